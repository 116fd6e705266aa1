// A bed for engines: two of them in this process, bound to one transport, with memory of either kind.
#pragma once

#include <doctest/doctest.h>
#include <poll.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "../certificates.hpp"
#include "../device/bed.hpp"
#include "../random.hpp"
#include "../sanitizer.hpp"
#include "engine/engine.hpp"
#include "fabric_bed.hpp"
#include "verbs_bed.hpp"

namespace moonpool::testing {

using transport::Direction;
using transport::Slice;
using transport::SliceState;

// While one lives, engines of the test have the example of a transport outside of the tree, too.
inline constexpr const char* kOutside = "unix_socket";
class OutsideBed {
   public:
    OutsideBed() { in_use() = true; }
    ~OutsideBed() { in_use() = false; }
    OutsideBed(const OutsideBed&) = delete;
    static bool& in_use() {
        static bool used = false;
        return used;
    }
};

// While one lives, engines of the test speak TCP inside TLS.
class TlsBed {
   public:
    TlsBed() { in_use() = true; }
    ~TlsBed() { in_use() = false; }
    TlsBed(const TlsBed&) = delete;
    static bool& in_use() {
        static bool used = false;
        return used;
    }
};

inline EngineOptions engine_options(const std::string& name, const std::string& transport) {
    EngineOptions options;
    options.name = name;
    options.listen = {"127.0.0.1:0"};
    options.token = "secret";
    options.timeout_ms = 10000;
    options.link_clock_ns = nullptr;  // tests say which path is taken
    if (VerbsBed::in_use()) {
        if (!real_verbs()) options.rdma.library = soft_verbs_library();
        if (real_verbs() && name == "here") options.rdma.devices = {"ra0", "ra1"};
        if (real_verbs() && name == "there") options.rdma.devices = {"rb0", "rb1"};
        options.rdma.chunk_bytes = 1u << 20;  // many borders
        options.rdma.silence_ms = 3000;       // of a machine that is busy
    }
    if (OutsideBed::in_use()) options.outside_transports = {beside_program("libunix_socket.so")};
    if (TlsBed::in_use()) {
        options.tls_server = tls_server();
        options.tls_client = tls_client();
    }
    if (FabricBed::in_use()) options.fabric = tcp_fabric();
    if (!transport.empty()) options.transports = std::vector<std::string>{transport};
    return options;
}

// The transports of the registry that reach peers and work on this host, with the software libibverbs and
// libfabric's provider over TCP; and the one outside of the tree.
inline std::vector<std::string> transports_here() {
    VerbsBed nics;
    FabricBed fabric;
    OutsideBed outside;
    Result<std::shared_ptr<Engine>> engine = Engine::create(engine_options("asked", ""));
    REQUIRE_MESSAGE(engine.ok(), (engine.ok() ? "" : engine.error().text));
    std::vector<std::string> names;
    for (auto& [name, why] : (*engine)->transports()) {
        auto row = std::ranges::find(transport::registry(), name, &transport::Factory::name);
        if (row != transport::registry().end() && row->of_files) continue;  // test_files.cpp
#if defined(__SANITIZE_THREAD__)
        if (name == "efa") continue;  // TSan does not see into libfabric; test_efa.cpp runs
#endif
        // An emulated machine is slow: there rdma is compared with one transport.
        if (real_verbs() && name != "rdma" && name != "tcp") continue;
        if (why.empty()) names.push_back(name);
        if (!why.empty()) MESSAGE("not tested: " << name << ": " << why);
    }
    return names;
}

// Over CUDA IPC the memory of the engine "there" is a card's, whatever kind a test asks for.
inline Bed*& cards_there() {
    static Bed* bed = nullptr;
    return bed;
}

inline void inside_tls(const std::function<void(const std::string&)>& body) {
    TlsBed tls;
    const bool is_inside_tls = true;
    CAPTURE(is_inside_tls);
    body("tcp");
}

inline void each_transport(const std::function<void(const std::string&)>& body) {
    for (const std::string& transport : transports_here()) {
        CAPTURE(transport);
        if (transport == "rdma") {
            VerbsBed nics("devices=2 relaxed");
            body(transport);
            continue;
        }
        if (transport == kOutside) {
            OutsideBed outside;
            body(transport);
            continue;
        }
        if (transport != "cuda_ipc") {
            std::optional<FabricBed> fabric;
            if (transport == "efa") fabric.emplace();
            body(transport);
            if (transport == "tcp") inside_tls(body);
            continue;
        }
        Bed bed(Policy::kShuffled, 78);
        cards_there() = &bed;
        body(transport);
        cards_there() = nullptr;
        bed.end();
    }
}
// Of tests about memory of the host.
inline void each_host_transport(const std::function<void(const std::string&)>& body) {
    for (const std::string& transport : transports_here()) {
        CAPTURE(transport);
        if (transport == "cuda_ipc") continue;
        std::optional<VerbsBed> nics;
        std::optional<FabricBed> fabric;
        if (transport == "rdma") nics.emplace("devices=2 relaxed");
        if (transport == "efa") fabric.emplace();
        std::optional<OutsideBed> outside;
        if (transport == kOutside) outside.emplace();
        body(transport);
        if (transport == "tcp") inside_tls(body);
    }
}

inline std::shared_ptr<Engine> make_engine(const EngineOptions& options) {
    Result<std::shared_ptr<Engine>> engine = Engine::create(options);
    REQUIRE_MESSAGE(engine.ok(), (engine.ok() ? "" : engine.error().text));
    return *engine;
}

// Compared as a whole: bytes by bytes, as a vector of std::byte is, megabytes take seconds in a test, which
// is not optimised.
struct Bytes : std::vector<std::byte> {
    using std::vector<std::byte>::vector;
    bool is(const std::vector<std::byte>& other) const {
        return size() == other.size() && std::memcmp(data(), other.data(), size()) == 0;
    }
    friend bool operator==(const Bytes& a, const std::vector<std::byte>& b) { return a.is(b); }
    friend bool operator==(const Bytes& a, const Bytes& b) { return a.is(b); }
};

inline bool all_are(std::byte value, const std::byte* data, size_t size) {
    return size == 0 || (data[0] == value && std::memcmp(data, data + 1, size - 1) == 0);
}

// Registered memory with a margin that no transfer may touch. Of a card it needs a Bed, whose software device
// lets the test look at it.
class Memory {
   public:
    Memory(Engine& engine, size_t size, MemoryKind kind) : engine_(engine), size_(size) {
        if (cards_there() != nullptr && engine.name() == "there") kind = MemoryKind::kDevice;
        if (kind == MemoryKind::kHostArena) {
            arena_ = *engine.allocate(size, "cpu:0");
            data_ = arena_->data();
            address_ = reinterpret_cast<uint64_t>(data_);
            return;
        }
        std::byte* all;
        if (kind == MemoryKind::kDevice) {
            card_ = device::must(
                device::DeviceMemory::allocate(device::must(device::Device::open(0)), size + 2 * kMargin));
            address_ = card_.address() + kMargin;
            all = reinterpret_cast<std::byte*>(soft_device().soft_at(card_.address(), card_.bytes()));
            std::memset(all, 0xEE, card_.bytes());
        } else {
            other_.resize(size + 2 * kMargin, std::byte{0xEE});
            all = other_.data();
            address_ = reinterpret_cast<uint64_t>(all + kMargin);
        }
        data_ = all + kMargin;
        Status status = engine.register_region(address(), size, "cpu:0");
        REQUIRE_MESSAGE(status.ok(), (status.ok() ? "" : status.error().text));
    }
    ~Memory() {
        (void)engine_.deregister_region(address());
        check_margin();
    }
    Memory(const Memory&) = delete;

