#include "transport/nic/target.hpp"

namespace moonpool::transport::nic {

namespace {

Error unreadable() { return Error{Code::kProtocol, "an unreadable question about a NIC"}; }

constexpr size_t kEndsOfOneMax = 64;  // of one initiator

}  // namespace

Result<std::vector<std::byte>> Target::answer(const SegmentId& peer, Reader question) {
    auto what = question.number<uint8_t>();
    if (!question.ok()) return unreadable();
    switch (static_cast<Question>(what)) {
        case Question::kKeys:
            return tell_keys(peer, question);
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

Result<std::vector<std::byte>> Target::tell_keys(const SegmentId& peer, Reader question) {
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
        {
            // Before the keys are read: leave_region() finds it, or these are keys that have ended.
            MutexLock lock(mutex_);
            told_[peer].insert((*region)->id);
        }
        encode(w, **region, keys_->find((*region)->id).get(), key_size_);
    }
    if (!question.done()) return unreadable();
    w.number_at(0, static_cast<uint16_t>(told.size()));
    return out;
}

Result<std::vector<std::byte>> Target::connect(const SegmentId& peer, Reader question) {
    auto rail = question.number<uint32_t>();
    auto port = question.number<uint8_t>();
    if (!question.ok()) return unreadable();
    const Name name{peer, rail};
    end(name);  // also where this one fails
    std::vector<std::byte> out;
    Writer w(out);
    Result<std::unique_ptr<TargetEnd>> made = make_(port, question, w);
    if (!made) return made.error();
    MutexLock lock(mutex_);
    if (closed_) return Error{Code::kUnavailable, "this engine is closed"};
    if (context_.shut_out->has(peer)) return ShutOut::error();  // since it asked
    auto from = ends_.lower_bound({peer, 0}), to = ends_.upper_bound({peer, UINT32_MAX});
    if (static_cast<size_t>(std::distance(from, to)) >= kEndsOfOneMax) {
        return Error{Code::kTooLarge, "an engine has at most " + std::to_string(kEndsOfOneMax) +
                                          " connections of NICs to another"};
    }
    ends_[name].swap(*made);  // of two questions with one number the later one's
    return out;
}

void Target::end(const Name& name) {
    MutexLock lock(mutex_);
    auto it = ends_.find(name);
    if (it == ends_.end()) return;
    // Under the lock: a second question about it is answered when it has ended.
    ends_.erase(it);
}

void Target::leave(const SegmentId& peer) {
    MutexLock lock(mutex_);
    ends_.erase(ends_.lower_bound({peer, 0}), ends_.upper_bound({peer, UINT32_MAX}));
    told_.erase(peer);
}

void Target::leave_region(uint64_t region_id) {
    MutexLock lock(mutex_);
    for (auto& [peer, regions] : told_) {
        if (regions.erase(region_id) == 0) continue;
        ends_.erase(ends_.lower_bound({peer, 0}), ends_.upper_bound({peer, UINT32_MAX}));
    }
}

void Target::close() {
    MutexLock lock(mutex_);
    closed_ = true;
    ends_.clear();
}

}  // namespace moonpool::transport::nic
