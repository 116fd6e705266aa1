// Client, over all nodes: removing every copy of an object, and listing.
#include <algorithm>
#include <climits>
#include <optional>
#include <unordered_set>

#include "base/clock.hpp"
#include "base/mutex.hpp"
#include "store/client/client.hpp"
#include "store/client/client_frames.hpp"
#include "store/client/removal_steps.hpp"

namespace moonpool {

namespace {

// Other threads' questions to the master wait as long.
constexpr int kWitnessMs = 500;

}  // namespace

Result<RemoveReport> Client::remove(std::span<const std::string_view> names) {
    WaitBudget budget(wait_budget_ms());
    std::vector<RemovedManifest> manifests;
    std::shared_ptr<Pool> others = pool();
    if (others == nullptr) {
        Result<std::vector<uint8_t>> removed = own_.remove(names, manifests);
        others = pool();  // the first call of all finds out
        if (others == nullptr || (!removed && !no_answer(removed.error()))) {
            if (!removed) return removed.error();
            return RemoveReport{std::move(*removed), {}};
        }
    }
    if (Status may = own_.check_may_write(); !may) return may.error();
    Status fit = own_.check_names(names);
    if (!fit && !no_answer(fit.error())) return fit.error();
    RemoveReport report;
    report.flags.resize(names.size());
    std::vector<std::string> unsure(names.size());
    bool any_unsure = false;
    // Each range of shards has an order of its own.
    for (const std::vector<size_t>& which : others->directory->by_range(hashes(names))) {
        std::vector<std::string_view> some;
        for (size_t i : which) some.push_back(names[i]);
        RemovalSteps steps(hashes(some), others->own, true, locations_, recent_);
        std::vector<RemovedManifest> shown;
        tell_removal(*others, some, steps, shown);
        end_removal(*others, some, steps);
        for (size_t k = 0; k < which.size(); ++k) {
            unsure[which[k]] = steps.unsure(k);
            any_unsure |= !steps.unsure(k).empty();
            report.flags[which[k]] = steps.unsure(k).empty() ? steps.removed()[k] : 2;
        }
        for (RemovedManifest& manifest : shown) {
            manifest.item = which[manifest.item];
            manifests.push_back(manifest);
        }
    }
    if (any_unsure) report.unsure = std::move(unsure);
    std::vector<Manifest> striped;
    for (const RemovedManifest& manifest : manifests) add_genuine(names[manifest.item], manifest, striped);
    remove_stripes(*others, striped);
    return report;
}

Result<std::vector<uint8_t>> Client::remove_at(std::span<const std::string_view> names, std::string_view node,
                                               std::span<const uint64_t> generations) {
    WaitBudget budget(wait_budget_ms());
    Result<Named> at = named(node);
    if (!at) return at.error();
    std::vector<RemovedManifest> manifests;
    Result<std::vector<uint8_t>> removed =
        (at->node == nullptr ? &own_ : at->node.get())->remove(names, manifests, generations);
    if (!removed) return removed;
    std::vector<Hash128> asked = hashes(names);
    for (size_t i = 0; i < asked.size(); ++i) {
        locations_.forget(asked[i]);
        if ((*removed)[i] != 0 && at->node != nullptr) recent_.forget(asked[i], at->member.id);
    }
    // The stripes of an object go with the last copy of its manifest. They stay when a node that may have one
    // is silent now, or cannot be asked.
    std::vector<Manifest> striped;
    for (const RemovedManifest& manifest : manifests) {
        std::span<const std::string_view> name = names.subspan(manifest.item, 1);
        Result<std::vector<Presence>> left = exists(name);
        if (!left || left->front() != Presence::kMiss || held_by_a_suspect(name.front())) continue;
        add_genuine(name.front(), manifest, striped);
    }
    if (std::shared_ptr<Pool> others = pool(); others != nullptr) remove_stripes(*others, striped);
    return removed;
}

// Whether the master names a holder that does not answer it, or names none because the master is away.
bool Client::held_by_a_suspect(std::string_view name) {
    std::shared_ptr<Pool> others = pool();
    if (others == nullptr) return false;
    LocateOptions question;
    question.suspects = true;
    const Hash128 hash = own_.hasher()(name);
    Result<LocateAnswer> located = others->directory->locate({&hash, 1}, question);
    if (!located) return true;
    return std::ranges::any_of(located->keys[0], [&](const Holder& holder) {
        const Member* member = located->members->find(holder.node);
        return member != nullptr && located->members->state(*member, hash) != MemberState::kAlive;
    });
}

// Drives RemovalSteps, which decide what is asked of whom, until all nodes that have a copy are told.
void Client::tell_removal(Pool& pool, std::span<const std::string_view> names, RemovalSteps& steps,
                          std::vector<RemovedManifest>& manifests) {
    using Wants = RemovalSteps::Wants;
    steps.ordered(now_ms(), pool.directory->order(steps.keys(), steps.placing(), steps.unique()));
    if (steps.wants() == Wants::kMembers) steps.members(now_ms(), pool.directory->members());
    if (steps.wants() == Wants::kDone) return;
    if (steps.tells_own()) steps.own_told(own_.remove_older(names, steps.versions(), manifests));
    Mutex merging;
    // The master must hear of those that did not answer.
    std::optional<WaitBudget> most(std::in_place, WaitBudget::of_one_peer(WaitBudget::within(INT_MAX)));
    each(steps.nodes(), [&](Group& group) {
        std::vector<RemovedManifest> shown;
        Result<std::vector<uint8_t>> flags = tell(pool, names, steps, group, shown);
        MutexLock lock(merging);
        steps.told(now_ms(), group, flags);
        manifests.insert(manifests.end(), shown.begin(), shown.end());
    });
    most.reset();
    steps.all_told();
}

Result<std::vector<uint8_t>> Client::tell(Pool& pool, std::span<const std::string_view> names,
                                          RemovalSteps& steps, const Group& group,
                                          std::vector<RemovedManifest>& shown) {
    return remove_older(*node(pool, group.member), names, group.items, steps.versions(), shown);
}

Result<std::vector<uint8_t>> Client::remove_older(NodeClient& at, std::span<const std::string_view> names,
                                                  std::span<const size_t> items,
                                                  std::span<const Version> versions,
                                                  std::vector<RemovedManifest>& shown) {
    std::vector<std::string_view> some;
    std::vector<Version> of_some;
    for (size_t i : items) {
        some.push_back(names[i]);
        if (!versions.empty()) of_some.push_back(versions[i]);
    }
    std::vector<RemovedManifest> of_these;
    Result<std::vector<uint8_t>> flags = at.remove_older(some, of_some, of_these);
    for (RemovedManifest manifest : of_these) {
        manifest.item = items[manifest.item];
        shown.push_back(manifest);
    }
    return flags;
}

// Every key: a node that is away may hold copies of which the directory no longer knows.
void Client::end_removal(Pool& pool, std::span<const std::string_view> names, RemovalSteps& steps) {
    if (steps.wants() != RemovalSteps::Wants::kEnd) return;
    if (!steps.versions().empty()) {
        return steps.ended(pool.directory->ordered(steps.done(), [&] {
            for (auto* more = &steps.witnesses(); !more->empty(); more = &steps.witnesses()) {
                WaitBudget most(kWitnessMs);
                for (const Group& group : *more) {
                    std::vector<RemovedManifest> none;
                    steps.witnessed(group, tell(pool, names, steps, group, none));
                }
            }
        }));
    }
    Result<uint32_t> rows = pool.directory->forget(steps.keys(), steps.unreached());
    Result<std::vector<Version>> last = std::vector<Version>{};
    if (!rows) last = rows.error();
    steps.ended(last);
}

Result<std::vector<ListRow>> Client::list(std::string_view prefix, uint64_t limit) {
    WaitBudget budget(wait_budget_ms());
    Result<std::vector<ListRow>> rows = own_.list(prefix, limit);
    std::shared_ptr<Pool> others = pool();
    if (others == nullptr || (!rows && !no_answer(rows.error()))) return rows;
    std::vector<ListRow> all = rows ? std::move(*rows) : std::vector<ListRow>();
    std::erase_if(all, [](const ListRow& row) { return is_stripe(row.name); });
    Result<std::shared_ptr<const Members>> members = others->directory->members();
    if (!members) {
        if (!rows) return rows;
        return all;
    }
    std::vector<Group> work;
    for (const Member& member : (*members)->rows) {
        // One that is joining for any master may have yet to drop something.
        if ((*members)->is_alive(member) && member.identity.incarnation != others->own) {
            work.emplace_back();
            work.back().member = member;
        }
    }
    Mutex merging;
    std::unordered_set<std::string> seen;
    for (const ListRow& row : all) seen.insert(row.name);
    each(work, [&](Group& group) {
        Result<std::vector<ListRow>> more = node(*others, group.member)->list(prefix, limit);
        if (!more) return;
        MutexLock lock(merging);
        for (ListRow& row : *more) {
            if (is_stripe(row.name)) continue;
            if (all.size() < limit && seen.insert(row.name).second) all.push_back(std::move(row));
        }
    });
    return all;
}

}  // namespace moonpool
