// Memory that another component has mapped read-only, pinned part by part: what a card may read of it, what
// stays when the driver refuses, and what it takes to give it back.
#include <sys/mman.h>
#include <sys/wait.h>

#include "bed.hpp"
#include "device/address.hpp"
#include "device/registered_parts.hpp"

using namespace moonpool;
using namespace moonpool::testing;
using device::DeviceMemory;
using device::must;
using device::RegisteredParts;
using device::Stream;

namespace {

constexpr uint64_t kPart = 64 << 10;
constexpr uint64_t kBytes = 5 * kPart / 2 + 4096;  // three parts, the last one shorter

// Of a memfd, as a node's arena is, in two mappings: one to write, one to read.
struct SharedBytes {
    unsigned char* written = nullptr;
    const std::byte* begin = nullptr;

    explicit SharedBytes(Random& random) {
        int fd = ::memfd_create("parts", MFD_CLOEXEC);
        REQUIRE(::ftruncate(fd, kBytes) == 0);
        written =
            static_cast<unsigned char*>(::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
        begin = static_cast<const std::byte*>(::mmap(nullptr, kBytes, PROT_READ, MAP_SHARED, fd, 0));
        ::close(fd);
        random.fill(written, kBytes);
    }
    ~SharedBytes() {
        ::munmap(written, kBytes);
        ::munmap(const_cast<std::byte*>(begin), kBytes);
    }
    SharedBytes(const SharedBytes&) = delete;
    uint64_t address() const { return reinterpret_cast<uint64_t>(begin); }
};

}  // namespace

TEST_CASE("device: memory that is mapped read-only is pinned part by part, and read by a card") {
    each_policy([](Bed& bed) {
        Random random(61);
        SharedBytes bytes(random);
        int before = is_real() ? 0 : soft_device().soft_calls("cuMemHostRegister");
        RegisteredParts parts(bed.device, bytes.begin, kPart);
        if (!bed.device->facts().registers_read_only) return;
        CHECK_FALSE(parts.holds(0, 1));
        REQUIRE(parts.grow(kPart + 4096));
        REQUIRE(parts.grow(kBytes));
        REQUIRE(parts.grow(4096));  // is pinned
        CHECK(parts.bytes() == kBytes);
        if (!is_real()) CHECK(soft_device().soft_calls("cuMemHostRegister") - before == 4);
        // A part ends at each call of grow(), too.
        CHECK(parts.holds(0, kPart));
        CHECK_FALSE(parts.holds(1, kPart));
        CHECK(parts.holds(kPart, 4096));
        CHECK_FALSE(parts.holds(kPart, 4097));
        CHECK(parts.holds(kBytes - 1, 1));
        CHECK_FALSE(parts.holds(kBytes - 1, 2));
        CHECK_FALSE(parts.holds(kBytes, 1));
        CHECK_FALSE(parts.holds(0, UINT64_MAX));
        CHECK(must(device::classify(bytes.address() + kPart, 4096)).kind == device::AddressKind::kPinned);

        Pinned back(bed, kPart);
        DeviceMemory card = must(DeviceMemory::allocate(bed.device, kPart));
        copy_now(bed, card.address(), bytes.address(), kPart);
        copy_now(bed, back.address(), card.address(), kPart);
        CHECK(std::memcmp(back.data(), bytes.written, kPart) == 0);
        CHECK(parts.release());
        CHECK(parts.bytes() == 0);
        CHECK(must(device::classify(bytes.address(), 1)).kind == device::AddressKind::kUnknown);
        REQUIRE(parts.grow(kPart));  // its destructor gives it back
    });
}

TEST_CASE("device: what a driver does not pin ends there, and the parts before stay pinned") {
    if (is_real()) return;
    Random random(62);
    for (int code : {1, 2, 800, 801}) {
        CAPTURE(code);
        Bed bed;
        SharedBytes bytes(random);
        {
            RegisteredParts parts(bed.device, bytes.begin, kPart);
            soft_device().soft_fail("cuMemHostRegister", 2, code);
            Status refused = parts.grow(kBytes);
            REQUIRE_FALSE(refused);
            CHECK(refused.error().text.find("cuMemHostRegister: ") == 0);
            CHECK(parts.bytes() == kPart);
            CHECK(parts.holds(0, kPart));
            REQUIRE(parts.grow(kBytes));  // later it does
        }
        bed.end();
    }
    // A limit of the driver or the system.
    Bed bed;
    SharedBytes bytes(random);
    {
        RegisteredParts parts(bed.device, bytes.begin, kPart);
        soft_device().soft_limit(UINT64_MAX, 2 * kPart + 100);
        REQUIRE_FALSE(parts.grow(kBytes));
        CHECK(parts.bytes() == 2 * kPart);
    }
    bed.end();
}

TEST_CASE("device: a card that does not read memory which is mapped read-only pins none of it") {
    if (is_real()) return;
    Random random(63);
    Bed bed;
    soft_device().soft_refuse("cuDeviceGetAttribute", 801);
    bed.device = must(device::Device::open(0));
    SharedBytes bytes(random);
    {
        RegisteredParts parts(bed.device, bytes.begin, kPart);
        Status refused = parts.grow(kBytes);
        REQUIRE_FALSE(refused);
        CHECK(refused.error().text.find("does not pin memory that is mapped read-only") != std::string::npos);
        CHECK(soft_device().soft_calls("cuMemHostRegister") == 0);
    }
    bed.end();
}

TEST_CASE("device: parts of a lost card, in a child of fork() and of a card that hangs are not given back") {
    if (is_real()) return;
    Random random(64);
    Bed bed;
    SharedBytes bytes(random);
    {
        RegisteredParts parts(bed.device, bytes.begin, kPart);
        REQUIRE(parts.grow(kBytes));
        pid_t child = ::fork();
        REQUIRE(child >= 0);
        if (child == 0) ::_exit(parts.release() ? 1 : 0);
        int status = 0;
        REQUIRE(::waitpid(child, &status, 0) == child);
        CHECK(status == 0);
        CHECK(parts.holds(0, kPart));
        soft_device().soft_fail("cuMemHostUnregister", 2, 719);
        CHECK_FALSE(parts.release());
        CHECK(soft_device().soft_calls("cuMemHostUnregister") == 3);  // each is tried
    }
    bed.forget();
    bed.device = must(device::Device::open(0));
    {
        RegisteredParts parts(bed.device, bytes.begin, kPart);
        REQUIRE(parts.grow(kBytes));
        parts.leak();
    }
    CHECK(soft_device().soft_calls("cuMemHostUnregister") == 0);
    bed.forget();
}
