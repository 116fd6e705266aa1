#include "store/client/card_stage.hpp"

#include <algorithm>
#include <chrono>
#include <new>
#include <string>
#include <utility>

#include "base/copy.hpp"

namespace moonpool {

namespace {

constexpr uint64_t kSlotBytes = device::CardCopier::kRing.slot_bytes;

uint64_t bytes_on_cards(CardStage::Parts parts) {
    uint64_t bytes = 0;
    for (const MemoryRef& part : parts) bytes += part.kind == MemoryKind::kDevice ? part.bytes : 0;
    return bytes;
}

// No error of a node's: callers take those for an absent pool.
Error card_error(int card, const Error& error) {
    return Error{error.code == Code::kForked ? Code::kForked : Code::kOs,
                 "memory of CUDA card " + std::to_string(card) + ": " + error.text};
}

}  // namespace

bool CardStage::needed(Parts parts) {
    return std::ranges::any_of(parts, [](const MemoryRef& part) { return part.kind == MemoryKind::kDevice; });
}

size_t CardStage::fitting(std::span<const Parts> objects) {
    uint64_t bytes = 0;
    size_t n = 0;
    for (; n < objects.size(); ++n) {
        bytes += bytes_on_cards(objects[n]);
        if (n > 0 && bytes > kSlotBytes) break;
    }
    return n;
}

Result<std::unique_ptr<CardStage>> CardStage::take(device::CardCopiers& cards, std::span<const Parts> objects,
                                                   int wait_ms, int limit_ms) {
    std::unique_ptr<CardStage> stage(new CardStage(limit_ms));
    for (Parts object : objects) stage->add(object);
    if (stage->pieces_.empty()) return stage;
    for (const Piece& piece : stage->pieces_) {
        const int card = piece.card.device;
        if (std::ranges::find(stage->copiers_, card, &Copier::first) != stage->copiers_.end()) continue;
        Result<std::shared_ptr<device::CardCopier>> copier = cards.at(card);
        if (!copier) return card_error(card, copier.error());
        stage->copiers_.emplace_back(card, std::move(*copier));
    }
    const auto& [card, owner] = stage->copiers_.front();
    Result<device::RingSlot> slot = owner->take(wait_ms);
    if (!slot && slot.error().code == Code::kTimeout) return std::unique_ptr<CardStage>();
    if (!slot) return card_error(card, slot.error());
    stage->kept_ = std::make_shared<Kept>(owner, std::move(*slot));
    if (stage->bytes_ > kSlotBytes) {
        stage->larger_.reset(new (std::nothrow) std::byte[stage->bytes_]);
        if (stage->larger_ == nullptr) {
            return Error{Code::kOs, "no memory for " + std::to_string(stage->bytes_) + " bytes"};
        }
    }
    stage->set_places();
    return stage;
}

// Neighbours on cards become one part. Until set_places() its address is a place.
void CardStage::add(Parts object) {
    std::vector<MemoryRef>& parts = objects_.emplace_back();
    uint64_t begin = 0;
    for (const MemoryRef& part : object) {
        if (part.kind != MemoryKind::kDevice) {
            parts.push_back(part);
        } else {
            pieces_.push_back({objects_.size() - 1, part, begin, bytes_});
            if (!parts.empty() && parts.back().kind == MemoryKind::kDevice) {
                parts.back().bytes += part.bytes;
            } else {
                parts.push_back({.address = bytes_, .bytes = part.bytes, .kind = MemoryKind::kDevice});
            }
            bytes_ += part.bytes;
        }
        begin += part.bytes;
    }
}

void CardStage::set_places() {
    const bool in_slot = larger_ == nullptr;
    for (std::vector<MemoryRef>& parts : objects_) {
        for (MemoryRef& part : parts) {
            if (part.kind != MemoryKind::kDevice) continue;
            part.address += in_slot ? kept_->slot.address() : reinterpret_cast<uint64_t>(larger_.get());
            part.kind = in_slot ? MemoryKind::kPinned : MemoryKind::kHost;
        }
    }
}

Status CardStage::copy_in() { return move(Way::kIn, pieces_); }

Status CardStage::copy_out(std::span<const int64_t> sizes) {
    std::vector<Piece> there;
    for (Piece piece : pieces_) {
        const auto size = static_cast<uint64_t>(std::max<int64_t>(sizes[piece.object], 0));
        piece.card.bytes = std::min(piece.card.bytes, size - std::min(size, piece.begin));
        if (piece.card.bytes != 0) there.push_back(piece);
    }
    return move(Way::kOut, there);
}

Status CardStage::move(Way way, std::span<const Piece> pieces) {
    if (pieces.empty()) return success();
    if (larger_ == nullptr) return queue(way, pieces, 0, bytes_);
    const uint64_t end = pieces.back().place + pieces.back().card.bytes;
    std::byte* slot = kept_->slot.bytes().data();
    for (uint64_t begin = 0; begin < end; begin += kSlotBytes) {
        const uint64_t bytes = std::min(kSlotBytes, end - begin);
        if (way == Way::kOut) moonpool::copy(slot, larger_.get() + begin, bytes);
        Status moved = queue(way, pieces, begin, bytes);
        if (moved) moved = wait();
        if (!moved) return moved;
        if (way == Way::kIn) moonpool::copy(larger_.get() + begin, slot, bytes);
    }
    return success();
}

Status CardStage::queue(Way way, std::span<const Piece> pieces, uint64_t begin, uint64_t bytes) {
    for (const auto& [card, copier] : copiers_) {
        std::vector<device::Copy> copies;
        for (const Piece& piece : pieces) {
            const uint64_t from = std::max(piece.place, begin);
            const uint64_t end = std::min(piece.place + piece.card.bytes, begin + bytes);
            if (piece.card.device != card || from >= end) continue;
            const uint64_t on_card = piece.card.address + (from - piece.place);
            const uint64_t in_slot = kept_->slot.address() + (from - begin);
            copies.push_back(way == Way::kIn ? device::Copy{in_slot, on_card, end - from}
                                             : device::Copy{on_card, in_slot, end - from});
        }
        if (copies.empty()) continue;
        Result<Running> running = copier->start(copies, kept_);
        if (!running) return card_error(card, running.error());
        running_.emplace_back(card, std::move(*running));
    }
    return success();
}

Status CardStage::wait() {
    using Clock = std::chrono::steady_clock;
    const auto until = Clock::now() + std::chrono::milliseconds(limit_ms_);
    Status ended = success();
    for (auto& [card, running] : running_) {
        const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - Clock::now());
        Result<bool> over = running.wait(static_cast<int>(left.count()));
        if (over && *over) continue;
        ended = card_error(card, over ? Error{Code::kTimeout, "its copies did not end within " +
                                                                  std::to_string(limit_ms_) + " ms"}
                                      : over.error());
    }
    running_.clear();
    return ended;
}

}  // namespace moonpool
