#include "store/client/lost_stripe_steps.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

namespace moonpool {

namespace {

constexpr size_t kNodesAskedMax = 256;  // of a larger pool no object is removed for a missing stripe

}  // namespace

LostStripeSteps::LostStripeSteps(std::vector<Incomplete> objects, const Incarnation& own,
                                 const KeyHasher& hasher, LocationCache& locations)
    : objects_(std::move(objects)),
      own_(own),
      hasher_(hasher),
      locations_(locations),
      present_(objects_.size(), Presence::kUnknown) {
    if (objects_.empty()) wants_ = Wants::kDone;
}

LostStripeSteps LostStripeSteps::free_orphans(const Incomplete& object, const Incarnation& own,
                                              const KeyHasher& hasher, LocationCache& locations) {
    LostStripeSteps steps({object}, own, hasher, locations);
    steps.orphans_ = true;
    if (!object.manifest.within_limits()) steps.wants_ = Wants::kDone;
    return steps;
}

// It ends where the master does not answer, does not know all nodes yet, or one of them is away.
void LostStripeSteps::members(const Result<std::shared_ptr<const Members>>& answer) {
    wants_ = Wants::kDone;
    if (!answer || (*answer)->before != nullptr || (*answer)->away != 0 ||
        (*answer)->rows.size() > kNodesAskedMax)
        return;
    bool own = false;
    for (const Member& member : (*answer)->rows) {
        if (!(*answer)->is_alive(member)) return;
        own |= member.identity.incarnation == own_;
        nodes_.push_back({member, {}});
    }
    if (!own) return;
    for (const Incomplete& object : objects_) {
        if (orphans_) {
            names_.emplace_back(object.name);
        } else {
            std::ranges::move(object.manifest.stripe_names(), std::back_inserter(names_));
        }
    }
    for (const std::string& name : names_) hashes_.push_back(hasher_(name));
    found_.resize(names_.size());
    wants_ = Wants::kAsk;
}

// Where it is, this client knows from now on.
void LostStripeSteps::answered(const NodeItems& node, const Result<std::vector<uint8_t>>& flags) {
    all_answered_ &= flags.ok();
    for (size_t i = 0; flags && i < names_.size(); ++i) {
        if ((*flags)[i] == 0) continue;
        found_[i] = 1;
        locations_.put(hashes_[i], node.member.identity.incarnation);
    }
}

void LostStripeSteps::all_answered() {
    wants_ = Wants::kDone;
    if (!all_answered_) return;
    if (orphans_) {
        if (found_.front() != 0) return;
        freed_.push_back(objects_.front().manifest);
        wants_ = Wants::kFree;
        return;
    }
    auto begin = found_.begin();
    for (size_t i = 0; i < objects_.size(); ++i) {
        auto end = begin + static_cast<std::ptrdiff_t>(objects_[i].manifest.stripes());
        const bool is_whole = std::find(begin, end, 0) == end;
        begin = end;
        present_[i] = is_whole ? Presence::kHit : Presence::kMiss;
        if (is_whole) continue;
        lost_.push_back(objects_[i]);
        freed_.push_back(objects_[i].manifest);
    }
    if (!lost_.empty()) wants_ = Wants::kDrop;
}

void LostStripeSteps::dropped() {
    for (const Incomplete& object : lost_) locations_.forget(hasher_(object.name));
    wants_ = Wants::kFree;
}

}  // namespace moonpool
