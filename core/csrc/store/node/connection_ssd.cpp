// The part of Connection that has to do with objects which only an SSD of the node holds: a frame that needs
// their bytes is parked until they are in memory, and is then handled anew, this time as if there were no
// SSD.
#include <poll.h>

#include <cstring>

#include "store/node/connection.hpp"

namespace moonpool {

bool Connection::only_on_ssd(uint32_t space, std::string_view name) const {
    return server_.ssd_ != nullptr && pool_->find(space, name) == kNoSlot &&
           server_.ssd_->holds(*pool_, space, name);
}

// `here`: the slots of the rest. At most a quarter of the arena is brought for one frame. False when nothing
// could be begun.
bool Connection::park(const FrameHeader& header, Reader body, uint32_t space,
                      std::span<const std::string_view> wanted, std::span<const uint32_t> here) {
    ObjectTable& table = pool_->table();
    auto parked = std::make_shared<Parked>();
    parked->owner = this;
    parked->header = header;
    // Bringing some must not drive out the others.
    for (uint32_t slot : here) {
        if (slot == kNoSlot) continue;
        table.pin(slot);
        parked->pinned.push_back({slot, table.generation(slot)});
    }
    auto arrived = [parked, pool = pool_, &server = server_](uint32_t slot) {
        --parked->waits_for;
        if (parked->owner == nullptr) return;
        if (slot != kNoSlot) {
            pool->table().pin(slot);
            parked->pinned.push_back({slot, pool->table().generation(slot)});
        }
        if (parked->waits_for == 0) server.resume(*parked->owner, now_ms());
    };
    uint64_t budget = pool_->size_now() / 4;
    ++parked->waits_for;  // until all have been begun
    for (std::string_view name : wanted) {
        std::optional<ssd::Found> found = server_.ssd_->find(*pool_, space, name);
        if (!found) continue;
        if (found->size > budget) break;
        if (!server_.ssd_->promote(*pool_, space, name, arrived)) break;
        budget -= found->size;
        ++parked->waits_for;
    }
    if (--parked->waits_for == 0) {
        unpin(parked->pinned);
        return false;
    }
    std::string_view bytes = body.bytes(body.left());
    parked->body.resize(bytes.size());
    if (!bytes.empty()) std::memcpy(parked->body.data(), bytes.data(), bytes.size());
    parked_ = std::move(parked);
    return true;
}

bool Connection::resume(uint64_t now_ms) {
    std::shared_ptr<Parked> parked = std::move(parked_);
    parked->owner = nullptr;
    progress_ms_ = now_ms;
    pace_.restart(now_ms);
    whole_answers_ = out_.size();
    resumed_ = true;
    bool alive = handle(parked->header, Reader(parked->body));
    resumed_ = false;
    whole_answers_ = out_.size();
    unpin(parked->pinned);
    return alive && serve();
}

void Connection::unpark() {
    if (parked_ == nullptr) return;
    parked_->owner = nullptr;
    unpin(parked_->pinned);
    parked_.reset();
}

// Whether the client left, without a look at what it sent before: that is not read while a frame waits.
bool Connection::hung_up() const {
    pollfd state{fd_.get(), POLLRDHUP, 0};
    return ::poll(&state, 1, 0) == 1 && (state.revents & (POLLRDHUP | POLLHUP | POLLERR | POLLNVAL)) != 0;
}

}  // namespace moonpool
