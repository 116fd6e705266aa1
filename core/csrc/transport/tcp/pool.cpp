// The connections to one peer: which caller has which, and what has to be fenced before the next one is used.
//
// Threads: any; those that need a connection wait here, for one to come back or for the peer to answer.
// mutex_ is not held while a connection is dialled or a fence is awaited.
//
// Between two calls: open_ counts idle connections, those in use and those being made, and is at most
// connections_max. fences_ are the numbers of connections that carried writes and were given up, whose
// fence no answer has confirmed: while there is one, no connection is handed out before it has carried the
// fences. After close() none is handed out.
#include "transport/tcp/pool.hpp"

#include <fcntl.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>

#include "base/clock.hpp"
#include "wire/address.hpp"
#include "wire/congestion.hpp"

#ifndef TCP_RTO_MAX_MS
#define TCP_RTO_MAX_MS 44
#endif

namespace moonpool::transport::tcp {

namespace {

// After a peer took no connection in time, others need not wait as long to learn the same.
constexpr uint64_t kUnreachableNs = 500000000;

}  // namespace

Result<std::unique_ptr<Channel>> Pool::acquire(bool fresh, int timeout_ms) {
    auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
    MutexLock lock(mutex_);
    for (;;) {
        if (closed_) return Error{Code::kClosed, "the segment was closed"};
        // The caller's connection has just failed. The idle ones lead the same way, and
        // would fail one after the other.
        if (fresh) {
            open_ -= static_cast<uint32_t>(idle_.size());
            for (const auto& channel : idle_) {
                if (channel->wrote) fences_.push_back(channel->number);
            }
            idle_.clear();
            fresh = false;
        }
        if (!idle_.empty() && fences_.empty()) {
            std::unique_ptr<Channel> channel = std::move(idle_.back());
            idle_.pop_back();
            return channel;
        }
        std::unique_ptr<Channel> channel;
        if (!idle_.empty()) {
            channel = std::move(idle_.back());
            idle_.pop_back();
        } else if (open_ < options_.connections_max) {
            // Callers that queue up behind a dead peer would each wait the whole time otherwise.
            if (now_ns() < unreachable_until_ns_) return unreachable_;
            ++open_;
        } else {
            auto returned = [this]() REQUIRES(mutex_) {
                return closed_ || !idle_.empty() || open_ < options_.connections_max;
            };
            if (!returned_.wait_until(lock, end, returned)) {
                return Error{Code::kTimeout, "all " + std::to_string(options_.connections_max) +
                                                 " connections to the peer were in use for " +
                                                 std::to_string(timeout_ms) + " ms"};
            }
            continue;
        }
        lock.unlock();
        auto left = std::chrono::ceil<std::chrono::milliseconds>(end - std::chrono::steady_clock::now());
        // Dialling and fences share what is left of the caller's time.
        int left_ms = std::max(1, static_cast<int>(left.count()));
        Error error;
        if (channel == nullptr) {
            Result<std::unique_ptr<Channel>> dialed = dial(left_ms);
            if (dialed) {
                channel = std::move(*dialed);
            } else {
                error = dialed.error();
            }
        }
        Status fenced = channel == nullptr ? Status(error) : send_fences(*channel, left_ms);
        if (fenced) return channel;
        channel.reset();
        lock.lock();
        --open_;
        returned_.notify_one();
        // Silence only: a peer that refuses answers at once, and may accept the next time.
        if (fenced.error().code == Code::kTimeout) {
            unreachable_ = fenced.error();
            unreachable_until_ns_ = now_ns() + kUnreachableNs;
        }
        return fenced.error();
    }
}

std::unique_ptr<Channel> Pool::try_acquire() {
    MutexLock lock(mutex_);
    // For callers that must not wait, and a fence is waited for.
    if (closed_ || idle_.empty() || !fences_.empty()) return nullptr;
    std::unique_ptr<Channel> channel = std::move(idle_.back());
    idle_.pop_back();
    return channel;
}

void Pool::give_back(std::unique_ptr<Channel> channel) {
    MutexLock lock(mutex_);
    if (closed_) {
        --open_;
    } else {
        idle_.push_back(std::move(channel));
    }
    returned_.notify_one();
}

void Pool::give_up(std::unique_ptr<Channel> channel) {
    MutexLock lock(mutex_);
    --open_;
    if (channel->wrote) fences_.push_back(channel->number);
    channel.reset();
    returned_.notify_one();
}

Status Pool::adopt(Dialed dialed, int timeout_ms) {
    Result<std::unique_ptr<Channel>> channel =
        greet(std::move(dialed), timeout_ms, options_.dial.given_up);  // of the engine that opens the peer
    if (!channel) return channel.error();
    MutexLock lock(mutex_);
    ++open_;
    idle_.push_back(std::move(*channel));
    unreachable_until_ns_ = 0;
    return success();
}

Result<std::unique_ptr<Channel>> Pool::dial(int timeout_ms) {
    DialOptions options = options_.dial;
    options.timeout_ms = timeout_ms;
    options.given_up = &closed_;
    counters_.dials_total.fetch_add(1);
    Result<Dialed> dialed = moonpool::dial(options);
    if (!dialed) return dialed.error();
    return greet(std::move(*dialed), timeout_ms, &closed_);
}

namespace {

// A target knows a connection by its engine and this number, and one engine may open a peer more than once.
uint32_t next_channel() {
    static std::atomic<uint32_t> last{0};
    return last.fetch_add(1) + 1;
}

}  // namespace

Result<std::unique_ptr<Channel>> Pool::greet(Dialed dialed, int timeout_ms,
                                             const std::atomic<bool>* given_up) {
    int fd = dialed.fd.get();
    int flags = ::fcntl(fd, F_GETFL);
    ::fcntl(fd, F_SETFL, flags | O_NONBLOCK);
    leave_bbr_when_near(fd);
    // A cable that was out for seconds is noticed to be back within one (Linux 6.15; others double the pause
    // each time).
    int rto_max_ms = 1000;
    (void)::setsockopt(fd, IPPROTO_TCP, TCP_RTO_MAX_MS, &rto_max_ms, sizeof(rto_max_ms));
    Hello hello;
    hello.segment = options_.self;
    hello.expected = options_.peer;
    hello.name = options_.self_name;
    hello.channel = next_channel();
    auto channel =
        // The number is new for every connection: a fence names it, and must never mean a later one.
        std::make_unique<Channel>(std::move(dialed.fd), hello.channel,
                                  local_address(fd) + " -> " + peer_address(fd), options_.frame_bytes);
    std::vector<std::byte> body;
    body.reserve(1024);
    Writer w(body);
    encode(w, hello);
    Result<std::vector<std::byte>> answer =
        exchange(*channel, Kind::kEngineHello, body, timeout_ms, given_up);
    if (!answer) return answer.error();
    return channel;
}

Status Pool::send_fences(Channel& channel, int timeout_ms) {
    std::vector<uint32_t> fences;
    {
        MutexLock lock(mutex_);
        // A copy: other callers may add some meanwhile. They are this connection's job no more; the next
        // one that is handed out carries them.
        fences = fences_;
    }
    if (fences.empty()) return success();
    for (size_t at = 0; at < fences.size(); at += kFencesMax) {
        size_t n = std::min<size_t>(kFencesMax, fences.size() - at);
        std::vector<std::byte> body;
        body.reserve(1024);
        Writer w(body);
        w.number(static_cast<uint32_t>(n));
        w.bytes(&fences[at], n * sizeof(uint32_t));
        Result<std::vector<std::byte>> answer =
            exchange(channel, Kind::kEngineFence, body, timeout_ms, &closed_);
        if (!answer) return answer.error();
    }
    MutexLock lock(mutex_);
    std::erase_if(fences_, [&](uint32_t n) { return std::ranges::find(fences, n) != fences.end(); });
    return success();
}

bool Pool::fenced() {
    MutexLock lock(mutex_);
    return fences_.empty();
}

size_t Pool::open() {
    MutexLock lock(mutex_);
    return open_;
}

bool Pool::full() {
    MutexLock lock(mutex_);
    return idle_.empty() && open_ >= options_.connections_max;
}

void Pool::close() {
    MutexLock lock(mutex_);
    closed_ = true;
    open_ -= static_cast<uint32_t>(idle_.size());
    idle_.clear();
    returned_.notify_all();
}

}  // namespace moonpool::transport::tcp
