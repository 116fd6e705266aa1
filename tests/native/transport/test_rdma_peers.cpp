// The half of RDMA that serves, asked by peers that lie: whatever they ask, a peer ends and reaches only what
// is its own, and a NIC takes nothing outside of what was registered.
#include <limits>
#include <map>

#include "base/clock.hpp"
#include "bed.hpp"
#include "transport/nic/messages.hpp"
#include "transport/rdma/messages.hpp"
#include "transport/rdma/transport.hpp"

using namespace moonpool;
using namespace moonpool::testing;
using namespace moonpool::transport::rdma;
namespace nic = moonpool::transport::nic;

namespace {

using Question = std::vector<std::byte>;
using Answer = Result<std::vector<std::byte>>;
using transport::SegmentId;

constexpr SegmentId kA = {1}, kB = {2};
constexpr size_t kBytes = 64u << 10;
constexpr uint64_t kChunkBytes = 4096;
constexpr size_t kEndsOfOneMax = 64;  // of one initiator, as target.cpp has it

// The transport of an engine that serves, without the engine.
class Serving {
   public:
    Serving() {
        REQUIRE(loop_->start().ok());
        REQUIRE(transport_.start().ok());
    }
    ~Serving() {
        closing_ = true;
        (void)waiters_.stop(std::chrono::steady_clock::time_point::max());
        transport_.close();
        (void)loop_->stop();
    }
    Serving(const Serving&) = delete;

    // A question as nic/messages.hpp makes it, which begins with the name of the transport.
    Answer ask(const SegmentId& peer, const Question& question) {
        Reader r(question);
        REQUIRE(r.text16() == kName);
        return transport_.answer(peer, r);
    }
    Answer ask_raw(const SegmentId& peer, std::span<const std::byte> body) {
        return transport_.answer(peer, Reader(body));
    }
    // Registered, with all of its keys.
    uint64_t add_region(std::byte* data, size_t size) {
        const auto address = reinterpret_cast<uint64_t>(data);
        auto region = regions_->add(address, size, "", {});
        REQUIRE(region.ok());
        REQUIRE(transport_.add_region(**region).ok());
        const uint64_t limit = now_ns() + 60'000'000'000;
        while (keys_of(address, size) == nullptr && now_ns() < limit) {
        }
        REQUIRE(keys_of(address, size) != nullptr);
        return (*region)->id;
    }
    // As kA is told them; null: none, or not all of them yet.
    std::unique_ptr<nic::RemoteRegion> keys_of(uint64_t address, uint64_t bytes) {
        Answer answer = ask(kA, nic::keys_question(kName, {{address, bytes}}));
        REQUIRE(answer.ok());
        auto rows = nic::decode_keys(Reader(*answer), nic::KeySize::k32);
        REQUIRE(rows.has_value());
        if (rows->size() != 1) return nullptr;
        for (const nic::Key& key : rows->front().keys) {
            if (key.state != nic::KeyState::kKeyed) return nullptr;
        }
        return std::make_unique<nic::RemoteRegion>(rows->front());
    }
    void remove_region(uint64_t address) {
        auto region = regions_->remove(address);
        REQUIRE(region.ok());
        const uint64_t number = transport_.revoke(**region);
        const uint64_t limit = now_ns() + 60'000'000'000;
        bool drained = false;
        while (!(drained = transport_.drained(number)) && now_ns() < limit) {
        }
        REQUIRE(drained);
    }
    void shut_out(const SegmentId& peer) {
        REQUIRE(shut_out_->add(peer).ok());
        transport_.shut_out(peer);
    }

   private:
    transport::Context context() {
        transport::Context made{.identity = identity_,
                                .regions = regions_,
                                .shut_out = shut_out_,
                                .counters = counters_,
                                .deliver = nullptr,
                                .card = nullptr,
                                .ask = nullptr,
                                .left = nullptr,
                                .loops = {loop_.get()},
                                .waiters = waiters_,
                                .card_waiters = card_waiters_,
                                .closing = closing_,
                                .options = {}};
        made.options.rdma.library = soft_verbs_library();
        made.options.rdma.chunk_bytes = kChunkBytes;
        return made;
    }

