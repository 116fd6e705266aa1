// Region: memory of this process that transfers may touch, and the table of them.
//
// A thread that is about to touch a region's bytes enters it, and leaves it right afterwards: for one system
// call or one copy of at most kAccessBytesMax, never while waiting for a peer. remove() takes the region out
// of the table and marks it closing. drained() tells when no thread is inside: from then on the memory may be
// freed.
//
//   toucher   users += 1; if closing { users -= 1; refuse }      remover   closing = true; wait for users ==
//   0
//
// Both sides write before they read (sequentially consistent), so at least one of them sees the other.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/result.hpp"
#include "memory/memory_ref.hpp"
#include "transport/memory.hpp"

namespace moonpool::transport {

inline constexpr uint64_t kAccessBytesMax = 8u << 20;
inline constexpr size_t kRegionsMax = 16384;
inline constexpr size_t kLocationBytesMax = 64;

// "host", "host_arena": as users see it; "kind 9" for what a later version may list.
std::string kind_name(MemoryKind kind);

struct Region {
    uint64_t id = 0;  // never used twice in one engine
    uint64_t address = 0;
    uint64_t length = 0;
    MemoryKind kind = MemoryKind::kHost;
    std::string location;            // a label: text of the owner, shown to peers; no transport reads it
    std::shared_ptr<Memory> memory;  // of kHostArena

    bool contains(uint64_t at, uint64_t bytes) const {
        return at >= address && bytes <= length && at - address <= length - bytes;
    }
    bool enter() {
        users_.fetch_add(1);
        if (!closing_.load()) return true;
        users_.fetch_sub(1);
        return false;
    }
    void leave() { users_.fetch_sub(1); }
    void close() { closing_.store(true); }
    bool closing() const { return closing_.load(); }
    bool drained() const { return users_.load() == 0; }

   private:
    std::atomic<int64_t> users_{0};
    std::atomic<bool> closing_{false};
};

// Regions sorted by address, which never change once they are in here.
using Regions = std::vector<std::shared_ptr<Region>>;

// What is said when Visit::reach() finds a piece outside: a fault of ours, which costs a slice or a
// connection, never memory.
inline constexpr const char* kOutsideText =
    "internal error: a piece lies outside of its slice; none of it was touched";

// The region that holds all of [address, address + bytes), or null.
const std::shared_ptr<Region>* find_region(const Regions& regions, uint64_t address, uint64_t bytes);

class RegionTable {
   public:
    // Refuses empty ranges, ranges that wrap, and ranges that overlap a registered one.
    Result<std::shared_ptr<Region>> add(uint64_t address, uint64_t length, MemoryKind kind,
                                        const std::string& location, std::shared_ptr<Memory> memory);
    // The region that begins there, taken out and closing.
    Result<std::shared_ptr<Region>> remove(uint64_t address);

    std::shared_ptr<const Regions> all() const;
    std::shared_ptr<Region> by_id(uint64_t id) const;
    bool check_integrity() const;

   private:
    mutable std::mutex mutex_;
    uint64_t next_id_ = 1;
    std::shared_ptr<const Regions> regions_ = std::make_shared<Regions>();
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
