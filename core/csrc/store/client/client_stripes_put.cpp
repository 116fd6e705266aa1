// Client, writing objects that are larger than one node takes. client_stripes.cpp says what they are.
//
// Threads: the caller's, and those of each() for several nodes at once; `merging` guards what they add up.
// No lock is held while a node or the master is asked.
//
// What holds: the manifest is put when each stripe was found at as many nodes as copies are wanted, or at all
// that take one. Copies of a stripe go to nodes of different hosts first, then to other nodes of those. The
// nodes are asked in rounds, each node once for each stripe. A put that fails removes the stripes that it
// placed.
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
constexpr size_t kSpreadRoundsMax = 4;  // for what a node refuses, the next ones
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

// Of a stripe that has copies at the nodes `at`: the next to ask, of another host than these where there is
// one that was not asked; nodes.size(): all were. The search begins at `first`.
size_t next_node(std::span<const NodeItems> nodes, size_t first, std::span<const size_t> at,
                 std::span<const size_t> tried) {
    auto host = [&](size_t node) -> const std::string& { return nodes[node].member.identity.host_id; };
    for (bool same_host : {false, true}) {
        for (size_t k = 0; k < nodes.size(); ++k) {
            size_t node = (first + k) % nodes.size();
            if (std::ranges::find(tried, node) != tried.end()) continue;
            bool has = std::ranges::any_of(at, [&](size_t other) { return host(other) == host(node); });
            if (!has || same_host) return node;
        }
    }
    return nodes.size();
}

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

// Those that are alive. Where there is none, those that join: while all nodes meet a new master, each may
// have yet to drop what is older, and stripes are new.
std::vector<Client::Group> Client::takers(const Members& members) {
    std::vector<Group> nodes;
    for (MemberState state : {MemberState::kAlive, MemberState::kJoining}) {
        for (const Member& member : members.rows) {
            if (member.state == state) nodes.push_back({member, {}});
        }
        if (!nodes.empty()) break;
    }
    return nodes;
}

void Client::spread(Pool& pool, std::vector<Group>& nodes, std::span<const PutItem> stripes, uint32_t copies,
                    int timeout_ms, Places& at, std::string& refusal) {
    Places tried = at;
    Mutex merging;
    for (size_t round = 0; round < kSpreadRoundsMax; ++round) {
        for (Group& node : nodes) node.items.clear();
        bool any = false;
        for (size_t i = 0; i < stripes.size(); ++i) {
            std::vector<size_t> chosen = at[i];
            while (chosen.size() < copies) {
                size_t node = next_node(nodes, i, chosen, tried[i]);
                if (node == nodes.size()) break;
                chosen.push_back(node);
                tried[i].push_back(node);
                nodes[node].items.push_back(i);
                any = true;
            }
        }
        if (!any) return;
        each(nodes, [&](Group& node) {
            const auto number = static_cast<size_t>(&node - nodes.data());
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
                    PutOutcome outcome = put->outcomes[k];
                    if (outcome != PutOutcome::kStored && outcome != PutOutcome::kExists) continue;
                    at[which[k]].push_back(number);
                    if (own) continue;
                    // Until the directory has heard of it, this client knows where it lies.
                    Hash128 hash = own_.hasher()(stripes[which[k]].name);
                    recent_.add(now_ms(), hash, node.member.id);
                    locations_.put(hash, node.member.identity.incarnation);
                }
            }
        });
    }
}

// Where there is too little room, the last stripes took the place of the first ones.
void Client::keep_what_is_there(Pool& pool, std::vector<Group>& nodes, std::span<const PutItem> stripes,
                                Places& at, std::string& refusal) {
    for (Group& node : nodes) node.items.clear();
    for (size_t i = 0; i < stripes.size(); ++i) {
        for (size_t node : at[i]) nodes[node].items.push_back(i);
    }
    Mutex merging;
    each(nodes, [&](Group& node) {
        if (node.items.empty()) return;
        std::vector<std::string_view> names;
        for (size_t i : node.items) names.push_back(stripes[i].name);
        Result<std::vector<uint8_t>> kept = client_of(pool, node.member)->exists(names);
        MutexLock lock(merging);
        for (size_t k = 0; k < node.items.size(); ++k) {
            if (kept && (*kept)[k] != 0) continue;
            std::erase(at[node.items[k]], static_cast<size_t>(&node - nodes.data()));
            refusal = kept ? "there is no room for all stripes of the object in the pool" : kept.error().text;
        }
    });
}

