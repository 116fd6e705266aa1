// A block is one row of BlockStore, with a set of bits for each holder that has it: a bit for each tier,
// `used` for the clock, `expected` for what was sent there. An entry is a holder's own name of a block
// (HolderBlocks). The store's row lives as long as an entry refers to it (refs) or a holder has a bit.
//
//             ingest, apply                     dispatched                  expire
//   block --> entry + tier bits                 expected bit, until ttl     expected bit goes
//             confirms what was expected
//
// Why two maps: an engine names blocks by hashes of its own, which mean nothing elsewhere, and a removal
// has only these. Questions come with our digests of the tokens. HolderBlocks translates the one into the
// other, per holder.
//
// Locking (QuestionsFirst): one mutex for everything. Changes are cut into pieces of kPieceMax entries,
// between which the lock is given up; so a state in the middle of a batch is visible, and each such state
// is consistent. Hashing of tokens, which is most of the work, is done without the lock.
#include "conductor/prefix_index.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <random>
#include <thread>

#include "base/digest.hpp"

namespace moonpool {

namespace {

constexpr uint32_t kBlocksMax = 8u << 20;
// Evicting one by one would look for the largest holder each time.
constexpr uint32_t kEvictedAtOnce = 32;
constexpr size_t kAhead = 8;  // a question looks so many blocks ahead, to have them in the cache

HoldBits bit_of(KvTier tier) { return static_cast<HoldBits>(1u << static_cast<unsigned>(tier)); }

// Of a pool's block: its first eight bytes serve as its name, as the pool has no other.
uint64_t name_of(const uint8_t* key) {
    uint64_t name;
    std::memcpy(&name, key, sizeof(name));
    return name;
}

const uint8_t* bytes_of(std::string_view text) { return reinterpret_cast<const uint8_t*>(text.data()); }

// What a chain's first block says of its salt. False: something stands there that we do not know.
bool salt_of(const KvEvent& event, std::optional<std::string_view>& salt) {
    salt = event.cache_salt;
    if (event.extras.empty()) return true;
    const BlockExtras& extras = event.extras.front();
    size_t at = event.lora_name && extras.texts_count > 0 && extras.texts[0] == *event.lora_name ? 1 : 0;
    if (extras.texts_count > at + 1) return false;
    if (extras.texts_count == at + 1) salt = extras.texts[at];
    return true;
}

// Of a later block nothing but the LoRA's name may stand there.
bool plain(const KvEvent& event, size_t block) {
    if (event.extras.empty()) return true;
    if (block >= event.extras.size() || event.extras[block].foreign) return false;
    if (block == 0 && !event.parent) return true;
    const BlockExtras& extras = event.extras[block];
    return extras.texts_count == 0 ||
           (extras.texts_count == 1 && event.lora_name && extras.texts[0] == *event.lora_name);
}

}  // namespace

void QuestionsFirst::lock_change() {
    // Only a hint: a question that comes after the look waits for one piece.
    while (waiting_.load(std::memory_order_relaxed) != 0) std::this_thread::yield();
    mutex_.lock();
}

class SCOPED_CAPABILITY PrefixIndex::Change {
   public:
    explicit Change(QuestionsFirst& lock) ACQUIRE(lock) : lock_(lock) { lock.lock_change(); }
    ~Change() RELEASE() { lock_.unlock(); }
    Change(const Change&) = delete;

   private:
    QuestionsFirst& lock_;
};

class SCOPED_CAPABILITY PrefixIndex::AsQuestion {
   public:
    explicit AsQuestion(QuestionsFirst& lock) ACQUIRE(lock) : lock_(lock) { lock.lock_question(); }
    ~AsQuestion() RELEASE() { lock_.unlock(); }
    AsQuestion(const AsQuestion&) = delete;

