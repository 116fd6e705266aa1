#include "store/client/search_steps.hpp"

#include <algorithm>

namespace moonpool {

SearchSteps::SearchSteps(std::vector<Hash128> keys, const OwnPlace& place, LocationCache& locations,
                         std::vector<int64_t>& sizes)
    : keys_(std::move(keys)), place_(place), locations_(locations), sizes_(sizes), tried_(keys_.size()) {}

void SearchSteps::members(const Result<std::shared_ptr<const Members>>& answer) {
    begin_round(answer ? answer->get() : nullptr);
}

void SearchSteps::assign(const Member& member, size_t item) {
    tried_[item].push_back(member.id);
    assigned_.try_emplace(member.identity.incarnation, NodeItems{member, {}})
        .first->second.items.push_back(item);
}

// known: the members, in the first round only: a place that was wrong is not asked again.
void SearchSteps::begin_round(const Members* known) {
    nodes_.clear();
    unknown_.clear();
    question_.clear();
    if (round_++ > kAttemptsMax) {
        wants_ = Wants::kDone;
        return;
    }
    for (size_t i = 0; i < keys_.size(); ++i) {
        if (sizes_[i] >= 0) continue;
        const Member* member = known == nullptr ? nullptr : known_place(locations_, *known, keys_[i]);
        if (member != nullptr && member->identity.incarnation != place_.own) {
            assign(*member, i);
        } else {
            unknown_.push_back(i);
            question_.push_back(keys_[i]);
        }
    }
    if (unknown_.empty()) return finish_round();
    wants_ = Wants::kLocate;
}

void SearchSteps::located(const Result<LocateAnswer>& answer) {
    for (size_t u = 0; answer && u < answer->keys.size(); ++u) {
        size_t item = unknown_[u];
        std::vector<NodeId> avoid = tried_[item];
        for (const Member& member : answer->members->rows) {
            if (member.identity.incarnation == place_.own) avoid.push_back(member.id);
        }
        const Member* member =
            nearest(place_, *answer->members, question_[u], answer->keys[u], avoid, question_[u].low);
        // Damaged on the way, and no other node has it: once more from the same node.
        if (member == nullptr && sizes_[item] == kDamagedRead && round_ <= 2) {
            member = nearest(place_, *answer->members, question_[u], answer->keys[u], {}, question_[u].low);
        }
        if (member != nullptr) assign(*member, item);
    }
    finish_round();
}

void SearchSteps::finish_round() {
    for (auto& [life, node] : assigned_) nodes_.push_back(std::move(node));
    assigned_.clear();
    wants_ = nodes_.empty() ? Wants::kDone : Wants::kRead;
}

void SearchSteps::answered(const NodeItems& node, const Result<std::vector<int64_t>>& sizes) {
    for (size_t k = 0; k < node.items.size(); ++k) {
        size_t i = node.items[k];
        if (sizes) sizes_[i] = (*sizes)[k];
        if (sizes && sizes_[i] >= 0) {
            locations_.put(keys_[i], node.member.identity.incarnation);
        } else {
            locations_.forget(keys_[i]);
        }
    }
}

void SearchSteps::all_answered() { begin_round(nullptr); }

}  // namespace moonpool
