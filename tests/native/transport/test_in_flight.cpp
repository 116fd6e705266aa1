// A transport whose peer moves bytes by itself, as one-sided hardware does, with completions that come when
// the test says so: what it has posted keeps memory from being freed.
#include <condition_variable>
#include <deque>
#include <future>
#include <map>
#include <mutex>
#include <thread>

#include "bed.hpp"
#include "transport/registry/registry.hpp"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/lsan_interface.h>
#endif

using namespace moonpool;
using namespace moonpool::testing;
using transport::Job;
using transport::Operation;
using transport::Region;

namespace {

// The hardware of all engines of a test.
class Device {
   public:
    void post(std::shared_ptr<Job> job, transport::Link::Finished finished, std::unique_ptr<Operation> held) {
        std::lock_guard lock(mutex_);
        queue_.push_back({std::move(job), std::move(finished), std::move(held)});
    }
    // Moves the bytes of the oldest operation, and completes it.
    void complete() {
        Posted posted = take();
        for (size_t i = 0; i < posted.job->slices.size(); ++i) {
            if (!posted.job->is_waiting(i)) continue;
            const Slice& slice = posted.job->slices[i];
            bool write = slice.direction == Direction::kWrite;
            std::memcpy(reinterpret_cast<void*>(write ? slice.remote : slice.local),
                        reinterpret_cast<void*>(write ? slice.local : slice.remote), slice.length);
            posted.job->bytes_done += slice.length;
            posted.job->done(i);
        }
        posted.held->end();
        posted.finished(posted.job, success());
    }
    // Ends the oldest job without a completion: the device may still write.
    void lose() {
        Posted posted = take();
        posted.finished(std::move(posted.job), Error{Code::kUnavailable, "the device is silent"});
        std::lock_guard lock(mutex_);
        lost_.push_back(std::move(posted.held));
    }
    // After a failed test: engines wait for jobs before they close.
    void abandon() {
        for (;;) {
            {
                std::lock_guard lock(mutex_);
                if (queue_.empty()) break;
            }
            lose();
        }
        fence();
    }
    // From here on it does not.
    void fence() {
        std::lock_guard lock(mutex_);
        lost_.clear();
    }

    uint64_t revoke(const Region& region) {
        std::lock_guard lock(mutex_);
        revoked_.push_back({region.address, region.length});
        changed_.notify_all();
        return revoked_.size() - 1;
    }
    bool drained(uint64_t revocation) {
        std::lock_guard lock(mutex_);
        auto [address, length] = revoked_[revocation];
        for (const Posted& posted : queue_) {
            for (const Slice& slice : posted.job->slices) {
                if (slice.remote >= address && slice.remote < address + length) return false;
            }
        }
        return true;
    }
    // Until a region is being deregistered.
    void await_revocations(size_t n) {
        std::unique_lock lock(mutex_);
        REQUIRE(changed_.wait_for(lock, std::chrono::seconds(30), [&] { return revoked_.size() >= n; }));
    }

   private:
    struct Posted {
        std::shared_ptr<Job> job;
        transport::Link::Finished finished;
        std::unique_ptr<Operation> held;
    };
    Posted take() {
        std::lock_guard lock(mutex_);
        REQUIRE_FALSE(queue_.empty());
        Posted posted = std::move(queue_.front());
        queue_.pop_front();
        return posted;
    }

    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<Posted> queue_;
    std::vector<std::unique_ptr<Operation>> lost_;
    std::vector<std::pair<uint64_t, uint64_t>> revoked_;
};

Device* device = nullptr;  // of the running test: a factory takes nothing of it along

class LateLink final : public transport::Link {
   public:
    std::string path() const override { return "late"; }
    bool reaches(MemoryKind kind, std::string* why) const override {
        return transport::reached_by_cpu(kind, why);
    }
    bool runs_on_caller(const Job&) const override { return false; }
    Status run(Job&) override { return Error{Code::kUnavailable, "it only posts"}; }
    bool post(const std::shared_ptr<Job>& job, const Finished& finished) override {
        auto held = std::make_unique<Operation>(job->regions);
        for (size_t i = 0; i < job->slices.size(); ++i) {
            if (job->is_waiting(i) && !held->hold(*job->locals[i])) {
                job->fail(i, Code::kInvalidArgument, "the local region was deregistered");
            }
        }
        device->post(job, finished, std::move(held));
        return true;
    }
};

class LateTransport final : public transport::Transport {
   public:
    Result<std::shared_ptr<transport::Link>> connect(const transport::PeerInfo&,
                                                     const std::shared_ptr<transport::Control>&,
                                                     int) override {
        return std::shared_ptr<transport::Link>(std::make_shared<LateLink>());
    }
    uint64_t revoke(const Region& region) override { return device->revoke(region); }
    bool drained(uint64_t revocation) override { return device->drained(revocation); }
};

// An engine that is closed while a device has its memory is never freed.
struct MayOutlive {
#if defined(__SANITIZE_ADDRESS__)
    MayOutlive() { __lsan_disable(); }
    ~MayOutlive() { __lsan_enable(); }
#else
    MayOutlive() {}
#endif
};

// Two engines whose slices go over the device alone.
struct LateBed {
    Device hardware;
    std::vector<transport::Factory> known;
    std::unique_ptr<Pair> pair;

