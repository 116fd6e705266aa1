// Hand-overs of KV between engines with many things at once: a prefill engine computes blocks and gives them
// away again, readers of a decode engine take them, and one engine or its card comes to an end amid it. The
// seed of a run says which path, which policies of the software device, and what happens.
//
//     prefill   forward, lease, [mark over] word ... done, or after a while: lease over, blocks of another
//     decode    word, [blocks free] read, lease looked at, good or not, [nothing runs on] blocks of another
//
// What has to hold: what a read whose lease is valid brought is what the forward computed; each ticket ends
// once; after its end nothing is written to its blocks; nothing leaks. Over all paths but loopback the
// prefill engine is another process, with a card of its own. MOONPOOL_TEST_RUNS says how many runs.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <deque>
#include <future>
#include <map>
#include <optional>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "../process.hpp"
#include "base/mutex.hpp"
#include "bed.hpp"

using namespace moonpool;
using namespace moonpool::testing;
using device::must;

namespace {

using Bytes = std::vector<std::byte>;
using SeedClock = std::chrono::steady_clock;

constexpr unsigned kSlots = 3, kReaders = 2, kPieces = 6;
constexpr uint64_t kWordsEach = 4;  // leases of a slot
constexpr int kHungMs = 60;         // so long transfers wait for a card that hangs
constexpr auto kHungRun = std::chrono::milliseconds(150);
constexpr auto kRun = std::chrono::seconds(120);
constexpr std::byte kOfAnother{0xC7};  // what the next owner of blocks has there

enum class End { kNone, kCardDies, kCardHangs, kCallFails, kCloses, kIsKilled };

// A run, as both processes know it.
struct Plan {
    uint64_t value;
    std::string path;
    MemoryKind here, there;
    Policy policy_here, policy_there;
    End end_here = End::kNone, end_there = End::kNone;
    int nth;         // operation of a card
    unsigned words;  // until an engine ends
    uint64_t piece_bytes;

    explicit Plan(uint64_t given) : value(given) {
        Random random = of(0);
        path = std::array{"loopback", "shm", "tcp", "tcp", "cuda_ipc", "cuda_ipc"}[random.below(6)];
        there = path == "shm" ? MemoryKind::kHostArena : MemoryKind::kDevice;
        here = path != "shm" && random.one_in(4) ? MemoryKind::kHost : MemoryKind::kDevice;
        constexpr std::array kPolicies{Policy::kLate, Policy::kEarly, Policy::kAtOnce, Policy::kShuffled,
                                       Policy::kShuffled};
        policy_here = kPolicies[random.below(kPolicies.size())];
        policy_there = kPolicies[random.below(kPolicies.size())];
        constexpr std::array kEnds{End::kNone,      End::kNone,   End::kCardDies, End::kCardHangs,
                                   End::kCallFails, End::kCloses, End::kIsKilled};
        End end = kEnds[random.below(kEnds.size())];
        if (end == End::kIsKilled && in_this_process()) end = End::kCloses;
        (random.one_in(2) && end != End::kIsKilled ? end_here : end_there) = end;
        nth = static_cast<int>(random.between(1, 60));
        words = static_cast<unsigned>(random.below(kSlots * kWordsEach));
        piece_bytes = std::array{500u, 4096u, 70001u}[random.below(3)];
    }
    // Random numbers that are the same in both processes.
    Random of(uint64_t use) const { return Random(value + use - seed()); }
    uint64_t bytes() const { return kPieces * piece_bytes; }
    bool in_this_process() const { return path == "loopback"; }
    bool has(End end) const { return end_here == end || end_there == end; }
    // Of a process that is killed, while a card of another reaches it, which ends that card's context.
    bool takes_memory_away() const { return end_there == End::kIsKilled && value % 2 == 1; }
    bool undisturbed() const { return end_here == End::kNone && end_there == End::kNone; }
    Bytes computed(uint64_t lease) const {
        Random random = of(1000 + lease);
        Bytes bytes(this->bytes());
        random.fill(bytes.data(), bytes.size());
        return bytes;
    }
    // That reach the prefill engine's memory.
    std::vector<std::string> transports() const {
        if (path == "shm" || path == "cuda_ipc") return {path, "tcp"};  // its other memory by TCP
        return {path};
    }
    int timeout_ms() const { return has(End::kCardHangs) ? kHungMs : 10000; }
    void disturb(End end) const {
        Random random = of(end == end_here ? 1 : 2);
        if (end == End::kCardDies) soft_device().soft_die(nth, random.one_in(2) ? 700 : 719);
        if (end == End::kCardHangs) soft_device().soft_hang(nth);
        if (end != End::kCallFails) return;
        constexpr std::array kCalls{"cuMemcpyAsync",     "cuMemcpyBatchAsync", "cuEventRecord",
                                    "cuStreamWaitEvent", "cuEventQuery",       "cuIpcOpenMemHandle"};
        constexpr std::array kCodes{1, 2, 801};
        soft_device().soft_fail(kCalls[random.below(kCalls.size())], nth / 5 + 1,
                                kCodes[random.below(kCodes.size())]);
    }
};

// The stream of an engine: its work is queued, and a mark tells when it is over.
class Forwards {
   public:
    Forwards(Bed& bed, uint64_t bytes)
        : device_(bed.device),
          stream_(must(device::Stream::create(bed.device, device::Stream::Priority::kDefault))),
          source_(bed, bytes) {}
    unsigned char* source() { return source_.data(); }

