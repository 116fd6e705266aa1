#include <doctest/doctest.h>

#include <atomic>
#include <map>
#include <optional>
#include <set>
#include <thread>

#include "../random.hpp"
#include "base/digest.hpp"
#include "conductor/prefix_index.hpp"
#include "pack.hpp"

namespace moonpool {
namespace {

using testing::all_cleared;
using testing::batch_of;
using testing::Pack;
using testing::removed;
using testing::Stored;

constexpr uint32_t kBlock = 4;

std::unique_ptr<PrefixIndex> make(uint32_t blocks_max = 10000, uint32_t holders_max = kHoldersMax) {
    auto index = PrefixIndex::create({kBlock, blocks_max, holders_max});
    REQUIRE(index);
    return std::move(*index);
}

std::vector<uint64_t> tokens_of(size_t blocks, uint64_t first = 0) {
    std::vector<uint64_t> tokens;
    for (size_t i = 0; i < blocks * kBlock; ++i) tokens.push_back(first + i);
    return tokens;
}

std::vector<BlockKey> keys_of(std::span<const uint64_t> tokens, std::span<const uint8_t> seed = {}) {
    std::vector<uint32_t> ids(tokens.begin(), tokens.end());
    std::vector<Digest> digests(ids.size() / kBlock);
    if (digests.empty()) return {};
    block_digests(ids, kBlock, seed, digests.front().data());
    std::vector<BlockKey> keys(digests.size());
    for (size_t i = 0; i < keys.size(); ++i) std::memcpy(keys[i].data(), digests[i].data(), kKeyBytes);
    return keys;
}

std::vector<uint64_t> names(size_t n, uint64_t first = 1000) {
    std::vector<uint64_t> out;
    for (size_t i = 0; i < n; ++i) out.push_back(first + i);
    return out;
}

Ingested take(PrefixIndex& index, uint32_t holder, const std::vector<std::string>& events) {
    Result<Ingested> result = index.ingest(holder, batch_of(events).span());
    REQUIRE(result);
    REQUIRE(index.check_integrity());
    return *result;
}

uint32_t match(const PrefixIndex& index, uint32_t holder, std::span<const BlockKey> keys, size_t tier = 2) {
    PrefixMatch m = index.match(keys);
    return holder < m.by_tier[tier].size() ? m.by_tier[tier][holder] : 0;
}

TEST_CASE("prefix index: blocks come, chains go on behind their parent, a hole ends a match") {
    auto index = make();
    std::vector<uint64_t> tokens = tokens_of(6);
    std::vector<BlockKey> keys = keys_of(tokens);
    std::vector<uint64_t> front(tokens.begin(), tokens.begin() + 4 * kBlock);
    std::vector<uint64_t> back(tokens.begin() + 4 * kBlock, tokens.end());
    CHECK(take(*index, 3, {Stored{names(4), false, 0, front}.packed()}).stored == 4);
    CHECK(match(*index, 3, keys) == 4);
    CHECK(take(*index, 3, {Stored{names(2, 1004), true, 1003, back}.packed()}).stored == 2);
    CHECK(match(*index, 3, keys) == 6);
    CHECK(match(*index, 2, keys) == 0);
    CHECK(index->match(keys).by_tier[0] == std::vector<uint32_t>{0, 0, 0, 6});
    CHECK(take(*index, 3, {removed({1002})}).removed == 1);
    CHECK(match(*index, 3, keys) == 2);
    Ingested orphan = take(*index, 3, {Stored{names(2, 2000), true, 1002, back}.packed()});
    CHECK(orphan.unknown == 2);
    CHECK(take(*index, 3, {removed({1002, 77})}).unknown == 2);
    CHECK(take(*index, 3, {all_cleared()}).cleared == 1);
    CHECK(match(*index, 3, keys) == 0);
    CHECK(index->stats().blocks == 0);
}

TEST_CASE("prefix index: the salt and the LoRA seed a chain, as in docs/keys.md") {
    auto index = make();
    std::vector<uint64_t> tokens = tokens_of(2);
    Digest both = chain_seed("sql-lora", "tenant-7"), salt = chain_seed({}, "tenant-7");
    auto event = [&](bool extras, bool sglang) {
        Pack p;
        p.map(extras ? 7 : sglang ? 8 : 6).text("type").text("BlockStored").text("block_hashes");
        p.array(2)
            .integer(1)
            .integer(2)
            .text("token_ids")
            .integers(tokens)
            .text("block_size")
            .integer(kBlock);
        p.text("lora_id").integer(1).text("lora_name").text("sql-lora");
        if (extras) {
            p.text("extra_keys")
                .array(2)
                .array(2)
                .text("sql-lora")
                .text("tenant-7")
                .array(1)
                .text("sql-lora");
        }
        if (sglang) p.text("cache_salt").text("tenant-7").text("parent_block_hash").nil();
        return p.data;
    };
    CHECK(take(*index, 0, {event(true, false)}).stored == 2);
    CHECK(take(*index, 1, {event(false, true)}).stored == 2);
    CHECK(take(*index, 2, {event(false, false)}).stored == 2);
    PrefixMatch m = index->match(keys_of(tokens, both));
    CHECK(m.by_tier[0] == std::vector<uint32_t>{2, 2, 0});
    CHECK(index->match(keys_of(tokens, salt)).by_tier[0] == std::vector<uint32_t>{0, 0, 0});
    CHECK(index->match(keys_of(tokens)).by_tier[0] == std::vector<uint32_t>{0, 0, 0});
    CHECK(index->match(keys_of(tokens, chain_seed("sql-lora", {}))).by_tier[0] ==
          std::vector<uint32_t>{0, 0, 2});
}

TEST_CASE("prefix index: what cannot be placed for certain is left out") {
    auto index = make();
    auto event = [&](auto fields) {
        Pack p;
        fields(p);
        return p.data;
    };
    auto plain = [&](Pack& p, size_t fields, uint64_t block) {
        p.map(fields).text("type").text("BlockStored").text("block_hashes").integers(names(3));
        p.text("token_ids").integers(tokens_of(3)).text("block_size").integer(block);
    };
    SUBCASE("an image from the second block on") {
        Ingested in = take(*index, 0, {event([&](Pack& p) {
            plain(p, 5, kBlock);
            p.text("extra_keys").array(3).nil().array(1).array(2).text("image").integer(0).nil();
        })});
        CHECK(in.stored == 1);
        CHECK(in.skipped == 2);
        CHECK(match(*index, 0, keys_of(tokens_of(3))) == 1);
    }
    SUBCASE("another block size") {
        CHECK(take(*index, 0, {event([&](Pack& p) { plain(p, 4, 2 * kBlock); })}).skipped == 3);
    }
    SUBCASE("a LoRA that has a number only") {
        CHECK(take(*index, 0, {event([&](Pack& p) {
                  plain(p, 5, kBlock);
                  p.text("lora_id").integer(1);
              })}).skipped == 3);
    }
    SUBCASE("fewer tokens than blocks") {
        CHECK(take(*index, 0, {Stored{names(3), false, 0, tokens_of(2)}.packed()}).skipped == 3);
    }
    SUBCASE("a group that sees a window only, and a second group") {
        auto grouped = [&](uint64_t group, const char* kind) {
            return event([&](Pack& p) {
                plain(p, 6, kBlock);
                p.text("group_idx").integer(group).text("kv_cache_spec_kind").text(kind);
            });
        };
        CHECK(take(*index, 0, {grouped(0, "sliding_window")}).skipped == 3);
        CHECK(take(*index, 0, {grouped(1, "full_attention")}).stored == 3);
        CHECK(take(*index, 0, {grouped(2, "full_attention")}).skipped == 3);
        Pack gone;
        gone.map(3).text("type").text("BlockRemoved").text("block_hashes").integers(names(3));
        gone.text("group_idx").integer(0);
        CHECK(take(*index, 0, {gone.data}).skipped == 3);
        CHECK(match(*index, 0, keys_of(tokens_of(3))) == 3);
    }
    CHECK(index->stats().skipped_total > 0);
}

TEST_CASE("prefix index: tiers, copies, and offloading that tells names only") {
    auto index = make();
    std::vector<BlockKey> keys = keys_of(tokens_of(3));
    std::string stored = Stored{names(3), false, 0, tokens_of(3)}.packed();
    take(*index, 0, {stored, stored});  // two copies on the device
    take(*index, 0, {removed(names(3))});
    CHECK(match(*index, 0, keys, 0) == 3);
    Stored named{{1000, 1001, 5}, false, 0, {}, 0, "CPU"};
    Ingested in = take(*index, 0, {named.packed()});
    CHECK(in.stored == 2);
    CHECK(in.unknown == 1);
    take(*index, 0, {removed(names(3))});
    CHECK(match(*index, 0, keys, 0) == 0);
    CHECK(match(*index, 0, keys, 1) == 2);
    CHECK(take(*index, 0, {removed({1000}, "CPU")}).removed == 1);
    CHECK(match(*index, 0, keys, 2) == 0);
}

TEST_CASE("prefix index: the nodes of the pool reach together what none has alone") {
    auto index = make();
    std::vector<BlockKey> keys = keys_of(tokens_of(5));
    std::span all(keys);
    REQUIRE(index->apply(10, KvTier::kHost, all.first(2), {}));
    REQUIRE(index->apply(11, KvTier::kHost, all.subspan(2, 1), {}));
    REQUIRE(index->apply(11, KvTier::kDisk, all.subspan(2, 2), {}));
    PrefixMatch m = index->match(keys);
    CHECK(m.by_tier[2][10] == 2);
    CHECK(m.by_tier[2][11] == 0);
    CHECK(m.pool_host == 3);
    CHECK(m.pool_any == 4);
    REQUIRE(index->apply(11, KvTier::kHost, {}, all.subspan(2, 1)));
    CHECK(index->match(keys).pool_host == 2);
    CHECK(index->match(keys).pool_any == 4);
    CHECK(index->check_integrity());

    std::vector<uint32_t> ids(5 * kBlock);
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<uint32_t>(i);
    std::vector<Digest> digests(5);
    block_digests(ids, kBlock, {}, digests.front().data());
    Pack p;
    p.map(3).text("type").text("BlockStored").text("block_hashes").array(1);
    p.bytes({reinterpret_cast<const char*>(digests[4].data()), 32}).text("medium").text("CPU");
    Result<Ingested> in = index->ingest(12, batch_of({p.data}).span(), true);
    REQUIRE(in);
    CHECK(in->stored == 1);
    CHECK(index->match(keys).pool_any == 5);
}

TEST_CASE("prefix index: what was dispatched counts until it is confirmed or its time is over") {
    auto index = make();
    std::vector<BlockKey> keys = keys_of(tokens_of(4));
    REQUIRE(index->dispatched(1, keys, 10.0, 5.0));
    CHECK(index->check_integrity());
    CHECK(match(*index, 1, keys, 0) == 4);
    take(*index, 1, {Stored{names(2), false, 0, tokens_of(2)}.packed()});
    CHECK(index->stats().expected == 2);
    REQUIRE(index->dispatched(1, std::span(keys).first(3), 14.0, 5.0));  // the third is wanted for longer
    index->expire(14.9);
    CHECK(match(*index, 1, keys) == 4);
    index->expire(15.0);
    CHECK(match(*index, 1, keys) == 3);
    index->expire(19.0);
    CHECK(match(*index, 1, keys) == 2);
    CHECK(index->stats().expected == 0);
    CHECK(index->check_integrity());

    REQUIRE(index->dispatched(1, keys, 20.0, 5.0));
    take(*index, 1, {removed(names(2))});
    CHECK(match(*index, 1, keys) == 0);  // those it had are gone, and nobody sent them again
    REQUIRE(index->forget(1));
    index->expire(100.0);
    CHECK(index->stats().blocks == 0);
    CHECK(index->check_integrity());
}

TEST_CASE("prefix index: full, the largest holder gives up what it has not used for longest") {
    auto index = make(100);
    take(*index, 0, {Stored{names(20), false, 0, tokens_of(20)}.packed()});
    for (uint64_t chain = 0; chain < 30; ++chain) {
        uint64_t first = 10000 * (chain + 1);
        take(*index, 1, {Stored{names(10, first), false, 0, tokens_of(10, first)}.packed()});
        REQUIRE(index->stats().entries <= 100);
    }
    CHECK(match(*index, 0, keys_of(tokens_of(20))) == 20);
    CHECK(match(*index, 1, keys_of(tokens_of(10, 300000))) == 10);
    CHECK(match(*index, 1, keys_of(tokens_of(10, 10000))) == 0);
    PrefixIndexStats stats = index->stats();
    CHECK(stats.evicted_total == 320 - stats.entries);
    CHECK(stats.entries_max == 100);
}

TEST_CASE("prefix index: one name for two blocks, and two names for one") {
    auto index = make();
    take(*index, 0, {Stored{{7}, false, 0, tokens_of(1)}.packed()});
    take(*index, 0, {Stored{{7}, false, 0, tokens_of(1, 500)}.packed()});
    CHECK(match(*index, 0, keys_of(tokens_of(1))) == 0);
    CHECK(match(*index, 0, keys_of(tokens_of(1, 500))) == 1);
    take(*index, 0, {Stored{{8}, false, 0, tokens_of(1, 500)}.packed()});
    take(*index, 0, {removed({7})});
    take(*index, 0, {removed({8})});
    CHECK(match(*index, 0, keys_of(tokens_of(1, 500))) == 0);
    CHECK(index->stats().entries == 0);
}

TEST_CASE("prefix index: malformed batches are refused whole, wrong holders and options too") {
    auto index = make(100, 4);
    std::string good = Stored{names(2), false, 0, tokens_of(2)}.packed();
    Result<Ingested> in = index->ingest(0, batch_of({good, "\xc1"}).span());
    REQUIRE_FALSE(in);
    CHECK(in.error().code == Code::kProtocol);
    CHECK(index->stats().refused_total == 1);
    CHECK(index->stats().entries == 0);
    CHECK(index->ingest(4, batch_of({good}).span()).error().code == Code::kInvalidArgument);
    CHECK_FALSE(index->dispatched(4, {}, 0, 0));
    CHECK_FALSE(PrefixIndex::create({0, 100, 4}));
    CHECK_FALSE(PrefixIndex::create({4, 0, 4}));
    CHECK_FALSE(PrefixIndex::create({4, 100, kHoldersMax + 1}));
}

// A slow index that knows everything.
struct Model {
    struct Entry {
        BlockKey key;
        std::array<bool, 3> tiers{};
        int copies = 0;
    };
    std::map<uint32_t, std::map<uint64_t, Entry>> entries;  // holder -> name ->
    std::map<uint32_t, std::map<BlockKey, double>> expected;

