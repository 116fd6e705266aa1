// Client, the end of a replacement: the master hears of it, and what a later change has voided goes.
#include "base/mutex.hpp"
#include "store/client/client.hpp"
#include "store/client/client_frames.hpp"
#include "store/client/manifest_reads.hpp"
#include "store/client/removal_steps.hpp"

namespace moonpool {

// The master hears where the new bytes are. Where a later replacement or removal of the key came between,
// they are void, as if that had come after this call.
void Client::end_replacement(Pool& pool, std::span<const PutItem> items, RemovalSteps& removal,
                             PutReport& report, std::vector<RemovedManifest>& manifests) {
    for (auto [item, node] : report.placed) removal.placed(item, node);
    std::vector<std::string_view> names;
    for (const PutItem& item : items) names.push_back(item.name);
    remove_left_here(names, removal, manifests);
    end_removal(pool, names, removal);
    std::vector<size_t> overtaken;
    report.unsure.clear();
    for (size_t i = 0; i < items.size(); ++i) {
        const bool is_void = removal.later()[i] != kNoVersion && is_free(removal.taken(i)) &&
                             report.outcomes[i] != PutOutcome::kRefused;
        if (!is_void) continue;
        report.outcomes[i] = PutOutcome::kStored;
        overtaken.push_back(i);
        // Also of one that no node took: its stripes are there.
        if (total(items[i].parts) == kManifestBytes) manifests.push_back({i, beginning(items[i].parts)});
    }
    remove_overtaken(pool, names, overtaken, removal, manifests);
    for (size_t i = 0; i < items.size(); ++i) {
        // Also where a node took it for older: nodes that were not told may have what was there before.
        if (report.outcomes[i] == PutOutcome::kStored && !removal.unsure(i).empty()) {
            report.unsure.resize(items.size());
            report.unsure[i] = removal.unsure(i);
        }
    }
}

// New bytes that a later change had voided when they arrived: the master has them removed a moment later, in
// which clients would read them.
void Client::remove_overtaken(Pool& pool, std::span<const std::string_view> names,
                              std::span<const size_t> items, RemovalSteps& removal,
                              std::vector<RemovedManifest>& manifests) {
    if (items.empty()) return;
    (void)remove_older(own_, names, items, removal.later(), manifests);
    Mutex merging;
    std::vector<Group> others = removal.overtaken_at(items);
    each(others, [&](Group& group) {
        std::vector<RemovedManifest> shown;
        Result<std::vector<uint8_t>> flags =
            remove_older(*node(pool, group.member), names, group.items, removal.later(), shown);
        MutexLock lock(merging);
        manifests.insert(manifests.end(), shown.begin(), shown.end());
        removal.overtaken_told(group, flags);
    });
}

// What the own node had where it refused the new bytes, as it is full of what is pinned: its clients would
// read that first.
void Client::remove_left_here(std::span<const std::string_view> names, RemovalSteps& removal,
                              std::vector<RemovedManifest>& manifests) {
    const std::vector<size_t> left = removal.left_here();
    if (left.empty() || removal.versions().size() != names.size()) return;
    removal.own_removed(left, remove_older(own_, names, left, removal.versions(), manifests));
}

}  // namespace moonpool
