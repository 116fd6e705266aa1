// Batches in which slices are refused: those that are not are done in full, nothing outside of a slice is
// ever touched, and every transport says the same of the same batch.
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <string>
#include <thread>

#include "bed.hpp"
#include "transport/tcp/channel.hpp"

using namespace moonpool;
using namespace moonpool::testing;
using transport::Region;

namespace {

constexpr uint64_t kMiB = 1u << 20;
constexpr uint64_t kWindowFrames = 8;  // more than that many frames of a slice are never under way at a time

// Pages of which parts may be registered; all of them may be written, so that a stray byte shows.
class Pages {
   public:
    explicit Pages(uint64_t size) : size_((size + 4095) & ~uint64_t{4095}) {
        void* pages = ::mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        REQUIRE(pages != MAP_FAILED);
        data_ = static_cast<std::byte*>(pages);
    }
    ~Pages() { ::munmap(data_, size_); }
    Pages(const Pages&) = delete;

    std::byte* data() const { return data_; }
    uint64_t size() const { return size_; }
    uint64_t address(uint64_t at = 0) const { return reinterpret_cast<uint64_t>(data_) + at; }

   private:
    uint64_t size_;
    std::byte* data_ = nullptr;
};

// Memory and what it has to hold.
struct Area {
    std::byte* data;
    uint64_t size;
    std::vector<std::byte> model;

    Area(std::byte* bytes, uint64_t n) : data(bytes), size(n), model(n) {}
    uint64_t begin() const { return reinterpret_cast<uint64_t>(data); }
    uint64_t end() const { return begin() + size; }
    void fill(Random& random) {
        for (uint64_t i = 0; i + 8 <= size; i += 8) {
            uint64_t value = random.next();
            std::memcpy(data + i, &value, 8);
        }
        model.assign(data, data + size);
    }
    // Bytes that may be anything now.
    void forgive(uint64_t from, uint64_t to) {
        from = std::max(from, begin());
        to = std::min(to, end());
        if (from < to) std::memcpy(&model[from - begin()], data + (from - begin()), to - from);
    }
    std::byte* expected(uint64_t address) { return &model[address - begin()]; }
    bool holds(uint64_t address, uint64_t bytes) const {
        return address >= begin() && address + bytes <= end();
    }
    // Where it does not hold what it has to; "" if it does.
    std::string wrong() const {
        if (std::memcmp(data, model.data(), size) == 0) return "";
        uint64_t first = 0, last = size - 1, count = 0;
        while (data[first] == model[first]) ++first;
        while (data[last] == model[last]) --last;
        for (uint64_t i = first; i <= last; ++i) count += data[i] != model[i];
        return std::to_string(count) + " bytes from " + std::to_string(begin() + first) + " to " +
               std::to_string(begin() + last) + " of the area from " + std::to_string(begin());
    }
};

// Two engines and the ground on which batches take place. Here one large region; there, with nothing
// registered between and around them:
//
//   margin | first | margin | second | third | margin | closed | margin
class Ground {
   public:
    Ground(const std::string& transport, uint64_t frame, MemoryKind kind)
        : frame_(frame), pair_(options(transport, frame), engine_options("there", "")) {
        margin_ = 2 * frame;
        here_ = std::make_unique<Pages>(96 * frame + 2 * margin_);
        local_begin_ = here_->address(margin_);
        local_end_ = here_->address(margin_ + 96 * frame);
        REQUIRE(pair_.here->register_region(local_begin_, local_end_ - local_begin_, "").ok());
        areas_.emplace_back(here_->data(), here_->size());
        // Lengths that end within a page: what lies behind in the same page is nobody's.
        first_bytes_ = 32 * frame - 100;
        uint64_t half = 12 * frame, closed = 4 * frame;
        there_ = std::make_unique<Pages>(first_bytes_ + 2 * half + closed + 4 * margin_);
        uint64_t at = there_->address(margin_);
        if (kind == MemoryKind::kHostArena) {
            own_ = *pair_.there->allocate(first_bytes_, "");
            first_ = reinterpret_cast<uint64_t>(own_->data());
            areas_.emplace_back(own_->data(), own_->size());
        } else {
            first_ = at;
            add(first_, first_bytes_);
        }
        at += first_bytes_ + margin_;
        second_ = at;
        seam_ = at + half;
        third_end_ = seam_ + half;
        add(second_, half);
        add(seam_, half);
        closed_ = third_end_ + margin_;
        closed_end_ = closed_ + closed;
        add(closed_, closed);
        REQUIRE(pair_.there->deregister_region(closed_).ok());
        areas_.emplace_back(there_->data(), there_->size());
    }

