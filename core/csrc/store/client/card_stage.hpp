// CardStage: memory of the host in place of memory of cards, for some objects of a call. No path between a
// process and a node reaches a card; so each part of an object that lies on one gets a place in a slot of
// pinned memory, or, of an object larger than a slot, in memory that it passes on to slot by slot.
//
//     put   card --copy_in()--> place --Client::put--> pool
//     get   pool --Client::get--> place --copy_out()--> card
//
// Copies of different cards run at the same time, and beside whatever the caller does until wait(). They run
// behind nothing of the engine's: its caller says that the bytes are there, and that they may be written.
//
// One thread. When a card does not end its copies within the limit, the slot stays taken until it has.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "base/result.hpp"
#include "device/card_copiers.hpp"
#include "memory/memory_ref.hpp"

namespace moonpool {

class CardStage {
   public:
    using Parts = std::span<const MemoryRef>;

    // Whether some of it lies on a card.
    static bool needed(Parts parts);
    // How many of the objects, 1 at least, fit into a slot together.
    static size_t fitting(std::span<const Parts> objects);

    // Takes a slot. Null: none came back within wait_ms. limit_ms: how long wait() takes at most.
    static Result<std::unique_ptr<CardStage>> take(device::CardCopiers& cards, std::span<const Parts> objects,
                                                   int wait_ms, int limit_ms);
    ~CardStage() { (void)wait(); }
    CardStage(const CardStage&) = delete;

    size_t size() const { return objects_.size(); }
    // Of an object, all of it in memory that the CPU reaches.
    Parts parts(size_t object) const { return objects_[object]; }

    // From the cards to the places; of what was begun wait() tells the end.
    Status copy_in();
    // From the places to the cards. sizes: of each object, the bytes that it has, below 0: none.
    Status copy_out(std::span<const int64_t> sizes);
    Status wait();

   private:
    using Running = device::CardCopier::Running;
    using Copier = std::pair<int, std::shared_ptr<device::CardCopier>>;
    enum class Way { kIn, kOut };
    struct Piece {  // a part on a card
        size_t object;
        MemoryRef card;
        uint64_t begin;  // in its object
        uint64_t place;  // in the staging memory
    };
    // Freed in this order, the copier last: the slot is of its ring.
    struct Kept {
        std::shared_ptr<device::CardCopier> owner;
        device::RingSlot slot;
    };

    explicit CardStage(int limit_ms) : limit_ms_(limit_ms) {}
    void add(Parts object);
    void set_places();
    Status move(Way way, std::span<const Piece> pieces);
    // Queues copies between the cards and bytes [begin, begin + bytes) of the staging memory, which lie in
    // the slot from its first byte on.
    Status queue(Way way, std::span<const Piece> pieces, uint64_t begin, uint64_t bytes);

    int limit_ms_;
    std::vector<std::vector<MemoryRef>> objects_;
    std::vector<Piece> pieces_;
    uint64_t bytes_ = 0;  // of the staging memory
    std::vector<Copier> copiers_;
    std::shared_ptr<Kept> kept_;           // null: nothing of these objects lies on a card
    std::unique_ptr<std::byte[]> larger_;  // than a slot
    std::vector<std::pair<int, Running>> running_;
};

template <class Item>
bool any_on_cards(std::span<const Item> items) {
    return std::ranges::any_of(items, [](const Item& item) { return CardStage::needed(item.parts); });
}

}  // namespace moonpool
