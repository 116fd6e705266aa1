#include "network.hpp"

#include <algorithm>

namespace moonpool::sim {

void End::send(Bytes frame) {
    if (open_) network_->transmit(*this, std::move(frame));
}

void End::close() {
    if (!open_) return;
    open_ = false;
    if (peer_ != nullptr) network_->tell_end(peer_);
}

// Mostly short, sometimes long: so frames of two connections overtake each other.
Micros Network::delay(uint32_t from, uint32_t to) {
    if (from == to) return world_.random.between(5, 50);
    if (world_.random.one_in(50)) return world_.random.between(1, 60) * kMs;
    return world_.random.between(40, 400);
}

void Network::dial(Process& from, Process& to, Accept accept,
                   std::function<void(std::shared_ptr<End>)> then) {
    if (is_cut(from.host(), to.host()) || is_cut(to.host(), from.host())) return;
    world_.at(world_.now() + delay(from.host(), to.host()), nullptr, [&, accept, then, life = from.life()] {
        if (from.life() != life || to.stopped())
            return;  // a stopped one says nothing; its backlog is not modelled
        Micros back = world_.now() + delay(to.host(), from.host());
        if (!to.running()) {
            world_.at(back, &from, [then] { then(nullptr); });
            return;
        }
        auto here = std::make_shared<End>(), there = std::make_shared<End>();
        for (auto& [end, owner, peer] : {std::tuple(here, &from, there), std::tuple(there, &to, here)}) {
            end->network_ = this;
            end->owner_ = owner;
            end->life_ = owner->life();
            end->peer_ = peer;
            ends_.push_back(end);
        }
        here->last_arrival_ = back;  // the answer to the dialling comes before all else
        if (accept(there)) return world_.at(back, &from, [then, here] { then(here); });
        here->open_ = there->open_ = false;
        world_.at(back, &from, [then] { then(nullptr); });
    });
    if (ends_.size() > 64) forget_closed();
}

Network::~Network() {
    for (auto& end : ends_) end->peer_ = nullptr;
}

void Network::forget_closed() {
    std::erase_if(ends_, [](const std::shared_ptr<End>& end) {
        if (end->open_ || (end->peer_ != nullptr && end->peer_->open_)) return false;
        end->peer_ = nullptr;
        return true;
    });
}

void Network::transmit(End& from, Bytes frame) {
    std::shared_ptr<End> to = from.peer_;
    if (to == nullptr) return;
    ++frames_;
    if (is_cut(from.owner_->host(), to->owner_->host())) {
        from.held_.push_back(std::move(frame));
        return;
    }
    Micros at =
        std::max(world_.now() + delay(from.owner_->host(), to->owner_->host()), to->last_arrival_ + 1);
    to->last_arrival_ = at;
    world_.at(at, nullptr, [this, from = from.shared_from_this(), to, frame = std::move(frame)] {
        arrive(from, to, frame);
    });
}

void Network::arrive(const std::shared_ptr<End>& from, const std::shared_ptr<End>& to, const Bytes& frame) {
    if (!lives(*to)) return tell_end(from);  // the host answers for a process that it has no more
    world_.at(world_.now(), to->owner_, [to, frame] {
        if (to->open_ && to->on_frame) to->on_frame(frame);
    });
}

void Network::tell_end(const std::shared_ptr<End>& end) {
    auto tell = [end] {
        end->open_ = false;
        if (end->on_end) end->on_end();
    };
    std::shared_ptr<End> peer = end->peer_;
    if (peer != nullptr && is_cut(peer->owner_->host(), end->owner_->host())) {
        peer->end_held_ = true;
        return;
    }
    Micros at = world_.now() + (peer == nullptr ? kMs : delay(peer->owner_->host(), end->owner_->host()));
    at = std::max(at, end->last_arrival_ + 1);  // behind what was sent before
    if (!lives(*end)) return;
    world_.at(at, end->owner_, tell);
    if (world_.random.one_in(8)) world_.at(at + world_.random.between(1, 5) * kMs, end->owner_, tell);
}

void Network::heal(uint32_t from, uint32_t to) {
    if (cuts_.erase({from, to}) == 0) return;
    healed_[{from, to}] = world_.now();
    for (auto& end : std::vector(ends_)) {
        std::shared_ptr<End> peer = end->peer_;
        if (peer == nullptr || end->owner_->host() != from || peer->owner_->host() != to) continue;
        for (Bytes& frame : std::exchange(end->held_, {})) transmit(*end, std::move(frame));
        if (std::exchange(end->end_held_, false)) tell_end(peer);
    }
}

void Network::heal_all() {
    for (auto [from, to] : std::set(cuts_)) heal(from, to);
}

void Network::ended(Process& process, bool silently) {
    for (auto& end : std::vector(ends_)) {
        if (end->owner_ != &process || !end->open_) continue;
        end->open_ = false;
        if (end->peer_ != nullptr && !silently) tell_end(end->peer_);
    }
}

}  // namespace moonpool::sim
