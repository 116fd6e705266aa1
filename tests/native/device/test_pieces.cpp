// Small pieces by the kernel: the plan against plain loops, the mover against memory under every policy,
// mistakes in the order of a plan's parts, and cards that refuse.
#include <algorithm>
#include <map>
#include <numeric>
#include <optional>

#include "bed.hpp"
#include "device/piece_mover.hpp"

using namespace moonpool;
using namespace moonpool::testing;
using device::Copy;
using device::DeviceMemory;
using device::Event;
using device::must;
using device::ObjectsKernel;
using device::PieceList;
using device::PieceMover;
using device::PiecePlan;
using device::PieceWays;
using device::PinnedMemory;
using device::SourceOrder;
using device::Stream;
using Way = device::PieceWays::Way;

namespace {

constexpr uint64_t kRoom = PieceMover::kStagingBytes;

// Bytes of one length after the other, and the same in an order of its own: copies from the first to the
// second. turned: from the second to the first.
std::vector<Copy> pieces_between(Random& random, const std::vector<uint64_t>& lengths, uint64_t ordered,
                                 uint64_t mixed, bool turned) {
    std::vector<size_t> order(lengths.size());
    std::iota(order.begin(), order.end(), size_t{0});
    for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random.below(i)]);
    std::vector<uint64_t> places(lengths.size());
    uint64_t at = mixed;
    for (size_t i : order) {
        places[i] = at;
        at += lengths[i];
    }
    std::vector<Copy> copies;
    for (size_t i = 0; i < lengths.size(); ++i) {
        copies.push_back(turned ? Copy{ordered, places[i], lengths[i]}
                                : Copy{places[i], ordered, lengths[i]});
        ordered += lengths[i];
    }
    return copies;
}

std::vector<uint64_t> lengths_of(Random& random, size_t count, uint64_t longest) {
    constexpr uint64_t kLengths[] = {512, 656, 584, 16, 8, 4, 1, 0};
    uint64_t fixed = random.one_in(2) ? kLengths[random.below(std::size(kLengths))] : 0;
    std::vector<uint64_t> lengths;
    for (size_t i = 0; i < count; ++i) {
        lengths.push_back(fixed != 0 && !random.one_in(20) ? fixed : random.between(1, longest));
    }
    return lengths;
}

uint64_t sum(const std::vector<uint64_t>& lengths) {
    return std::accumulate(lengths.begin(), lengths.end(), uint64_t{0});
}

PieceWays ways_of(const std::vector<Copy>& copies, uint64_t card_from, uint64_t card_to,
                  uint64_t room = kRoom) {
    return {copies, [=](uint64_t address, uint64_t) { return address >= card_from && address < card_to; },
            room};
}

size_t count(const PieceWays& ways, const std::vector<Copy>& copies, Way way) {
    size_t n = 0;
    for (size_t i = 0; i < copies.size(); ++i) n += ways[i] == way;
    return n;
}

// `count` pieces of `bytes` each, which begin `to_step` and `from_step` apart.
std::vector<Copy> evenly(size_t count, uint64_t bytes, uint64_t to, uint64_t to_step, uint64_t from,
                         uint64_t from_step) {
    std::vector<Copy> copies;
    for (size_t i = 0; i < count; ++i) copies.push_back({to + i * to_step, from + i * from_step, bytes});
    return copies;
}

constexpr uint64_t kCard = uint64_t{1} << 40, kCardEnd = kCard << 1, kHost = kCard << 2;

// Addresses that are no memory of this process, and what lies there.
class Places {
   public:
    void add(uint64_t address, std::vector<unsigned char> bytes) { all_[address] = std::move(bytes); }
    void copy(uint64_t to, uint64_t from, uint64_t bytes) {
        std::memmove(find(to, bytes), find(from, bytes), bytes);
    }
    std::map<uint64_t, std::vector<unsigned char>>& all() { return all_; }

   private:
    unsigned char* find(uint64_t address, uint64_t bytes) {
        auto after = all_.upper_bound(address);
        REQUIRE(after != all_.begin());
        auto& [base, found] = *std::prev(after);
        REQUIRE(address - base + bytes <= found.size());
        return found.data() + (address - base);
    }
    std::map<uint64_t, std::vector<unsigned char>> all_;
};

