// RDMA over the software libibverbs: what it says of hosts without NICs, and what becomes of transfers when
// requests fail, vanish, arrive late, when queues are full, memory gets no key, ports go down. That bytes
// arrive at all is the conformance suite's.
#include <algorithm>
#include <atomic>
#include <thread>

#include "../process.hpp"
#include "bed.hpp"
#include "nodes.hpp"
#include "transport/nic/messages.hpp"
#include "transport/rdma/messages.hpp"

using namespace moonpool;
using namespace moonpool::testing;
using namespace moonpool::transport::rdma;
namespace nic = moonpool::transport::nic;

TEST_CASE("rdma: a host without it says why in one sentence, and the engine works") {
    struct Host {
        const char* script;
        std::vector<const char*> says;
    };
    for (const Host& host :
         std::vector<Host>{{"devices=none", {"finds no RDMA device", "Function not implemented"}},
                           {"devices=0", {"finds no RDMA device"}},
                           {"down0 down1", {"soft0:1 is not active", "soft1:1 is not active"}},
                           {"gids=none devices=1", {"soft0:1 has no GID of use"}},
                           {"efa devices=1", {"soft0:1 is neither InfiniBand nor RoCE (NICs of EFA are"}},
                           {"gids=v1 devices=1",
                            {"has no GID of use: GID 0 (fe80::1) is RoCE v1, which no router forwards"}}}) {
        CAPTURE(host.script);
        VerbsBed bed(host.script);
        std::string why = why_not(engine_options("asked", ""), "rdma");
        for (const char* text : host.says) CHECK_MESSAGE(why.find(text) != std::string::npos, why);
        Nodes nodes({"rdma", "tcp"}, kMiB);
        Random random(902);
        nodes.check_transfer(random);
        CHECK(nodes.moved_by("rdma") == 0);
    }
    VerbsBed bed;
    EngineOptions options = engine_options("asked", "");
    options.rdma.library = "no-such-libibverbs.so.1";
    CHECK(why_not(options, "rdma").find("there is no libibverbs here (no-such-libibverbs.so.1") == 0);
    options.rdma.library = soft_library();  // of something else
    CHECK(why_not(options, "rdma").find("libsoftcuda.so lacks ibv_get_device_list") != std::string::npos);
    CHECK(why_not(engine_options("asked", ""), "rdma").empty());
    Result<const Verbs*> none = open_verbs("");
    if (!none.ok()) CHECK(none.error().text.find("this host has no RDMA device") == 0);
}

TEST_CASE("rdma: an address of a port is IPv4 before IPv6, and the others keep their reasons") {
    const Verbs& verbs = **open_verbs(soft_verbs_library());
    {
        VerbsBed bed("devices=1 mtu0=3");
        Result<Nics> nics = open_nics(verbs);
        REQUIRE(nics.ok());
        REQUIRE(nics->ports.size() == 1);
        const Port& port = *nics->ports[0];
        CHECK(port.text() == "soft0:1 10.8.0.1");
        const PortFacts facts = port.facts();
        CHECK(facts.gids.front().index == 3);
        CHECK(facts.gids.size() == 2);
        CHECK(facts.address.mtu == 3);
        CHECK(facts.gbit_s == 100);
        CHECK(
            facts.rejected ==
            "GID 0 (fe80::1) is RoCE v1, which no router forwards; GID 2 (fe80::1) comes behind another one");
    }
    for (const char* script : {"ib devices=1", "gids=v6", "gids=v4 devices=3 mtu0=1 mtu1=3"}) {
        CAPTURE(script);
        VerbsBed bed(script);
        Nodes nodes({"rdma"});
        Random random(903);
        nodes.check_transfer(random);
        CHECK(nodes.moved_by("rdma") != 0);
    }
}