    // Queues that memory gets `bytes` of the source. -> the mark; none: the card refused.
    std::optional<device::Event> write(Memory& memory, uint64_t at, uint64_t from, uint64_t bytes) {
        Result<device::Event> mark = device::Event::create(device_);
        if (!mark) return std::nullopt;
        if (!memory.on_card()) {
            std::memcpy(memory.data() + at, source_.data() + from, bytes);
        } else if (!stream_.copy({memory.address() + at, source_.address() + from, bytes})) {
            return std::nullopt;
        }
        if (!mark->record(stream_.handle())) return std::nullopt;
        return std::move(*mark);
    }

   private:
    std::shared_ptr<device::Device> device_;
    device::Stream stream_;
    testing::Pinned source_;
};

// A reader in the same process looks at the lease as transfers do: by copying.
Mutex& lease_mutex() {
    static Mutex mutex;
    return mutex;
}

// The engine that computes. One thread serves.
class Prefill {
   public:
    Prefill(Bed& bed, const Plan& plan)
        : plan_(plan),
          engine_(make_engine(engine_options("there", ""))),
          kv_(*engine_, kSlots * plan.bytes(), plan.there),
          leases_(*engine_, kSlots * 8, MemoryKind::kHostArena),
          forwards_(bed, (kSlots * kWordsEach + 1) * plan.bytes()) {
        std::memset(forwards_.source(), static_cast<int>(kOfAnother), plan.bytes());
        for (unsigned slot = 0; slot < kSlots; ++slot) set_lease(slot, 0);
    }

    const std::string& address() const { return engine_->addresses().front(); }

    void serve(const std::string& decode, const std::atomic<bool>& stop) {
        Result<uint32_t> peer = engine_->open(decode);
        CHECK(peer.ok());
        if (!peer) return;
        Random random = plan_.of(3);
        while (!stop && std::ranges::any_of(slots_, [](const Slot& slot) { return slot.left != 0; })) {
            hear();
            for (unsigned number = 0; number < kSlots; ++number) go_on(number, *peer, random);
            if (plan_.end_there == End::kCloses && words_ > plan_.words) {
                CHECK(engine_->close().ok());
                return;
            }
            (void)readable(engine_->event_fd(), 1);
            (void)engine_->poll();
        }
    }

   private:
    struct Slot {
        uint64_t left = kWordsEach, lease = 0;
        std::optional<device::Event> mark;
        bool told = false, done = false;
        SeedClock::time_point until{};
    };