    // One batch of its kind; what became of its slices, and how it was told.
    std::string batch(Random& random, bool& large) {
        if (batches_++ % 32 == 0) {
            for (Area& area : areas_) area.fill(random);
        }
        std::vector<bool> good;
        std::vector<Slice> slices = make(random, good);
        TransferRequest request = pair_.request(slices);
        request.background = random.one_in(4);
        bool submits = random.one_in(2);
        TicketStatus status;
        if (submits) {
            uint64_t ticket = *pair_.here->submit(request);
            REQUIRE(*pair_.here->wait(ticket, 120000));
            status = *pair_.here->status(ticket);
            REQUIRE(pair_.here->release(ticket).ok());
        } else if (pair_.here->transfer(request, &status)) {
            status.state = TicketState::kDone;
            status.slices.assign(slices.size(), SliceState::kDone);
        }
        bool all_good = std::ranges::count(good, false) == 0;
        REQUIRE_MESSAGE(status.state == (all_good ? TicketState::kDone : TicketState::kFailed),
                        status.failure.error.text);
        std::string verdict = all_good ? "" : std::to_string(static_cast<int>(status.failure.error.code));
        for (size_t i = 0; i < slices.size(); ++i) {
            const Slice& slice = slices[i];
            CAPTURE(i);
            CAPTURE(slice.length);
            REQUIRE_MESSAGE(status.slices[i] == (good[i] ? SliceState::kDone : SliceState::kFailed),
                            status.failure.error.text);
            verdict += good[i] ? '+' : '-';
            large = large || (!good[i] && slice.length > kWindowFrames * frame_);
            expect(slice, good[i]);
        }
        for (const Area& area : areas_) {
            std::string wrong = area.wrong();
            if (wrong.empty()) continue;
            for (size_t i = 0; i < slices.size(); ++i) {
                const auto& [local, remote, length, direction] = slices[i];
                MESSAGE(i << (direction == Direction::kWrite ? " write " : " read ") << length << " local "
                          << local << " remote " << remote << (good[i] ? "" : " refused"));
            }
            FAIL(wrong << (submits ? " by submit()" : " by transfer()"));
        }
        return verdict;
    }

   private:
    static EngineOptions options(const std::string& transport, uint64_t frame) {
        EngineOptions options = engine_options("here", transport);
        options.frame_bytes = frame;
        return options;
    }
    void add(uint64_t address, uint64_t bytes) {
        REQUIRE(pair_.there->register_region(address, bytes, "").ok());
    }
    Area& area_of(uint64_t address, uint64_t bytes) {
        for (Area& area : areas_) {
            if (area.holds(address, bytes)) return area;
        }
        FAIL("a slice lies nowhere");
        return areas_.front();
    }

    // Around the borders of frames, and small.
    uint64_t size(Random& random) {
        if (random.one_in(2)) return random.between(1, std::min<uint64_t>(frame_, 300));
        if (random.one_in(8)) return random.between(1, 3 * frame_);
        uint64_t frames = random.between(1, 3);
        uint64_t off = random.one_in(4) ? 0 : random.between(1, 70);
        return frames * frame_ + (random.one_in(2) ? off : -off);
    }