TEST_CASE("rdma: each status at each request costs no byte, with another path and without") {
    Random random(904);
    for (const std::vector<std::string>& transports :
         std::vector<std::vector<std::string>>{{"rdma"}, {"rdma", "tcp"}}) {
        for (int status : {1, 2, 4, 5, 9, 10, 11, 12, 13}) {
            CAPTURE(status);
            VerbsBed bed("devices=1");
            Nodes nodes(transports, kMiB);
            nodes.warm_up("rdma");
            for (uint64_t at : {1, 2, 7, 20}) {
                CAPTURE(at);
                soft_verbs().soft_verbs_script(
                    ("devices=1 fail=" + std::to_string(at) + ":" + std::to_string(status)).c_str());
                nodes.check_transfer(random);
            }
        }
    }
}

TEST_CASE("rdma: what a dead queue pair has sent never lands over newer bytes") {
    for (const char* path : {"", "tcp"}) {
        VerbsBed bed("devices=1");
        Nodes nodes(*path == 0 ? std::vector<std::string>{"rdma"} : std::vector<std::string>{"rdma", path});
        nodes.warm_up("rdma");
        for (int at = 1; at <= 4; ++at) {
            std::memset(nodes.mine.data(), 0x11, nodes.mine.size());
            soft_verbs().soft_verbs_script(("devices=1 late=" + std::to_string(at)).c_str());
            std::vector<Slice> slices;
            for (size_t i = 0; i < 4; ++i) {
                slices.push_back({nodes.mine.address() + i * kMiB, nodes.theirs.address() + i * kMiB, 100'000,
                                  Direction::kWrite});
            }
            REQUIRE(nodes.pair.transfer(slices).ok());
            REQUIRE(VerbsBed::count("in_wire") == 1);
            CHECK(nodes.theirs.data()[50] == std::byte{0x11});
            std::memset(nodes.theirs.data(), 0x22, nodes.theirs.size());  // its owner, told that all is there
            CHECK(soft_verbs().soft_verbs_release() == 0);
            CHECK(VerbsBed::count("dropped_late") == 1);
            CHECK(std::ranges::count(nodes.theirs.bytes(), std::byte{0x22}) ==
                  static_cast<long>(nodes.theirs.size()));
            soft_verbs().soft_verbs_script("devices=1");
            if (*path != 0) break;  // the rail is left alone for a while
        }
    }
}

TEST_CASE(
    "rdma: a request that never completes, a full queue, and one that is taken in part go another way") {
    Random random(905);
    for (const char* fault : {"lost=1", "lost=3", "full=1", "full=2"}) {
        CAPTURE(fault);
        VerbsBed bed("devices=1");
        Nodes nodes({"rdma", "tcp"}, 4 * kMiB, [](EngineOptions& options) { options.rdma.silence_ms = 200; });
        nodes.warm_up("rdma");
        uint64_t before = nodes.moved_by("tcp");
        soft_verbs().soft_verbs_script((std::string("devices=1 ") + fault).c_str());
        nodes.check_transfer(random);
        CHECK(nodes.moved_by("tcp") > before);
        nodes.check_transfer(random);  // the rail waits, TCP carries it
    }
}

TEST_CASE("rdma: memory that the NIC does not take is reached by other paths, and the reason is told") {
    VerbsBed bed("devices=1 nomem=1+");
    {
        Nodes nodes({"rdma", "tcp"});
        Random random(906);
        nodes.check_transfer(random);
        CHECK(nodes.moved_by("rdma") == 0);
        CHECK(nodes.moved_by("tcp") == 2 * kMiB);
    }
    Nodes alone({"rdma"});
    Result<uint64_t> moved =
        alone.pair.transfer({{alone.mine.address(), alone.theirs.address(), 4096, Direction::kRead}});
    REQUIRE_FALSE(moved.ok());
    CHECK(moved.error().code == Code::kUnavailable);
    CHECK_MESSAGE(moved.error().text.find("ulimit -l") != std::string::npos, moved.error().text);
    // One chunk of many.
    soft_verbs().soft_verbs_script("devices=1 nomem=3 nomem=7");
    Nodes holes({"rdma", "tcp"});
    Random random(907);
    for (int round = 0; round < 4; ++round) holes.check_transfer(random);
    CHECK(holes.moved_by("rdma") != 0);
}

