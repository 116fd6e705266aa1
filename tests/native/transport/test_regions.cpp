// What is registered: the tree of ranges, the table of regions and its changes, and a peer of this host that
// follows them.
#include <fcntl.h>
#include <sys/mman.h>

#include <atomic>
#include <fstream>
#include <map>
#include <sstream>
#include <thread>

#include "bed.hpp"
#include "transport/frames.hpp"
#include "transport/shm/peer_memory.hpp"

using namespace moonpool;
using namespace moonpool::testing;
using transport::RangeTree;
using transport::RegionTable;
using transport::shm::PeerMemory;

namespace {

constexpr uint64_t kKiB = 1u << 10, kMiB = 1u << 20;

struct Range {
    uint64_t address, length;
    bool contains(uint64_t at, uint64_t bytes) const {
        return at >= address && bytes <= length && at - address <= length - bytes;
    }
};

// Says the same as a tree, the plain way.
struct Model {
    std::map<uint64_t, uint64_t> ranges;

    bool overlaps(uint64_t address, uint64_t bytes) const {
        for (auto [from, length] : ranges) {
            if (from < address + bytes && address < from + length) return true;
        }
        return false;
    }
    bool holds(uint64_t address, uint64_t bytes) const {
        for (auto [from, length] : ranges) {
            if (Range{from, length}.contains(address, bytes)) return true;
        }
        return false;
    }
};

void compare(const RangeTree<Range>& tree, const Model& model, Random& random) {
    REQUIRE(tree.size() == model.ranges.size());
    auto next = model.ranges.begin();
    for (const auto& range : tree.list()) {
        REQUIRE(range->address == next->first);
        REQUIRE(range->length == next->second);
        ++next;
    }
    for (int i = 0; i < 30; ++i) {
        uint64_t address = random.between(1, 1000), bytes = random.between(1, 30);
        REQUIRE((tree.find(address, bytes) != nullptr) == model.holds(address, bytes));
        REQUIRE((tree.overlapping(address, bytes) != nullptr) == model.overlaps(address, bytes));
        REQUIRE((tree.at(address) != nullptr) == model.ranges.contains(address));
    }
}

// The mappings of allocated memory in this process: the bytes of each whose page tables are filled.
std::vector<uint64_t> arenas_resident() {
    std::vector<uint64_t> all;
    std::ifstream smaps("/proc/self/smaps");
    bool inside = false;
    for (std::string line; std::getline(smaps, line);) {
        if (line.find('-') < line.find(' ') && line.find(':') > line.find(' ')) {
            inside = line.find("/memfd:moonpool-engine") != std::string::npos;
        }
        uint64_t kib = 0;
        if (inside && std::sscanf(line.c_str(), "Rss: %lu kB", &kib) == 1) all.push_back(kib * kKiB);
    }
    std::ranges::sort(all);
    return all;
}

}  // namespace

TEST_CASE("regions: a tree says what a plain list says, and older trees stay as they were") {
    for (uint64_t seed : {3801, 3802, 3803}) {
        CAPTURE(seed);
        Random random(seed);
        RangeTree<Range> tree;
        Model model;
        std::vector<std::pair<RangeTree<Range>, Model>> kept;
        for (int step = 0; step < 400; ++step) {
            uint64_t address = random.between(1, 1000), length = random.between(1, 20);
            if (random.one_in(3) && !model.ranges.empty()) {
                auto victim = model.ranges.lower_bound(address);
                if (victim == model.ranges.end()) victim = model.ranges.begin();
                tree.remove(victim->first);
                model.ranges.erase(victim);
            } else if (!model.overlaps(address, length)) {
                tree.add(std::make_shared<Range>(Range{address, length}));
                model.ranges[address] = length;
            }
            tree.remove(100000);  // none is there
            if (random.one_in(10)) compare(tree, model, random);
            if (random.one_in(50)) kept.emplace_back(tree, model);
        }
        for (const auto& [old, then] : kept) compare(old, then, random);
    }
    RangeTree<Range> top;
    top.add(std::make_shared<Range>(Range{UINT64_MAX - 9, 10}));
    CHECK(top.overlapping(UINT64_MAX, 1) != nullptr);
    CHECK(top.overlapping(UINT64_MAX - 20, 11) == nullptr);
}

TEST_CASE("regions: of 16,000 a change touches some tens") {
    RangeTree<Range> tree;
    for (uint64_t i = 0; i < transport::kRegionsMax; ++i) {
        tree.add(std::make_shared<Range>(Range{(i + 1) * 16 * kKiB, 8 * kKiB}));
    }
    CHECK(tree.depth() >= 14);
    CHECK(tree.depth() < 60);
}

