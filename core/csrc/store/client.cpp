#include "store/client.hpp"

#include <algorithm>
#include <cstring>
#include <map>
#include <new>
#include <numeric>
#include <system_error>
#include <thread>
#include <unordered_set>

#include "base/crc32c.hpp"
#include "store/client_frames.hpp"

namespace moonpool {

namespace {

constexpr size_t kAttemptsMax = 3;   // holders that are tried for one key in one call
constexpr size_t kNodesAtOnce = 16;  // that one call talks to
constexpr int kOffsetBits = 48;      // of a descriptor's offset; above it a hand-over has the holder's place
constexpr size_t kHoldersMax = 1u << 16;

bool no_answer(const Error& error) {
    return error.code == Code::kUnavailable || error.code == Code::kTimeout || error.code == Code::kProtocol;
}

}  // namespace

Client::Client(ClientOptions options) : own_(options), peers_(options), options_(std::move(options)) {}

Client::~Client() { close(); }

void Client::close() {
    own_.close();
    if (own_.check_open().ok() || own_.check_open().error().code == Code::kForked) return;
    std::shared_ptr<Pool> pool;
    {
        std::lock_guard lock(mutex_);
        closed_ = true;
        pool = std::move(pool_);
    }
    if (pool != nullptr) pool->directory->close();
    peers_.close();
}

// Known once the own node was reached; it stays known when that node is gone.
std::shared_ptr<Client::Pool> Client::pool() {
    std::shared_ptr<Session> session = own_.current();
    std::lock_guard lock(mutex_);
    if (closed_ || session == nullptr || session->incarnation() == asked_) return pool_;
    asked_ = session->incarnation();
    if (session->master().empty()) {
        pool_.reset();
        return pool_;
    }
    auto pool = std::make_shared<Pool>();
    pool->host_id = session->host_id();
    pool->own = session->incarnation();
    DirectoryClientOptions to;
    to.master = session->master();
    to.token = options_.token;
    to.tenant = options_.tenant;
    to.timeout_ms = std::min(options_.timeout_ms, to.timeout_ms);
    pool->directory = std::make_unique<DirectoryClient>(std::move(to));
    pool_ = std::move(pool);
    return pool_;
}

std::vector<Hash128> Client::hashes(std::span<const std::string_view> names) const {
    std::vector<Hash128> out;
    out.reserve(names.size());
    for (std::string_view name : names) out.push_back(own_.hasher()(name));
    return out;
}

void Client::each(std::vector<Group>& groups, const std::function<void(Group&)>& run) {
    std::atomic<size_t> next{0};
    auto work = [&] {
        for (size_t i; (i = next.fetch_add(1)) < groups.size();) run(groups[i]);
    };
    // Where no more threads are to be had, fewer do it.
    std::vector<std::thread> threads;
    size_t helpers = std::min(groups.size(), kNodesAtOnce) - (groups.empty() ? 0 : 1);
    try {
        for (size_t i = 0; i < helpers; ++i) threads.emplace_back(work);
    } catch (const std::system_error&) {
    }
    work();
    for (std::thread& thread : threads) thread.join();
}

// The own node before others of this host before the rest; memory before disk; and else spread by `salt`.
const Member* Client::nearest(const Pool& pool, const Members& members, std::span<const Holder> holders,
                              std::span<const NodeId> tried, uint64_t salt) {
    const Member* best = nullptr;
    uint64_t best_cost = UINT64_MAX;
    for (size_t i = 0; i < holders.size(); ++i) {
        if (std::ranges::find(tried, holders[i].node) != tried.end()) continue;
        const Member* member = members.find(holders[i].node);
        if (member == nullptr || member->state != MemberState::kAlive) continue;
        uint64_t cost = 2;
        if (member->identity.incarnation == pool.own) {
            cost = 0;
        } else if (!pool.host_id.empty() && member->identity.host_id == pool.host_id) {
            cost = 1;
        }
        cost = cost * 2 + static_cast<uint64_t>(holders[i].tier != Tier::kDram);
        cost = cost * 256 + (salt + i) % holders.size() % 256;
        if (cost < best_cost) {
            best = member;
            best_cost = cost;
        }
    }
    return best;
}

// ---- get

Result<std::vector<int64_t>> Client::get(std::span<const GetItem> items, bool verify) {
    Result<std::vector<int64_t>> sizes = get_whole(items, verify);
    for (size_t i = 0; sizes && i < items.size(); ++i) {
        uint64_t room = total(items[i].parts);
        if ((*sizes)[i] >= 0 && room < static_cast<uint64_t>((*sizes)[i])) {
            return too_small(items[i].name, room, static_cast<uint64_t>((*sizes)[i]));
        }
    }
    if (sizes) {
        if (Status status = fill_striped(items, verify, *sizes); !status) return status.error();
    }
    return sizes;
}

Result<std::vector<int64_t>> Client::get_pinned(const Pinned& pinned, std::span<const size_t> places,
                                                std::span<const GetItem> items, bool verify) {
    Result<std::vector<int64_t>> sizes = NodeClient::get_pinned(pinned, places, items, verify);
    if (sizes) {
        if (Status status = fill_striped(items, verify, *sizes); !status) return status.error();
    }
    return sizes;
}

Result<std::vector<int64_t>> Client::get_whole(std::span<const GetItem> items, bool verify) {
    Result<std::vector<int64_t>> sizes = own_.get(items, verify, true);
    std::shared_ptr<Pool> others = pool();
    if (others == nullptr) {
        if (!sizes) return sizes;
        for (size_t i = 0; i < items.size(); ++i) {
            if ((*sizes)[i] == kDamagedRead) return corrupt(items[i].name);
        }
        return sizes;
    }
    bool own_answered = sizes.ok();
    if (!own_answered) {
        if (!no_answer(sizes.error())) return sizes;
        for (const GetItem& item : items) {
            if (item.name.empty()) return sizes;
        }
    }
    std::vector<int64_t> found = own_answered ? *sizes : std::vector<int64_t>(items.size(), kMiss);
    if (std::ranges::all_of(found, [](int64_t size) { return size >= 0; })) return found;
    find_elsewhere(*others, items, verify, found);
    for (int64_t& size : found) {
        if (size == kDamagedRead) size = kMiss;  // nobody had it whole
    }
    // With the own node away, a miss everywhere else is not known to be a miss.
    if (!own_answered && std::ranges::find(found, kMiss) != found.end()) return sizes.error();
    return found;
}

// Fills in what other nodes have. A holder that fails, or whose bytes are damaged, is followed by the next.
void Client::find_elsewhere(Pool& pool, std::span<const GetItem> items, bool verify,
                            std::vector<int64_t>& sizes) {
    std::vector<std::vector<NodeId>> tried(items.size());
    Result<std::shared_ptr<const Members>> members = pool.directory->members();
    for (size_t attempt = 0; attempt < kAttemptsMax + 1; ++attempt) {
        std::vector<size_t> missing;
        std::vector<Hash128> asked;
        for (size_t i = 0; i < items.size(); ++i) {
            if (sizes[i] >= 0) continue;
            missing.push_back(i);
            asked.push_back(own_.hasher()(items[i].name));
        }
        if (missing.empty()) return;
        std::map<NodeId, Group> groups;
        auto assign = [&](const Member& member, size_t item) {
            tried[item].push_back(member.id);
            Group& group = groups[member.id];
            group.member = member;
            group.items.push_back(item);
        };
        std::vector<size_t> unknown;
        for (size_t k = 0; k < missing.size(); ++k) {
            NodeId known = attempt == 0 && members ? locations_.find(asked[k]) : kNoNode;
            const Member* member = known == kNoNode ? nullptr : (*members)->find(known);
            if (member != nullptr && member->state == MemberState::kAlive &&
                member->identity.incarnation != pool.own) {
                assign(*member, missing[k]);
            } else {
                unknown.push_back(k);
            }
        }
        if (!unknown.empty()) {
            std::vector<Hash128> question;
            for (size_t k : unknown) question.push_back(asked[k]);
            Result<LocateAnswer> located = pool.directory->locate(question);
            for (size_t u = 0; located && u < located->keys.size(); ++u) {
                size_t item = missing[unknown[u]];
                std::vector<NodeId> avoid = tried[item];
                for (const Member& member : located->members->rows) {
                    if (member.identity.incarnation == pool.own) avoid.push_back(member.id);
                }
                const Member* member =
                    nearest(pool, *located->members, located->keys[u], avoid, question[u].low);
                // Damaged on the way, and nobody else has it: once more from the same node.
                if (member == nullptr && sizes[item] == kDamagedRead && attempt < 2) {
                    member = nearest(pool, *located->members, located->keys[u], {}, question[u].low);
                }
                if (member != nullptr) assign(*member, item);
            }
        }
        if (groups.empty()) return;
        std::vector<Group> work;
        for (auto& [id, group] : groups) work.push_back(std::move(group));
        each(work, [&](Group& group) {
            std::vector<GetItem> wanted;
            for (size_t i : group.items) wanted.push_back(items[i]);
            Result<std::vector<int64_t>> got = node(pool, group.member)->get(wanted, verify, true);
            for (size_t k = 0; k < group.items.size(); ++k) {
                size_t i = group.items[k];
                if (!got) {
                    locations_.forget(own_.hasher()(items[i].name));
                    continue;
                }
                sizes[i] = (*got)[k];
                if (sizes[i] >= 0) {
                    locations_.put(own_.hasher()(items[i].name), group.member.id);
                } else {
                    locations_.forget(own_.hasher()(items[i].name));
                }
            }
        });
    }
}

Result<std::vector<ObjectView>> Client::views(const Pinned& pinned, std::span<const size_t> places,
                                              std::span<const std::string_view> names, bool verify) {
    if (verify) {
        if (Status status = NodeClient::verify(pinned, places, names); !status) return status.error();
    }
    Result<std::vector<ObjectView>> views = NodeClient::views(pinned, places);
    if (views) {
        if (Status status = view_striped(names, verify, *views); !status) return status.error();
    }
    return views;
}

Result<std::vector<ObjectView>> Client::views(std::span<const std::string_view> names, bool verify) {
    Result<Pinned> pinned = pin(names);
    if (!pinned) return pinned.error();
    std::vector<size_t> places(names.size());
    std::iota(places.begin(), places.end(), 0);
    if (verify) {
        if (Status status = NodeClient::verify(*pinned, places, names); !status) return status.error();
    }
    Result<std::vector<ObjectView>> views = NodeClient::views(*pinned, places);
    bool lost = !views.ok();
    if (lost) {
        if (!no_answer(views.error())) return views;
        views = std::vector<ObjectView>(names.size());
    }
    std::shared_ptr<Pool> others = pool();
    if (others == nullptr) return views;
    // A holder died, or the bytes were damaged on their way: from wherever else they are.
    std::vector<GetItem> items;
    std::vector<Part> parts;
    std::vector<size_t> at;
    std::vector<std::shared_ptr<std::byte[]>> memory;
    for (size_t i = 0; i < names.size(); ++i) {
        if ((*views)[i].owner != nullptr || !pinned->has(i)) continue;
        uint64_t size = pinned->descriptors[i].size;
        memory.emplace_back(new (std::nothrow) std::byte[size]);
        if (memory.back() == nullptr)
            return Error{Code::kOs, "no memory for " + std::to_string(size) + " bytes"};
        parts.push_back(Part{memory.back().get(), size});
        at.push_back(i);
    }
    if (at.empty()) {
        if (Status status = view_striped(names, verify, *views); !status) return status.error();
        return views;
    }
    for (size_t k = 0; k < at.size(); ++k) items.push_back({names[at[k]], {&parts[k], 1}});
    Result<std::vector<int64_t>> sizes = get_whole(items, verify);
    if (!sizes) return sizes.error();
    for (size_t k = 0; k < at.size(); ++k) {
        if ((*sizes)[k] < 0) continue;
        (*views)[at[k]] = ObjectView{memory[k], memory[k].get(), static_cast<uint64_t>((*sizes)[k])};
    }
    if (Status status = view_striped(names, verify, *views); !status) return status.error();
    return views;
}

// ---- pin, exists, longest_prefix

Result<Pinned> Client::pin(std::span<const std::string_view> names) {
    Result<Pinned> pinned = own_.pin(names);
    std::shared_ptr<Pool> others = pool();
    if (others == nullptr) return pinned;
    bool own_answered = pinned.ok();
    Error own_error;
    if (!own_answered) {
        if (!no_answer(pinned.error())) return pinned;
        own_error = pinned.error();
        Pinned nothing;
        nothing.descriptors.resize(names.size());
        nothing.under.assign(names.size(), kNoPin);
        pinned = std::move(nothing);
    }
    std::vector<size_t> missing;
    for (size_t i = 0; i < names.size(); ++i) {
        if (!pinned->has(i)) missing.push_back(i);
    }
    if (missing.empty()) return pinned;
    std::string why;
    pin_elsewhere(*others, names, missing, *pinned, why);
    // With the own node away, a miss everywhere else is not known to be a miss.
    for (size_t i = 0; !own_answered && i < names.size(); ++i) {
        if (!pinned->has(i)) return own_error;
    }
    return pinned;
}

void Client::pin_elsewhere(Pool& pool, std::span<const std::string_view> names,
                           std::span<const size_t> missing, Pinned& pinned, std::string& why) {
    std::vector<size_t> left(missing.begin(), missing.end());
    std::map<size_t, std::vector<NodeId>> tried;
    std::mutex merging;
    for (size_t attempt = 0; attempt < kAttemptsMax && !left.empty(); ++attempt) {
        std::vector<std::string_view> wanted;
        for (size_t i : left) wanted.push_back(names[i]);
        std::vector<Hash128> asked = hashes(wanted);
        Result<LocateAnswer> located = pool.directory->locate(asked);
        std::shared_ptr<const Members> members;
        if (located) {
            members = located->members;
        } else {
            why = located.error().text;
            if (auto last = pool.directory->members()) members = *last;
            if (members == nullptr) return;
        }
        std::map<NodeId, Group> groups;
        for (size_t k = 0; k < asked.size(); ++k) {
            const Member* member =
                located ? nearest(pool, *members, located->keys[k], tried[left[k]], asked[k].low) : nullptr;
            // Where this client put it a moment ago, or found it before.
            if (NodeId known = locations_.find(asked[k]); member == nullptr && attempt == 0) {
                member = members->find(known);
                if (member != nullptr && member->state != MemberState::kAlive) member = nullptr;
            }
            if (member == nullptr) continue;
            tried[left[k]].push_back(member->id);
            Group& group = groups[member->id];
            group.member = *member;
            group.items.push_back(left[k]);
        }
        std::vector<Group> work;
        for (auto& [id, group] : groups) work.push_back(std::move(group));
        std::vector<size_t> again;
        each(work, [&](Group& group) {
            std::vector<std::string_view> keys;
            for (size_t i : group.items) keys.push_back(names[i]);
            Result<Pinned> got = group.member.identity.incarnation == pool.own
                                     ? own_.pin(keys)
                                     : node(pool, group.member)->pin(keys);
            std::lock_guard lock(merging);
            if (!got) {
                why = got.error().text;
                again.insert(again.end(), group.items.begin(), group.items.end());
                return;
            }
            auto base = static_cast<uint32_t>(pinned.pins.size());
            for (size_t k = 0; k < group.items.size(); ++k) {
                if (!got->has(k)) {
                    again.push_back(group.items[k]);
                    continue;
                }
                locations_.put(own_.hasher()(keys[k]), group.member.id);
                pinned.descriptors[group.items[k]] = got->descriptors[k];
                pinned.under[group.items[k]] = base + got->under[k];
            }
            for (auto& pin : got->pins) pinned.pins.push_back(std::move(pin));
        });
        left = std::move(again);
    }
}

Result<std::vector<Presence>> Client::exists(std::span<const std::string_view> names) {
    Result<std::vector<uint8_t>> own = own_.exists(names);
    std::shared_ptr<Pool> others = pool();
    if (!own && (others == nullptr || !no_answer(own.error()))) return own.error();
    std::vector<Presence> present(names.size(), own ? Presence::kMiss : Presence::kUnknown);
    std::vector<std::string_view> wanted;
    std::vector<size_t> place;
    for (size_t i = 0; i < names.size(); ++i) {
        if (own && (*own)[i] != 0) {
            present[i] = Presence::kHit;
        } else {
            wanted.push_back(names[i]);
            place.push_back(i);
        }
    }
    if (others == nullptr || wanted.empty()) return present;
    Result<LocateAnswer> located = others->directory->locate(hashes(wanted));
    if (!located) {
        for (size_t i : place) present[i] = Presence::kUnknown;
        return present;
    }
    // The directory may be some milliseconds behind: the holder has the last word.
    std::map<NodeId, Group> groups;
    for (size_t k = 0; k < wanted.size(); ++k) {
        std::vector<NodeId> avoid;
        for (const Member& member : located->members->rows) {
            if (own && member.identity.incarnation == others->own) avoid.push_back(member.id);
        }
        const Member* member = nearest(*others, *located->members, located->keys[k], avoid, k);
        if (member == nullptr) member = located->members->find(locations_.find(own_.hasher()(wanted[k])));
        if (member == nullptr || member->state != MemberState::kAlive) continue;
        Group& group = groups[member->id];
        group.member = *member;
        group.items.push_back(k);
    }
    std::vector<Group> work;
    for (auto& [id, group] : groups) work.push_back(std::move(group));
    each(work, [&](Group& group) {
        std::vector<std::string_view> keys;
        for (size_t k : group.items) keys.push_back(wanted[k]);
        Result<std::vector<uint8_t>> flags = node(*others, group.member)->exists(keys);
        for (size_t j = 0; j < keys.size(); ++j) {
            Presence& answer = present[place[group.items[j]]];
            if (!flags) {
                answer = Presence::kUnknown;
            } else if ((*flags)[j] != 0) {
                answer = Presence::kHit;
            }
        }
    });
    return present;
}

Result<Prefix> Client::longest_prefix(std::span<const std::string_view> names, uint32_t width, bool pin) {
    Result<Prefix> own = own_.longest_prefix(names, width, pin);
    std::shared_ptr<Pool> others = pool();
    if (others == nullptr) return own;
    Prefix prefix;
    if (own) {
        prefix = std::move(*own);
    } else if (no_answer(own.error()) && width != 0 && names.size() % width == 0) {
        prefix.why = own.error().text;
    } else {
        return own;
    }
    size_t have = prefix.blocks * width;
    if (have == names.size()) return prefix;
    std::span<const std::string_view> rest = names.subspan(have);
    LocateOptions question;
    question.prefix = true;
    question.width = static_cast<uint16_t>(width);
    Result<LocateAnswer> located = others->directory->locate(hashes(rest), question);
    if (!located) {
        prefix.why = located.error().text;
        return prefix;
    }
    size_t more = located->keys.size() / width * width;
    if (more == 0) return prefix;
    prefix.descriptors.resize(have + more);
    prefix.under.resize(have + more, kNoPin);
    if (pin) {
        std::vector<size_t> missing(more);
        std::iota(missing.begin(), missing.end(), have);
        pin_elsewhere(*others, names, missing, prefix, prefix.why);
        while (more != 0) {
            size_t gap = have;
            while (gap < have + more && prefix.has(gap)) ++gap;
            if (gap == have + more) break;
            more = (gap - have) / width * width;
        }
        prefix.descriptors.resize(have + more);
        prefix.under.resize(have + more);
    }
    prefix.blocks += more / width;
    return prefix;
}

// ---- put

// Whether the own node would have to evict for that much. Not known of a node of another host.
bool Client::own_is_full(uint64_t bytes) {
    std::shared_ptr<Session> session = own_.current();
    if (session == nullptr || !session->alive() || session->remote()) return false;
    return session->index().free_bytes() < bytes + session->arena_bytes() / 8;
}

Result<PutReport> Client::put(std::span<const PutItem> items, const PutOptions& options) {
    std::vector<PutItem> whole;
    std::vector<size_t> place, striped;
    for (size_t i = 0; i < items.size(); ++i) {
        if (too_large_for_one(items[i])) {
            striped.push_back(i);
        } else {
            whole.push_back(items[i]);
            place.push_back(i);
        }
    }
    if (striped.empty()) return put_whole(items, options);
    Result<PutReport> some = put_whole(whole, options);
    if (!some) return some;
    PutReport report = std::move(*some);
    std::vector<PutOutcome> outcomes(items.size(), PutOutcome::kRefused);
    std::vector<uint8_t> copies;
    if (!report.copies.empty()) copies.assign(items.size(), 1);
    for (size_t k = 0; k < place.size(); ++k) {
        outcomes[place[k]] = report.outcomes[k];
        if (!copies.empty()) copies[place[k]] = report.copies[k];
    }
    std::shared_ptr<Pool> others = pool();
    for (size_t i : striped) {
        Status status = put_striped(*others, items[i], options, outcomes[i], report);
        if (!status) return status.error();
    }
    report.outcomes = std::move(outcomes);
    report.copies = std::move(copies);
    return report;
}

Result<PutReport> Client::put_whole(std::span<const PutItem> items, const PutOptions& options) {
    std::shared_ptr<Pool> others = pool();
    if (others == nullptr) {
        Result<PutReport> report = own_.put(items, options.replace, options.ack, options.timeout_ms);
        others = pool();  // the first call of all finds out
        if (report && options.replicas > 1) {
            if (others != nullptr) {
                replicate(*others, items, options, *report);
            } else {
                report->copies.assign(items.size(), 1);
                report->short_of_copies = "the node has no master, and so no other nodes";
            }
        }
        if (others == nullptr || report) return report;
    }
    uint64_t bytes = 0;
    for (const PutItem& item : items) bytes += std::min(total(item.parts), UINT64_MAX - bytes);
    PutReport report;
    std::vector<size_t> left(items.size());
    std::iota(left.begin(), left.end(), 0);
    report.outcomes.assign(items.size(), PutOutcome::kRefused);
    auto still_refused = [&] {
        std::vector<size_t> refused;
        for (size_t i = 0; i < items.size(); ++i) {
            if (report.outcomes[i] == PutOutcome::kRefused) refused.push_back(i);
        }
        return refused;
    };
    if (options.replace) {
        // Whoever else has an older generation loses it first: from here on nobody reads it.
        std::vector<std::string_view> names;
        for (const PutItem& item : items) names.push_back(item.name);
        std::vector<uint8_t> ignored(names.size());
        remove_elsewhere(*others, names, false, ignored);
    }
    // The own node is full and another is not: a new block is better there than in an old one's place.
    bool spilled = options.ack && !options.replace && own_is_full(bytes) && others->room.may_ask();
    if (spilled) {
        std::erase_if(left, [&](size_t i) {
            bool here = own_has(items[i].name);
            if (here) report.outcomes[i] = PutOutcome::kExists;
            return here;
        });
        size_t wanted = left.size();
        put_elsewhere(*others, items, options, left, report, false);
        left = still_refused();
        if (wanted != 0 && left.size() == wanted) others->room.nowhere();
    }
    Error own_error;
    if (!left.empty()) {
        std::vector<PutItem> own_items;
        for (size_t i : left) own_items.push_back(items[i]);
        Result<PutReport> own = own_.put(own_items, options.replace, options.ack, options.timeout_ms);
        if (own) {
            for (size_t k = 0; k < left.size(); ++k) report.outcomes[left[k]] = own->outcomes[k];
            report.refusal = own->refusal;
            report.stored_bytes += own->stored_bytes;
        } else if (no_answer(own.error())) {
            own_error = own.error();
            if (options.replace) {
                std::vector<std::string_view> names;
                for (size_t i : left) names.push_back(items[i].name);
                std::vector<uint8_t> ignored(names.size());
                remove_elsewhere(*others, names, true, ignored);
            }
        } else {
            return own;
        }
        left = still_refused();
    }
    if (!left.empty() && options.ack) put_elsewhere(*others, items, options, left, report, true);
    if (!own_error.text.empty() && !still_refused().empty()) return own_error;
    if (options.replicas > 1) replicate(*others, items, options, report);
    return report;
}

bool Client::own_has(std::string_view name) {
    std::shared_ptr<Session> session = own_.current();
    return session != nullptr && !session->remote() &&
           session->index().find(session->space(), own_.hasher()(name), name).has_value();
}

// What one node is asked to take at a time: some hundred MiB, or one object.
std::vector<std::vector<size_t>> Client::in_chunks(std::span<const PutItem> items,
                                                   std::span<const size_t> which) {
    constexpr uint64_t kChunkBytes = 256ull << 20;
    std::vector<std::vector<size_t>> chunks;
    uint64_t bytes = 0;
    for (size_t i : which) {
        uint64_t size = total(items[i].parts);
        if (chunks.empty() || bytes + size > kChunkBytes) {
            chunks.emplace_back();
            bytes = 0;
        }
        chunks.back().push_back(i);
        bytes += size;
    }
    return chunks;
}

void Client::put_elsewhere(Pool& pool, std::span<const PutItem> items, const PutOptions& options,
                           std::span<const size_t> which, PutReport& report, bool evict) {
    Result<std::shared_ptr<const Members>> members = pool.directory->members();
    if (!members) return;
    for (std::vector<size_t>& left : in_chunks(items, which)) {
        PlaceOptions where;
        for (const Member& member : (*members)->rows) {
            if (member.identity.incarnation == pool.own) where.avoid_nodes.push_back(member.id);
        }
        for (bool last : {false, true}) {
            if (last && !evict) break;
            where.evict = last;
            for (size_t attempt = 0; attempt < kAttemptsMax && !left.empty(); ++attempt) {
                uint64_t bytes = 0;
                for (size_t i : left) bytes += total(items[i].parts);
                Result<std::vector<NodeId>> placed = pool.directory->place(bytes, 1, where);
                if (!placed || placed->empty()) break;
                where.avoid_nodes.push_back(placed->front());
                const Member* member = (*members)->find(placed->front());
                if (member == nullptr) {
                    members = pool.directory->members(true);
                    if (!members) return;
                    member = (*members)->find(placed->front());
                    if (member == nullptr) continue;
                }
                std::vector<PutItem> batch;
                for (size_t i : left) batch.push_back(items[i]);
                Result<PutReport> put =
                    node(pool, *member)->put(batch, options.replace, true, options.timeout_ms);
                if (!put) {
                    report.refusal = put.error().text;
                    continue;
                }
                std::vector<size_t> refused;
                for (size_t k = 0; k < left.size(); ++k) {
                    report.outcomes[left[k]] = put->outcomes[k];
                    if (put->outcomes[k] == PutOutcome::kRefused) {
                        refused.push_back(left[k]);
                        continue;
                    }
                    Hash128 hash = own_.hasher()(items[left[k]].name);
                    locations_.put(hash, member->id);
                    recent_.add(hash, member->id);
                }
                if (!put->refusal.empty()) report.refusal = put->refusal;
                report.stored_bytes += put->stored_bytes;
                left = std::move(refused);
            }
        }
    }
}

// Of objects that were there before, only those with the very bytes of this call are to have more copies.
std::vector<size_t> Client::with_equal_bytes(std::span<const PutItem> items, std::span<const size_t> which) {
    std::vector<std::string_view> names;
    for (size_t i : which) names.push_back(items[i].name);
    Result<Pinned> pinned = pin(names);
    std::vector<size_t> equal;
    for (size_t k = 0; pinned && k < which.size(); ++k) {
        if (!pinned->has(k)) continue;
        uint32_t crc = 0;
        for (const Part& part : items[which[k]].parts) crc = crc32c(crc, part.data, part.size);
        const Descriptor& d = pinned->descriptors[k];
        if (d.size == total(items[which[k]].parts) && d.crc == crc) equal.push_back(which[k]);
    }
    return equal;
}

void Client::replicate(Pool& pool, std::span<const PutItem> items, const PutOptions& options,
                       PutReport& report) {
    report.copies.assign(items.size(), 0);
    std::vector<size_t> stored, existed;
    for (size_t i = 0; i < items.size(); ++i) {
        if (report.outcomes[i] == PutOutcome::kRefused) continue;
        report.copies[i] = 1;
        (report.outcomes[i] == PutOutcome::kStored ? stored : existed).push_back(i);
    }
    if (!existed.empty()) {
        std::vector<size_t> equal = with_equal_bytes(items, existed);
        if (equal.size() != existed.size()) {
            report.short_of_copies = "the key has other bytes than these, which stay";
        }
        stored.insert(stored.end(), equal.begin(), equal.end());
    }
    for (const std::vector<size_t>& chunk : in_chunks(items, stored)) {
        replicate_some(pool, items, options, chunk, report);
    }
}

// One host after the other gets a copy, until there are enough or no host is left.
void Client::replicate_some(Pool& pool, std::span<const PutItem> items, const PutOptions& options,
                            std::span<const size_t> which, PutReport& report) {
    Result<std::shared_ptr<const Members>> members = pool.directory->members();
    if (!members) {
        report.short_of_copies = members.error().text;
        return;
    }
    PlaceOptions where;
    where.avoid_host_ids.push_back(pool.host_id);
    for (const Member& member : (*members)->rows) {
        if (member.identity.incarnation == pool.own) where.avoid_nodes.push_back(member.id);
    }
    // What was spilled lies elsewhere already: not a second time on that host.
    for (size_t i : which) {
        std::vector<NodeId> at;
        recent_.find(own_.hasher()(items[i].name), at);
        for (NodeId node : at) {
            const Member* member = (*members)->find(node);
            if (member == nullptr || where.avoid_nodes.size() >= 64) continue;
            if (std::ranges::find(where.avoid_nodes, node) != where.avoid_nodes.end()) continue;
            where.avoid_nodes.push_back(node);
            where.avoid_host_ids.push_back(member->identity.host_id);
        }
    }
    std::string why;
    auto wanting = [&] {
        std::vector<size_t> left;
        for (size_t i : which) {
            if (report.copies[i] < options.replicas) left.push_back(i);
        }
        return left;
    };
    for (bool evict : {false, true}) {
        where.evict = evict;
        for (std::vector<size_t> left = wanting(); !left.empty(); left = wanting()) {
            uint64_t bytes = 0;
            for (size_t i : left) bytes += total(items[i].parts);
            Result<std::vector<NodeId>> placed = pool.directory->place(bytes, 1, where);
            if (!placed) {
                report.short_of_copies = placed.error().text;
                return;
            }
            if (placed->empty()) break;
            where.avoid_nodes.push_back(placed->front());
            const Member* member = (*members)->find(placed->front());
            if (member == nullptr) continue;
            std::vector<PutItem> batch;
            for (size_t i : left) batch.push_back(items[i]);
            Result<PutReport> put =
                node(pool, *member)->put(batch, options.replace, true, options.timeout_ms);
            if (!put) {
                why = put.error().text;
                continue;
            }
            where.avoid_host_ids.push_back(member->identity.host_id);
            for (size_t k = 0; k < left.size(); ++k) {
                if (put->outcomes[k] == PutOutcome::kRefused) {
                    why = put->refusal;
                    continue;
                }
                ++report.copies[left[k]];
                recent_.add(own_.hasher()(items[left[k]].name), member->id);
            }
        }
    }
    if (wanting().empty()) return;
    report.short_of_copies = why.empty() ? "there are not enough other hosts in the pool" : why;
}

// ---- remove, list

Result<std::vector<uint8_t>> Client::remove(std::span<const std::string_view> names) {
    Result<std::vector<uint8_t>> removed = own_.remove(names);
    std::shared_ptr<Pool> others = pool();
    if (others == nullptr || (!removed && !no_answer(removed.error()))) return removed;
    std::vector<uint8_t> flags = removed ? *removed : std::vector<uint8_t>(names.size());
    remove_elsewhere(*others, names, !removed, flags);
    if (!removed && std::ranges::find(flags, 0) != flags.end()) return removed.error();
    return flags;
}

void Client::remove_elsewhere(Pool& pool, std::span<const std::string_view> names, bool own_away,
                              std::vector<uint8_t>& removed) {
    std::vector<Hash128> asked = hashes(names);
    for (const Hash128& hash : asked) locations_.forget(hash);
    LocateOptions question;
    question.suspects = true;
    Result<LocateAnswer> located = pool.directory->locate(asked, question);
    std::map<NodeId, Group> groups;
    if (!located) {
        // The master is away: every node that was in the pool is told.
        Result<std::shared_ptr<const Members>> members = pool.directory->members();
        if (!members) return;
        for (const Member& member : (*members)->rows) {
            if (member.identity.incarnation == pool.own) continue;
            Group& group = groups[member.id];
            group.member = member;
            group.items.resize(names.size());
            std::iota(group.items.begin(), group.items.end(), 0);
        }
    }
    for (size_t i = 0; located && i < located->keys.size(); ++i) {
        for (const Holder& holder : located->keys[i]) {
            const Member* member = located->members->find(holder.node);
            if (member == nullptr || member->identity.incarnation == pool.own) continue;
            Group& group = groups[member->id];
            group.member = *member;
            if (group.items.empty() || group.items.back() != i) group.items.push_back(i);
        }
    }
    // And where this client put copies of which the directory has not heard yet.
    std::shared_ptr<const Members> known;
    if (located) {
        known = located->members;
    } else if (auto members = pool.directory->members()) {
        known = *members;
    }
    for (size_t i = 0; known != nullptr && i < asked.size(); ++i) {
        std::vector<NodeId> at;
        recent_.find(asked[i], at);
        for (NodeId node : at) {
            const Member* member = known->find(node);
            if (member == nullptr || member->identity.incarnation == pool.own) continue;
            Group& group = groups[node];
            group.member = *member;
            if (std::ranges::find(group.items, i) == group.items.end()) group.items.push_back(i);
        }
    }
    std::vector<Group> work;
    for (auto& [id, group] : groups) work.push_back(std::move(group));
    std::mutex merging;
    std::vector<NodeId> unreached;
    for (size_t i = 0; own_away && known != nullptr && i < known->rows.size(); ++i) {
        if (known->rows[i].identity.incarnation == pool.own) unreached.push_back(known->rows[i].id);
    }
    each(work, [&](Group& group) {
        std::vector<std::string_view> keys;
        for (size_t i : group.items) keys.push_back(names[i]);
        Result<std::vector<uint8_t>> flags = Error{Code::kUnavailable, "suspect"};
        if (group.member.state == MemberState::kAlive) flags = node(pool, group.member)->remove(keys);
        std::lock_guard lock(merging);
        if (!flags) unreached.push_back(group.member.id);
        for (size_t k = 0; flags && k < group.items.size(); ++k) {
            if ((*flags)[k] != 0) removed[group.items[k]] = 1;
        }
    });
    // Every key: whoever is away may hold copies of which the directory no longer knows.
    (void)pool.directory->forget(asked, unreached);
}

Result<std::vector<ListRow>> Client::list(std::string_view prefix, uint64_t limit) {
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
        if (member.state == MemberState::kAlive && member.identity.incarnation != others->own) {
            work.emplace_back();
            work.back().member = member;
        }
    }
    std::mutex merging;
    std::unordered_set<std::string> seen;
    for (const ListRow& row : all) seen.insert(row.name);
    each(work, [&](Group& group) {
        Result<std::vector<ListRow>> more = node(*others, group.member)->list(prefix, limit);
        if (!more) return;
        std::lock_guard lock(merging);
        for (ListRow& row : *more) {
            if (is_stripe(row.name)) continue;
            if (all.size() < limit && seen.insert(row.name).second) all.push_back(std::move(row));
        }
    });
    return all;
}

