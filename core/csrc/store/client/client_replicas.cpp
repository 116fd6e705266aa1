// Client, copies of a put at other hosts.
#include <algorithm>

#include "base/clock.hpp"
#include "memory/copier.hpp"
#include "store/client/client.hpp"
#include "store/client/client_frames.hpp"

namespace moonpool {

// Of objects that were there before, only those with the very bytes of this call are to have more copies.
std::vector<size_t> Client::with_equal_bytes(std::span<const PutItem> items, std::span<const size_t> which) {
    std::vector<std::string_view> names;
    for (size_t i : which) names.push_back(items[i].name);
    Result<std::vector<ObjectState>> there = describe_whole(names, false);
    std::vector<size_t> equal;
    for (size_t k = 0; there && k < which.size(); ++k) {
        if ((*there)[k].copies.empty()) continue;
        const Description& what = (*there)[k].copies.front().what;
        std::span<const MemoryRef> parts = items[which[k]].parts;
        if (what.size != total(parts)) continue;
        if (Result<uint32_t> crc = checksum(parts, what.size); crc && *crc == what.crc)
            equal.push_back(which[k]);
    }
    return equal;
}

void Client::replicate(Pool& pool, std::span<const PutItem> items, const PutOptions& options,
                       std::span<const Named> wanted, PutReport& report) {
    report.copies.assign(items.size(), 0);
    std::vector<size_t> stored, existed;
    for (size_t i = 0; i < items.size(); ++i) {
        if (report.outcomes[i] != PutOutcome::kStored && report.outcomes[i] != PutOutcome::kExists) continue;
        report.copies[i] = 1;
        (report.outcomes[i] == PutOutcome::kStored ? stored : existed).push_back(i);
    }
    if (!existed.empty()) {
        std::vector<size_t> equal = with_equal_bytes(items, existed);
        if (equal.size() != existed.size()) {
            report.short_of_copies = "the key has other bytes than these, which stay";
        }
        stored.insert(stored.end(), equal.begin(), equal.end());
    }
    for (const std::vector<size_t>& chunk : in_chunks(items, stored)) {
        replicate_some(pool, items, options, chunk, wanted, report);
    }
}

// One host after the other gets a copy, until there are enough or no host is left; then other nodes of those.
void Client::replicate_some(Pool& pool, std::span<const PutItem> items, const PutOptions& options,
                            std::span<const size_t> which, std::span<const Named> wanted, PutReport& report) {
    Result<std::shared_ptr<const Members>> members = pool.directory->members();
    if (!members) {
        report.short_of_copies = members.error().text;
        return;
    }
    PlaceOptions where;
    // With the first copy wanted elsewhere, and taken there, the own host may have another.
    bool own_may_have = !wanted.empty() && wanted.front().node != nullptr &&
                        std::ranges::none_of(which, [&](size_t i) { return !!own_has(items[i].name); });
    if (!own_may_have) {
        where.avoid_host_ids.push_back(pool.host_id);
        for (const Member& member : (*members)->rows) {
            if (member.identity.incarnation == pool.own) where.avoid_nodes.push_back(member.id);
        }
    }
    // What was spilled lies elsewhere already: not a second time on that host.
    for (size_t i : which) {
        std::vector<NodeId> at;
        recent_.find(now_ms(), own_.hasher()(items[i].name), at);
        for (NodeId node : at) {
            const Member* member = (*members)->find(node);
            if (member == nullptr || where.avoid_nodes.size() >= 64) continue;
            if (std::ranges::find(where.avoid_nodes, node) != where.avoid_nodes.end()) continue;
            where.avoid_nodes.push_back(node);
            where.avoid_host_ids.push_back(member->identity.host_id);
        }
    }
    std::string why;
    bool same_hosts = false;
    // A node knows of a later removal: others, which may not have heard of it yet, are not asked to take a
    // copy that they would have to drop.
    auto is_void = [&](size_t i) {
        return std::ranges::any_of(report.older, [i](const auto& older) { return older.first == i; });
    };
    auto wanting = [&] {
        std::vector<size_t> left;
        for (size_t i : which) {
            if (report.copies[i] < options.replicas && !is_void(i)) left.push_back(i);
        }
        return left;
    };
    // A node is asked once, whatever it answers; a host once, until same_hosts.
    auto copy_to = [&](NodeClient& to, const Member& member, const std::vector<size_t>& left) {
        where.avoid_nodes.push_back(member.id);
        std::vector<PutItem> batch;
        for (size_t i : left) batch.push_back(items[i]);
        Result<PutReport> put = to.put(batch, how(options, report, true));
        if (!put) {
            why = put.error().text;
            return;
        }
        if (!same_hosts) where.avoid_host_ids.push_back(member.identity.host_id);
        for (size_t k = 0; k < left.size(); ++k) {
            PutOutcome outcome = put->outcomes[k];
            if (outcome == PutOutcome::kRefused || outcome == PutOutcome::kOlder) {
                why = outcome == PutOutcome::kOlder ? "the key was replaced meanwhile" : put->refusal;
                if (outcome == PutOutcome::kOlder) report.older.emplace_back(left[k], kNoVersion);
                continue;
            }
            if (outcome == PutOutcome::kStored) report.placed.emplace_back(left[k], member.id);
            ++report.copies[left[k]];
            recent_.add(now_ms(), own_.hasher()(items[left[k]].name), member.id);
        }
    };
    auto copy_to_wanted = [&] {
        for (const Named& at : wanted) {
            std::vector<size_t> left = wanting();
            const Member* own = (*members)->find(pool.own);
            const Member* member = at.node == nullptr ? own : &at.member;
            if (left.empty() || member == nullptr) continue;
            if (std::ranges::find(where.avoid_host_ids, member->identity.host_id) !=
                where.avoid_host_ids.end())
                continue;
            if (std::ranges::find(where.avoid_nodes, member->id) != where.avoid_nodes.end()) continue;
            copy_to(at.node == nullptr ? own_ : *at.node, *member, left);
        }
    };
    // Which nodes are left, the master says. False: it does not answer.
    auto copy_to_any = [&](bool evict) {
        where.evict = evict;
        for (std::vector<size_t> left = wanting(); !left.empty(); left = wanting()) {
            uint64_t bytes = 0;
            for (size_t i : left) bytes += total(items[i].parts);
            Result<std::vector<NodeId>> placed = pool.directory->place(bytes, 1, where);
            if (!placed) {
                report.short_of_copies = placed.error().text;
                return false;
            }
            if (placed->empty()) break;
            const Member* member = (*members)->find(placed->front());
            if (member == nullptr) {  // it has joined a moment ago
                if (auto fresh = pool.directory->members(true)) members = std::move(fresh);
                member = (*members)->find(placed->front());
            }
            if (member == nullptr) {
                where.avoid_nodes.push_back(placed->front());
                continue;
            }
            copy_to(*node(pool, *member), *member, left);
        }
        return true;
    };
    copy_to_wanted();
    for (bool evict : {false, true}) {
        if (evict && !options.copies_evict) continue;
        if (!copy_to_any(evict)) return;
    }
    // Where no host is left, another process of a host that has one: it survives the death of the first.
    if (options.copies_on_same_host) {
        same_hosts = true;
        where.avoid_host_ids.clear();
        copy_to_wanted();
    }
    for (bool evict : {false, true}) {
        if (!same_hosts || (evict && !options.copies_evict)) continue;
        if (!copy_to_any(evict)) return;
    }
    if (wanting().empty() && report.older.empty()) return;
    report.short_of_copies = why.empty() ? "there are not enough other hosts and nodes in the pool" : why;
}

}  // namespace moonpool
