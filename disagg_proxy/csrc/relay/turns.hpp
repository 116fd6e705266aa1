// Turns: of some engines, the one that was chosen longest ago is next. One that was not among them, or that
// has left, moves no other's turn. The policy round_robin counts by these, and so does the relay in its place
// (PyRelay::decide): on the thread that decides alone.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace moonpool::relay {

class Turns {
   public:
    // Which of these places is next: its index. One without a turn comes first; of equals the first. places:
    // at least one. Changes no turn: took() does.
    size_t next(const std::vector<uint16_t>& places) const {
        auto before = [this](uint16_t a, uint16_t b) { return last(a) < last(b); };
        return static_cast<size_t>(std::ranges::min_element(places, before) - places.begin());
    }
    void took(uint16_t place) {
        if (place >= last_.size()) last_.resize(size_t{place} + 1);
        last_[place] = ++count_;
    }

   private:
    uint64_t last(uint16_t place) const { return place < last_.size() ? last_[place] : 0; }

    uint64_t count_ = 0;
    std::vector<uint64_t> last_;  // turn of each place; 0: none
};

}  // namespace moonpool::relay
