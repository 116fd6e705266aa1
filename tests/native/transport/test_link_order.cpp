// The order of links by measured cost, with made-up times; and a peer of an engine whose links are fakes on a
// fake clock.
#include <atomic>
#include <cstring>

#include "bed.hpp"
#include "engine/link_order.hpp"

using namespace moonpool;
using namespace moonpool::testing;
using engine::Cost;
using engine::CostFit;
using engine::LinkOrder;

namespace {

constexpr uint64_t kSmall = 4096, kLarge = 8u << 20;

std::vector<size_t> places(const LinkOrder& order, uint64_t bytes, size_t n) {
    std::vector<size_t> links;
    for (size_t place = 0; place < n; ++place) links.push_back(LinkOrder::at(order.order(1, bytes), place));
    return links;
}

void carry(LinkOrder& order, size_t link, int jobs, uint64_t bytes, uint64_t ns) {
    for (int i = 0; i < jobs; ++i) order.carried(link, 1, bytes, ns);
}

using Places = std::vector<size_t>;

// A transport that copies within this process, and takes a time of the test's clock for it.
std::atomic<uint64_t> fake_now;
uint64_t fake_clock() { return fake_now; }
struct Fake {
    std::atomic<uint64_t> ns{0};  // for a job
    std::atomic<int> jobs{0};
    std::atomic<bool> gone{false};
};
Fake fakes[2];

class FakeLink final : public transport::Link {
   public:
    explicit FakeLink(size_t which) : fake_(fakes[which]), which_(which) {}
    std::string path() const override { return which_ == 0 ? "first" : "second"; }
    bool reaches(MemoryKind, std::string*) const override { return true; }
    bool runs_on_caller(const transport::Job&) const override { return false; }
    Status run(transport::Job& job) override {
        ++fake_.jobs;
        fake_now += fake_.ns;
        if (fake_.gone) return Error{Code::kUnavailable, "it is gone"};
        for (size_t i = 0; i < job.slices.size(); ++i) {
            if (!job.is_waiting(i)) continue;
            const Slice& slice = job.slices[i];
            std::memcpy(reinterpret_cast<void*>(slice.local), reinterpret_cast<void*>(slice.remote),
                        slice.length);
            job.bytes_done += slice.length;
            job.done(i);
        }
        return success();
    }

   private:
    Fake& fake_;
    size_t which_;
};

template <size_t which>
class FakeTransport final : public transport::Transport {
   public:
    Result<std::shared_ptr<transport::Link>> connect(const transport::PeerInfo&,
                                                     const std::shared_ptr<transport::Control>&,
                                                     int) override {
        return std::shared_ptr<transport::Link>(std::make_shared<FakeLink>(which));
    }
};
std::string anywhere(const transport::Context&) { return ""; }
template <size_t which>
std::unique_ptr<transport::Transport> make_fake(const transport::Context&) {
    return std::make_unique<FakeTransport<which>>();
}

std::vector<transport::Factory> with_fakes() {
    std::vector<transport::Factory> rows = {{"first", anywhere, make_fake<0>},
                                            {"second", anywhere, make_fake<1>}};
    for (const transport::Factory& row : transport::registry()) rows.push_back(row);
    return rows;
}

}  // namespace

