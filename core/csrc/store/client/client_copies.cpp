// Client, copying what the own node has to other nodes, so that the own one can go.
//
// A copy is the object as it is, a manifest or a stripe like any other: no key changes its value, and none
// that was removed comes back. The version of each copy sees to that: another node refuses one when it knows
// of a later removal in the order of the key's range, and drops one of which the master knows that.
#include <algorithm>

#include "memory/copier.hpp"
#include "store/client/client.hpp"
#include "store/client/client_frames.hpp"

namespace moonpool {

Result<CopyReport> Client::copy_out(std::span<const PutItem> items, bool evict) {
    WaitBudget budget(wait_budget_ms());
    if (own_.current() == nullptr) (void)own_.session();
    std::shared_ptr<Pool> others = pool();
    if (others == nullptr) {
        return Error{Code::kUnavailable, "the node has no master, and so no other nodes"};
    }
    Result<std::shared_ptr<const Members>> members = others->directory->members();
    if (!members) return members.error();
    const Member* own = (*members)->find(others->own);
    auto is_other = [&](const Member& member) {
        return member.state == MemberState::kAlive && member.identity.incarnation != others->own;
    };
    const bool has_other_hosts = std::ranges::any_of((*members)->rows, [&](const Member& member) {
        return is_other(member) && member.identity.host_id != others->host_id;
    });
    if (own == nullptr || std::ranges::none_of((*members)->rows, is_other)) {
        return Error{Code::kUnavailable, own == nullptr ? "the node is not in the pool of its master"
                                                        : "the pool has no other node"};
    }
    std::vector<std::string_view> names;
    for (const PutItem& item : items) names.push_back(item.name);
    Result<std::vector<ObjectState>> states = describe_whole(names, true);
    if (!states) return states.error();
    CopyReport report;
    report.outcomes.assign(items.size(), CopyOutcome::kThere);
    std::vector<size_t> only_here;
    for (size_t i = 0; i < items.size(); ++i) {
        // It has gone since; or the copy would get the version of what this process has heard, which may be a
        // removal of the key.
        if ((*states)[i].copies.empty() || items[i].version == kNoVersion) {
            report.outcomes[i] = CopyOutcome::kLater;
            continue;
        }
        bool elsewhere = std::ranges::any_of((*states)[i].copies, [&](const Copy& copy) {
            if (copy.host_id != others->host_id) return true;
            return !has_other_hosts && copy.node != own->identity.name;
        });
        if (!elsewhere) only_here.push_back(i);
    }
    PutOptions options{.replicas = 2};
    options.copies_ordered = true;
    options.copies_evict = evict;
    options.copies_on_same_host = !has_other_hosts;
    PutReport put;
    put.outcomes.assign(items.size(), PutOutcome::kStored);
    put.copies.assign(items.size(), 1);
    for (const std::vector<size_t>& chunk : in_chunks(items, only_here)) {
        replicate_some(*others, items, options, chunk, {}, put);
    }
    for (size_t i : only_here) {
        report.outcomes[i] = put.copies[i] > 1 ? CopyOutcome::kCopied : CopyOutcome::kNowhere;
    }
    for (auto [i, version] : put.older) {
        if (report.outcomes[i] == CopyOutcome::kNowhere) report.outcomes[i] = CopyOutcome::kLater;
    }
    report.why = put.short_of_copies;
    return report;
}

}  // namespace moonpool
