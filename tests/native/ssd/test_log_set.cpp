// Directories of one node of which some are away at times, against a model. Seeds are printed.
#include <map>
#include <set>

#include "bench_log.hpp"
#include "ssd/log_set.hpp"

using namespace moonpool;
using namespace moonpool::ssd;
using namespace moonpool::ssd::testing;
using moonpool::testing::Random;

namespace {

std::vector<std::byte> value_of(uint64_t number) {
    std::vector<std::byte> bytes(3'000, static_cast<std::byte>(number));
    std::memcpy(bytes.data(), &number, sizeof(number));
    return bytes;
}

using Disks = std::vector<std::shared_ptr<FakeDisk>>;

// What SsdTier does with the directories, in small.
class Node {
   public:
    explicit Node(const Disks& disks, size_t orders = 1) : disks_(disks) {
        std::vector<Log*> logs;
        for (const auto& disk : disks) {
            LogOptions options = small_log(disk, 10);
            options.sequence = sequence_;
            Result<std::unique_ptr<Log>> log = Log::open(std::move(options));
            if (!log) {
                error_ = log.error().text;
                return;
            }
            logs_.push_back(std::move(*log));
            logs.push_back(logs_.back().get());
        }
        Result<std::unique_ptr<LogSet>> set = LogSet::open(std::move(logs), sequence_, orders);
        if (set) {
            set_ = std::move(*set);
        } else {
            error_ = set.error().text;
        }
    }

    LogSet& set() { return *set_; }
    Log& log(size_t i) { return *logs_[i]; }
    const std::string& error() const { return error_; }

    Outcome put(const std::string& name, uint64_t number, size_t at) {
        set_->note(hash_of(name));
        for (auto& log : logs_) log->remove(hash_of(name));
        return ssd::testing::put(*logs_[at % logs_.size()], name, value_of(number));
    }
    void remove(const std::string& name) {
        set_->note(hash_of(name));
        for (auto& log : logs_) log->remove(hash_of(name));
    }
    // -> the numbers of what is there, of each directory that has it.
    std::vector<uint64_t> find(const std::string& name) {
        std::vector<uint64_t> numbers;
        for (auto& log : logs_) {
            std::vector<std::byte> bytes;
            if (get(*log, name, bytes) != Outcome::kDone) continue;
            uint64_t number = 0;
            REQUIRE(bytes.size() > sizeof(number));
            std::memcpy(&number, bytes.data(), sizeof(number));
            CHECK(bytes == value_of(number));
            numbers.push_back(number);
        }
        return numbers;
    }
    bool has(const std::string& name) {
        return std::ranges::any_of(logs_, [&](auto& log) { return log->has(hash_of(name)); });
    }

    // All that was done is safe.
    bool settle() {
        Call saved;
        set_->save([done = saved.done()] { done(Outcome::kDone); });
        while (!saved.ready()) set_->on_tick(now_ms_ += 1000);
        saved.wait();
        bool all = true;
        for (auto& log : logs_) all &= sync(*log) == Outcome::kDone;
        return all;
    }
    void kill(const std::function<bool(uint64_t)>& stays = [](uint64_t) { return false; }) {
        for (const auto& disk : disks_) disk->kill();
        set_.reset();
        logs_.clear();
        for (const auto& disk : disks_) disk->crash(stays);
    }
    void crash(Random& random) {
        for (const auto& disk : disks_) disk->kill();
        set_.reset();
        logs_.clear();
        for (const auto& disk : disks_) disk->crash(random);
    }

   private:
    static Hash128 hash_of(const std::string& name) {
        std::string whole = kSpace + name;
        return xxh3_128(whole.data(), whole.size());
    }

    Disks disks_;
    std::shared_ptr<std::atomic<uint64_t>> sequence_ = std::make_shared<std::atomic<uint64_t>>(0);
    std::vector<std::unique_ptr<Log>> logs_;
    std::unique_ptr<LogSet> set_;
    std::string error_;
    uint64_t now_ms_ = 1'000'000;
};

Disks fake_disks(size_t n) {
    Disks disks;
    for (size_t i = 0; i < n; ++i) disks.push_back(fake_disk());
    return disks;
}

}  // namespace

TEST_CASE(
    "ssd set: what was removed, replaced or put while a directory was away does not come back with it") {
    for (bool killed : {false, true}) {
        CAPTURE(killed);
        Disks disks = fake_disks(2);
        auto end = [&](Node& node) {
            REQUIRE(node.settle());
            if (killed) node.kill();
        };
        {
            Node node(disks);
            for (int i = 0; i < 40; ++i) REQUIRE(node.put("k" + std::to_string(i), 1, 1) == Outcome::kDone);
            CHECK(node.set().away() == 0);
            end(node);
        }
        {
            Node node({disks[0]});
            CHECK(node.set().away() == 1);
            for (int i = 0; i < 10; ++i) node.remove("k" + std::to_string(i));
            for (int i = 10; i < 20; ++i) REQUIRE(node.put("k" + std::to_string(i), 2, 0) == Outcome::kDone);
            end(node);
        }
        {
            Node node({disks[0]});  // the filter goes on
            for (int i = 20; i < 30; ++i) node.remove("k" + std::to_string(i));
            end(node);
        }
        Node node({disks[1], disks[0]});
        CHECK(node.set().away() == 0);
        CHECK(node.set().epoch() == 4);
        for (int i = 0; i < 40; ++i) {
            CAPTURE(i);
            std::vector<uint64_t> found = node.find("k" + std::to_string(i));
            bool gone = i < 10 || (i >= 20 && i < 30);
            CHECK(found == (gone ? std::vector<uint64_t>{} : std::vector<uint64_t>{i < 20 ? 2u : 1u}));
        }
        CHECK(node.set().voided() == 30);
    }
}

TEST_CASE(
    "ssd set: directories that were used each without the other, or for too long: nothing stale counts") {
    Disks disks = fake_disks(2);
    {
        Node node(disks);
        REQUIRE(node.put("a", 1, 0) == Outcome::kDone);
        REQUIRE(node.put("b", 1, 1) == Outcome::kDone);
    }
    SUBCASE("each without the other") {
        for (size_t i : {0, 1}) {
            Node node({disks[i]});
            REQUIRE(node.put("a", 2 + i, 0) == Outcome::kDone);
        }
        Node node(disks);
        CHECK(node.find("a").empty());
        CHECK_FALSE(node.has("b"));
        CHECK(node.set().note_of_start().find("used apart") != std::string::npos);
        REQUIRE(node.put("a", 4, 0) == Outcome::kDone);
    }
    SUBCASE("more changed than the filter takes") {
        {
            Node node({disks[0]});
            for (uint64_t i = 1; i < 200'000; ++i) node.set().note(Hash128{i * 0x9E3779B97F4A7C15, i});
            REQUIRE(node.settle());
        }
        { Node node({disks[0]}); }
        Node node(disks);
        CHECK(node.find("a") == std::vector<uint64_t>{1});
        CHECK_FALSE(node.has("b"));
    }
    SUBCASE("the filter on the disk is damaged") {
        {
            Node node({disks[0]});
            REQUIRE(node.settle());
        }
        disks[0]->image[kAreaBegin + kFilterBlock * kBlockBytes + 5000] ^= std::byte{1};
        Node node(disks);
        CHECK(node.has("a"));
        CHECK_FALSE(node.has("b"));
    }
    SUBCASE("a block of the set is damaged") {
        {
            Node node({disks[0]});
            node.remove("b");
            REQUIRE(node.settle());
        }
        for (uint64_t place : {0, 1}) {
            disks[0]->image[kAreaBegin + place * kBlockBytes + 20] ^= std::byte{1};
            {
                Node node(disks);
                CHECK(node.has("a"));
                CHECK_FALSE(node.has("b"));
                REQUIRE(node.put("b", 1, 1) == Outcome::kDone);
            }
            Node node({disks[0]});
            node.remove("b");
            REQUIRE(node.settle());
        }
    }
    SUBCASE("few changed") {
        {
            Node node({disks[0]});
            REQUIRE(node.settle());
        }
        Node node(disks);
        CHECK(node.has("a"));
        CHECK(node.has("b"));
    }
}

TEST_CASE("ssd set: directories of different nodes are refused, those of an earlier release become one set") {
    Disks disks = fake_disks(3);
    for (size_t i : {0, 1}) {
        Node node({disks[i]});
        REQUIRE(node.put("a", 1 + i, 0) == Outcome::kDone);
    }
    {
        Node node({disks[0], disks[1]});
        CHECK(node.error().find("belong to different nodes") != std::string::npos);
    }
    auto make_old = [](FakeDisk& disk) {
        std::fill_n(disk.image.begin() + kAreaBegin, kAreaBytes, std::byte{0});
    };
    make_old(*disks[0]);
    make_old(*disks[1]);
    {
        Node node({disks[0], disks[1]});
        CHECK(node.error().empty());
        CHECK(node.set().epoch() == 1);
        CHECK(node.find("a").size() == 2);  // which of the two counts is for the caller
    }
    // One with content that comes to a set that was opened without it is older than it.
    {
        Node node({disks[2]});
        REQUIRE(node.put("c", 1, 0) == Outcome::kDone);
    }
    make_old(*disks[2]);
    Node node(disks);
    CHECK_FALSE(node.has("c"));
    CHECK(node.has("a"));
}

TEST_CASE(
    "ssd set: applied is the least of what is there, and is on the disk after the removals it speaks of") {
    Disks disks = fake_disks(2);
    {
        Node node(disks);
        REQUIRE(node.put("a", 1, 1) == Outcome::kDone);
        CHECK(node.set().applied(0) == 0);
        node.set().set_applied(0, 7);
        node.set().set_applied(0, 5);
        CHECK(node.set().applied(0) == 7);
        REQUIRE(node.settle());
        node.kill();
    }
    {
        Node node({disks[0]});
        CHECK(node.set().applied(0) == 7);
        node.set().set_applied(0, 9);
        REQUIRE(node.settle());
    }
    CHECK(Node({disks[0]}).set().applied(0) == 9);
    {
        Node node(disks);
        CHECK(node.set().applied(0) == 7);
        REQUIRE(node.put("b", 1, 0) == Outcome::kDone);
        REQUIRE(node.settle());
        std::vector<uint64_t> begun;
        for (auto& disk : disks) {
            begun.push_back(disk->syncs_begun());
            disk->hold_syncs([] { return false; });
        }
        node.remove("a");
        node.remove("b");
        node.set().set_applied(0, 20);
        node.set().on_tick(5'000'000);
        for (size_t i : {0, 1}) CHECK(eventually([&] { return disks[i]->syncs_begun() > begun[i]; }));
        // The removals are written and not synced: they are lost, and what is before the segments is not.
        node.kill([](uint64_t offset) { return offset < kSegmentsBegin; });
        for (auto& disk : disks) disk->hold_syncs({});
    }
    {
        Node node(disks);
        CHECK(node.set().applied(0) == 7);
        CHECK(node.has("a"));
        node.remove("a");
        node.remove("b");
        node.set().set_applied(0, 20);
        REQUIRE(node.settle());
        node.kill();
    }
    Node node(disks);
    CHECK(node.set().applied(0) == 20);
    CHECK_FALSE(node.has("a"));
    CHECK_FALSE(node.has("b"));
}

TEST_CASE("ssd set: of several orders each has its own place, and none is known of another number of them") {
    Disks disks = fake_disks(2);
    auto begin_with = [&](size_t orders, uint64_t add) {
        Node node(disks, orders);
        std::vector<uint64_t> known;
        for (size_t order = 0; order < orders; ++order) known.push_back(node.set().applied(order));
        REQUIRE(node.put("a", 1, 1) == Outcome::kDone);
        for (size_t order = 0; order < orders; ++order) node.set().set_applied(order, add + order);
        REQUIRE(node.settle());
        node.kill();
        return known;
    };
    CHECK(begin_with(3, 10) == std::vector<uint64_t>{0, 0, 0});
    CHECK(begin_with(3, 11) == std::vector<uint64_t>{10, 11, 12});
    CHECK(begin_with(3, 5) == std::vector<uint64_t>{11, 12, 13});
    CHECK(begin_with(2, 20) == std::vector<uint64_t>{0, 0});
    CHECK(begin_with(1, 30) == std::vector<uint64_t>{0});
    CHECK(begin_with(1, 31) == std::vector<uint64_t>{30});
    CHECK(begin_with(16, 40) == std::vector<uint64_t>(16, 0));
    CHECK(begin_with(16, 40).back() == 55);
}

TEST_CASE("ssd set: a release that knows one order takes a block with several for one without removals") {
    LogId log{};
    std::vector<std::byte> block(kBlockBytes);
    SetBlock value;
    value.opening = {1, 2};
    value.revision = 3;
    value.applied = {70, 80};
    encode_set_block(log, value, block.data());
    CHECK(decode_set_block(log, block)->applied == std::vector<uint64_t>{70, 80});
    std::ranges::fill(std::span(block).subspan(72 + kSetMembersMax * 56),
                      std::byte{0});  // which it never read
    CHECK(decode_set_block(log, block)->applied == std::vector<uint64_t>{0});
}

TEST_CASE("ssd set: a directory that takes no more writes is away for the others from then on") {
    Disks disks = fake_disks(2);
    {
        Node node(disks);
        REQUIRE(node.put("a", 1, 1) == Outcome::kDone);
        REQUIRE(node.put("b", 1, 1) == Outcome::kDone);
        disks[1]->fail([](bool write, uint64_t, size_t) { return write ? EROFS : 0; });
        CHECK(node.put("x", 1, 1) == Outcome::kFailed);
        REQUIRE(eventually([&] { return !node.log(1).accepts_writes(); }));
        node.set().on_tick(1);
        CHECK(node.set().away() == 1);
        node.remove("a");
        node.settle();
    }
    disks[1]->fail({});
    Node node(disks);
    CHECK_FALSE(node.has("a"));
    CHECK(node.has("b"));
    CHECK(node.set().away() == 0);
}

TEST_CASE("ssd set: a start that ends at any write, or cannot write, leaves what counts and nothing else") {
    Disks prepared = fake_disks(3);
    {
        Node node(prepared);
        for (size_t i : {0, 1, 2}) {
            REQUIRE(node.put("kept" + std::to_string(i), 1, i) == Outcome::kDone);
            REQUIRE(node.put("gone" + std::to_string(i), 1, i) == Outcome::kDone);
        }
        REQUIRE(node.settle());
    }
    {
        Node node({prepared[0], prepared[1]});
        for (size_t i : {0, 1, 2}) node.remove("gone" + std::to_string(i));
        REQUIRE(node.settle());
    }
    for (size_t failing : {0, 2}) {
        for (uint64_t nth = 1; nth < 10; ++nth) {
            for (bool all_die : {false, true}) {
                CAPTURE(failing);
                CAPTURE(nth);
                CAPTURE(all_die);
                Disks disks;
                for (size_t i : {0, 1, 2}) {
                    disks.push_back(prepared[i]->clone());
                    if (all_die || i == failing) disks[i]->die(i == failing ? nth : nth + 1);
                }
                {
                    Node node(disks);
                    node.kill();
                }
                Node node(disks);
                for (size_t i : {0, 1, 2}) {
                    CHECK_FALSE(node.has("gone" + std::to_string(i)));
                    CHECK(node.has("kept" + std::to_string(i)));
                }
                CHECK(node.set().away() == 0);
            }
        }
    }
}

TEST_CASE(
    "ssd set: lives with some of four directories, crashes included: never an older value, never a removed "
    "one") {
    for (uint64_t seed = 0; seed < 6; ++seed) {
        CAPTURE(seed);
        Random random(seed);
        Disks disks = fake_disks(4);
        std::map<std::string, std::set<uint64_t>> possible;  // numbers that may be found; 0: or nothing
        std::map<std::string, uint64_t> last;
        uint64_t number = 0, hits = 0;
        size_t stays = 0;  // in the next life, or the two would be apart
        for (int life = 0; life < 10; ++life) {
            CAPTURE(life);
            Disks there;
            size_t also_stays = stays;
            for (size_t i = 0; i < disks.size(); ++i) {
                if (i != stays && random.one_in(3)) continue;
                there.push_back(disks[i]);
                if (random.one_in(3)) also_stays = i;
            }
            stays = also_stays;
            Node node(there);
            REQUIRE(node.error().empty());
            for (auto& [name, numbers] : possible) {
                CAPTURE(name);
                for (uint64_t found : node.find(name)) {
                    CHECK(numbers.contains(found));
                    ++hits;
                }
            }
            for (int i = 0; i < 12; ++i) {
                std::string name = "k" + std::to_string(random.below(20));
                if (random.one_in(3)) {
                    node.remove(name);
                    last[name] = 0;
                } else {
                    uint64_t next = ++number;
                    if (node.put(name, next, random.below(4)) == Outcome::kDone) last[name] = next;
                }
                possible[name].insert(last[name]);
            }
            REQUIRE(node.settle());
            for (auto& [name, value] : last) possible[name] = {value};
            if (random.one_in(2)) node.crash(random);
        }
        CHECK(hits > 20);
    }
}