    const transport::Identity identity_;
    const std::shared_ptr<transport::RegionTable> regions_ = std::make_shared<transport::RegionTable>();
    const std::shared_ptr<transport::ShutOut> shut_out_ = std::make_shared<transport::ShutOut>();
    transport::Counters counters_;
    const std::unique_ptr<EventLoop> loop_ = std::move(*EventLoop::create({}));
    transport::Workers waiters_{4}, card_waiters_{4};
    std::atomic<bool> closing_{false};
    Transport transport_{context()};
};

// A peer's NIC, with a queue pair and memory of its own.
class Initiator {
   public:
    Initiator()
        : nics_(std::move(*open_nics(**open_verbs(soft_verbs_library())))),
          port_(nics_.ports.front()),
          completions_(*Completions::create(port_->device, 64, true)),
          pair_(std::move(*QueuePair::create(port_, completions_))),
          key_(*port_->device->make_key(reinterpret_cast<uint64_t>(bytes_.data()), bytes_.size())) {}
    ~Initiator() {
        pair_.reset();
        (void)port_->device->end_key(key_.handle);
    }
    Initiator(const Initiator&) = delete;

    std::vector<std::byte> endpoint() const {
        std::vector<std::byte> out;
        Writer w(out);
        encode(w, pair_->endpoint());
        return out;
    }
    Question connect_question(uint32_t rail, uint8_t port = 0) const {
        return nic::connect_question(kName, rail, port, endpoint());
    }
    // The target's end, by its answer.
    static Endpoint peer_of(const Answer& answer) {
        REQUIRE_MESSAGE(answer.ok(), (answer.ok() ? "" : answer.error().text));
        Reader r(*answer);
        Endpoint peer = decode_endpoint(r);
        REQUIRE(r.ok());
        return peer;
    }
    void connect(const Endpoint& peer) { REQUIRE(pair_->connect(peer, true).ok()); }
    void connect(Serving& target, const SegmentId& as, uint32_t rail) {
        connect(peer_of(target.ask(as, connect_question(rail))));
    }
    // The status of a request.
    int post(int opcode, uint64_t remote, uint64_t key, size_t bytes, std::byte value = {}) {
        std::fill_n(bytes_.begin(), bytes, value);
        ib::Sge sge{reinterpret_cast<uint64_t>(bytes_.data()), static_cast<uint32_t>(bytes),
                    static_cast<uint32_t>(key_.local)};
        ib::SendWr wr{}, *bad = nullptr;
        wr.sg_list = &sge;
        wr.num_sge = 1;
        wr.opcode = opcode;
        wr.send_flags = ib::kSignaled;
        wr.wr.rdma = {remote, static_cast<uint32_t>(key)};
        REQUIRE(pair_->post(&wr, &bad) == 0);
        ib::Wc wc{};
        REQUIRE(completions_->poll({&wc, 1}) == 1);  // the software one completes while it posts
        return wc.status;
    }
    bool writes(const nic::RemoteRegion& region, std::byte value) {
        bool written = post(ib::kWrite, region.address, region.keys[0].remote, 8, value) == ib::kOk;
        if (written) CHECK(all_are(value, reinterpret_cast<std::byte*>(region.address), 8));
        return written;
    }

   private:
    std::vector<std::byte> bytes_ = std::vector<std::byte>(2 * kChunkBytes);
    Nics nics_;
    std::shared_ptr<Port> port_;
    std::shared_ptr<Completions> completions_;
    std::unique_ptr<QueuePair> pair_;
    nic::KeyMaker::Made key_;
};

uint64_t pairs() { return VerbsBed::count("pairs"); }

}  // namespace

