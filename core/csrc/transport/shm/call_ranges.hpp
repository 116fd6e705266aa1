// The ranges of one process_vm call, from pieces that are moved in order.
//
// The kernel looks up and pins the peer's pages range by range, which takes as long as to copy some KiB, and
// threads of several processes wait for one another in it. So pieces that follow one another in memory are
// one range, and a small gap between two that are read is read, too, into bytes that are not used:
//
//     peer    |--- piece 0 ---| gap |--- piece 1 ---||--- piece 2 ---|     one range
//     here    |--- piece 0 ---|unused|--- piece 1 ---|   |--- piece 2 ---|
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <span>
#include <vector>

namespace moonpool::transport::shm {

inline constexpr size_t kGapBytesMax = 8192;  // that is read rather than left out

class CallRanges {
   public:
    // here, there: of each piece. bridges(i): whether the bytes between pieces i and i + 1 may be read; they
    // are of one region of the peer.
    template <typename Bridges>
    void build(std::span<const iovec> here, std::span<const iovec> there, Bridges bridges) {
        here_.clear();
        there_.clear();
        gaps_.assign(here.size(), 0);
        for (size_t i = 0; i < here.size(); ++i) {
            const size_t gap = i == 0 ? kNoBridge : gap_before(there, i);
            if (gap == 0 || (gap <= kGapBytesMax && bridges(i - 1))) {
                gaps_[i] = gap;
                if (gap != 0) here_.push_back({unused_.data(), gap});
                there_.back().iov_len += gap + there[i].iov_len;
            } else {
                there_.push_back(there[i]);
            }
            if (!here_.empty() && gap == 0 && end_of(here_.back()) == here[i].iov_base) {
                here_.back().iov_len += here[i].iov_len;
            } else {
                here_.push_back(here[i]);
            }
        }
    }
    std::span<const iovec> here() const { return here_; }
    std::span<const iovec> there() const { return there_; }
    // How many bytes are moved before piece i that are of none.
    size_t gap(size_t i) const { return gaps_[i]; }

   private:
    static constexpr size_t kNoBridge = SIZE_MAX;

    static char* end_of(const iovec& range) { return static_cast<char*>(range.iov_base) + range.iov_len; }
    static size_t gap_before(std::span<const iovec> there, size_t i) {
        const char* begin = static_cast<const char*>(there[i].iov_base);
        const char* before = end_of(there[i - 1]);
        return begin < before ? kNoBridge : static_cast<size_t>(begin - before);
    }

    std::vector<iovec> here_, there_;
    std::vector<size_t> gaps_;
    std::array<std::byte, kGapBytesMax> unused_;  // written by the kernel alone
};

}  // namespace moonpool::transport::shm
