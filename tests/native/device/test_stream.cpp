// Copies, and the order that events make between streams.
#include "bed.hpp"

using namespace moonpool;
using namespace moonpool::testing;
using device::Copy;
using device::DeviceMemory;
using device::Event;
using device::must;
using device::SourceOrder;
using device::Stream;

namespace {

constexpr size_t kBytes = 64 << 10;

}  // namespace

TEST_CASE("device: copies of every size and alignment, one by one and in batches, arrive") {
    each_policy([](Bed& bed) {
        Random random(2301);
        Stream stream = must(Stream::create(bed.device, Stream::Priority::kDefault));
        DeviceMemory card = must(DeviceMemory::allocate(bed.device, kBytes));
        Pinned from(bed, kBytes), to(bed, kBytes);
        from.fill(random);
        REQUIRE(stream.copy({card.address(), from.address(), kBytes}));
        REQUIRE(stream.copy({0, 0, 0}));  // nothing
        std::vector<Copy> pieces;
        std::vector<unsigned char> expected = to.bytes();
        for (size_t at = 0; at < kBytes;) {
            size_t bytes = std::min<size_t>(random.below(700), kBytes - at);
            pieces.push_back({to.address() + at, card.address() + at, bytes});
            at += bytes;
        }
        REQUIRE(stream.copy(pieces, SourceOrder::kStream));
        REQUIRE(stream.copy(std::span<const Copy>(), SourceOrder::kStream));
        Copy none[] = {{to.address(), card.address(), 0}, {to.address(), card.address(), 0}};
        REQUIRE(stream.copy(none, SourceOrder::kStream));
        finish(bed, stream);
        CHECK(to.bytes() == from.bytes());
    });
}

TEST_CASE("device: a driver without batch copies makes them one by one") {
    if (is_real()) return;
    soft_device().soft_reset(0, 1);
    Bed bed;
    soft_device().soft_hide("cuMemcpyBatchAsync");
    device::Driver::use_library_for_tests(soft_library());  // looked up anew
    bed.device = must(device::Device::open(0));
    REQUIRE_FALSE(bed.device->driver().has_batch_copies());
    {
        Random random(2302);
        Stream stream = must(Stream::create(bed.device, Stream::Priority::kDefault));
        DeviceMemory card = must(DeviceMemory::allocate(bed.device, 4096));
        Pinned from(bed, 4096), to(bed, 4096);
        from.fill(random);
        Copy halves[] = {{card.address(), from.address(), 2048},
                         {card.address() + 2048, from.address() + 2048, 2048}};
        REQUIRE(stream.copy(halves, SourceOrder::kStream));
        REQUIRE(stream.copy({to.address(), card.address(), 4096}));
        finish(bed, stream);
        CHECK(to.bytes() == from.bytes());
        CHECK(soft_device().soft_calls("cuMemcpyAsync") == 3);
    }
    bed.end();
}

TEST_CASE("device: an event is over when its stream has got there, and orders other streams") {
    each_policy([](Bed& bed) {
        Random random(2303);
        Stream first = must(Stream::create(bed.device, Stream::Priority::kDefault));
        Stream second = must(Stream::create(bed.device, Stream::Priority::kLowest));
        Event event = must(Event::create(bed.device)), end = must(Event::create(bed.device));
        CHECK(must(event.over()));  // never recorded
        REQUIRE(second.wait_for(event));
        DeviceMemory card = must(DeviceMemory::allocate(bed.device, kBytes));
        Pinned from(bed, kBytes), to(bed, kBytes);
        for (int round = 0; round < 5; ++round) {
            from.fill(random);
            REQUIRE(first.copy({card.address(), from.address(), kBytes}));
            REQUIRE(event.record(first.handle()));
            REQUIRE(second.wait_for(event));
            REQUIRE(second.copy({to.address(), card.address(), kBytes}));
            REQUIRE(end.record(second.handle()));
            REQUIRE(must(end.wait(10000)));
            CHECK(must(event.over()));
            CHECK(to.bytes() == from.bytes());
        }
    });
}

