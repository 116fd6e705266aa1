// How a job reaches a peer over TCP: which connection carries it, on which thread, and what follows when
// that connection fails.
//
// Threads: run() and ask() on the caller's; a Stream on its loop's I/O thread; post_slowly() on one of
// `workers_`, the only threads here that may wait for a connection. So the I/O threads wait for no thread,
// and the workers for peers only.
//
// Between two calls: a channel has one owner, the pool, the stack of a caller, or a stream. streams_ holds
// exactly the streams that may still be given jobs: a stream leaves it, under mutex_, before it gives its
// channel back, and whatever was queued by then is carried out or handed on. Each job comes back once,
// through `left` or run()'s return.
//
// Locks: mutex_ before the pool's own.
#include "transport/tcp/link.hpp"

#include <poll.h>
#include <sched.h>
#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>

namespace moonpool::transport::tcp {

namespace {

constexpr int kAttempts = 3;
constexpr int kCheckMs = 50;

// How long a caller polls for a small answer before it sleeps: a sleeping thread in a virtual machine is
// woken in 20-50 us, several times what the peer needs to answer.
constexpr uint64_t kSpinNs = 50000;
constexpr uint64_t kSpinBytesMax = 1u << 20;

// Half of the time for the first connection: when it is stuck, another still has a chance.
int stall_of(const Job& job, bool first) {
    if (first) return std::max(1, job.timeout_ms / 2);
    uint64_t gone_ms = (now_ns() - job.progress_ns.load(std::memory_order_relaxed)) / 1000000;
    return std::max(1, job.timeout_ms - static_cast<int>(std::min<uint64_t>(gone_ms, 86400000)));
}

}  // namespace

// A connection on an I/O thread, for as long as it has jobs.
class Link::Stream final : public EventHandler, public std::enable_shared_from_this<Stream> {
   public:
    Stream(std::shared_ptr<Link> link, EventLoop& loop, std::unique_ptr<Channel> channel)
        : link_(std::move(link)), loop_(loop), channel_(std::move(channel)), run_(*channel_, link_->moved_) {}

    // Under the link's mutex, which the analysis does not know as this stream's, and only while the link
    // knows this stream.
    void queue(const std::shared_ptr<Job>& job, Left left) NO_THREAD_SAFETY_ANALYSIS {
        ++jobs_;
        inbox_.emplace_back(job, std::move(left));
    }
    size_t jobs() const NO_THREAD_SAFETY_ANALYSIS { return jobs_; }
    uint64_t moved_ns() const { return moved_ns_.load(std::memory_order_relaxed); }

    void start() {
        if (!loop_.post([self = shared_from_this()] {
                if (!self->loop_.add(self->channel_->fd.get(), EPOLLIN, self)) return self->over();
                self->wake();
            })) {
            over();
        }
    }
    void nudge() {
        loop_.post([self = shared_from_this()] { self->wake(); });
    }
    void end() {
        loop_.post([self = shared_from_this()] {
            if (self->channel_ != nullptr) self->over();
        });
    }

    bool on_events(uint32_t) override { return channel_ != nullptr && go(); }
    // Comes also while nothing moves: Run says when a connection has made no progress for too long.
    bool on_tick(uint64_t) override {
        if (channel_ == nullptr) return false;
        if (run_.check(now_ns(), stall_ms_)) return go();
        over();
        return false;
    }

   private:
    using Jobs = std::vector<std::pair<std::shared_ptr<Job>, Left>>;

    void wake() {
        if (channel_ != nullptr) go();
    }

