// Stream: one connection to a peer, from its dialling to its end: a channel, the frames on it, and the thread
// that drives it. At each time that is none (it is idle), one caller, which waits for a task of its own, or
// the I/O thread of its loop:
//
//   dialling ──► idle ◄──► a caller drives          a small blocking transfer wakes no thread
//      │          ▲ │          │ it has what it waits for, and others' frames are left
//      └────┐     │ ▼          ▼
//           └──► an I/O thread drives ──► lost
//
// The thread that drives it sends and receives what the queue has, of any caller.
#pragma once

#include <atomic>
#include <memory>
#include <optional>

#include "base/event_loop.hpp"
#include "base/fd.hpp"
#include "transport/tcp/channel.hpp"
#include "transport/tcp/queue.hpp"
#include "transport/tcp/run.hpp"

namespace moonpool::transport::tcp {

class Link;

class Stream final : public EventHandler, public std::enable_shared_from_this<Stream> {
   public:
    Stream(Queue& queue, EventLoop& loop);

    // What the link knows of it, under its mutex.
    enum class Driver : uint8_t { kNone, kCaller, kLoop };
    Driver driver = Driver::kNone;
    int waker = -1;  // an eventfd of the caller that drives it
    bool dialling = true;

    // Before it is driven: the connection has been made.
    void open(std::unique_ptr<Channel> channel);
    // Any thread, while it is driven, and not dialling.
    uint64_t load(uint64_t now) const;
    bool carries_little(uint64_t now) const;
    bool has_room() const { return run_->has_room(); }

    // The calling thread drives it until the task has ended or nothing is left to do here.
    void drive(Link& link, const Task& task);
    // The loop drives it until it is idle or lost, and keeps the link until then. Also while it is dialling,
    // for the sake of the deadlines of those that wait for it.
    void start(std::shared_ptr<Link> link);
    void dialled(Result<std::unique_ptr<Channel>> channel);
    // The queue has something for it, or was closed. Under the link's mutex; does nothing when it is idle.
    void nudge();
    static int waker_of_this_thread();

    const Channel* channel() const { return channel_.get(); }
    void fail(const Error& error);  // gives back what is on its way

    bool on_events(uint32_t events) override;
    bool on_tick(uint64_t now_ms) override;

   private:
    void begin();
    bool go();
    void go_on();
    bool rest();
    void lose();
    void watch();

    Queue& queue_;
    EventLoop& loop_;
    Fd handle_;  // an eventfd by which the loop knows it while it is dialling
    std::unique_ptr<Channel> channel_;
    std::optional<Run> run_;
    // Of the loop's thread.
    std::shared_ptr<Link> link_;  // while the loop drives
    bool on_loop_ = false;
    uint32_t watched_ = 0;
};

}  // namespace moonpool::transport::tcp