TEST_CASE("rdma: a peer neither ends nor takes over the queue pairs of another one") {
    VerbsBed bed("devices=1");
    std::vector<std::byte> memory(kBytes);
    Serving target;
    (void)target.add_region(memory.data(), memory.size());
    auto region = target.keys_of(reinterpret_cast<uint64_t>(memory.data()), memory.size());
    Initiator a, b;
    a.connect(target, kA, 7);
    REQUIRE(a.writes(*region, std::byte{0x11}));
    // Ends of the number that is A's, and of all others.
    for (uint32_t rail = 0; rail < 16; ++rail) CHECK(target.ask(kB, nic::end_question(kName, rail)).ok());
    CHECK(target.ask(kB, nic::end_question(kName, UINT32_MAX)).ok());
    CHECK(a.writes(*region, std::byte{0x12}));
    // A connection with A's number is B's own.
    const Endpoint of_b = Initiator::peer_of(target.ask(kB, b.connect_question(7)));
    CHECK(a.writes(*region, std::byte{0x13}));
    // One that is for A's queue pair: it leads to an end that is B's, which A does not use.
    Endpoint stolen = Initiator::peer_of(target.ask(kB, a.connect_question(8)));
    CHECK(a.writes(*region, std::byte{0x14}));
    // B's queue pair reaches no end that was made for A's.
    b.connect(stolen);
    CHECK_FALSE(b.writes(*region, std::byte{0x21}));
    CHECK(memory[0] == std::byte{0x14});
    // What ends B's ends leaves A's.
    target.shut_out(kB);
    CHECK(a.writes(*region, std::byte{0x15}));
    Initiator again;
    Answer refused = target.ask(kB, again.connect_question(9));
    REQUIRE_FALSE(refused.ok());
    CHECK(refused.error().code == Code::kAuth);
    again.connect(of_b);  // which was ended
    CHECK_FALSE(again.writes(*region, std::byte{0x22}));
    CHECK(memory[0] == std::byte{0x15});
}

TEST_CASE("rdma: ends that are asked for twice, late or of no connection end nothing else") {
    VerbsBed bed("devices=1");
    std::vector<std::byte> memory(kBytes);
    Serving target;
    (void)target.add_region(memory.data(), memory.size());
    auto region = target.keys_of(reinterpret_cast<uint64_t>(memory.data()), memory.size());
    Initiator first, second, third;
    first.connect(target, kA, 1);
    second.connect(target, kA, 2);
    const uint64_t both = pairs();
    // Before the answer, not after it: then nothing more of the first one lands.
    CHECK(target.ask(kA, nic::end_question(kName, 1)).ok());
    CHECK(pairs() == both - 1);
    CHECK_FALSE(first.writes(*region, std::byte{0x31}));
    for (int i = 0; i < 3; ++i) CHECK(target.ask(kA, nic::end_question(kName, 1)).ok());
    CHECK(target.ask(kA, nic::end_question(kName, 3)).ok());
    CHECK(second.writes(*region, std::byte{0x32}));
    // A number that is used again ends the connection before, whether the new one comes about or not.
    CHECK_FALSE(target.ask(kA, nic::connect_question(kName, 2, 0, {})).ok());
    CHECK_FALSE(second.writes(*region, std::byte{0x33}));
    CHECK(memory[0] == std::byte{0x32});
    third.connect(target, kA, 2);
    CHECK(target.ask(kB, nic::end_question(kName, 2)).ok());  // replayed by another one
    CHECK(third.writes(*region, std::byte{0x34}));
    CHECK(target.ask(kA, nic::end_question(kName, 2)).ok());
    CHECK_FALSE(third.writes(*region, std::byte{0x35}));
    CHECK(memory[0] == std::byte{0x34});
}

