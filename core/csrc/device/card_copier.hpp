// CardCopier: what a transfer needs to touch memory of one card: streams, and a ring of pinned memory in
// which bytes stop between the card and memory of the host that the card does not reach.
//
//     auto kept = std::make_shared<Kept>();              the regions that the copies touch, the slot
//     kept->slot = *copier->take(timeout_ms);
//     CardCopier::Running copies = *copier->start({{to, from, bytes}}, kept);
//     if (*copies.wait(50)) ...                          over: the bytes are there
//
// Small pieces among them are moved by the card's kernel (piece_mover.hpp).
//
// A caller may give up before its copies have ended, as when the card hangs. Then the copier keeps `kept`
// until they have, with what the kernel uses, so that no memory is freed or used again that the card may
// still touch.
//
// Threads: any. Copies of two start() calls run in any order. A call that waits is never made by an I/O
// thread.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/mutex.hpp"
#include "device/event.hpp"
#include "device/piece_mover.hpp"
#include "device/pinned_ring.hpp"
#include "device/stream.hpp"

namespace moonpool::device {

class CardCopier : public std::enable_shared_from_this<CardCopier> {
   public:
    // Of an engine's copier: 64 MiB, half of that and so on where the system pins no more. A slot has room
    // for the bytes of one frame of the engine's protocol.
    static constexpr RingOptions kRing{.slot_bytes = 8u << 20, .slots = 8, .slots_min = 2};

    // An error, in one sentence: no driver, no such card, no pinned memory.
    static Result<std::shared_ptr<CardCopier>> open(int ordinal, const RingOptions& ring = kRing);
    ~CardCopier();
    CardCopier(const CardCopier&) = delete;

   private:
    struct Lane {
        Stream stream;
        Event ended;
        bool recorded = false;
        std::shared_ptr<void> kept;
        PieceMover::Buffer buffer;

        void end() {
            kept.reset();
            buffer.give_back();
            recorded = false;
        }
    };

   public:
    // Copies under way.
    class Running {
       public:
        Running(Running&&) noexcept = default;
        Running& operator=(Running&& other) noexcept;
        ~Running() { give_up(); }

        // -> whether all have ended; false when timeout_ms passed before. An error: the card is lost, and
        // runs none of them any more.
        Result<bool> wait(int timeout_ms);

       private:
        friend class CardCopier;
        Running(std::shared_ptr<CardCopier> copier, std::unique_ptr<Lane> lane)
            : copier_(std::move(copier)), lane_(std::move(lane)) {}
        void give_up();

        std::shared_ptr<CardCopier> copier_;
        std::unique_ptr<Lane> lane_;  // null: they have ended
    };

    // Queues copies behind those that were given up, between memory of the card, of other cards
    // and pinned memory. kept: stays until the last has ended, also after an error.
    Result<Running> start(std::span<const Copy> copies, std::shared_ptr<void> kept);

    // A slot of the ring, which any card reaches. kTimeout: none came back; kUnavailable: the card is lost.
    // own: for a transfer of this engine, which may hold it while it waits for a peer. Those have half of the
    // ring, so that what peers ask for never waits for another peer.
    Result<RingSlot> take(int timeout_ms, bool own = false) {
        return ring_->take(timeout_ms, own ? &own_share_ : nullptr);
    }
    bool has_free_slot() const { return ring_->counts().free != 0; }
    uint64_t slot_bytes() const { return ring_->slot_bytes(); }
    uint64_t ring_address() const { return ring_->address(); }
    uint64_t ring_bytes() const { return ring_->slot_bytes() * ring_->slots(); }

    // Lets go of what copies kept that were given up and have ended; -> whether others have not.
    // Never waits.
    bool collect();
    // The same for every copier of this process: what one keeps may be another's, or no card's.
    static void collect_all();

    const std::shared_ptr<const Device>& device() const { return device_; }
    const DeviceFacts& facts() const { return device_->facts(); }

   private:
    CardCopier(std::shared_ptr<const Device> device, std::unique_ptr<PinnedRing> ring)
        : device_(std::move(device)),
          ring_(std::move(ring)),
          own_share_(std::max(ring_->slots() / 2, 1u)),
          pieces_(std::make_shared<PieceMover>(device_)) {}

    Result<std::unique_ptr<Lane>> take_lane();
    // What was given up may still run, and what comes after it must not be overwritten by it.
    Status wait_for_abandoned(Stream& stream) EXCLUDES(mutex_);
    // -> whether its copies have ended; an error: the card is lost.
    Result<bool> ask(Lane& lane) const;
    void abandon(std::unique_ptr<Lane> lane);

    const std::shared_ptr<const Device> device_;
    std::unique_ptr<PinnedRing> ring_;
    RingShare own_share_;
    const std::shared_ptr<PieceMover> pieces_;
    Mutex mutex_;
    std::vector<std::unique_ptr<Lane>> idle_ GUARDED_BY(mutex_);
    std::vector<std::unique_ptr<Lane>> abandoned_ GUARDED_BY(mutex_);
};

}  // namespace moonpool::device