// What the kernel does with a list, by a plain loop.
void run_list(Places& places, const PieceList& list) {
    std::vector<std::byte> memory(list.bytes());
    list.write(memory.data());
    auto base = reinterpret_cast<uint64_t>(memory.data());
    device::ObjectsJob job = list.job(base);
    REQUIRE(job.begins + (list.objects() + 1) * 4 == base + memory.size());
    CHECK(memory.size() <= PieceList::kBytesMax);
    auto* begins = reinterpret_cast<const uint32_t*>(job.begins);
    for (uint32_t i = 0; i < job.count; ++i) {
        const auto& object = reinterpret_cast<const device::KvObject*>(job.objects)[i];
        CHECK(begins[object.column + 1] - begins[object.column] <= 4);
        for (uint32_t r = begins[object.column]; r < begins[object.column + 1]; ++r) {
            const auto& row = reinterpret_cast<const device::KvRow*>(job.rows)[r];
            CHECK(row.bytes <= PieceList::kRowBytesMax);
            places.copy(row.address, job.staging + object.staged + row.offset, row.bytes);
        }
    }
}

}  // namespace

TEST_CASE("pieces: few ones, long ones and those that are scattered on both sides go by copies") {
    const uint64_t other = kCard + (1u << 30);
    auto within = [&](size_t n, uint64_t bytes) {
        return evenly(n, bytes, kCard, 2 * bytes, other, 2 * bytes);
    };
    auto kernel = [&](const std::vector<Copy>& copies, uint64_t room = kRoom) {
        return ways_of(copies, kCard, kCardEnd, room).by_kernel();
    };
    CHECK(kernel(within(16, 512)));
    CHECK_FALSE(kernel(within(15, 512)));
    CHECK(kernel(within(64, device::kSmallWithinCard - 1)));
    CHECK_FALSE(kernel(within(64, device::kSmallWithinCard)));
    auto scatter = [&](size_t n, uint64_t bytes, uint64_t step) {
        return evenly(n, bytes, kCard, 2 * bytes, kHost, step);
    };
    CHECK(kernel(scatter(16, 512, 512)));
    CHECK_FALSE(kernel(scatter(15, 512, 512)));
    CHECK_FALSE(kernel(scatter(64, 512, 513)));  // no run
    CHECK_FALSE(kernel(scatter(64, device::kSmallOverLink, device::kSmallOverLink)));
    CHECK(kernel(scatter(16, 512, 512), 16 * 512));
    CHECK_FALSE(kernel(scatter(16, 512, 512), 16 * 512 - 1));
    // Together, and each by its own rule.
    std::vector<Copy> mixed = scatter(20, 512, 512);
    for (const Copy& copy : within(20, 100)) mixed.push_back(copy);
    for (const Copy& copy : evenly(20, 512, kHost, 600, kCard, 600)) mixed.push_back(copy);
    mixed.push_back({kHost, kCard, 1 << 20});
    mixed.push_back({kCard, kHost, 0});
    mixed.push_back({kHost, kHost + 512, 512});
    PieceWays ways = ways_of(mixed, kCard, kCardEnd);
    CHECK(count(ways, mixed, Way::kScatter) == 20);
    CHECK(count(ways, mixed, Way::kWithin) == 20);
    CHECK(count(ways, mixed, Way::kCopy) == 23);
    CHECK(ways.staged_bytes() == 20 * 512);
    ways.drop_staged();
    CHECK(ways.staged_bytes() == 0);
    CHECK(ways.by_kernel());
    CHECK(count(ways, mixed, Way::kCopy) == 43);
    // More rows than a list has.
    CHECK(kernel(within(PieceList::kRowsMax, 16)));
    CHECK_FALSE(kernel(within(PieceList::kRowsMax + 1, 16)));
    CHECK(kernel(within(PieceList::kRowsMax / 2, PieceList::kRowBytesMax + 1)));
    CHECK_FALSE(kernel(within(PieceList::kRowsMax / 2 + 1, PieceList::kRowBytesMax + 1)));
}

