#include "store/client/holders.hpp"

#include <algorithm>

namespace moonpool {

const Member* nearest(const OwnPlace& place, const Members& members, const Hash128& key,
                      std::span<const Holder> holders, std::span<const NodeId> tried, uint64_t salt) {
    const Member* best = nullptr;
    uint64_t best_cost = UINT64_MAX;
    for (size_t i = 0; i < holders.size(); ++i) {
        if (std::ranges::find(tried, holders[i].node) != tried.end()) continue;
        const Member* member = members.find(holders[i].node);
        if (member == nullptr || members.state(*member, key) != MemberState::kAlive) continue;
        uint64_t cost = 2;
        if (member->identity.incarnation == place.own) {
            cost = 0;
        } else if (!place.host_id.empty() && member->identity.host_id == place.host_id) {
            cost = 1;
        }
        cost = cost * 2 + static_cast<uint64_t>(holders[i].tier != Tier::kDram);
        cost = cost * 256 + (salt + i) % holders.size() % 256;
        if (cost < best_cost) {
            best = member;
            best_cost = cost;
        }
    }
    return best;
}

const Member* known_place(LocationCache& locations, const Members& members, const Hash128& hash) {
    std::optional<Incarnation> life = locations.find(hash);
    const Member* member = life ? members.find(*life) : nullptr;
    bool alive = member != nullptr && members.state(*member, hash) == MemberState::kAlive;
    return alive ? member : nullptr;
}

}  // namespace moonpool