TEST_CASE("regions: what a thread has taken of the table stays as it was while others change it") {
    constexpr uint64_t kFixed = 64, kStep = 16 * kKiB;
    RegionTable table;
    // Of the even places, which stay; those between come and go.
    for (uint64_t i = 0; i < kFixed; ++i) REQUIRE(table.add((2 * i + 2) * kStep, kKiB, "", {}).ok());
    std::atomic<bool> over{false};
    std::atomic<int> looks{0}, wrong{0};
    auto look = [&] {
        for (; !over || looks < 2; ++looks) {
            std::shared_ptr<const transport::Regions> all = table.all();
            transport::RegionList first = all->list();
            uint64_t fixed = 0;
            for (const auto& region : first) {
                fixed += region->address / kStep % 2 == 0;
                const auto* found = all->find(region->address, kKiB);
                if (found == nullptr || *found != region) ++wrong;
            }
            if (fixed != kFixed || first.size() != all->size() || first != all->list()) ++wrong;
        }
    };
    std::thread one(look), other(look);
    Random random(3812);
    for (int step = 0; step < 3000 || looks < 50; ++step) {
        uint64_t address = (2 * random.below(kFixed) + 1) * kStep;
        if (!table.remove(address).ok()) REQUIRE(table.add(address, kKiB, "", {}).ok());
    }
    over = true;
    one.join();
    other.join();
    CHECK(wrong == 0);
    CHECK(table.check_integrity());
}

TEST_CASE("regions: the changes since an edition make the old list the new one, as frames too") {
    Random random(3811);
    RegionTable table;
    transport::ChangedRows first;
    std::map<uint64_t, transport::RegionRow> known;  // as a peer that follows
    uint64_t edition = 0;
    size_t wholes = 0;
    std::map<uint64_t, uint64_t> model;
    for (int round = 0; round < 300; ++round) {
        // Some rounds change more than is remembered.
        uint64_t steps = round % 100 == 50 ? RegionTable::kChangesKept + 1 : random.below(30);
        for (uint64_t step = 0; step < steps; ++step) {
            uint64_t address = random.between(1, 100) * 4096;
            if (model.contains(address)) {
                REQUIRE(table.remove(address).ok());
                model.erase(address);
            } else {
                model[address] = (*table.add(address, 4096, "cpu:0", {}))->id;
            }
        }
        transport::RegionChanges changes = table.changes(edition);
        CHECK(changes.added.size() <= 100);
        std::vector<std::byte> frame;
        Writer w(frame);
        encode_changes(w, changes, transport::kEngineVersion);
        std::optional<transport::ChangedRows> read = transport::decode_changes(Reader(frame));
        REQUIRE(read.has_value());
        CHECK(read->whole == changes.whole);
        CHECK(read->whole == (edition == 0 || steps > RegionTable::kChangesKept));
        if (!read->whole) CHECK(read->added.size() + read->removed.size() <= steps);
        wholes += read->whole;
        if (read->whole) known.clear();
        for (const auto& removed : read->removed) {
            auto it = known.find(removed.address);
            if (it != known.end() && it->second.id == removed.id) known.erase(it);
        }
        for (const auto& row : read->added) {
            REQUIRE_FALSE(known.contains(row.address));
            known[row.address] = row;
        }
        edition = read->edition;
        REQUIRE(known.size() == model.size());
        for (const auto& [address, id] : model) {
            REQUIRE(known.at(address).id == id);
            REQUIRE(table.by_id(id)->address == address);
        }
        REQUIRE(table.check_integrity());
        // What is cut off is not read, but where the old form of the answer ends.
        for (size_t size = 0; round < 20 && size < frame.size(); ++size) {
            std::vector<std::byte> part(frame.begin(), frame.begin() + static_cast<long>(size));
            std::optional<transport::ChangedRows> cut = transport::decode_changes(Reader(part));
            if (cut) CHECK(cut->edition == 0);
        }
    }
    CHECK(wholes == 4);
    CHECK(table.changes(edition + 1).whole);  // of another table
    CHECK(table.by_id(UINT64_MAX) == nullptr);
}

TEST_CASE("regions: a question with an edition is understood by peers that know none, and theirs by us") {
    transport::PeerInfo peer;
    peer.version = transport::kEngineVersion;
    std::vector<std::byte> question = transport::regions_question(peer, 77);
    std::optional<transport::RegionsQuestion> read = transport::decode_regions_question(Reader(question));
    REQUIRE(read.has_value());
    CHECK(read->edition == std::optional<uint64_t>(77));
    question.resize(2);  // what such a peer reads of it
    CHECK_FALSE(transport::decode_regions_question(Reader(question))->edition.has_value());
    peer.version = 1;  // would drop the connection over any byte
    CHECK(transport::regions_question(peer, 77).empty());
    // Its answer is the list alone.
    RegionTable table;
    REQUIRE(table.add(4096, 4096, "cpu:0", {}).ok());
    std::vector<std::byte> answer;
    Writer w(answer);
    encode_regions(w, table.all()->list(), 2);
    std::optional<transport::ChangedRows> changes = transport::decode_changes(Reader(answer));
    REQUIRE(changes.has_value());
    CHECK(changes->whole);
    CHECK(changes->edition == 0);
    CHECK(changes->added.size() == 1);
}

