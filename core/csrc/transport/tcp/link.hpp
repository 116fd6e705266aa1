// A peer over TCP: a link for slices and the control channel, over the same few connections. What callers
// want goes into one queue, from which each connection takes what it has room for: foreground first, each job
// in turn. A caller that waits drives an idle connection itself, so that a small transfer costs what a plain
// request and its answer cost; everything else is driven by I/O threads. A connection that fails is fenced,
// and what it had not answered goes over another.
//
// No thread here waits for a connection: where there is none, one is dialled, on a thread of its own.
#pragma once

#include <memory>
#include <span>

#include "base/event_loop.hpp"
#include "base/mutex.hpp"
#include "transport/control.hpp"
#include "transport/link.hpp"
#include "transport/tcp/channel.hpp"
#include "transport/tcp/queue.hpp"
#include "transport/tcp/stream.hpp"
#include "transport/workers.hpp"

namespace moonpool::transport::tcp {

struct LinkOptions {
    ChannelOptions channel;
    uint32_t connections_max = 2;
};

class Link final : public transport::Link, public Control, public std::enable_shared_from_this<Link> {
   public:
    // moved: what it counts as moved; counters: of the engine. waiters: one thread at a time, to dial.
    Link(LinkOptions options, std::vector<EventLoop*> loops, Workers& waiters, TransportCounters& moved,
         Counters& counters);
    ~Link() override;

    // The first connection, which was made by the handshake of the engine.
    Status adopt(Dialed dialed);

    std::string path() const override;
    // A peer that lists memory of a card copies it there by itself.
    bool reaches(MemoryKind kind, std::string* why) const override {
        return kind == MemoryKind::kDevice || reached_by_cpu(kind, why);
    }
    bool runs_on_caller(const Job&) const override { return false; }  // it waits for answers
    Status run(Job& job) override;
    bool post(const std::shared_ptr<Job>& job, const Finished& finished) override;

    bool settled() const override { return queue_.all_fenced(); }
    bool settle(int timeout_ms) override;

    // Frames of control, before any bytes of jobs.
    Result<std::vector<std::byte>> ask(Kind kind, const std::vector<std::byte>& body,
                                       int timeout_ms) override;
    void post(Kind kind, const std::vector<std::byte>& body, int timeout_ms, Answered answered) override;
    void close() override;

    // ---- for its streams

    // The queue has something that no connection may have seen: an idle one is started, a busy one told, a
    // further one dialled. kOntoOne: one that is driven and has room is preferred, since it carries many jobs
    // at once. kForHelp: a connection has no more room, and others may have none either.
    enum class Spread : uint8_t { kOntoOne, kOverConnections, kForHelp };
    void wake(Spread spread);
    // Its driver lets go of it; busy: with frames under way. False: its loop is to drive it from here on.
    bool idle(Stream& stream, bool busy);
    void opened(Stream& stream);
    void not_dialled(const std::shared_ptr<Stream>& stream, const Error& error);
    void lost(const std::shared_ptr<Stream>& stream, const Error& error);

   private:
    std::shared_ptr<Stream> claim_idle();
    std::shared_ptr<Stream> add_dialling() REQUIRES(mutex_);
    void dial(const std::shared_ptr<Stream>& stream);
    void carry(const std::shared_ptr<Stream>& mine, Task& task);

    const LinkOptions options_;
    std::vector<EventLoop*> loops_;
    Workers& waiters_;
    Counters& counters_;
    Queue queue_;
    mutable Mutex mutex_;  // before the queue's
    std::vector<std::shared_ptr<Stream>> streams_ GUARDED_BY(mutex_);
    std::string path_ GUARDED_BY(mutex_);
    size_t next_loop_ GUARDED_BY(mutex_);
    uint64_t dial_again_ns_ GUARDED_BY(mutex_) = 0;  // a further one; the last could not be made
    std::atomic<bool> closed_{false};                // seen by a thread that dials
};

}  // namespace moonpool::transport::tcp
