#include "store/client/removal_steps.hpp"

#include <algorithm>
#include <utility>

namespace moonpool {

namespace {

// Nodes, at least, that are to know of each removal.
constexpr size_t kKnow = 2;

// So often others are asked to know of it where some did not answer.
constexpr int kWitnessRounds = 2;

}  // namespace

RemovalSteps::RemovalSteps(std::vector<Hash128> keys, const Incarnation& own, bool own_too,
                           LocationCache& locations, RecentCopies& recent, bool unique)
    : keys_(std::move(keys)),
      own_(own),
      own_too_(own_too),
      unique_(unique),
      locations_(locations),
      recent_(recent),
      later_(keys_.size()),
      removed_(keys_.size()),
      own_silent_(keys_.size()),
      witness_silent_(keys_.size()),
      witnessed_(keys_.size()),
      unsure_(keys_.size()),
      taken_(keys_.size()) {
    for (const Hash128& key : keys_) locations_.forget(key);
}

void RemovalSteps::doubt(size_t item, std::string_view nodes) {
    std::string& text = unsure_[item];
    if (!text.empty()) text += ", ";
    text += nodes;
}

// What a node is to be told; null: it is the own one.
NodeItems* RemovalSteps::planned(const Member& member) {
    if (member.identity.incarnation == own_) {
        own_id_ = member.id;
        return nullptr;
    }
    return &planned_.try_emplace(member.identity.incarnation, NodeItems{member, {}}).first->second;
}

void RemovalSteps::ordered(uint64_t now_ms, const Result<OrderAnswer>& answer) {
    if (!answer) {
        wants_ = unique_ ? Wants::kDone : Wants::kMembers;
        no_master_ = answer.error().text;
        return;
    }
    has_master_ = true;
    versions_ = answer->versions;
    const LocateAnswer& at = answer->at;
    for (size_t i = 0; unique_ && i < at.keys.size(); ++i) {
        // A master that does not say names the holders.
        taken_[i] = !answer->taken.empty() ? answer->taken[i]
                    : at.keys[i].empty()   ? Taken::kFree
                                           : Taken::kHeld;
    }
    done_ = OrderDone{keys_, versions_, answer->epoch, {}, {}};
    done_.told.resize(keys_.size());
    done_.placed.resize(keys_.size());
    for (size_t i = 0; i < at.keys.size(); ++i) {
        if (taken_[i] != Taken::kFree) continue;
        for (const Holder& holder : at.keys[i]) {
            const Member* member = at.members->find(holder.node);
            NodeItems* node = member == nullptr ? nullptr : planned(*member);
            if (node == nullptr) continue;
            if (node->items.empty() || node->items.back() != i) node->items.push_back(i);
        }
    }
    // Nodes that the former master knew may have copies, and have not joined this one yet. Clients read there
    // what they know to be there; once such a node joins, it is sent what was removed.
    if (answer->filling && at.members->before != nullptr) everywhere(*at.members->before);
    plan(now_ms, at.members);
}

// The master is away: every node that was in the pool is told.
void RemovalSteps::members(uint64_t now_ms, const Result<std::shared_ptr<const Members>>& answer) {
    for (size_t i = 0; i < keys_.size(); ++i) doubt(i, "nodes that cannot be asked while the master is away");
    if (!answer) {
        wants_ = own_too_ ? Wants::kTell : Wants::kDone;
        return;
    }
    everywhere(**answer);
    plan(now_ms, *answer);
}

void RemovalSteps::everywhere(const Members& known) {
    for (const Member& member : known.rows) {
        NodeItems* node = planned(member);
        if (node == nullptr) continue;
        node->items.clear();
        for (size_t i = 0; i < keys_.size(); ++i) {
            if (taken_[i] == Taken::kFree) node->items.push_back(i);
        }
    }
}

void RemovalSteps::plan(uint64_t now_ms, std::shared_ptr<const Members> known) {
    if (const Member* own = known->find(own_); own != nullptr) {
        own_id_ = own->id;
        own_host_ = own->identity.host_id;
    }
    // And where this client put copies of which the directory has not heard yet.
    for (size_t i = 0; i < keys_.size(); ++i) {
        if (taken_[i] != Taken::kFree) continue;
        std::vector<NodeId> at;
        recent_.find(now_ms, keys_[i], at);
        for (NodeId node : at) {
            const Member* member = known->find(node);
            NodeItems* also = member == nullptr ? nullptr : planned(*member);
            if (also == nullptr || std::ranges::find(also->items, i) != also->items.end()) continue;
            also->items.push_back(i);
        }
    }
    for (auto& [life, node] : planned_) {
        for (size_t i : node.items) recent_.forget(keys_[i], node.member.id);
        // One that is away now is not waited for.
        if (in_touch(node.member.state)) {
            nodes_.push_back(std::move(node));
        } else {
            told(now_ms, node, Error{Code::kUnavailable, "suspect"});
        }
    }
    planned_.clear();
    members_ = std::move(known);
    wants_ = Wants::kTell;
}

// Of each key, as many as are missing: holders in touch, the own node, and where the new bytes are know it by
// now. Nodes of other hosts come first, so that the end of one host does not take both.
std::vector<NodeItems>& RemovalSteps::witnesses() {
    witnesses_.clear();
    if (versions_.empty() || ++witness_rounds_ > kWitnessRounds) return witnesses_;
    std::vector<size_t> missing(keys_.size());
    size_t left = 0;  // of all
    for (size_t i = 0; i < keys_.size(); ++i) {
        if (taken_[i] == Taken::kFree) missing[i] = kKnow - std::min(kKnow, know(i));
        left += missing[i];
    }
    for (bool same_host : {false, true}) {
        for (const Member& member : members_->rows) {
            if (left == 0) return witnesses_;
            bool fits = member.state == MemberState::kAlive && member.identity.incarnation != own_ &&
                        !asked_witnesses_.contains(member.identity.incarnation);
            if (!fits || (member.identity.host_id == own_host_) != same_host) continue;
            NodeItems witness{member, {}};
            for (size_t i = 0; i < keys_.size(); ++i) {
                if (missing[i] == 0 || std::ranges::find(done_.told[i], member.id) != done_.told[i].end())
                    continue;
                witness.items.push_back(i);
                --missing[i];
                --left;
            }
            if (witness.items.empty()) continue;
            asked_witnesses_.insert(member.identity.incarnation);
            witnesses_.push_back(std::move(witness));
        }
    }
    return witnesses_;
}

size_t RemovalSteps::know(size_t item) const {
    return witnessed_[item] + (has_master_ ? done_.told[item].size() : 0);
}

void RemovalSteps::told(uint64_t now_ms, const NodeItems& node, const Result<std::vector<uint8_t>>& flags) {
    if (!flags) {
        unreached_.push_back(node.member.id);
        for (size_t i : node.items) {
            recent_.add(now_ms, keys_[i], node.member.id);  // it may have them still
            doubt(i, "node " + node.member.identity.name + " on " + node.member.identity.host_id);
        }
        return;
    }
    for (size_t k = 0; k < node.items.size(); ++k) {
        size_t i = node.items[k];
        if ((*flags)[k] != 0) removed_[i] = 1;
        if (has_master_ && node.member.id != kNoNode) done_.told[i].push_back(node.member.id);
    }
}

void RemovalSteps::own_told(const Result<std::vector<uint8_t>>& flags) {
    if (!flags) {
        if (own_id_ != kNoNode) unreached_.push_back(own_id_);
        for (size_t i = 0; i < keys_.size(); ++i) doubt(i, "this host's node");
        return;
    }
    for (size_t i = 0; i < keys_.size(); ++i) {
        if ((*flags)[i] != 0) removed_[i] = 1;
        if (has_master_ && own_id_ != kNoNode) done_.told[i].push_back(own_id_);
    }
}

void RemovalSteps::witnessed(const NodeItems& node, const Result<std::vector<uint8_t>>& flags) {
    for (size_t k = 0; k < node.items.size(); ++k) {
        const size_t i = node.items[k];
        if (flags) {
            removed_[i] |= (*flags)[k];
            ++witnessed_[i];
        } else if (flags.error().code == Code::kUnavailable || flags.error().code == Code::kTimeout) {
            witness_silent_[i] = 1;
        }  // else it does not serve this tenant: it will never have a copy
    }
}

void RemovalSteps::all_told() { wants_ = has_master_ ? Wants::kEnd : Wants::kDone; }

void RemovalSteps::placed(size_t item, NodeId node) {
    if (!has_master_ || node == kNoNode) return;
    std::vector<NodeId>& told = done_.told[item];
    if (std::ranges::find(told, node) == told.end()) told.push_back(node);
    done_.placed[item].push_back(node);
}

void RemovalSteps::placed_here(size_t item) { placed(item, own_id_); }

void RemovalSteps::not_answered_here(size_t item) {
    if (!std::exchange(own_silent_[item], uint8_t{1})) doubt(item, "this host's node");
}

std::vector<size_t> RemovalSteps::left_here() const {
    std::vector<size_t> items;
    for (size_t i = 0; i < done_.placed.size() && !own_too_; ++i) {
        const std::vector<NodeId>& at = done_.placed[i];
        if (!at.empty() && own_silent_[i] == 0 && std::ranges::find(at, own_id_) == at.end())
            items.push_back(i);
    }
    return items;
}

void RemovalSteps::own_removed(std::span<const size_t> items, const Result<std::vector<uint8_t>>& flags) {
    for (size_t k = 0; k < items.size(); ++k) {
        const size_t i = items[k];
        if (!flags) {
            not_answered_here(i);
            continue;
        }
        removed_[i] |= (*flags)[k];
        std::vector<NodeId>& told = done_.told[i];
        if (own_id_ != kNoNode && std::ranges::find(told, own_id_) == told.end()) told.push_back(own_id_);
    }
}

void RemovalSteps::ended(const Result<std::vector<Version>>& last) {
    wants_ = Wants::kDone;
    if (!last) {
        for (size_t i = 0; i < keys_.size(); ++i) doubt(i, "nodes that the master has yet to tell");
        return;
    }
    for (size_t i = 0; i < keys_.size(); ++i) {
        if (witness_silent_[i] != 0 && know(i) < kKnow)
            doubt(i, "nodes that restart together with the master");
    }
    // If no node knows of it, it ends with the master.
    acknowledged_ = true;
    for (size_t i = 0; i < keys_.size(); ++i) acknowledged_ &= !done_.told[i].empty() || !is_free(taken_[i]);
    for (size_t i = 0; i < last->size() && i < versions_.size(); ++i) {
        if ((*last)[i] > versions_[i]) later_[i] = (*last)[i];
    }
}

std::vector<NodeItems> RemovalSteps::overtaken_at(std::span<const size_t> items) const {
    std::map<NodeId, NodeItems> nodes;
    for (size_t i : items) {
        for (NodeId id : done_.placed[i]) {
            const Member* member = id == own_id_ ? nullptr : members_->find(id);
            if (member == nullptr) continue;
            NodeItems& node = nodes.try_emplace(id, NodeItems{*member, {}}).first->second;
            if (node.items.empty() || node.items.back() != i) node.items.push_back(i);
        }
    }
    std::vector<NodeItems> all;
    for (auto& [id, node] : nodes) all.push_back(std::move(node));
    return all;
}

void RemovalSteps::overtaken_told(const NodeItems& node, const Result<std::vector<uint8_t>>& flags) {
    if (flags) return;
    for (size_t i : node.items) {
        doubt(i, "node " + node.member.identity.name + " on " + node.member.identity.host_id);
    }
}

}  // namespace moonpool
