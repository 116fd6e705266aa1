// PiecePlan: how a set of copies of one card is made. Its copy engine takes about as long to begin a piece of
// 512 bytes as one of a megabyte, so small pieces are moved by the kernel (objects_kernel.hpp), all others by
// copies:
//
//     within the card                                 kernel   piece -> piece
//     scatter   in   run on the link -> staging       kernel   staging -> pieces
//     gather                                          kernel   pieces -> staging      out   staging -> run
//
// A run is the other side of pieces that follow each other there, as in a slot of pinned memory: it crosses
// the link as one copy. `in`, one launch of the kernel and `out` are queued in that order on one stream.
//
// Values only: no call of the driver. About 30 ns for a piece.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "device/objects_kernel.hpp"
#include "device/stream.hpp"

namespace moonpool::device {

// From here on a copy engine needs no kernel. Batches on an H200: over the link 40 GB/s at 64 KiB, 25 at
// 32 KiB and 4 at 16 KiB; within the card, where the kernel moves 770 GB/s, 273 at 1 MiB and 67 at 256 KiB.
inline constexpr uint64_t kSmallOverLink = 64u << 10;
inline constexpr uint64_t kSmallWithinCard = 2u << 20;
// Fewer begin sooner as copies than a list crosses the link and a kernel is launched.
inline constexpr size_t kSmallPiecesMin = 16;

// What the kernel moves, in its own terms: an object of at most four rows is what a warp has in flight, and
// all rows are of "block" 0. Longer pieces are cut, so that many warps share them.
class PieceList {
   public:
    static constexpr uint64_t kRowBytesMax = 16u << 10;
    static constexpr size_t kRowsMax = 20480;  // 64 MiB in 16,384 pieces
    // Of a list with that many rows, wherever they lie.
    static constexpr uint64_t kBytesMax = (kRowsMax * 44 + 4 + 4095) / 4096 * 4096;
    static size_t rows_of(uint64_t piece_bytes) { return (piece_bytes + kRowBytesMax - 1) / kRowBytesMax; }

    // At most kRowsMax rows in all.
    void add(const Copy& piece);
    void close() { close_object(); }  // after the last piece

    bool empty() const { return rows_.empty(); }
    size_t objects() const { return objects_.size(); }
    // bytes() of memory; job(): for the list when it lies at that address of the card.
    uint64_t bytes() const;
    void write(std::byte* to) const;
    ObjectsJob job(uint64_t list) const;

   private:
    static constexpr size_t kRowsOfObject = 4;
    void close_object();

    std::vector<KvRow> rows_;
    std::vector<KvObject> objects_;
    std::vector<uint32_t> begins_{0};
    std::array<uint64_t, kRowsOfObject> from_{};  // of the rows behind the last object
    size_t open_ = 0;
};

// Which of the copies go by the kernel.
class PieceWays {
   public:
    enum class Way : uint8_t { kCopy, kWithin, kScatter, kGather };
    // Whether a range is memory of the card.
    using OnCard = std::function<bool(uint64_t address, uint64_t bytes)>;

    PieceWays(std::span<const Copy> copies, const OnCard& on_card, uint64_t staging_bytes_max);

    bool by_kernel() const { return within_.pieces + staged_pieces() != 0; }
    uint64_t staged_bytes() const { return scatter_.bytes + gather_.bytes; }
    // Where what is gathered begins there; what is scattered lies before it.
    uint64_t gather_begin() const { return scatter_.bytes; }
    // There is no staging memory: by copies.
    void drop_staged();
    Way operator[](size_t copy) const { return ways_.empty() ? Way::kCopy : ways_[copy]; }

   private:
    struct Group {
        size_t pieces = 0, rows = 0, runs = 0;
        uint64_t bytes = 0;  // of staging memory
        uint64_t end = 0;    // of the last run
    };
    size_t staged_pieces() const { return scatter_.pieces + gather_.pieces; }
    Way way_of(const Copy& copy, const OnCard& on_card) const;
    void drop(Way way, Group& group);

    std::vector<Way> ways_;
    Group within_, scatter_, gather_;
};

struct PiecePlan {
    // staging: device memory of ways.staged_bytes().
    PiecePlan(std::span<const Copy> copies, const PieceWays& ways, uint64_t staging);

    std::vector<Copy> in, out;
    PieceList list;
};

}  // namespace moonpool::device
