#include "store/node/put_sink.hpp"

#include <algorithm>

#include "base/crc32c.hpp"

namespace moonpool {

void PutSink::skip_whole() {
    while (row_ < rows.size() && done_ == rows[row_].size) {
        ++row_;
        done_ = 0;
    }
}

bool PutSink::complete() {
    skip_whole();
    return row_ == rows.size();
}

size_t PutSink::targets(iovec* parts, size_t parts_max) {
    skip_whole();
    size_t n = 0;
    uint64_t left = kTurnBytes, done = done_;
    for (size_t i = row_; i < rows.size() && n < parts_max && left != 0; ++i, done = 0) {
        uint64_t size = std::min(left, rows[i].size - done);
        if (size == 0) continue;
        std::byte* place = rows[i].place(done, size);
        if (place == nullptr) {
            // One target at a time: all that is forgotten goes to the same place.
            if (n != 0) break;
            forgotten_.resize(64u << 10);
            parts[0] = iovec{forgotten_.data(), std::min<uint64_t>(size, forgotten_.size())};
            return 1;
        }
        parts[n++] = iovec{place, size};
        left -= size;
    }
    return n;
}

void PutSink::advance(uint64_t n) {
    while (n != 0) {
        skip_whole();
        PutRow& row = rows[row_];
        uint64_t step = std::min(n, row.size - done_);
        if (std::byte* place = row.place(done_, step)) row.crc_here = crc32c(row.crc_here, place, step);
        done_ += step;
        n -= step;
    }
}

size_t PutSink::take(const std::byte* data, size_t size) {
    size_t taken = 0;
    while (taken < size && !complete()) {
        PutRow& row = rows[row_];
        uint64_t step = std::min<uint64_t>(size - taken, row.size - done_);
        if (std::byte* place = row.place(done_, step)) {
            row.crc_here = copy_crc32c(row.crc_here, place, data + taken, step);
        }
        done_ += step;
        taken += step;
    }
    return taken;
}

}  // namespace moonpool
