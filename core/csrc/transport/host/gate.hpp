// Gate: a page that target and initiator share, through which the target can revoke what the initiator may
// touch without a message. One gate for each initiator: when it dies, the target drops its gate, and nothing
// that it left there blocks the target.
//
//   initiator   slot = generation it knows; generation still the same? touch the regions; slot = 0
//   target      generation += 1; wait until no slot holds an older one: the regions removed before are free
//
// Each side writes before it reads (sequentially consistent), so one of them sees the other. An initiator
// that finds another generation asks for the list of regions again.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "memory/mapping.hpp"

namespace moonpool::transport::host {

inline constexpr size_t kGateSlots = 64;  // threads of the initiator that are inside at one time

struct GatePage {
    uint64_t nonce;  // of this gate: proves that both sides see the same memory
    std::atomic<uint64_t> closed;
    std::atomic<uint64_t> generation;
    uint64_t unused[5];
    struct alignas(64) Slot {
        std::atomic<uint64_t> inside;
    };
    std::array<Slot, kGateSlots> slots;
};
static_assert(sizeof(GatePage) == 64 + 64 * kGateSlots);
static_assert(std::atomic<uint64_t>::is_always_lock_free, "shared between processes");

inline constexpr uint64_t kGateBytes = 8192;
static_assert(sizeof(GatePage) <= kGateBytes);

class Gate {
   public:
    static Result<std::unique_ptr<Gate>> create(uint64_t generation);
    static Result<std::unique_ptr<Gate>> open(int fd);  // a peer's

    GatePage& page() const { return *reinterpret_cast<GatePage*>(mapping_.data()); }
    int fd() const { return fd_.get(); }

    // The target's half.
    void revoke(uint64_t generation) { page().generation.store(generation); }
    void close() { page().closed.store(1); }
    bool drained(uint64_t generation) const;
    bool occupied() const;  // by any generation

   private:
    Fd fd_;
    Mapping mapping_;
};

// The initiator's half: inside from construction to leave(), when `open()` says so.
class Pass {
   public:
    Pass(Gate& gate, uint64_t generation);
    ~Pass() { leave(); }
    Pass(const Pass&) = delete;

    bool open() const { return slot_ != nullptr; }
    void leave() {
        if (slot_ != nullptr) slot_->store(0, std::memory_order_release);
        slot_ = nullptr;
    }

   private:
    std::atomic<uint64_t>* slot_ = nullptr;
};

}  // namespace moonpool::transport::host