    // Ranges of one batch do not meet, on neither side: its order is nobody's business.
    std::vector<Slice> make(Random& random, std::vector<bool>& good) {
        std::vector<Slice> slices;
        uint64_t local = local_begin_;
        // Around each border there is room for one slice that crosses it.
        const uint64_t edge = 2 * frame_;
        uint64_t in_first = first_ + edge, in_second = second_, in_third = seam_ + edge;
        bool crossed[3] = {};
        size_t count = random.between(1, random.one_in(8) ? 600 : 24);
        while (slices.size() < count) {
            bool refused = random.one_in(10);
            uint64_t bytes = size(random);
            if (refused && random.one_in(3))
                bytes = random.between(kWindowFrames, 20) * frame_ + random.below(99);
            local += random.one_in(2) ? 0 : random.below(80);
            if (local + bytes > local_end_) break;
            uint64_t remote = 0;
            if (!refused) {
                bool second = random.one_in(4), third = random.one_in(4);
                uint64_t& cursor = second ? in_second : third ? in_third : in_first;
                uint64_t end = second ? seam_ - edge : third ? third_end_ : first_ + first_bytes_ - edge;
                cursor += random.one_in(2) ? 0 : random.below(80);
                if (cursor + bytes > end) break;
                remote = cursor;
                cursor += bytes;
            } else {
                size_t border = random.below(6);
                uint64_t beside = random.between(1, std::min(bytes, edge));
                if (border < 3 && crossed[border]) border = 3;
                if (border < 3) crossed[border] = true;
                if (border == 0) {
                    bytes = std::min(bytes + 1, edge);
                    remote = first_ - std::min(beside, bytes);
                } else if (border == 1) {
                    // (Not as far as the second: its pieces there would be its own to write.)
                    remote = first_ + first_bytes_ - (beside - 1);
                    bytes = std::min(bytes, beside - 1 + margin_);
                } else if (border == 2) {
                    bytes = std::clamp<uint64_t>(bytes, 2, 2 * edge);
                    remote = seam_ - std::min(std::min(beside, bytes - 1), edge);
                    if (remote + bytes > seam_ + edge) bytes = seam_ + edge - remote;
                } else if (border == 3) {
                    remote = third_end_ + random.below(margin_);
                } else if (border == 4) {
                    remote = closed_ + random.below(closed_end_ - closed_);
                } else {
                    remote = random.one_in(2) ? random.below(4096) : UINT64_MAX - random.below(4096);
                }
            }
            bool write = random.one_in(2);
            slices.push_back({local, remote, bytes, write ? Direction::kWrite : Direction::kRead});
            good.push_back(!refused);
            local += bytes;
        }
        if (slices.empty()) {
            slices.push_back({local_begin_, in_first, 1, Direction::kRead});
            good.push_back(true);
        }
        return slices;
    }

    void expect(const Slice& slice, bool good) {
        bool write = slice.direction == Direction::kWrite;
        if (good) {
            Area& mine = area_of(slice.local, slice.length);
            Area& theirs = area_of(slice.remote, slice.length);
            std::byte* a = mine.expected(slice.local);
            std::byte* b = theirs.expected(slice.remote);
            std::memcpy(write ? b : a, write ? a : b, slice.length);
        } else if (!write) {
            areas_.front().forgive(slice.local, slice.local + slice.length);
        } else if (slice.remote + slice.length > slice.remote) {
            // Its own bytes in registered memory may have been written in part, and no others.
            uint64_t end = slice.remote + slice.length;
            const std::pair<uint64_t, uint64_t> registered[] = {{first_, first_ + first_bytes_},
                                                                {second_, third_end_}};
            for (auto [from, to] : registered) {
                uint64_t low = std::max(from, slice.remote), high = std::min(to, end);
                for (Area& area : areas_) {
                    if (low < high) area.forgive(low, high);
                }
            }
        }
    }

    uint64_t frame_, margin_ = 0;
    std::unique_ptr<Pages> here_, there_;  // before the engines: they are closed first
    std::shared_ptr<transport::Memory> own_;
    std::vector<Area> areas_;  // the first: here
    uint64_t local_begin_ = 0, local_end_ = 0;
    uint64_t first_ = 0, first_bytes_ = 0, second_ = 0, seam_ = 0, third_end_ = 0, closed_ = 0,
             closed_end_ = 0;
    uint64_t batches_ = 0;
    Pair pair_;
};

size_t batches_asked(size_t otherwise) {
    const char* given = std::getenv("MOONPOOL_TRANSFER_BATCHES");
    return given == nullptr ? otherwise : std::strtoull(given, nullptr, 10);
}

void seeded(uint64_t frame, size_t batches, uint64_t salt) {
    if (batches == 0) return;
    for (MemoryKind kind : {MemoryKind::kHost, MemoryKind::kHostArena}) {
        std::vector<std::string> verdicts;
        size_t large = 0;
        each_host_transport([&](const std::string& transport) {
            Random random(salt + static_cast<uint64_t>(kind));  // the same batches for each
            Ground ground(transport, frame, kind);
            for (size_t i = 0; i < batches / 2; ++i) {
                CAPTURE(i);
                bool is_large = false;
                std::string verdict = ground.batch(random, is_large);
                large += is_large;
                if (i == verdicts.size()) {  // the first transport
                    verdicts.push_back(std::move(verdict));
                } else {
                    REQUIRE(verdict == verdicts[i]);
                }
            }
        });
        if (batches >= 500) CHECK(large != 0);  // slices that were refused and larger than the window
    }
}

}  // namespace

