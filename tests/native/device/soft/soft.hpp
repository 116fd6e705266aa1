// The software device: a CUDA driver for tests, on host memory. Built as a shared library with the driver's
// own symbols, and given to the core by Driver::use_library_for_tests(). These are its controls, which no
// driver has; tests find them by dlsym().
//
// It has no thread: an operation of a stream runs inside of a call of some thread, under one lock, in an
// order that the policy chooses. So a run of one thread is the same for the same seed.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moonpool::soft {

enum class Policy : int {
    kLate,      // an operation runs when a call waits for it, no earlier; a question counts from the third on
    kEarly,     // the same, and sources that may be read at any time are read when the copy is queued
    kAtOnce,    // an operation runs when it is queued
    kShuffled,  // each call runs some operations, or some steps of one; some streams are hasty and some are
                // slow
};

// name, arguments
#define MOONPOOL_SOFT_CONTROLS(X)                                                                           \
    /* As after the start of a process, with one card. Counts of calls begin anew. */                       \
    X(void, soft_reset, (int policy, uint64_t seed))                                                        \
    X(void, soft_set_cards, (int cards))                                                                    \
    /* The card of the machine that this process sees as its first one, as CUDA_VISIBLE_DEVICES says. */    \
    X(void, soft_set_first_card, (int card))                                                                \
    /* What copies and kernels of another process's memory end with once it ended; 0: its bytes stay. */    \
    X(void, soft_owner_ended, (int code))                                                                   \
    X(void, soft_set_version, (int version))                                                                \
    X(void, soft_set_capability, (int capability))                                                          \
    /* cuGetProcAddress finds no such function. */                                                          \
    X(void, soft_hide, (const char* name))                                                                  \
    /* Allocations beyond it are refused, of a card's memory and of pinned memory. */                       \
    X(void, soft_limit, (uint64_t card_bytes, uint64_t pinned_bytes))                                       \
    /* The nth call of `name` from now on, 1: the next one, answers `code` and has no effect. */            \
    X(void, soft_fail, (const char* name, int nth, int code))                                               \
    /* Every call of `name` from now on answers `code` and has no effect; 0: no call does. */               \
    X(void, soft_refuse, (const char* name, int code))                                                      \
    /* The nth operation that is queued from now on never ends, nor what is behind it, until soft_unhang(). \
     */                                                                                                     \
    X(void, soft_hang, (int nth))                                                                           \
    X(void, soft_unhang, ())                                                                                \
    /* The card dies with `code` instead of running its nth operation from now on. */                       \
    X(void, soft_die, (int nth, int code))                                                                  \
    /* Calls of a function since soft_reset(). */                                                           \
    X(int, soft_calls, (const char* name))                                                                  \
    /* The number of functions; the name of one of them. */                                                 \
    X(int, soft_functions, ())                                                                              \
    X(const char*, soft_function, (int number))                                                             \
    /* Runs all that is queued, but for what hangs. */                                                      \
    X(void, soft_settle, ())                                                                                \
    /* What no program may do, and did: how often, and the first of them in words. */                       \
    X(int, soft_violations, (char* text, size_t bytes))                                                     \
    /* Handles, allocations and registrations that are not given back, and in words which. */               \
    X(int, soft_live, (char* text, size_t bytes))                                                           \
    /* Memory of the host becomes card 0's, too, with all of its pages, which no other thread may touch     \
     * meanwhile: the address that it has there. */                                                         \
    X(uint64_t, soft_adopt, (void* data, size_t bytes))                                                     \
    /* Where the CPU sees device memory; null: it is none. */                                               \
    X(char*, soft_at, (uint64_t address, uint64_t bytes))                                                   \
    /* The priority a stream was made with; the node of no machine. */                                      \
    X(int, soft_priority, (const void* stream))

}  // namespace moonpool::soft
