// How a connection is driven.
//
// Threads: the one that the link's mutex says in `driver` is the only one that uses run_ and channel_, and
// changes hands by the link's idle() alone. start(), dialled() and nudge() post to the loop; what they posted
// may come late, so on_loop_, which is the loop's own, says whether it drives.
#include "transport/tcp/stream.hpp"

#include <poll.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <thread>

#include "transport/tcp/link.hpp"

namespace moonpool::transport::tcp {

namespace {

constexpr int kCheckMs = 50;
constexpr int kTurnStepsMax = 16;  // then it is the turn of others of this loop

// How long a caller polls for a small answer before it sleeps: a sleeping thread in a virtual machine is
// woken in 20-50 us, several times what the peer needs to answer.
constexpr uint64_t kSpinNs = 50000;
constexpr uint64_t kSpinBytesMax = 1u << 20;

// Of a stream that carries many jobs at once, before another one is worth it.
constexpr size_t kFramesLittle = 6;
constexpr uint64_t kBytesLittle = 4u << 20;

}  // namespace

Stream::Stream(Queue& queue, EventLoop& loop) : queue_(queue), loop_(loop) {}

// A thread waits for one socket at a time, so that one descriptor a thread is enough.
int Stream::waker_of_this_thread() {
    struct Waker {
        ForkGuard fork;
        Fd fd{::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)};
    };
    static thread_local std::optional<Waker> waker;
    if (!waker || waker->fork.in_child()) waker.emplace();
    return waker->fd.get();
}

void Stream::open(std::unique_ptr<Channel> channel) {
    channel_ = std::move(channel);
    run_.emplace(*channel_, queue_, this);
}

uint64_t Stream::load(uint64_t now) const {
    uint64_t silent = run_->is_silent(now) ? uint64_t{1} << 60 : 0;
    return silent + run_->bytes_open() + run_->frames_open();
}
bool Stream::carries_little(uint64_t now) const {
    return run_->frames_open() < kFramesLittle && run_->bytes_open() < kBytesLittle && !run_->is_silent(now);
}

void Stream::fail(const Error& error) {
    if (run_) run_->fail(error);
}

// ---- by a caller

void Stream::drive(Link& link, const Task& task) {
    static const uint64_t spin_ns = std::thread::hardware_concurrency() < 2 ? 0 : kSpinNs;
    const int wake = waker_of_this_thread();
    uint64_t now = now_ns();
    uint64_t next_check = now + kCheckMs * 1000000ull, spin_until = now + spin_ns;
    for (;;) {
        Run::Step step = run_->step();
        if (run_->wants_help()) link.wake(Link::Spread::kForHelp);
        if (step == Run::Step::kFailed) return link.lost(shared_from_this(), run_->error());
        if (step == Run::Step::kNothing || task.ended()) break;
        now = now_ns();
        if (step == Run::Step::kMoved) {
            spin_until = now + spin_ns;
        } else if (now < spin_until && !run_->sending() && run_->bytes_open() <= kSpinBytesMax) {
            ::sched_yield();  // the peer may wait for this very core
        } else {
            pollfd waiting[2] = {{channel_->fd.get(), run_->wants(), 0}, {wake, POLLIN, 0}};
            (void)::poll(waiting, 2, kCheckMs);
            uint64_t count;
            if (waiting[1].revents != 0) (void)!::read(wake, &count, sizeof(count));
            now = now_ns();
        }
        if (queue_.closed()) {
            return link.lost(shared_from_this(), Error{Code::kClosed, "the segment was closed"});
        }
        if (now < next_check) continue;
        next_check = now + kCheckMs * 1000000ull;
        queue_.look(now);
        if (!run_->check(now)) return link.lost(shared_from_this(), run_->error());
    }
    if (!link.idle(*this, run_->busy())) start(link.shared_from_this());
}

// ---- by the loop

