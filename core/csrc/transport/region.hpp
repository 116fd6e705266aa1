// Region: memory of this process that transfers may touch, and the table of them.
//
// Its bytes are touched in two ways. A thread of this process makes a visit: it enters the region right
// before one system call or one copy of at most kAccessBytesMax, and leaves it right afterwards, never while
// waiting for a peer. A device or a peer that reads and writes by itself touches them at any time between the
// posting and the completion of an operation: the transport that posts it holds the region for all of that
// time.
//
// A region of a card's memory has a CardCopier, which makes its copies: an operation each, since the card is
// at work when the thread that queued them has given up.
//
// remove() takes the region out of the table and marks it closing. drained() tells when no visit and no
// operation is left: from then on the memory may be freed.
//
//   visit, operation   count += 1; if closing { count -= 1; refuse }
//   remover            closing = true; wait until both counts are 0
//
// Both sides write before they read (sequentially consistent), so at least one of them sees the other.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/mutex.hpp"
#include "base/result.hpp"
#include "device/card_copier.hpp"
#include "memory/kind_name.hpp"
#include "transport/memory.hpp"
#include "transport/range_tree.hpp"

namespace moonpool::transport {

inline constexpr uint64_t kAccessBytesMax = 8u << 20;
inline constexpr size_t kRegionsMax = 16384;
inline constexpr size_t kLocationBytesMax = 64;

// What the memory of a region is, besides where.
struct RegionMemory {
    MemoryKind kind = MemoryKind::kHost;
    std::shared_ptr<Memory> memory;            // of kHostArena
    std::shared_ptr<device::CardCopier> card;  // of kDevice
    bool pinned = false;                       // of the host, and every card reaches it
};

struct Region : RegionMemory {
    uint64_t id = 0;  // never used twice in one engine
    uint64_t address = 0;
    uint64_t length = 0;
    std::string location;  // a label: text of the owner, shown to peers; no transport reads it

    bool contains(uint64_t at, uint64_t bytes) const {
        return at >= address && bytes <= length && at - address <= length - bytes;
    }
    bool enter() { return count(visits_); }
    void leave() { visits_.fetch_sub(1); }
    bool begin_operation() { return count(operations_); }
    void end_operation() { operations_.fetch_sub(1); }
    void close() { closing_.store(true); }
    bool closing() const { return closing_.load(); }
    bool on_card() const { return card != nullptr; }
    // Its pages are this engine's own: no user unmaps or truncates them. Of any other region a copy by code
    // of this process could be a SIGSEGV.
    bool stays_mapped() const { return memory != nullptr && memory->fd() >= 0; }
    bool drained() const {
        if (operations_.load() != 0) device::CardCopier::collect_all();
        return visits_.load() == 0 && operations_.load() == 0;
    }

   private:
    bool count(std::atomic<int64_t>& uses) {
        uses.fetch_add(1);
        if (!closing_.load()) return true;
        uses.fetch_sub(1);
        return false;
    }

    std::atomic<int64_t> visits_{0};
    std::atomic<int64_t> operations_{0};  // posted, neither completed nor fenced
    std::atomic<bool> closing_{false};
};

using Regions = RangeTree<Region>;
using RegionList = std::vector<std::shared_ptr<Region>>;  // by ascending address

// What is said when Visit::reach() finds a piece outside: a fault of ours, which costs a slice or a
// connection, never memory.
inline constexpr const char* kOutsideText =
    "internal error: a piece lies outside of its slice; none of it was touched";

// The region that holds all of [address, address + bytes), or null.
inline const std::shared_ptr<Region>* find_region(const Regions& regions, uint64_t address, uint64_t bytes) {
    return regions.find(address, bytes);
}

// How a table came from one edition to a later one.
struct RegionChanges {
    struct Removed {
        uint64_t id = 0, address = 0;
    };

    uint64_t edition = 0;          // the later one
    bool whole = true;             // `added` is all that is registered, and `removed` is empty
    RegionList added;              // and still there
    std::vector<Removed> removed;  // before what was added: an address may have both
};

class RegionTable {
   public:
    static constexpr size_t kChangesKept = 4096;

