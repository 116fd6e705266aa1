// Objects that are larger than one node takes: cut into stripes that lie on all nodes in turn, and are
// written and read in parallel. A stripe that is lost makes the whole object a miss.
//
// Threads: the caller's, and those of each(). No lock is held while a node is asked.
//
// What holds: under the key lies a manifest, which is written when all stripes are there and names them by
// an id of its own. So a manifest that a client can read had all its stripes once, two objects never share
// a stripe, and a replaced object's stripes cannot be taken for the new one's. A user's object may have a
// manifest's size, and any bytes: only the MAC with the cluster token makes a manifest.
//
// A crash between the stripes and the manifest leaves stripes that no key leads to; they are evicted as
// any cold object is.
#include <algorithm>
#include <cstring>
#include <iterator>
#include <new>

#include "base/clock.hpp"
#include "base/mutex.hpp"
#include "store/client/client.hpp"
#include "store/client/client_frames.hpp"
#include "store/client/removal_steps.hpp"
#include "wire/auth.hpp"

namespace moonpool {

namespace {

constexpr uint64_t kStripeBytesMax = 64ull << 20;
constexpr uint64_t kStripesMax = 4096;

// The first bytes of an object, wherever its parts lie.
std::array<std::byte, kManifestBytes> beginning(std::span<const MemoryRef> parts) {
    std::array<std::byte, kManifestBytes> bytes{};
    size_t at = 0;
    for (const MemoryRef& part : parts) {
        size_t n = std::min<uint64_t>(bytes.size() - at, part.bytes);
        if (n != 0) std::memcpy(bytes.data() + at, part.data(), n);
        at += n;
    }
    return bytes;
}

std::vector<std::string> stripe_names(const Manifest& manifest) {
    std::vector<std::string> names;
    for (uint64_t i = 0; i < std::min(manifest.stripes(), kStripesMax); ++i) {
        names.push_back(manifest.stripe_name(i));
    }
    return names;
}

}  // namespace

Status Client::fill_striped(std::span<const GetItem> items, bool verify, std::vector<int64_t>& sizes) {
    for (size_t i = 0; i < items.size(); ++i) {
        if (sizes[i] != static_cast<int64_t>(kManifestBytes)) continue;
        std::optional<Manifest> manifest =
            decode_manifest(beginning(items[i].parts), options_.token, items[i].name);
        if (!manifest) continue;
        // The manifest lies at the front of the caller's memory, which the stripes overwrite: it was
        // decoded into a copy.
        uint64_t room = total(items[i].parts);
        sizes[i] = kMiss;
        Result<bool> read = read_striped(items[i].name, *manifest, [&](const Manifest& m) -> Result<bool> {
            if (room < m.size) return too_small(items[i].name, room, m.size);
            Result<bool> got = get_stripes(m, items[i].parts, verify);
            if (got && *got) sizes[i] = static_cast<int64_t>(m.size);
            return got;
        });
        if (!read) return read.error();
    }
    return success();
}

Status Client::view_striped(std::span<const std::string_view> names, bool verify,
                            std::vector<ObjectView>& views) {
    for (size_t i = 0; i < views.size(); ++i) {
        if (views[i].owner == nullptr || views[i].size != kManifestBytes) continue;
        std::optional<Manifest> manifest =
            decode_manifest(std::span(views[i].data, kManifestBytes), options_.token, names[i]);
        if (!manifest) continue;
        views[i] = ObjectView{};
        Result<bool> read = read_striped(names[i], *manifest, [&](const Manifest& m) -> Result<bool> {
            std::shared_ptr<std::byte[]> memory(new (std::nothrow) std::byte[m.size]);
            if (memory == nullptr) {
                return Error{Code::kOs, "no memory for an object of " + std::to_string(m.size) + " bytes"};
            }
            MemoryRef part = MemoryRef::host(memory.get(), m.size);
            Result<bool> got = get_stripes(m, {&part, 1}, verify);
            if (got && *got) views[i] = ObjectView{memory, memory.get(), m.size};
            return got;
        });
        if (!read) return read.error();
    }
    return success();
}

template <class Read>
Result<bool> Client::read_striped(std::string_view name, Manifest manifest, Read read) {
    constexpr int kReplacedMax = 8;  // while it is read
    for (int i = 0;; ++i) {
        Result<bool> got = read(manifest);
        if (!got || *got || i == kReplacedMax) return got;
        // The stripes of a manifest that was replaced go with it; those of the new one are there.
        Result<std::optional<Manifest>> now = manifest_of(name);
        // The same manifest still: its stripes are lost, and reading again would not find them.
        if (!now || !*now || **now == manifest) return got;
        manifest = **now;
    }
}

Result<std::optional<Manifest>> Client::manifest_of(std::string_view name) {
    std::array<std::byte, kManifestBytes> bytes;
    MemoryRef part = MemoryRef::host(bytes.data(), bytes.size());
    GetItem item{name, {&part, 1}};
    Result<std::vector<int64_t>> got = get_whole({&item, 1}, true);
    if (!got) return got.error();
    if (got->front() != static_cast<int64_t>(kManifestBytes)) return std::optional<Manifest>();
    return decode_manifest(bytes, options_.token, name);
}

Presence Client::whole(std::string_view name) {
    Result<std::optional<Manifest>> manifest = manifest_of(name);
    if (!manifest) return Presence::kUnknown;
    // An object of a user; should it be gone by now, then it was there when it was asked for.
    if (!*manifest) return Presence::kHit;
    if ((*manifest)->stripes() > kStripesMax) return Presence::kMiss;
    std::vector<std::string> stripes = stripe_names(**manifest);
    std::vector<std::string_view> names(stripes.begin(), stripes.end());
    std::vector<size_t> ignored;
    // A question about the object is a use of it, and of all that it is made of.
    Result<std::vector<Presence>> present = exists_whole(names, true, ignored);
    if (!present) return Presence::kUnknown;
    if (std::ranges::find(*present, Presence::kMiss) != present->end()) return Presence::kMiss;
    bool unknown = std::ranges::find(*present, Presence::kUnknown) != present->end();
    return unknown ? Presence::kUnknown : Presence::kHit;
}

void Client::pin_stripes(Pinned& pinned, size_t i, std::string_view name, std::string& why) {
    if (!pinned.has(i)) return;
    Result<std::optional<Manifest>> manifest = manifest_of(name);
    if (manifest && !*manifest) return;
    if (manifest) {
        std::vector<std::string> stripes = stripe_names(**manifest);
        std::vector<std::string_view> names(stripes.begin(), stripes.end());
        std::string reason = "a stripe of a striped object is lost";
        // One missing stripe is as bad as none: the pins of the others end here with `all`.
        Result<Pinned> all = pin_whole(names, reason);
        for (size_t k = 0; all && k < names.size(); ++k) {
            if (!all->has(k)) all = Error{Code::kUnavailable, reason};
        }
        if (all) {
            for (auto& pin : all->pins) pinned.pins.push_back(std::move(pin));
            return;
        }
        why = all.error().text;
        // More than the pins of one caller may hold: it is there all the same.
        if (whole(name) == Presence::kHit) return;
    } else {
        why = manifest.error().text;
    }
    pinned.under[i] = kNoPin;
}

Result<bool> Client::get_stripes(const Manifest& manifest, std::span<const MemoryRef> parts, bool verify) {
    // A manifest of a later release may be larger; reserving memory by its word would be a mistake.
    if (manifest.stripes() > kStripesMax) return false;
    std::vector<std::string> names = stripe_names(manifest);
    std::vector<std::vector<MemoryRef>> targets;
    std::vector<GetItem> items;
    targets.reserve(manifest.stripes());
    for (uint64_t i = 0; i < manifest.stripes(); ++i) {
        targets.push_back(slice(parts, i * manifest.stripe_bytes, manifest.bytes_of(i)));
        items.push_back({names[i], targets.back()});
    }
    Result<std::vector<int64_t>> sizes = get_whole(items, verify);
    if (!sizes) return sizes.error();
    for (uint64_t i = 0; i < manifest.stripes(); ++i) {
        if ((*sizes)[i] != static_cast<int64_t>(manifest.bytes_of(i))) return false;
    }
    return true;
}

void Client::add_genuine(std::string_view name, const RemovedManifest& removed,
                         std::vector<Manifest>& out) const {
    std::optional<Manifest> manifest = decode_manifest(removed.bytes, options_.token, name);
    if (manifest && std::ranges::find(out, *manifest) == out.end()) out.push_back(*manifest);
}

void Client::own_manifests(std::span<const std::string_view> names, std::vector<RemovedManifest>& manifests) {
    std::shared_ptr<Session> session = own_.current();
    const IndexReader* index = session == nullptr ? nullptr : session->path().index();
    if (index == nullptr) return;
    for (size_t i = 0; i < names.size(); ++i) {
        auto hit = index->find(session->space(), own_.hasher()(names[i]), names[i]);
        if (!hit || hit->size != kManifestBytes) continue;
        RemovedManifest manifest;
        manifest.item = i;
        MemoryRef part = MemoryRef::host(manifest.bytes.data(), manifest.bytes.size());
        GetItem item{names[i], {&part, 1}};
        Result<std::vector<int64_t>> got = own_.get({&item, 1}, false, true);
        if (got && got->front() == static_cast<int64_t>(kManifestBytes)) manifests.push_back(manifest);
    }
}

void Client::remove_stripes(Pool& pool, std::span<const Manifest> manifests) {
    std::vector<std::string> stripes;
    for (const Manifest& manifest : manifests) {
        std::ranges::move(stripe_names(manifest), std::back_inserter(stripes));
    }
    if (stripes.empty()) return;
    std::vector<std::string_view> names(stripes.begin(), stripes.end());
    std::vector<RemovedManifest> none;
    RemovalSteps steps(hashes(names), pool.own, true, locations_, recent_);
    tell_removal(pool, names, steps, none);
    end_removal(pool, names, steps);
}

bool Client::too_large_for_one(const PutItem& item) {
    std::shared_ptr<Session> session = own_.current();
    if (session == nullptr || total(item.parts) <= session->object_bytes_max()) return false;
    return pool() != nullptr;
}

Status Client::put_striped(Pool& pool, const PutItem& item, const PutOptions& options, PutOutcome& outcome,
                           PutReport& report) {
    std::shared_ptr<Session> session = own_.current();
    Result<std::shared_ptr<const Members>> members = pool.directory->members();
    outcome = PutOutcome::kRefused;
    if (!members || session == nullptr) {
        report.refusal = "an object that is larger than one node takes needs the master, which is away";
        return success();
    }
    PutOptions for_manifest = options;
    if (!options.replace) {
        std::vector<size_t> manifest_sized;
        Result<std::vector<Presence>> here = exists_whole({&item.name, 1}, false, manifest_sized);
        if (here && here->front() == Presence::kHit) {
            if (manifest_sized.empty() || whole(item.name) == Presence::kHit) {
                outcome = PutOutcome::kExists;
                return success();
            }
            for_manifest.replace = true;  // one that no client can read: it and its stripes go
        }
    }
    // One group for each node that lives, and every stripe to the next of them: writing and reading use
    // the memory and the network of all.
    std::vector<Group> groups;
    for (const Member& member : (*members)->rows) {
        if (member.state != MemberState::kAlive) continue;
        groups.emplace_back();
        groups.back().member = member;
    }
    Manifest manifest;
    manifest.id = random_incarnation();
    manifest.size = total(item.parts);
    manifest.stripe_bytes = std::clamp<uint64_t>(session->object_bytes_max() / 4, 64u << 10, kStripeBytesMax);
    if (groups.empty() || manifest.stripes() > kStripesMax) {
        report.refusal = "an object of " + std::to_string(manifest.size) + " bytes has over " +
                         std::to_string(kStripesMax) + " stripes, the limit";
        return success();
    }
    std::vector<std::string> names = stripe_names(manifest);
    const std::string group_name = manifest.group_name();
    std::vector<std::vector<MemoryRef>> parts;
    std::vector<PutItem> stripes;
    parts.reserve(manifest.stripes());
    for (uint64_t i = 0; i < manifest.stripes(); ++i) {
        parts.push_back(slice(item.parts, i * manifest.stripe_bytes, manifest.bytes_of(i)));
        stripes.push_back({names[i], {}, parts.back(), group_name, item.soft_ms});
        groups[i % groups.size()].items.push_back(i);
    }
    std::vector<PutOutcome> outcomes(stripes.size(), PutOutcome::kRefused);
    Mutex merging;
    each(groups, [&](Group& group) {
        std::vector<PutItem> batch;
        for (size_t i : group.items) batch.push_back(stripes[i]);
        bool own = group.member.identity.incarnation == pool.own;
        PutHow how{.timeout_ms = options.timeout_ms, .known = pool.directory->newest()};
        Result<PutReport> put = own ? own_.put(batch, how) : node(pool, group.member)->put(batch, how);
        MutexLock lock(merging);
        if (!put) {
            report.refusal = put.error().text;
            return;
        }
        for (size_t k = 0; k < group.items.size(); ++k) {
            outcomes[group.items[k]] = put->outcomes[k];
            if (own || put->outcomes[k] == PutOutcome::kRefused) continue;
            // Until the directory has heard of it, this client knows where it lies.
            Hash128 hash = own_.hasher()(names[group.items[k]]);
            recent_.add(now_ms(), hash, group.member.id);
            locations_.put(hash, group.member.identity.incarnation);
        }
        if (!put->refusal.empty()) report.refusal = put->refusal;
    });
    // What a node would not take goes wherever there is room, or else the object is refused as a whole.
    PutReport rest;
    rest.outcomes = std::move(outcomes);
    std::vector<size_t> left;
    for (size_t i = 0; i < stripes.size(); ++i) {
        if (rest.outcomes[i] == PutOutcome::kRefused) left.push_back(i);
    }
    PutOptions plain;
    // Without replace: the names of stripes are new.
    plain.timeout_ms = options.timeout_ms;
    if (!left.empty()) put_elsewhere(pool, stripes, plain, left, rest, true);
    // Where there is too little room, the last stripes took the place of the first ones.
    each(groups, [&](Group& group) {
        std::vector<std::string_view> here;
        std::vector<size_t> which;
        for (size_t i : group.items) {
            if (std::ranges::find(left, i) != left.end()) continue;
            here.push_back(names[i]);
            which.push_back(i);
        }
        bool own = group.member.identity.incarnation == pool.own;
        auto kept = own ? own_.exists(here) : node(pool, group.member)->exists(here);
        MutexLock lock(merging);
        for (size_t k = 0; k < which.size(); ++k) {
            if (kept && (*kept)[k] != 0) continue;
            rest.outcomes[which[k]] = PutOutcome::kRefused;
            rest.refusal = kept ? "there is no room for an object of " + std::to_string(manifest.size) +
                                      " bytes in the pool"
                                : kept.error().text;
        }
    });
    if (std::ranges::find(rest.outcomes, PutOutcome::kRefused) != rest.outcomes.end()) {
        remove_stripes(pool, {&manifest, 1});
        if (!rest.refusal.empty()) report.refusal = rest.refusal;
        return success();
    }
    // Now that every stripe is there, the key may lead to them.
    std::vector<std::byte> bytes = encode(manifest, options_.token, item.name);
    MemoryRef part = MemoryRef::host(bytes.data(), bytes.size());
    std::string_view group = item.group.empty() ? std::string_view(group_name) : item.group;
    PutItem under_key{item.name, item.parent, {&part, 1}, group, item.soft_ms};
    Result<PutReport> put = for_manifest.unique ? put_unique({&under_key, 1}, for_manifest)
                                                : put_whole({&under_key, 1}, for_manifest);
    if (!put) return put.error();
    outcome = put->outcomes.front();
    if (outcome == PutOutcome::kStored) {
        report.stored_bytes += manifest.size;
        return success();
    }
    remove_stripes(pool, {&manifest, 1});  // of no object: another stands under the key, or none
    if (!put->refusal.empty()) report.refusal = put->refusal;
    return success();
}

}  // namespace moonpool
