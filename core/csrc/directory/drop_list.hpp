// DropList: the stale copies that one node is to drop, numbered, until it says that it has. Each beat's
// answer repeats what is not confirmed; so a lost connection loses none, and none is dropped twice. Pure.
//
// At most `max` wait; beyond that the node is told to drop all it holds, which counts as one item.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>

#include "base/xxh3.hpp"

namespace moonpool {

class DropList {
   public:
    explicit DropList(size_t max) : max_(max) {}

    void push(const Hash128& hash) {
        if (hashes_.size() == max_) {
            push_all();
        } else {
            hashes_.push_back(hash);
        }
    }
    void push_all() {
        first_ += hashes_.size() + 1;
        hashes_.clear();
        all_ = true;
    }
    // The node carried out all items below `done`.
    void confirm(uint64_t done) {
        if (done < first_) return;  // of an earlier answer; or, with all_, not that yet
        all_ = false;
        uint64_t n = std::min<uint64_t>(done - first_, hashes_.size());
        hashes_.erase(hashes_.begin(), hashes_.begin() + static_cast<std::ptrdiff_t>(n));
        first_ += n;
    }

    bool all() const { return all_; }          // everything, as the item before first()
    uint64_t first() const { return first_; }  // the number of hashes()[0]
    const std::deque<Hash128>& hashes() const { return hashes_; }
    bool empty() const { return !all_ && hashes_.empty(); }

   private:
    size_t max_;
    uint64_t first_ = 0;
    bool all_ = false;
    std::deque<Hash128> hashes_;
};

}  // namespace moonpool
