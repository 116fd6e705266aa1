// Rows: a table that grows by pieces and never moves, so that growing costs neither a copy nor slack. Rows
// that are freed are used again first; the caller's type keeps the list of them (next_free).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/slot_table.hpp"

namespace moonpool {

template <class Row, uint32_t kPerPiece>
class Rows {
   public:
    uint32_t take() {
        ++used_;
        if (free_ != kNoRow) {
            uint32_t row = free_;
            free_ = (*this)[row].next_free();
            (*this)[row] = Row{};
            return row;
        }
        if (end_ % kPerPiece == 0) pieces_.push_back(std::make_unique<Row[]>(kPerPiece));
        return end_++;
    }
    void give(uint32_t row) {
        (*this)[row].set_next_free(free_);
        free_ = row;
        --used_;
    }

    Row& operator[](uint32_t row) { return pieces_[row / kPerPiece][row % kPerPiece]; }
    const Row& operator[](uint32_t row) const { return pieces_[row / kPerPiece][row % kPerPiece]; }

    uint32_t used() const { return used_; }
    uint32_t end() const { return end_; }  // every row in use is below it
    size_t memory_bytes() const {
        return pieces_.size() * kPerPiece * sizeof(Row) + pieces_.capacity() * sizeof(pieces_[0]);
    }

   private:
    std::vector<std::unique_ptr<Row[]>> pieces_;
    uint32_t end_ = 0, used_ = 0, free_ = kNoRow;
};

}  // namespace moonpool