TEST_CASE("shm: page tables are filled where memory is touched, once, in steps") {
    Fd fd(::memfd_create("test", MFD_CLOEXEC));
    constexpr uint64_t kBytes = 10 * PeerMemory::kStepBytes + 4096;
    REQUIRE(::ftruncate(fd.get(), kBytes) == 0);
    PeerMemory memory(std::move(*Mapping::map(fd.get(), kBytes, true)));
    auto resident = [&] {
        std::vector<unsigned char> pages(kBytes / 4096);
        REQUIRE(::mincore(memory.data(), kBytes, pages.data()) == 0);
        return std::ranges::count_if(pages, [](unsigned char page) { return (page & 1) != 0; });
    };
    constexpr uint64_t kPages = PeerMemory::kStepBytes / 4096;
    CHECK(memory.steps_filled() == 0);
    memory.fill(PeerMemory::kStepBytes + 5, 1);
    CHECK(memory.steps_filled() == 1);
    memory.fill(PeerMemory::kStepBytes, PeerMemory::kStepBytes);  // the same
    CHECK(memory.steps_filled() == 1);
    memory.fill(3 * PeerMemory::kStepBytes - 1, 2);  // two, on both sides of a border
    CHECK(memory.steps_filled() == 3);
    CHECK(resident() == 3 * kPages);
    memory.fill(kBytes - 1, 1);  // the last, which is short
    CHECK(resident() == 3 * kPages + 1);
    memory.fill(0, kBytes);
    CHECK(memory.steps_filled() == 11);
    CHECK(resident() == kBytes / 4096);
}

TEST_CASE("shm: the first small read of a peer maps one region of it, and fills a step") {
    constexpr uint64_t kBytes = 8 * kMiB;
    Pair pair("shm");
    Memory mine(*pair.here, 4096, MemoryKind::kHostArena);
    std::vector<std::unique_ptr<Memory>> theirs;
    for (int i = 0; i < 5; ++i) {
        theirs.push_back(std::make_unique<Memory>(*pair.there, kBytes, MemoryKind::kHostArena));
    }
    REQUIRE(arenas_resident().size() == 6);
    theirs[2]->data()[kMiB] = std::byte{7};
    REQUIRE(pair.transfer({{mine.address(), theirs[2]->address() + kMiB, 64, Direction::kRead}}).ok());
    CHECK(mine.data()[0] == std::byte{7});
    std::vector<uint64_t> resident = arenas_resident();
    REQUIRE(resident.size() == 7);  // what the owner has, and one of the initiator
    // A huge page is filled whole.
    CHECK(resident[1] <= 2 * kMiB);
    REQUIRE(pair.transfer({{mine.address(), theirs[2]->address(), 64, Direction::kRead}}).ok());
    CHECK(arenas_resident().size() == 7);
    REQUIRE(pair.transfer({{mine.address(), theirs[4]->address(), 64, Direction::kRead}}).ok());
    CHECK(arenas_resident().size() == 8);
    // What stays registered stays mapped; what goes, goes with the next look at the list.
    theirs[4].reset();
    REQUIRE(pair.transfer({{mine.address(), theirs[2]->address(), 64, Direction::kRead}}).ok());
    CHECK(arenas_resident().size() == 6);
}

TEST_CASE("shm: a peer follows regions that come and go, one by one") {
    Random random(3821);
    Pair pair("shm");
    Memory mine(*pair.here, 4096, MemoryKind::kHostArena);
    std::map<int, std::unique_ptr<Memory>> theirs;
    std::vector<uint64_t> gone;
    for (int round = 0; round < 200; ++round) {
        int place = static_cast<int>(random.below(12));
        if (theirs.contains(place)) {
            gone.push_back(theirs[place]->address());
            theirs.erase(place);
        } else {
            auto kind = random.one_in(2) ? MemoryKind::kHostArena : MemoryKind::kHost;
            theirs[place] = std::make_unique<Memory>(*pair.there, 4096, kind);
        }
        for (auto& [number, memory] : theirs) {
            std::memset(memory->data(), number + round, 4096);
            REQUIRE(*pair.transfer({{mine.address(), memory->address(), 4096, Direction::kRead}}) == 4096);
            REQUIRE(mine.bytes() == memory->bytes());
        }
        for (uint64_t address : gone) {
            bool again = std::ranges::any_of(theirs, [&](auto& row) {
                return address < row.second->address() + 4096 && row.second->address() < address + 4096;
            });
            if (again) continue;
            Result<uint64_t> moved = pair.transfer({{mine.address(), address, 4096, Direction::kRead}});
            REQUIRE_FALSE(moved.ok());
            CHECK(moved.error().code == Code::kInvalidArgument);
        }
        if (gone.size() > 4) gone.erase(gone.begin());
    }
}