Status Client::put_striped(Pool& pool, const PutItem& item, const PutOptions& options, size_t i,
                           PutReport& report) {
    std::shared_ptr<Session> session = own_.current();
    Result<std::shared_ptr<const Members>> members = pool.directory->members();
    if (!members || session == nullptr) {
        report.refusal = "an object that is larger than one node takes needs the master, which is away";
        return success();
    }
    PutOptions for_manifest = options;
    if (!options.replace) {
        std::vector<size_t> manifest_sized;
        Result<std::vector<Presence>> here = exists_whole({&item.name, 1}, false, manifest_sized);
        if (here && here->front() == Presence::kHit) {
            if (manifest_sized.empty() || whole({&item.name, 1}).front() == Presence::kHit) {
                report.outcomes[i] = PutOutcome::kExists;
                if (options.replicas > 1) copy_striped(pool, item, options, i, report);
                return success();
            }
            // Its stripes were freed with it, unless a node is away: then its manifest stands there still.
            manifest_sized.clear();
            (void)exists_whole({&item.name, 1}, false, manifest_sized);
            for_manifest.replace = !manifest_sized.empty();
        }
    }
    // Every stripe goes to the next node: writing and reading use the memory and the network of all.
    std::vector<Group> nodes = takers(**members);
    if (nodes.empty()) {
        report.refusal = "no node is in touch with the master that could take the stripes of a large object";
        return success();
    }
    Manifest manifest;
    manifest.id = random_incarnation();
    manifest.size = total(item.parts);
    manifest.stripe_bytes = std::clamp<uint64_t>(session->object_bytes_max() / 4, 64u << 10, kStripeBytesMax);
    if (!manifest.within_limits()) {
        report.refusal = "an object of " + std::to_string(manifest.size) + " bytes has over " +
                         std::to_string(kStripesMax) + " stripes, the limit";
        return success();
    }
    Stripes stripes(manifest, item);
    Places at(stripes.items.size());
    std::string refusal;
    spread(pool, nodes, stripes.items, std::max(options.replicas, 1u), options.timeout_ms, at, refusal);
    // A stripe that none of these took goes wherever there is room.
    PutReport rest;
    rest.outcomes.assign(stripes.items.size(), PutOutcome::kRefused);
    std::vector<size_t> left;
    for (size_t k = 0; k < at.size(); ++k) {
        if (at[k].empty()) left.push_back(k);
    }
    PutOptions plain;
    // Without replace: the names of stripes are new.
    plain.timeout_ms = options.timeout_ms;
    if (!left.empty()) put_elsewhere(pool, stripes.items, plain, left, rest, true);
    keep_what_is_there(pool, nodes, stripes.items, at, refusal);
    size_t copies = SIZE_MAX;
    for (size_t k = 0; k < at.size(); ++k) {
        bool elsewhere = rest.outcomes[k] == PutOutcome::kStored || rest.outcomes[k] == PutOutcome::kExists;
        copies = std::min(copies, at[k].size() + (elsewhere ? 1 : 0));
    }
    if (copies == 0) {
        remove_stripes(pool, {&manifest, 1});
        report.refusal = !refusal.empty() ? refusal : rest.refusal;
        return success();
    }
    // Now that every stripe is there, the key may lead to them.
    std::vector<std::byte> bytes = encode(manifest, own_.manifest_secrets(), item.name);
    MemoryRef part = MemoryRef::host(bytes.data(), bytes.size());
    std::string_view group = item.group.empty() ? std::string_view(stripes.group) : item.group;
    PutItem under_key{item.name, item.parent, {&part, 1}, group, item.soft_ms};
    Result<PutReport> put = for_manifest.unique ? put_unique({&under_key, 1}, for_manifest)
                                                : put_whole({&under_key, 1}, for_manifest);
    if (!put) return put.error();
    report.outcomes[i] = put->outcomes.front();
    if (report.outcomes[i] != PutOutcome::kStored) {
        remove_stripes(pool, {&manifest, 1});  // of no object: another stands under the key, or none
        if (!put->refusal.empty()) report.refusal = put->refusal;
        if (!report.copies.empty()) report.copies[i] = report.outcomes[i] == PutOutcome::kExists;
        return success();
    }
    report.stored_bytes += manifest.size;
    if (report.copies.empty()) return success();
    report.copies[i] =
        std::min(put->copies.front(), static_cast<uint8_t>(std::min<size_t>(copies, UINT8_MAX)));
    if (report.copies[i] >= options.replicas) return success();
    report.short_of_copies = !put->short_of_copies.empty() ? put->short_of_copies
                             : !refusal.empty()            ? refusal
                                                : "there are not enough other hosts and nodes in the pool";
    return success();
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
    std::vector<Group> nodes = takers(*located->members);
    Places at(names.size());
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
    spread(pool, nodes, stripes->items, options.replicas, options.timeout_ms, at, refusal);
    keep_what_is_there(pool, nodes, stripes->items, at, refusal);
    std::vector<std::byte> bytes = encode(*manifest, own_.manifest_secrets(), item.name);
    MemoryRef part = MemoryRef::host(bytes.data(), bytes.size());
    std::string_view group = item.group.empty() ? std::string_view(stripes->group) : item.group;
    PutItem under_key{item.name, item.parent, {&part, 1}, group, item.soft_ms};
    PutOptions for_manifest = options;
    for_manifest.unique = false;  // it is there
    Result<PutReport> put = put_whole({&under_key, 1}, for_manifest);
    if (!put || put->outcomes.front() == PutOutcome::kRefused) return;
    size_t copies = std::min<size_t>(fewest(at), UINT8_MAX);
    report.copies[i] = std::max<uint8_t>(std::min(put->copies.front(), static_cast<uint8_t>(copies)), 1);
    if (report.copies[i] >= options.replicas) return;
    report.short_of_copies = !put->short_of_copies.empty() ? put->short_of_copies
                             : !refusal.empty()            ? refusal
                                                : "there are not enough other hosts and nodes in the pool";
}

}  // namespace moonpool
