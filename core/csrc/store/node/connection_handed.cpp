// The half of Connection that goes from one process to another, with the socket itself: the client notices
// nothing. What it holds goes along: leases, since it may be writing there at this moment, and pins, since it
// may be reading there.
#include <cstring>

#include "store/node/connection.hpp"

namespace moonpool {

HandedConnection Connection::give() const {
    HandedConnection handed;
    handed.proved = proved();
    handed.remote = remote_;
    handed.ended = ended_;
    handed.nonce = nonce_;
    handed.access = access_;
    if (proved()) handed.tenant = pool_->tenant();
    handed.spaces.assign(spaces_.begin(), spaces_.end());
    handed.last_space = last_space_;
    for (const auto& [offset, extent] : leases_) handed.leases.push_back(extent);
    for (const auto& [id, pinned] : pins_) {
        std::vector<HandedPin>& rows = handed.pins.emplace_back(id, std::vector<HandedPin>()).second;
        for (const Pinned& pin : pinned) rows.push_back({pin.slot, pin.generation});
    }
    handed.received.assign(in_.waiting().begin(), in_.waiting().end());
    handed.unsent.assign(queue_.unsent().begin(), queue_.unsent().end());
    return handed;
}

bool Connection::end_unfinished(const std::string& why) {
    if (!remote_ || relayed_ || !queue_.pieces().empty()) return false;
    if (put_ == nullptr && parked_ == nullptr) return false;
    unpark();
    ends_here_ = fail(Code::kUnavailable, why);
    return ends_here_;
}

bool Connection::listen_again() {
    return server_.loop_->add(fd_.get(), events_, server_.connections_.at(fd_.get()));
}

// Pins count in the table already (ObjectTable::adopt).
Connection::Connection(Server& server, Fd fd, uint64_t now_ms, const HandedConnection& handed, Pool* pool)
    : server_(server),
      fd_(std::move(fd)),
      pool_(pool),
      access_(handed.access),
      nonce_(handed.nonce),
      since_ms_(now_ms),
      progress_ms_(now_ms),
      pace_(server.options_.limits, now_ms),
      remote_(handed.remote),
      ended_(handed.ended) {
    if (!handed.received.empty()) {
        std::span<std::byte> room = in_.room(handed.received.size());
        std::memcpy(room.data(), handed.received.data(), handed.received.size());
        in_.received(handed.received.size());
    }
    out_.insert(out_.end(), handed.unsent.begin(), handed.unsent.end());
    whole_answers_ = out_.size();
    if (pool_ == nullptr) return;
    for (Extent extent : handed.leases) {
        leases_.emplace(extent.offset, extent);
        leased_bytes_ += extent.size;
    }
    for (uint32_t space : handed.spaces) {
        if (spaces_.insert(space).second) pool_->use_space(space);
    }
    if (spaces_.contains(handed.last_space)) last_space_ = handed.last_space;
    for (const auto& [id, pinned] : handed.pins) {
        std::vector<Pinned> rows;
        for (const HandedPin& pin : pinned) {
            rows.push_back({pin.slot, pin.generation});
            if (remote_) pool_->remote_pins().add(pin.slot, pool_->table().entry(pin.slot).size);
        }
        pinned_objects_ += rows.size();
        pins_.emplace(id, std::move(rows));
    }
}

}  // namespace moonpool