TEST_CASE("pieces: a plan moves what its copies move, with one copy over the link for each run") {
    Random random(2360);
    for (int round = 0; round < 20; ++round) {
        const uint64_t far = kCard + (uint64_t{1} << 36);  // further than an offset of 32 bits
        Places places;
        std::vector<Copy> copies;
        uint64_t next = 0;
        // Areas of their own, so that no two copies write one byte.
        auto areas = [&](uint64_t one, uint64_t other, bool turned, size_t n, uint64_t longest,
                         bool shuffled) {
            std::vector<uint64_t> lengths = lengths_of(random, n, longest);
            uint64_t shift = (next++) << 24;
            for (uint64_t base : {one + shift, other + shift}) {
                std::vector<unsigned char> bytes(sum(lengths) + 8);
                random.fill(bytes.data(), bytes.size());
                places.add(base, std::move(bytes));
            }
            std::vector<Copy> more = pieces_between(random, lengths, one + shift + random.below(8),
                                                    other + shift + random.below(8), turned);
            if (shuffled) more.insert(more.end(), copies.begin(), copies.end());
            if (shuffled) std::swap(copies, more);
            if (shuffled) std::shuffle(copies.begin(), copies.end(), std::mt19937_64(random.next()));
            if (!shuffled) copies.insert(copies.end(), more.begin(), more.end());
        };
        areas(kCard, kCard + (1u << 30), false, random.below(60), 40000, true);
        areas(far, kCard, random.one_in(2), random.below(60), 700, true);
        size_t gathered = random.below(80), scattered = random.below(80);
        areas(kHost, kCard, false, scattered, 600, false);
        areas(kHost + (1u << 30), kCard, true, gathered, 600, false);
        const uint64_t staging = kCard + (uint64_t{1} << 38);
        PieceWays ways = ways_of(copies, kCard, kCardEnd);
        places.add(staging, std::vector<unsigned char>(ways.staged_bytes()));
        Places expected = places;
        for (const Copy& copy : copies) expected.copy(copy.to, copy.from, copy.bytes);
        PiecePlan plan(copies, ways, staging);
        CHECK(plan.out.size() == (gathered >= device::kSmallPiecesMin ? 1 : 0));
        for (const Copy& copy : plan.in) places.copy(copy.to, copy.from, copy.bytes);
        run_list(places, plan.list);
        for (const Copy& copy : plan.out) places.copy(copy.to, copy.from, copy.bytes);
        places.all().erase(staging);
        expected.all().erase(staging);
        CHECK(places.all() == expected.all());
    }
}

namespace {

// Memory of a card and of the host between which sets of pieces move, each in areas of its own.
class PieceBed {
   public:
    static constexpr uint64_t kArea = 20u << 10;

    // length: of every piece; 0: of any length.
    PieceBed(Bed& bed, uint64_t salt, uint64_t length = 0)
        : random_(salt),
          length_(length),
          bed_(bed),
          stream_(must(Stream::create(bed.device, Stream::Priority::kDefault))),
          card_(must(DeviceMemory::allocate(bed.device, 4 * kArea))),
          host_(bed, 2 * kArea),
          image_(bed, 6 * kArea) {
        for (size_t i = 0; i + 8 <= image_.size(); i += 8) {
            uint64_t value = random_.next();
            std::memcpy(image_.data() + i, &value, 8);
        }
        REQUIRE(stream_.copy({card_.address(), image_.address(), card_.bytes()}));
        finish(bed_, stream_);
        std::memcpy(host_.data(), image_.data() + card_.bytes(), host_.size());
        expected_ = image_.bytes();
    }

    // Card -> card, host -> card and card -> host, and what they make of the memory.
    std::vector<Copy> pieces() {
        const uint64_t card = card_.address(), host = host_.address();
        std::vector<Copy> copies = between(card, card + kArea, false);
        for (const Copy& copy : between(host, card + 2 * kArea, false)) copies.push_back(copy);
        for (const Copy& copy : between(host + kArea, card + 3 * kArea, true)) copies.push_back(copy);
        for (const Copy& copy : copies) {
            std::memcpy(expected_.data() + place(copy.to), expected_.data() + place(copy.from), copy.bytes);
        }
        return copies;
    }
    bool is_right() {
        Pinned now(bed_, card_.bytes());
        REQUIRE(stream_.copy({now.address(), card_.address(), card_.bytes()}));
        finish(bed_, stream_);
        return std::memcmp(now.data(), expected_.data(), card_.bytes()) == 0 &&
               std::memcmp(host_.data(), expected_.data() + card_.bytes(), host_.size()) == 0;
    }
    bool is_on_card(uint64_t address) const { return address - card_.address() < card_.bytes(); }
    Bed& bed() { return bed_; }

