// Memory of a card that two processes share.
#include "../process.hpp"
#include "bed.hpp"
#include "device/address.hpp"
#include "device/ipc.hpp"

using namespace moonpool;
using namespace moonpool::device;
using namespace moonpool::testing;

namespace {

constexpr uint64_t kIpcBytes = 70000;

std::string ipc_hex(const CuIpcMemory& handle) {
    std::string text;
    char two[3];
    for (unsigned char byte : handle.bytes) {
        std::snprintf(two, sizeof(two), "%02x", byte);
        text += two;
    }
    return text;
}
CuIpcMemory ipc_handle(const std::string& text) {
    CuIpcMemory handle{};
    REQUIRE(text.size() == 2 * sizeof(handle.bytes));
    for (size_t i = 0; i < sizeof(handle.bytes); ++i) {
        handle.bytes[i] = static_cast<unsigned char>(std::stoi(text.substr(2 * i, 2), nullptr, 16));
    }
    return handle;
}

}  // namespace

// Allocates on its card, fills the memory with 0x11, and does what it is told.
TEST_CASE("ipc owner" * doctest::skip()) {
    Parent parent;
    Bed bed;
    {
        DeviceMemory memory = must(DeviceMemory::allocate(bed.device, kIpcBytes));
        Pinned host(bed, kIpcBytes);
        std::memset(host.data(), 0x11, kIpcBytes);
        copy_now(bed, memory.address(), host.address(), kIpcBytes);
        // An address inside, and the handle of the whole.
        IpcExport exported = must(export_memory(*bed.device, memory.address() + 5000));
        CHECK(exported.base == memory.address());
        CHECK(exported.bytes == kIpcBytes);
        Result<IpcMemory> own = IpcMemory::open(bed.device, exported.handle);
        CHECK_FALSE(own.ok());
        parent.say(ipc_hex(exported.handle));
        for (std::string line = parent.hear(); !line.empty(); line = parent.hear()) {
            if (line == "free") memory = DeviceMemory();
            if (line == "bytes") {
                copy_now(bed, host.address(), memory.address(), kIpcBytes);
                parent.say(std::to_string(host.data()[0]) + " " + std::to_string(host.data()[kIpcBytes - 1]));
                continue;
            }
            parent.say("done");
        }
    }
    bed.end();
}

TEST_CASE("device: memory of another process's card is read and written by the card") {
    if (is_real()) return;
    each_policy([](Bed& bed) {
        Child owner("ipc owner");
        CuIpcMemory handle = ipc_handle(owner.hear());
        IpcMemory memory = must(IpcMemory::open(bed.device, handle));
        {
            // A second time it is the same mapping, which stays until both are closed.
            IpcMemory again = must(IpcMemory::open(bed.device, handle));
            CHECK(again.address() == memory.address());
        }
        Address what = must(classify(memory.address(), kIpcBytes));
        CHECK(what.kind == AddressKind::kDevice);
        CHECK(what.bytes == kIpcBytes);
        CHECK_FALSE(export_memory(*bed.device, memory.address()).ok());
        Pinned host(bed, kIpcBytes);
        copy_now(bed, host.address(), memory.address(), kIpcBytes);
        CHECK(host.bytes() == std::vector<unsigned char>(kIpcBytes, 0x11));
        std::memset(host.data(), 0x22, kIpcBytes);
        copy_now(bed, memory.address(), host.address(), kIpcBytes);
        owner.say("bytes");
        CHECK(owner.hear() == "34 34");
        owner.kill();
        // The bytes may stay.
        std::memset(host.data(), 0, kIpcBytes);
        copy_now(bed, host.address(), memory.address(), kIpcBytes);
        CHECK(host.bytes() == std::vector<unsigned char>(kIpcBytes, 0x22));
    });
}

TEST_CASE("device: copies of memory whose owner ended fail where the driver has taken it away") {
    if (is_real()) return;
    Bed bed;
    {
        Child owner("ipc owner");
        IpcMemory memory = must(IpcMemory::open(bed.device, ipc_handle(owner.hear())));
        Pinned host(bed, kIpcBytes);
        soft_device().soft_owner_ended(cu::kInvalidValue);
        copy_now(bed, host.address(), memory.address(), kIpcBytes);
        owner.kill();
        Stream stream = must(Stream::create(bed.device, Stream::Priority::kDefault));
        CHECK_FALSE(stream.copy({host.address(), memory.address(), kIpcBytes}).ok());
        CHECK(bed.device->lost() == 0);
    }
    bed.end();
}

TEST_CASE("device: the software device sees what no program may do with shared memory") {
    if (is_real()) return;
    Child owner("ipc owner");
    CuIpcMemory handle = ipc_handle(owner.hear());
    {
        Bed bed;
        CuIpcMemory wrong = handle;
        wrong.bytes[0] ^= 1;
        CHECK_FALSE(IpcMemory::open(bed.device, wrong).ok());
        soft_device().soft_set_first_card(1);
        CHECK_FALSE(IpcMemory::open(bed.device, handle).ok());  // it does not see the card
        CHECK_FALSE(Device::find(bed.device->facts().uuid).ok());
        soft_device().soft_set_first_card(0);
        CHECK(must(Device::find(bed.device->facts().uuid)) == 0);
        soft_device().soft_hide("cuIpcOpenMemHandle");
        bed.end();
    }
    {
        Bed bed;
        OnDevice here(*bed.device);
        CHECK(bed.device->driver().cuIpcCloseMemHandle(4096) != 0);
        char text[200];
        CHECK(soft_device().soft_violations(text, sizeof(text)) == 1);
    }
    Bed bed;
    IpcMemory memory = must(IpcMemory::open(bed.device, handle));
    char text[200];
    CHECK(soft_device().soft_live(text, sizeof(text)) == 2);  // the context, and it
    owner.say("free");
    CHECK(owner.hear() == "done");
    Stream stream = must(Stream::create(bed.device, Stream::Priority::kDefault));
    Pinned host(bed, kIpcBytes);
    REQUIRE(stream.copy({host.address(), memory.address(), kIpcBytes}));
    soft_device().soft_settle();
    CHECK(soft_device().soft_violations(text, sizeof(text)) == 1);
    CHECK(std::string(text).find("has freed") != std::string::npos);
    memory.leak();
    bed.forget();
}