// MOONPOOL_TRANSFER_BATCHES=10000 is the long form, over each transport; a few of them then with whole
// frames.
TEST_CASE("batches: one slice in ten refused, sizes around the frames: no stray byte, no hole, one verdict") {
    seeded(4096, batches_asked(kUnderTsan ? 200 : 1000), 700);
}

TEST_CASE("batches: the same with frames as long as they are") {
    seeded(transport::tcp::kFrameBytes, batches_asked(0) / 50, 710);
}

TEST_CASE("batches: a refused slice larger than the window does not move those behind it") {
    each_host_transport([](const std::string& transport) {
        for (Direction direction : {Direction::kRead, Direction::kWrite}) {
            constexpr uint64_t kUnit = 32 << 10;
            EngineOptions options = engine_options("here", transport);
            options.frame_bytes = 2 * kUnit;
            Pair pair(options, engine_options("there", ""));
            constexpr uint64_t kBad = 18 * kUnit, kGood = 5 * kUnit + 1, kSmall = 4096;
            constexpr uint64_t kSmallAt = 20 * kUnit, kGoodAt = 22 * kUnit;
            Pages here(48 * kUnit), there(40 * kUnit);
            std::memset(here.data(), 0x11, here.size());
            std::memset(there.data(), 0x22, there.size());
            // Here each slice is registered alone; there one region goes on behind the small slice.
            for (auto [at, bytes] : {std::pair{uint64_t{0}, kBad}, {kSmallAt, kSmall}, {kGoodAt, kGood}}) {
                REQUIRE(pair.here->register_region(here.address(at), bytes, "").ok());
            }
            REQUIRE(pair.there->register_region(there.address(), there.size(), "").ok());
            std::vector<Slice> slices = {{here.address(), there.address(there.size()), kBad, direction},
                                         {here.address(kSmallAt), there.address(), kSmall, direction},
                                         {here.address(kGoodAt), there.address(8 * kUnit), kGood, direction}};
            TicketStatus status;
            REQUIRE_FALSE(pair.here->transfer(pair.request(slices), &status).ok());
            CHECK(status.slices[0] == SliceState::kFailed);
            CHECK(status.slices[1] == SliceState::kDone);
            CHECK(status.slices[2] == SliceState::kDone);
            CHECK(status.bytes_done == kSmall + kGood);
            bool read = direction == Direction::kRead;
            auto sound = [&](const Pages& pages, std::byte own, std::byte other, uint64_t from,
                             uint64_t small, uint64_t large, bool changes) {
                for (uint64_t i = from; i < pages.size(); ++i) {
                    bool moved = (i >= small && i < small + kSmall) || (i >= large && i < large + kGood);
                    if (pages.data()[i] != (moved && changes ? other : own)) return false;
                }
                return true;
            };
            // (The destination of the refused read holds anything.)
            CHECK(sound(here, std::byte{0x11}, std::byte{0x22}, kBad, kSmallAt, kGoodAt, read));
            CHECK(sound(there, std::byte{0x22}, std::byte{0x11}, 0, 0, 8 * kUnit, !read));
        }
    });
}

TEST_CASE("batches: reads that share a destination are done, whichever of them is refused") {
    each_host_transport([](const std::string& transport) {
        Pair pair(transport);
        Memory mine(*pair.here, kMiB, MemoryKind::kHost), theirs(*pair.there, kMiB, MemoryKind::kHostArena);
        std::memset(theirs.data(), 0x77, kMiB);
        std::vector<Slice> slices;
        for (uint64_t i = 0; i < 64; ++i) {
            uint64_t remote = i == 10 ? theirs.address() + 2 * kMiB : theirs.address() + i * 4096;
            slices.push_back({mine.address(), remote, 4096, Direction::kRead});
        }
        TicketStatus status;
        REQUIRE_FALSE(pair.here->transfer(pair.request(slices), &status).ok());
        CHECK(std::ranges::count(status.slices, SliceState::kDone) == 63);
        CHECK(status.slices[10] == SliceState::kFailed);
        CHECK(metric(*pair.here, "retries_total") == 0);
        CHECK(mine.data()[0] == std::byte{0x77});
    });
}

