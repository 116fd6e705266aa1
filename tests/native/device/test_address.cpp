// What an address is: each kind, and each way of naming memory that is none.
#include <sys/mman.h>
#include <sys/uio.h>

#include <cerrno>

#include "bed.hpp"
#include "device/address.hpp"
#include "memory/address.hpp"

using namespace moonpool;
using namespace moonpool::testing;
using device::AddressKind;
using device::classify;

TEST_CASE("device: an address is what the driver says") {
    Bed bed;
    {
        auto* allocate_managed = engine_call<int(uint64_t*, size_t, unsigned)>("cuMemAllocManaged");
        device::DeviceMemory card = device::must(device::DeviceMemory::allocate(bed.device, 1 << 20));
        Pinned pinned(bed, 1 << 20);
        std::vector<char> heap(1 << 20);
        uint64_t host = reinterpret_cast<uint64_t>(heap.data()), managed = 0;
        {
            device::OnDevice here(*bed.device);
            REQUIRE(allocate_managed(&managed, 1 << 16, 1) == 0);
        }
        device::Address at = device::must(classify(card.address() + 4096, 8192));
        CHECK(at.kind == AddressKind::kDevice);
        CHECK(at.device == 0);
        CHECK(at.base == card.address());
        CHECK(at.bytes >= card.bytes());
        CHECK(at.context == bed.device->context());
        CHECK(device::must(classify(pinned.address() + 100, 1000)).kind == AddressKind::kPinned);
        CHECK(device::must(classify(host, heap.size())).kind == AddressKind::kUnknown);
        CHECK(device::must(classify(managed, 1 << 16)).kind == AddressKind::kManaged);
        CHECK(device::must(classify(0, 0)).kind == AddressKind::kUnknown);
        CHECK_FALSE(classify(UINT64_MAX - 10, 100));

        MemoryRef ref = device::must(describe_memory(card.address(), card.bytes()));
        CHECK(ref.kind == MemoryKind::kDevice);
        CHECK(ref.device == 0);
        CHECK(ref.bytes == card.bytes());
        CHECK(device::must(describe_memory(pinned.address(), 100)).kind == MemoryKind::kPinned);
        CHECK(device::must(describe_memory(host, heap.size())).kind == MemoryKind::kHost);
        CHECK(describe_memory(managed, 4096).error().text.find("managed CUDA memory") == 0);
        CHECK(describe_memory(4096, 4096).error().text == "at 0x1000 nothing is mapped");
        device::OnDevice here(*bed.device);
        REQUIRE(bed.device->driver().cuMemFree(managed) == 0);
    }
    bed.end();
}

TEST_CASE("device: a range over two allocations, over an end, or of memory that was freed is refused") {
    Bed bed;
    device::DeviceMemory card = device::must(device::DeviceMemory::allocate(bed.device, 2 << 20));
    uint64_t address = card.address(), bytes = card.bytes();
    Pinned pinned(bed, 4096);
    for (uint64_t beyond : {uint64_t{64} << 40, pinned.address() - address}) {
        if (pinned.address() < address) continue;
        Result<device::Address> over = classify(address, beyond);
        REQUIRE_FALSE(over);
        CHECK(over.error().code == Code::kInvalidArgument);
        CHECK(over.error().text.find("begin and end in different allocations") != std::string::npos);
    }
    if (!is_real()) {  // a real one may round an allocation up
        CHECK_FALSE(classify(address, bytes + 1));
        CHECK_FALSE(classify(address - 1, 2));
        CHECK_FALSE(describe_memory(address - 1, 2));
    }
    card = device::DeviceMemory();
    CHECK(device::must(classify(address, bytes)).kind == AddressKind::kUnknown);
    CHECK_FALSE(describe_memory(address, bytes));  // nothing for the CPU either
}

TEST_CASE("device: the CPU and the kernel cannot reach device memory") {
    Bed bed;
    {
        device::DeviceMemory card = device::must(device::DeviceMemory::allocate(bed.device, 4096));
        char byte = 0;
        iovec here{&byte, 1}, there{reinterpret_cast<void*>(card.address()), 1};
        CHECK(::process_vm_readv(::getpid(), &here, 1, &there, 1, 0) == -1);
        CHECK(errno == EFAULT);
        int ends[2];
        REQUIRE(::pipe(ends) == 0);
        CHECK(::write(ends[1], reinterpret_cast<void*>(card.address()), 1) == -1);
        CHECK(errno == EFAULT);
        ::close(ends[0]);
        ::close(ends[1]);
    }
    bed.end();
}
