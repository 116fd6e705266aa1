#include "transport/tcp/card_rows.hpp"

#include <algorithm>

namespace moonpool::transport::tcp {

std::unique_ptr<CardRows> CardRows::find(const std::vector<TransferRow>& rows,
                                         const std::vector<Region*>& places,
                                         const std::shared_ptr<const Regions>& regions) {
    std::unique_ptr<CardRows> found;
    for (size_t i = 0; i < rows.size(); ++i) {
        if (places[i] == nullptr || !places[i]->on_card() || rows[i].length == 0) continue;
        if (found == nullptr) {
            found = std::make_unique<CardRows>();
            found->regions_ = regions;
            found->rows_.reserve(rows.size());
            found->by_number_.assign(rows.size(), nullptr);
        }
        uint64_t& bytes = rows[i].direction == 1 ? found->write_bytes_ : found->read_bytes_;
        found->rows_.push_back({i, places[i], rows[i], bytes});
        found->by_number_[i] = &found->rows_.back();  // reserve(): they do not move
        bytes += rows[i].length;
    }
    return found;
}

Status CardRows::check_room(uint64_t bytes) const {
    if (bytes <= rows_.front().place->card->slot_bytes()) return success();
    return Error{Code::kTooLarge, "a frame has more bytes for a card than a slot of pinned memory"};
}

Result<bool> CardRows::need_slot() {
    if (write_bytes_ == 0 || writes_ != nullptr) return true;
    if (Status fits = check_room(write_bytes_); !fits) return fits.error();
    // A ring's memory is reached by every card.
    Result<device::RingSlot> slot = rows_.front().place->card->take(0);
    if (!slot && slot.error().code == Code::kTimeout) return false;
    if (!slot) return slot.error();
    writes_ = std::make_shared<Held>(regions_);
    writes_->slot = std::move(*slot);
    return true;
}

Status CardRows::wait_for_slot(const CardPatience& patience) {
    Result<device::RingSlot> slot = take_slot(*rows_.front().place->card, patience.timeout_ms, false,
                                              [&] { return patience.closing.load(); });
    if (!slot) return slot.error();
    writes_ = std::make_shared<Held>(regions_);
    writes_->slot = std::move(*slot);
    return success();
}

std::byte* CardRows::staged(size_t number) const {
    const Row* row = by_number_[number];
    if (row == nullptr) return nullptr;
    const std::shared_ptr<Held>& held = row->row.direction == 1 ? writes_ : reads_;
    return held == nullptr ? nullptr : held->slot.bytes().data() + row->offset;
}

void CardRows::writes_begin(std::shared_ptr<std::atomic<int>> copying) {
    if (writes_ == nullptr) return;
    copying->fetch_add(1);
    writes_->copying = std::move(copying);
}

CardRows::Refused CardRows::move(const std::atomic<bool>& fenced, const CardPatience& patience) {
    Refused refused;
    if (writes_ != nullptr) {
        if (!fenced.load()) move(true, writes_, patience, refused);
        writes_.reset();  // a thread that waits for a slot has none
    }
    if (read_bytes_ == 0) return refused;
    Status room = check_room(read_bytes_);
    Result<device::RingSlot> slot = room ? take_slot(*rows_.front().place->card, patience.timeout_ms, false,
                                                     [&] { return patience.closing.load(); })
                                         : room.error();
    if (!slot) {
        for (const Row& row : rows_) {
            if (row.row.direction == 1) continue;
            refused.emplace_back(row.number,
                                 Error{slot.error().code, "was not copied: " + slot.error().text});
        }
        return refused;
    }
    reads_ = std::make_shared<Held>(regions_);
    reads_->slot = std::move(*slot);
    move(false, reads_, patience, refused);
    return refused;
}

// Waits until the cards have ended the copies of one direction.
void CardRows::move(bool write, const std::shared_ptr<Held>& held, const CardPatience& patience,
                    Refused& refused) const {
    struct OfCard {
        std::shared_ptr<device::CardCopier> copier;
        std::vector<device::Copy> copies;
        std::vector<size_t> rows;
    };
    std::vector<OfCard> cards;
    for (const Row& row : rows_) {
        if ((row.row.direction == 1) != write) continue;
        const Region& region = *row.place;
        if (!row.place->contains(row.row.address, row.row.length)) {
            refused.emplace_back(row.number, Error{Code::kProtocol, kOutsideText});
            continue;
        }
        if (!held->places.hold(*row.place)) {
            refused.emplace_back(row.number, Error{Code::kInvalidArgument, "was deregistered by the peer"});
            continue;
        }
        auto card = std::ranges::find(cards, region.card, &OfCard::copier);
        if (card == cards.end()) card = cards.insert(cards.end(), {region.card, {}, {}});
        uint64_t slot = held->slot.address() + row.offset;
        card->copies.push_back(write ? device::Copy{row.row.address, slot, row.row.length}
                                     : device::Copy{slot, row.row.address, row.row.length});
        card->rows.push_back(row.number);
    }
    bool all_ended = true;
    std::vector<Result<device::CardCopier::Running>> running;
    for (OfCard& card : cards) running.push_back(card.copier->start(card.copies, held));
    for (size_t i = 0; i < cards.size(); ++i) {
        Status ended = running[i] ? ask_until(
                                        patience.timeout_ms, "its card did not end the copy",
                                        [&] { return patience.closing.load(); },
                                        [&](int ms) { return running[i]->wait(ms); })
                                  : running[i].error();
        if (ended) continue;
        Error why{ended.error().code, "was not copied: " + ended.error().text};
        all_ended = false;
        for (size_t row : cards[i].rows) refused.emplace_back(row, why);
    }
    running.clear();
    // What has ended; copies of a card that hangs keep `held` and with it the regions.
    if (all_ended) held->places.end();
}

}  // namespace moonpool::transport::tcp