TEST_CASE("batches: a slice over two registrations that touch is refused, wherever frames end") {
    each_host_transport([](const std::string& transport) {
        Pair pair(transport);
        constexpr uint64_t kFrame = transport::tcp::kFrameBytes;
        Pages there(4 * kFrame);
        for (uint64_t at : {uint64_t{0}, 2 * kFrame}) {
            REQUIRE(pair.there->register_region(there.address(at), 2 * kFrame, "").ok());
        }
        Memory mine(*pair.here, 4 * kFrame, MemoryKind::kHostArena);
        // The seam lies at the end of the second frame, of the first, and inside of one.
        for (uint64_t from : {uint64_t{0}, kFrame, uint64_t{4096}}) {
            for (Direction direction : {Direction::kRead, Direction::kWrite}) {
                Slice over{mine.address(), there.address(from), 4 * kFrame - from, direction};
                Result<uint64_t> moved = pair.transfer({over});
                REQUIRE_FALSE(moved.ok());
                CHECK(moved.error().code == Code::kInvalidArgument);
                CHECK(moved.error().text.find("no registered region") != std::string::npos);
            }
        }
        CHECK(*pair.transfer({{mine.address(), there.address(), 2 * kFrame, Direction::kRead}}) ==
              2 * kFrame);
    });
}

TEST_CASE("batches: a region that is closed on the way takes its own slices with it, no others") {
    each_host_transport([](const std::string& transport) {
        Random random(720);
        constexpr uint64_t kFrame = 4096, kDies = 400 * kFrame, kStays = 40 * kFrame;
        EngineOptions options = engine_options("here", transport);
        options.frame_bytes = kFrame;
        Pair pair(options, engine_options("there", ""));
        Memory mine(*pair.here, kDies + kStays + kFrame, MemoryKind::kHost);
        for (int round = 0; round < 12; ++round) {
            Memory stays(*pair.there, kStays, MemoryKind::kHost);
            Pages dies(kDies);
            stays.fill(random);
            mine.fill(random);
            std::vector<std::byte> behind(mine.data() + kDies + kStays, mine.data() + mine.size());
            REQUIRE(pair.there->register_region(dies.address(), kDies, "").ok());
            std::vector<Slice> slices = {{mine.address(), dies.address(), kDies, Direction::kRead},
                                         {mine.address() + kDies, stays.address(), kStays, Direction::kRead}};
            uint64_t ticket = *pair.here->submit(pair.request(slices));
            uint64_t enough = random.below(kDies);
            while (pair.here->status(ticket)->bytes_done < enough && !*pair.here->wait(ticket, 0)) {
                std::this_thread::yield();
            }
            REQUIRE(pair.there->deregister_region(dies.address()).ok());
            REQUIRE(*pair.here->wait(ticket, 60000));
            TicketStatus status = *pair.here->status(ticket);
            CHECK(status.slices[0] != SliceState::kWaiting);
            REQUIRE_MESSAGE(status.slices[1] == SliceState::kDone, status.failure.error.text);
            CHECK(std::memcmp(mine.data() + kDies, stays.data(), kStays) == 0);
            CHECK(std::memcmp(mine.data() + kDies + kStays, behind.data(), behind.size()) == 0);
            REQUIRE(pair.here->release(ticket).ok());
        }
    });
}

TEST_CASE("visit: what a state machine computes wrongly is not touched") {
    transport::RegionTable table;
    std::shared_ptr<Region> region = *table.add(4096, 4096, "", {});
    using Access = transport::Visit::Access;
    transport::Visit visit;
    CHECK(visit.reach(*region, 4096, 4096, 0, 4096) == Access::kGranted);
    CHECK(visit.reach(*region, 5000, 100, 99, 1) == Access::kGranted);
    CHECK(visit.reach(*region, 5000, 100, 99, 2) == Access::kOutside);          // behind its slice
    CHECK(visit.reach(*region, 5000, 100, 101, 0) == Access::kOutside);         // at - length wraps
    CHECK(visit.reach(*region, 5000, 100, 1, UINT64_MAX) == Access::kOutside);  // bytes wrap
    CHECK(visit.reach(*region, 4000, 200, 100, 100) == Access::kOutside);  // a slice outside of its region
    CHECK(visit.reach(*region, UINT64_MAX, 4096, 0, 1) == Access::kOutside);
    region->close();
    transport::Visit later;
    CHECK(later.reach(*region, 4096, 4096, 0, 1) == Access::kClosing);
    visit.end();
    CHECK(region->drained());
}