    void set_lease(unsigned slot, uint64_t lease) {
        MutexLock lock(lease_mutex());
        std::memcpy(leases_.data() + slot * 8, &lease, 8);
    }
    void hear() {
        auto heard = engine_->notifications();
        if (!heard) return;
        for (auto& [peer, text] : *heard) {
            for (Slot& slot : slots_) slot.done = slot.done || text == "done " + std::to_string(slot.lease);
        }
    }
    // One thing after another: the forward, the word when it is over, the end of the lease.
    void go_on(unsigned number, uint32_t peer, Random& random) {
        Slot& slot = slots_[number];
        if (slot.left == 0) return;
        if (slot.lease == 0) {
            slot.lease = ++leases_given_;
            Bytes bytes = plan_.computed(slot.lease);
            std::memcpy(forwards_.source() + slot.lease * plan_.bytes(), bytes.data(), bytes.size());
            set_lease(number, slot.lease);
            slot.mark =
                forwards_.write(kv_, number * plan_.bytes(), slot.lease * plan_.bytes(), plan_.bytes());
            if (!slot.mark) end(number);
            return;
        }
        if (!slot.told) {
            Result<bool> over = slot.mark->over();
            if (!over) return end(number);
            if (!*over) return;
            std::string word = "word " + std::to_string(slot.lease) + " " +
                               std::to_string(kv_.address() + number * plan_.bytes()) + " " +
                               std::to_string(leases_.address() + number * 8);
            if (!engine_->notify(peer, word)) return end(number);
            ++words_;
            slot.told = true;
            bool gives_up = random.one_in(3);
            slot.until = SeedClock::now() + (gives_up ? std::chrono::microseconds(random.below(2000)) : kRun);
        }
        if (slot.done || SeedClock::now() > slot.until) end(number);
    }
    // The blocks have another owner.
    void end(unsigned number) {
        Slot& slot = slots_[number];
        set_lease(number, 0);
        (void)forwards_.write(kv_, number * plan_.bytes(), 0, plan_.bytes());
        uint64_t left = slot.left - 1;
        slot = Slot();
        slot.left = left;
    }

    const Plan plan_;
    std::shared_ptr<Engine> engine_;
    Memory kv_, leases_;
    Forwards forwards_;
    std::array<Slot, kSlots> slots_;
    uint64_t leases_given_ = 0;
    unsigned words_ = 0;
};

struct Sum {
    int good = 0, over = 0, failed = 0, cancelled = 0;
};

// The engine that takes over: a thread that listens, and readers.
class Decode {
   public:
    Decode(Bed& bed, const Plan& plan)
        : plan_(plan),
          engine_(make_engine([&] {
              EngineOptions options = engine_options("here", "");
              options.transports = plan.transports();
              return options;
          }())),
          kv_(*engine_, kReaders * plan.bytes(), plan.here),
          scratch_(*engine_, kReaders * 8, MemoryKind::kHost) {
        for (unsigned r = 0; r < kReaders; ++r) {
            Forwards& forwards = forwards_.emplace_back(bed, plan.bytes());
            std::memset(forwards.source(), 0x77, plan.bytes());
            give_away(r);
        }
    }

    const std::string& address() const { return engine_->addresses().front(); }
    void open(const std::string& address) {
        Result<uint32_t> opened = engine_->open(address);
        REQUIRE_MESSAGE(opened.ok(), (opened.ok() ? "" : opened.error().text));
        segment_ = *opened;
    }
    void start() {
        threads_.push_back(std::async(std::launch::async, [this] { listen(); }));
        for (unsigned r = 0; r < kReaders; ++r) {
            threads_.push_back(std::async(std::launch::async, [this, r] { take_words(r); }));
        }
    }
    unsigned words() const { return words_; }
    // Nothing that was told is left to read.
    bool idle() EXCLUDES(mutex_) {
        unsigned looks = looks_;
        auto until = SeedClock::now() + kRun;
        while (looks_ < looks + 2 && SeedClock::now() < until) std::this_thread::yield();
        MutexLock lock(mutex_);
        return queue_.empty() && reading_ == 0;
    }
    void close() {
        Status closed = engine_->close();
        CHECK_MESSAGE(closed.ok(), (closed.ok() ? "" : closed.error().text));
        closed_ = true;
    }
    // Readers that wait for a card wait no more.
    void stop() { stop_ = true; }
    // Every card runs again.
    void finish(Sum& sum) {
        for (std::future<void>& thread : threads_) thread.get();
        soft_device().soft_settle();  // earlier owners' work
        if (!closed_) {
            auto until = SeedClock::now() + kRun;
            while (*engine_->has_abandoned_copies() && SeedClock::now() < until) std::this_thread::yield();
            CHECK_FALSE(*engine_->has_abandoned_copies());
            look_at_tickets();
            for (auto& [ticket, ends] : tickets_) {
                if (ends != 1) is_wrong("a ticket ended " + std::to_string(ends) + " times");
                CHECK(engine_->release(ticket).ok());
            }
        }
        for (unsigned r = 0; r < kReaders; ++r) check_untouched(r);
        CHECK(engine_->check_integrity());
        MutexLock lock(mutex_);
        CHECK(wrong_ == "");
        sum.good += sum_.good;
        sum.over += sum_.over;
        sum.failed += sum_.failed;
        sum.cancelled += sum_.cancelled;
        if (plan_.undisturbed()) CHECK(words_.load() == kSlots * kWordsEach);
    }

