// Memory of DAX devices: what /sys says of them, and which process has which piece. Files stand in for the
// devices; tests/vm has real ones.
#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "dax_machine.hpp"
#include "memory/dax_memory.hpp"

using namespace moonpool;
using moonpool::testing::DaxMachine;

namespace {

constexpr uint64_t kGrain = 2u << 20;

std::string why_not(const std::string& path, const std::string& root) {
    Result<DaxDevice> found = DaxDevice::find(path, root);
    REQUIRE_MESSAGE(!found.ok(), path);
    CHECK(found.error().code == Code::kInvalidArgument);
    return found.error().text;
}

DaxDevice device_of(const DaxMachine& machine) { return *DaxDevice::find("/dev/dax0.0", machine.root()); }

std::unique_ptr<DaxMemory> piece(const DaxDevice& device, uint64_t bytes) {
    Result<std::unique_ptr<DaxMemory>> made = DaxMemory::create(device, bytes);
    REQUIRE_MESSAGE(made.ok(), (made.ok() ? "" : made.error().text));
    return std::move(*made);
}

Code refusal(const DaxDevice& device, uint64_t bytes) {
    Result<std::unique_ptr<DaxMemory>> made = DaxMemory::create(device, bytes);
    REQUIRE(!made.ok());
    return made.error().code;
}

}  // namespace

TEST_CASE("dax: a device is found by its name, with what /sys says of it") {
    DaxMachine machine;
    machine.add("dax0.0", 8 * kGrain + 4096);
    for (const char* path : {"/dev/dax0.0", "dax0.0"}) {
        Result<DaxDevice> found = DaxDevice::find(path, machine.root());
        REQUIRE(found.ok());
        CHECK(found->name == "dax0.0");
        CHECK(found->bytes == 8 * kGrain);  // whole pieces of its alignment
        CHECK(found->align == kGrain);
        CHECK(found->node == 2);
        CHECK(found->open().ok());
    }
    for (const char* path : {"", "dax", "dax0", "dax.0", "dax0.", "dax0.0.0", "daxa.0", "pmem0", "/dev/pmem0",
                             "../dax0.0", "/dev/../dax0.0", "/dev/dax0.0/x", "dax0.0\n", "/tmp/dax0.0"}) {
        CHECK(why_not(path, machine.root()).find("is an example of one") != std::string::npos);
    }
    CHECK(why_not("dax1.0", machine.root()).find("does not list it") != std::string::npos);
    machine.fact("dax0.0", "target_node", "-1");
    machine.fact("dax0.0", "align", "4096");
    CHECK(DaxDevice::find("dax0.0", machine.root())->node == -1);
    CHECK(DaxDevice::find("dax0.0", machine.root())->align == 4096);
    for (const char* align : {"0", "1", "6291456", "1099511627776", "18446744073709551615"}) {
        machine.fact("dax0.0", "align", align);
        CHECK(why_not("dax0.0", machine.root()).find("make no sense") != std::string::npos);
    }
    machine.fact("dax0.0", "align", "2097152");
    for (const char* size : {"", "much", "-1", "12 MiB", "0x100", "99999999999999999999999"}) {
        machine.fact("dax0.0", "size", size);
        CHECK(why_not("dax0.0", machine.root()).find("does not list it with a size") != std::string::npos);
    }
    machine.fact("dax0.0", "size", "0");
    CHECK(why_not("dax0.0", machine.root()).find("make no sense") != std::string::npos);
}

TEST_CASE("dax: pieces do not overlap, are zeros, and are free again when they go") {
    DaxMachine machine;
    machine.add("dax0.0", 8 * kGrain);  // of which the first has the table
    DaxDevice device = device_of(machine);
    std::unique_ptr<DaxMemory> a = piece(device, 1), b = piece(device, 2 * kGrain + 1);
    CHECK(a->place().offset == kGrain);
    CHECK(b->place().offset == 2 * kGrain);
    CHECK(a->place().nonce != b->place().nonce);
    std::memset(a->data(), 0xAA, kGrain);
    std::memset(b->data(), 0xBB, 3 * kGrain);
    CHECK(std::all_of(a->data(), a->data() + kGrain, [](std::byte x) { return x == std::byte{0xAA}; }));
    CHECK(refusal(device, 4 * kGrain) == Code::kTooLarge);  // three are left
    a.reset();
    CHECK(refusal(device, 4 * kGrain) == Code::kTooLarge);  // four, but not in a row
    b.reset();
    b = piece(device, 7 * kGrain);
    CHECK(std::all_of(b->data(), b->data() + 7 * kGrain, [](std::byte x) { return x == std::byte{0}; }));
    CHECK(refusal(device, 1) == Code::kTooLarge);
    CHECK(refusal(device, uint64_t{1} << 45) == Code::kTooLarge);
}

