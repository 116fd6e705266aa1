#include "engine/tickets.hpp"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>

namespace moonpool::engine {

Tickets::Tickets() : event_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {}

Status Tickets::add(const std::shared_ptr<Ticket>& ticket) {
    MutexLock lock(mutex_);
    if (tickets_.size() >= kEngineTicketsMax) {
        return Error{Code::kTooLarge, "this engine already has " + std::to_string(kEngineTicketsMax) +
                                          " tickets, the limit; release those that ended"};
    }
    if (slices_open_ + ticket->slices > kEngineSlicesOpenMax) {
        return Error{Code::kTooLarge, "this engine already has " + std::to_string(slices_open_) +
                                          " slices under way and takes " +
                                          std::to_string(kEngineSlicesOpenMax) + "; wait for some"};
    }
    ticket->id = next_++;
    slices_open_ += ticket->slices;
    tickets_[ticket->id] = ticket;
    return success();
}

std::shared_ptr<Ticket> Tickets::find(uint64_t id) {
    MutexLock lock(mutex_);
    auto it = tickets_.find(id);
    return it == tickets_.end() ? nullptr : it->second;
}

void Tickets::release(uint64_t id) {
    MutexLock lock(mutex_);
    tickets_.erase(id);
    std::erase(ended_, id);
}

void Tickets::end(Ticket& ticket, TicketState state, TransferFailure failure) {
    {
        // poll() tells of no ticket that status() still calls waiting, and forgets none that was released.
        MutexLock lock(mutex_);
        MutexLock inner(ticket.mutex);
        if (ticket.state != TicketState::kWaiting) return;
        slices_open_ -= ticket.slices;
        ticket.state = state;
        ticket.failure = std::move(failure);
        ended_.push_back(ticket.id);
        ticket.ended.notify_all();
    }
    wake();
}

std::vector<uint64_t> Tickets::poll() {
    uint64_t value;
    (void)!::read(event_.get(), &value, sizeof(value));
    MutexLock lock(mutex_);
    return std::exchange(ended_, {});
}

std::vector<std::shared_ptr<Ticket>> Tickets::running() {
    MutexLock lock(mutex_);
    std::vector<std::shared_ptr<Ticket>> all;
    for (const auto& [id, ticket] : tickets_) {
        MutexLock inner(ticket->mutex);
        if (ticket->state == TicketState::kWaiting) all.push_back(ticket);
    }
    return all;
}

void Tickets::wake() {
    uint64_t one = 1;
    (void)!::write(event_.get(), &one, sizeof(one));
}

size_t Tickets::size() {
    MutexLock lock(mutex_);
    return tickets_.size();
}

}  // namespace moonpool::engine
