// Tickets: transfers that were submitted, from their beginning to their release. Each consists of one share
// for each peer; it has ended when the last share has, and the peers were told.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/fd.hpp"
#include "base/mutex.hpp"
#include "engine/engine.hpp"
#include "engine/peer.hpp"

namespace moonpool::engine {

// A job together with what its spans point at.
struct Share {
    std::shared_ptr<Peer> peer;
    std::vector<transport::Slice> slices;
    std::unique_ptr<std::atomic<transport::SliceState>[]> states;
    std::vector<transport::Region*> locals;
    std::vector<size_t> places;  // of each slice in the request; empty: the same
    std::shared_ptr<transport::Job> job;
    Outcome outcome;
    Status told = success();  // the message
    bool settled = true;
};

struct Ticket {
    uint64_t id = 0;
    std::vector<std::unique_ptr<Share>> shares;
    size_t slices = 0;
    std::optional<std::string> notify;
    int timeout_ms = 0;  // without progress
    std::atomic<size_t> shares_left{0};
    std::atomic<size_t> unconcluded{0};  // peers whose answers to the message, or to a fence, are awaited
    std::atomic<bool> over{false};       // no thread does anything more for it

    Mutex mutex;
    CondVar ended;
    TicketState state GUARDED_BY(mutex) = TicketState::kWaiting;
    TransferFailure failure GUARDED_BY(mutex);

    // Until it has ended, at `end` at the latest; whether it has.
    bool wait(std::chrono::steady_clock::time_point end) EXCLUDES(mutex) {
        MutexLock lock(mutex);
        return ended.wait_until(lock, end,
                                [this]() REQUIRES(mutex) { return state != TicketState::kWaiting; });
    }
};

class Tickets {
   public:
    Tickets();

    Status add(const std::shared_ptr<Ticket>& ticket);  // gives it its number
    std::shared_ptr<Ticket> find(uint64_t id);
    void release(uint64_t id);
    // Once; what is told of its end later is passed over.
    void end(Ticket& ticket, TicketState state, TransferFailure failure);
    std::vector<uint64_t> poll();
    std::vector<std::shared_ptr<Ticket>> running();
    void wake();  // the event descriptor, for notifications
    int event_fd() const { return event_.get(); }
    size_t size();
    size_t slices_open() const { return slices_open_; }

   private:
    Fd event_;
    Mutex mutex_;  // before a ticket's
    std::unordered_map<uint64_t, std::shared_ptr<Ticket>> tickets_ GUARDED_BY(mutex_);
    std::vector<uint64_t> ended_ GUARDED_BY(mutex_);
    uint64_t next_ GUARDED_BY(mutex_) = 1;
    std::atomic<size_t> slices_open_{0};
};

}  // namespace moonpool::engine