    // False: the stream has ended.
    bool go() {
        for (int round = 0; round < 16; ++round) {
            take_inbox();
            switch (run_.step()) {
                case Run::Step::kMoved:
                    moved_ns_.store(now_ns(), std::memory_order_relaxed);
                    continue;
                case Run::Step::kIdle:
                    watch();
                    return true;
                case Run::Step::kFinished:
                    if (let_go()) return false;
                    continue;
                case Run::Step::kFailed:
                    over();
                    return false;
            }
        }
        watch();
        nudge();  // what was just queued moves no socket
        return true;
    }
    void watch() {
        uint32_t events = run_.sending() ? uint32_t{EPOLLIN | EPOLLOUT} : uint32_t{EPOLLIN};
        if (events != watched_) loop_.watch(channel_->fd.get(), events);
        watched_ = events;
    }
    void take_inbox() {
        Jobs jobs;
        {
            MutexLock lock(link_->mutex_);
            jobs.swap(inbox_);
        }
        for (auto& [job, left] : jobs) {
            stall_ms_ = std::max(1, job->timeout_ms / 2);
            run_.add(std::move(job),
                     [this, left = std::move(left)](std::shared_ptr<Job> ended, Status status) {
                         {
                             MutexLock lock(link_->mutex_);
                             --jobs_;
                         }
                         // A job that was stopped would fail on any other connection, too.
                         bool failed = !status && !ended->stopped();
                         left(std::move(ended), std::move(status), failed);
                     });
        }
    }

    // The inbox is looked at under the lock under which it is filled: a job that came too late for it
    // finds the stream gone from the list, and is queued elsewhere.
    bool let_go() {
        {
            MutexLock lock(link_->mutex_);
            if (!inbox_.empty()) return false;
            std::erase(link_->streams_, shared_from_this());
        }
        loop_.remove(channel_->fd.get());
        link_->pool_.give_back(std::move(channel_));
        return true;
    }
    // Everything that the stream was given fails with it, also what it has not begun.
    void over() {
        {
            MutexLock lock(link_->mutex_);
            std::erase(link_->streams_, shared_from_this());
        }
        take_inbox();
        loop_.remove(channel_->fd.get());
        link_->pool_.give_up(std::move(channel_));
        run_.fail();
    }