    bool holds(uint32_t holder, const BlockKey& key, size_t tier) const {
        if (auto at = expected.find(holder); at != expected.end() && at->second.contains(key)) return true;
        auto at = entries.find(holder);
        if (at == entries.end()) return false;
        for (auto& [name, e] : at->second) {
            if (e.key != key) continue;
            for (size_t t = 0; t <= tier; ++t) {
                if (e.tiers[t]) return true;
            }
        }
        return false;
    }
    uint32_t match(uint32_t holder, std::span<const BlockKey> keys, size_t tier) const {
        uint32_t n = 0;
        while (n < keys.size() && holds(holder, keys[n], tier)) ++n;
        return n;
    }
    void remove(uint32_t holder, uint64_t name, size_t tier) {
        auto at = entries[holder].find(name);
        if (at == entries[holder].end()) return;
        Entry& e = at->second;
        if (tier == 0 && --e.copies > 0) return;
        e.copies = std::max(e.copies, 0);
        e.tiers[tier] = false;
        if (!e.tiers[0] && !e.tiers[1] && !e.tiers[2]) entries[holder].erase(at);
    }
};

TEST_CASE("prefix index: random events against a slow model") {
    testing::Random random(31);
    auto index = make(1u << 16);
    Model model;
    constexpr uint32_t kHolders = 20;
    // Half of them far apart, half side by side.
    auto nth = [](uint32_t n) { return n % 2 == 0 ? n * 101 : 1900 + n; };
    constexpr const char* kMedia[] = {"GPU", "CPU", "DISK"};
    // A tree of prompts: each chain is a path of up to 8 blocks, each block one of three.
    auto path = [&] {
        std::vector<uint64_t> choices(random.between(1, 8));
        for (uint64_t& c : choices) c = random.below(3);
        return choices;
    };
    auto tokens = [](std::span<const uint64_t> choices) {
        std::vector<uint64_t> out;
        for (uint64_t c : choices) out.insert(out.end(), kBlock, c);
        return out;
    };
    auto name = [](std::span<const uint64_t> choices) {
        uint64_t n = 1;
        for (uint64_t c : choices) n = n * 4 + c + 1;
        return n;
    };
    double now_s = 0;
    for (int step = 0; step < 6000; ++step) {
        uint32_t holder = nth(static_cast<uint32_t>(random.below(kHolders)));
        std::vector<uint64_t> choices = path();
        std::span<const uint64_t> all(choices);
        std::vector<BlockKey> keys = keys_of(tokens(choices));
        size_t tier = random.one_in(3) ? random.between(1, 2) : 0;
        uint64_t what = random.below(100);
        if (what < 45) {  // store from a block on, with its parent when the model knows it
            size_t from = random.below(choices.size());
            Stored e{{},     from > 0,    from > 0 ? name(all.first(from)) : 0, tokens(all.subspan(from)),
                     kBlock, kMedia[tier]};
            for (size_t i = from; i < choices.size(); ++i) e.hashes.push_back(name(all.first(i + 1)));
            Ingested in = *index->ingest(holder, batch_of({e.packed()}).span());
            bool known = from == 0 || model.entries[holder].contains(e.parent);
            REQUIRE((known ? in.stored : in.unknown) == choices.size() - from);
            for (size_t i = from; known && i < choices.size(); ++i) {
                Model::Entry& m = model.entries[holder][name(all.first(i + 1))];
                m.key = keys[i];
                m.tiers[tier] = true;
                if (tier == 0) ++m.copies;
                if (tier == 0) model.expected[holder].erase(keys[i]);
            }
        } else if (what < 80) {
            std::vector<uint64_t> gone;
            for (size_t i = random.below(choices.size()); i < choices.size(); ++i) {
                gone.push_back(name(all.first(i + 1)));
                model.remove(holder, gone.back(), tier);
            }
            REQUIRE(index->ingest(holder, batch_of({removed(gone, kMedia[tier])}).span()));
        } else if (what < 92) {
            double ttl_s = static_cast<double>(random.between(1, 9));
            REQUIRE(index->dispatched(holder, keys, now_s, ttl_s));
            for (const BlockKey& key : keys) {
                bool there = false;
                for (auto& [n, e] : model.entries[holder]) there |= e.key == key && e.tiers[0];
                double& until_s = model.expected[holder][key];
                until_s = std::max(until_s, now_s + ttl_s);
                if (there) model.expected[holder].erase(key);
            }
        } else if (what < 97) {
            now_s += 1;
            index->expire(now_s);
            for (auto& [h, blocks] : model.expected) {
                std::erase_if(blocks, [&](const auto& row) { return row.second <= now_s; });
            }
        } else if (random.one_in(4)) {
            REQUIRE(index->forget(holder));
            model.entries.erase(holder);
            model.expected.erase(holder);
        }
        if (step % 50 == 0) REQUIRE(index->check_integrity());
        std::vector<BlockKey> asked = keys_of(tokens(path()));
        PrefixMatch m = index->match(asked);
        for (size_t t = 0; t < kKvTiers; ++t) {
            std::vector<uint32_t> expected(kHoldersMax), said = m.by_tier[t];
            for (uint32_t n = 0; n < kHolders; ++n) expected[nth(n)] = model.match(nth(n), asked, t);
            said.resize(kHoldersMax);
            REQUIRE(said == expected);
        }
    }
    size_t entries = 0;
    for (auto& [h, own] : model.entries) entries += own.size();
    CHECK(index->stats().entries == entries);
}

TEST_CASE("prefix index: events, questions and a holder's end at the same time") {
    auto index = make(3000);
    std::vector<BlockKey> keys = keys_of(tokens_of(8));
    std::atomic<bool> stop{false};
    std::atomic<uint64_t> questions{0};
    std::thread asking([&] {
        while (!stop) {
            PrefixMatch m = index->match(keys);
            for (uint32_t n : m.by_tier[2]) REQUIRE(n <= 8);
            ++questions;
        }
    });
    std::thread ending([&] {
        while (!stop) {
            REQUIRE(index->forget(1));
            index->expire(1e9);
        }
    });
    std::vector<std::thread> telling;
    for (uint32_t holder : {0u, 1u, 2u}) {
        telling.emplace_back([&, holder] {
            testing::Random random(40 + holder);
            for (int i = 0; i < 300; ++i) {
                uint64_t first = random.below(40) * 1000;
                Stored e{names(8, first), false, 0, tokens_of(8, first)};
                REQUIRE(index->ingest(holder, batch_of({e.packed()}).span()));
                if (random.one_in(2))
                    REQUIRE(index->ingest(holder, batch_of({removed(names(8, first))}).span()));
                REQUIRE(index->dispatched(holder, keys, 0, 1));
            }
        });
    }
    for (std::thread& t : telling) t.join();
    while (questions == 0) std::this_thread::yield();
    stop = true;
    asking.join();
    ending.join();
    CHECK(index->check_integrity());
}

}  // namespace
}  // namespace moonpool
