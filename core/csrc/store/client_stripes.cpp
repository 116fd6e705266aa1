// Objects that are larger than one node takes: cut into stripes that lie on all nodes in turn, and are
// written and read in parallel. A stripe that is lost makes the whole object a miss.
#include <algorithm>
#include <cstring>
#include <new>

#include "store/client.hpp"
#include "store/client_frames.hpp"
#include "wire/auth.hpp"

namespace moonpool {

namespace {

constexpr uint64_t kStripeBytesMax = 64ull << 20;
constexpr uint64_t kStripesMax = 4096;

// The first bytes of an object, wherever its parts lie.
std::array<std::byte, kManifestBytes> beginning(std::span<const Part> parts) {
    std::array<std::byte, kManifestBytes> bytes{};
    size_t at = 0;
    for (const Part& part : parts) {
        size_t n = std::min<uint64_t>(bytes.size() - at, part.size);
        if (n != 0) std::memcpy(bytes.data() + at, part.data, n);
        at += n;
    }
    return bytes;
}

}  // namespace

Status Client::fill_striped(std::span<const GetItem> items, bool verify, std::vector<int64_t>& sizes) {
    for (size_t i = 0; i < items.size(); ++i) {
        if (sizes[i] != static_cast<int64_t>(kManifestBytes)) continue;
        std::optional<Manifest> manifest =
            decode_manifest(beginning(items[i].parts), options_.token, items[i].name);
        if (!manifest) continue;
        uint64_t room = total(items[i].parts);
        if (room < manifest->size) return too_small(items[i].name, room, manifest->size);
        Result<bool> whole = get_stripes(*manifest, items[i].parts, verify);
        if (!whole) return whole.error();
        sizes[i] = *whole ? static_cast<int64_t>(manifest->size) : kMiss;
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
        std::shared_ptr<std::byte[]> memory(new (std::nothrow) std::byte[manifest->size]);
        if (memory == nullptr) {
            return Error{Code::kOs,
                         "no memory for an object of " + std::to_string(manifest->size) + " bytes"};
        }
        Part part{memory.get(), manifest->size};
        Result<bool> whole = get_stripes(*manifest, {&part, 1}, verify);
        if (!whole) return whole.error();
        views[i] = *whole ? ObjectView{memory, memory.get(), manifest->size} : ObjectView{};
    }
    return success();
}

Result<bool> Client::get_stripes(const Manifest& manifest, std::span<const Part> parts, bool verify) {
    if (manifest.stripes() > kStripesMax) return false;
    std::vector<std::string> names;
    std::vector<std::vector<Part>> targets;
    std::vector<GetItem> items;
    names.reserve(manifest.stripes());
    targets.reserve(manifest.stripes());
    for (uint64_t i = 0; i < manifest.stripes(); ++i) {
        names.push_back(manifest.stripe_name(i));
        targets.push_back(slice(parts, i * manifest.stripe_bytes, manifest.bytes_of(i)));
        items.push_back({names.back(), targets.back()});
    }
    Result<std::vector<int64_t>> sizes = get_whole(items, verify);
    if (!sizes) return sizes.error();
    for (uint64_t i = 0; i < manifest.stripes(); ++i) {
        if ((*sizes)[i] != static_cast<int64_t>(manifest.bytes_of(i))) return false;
    }
    return true;
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
    if (!options.replace) {
        Result<std::vector<Presence>> here = exists({&item.name, 1});
        if (here && here->front() == Presence::kHit) {
            outcome = PutOutcome::kExists;
            return success();
        }
    }
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
    std::vector<std::string> names;
    std::vector<std::vector<Part>> parts;
    std::vector<PutItem> stripes;
    names.reserve(manifest.stripes());
    parts.reserve(manifest.stripes());
    for (uint64_t i = 0; i < manifest.stripes(); ++i) {
        names.push_back(manifest.stripe_name(i));
        parts.push_back(slice(item.parts, i * manifest.stripe_bytes, manifest.bytes_of(i)));
        stripes.push_back({names.back(), {}, parts.back()});
        groups[i % groups.size()].items.push_back(i);
    }
    std::vector<PutOutcome> outcomes(stripes.size(), PutOutcome::kRefused);
    std::mutex merging;
    each(groups, [&](Group& group) {
        std::vector<PutItem> batch;
        for (size_t i : group.items) batch.push_back(stripes[i]);
        bool own = group.member.identity.incarnation == pool.own;
        Result<PutReport> put = own ? own_.put(batch, false, true, options.timeout_ms)
                                    : node(pool, group.member)->put(batch, false, true, options.timeout_ms);
        std::lock_guard lock(merging);
        if (!put) {
            report.refusal = put.error().text;
            return;
        }
        for (size_t k = 0; k < group.items.size(); ++k) outcomes[group.items[k]] = put->outcomes[k];
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
    plain.timeout_ms = options.timeout_ms;
    if (!left.empty()) put_elsewhere(pool, stripes, plain, left, rest, true);
    if (std::ranges::find(rest.outcomes, PutOutcome::kRefused) != rest.outcomes.end()) {
        if (!rest.refusal.empty()) report.refusal = rest.refusal;
        return success();
    }
    std::vector<std::byte> bytes = encode(manifest, options_.token, item.name);
    Part part{bytes.data(), bytes.size()};
    PutItem under_key{item.name, item.parent, {&part, 1}};
    Result<PutReport> put = put_whole({&under_key, 1}, options);
    if (!put) return put.error();
    outcome = put->outcomes.front();
    if (outcome == PutOutcome::kStored) {
        report.stored_bytes += manifest.size;
    } else if (!put->refusal.empty()) {
        report.refusal = put->refusal;
    }
    return success();
}

}  // namespace moonpool
