#include "directory/member_views.hpp"

#include <algorithm>
#include <set>
#include <utility>

namespace moonpool {

namespace {

// The better a state, the more may be asked of the node.
int badness(MemberState state) {
    switch (state) {
        case MemberState::kAlive:
            return 0;
        case MemberState::kJoining:
            return 1;
        case MemberState::kSuspect:
            return 2;
        case MemberState::kGone:
            return 3;
    }
    return 3;
}

}  // namespace

void MemberViews::hear(uint32_t range, const std::shared_ptr<const Members>& list, bool in_touch) {
    Heard& heard = heard_[range];
    changed_ |= std::exchange(heard.in_touch, in_touch) != in_touch;
    if (list == nullptr || list == heard.list) return;
    if (heard.list != nullptr && list->reading < heard.list->reading) return;
    heard.list = list;
    heard.ids.clear();
    for (const Member& member : list->rows) {
        heard.ids.emplace(member.identity.incarnation, member.id);
        heard.listed.insert(member.identity.incarnation);
    }
    number_lives();
    changed_ = true;
}

// A number is another life's only after all others were given: what a caller remembers of a node that ended
// names no other one for long.
void MemberViews::number_lives() {
    std::set<Incarnation> listed;
    for (const Heard& heard : heard_) {
        if (heard.list == nullptr) continue;
        for (const Member& member : heard.list->rows) listed.insert(member.identity.incarnation);
    }
    std::erase_if(numbers_, [&](const auto& entry) {
        if (listed.contains(entry.first)) return false;
        lives_.erase(entry.second);
        return true;
    });
    for (Heard& heard : heard_)
        std::erase_if(heard.listed, [&](const Incarnation& life) { return !listed.contains(life); });
    for (const Incarnation& life : listed) {
        if (numbers_.contains(life)) continue;
        while (next_ == kNoNode || lives_.contains(next_)) ++next_;
        numbers_[life] = next_;
        lives_[next_++] = life;
    }
}

std::optional<NodeId> MemberViews::number(const Incarnation& life) const {
    auto it = numbers_.find(life);
    return it == numbers_.end() ? std::nullopt : std::optional(it->second);
}

std::optional<NodeId> MemberViews::number_at(uint32_t range, NodeId number) const {
    auto life = lives_.find(number);
    if (life == lives_.end()) return std::nullopt;
    const std::map<Incarnation, NodeId>& ids = heard_[range].ids;
    auto it = ids.find(life->second);
    return it == ids.end() ? std::nullopt : std::optional(it->second);
}

const std::shared_ptr<const Members>& MemberViews::all() {
    if (std::exchange(changed_, false)) rebuild();
    return all_;
}

std::shared_ptr<const Members> MemberViews::of(uint32_t range) {
    const std::shared_ptr<const Members>& list = heard_[range].list;
    if (list == nullptr) return nullptr;
    auto view = std::make_shared<Members>(*list);
    for (Member& member : view->rows) member.id = numbers_.at(member.identity.incarnation);
    std::ranges::sort(view->rows, {}, &Member::id);
    if (view->before == nullptr) view->before = others(heard_[range].listed);
    return view;
}

// The nodes that some range lists, and this one never has: those that it no longer lists have left.
std::shared_ptr<const Members> MemberViews::others(std::set<Incarnation> seen) const {
    auto others = std::make_shared<Members>();
    for (const Heard& heard : heard_) {
        if (heard.list == nullptr) continue;
        for (const Member& member : heard.list->rows) {
            if (!seen.insert(member.identity.incarnation).second) continue;
            others->rows.push_back(member);
            others->rows.back().id = kNoNode;
        }
    }
    return others;
}

void MemberViews::rebuild() {
    const size_t ranges = heard_.size();
    const bool any_in_touch = std::ranges::any_of(heard_, &Heard::in_touch);
    struct Row {
        Member member;
        bool first = true;  // no list in touch has it
        std::vector<std::optional<MemberState>> states;
    };
    std::map<NodeId, Row> rows;
    auto all = std::make_shared<Members>();
    all->epoch = ++epoch_;
    all->ranges = static_cast<uint32_t>(ranges);
    auto before = std::make_shared<Members>();
    for (size_t range = 0; range < ranges; ++range) {
        const Heard& heard = heard_[range];
        if (!heard.in_touch) all->away |= 1u << range;
        if (heard.list == nullptr) continue;
        const bool counts = heard.in_touch || !any_in_touch;
        for (const Member& member : heard.list->rows) {
            Row& row = rows[numbers_.at(member.identity.incarnation)];
            row.states.resize(ranges);
            row.states[range] = member.state;
            bool better = row.first || badness(member.state) < badness(row.member.state);
            if (row.member.identity.name.empty() || (counts && better)) row.member = member;
            if (counts) row.first = false;
        }
    }
    for (size_t range = 0; range < ranges; ++range) {
        const Heard& heard = heard_[range];
        if (heard.list == nullptr || heard.list->before == nullptr) continue;
        all->filling |= 1u << range;
        for (const Member& member : heard.list->before->rows) {
            auto number = numbers_.find(member.identity.incarnation);
            if (number == numbers_.end()) {
                if (before->find(member.identity.incarnation) == nullptr) before->rows.push_back(member);
            } else if (auto& state = rows.at(number->second).states[range]; !state) {
                state = member.state;  // it has not joined that master again yet
            }
        }
    }
    for (auto& [number, row] : rows) {
        row.member.id = number;
        for (size_t range = 0; range < ranges; ++range) {
            // Of a master that was never heard the others' word is all there is.
            MemberState other = heard_[range].list == nullptr ? row.member.state : MemberState::kGone;
            all->states.push_back(row.states[range].value_or(other));
        }
        all->rows.push_back(std::move(row.member));
    }
    if (all->filling != 0) all->before = std::move(before);
    all_ = std::move(all);
}

bool MemberViews::check_integrity() const {
    return numbers_.size() == lives_.size() && std::ranges::all_of(numbers_, [&](const auto& entry) {
               auto life = lives_.find(entry.second);
               return life != lives_.end() && life->second == entry.first;
           });
}

}  // namespace moonpool
