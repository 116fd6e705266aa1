// Client, answering for striped objects: whether one is there as a whole, pins on all that it is made of, and
// the end of one that lost a stripe.
//
// Threads: the caller's, and those of each(). No lock is held while a node or the master is asked.
//
// What holds: kHit is said of an object when each of its stripes was found at a node a moment ago, and that
// was a use of all of them. A pin holds all stripes or counts for none. The stripes of all objects of a call
// are asked for together: one question to the own node, one to the master, one to each other node.
//
// An object is removed for a missing stripe only when every node of the pool was asked for it and said no:
// the directory may be behind, and a node that is away may come back. Each node then removes the generation
// of the manifest that was read there, so a replacement that came meanwhile stays.
#include <algorithm>
#include <array>
#include <numeric>

#include "base/mutex.hpp"
#include "store/client/client.hpp"
#include "store/client/client_frames.hpp"
#include "store/client/manifest_reads.hpp"

namespace moonpool {

namespace {

constexpr int kLookupRoundsMax = 4;     // for objects that are replaced meanwhile
constexpr size_t kNodesAskedMax = 256;  // of a larger pool no object is removed for a missing stripe

}  // namespace

std::vector<Presence> Client::whole(std::span<const std::string_view> names) {
    std::vector<Presence> present(names.size(), Presence::kMiss);
    std::vector<std::optional<Manifest>> before(names.size());  // what lacked a stripe in the round before
    std::vector<size_t> left(names.size());
    std::iota(left.begin(), left.end(), 0);
    for (int round = 0; round < kLookupRoundsMax && !left.empty(); ++round) {
        std::vector<std::string_view> asked;
        for (size_t i : left) asked.push_back(names[i]);
        Result<std::vector<Standing>> now = standing(asked);
        if (!now) {
            for (size_t i : left) present[i] = Presence::kUnknown;
            return present;
        }
        std::vector<std::string> stripes;
        std::vector<std::pair<size_t, size_t>> objects;  // place in `left`, and where its stripes begin
        for (size_t k = 0; k < left.size(); ++k) {
            const Standing& object = (*now)[k];
            if (!object.manifest) {
                present[left[k]] = object.size < 0 ? Presence::kMiss : Presence::kHit;
            } else if (object.manifest->within_limits()) {
                objects.emplace_back(k, stripes.size());
                std::ranges::move(object.manifest->stripe_names(), std::back_inserter(stripes));
            }
        }
        std::vector<std::string_view> stripe_names(stripes.begin(), stripes.end());
        std::vector<size_t> ignored;
        // A question about the object is a use of it, and of all that it is made of.
        Result<std::vector<Presence>> parts = exists_whole(stripe_names, true, ignored);
        std::vector<size_t> again;
        std::vector<Incomplete> incomplete;
        std::vector<size_t> incomplete_at;
        for (auto [k, begin] : objects) {
            size_t i = left[k];
            const Manifest& manifest = *(*now)[k].manifest;
            auto all = parts ? std::span(*parts).subspan(begin, manifest.stripes()) : std::span<Presence>();
            auto any = [&](Presence what) { return std::ranges::find(all, what) != all.end(); };
            if (any(Presence::kMiss)) {
                present[i] = Presence::kMiss;
                // It was replaced while it was asked for, or has lost a stripe.
                if (before[i] != manifest) {
                    before[i] = manifest;
                    again.push_back(i);
                } else {
                    incomplete.push_back({names[i], manifest});
                    incomplete_at.push_back(i);
                }
            } else {
                present[i] = !parts || any(Presence::kUnknown) ? Presence::kUnknown : Presence::kHit;
            }
        }
        std::vector<Presence> settled = settle(incomplete);
        for (size_t k = 0; k < settled.size(); ++k) {
            if (settled[k] == Presence::kHit) present[incomplete_at[k]] = Presence::kHit;
            // Another client may have put another object at another node.
            if (settled[k] == Presence::kMiss) again.push_back(incomplete_at[k]);
        }
        left = std::move(again);
    }
    return present;
}

void Client::pin_striped(Pinned& pinned, std::span<const std::string_view> names, std::string& why) {
    std::vector<size_t> which;
    for (size_t i = 0; i < pinned.descriptors.size(); ++i) {
        if (pinned.has(i) && pinned.descriptors[i].size == kManifestBytes) which.push_back(i);
    }
    if (which.empty()) return;
    ManifestReads reads(which.size());
    for (size_t i : which) reads.add(names[i]);
    Result<std::vector<int64_t>> sizes = NodeClient::get_pinned(pinned, which, reads.items, true, true);
    if (!sizes) why = sizes.error().text;
    std::vector<std::pair<size_t, Manifest>> striped;
    std::vector<std::string> stripes;
    for (size_t k = 0; k < which.size(); ++k) {
        size_t i = which[k];
        std::optional<Manifest> manifest = decode_manifest(reads.bytes[k], own_.manifest_secrets(), names[i]);
        bool is_lost = manifest ? !manifest->within_limits() : may_be_manifest(reads.bytes[k]);
        if (!sizes || (*sizes)[k] < 0 || is_lost) {
            pinned.under[i] = kNoPin;
        } else if (manifest) {
            striped.emplace_back(i, *manifest);
            std::ranges::move(manifest->stripe_names(), std::back_inserter(stripes));
        }
    }
    if (striped.size() > 1) {
        // Mostly all are there, and one question to each node is enough.
        std::vector<std::string_view> stripe_names(stripes.begin(), stripes.end());
        std::string ignored;
        Result<Pinned> all = pin_whole(stripe_names, ignored);
        if (all && std::ranges::find(all->under, kNoPin) == all->under.end()) {
            auto base = static_cast<uint32_t>(pinned.pins.size());
            for (uint32_t& under : all->under) under += base;
            for (auto& pin : all->pins) pinned.pins.push_back(std::move(pin));
            auto begin = std::ptrdiff_t{0};
            for (auto& [i, manifest] : striped) {
                auto end = begin + static_cast<std::ptrdiff_t>(manifest.stripes());
                pinned.striped[i] = {manifest,
                                     {all->descriptors.begin() + begin, all->descriptors.begin() + end},
                                     {all->under.begin() + begin, all->under.begin() + end}};
                begin = end;
            }
            return;
        }
    }
    // A pin is given back as a whole: each object has pins of its own, which end with it if a stripe is
    // missing.
    for (auto& [i, manifest] : striped) {
        if (!pin_stripes(pinned, i, names[i], manifest, why)) pinned.under[i] = kNoPin;
    }
}

bool Client::pin_stripes(Pinned& pinned, size_t i, std::string_view name, Manifest manifest,
                         std::string& why) {
    bool settled = false;
    for (int round = 0; round < kLookupRoundsMax; ++round) {
        std::vector<std::string> stripes = manifest.stripe_names();
        std::vector<std::string_view> names(stripes.begin(), stripes.end());
        std::string reason;
        Result<Pinned> all = pin_whole(names, reason);
        if (!all) {
            why = all.error().text;
            return false;
        }
        auto base = static_cast<uint32_t>(pinned.pins.size());
        if (std::ranges::find(all->under, kNoPin) == all->under.end()) {
            for (uint32_t& under : all->under) under += base;
            pinned.striped[i] = {manifest, std::move(all->descriptors), std::move(all->under)};
            for (auto& pin : all->pins) pinned.pins.push_back(std::move(pin));
            return true;
        }
        if (!all->why.empty()) reason = all->why;
        if (!reason.empty()) {  // not all may be pinned, or a node did not answer
            why = reason;
            return false;
        }
        all->pins.clear();
        // Replaced meanwhile, or a stripe is lost.
        Result<Pinned> again = pin_whole({&name, 1}, reason);
        if (!again || !again->has(0)) return false;
        std::array<std::byte, kManifestBytes> bytes{};
        MemoryRef part = MemoryRef::host(bytes.data(), bytes.size());
        GetItem item{name, {&part, 1}};
        size_t place = 0;
        Result<std::vector<int64_t>> size =
            NodeClient::get_pinned(*again, {&place, 1}, {&item, 1}, true, true);
        if (!size || size->front() < 0) return false;
        std::optional<Manifest> now;
        if (size->front() == static_cast<int64_t>(kManifestBytes)) {
            now = decode_manifest(bytes, own_.manifest_secrets(), name);
        }
        if (now == manifest) {
            Incomplete object{name, manifest};
            if (settled || settle({&object, 1}).front() != Presence::kHit) return false;
            settled = true;
            continue;
        }
        pinned.descriptors[i] = again->descriptors[0];
        pinned.under[i] = base + again->under[0];
        for (auto& pin : again->pins) pinned.pins.push_back(std::move(pin));
        if (!now) return !may_be_manifest(bytes);  // an object that lies whole at its node
        if (!now->within_limits()) return false;
        manifest = *now;
    }
    why = "the object was replaced again and again while it was pinned";
    return false;
}

std::vector<Presence> Client::settle(std::span<const Incomplete> objects) {
    std::vector<Presence> out(objects.size(), Presence::kUnknown);
    std::shared_ptr<Pool> others = pool();
    if (objects.empty() || others == nullptr) return out;
    std::optional<std::vector<Group>> nodes = every_node(*others);
    if (!nodes) return out;
    std::vector<std::string> stripes;
    for (const Incomplete& object : objects) {
        std::ranges::move(object.manifest.stripe_names(), std::back_inserter(stripes));
    }
    std::vector<std::string_view> names(stripes.begin(), stripes.end());
    std::optional<std::vector<uint8_t>> found = ask_every_node(*others, *nodes, names);
    if (!found) return out;
    std::vector<Incomplete> lost;
    std::vector<Manifest> manifests;
    size_t begin = 0;
    for (size_t i = 0; i < objects.size(); ++i) {
        auto all = std::span(*found).subspan(begin, objects[i].manifest.stripes());
        begin += all.size();
        bool whole = std::ranges::find(all, 0) == all.end();
        out[i] = whole ? Presence::kHit : Presence::kMiss;
        if (whole) continue;
        lost.push_back(objects[i]);
        manifests.push_back(objects[i].manifest);
    }
    if (!lost.empty()) drop_manifests(*others, *nodes, lost);
    remove_stripes(*others, manifests);
    return out;
}

void Client::free_orphans(std::string_view name, const Manifest& manifest) {
    std::shared_ptr<Pool> others = pool();
    if (others == nullptr || !manifest.within_limits()) return;
    std::optional<std::vector<Group>> nodes = every_node(*others);
    if (!nodes) return;
    std::optional<std::vector<uint8_t>> found = ask_every_node(*others, *nodes, {&name, 1});
    if (found && found->front() == 0) remove_stripes(*others, {&manifest, 1});
}

// Nothing: the master does not answer, does not know all nodes yet, or one of them is away.
std::optional<std::vector<Client::Group>> Client::every_node(Pool& pool) {
    Result<std::shared_ptr<const Members>> members = pool.directory->members(true);
    if (!members || (*members)->before != nullptr || (*members)->away != 0 ||
        (*members)->rows.size() > kNodesAskedMax) {
        return std::nullopt;
    }
    std::vector<Group> nodes;
    bool own = false;
    for (const Member& member : (*members)->rows) {
        if (!(*members)->is_alive(member)) return std::nullopt;
        own |= member.identity.incarnation == pool.own;
        nodes.push_back({member, {}});
    }
    if (!own) return std::nullopt;
    return nodes;
}

// Of each name whether a node has it; where, this client knows from now on. Nothing: not all nodes answered.
std::optional<std::vector<uint8_t>> Client::ask_every_node(Pool& pool, std::vector<Group>& nodes,
                                                           std::span<const std::string_view> names) {
    std::vector<uint8_t> found(names.size());
    std::vector<Hash128> asked = hashes(names);
    bool all_answered = true;
    Mutex merging;
    each(nodes, [&](Group& group) {
        Result<std::vector<uint8_t>> flags = client_of(pool, group.member)->exists(names, true);
        MutexLock lock(merging);
        all_answered &= flags.ok();
        for (size_t i = 0; flags && i < names.size(); ++i) {
            if ((*flags)[i] == 0) continue;
            found[i] = 1;
            locations_.put(asked[i], group.member.identity.incarnation);
        }
    });
    if (!all_answered) return std::nullopt;
    return found;
}

void Client::drop_manifests(Pool& pool, std::vector<Group>& nodes, std::span<const Incomplete> objects) {
    std::vector<std::string_view> names;
    for (const Incomplete& object : objects) names.push_back(object.name);
    std::vector<size_t> places(objects.size());
    std::iota(places.begin(), places.end(), 0);
    each(nodes, [&](Group& group) {
        std::shared_ptr<NodeClient> at = client_of(pool, group.member);
        // Under a pin the bytes that are read are those of the generation.
        Result<Pinned> pinned = at->pin(names);
        if (!pinned) return;
        ManifestReads reads(objects.size());
        for (std::string_view name : names) reads.add(name);
        Result<std::vector<int64_t>> sizes = NodeClient::get_pinned(*pinned, places, reads.items, true, true);
        if (!sizes) return;
        std::vector<std::string_view> lost;
        std::vector<uint64_t> generations;
        for (size_t i = 0; i < objects.size(); ++i) {
            if ((*sizes)[i] != static_cast<int64_t>(kManifestBytes)) continue;
            if (decode_manifest(reads.bytes[i], own_.manifest_secrets(), names[i]) != objects[i].manifest)
                continue;
            lost.push_back(names[i]);
            generations.push_back(pinned->descriptors[i].generation);
        }
        std::vector<RemovedManifest> known;
        if (!lost.empty()) (void)at->remove(lost, known, generations);
    });
    for (std::string_view name : names) locations_.forget(own_.hasher()(name));
}

}  // namespace moonpool