   private:
    QuestionsFirst& lock_;
};

Result<std::unique_ptr<PrefixIndex>> PrefixIndex::create(const PrefixIndexOptions& options) {
    if (options.block_tokens == 0 || options.block_tokens > 1u << 16) {
        return Error{Code::kInvalidArgument, "a block of the index has 1 to 65,536 tokens"};
    }
    if (options.blocks_max == 0 || options.blocks_max > kBlocksMax) {
        return Error{Code::kInvalidArgument, "an index has room for 1 to 8,388,608 blocks"};
    }
    if (options.holders_max == 0 || options.holders_max > kHoldersMax) {
        return Error{Code::kInvalidArgument, "an index has 1 to 2,048 holders"};
    }
    // The secret keys the hash tables, so that no client can choose prompts that collide.
    std::random_device random;
    uint64_t secret = uint64_t{random()} << 32 | random();
    return std::unique_ptr<PrefixIndex>(new PrefixIndex(options, secret));
}

PrefixIndex::PrefixIndex(const PrefixIndexOptions& options, uint64_t secret)
    : options_(options),
      secret_(secret),
      expected_max_(std::max(4096u, options.blocks_max / 8)),
      store_(secret),
      holders_(options.holders_max) {}

Status PrefixIndex::check_holder(uint32_t holder) const {
    if (holder < options_.holders_max) return success();
    return Error{Code::kInvalidArgument, "holder " + std::to_string(holder) + " is beyond the index's " +
                                             std::to_string(options_.holders_max)};
}

// A holder that is being forgotten is not made present again: its events are still taken by name, and
// answered as unknown.
HolderBlocks& PrefixIndex::obtain(uint32_t holder) {
    if (!holders_[holder]) holders_[holder] = std::make_unique<HolderBlocks>(secret_);
    if (!holders_[holder]->leaving) present_.set(holder);
    return *holders_[holder];
}

// ---- events

Result<Ingested> PrefixIndex::ingest(uint32_t holder, std::span<const uint8_t> payload, bool of_pool) {
    if (Status known = check_holder(holder); !known) return known.error();
    Result<KvEventBatch> batch = decode_kv_events(payload);
    if (!batch) {
        Change change(lock_);
        ++counts_.refused_total;
        return batch.error();
    }
    Ingested sum;
    sum.sent_s = batch->sent_s;
    for (const KvEvent& event : batch->events) {
        if (event.kind == KvEvent::Kind::kStored && of_pool) take_digests(holder, event, sum);
        if (event.kind == KvEvent::Kind::kStored && !of_pool) take_stored(holder, event, sum);
        if (event.kind == KvEvent::Kind::kRemoved) take_removed(holder, event, of_pool, sum);
        if (event.kind == KvEvent::Kind::kCleared) {
            // The cleared holder begins anew with the next event of the same batch.
            if (Status forgotten = forget(holder); !forgotten) return forgotten.error();
            ++sum.cleared;
        }
    }
    Change change(lock_);
    counts_.stored_total += sum.stored;
    counts_.removed_total += sum.removed;
    counts_.cleared_total += sum.cleared;
    counts_.unknown_total += sum.unknown;
    counts_.skipped_total += sum.skipped;
    return sum;
}

// An engine with several KV cache groups tells of each block in each of them. One group that sees the whole
// prefix speaks for all: the first that stores.
bool PrefixIndex::follows_group(uint32_t holder, const KvEvent& event) {
    if (event.part_of_attention) return false;
    if (!event.group) return true;
    Change change(lock_);
    int64_t& group = obtain(holder).group;
    if (group == HolderBlocks::kNoGroup && event.kind == KvEvent::Kind::kStored && !event.tokens.empty()) {
        group = *event.group;
    }
    return group == HolderBlocks::kNoGroup || group == *event.group;
}

// How many of an event's blocks can be named by their tokens.
uint32_t PrefixIndex::placeable(const KvEvent& event) const {
    size_t blocks = event.hashes.size();
    bool unclear_lora = event.has_lora_id && !event.lora_name;  // which adapter a number is, is not said
    if (event.block_tokens != options_.block_tokens || unclear_lora) return 0;
    // Blocks that an engine left out: which of the tokens are whose is not said.
    if (!event.odd_tokens && event.tokens.size() != blocks * options_.block_tokens) return 0;
    blocks = std::min(blocks, event.tokens.size() / options_.block_tokens);
    for (size_t i = 0; i < blocks; ++i) {
        if (!plain(event, i)) return static_cast<uint32_t>(i);
    }
    return static_cast<uint32_t>(blocks);
}

// What stands before the event's first block. False: not known.
bool PrefixIndex::start_of_chain(uint32_t holder, const KvEvent& event, std::vector<uint8_t>& previous) {
    if (!event.parent) {
        std::optional<std::string_view> salt;
        if (!salt_of(event, salt)) return false;
        // Plain chains begin with nothing before them, so that their digests are the same at every engine
        // and in the pool.
        if (!event.lora_name && !salt) return true;
        Digest seed = chain_seed(event.lora_name, salt);
        previous.assign(seed.begin(), seed.end());
        return true;
    }
    Change change(lock_);
    HolderBlocks& own = obtain(holder);
    uint32_t row = own.find(event.parent->value);
    // The parent was evicted here, or never told (the stream began later): the chain cannot be placed, and
    // its blocks count as unknown.
    if (row == kNoRow) return false;
    uint32_t block = own.block(row);
    const Digest& digest = store_.digest(block);
    previous.assign(digest.begin(), digest.end());
    HoldBits bits = store_.bits(block, holder);
    // The parent of a new block is in use, whether or not a question came for it.
    if (bits != 0) store_.set_bits(block, holder, bits | kUsed);
    return true;
}

// Order of checks: what is not of this index is skipped; what is, but has no known place, is unknown. Both
// are counted, since both mean that the index knows less than the engine.
void PrefixIndex::take_stored(uint32_t holder, const KvEvent& event, Ingested& sum) {
    auto told = static_cast<uint32_t>(event.hashes.size());
    if (event.remote || !follows_group(holder, event)) {
        sum.skipped += told;
        return;
    }
    if (event.tokens.empty() && !event.odd_tokens) return take_more_of_known(holder, event, sum);
    // A prefix of the event's blocks: behind one that cannot be named none can, since each digest covers
    // all before it.
    uint32_t blocks = placeable(event);
    sum.skipped += told - blocks;
    if (blocks == 0) return;
    std::vector<uint8_t> previous;
    if (!start_of_chain(holder, event, previous)) {
        sum.unknown += blocks;
        return;
    }
    std::vector<Digest> digests(blocks);
    block_digests(std::span(event.tokens).first(size_t{blocks} * options_.block_tokens),
                  options_.block_tokens, previous, digests.front().data());
    for (uint32_t i = 0; i < blocks;) {
        Change change(lock_);
        for (uint32_t end = std::min(blocks, i + kPieceMax); i < end; ++i) {
            const uint8_t* digest = digests[i].data();
            bool taken = insert(holder, event.hashes[i].value, digest, digest + kKeyBytes, event.tier);
            ++(taken ? sum.stored : sum.unknown);
        }
    }
}

// Offloading tells of blocks in a further tier by their names alone.
void PrefixIndex::take_more_of_known(uint32_t holder, const KvEvent& event, Ingested& sum) {
    for (size_t i = 0; i < event.hashes.size();) {
        Change change(lock_);
        HolderBlocks& own = obtain(holder);
        for (size_t end = std::min(event.hashes.size(), i + kPieceMax); i < end; ++i) {
            uint32_t row = own.find(event.hashes[i].value);
            if (row == kNoRow || own.leaving) {
                ++sum.unknown;
                continue;
            }
            uint32_t block = own.block(row);
            HoldBits bits = static_cast<HoldBits>(store_.bits(block, holder) | bit_of(event.tier) | kUsed);
            store_.set_bits(block, holder, bits);
            ++sum.stored;
        }
    }
}

void PrefixIndex::take_digests(uint32_t holder, const KvEvent& event, Ingested& sum) {
    for (size_t i = 0; i < event.hashes.size();) {
        Change change(lock_);
        obtain(holder).of_pool = true;
        // Any engine may fetch from the pool's nodes, so that what several of them hold together counts
        // (match).
        pool_.set(holder);
        for (size_t end = std::min(event.hashes.size(), i + kPieceMax); i < end; ++i) {
            std::string_view digest = event.hashes[i].bytes;
            bool taken =
                digest.size() == sizeof(Digest) && insert(holder, name_of(bytes_of(digest)), bytes_of(digest),
                                                          bytes_of(digest) + kKeyBytes, event.tier);
            ++(taken ? sum.stored : sum.unknown);
        }
    }
}

void PrefixIndex::take_removed(uint32_t holder, const KvEvent& event, bool of_pool, Ingested& sum) {
    if (event.remote || !follows_group(holder, event)) {
        sum.skipped += static_cast<uint32_t>(event.hashes.size());
        return;
    }
    for (size_t i = 0; i < event.hashes.size();) {
        Change change(lock_);
        for (size_t end = std::min(event.hashes.size(), i + kPieceMax); i < end; ++i) {
            const EventHash& hash = event.hashes[i];
            bool named = !of_pool || hash.bytes.size() == sizeof(Digest);
            uint64_t name = of_pool && named ? name_of(bytes_of(hash.bytes)) : hash.value;
            ++(named && remove(holder, name, event.tier) ? sum.removed : sum.unknown);
        }
    }
}

Status PrefixIndex::apply(uint32_t holder, KvTier tier, std::span<const BlockKey> stored,
                          std::span<const BlockKey> removed) {
    if (Status known = check_holder(holder); !known) return known;
    while (!stored.empty() || !removed.empty()) {
        Change change(lock_);
        obtain(holder).of_pool = true;
        pool_.set(holder);
        size_t in = std::min<size_t>(stored.size(), kPieceMax),
               out = std::min<size_t>(removed.size(), kPieceMax);
        for (const BlockKey& key : stored.first(in)) {
            ++(insert(holder, name_of(key.data()), key.data(), nullptr, tier) ? counts_.stored_total
                                                                              : counts_.unknown_total);
        }
        for (const BlockKey& key : removed.first(out)) {
            ++(remove(holder, name_of(key.data()), tier) ? counts_.removed_total : counts_.unknown_total);
        }
        stored = stored.subspan(in);
        removed = removed.subspan(out);
    }
    return success();
}

// ---- entries

bool PrefixIndex::insert(uint32_t holder, uint64_t name, const uint8_t* key, const uint8_t* rest,
                         KvTier tier) {
    HolderBlocks& own = obtain(holder);
    if (own.leaving) return false;
    uint32_t block = store_.obtain(key, rest);
    uint32_t row = own.find(name);
    if (row != kNoRow && own.block(row) != block) {  // one name for two blocks: the newer counts
        drop_entry(holder, row);
        row = kNoRow;
    }
    if (row == kNoRow) {
        // The count of references has 16 bits; a block with more entries than that is left out.
        if (!store_.add_ref(block)) return false;
        // After add_ref(), so that the block itself is not the one to go.
        if (entries_ >= options_.blocks_max) make_room();
        row = own.insert(name, block);
        ++entries_;
    }
    if (tier == KvTier::kDevice) {
        own.add_copy(row);
        confirm(holder, block);
    }
    HoldBits bits = store_.bits(block, holder);
    store_.set_bits(block, holder, static_cast<HoldBits>(bits | bit_of(tier) | kUsed));
    return true;
}

bool PrefixIndex::remove(uint32_t holder, uint64_t name, KvTier tier) {
    HolderBlocks& own = obtain(holder);
    uint32_t row = own.find(name);
    if (row == kNoRow) return false;
    uint32_t block = own.block(row);
    HoldBits bits = store_.bits(block, holder);
    // The engine holds another copy of the same block.
    if (tier == KvTier::kDevice && !own.drop_copy(row)) return true;
    bits = static_cast<HoldBits>(bits & ~bit_of(tier));
    if ((bits & kTierBits) == 0) {
        drop_entry(holder, row);
    } else {
        store_.set_bits(block, holder, bits);
    }
    return true;
}

// The expected bit survives: a request is still on its way there and will bring the block back.
void PrefixIndex::drop_entry(uint32_t holder, uint32_t row) {
    HolderBlocks& own = *holders_[holder];
    uint32_t block = own.block(row);
    bool expected = (store_.bits(block, holder) & kExpected) != 0;
    store_.set_bits(block, holder, expected ? kExpected : 0);
    store_.drop_ref(block);
    store_.release_unused(block);
    own.erase(row);
    --entries_;
}

uint32_t PrefixIndex::largest_holder() const {
    uint32_t largest = 0, size = 0;
    for (uint32_t holder = 0; holder < options_.holders_max; ++holder) {
        if (holders_[holder] && holders_[holder]->size() > size) {
            largest = holder;
            size = holders_[holder]->size();
        }
    }
    return largest;
}

// The clock (second chance): an entry that was used since the hand last passed stays for another round.
// From the largest holder, so that an engine with a large cache does not drive out what is known of the
// small ones.
void PrefixIndex::make_room() {
    uint32_t holder = largest_holder();
    HolderBlocks& own = *holders_[holder];
    for (uint32_t n = 0; n < kEvictedAtOnce && own.size() > 0; ++n) {
        uint32_t row = own.turn();
        while (true) {
            HoldBits bits = store_.bits(own.block(row), holder);
            if ((bits & kUsed) == 0) break;
            store_.set_bits(own.block(row), holder, static_cast<HoldBits>(bits & ~kUsed));
            row = own.turn();
        }
        drop_entry(holder, row);
        ++counts_.evicted_total;
    }
}

// ---- what was sent

Status PrefixIndex::dispatched(uint32_t holder, std::span<const BlockKey> keys, double now_s, double ttl_s) {
    if (Status known = check_holder(holder); !known) return known;
    Change change(lock_);
    HolderBlocks& own = obtain(holder);
    if (own.leaving) return success();
    Dispatch dispatch{now_s + ttl_s, holder, {}};
    for (const BlockKey& key : keys) {
        uint32_t block = store_.obtain(key.data(), nullptr);
        HoldBits bits = store_.bits(block, holder);
        // It is there already, nothing to expect.
        if ((bits & kOnDevice) != 0) {
            store_.set_bits(block, holder, bits | kUsed);
            continue;
        }
        bool more = (bits & kExpected) == 0;
        // Two bounds: distinct expected blocks, and blocks in all dispatches, since many requests may name
        // the same block.
        if ((more && expected_ == expected_max_) || dispatches_blocks_ == 4ull * expected_max_) {
            ++counts_.expected_dropped_total;
            store_.release_unused(block);
            continue;
        }
        double& until_s = own.expected[block];
        until_s = std::max(until_s, dispatch.until_s);
        if (more) {
            ++expected_;
            store_.set_bits(block, holder, bits | kExpected);
        }
        dispatch.blocks.push_back(block);
        ++dispatches_blocks_;
    }
    if (!dispatch.blocks.empty()) dispatches_.push(std::move(dispatch));
    return success();
}

void PrefixIndex::drop_expected(uint32_t holder, uint32_t block) {
    holders_[holder]->expected.erase(block);
    --expected_;
    HoldBits left = static_cast<HoldBits>(store_.bits(block, holder) & ~kExpected);
    store_.set_bits(block, holder, (left & kTierBits) == 0 ? HoldBits{0} : left);
}

// An event says that it is there.
void PrefixIndex::confirm(uint32_t holder, uint32_t block) {
    if ((store_.bits(block, holder) & kExpected) != 0) drop_expected(holder, block);
}

// A dispatch is one entry of the queue, but its blocks may have been renewed by later ones: only those
// whose own time has passed go.
void PrefixIndex::expire(double now_s) {
    while (true) {
        Change change(lock_);
        if (dispatches_.empty() || dispatches_.top().until_s > now_s) return;
        Dispatch dispatch = dispatches_.top();
        dispatches_.pop();
        dispatches_blocks_ -= dispatch.blocks.size();
        if (!holders_[dispatch.holder]) continue;  // forgotten meanwhile
        HolderBlocks& own = *holders_[dispatch.holder];
        for (uint32_t block : dispatch.blocks) {
            auto at = own.expected.find(block);
            if (at == own.expected.end() || at->second > now_s) continue;
            drop_expected(dispatch.holder, block);
            store_.release_unused(block);
        }
    }
}

// ---- the end of a holder

Status PrefixIndex::forget(uint32_t holder) {
    if (Status known = check_holder(holder); !known) return known;
    uint32_t row = 0;
    while (true) {
        Change change(lock_);
        if (!holders_[holder]) return success();
        HolderBlocks& own = *holders_[holder];
        // In pieces: a holder with a million blocks takes many. Between two pieces events and dispatches
        // for it are refused by this mark.
        own.leaving = true;  // no match, no insert
        present_.reset(holder);
        pool_.reset(holder);
        uint32_t budget = kPieceMax;
        for (; budget > 0 && row < own.rows_end(); ++row) {
            if (!own.live(row)) continue;
            drop_entry(holder, row);
            --budget;
        }
        for (; budget > 0 && !own.expected.empty(); --budget) {
            uint32_t block = own.expected.begin()->first;
            drop_expected(holder, block);
            store_.release_unused(block);
        }
        if (budget == 0) continue;
        if (own.size() == 0) {
            holders_[holder].reset();
            return success();
        }
        row = 0;  // another thread ended this, and it began again
    }
}

// ---- questions

// Cost: a look-up for each block up to the end of the longest match, about as long as one miss in the
// cache, since the next ones are prefetched. All holders are followed at a time, 64 to a word.
PrefixMatch PrefixIndex::match(std::span<const BlockKey> keys) const {
    PrefixMatch out;
    std::vector<uint64_t> hashes(keys.size());
    for (size_t i = 0; i < keys.size(); ++i) hashes[i] = BlockStore::hash(keys[i].data(), secret_);
    AsQuestion question(lock_);

    // The holders that had all blocks so far, 64 to a word; and the words in which a holder still counts.
    std::array<HoldersByTier, kHolderWords> alive, held;
    std::array<uint32_t, kHolderWords> words;
    uint32_t left = 0, holders = 0;
    bool pool_any = false;
    for (uint32_t w = 0; w * 64 < options_.holders_max; ++w) {
        if (present_.words[w] == 0) continue;
        alive[w].fill(present_.words[w]);
        words[left++] = w;
        holders = w * 64 + static_cast<uint32_t>(std::bit_width(present_.words[w]));
        pool_any = pool_any || pool_.words[w] != 0;
    }
    bool pool_host = pool_any;
    for (auto& row : out.by_tier) row.assign(holders, 0);
    // The holders in `lost` have matched `blocks` and no more.
    auto end = [&](size_t tier, uint32_t word, uint64_t lost, uint32_t blocks) {
        for (; lost != 0; lost &= lost - 1) {
            out.by_tier[tier][word * 64 + static_cast<uint32_t>(std::countr_zero(lost))] = blocks;
        }
    };

    for (size_t i = 0; i < std::min(2 * kAhead, keys.size()); ++i) store_.prefetch_slot(hashes[i]);
    for (size_t i = 0; i < std::min(kAhead, keys.size()); ++i) store_.prefetch_block(hashes[i]);
    uint32_t i = 0;
    for (; i < keys.size() && left > 0; ++i) {
        if (i + 2 * kAhead < keys.size()) store_.prefetch_slot(hashes[i + 2 * kAhead]);
        if (i + kAhead < keys.size()) store_.prefetch_block(hashes[i + kAhead]);
        uint32_t block = store_.find(keys[i].data(), hashes[i]);
        if (block == kNoRow) break;
        std::span<const uint32_t> asked(words.data(), left);
        store_.holders(block, asked, held.data());
        uint64_t in_host = 0, in_pool = 0;
        for (uint32_t w : asked) {
            for (size_t tier = 0; tier < kKvTiers; ++tier) {
                uint64_t lost = alive[w][tier] & ~held[w][tier];
                // Those that do not have the first block stay at the 0 that assign() wrote.
                if (lost != 0 && i != 0) end(tier, w, lost, i);
                alive[w][tier] &= held[w][tier];
            }
            in_host |= held[w][1] & pool_.words[w];
            in_pool |= held[w][2] & pool_.words[w];
        }
        pool_host = pool_host && in_host != 0;
        pool_any = pool_any && in_pool != 0;
        if (pool_host) out.pool_host = i + 1;
        if (pool_any) out.pool_any = i + 1;
        // The nodes of the pool together may reach further than any one holder.
        uint32_t kept = 0;
        for (uint32_t w : asked) {
            if (alive[w][2] != 0 || (pool_any && pool_.words[w] != 0)) words[kept++] = w;
        }
        left = kept;
    }
    for (uint32_t w : std::span(words.data(), left)) {
        for (size_t tier = 0; tier < kKvTiers; ++tier) end(tier, w, alive[w][tier], i);
    }
    return out;
}

PrefixIndexStats PrefixIndex::stats() const {
    Change change(lock_);
    PrefixIndexStats out = counts_;
    out.blocks = store_.blocks();
    out.entries = entries_;
    out.entries_max = options_.blocks_max;
    out.expected = expected_;
    out.expected_max = expected_max_;
    out.memory_bytes = store_.memory_bytes();
    for (const auto& own : holders_) {
        if (!own) continue;
        ++out.holders;
        out.memory_bytes += own->memory_bytes();
    }
    return out;
}

uint32_t PrefixIndex::entries(uint32_t holder) const {
    Change change(lock_);
    return holder < holders_.size() && holders_[holder] ? holders_[holder]->size() : 0;
}

// Recounts entries, references and expected blocks from the rows, O(n) under the lock: for tests.
bool PrefixIndex::check_integrity() const {
    Change change(lock_);
    if (!store_.check_integrity()) return false;
    uint64_t entries = 0, expected = 0;
    std::vector<uint32_t> refs(store_.rows_end());
    for (uint32_t h = 0; h < options_.holders_max; ++h) {
        if (!holders_[h]) {
            if (present_.test(h) || pool_.test(h)) return false;
            continue;
        }
        const HolderBlocks& own = *holders_[h];
        if (!own.check_integrity() || present_.test(h) == own.leaving) return false;
        entries += own.size();
        expected += own.expected.size();
        for (uint32_t row = 0; row < own.rows_end(); ++row) {
            if (own.live(row)) ++refs[own.block(row)];
        }
        for (const auto& [block, until_s] : own.expected) {
            if ((store_.bits(block, h) & kExpected) == 0) return false;
        }
    }
    for (uint32_t block = 0; block < refs.size(); ++block) {
        if (refs[block] != (store_.in_use(block) ? store_.refs(block) : 0)) return false;
        if (!store_.in_use(block)) continue;
        std::vector<uint32_t> holders;
        store_.each_holder(block, [&holders](uint32_t h, HoldBits) { holders.push_back(h); });
        for (uint32_t h : holders) {
            if (h >= holders_.size() || !holders_[h]) return false;
        }
    }
    return entries == entries_ && expected == expected_ && entries_ <= options_.blocks_max &&
           expected_ <= expected_max_;
}

}  // namespace moonpool
