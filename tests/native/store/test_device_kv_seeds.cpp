// Loads, saves, aborts and deaths mixed by seed, on the software device: no wrong byte in the KV cache or in
// the pool, each end told once, nothing leaked.
//
// A run has one KV cache, in most of the runs pins on the node's arena, and some threads, each with blocks of
// its own, as an engine gives blocks to requests:
//
//     save   the forward writes blocks (queued) --> save --> staged: another owner writes them (queued)
//     load   an earlier owner writes blocks (queued) --> load --> what is told to be there is compared at
//     once
//
// and one event, or none: the card dies or hangs at some operation, a call of the driver fails, the KV cache
// is closed, or the node ends. At last the pool is compared with what was to be saved.
//
// MOONPOOL_TEST_RUNS: how many, 24 otherwise.
#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <deque>
#include <future>
#include <map>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/mutex.hpp"
#include "device_kv_bed.hpp"

using namespace moonpool;
using namespace moonpool::testing;

namespace {

using Bytes = std::vector<unsigned char>;

constexpr unsigned kThreads = 3, kBlocksEach = 3, kSteps = 5;

enum class Fate { kNone, kCardDies, kCardHangs, kCallFails, kClosed, kNodeEnds };
constexpr Fate kFates[] = {Fate::kNone,      Fate::kNone,   Fate::kCardDies, Fate::kCardHangs,
                           Fate::kCallFails, Fate::kClosed, Fate::kNodeEnds};

// What the threads of a run share.
struct Run {
    Bed& bed;
    const KvShape shape;
    DeviceKv& kv;
    Client& client;
    uint64_t cache;  // address on the card
    bool undisturbed;

    std::atomic<unsigned> steps{0};
    std::atomic<int> loads_ok{0}, loads_failed{0}, saves_ok{0}, saves_failed{0};
    Mutex mutex{};
    std::string wrong GUARDED_BY(mutex){};                             // the first thing
    std::map<std::string, Bytes> names GUARDED_BY(mutex){};            // objects that were to be saved
    std::vector<std::vector<std::string>> stored GUARDED_BY(mutex){};  // of saves that were told to be whole

    void is_wrong(const std::string& what) EXCLUDES(mutex) {
        MutexLock lock(mutex);
        if (wrong.empty()) wrong = what;
    }
};

std::string new_name() {
    static std::atomic<uint64_t> last{0};
    char text[kNameBytes + 1];
    std::snprintf(text, sizeof(text), "%08llx", static_cast<unsigned long long>(++last));
    return std::string(text, kNameBytes);
}

std::vector<std::string_view> views(const std::vector<std::string>& names) {
    return {names.begin(), names.end()};
}

// One thread: requests that own the blocks [first, first + kBlocksEach), one after another.
class Requests {
   public:
    Requests(Run& run, unsigned first, uint64_t seed)
        : run_(run), first_(first), random_(seed), host_(run.bed, kWrites * owner_bytes()) {
        host_.fill(random_);
    }

    void go() {
        for (unsigned i = 0; i < kSteps; ++i) {
            if (random_.below(3) == 0 || !load()) save();
            ++run_.steps;
        }
    }
    // Each save was told to be staged once, by the end of the run.
    bool staged_once() const {
        return std::ranges::all_of(staged_, [](const std::atomic<int>& calls) { return calls == 1; });
    }

   private:
    static constexpr unsigned kWrites = 3 * kSteps;
    uint64_t owner_bytes() const { return kBlocksEach * run_.shape.layers * run_.shape.block_bytes(); }

