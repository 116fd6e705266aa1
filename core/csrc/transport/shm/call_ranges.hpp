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

// A part of a slice that is moved within one visit.
struct Piece {
    size_t slice;
    bool last;           // of its slice
    const void* region;  // of the peer, in which all of it lies
    char *here, *there;
    size_t bytes;
    size_t gap = 0;  // bytes before it that are moved, too, and are of none; CallRanges sets it

    void advance(size_t n) {
        here += n;
        there += n;
        bytes -= n;
    }
};

class CallRanges {
   public:
    // reads_gaps: of gaps that are in one region of the peer with what is on both sides of them.
    void build(std::span<Piece> pieces, bool reads_gaps) {
        here_.clear();
        there_.clear();
        const Piece* before = nullptr;
        for (Piece& piece : pieces) {
            const bool behind = before != nullptr && piece.there >= before->there + before->bytes;
            const size_t gap = behind ? static_cast<size_t>(piece.there - before->there) - before->bytes : 0;
            const bool bridges =
                reads_gaps && behind && gap <= kGapBytesMax && piece.region == before->region;
            const bool joins = behind && (gap == 0 || bridges);
            piece.gap = joins ? gap : 0;
            if (piece.gap != 0) here_.push_back({unused_.data(), gap});
            add(here_, piece.here, piece.bytes,
                joins && gap == 0 && piece.here == before->here + before->bytes);
            add(there_, piece.there, piece.gap + piece.bytes, joins);
            before = &piece;
        }
    }
    std::span<const iovec> here() const { return here_; }
    std::span<const iovec> there() const { return there_; }

   private:
    static void add(std::vector<iovec>& ranges, char* at, size_t bytes, bool joins) {
        if (joins) {
            ranges.back().iov_len += bytes;
        } else {
            ranges.push_back({at, bytes});
        }
    }

    std::vector<iovec> here_, there_;
    std::array<std::byte, kGapBytesMax> unused_;  // written by the kernel alone
};

}  // namespace moonpool::transport::shm
