// Engines that are killed and come back at the same address, over every transport; an engine in a child of
// fork(); and hundreds of peers of which most stand still.
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>

#include "../process.hpp"
#include "nodes.hpp"
#include "transport/efa/fabric.hpp"
#include "transport/frames.hpp"
#include "wire/listener.hpp"

using namespace moonpool;
using namespace moonpool::testing;
using std::chrono::steady_clock;

namespace {

double seconds_since(steady_clock::time_point begin) {
    return std::chrono::duration<double>(steady_clock::now() - begin).count();
}

// What a transport needs of a test, in both processes.
struct BedOf {
    std::optional<VerbsBed> nics;
    std::optional<FabricBed> fabric;
    std::optional<OutsideBed> outside;
    explicit BedOf(const std::string& transport) {
        if (transport == "rdma") nics.emplace("devices=2");
        if (transport == "efa") fabric.emplace();
        if (transport == kOutside) outside.emplace();
    }
};

constexpr size_t kBytes = 1u << 20;
// Where each life of the engine has its memory: an address of the first life is one of the second, too.
void* const kPlace = reinterpret_cast<void*>(0x200000000000);

}  // namespace

TEST_CASE("a life of an engine" * doctest::skip()) {
    Parent parent;
    const std::string transport = parent.hear(), address = parent.hear();
    BedOf bed(transport);
    void* memory = ::mmap(kPlace, kBytes, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    REQUIRE(memory == kPlace);
    std::memset(memory, 0x22, kBytes);
    EngineOptions options = engine_options("there", "");
    options.listen = {address};
    std::shared_ptr<Engine> engine = make_engine(options);
    REQUIRE(engine->register_region(reinterpret_cast<uint64_t>(memory), kBytes, "").ok());
    parent.say(engine->addresses().front());
    while (parent.hear() == "look") {
        parent.say(all_are(std::byte{0x22}, static_cast<std::byte*>(memory), kBytes) ? "untouched"
                                                                                     : "written");
    }
}

TEST_CASE("restarts: an engine that was killed and is back at its address is not taken for the old one") {
#if !defined(__SANITIZE_THREAD__)  // which has its own idea of addresses
    std::vector<std::string> tested;
    for (const char* transport : {"tcp", "shm", "rdma", "efa", kOutside}) {
        CAPTURE(transport);
        if (transport == std::string("efa") && !transport::efa::has_nic(tcp_fabric()).ok()) continue;
        BedOf bed(transport);
        auto start = [&](const std::string& address) {
            auto child = std::make_unique<Child>("a life of an engine");
            child->say(transport);
            child->say(address);
            return child;
        };
        std::unique_ptr<Child> first = start("127.0.0.1:0");
        const std::string address = first->hear();
        EngineOptions options = engine_options("here", transport);
        options.timeout_ms = 4000;
        std::shared_ptr<Engine> here = make_engine(options);
        Result<uint32_t> old = here->open(address);
        REQUIRE_MESSAGE(old.ok(), (old.ok() ? "" : old.error().text));
        Memory mine(*here, kBytes, MemoryKind::kHostArena);
        std::memset(mine.data(), 0x11, mine.size());
        auto write = [&](uint32_t segment) {
            std::vector<Slice> slices = {
                {mine.address(), reinterpret_cast<uint64_t>(kPlace), kBytes, Direction::kWrite}};
            TransferRequest request;
            request.segments = {&segment, 1};
            request.slices = slices;
            return here->transfer(request);
        };
        const std::string counter = std::string(transport) + "_write_bytes_total";
        // Keys are made in the background.
        for (auto begin = steady_clock::now(); metric(*here, counter) == 0 && seconds_since(begin) < 20;) {
            Result<uint64_t> moved = write(*old);
            if (!moved.ok()) std::this_thread::yield();
        }
        REQUIRE(metric(*here, counter) != 0);
        first->say("look");
        CHECK(first->hear() == "written");
        first->kill();

        std::unique_ptr<Child> second = start(address);
        REQUIRE(second->hear() == address);
        for (int i = 0; i < 3; ++i) {
            auto begin = steady_clock::now();
            CHECK_FALSE(write(*old).ok());
            CHECK(seconds_since(begin) < 20);
        }
        second->say("look");
        CHECK(second->hear() == "untouched");

        // Others are told at once for half a second that the peer is out of reach.
        Result<uint32_t> again = here->open(address);
        for (auto begin = steady_clock::now(); !again.ok() && seconds_since(begin) < 20;) {
            (void)readable(here->event_fd(), 20);
            again = here->open(address);
        }
        REQUIRE_MESSAGE(again.ok(), (again.ok() ? "" : again.error().text));
        const uint64_t before = metric(*here, counter);
        Result<uint64_t> moved = write(*again);
        for (auto begin = steady_clock::now();
             (!moved.ok() || metric(*here, counter) == before) && seconds_since(begin) < 20;) {
            moved = write(*again);
        }
        CHECK_MESSAGE(moved.ok(), (moved.ok() ? "" : moved.error().text));
        CHECK(metric(*here, counter) > before);
        second->say("look");
        CHECK(second->hear() == "written");
        CHECK_FALSE(write(*old).ok());
        second->say("end");
        CHECK(second->reap());
        tested.emplace_back(transport);
    }
    CHECK(tested.size() >= 4);
#endif
}

TEST_CASE("restarts: a child of fork() is refused by an engine with NICs, and takes none of them down") {
    VerbsBed bed("devices=2");
    {
        Nodes nodes({"rdma"}, kMiB);
        nodes.warm_up("rdma");
        Engine& here = *nodes.pair.here;
        const uint64_t objects = VerbsBed::count("objects");
        std::vector<Slice> slices = {{nodes.mine.address(), nodes.theirs.address(), 4096, Direction::kRead}};
        const TransferRequest request = nodes.pair.request(slices);
        Result<uint64_t> ticket = here.submit(request);
        REQUIRE(ticket.ok());
        pid_t child = ::fork();
        REQUIRE(child >= 0);
        if (child == 0) {
            auto refused = [](const auto& result) {
                return !result.ok() && result.error().code == Code::kForked;
            };
            bool all = refused(here.transfer(request)) && refused(here.submit(request)) &&
                       refused(here.status(*ticket)) && refused(here.open("127.0.0.1:1")) &&
                       refused(here.register_region(64, 64, "")) &&
                       refused(here.notify(nodes.pair.segment, "x")) && refused(here.notifications()) &&
                       refused(here.deregister_region(nodes.mine.address()));
            // Its end gives back nothing that is the parent's.
            (void)here.close();
            nodes.pair.here.reset();
            nodes.pair.there.reset();
            ::_exit(all ? (VerbsBed::count("objects") == objects ? 0 : 2) : 1);
        }
        int status = 0;
        REQUIRE(::waitpid(child, &status, 0) == child);
        CHECK(WIFEXITED(status));
        CHECK(WEXITSTATUS(status) == 0);
        REQUIRE(*here.wait(*ticket, 20000));
        CHECK(here.status(*ticket)->state == TicketState::kDone);
        const uint64_t before = nodes.moved_by("rdma");
        Random random(1600);
        nodes.check_transfer(random);
        CHECK(nodes.moved_by("rdma") > before);
        CHECK(VerbsBed::count("objects") >= objects);
    }
}

// ---- many peers, most of which stand still

namespace {

// Peers that greet, and never say anything again: to the engine each is one of its own.
class StandingStill {
   public:
    StandingStill() {
        ListenerOptions door;
        door.addresses = {"127.0.0.1:0"};
        door.token = "secret";
        listener_ = std::move(*Listener::create(std::move(door)));
        listener_->offer(std::string(kServiceEngine),
                         Service{[this](std::string_view) -> Result<std::vector<std::byte>> {
                                     transport::PeerInfo self;
                                     self.name = "stands still";
                                     uint64_t number = ++made_;
                                     std::memcpy(self.segment.data(), &number, sizeof(number));
                                     return transport::encode_welcome(self);
                                 },
                                 [this](AuthenticatedConnection caller) {
                                     std::vector<std::byte> out;
                                     size_t at = begin_frame(out, Kind::kEngineHello, kFlagAnswer, 1);
                                     Writer(out).number(transport::kEngineVersion);
                                     finish_frame(out, at);
                                     (void)::send(caller.fd.get(), out.data(), out.size(), MSG_NOSIGNAL);
                                     hold(std::move(caller.fd));
                                 }});
        REQUIRE(listener_->start().ok());
    }
    ~StandingStill() { listener_->stop(); }
    const std::string& address() const { return listener_->addresses().front(); }

   private:
    // Until the engine hangs up.
    void hold(Fd fd) {
        std::lock_guard lock(mutex_);
        std::erase_if(held_, [](const Fd& one) {
            pollfd state{one.get(), POLLRDHUP, 0};
            return ::poll(&state, 1, 0) == 1;
        });
        held_.push_back(std::move(fd));
    }

    std::unique_ptr<Listener> listener_;
    std::mutex mutex_;
    std::vector<Fd> held_;
    std::atomic<uint64_t> made_{0};
};

}  // namespace

TEST_CASE("many peers: of 200 most stand still: each transfer ends in time, and the others are served") {
    constexpr size_t kStill = 190, kAwake = 10;
    constexpr int kDeadlineMs = 1000;
    constexpr double kMarginS = 6;  // of a machine that is busy; the promise is 1 s
    rlimit files{};                 // both ends of all connections are here
    REQUIRE(::getrlimit(RLIMIT_NOFILE, &files) == 0);
    files.rlim_cur = std::max<rlim_t>(files.rlim_cur, std::min<rlim_t>(files.rlim_max, 4096));
    REQUIRE(::setrlimit(RLIMIT_NOFILE, &files) == 0);
    StandingStill still;
    EngineOptions options = engine_options("here", "tcp");
    options.timeout_ms = 3000;
    options.connections_per_peer = 1;
    std::shared_ptr<Engine> here = make_engine(options);
    std::vector<std::shared_ptr<Engine>> awake;
    std::vector<std::unique_ptr<Memory>> theirs;
    std::vector<uint32_t> to_awake, to_still;
    for (size_t i = 0; i < kAwake; ++i) {
        EngineOptions one = engine_options("there", "tcp");
        one.io_threads = 1;
        awake.push_back(make_engine(one));
        theirs.push_back(std::make_unique<Memory>(*awake.back(), 8192, MemoryKind::kHost));
        to_awake.push_back(*here->open(awake.back()->addresses().front()));
    }
    for (size_t i = 0; i < kStill; ++i) {
        Result<uint32_t> opened = here->open(still.address());
        REQUIRE_MESSAGE(opened.ok(), (opened.ok() ? "" : opened.error().text));
        to_still.push_back(*opened);
    }
    Memory mine(*here, 8192 + kStill * 4096, MemoryKind::kHostArena);
    auto submit_all = [&] {
        std::vector<uint64_t> tickets;
        for (size_t i = 0; i < kStill; ++i) {
            std::vector<Slice> slices = {{mine.address() + 8192 + i * 4096, 1 << 20, 4096,
                                          i % 2 == 0 ? Direction::kRead : Direction::kWrite}};
            TransferRequest request;
            request.segments = {&to_still[i], 1};
            request.slices = slices;
            request.timeout_ms = kDeadlineMs;
            Result<uint64_t> ticket = here->submit(request);
            REQUIRE_MESSAGE(ticket.ok(), (ticket.ok() ? "" : ticket.error().text));
            tickets.push_back(*ticket);
        }
        return tickets;
    };
    const auto begin = steady_clock::now();
    std::vector<uint64_t> tickets = submit_all();
    size_t served = 0, ended = 0;
    double slowest_s = 0;
    std::vector<bool> over(tickets.size());
    while (ended < tickets.size() && seconds_since(begin) < kDeadlineMs / 1000.0 + kMarginS) {
        const auto one = steady_clock::now();
        std::vector<Slice> slices = {
            {mine.address(), theirs[served % kAwake]->address(), 4096, Direction::kRead}};
        TransferRequest request;
        request.segments = {&to_awake[served % kAwake], 1};
        request.slices = slices;
        Result<uint64_t> moved = here->transfer(request);
        REQUIRE_MESSAGE(moved.ok(), (moved.ok() ? "" : moved.error().text));
        slowest_s = std::max(slowest_s, seconds_since(one));
        ++served;
        const std::vector<uint64_t> polled = *here->poll();
        for (uint64_t ticket : polled) {
            auto at = std::ranges::find(tickets, ticket);
            REQUIRE(at != tickets.end());
            over[static_cast<size_t>(at - tickets.begin())] = true;
            ++ended;
        }
    }
    MESSAGE(ended << " transfers ended within " << seconds_since(begin) << " s; " << served
                  << " reads of the others, the slowest took " << slowest_s << " s");
    CHECK(std::ranges::count(over, true) == static_cast<long>(tickets.size()));
    CHECK(served > 20);
    for (uint64_t ticket : tickets) {
        Result<TicketStatus> status = here->status(ticket);
        REQUIRE(status.ok());
        CHECK(status->state == TicketState::kFailed);
        CHECK(here->release(ticket).ok());
    }
    // With all of them under way again it closes within one deadline.
    (void)submit_all();
    const auto closing = steady_clock::now();
    (void)here->close();
    CHECK(seconds_since(closing) < options.timeout_ms / 1000.0 + kMarginS);
    MESSAGE("close() took " << seconds_since(closing) << " s");
}
