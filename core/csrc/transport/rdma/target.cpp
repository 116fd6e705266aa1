#include "transport/rdma/target.hpp"

#include <set>

namespace moonpool::transport::rdma {

namespace {

Error unreadable() { return Error{Code::kProtocol, "an unreadable question about RDMA"}; }

constexpr size_t kPairsOfOneMax = 64;  // of one initiator

}  // namespace

Result<std::vector<std::byte>> Target::answer(const SegmentId& peer, Reader question) {
    auto what = question.number<uint8_t>();
    if (!question.ok()) return unreadable();
    switch (static_cast<Question>(what)) {
        case Question::kKeys:
            return tell_keys(question);
        case Question::kConnect:
            return connect(peer, question);
        case Question::kEnd: {
            auto rail = question.number<uint32_t>();
            if (!question.done()) return unreadable();
            end({peer, rail});
            return std::vector<std::byte>{};
        }
    }
    return unreadable();
}

Result<std::vector<std::byte>> Target::tell_keys(Reader question) const {
    auto n = question.number<uint16_t>();
    if (!question.ok() || n > kRangesMax) return unreadable();
    std::shared_ptr<const Regions> all = context_.regions->all();
    std::set<uint64_t> told;
    std::vector<std::byte> out;
    Writer w(out);
    w.number(uint16_t{0});
    for (uint16_t i = 0; i < n; ++i) {
        auto address = question.number<uint64_t>();
        auto length = question.number<uint64_t>();
        const std::shared_ptr<Region>* region = find_region(*all, address, length);
        if (region == nullptr || !told.insert((*region)->id).second) continue;
        encode(w, **region, keys_->find((*region)->id).get());
    }
    if (!question.done()) return unreadable();
    w.number_at(0, static_cast<uint16_t>(told.size()));
    return out;
}

Result<std::vector<std::byte>> Target::connect(const SegmentId& peer, Reader question) {
    Connect asked;
    asked.rail = question.number<uint32_t>();
    asked.port = question.number<uint8_t>();
    asked.initiator = decode_endpoint(question);
    if (!question.ok() || asked.port >= ports_.size()) return unreadable();  // a later version may append
    const std::shared_ptr<Port>& port = ports_[asked.port];
    const Name name{peer, asked.rail};
    end(name);  // also where this one fails
    // No completion comes of what peers do.
    Result<std::shared_ptr<Completions>> none = Completions::create(port->device, 1, false);
    if (!none) return none.error();
    Result<std::unique_ptr<QueuePair>> pair = QueuePair::create(port, std::move(*none));
    if (!pair) return pair.error();
    if (Status connected = (*pair)->connect(asked.initiator, false); !connected) return connected.error();
    std::vector<std::byte> out;
    Writer w(out);
    encode(w, (*pair)->endpoint());
    MutexLock lock(mutex_);
    if (closed_) return Error{Code::kUnavailable, "this engine is closed"};
    if (context_.shut_out->has(peer)) return ShutOut::error();  // since it asked
    auto from = pairs_.lower_bound({peer, 0}), to = pairs_.upper_bound({peer, UINT32_MAX});
    if (static_cast<size_t>(std::distance(from, to)) >= kPairsOfOneMax) {
        return Error{Code::kTooLarge,
                     "an engine has at most " + std::to_string(kPairsOfOneMax) + " queue pairs to another"};
    }
    pairs_[name].swap(*pair);  // of two questions with one number the later one's
    return out;
}

void Target::end(const Name& name) {
    MutexLock lock(mutex_);
    auto it = pairs_.find(name);
    if (it == pairs_.end()) return;
    // Under the lock: a second question about it is answered when it has ended.
    pairs_.erase(it);
}

void Target::leave(const SegmentId& peer) {
    MutexLock lock(mutex_);
    pairs_.erase(pairs_.lower_bound({peer, 0}), pairs_.upper_bound({peer, UINT32_MAX}));
}

void Target::close() {
    MutexLock lock(mutex_);
    closed_ = true;
    pairs_.clear();
}

}  // namespace moonpool::transport::rdma