   private:
    struct Word {
        uint64_t lease = 0, kv = 0, lease_at = 0;
    };
    struct Read {
        bool ok = false, cancelled = false;
        std::string why;
    };

    void is_wrong(const std::string& what) EXCLUDES(mutex_) {
        MutexLock lock(mutex_);
        if (wrong_.empty()) wrong_ = what;
    }

    void listen() {
        while (!stop_) {
            (void)readable(engine_->event_fd(), 5);
            look_at_tickets();
            if (auto heard = engine_->notifications()) {
                for (auto& [peer, text] : *heard) {
                    std::istringstream words(text);
                    std::string kind;
                    Word word;
                    words >> kind >> word.lease >> word.kv >> word.lease_at;
                    MutexLock lock(mutex_);
                    queue_.push_back(word);
                    ++words_;
                    told_.notify_one();
                }
            }
            ++looks_;
        }
        MutexLock lock(mutex_);
        told_.notify_all();
    }
    void look_at_tickets() {
        auto ended = engine_->poll();
        if (!ended) return;
        MutexLock lock(mutex_);
        for (uint64_t ticket : *ended) ++tickets_[ticket];
    }

    void take_words(unsigned r) {
        Random random = plan_.of(10 + r);
        for (;;) {
            Word word;
            {
                MutexLock lock(mutex_);
                told_.wait(lock, [this]() REQUIRES(mutex_) { return stop_ || !queue_.empty(); });
                if (stop_) return;
                word = queue_.front();
                queue_.pop_front();
                ++reading_;
            }
            take_over(r, word, random);
            MutexLock lock(mutex_);
            --reading_;
        }
    }

    void take_over(unsigned r, const Word& word, Random& random) {
        if (may_be_written_[r]) return;
        check_untouched(r);
        if (free_blocks(r)) read_blocks(r, word, random);
        (void)engine_->notify(segment_, "done " + std::to_string(word.lease));
    }

    // What an earlier owner has queued on the blocks ends first. False: the card refused it, or hangs.
    bool free_blocks(unsigned r) {
        std::optional<device::Event> mark = forwards_[r].write(kv_, r * plan_.bytes(), 0, plan_.bytes());
        own_[r] = false;
        while (mark && !stop_) {
            Result<bool> over = mark->over();
            if (over && *over) return true;
            if (!over) break;
            std::this_thread::yield();
        }
        return false;
    }

