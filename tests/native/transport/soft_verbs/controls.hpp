// What tests ask of the software libibverbs, by dlsym. A script is words with values:
//
// - devices=2: that the list has; none: "not implemented", as a kernel without RDMA says; 0: an empty list
// - pairs=2: that an engine may have on a device, half of what the device can
// - ib: ports are InfiniBand's, with LIDs
// - gids=v4: IPv4-mapped RoCE v2 at index 3, behind a RoCE v1, a hole and a link-local one; or v6, v1, none;
// both: v6 at index 4,
//   too
// - mtu0=3: active MTU of a device's port, as in the ABI
// - down0: the device's port is not active
// - speed0=100: bytes a microsecond that a device carries; 0: at once, on the poster's thread
// - virtual: the clock, which never goes back, jumps to the next completion when all queues were polled and
//   are empty, or were armed: then callers sleep until something completes. Where requests were lost, it goes
//   on by 20 ms at most before queues are armed again
// - fail=5:12: the 5th request gets status 12 (any number of these)
// - lost=5: the 5th request and all behind it on its queue pair never complete
// - late=5: the 5th request, a write, is in the network: its sender is told that retries are over, its bytes
// land
//   with soft_verbs_release() if the target's queue pair still takes them
// - held=5:9: the 5th request is carried out, but told of only when the 9th is posted, on whichever queue
// pair;
//   all behind it on its own one never completes
// - swapped=5: the completion of the 5th request is told behind the next one of its queue pair
// - twice=5: the completion of the 5th request is told twice
// - gone0: no way leads to the GIDs of the device; gone0=v4: to that one
// - relaxed: bytes of writes land, in reverse order, when a read on their queue pair comes behind them
// - full=3: the 3rd call to post is refused with ENOMEM
// - nodmabuf: the NICs take no dma-buf
// - nomem=3: the 3rd registration of memory is refused with ENOMEM; nomem=3+: all from there on
#pragma once

#include <cstdint>

#define MOONPOOL_SOFT_VERBS_CONTROLS(X)                                                                    \
    X(void, soft_verbs_script, (const char* script))                                                       \
    X(void, soft_verbs_port, (int device, int up))                                                         \
    /* The device fails as a whole: an event says so, and nothing of it completes any more. */             \
    X(void, soft_verbs_fatal, (int device))                                                                \
    /* Devices have other GIDs from now on, as gids= of the script says; an event says so. */              \
    X(void, soft_verbs_gids, (const char* gids))                                                           \
    X(void, soft_verbs_silent, (int device, int silent))                                                   \
    X(int, soft_verbs_release, ())                                                                         \
    /* As the module nvidia_peermem: NICs take a card's addresses, where the CPU sees the bytes at `seen`. \
     */                                                                                                    \
    X(void, soft_verbs_peermem, (uint64_t address, uint64_t bytes, char* seen))                            \
    X(uint64_t, soft_verbs_count, (const char* what))                                                      \
    X(uint64_t, soft_verbs_now, ())                                                                        \
    X(void, soft_verbs_pass, (uint64_t ns))