TEST_CASE("rdma: a port that goes down costs nothing while another is up, and TCP carries on without any") {
    VerbsBed bed("devices=2 speed0=2000 speed1=2000");
    Nodes nodes({"rdma", "tcp"}, 16 * kMiB, [](EngineOptions& options) { options.rdma.silence_ms = 300; });
    nodes.warm_up("rdma");
    Random random(908);
    for (int round = 0; round < 3; ++round) {
        std::atomic<bool> over{false};
        std::thread breaker([&] {
            while (!over && VerbsBed::count("requests") < 200u * (static_cast<unsigned>(round) + 1))
                std::this_thread::yield();
            soft_verbs().soft_verbs_port(round == 1 ? 1 : 0, 0);
            if (round == 2) soft_verbs().soft_verbs_port(1, 0);
        });
        nodes.check_transfer(random);
        over = true;
        breaker.join();
        nodes.check_transfer(random);
        soft_verbs().soft_verbs_port(0, 1);
        soft_verbs().soft_verbs_port(1, 1);
    }
}

TEST_CASE("rdma: rails carry what they are fast enough for") {
    VerbsBed bed("devices=3 virtual speed0=100 speed1=200 speed2=400");
    Nodes nodes({"rdma"}, 16 * kMiB, [](EngineOptions& options) {
        options.rdma.clock_ns = soft_verbs().soft_verbs_now;
        options.rdma.window_bytes = 256u << 10;
        options.rdma.piece_bytes = 64u << 10;
    });
    nodes.warm_up("rdma");
    Random random(911);
    nodes.check_transfer(random);  // connects them all
    auto whole = [&](Direction direction) {
        return std::vector<Slice>{
            {nodes.mine.address(), nodes.theirs.address(), nodes.mine.size(), direction}};
    };
    REQUIRE(nodes.pair.transfer(whole(Direction::kWrite)).ok());  // measures them
    for (Direction direction : {Direction::kWrite, Direction::kRead}) {
        std::vector<Slice> slices = whole(direction);
        uint64_t before = soft_verbs().soft_verbs_now();
        REQUIRE(nodes.pair.transfer(slices).ok());
        auto taken_us = static_cast<double>(soft_verbs().soft_verbs_now() - before) / 1e3;
        CHECK(nodes.mine.bytes() == nodes.theirs.bytes());
        double share = static_cast<double>(nodes.mine.size()) / 700 / taken_us;  // of the rails' sum
        MESSAGE("16 MiB over rails of 1:2:4: " << share << " of their sum");
        CHECK(share > 0.9);  // by the stub's clock
    }
}

TEST_CASE("rdma: slow rails carry by their speed, too, though a window takes them as long as a transfer") {
    VerbsBed bed("devices=3 virtual speed0=2 speed1=4 speed2=8");
    Nodes nodes({"rdma"}, 8 * kMiB,
                [](EngineOptions& options) { options.rdma.clock_ns = soft_verbs().soft_verbs_now; });
    nodes.warm_up("rdma");
    Random random(912);
    nodes.check_transfer(random);  // connects them all
    for (Direction direction : {Direction::kWrite, Direction::kRead}) {
        std::vector<Slice> slices = {
            {nodes.mine.address(), nodes.theirs.address(), nodes.mine.size(), direction}};
        REQUIRE(nodes.pair.transfer(slices).ok());  // measures them all
        uint64_t before = soft_verbs().soft_verbs_now();
        REQUIRE(nodes.pair.transfer(slices).ok());
        auto taken_us = static_cast<double>(soft_verbs().soft_verbs_now() - before) / 1e3;
        CHECK(nodes.mine.bytes() == nodes.theirs.bytes());
        double share = static_cast<double>(nodes.mine.size()) / 14 / taken_us;  // of the rails' sum
        MESSAGE("8 MiB over slow rails of 1:2:4: " << share << " of their sum");
        CHECK(share > 0.9);  // by the stub's clock
    }
}

