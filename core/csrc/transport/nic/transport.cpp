#include "transport/nic/transport.hpp"

#include <utility>

namespace moonpool::transport::nic {

void Transport::serve_by(std::vector<std::shared_ptr<KeyMaker>> makers, const NicOptions& options,
                         std::vector<std::string> cards, KeySize key_size, Target::Make make) {
    keys_ = std::make_shared<Keys>(std::move(makers), options, std::move(cards), context_.waiters,
                                   context_.closing);
    target_.emplace(context_, keys_, key_size, std::move(make));
}

void Transport::end() {
    target_.reset();
    keys_.reset();
}

Status Transport::add_region(Region& region) {
    if (keys_ == nullptr) return success();
    std::shared_ptr<const Regions> all = context_.regions->all();
    const std::shared_ptr<Region>* found = find_region(*all, region.address, region.length);
    if (found != nullptr && found->get() == &region) keys_->add(*found);
    return success();
}

uint64_t Transport::revoke(const Region& region) {
    if (keys_ == nullptr) return 0;
    keys_->revoke(region.id);
    return region.id;
}

bool Transport::drained(uint64_t revocation) { return revocation == 0 || keys_->released(revocation); }

Result<std::vector<std::byte>> Transport::answer(const SegmentId& peer, Reader question) {
    if (!target_) return Error{Code::kUnavailable, "this engine does not serve " + what_};
    return target_->answer(peer, question);
}

// Ending a connection may wait for the NIC.
void Transport::peer_left(const SegmentId& peer) {
    if (target_) context_.card_waiters.post(false, [this, peer] { target_->leave(peer); });
}

// When it returns, no NIC touches memory for that engine any more.
void Transport::shut_out(const SegmentId& segment) {
    if (target_) target_->leave(segment);
}

void Transport::close() {
    if (target_) target_->close();
}

void Transport::metrics(const std::string& name, Metrics& rows) const {
    append(name, counters_, rows);
    for (const auto& [port, totals] : links_->ports()) {
        auto add = [&](const char* what, uint64_t value) {
            rows.emplace_back(name + "_rail_" + what + "{port=\"" + port + "\"}", value);
        };
        add("bytes_total", totals.bytes);
        add("pieces_total", totals.pieces);
        add("faults_total", totals.faults);
        add("connections", totals.up);
    }
}

}  // namespace moonpool::transport::nic