    // Refuses empty ranges, ranges that wrap, and ranges that overlap a registered one.
    Result<std::shared_ptr<Region>> add(uint64_t address, uint64_t length, const std::string& location,
                                        RegionMemory memory);
    // The region that begins there, taken out and closing.
    Result<std::shared_ptr<Region>> remove(uint64_t address);

    std::shared_ptr<const Regions> all() const;
    std::shared_ptr<Region> by_id(uint64_t id) const;
    // Since that edition of this table; of an edition that is not remembered, and of 0, all of it.
    RegionChanges changes(uint64_t since) const;
    // Whether one of them is, or was, memory of a card.
    bool ever_on_card() const { return ever_on_card_.load(std::memory_order_relaxed); }
    bool check_integrity() const;

   private:
    std::atomic<bool> ever_on_card_{false};
    mutable Mutex mutex_;
    uint64_t next_id_ GUARDED_BY(mutex_) = 1;
    std::shared_ptr<Regions> regions_ GUARDED_BY(mutex_) = std::make_shared<Regions>();
    std::unordered_map<uint64_t, uint64_t> addresses_ GUARDED_BY(mutex_);  // by id
    // The last kChangesKept; each makes an edition, of which the first is 1.
    struct Change {
        uint64_t id, address;
        bool added;
    };
    Regions& own_regions() REQUIRES(mutex_);
    void note(const Region& region, bool added) REQUIRES(mutex_);
    std::deque<Change> log_ GUARDED_BY(mutex_);
    uint64_t edition_ GUARDED_BY(mutex_) = 0;
};

// The regions that one posted operation may touch without a thread of this process. A transport makes it
// before it posts, and ends it at the completion, or when a fence says that there will be none: not when the
// job is given up, since the device may still be at work then.
class Operation {
   public:
    // regions: of the job; they live as long as the operation.
    explicit Operation(std::shared_ptr<const Regions> regions) : regions_(std::move(regions)) {}
    ~Operation() { end(); }
    Operation(const Operation&) = delete;

    // False: the region is closing, and must not be posted.
    bool hold(Region& region) {
        if (last_ == &region) return true;
        if (!region.begin_operation()) return false;
        if (last_ != nullptr) others_.push_back(last_);
        last_ = &region;
        return true;
    }
    void end() {
        if (last_ != nullptr) last_->end_operation();
        for (Region* region : others_) region->end_operation();
        last_ = nullptr;
        others_.clear();
    }

   private:
    std::shared_ptr<const Regions> regions_;
    Region* last_ = nullptr;
    std::vector<Region*> others_;
};

// The regions that one thread is inside of; leaves them all at the end.
class Visit {
   public:
    enum class Access : uint8_t { kGranted, kClosing, kOutside };

    Visit() = default;
    ~Visit() { end(); }
    Visit(const Visit&) = delete;

    // The one gate between the offsets of a state machine and memory, passed right before each system call
    // and each copy: `bytes` at `at` of the range [base, base + length), which lies in the region. Whatever
    // the caller has computed, what is not wholly inside of both is never touched.
    Access reach(Region& region, uint64_t base, uint64_t length, uint64_t at, uint64_t bytes) {
        if (at > length || bytes > length - at || !region.contains(base, length)) return Access::kOutside;
        return enter(region) ? Access::kGranted : Access::kClosing;
    }

    bool enter(Region& region) {
        if (count_ != 0 && last_ == &region) return true;
        if (!region.enter()) return false;
        last_ = &region;
        if (count_ < kInPlace) {
            few_[count_] = &region;
        } else {
            many_.push_back(&region);
        }
        ++count_;
        return true;
    }
    void end() {
        for (size_t i = 0; i < count_; ++i) (i < kInPlace ? few_[i] : many_[i - kInPlace])->leave();
        count_ = 0;
        last_ = nullptr;
        many_.clear();
    }

   private:
    static constexpr size_t kInPlace = 4;
    Region* last_ = nullptr;
    size_t count_ = 0;
    Region* few_[kInPlace];
    std::vector<Region*> many_;
};

}  // namespace moonpool::transport
