// Client, answering for striped objects: whether one is there as a whole, pins on all that it is made of, and
// the end of one that lost a stripe.
//
// Threads: the caller's, and those of each(). No lock is held while a node or the master is asked.
//
// What holds: StripeLookupSteps, StripePinSteps and LostStripeSteps say it, which this file drives. A pin
// holds all stripes or counts for none. The stripes of all objects of a call are asked for together: one
// question to the own node, one to the master, one to each other node.
#include <algorithm>
#include <array>
#include <numeric>

#include "base/mutex.hpp"
#include "store/client/client.hpp"
#include "store/client/client_frames.hpp"
#include "store/client/manifest_reads.hpp"
#include "store/client/stripe_lookup_steps.hpp"

namespace moonpool {

std::vector<Presence> Client::whole(std::span<const std::string_view> names) {
    using Wants = StripeLookupSteps::Wants;
    StripeLookupSteps steps(names.size());
    for (;;) {
        switch (steps.wants()) {
            case Wants::kStanding: {
                std::vector<std::string_view> asked;
                for (size_t i : steps.left()) asked.push_back(names[i]);
                steps.standing(standing(asked));
                break;
            }
            case Wants::kStripes: {
                std::vector<std::string_view> stripes(steps.names().begin(), steps.names().end());
                std::vector<size_t> ignored;
                steps.stripes(exists_whole(stripes, true, ignored));
                break;
            }
            case Wants::kLost: {
                std::vector<Incomplete> objects;
                for (const auto& [i, manifest] : steps.lost()) objects.push_back({names[i], manifest});
                steps.settled(settle(std::move(objects)));
                break;
            }
            case Wants::kDone:
                return steps.present();
        }
    }
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

bool Client::pin_stripes(Pinned& pinned, size_t i, std::string_view name, const Manifest& manifest,
                         std::string& why) {
    using Wants = StripePinSteps::Wants;
    using Outcome = StripePinSteps::Outcome;
    StripePinSteps steps(manifest);
    for (;;) {
        switch (steps.wants()) {
            case Wants::kPinStripes: {
                std::vector<std::string> stripes = steps.manifest().stripe_names();
                std::vector<std::string_view> names(stripes.begin(), stripes.end());
                std::string reason;
                Result<Pinned> all = pin_whole(names, reason);
                if (!all) {
                    why = all.error().text;
                    return false;
                }
                bool has_all = std::ranges::find(all->under, kNoPin) == all->under.end();
                if (has_all) {
                    auto base = static_cast<uint32_t>(pinned.pins.size());
                    for (uint32_t& under : all->under) under += base;
                    pinned.striped[i] = {steps.manifest(), std::move(all->descriptors),
                                         std::move(all->under)};
                    for (auto& pin : all->pins) pinned.pins.push_back(std::move(pin));
                } else {  // not all may be pinned, or a node did not answer
                    if (!all->why.empty()) reason = all->why;
                    if (!reason.empty()) why = reason;
                }
                steps.stripes(has_all, reason.empty());
                break;
            }
            case Wants::kPinKey:
                steps.key(pin_key(pinned, i, name, steps.manifest()));
                break;
            case Wants::kLost:
                steps.settled(settle({{name, steps.manifest()}}).front());
                break;
            case Wants::kDone:
                if (steps.outcome() == Outcome::kOvertaken)
                    why = "the object was replaced again and again while it was pinned";
                return steps.outcome() == Outcome::kPinned || steps.outcome() == Outcome::kWhole;
        }
    }
}

// The key as it is now, in the place of what was pinned before, unless it is the same.
std::optional<Standing> Client::pin_key(Pinned& pinned, size_t i, std::string_view name,
                                        const Manifest& before) {
    std::string ignored;
    Result<Pinned> again = pin_whole({&name, 1}, ignored);
    if (!again || !again->has(0)) return std::nullopt;
    std::array<std::byte, kManifestBytes> bytes{};
    MemoryRef part = MemoryRef::host(bytes.data(), bytes.size());
    GetItem item{name, {&part, 1}};
    size_t place = 0;
    Result<std::vector<int64_t>> size = NodeClient::get_pinned(*again, {&place, 1}, {&item, 1}, true, true);
    if (!size || size->front() < 0) return std::nullopt;
    Standing now = standing_of(size->front(), bytes, own_.manifest_secrets(), name);
    if (now.manifest == before) return now;
    pinned.descriptors[i] = again->descriptors[0];
    pinned.under[i] = static_cast<uint32_t>(pinned.pins.size()) + again->under[0];
    for (auto& pin : again->pins) pinned.pins.push_back(std::move(pin));
    return now;
}

std::vector<Presence> Client::settle(std::vector<Incomplete> objects) {
    std::shared_ptr<Pool> others = pool();
    if (others == nullptr) return std::vector<Presence>(objects.size(), Presence::kUnknown);
    LostStripeSteps steps(std::move(objects), others->own, own_.hasher(), locations_);
    drive(*others, steps);
    return steps.present();
}

void Client::free_orphans(std::string_view name, const Manifest& manifest) {
    std::shared_ptr<Pool> others = pool();
    if (others == nullptr) return;
    LostStripeSteps steps =
        LostStripeSteps::free_orphans({name, manifest}, others->own, own_.hasher(), locations_);
    drive(*others, steps);
}

void Client::drive(Pool& pool, LostStripeSteps& steps) {
    using Wants = LostStripeSteps::Wants;
    while (steps.wants() != Wants::kDone) {
        switch (steps.wants()) {
            case Wants::kMembers:
                steps.members(pool.directory->members(true));
                break;
            case Wants::kAsk: {
                std::vector<std::string_view> names(steps.names().begin(), steps.names().end());
                Mutex merging;
                each(steps.nodes(), [&](Group& group) {
                    Result<std::vector<uint8_t>> flags = client_of(pool, group.member)->exists(names, true);
                    MutexLock lock(merging);
                    steps.answered(group, flags);
                });
                steps.all_answered();
                break;
            }
            case Wants::kDrop:
                drop_manifests(pool, steps.nodes(), steps.lost());
                steps.dropped();
                break;
            case Wants::kFree:
                remove_stripes(pool, steps.freed());
                steps.done();
                break;
            case Wants::kDone:
                break;
        }
    }
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
}

}  // namespace moonpool