TEST_CASE("rdma: keys are told of whole registered ranges, and reach nothing else") {
    VerbsBed bed("devices=1");
    std::vector<std::byte> all(4 * kBytes, std::byte{0xEE});
    std::byte* const memory = all.data() + kBytes;  // 1 to 2 of 4; 3 to 4 is another region
    const auto address = reinterpret_cast<uint64_t>(memory);
    Serving target;
    (void)target.add_region(memory, kBytes);
    (void)target.add_region(memory + 2 * kBytes, kBytes);
    auto rows_of = [&](const std::vector<nic::Range>& ranges) {
        Answer answer = target.ask(kB, nic::keys_question(kName, ranges));
        REQUIRE(answer.ok());
        auto rows = nic::decode_keys(Reader(*answer), nic::KeySize::k32);
        REQUIRE(rows.has_value());
        return rows->size();
    };
    const uint64_t last = std::numeric_limits<uint64_t>::max();
    for (const nic::Range& foreign :
         {nic::Range{address - 1, 1}, nic::Range{address - 1, kBytes}, nic::Range{address, kBytes + 1},
          nic::Range{address + kBytes, 1}, nic::Range{address + kBytes - 1, 2}, nic::Range{address, last},
          nic::Range{address + 1, last}, nic::Range{last, 1}, nic::Range{last, last}, nic::Range{0, last},
          nic::Range{0, 1}, nic::Range{address, 3 * kBytes}}) {
        CAPTURE(foreign.address - address);
        CAPTURE(foreign.length);
        CHECK(rows_of({foreign}) == 0);
    }
    CHECK(rows_of({{address, kBytes}}) == 1);
    CHECK(rows_of({{address, 1}, {address + 5, 7}, {address, kBytes}}) == 1);  // once
    CHECK(rows_of({{address, 1}, {address + 2 * kBytes, 1}, {0, 1}}) == 2);
    CHECK(rows_of(std::vector<nic::Range>(nic::kRangesMax, {address, 1})) == 1);
    CHECK_FALSE(
        target.ask(kB, nic::keys_question(kName, std::vector<nic::Range>(nic::kRangesMax + 1, {address, 1})))
            .ok());

    // The keys themselves: of a chunk each, and of nothing else.
    auto region = target.keys_of(address, kBytes), other = target.keys_of(address + 2 * kBytes, kBytes);
    REQUIRE(region->chunk_bytes == kChunkBytes);
    auto status_of = [&](int opcode, uint64_t at, uint64_t key, size_t bytes) {
        Initiator peer;  // a queue pair that was refused is of no more use
        peer.connect(target, kB, 1);
        return peer.post(opcode, at, key, bytes, std::byte{0x41});
    };
    const uint64_t key = region->keys[0].remote;
    for (int opcode : {ib::kWrite, ib::kRead}) {
        CAPTURE(opcode);
        CHECK(status_of(opcode, address - 1, key, 8) == ib::kRemoteAccess);
        CHECK(status_of(opcode, address + kChunkBytes - 4, key, 8) == ib::kRemoteAccess);
        CHECK(status_of(opcode, address + kChunkBytes, key, 8) == ib::kRemoteAccess);
        CHECK(status_of(opcode, address, other->keys[0].remote, 8) == ib::kRemoteAccess);
        CHECK(status_of(opcode, address, key ^ 1, 8) == ib::kRemoteAccess);
        CHECK(status_of(opcode, address, key + (100u << 8), 8) == ib::kRemoteAccess);
        CHECK(status_of(opcode, address, 0, 8) == ib::kRemoteAccess);
    }
    CHECK(all_are(std::byte{0xEE}, all.data(), all.size()));
    CHECK(status_of(ib::kWrite, address + kChunkBytes - 8, key, 8) == ib::kOk);
    CHECK(all_are(std::byte{0x41}, memory + kChunkBytes - 8, 8));

    // A region that was closed: no key of it works, nor is one told.
    target.remove_region(address);
    CHECK(rows_of({{address, kBytes}}) == 0);
    CHECK(status_of(ib::kWrite, address, key, 8) == ib::kRemoteAccess);
    CHECK(all_are(std::byte{0xEE}, memory, kChunkBytes - 8));
}

