// PrefixIndex: which engine and which node of the pool holds how many leading blocks of a prompt, in which
// tier. Events, the time and questions in, answers out: no thread, no socket, no clock. One index is of one
// model and one block size.
//
//   engines' events --ingest()--> own digests of the tokens     (an engine's own hashes are names only)
//   the pool's events -ingest()--> digests as they are
//   what was sent  --dispatched()--> held until an event says so, or for ttl_s
//   match(keys) -> leading blocks of each holder
//
// A holder's match is the number of leading blocks that it holds; a chain with a hole ends at the hole.
// What cannot be placed for certain (an unknown parent, an image, another block size) is counted and left
// out: the index may know less than the engine, not something else.
//
// Bounded: at most blocks_max entries (a block at a holder), 93 to 101 bytes each where no two holders share
// a block. When full, the largest holder's oldest unused entries go first.
//
// Any thread may call anything. A question waits for at most kPieceMax entries of another thread's changes:
// hashing is done without the lock, and changes let questions go first.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <queue>
#include <span>
#include <string>
#include <vector>

#include "base/mutex.hpp"
#include "base/result.hpp"
#include "conductor/block_store.hpp"
#include "conductor/holder_blocks.hpp"
#include "conductor/kv_events.hpp"

namespace moonpool {

struct PrefixIndexOptions {
    uint32_t block_tokens = 64;
    uint32_t blocks_max = 1u << 20;      // entries; at most 8 Mi
    uint32_t holders_max = kHoldersMax;  // and no more
};

// What a batch of events came to, in blocks.
struct Ingested {
    uint32_t stored = 0;
    uint32_t removed = 0;
    uint32_t cleared = 0;
    uint32_t unknown = 0;  // their parent, or they themselves, are not known
    uint32_t skipped = 0;  // not of this index: images, embeddings, another block size, another cache group
    double sent_s = 0;     // the sender's clock
};

// Leading blocks. by_tier[0]: on the device, [1]: there or in the host's memory, [2]: anywhere.
struct PrefixMatch {
    std::array<std::vector<uint32_t>, kKvTiers> by_tier;  // of each holder
    uint32_t pool_host = 0;                               // in the memory of the pool's nodes taken together
    uint32_t pool_any = 0;                                // and on their disks
};

struct PrefixIndexStats {
    uint32_t holders = 0, blocks = 0, entries = 0, entries_max = 0, expected = 0, expected_max = 0;
    uint64_t memory_bytes = 0;
    uint64_t stored_total = 0, removed_total = 0, cleared_total = 0, unknown_total = 0, skipped_total = 0;
    uint64_t refused_total = 0;           // batches that were malformed
    uint64_t evicted_total = 0;           // entries that made room
    uint64_t expected_dropped_total = 0;  // dispatched blocks that there was no room for
};

// Questions go before changes: std::mutex is not fair, and a thread with many changes takes it repeatedly.
class CAPABILITY("mutex") QuestionsFirst {
   public:
    void lock_question() ACQUIRE() {
        ++waiting_;
        mutex_.lock();
        --waiting_;
    }
    void lock_change() ACQUIRE();
    void unlock() RELEASE() { mutex_.unlock(); }

   private:
    std::mutex mutex_;
    std::atomic<int> waiting_{0};
};

class PrefixIndex {
   public:
    static Result<std::unique_ptr<PrefixIndex>> create(const PrefixIndexOptions& options);
    PrefixIndex(const PrefixIndex&) = delete;

    uint32_t block_tokens() const { return options_.block_tokens; }

    // One batch of events of a holder. of_pool: the hashes are our digests (32 bytes) and carry no tokens.
    // kProtocol: malformed, and nothing of it was taken.
    Result<Ingested> ingest(uint32_t holder, std::span<const uint8_t> payload, bool of_pool = false);

    // A node of the pool has, or no longer has, these blocks in a tier.
    Status apply(uint32_t holder, KvTier tier, std::span<const BlockKey> stored,
                 std::span<const BlockKey> removed);

    // A request with these blocks was sent there.
    Status dispatched(uint32_t holder, std::span<const BlockKey> keys, double now_s, double ttl_s);

    PrefixMatch match(std::span<const BlockKey> keys) const;

    // All of a holder: its stream was lost, or it is gone.
    Status forget(uint32_t holder);
    void expire(double now_s);

    PrefixIndexStats stats() const;
    uint32_t entries(uint32_t holder) const;
    bool check_integrity() const;

    static constexpr uint32_t kPieceMax = 256;

   private:
    explicit PrefixIndex(const PrefixIndexOptions& options, uint64_t secret);
    struct Dispatch {  // wakes up when it ends; the expected blocks say whether it still means them
        double until_s;
        uint32_t holder;
        std::vector<uint32_t> blocks;
        bool operator<(const Dispatch& other) const { return until_s > other.until_s; }
    };
    class Change;      // holds the lock as a change
    class AsQuestion;  // and as a question

    Status check_holder(uint32_t holder) const;
    HolderBlocks& obtain(uint32_t holder) REQUIRES(lock_);

    void take_stored(uint32_t holder, const KvEvent& event, Ingested& sum);
    void take_removed(uint32_t holder, const KvEvent& event, bool of_pool, Ingested& sum);
    void take_digests(uint32_t holder, const KvEvent& event, Ingested& sum);
    void take_more_of_known(uint32_t holder, const KvEvent& event, Ingested& sum);
    bool follows_group(uint32_t holder, const KvEvent& event);
    uint32_t placeable(const KvEvent& event) const;
    bool start_of_chain(uint32_t holder, const KvEvent& event, std::vector<uint8_t>& previous);

    bool insert(uint32_t holder, uint64_t name, const uint8_t* key, const uint8_t* rest, KvTier tier)
        REQUIRES(lock_);
    bool remove(uint32_t holder, uint64_t name, KvTier tier) REQUIRES(lock_);
    void drop_entry(uint32_t holder, uint32_t row) REQUIRES(lock_);
    void confirm(uint32_t holder, uint32_t block) REQUIRES(lock_);
    void drop_expected(uint32_t holder, uint32_t block) REQUIRES(lock_);
    void make_room() REQUIRES(lock_);
    uint32_t largest_holder() const REQUIRES(lock_);

    const PrefixIndexOptions options_;
    const uint64_t secret_;
    const uint32_t expected_max_;
    mutable QuestionsFirst lock_;
    BlockStore store_ GUARDED_BY(lock_);
    std::vector<std::unique_ptr<HolderBlocks>> holders_ GUARDED_BY(lock_);
    HolderMask present_ GUARDED_BY(lock_), pool_ GUARDED_BY(lock_);
    uint32_t entries_ GUARDED_BY(lock_) = 0, expected_ GUARDED_BY(lock_) = 0;
    uint64_t dispatches_blocks_ GUARDED_BY(lock_) = 0;  // in dispatches_, all together
    std::priority_queue<Dispatch> dispatches_ GUARDED_BY(lock_);
    PrefixIndexStats counts_ GUARDED_BY(lock_);
};

}  // namespace moonpool
