// Objects that are larger than one node takes: cut into stripes that lie on all nodes in turn, and are
// written and read in parallel. This file reads and frees them; client_stripes_put.cpp writes them, and
// client_stripes_lookup.cpp answers for them.
//
// Threads: the caller's, and those of each(). No lock is held while a node is asked.
//
// What holds: under the key lies a manifest, which is written when all stripes are there and names them by
// an id of its own. So a manifest that a client can read had all its stripes once, two objects never share
// a stripe, and a replaced object's stripes cannot be taken for the new one's. A user's object may have a
// manifest's size, and any bytes: only the MAC with the cluster token makes a manifest.
//
// A stripe that is not found was replaced with its object, is lost, or is one of which the directory has not
// heard yet. StripeReadSteps decide how the reader finds out which.
//
// A crash between the stripes and the manifest leaves stripes that no key leads to; they are evicted as
// any cold object is.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <iterator>
#include <new>
#include <numeric>
#include <thread>

#include "base/clock.hpp"
#include "store/client/client.hpp"
#include "store/client/client_frames.hpp"
#include "store/client/manifest_reads.hpp"
#include "store/client/removal_steps.hpp"
#include "store/client/stripe_read_steps.hpp"

namespace moonpool {

namespace {

constexpr int kReplacementMaxMs = 128;  // the longest pause for a replacement of which the key is a miss

// Reads of all stripes, each to its part of the object's memory.
struct StripeReads {
    std::vector<std::string> names;
    std::vector<std::vector<MemoryRef>> targets;
    std::vector<GetItem> items;

    StripeReads(const Manifest& manifest, std::span<const MemoryRef> parts) : names(manifest.stripe_names()) {
        targets.reserve(names.size());
        for (uint64_t i = 0; i < names.size(); ++i) {
            targets.push_back(slice(parts, i * manifest.stripe_bytes, manifest.bytes_of(i)));
            items.push_back({names[i], targets.back()});
        }
    }
    StripeReads(const StripeReads&) = delete;
};

bool all_read(const Manifest& manifest, std::span<const int64_t> sizes) {
    for (uint64_t i = 0; i < sizes.size(); ++i) {
        if (sizes[i] != static_cast<int64_t>(manifest.bytes_of(i))) return false;
    }
    return true;
}

// False: the call has no time left.
bool sleep_within_budget(int ms) {
    int most = WaitBudget::within(ms);
    if (most <= 0) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(most));
    WaitBudget::spent(most);
    return true;
}

}  // namespace

Result<std::vector<Standing>> Client::standing(std::span<const std::string_view> names) {
    ManifestReads reads(names.size());
    for (std::string_view name : names) reads.add(name);
    Result<std::vector<int64_t>> sizes = get_whole(reads.items, true);
    if (!sizes) return sizes.error();
    std::vector<Standing> out;
    for (size_t i = 0; i < names.size(); ++i) {
        out.push_back(standing_of((*sizes)[i], reads.bytes[i], own_.manifest_secrets(), names[i]));
    }
    return out;
}

// A replacement removes what is older elsewhere before it puts what is new: between them the key is a miss.
Result<Standing> Client::successor(std::string_view name) {
    for (int pause_ms = 1;; pause_ms *= 2) {
        Result<std::vector<Standing>> now = standing({&name, 1});
        if (!now) return now.error();
        bool wait = now->front().size < 0 && pause_ms <= kReplacementMaxMs && sleep_within_budget(pause_ms);
        if (!wait) return now->front();
    }
}

const StripedPin* Client::UnderPins::of(size_t i) const {
    if (places[i] == kNotPinned || !pinned.has(places[i])) return nullptr;
    auto it = pinned.striped.find(places[i]);
    return it == pinned.striped.end() ? nullptr : &it->second;
}

