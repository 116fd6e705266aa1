// CardBatch: pieces of a job between two memories that this process names by their addresses, at least one of
// them memory of a card, which makes the copies. A piece whose other side is memory of the host that no card
// reaches goes through a slot of pinned memory.
//
//     CardBatch batch(job, copier);
//     batch.hold(region), batch.keep(...)     what the copies touch stays registered until they have ended
//     batch.add({...})                        while room() is left
//     batch.run()                             waits; a slice is done with its last piece
//
// One thread, which may wait.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "device/card_copier.hpp"
#include "transport/counters.hpp"
#include "transport/link.hpp"

namespace moonpool::transport {

// The copies of a job that this thread waits for; an error when the job is stopped, the card is lost, or
// nothing has moved for the job's timeout. The copies may go on then, and keep what they touch.
Status wait_for_copies(device::CardCopier::Running& copies, const Job& job);
// Fails slices whose copies may go on: no other path may move them, which could end before those do.
Status give_up(Job& job, std::span<const size_t> slices, Status why);
// A slot of the ring, waiting for it as long.
Result<device::RingSlot> wait_for_slot(device::CardCopier& copier, const Job& job);

class CardBatch {
   public:
    struct Side {
        uint64_t address = 0;
        bool reached = false;  // by the card: its own memory, that of another card, pinned memory
    };
    struct Piece {
        size_t slice = 0;  // of the job
        Side to, from;     // one of them is memory of a card
        uint64_t bytes = 0;
        bool last = false;  // of its slice
    };

    CardBatch(Job& job, std::shared_ptr<device::CardCopier> copier) : job_(job), copier_(std::move(copier)) {
        begin();
    }

    const device::CardCopier* copier() const { return copier_.get(); }
    // Bytes that one more piece may have; 0: run() first.
    uint64_t room() const;
    // False: the region is closing, and must not be touched.
    bool hold(Region& region) { return kept_->local.hold(region); }
    void keep(std::shared_ptr<void> thing) { kept_->things.push_back(std::move(thing)); }
    void add(const Piece& piece);
    bool empty() const { return pieces_.empty(); }

    // Moves what was added, and begins anew. sound: asked when the copies have ended; with its error nothing
    // of them counts as done. After an error the slices wait for another path.
    Status run(Tally& tally, const std::function<Status()>& sound = nullptr);

   private:
    struct Kept {
        explicit Kept(std::shared_ptr<const Regions> regions) : local(std::move(regions)) {}
        Operation local;
        std::vector<std::shared_ptr<void>> things;
        device::RingSlot slot;
    };

    void begin();
    static bool staged(const Piece& piece) { return !piece.to.reached || !piece.from.reached; }

    Job& job_;
    std::shared_ptr<device::CardCopier> copier_;
    std::shared_ptr<Kept> kept_;
    std::vector<Piece> pieces_;
    uint64_t bytes_ = 0, staged_bytes_ = 0;
};

}  // namespace moonpool::transport
