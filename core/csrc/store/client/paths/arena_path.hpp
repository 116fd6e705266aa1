// The path to a node of this host. The node's arena and index are mapped here: a get copies straight out of
// the arena, without a message; a put copies into memory that the node leased to this client, then commits.
//
// The arena is mapped read-only; the range of a leased slab is writable until the slab goes back. What was
// read is checked afterwards: against the entry's generation, and, if asked, against the checksum.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/mutex.hpp"
#include "memory/allocator.hpp"
#include "memory/copier.hpp"
#include "memory/mapping.hpp"
#include "store/client/block_path.hpp"
#include "store/client/session.hpp"

namespace moonpool {

class ArenaPath final : public BlockPath {
   public:
    static Result<std::unique_ptr<BlockPath>> open(Session& session, const ClientOptions& options);

    std::string route() const override;
    bool moves(MemoryKind kind) const override {
        return find_copier(kind, MemoryKind::kHostArena) != nullptr &&
               find_copier(MemoryKind::kHostArena, kind) != nullptr;
    }
    Result<PutReport> put(std::span<const PutItem> items, const PutHow& how) override;
    Status read(std::span<NamedRead> reads, bool verify) override;
    Status read(std::span<PinnedRead> reads, PinHolder holder, bool verify) override;
    const IndexReader* index() const override { return index_.get(); }
    const std::byte* in_place(const Descriptor& d) const override { return arena_.data() + d.offset; }
    Result<NodeMemory> map_memory() const override;
    void retire() override;

   private:
    // A lease: memory of the arena that only this client writes. Handed back with the last reference to it.
    struct Slab {
        ArenaPath& path;
        Extent extent;
        uint64_t cursor = 0;  // the next free byte, from extent.offset

        Slab(ArenaPath& p, Extent e) : path(p), extent(e) {}
        ~Slab();
        Slab(const Slab&) = delete;
    };
    struct Room {
        std::shared_ptr<Slab> slab;  // null: there is none
        Extent extent;
    };
    // An object whose bytes are in the arena, and which the node does not know yet.
    struct Written {
        size_t item;
        Room room;
        uint32_t crc;
    };

    ArenaPath(Session& session, const ClientOptions& options);

    MemoryRef bytes_of(Extent extent) const;
    Status commit(std::span<const PutItem> items, const PutHow& how, std::vector<Written>& written,
                  PutReport& report);

    // Room for an object of `size` bytes. `ahead`: how much more room (see room_bytes) the caller is going to
    // ask for. `own`: empty at first; a caller that asks for much gets its own slab there, so that callers
    // lease, and get fresh pages, beside each other. A refusal is told in `why` and leaves slab empty.
    Result<Room> reserve(uint64_t size, uint64_t ahead, std::shared_ptr<Slab>& own, std::string& why,
                         int timeout_ms);
    Result<Room> reserve_shared(uint64_t size, uint64_t ahead, std::string& why, int timeout_ms);
    static uint64_t room_bytes(uint64_t size);  // of a slab, for an object of `size` bytes
    void unreserve(Room& room);                 // it was not committed after all
    Result<std::shared_ptr<Slab>> lease(uint64_t min, uint64_t want, std::string& why, int timeout_ms);
    Status make_writable(Extent extent);

    Session& session_;
    KeyHasher hash_;
    Fd arena_fd_;
    Mapping arena_;
    std::shared_ptr<const IndexReader> index_;

    Mutex slab_mutex_;
    std::shared_ptr<Slab> slab_ GUARDED_BY(slab_mutex_);  // for what is less than a slab
    Mutex populated_mutex_;
    std::vector<bool> populated_
        GUARDED_BY(populated_mutex_);  // by huge page: whose page table entries were filled once
};

}  // namespace moonpool
