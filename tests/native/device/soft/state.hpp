// What the software device knows, and the one lock over all of it.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "device/cuda.hpp"
#include "soft.hpp"

namespace moonpool::soft {

// One operation of a stream: steps that may run in any order, or a wait.
struct Operation {
    std::vector<std::function<void()>> steps;
    struct Stream* waits_for = nullptr;  // until that stream has ended so many operations
    uint64_t waits_place = 0;
    bool hangs = false;
};

// Freed by reset(): work goes on after the handle was destroyed, and events remember it.
struct Stream {
    int card = 0;
    int priority = 0;
    unsigned haste = 0;  // of 64: how likely a call runs something of it, when shuffled
    std::deque<Operation> queue;
    uint64_t given = 0, ended = 0;  // operations
    bool capturing = false, capture_broken = false;
};

struct Event {
    Stream* stream = nullptr;  // null: never recorded
    uint64_t place = 0;        // over when the stream has ended so many
    int asked = 0;             // since it was recorded
};

struct Context {
    int card = 0;
    int retained = 0;
};

struct Module {
    std::string text;
};

// What processes that share an allocation know of it: a page behind its bytes, in the same memfd.
struct SharedPage {
    uint64_t secret = 0;
    std::atomic<uint64_t> freed{0};  // by its owner
};

// Memory of another process, opened by its handle.
struct Opened {
    int process = -1;  // its owner, as a pidfd
    int count = 0;     // how often it was opened, less how often closed
    uint64_t secret = 0;
    bool owner_ended() const;
};

// Device memory is one memfd in two mappings: the address that callers get has no access, so that a CPU that
// touches it faults and a system call answers EFAULT, as with a card's; the device uses the other one.
struct CardMemory {
    uint64_t bytes = 0;
    char* hidden = nullptr;
    int card = 0;
    SharedPage* adopted = nullptr;  // `hidden` is the memory of a test, which frees it, and its page is apart
    int fd = -1;                    // of the memfd, -1: of opened memory
    std::shared_ptr<Opened> opened = nullptr;

    static uint64_t mapped(uint64_t bytes) { return (bytes + 4095) / 4096 * 4096 + 4096; }
    SharedPage& page() const {
        return adopted != nullptr ? *adopted : *reinterpret_cast<SharedPage*>(hidden + mapped(bytes) - 4096);
    }
    void unmap(uint64_t address) const;
};
struct HostMemory {
    uint64_t bytes = 0;
    bool read_only = false, managed = false;
    int card = 0;
};

class State {
   public:
    std::recursive_mutex mutex;

    Policy policy = Policy::kLate;
    std::mt19937_64 random;
    int cards = 1, first_card = 0, version = 12080, capability = 90;
    std::set<std::string> hidden_names;
    uint64_t card_limit = UINT64_MAX, pinned_limit = UINT64_MAX;
    bool initialised = false;
    int broken = 0;
    int owner_ended = 0;  // what copies of memory answer whose owner has ended, 0: they work
    int hang_in = 0, die_in = 0, die_code = 0;
    struct Failure {
        int left, code;
    };
    std::map<std::string, Failure> failures;
    std::map<std::string, int> refusals;  // codes
    std::map<std::string, int> calls;
    int violations = 0;
    std::string first_violation;

    Context contexts[8];
    std::map<uint64_t, CardMemory> card_memory;
    mutable const std::pair<const uint64_t, CardMemory>* last_card = nullptr;  // found
    std::map<uint64_t, HostMemory> host_memory;
    std::set<Stream*> streams;
    std::set<Event*> events;
    std::set<Module*> modules;
    std::vector<std::unique_ptr<Stream>> all_streams;
    std::vector<std::unique_ptr<Event>> all_events;

    void reset(Policy policy, uint64_t seed);
    void violation(const std::string& what);

    // Memory as the device `card` sees it, -1: a copy of any; null, and a violation, where it may not.
    char* reach(uint64_t address, uint64_t bytes, bool write, int card);
    const CardMemory* find_card(uint64_t address, uint64_t* base) const;
    const HostMemory* find_host(uint64_t address, uint64_t* base) const;
    uint64_t card_bytes() const, pinned_bytes() const;

    // The scheduler.
    void queue(Stream* stream, Operation operation);
    void settle();
    // Runs what has to run for that; false: something hangs.
    bool demand(Stream* stream, uint64_t place);
    void some();  // what the policy runs in every call

    uint64_t below(uint64_t n) { return random() % n; }

   private:
    bool runnable(Stream* stream) const;
    void run_one(Stream* stream);
};

State& state();

// The context stack and capture mode of a thread.
struct ThreadState {
    std::vector<Context*> contexts;
    int capture_mode = device::cu::kCaptureModeGlobal;
};
ThreadState& this_thread();

}  // namespace moonpool::soft
