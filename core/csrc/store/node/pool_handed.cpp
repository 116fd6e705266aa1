// The half of Pool that goes from one process to another: the arena stays where it is, as the same memory
// file; what is free in it follows from what is not.
#include <algorithm>
#include <set>
#include <utility>

#include "store/node/pool.hpp"

namespace moonpool {

HandedPool Pool::give() {
    open_memory();
    HandedPool handed;
    handed.tenant = tenant();
    handed.salt = salt();
    handed.arena_bytes = arena_bytes();
    handed.committed_bytes = arena_.committed();
    handed.generations = table_->generations();
    handed.uses = table_->uses();
    absent_.for_each([&](Extent extent) { handed.absent.push_back(extent); });
    handed.all_opened = allocator_.capacity() == arena_bytes();
    for (const auto& [identity, id] : space_ids_) {
        // tenant 0 namespace 0 fingerprint
        const std::string name = unsalted_identity(id).substr(tenant().size() + 1);
        const size_t end = name.find('\0');
        handed.spaces.push_back({id, name.substr(0, end), name.substr(end + 1)});
    }
    handed.objects = table_->give();
    return handed;
}

Result<std::unique_ptr<Pool>> Pool::adopt(const PoolOptions& options, const Incarnation& incarnation,
                                          Handed handed) {
    std::unique_ptr<Pool> pool(new Pool());
    if (Status status = pool->set_sizes(options); !status) return status.error();
    const HandedPool& from = handed.pool;
    if (pool->arena_bytes() != from.arena_bytes || pool->salt() != from.salt) {
        return Error{Code::kInvalidArgument, "the arena of tenant " + pool->tenant() +
                                                 " has another size, or another salt, in the running node"};
    }
    // Limits that are new here change nothing of what was reserved for the start.
    if (uint64_t& start = pool->options_.start_bytes; from.all_opened || start < from.committed_bytes)
        start = from.committed_bytes;
    Result<Arena> arena = Arena::adopt(std::move(handed.arena), from.arena_bytes, from.committed_bytes);
    if (!arena) return arena.error();
    pool->arena_ = std::move(*arena);
    pool->committed_ = from.committed_bytes;
    if (Status status = pool->make_table(incarnation); !status) return status.error();
    pool->adopt_spaces(from);
    // Objects enter the table first: their memory counts as allocated until adopt_memory() says what is free.
    auto hash = [p = pool.get()](uint32_t space, std::string_view name) { return p->hash(space, name); };
    if (Status status = pool->table_->adopt(from, handed.pins, hash); !status) return status.error();
    pool->adopt_memory(handed);
    return pool;
}

void Pool::adopt_spaces(const HandedPool& handed) {
    for (const HandedSpace& space : handed.spaces) {
        if (spaces_.size() <= space.id) spaces_.resize(space.id + 1);
        spaces_[space.id].hasher = KeyHasher(tenant(), space.name_space, space.fingerprint, salt());
        space_ids_.emplace(identity(space.id), space.id);
    }
    for (uint32_t id = static_cast<uint32_t>(spaces_.size()); id-- > 0;) {
        if (identity(id).empty()) free_spaces_.push_back(id);
    }
}

void Pool::drop_unused_spaces() {
    for (uint32_t id = 0; id < spaces_.size(); ++id) {
        if (has_space(id)) close_if_unused(id);
    }
}

void Pool::adopt_memory(const Handed& handed) {
    const HandedPool& from = handed.pool;
    std::vector<Extent> taken = handed.leases;
    for (Extent lease : handed.leases) leases_.adopt(lease);
    taken.insert(taken.end(), from.absent.begin(), from.absent.end());
    for (uint32_t slot = 0; slot < table_->slots_used(); ++slot) {
        if (!table_->holds_memory(slot)) continue;
        const IndexEntry& entry = table_->entry(slot);
        const Extent extent{entry.offset, entry.size};
        if (!leases_.commit(extent)) taken.push_back(extent);
    }
    std::ranges::sort(taken, {}, &Extent::offset);
    const uint64_t end = from.all_opened ? from.arena_bytes : from.committed_bytes;
    allocator_.grow_allocated(end);
    uint64_t free_from = 0;
    for (const Extent& extent : taken) {
        if (extent.offset > free_from) allocator_.free({free_from, extent.offset - free_from});
        free_from = extent.end();
    }
    if (free_from < end) allocator_.free({free_from, end - free_from});
    if (!from.all_opened || !options_.shares_memory) return;
    absent_.grow_allocated(end);
    for (Extent extent : from.absent) absent_.free(extent);
}

}  // namespace moonpool
