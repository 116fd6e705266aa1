#include "store/client/stripe_read_steps.hpp"

namespace moonpool {

namespace {

constexpr int kReadRoundsMax = 8;  // of one read of an object that is replaced meanwhile

}  // namespace

StripeReadSteps::StripeReadSteps(const Manifest& manifest) {
    read({static_cast<int64_t>(kManifestBytes), manifest});
}

void StripeReadSteps::read(const Standing& next) {
    if (rounds_++ == kReadRoundsMax) return end(kMiss);
    now_ = next;
    wants_ = now_.manifest ? Wants::kStripes : Wants::kWhole;
}

void StripeReadSteps::end(int64_t size) {
    size_ = size;
    wants_ = Wants::kDone;
}

void StripeReadSteps::stripes_read(bool all) {
    if (all) return end(static_cast<int64_t>(now_.manifest->size));
    wants_ = Wants::kSuccessor;
}

void StripeReadSteps::whole_read(int64_t size, bool all) {
    if (all) return end(size);
    wants_ = Wants::kSuccessor;
}

void StripeReadSteps::standing(const Standing& next) {
    const bool is_same = now_.manifest && next.manifest == now_.manifest;
    if (wants_ == Wants::kOther) {
        if (next.size < 0 || is_same) return end(kMiss);
        return read(next);
    }
    if (next.size < 0) {
        if (!now_.manifest) return end(kMiss);
        wants_ = Wants::kFreeOrphans;
    } else if (!is_same) {
        settled_ = false;
        read(next);
    } else if (settled_) {
        end(kMiss);
    } else {
        settled_ = true;
        wants_ = Wants::kLost;
    }
}

void StripeReadSteps::settled(Presence is) {
    if (is == Presence::kUnknown) return end(kMiss);
    // It was removed. Another client may have put another object at another node.
    if (is == Presence::kMiss) {
        wants_ = Wants::kOther;
    } else {
        read(Standing(now_));
    }
}

}  // namespace moonpool
