// Slots of pinned memory: when they come back, when they do not, and how many there are.
#include <atomic>
#include <set>
#include <thread>

#include "bed.hpp"
#include "device/pinned_ring.hpp"

using namespace moonpool;
using namespace moonpool::testing;
using device::DeviceMemory;
using device::must;
using device::PinnedRing;
using device::RingOptions;
using device::RingSlot;
using device::Stream;

namespace {

constexpr uint64_t kSlot = 4096;

RingOptions small(uint32_t slots) { return {.slot_bytes = kSlot, .slots = slots}; }

void check_integrity(const PinnedRing& ring) {
    device::RingCounts counts = ring.counts();
    CHECK(counts.free + counts.taken + counts.in_flight + counts.lost == ring.slots());
}

}  // namespace

TEST_CASE("device: a ring's slots are apart, and come back when they are released") {
    Bed bed;
    {
        std::unique_ptr<PinnedRing> ring = must(PinnedRing::open(bed.device, small(4)));
        CHECK(ring->slots() == 4);
        CHECK(RingOptions{}.slot_bytes * RingOptions{}.slots == 64u << 20);
        std::vector<RingSlot> slots;
        std::set<uint64_t> addresses;
        for (int i = 0; i < 4; ++i) {
            slots.push_back(must(ring->take(0)));
            addresses.insert(slots.back().address() / kSlot);
            std::memset(slots.back().bytes().data(), i, kSlot);
        }
        CHECK(addresses.size() == 4);
        CHECK(ring->take(0).error().code == Code::kTimeout);
        CHECK(ring->counts().taken == 4);
        slots[2].release();
        CHECK_FALSE(slots[2]);
        slots[2].release();  // nothing
        RingSlot again = must(ring->take(0));
        RingSlot moved = std::move(again);
        CHECK(moved);
        slots.clear();
        check_integrity(*ring);
        CHECK(ring->counts().free == 3);
    }
    bed.end();
}

TEST_CASE("device: users of a ring with a share of it leave the rest to others") {
    Bed bed;
    {
        std::unique_ptr<PinnedRing> ring = must(PinnedRing::open(bed.device, small(4)));
        device::RingShare share(2);
        std::vector<RingSlot> slots;
        slots.push_back(must(ring->take(0, &share)));
        slots.push_back(must(ring->take(0, &share)));
        CHECK(ring->take(0, &share).error().code == Code::kTimeout);
        slots.push_back(must(ring->take(0)));
        slots.front().release();
        slots.push_back(must(ring->take(0, &share)));
        CHECK(ring->take(0, &share).error().code == Code::kTimeout);
        CHECK(ring->counts().free == 1);
        check_integrity(*ring);
    }
    bed.end();
}

TEST_CASE("device: a slot that a stream uses comes back with its event, not before") {
    each_policy([](Bed& bed) {
        Random random(2320);
        std::unique_ptr<PinnedRing> ring = must(PinnedRing::open(bed.device, small(2)));
        Stream stream = must(Stream::create(bed.device, Stream::Priority::kDefault));
        DeviceMemory card = must(DeviceMemory::allocate(bed.device, 16 * kSlot));
        Pinned truth(bed, 16 * kSlot), seen(bed, 16 * kSlot);
        truth.fill(random);
        for (uint64_t i = 0; i < 16; ++i) {
            RingSlot slot = must(ring->take(10000));
            std::memcpy(slot.bytes().data(), truth.data() + i * kSlot, kSlot);
            slot.used_on(stream);
            REQUIRE(stream.copy({card.address() + i * kSlot, slot.address(), kSlot}));
            slot.release();
            check_integrity(*ring);
        }
        REQUIRE(stream.copy({seen.address(), card.address(), 16 * kSlot}));
        finish(bed, stream);
        CHECK(seen.bytes() == truth.bytes());
        REQUIRE(ring->close(10000));
        CHECK(ring->take(0).error().code == Code::kClosed);
    });
}

TEST_CASE("device: several threads share a ring") {
    each_policy([](Bed& bed) {
        std::unique_ptr<PinnedRing> ring = must(PinnedRing::open(bed.device, small(3)));
        std::vector<std::thread> threads;
        std::atomic<int> wrong{0};
        for (unsigned char t = 0; t < 4; ++t) {
            threads.emplace_back([&, t] {
                auto work = [&]() -> Status {
                    Result<Stream> stream = Stream::create(bed.device, Stream::Priority::kDefault);
                    if (!stream) return stream.error();
                    Result<DeviceMemory> card = DeviceMemory::allocate(bed.device, kSlot);
                    if (!card) return card.error();
                    Result<device::Event> event = device::Event::create(bed.device);
                    if (!event) return event.error();
                    for (int i = 0; i < 10; ++i) {
                        Result<RingSlot> in = ring->take(10000);
                        if (!in) return in.error();
                        std::memset(in->bytes().data(), t * 16 + i, kSlot);
                        in->used_on(*stream);
                        if (Status s = stream->copy({card->address(), in->address(), kSlot}); !s) return s;
                        in->release();
                        Result<RingSlot> out = ring->take(10000);
                        if (!out) return out.error();
                        out->used_on(*stream);
                        if (Status s = stream->copy({out->address(), card->address(), kSlot}); !s) return s;
                        if (Status s = event->record(stream->handle()); !s) return s;
                        Result<bool> over = event->wait(10000);
                        if (!over || !*over) return Error{Code::kTimeout, "no end"};
                        for (std::byte b : out->bytes()) wrong += b != static_cast<std::byte>(t * 16 + i);
                    }
                    return success();
                };
                if (!work()) ++wrong;
            });
        }
        for (std::thread& thread : threads) thread.join();
        CHECK(wrong == 0);
        check_integrity(*ring);
    });
}