void Stream::start(std::shared_ptr<Link> link) {
    if (!run_) handle_.reset(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
    auto begun = [self = shared_from_this(), link]() mutable {
        self->link_ = std::move(link);
        self->begin();
    };
    // The loop has stopped: its engine is closed, and nothing waits any more.
    if (!loop_.post(std::move(begun))) queue_.close();
}

void Stream::begin() {
    on_loop_ = true;
    watched_ = EPOLLIN;
    if (!loop_.add(run_ ? channel_->fd.get() : handle_.get(), EPOLLIN, shared_from_this())) return lose();
    if (run_) go();
}

void Stream::dialled(Result<std::unique_ptr<Channel>> channel) {
    auto made = std::make_shared<Result<std::unique_ptr<Channel>>>(std::move(channel));
    bool posted = loop_.post([self = shared_from_this(), made] {
        if (!self->on_loop_) return;  // it could not begin
        auto handler = self->loop_.remove(self->handle_.get());
        self->handle_.reset();
        std::shared_ptr<Link> link = self->link_;
        if (!*made) {
            self->on_loop_ = false;
            self->link_.reset();
            return link->not_dialled(self, made->error());
        }
        self->open(std::move(**made));
        link->opened(*self);
        self->begin();
    });
    if (!posted) queue_.close();
}

void Stream::nudge() {
    if (driver == Driver::kCaller) {
        uint64_t one = 1;
        (void)!::write(waker, &one, sizeof(one));
    } else if (driver == Driver::kLoop) {
        go_on();
    }
}

void Stream::go_on() {
    loop_.post([self = shared_from_this()] {
        if (self->on_loop_ && self->run_) self->go();
    });
}

bool Stream::on_events(uint32_t) { return on_loop_ && run_ && go(); }

bool Stream::on_tick(uint64_t) {
    if (!on_loop_) return false;
    uint64_t now = now_ns();
    std::shared_ptr<Link> link = link_;
    queue_.look(now);
    if (!run_) return true;
    if (run_->check(now)) return go();
    lose();
    return false;
}

// False: the loop does not drive it any more.
bool Stream::go() {
    std::shared_ptr<Link> link = link_;  // it may let go of it
    for (int round = 0; round < kTurnStepsMax; ++round) {
        Run::Step step = run_->step();
        if (run_->wants_help()) link->wake(Link::Spread::kForHelp);
        if (queue_.closed() || step == Run::Step::kFailed) {
            lose();
            return false;
        }
        if (step == Run::Step::kNothing && rest()) return false;
        if (step == Run::Step::kIdle) {
            watch();
            return true;
        }
    }
    watch();
    go_on();  // what the queue has moves no socket
    return true;
}

void Stream::watch() {
    uint32_t events = run_->sending() ? uint32_t{EPOLLIN | EPOLLOUT} : uint32_t{EPOLLIN};
    if (events != watched_) loop_.watch(channel_->fd.get(), events);
    watched_ = events;
}

// The loop lets go of it before the link hands it to another. False: there is something to do.
bool Stream::rest() {
    auto handler = loop_.remove(channel_->fd.get());
    on_loop_ = false;
    std::shared_ptr<Link> link = std::move(link_);
    if (link->idle(*this, false)) return true;
    link_ = std::move(link);
    on_loop_ = true;
    watched_ = EPOLLIN;
    if (loop_.add(channel_->fd.get(), EPOLLIN, shared_from_this())) return false;
    lose();
    return true;
}

void Stream::lose() {
    auto handler = loop_.remove(run_ ? channel_->fd.get() : handle_.get());
    on_loop_ = false;
    std::shared_ptr<Link> link = std::move(link_);
    Error why = queue_.closed()                       ? Error{Code::kClosed, "the segment was closed"}
                : run_ && !run_->error().text.empty() ? run_->error()
                                                      : Error{Code::kOs, "epoll takes no more descriptors"};
    link->lost(shared_from_this(), why);
}

}  // namespace moonpool::transport::tcp