    uint64_t address() const { return address_; }
    std::byte* data() { return data_; }
    size_t size() const { return size_; }
    bool on_card() const { return card_.address() != 0; }
    void fill(Random& random) { random.fill(data_, size_); }
    Bytes bytes() const { return {data_, data_ + size_}; }
    void check_margin() {
        if (arena_ != nullptr) return;
        REQUIRE(all_are(std::byte{0xEE}, data_ - kMargin, kMargin));
        REQUIRE(all_are(std::byte{0xEE}, data_ + size_, kMargin));
    }

   private:
    static constexpr size_t kMargin = 64;
    Engine& engine_;
    size_t size_;
    std::shared_ptr<transport::Memory> arena_;
    std::vector<std::byte> other_;
    device::DeviceMemory card_;
    std::byte* data_ = nullptr;  // as this test sees it
    uint64_t address_ = 0;
};

// The kinds of memory on the two sides, in each combination that is carried in a way of its own. With a
// software device where one of them is a card's, under a policy of its own.
inline void each_kinds(const std::string& transport,
                       const std::function<void(MemoryKind mine, MemoryKind theirs)>& body) {
    using enum MemoryKind;
    struct Sides {
        MemoryKind mine, theirs;
        Policy policy = Policy::kLate;
    };
    for (const Sides& sides :
         {Sides{kHostArena, kHostArena}, Sides{kHost, kHost}, Sides{kDevice, kDevice, Policy::kShuffled},
          Sides{kDevice, kHost}, Sides{kHostArena, kDevice, Policy::kEarly}}) {
        if (transport == "shm" && sides.theirs == kDevice) continue;  // another path's
        if (transport == kOutside && sides.theirs == kDevice) continue;
        if (transport == "cuda_ipc" && sides.theirs != kDevice) continue;
        // Of others; and a NIC of the kernel cannot pin the software device's memory.
        if ((transport == "efa" || (transport == "rdma" && real_verbs())) &&
            (sides.mine == kDevice || sides.theirs == kDevice)) {
            continue;
        }
        if (cards_there() != nullptr) cards_there()->device.reset();  // each has a software device of its own
        CAPTURE(kind_name(sides.mine));
        CAPTURE(kind_name(sides.theirs));
        if (sides.mine != kDevice && sides.theirs != kDevice) {
            body(sides.mine, sides.theirs);
            continue;
        }
        Bed bed(sides.policy, 77);
        body(sides.mine, sides.theirs);
        bed.end();
    }
}

struct Pair {
    std::shared_ptr<Engine> here, there;
    uint32_t segment = 0;

    explicit Pair(const std::string& transport)
        : Pair(engine_options("here", transport), engine_options("there", "")) {}
    Pair(const EngineOptions& mine, const EngineOptions& theirs)
        : here(make_engine(mine)), there(make_engine(theirs)) {
        Result<uint32_t> opened = here->open(there->addresses().front());
        REQUIRE_MESSAGE(opened.ok(), (opened.ok() ? "" : opened.error().text));
        segment = *opened;
    }
    ~Pair() {
        CHECK(here->check_integrity());
        CHECK(there->check_integrity());
    }

    TransferRequest request(const std::vector<Slice>& slices) const {
        TransferRequest request;
        request.segments = {&segment, 1};
        request.slices = slices;
        return request;
    }
    Result<uint64_t> transfer(const std::vector<Slice>& slices) { return here->transfer(request(slices)); }
};

inline uint64_t metric(Engine& engine, const std::string& name) {
    for (auto& [key, value] : engine.metrics()) {
        if (key == name) return value;
    }
    FAIL("no metric " << name);
    return 0;
}

inline bool readable(int fd, int timeout_ms) {
    pollfd p{fd, POLLIN, 0};
    return ::poll(&p, 1, timeout_ms) == 1;
}

}  // namespace moonpool::testing