    // An owner writes all blocks of this thread: queued only. -> which bytes; none: the card refused.
    std::optional<unsigned> write() {
        unsigned number = writes_++;
        const KvShape& shape = run_.shape;
        for (unsigned layer = 0; layer < shape.layers; ++layer) {
            for (unsigned b = 0; b < kBlocksEach; ++b) {
                device::Copy copy{run_.cache + shape.at(layer, first_ + b, 0, 0),
                                  host_.address() + place(number, layer, b), shape.block_bytes()};
                if (!engine_.copy(copy)) return std::nullopt;
            }
        }
        return number;
    }
    uint64_t place(unsigned number, unsigned layer, unsigned b) const {
        return number * owner_bytes() + (layer * kBlocksEach + b) * run_.shape.block_bytes();
    }
    // Object `i` of those in this thread's blocks: at(layer, b, offset in the block) -> its bytes.
    template <class At>
    Bytes object(unsigned i, At at) const {
        const KvShape& shape = run_.shape;
        Bytes bytes;
        for (unsigned layer = 0; layer < shape.layers; ++layer) {
            for (unsigned token = 0; token < shape.tokens; ++token) {
                uint64_t in_block = shape.at(0, 0, i % shape.heads, token);
                const unsigned char* from = at(layer, i / shape.heads, in_block);
                bytes.insert(bytes.end(), from, from + shape.content);
            }
        }
        return bytes;
    }
    Bytes written(unsigned number, unsigned i) {
        return object(i, [&](unsigned layer, unsigned b, uint64_t in_block) {
            return host_.data() + place(number, layer, b) + in_block;
        });
    }
    Bytes on_card(unsigned i) const {
        return object(i, [&](unsigned layer, unsigned b, uint64_t in_block) {
            uint64_t address = run_.cache + run_.shape.at(layer, first_ + b, 0, 0) + in_block;
            return reinterpret_cast<unsigned char*>(soft_device().soft_at(address, run_.shape.content));
        });
    }
    void take_places(size_t objects) {
        blocks_.clear();
        columns_.clear();
        for (size_t i = 0; i < objects; ++i) {
            blocks_.push_back(first_ + static_cast<uint32_t>(i / run_.shape.heads));
            columns_.push_back(static_cast<uint16_t>(i % run_.shape.heads));
        }
    }

    void save() {
        std::optional<unsigned> number = write();
        if (!number) return;
        Result<Mark> mark = run_.kv.mark(reinterpret_cast<uint64_t>(engine_.handle()));
        if (!mark) return;
        auto objects = static_cast<unsigned>(random_.between(1, kBlocksEach * run_.shape.heads));
        take_places(objects);
        std::vector<std::string> names;
        {
            MutexLock lock(run_.mutex);
            for (unsigned i = 0; i < objects; ++i) {
                names.push_back(new_name());
                run_.names[names.back()] = written(*number, i);
            }
        }
        std::vector<std::string_view> above{{}};  // each object the parent of the next
        for (size_t i = 1; i < names.size(); ++i) above.push_back(names[i - 1]);
        std::atomic<int>& calls = staged_.emplace_back(0);
        Result<PutReport> report =
            save_now(run_.kv, run_.client, {views(names), above, 0, blocks_, columns_, *mark}, [&] {
                ++calls;
                (void)write();  // the blocks have another owner
            });
        if (calls != 1) run_.is_wrong("a save was not told once that it is staged before its end");
        bool whole = report.ok() && report->outcomes.size() == objects &&
                     std::ranges::all_of(report->outcomes,
                                         [](PutOutcome outcome) { return outcome == PutOutcome::kStored; });
        if (!whole && report.ok() && report->refusal.empty()) run_.is_wrong("a save failed without a reason");
        ++(whole ? run_.saves_ok : run_.saves_failed);
        if (!whole) return;
        MutexLock lock(run_.mutex);
        run_.stored.push_back(std::move(names));
    }

