// Client, asking: what is here or elsewhere, and pinning it where it lies.
//
// Threads: the caller's, and those of each() for several nodes at once; `merging` guards what they add to
// one answer. No lock is held while a node or the master is asked.
//
// The directory hints, the holder decides: a place from the directory or from locations_ only says whom to
// ask, so a stale one costs a question, and a hit always comes from a node that has the object, pinned
// where that was asked for. The opposite of a hit is kMiss only where every node that may have it was
// reached, else kUnknown: an engine that is told "miss" computes, one that is told "unknown" may ask
// again.
//
// Objects of a manifest's size may be striped. The functions named ..._whole treat them like any other;
// the public ones look behind them, so only those give an object's real state.
#include <algorithm>
#include <map>
#include <numeric>

#include "base/mutex.hpp"
#include "store/client/client.hpp"
#include "store/client/client_frames.hpp"

namespace moonpool {

Result<Pinned> Client::pin(std::span<const std::string_view> names) {
    WaitBudget budget(wait_budget_ms());
    std::string why;
    Result<Pinned> pinned = pin_whole(names, why);
    if (pinned && pool() != nullptr) pin_striped(*pinned, names, why);
    return pinned;
}

Result<Pinned> Client::pin_whole(std::span<const std::string_view> names, std::string& why) {
    Result<Pinned> pinned = own_.pin(names);
    std::shared_ptr<Pool> others = pool();
    if (others == nullptr) return pinned;
    bool own_answered = pinned.ok();
    Error own_error;
    if (!own_answered) {
        // A mistake of the caller's is the same at every node.
        if (!no_answer(pinned.error())) return pinned;
        own_error = pinned.error();
        Pinned nothing;
        nothing.descriptors.resize(names.size());
        nothing.under.assign(names.size(), kNoPin);
        pinned = std::move(nothing);
    }
    std::vector<size_t> missing;
    for (size_t i = 0; i < names.size(); ++i) {
        if (!pinned->has(i)) missing.push_back(i);
    }
    if (missing.empty()) return pinned;
    pin_elsewhere(*others, names, missing, *pinned, why);
    // With the own node away, a miss everywhere else is not known to be a miss.
    for (size_t i = 0; !own_answered && i < names.size(); ++i) {
        if (!pinned->has(i)) return own_error;
    }
    return pinned;
}

void Client::pin_elsewhere(Pool& pool, std::span<const std::string_view> names,
                           std::span<const size_t> missing, Pinned& pinned, std::string& why) {
    std::vector<size_t> left(missing.begin(), missing.end());
    std::map<size_t, std::vector<NodeId>> tried;
    Mutex merging;
    for (size_t attempt = 0; attempt < kAttemptsMax && !left.empty(); ++attempt) {
        std::vector<std::string_view> wanted;
        for (size_t i : left) wanted.push_back(names[i]);
        std::vector<Hash128> asked = hashes(wanted);
        Result<LocateAnswer> located = pool.directory->locate(asked);
        std::shared_ptr<const Members> members;
        if (located) {
            members = located->members;
        } else {
            why = located.error().text;
            // Without the master the nodes are still there, and this client knows where it put or found
            // things.
            if (auto last = pool.directory->members()) members = *last;
            if (members == nullptr) return;
        }
        std::map<Incarnation, Group> groups;
        for (size_t k = 0; k < asked.size(); ++k) {
            if (const Error* unknown = located ? located->unknown(asked[k]) : nullptr) why = unknown->text;
            const Member* member =
                located ? nearest(pool, *members, asked[k], located->keys[k], tried[left[k]], asked[k].low)
                        : nullptr;
            // Where this client put it a moment ago, or found it before.
            if (member == nullptr) {
                member = known_place(locations_, *members, asked[k]);
                const std::vector<NodeId>& asked_before = tried[left[k]];
                if (member != nullptr && std::ranges::find(asked_before, member->id) != asked_before.end())
                    member = nullptr;
            }
            if (member == nullptr) continue;
            tried[left[k]].push_back(member->id);
            Group& group = groups[member->identity.incarnation];
            group.member = *member;
            group.items.push_back(left[k]);
        }
        std::vector<Group> work;
        for (auto& [id, group] : groups) work.push_back(std::move(group));
        std::vector<size_t> again;
        each(work, [&](Group& group) {
            std::vector<std::string_view> keys;
            for (size_t i : group.items) keys.push_back(names[i]);
            // The own node may have got it since it was asked first.
            Result<Pinned> got = group.member.identity.incarnation == pool.own
                                     ? own_.pin(keys)
                                     : node(pool, group.member)->pin(keys);
            MutexLock lock(merging);
            if (!got) {
                why = got.error().text;
                again.insert(again.end(), group.items.begin(), group.items.end());
                return;
            }
            if (!got->why.empty()) why = got->why;
            // Each node numbers its pins from 0.
            auto base = static_cast<uint32_t>(pinned.pins.size());
            for (size_t k = 0; k < group.items.size(); ++k) {
                if (!got->has(k)) {
                    again.push_back(group.items[k]);
                    continue;
                }
                locations_.put(own_.hasher()(keys[k]), group.member.identity.incarnation);
                pinned.descriptors[group.items[k]] = got->descriptors[k];
                pinned.under[group.items[k]] = base + got->under[k];
            }
            for (auto& pin : got->pins) pinned.pins.push_back(std::move(pin));
        });
        // What a holder did not have, or did not answer, goes to the next holder; `tried` keeps it from
        // the same one.
        left = std::move(again);
    }
}

Result<std::vector<Presence>> Client::exists(std::span<const std::string_view> names) {
    WaitBudget budget(wait_budget_ms());
    std::vector<size_t> manifest_sized;
    Result<std::vector<Presence>> present = exists_whole(names, false, manifest_sized);
    if (!present || manifest_sized.empty() || pool() == nullptr) return present;
    std::vector<std::string_view> striped;
    for (size_t i : manifest_sized) striped.push_back(names[i]);
    std::vector<Presence> whole = this->whole(striped);
    for (size_t k = 0; k < whole.size(); ++k) (*present)[manifest_sized[k]] = whole[k];
    return present;
}

Result<std::vector<Presence>> Client::exists_whole(std::span<const std::string_view> names, bool use,
                                                   std::vector<size_t>& manifest_sized) {
    Result<std::vector<uint8_t>> own = own_.exists(names, use);
    std::shared_ptr<Pool> others = pool();
    if (!own && (others == nullptr || !no_answer(own.error()))) return own.error();
    // Without others a miss of the own node is one; with them it is what is left after all were asked.
    std::vector<Presence> present(names.size(), own ? Presence::kMiss : Presence::kUnknown);
    std::vector<std::string_view> wanted;
    std::vector<size_t> place;
    for (size_t i = 0; i < names.size(); ++i) {
        if (own && (*own)[i] != 0) {
            present[i] = Presence::kHit;
            if ((*own)[i] == NodeClient::kManifestSized) manifest_sized.push_back(i);
        } else {
            wanted.push_back(names[i]);
            place.push_back(i);
        }
    }
    if (others == nullptr || wanted.empty()) return present;
    LocateOptions question;
    question.suspects = true;  // they may have it, and would have to answer before it is a miss
    const std::vector<Hash128> asked = hashes(wanted);
    Result<LocateAnswer> located = others->directory->locate(asked, question);
    if (!located) {
        for (size_t i : place) present[i] = Presence::kUnknown;
        return present;
    }
    std::vector<NodeId> own_id;  // it has just said that it has not got it, and the directory may be behind
    for (const Member& member : located->members->rows) {
        if (own && member.identity.incarnation == others->own) own_id.push_back(member.id);
    }
    for (size_t k = 0; k < wanted.size(); ++k) {
        // A new master has not heard of every node yet: the holder may be unknown to it.
        bool unknown = located->members->is_filling(asked[k]) || located->unknown(asked[k]) != nullptr;
        for (const Holder& holder : located->keys[k]) {
            const Member* silent = located->members->find(holder.node);
            unknown |= silent != nullptr &&
                       located->members->state(*silent, asked[k]) != MemberState::kAlive &&
                       !(own && silent->identity.incarnation == others->own);
        }
        if (unknown) present[place[k]] = Presence::kUnknown;
    }
    // The directory may be some milliseconds behind: the holder has the last word, or the next holder.
    std::vector<size_t> left(wanted.size());
    std::iota(left.begin(), left.end(), 0);
    std::map<size_t, std::vector<NodeId>> tried;  // of keys with several holders, but for own_id
    Mutex merging;
    for (size_t attempt = 0; attempt < kAttemptsMax && !left.empty(); ++attempt) {
        std::map<Incarnation, Group> groups;
        for (size_t k : left) {
            if (present[place[k]] == Presence::kHit) continue;
            std::span<const NodeId> avoid = attempt == 0 ? std::span<const NodeId>(own_id) : tried[k];
            const Member* member = nearest(*others, *located->members, asked[k], located->keys[k], avoid, k);
            if (member == nullptr && attempt == 0) {
                member = known_place(locations_, *located->members, asked[k]);
            }
            if (member == nullptr) continue;
            if (located->keys[k].size() > 1) {
                std::vector<NodeId>& nodes = tried.try_emplace(k, own_id).first->second;
                nodes.push_back(member->id);
            }
            Group& group = groups[member->identity.incarnation];
            group.member = *member;
            group.items.push_back(k);
        }
        left.clear();
        for (const auto& [k, nodes] : tried) left.push_back(k);
        std::vector<Group> work;
        for (auto& [id, group] : groups) work.push_back(std::move(group));
        each(work, [&](Group& group) {
            std::vector<std::string_view> keys;
            for (size_t k : group.items) keys.push_back(wanted[k]);
            Result<std::vector<uint8_t>> flags = node(*others, group.member)->exists(keys, use);
            MutexLock lock(merging);
            for (size_t j = 0; j < keys.size(); ++j) {
                size_t at = place[group.items[j]];
                if (!flags) {
                    present[at] = Presence::kUnknown;
                } else if ((*flags)[j] != 0) {
                    present[at] = Presence::kHit;
                    if ((*flags)[j] == NodeClient::kManifestSized) manifest_sized.push_back(at);
                }
            }
        });
    }
    return present;
}

Result<Prefix> Client::longest_prefix(std::span<const std::string_view> names, uint32_t width, bool pin) {
    WaitBudget budget(wait_budget_ms());
    Result<Prefix> prefix = prefix_whole(names, width, pin);
    if (!prefix || pool() == nullptr) return prefix;
    std::vector<size_t> manifest_sized;
    std::vector<std::string_view> striped;
    for (size_t i = 0; i < prefix->descriptors.size(); ++i) {
        if (prefix->descriptors[i].size != kManifestBytes) continue;
        manifest_sized.push_back(i);
        striped.push_back(names[i]);
    }
    if (striped.empty()) return prefix;
    std::vector<Presence> whole;
    if (pin) {
        pin_striped(*prefix, names, prefix->why);
        for (size_t i : manifest_sized) whole.push_back(prefix->has(i) ? Presence::kHit : Presence::kMiss);
    } else {
        whole = this->whole(striped);
    }
    // A block counts only when all its objects can be read.
    auto gap = std::ranges::find_if(whole, [](Presence is) { return is != Presence::kHit; });
    if (gap == whole.end()) return prefix;
    prefix->blocks = manifest_sized[static_cast<size_t>(gap - whole.begin())] / width;
    prefix->descriptors.resize(prefix->blocks * width);
    prefix->under.resize(prefix->blocks * width);
    std::erase_if(prefix->striped, [&](const auto& pins) { return pins.first >= prefix->under.size(); });
    if (!pin) prefix->found_at.resize(prefix->blocks);
    return prefix;
}

Result<Prefix> Client::prefix_whole(std::span<const std::string_view> names, uint32_t width, bool pin) {
    Result<Prefix> own = own_.longest_prefix(names, width, pin);
    std::shared_ptr<Session> session = own_.current();
    if (own && !pin && session != nullptr) {
        own->found_at.assign(own->blocks, {session->node_name(), session->host_id()});
    }
    std::shared_ptr<Pool> others = pool();
    if (others == nullptr) return own;
    Prefix prefix;
    if (own) {
        prefix = std::move(*own);
    } else if (no_answer(own.error()) && width != 0 && names.size() % width == 0) {
        prefix.why = own.error().text;
    } else {
        return own;
    }
    // Only what follows the own node's prefix is asked of others: engines read the own node's blocks
    // without a copy over the network.
    size_t have = prefix.blocks * width;
    if (have == names.size()) return prefix;
    std::span<const std::string_view> rest = names.subspan(have);
    LocateOptions question;
    question.prefix = true;
    question.width = static_cast<uint16_t>(width);
    const std::vector<Hash128> asked = hashes(rest);
    Result<LocateAnswer> located = others->directory->locate(asked, question);
    if (!located) {
        prefix.why = located.error().text;
        return prefix;
    }
    size_t more = located->keys.size() / width * width;
    // A short prefix costs the engine computing: it says why there may be more.
    if (located->members->before != nullptr && more != rest.size()) {
        prefix.why = "the master has just started, and does not know yet what all nodes hold";
    }
    if (more != rest.size() && !located->unreached.empty())
        prefix.why = located->unreached.begin()->second.text;
    for (const Member& member : located->members->rows) {
        bool away = !located->members->is_alive(member) && more != rest.size() && prefix.why.empty();
        if (away) prefix.why = "the node at " + member.identity.address + " is silent";
    }
    if (more == 0) return prefix;
    prefix.descriptors.resize(have + more);
    prefix.under.resize(have + more, kNoPin);
    if (pin) {
        std::vector<size_t> missing(more);
        std::iota(missing.begin(), missing.end(), have);
        pin_elsewhere(*others, names, missing, prefix, prefix.why);
        // Holders pin in parallel and may each lose some. A prefix has no gaps: it ends at the first block
        // of which one object has no pin.
        while (more != 0) {
            size_t gap = have;
            while (gap < have + more && prefix.has(gap)) ++gap;
            if (gap == have + more) break;
            more = (gap - have) / width * width;
        }
        prefix.descriptors.resize(have + more);
        prefix.under.resize(have + more);
    } else {
        // The holders say what is there, and what may be striped and have lost a stripe.
        std::vector<size_t> manifest_sized;
        Result<std::vector<Presence>> present = exists_whole(rest.first(more), false, manifest_sized);
        if (present) {
            auto gap = std::ranges::find_if(*present, [](Presence is) { return is != Presence::kHit; });
            more = static_cast<size_t>(gap - present->begin()) / width * width;
        } else {
            prefix.why = present.error().text;
            more = 0;
        }
        prefix.descriptors.resize(have + more);
        prefix.under.resize(have + more);
        for (size_t k : manifest_sized) {
            if (k < more) prefix.descriptors[have + k].size = kManifestBytes;
        }
        for (size_t k = 0; k < more; k += width) {
            const Member* member = nearest(*others, *located->members, asked[k], located->keys[k], {}, k);
            if (member == nullptr) {
                prefix.found_at.emplace_back();
            } else {
                prefix.found_at.emplace_back(member->identity.name, member->identity.host_id);
            }
        }
    }
    prefix.blocks += more / width;
    return prefix;
}

}  // namespace moonpool