TEST_CASE("dax: a piece is its owner's until that has ended, however it ends") {
    DaxMachine machine;
    machine.add("dax0.0", 4 * kGrain);
    DaxDevice device = device_of(machine);
    int told[2], end[2];
    REQUIRE(::pipe(told) == 0);
    REQUIRE(::pipe(end) == 0);
    pid_t child = ::fork();
    if (child == 0) {
        Result<std::unique_ptr<DaxMemory>> made = DaxMemory::create(device, 3 * kGrain);
        char c = made.ok() ? 'y' : 'n';
        (void)!::write(told[1], &c, 1);
        (void)!::read(end[0], &c, 1);
        ::_exit(0);  // gives nothing back
    }
    char c = 0;
    REQUIRE(::read(told[0], &c, 1) == 1);
    CHECK(c == 'y');
    CHECK(refusal(device, 1) == Code::kTooLarge);
    REQUIRE(::write(end[1], &c, 1) == 1);
    REQUIRE(::waitpid(child, nullptr, 0) == child);
    std::unique_ptr<DaxMemory> all = piece(device, 3 * kGrain);
    // A child that inherits it and ends does not give it back.
    child = ::fork();
    if (child == 0) {
        all.reset();
        ::_exit(0);
    }
    REQUIRE(::waitpid(child, nullptr, 0) == child);
    CHECK(refusal(device, 1) == Code::kTooLarge);
    for (int fd : {told[0], told[1], end[0], end[1]}) ::close(fd);
}

TEST_CASE("dax: a peer's piece is mapped where the same device is, and nowhere else") {
    DaxMachine machine, other;
    machine.add("dax0.0", 4 * kGrain);
    other.add("dax0.0", 4 * kGrain);
    std::unique_ptr<DaxMemory> own = piece(device_of(machine), 5000), theirs = piece(device_of(other), 5000);
    std::memcpy(own->data() + 4000, "bytes", 5);
    Result<Mapping> mapped = DaxMemory::map_peers(own->place(), 5000, machine.root());
    REQUIRE(mapped.ok());
    CHECK(std::memcmp(mapped->data() + own->place().offset + 4000, "bytes", 5) == 0);
    auto refused = [&](DaxPlace place, uint64_t bytes = 5000) {
        Result<Mapping> none = DaxMemory::map_peers(place, bytes, machine.root());
        REQUIRE(!none.ok());
        return none.error().code;
    };
    CHECK(refused(theirs->place()) == Code::kUnavailable);  // of the same name, at the same offset
    const DaxPlace good = own->place();
    for (DaxPlace place :
         {DaxPlace{"dax0.0", 0, good.nonce}, DaxPlace{"dax0.0", good.offset + 4096, good.nonce},
          DaxPlace{"dax0.0", 4 * kGrain, good.nonce},
          DaxPlace{"dax0.0", ~uint64_t{0} - kGrain + 1, good.nonce}, DaxPlace{"dax0.0", good.offset, 0}}) {
        CHECK(refused(place) == Code::kProtocol);
    }
    CHECK(refused(good, 4 * kGrain) == Code::kProtocol);
    CHECK(refused(good, 0) == Code::kProtocol);
    CHECK(refused({"../../etc/passwd", good.offset, good.nonce}) == Code::kInvalidArgument);
    own.reset();
    CHECK(refused(good) == Code::kUnavailable);  // it has gone
}

TEST_CASE("dax: data of others is not written over") {
    DaxMachine machine;
    machine.add("dax0.0", 4 * kGrain);
    {
        std::fstream file(machine.root() + "/dev/dax0.0", std::ios::in | std::ios::out);
        file.seekp(100);
        file << "a database";
    }
    Result<std::unique_ptr<DaxMemory>> made = DaxMemory::create(device_of(machine), kGrain);
    REQUIRE(!made.ok());
    CHECK(made.error().text.find("has data that is not moonpool's") != std::string::npos);
    machine.fact("dax0.0", "size", "4096");
    machine.fact("dax0.0", "align", "4096");
    CHECK(refusal(device_of(machine), 1) == Code::kTooLarge);
}