    // False: there is nothing to load.
    bool load() {
        std::vector<std::string> names;
        std::vector<Bytes> truth;
        {
            MutexLock lock(run_.mutex);
            if (run_.stored.empty()) return false;
            names = run_.stored[random_.below(run_.stored.size())];
            for (const std::string& name : names) truth.push_back(run_.names[name]);
        }
        Result<Prefix> prefix = run_.client.longest_prefix(views(names), 1, true);
        if (!prefix || prefix->descriptors.empty()) return false;
        Handover handover = Client::hand_over(*prefix);
        size_t objects = handover.descriptors.size();
        std::optional<size_t> gone;
        if (random_.below(4) == 0) {  // the request is aborted: its pin ends, and an object is removed
            prefix = Prefix{};
            gone = random_.below(objects);
            std::string_view name = names[*gone];
            if (!run_.client.remove(std::span(&name, 1))) gone.reset();
        }
        if (!write()) return false;
        Result<Mark> mark = run_.kv.mark(reinterpret_cast<uint64_t>(engine_.handle()));
        if (!mark) return false;
        take_places(objects);
        LoadReport report = run_.kv.load(
            run_.client, {handover.holders, handover.descriptors, blocks_, columns_, false, *mark});
        if (report.ok.size() != objects) run_.is_wrong("a load was not answered object by object");
        uint64_t bytes = 0;
        for (size_t i = 0; i < report.ok.size(); ++i) {
            if (report.ok[i] == 0) continue;
            bytes += truth[i].size();
            if (gone == i) run_.is_wrong("an object that was removed was loaded");
            if (on_card(static_cast<unsigned>(i)) != truth[i]) run_.is_wrong("a load left a wrong byte");
        }
        if (bytes != report.bytes) run_.is_wrong("a load counted its bytes wrongly");
        bool whole = bytes == objects * run_.shape.object_bytes();
        if (whole != report.error.empty()) run_.is_wrong("a load's error does not fit its objects");
        // Another request may have removed an object of the same save.
        if (run_.undisturbed && !whole && report.error.find("a pinned object was removed ") != 0) {
            run_.is_wrong("a load failed without a cause: " + report.error);
        }
        ++(whole ? run_.loads_ok : run_.loads_failed);
        return true;
    }