// ---- from the process that pinned to the process that loads

// holders: the own node's incarnation, then each other holder's incarnation and route. A descriptor's holder
// stands above its offset: 0 is the own node.
Handover Client::hand_over(const Prefix& prefix) {
    Handover out;
    out.holders.assign(reinterpret_cast<const char*>(prefix.incarnation.data()), prefix.incarnation.size());
    out.descriptors = prefix.descriptors;
    std::vector<Session*> others;
    for (size_t i = 0; i < out.descriptors.size(); ++i) {
        if (!prefix.has(i)) continue;
        Session* session = prefix.pin_of(i)->session().get();
        if (session->incarnation() == prefix.incarnation) continue;
        size_t place = static_cast<size_t>(std::ranges::find(others, session) - others.begin());
        if (place == others.size()) {
            others.push_back(session);
            std::string route = (session->remote() ? "tcp:" : "unix:") + session->peer();
            out.holders.append(reinterpret_cast<const char*>(session->incarnation().data()),
                               session->incarnation().size());
            auto size = static_cast<uint16_t>(route.size());
            out.holders.append(reinterpret_cast<const char*>(&size), sizeof(size));
            out.holders.append(route);
        }
        uint64_t offset = out.descriptors[i].offset & ((1ull << kOffsetBits) - 1);
        out.descriptors[i].offset = offset | (static_cast<uint64_t>(place + 1) << kOffsetBits);
    }
    return out;
}