   private:
    std::vector<Copy> between(uint64_t ordered, uint64_t mixed, bool turned) {
        std::vector<uint64_t> lengths(20, length_);
        if (length_ == 0) lengths = lengths_of(random_, random_.between(16, 28), 600);
        return pieces_between(random_, lengths, ordered + random_.below(16), mixed + random_.below(16),
                              turned);
    }
    uint64_t place(uint64_t address) const {
        return address - card_.address() < card_.bytes() ? address - card_.address()
                                                         : card_.bytes() + (address - host_.address());
    }

    Random random_;
    const uint64_t length_;
    Bed& bed_;
    Stream stream_;
    DeviceMemory card_;
    Pinned host_, image_;
    std::vector<unsigned char> expected_;  // card, then host
};

int launches() { return is_real() ? 0 : soft_device().soft_calls("cuLaunchKernel"); }

void queue_and_finish(PieceBed& pieces, PieceMover& mover) {
    Stream stream = must(Stream::create(pieces.bed().device, Stream::Priority::kLowest));
    PieceMover::Buffer buffer;
    REQUIRE(mover.queue(stream, pieces.pieces(), buffer));
    finish(pieces.bed(), stream);
}

}  // namespace

TEST_CASE("pieces: within a card, from the host and to it, every byte is where it belongs") {
    uint64_t salt = 2361;
    each_policy([&](Bed& bed) {
        PieceBed pieces(bed, ++salt);
        auto mover = std::make_shared<PieceMover>(bed.device);
        for (int round = 0; round < 3; ++round) {
            int before = launches();
            queue_and_finish(pieces, *mover);
            CHECK((is_real() || launches() == before + 1));
            CHECK(pieces.is_right());
        }
        CHECK(mover->refusal() == "");
    });
}

TEST_CASE("pieces: sets under way at once have a buffer each, and further ones go by copies") {
    uint64_t salt = 2371;
    each_policy([&](Bed& bed) {
        auto mover = std::make_shared<PieceMover>(bed.device);
        constexpr size_t kSets = PieceMover::kBuffersMax + 2;
        for (int round = 0; round < 2; ++round) {
            std::vector<std::unique_ptr<PieceBed>> beds;
            std::vector<PieceMover::Buffer> buffers(kSets);
            std::vector<Stream> streams;
            int before = launches();
            for (size_t i = 0; i < kSets; ++i) {
                beds.push_back(std::make_unique<PieceBed>(bed, ++salt));
                streams.push_back(must(Stream::create(bed.device, Stream::Priority::kLowest)));
                REQUIRE(mover->queue(streams[i], beds[i]->pieces(), buffers[i]));
            }
            CHECK((is_real() || launches() == before + static_cast<int>(PieceMover::kBuffersMax)));
            for (Stream& stream : streams) finish(bed, stream);
            for (auto& each : beds) CHECK(each->is_right());
        }
    });
}