Status Client::fill_striped(std::span<const GetItem> items, bool verify, const UnderPins* pins,
                            std::vector<int64_t>& sizes) {
    for (size_t i = 0; i < items.size(); ++i) {
        if (sizes[i] != static_cast<int64_t>(kManifestBytes)) continue;
        // The manifest lies at the front of the caller's memory, which the stripes overwrite: it was
        // decoded into a copy.
        std::array<std::byte, kManifestBytes> bytes = beginning(items[i].parts);
        std::optional<Manifest> manifest = decode_manifest(bytes, own_.manifest_secrets(), items[i].name);
        if (!manifest) {
            if (may_be_manifest(bytes)) sizes[i] = kMiss;
            continue;
        }
        uint64_t have = total(items[i].parts);
        auto room = [&](uint64_t size) -> Result<std::span<const MemoryRef>> {
            if (have < size) return too_small(items[i].name, have, size);
            return items[i].parts;
        };
        if (const StripedPin* pin = pins == nullptr ? nullptr : pins->of(i)) {
            Result<std::span<const MemoryRef>> parts = room(pin->manifest.size);
            if (!parts) return parts.error();
            Result<bool> got = get_pinned_stripes(pins->pinned, *pin, *parts, verify);
            if (!got) return got.error();
            if (*got) {
                sizes[i] = static_cast<int64_t>(pin->manifest.size);
                continue;
            }
        }
        Result<int64_t> size = read_striped(items[i].name, *manifest, verify, room);
        if (!size) return size.error();
        sizes[i] = *size;
    }
    return success();
}

Status Client::view_striped(std::span<const std::string_view> names, bool verify, const UnderPins* pins,
                            std::vector<ObjectView>& views) {
    for (size_t i = 0; i < views.size(); ++i) {
        if (views[i].owner == nullptr || views[i].size != kManifestBytes) continue;
        std::span<const std::byte> bytes(views[i].data, kManifestBytes);
        std::optional<Manifest> manifest = decode_manifest(bytes, own_.manifest_secrets(), names[i]);
        if (!manifest && !may_be_manifest(bytes)) continue;
        views[i] = ObjectView{};
        if (!manifest) continue;
        std::shared_ptr<std::byte[]> memory;
        MemoryRef part;
        auto room = [&](uint64_t size) -> Result<std::span<const MemoryRef>> {
            memory.reset(new (std::nothrow) std::byte[size]);
            if (memory == nullptr) {
                return Error{Code::kOs, "no memory for an object of " + std::to_string(size) + " bytes"};
            }
            part = MemoryRef::host(memory.get(), size);
            return std::span<const MemoryRef>(&part, 1);
        };
        if (const StripedPin* pin = pins == nullptr ? nullptr : pins->of(i)) {
            Result<std::span<const MemoryRef>> parts = room(pin->manifest.size);
            if (!parts) return parts.error();
            Result<bool> got = get_pinned_stripes(pins->pinned, *pin, *parts, verify);
            if (!got) return got.error();
            if (*got) {
                views[i] = ObjectView{memory, memory.get(), pin->manifest.size};
                continue;
            }
        }
        Result<int64_t> size = read_striped(names[i], *manifest, verify, room);
        if (!size) return size.error();
        if (*size >= 0) views[i] = ObjectView{memory, memory.get(), static_cast<uint64_t>(*size)};
    }
    return success();
}

template <class Room>
Result<int64_t> Client::read_striped(std::string_view name, const Manifest& manifest, bool verify,
                                     Room room) {
    using Wants = StripeReadSteps::Wants;
    StripeReadSteps steps(manifest);
    for (;;) {
        switch (steps.wants()) {
            case Wants::kStripes: {
                Result<std::span<const MemoryRef>> parts = room(steps.manifest().size);
                if (!parts) return parts.error();
                Result<bool> got = get_stripes(steps.manifest(), *parts, verify);
                if (!got) return got.error();
                steps.stripes_read(*got);
                break;
            }
            case Wants::kWhole: {
                Result<std::span<const MemoryRef>> parts = room(static_cast<uint64_t>(steps.now().size));
                if (!parts) return parts.error();
                GetItem item{name, *parts};
                Result<std::vector<int64_t>> sizes = get_whole({&item, 1}, verify);
                if (!sizes) return sizes.error();
                int64_t size = sizes->front();
                bool manifest_again =
                    size == static_cast<int64_t>(kManifestBytes) && may_be_manifest(beginning(*parts));
                steps.whole_read(
                    size, size >= 0 && static_cast<uint64_t>(size) <= total(*parts) && !manifest_again);
                break;
            }
            case Wants::kSuccessor: {
                Result<Standing> next = successor(name);
                if (!next) return next.error();
                steps.standing(*next);
                break;
            }
            case Wants::kLost:
                steps.settled(settle({{name, steps.manifest()}}).front());
                break;
            case Wants::kOther: {
                Result<std::vector<Standing>> other = standing({&name, 1});
                if (!other) return other.error();
                steps.standing(other->front());
                break;
            }
            case Wants::kFreeOrphans:
                free_orphans(name, steps.manifest());
                steps.freed();
                break;
            case Wants::kDone:
                return steps.size();
        }
    }
}