TEST_CASE("rdma: questions that are unreadable or too many leave nothing behind") {
    VerbsBed bed("devices=1");
    std::vector<std::byte> memory(kBytes);
    const auto address = reinterpret_cast<uint64_t>(memory.data());
    Serving target;
    (void)target.add_region(memory.data(), memory.size());
    auto region = target.keys_of(address, memory.size());
    Initiator a, b;
    a.connect(target, kA, 1);
    const uint64_t before = pairs();
    auto body_of = [](const Question& question) {
        return Question(question.begin() + static_cast<long>(2 + std::strlen(kName)), question.end());
    };
    const Question connect = body_of(b.connect_question(5)), end = body_of(nic::end_question(kName, 5)),
                   keys = body_of(nic::keys_question(kName, {{address, 1}, {address, 2}}));
    for (const Question* whole : {&connect, &end, &keys}) {
        for (size_t size = 0; size < whole->size(); ++size) {
            CAPTURE(size);
            Answer answer = target.ask_raw(kB, std::span(*whole).first(size));
            REQUIRE_FALSE(answer.ok());
            CHECK(answer.error().code == Code::kProtocol);
        }
    }
    for (const Question* whole : {&end, &keys}) {
        Question longer = *whole;
        longer.push_back({});
        CHECK_FALSE(target.ask_raw(kB, longer).ok());
    }
    for (int what = 3; what < 256; ++what) {
        Question other = connect;
        other[0] = std::byte(what);
        CHECK_FALSE(target.ask_raw(kB, other).ok());
    }
    for (int port = 1; port < 256; ++port)
        CHECK_FALSE(target.ask(kB, b.connect_question(5, static_cast<uint8_t>(port))).ok());
    CHECK(pairs() == before);
    // An endpoint that no port has: behind the question, rail and port stand the link layer, MTU, LID and
    // GID.
    constexpr size_t kMtuAt = 7, kGidAt = 10, kPsnAt = kGidAt + 16 + 4, kReadsAt = kPsnAt + 4;
    auto changed = [&](size_t at, int value) {
        Question other = connect;
        other[at] = std::byte(value);
        return target.ask_raw(kB, other);
    };
    for (int mtu : {0, 6, 255}) CHECK_FALSE(changed(kMtuAt, mtu).ok());
    CHECK_FALSE(changed(kPsnAt + 3, 1).ok());  // more than 24 bits
    CHECK_FALSE(changed(kReadsAt, 0).ok());
    Answer unknown = changed(kGidAt + 15, 99);
    REQUIRE_FALSE(unknown.ok());
    CHECK(unknown.error().text.find("10.8.0.99") != std::string::npos);
    CHECK(pairs() == before);
    // As many as one may have; the next ones are refused, and other peers are not.
    for (uint32_t rail = 100; rail < 100 + kEndsOfOneMax + 8; ++rail) {
        Answer answer = target.ask(kB, b.connect_question(rail));
        REQUIRE(answer.ok() == (rail < 100 + kEndsOfOneMax));
        if (!answer.ok()) CHECK(answer.error().code == Code::kTooLarge);
    }
    CHECK(pairs() == before + kEndsOfOneMax);
    CHECK(target.ask({3}, b.connect_question(1)).ok());
    CHECK(a.writes(*region, std::byte{0x51}));
    // Anything at all, by a peer that knows how questions look.
    Random random(931);
    for (int round = 0; round < 5000; ++round) {
        Question some = *std::array{&connect, &end, &keys}[random.below(3)];
        for (uint64_t n = random.between(0, 3); n > 0 && !some.empty(); --n) {
            some[random.below(some.size())] = std::byte(random.below(256));
        }
        if (random.one_in(4)) some.resize(random.below(some.size() + 20));
        (void)target.ask_raw(kB, some);
        CHECK(pairs() <= before + 1 + kEndsOfOneMax);
    }
    CHECK(a.writes(*region, std::byte{0x52}));
}
