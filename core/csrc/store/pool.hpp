// Pool: all that a node keeps for one tenant: its arena, what is free in it, its objects and its spaces.
// Tenants share nothing. The node's loop owns it; only commit_memory() may run on another thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "memory/allocator.hpp"
#include "memory/leases.hpp"
#include "memory/mapping.hpp"
#include "store/object_table.hpp"
#include "store/space.hpp"
#include "wire/limits.hpp"

namespace moonpool {

struct PoolOptions {
    std::string tenant = "default";
    uint64_t arena_bytes = 0;
    uint32_t objects_max = 0;  // 0: one per 4 KiB of arena, between 4,096 and 4 Mi
    uint64_t slab_bytes = 0;   // 0: 1/128 of the arena, between 256 KiB and 8 MiB
    double object_share = 0.25;
};

class Pool {
   public:
    static Result<std::unique_ptr<Pool>> create(const PoolOptions& options, const Incarnation& incarnation);

    // A lease of at least `min` bytes, up to `want`: page aligned. Evicts as needed. Nothing when pins and
    // other leases stand in the way.
    std::optional<Extent> lease(uint64_t min, uint64_t want);
    Leases& leases() { return leases_; }

    // The id of a space, made on first use; nothing when the tenant has too many.
    std::optional<uint32_t> open_space(std::string_view name_space, std::string_view fingerprint,
                                       uint32_t limit);
    bool has_space(uint32_t space) const { return space < hashers_.size(); }
    Hash128 hash(uint32_t space, std::string_view name) const { return hashers_[space](name); }
    const std::string& identity(uint32_t space) const { return hashers_[space].identity(); }
    uint32_t find(uint32_t space, std::string_view name) const {
        return table_->find(space, hash(space, name), name);
    }

    // Verifies up to `budget` bytes of objects that were not verified since they came to memory; drops an
    // object whose bytes do not match its checksum. Returns the number dropped.
    uint64_t scrub(uint64_t budget);

    ObjectTable& table() { return *table_; }
    const ObjectTable& table() const { return *table_; }
    const std::string& tenant() const { return options_.tenant; }
    uint64_t slab_bytes() const { return options_.slab_bytes; }
    uint64_t object_bytes_max() const {
        return static_cast<uint64_t>(static_cast<double>(options_.arena_bytes) * options_.object_share);
    }
    uint64_t arena_bytes() const { return options_.arena_bytes; }
    uint64_t free_bytes() const { return allocator_.free_bytes(); }
    uint64_t capacity() const { return allocator_.capacity(); }
    int arena_fd() const { return arena_.fd(); }
    const std::byte* data() const { return arena_.data(); }
    std::byte* writable() const { return arena_.writable(); }

    // Reserves the next piece of the arena's memory (any thread); opens it to the allocator (the loop).
    Result<uint64_t> commit_memory();
    void open_memory(uint64_t bytes) {
        allocator_.grow(bytes);
        publish_free_bytes();
    }
    // Tells clients what is free. Memory that is still being reserved counts: a node that has just started is
    // not full, and nobody shall put elsewhere for that.
    void publish_free_bytes() { table_->publish_free_bytes(memory_short_ ? 0 : arena_bytes() - capacity()); }
    void memory_is_short() { memory_short_ = true; }  // no more will come
    // Makes huge pages of the next piece of committed memory (any thread); 0: all is done, or the kernel does
    // not.
    uint64_t collapse_memory();
    uint64_t huge_bytes() const { return huge_bytes_; }

    bool check_integrity() const { return table_->check_integrity(); }

   private:
    Pool() = default;

    PoolOptions options_;
    Arena arena_;
    ExtentAllocator allocator_;
    Leases leases_{allocator_};
    std::unique_ptr<ObjectTable> table_;
    std::unordered_map<std::string, uint32_t> space_ids_;
    std::vector<KeyHasher> hashers_;
    struct Scrub {  // where the background verification stands
        uint32_t slot = 0;
        uint64_t generation = 0;
        uint64_t done = 0;  // bytes of that object
        uint32_t crc = 0;
    };
    Scrub scrub_;
    bool memory_short_ = false;
    std::atomic<uint64_t> huge_bytes_{0};
};

}  // namespace moonpool