Result<bool> Client::get_stripes(const Manifest& manifest, std::span<const MemoryRef> parts, bool verify) {
    if (!manifest.within_limits()) return false;
    StripeReads reads(manifest, parts);
    Result<std::vector<int64_t>> sizes = get_whole(reads.items, verify);
    if (!sizes) return sizes.error();
    return all_read(manifest, *sizes);
}

// False: a pin was lost with its node.
Result<bool> Client::get_pinned_stripes(const Pinned& pinned, const StripedPin& striped,
                                        std::span<const MemoryRef> parts, bool verify) {
    const Manifest& manifest = striped.manifest;
    Pinned stripes;
    stripes.pins = pinned.pins;
    stripes.descriptors = striped.descriptors;
    stripes.under = striped.under;
    StripeReads reads(manifest, parts);
    std::vector<size_t> places(reads.items.size());
    std::iota(places.begin(), places.end(), 0);
    Result<std::vector<int64_t>> sizes = NodeClient::get_pinned(stripes, places, reads.items, verify, true);
    // A node that is gone is no error of the object's: another may have copies.
    if (!sizes && no_answer(sizes.error())) return false;
    if (!sizes) return sizes.error();
    return all_read(manifest, *sizes);
}

void Client::add_genuine(std::string_view name, const RemovedManifest& removed,
                         std::vector<Manifest>& out) const {
    std::optional<Manifest> manifest = decode_manifest(removed.bytes, own_.manifest_secrets(), name);
    if (manifest && std::ranges::find(out, *manifest) == out.end()) out.push_back(*manifest);
}

void Client::own_manifests(std::span<const std::string_view> names, std::vector<RemovedManifest>& manifests) {
    std::shared_ptr<Session> session = own_.current();
    if (session == nullptr) return;
    const IndexReader* index = session->path().index();
    std::vector<RemovedManifest> found;
    std::vector<std::string_view> asked;
    for (size_t i = 0; i < names.size(); ++i) {
        // The index has no long names, and a node of another host shows none.
        if (index != nullptr && names[i].size() <= kInlineName) {
            auto hit = index->find(session->space(), own_.hasher()(names[i]), names[i]);
            if (!hit || hit->size != kManifestBytes) continue;
        }
        found.emplace_back().item = i;
        asked.push_back(names[i]);
    }
    if (asked.empty()) return;
    std::vector<MemoryRef> parts;
    std::vector<GetItem> items;
    parts.reserve(asked.size());
    for (size_t k = 0; k < asked.size(); ++k) {
        parts.push_back(MemoryRef::host(found[k].bytes.data(), found[k].bytes.size()));
        items.push_back({asked[k], {&parts[k], 1}});
    }
    Result<std::vector<int64_t>> sizes = own_.get(items, false, true);
    for (size_t k = 0; sizes && k < asked.size(); ++k) {
        if ((*sizes)[k] == static_cast<int64_t>(kManifestBytes)) manifests.push_back(found[k]);
    }
}

void Client::remove_stripes(Pool& pool, std::span<const Manifest> manifests) {
    std::vector<std::string> stripes;
    for (const Manifest& manifest : manifests) {
        std::ranges::move(manifest.stripe_names(), std::back_inserter(stripes));
    }
    if (stripes.empty()) return;
    std::vector<std::string_view> names(stripes.begin(), stripes.end());
    std::vector<RemovedManifest> none;
    for (const std::vector<size_t>& which : pool.directory->by_range(hashes(names))) {
        std::vector<std::string_view> some;
        for (size_t i : which) some.push_back(names[i]);
        RemovalSteps steps(hashes(some), pool.own, true, locations_, recent_);
        tell_removal(pool, some, steps, none);
        end_removal(pool, some, steps);
    }
}

}  // namespace moonpool