TEST_CASE(
    "device: a ring takes half as many slots where the system refuses more, and is absent with a reason") {
    if (is_real()) return;
    Bed bed;
    soft_device().soft_limit(UINT64_MAX, 5 * kSlot);
    CHECK(must(PinnedRing::open(bed.device, small(16)))->slots() == 4);
    soft_device().soft_limit(UINT64_MAX, 2 * kSlot);
    CHECK(must(PinnedRing::open(bed.device, small(16)))->slots() == 2);
    soft_device().soft_limit(UINT64_MAX, kSlot);
    Result<std::unique_ptr<PinnedRing>> none = PinnedRing::open(bed.device, small(16));
    REQUIRE_FALSE(none);
    CHECK(none.error().text.find("no pinned memory of 2 x 4096 bytes: cuMemHostRegister: ") == 0);
    bed.end();
}

TEST_CASE("device: slots of a card that hangs do not come back, and their memory is not freed") {
    if (is_real()) return;
    Bed bed;
    {
        std::unique_ptr<PinnedRing> ring = must(PinnedRing::open(bed.device, small(2)));
        Stream stream = must(Stream::create(bed.device, Stream::Priority::kDefault));
        DeviceMemory card = must(DeviceMemory::allocate(bed.device, kSlot));
        soft_device().soft_hang(1);
        uint64_t address = 0;
        for (int i = 0; i < 2; ++i) {
            RingSlot slot = must(ring->take(0));
            slot.used_on(stream);
            address = slot.address();
            REQUIRE(stream.copy({slot.address(), card.address(), kSlot}));
        }
        CHECK(ring->take(10).error().code == Code::kTimeout);
        CHECK(ring->counts().in_flight == 2);
        Status closed = ring->close(10);
        REQUIRE_FALSE(closed);
        CHECK(closed.error().code == Code::kTimeout);
        CHECK(closed.error().text ==
              "2 of 2 slots of the pinned ring did not come back: their memory stays pinned");
        CHECK(ring->close(10));
        ring.reset();
        soft_device().soft_unhang();
        soft_device().soft_settle();  // the card writes at last: the memory is there, and pinned
        CHECK(*reinterpret_cast<unsigned char*>(address) == 0xDB);
    }
    bed.end(1);
}

TEST_CASE("device: a ring of a card that is lost says so once it is asked, and keeps no thread waiting") {
    if (is_real()) return;
    Bed bed;
    {
        std::unique_ptr<PinnedRing> ring = must(PinnedRing::open(bed.device, small(2)));
        Stream stream = must(Stream::create(bed.device, Stream::Priority::kDefault));
        DeviceMemory card = must(DeviceMemory::allocate(bed.device, kSlot));
        RingSlot held = must(ring->take(0));
        RingSlot slot = must(ring->take(0));
        slot.used_on(stream);
        REQUIRE(stream.copy({card.address(), slot.address(), kSlot}));
        soft_device().soft_die(1, 700);
        slot.release();
        Result<RingSlot> none = ring->take(10000);
        REQUIRE_FALSE(none);
        CHECK(none.error().code == Code::kUnavailable);
        CHECK(none.error().text.find("the CUDA device is lost: an illegal memory access") == 0);
        held.release();
        check_integrity(*ring);
        CHECK(ring->counts().lost == 1);
        CHECK(ring->close(10000).error().code == Code::kUnavailable);
    }
}

TEST_CASE("device: closing a ring ends the waits for its slots") {
    Bed bed;
    {
        std::unique_ptr<PinnedRing> ring = must(PinnedRing::open(bed.device, small(1)));
        RingSlot slot = must(ring->take(0));
        std::atomic<bool> refused{false};
        std::thread waiter([&] {
            Result<RingSlot> none = ring->take(60000);
            refused = !none && none.error().code == Code::kClosed;
            slot.release();
        });
        CHECK(ring->close(60000));
        waiter.join();
        CHECK(refused);
    }
    bed.end();
}
