#include "transport/loopback/link.hpp"

#include <algorithm>
#include <cstring>
#include <optional>

#include "transport/card_batch.hpp"

namespace moonpool::transport::loopback {

// The pieces of a job that a card copies, gathered while they are of one card.
class Link::Cards {
   public:
    Cards(Job& job, std::shared_ptr<const Regions> theirs, Tally& tally)
        : job_(job), regions_(std::move(theirs)), tally_(tally) {}

    // Has room for a piece that `copier` copies.
    Status prepare(const std::shared_ptr<device::CardCopier>& copier) {
        if (batch_ && (batch_->copier() != copier.get() || batch_->room() == 0)) {
            if (Status moved = flush(); !moved) return moved;
        }
        if (!batch_) batch_.emplace(job_, copier);
        if (theirs_ == nullptr) {
            theirs_ = std::make_shared<Operation>(regions_);
            batch_->keep(theirs_);
        }
        return success();
    }
    CardBatch& batch() { return *batch_; }
    Operation& theirs() { return *theirs_; }
    Status flush() {
        if (!batch_) return success();
        Status moved = batch_->run(tally_);
        batch_.reset();
        theirs_.reset();
        return moved;
    }

   private:
    Job& job_;
    std::shared_ptr<const Regions> regions_;
    Tally& tally_;
    std::optional<CardBatch> batch_;
    std::shared_ptr<Operation> theirs_;
};

Status Link::copy_by_card(Job& job, size_t i, const std::shared_ptr<Region>& remote, Cards& cards) {
    const Slice& slice = job.slices[i];
    Region& local = *job.locals[i];
    if (!local.contains(slice.local, slice.length)) {
        job.fail(i, Code::kProtocol, kOutsideText);
        return success();
    }
    // The driver copies no range onto itself; memory of the host is the card's for no other purpose.
    bool same = local.on_card() && remote->on_card();
    if (same && slice.local != slice.remote && slice.local < slice.remote + slice.length &&
        slice.remote < slice.local + slice.length) {
        job.fail(i, Code::kInvalidArgument, "a range of a card's memory overlaps the one it is copied to");
        return success();
    }
    for (uint64_t at = 0; at < slice.length;) {
        if (Status may = may_go_on(job); !may) return may;
        if (Status ready = cards.prepare(local.on_card() ? local.card : remote->card); !ready) return ready;
        bool mine = cards.batch().hold(local);
        if (!mine || !cards.theirs().hold(*remote)) {
            job.fail(i, Code::kInvalidArgument,
                     mine ? "the peer deregistered the region" : "the local region was deregistered");
            return success();
        }
        uint64_t n = std::min(slice.length - at, cards.batch().room());
        CardBatch::Side here{slice.local + at, local.on_card() || local.pinned};
        CardBatch::Side there{slice.remote + at, remote->on_card() || remote->pinned};
        const bool write = slice.direction == Direction::kWrite;
        at += n;
        cards.batch().add({i, write ? there : here, write ? here : there, n, at == slice.length});
    }
    return success();
}

// Before each piece.
Status Link::may_go_on(const Job& job) const {
    if (job.stopped()) return Error{Code::kClosed, "stopped"};
    if (target_->closed) return Error{Code::kUnavailable, "the peer has closed"};
    return target_->refuses(*self_) ? Status(ShutOut::error()) : success();
}

Status Link::run(Job& job) {
    self_->inside.fetch_add(1);
    Status status = carry(job);
    self_->inside.fetch_sub(1);
    return status;
}

Status Link::carry(Job& job) {
    std::shared_ptr<const Regions> regions = target_->regions->all();
    const std::shared_ptr<Region>* region = nullptr;
    uint64_t held = 0;
    Tally tally(counters_);
    Visit here, there;
    Cards cards(job, regions, tally);
    for (size_t i = 0; i < job.slices.size(); ++i) {
        if (!job.is_waiting(i)) continue;
        const Slice& slice = job.slices[i];
        if (region == nullptr || !(*region)->contains(slice.remote, slice.length)) {
            region = find_region(*regions, slice.remote, slice.length);
        }
        if (region == nullptr) {
            job.fail(i, Code::kInvalidArgument,
                     "the range " + range_text(slice) + " lies in no registered region of the peer");
            continue;
        }
        if (job.locals[i]->on_card() || (*region)->on_card()) {
            // A card may take its time: nothing is visited meanwhile.
            here.end();
            there.end();
            held = 0;
            if (Status queued = copy_by_card(job, i, *region, cards); !queued) return queued;
            continue;
        }
        for (uint64_t at = 0; at < slice.length;) {
            if (Status may = may_go_on(job); !may) return may;
            // Leave now and then, so that no thread waits long to deregister.
            if (held >= kAccessBytesMax) {
                here.end();
                there.end();
                held = 0;
            }
            uint64_t n = std::min(slice.length - at, kAccessBytesMax - held);
            Visit::Access mine = here.reach(*job.locals[i], slice.local, slice.length, at, n);
            if (mine == Visit::Access::kClosing) {
                job.fail(i, Code::kInvalidArgument, "the local region was deregistered");
                break;
            }
            Visit::Access theirs = there.reach(**region, slice.remote, slice.length, at, n);
            if (theirs == Visit::Access::kClosing) {
                job.fail(i, Code::kInvalidArgument, "the peer deregistered the region");
                region = nullptr;
                break;
            }
            if (mine == Visit::Access::kOutside || theirs == Visit::Access::kOutside) {
                job.fail(i, Code::kProtocol, kOutsideText);
                break;
            }
            auto* local = reinterpret_cast<std::byte*>(slice.local + at);
            auto* remote = reinterpret_cast<std::byte*>(slice.remote + at);
            // Both sides may be the same engine, and the ranges one.
            if (slice.direction == Direction::kRead) {
                std::memmove(local, remote, n);
            } else {
                std::memmove(remote, local, n);
            }
            at += n;
            held += n;
        }
        if (!job.is_waiting(i)) continue;
        tally.count(slice.direction == Direction::kWrite, slice.length);
        job.bytes_done.fetch_add(slice.length, std::memory_order_relaxed);
        job.done(i);
    }
    here.end();
    there.end();
    return cards.flush();
}

}  // namespace moonpool::transport::loopback