    Run& run_;
    const unsigned first_;
    Random random_;
    testing::Pinned host_;
    device::Stream engine_ =
        must(device::Stream::create(run_.bed.device, device::Stream::Priority::kDefault));
    unsigned writes_ = 0;
    std::vector<uint32_t> blocks_;
    std::vector<uint16_t> columns_;
    std::deque<std::atomic<int>> staged_;
};

void compare_pool(Run& run, const ClientOptions& options) {
    MutexLock lock(run.mutex);
    Client client(options);
    for (const auto& [name, truth] : run.names) {
        Bytes there(truth.size());
        MemoryRef part = MemoryRef::host(there.data(), there.size());
        GetItem item{name, {&part, 1}};
        auto sizes = must(client.get(std::span(&item, 1), true));
        if (sizes[0] >= 0 && there != truth) run.wrong = "the pool has a wrong byte";
        std::string_view view = name;
        REQUIRE(client.remove(std::span(&view, 1)));
    }
}

struct Sum {
    int loads_ok = 0, loads_failed = 0, saves_ok = 0, saves_failed = 0;
};

void run_once(std::optional<Node>& node, uint64_t salt, Sum& sum) {
    Random random(salt);
    Fate fate = kFates[random.below(std::size(kFates))];
    constexpr Policy kPolicies[] = {Policy::kLate, Policy::kEarly, Policy::kAtOnce, Policy::kShuffled,
                                    Policy::kShuffled};
    DeviceKvOptions options = *std::array{&kSmall, &kDirect, &kTight}[random.below(3)];
    options.load_lanes = static_cast<uint32_t>(random.between(1, 3));
    options.arena = {.part_bytes = 4 * kMiB, .object_bytes_min = 0};
    // What the node has settled by then, up to that; the ring alone in every third run.
    const uint64_t pins = random.below(3) * random.between(1, 64) * kMiB;
    KvShape shape{.tokens_first = random.one_in(2), .blocks = kThreads * kBlocksEach};
    shape.content = std::array{24u, 128u, 512u}[random.below(3)];
    std::string fates[] = {"none",         "the card dies", "the card hangs",
                           "a call fails", "closed",        "the node ends"};
    std::string what = fates[static_cast<int>(fate)];
    CAPTURE(salt);
    CAPTURE(what);

    Bed bed(kPolicies[random.below(std::size(kPolicies))], random.next());
    bool told_once = true;
    {
        Client client(node->options());
        REQUIRE(client.connect());
        Cache cache(bed, shape);
        std::shared_ptr<DeviceKv> kv = cache.open(options);
        (void)kv->pin_arena(client, pins);
        Run run{.bed = bed,
                .shape = shape,
                .kv = *kv,
                .client = client,
                .cache = cache.memory.address(),
                .undisturbed = fate == Fate::kNone};
        std::deque<Requests> requests;
        for (unsigned t = 0; t < kThreads; ++t) requests.emplace_back(run, t * kBlocksEach, random.next());

        auto nth = static_cast<int>(random.between(1, 150));
        if (fate == Fate::kCardDies) soft_device().soft_die(nth, random.one_in(2) ? 700 : 719);
        if (fate == Fate::kCardHangs) soft_device().soft_hang(nth);
        if (fate == Fate::kCallFails) {
            constexpr const char* kCalls[] = {"cuMemcpyAsync",     "cuMemcpyBatchAsync", "cuLaunchKernel",
                                              "cuStreamWaitEvent", "cuEventRecord",      "cuEventQuery"};
            constexpr int kCodes[] = {1, 2, 801};
            soft_device().soft_fail(kCalls[random.below(std::size(kCalls))], nth / 5 + 1,
                                    kCodes[random.below(std::size(kCodes))]);
        }
        std::vector<std::future<void>> threads;
        for (Requests& each : requests)
            threads.push_back(std::async(std::launch::async, [&each] { each.go(); }));
        auto wait_for = [&](unsigned steps) {
            auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(30);
            while (run.steps < steps &&
                   (fate != Fate::kCardHangs || std::chrono::steady_clock::now() < until)) {
                std::this_thread::yield();
            }
        };
        if (fate == Fate::kCardHangs) wait_for(kThreads * kSteps);
        if (fate == Fate::kClosed || fate == Fate::kNodeEnds) {
            wait_for(static_cast<unsigned>(random.below(kThreads * kSteps)));
        }
        if (fate == Fate::kNodeEnds) node->server.reset();
        if (fate == Fate::kClosed) CHECK(kv->close(20'000));
        if (fate == Fate::kCardHangs) (void)kv->close(10);
        for (std::future<void>& thread : threads) thread.get();

        if (fate == Fate::kCardHangs) {
            soft_device().soft_unhang();
            soft_device().soft_settle();  // into memory that was kept
        }
        if (fate != Fate::kNodeEnds) compare_pool(run, node->options());
        soft_device().soft_fail("cuMemcpyAsync", 0, 0);
        soft_device().soft_settle();
        for (const Requests& each : requests) told_once = told_once && each.staged_once();
        {
            MutexLock lock(run.mutex);
            CHECK(run.wrong == "");
        }
        sum.loads_ok += run.loads_ok;
        sum.loads_failed += run.loads_failed;
        sum.saves_ok += run.saves_ok;
        sum.saves_failed += run.saves_failed;
        if (fate == Fate::kNone) CHECK(run.saves_failed == 0);
    }
    CHECK(told_once);
    char text[200];
    CHECK_MESSAGE(soft_device().soft_violations(text, sizeof(text)) == 0, text);
    if (fate == Fate::kCardDies || fate == Fate::kCardHangs) {
        bed.forget();  // which keep what the card might still use
    } else {
        bed.end();
    }
    if (fate == Fate::kNodeEnds) node.emplace();
}

}  // namespace

TEST_CASE("device kv: loads, saves, aborts and deaths, mixed by seed") {
    if (is_real()) return;
    const char* given = std::getenv("MOONPOOL_TEST_RUNS");
    int runs = given != nullptr ? std::atoi(given) : 24;
    std::optional<Node> node;
    node.emplace();
    Sum sum;
    for (int i = 0; i < runs; ++i) run_once(node, 3000 + static_cast<uint64_t>(i), sum);
    MESSAGE(runs << " runs: " << sum.loads_ok << " loads and " << sum.saves_ok << " saves whole, "
                 << sum.loads_failed << " loads and " << sum.saves_failed
                 << " saves failed at least in part");
    CHECK(sum.loads_ok > 0);
    CHECK(sum.saves_ok > 0);
}