TEST_CASE("rdma: a rail that falls silent is left within 50 ms of the stub's clock") {
    VerbsBed bed("devices=2 virtual speed0=1000 speed1=1000");
    Nodes nodes({"rdma"}, 16 * kMiB, [](EngineOptions& options) {
        options.rdma.clock_ns = soft_verbs().soft_verbs_now;
        options.rdma.silence_ms = 30;
    });
    nodes.warm_up("rdma");
    soft_verbs().soft_verbs_silent(0, 1);
    uint64_t before = soft_verbs().soft_verbs_now();
    std::vector<Slice> slices = {
        {nodes.mine.address(), nodes.theirs.address(), nodes.mine.size(), Direction::kWrite}};
    REQUIRE(nodes.pair.transfer(slices).ok());
    CHECK(nodes.mine.bytes() == nodes.theirs.bytes());
    auto taken_us = static_cast<double>(soft_verbs().soft_verbs_now() - before) / 1e3;
    MESSAGE("16 MiB, one rail silent from the start: " << taken_us / 1e3
                                                       << " ms, of which 16.8 ms on the other rail");
    CHECK(taken_us < 16'800 + 50'000);
}

TEST_CASE("rdma: what a caller polls for wakes no other thread, also behind a transfer that was submitted") {
    VerbsBed bed("devices=1");
    Nodes nodes({"rdma"}, kMiB);
    nodes.warm_up("rdma");
    std::vector<Slice> slices = {{nodes.mine.address(), nodes.theirs.address(), 64, Direction::kWrite}};
    uint64_t ticket = *nodes.pair.here->submit(nodes.pair.request(slices));
    REQUIRE(*nodes.pair.here->wait(ticket, 20000));
    const uint64_t before = VerbsBed::count("events");
    for (int i = 0; i < 500; ++i) REQUIRE(nodes.pair.transfer(slices).ok());
    uint64_t events = VerbsBed::count("events") - before;
    CHECK_MESSAGE(events <= 2, events);  // of what was armed for the first one
}

TEST_CASE("rdma: where a NIC is full, the connection that was idle for longest makes room for a new peer") {
    VerbsBed bed("devices=1 pairs=2");
    std::shared_ptr<Engine> here = make_engine(engine_options("here", "rdma"));
    Memory mine(*here, kMiB, MemoryKind::kHost);
    struct Peer {
        std::shared_ptr<Engine> engine = make_engine(engine_options("there", ""));
        Memory memory{*engine, kMiB, MemoryKind::kHostArena};
        uint32_t segment = 0;
    };
    std::vector<std::unique_ptr<Peer>> peers;
    auto write = [&](Peer& peer) {
        std::vector<Slice> slices = {{mine.address(), peer.memory.address(), 1000, Direction::kWrite}};
        TransferRequest request;
        request.segments = {&peer.segment, 1};
        request.slices = slices;
        Result<uint64_t> moved = here->transfer(request);
        REQUIRE_MESSAGE(moved.ok(), (moved.ok() ? "" : moved.error().text));
    };
    // Of one after the other, and of those before again.
    for (int i = 0; i < 4; ++i) {
        peers.push_back(std::make_unique<Peer>());
        peers.back()->segment = *here->open(peers.back()->engine->addresses().front());
        for (const auto& peer : peers) write(*peer);
    }
    auto connects = [&](size_t peer) {
        uint64_t before = VerbsBed::count("pairs_made");
        write(*peers[peer]);
        return VerbsBed::count("pairs_made") != before;
    };
    (void)connects(0);
    (void)connects(1);
    CHECK_FALSE(connects(0));
    CHECK_FALSE(connects(1));
    CHECK(connects(2));  // in the place of 0
    CHECK_FALSE(connects(1));
    CHECK_FALSE(connects(2));
    CHECK(connects(0));
    CHECK_FALSE(connects(2));
}

