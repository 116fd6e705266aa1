// CardRows: those rows of one TRANSFER that are memory of cards, at the target. Their bytes stop in slots of
// pinned memory, because the CPU reaches no memory of a card:
//
//     writes   socket --I/O thread--> slot --card--> region     the rows are answered when the card has ended
//     reads    region --card--> slot --I/O thread--> socket
//
// The I/O thread makes it and sees to the socket; move() waits for cards, on a thread that may wait.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "transport/card_wait.hpp"
#include "transport/frames.hpp"
#include "transport/region.hpp"

namespace moonpool::transport::tcp {

// How long a thread waits for a card.
struct CardPatience {
    int timeout_ms;
    const std::atomic<bool>& closing;  // of the engine
};

class CardRows {
   public:
    // Null when no row is memory of a card. places: of each row, null: refused.
    static std::unique_ptr<CardRows> find(const std::vector<TransferRow>& rows,
                                          const std::vector<Region*>& places,
                                          const std::shared_ptr<const Regions>& regions);

    // Whether the bytes of its writes have a slot, or need none. need_slot() takes one that is free;
    // wait_for_slot() waits for one.
    Result<bool> need_slot();
    Status wait_for_slot(const CardPatience& patience);
    bool has_reads() const { return read_bytes_ != 0; }

    // Where the bytes of a row are while they are in a slot; null: that row is memory of the host.
    std::byte* staged(size_t row) const;
    // What move() read stays there as long as this is kept.
    std::shared_ptr<void> answer_slot() const { return reads_; }
    std::shared_ptr<device::CardCopier> card() const { return rows_.front().place->card; }

    // The card still writes what came over this connection until this is gone; see Connection::fence().
    void writes_begin(std::shared_ptr<std::atomic<int>> copying);

    // Writes to cards what came, and reads what is asked for. fenced: nothing more is to be written. -> rows
    // that are refused, with the reason.
    using Refused = std::vector<std::pair<size_t, Error>>;
    Refused move(const std::atomic<bool>& fenced, const CardPatience& patience);

   private:
    struct Row {
        size_t number;
        Region* place;
        TransferRow row;
        uint64_t offset;  // in the slot of its direction
    };
    // What copies in one direction use, until they have ended.
    struct Held {
        explicit Held(std::shared_ptr<const Regions> regions) : places(std::move(regions)) {}
        ~Held() {
            if (copying != nullptr) copying->fetch_sub(1);
        }
        Operation places;
        device::RingSlot slot;
        std::shared_ptr<std::atomic<int>> copying;
    };
    Status check_room(uint64_t bytes) const;
    void move(bool write, const std::shared_ptr<Held>& held, const CardPatience& patience,
              Refused& refused) const;

    std::shared_ptr<const Regions> regions_;
    std::vector<Row> rows_;
    std::vector<const Row*> by_number_;  // null: not of a card
    uint64_t write_bytes_ = 0, read_bytes_ = 0;
    std::shared_ptr<Held> writes_, reads_;
};

}  // namespace moonpool::transport::tcp
