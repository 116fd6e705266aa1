// Client, writing objects that are larger than one node takes. client_stripes.cpp says what they are.
//
// Threads: the caller's, and those of each() for several nodes at once; `merging` guards what they add up.
// No lock is held while a node or the master is asked.
//
// What holds: StripePutSteps and SpreadSteps say it, which this file drives.
#include <algorithm>
#include <numeric>

#include "base/clock.hpp"
#include "base/mutex.hpp"
#include "store/client/client.hpp"
#include "store/client/client_frames.hpp"
#include "wire/auth.hpp"

namespace moonpool {

namespace {

constexpr uint64_t kStripeBytesMax = 64ull << 20;
// What one node is asked to take at a time. It has at most half of its arena for what is on its way, and
// these are about a quarter.
constexpr size_t kStripesAtOnce = 4;

// The stripes of an object as items of a put.
struct Stripes {
    std::vector<std::string> names;
    std::string group;
    std::vector<std::vector<MemoryRef>> parts;
    std::vector<PutItem> items;

    Stripes(const Manifest& manifest, const PutItem& object)
        : names(manifest.stripe_names()), group(manifest.group_name()) {
        parts.reserve(names.size());
        for (uint64_t i = 0; i < names.size(); ++i) {
            parts.push_back(slice(object.parts, i * manifest.stripe_bytes, manifest.bytes_of(i)));
            items.push_back({names[i], {}, parts.back(), group, object.soft_ms});
        }
    }
    Stripes(const Stripes&) = delete;
};

size_t fewest(std::span<const std::vector<size_t>> at) {
    size_t copies = SIZE_MAX;
    for (const std::vector<size_t>& nodes : at) copies = std::min(copies, nodes.size());
    return copies;
}

}  // namespace

bool Client::too_large_for_one(const PutItem& item) {
    std::shared_ptr<Session> session = own_.current();
    if (session == nullptr || total(item.parts) <= session->object_bytes_max()) return false;
    return pool() != nullptr;
}

void Client::spread(Pool& pool, SpreadSteps& steps, std::span<const PutItem> stripes, int timeout_ms,
                    std::string& refusal) {
    Mutex merging;
    while (steps.wants() == SpreadSteps::Wants::kPut) {
        each(steps.nodes(), [&](Group& node) {
            const bool own = node.member.identity.incarnation == pool.own;
            std::shared_ptr<NodeClient> to = client_of(pool, node.member);
            for (size_t begin = 0; begin < node.items.size(); begin += kStripesAtOnce) {
                size_t end = std::min(begin + kStripesAtOnce, node.items.size());
                auto which = std::span(node.items).subspan(begin, end - begin);
                std::vector<PutItem> batch;
                for (size_t i : which) batch.push_back(stripes[i]);
                PutHow how{.timeout_ms = timeout_ms, .known = pool.directory->newest()};
                Result<PutReport> put = to->put(batch, how);
                MutexLock lock(merging);
                if (!put) {
                    refusal = put.error().text;
                    return;
                }
                if (!put->refusal.empty()) refusal = put->refusal;
                for (size_t k = 0; k < which.size(); ++k) {
                    if (!steps.put(node, which[k], put->outcomes[k]) || own) continue;
                    // Until the directory has heard of it, this client knows where it lies.
                    Hash128 hash = own_.hasher()(stripes[which[k]].name);
                    recent_.add(now_ms(), hash, node.member.id);
                    locations_.put(hash, node.member.identity.incarnation);
                }
            }
        });
        steps.all_put();
    }
}

void Client::keep_what_is_there(Pool& pool, SpreadSteps& steps, std::span<const PutItem> stripes,
                                std::string& refusal) {
    steps.confirm();
    Mutex merging;
    each(steps.nodes(), [&](Group& node) {
        if (node.items.empty()) return;
        std::vector<std::string_view> names;
        for (size_t i : node.items) names.push_back(stripes[i].name);
        Result<std::vector<uint8_t>> kept = client_of(pool, node.member)->exists(names);
        MutexLock lock(merging);
        if (steps.kept(node, kept)) return;
        refusal = kept ? "there is no room for all stripes of the object in the pool" : kept.error().text;
    });
    steps.all_kept();
}

Status Client::put_striped(Pool& pool, const PutItem& item, const PutOptions& options, size_t i,
                           PutReport& report) {
    std::shared_ptr<Session> session = own_.current();
    Result<std::shared_ptr<const Members>> members = pool.directory->members();
    if (!members || session == nullptr) {
        report.refusal = "an object that is larger than one node takes needs the master, which is away";
        return success();
    }
    // Every stripe goes to the next node: writing and reading use the memory and the network of all.
    std::vector<Group> nodes = SpreadSteps::takers(**members);
    std::optional<SpreadSteps> spreading;
    std::optional<Stripes> stripes;
    Manifest manifest;
    PutReport under_key;
    std::string refusal, refusal_elsewhere;
    using Wants = StripePutSteps::Wants;
    StripePutSteps steps(options.replace);
    while (steps.wants() != Wants::kDone) {
        switch (steps.wants()) {
            case Wants::kLook:
            case Wants::kLookAgain: {
                std::vector<size_t> manifest_sized;
                Result<std::vector<Presence>> here = exists_whole({&item.name, 1}, false, manifest_sized);
                steps.looked(here, !manifest_sized.empty());
                break;
            }
            case Wants::kWhole:
                steps.whole(whole({&item.name, 1}).front());
                break;
            case Wants::kSpread:
                if (nodes.empty()) {
                    report.refusal =
                        "no node is in touch with the master that could take the stripes of a large object";
                    return success();
                }
                manifest = {
                    random_incarnation(), total(item.parts),
                    std::clamp<uint64_t>(session->object_bytes_max() / 4, 64u << 10, kStripeBytesMax)};
                if (!manifest.within_limits()) {
                    report.refusal = "an object of " + std::to_string(manifest.size) + " bytes has over " +
                                     std::to_string(kStripesMax) + " stripes, the limit";
                    return success();
                }
                stripes.emplace(manifest, item);
                spreading.emplace(std::move(nodes), SpreadSteps::Places(stripes->items.size()),
                                  std::max(options.replicas, 1u));
                spread(pool, *spreading, stripes->items, options.timeout_ms, refusal);
                steps.spread(spreading->left());
                break;
            case Wants::kElsewhere: {  // wherever there is room; without replace: the names of stripes are
                                       // new
                PutReport rest;
                rest.outcomes.assign(stripes->items.size(), PutOutcome::kRefused);
                PutOptions plain;
                plain.timeout_ms = options.timeout_ms;
                put_elsewhere(pool, stripes->items, plain, spreading->left(), rest, true);
                std::vector<uint8_t> elsewhere;
                for (PutOutcome outcome : rest.outcomes)
                    elsewhere.push_back(outcome == PutOutcome::kStored || outcome == PutOutcome::kExists);
                refusal_elsewhere = rest.refusal;
                steps.put_elsewhere(std::move(elsewhere));
                break;
            }
            case Wants::kConfirm:
                keep_what_is_there(pool, *spreading, stripes->items, refusal);
                steps.confirmed(spreading->at());
                if (steps.copies() == 0) report.refusal = !refusal.empty() ? refusal : refusal_elsewhere;
                break;
            case Wants::kManifest: {
                PutOptions how = options;
                how.replace = steps.replaces();
                Result<PutReport> put = put_manifest(item, manifest, how);
                if (!put) return put.error();
                steps.manifest_put(put->outcomes.front());
                under_key = std::move(*put);
                break;
            }
            case Wants::kFree:
                remove_stripes(pool, {&manifest, 1});
                steps.freed();
                break;
            case Wants::kDone:
                break;
        }
    }
    report.outcomes[i] = steps.outcome();
    if (steps.was_there()) {
        if (options.replicas > 1) copy_striped(pool, item, options, i, report);
        return success();
    }
    if (under_key.outcomes.empty()) return success();  // there was no room
    if (report.outcomes[i] != PutOutcome::kStored) {   // another object stands under the key, or none
        if (!under_key.refusal.empty()) report.refusal = under_key.refusal;
        if (!report.copies.empty()) report.copies[i] = report.outcomes[i] == PutOutcome::kExists;
        return success();
    }
    report.stored_bytes += manifest.size;
    if (report.copies.empty()) return success();
    report.copies[i] =
        std::min(under_key.copies.front(), static_cast<uint8_t>(std::min<size_t>(steps.copies(), UINT8_MAX)));
    if (report.copies[i] >= options.replicas) return success();
    report.short_of_copies = !under_key.short_of_copies.empty() ? under_key.short_of_copies
                             : !refusal.empty()                 ? refusal
                                                : "there are not enough other hosts and nodes in the pool";
    return success();
}

// Once every stripe is there, the key may lead to them.
Result<PutReport> Client::put_manifest(const PutItem& object, const Manifest& manifest,
                                       const PutOptions& options) {
    std::vector<std::byte> bytes = encode(manifest, own_.manifest_secrets(), object.name);
    MemoryRef part = MemoryRef::host(bytes.data(), bytes.size());
    std::string group = object.group.empty() ? manifest.group_name() : std::string(object.group);
    PutItem item{object.name, object.parent, {&part, 1}, group, object.soft_ms};
    return options.unique ? put_unique({&item, 1}, options) : put_whole({&item, 1}, options);
}

// More copies of an object that is there and has these bytes.
void Client::copy_striped(Pool& pool, const PutItem& item, const PutOptions& options, size_t i,
                          PutReport& report) {
    report.copies[i] = 1;
    Result<std::vector<Standing>> now = standing({&item.name, 1});
    const Manifest* manifest = now && now->front().manifest ? &*now->front().manifest : nullptr;
    std::vector<size_t> which;
    std::optional<Stripes> stripes;
    if (manifest != nullptr && manifest->size == total(item.parts) && manifest->within_limits()) {
        stripes.emplace(*manifest, item);
        which.resize(stripes->items.size());
        std::iota(which.begin(), which.end(), 0);
    }
    if (!stripes || with_equal_bytes(stripes->items, which).size() != which.size()) {
        report.short_of_copies = "the key has other bytes than these, which stay";
        return;
    }
    std::vector<std::string_view> names(stripes->names.begin(), stripes->names.end());
    Result<LocateAnswer> located = pool.directory->locate(hashes(names));
    if (!located) {
        report.short_of_copies = located.error().text;
        return;
    }
    std::vector<Group> nodes = SpreadSteps::takers(*located->members);
    SpreadSteps::Places at(names.size());
    for (size_t k = 0; k < at.size(); ++k) {
        for (const Holder& holder : located->keys[k]) {
            auto node =
                std::ranges::find(nodes, holder.node, [](const Group& group) { return group.member.id; });
            auto number = static_cast<size_t>(node - nodes.begin());
            bool more = node != nodes.end() && std::ranges::find(at[k], number) == at[k].end();
            if (more) at[k].push_back(number);
        }
    }
    std::string refusal;
    SpreadSteps steps(std::move(nodes), std::move(at), options.replicas);
    spread(pool, steps, stripes->items, options.timeout_ms, refusal);
    keep_what_is_there(pool, steps, stripes->items, refusal);
    PutOptions for_manifest = options;
    for_manifest.unique = false;  // it is there
    Result<PutReport> put = put_manifest(item, *manifest, for_manifest);
    if (!put || put->outcomes.front() == PutOutcome::kRefused) return;
    size_t copies = std::min<size_t>(fewest(steps.at()), UINT8_MAX);
    report.copies[i] = std::max<uint8_t>(std::min(put->copies.front(), static_cast<uint8_t>(copies)), 1);
    if (report.copies[i] >= options.replicas) return;
    report.short_of_copies = !put->short_of_copies.empty() ? put->short_of_copies
                             : !refusal.empty()            ? refusal
                                                : "there are not enough other hosts and nodes in the pool";
}

}  // namespace moonpool
