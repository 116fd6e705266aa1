// The shared index: where each visible object lies, in memory that clients map read-only. It makes the common
// hit a matter of memory, not messages: a client finds an object and copies it without asking the node.
//
//   header (one page) | u32 buckets[] (slot + 1 of the first entry, 0 = none) | Entry entries[]
//
// One writer (the node's loop), any number of readers in other processes. Entry.seq is the lock: it holds
// 2 x generation while the entry is valid and an odd number while it is not; generations never repeat in one
// incarnation of a node. A reader takes seq, reads what it wants *including the object's bytes*, and takes
// seq again: if it did not change, all of it was of that generation, because the node makes seq odd before it
// lets the memory be used again (a seqlock; Boehm, "Can seqlocks get along with programming language memory
// models?", 2012). If it did change, the reader asks the node.
//
// A hit in the index is a hit. A miss is not a miss: chains are walked while the writer changes them, and
// names over kInlineName bytes are not in it. Readers ask the node then.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "base/xxh3.hpp"
#include "memory/allocator.hpp"
#include "memory/mapping.hpp"
#include "wire/auth.hpp"

namespace moonpool {

inline constexpr uint32_t kInlineName = 72;
inline constexpr uint32_t kNoSlot = UINT32_MAX;

struct IndexEntry {
    std::atomic<uint64_t> seq;
    uint64_t hash_low;
    uint64_t hash_high;
    uint64_t offset;
    uint64_t size;
    uint32_t crc;
    uint32_t space;
    std::atomic<uint32_t> next;  // slot + 1 of the next entry of this bucket
    uint16_t name_size;
    uint16_t tier;
    char name[kInlineName];
};
static_assert(sizeof(IndexEntry) == 128);

inline constexpr uint32_t kIndexRangesMax = 16;

struct IndexHeader {
    uint64_t magic;
    uint32_t slots;
    uint32_t buckets;
    Incarnation incarnation;
    // Each read and written as a whole; the first two are of the arena.
    uint64_t free_bytes;     // a fraction of a second ago
    uint64_t settled_bytes;  // from its front on: in pages that the node will not gather into others any more
    uint64_t applied;        // up to which removal the node is right, in a pool of one range; 0: none
    uint64_t relays;         // 1: processes are to ask the master by the node; 0 of the release before, too
    uint64_t ranges;         // of the pool, where there are several; 0 of the release before, too
    uint64_t applied_of[kIndexRangesMax];  // of each of them
    uint64_t superseded;  // 1: another process has taken over; a new connection gets its index
};
static_assert(sizeof(IndexHeader) <= kPageBytes);
inline constexpr uint64_t kIndexMagic = 0x3158444E494C504DULL;  // "MPLINDX1"

// What a reader learns of an object; valid as long as `seq` is unchanged.
struct IndexHit {
    const IndexEntry* entry = nullptr;
    uint64_t seq = 0;
    uint64_t offset = 0;
    uint64_t size = 0;
    uint32_t crc = 0;
    uint32_t slot = kNoSlot;

    // True when everything read since the lookup, the object's bytes included, was of one generation.
    bool still_valid() const {
        std::atomic_thread_fence(std::memory_order_acquire);
        return entry->seq.load(std::memory_order_relaxed) == seq;
    }
};

class IndexReader {
   public:
    static Result<IndexReader> open(int fd, uint64_t bytes, const Incarnation& incarnation);

