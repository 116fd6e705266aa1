#include "engine/link_order.hpp"

#include <algorithm>

namespace moonpool::engine {

namespace {

LinkOrder::Packed pack(const std::vector<size_t>& links) {
    LinkOrder::Packed packed = LinkOrder::kAsTheyStand;
    for (size_t place = 0; place < links.size(); ++place) {
        packed &= ~(LinkOrder::Packed{15} << (4 * place));
        packed |= LinkOrder::Packed{links[place]} << (4 * place);
    }
    return packed;
}

}  // namespace

void CostFit::add(uint64_t slices, uint64_t bytes, uint64_t ns) {
    auto time = static_cast<double>(ns);
    // A process that is not scheduled for a while makes one job as slow as a thousand.
    if (known()) time = std::min(time, kAtMost * cost().of(slices, bytes));
    double unit = static_cast<double>(slices) + static_cast<double>(bytes) / kUnitBytes;
    double s = static_cast<double>(slices) / unit, b = static_cast<double>(bytes) / unit, t = time / unit;
    ss_ = ss_ * kKept + s * s;
    sb_ = sb_ * kKept + s * b;
    bb_ = bb_ * kKept + b * b;
    st_ = st_ * kKept + s * t;
    bt_ = bt_ * kKept + b * t;
    ++jobs_;
}

// The least squares of t - slice_ns * s - byte_ns * b, with neither of the two below 0.
Cost CostFit::cost() const {
    if (jobs_ == 0) return {};
    double determinant = ss_ * bb_ - sb_ * sb_;
    // Slices of one size do not tell what a slice costs and what a byte. Half and half is right for that
    // size, and the least wrong for others.
    if (determinant < 1e-3 * ss_ * bb_) return {0.5 * st_ / ss_, 0.5 * bt_ / bb_};
    double slice_ns = (st_ * bb_ - bt_ * sb_) / determinant, byte_ns = (bt_ * ss_ - st_ * sb_) / determinant;
    if (slice_ns < 0) return {0, bt_ / bb_};
    if (byte_ns < 0) return {st_ / ss_, 0};
    return {slice_ns, byte_ns};
}

LinkOrder::LinkOrder(std::vector<bool> only_copies)
    : only_copies_(std::move(only_copies)),
      chooses_(std::ranges::count(only_copies_, false) > 1 && only_copies_.size() <= kLinksMax),
      states_(only_copies_.size()) {
    for (auto& order : orders_) order = kAsTheyStand;
}

bool LinkOrder::slower(size_t a, size_t b, double factor, uint64_t bytes) const {
    const CostFit &one = states_[a].fit, &other = states_[b].fit;
    if (!one.known() || !other.known()) return false;
    return one.cost().of(1, bytes) > factor * other.cost().of(1, bytes);
}

// Each link, the last of the registry first, goes before all that is there, but behind those that are clearly
// faster. One that stands behind another already stays there until it is not slower.
void LinkOrder::sort(size_t size_class) {
    const uint64_t bytes = kClassBytes[size_class];
    Packed old = orders_[size_class].load(std::memory_order_relaxed);
    std::vector<size_t> place_before(states_.size());
    for (size_t place = 0; place < states_.size(); ++place) place_before[at(old, place)] = place;
    std::vector<size_t> sorted;
    for (size_t link = states_.size(); link-- > 0;) {
        size_t place = 0;
        for (size_t k = 0; k < sorted.size() && !only_copies_[link]; ++k) {
            bool stood_behind = place_before[sorted[k]] < place_before[link];
            if (slower(link, sorted[k], stood_behind ? 1.0 : kSlower, bytes)) place = k + 1;
        }
        sorted.insert(sorted.begin() + static_cast<ptrdiff_t>(place), link);
    }
    orders_[size_class].store(pack(sorted), std::memory_order_relaxed);
}

LinkOrder::Packed LinkOrder::order_or_probe(uint64_t slices, uint64_t bytes, uint64_t now_ns) {
    Packed usual = order(slices, bytes);
    if (!chooses_ || slices == 0 || bytes > kProbeBytesMax) return usual;
    MutexLock lock(mutex_);
    ++jobs_;
    size_t front = 0;  // the place of the link that would be measured without a probe
    while (only_copies_[at(usual, front)]) ++front;
    for (size_t place = front + 1; place < states_.size(); ++place) {
        size_t link = at(usual, place);
        State& state = states_[link];
        if (only_copies_[link] || now_ns < state.not_before_ns) continue;
        if (state.fit.known() && link > at(usual, front)) continue;  // it stands where the registry has it
        if (jobs_ - state.probed_at < (state.fit.known() ? kProbesEvery : kFirstProbesEvery)) continue;
        state.probed_at = jobs_;
        std::vector<size_t> links;
        for (size_t k = 0; k < states_.size(); ++k) links.push_back(at(usual, k));
        std::rotate(links.begin() + static_cast<ptrdiff_t>(front),
                    links.begin() + static_cast<ptrdiff_t>(place),
                    links.begin() + static_cast<ptrdiff_t>(place) + 1);
        return pack(links);
    }
    return usual;
}

void LinkOrder::began(size_t link, uint64_t now_ns) {
    MutexLock lock(mutex_);
    if (states_[link].under_way++ == 0) states_[link].since_ns = now_ns;
}

void LinkOrder::ended(size_t link, uint64_t slices, uint64_t bytes, uint64_t now_ns) {
    MutexLock lock(mutex_);
    State& state = states_[link];
    uint64_t ns = now_ns - std::min(now_ns, state.since_ns);
    state.since_ns = now_ns;
    --state.under_way;
    add(link, slices, bytes, ns);
}

void LinkOrder::carried(size_t link, uint64_t slices, uint64_t bytes, uint64_t ns) {
    MutexLock lock(mutex_);
    add(link, slices, bytes, ns);
}

void LinkOrder::add(size_t link, uint64_t slices, uint64_t bytes, uint64_t ns) {
    if (slices == 0 || bytes == 0) return;
    State& state = states_[link];
    state.fit.add(slices, bytes, ns);
    state.leave_alone_ns = kLeaveAloneNs;
    if (!chooses_ || !state.fit.known()) return;
    for (size_t size_class = 0; size_class < orders_.size(); ++size_class) sort(size_class);
}

void LinkOrder::left_undone(size_t link, uint64_t now_ns) {
    MutexLock lock(mutex_);
    State& state = states_[link];
    state.not_before_ns = now_ns + state.leave_alone_ns;
    state.leave_alone_ns = std::min(2 * state.leave_alone_ns, kLeaveAloneNsMax);
}

LinkOrder::Measured LinkOrder::measured(size_t link) const {
    MutexLock lock(mutex_);
    return {states_[link].fit.jobs(), states_[link].fit.cost()};
}

}  // namespace moonpool::engine
