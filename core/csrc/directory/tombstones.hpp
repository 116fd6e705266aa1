// Tombstones: the keys that were removed while a node that may hold them was not in touch. The master
// compares the inventory of a node that comes back with what was forgotten since the node was last heard, so
// that no copy of a removed key becomes visible again. Pure.
//
// It holds at most `max` keys and remembers since when it is complete. A holder that was away for longer has
// to drop all it holds: that costs misses, never a stale read.
#pragma once

#include <cstdint>
#include <deque>
#include <unordered_map>

#include "base/xxh3.hpp"

namespace moonpool {

class Tombstones {
   public:
    explicit Tombstones(uint32_t max) : max_(max) {}

    void add(uint64_t now_ms, const Hash128& hash) {
        // One time for each key, its last; older entries of the queue are passed over when they leave.
        last_ms_[hash] = now_ms;
        queue_.push_back({hash, now_ms});
        while (queue_.size() > max_) drop_oldest();
    }

    // Drops what is older: no inventory will be compared with it, as every node was in touch since.
    void prune(uint64_t before_ms) {
        while (!queue_.empty() && queue_.front().ms < before_ms) drop_oldest();
        if (!queue_.empty()) return;
        decltype(queue_)().swap(queue_);  // their memory, too: "= {}" would keep it
        decltype(last_ms_)().swap(last_ms_);
    }

    // From now on every node that was away at now_ms counts as away for too long.
    void lose(uint64_t now_ms) {
        prune(now_ms + 1);
        complete_since_ms_ = now_ms + 1;
    }

    // Whether every removal at or after since_ms is here.
    bool covers(uint64_t since_ms) const { return since_ms >= complete_since_ms_; }
    bool has(const Hash128& hash, uint64_t since_ms) const {
        auto it = last_ms_.find(hash);
        return it != last_ms_.end() && it->second >= since_ms;
    }

    size_t size() const { return queue_.size(); }
    bool check_integrity() const { return queue_.size() <= max_ && last_ms_.size() <= queue_.size(); }

   private:
    struct Entry {
        Hash128 hash;
        uint64_t ms;
    };
    struct Fold {
        size_t operator()(const Hash128& hash) const { return hash.high; }
    };

    void drop_oldest() {
        complete_since_ms_ = queue_.front().ms + 1;
        auto it = last_ms_.find(queue_.front().hash);
        if (it != last_ms_.end() && it->second == queue_.front().ms) last_ms_.erase(it);
        queue_.pop_front();
    }

    uint32_t max_;
    std::deque<Entry> queue_;
    std::unordered_map<Hash128, uint64_t, Fold> last_ms_;
    uint64_t complete_since_ms_ = 0;
};

}  // namespace moonpool
