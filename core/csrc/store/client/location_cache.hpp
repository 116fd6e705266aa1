// LocationCache: where keys were found last, so that a get of a known key asks its holder and not the master,
// and goes on while the master is away. One slot for each value of some bits of the hash: a newer key takes
// an older one's place. A wrong entry costs one question to a node that has not got it.
#pragma once

#include <optional>
#include <vector>

#include "base/mutex.hpp"
#include "base/xxh3.hpp"
#include "directory/types.hpp"

namespace moonpool {

class LocationCache {
   public:
    std::optional<Incarnation> find(const Hash128& hash) {
        MutexLock lock(mutex_);
        if (slots_.empty()) return std::nullopt;
        const Slot& slot = slots_[place(hash)];
        if (slot.hash != hash || slot.node == Incarnation{}) return std::nullopt;
        return slot.node;
    }
    void put(const Hash128& hash, const Incarnation& node) {
        MutexLock lock(mutex_);
        if (slots_.empty()) slots_.resize(kSlots);
        slots_[place(hash)] = Slot{hash, node};
    }
    void forget(const Hash128& hash) {
        MutexLock lock(mutex_);
        if (slots_.empty()) return;
        Slot& slot = slots_[place(hash)];
        if (slot.hash == hash) slot = Slot{};
    }

   private:
    static constexpr size_t kSlots = 1u << 16;
    struct Slot {
        Hash128 hash{};
        Incarnation node{};  // none has all zeros; numbers are another master's after its restart
    };
    static size_t place(const Hash128& hash) { return hash.high % kSlots; }

    Mutex mutex_;
    std::vector<Slot> slots_ GUARDED_BY(mutex_);  // made with the first entry
};

}  // namespace moonpool
