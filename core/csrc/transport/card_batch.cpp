#include "transport/card_batch.hpp"

#include <algorithm>
#include <cstring>

#include "base/clock.hpp"
#include "transport/card_wait.hpp"

namespace moonpool::transport {

namespace {

constexpr size_t kPiecesMax = 16384;            // what one list of the card's kernel holds
constexpr uint64_t kBatchBytesMax = 64u << 20;  // so that a job that is stopped ends soon

}  // namespace

Status wait_for_copies(device::CardCopier::Running& copies, const Job& job) {
    // A job that was cancelled, too: its caller may use the memory again when it has ended.
    return ask_until(
        job.timeout_ms, "the card did not end its copies", [&] { return job.closing->load(); },
        [&](int ms) { return copies.wait(ms); });
}

Result<device::RingSlot> wait_for_slot(device::CardCopier& copier, const Job& job) {
    return take_slot(copier, job.timeout_ms, true, [&] { return job.stopped(); });
}

Status give_up(Job& job, std::span<const size_t> slices, Status why) {
    for (size_t i : slices) {
        if (job.is_waiting(i)) job.fail(i, why.error().code, why.error().text);
    }
    return why;
}

void CardBatch::begin() {
    kept_ = std::make_shared<Kept>(job_.regions);
    pieces_.clear();
    bytes_ = staged_bytes_ = 0;
}

uint64_t CardBatch::room() const {
    if (pieces_.size() >= kPiecesMax) return 0;
    return std::min(kBatchBytesMax - bytes_, copier_->slot_bytes() - staged_bytes_);
}

void CardBatch::add(const Piece& piece) {
    pieces_.push_back(piece);
    bytes_ += piece.bytes;
    if (staged(piece)) staged_bytes_ += piece.bytes;
}

Status CardBatch::run(Tally& tally, const std::function<Status()>& sound) {
    if (pieces_.empty()) return success();
    if (staged_bytes_ != 0) {
        Result<device::RingSlot> slot = wait_for_slot(*copier_, job_);
        if (!slot) return slot.error();
        kept_->slot = std::move(*slot);
    }
    std::vector<device::Copy> copies;
    copies.reserve(pieces_.size());
    uint64_t at = 0;  // in the slot
    for (const Piece& piece : pieces_) {
        device::Copy copy{.to = piece.to.address, .from = piece.from.address, .bytes = piece.bytes};
        if (staged(piece)) {
            uint64_t place = kept_->slot.address() + at;
            at += piece.bytes;
            if (!piece.from.reached) {
                std::memcpy(reinterpret_cast<void*>(place), reinterpret_cast<const void*>(copy.from),
                            piece.bytes);
                copy.from = place;
            } else {
                copy.to = place;
            }
        }
        copies.push_back(copy);
    }
    Result<device::CardCopier::Running> running = copier_->start(copies, kept_);
    // That the owner of the memory has ended says more than the driver's error of its copies does.
    auto check_owner = [&](const Error& why) {
        bool over = why.code != Code::kTimeout && why.code != Code::kClosed;
        return over && sound ? sound() : success();
    };
    if (!running) {
        if (Status owner = check_owner(running.error()); !owner) return owner;
        return running.error();
    }
    if (Status ended = wait_for_copies(*running, job_); !ended) {
        if (Status owner = check_owner(ended.error()); !owner) return owner;
        std::vector<size_t> slices;
        for (const Piece& piece : pieces_) slices.push_back(piece.slice);
        return give_up(job_, slices, std::move(ended));
    }
    if (Status status = sound ? sound() : success(); !status) return status;
    for (size_t i = 0; i < pieces_.size(); ++i) {
        const Piece& piece = pieces_[i];
        if (!piece.to.reached) {
            std::memcpy(reinterpret_cast<void*>(piece.to.address),
                        reinterpret_cast<const void*>(copies[i].to), piece.bytes);
        }
        if (!piece.last || !job_.is_waiting(piece.slice)) continue;
        const Slice& slice = job_.slices[piece.slice];
        tally.count(slice.direction == Direction::kWrite, slice.length);
        job_.bytes_done.fetch_add(slice.length, std::memory_order_relaxed);
        job_.done(piece.slice);
    }
    job_.progress_ns.store(now_ns(), std::memory_order_relaxed);
    begin();
    return success();
}

}  // namespace moonpool::transport
