#include "store/client/stripe_lookup_steps.hpp"

#include <algorithm>
#include <iterator>
#include <numeric>

namespace moonpool {

namespace {

constexpr int kLookupRoundsMax = 4;  // for objects that are replaced meanwhile

}  // namespace

StripeLookupSteps::StripeLookupSteps(size_t keys)
    : present_(keys, Presence::kMiss), before_(keys), again_(keys) {
    std::iota(again_.begin(), again_.end(), 0);
    next_round();
}

void StripeLookupSteps::next_round() {
    left_ = std::exchange(again_, {});
    wants_ = left_.empty() || rounds_++ == kLookupRoundsMax ? Wants::kDone : Wants::kStanding;
}

void StripeLookupSteps::standing(const Result<std::vector<Standing>>& now) {
    objects_.clear();
    names_.clear();
    if (!now) {
        for (size_t i : left_) present_[i] = Presence::kUnknown;
        wants_ = Wants::kDone;
        return;
    }
    for (size_t k = 0; k < left_.size(); ++k) {
        const Standing& object = (*now)[k];
        if (!object.manifest) {
            present_[left_[k]] = object.size < 0 ? Presence::kMiss : Presence::kHit;
        } else if (object.manifest->within_limits()) {
            objects_.emplace_back(left_[k], *object.manifest);
            std::ranges::move(object.manifest->stripe_names(), std::back_inserter(names_));
        }
    }
    wants_ = names_.empty() ? Wants::kDone : Wants::kStripes;
}

void StripeLookupSteps::stripes(const Result<std::vector<Presence>>& present) {
    lost_.clear();
    size_t begin = 0;
    for (const auto& [i, manifest] : objects_) {
        auto all =
            present ? std::span(*present).subspan(begin, manifest.stripes()) : std::span<const Presence>();
        begin += manifest.stripes();
        auto any = [&](Presence what) { return std::ranges::find(all, what) != all.end(); };
        if (any(Presence::kMiss)) {
            present_[i] = Presence::kMiss;
            // It was replaced while it was asked for, or has lost a stripe.
            if (before_[i] != manifest) {
                before_[i] = manifest;
                again_.push_back(i);
            } else {
                lost_.emplace_back(i, manifest);
            }
        } else {
            present_[i] = !present || any(Presence::kUnknown) ? Presence::kUnknown : Presence::kHit;
        }
    }
    wants_ = Wants::kLost;
    if (lost_.empty()) next_round();
}

void StripeLookupSteps::settled(const std::vector<Presence>& present) {
    for (size_t k = 0; k < lost_.size(); ++k) {
        if (present[k] == Presence::kHit) present_[lost_[k].first] = Presence::kHit;
        // Another client may have put another object at another node.
        if (present[k] == Presence::kMiss) again_.push_back(lost_[k].first);
    }
    next_round();
}

void StripePinSteps::end(Outcome outcome) {
    outcome_ = outcome;
    wants_ = Wants::kDone;
}

void StripePinSteps::pin_again() {
    if (rounds_++ == kLookupRoundsMax) return end(Outcome::kOvertaken);
    wants_ = Wants::kPinStripes;
}

void StripePinSteps::stripes(bool all, bool is_known) {
    if (all) return end(Outcome::kPinned);
    if (!is_known) return end(Outcome::kNot);
    wants_ = Wants::kPinKey;  // replaced meanwhile, or a stripe is lost
}

void StripePinSteps::key(const std::optional<Standing>& now) {
    if (!now || now->size < 0) return end(Outcome::kNot);
    if (!now->manifest) return end(Outcome::kWhole);
    if (*now->manifest == manifest_) {
        if (settled_) return end(Outcome::kNot);
        settled_ = true;
        wants_ = Wants::kLost;
        return;
    }
    if (!now->manifest->within_limits()) return end(Outcome::kNot);
    manifest_ = *now->manifest;
    pin_again();
}

void StripePinSteps::settled(Presence is) {
    if (is != Presence::kHit) return end(Outcome::kNot);
    pin_again();
}

}  // namespace moonpool
