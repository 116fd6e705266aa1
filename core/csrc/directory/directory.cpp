// Shards are open tables with linear probing, and no marks of removed rows: erase() moves later rows of a run
// back into the hole. A look-up reads the run from its home slot on: at three quarters full some 8 rows of 20
// bytes, three cache lines. A table that grows or shrinks is placed anew, in one step of at most one shard in
// 1,024.
//
// Counters of rows go by node, tier and round, so that a death or the end of an inventory voids rows by
// changing counters alone (make_void); sweep() takes the rows away later.
//
// The master's loop is the only thread here. Three counters always describe the tables, and
// check_integrity() recounts them: rows_ (rows that count), void_rows_, and for each node the rows of its
// current round, of the rounds before it that still count (previous), and void ones. A row changes its
// class without being touched, when its node's round, depth or `open` changes; then make_void() or
// begin_inventory() moves the counters, and no row is visited.
#include "directory/directory.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <utility>

namespace moonpool {

namespace {

uint64_t page_bytes() {
    static const auto bytes = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
    return bytes;
}

// A fresh table is half full: it grows when it is three quarters full and shrinks when it is one quarter
// full.
bool too_full(uint32_t size, uint32_t capacity) { return uint64_t{size} * 4 >= uint64_t{capacity} * 3; }
bool too_empty(uint32_t size, uint32_t capacity) { return uint64_t{size} * 4 < capacity; }

}  // namespace

DirectoryShard::~DirectoryShard() { free_table(); }

void DirectoryShard::free_table() {
    if (rows_ != nullptr) ::munmap(rows_, bytes_);
    rows_ = nullptr;
    capacity_ = 0;
    bytes_ = 0;
}

// Whole pages straight from the kernel, so that a table that shrinks gives its memory back. The old table
// stays valid until the new one is there: a failure changes nothing.
bool DirectoryShard::resize(uint32_t rows) {
    uint64_t page = page_bytes();
    uint64_t bytes = (uint64_t{rows} * sizeof(DirectoryRow) + page - 1) / page * page;
    if (bytes == bytes_) return true;
    void* fresh = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (fresh == MAP_FAILED) return false;
    DirectoryRow* old = std::exchange(rows_, static_cast<DirectoryRow*>(fresh));
    uint32_t old_capacity = std::exchange(capacity_, static_cast<uint32_t>(bytes / sizeof(DirectoryRow)));
    uint64_t old_bytes = std::exchange(bytes_, bytes);
    std::memset(static_cast<void*>(rows_), 0xFF, bytes);  // node kNoNode in every slot
    for (uint32_t slot = 0; slot < old_capacity; ++slot) {
        if (old[slot].node != kNoNode) place(old[slot]);
    }
    if (old != nullptr) ::munmap(old, old_bytes);
    return true;
}

// The caller knows that the row is not in the table and that a slot is free. Several rows of one hash (its
// holders) share a home slot and so lie in one run.
void DirectoryShard::place(const DirectoryRow& row) {
    uint32_t slot = home(row.hash());
    while (rows_[slot].node != kNoNode) slot = next(slot);
    rows_[slot] = row;
}

DirectoryRow* DirectoryShard::find(const Hash128& hash, NodeId node, Tier tier) {
    if (capacity_ == 0) return nullptr;
    for (uint32_t slot = home(hash); rows_[slot].node != kNoNode; slot = next(slot)) {
        DirectoryRow& row = rows_[slot];
        if (row.hash() == hash && row.node == node && row.tier == tier) return &row;
    }
    return nullptr;
}

bool DirectoryShard::insert(const DirectoryRow& row) {
    // Growth that fails is tried again with the next row; one slot stays empty, or a search would not end.
    if (too_full(size_ + 1, capacity_) && !resize((size_ + 1) * 2) && size_ + 1 >= capacity_) return false;
    place(row);
    ++size_;
    return true;
}

void DirectoryShard::erase(DirectoryRow* row) {
    // Close the hole: a row moves back into it unless that would put it before its home.
    auto hole = static_cast<uint32_t>(row - rows_);
    for (uint32_t slot = next(hole); rows_[slot].node != kNoNode; slot = next(slot)) {
        // Both distances go round the end of the table. A row that lies nearer to its home than to the hole
        // would be moved before its home, where no search looks.
        uint32_t from_home = slot >= home(rows_[slot].hash()) ? slot - home(rows_[slot].hash())
                                                              : slot + capacity_ - home(rows_[slot].hash());
        uint32_t from_hole = slot >= hole ? slot - hole : slot + capacity_ - hole;
        if (from_home < from_hole) continue;
        rows_[hole] = rows_[slot];
        hole = slot;
    }
    rows_[hole] = DirectoryRow{};
    // Shrinking may fail for lack of memory; the table then stays larger than it need be.
    if (--size_ == 0) {
        free_table();
    } else if (too_empty(size_, capacity_)) {
        resize(size_ * 2);
    }
}

// Rebuilds the shard from the rows to keep. Erasing them one by one would move rows past the place where
// the visit is, and visit them twice or never.
template <class Keep>
uint32_t DirectoryShard::keep_only(Keep keep) {
    std::vector<DirectoryRow> kept;
    kept.reserve(size_);
    for_each([&](const DirectoryRow& row) {
        if (keep(row)) kept.push_back(row);
    });
    uint32_t went = size_ - static_cast<uint32_t>(kept.size());
    if (went == 0) return 0;
    size_ = static_cast<uint32_t>(kept.size());
    if (kept.empty()) {
        free_table();
        return went;
    }
    std::memset(static_cast<void*>(rows_), 0xFF, bytes_);
    if (too_empty(size_, capacity_)) resize(size_ * 2);
    for (const DirectoryRow& row : kept) place(row);
    return went;
}

bool DirectoryShard::check_integrity() const {
    if (size_ == 0) return rows_ == nullptr && capacity_ == 0 && bytes_ == 0;
    if (size_ >= capacity_ || capacity_ != bytes_ / sizeof(DirectoryRow)) return false;
    if (too_empty(size_, capacity_) && bytes_ > page_bytes()) return false;
    uint32_t filled = 0;
    for (uint32_t slot = 0; slot < capacity_; ++slot) {
        const DirectoryRow& row = rows_[slot];
        if (row.node == kNoNode) continue;
        ++filled;
        uint32_t same = 0;
        bool reached = false;
        for (uint32_t at = home(row.hash()); rows_[at].node != kNoNode; at = next(at)) {
            reached |= at == slot;
            same +=
                rows_[at].hash() == row.hash() && rows_[at].node == row.node && rows_[at].tier == row.tier;
        }
        if (!reached || same != 1) return false;
    }
    return filled == size_;
}

Directory::Directory(uint64_t rows_max) : rows_max_(rows_max) {}

void Directory::open(NodeId node) {
    if (node >= nodes_.size()) nodes_.resize(size_t{node} + 1);
    nodes_[node].open = true;
}

// The id is free again only after the sweep has taken its last void row (NodeRows::free): otherwise rows of
// the former incarnation would count for the next one.
void Directory::close(NodeId node) {
    NodeRows& node_rows = nodes_[node];
    node_rows.open = false;
    node_rows.depth = 0;
    make_void(node_rows, node_rows.rows);
    make_void(node_rows, node_rows.previous);
}

void Directory::make_void(NodeRows& node_rows, std::array<uint64_t, kTiers>& rows) {
    for (uint64_t& n : rows) {
        node_rows.void_rows += n;
        void_rows_ += n;
        rows_ -= n;
        n = 0;
    }
}

void Directory::begin_inventory(NodeId node) {
    NodeRows& node_rows = nodes_[node];
    if (!node_rows.open) return;
    // Rounds come again after 256 inventories; so a void row must not stay for that long.
    constexpr uint8_t kRoundsMax = 64;
    // A node that begins again and again without an end: the rounds before are given up, so that the
    // difference of two rounds always fits into the 8 bits of a row.
    if (node_rows.depth == kRoundsMax) end_inventory(node);
    // Every 64 rounds void rows are taken away now, at the price of one visit to all shards: a void row of
    // round r must be gone before round r + 256, which has the same number.
    if (node_rows.round % kRoundsMax == 0 && node_rows.void_rows != 0) {
        for (DirectoryShard& shard : shards_) sweep_shard(shard);
    }
    ++node_rows.round;
    ++node_rows.depth;
    for (size_t tier = 0; tier < kTiers; ++tier)
        node_rows.previous[tier] += std::exchange(node_rows.rows[tier], 0);
}

void Directory::end_inventory(NodeId node) {
    NodeRows& node_rows = nodes_[node];
    node_rows.depth = 0;
    make_void(node_rows, node_rows.previous);
}

uint64_t& Directory::count_of(const DirectoryRow& row) {
    NodeRows& node_rows = nodes_[row.node];
    auto tier = static_cast<size_t>(row.tier);
    if (!counts(row)) return node_rows.void_rows;
    return row.round == node_rows.round ? node_rows.rows[tier] : node_rows.previous[tier];
}

// Idempotent. A row that is there already, void or of an earlier round, becomes one of the current round,
// so that an inventory confirms what is still held. The limit counts void rows as well: they take memory
// until they are swept.
bool Directory::add(const Hash128& hash, NodeId node, Tier tier) {
    if (node >= nodes_.size() || !nodes_[node].open) return false;
    DirectoryShard& shard = shards_[shard_of(hash)];
    DirectoryRow* row = shard.find(hash, node, tier);
    if (row == nullptr) {
        DirectoryRow fresh{hash, node, tier, nodes_[node].round};
        if (rows_ + void_rows_ >= rows_max_ || !shard.insert(fresh)) {
            ++refused_total_;
            return false;
        }
        ++count_of(fresh);
        ++rows_;
        return true;
    }
    if (!counts(*row)) {
        --void_rows_;
        ++rows_;
    }
    --count_of(*row);
    row->round = nodes_[node].round;
    ++count_of(*row);
    return true;
}

void Directory::erase(DirectoryShard& shard, DirectoryRow* row) {
    --(counts(*row) ? rows_ : void_rows_);
    --count_of(*row);
    shard.erase(row);
}

bool Directory::remove(const Hash128& hash, NodeId node, Tier tier) {
    if (node >= nodes_.size()) return false;
    DirectoryShard& shard = shards_[shard_of(hash)];
    DirectoryRow* row = shard.find(hash, node, tier);
    if (row == nullptr) return false;
    bool counted = counts(*row);
    erase(shard, row);
    return counted;
}

bool Directory::remove(const Hash128& hash, NodeId node) {
    bool was_there = false;
    for (size_t tier = 0; tier < kTiers; ++tier) was_there |= remove(hash, node, static_cast<Tier>(tier));
    return was_there;
}

void Directory::sweep_shard(DirectoryShard& shard) {
    void_rows_ -= shard.keep_only([this](const DirectoryRow& row) {
        if (counts(row)) return true;
        --nodes_[row.node].void_rows;
        return false;
    });
}

// One shard a call, in turn. The caller decides how much time it spends (MasterServer::on_tick).
bool Directory::sweep() {
    if (void_rows_ == 0) return false;
    sweep_shard(shards_[sweep_at_]);
    sweep_at_ = (sweep_at_ + 1) % kShards;
    return void_rows_ != 0;
}

uint64_t Directory::rows(NodeId node, Tier tier) const {
    if (node >= nodes_.size()) return 0;
    auto at = static_cast<size_t>(tier);
    return nodes_[node].rows[at] + nodes_[node].previous[at];
}

DirectoryCounters Directory::counters() const {
    DirectoryCounters c{rows_, void_rows_, 0, refused_total_};
    for (const DirectoryShard& shard : shards_) c.table_bytes += shard.bytes();
    return c;
}

bool Directory::check_integrity() const {
    std::vector<NodeRows> seen(nodes_.size());
    uint64_t counted = 0, voided = 0;
    for (uint32_t i = 0; i < kShards; ++i) {
        if (!shards_[i].check_integrity()) return false;
        bool sound = true;
        shards_[i].for_each([&](const DirectoryRow& row) {
            if (shard_of(row.hash()) != i || row.node >= nodes_.size()) {
                sound = false;
                return;
            }
            auto tier = static_cast<size_t>(row.tier);
            NodeRows& node_rows = seen[row.node];
            if (!counts(row)) {
                ++voided;
                ++node_rows.void_rows;
            } else {
                ++counted;
                ++(row.round == nodes_[row.node].round ? node_rows.rows[tier] : node_rows.previous[tier]);
            }
        });
        if (!sound) return false;
    }
    for (size_t node = 0; node < nodes_.size(); ++node) {
        const NodeRows &node_rows = nodes_[node], &recount = seen[node];
        if (node_rows.rows != recount.rows || node_rows.previous != recount.previous) return false;
        if (node_rows.void_rows != recount.void_rows) return false;
    }
    return counted == rows_ && voided == void_rows_;
}

}  // namespace moonpool
