#include "store/client/removal_steps.hpp"

#include <algorithm>
#include <numeric>

namespace moonpool {

RemovalSteps::RemovalSteps(std::vector<Hash128> keys, const Incarnation& own, bool own_away,
                           LocationCache& locations, RecentCopies& recent)
    : keys_(std::move(keys)),
      own_(own),
      own_away_(own_away),
      locations_(locations),
      recent_(recent),
      removed_(keys_.size()) {
    for (const Hash128& key : keys_) locations_.forget(key);
}

LocateOptions RemovalSteps::question() {
    LocateOptions question;
    question.suspects = true;  // they hold their copies still, and the master has to tell them
    return question;
}

// What a node is to be told; null: it is the own one.
NodeItems* RemovalSteps::planned(const Member& member) {
    if (member.identity.incarnation == own_) return nullptr;
    return &planned_.try_emplace(member.id, NodeItems{member, {}}).first->second;
}

void RemovalSteps::located(uint64_t now_ms, const Result<LocateAnswer>& answer) {
    if (!answer) {
        wants_ = Wants::kMembers;
        return;
    }
    for (size_t i = 0; i < answer->keys.size(); ++i) {
        for (const Holder& holder : answer->keys[i]) {
            const Member* member = answer->members->find(holder.node);
            NodeItems* node = member == nullptr ? nullptr : planned(*member);
            if (node == nullptr) continue;
            if (node->items.empty() || node->items.back() != i) node->items.push_back(i);
        }
    }
    plan(now_ms, *answer->members);
}

// The master is away: every node that was in the pool is told.
void RemovalSteps::members(uint64_t now_ms, const Result<std::shared_ptr<const Members>>& answer) {
    if (!answer) {
        wants_ = Wants::kDone;
        return;
    }
    const Members& known = **answer;
    for (const Member& member : known.rows) {
        NodeItems* node = planned(member);
        if (node == nullptr) continue;
        node->items.resize(keys_.size());
        std::iota(node->items.begin(), node->items.end(), 0);
    }
    plan(now_ms, known);
}

void RemovalSteps::plan(uint64_t now_ms, const Members& known) {
    // And where this client put copies of which the directory has not heard yet.
    for (size_t i = 0; i < keys_.size(); ++i) {
        std::vector<NodeId> at;
        recent_.find(now_ms, keys_[i], at);
        for (NodeId node : at) {
            const Member* member = known.find(node);
            NodeItems* also = member == nullptr ? nullptr : planned(*member);
            if (also == nullptr || std::ranges::find(also->items, i) != also->items.end()) continue;
            also->items.push_back(i);
        }
    }
    for (size_t i = 0; own_away_ && i < known.rows.size(); ++i) {
        if (known.rows[i].identity.incarnation == own_) unreached_.push_back(known.rows[i].id);
    }
    for (auto& [id, node] : planned_) {
        for (size_t i : node.items) recent_.forget(keys_[i], id);
        // One that is away now is not waited for.
        if (node.member.state == MemberState::kAlive) {
            nodes_.push_back(std::move(node));
        } else {
            told(now_ms, node, Error{Code::kUnavailable, "suspect"});
        }
    }
    planned_.clear();
    wants_ = Wants::kTell;
}

void RemovalSteps::told(uint64_t now_ms, const NodeItems& node, const Result<std::vector<uint8_t>>& flags) {
    if (!flags) {
        unreached_.push_back(node.member.id);
        for (size_t i : node.items) recent_.add(now_ms, keys_[i], node.member.id);  // it may have them still
        return;
    }
    for (size_t k = 0; k < node.items.size(); ++k) {
        if ((*flags)[k] != 0) removed_[node.items[k]] = 1;
    }
}

}  // namespace moonpool
