// Directory: key hash -> which nodes hold it, and in which tier. 1,024 shards by hash, each one open table of
// rows. Pure: no thread, no clock; the master's loop owns it.
//
// A row is 20 bytes: hash, node, tier, round. A key with several holders has several rows, next to each other
// in the same run. A table is a mapping of whole pages, filled between a quarter and three quarters: 27 to 80
// bytes for each holder of a key, and what is removed goes back to the kernel.
//
// A row counts only while the incarnation of its node (its id) is open and its round is the node's current
// one, or, while an inventory runs, of the time before it. So the death of a node, and the end of an
// inventory, void any number of rows at once; sweep() removes void rows later, one shard at a time.
//
// Invariants (check_integrity):
//   - every row lies in its shard, between its home slot and the next empty slot, and no row appears twice;
//   - a table is empty and has no memory, or has at least a quarter of its slots filled or one page only;
//   - the counts of rows per node, tier and round, and of void rows, are those of the tables.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "directory/types.hpp"

namespace moonpool {

struct DirectoryRow {
    std::array<uint32_t, 4> words{};  // of the hash: in this form the row has 20 bytes, not 24
    NodeId node = kNoNode;            // kNoNode: an empty slot
    Tier tier = Tier::kDram;
    uint8_t round = 0;

    DirectoryRow() = default;
    DirectoryRow(const Hash128& hash, NodeId n, Tier t, uint8_t r)
        : words(std::bit_cast<std::array<uint32_t, 4>>(hash)), node(n), tier(t), round(r) {}
    Hash128 hash() const { return std::bit_cast<Hash128>(words); }
};
static_assert(sizeof(DirectoryRow) == 20);

// One shard: rows in open addressing, in the order of their hashes as far as runs allow. Knows nothing of
// which rows count.
class DirectoryShard {
   public:
    DirectoryShard() = default;
    ~DirectoryShard();
    DirectoryShard(const DirectoryShard&) = delete;

    DirectoryRow* find(const Hash128& hash, NodeId node, Tier tier);
    bool insert(const DirectoryRow& row);  // one that is not there; false: the kernel gives no memory
    void erase(DirectoryRow* row);         // of find()
    template <class Keep>
    uint32_t keep_only(Keep keep);  // the number of rows that went

    // Calls visit(row) for every row of that hash.
    template <class Visit>
    void for_hash(const Hash128& hash, Visit visit) const {
        if (capacity_ == 0) return;
        for (uint32_t slot = home(hash); rows_[slot].node != kNoNode; slot = next(slot)) {
            if (rows_[slot].hash() == hash) visit(rows_[slot]);
        }
    }
    template <class Visit>
    void for_each(Visit visit) const {
        for (uint32_t slot = 0; slot < capacity_; ++slot) {
            if (rows_[slot].node != kNoNode) visit(rows_[slot]);
        }
    }
    void prefetch(const Hash128& hash) const {
        if (capacity_ != 0) __builtin_prefetch(&rows_[home(hash)]);
    }

    uint32_t size() const { return size_; }
    uint64_t bytes() const { return bytes_; }
    bool check_integrity() const;

   private:
    // The high half: the shard was chosen by the low one. Monotonic in it, so a table is rebuilt in order.
    uint32_t home(const Hash128& hash) const {
        return static_cast<uint32_t>((static_cast<unsigned __int128>(hash.high) * capacity_) >> 64);
    }
    uint32_t next(uint32_t slot) const { return slot + 1 == capacity_ ? 0 : slot + 1; }
    bool resize(uint32_t rows);  // a fresh table with room for so many; false: no memory, nothing changed
    void place(const DirectoryRow& row);
    void free_table();

    DirectoryRow* rows_ = nullptr;
    uint32_t capacity_ = 0;
    uint32_t size_ = 0;
    uint64_t bytes_ = 0;
};

struct DirectoryCounters {
    uint64_t rows = 0;       // that count
    uint64_t void_rows = 0;  // that wait to be swept
    uint64_t table_bytes = 0;
    uint64_t refused_total = 0;  // rows over rows_max, or for which there was no memory
};

class Directory {
   public:
    explicit Directory(uint64_t rows_max);

    // An incarnation begins under a free id; its rows void at once; whether the id is free again.
    void open(NodeId node);
    void close(NodeId node);
    bool is_free(NodeId node) const { return node >= nodes_.size() || nodes_[node].free(); }

    // Rows added from begin on are the node's whole inventory; at the end the others are void. Another begin
    // before the end starts over.
    void begin_inventory(NodeId node);
    void end_inventory(NodeId node);

    bool add(const Hash128& hash, NodeId node,
             Tier tier);  // false: over the limit, or the incarnation is not open
    bool remove(const Hash128& hash, NodeId node, Tier tier);  // whether it was there
    bool remove(const Hash128& hash, NodeId node);             // in every tier
    void prefetch(const Hash128& hash) const { shards_[shard_of(hash)].prefetch(hash); }

    // Calls visit(Holder) for every row that counts.
    template <class Visit>
    void find(const Hash128& hash, Visit visit) const {
        shards_[shard_of(hash)].for_hash(hash, [&](const DirectoryRow& row) {
            if (counts(row)) visit(Holder{row.node, row.tier});
        });
    }

    // Removes void rows of at most one shard. Whether there may be more.
    bool sweep();

    uint64_t rows(NodeId node, Tier tier) const;
    DirectoryCounters counters() const;
    bool check_integrity() const;

   private:
    struct NodeRows {
        bool open = false;
        uint8_t round = 0;
        uint8_t depth = 0;                        // rounds before the current one that still count
        std::array<uint64_t, kTiers> rows{};      // of the current round
        std::array<uint64_t, kTiers> previous{};  // of the `depth` rounds before
        uint64_t void_rows = 0;

        bool free() const { return !open && void_rows == 0; }
        bool counts(uint8_t of_round) const {
            return open && static_cast<uint8_t>(round - of_round) <= depth;
        }
    };

    bool counts(const DirectoryRow& row) const { return nodes_[row.node].counts(row.round); }
    uint64_t& count_of(const DirectoryRow& row);
    void erase(DirectoryShard& shard, DirectoryRow* row);
    void make_void(NodeRows& node_rows, std::array<uint64_t, kTiers>& rows);
    void sweep_shard(DirectoryShard& shard);

    uint64_t rows_max_;
    std::vector<DirectoryShard> shards_{kShards};
    std::vector<NodeRows> nodes_;
    uint64_t rows_ = 0, void_rows_ = 0, refused_total_ = 0;
    uint32_t sweep_at_ = 0;
};

}  // namespace moonpool