    explicit LateBed(int timeout_ms) {
        MayOutlive engines;
        device = &hardware;
        known.push_back({"late", [](const transport::Context&) { return std::string(); },
                         [](const transport::Context&) -> std::unique_ptr<transport::Transport> {
                             return std::make_unique<LateTransport>();
                         }});
        for (const transport::Factory& row : transport::registry()) known.push_back(row);
        EngineOptions mine = engine_options("here", "late"), theirs = engine_options("there", "late");
        mine.registry = theirs.registry = known;
        mine.timeout_ms = theirs.timeout_ms = timeout_ms;
        pair = std::make_unique<Pair>(mine, theirs);
    }
    ~LateBed() {
        hardware.abandon();
        pair.reset();
        device = nullptr;
    }

    uint64_t submit(uint64_t local, uint64_t remote, uint64_t bytes) {
        std::vector<Slice> slices = {{local, remote, bytes, Direction::kRead}};
        Result<uint64_t> ticket = pair->here->submit(pair->request(slices));
        REQUIRE_MESSAGE(ticket.ok(), (ticket.ok() ? "" : ticket.error().text));
        return *ticket;
    }
    TicketState end_of(uint64_t ticket) {
        REQUIRE(*pair->here->wait(ticket, 10000));
        TicketState state = pair->here->status(ticket)->state;
        REQUIRE(pair->here->release(ticket).ok());
        return state;
    }
};

constexpr int kShortMs = 300;
constexpr int kLongMs = 30000;

void check_still_inside(const Status& status) {
    REQUIRE_FALSE(status.ok());
    CHECK(status.error().code == Code::kTimeout);
    CHECK(status.error().text.find("must not be freed") != std::string::npos);
}

}  // namespace

TEST_CASE(
    "in flight: deregistering times out while an operation is posted, and succeeds once it has completed") {
    LateBed bed(kShortMs);
    std::vector<std::byte> mine(4096, std::byte{0}), theirs(4096, std::byte{7});
    auto local = reinterpret_cast<uint64_t>(mine.data()), remote = reinterpret_cast<uint64_t>(theirs.data());
    for (bool here : {true, false}) {
        CAPTURE(here);  // whose region goes
        REQUIRE(bed.pair->here->register_region(local, 4096, "").ok());
        REQUIRE(bed.pair->there->register_region(remote, 4096, "").ok());
        Engine& owner = here ? *bed.pair->here : *bed.pair->there;
        uint64_t address = here ? local : remote;
        std::ranges::fill(mine, std::byte{0});
        uint64_t ticket = bed.submit(local, remote, 4096);
        check_still_inside(owner.deregister_region(address));
        check_still_inside(owner.deregister_region(address));
        CHECK(mine.front() == std::byte{0});
        bed.hardware.complete();
        CHECK(mine.back() == std::byte{7});
        CHECK(bed.end_of(ticket) == TicketState::kDone);
        CHECK(owner.deregister_region(address).ok());
        CHECK(owner.deregister_region(address).error().code == Code::kInvalidArgument);
        Engine& other = here ? *bed.pair->there : *bed.pair->here;
        REQUIRE(other.deregister_region(here ? remote : local).ok());
    }
}