    void read_blocks(unsigned r, const Word& word, Random& random) {
        std::array<uint64_t, kPieces> places{};
        for (uint64_t i = 0; i < kPieces; ++i) places[i] = i;
        for (uint64_t i = kPieces; i > 1; --i) std::swap(places[i - 1], places[random.below(i)]);
        std::vector<Slice> slices;
        for (uint64_t i = 0; i < kPieces; ++i) {
            slices.push_back({kv_.address() + r * plan_.bytes() + places[i] * plan_.piece_bytes,
                              word.kv + i * plan_.piece_bytes, plan_.piece_bytes, Direction::kRead});
        }
        Read read = random.one_in(2) ? wait_for(slices) : submit(slices, random);
        bool good = read.ok && lease_is(r, word);
        if (good) compare(r, word, places);
        if (!read.ok && !read.cancelled && plan_.undisturbed()) {
            is_wrong("a read failed without a cause: " + read.why);
        }
        {
            MutexLock lock(mutex_);
            ++(good ? sum_.good : read.ok ? sum_.over : read.cancelled ? sum_.cancelled : sum_.failed);
        }
        if (wait_until_written(r)) give_away(r);
    }
    TransferRequest request(const std::vector<Slice>& slices) const {
        TransferRequest request;
        request.segments = {&segment_, 1};
        request.slices = slices;
        request.timeout_ms = plan_.timeout_ms();
        return request;
    }
    Read wait_for(const std::vector<Slice>& slices) {
        Result<uint64_t> moved = engine_->transfer(request(slices));
        return {.ok = moved.ok(), .why = moved.ok() ? "" : moved.error().text};
    }
    Read submit(const std::vector<Slice>& slices, Random& random) {
        Read read;
        Result<uint64_t> ticket = engine_->submit(request(slices));
        if (!ticket) return {.why = ticket.error().text};
        {
            MutexLock lock(mutex_);
            tickets_[*ticket] += 0;
        }
        if (random.one_in(3)) {
            for (uint64_t n = random.below(200); n > 0; --n) std::this_thread::yield();
            read.cancelled = engine_->cancel(*ticket).ok();
        }
        for (;;) {
            Result<bool> ended = engine_->wait(*ticket, 1000);
            if (!ended) return {.why = ended.error().text};  // the engine is closed
            if (*ended) break;
        }
        Result<TicketStatus> status = engine_->status(*ticket);
        if (!status) return {.why = status.error().text};
        read.ok = status->state == TicketState::kDone;
        read.why = status->failure.error.text;
        return read;
    }
    bool lease_is(unsigned r, const Word& word) {
        uint64_t now = 0;
        MutexLock lock(lease_mutex());
        bool read = wait_for({{scratch_.address() + r * 8, word.lease_at, 8, Direction::kRead}}).ok;
        std::memcpy(&now, scratch_.data() + r * 8, 8);
        return read && now == word.lease;
    }
    void compare(unsigned r, const Word& word, const std::array<uint64_t, kPieces>& places) {
        Bytes truth = plan_.computed(word.lease);
        for (uint64_t i = 0; i < kPieces; ++i) {
            const std::byte* got = kv_.data() + r * plan_.bytes() + places[i] * plan_.piece_bytes;
            if (std::memcmp(got, truth.data() + i * plan_.piece_bytes, plan_.piece_bytes) != 0) {
                is_wrong("a read whose lease is valid brought a wrong byte");
            }
        }
    }

    // Whether nothing writes to the blocks of a read any more. False: a card hangs.
    bool wait_until_written(unsigned r) {
        for (;;) {
            Result<bool> left = engine_->has_abandoned_copies();
            if (left && !*left) return true;
            if (!left) break;  // the engine is being closed
            if (stop_) {
                may_be_written_[r] = true;
                return false;
            }
            std::this_thread::yield();
        }
        while (!closed_) std::this_thread::yield();
        return true;
    }
    // The blocks have another owner.
    void give_away(unsigned r) {
        std::memset(kv_.data() + r * plan_.bytes(), static_cast<int>(kOfAnother), plan_.bytes());
        own_[r] = true;
    }
    void check_untouched(unsigned r) {
        const std::byte* begin = kv_.data() + r * plan_.bytes();
        if (own_[r] &&
            !std::all_of(begin, begin + plan_.bytes(), [](std::byte b) { return b == kOfAnother; })) {
            is_wrong("blocks were written to after their read had ended");
        }
    }

    const Plan plan_;
    std::shared_ptr<Engine> engine_;
    Memory kv_, scratch_;
    std::deque<Forwards> forwards_;  // of each reader
    uint32_t segment_ = 0;
    std::array<bool, kReaders> own_{};             // the blocks have their other owner's bytes
    std::array<bool, kReaders> may_be_written_{};  // by copies of a card that hangs
    std::vector<std::future<void>> threads_;
    std::atomic<bool> stop_{false}, closed_{false};
    std::atomic<unsigned> words_{0}, looks_{0};
    Mutex mutex_;
    CondVar told_;
    std::deque<Word> queue_ GUARDED_BY(mutex_);
    unsigned reading_ GUARDED_BY(mutex_) = 0;
    std::map<uint64_t, int> tickets_ GUARDED_BY(mutex_);  // how often poll() told of their end
    Sum sum_ GUARDED_BY(mutex_);
    std::string wrong_ GUARDED_BY(mutex_);  // the first thing
};

void end_bed(Bed& bed, bool died) {
    if (!died) return bed.end();
    char text[200];
    CHECK_MESSAGE(soft_device().soft_violations(text, sizeof(text)) == 0, text);
    bed.forget();  // a card that died gives nothing back
}

// The prefill engine of a run, in this process or in another.
class Opposite {
   public:
    Opposite(Bed& bed, const Plan& plan, std::unique_ptr<Child>& process) : plan_(plan), process_(process) {
        if (plan.in_this_process()) {
            near_.emplace(bed, plan);
            return;
        }
        if (process_ == nullptr) process_ = std::make_unique<Child>("handover prefill");
        process_->say(std::to_string(plan.value));
        address_ = process_->hear();
    }
    std::string address() const { return near_ ? near_->address() : address_; }
    void serve(const std::string& decode) {
        if (!near_) return process_->say(decode);
        plan_.disturb(plan_.end_there);
        served_ = std::async(std::launch::async, [this, decode] { near_->serve(decode, stop_); });
    }
    bool over() {
        if (near_) return served_.wait_for(std::chrono::milliseconds(1)) == std::future_status::ready;
        return process_ == nullptr || readable(process_->fd(), 1);
    }
    void kill() {
        if (!near_) process_.reset();
    }
    void stop() {
        stop_ = true;
        if (near_) return served_.get();
        if (process_ == nullptr) return;
        process_->say("stop");
        CHECK(process_->hear() == "over");
        CHECK(process_->hear() == "ended");
    }

