#include <doctest/doctest.h>

#include <cmath>
#include <string>

#include "../random.hpp"
#include "base/msgpack.hpp"
#include "conductor/kv_events.hpp"
#include "pack.hpp"

namespace moonpool {
namespace {

using testing::batch_of;
using testing::Pack;

TEST_CASE("kv events: a map with all fields, in any order, and unknown ones") {
    Pack p;
    p.map(14).text("group_idx").integer(2).text("medium").text("CPU_PINNED");
    p.text("lora_name").text("sql").text("lora_id").integer(7).text("cache_salt").text("s");
    p.text("type").text("BlockStored").text("block_size").integer(2);
    p.text("block_hashes").array(2).negative(-5).bytes("abcdefgh");
    p.text("parent_block_hash").integer(UINT64_MAX);
    p.text("token_ids").array(4).integer(1).integer(70000).array(2).integer(3).integer(4).integer(UINT32_MAX);
    p.text("extra_keys").array(2).nil().array(3).text("sql").array(2).text("image").integer(0).bytes("e");
    p.text("new").map(1).integer(1).array(1).raw(std::string("\xc7\x02\x05zz", 5));
    p.text("kv_cache_spec_kind").text("sliding_window").text("locality").text("REMOTE");
    Pack whole = batch_of({p.data}, 12.5);  // the events refer to it
    Result<KvEventBatch> batch = decode_kv_events(whole.span());
    REQUIRE(batch);
    CHECK(batch->sent_s == 12.5);
    REQUIRE(batch->events.size() == 1);
    const KvEvent& e = batch->events[0];
    CHECK(e.kind == KvEvent::Kind::kStored);
    CHECK(e.group == 2);
    CHECK(e.tier == KvTier::kHost);
    CHECK(e.lora_name == "sql");
    CHECK(e.has_lora_id);
    CHECK(e.cache_salt == "s");
    CHECK(e.block_tokens == 2);
    REQUIRE(e.hashes.size() == 2);
    CHECK(e.hashes[0].value == static_cast<uint64_t>(-5));
    CHECK(e.hashes[1].bytes == "abcdefgh");
    REQUIRE(e.parent);
    CHECK(e.parent->value == UINT64_MAX);
    CHECK(e.tokens == std::vector<uint32_t>{1, 70000, 3, UINT32_MAX});
    REQUIRE(e.extras.size() == 2);
    CHECK(e.extras[0].texts_count == 0);
    CHECK(e.extras[1].texts[0] == "sql");
    CHECK(e.extras[1].foreign);
    CHECK(e.part_of_attention);
    CHECK(e.remote);
}

TEST_CASE("kv events: the older array form, and kinds that are not known") {
    Pack stored, removed, cleared, other;
    stored.array(7).text("BlockStored").array(1).integer(9).nil().array(2).integer(5).integer(6);
    stored.integer(2).nil().text("DISK");
    removed.array(2).text("BlockRemoved").array(1).integer(9);
    cleared.array(1).text("AllBlocksCleared");
    other.array(3).text("BlockMoved").nil().map(0);
    Pack whole = batch_of({stored.data, removed.data, cleared.data, other.data});
    Result<KvEventBatch> batch = decode_kv_events(whole.span());
    REQUIRE(batch);
    REQUIRE(batch->events.size() == 4);
    CHECK(batch->events[0].tokens == std::vector<uint32_t>{5, 6});
    CHECK(batch->events[0].tier == KvTier::kDisk);
    CHECK_FALSE(batch->events[0].parent);
    CHECK(batch->events[1].kind == KvEvent::Kind::kRemoved);
    CHECK(batch->events[1].hashes.at(0).value == 9);
    CHECK(batch->events[2].kind == KvEvent::Kind::kCleared);
    CHECK(batch->events[3].kind == KvEvent::Kind::kOther);
}

TEST_CASE("kv events: ids that are no u32 end the tokens, they are not cut") {
    Pack p;
    p.map(2).text("type").text("BlockStored").text("token_ids").array(3).integer(1).negative(-1).integer(2);
    Pack whole = batch_of({p.data});
    Result<KvEventBatch> batch = decode_kv_events(whole.span());
    REQUIRE(batch);
    CHECK(batch->events[0].odd_tokens);
    CHECK(batch->events[0].tokens == std::vector<uint32_t>{1});
}

TEST_CASE("kv events: every integer of msgpack") {
    struct Row {
        std::string bytes;
        int64_t value;
    };
    using namespace std::string_literals;
    const Row rows[] = {{"\x7f"s, 127},
                        {"\xe0"s, -32},
                        {"\xcc\xff"s, 255},
                        {"\xcd\x01\x00"s, 256},
                        {"\xd0\x80"s, -128},
                        {"\xd1\xff\xfe"s, -2},
                        {"\xd2\x80\0\0\0"s, INT32_MIN},
                        {"\xd3\xff\xff\xff\xff\xff\xff\xff\xff"s, -1},
                        {"\xce\0\0\0\x05"s, 5},
                        {"\xcf\0\0\0\0\0\0\0\x06"s, 6}};
    for (const Row& row : rows) {
        MsgpackReader in({reinterpret_cast<const uint8_t*>(row.bytes.data()), row.bytes.size()});
        uint64_t bits = 0;
        bool negative = false;
        REQUIRE(in.integer(bits, negative));
        CHECK(static_cast<int64_t>(bits) == row.value);
        CHECK(negative == (row.value < 0));
        CHECK(in.done());
        for (size_t cut = 0; cut < row.bytes.size(); ++cut) {
            MsgpackReader shorter({reinterpret_cast<const uint8_t*>(row.bytes.data()), cut});
            CHECK_FALSE(shorter.integer(bits, negative));
        }
    }
}

TEST_CASE("kv events: what is no batch is refused") {
    Pack deep, huge, wrong, behind;
    deep.array(3).real(1).array(0);
    for (int i = 0; i < 100; ++i) deep.array(1);
    deep.nil();
    huge.array(2).real(1).raw(std::string("\xdd\xff\xff\xff\xff", 5));
    wrong.map(2).text("type").text("BlockStored").text("block_hashes").text("no list");
    behind = batch_of({});
    behind.nil();
    for (const Pack& p : {deep, huge, batch_of({wrong.data}), behind, Pack(), Pack().map(0)}) {
        Result<KvEventBatch> batch = decode_kv_events(p.span());
        REQUIRE_FALSE(batch);
        CHECK(batch.error().code == Code::kProtocol);
    }
    std::vector<uint8_t> long_one(kEventBytesMax + 1);
    CHECK(decode_kv_events(long_one).error().code == Code::kTooLarge);
}

TEST_CASE("kv events: what takes many times its bytes when it is read is refused before") {
    auto refused = [](const std::string& event) {
        Result<KvEventBatch> batch = decode_kv_events(batch_of({event, event}).span());
        REQUIRE_FALSE(batch);
        return batch.error().code;
    };
    const size_t many = kBatchBlocksMax + 1, half = kBatchBlocksMax / 2 + 1;
    for (size_t blocks : {many, half}) {
        Pack extras, hashes;
        extras.map(2).text("type").text("BlockStored").text("extra_keys").array(blocks);
        extras.raw(std::string(blocks, '\xc0'));
        hashes.map(2).text("type").text("BlockRemoved").text("block_hashes").array(blocks);
        hashes.raw(std::string(blocks, '\x01'));
        CHECK(refused(extras.data) == (blocks == many ? Code::kProtocol : Code::kTooLarge));
        CHECK(refused(hashes.data) == (blocks == many ? Code::kProtocol : Code::kTooLarge));
    }
    std::vector<std::string> events(kBatchEventsMax + 1, testing::all_cleared());
    CHECK(decode_kv_events(batch_of(events).span()).error().code == Code::kTooLarge);
    events.pop_back();
    CHECK(decode_kv_events(batch_of(events).span()));
}

TEST_CASE("kv events: cut and damaged batches never read beyond the end") {
    testing::Random random(21);
    testing::Stored stored{{1, 2, 1ull << 40}, true, 7, {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}, 4, "GPU"};
    std::string whole = batch_of({stored.packed(), testing::removed({1, 2}), testing::all_cleared()}).data;
    for (size_t cut = 0; cut < whole.size(); ++cut) {
        std::vector<uint8_t> piece(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(cut));
        CHECK_FALSE(decode_kv_events(piece));
    }
    for (int i = 0; i < 20000; ++i) {
        std::vector<uint8_t> damaged(whole.begin(), whole.end());
        for (uint64_t n = random.between(1, 4); n > 0; --n) {
            damaged[random.below(damaged.size())] = static_cast<uint8_t>(random.next());
        }
        (void)decode_kv_events(damaged);
    }
}

}  // namespace
}  // namespace moonpool