TEST_CASE("in flight: deregistering waits for the completion, and new transfers are refused meanwhile") {
    LateBed bed(kLongMs);
    std::vector<std::byte> mine(4096, std::byte{0}), theirs(4096, std::byte{7});
    auto local = reinterpret_cast<uint64_t>(mine.data()), remote = reinterpret_cast<uint64_t>(theirs.data());
    REQUIRE(bed.pair->here->register_region(local, 4096, "").ok());
    REQUIRE(bed.pair->there->register_region(remote, 4096, "").ok());
    uint64_t ticket = bed.submit(local, remote, 4096);
    std::atomic<bool> completed{false};
    std::thread remover([&] {
        CHECK(bed.pair->here->deregister_region(local).ok());
        CHECK(completed);
    });
    bed.hardware.await_revocations(1);
    std::vector<Slice> more = {{local, remote, 1, Direction::kRead}};
    CHECK(bed.pair->here->submit(bed.pair->request(more)).error().code == Code::kInvalidArgument);
    completed = true;
    bed.hardware.complete();
    remover.join();
    CHECK(bed.end_of(ticket) == TicketState::kDone);
    CHECK(mine.back() == std::byte{7});
}

TEST_CASE("in flight: a job that was given up keeps its memory until the fence") {
    LateBed bed(kShortMs);
    std::vector<std::byte> mine(4096), theirs(4096);
    auto local = reinterpret_cast<uint64_t>(mine.data()), remote = reinterpret_cast<uint64_t>(theirs.data());
    REQUIRE(bed.pair->here->register_region(local, 4096, "").ok());
    REQUIRE(bed.pair->there->register_region(remote, 4096, "").ok());
    uint64_t ticket = bed.submit(local, remote, 4096);
    bed.hardware.lose();
    CHECK(bed.end_of(ticket) == TicketState::kFailed);
    check_still_inside(bed.pair->here->deregister_region(local));
    bed.hardware.fence();
    CHECK(bed.pair->here->deregister_region(local).ok());
}

TEST_CASE(
    "in flight: close() ends at its deadline while an operation is posted, and survives its completion") {
    std::vector<std::byte> mine(4096, std::byte{0}), theirs(4096, std::byte{7});
    auto local = reinterpret_cast<uint64_t>(mine.data()), remote = reinterpret_cast<uint64_t>(theirs.data());
    LateBed bed(kShortMs);
    REQUIRE(bed.pair->here->register_region(local, 4096, "").ok());
    REQUIRE(bed.pair->there->register_region(remote, 4096, "").ok());
    uint64_t ticket = bed.submit(local, remote, 4096);
    std::thread waiter([&] {  // is told of the end, or comes too late to ask
        Result<bool> ended = bed.pair->here->wait(ticket, 600000);
        CHECK((ended ? *ended : ended.error().code == Code::kClosed));
    });
    std::promise<Status> closed;
    std::thread closer([&] { closed.set_value(bed.pair->here->close()); });
    std::future<Status> outcome = closed.get_future();
    bool in_time = outcome.wait_for(std::chrono::seconds(60)) == std::future_status::ready;
    CHECK(in_time);
    if (in_time) waiter.join();
    bed.hardware.complete();
    if (!in_time) waiter.join();
    closer.join();
    Status status = outcome.get();
    REQUIRE_FALSE(status.ok());
    CHECK(status.error().code == Code::kTimeout);
    CHECK(status.error().text.find("must not be freed") != std::string::npos);
    CHECK(mine.back() == std::byte{7});
    CHECK(bed.pair->here->close().ok());  // nothing is left to wait for
    CHECK(bed.pair->here->submit({}).error().code == Code::kClosed);
}

TEST_CASE("in flight: visits and operations of a region are counted apart, and none begins once it closes") {
    transport::RegionTable table;
    REQUIRE(table.add(4096, 4096, "", {}).ok());
    std::shared_ptr<const transport::Regions> regions = table.all();
    Region& region = **regions->at(4096);
    Operation first(regions), second(regions);
    CHECK(first.hold(region));
    CHECK(first.hold(region));  // once
    CHECK(second.hold(region));
    REQUIRE(region.enter());
    REQUIRE(table.remove(4096).ok());
    first.end();
    CHECK_FALSE(region.drained());
    second.end();
    CHECK_FALSE(region.drained());
    region.leave();
    CHECK(region.drained());
    CHECK_FALSE(first.hold(region));
    CHECK(region.drained());
}