TEST_CASE("pieces: a card that refuses the kernel or memory copies one by one, and is asked once") {
    if (is_real()) return;
    struct Refusal {
        const char* why;
        std::function<void()> plan;
        int launches;
    };
    const Refusal refusals[] = {
        {"compute capability 6.1", [] { soft_device().soft_set_capability(61); }, 0},
        {"cuModuleLoadDataEx", [] { soft_device().soft_refuse("cuModuleLoadDataEx", 218); }, 0},
        {"cuMemHostRegister", [] { soft_device().soft_refuse("cuMemHostRegister", 2); }, 0},
        {"cuMemAlloc", [] { soft_device().soft_refuse("cuMemAlloc", 2); }, 0},
        // Without staging memory the kernel still moves what stays within the card.
        {"cuMemAlloc", [] { soft_device().soft_fail("cuMemAlloc", 2, 2); }, 2},
    };
    for (const Refusal& refusal : refusals) {
        CAPTURE(refusal.why);
        Bed bed;
        {
            PieceBed pieces(bed, 2401);
            refusal.plan();
            if (std::strncmp(refusal.why, "compute", 7) == 0) bed.device = must(device::Device::open(0));
            auto mover = std::make_shared<PieceMover>(bed.device);
            int asked = 0;
            for (int round = 0; round < 2; ++round) {
                PieceMover::Buffer buffer;
                Stream stream = must(Stream::create(bed.device, Stream::Priority::kLowest));
                REQUIRE(mover->queue(stream, pieces.pieces(), buffer));
                finish(bed, stream);
                CHECK(mover->refusal().find(refusal.why) != std::string::npos);
                int now = soft_device().soft_calls("cuModuleLoadDataEx") +
                          soft_device().soft_calls("cuMemHostRegister") +
                          soft_device().soft_calls("cuMemAlloc");
                CHECK((round == 0 || now == asked));
                asked = now;
            }
            CHECK(soft_device().soft_calls("cuLaunchKernel") == refusal.launches);
            for (const char* name : {"cuMemHostRegister", "cuMemAlloc"}) soft_device().soft_refuse(name, 0);
            CHECK(pieces.is_right());
        }
        bed.end();
    }
}

namespace {

// Mistakes in what PieceMover does. The order on one stream is what it relies on; with two of them a wait is
// missing.
enum class Slip {
    kNone,
    kKernelDoesNotWait,  // for the copies that bring its list and fill its staging memory
    kOutDoesNotWait,     // for the kernel that gathers
    kEndBeforeOut,       // the event is recorded before the last copies
    kOutAtAnyTime,       // the staging memory may be read before the kernel has written it
    kStagingUsedAgain,   // by another set, before the first has ended
    kListWrittenAgain,   // for another set, before the first has ended
};

struct SlipBuffer {
    PinnedMemory list;
    DeviceMemory on_card, staging;
    explicit SlipBuffer(Bed& bed)
        : list(must(PinnedMemory::allocate(bed.device, 8192))),
          on_card(must(DeviceMemory::allocate(bed.device, 8192))),
          staging(must(DeviceMemory::allocate(bed.device, 2 * PieceBed::kArea))) {}
};

// One set, in the three parts of a plan.
struct SlipSet {
    PieceBed* bed;
    SlipBuffer* own;
    std::byte* host_list;
    uint64_t staging;
    Stream first, second;
    Event ended;
    std::optional<PiecePlan> plan = {};

    Stream& of_kernel(Slip slip) { return slip == Slip::kKernelDoesNotWait ? second : first; }
    Stream& of_out(Slip slip) { return slip == Slip::kOutDoesNotWait ? second : of_kernel(slip); }