TEST_CASE("device: a wait for a card that hangs has an end, and moved handles work") {
    if (is_real()) return;
    Bed bed;
    {
        Stream stream = must(Stream::create(bed.device, Stream::Priority::kLowest));
        CHECK(soft_device().soft_priority(stream.handle()) == 0);
        Event event = must(Event::create(bed.device));
        soft_device().soft_hang(1);
        REQUIRE(event.record(stream.handle()));
        CHECK_FALSE(must(event.wait(0)));
        CHECK_FALSE(must(event.wait(20)));
        soft_device().soft_unhang();
        CHECK(must(event.wait(10000)));
        Stream moved = std::move(stream);
        stream = must(Stream::create(bed.device, Stream::Priority::kDefault));
        moved = std::move(stream);
        Event other = must(Event::create(bed.device));
        other = std::move(event);
        REQUIRE(other.record(moved.handle()));
        CHECK(must(other.wait(10000)));
    }
    bed.end();
}

TEST_CASE("device: after an error that lasts for ever each call fails and the device remembers the first") {
    if (is_real()) return;
    Bed bed;
    {
        Stream stream = must(Stream::create(bed.device, Stream::Priority::kDefault));
        Event event = must(Event::create(bed.device));
        DeviceMemory card = must(DeviceMemory::allocate(bed.device, 4096));
        Pinned host(bed, 4096);
        soft_device().soft_die(2, 719);
        for (int i = 0; i < 3; ++i) REQUIRE(stream.copy({card.address(), host.address(), 4096}));
        REQUIRE(event.record(stream.handle()));
        Result<bool> over = event.wait(10000);
        REQUIRE_FALSE(over);
        CHECK(over.error().code == Code::kUnavailable);
        CHECK(over.error().text.find("cuEventQuery: ") == 0);
        CHECK(bed.device->lost() == 719);
        CHECK_FALSE(stream.copy({card.address(), host.address(), 4096}));
        CHECK_FALSE(Event::create(bed.device));
    }
    bed.end();
}

TEST_CASE(
    "device: memory of the host that is not pinned, or read-only, is a violation on the software device") {
    if (is_real()) return;
    auto violation = [](const std::function<void(Bed&, Stream&, DeviceMemory&)>& body) {
        Bed bed;
        {
            Stream stream = must(Stream::create(bed.device, Stream::Priority::kDefault));
            DeviceMemory card = must(DeviceMemory::allocate(bed.device, 4096));
            body(bed, stream, card);
            soft_device().soft_settle();
        }
        char text[200];
        CHECK(soft_device().soft_violations(text, sizeof(text)) == 1);
        bed.forget();
        return std::string(text);
    };
    std::vector<char> heap(8192);
    uint64_t pageable = reinterpret_cast<uint64_t>(heap.data());
    CHECK(violation([&](Bed&, Stream& stream, DeviceMemory& card) {
              REQUIRE(stream.copy({card.address(), pageable, 64}));
          }).find("neither a card's nor pinned") != std::string::npos);
    CHECK(violation([&](Bed&, Stream& stream, DeviceMemory& card) {
              REQUIRE(stream.copy({card.address() + 4000, card.address(), 97}));
          }).find("behind the end") != std::string::npos);
    CHECK(violation([&](Bed& bed, Stream& stream, DeviceMemory& card) {
              device::OnDevice here(*bed.device);
              const device::Driver& driver = bed.device->driver();
              REQUIRE(driver.cuMemHostRegister(heap.data(), 8192, device::cu::kRegisterReadOnly) == 0);
              REQUIRE(stream.copy({card.address(), pageable, 64}));
              soft_device().soft_settle();
              REQUIRE(stream.copy({pageable, card.address(), 64}));
              soft_device().soft_settle();
              driver.cuMemHostUnregister(heap.data());
          }).find("registered read-only") != std::string::npos);
}