   private:
    const Plan plan_;
    std::unique_ptr<Child>& process_;
    std::optional<Prefill> near_;
    std::string address_;
    std::atomic<bool> stop_{false};
    std::future<void> served_;
};

void run_handover(std::unique_ptr<Child>& process, uint64_t value, Sum& sum) {
    const Plan plan(value);
    std::string ends[] = {"none", "dies", "hangs", "a call fails", "closes", "is killed"};
    std::string here = ends[static_cast<int>(plan.end_here)], there = ends[static_cast<int>(plan.end_there)];
    CAPTURE(value);
    CAPTURE(plan.path);
    CAPTURE(here);
    CAPTURE(there);
    Bed bed(plan.policy_here, plan.value);
    {
        Opposite opposite(bed, plan, process);
        Decode decode(bed, plan);
        decode.open(opposite.address());
        if (plan.takes_memory_away()) soft_device().soft_owner_ended(device::cu::kIllegalAddress);
        plan.disturb(plan.end_here);
        decode.start();
        opposite.serve(decode.address());
        const auto until =
            SeedClock::now() + (plan.has(End::kCardHangs) ? kHungRun : SeedClock::duration(kRun));
        bool ended = false;
        while (!(opposite.over() && decode.idle())) {
            bool is_time = decode.words() > plan.words;
            if (is_time && !ended && plan.end_there == End::kIsKilled) {
                opposite.kill();
                ended = true;
            }
            if (is_time && !ended && plan.end_here == End::kCloses) {
                decode.close();
                break;
            }
            if (SeedClock::now() > until) {
                CHECK(plan.has(End::kCardHangs));
                break;
            }
        }
        decode.stop();
        soft_device().soft_unhang();
        soft_device().soft_settle();
        opposite.stop();
        decode.finish(sum);
    }
    bool died = plan.end_here == End::kCardDies || plan.takes_memory_away() ||
                (plan.in_this_process() && plan.has(End::kCardDies));
    end_bed(bed, died);
}

}  // namespace

TEST_CASE("handover prefill" * doctest::skip()) {
    Parent parent;
    for (std::string line = parent.hear(); !line.empty(); line = parent.hear()) {
        const Plan plan(std::stoull(line));
        Bed bed(plan.policy_there, plan.value);
        {
            Prefill prefill(bed, plan);
            parent.say(prefill.address());
            std::string decode = parent.hear();
            plan.disturb(plan.end_there);
            std::atomic<bool> stop{false};
            std::future<void> served = std::async(std::launch::async, [&] {
                prefill.serve(decode, stop);
                parent.say("over");
            });
            (void)parent.hear();
            stop = true;
            soft_device().soft_unhang();
            soft_device().soft_settle();
            served.get();
            soft_device().soft_settle();  // what it queued last
        }
        end_bed(bed, plan.end_there == End::kCardDies);
        parent.say("ended");
    }
}

TEST_CASE("handover: words, reads, aborts, deaths and ends, mixed by seed") {
    if (is_real()) return;
    const char* given = std::getenv("MOONPOOL_TEST_RUNS");
    int runs = given != nullptr ? std::atoi(given) : 16;
    std::unique_ptr<Child> process;
    Sum sum;
    Random random(2340);
    for (int i = 0; i < runs; ++i) run_handover(process, random.next() >> 1, sum);
    MESSAGE(runs << " runs: " << sum.good << " hand-overs good, " << sum.over << " whose lease was over, "
                 << sum.cancelled << " cancelled, " << sum.failed << " failed");
    CHECK(sum.good > 0);
}