LoadReport Client::load(std::string_view holders, std::span<const Descriptor> descriptors,
                        const PartTable& table, std::span<const uint32_t> indices,
                        std::span<const uint16_t> columns, bool verify) {
    LoadReport report;
    report.ok.assign(descriptors.size(), 0);
    if (Status status = own_.check_open(); !status) {
        report.error = status.error().text;
        return report;
    }
    struct Source {
        Incarnation incarnation{};
        std::string route;
        std::vector<uint32_t> which;
    };
    std::vector<Source> sources(1);
    Reader r(std::as_bytes(std::span(holders)));
    std::string_view own = r.bytes(sizeof(Incarnation));
    if (r.ok()) std::memcpy(sources[0].incarnation.data(), own.data(), own.size());
    while (r.ok() && !r.done() && sources.size() < kHoldersMax) {
        Source source;
        std::string_view incarnation = r.bytes(sizeof(Incarnation));
        source.route = std::string(r.text16());
        if (!r.ok()) break;
        std::memcpy(source.incarnation.data(), incarnation.data(), incarnation.size());
        sources.push_back(std::move(source));
    }
    if (!r.ok()) {
        report.error = "the description of the holders is not whole";
        return report;
    }
    std::vector<Descriptor> plain(descriptors.begin(), descriptors.end());
    for (size_t i = 0; i < plain.size(); ++i) {
        uint64_t place = plain[i].offset >> kOffsetBits;
        plain[i].offset &= (1ull << kOffsetBits) - 1;
        if (place >= sources.size()) {
            report.error = "a descriptor names a holder that is not described";
            continue;
        }
        sources[place].which.push_back(static_cast<uint32_t>(i));
    }
    std::mutex merging;
    std::vector<Group> work;
    for (size_t i = 0; i < sources.size(); ++i) {
        if (sources[i].which.empty()) continue;
        work.emplace_back();
        work.back().items.push_back(i);
    }
    each(work, [&](Group& group) {
        Source& source = sources[group.items.front()];
        LoadReport part;
        part.ok.assign(plain.size(), 0);
        if (source.route.empty()) {
            own_.load(source.incarnation, plain, source.which, table, indices, columns, verify, part);
        } else {
            peers_.node(source.route)
                ->load(source.incarnation, plain, source.which, table, indices, columns, verify, part);
        }
        std::lock_guard lock(merging);
        for (uint32_t i : source.which) report.ok[i] = part.ok[i];
        report.bytes += part.bytes;
        if (!part.error.empty()) report.error = part.error;
    });
    return report;
}

}  // namespace moonpool
