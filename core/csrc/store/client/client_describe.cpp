// Client, asking what objects are, without reading them and without a use of them.
#include <algorithm>
#include <iterator>
#include <map>
#include <tuple>

#include "base/clock.hpp"
#include "base/mutex.hpp"
#include "store/client/client.hpp"
#include "store/client/client_frames.hpp"

namespace moonpool {

Result<std::vector<ObjectState>> Client::describe(std::span<const std::string_view> names, bool everywhere) {
    WaitBudget budget(wait_budget_ms());
    Result<std::vector<ObjectState>> states = describe_whole(names, everywhere);
    std::vector<size_t> manifest_sized;
    std::vector<std::string_view> asked;
    for (size_t i = 0; states && i < names.size(); ++i) {
        if ((*states)[i].copies.empty() || (*states)[i].size != kManifestBytes) continue;
        manifest_sized.push_back(i);
        asked.push_back(names[i]);
    }
    if (asked.empty() || pool() == nullptr) return states;
    Result<std::vector<Standing>> objects = standing(asked);
    if (!objects) return states;
    std::vector<std::string> stripes;
    for (size_t k = 0; k < asked.size(); ++k) {
        const std::optional<Manifest>& manifest = (*objects)[k].manifest;
        if (manifest) std::ranges::move(manifest->stripe_names(), std::back_inserter(stripes));
    }
    std::vector<std::string_view> stripe_names(stripes.begin(), stripes.end());
    Result<std::vector<ObjectState>> parts = describe_whole(stripe_names, false);
    if (!parts) return parts.error();
    auto part = parts->begin();
    for (size_t k = 0; k < asked.size(); ++k) {
        const std::optional<Manifest>& manifest = (*objects)[k].manifest;
        if (!manifest) continue;
        auto end = part + static_cast<std::ptrdiff_t>(std::min(manifest->stripes(), kStripesMax));
        bool lost = std::any_of(part, end, [](const ObjectState& stripe) { return stripe.copies.empty(); });
        part = end;
        ObjectState& state = (*states)[manifest_sized[k]];
        state.size = manifest->size;
        if (lost || !manifest->within_limits()) state = ObjectState{};
    }
    return states;
}

Result<std::vector<ObjectState>> Client::describe_whole(std::span<const std::string_view> names,
                                                        bool everywhere) {
    Result<std::vector<Description>> own = own_.describe(names);
    std::shared_ptr<Pool> others = pool();
    if (!own && (others == nullptr || !no_answer(own.error()))) return own.error();
    std::vector<ObjectState> states(names.size());
    // Why a key without a copy may have one all the same.
    std::vector<std::string> doubt(names.size(), own ? "" : own.error().text);
    std::shared_ptr<Session> session = own_.current();
    for (size_t i = 0; own && i < names.size(); ++i) {
        if ((*own)[i].where == 0) continue;
        if (session == nullptr) {
            doubt[i] = "the own node went away";
            continue;
        }
        states[i].copies.push_back({session->node_name(), session->host_id(), session->address(), (*own)[i]});
    }
    if (others != nullptr) {
        std::vector<size_t> which;
        for (size_t i = 0; i < names.size(); ++i) {
            if (everywhere || states[i].copies.empty()) which.push_back(i);
        }
        if (!which.empty()) describe_elsewhere(*others, names, which, states, doubt);
    }
    for (size_t i = 0; i < names.size(); ++i) {
        std::vector<Copy>& copies = states[i].copies;
        if (copies.empty() && !doubt[i].empty()) {
            return Error{Code::kUnavailable,
                         "no node says whether " + std::string(names[i]) + " is there: " + doubt[i]};
        }
        if (copies.empty()) continue;
        states[i].size = copies.front().what.size;
    }
    return states;
}

void Client::describe_elsewhere(Pool& pool, std::span<const std::string_view> names,
                                std::span<const size_t> which, std::vector<ObjectState>& states,
                                std::vector<std::string>& doubt) {
    std::vector<std::string_view> wanted;
    for (size_t i : which) wanted.push_back(names[i]);
    std::vector<Hash128> asked = hashes(wanted);
    std::vector<std::ptrdiff_t> own_copies;
    for (const ObjectState& state : states) own_copies.push_back(std::ssize(state.copies));
    LocateOptions question;
    question.suspects = true;  // they may have it, and would have to answer before it is a miss
    Result<LocateAnswer> located = pool.directory->locate(asked, question);
    std::shared_ptr<const Members> members;
    if (located) {
        members = located->members;
    } else if (auto last = pool.directory->members()) {
        members = *last;
    }
    for (size_t k = 0; k < which.size(); ++k) {
        const Error* unknown = located ? located->unknown(asked[k]) : &located.error();
        if (unknown != nullptr) {
            doubt[which[k]] = unknown->text;
        } else if (members->is_filling(asked[k])) {
            doubt[which[k]] = "the master has just started";
        }
    }
    if (members == nullptr) return;
    std::map<NodeId, Group> groups;
    auto ask = [&](const Member* member, size_t item, const Hash128& hash) {
        if (member == nullptr || member->identity.incarnation == pool.own) return;
        if (members->state(*member, hash) != MemberState::kAlive) {
            doubt[item] = "the node at " + member->identity.address + " is silent";
            return;
        }
        Group& group = groups[member->id];
        group.member = *member;
        if (group.items.empty() || group.items.back() != item) group.items.push_back(item);
    };
    for (size_t k = 0; k < which.size(); ++k) {
        std::vector<NodeId> at;
        if (located) {
            for (const Holder& holder : located->keys[k]) at.push_back(holder.node);
        }
        // Where this client put copies of which the directory has not heard yet.
        recent_.find(now_ms(), asked[k], at);
        for (NodeId node : at) ask(members->find(node), which[k], asked[k]);
        if (at.empty()) ask(known_place(locations_, *members, asked[k]), which[k], asked[k]);
    }
    std::vector<Group> work;
    for (auto& [id, group] : groups) work.push_back(std::move(group));
    Mutex merging;
    each(work, [&](Group& group) {
        std::vector<std::string_view> keys;
        for (size_t i : group.items) keys.push_back(names[i]);
        Result<std::vector<Description>> found = node(pool, group.member)->describe(keys);
        const NodeIdentity& at = group.member.identity;
        MutexLock lock(merging);
        for (size_t k = 0; k < group.items.size(); ++k) {
            if (!found) {
                doubt[group.items[k]] = found.error().text;
            } else if ((*found)[k].where != 0) {
                states[group.items[k]].copies.push_back({at.name, at.host_id, at.address, (*found)[k]});
            }
        }
    });
    // The own node's stands first already; the others answered in any order.
    for (size_t i = 0; i < states.size(); ++i) {
        auto rest = states[i].copies.begin() + own_copies[i];
        std::ranges::sort(rest, states[i].copies.end(), {},
                          [](const Copy& copy) { return std::tie(copy.host_id, copy.node, copy.address); });
    }
}

}  // namespace moonpool