TEST_CASE("link order: a cost has a part for each slice and one for each byte, found from mixed jobs") {
    Random random(910);
    CostFit fit;
    for (int i = 0; i < 200; ++i) {
        uint64_t slices = random.between(1, 64), bytes = slices * random.between(1, 1u << 20);
        fit.add(slices, bytes, slices * 2000 + bytes / 2);
    }
    CHECK(fit.cost().slice_ns == doctest::Approx(2000).epsilon(0.01));
    CHECK(fit.cost().byte_ns == doctest::Approx(0.5).epsilon(0.01));
    // Of one size only the sum is known, and is right.
    CostFit one;
    for (int i = 0; i < 20; ++i) one.add(1, kSmall, 30000);
    CHECK(one.cost().of(1, kSmall) == doctest::Approx(30000));
    // A job of a process that was not scheduled counts no more than four times what was expected.
    one.add(1, kSmall, 3'000'000'000);
    CHECK(one.cost().of(1, kSmall) < 45000);
    CHECK(CostFit().cost().of(1, kSmall) == 0);
}

TEST_CASE("link order: a link moves behind another only when both are measured and it is clearly slower") {
    LinkOrder order({false, false, false});
    CHECK(places(order, kSmall, 3) == Places{0, 1, 2});
    carry(order, 0, 100, kSmall, 90000);
    CHECK(places(order, kSmall, 3) == Places{0, 1, 2});  // the others are not known
    carry(order, 2, CostFit::kJobsMin - 1, kSmall, 10000);
    CHECK(places(order, kSmall, 3) == Places{0, 1, 2});
    carry(order, 2, 1, kSmall, 10000);
    CHECK(places(order, kSmall, 3) == Places{1, 2, 0});  // the one in between is not known to be slow
    carry(order, 1, 10, kSmall, 14000);
    CHECK(places(order, kSmall, 3) == Places{1, 2, 0});  // 1.4 times: not clearly
    carry(order, 1, 60, kSmall, 16000);
    CHECK(places(order, kSmall, 3) == Places{2, 1, 0});
    // It comes back when it is not slower, not before.
    carry(order, 1, 60, kSmall, 11000);
    CHECK(places(order, kSmall, 3) == Places{2, 1, 0});
    carry(order, 1, 60, kSmall, 9900);
    CHECK(places(order, kSmall, 3) == Places{1, 2, 0});
}

TEST_CASE("link order: each size class has its own") {
    LinkOrder order({false, false});
    for (int i = 0; i < 50; ++i) {
        for (uint64_t bytes : {kSmall, kLarge}) {
            order.carried(0, 1, bytes, 2000 + bytes);       // soon there, and slow
            order.carried(1, 1, bytes, 50000 + bytes / 4);  // the other way round
        }
    }
    CHECK(places(order, kSmall, 2) == Places{0, 1});
    CHECK(places(order, kLarge, 2) == Places{1, 0});
}

TEST_CASE("link order: links that only copy keep their place") {
    LinkOrder order({true, false, false});
    CHECK(order.chooses());
    carry(order, 0, 50, kSmall, 1000000);
    carry(order, 1, 50, kSmall, 90000);
    carry(order, 2, 50, kSmall, 10000);
    CHECK(places(order, kSmall, 3) == Places{0, 2, 1});
    CHECK_FALSE(LinkOrder({true, true, false}).chooses());
    CHECK_FALSE(LinkOrder({false}).chooses());
}

TEST_CASE("link order: one job in some hundreds measures a link again, and is left alone where it failed") {
    LinkOrder order({false, false});
    auto probes = [&](int jobs, uint64_t bytes, uint64_t now_ns) {
        int n = 0;
        for (int i = 0; i < jobs; ++i) {
            LinkOrder::Packed usual = order.order(1, bytes);
            n += LinkOrder::at(order.order_or_probe(1, bytes, now_ns), 0) != LinkOrder::at(usual, 0);
        }
        return n;
    };
    CHECK(probes(160, kSmall, 0) == 10);
    CHECK(probes(1000, LinkOrder::kProbeBytesMax + 1, 0) == 0);  // large ones never
    carry(order, 0, 50, kSmall, 10000);
    carry(order, 1, 50, kSmall, 30000);
    CHECK(probes(5000, kSmall, 0) == 0);  // known, and where the registry has it
    carry(order, 0, 50, kSmall, 90000);
    REQUIRE(places(order, kSmall, 2) == Places{1, 0});
    CHECK(probes(5120, kSmall, 0) == 10);
    order.left_undone(0, 1000);
    CHECK(probes(5120, kSmall, 1000 + LinkOrder::kLeaveAloneNs - 1) == 0);
    CHECK(probes(1, kSmall, 1000 + LinkOrder::kLeaveAloneNs) == 1);
    order.left_undone(0, 0);
    CHECK(probes(5120, kSmall, 2 * LinkOrder::kLeaveAloneNs - 1) == 0);
    CHECK(probes(1, kSmall, 2 * LinkOrder::kLeaveAloneNs) == 1);
}

TEST_CASE("link order: jobs in a queue count once") {
    LinkOrder order({false, false});
    uint64_t now = 1000;
    for (int i = 0; i < 100; ++i) order.began(0, now);
    for (int i = 0; i < 100; ++i) order.ended(0, 1, kSmall, now += 5000);
    CHECK(order.measured(0).jobs == 100);
    CHECK(order.measured(0).cost.of(1, kSmall) == doctest::Approx(5000));
    // What was not carried whole says nothing, and the time until then is not the next one's.
    order.began(0, now);
    order.began(0, now);
    order.ended(0, 0, 0, now += 900000);
    order.ended(0, 1, kSmall, now += 5000);
    CHECK(order.measured(0).jobs == 101);
    CHECK(order.measured(0).cost.of(1, kSmall) == doctest::Approx(5000));
}

TEST_CASE(
    "link order: a peer's jobs go by the faster link, by the other one when that is gone, and come back") {
    static const std::vector<transport::Factory> rows = with_fakes();
    EngineOptions options = engine_options("here", "");
    options.registry = rows;
    options.transports = {"first", "second"};
    options.link_clock_ns = fake_clock;
    Pair pair(options, engine_options("there", ""));
    Memory mine(*pair.here, kSmall, MemoryKind::kHost), theirs(*pair.there, kSmall, MemoryKind::kHost);
    std::vector<Slice> slices = {{mine.address(), theirs.address(), kSmall, Direction::kRead}};
    // How many of n jobs each link was asked for.
    auto carry_jobs = [&](int n) {
        for (Fake& fake : fakes) fake.jobs = 0;
        for (int i = 0; i < n; ++i) REQUIRE(pair.transfer(slices).ok());
        return std::pair(fakes[0].jobs.load(), fakes[1].jobs.load());
    };
    auto first_of_paths = [&] {
        std::vector<SegmentPath> paths = *pair.here->paths(pair.segment);
        return paths.front();
    };
    fakes[0].ns = 10000;
    fakes[1].ns = 40000;
    // The second one is measured by one job in 16 until it is known; then only the first one is used.
    CHECK(carry_jobs(128) == std::pair(120, 8));
    CHECK(carry_jobs(2000) == std::pair(2000, 0));
    CHECK(first_of_paths().transport == "first");
    CHECK(first_of_paths().jobs == 2120);
    CHECK(first_of_paths().slice_ns + kSmall * first_of_paths().byte_ns == doctest::Approx(10000));
    // It becomes slow: after some jobs it stands behind, but is measured now and then.
    fakes[0].ns = 200000;
    CHECK(carry_jobs(100).first < 50);
    CHECK(first_of_paths().transport == "second");
    CHECK(carry_jobs(5120) == std::pair(10, 5110));
    // Gone: each such job goes by the other one, and then it is left alone for ten seconds.
    fakes[0].gone = true;
    CHECK(carry_jobs(512) == std::pair(1, 512));
    fake_now += LinkOrder::kLeaveAloneNs;
    CHECK(metric(*pair.here, "retries_total") == 1);
    fakes[0].gone = false;
    fakes[0].ns = 10000;
    // And it comes back when it is as fast again.
    int rounds = 0;
    while (first_of_paths().transport != "first" && ++rounds < 100) (void)carry_jobs(512);
    CHECK(rounds < 100);
    CHECK(carry_jobs(1000) == std::pair(1000, 0));
    // The same on the engine's threads, several at a time.
    for (Fake& fake : fakes) fake.jobs = 0;
    std::vector<uint64_t> tickets;
    for (uint64_t i = 0; i < 200; ++i) {
        slices = {{mine.address() + 16 * i, theirs.address() + 16 * i, 16, Direction::kRead}};
        tickets.push_back(*pair.here->submit(pair.request(slices)));
    }
    for (uint64_t ticket : tickets) {
        REQUIRE(*pair.here->wait(ticket, 60000));
        CHECK(pair.here->status(ticket)->state == TicketState::kDone);
        REQUIRE(pair.here->release(ticket).ok());
    }
    // Threads move the one fake clock on for each other, so how they are shared out is not known.
    CHECK(fakes[0].jobs + fakes[1].jobs == 200);
}
