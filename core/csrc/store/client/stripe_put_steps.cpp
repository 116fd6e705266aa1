#include "store/client/stripe_put_steps.hpp"

#include <algorithm>
#include <string>
#include <utility>

namespace moonpool {

namespace {

constexpr size_t kSpreadRoundsMax = 4;  // for what a node refuses, the next ones

// Of a stripe that has copies at the nodes `at`: the next to ask, of another host than these where there is
// one that was not asked; nodes.size(): all were. The search begins at `first`.
size_t next_node(std::span<const NodeItems> nodes, size_t first, std::span<const size_t> at,
                 std::span<const size_t> tried) {
    auto host = [&](size_t node) -> const std::string& { return nodes[node].member.identity.host_id; };
    for (bool same_host : {false, true}) {
        for (size_t k = 0; k < nodes.size(); ++k) {
            size_t node = (first + k) % nodes.size();
            if (std::ranges::find(tried, node) != tried.end()) continue;
            bool has = std::ranges::any_of(at, [&](size_t other) { return host(other) == host(node); });
            if (!has || same_host) return node;
        }
    }
    return nodes.size();
}

}  // namespace

// Those that are alive. Where there is none, those that join: while all nodes meet a new master, each may
// have yet to drop what is older, and stripes are new.
std::vector<NodeItems> SpreadSteps::takers(const Members& members) {
    std::vector<NodeItems> nodes;
    for (MemberState state : {MemberState::kAlive, MemberState::kJoining}) {
        for (const Member& member : members.rows) {
            if (member.state == state) nodes.push_back({member, {}});
        }
        if (!nodes.empty()) break;
    }
    return nodes;
}

SpreadSteps::SpreadSteps(std::vector<NodeItems> nodes, Places at, uint32_t copies)
    : nodes_(std::move(nodes)), at_(std::move(at)), tried_(at_), copies_(copies) {
    next_round();
}

void SpreadSteps::next_round() {
    for (NodeItems& node : nodes_) node.items.clear();
    bool any = false;
    for (size_t i = 0; i < at_.size() && rounds_ < kSpreadRoundsMax; ++i) {
        std::vector<size_t> chosen = at_[i];
        while (chosen.size() < copies_) {
            size_t node = next_node(nodes_, i, chosen, tried_[i]);
            if (node == nodes_.size()) break;
            chosen.push_back(node);
            tried_[i].push_back(node);
            nodes_[node].items.push_back(i);
            any = true;
        }
    }
    ++rounds_;
    wants_ = any ? Wants::kPut : Wants::kSpread;
}

bool SpreadSteps::put(const NodeItems& node, size_t item, PutOutcome outcome) {
    if (outcome != PutOutcome::kStored && outcome != PutOutcome::kExists) return false;
    at_[item].push_back(number(node));
    return true;
}

void SpreadSteps::all_put() { next_round(); }

std::vector<size_t> SpreadSteps::left() const {
    std::vector<size_t> left;
    for (size_t i = 0; i < at_.size(); ++i) {
        if (at_[i].empty()) left.push_back(i);
    }
    return left;
}

// Where there is too little room, the last stripes took the place of the first ones.
void SpreadSteps::confirm() {
    for (NodeItems& node : nodes_) node.items.clear();
    for (size_t i = 0; i < at_.size(); ++i) {
        for (size_t node : at_[i]) nodes_[node].items.push_back(i);
    }
    wants_ = Wants::kConfirm;
}

bool SpreadSteps::kept(const NodeItems& node, const Result<std::vector<uint8_t>>& flags) {
    bool all = true;
    for (size_t k = 0; k < node.items.size(); ++k) {
        if (flags && (*flags)[k] != 0) continue;
        std::erase(at_[node.items[k]], number(node));
        all = false;
    }
    return all;
}

void StripePutSteps::looked(const Result<std::vector<Presence>>& here, bool is_manifest_sized) {
    if (wants_ == Wants::kLookAgain) {
        // Its stripes were freed with it, unless a node is away: then its manifest stands there still.
        replaces_ = is_manifest_sized;
        wants_ = Wants::kSpread;
    } else if (!here || here->front() != Presence::kHit) {
        wants_ = Wants::kSpread;
    } else if (is_manifest_sized) {
        wants_ = Wants::kWhole;
    } else {
        whole(Presence::kHit);
    }
}

void StripePutSteps::whole(Presence is) {
    if (is != Presence::kHit) {
        wants_ = Wants::kLookAgain;
        return;
    }
    outcome_ = PutOutcome::kExists;
    was_there_ = true;
    wants_ = Wants::kDone;
}

void StripePutSteps::spread(std::span<const size_t> left) {
    wants_ = left.empty() ? Wants::kConfirm : Wants::kElsewhere;
}

void StripePutSteps::put_elsewhere(std::vector<uint8_t> elsewhere) {
    elsewhere_ = std::move(elsewhere);
    wants_ = Wants::kConfirm;
}

void StripePutSteps::confirmed(const SpreadSteps::Places& at) {
    copies_ = SIZE_MAX;
    for (size_t i = 0; i < at.size(); ++i) {
        const bool elsewhere = !elsewhere_.empty() && elsewhere_[i] != 0;
        copies_ = std::min(copies_, at[i].size() + (elsewhere ? 1 : 0));
    }
    wants_ = copies_ == 0 ? Wants::kFree : Wants::kManifest;
}

// Not stored: the stripes are of no object. Another stands under the key, or none.
void StripePutSteps::manifest_put(PutOutcome outcome) {
    outcome_ = outcome;
    wants_ = outcome == PutOutcome::kStored ? Wants::kDone : Wants::kFree;
}

}  // namespace moonpool