    std::shared_ptr<Link> link_;
    EventLoop& loop_;
    std::unique_ptr<Channel> channel_;
    Run run_;
    Jobs inbox_ GUARDED_BY(link_->mutex_);
    size_t jobs_ GUARDED_BY(link_->mutex_) = 0;
    int stall_ms_ = 2500;
    uint32_t watched_ = EPOLLIN;
    std::atomic<uint64_t> moved_ns_{now_ns()};
};

Link::Link(PoolOptions options, std::vector<EventLoop*> loops, Workers& workers, TransportCounters& moved,
           Counters& counters)
    : pool_(options, counters),
      address_(options.dial.address),
      loops_(std::move(loops)),
      workers_(workers),
      moved_(moved),
      counters_(counters),
      streams_max_(std::max(1u, options.connections_max - 1)) {}

Link::~Link() = default;

std::string Link::path() const {
    MutexLock lock(mutex_);
    return "tcp " + (path_.empty() ? address_ : path_);
}

// False: nothing is left to try.
bool Link::begin_try(Job& job, int tried) {
    if (tried >= kAttempts || job.stopped()) return false;
    // Memory that was deregistered meanwhile is nothing that another connection could help with.
    for (size_t k = 0; k < job.slices.size(); ++k) {
        if (job.is_waiting(k) && job.locals[k]->closing()) {
            job.fail(k, Code::kInvalidArgument, "the local region was deregistered");
        }
    }
    if (job.waiting == 0) return false;
    if (tried == 0) return true;
    uint64_t gone_ns = now_ns() - job.progress_ns.load(std::memory_order_relaxed);
    if (gone_ns / 1000000 >= static_cast<uint64_t>(job.timeout_ms)) return false;
    counters_.retries_total.fetch_add(job.waiting);
    return true;
}

Status Link::run(Job& job) {
    Status status = success();
    for (int tried = 0; begin_try(job, tried); ++tried) {
        // Only the first time: a job whose stream has failed wants a connection of its own.
        if (tried == 0 && ride(job, status)) {
            if (status) return status;
            continue;
        }
        status = attempt(job, tried == 0);
        if (status) return status;
    }
    return job.waiting == 0 ? success() : status;
}

// When I/O threads have all connections, the job joins the jobs of one of them, and comes back when that one
// fails. For callers of run() only, which wait anyway.
bool Link::ride(Job& job, Status& status) {
    {
        MutexLock lock(mutex_);
        if (streams_.empty()) return false;
    }
    if (!pool_.full()) return false;
    Mutex mutex;
    CondVar ended;
    bool done = false;
    // The job is on the caller's stack, so this waits until the stream has let go of it, however long the
    // peer is silent.
    auto borrowed = std::shared_ptr<Job>(std::shared_ptr<void>(), &job);  // we wait for it
    std::shared_ptr<Stream> stream = post_to_stream(
        borrowed,
        [&](const std::shared_ptr<Job>&, Status result, bool) {
            MutexLock lock(mutex);
            status = std::move(result);
            done = true;
            ended.notify_one();
        },
        true);
    if (stream == nullptr) return false;
    MutexLock lock(mutex);
    bool late = false;
    while (!ended.wait_for(lock, std::chrono::milliseconds(kCheckMs), [&] { return done; })) {
        // The connection has the patience of its most patient job; this one's may be shorter. Cancelled, it
        // comes back within a second.
        uint64_t moved_ns = std::max(job.progress_ns.load(std::memory_order_relaxed), stream->moved_ns());
        uint64_t now = now_ns();
        if (late || now < moved_ns) continue;
        if ((now - moved_ns) / 1000000 < static_cast<uint64_t>(job.timeout_ms)) continue;
        late = true;
        job.cancelled = true;
    }
    if (late) {
        job.cancelled = false;
        if (job.waiting != 0) {
            status = Error{Code::kTimeout, "no progress within " + std::to_string(job.timeout_ms) + " ms"};
        }
    }
    return true;
}

Status Link::attempt(Job& job, bool first) {
    // After a failure the idle connections are given up, too: they lead to the same peer, and waiting out
    // each would take the whole timeout.
    int stall_ms = stall_of(job, first);
    Result<std::unique_ptr<Channel>> channel = pool_.acquire(!first, stall_ms);
    if (!channel) return channel.error();
    if (std::string& text = (*channel)->path; true) {
        MutexLock lock(mutex_);
        if (path_ != text) path_ = text;
    }
    Run run(**channel, moved_);
    run.add(std::shared_ptr<Job>(std::shared_ptr<void>(), &job), nullptr);
    // The caller turns the state machine itself: no thread has to be woken for a small transfer, neither
    // here nor when the answer comes.
    Status status = drive(run, **channel, stall_ms);
    if (status) {
        pool_.give_back(std::move(*channel));
    } else {
        run.fail();
        pool_.give_up(std::move(*channel));
    }
    return status;
}

Status Link::drive(Run& run, Channel& channel, int stall_ms) {
    static const bool alone = std::thread::hardware_concurrency() < 2;
    uint64_t now = now_ns();
    uint64_t next_check = now + kCheckMs * 1000000ull;
    uint64_t spin_until = now + kSpinNs;
    for (;;) {
        switch (run.step()) {
            case Run::Step::kFinished:
                return success();
            case Run::Step::kFailed:
                return run.error();
            case Run::Step::kMoved:
                spin_until = now_ns() + kSpinNs;
                break;
            case Run::Step::kIdle: {
                now = now_ns();
                if (!alone && now < spin_until && !run.sending() && run.bytes_awaited() <= kSpinBytesMax) {
                    ::sched_yield();  // the peer may wait for this very core
                    continue;
                }
                pollfd waiting{channel.fd.get(), run.wants(), 0};
                (void)::poll(&waiting, 1, std::min(kCheckMs, stall_ms));
                break;
            }
        }
        now = now_ns();
        if (now >= next_check) {
            if (!run.check(now, stall_ms)) return run.error();
            next_check = now + kCheckMs * 1000000ull;
        }
    }
}

bool Link::post(const std::shared_ptr<Job>& job, const Finished& finished) {
    auto left = [link = shared_from_this(), finished](std::shared_ptr<Job> ended, Status status,
                                                      bool failed) {
        if (!failed) return finished(std::move(ended), std::move(status));
        link->counters_.retries_total.fetch_add(ended->waiting);
        link->post_slowly(std::move(ended), finished, 0, std::move(status));
    };
    if (post_to_stream(job, left, false) == nullptr) post_slowly(job, finished, 0, success());
    return true;
}

// The stream that took the job; null: none did.
std::shared_ptr<Link::Stream> Link::post_to_stream(const std::shared_ptr<Job>& job, Left left,
                                                   bool only_living) {
    constexpr size_t kJobsMax = 8;  // of a stream, before another one is worth it
    std::shared_ptr<Stream> fresh, living;
    {
        MutexLock lock(mutex_);
        // A stream that has started carries many jobs at once; a second connection pays only when the
        // first has a queue, or on a path with loss.
        auto least = std::ranges::min_element(streams_, {}, [](const auto& s) { return s->jobs(); });
        if (least != streams_.end()) living = *least;
        bool crowded = living == nullptr || (living->jobs() >= kJobsMax && streams_.size() < streams_max_);
        if (crowded && !only_living) {
            if (std::unique_ptr<Channel> channel = pool_.try_acquire()) {
                path_ = channel->path;
                EventLoop& loop = *loops_[next_loop_++ % loops_.size()];
                fresh = std::make_shared<Stream>(shared_from_this(), loop, std::move(channel));
                streams_.push_back(fresh);
            }
        }
        if (fresh == nullptr && living == nullptr) return nullptr;
        // Under the lock, so that a stream does not end between being chosen and being given the job.
        (fresh != nullptr ? fresh : living)->queue(job, std::move(left));
    }
    if (fresh != nullptr) {
        fresh->start();
        return fresh;
    }
    living->nudge();
    return living;
}

// By a thread that may wait: for a connection to become free, or to be made.
void Link::post_slowly(std::shared_ptr<Job> job, Finished finished, int tried, Status last) {
    bool background = job->background;
    workers_.post(background, [link = shared_from_this(), job = std::move(job),
                               finished = std::move(finished), tried, last = std::move(last)]() mutable {
        link->carry_slowly(std::move(job), finished, tried, std::move(last));
    });
}

void Link::carry_slowly(std::shared_ptr<Job> job, const Finished& finished, int tried, Status last) {
    for (; begin_try(*job, tried); ++tried) {
        // When I/O threads have all connections, one of them takes the job over, and this thread is free.
        if (pool_.full()) {
            auto left = [link = shared_from_this(), finished, tried](std::shared_ptr<Job> ended,
                                                                     Status status, bool failed) {
                if (!failed) return finished(std::move(ended), std::move(status));
                link->post_slowly(std::move(ended), finished, tried + 1, std::move(status));
            };
            if (post_to_stream(job, left, true) != nullptr) return;
        }
        last = attempt(*job, tried == 0);
        if (last) break;
    }
    if (job->waiting == 0) last = success();
    finished(std::move(job), std::move(last));
}

// A question needs a connection, and none is had before it has carried the fences: this one asks for nothing
// besides.
bool Link::settle(int timeout_ms) {
    if (settled()) return true;
    std::vector<std::byte> none;
    Writer(none).number(uint32_t{0});
    return ask(Kind::kEngineFence, none, timeout_ms).ok() && settled();
}

Result<std::vector<std::byte>> Link::ask(Kind kind, const std::vector<std::byte>& body, int timeout_ms) {
    // A connection that was idle may be dead without our knowing; a message is not said twice, since the
    // first may have arrived.
    for (int i = 0;; ++i) {
        Result<std::unique_ptr<Channel>> channel = pool_.acquire(i != 0, timeout_ms);
        if (!channel) return channel.error();
        Result<std::vector<std::byte>> answer = exchange(**channel, kind, body, timeout_ms, pool_.closed());
        if (answer) {
            pool_.give_back(std::move(*channel));
            return answer;
        }
        bool answered = answer.error().code != Code::kUnavailable && answer.error().code != Code::kTimeout &&
                        answer.error().code != Code::kProtocol;
        if (answered) {
            pool_.give_back(std::move(*channel));
            return answer;
        }
        pool_.give_up(std::move(*channel));
        if (i != 0 || kind == Kind::kEngineNotify || answer.error().code != Code::kUnavailable) return answer;
    }
}

void Link::close() {
    pool_.close();
    std::vector<std::shared_ptr<Stream>> streams;
    {
        MutexLock lock(mutex_);
        streams = streams_;
    }
    // Outside of the lock: ending a stream takes it.
    for (const auto& stream : streams) stream->end();
}

}  // namespace moonpool::transport::tcp
