// A peer over TCP: a link for slices and the control channel, over the same connections. run() has the
// calling thread drive a connection itself, so that a small transfer costs what a plain request and its
// answer cost; post() hands jobs to a stream: a connection on an I/O thread, which carries several jobs at
// once. A connection that fails is fenced and the rest goes over another, within the same call.
//
// No working thread ever waits for a stream: the jobs of a stream that fails need one.
#pragma once

#include <memory>

#include "base/event_loop.hpp"
#include "base/mutex.hpp"
#include "transport/control.hpp"
#include "transport/link.hpp"
#include "transport/tcp/pool.hpp"
#include "transport/tcp/run.hpp"
#include "transport/workers.hpp"

namespace moonpool::transport::tcp {

class Link final : public transport::Link, public Control, public std::enable_shared_from_this<Link> {
   public:
    // moved: what it counts as moved; counters: of the engine.
    Link(PoolOptions options, std::vector<EventLoop*> loops, Workers& workers, TransportCounters& moved,
         Counters& counters);
    ~Link() override;

    std::string path() const override;
    // A peer that lists memory of a card copies it there by itself.
    bool reaches(MemoryKind kind, std::string* why) const override {
        return kind == MemoryKind::kDevice || reached_by_cpu(kind, why);
    }
    bool runs_on_caller() const override { return false; }  // it waits for answers
    Status run(Job& job) override;
    bool post(const std::shared_ptr<Job>& job, const Finished& finished) override;

    bool settled() const override { return pool_.fenced(); }
    bool settle(int timeout_ms) override;

    // Frames of control, over any connection.
    Result<std::vector<std::byte>> ask(Kind kind, const std::vector<std::byte>& body,
                                       int timeout_ms) override;
    void close() override;

    Pool& pool() { return pool_; }

   private:
    class Stream;

    // What became of a job on a stream: `failed` when another connection may do better.
    using Left = std::function<void(std::shared_ptr<Job>, Status, bool failed)>;

    bool begin_try(Job& job, int tried);
    Status attempt(Job& job, bool first);
    std::shared_ptr<Stream> post_to_stream(const std::shared_ptr<Job>& job, Left left, bool only_living);
    Status drive(Run& run, Channel& channel, int stall_ms);
    bool ride(Job& job, Status& status);
    // `last`: how the try before ended.
    void post_slowly(std::shared_ptr<Job> job, Finished finished, int tried, Status last);
    void carry_slowly(std::shared_ptr<Job> job, const Finished& finished, int tried, Status last);

    mutable Pool pool_;
    std::string address_;
    std::vector<EventLoop*> loops_;
    Workers& workers_;
    TransportCounters& moved_;
    Counters& counters_;
    mutable Mutex mutex_;
    std::string path_ GUARDED_BY(mutex_);
    std::vector<std::shared_ptr<Stream>> streams_ GUARDED_BY(mutex_);
    size_t streams_max_;
    size_t next_loop_ GUARDED_BY(mutex_) = 0;
};

}  // namespace moonpool::transport::tcp