    // What was free in the arena at the node's last look.
    uint64_t free_bytes() const {
        auto* header = reinterpret_cast<const IndexHeader*>(mapping_.data());
        return __atomic_load_n(&header->free_bytes, __ATOMIC_RELAXED);
    }
    // How much of the arena may be pinned: a page that is pinned cannot be gathered into a huge page.
    uint64_t settled_bytes() const {
        auto* header = reinterpret_cast<const IndexHeader*>(mapping_.data());
        return __atomic_load_n(&header->settled_bytes, __ATOMIC_RELAXED);
    }
    // Of how many ranges the pool is; the same for the life of the node.
    uint32_t ranges() const {
        auto* header = reinterpret_cast<const IndexHeader*>(mapping_.data());
        uint64_t ranges = __atomic_load_n(&header->ranges, __ATOMIC_RELAXED);
        return ranges <= 1 || ranges > kIndexRangesMax ? 1 : static_cast<uint32_t>(ranges);
    }
    // Up to which removal of that range the node is right: what is put now comes after it.
    uint64_t applied(uint32_t range) const {
        auto* header = reinterpret_cast<const IndexHeader*>(mapping_.data());
        const uint64_t* of = ranges() == 1 ? &header->applied : &header->applied_of[range];
        return __atomic_load_n(of, __ATOMIC_RELAXED);
    }
    bool relays() const {
        auto* header = reinterpret_cast<const IndexHeader*>(mapping_.data());
        return __atomic_load_n(&header->relays, __ATOMIC_RELAXED) != 0;
    }
    // Whether the node's process has been replaced: no entry of this index is valid any more.
    bool superseded() const {
        auto* header = reinterpret_cast<const IndexHeader*>(mapping_.data());
        return __atomic_load_n(&header->superseded, __ATOMIC_RELAXED) != 0;
    }
    std::optional<IndexHit> find(uint32_t space, const Hash128& hash, std::string_view name) const;
    // The entry of that slot while it holds that generation.
    std::optional<IndexHit> at(uint32_t slot, uint64_t generation) const;

   private:
    Mapping mapping_;
    const std::atomic<uint32_t>* buckets_ = nullptr;
    const IndexEntry* entries_ = nullptr;
    uint32_t slots_ = 0;
    uint32_t bucket_mask_ = 0;
};

class IndexWriter {
   public:
    static Result<IndexWriter> create(uint32_t slots, const Incarnation& incarnation);
    static uint64_t bytes_for(uint32_t slots);

    // A descriptor of the same memory that cannot be mapped writable.
    Result<Fd> read_only_fd() const;
    uint64_t bytes() const { return mapping_.size(); }
    uint32_t slots() const { return slots_; }

    // Fills the entry of a free slot and links it. A name over kInlineName is linked, but only the node can
    // find it.
    void publish(uint32_t slot, uint64_t generation, uint32_t space, const Hash128& hash,
                 std::string_view name, Extent extent, uint32_t crc);
    // Makes the entry invalid, then unlinks it. After it returns, a reader that looks again sees the change.
    void retract(uint32_t slot);

    void set_free_bytes(uint64_t bytes) {
        auto* header = reinterpret_cast<IndexHeader*>(mapping_.data());
        __atomic_store_n(&header->free_bytes, bytes, __ATOMIC_RELAXED);
    }
    // On any thread.
    void set_settled_bytes(uint64_t bytes) {
        auto* header = reinterpret_cast<IndexHeader*>(mapping_.data());
        __atomic_store_n(&header->settled_bytes, bytes, __ATOMIC_RELAXED);
    }
    // Before any process reads it. One range is 0, as in the release before.
    void set_ranges(uint32_t ranges) {
        auto* header = reinterpret_cast<IndexHeader*>(mapping_.data());
        __atomic_store_n(&header->ranges, ranges == 1 ? 0 : ranges, __ATOMIC_RELAXED);
    }
    // A client of the release before reads `applied` only: of several ranges it is told of no removal.
    void set_applied(uint32_t range, uint64_t version) {
        auto* header = reinterpret_cast<IndexHeader*>(mapping_.data());
        uint64_t* of = header->ranges == 0 ? &header->applied : &header->applied_of[range];
        __atomic_store_n(of, version, __ATOMIC_RELAXED);
    }
    void set_relays() {
        auto* header = reinterpret_cast<IndexHeader*>(mapping_.data());
        __atomic_store_n(&header->relays, 1, __ATOMIC_RELAXED);
    }
    // No entry below `used` is valid from now on: another process writes an index of its own, and this one,
    // which no other process can write to, must not name memory that is going to be used again.
    void supersede(uint32_t used);
    // After supersede(): the object is still what it was, and this process writes the index as before.
    void revive(uint32_t slot, uint64_t generation);
    void end_supersede();
    uint32_t first(const Hash128& hash) const;  // slot or kNoSlot
    uint32_t next(uint32_t slot) const;
    const IndexEntry& entry(uint32_t slot) const { return entries_[slot]; }

   private:
    Fd fd_;
    Mapping mapping_;
    std::atomic<uint32_t>* buckets_ = nullptr;
    IndexEntry* entries_ = nullptr;
    uint32_t slots_ = 0;
    uint32_t bucket_mask_ = 0;
};

}  // namespace moonpool
