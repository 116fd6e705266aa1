// DropList: the stale copies that one node is to drop, numbered, until it says that it has. Each beat's
// answer repeats what is not confirmed; so a lost connection loses none, and none is dropped twice. Pure.
//
// At most `max` wait; beyond that the node is told to drop all copies that are older than the last of them,
// which counts as one item.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <unordered_map>

#include "base/xxh3.hpp"
#include "directory/version.hpp"

namespace moonpool {

// A copy of that key is void if it is older.
struct Drop {
    Hash128 hash;
    Version version = kNoVersion;

    friend bool operator==(const Drop&, const Drop&) = default;
};

class DropList {
   public:
    explicit DropList(size_t max) : max_(max) {}

    void push(const Drop& drop) {
        if (items_.size() == max_) {
            push_all_before(std::max(drop.version, last_));
        } else {
            last_ = std::max(last_, drop.version);
            items_.push_back(drop);
            ++of_key_[drop.hash];
        }
    }
    void push_all_before(Version version) {
        first_ += items_.size() + 1;
        items_.clear();
        of_key_.clear();
        all_before_ = std::max({all_before_, version, last_});
        all_ = true;
    }
    // Nothing is to be dropped; the numbers go on.
    void clear() {
        first_ = end();
        items_.clear();
        of_key_.clear();
        all_ = false;
        all_before_ = kNoVersion;
    }
    // The node carried out all items below `done`. told(drop): of each that is confirmed now.
    template <class Told>
    void confirm(uint64_t done, Told told) {
        if (done < first_) return;  // of an earlier answer; or, with all_, not that yet
        all_ = false;
        all_before_ = kNoVersion;
        uint64_t n = std::min<uint64_t>(done - first_, items_.size());
        for (uint64_t i = 0; i < n; ++i) {
            told(items_[i]);
            if (auto at = of_key_.find(items_[i].hash); --at->second == 0) of_key_.erase(at);
        }
        items_.erase(items_.begin(), items_.begin() + static_cast<std::ptrdiff_t>(n));
        first_ += n;
    }

    bool all() const { return all_; }                        // those older than all_before(), as the item
    Version all_before() const { return all_before_; }       // before first()
    uint64_t first() const { return first_; }                // the number of items()[0]
    uint64_t end() const { return first_ + items_.size(); }  // of the next item
    const std::deque<Drop>& items() const { return items_; }
    bool empty() const { return !all_ && items_.empty(); }
    // Whether the node may have a copy of that key which it is to drop.
    bool has(const Hash128& hash) const { return all_ || of_key_.contains(hash); }

   private:
    size_t max_;
    uint64_t first_ = 0;
    bool all_ = false;
    Version all_before_ = kNoVersion, last_ = kNoVersion;
    std::deque<Drop> items_;
    struct Fold {
        size_t operator()(const Hash128& hash) const { return hash.high; }
    };
    std::unordered_map<Hash128, uint32_t, Fold> of_key_;  // how many of each
};

}  // namespace moonpool