TEST_CASE("memory behind NICs for another process" * doctest::skip()) {
    Parent parent;
    VerbsBed bed("devices=2");
    std::shared_ptr<Engine> engine = make_engine(engine_options("there", ""));
    Memory memory(*engine, 8 * kMiB, MemoryKind::kHostArena);
    std::memset(memory.data(), 0x33, memory.size());
    parent.say(engine->addresses().front());
    parent.say(std::to_string(memory.address()));
    (void)parent.hear();
}

TEST_CASE("rdma: a peer in another process is read and written, and its death ends transfers") {
#if !defined(__SANITIZE_THREAD__)
    VerbsBed bed("devices=2");
    for (bool killed : {false, true}) {
        CAPTURE(killed);
        Child child("memory behind NICs for another process");
        std::string address = child.hear();
        uint64_t remote = std::stoull(child.hear());
        EngineOptions options = engine_options("here", "rdma");
        options.timeout_ms = 15000;
        std::shared_ptr<Engine> here = make_engine(options);
        Result<uint32_t> opened = here->open(address);
        REQUIRE_MESSAGE(opened.ok(), (opened.ok() ? "" : opened.error().text));
        uint32_t segment = *opened;
        Memory mine(*here, 8 * kMiB, MemoryKind::kHost);
        auto transfer = [&](Direction direction, size_t at, size_t bytes) {
            std::vector<Slice> slices = {{mine.address() + at, remote + at, bytes, direction}};
            TransferRequest request;
            request.segments = {&segment, 1};
            request.slices = slices;
            return here->transfer(request);
        };
        Result<uint64_t> read = transfer(Direction::kRead, 0, 4 * kMiB);
        REQUIRE_MESSAGE(read.ok(), (read.ok() ? "" : read.error().text));
        CHECK(std::ranges::count(mine.bytes(), std::byte{0x33}) == 4 * kMiB);
        std::memset(mine.data(), 0x44, 8 * kMiB);
        REQUIRE(transfer(Direction::kWrite, 4 * kMiB, 4 * kMiB).ok());
        std::memset(mine.data(), 0, 8 * kMiB);
        REQUIRE(transfer(Direction::kRead, 0, 8 * kMiB).ok());
        CHECK(std::ranges::count(mine.bytes(), std::byte{0x33}) == 4 * kMiB);
        CHECK(std::ranges::count(mine.bytes(), std::byte{0x44}) == 4 * kMiB);
        if (killed) {
            child.kill();
            Result<uint64_t> dead = transfer(Direction::kWrite, 0, kMiB);
            REQUIRE_FALSE(dead.ok());
            CHECK(dead.error().code == Code::kUnavailable);
        } else {
            child.say("end");
            CHECK(child.reap());
        }
    }
#endif
}

TEST_CASE("rdma: offers, keys and endpoints of liars are refused") {
    Random random(909);
    VerbsBed bed("devices=2");
    {
        std::vector<std::byte> offer = encode_offer((*open_nics(**open_verbs(soft_verbs_library()))).ports);
        REQUIRE(decode_offer(offer).has_value());
        // The ports alone are an offer, too: that of an engine which says nothing of further GIDs.
        const size_t ports_alone = offer.size() - 2 * (1 + sizeof(Gid));
        for (size_t size = 0; size < offer.size(); ++size) {
            CHECK(decode_offer(std::span(offer).first(size)).has_value() == (size == ports_alone));
        }
        for (int round = 0; round < 2000; ++round) {
            std::vector<std::byte> bytes(random.below(200));
            for (std::byte& byte : bytes)
                byte = std::byte(random.one_in(3) ? random.below(256) : random.below(3));
            (void)decode_offer(bytes);
            if (auto rows = nic::decode_keys(Reader(bytes), nic::KeySize::k32)) {
                for (const nic::RemoteRegion& row : *rows) CHECK(row.keys.size() <= bytes.size());
            }
            Reader r(bytes);
            (void)decode_endpoint(r);
        }
    }
    Nodes nodes({"rdma"}, kMiB);
    Random other(910);
    nodes.check_transfer(other);
    CHECK(metric(*nodes.pair.there, "protocol_errors_total") == 0);
}