    Status queue_in() {
        std::vector<Copy> copies = bed->pieces();
        PieceWays ways(
            copies, [&](uint64_t address, uint64_t) { return bed->is_on_card(address); }, kRoom);
        plan.emplace(copies, ways, staging);
        plan->list.write(host_list);
        plan->in.push_back(
            {own->on_card.address(), reinterpret_cast<uint64_t>(host_list), plan->list.bytes()});
        return first.copy(plan->in, SourceOrder::kStream);
    }
    Status queue_kernel(Slip slip, const ObjectsKernel& kernel) {
        Stream& stream = of_kernel(slip);
        if (Status s = kernel.launch(stream, plan->list.job(own->on_card.address()), 2, 256); !s) return s;
        return slip == Slip::kEndBeforeOut ? ended.record(stream.handle()) : success();
    }
    Status queue_out(Slip slip) {
        SourceOrder order = slip == Slip::kOutAtAnyTime ? SourceOrder::kAny : SourceOrder::kStream;
        // Two of them: one alone is no batch, and is read in the stream's order.
        std::vector<Copy> out = plan->out;
        Copy half = out.back();
        out.back().bytes /= 2;
        out.push_back({half.to + half.bytes / 2, half.from + half.bytes / 2, half.bytes - half.bytes / 2});
        if (Status s = of_out(slip).copy(out, order); !s) return s;
        return slip == Slip::kEndBeforeOut ? success() : ended.record(of_out(slip).handle());
    }
};

bool slip_is_found(Slip slip, Policy policy, uint64_t seed) {
    Bed bed(policy, seed);
    bool right = true;
    {
        ObjectsKernel kernel = must(ObjectsKernel::load(bed.device));
        // Of one length each: lists differ in addresses only, and a wrong one can be read.
        constexpr size_t kSets = 3;
        std::vector<std::unique_ptr<PieceBed>> beds;
        std::vector<std::unique_ptr<SlipBuffer>> buffers;
        std::vector<SlipSet> sets;
        bool queued = true;
        for (size_t i = 0; i < kSets; ++i) {
            beds.push_back(std::make_unique<PieceBed>(bed, seed + i, 512));
            buffers.push_back(std::make_unique<SlipBuffer>(bed));
            SlipBuffer& list = *buffers[slip == Slip::kListWrittenAgain ? 0 : i];
            SlipBuffer& staging = *buffers[slip == Slip::kStagingUsedAgain ? 0 : i];
            sets.push_back({beds[i].get(), buffers[i].get(), list.list.data(), staging.staging.address(),
                            must(Stream::create(bed.device, Stream::Priority::kLowest)),
                            must(Stream::create(bed.device, Stream::Priority::kLowest)),
                            must(Event::create(bed.device))});
        }
        for (SlipSet& set : sets) queued = queued && set.queue_in().ok();
        for (SlipSet& set : sets) queued = queued && set.queue_kernel(slip, kernel).ok();
        for (SlipSet& set : sets) queued = queued && set.queue_out(slip).ok();
        for (SlipSet& set : sets) {
            Result<bool> over = set.ended.wait(10000);
            right = right && queued && over && *over;
        }
        char text[200];
        if (soft_device().soft_violations(text, sizeof(text)) != 0) right = false;
        for (auto& each : beds) right = right && each->is_right();
        soft_device().soft_settle();
        if (soft_device().soft_violations(text, sizeof(text)) != 0) right = false;
    }
    bed.forget();
    return !right;
}

}  // namespace

TEST_CASE("pieces: a mistake in the order of a plan's parts is found by the policies that can" *
          doctest::skip(kUnderTsan)) {
    if (is_real()) return;
    struct Row {
        Slip slip;
        const char* name;
        bool late, early;
    };
    const Row rows[] = {
        {Slip::kNone, "none", false, false},
        {Slip::kKernelDoesNotWait, "the kernel does not wait for its list and its staging memory", true,
         true},
        {Slip::kOutDoesNotWait, "a copy does not wait for the kernel that gathers", true, true},
        {Slip::kEndBeforeOut, "a set ends before its last copies", true, true},
        {Slip::kOutAtAnyTime, "what the kernel gathers is read at any time", false, true},
        // Late, early: the first set is over before the second begins. At once: the calls themselves cross.
        {Slip::kStagingUsedAgain, "staging memory is used before its last set has ended", false, false},
        {Slip::kListWrittenAgain, "a list is written before its last set has ended", true, true},
    };
    Random random(2410);
    constexpr int kRuns = 2, kShuffledRuns = 15;
    for (const Row& row : rows) {
        auto found = [&](Policy policy, int runs) {
            int n = 0;
            for (int i = 0; i < runs; ++i) n += slip_is_found(row.slip, policy, random.next());
            return n;
        };
        int late = found(Policy::kLate, kRuns), early = found(Policy::kEarly, kRuns);
        int at_once = found(Policy::kAtOnce, kRuns), shuffled = found(Policy::kShuffled, kShuffledRuns);
        MESSAGE(std::string(row.name) << ": late " << late << ", early " << early << " of " << kRuns
                                      << ", shuffled " << shuffled << " of " << kShuffledRuns);
        CHECK(late == (row.late ? kRuns : 0));
        CHECK(early == (row.early ? kRuns : 0));
        CHECK(at_once == (row.slip == Slip::kStagingUsedAgain ? kRuns : 0));
        CHECK((shuffled > 0) == (row.slip != Slip::kNone));
    }
}
