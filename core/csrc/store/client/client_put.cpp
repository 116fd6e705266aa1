// Client, writing: to the own node; elsewhere when that is full or gone; copies to other hosts.
//
// Threads: the caller's. No lock is held while a node or the master is asked; a call's items go to one
// node at a time.
//
// What holds: an outcome of kStored means that a node has the object, and with `ack` that every get which
// starts later on this host finds it. One of kExists means that the key had bytes before, which stay. Until
// an item has one of these it is in `left`, and each step takes out what it has placed. PutSteps decide in
// which order nodes are asked.
//
// What other nodes hold the directory learns from them, some milliseconds later. Until then recent_ and
// locations_ know it: this client finds, replaces and removes its own copies at once.
#include <algorithm>
#include <chrono>
#include <iterator>
#include <numeric>
#include <thread>

#include "base/clock.hpp"
#include "store/client/card_stage.hpp"
#include "store/client/client.hpp"
#include "store/client/client_frames.hpp"
#include "store/client/manifest_reads.hpp"
#include "store/client/put_steps.hpp"
#include "store/client/removal_steps.hpp"

namespace moonpool {

// Whether the own node would have to evict for that much. Not known of a node whose index is not mapped here.
bool Client::own_is_full(uint64_t bytes) {
    std::shared_ptr<Session> session = own_.current();
    if (session == nullptr || !session->alive() || session->path().index() == nullptr) return false;
    // An eighth of the arena is left out of it, for what other clients lease meanwhile.
    return session->path().index()->free_bytes() < bytes + session->arena_bytes() / 8;
}

Result<PutReport> Client::put(std::span<const PutItem> items, const PutOptions& options) {
    if (any_on_cards(items)) return put_from_cards(items, options);
    WaitBudget budget(options.timeout_ms > 0 ? WaitBudget::of_a_call(options.timeout_ms) : wait_budget_ms());
    // In the first call of all the limit of an object is not known yet.
    if (own_.current() == nullptr) (void)own_.session();
    if (Status may = own_.check_may_write(); !may) return may.error();
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
    // What one node takes goes in one call; each striped object has calls of its own.
    Result<PutReport> some = options.unique ? put_unique(striped.empty() ? items : whole, options)
                                            : put_whole(striped.empty() ? items : whole, options);
    if (some && !some->manifest_sized.empty()) {
        some = put_anew_what_is_lost(striped.empty() ? items : whole, options, std::move(*some));
    }
    if (!some || striped.empty()) return some;
    PutReport report = std::move(*some);
    std::vector<PutOutcome> outcomes(items.size(), PutOutcome::kRefused);
    std::vector<uint8_t> copies;
    if (!report.copies.empty()) copies.assign(items.size(), 0);
    for (size_t k = 0; k < place.size(); ++k) {
        outcomes[place[k]] = report.outcomes[k];
        if (!copies.empty()) copies[place[k]] = report.copies[k];
    }
    if (options.replicas > 1) copies.resize(items.size());
    report.outcomes = std::move(outcomes);
    report.copies = std::move(copies);
    std::shared_ptr<Pool> others = pool();
    for (size_t i : striped) {
        Status status = put_striped(*others, items[i], options, i, report);
        if (!status) return status.error();
    }
    return report;
}

// What is there already may be an object that lost one of its stripes: no client can read it, and nothing
// else would ever take its place.
Result<PutReport> Client::put_anew_what_is_lost(std::span<const PutItem> items, const PutOptions& options,
                                                PutReport report) {
    PutOptions anew = options;
    anew.unique = false;
    // Once the lost object is removed, any other one under the key stays. Where it could not be removed, as a
    // node is away, its manifest stands under the key still, and the put must take its place.
    for (bool replace : {false, true}) {
        std::vector<std::string_view> names;
        std::vector<size_t> place;
        for (size_t i : report.manifest_sized) {
            if (pool() == nullptr || report.outcomes[i] != PutOutcome::kExists) continue;
            names.push_back(items[i].name);
            place.push_back(i);
        }
        report.manifest_sized.clear();
        if (names.empty()) return report;
        std::vector<Presence> whole = this->whole(names);
        std::vector<PutItem> lost;
        for (size_t k = 0; k < place.size(); ++k) {
            if (whole[k] == Presence::kHit) continue;
            place[lost.size()] = place[k];
            lost.push_back(items[place[k]]);
        }
        if (lost.empty()) return report;
        anew.replace = replace;
        Result<PutReport> put = put_whole(lost, anew);
        if (!put) return put;
        for (size_t k = 0; k < lost.size(); ++k) {
            report.outcomes[place[k]] = put->outcomes[k];
            if (!put->copies.empty()) report.copies[place[k]] = put->copies[k];
        }
        for (size_t k : put->manifest_sized) report.manifest_sized.push_back(place[k]);
        report.stored_bytes += put->stored_bytes;
        if (!put->refusal.empty()) report.refusal = put->refusal;
        if (!put->short_of_copies.empty()) report.short_of_copies = put->short_of_copies;
    }
    report.manifest_sized.clear();
    return report;
}

// What the master has heard of may be removed since, some milliseconds ago: it is looked at, and what is gone
// is asked for again. After a while the master is wrong, and its word no reason to refuse the key.
Result<PutReport> Client::put_unique(std::span<const PutItem> items, const PutOptions& options) {
    if (pool() == nullptr) return put_whole(items, options);
    PutReport report;
    report.outcomes.assign(items.size(), PutOutcome::kExists);
    if (options.replicas > 1) report.copies.assign(items.size(), 1);
    std::vector<size_t> left;
    std::vector<std::string_view> names;
    for (const PutItem& item : items) names.push_back(item.name);
    if (Status fit = own_.check_names(names); !fit && !no_answer(fit.error())) return fit.error();
    for (size_t i = 0; i < items.size(); ++i) {
        std::optional<uint64_t> here = own_has(items[i].name);
        if (!here) left.push_back(i);
        if (here == kManifestBytes) report.manifest_sized.push_back(i);
    }
    PutOptions how = options;
    for (size_t attempt = 1; !left.empty(); ++attempt) {
        std::vector<PutItem> some;
        for (size_t i : left) some.push_back(items[i]);
        how.unique = attempt < kUniqueAttempts;
        how.replace = !how.unique;
        Result<PutReport> put = put_whole(some, how);
        if (!put && (attempt == 1 || !no_answer(put.error()))) return put;
        if (!put) {  // other keys of the call are stored
            for (size_t i : left) report.outcomes[i] = PutOutcome::kRefused;
            report.refusal = put.error().text;
            report.unanswered = true;
            return report;
        }
        std::vector<size_t> again;
        std::vector<std::string_view> held;
        for (size_t k : put->held) held.push_back(some[k].name);
        Result<std::vector<Presence>> there = std::vector<Presence>();
        if (!held.empty()) there = exists(held);
        for (size_t k = 0; there && k < put->held.size(); ++k) {
            if ((*there)[k] == Presence::kMiss) again.push_back(left[put->held[k]]);
        }
        for (size_t k = 0; k < left.size(); ++k) {
            report.outcomes[left[k]] = put->outcomes[k];
            if (!report.copies.empty() && !put->copies.empty()) report.copies[left[k]] = put->copies[k];
        }
        for (size_t k : put->manifest_sized) report.manifest_sized.push_back(left[k]);
        report.stored_bytes += put->stored_bytes;
        if (!put->refusal.empty()) report.refusal = std::move(put->refusal);
        if (!put->short_of_copies.empty()) report.short_of_copies = std::move(put->short_of_copies);
        left = std::move(again);
        if (left.empty()) break;
        const auto wait_ms = static_cast<int>(unique_wait_ms(attempt));
        if (WaitBudget::within(wait_ms) < wait_ms) {
            for (size_t i : left) report.outcomes[i] = PutOutcome::kRefused;
            report.refusal = "the master lists the key at a node that has it no more";
            break;
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(wait_ms));
        WaitBudget::spent(wait_ms);
    }
    return report;
}

// A replacement takes a place in the order of its key's range: one call for each of them. What a call could
// not say of its keys is no word about the others.
Result<PutReport> Client::put_whole(std::span<const PutItem> items, const PutOptions& options) {
    std::shared_ptr<Pool> others = pool();
    if (others == nullptr || !(options.replace || options.unique) || others->directory->ranges() == 1)
        return put_some(items, options);
    std::vector<Hash128> keys;
    for (const PutItem& item : items) keys.push_back(own_.hasher()(item.name));
    std::vector<std::vector<size_t>> groups = others->directory->by_range(keys);
    if (groups.size() <= 1) return put_some(items, options);
    // A call is refused as a whole or not at all.
    std::vector<std::string_view> names;
    for (const PutItem& item : items) names.push_back(item.name);
    if (Status fit = own_.check_names(names); !fit && !no_answer(fit.error())) return fit.error();
    PutReport report;
    report.outcomes.assign(items.size(), PutOutcome::kRefused);
    if (options.replicas > 1) report.copies.resize(items.size());
    std::optional<Error> why_not;
    size_t failed = 0;
    for (const std::vector<size_t>& which : groups) {
        std::vector<PutItem> some;
        for (size_t i : which) some.push_back(items[i]);
        Result<PutReport> put = put_some(some, options);
        if (!put) {
            if (!no_answer(put.error())) return put;
            ++failed;
            report.refusal = put.error().text;
            report.unanswered = true;
            why_not = put.error();
            continue;
        }
        for (size_t k = 0; k < which.size(); ++k) {
            report.outcomes[which[k]] = put->outcomes[k];
            if (!put->copies.empty()) report.copies[which[k]] = put->copies[k];
        }
        for (size_t k : put->manifest_sized) report.manifest_sized.push_back(which[k]);
        for (size_t k : put->held) report.held.push_back(which[k]);
        for (auto [k, node] : put->placed) report.placed.emplace_back(which[k], node);
        if (!put->unsure.empty()) report.unsure.resize(items.size());
        for (size_t k = 0; k < put->unsure.size(); ++k) report.unsure[which[k]] = put->unsure[k];
        report.known.raise(put->known);
        report.unanswered |= put->unanswered;
        report.stored_bytes += put->stored_bytes;
        if (!put->refusal.empty()) report.refusal = put->refusal;
        if (!put->short_of_copies.empty()) report.short_of_copies = put->short_of_copies;
    }
    if (failed == groups.size()) return *why_not;
    return report;
}

Result<PutReport> Client::put_some(std::span<const PutItem> given, const PutOptions& asked, size_t attempt) {
    std::span<const PutItem> items = given;
    PutOptions options = asked;
    std::shared_ptr<Pool> others = pool();
    if (others == nullptr) {
        Result<PutReport> report = own_.put(items, how(options, options.ack));
        others = pool();  // the first call of all finds out
        if (report && options.replicas > 1) {
            if (others != nullptr) {
                replicate(*others, items, options, preferred(options), *report);
            } else {
                report->copies.assign(items.size(), 1);
                report->short_of_copies = "the node has no master, and so no other nodes";
            }
        }
        if (others == nullptr || report) return report;
        if (others->directory->ranges() > 1) return put_whole(given, asked);  // range by range
    }
    options.known = others->directory->newest();
    uint64_t bytes = 0;
    for (const PutItem& item : items) bytes += std::min(total(item.parts), UINT64_MAX - bytes);
    PutReport report;
    report.outcomes.assign(items.size(), PutOutcome::kRefused);
    auto still_refused = [&] {
        std::vector<size_t> refused;
        for (size_t i = 0; i < items.size(); ++i) {
            if (report.outcomes[i] == PutOutcome::kRefused) refused.push_back(i);
        }
        return refused;
    };
    auto names_of = [&](std::span<const size_t> which) {
        std::vector<std::string_view> names;
        for (size_t i : which) names.push_back(items[i].name);
        return names;
    };
    std::vector<size_t> all(items.size());
    std::iota(all.begin(), all.end(), 0);
    auto leave_what_is_here = [&](std::vector<size_t>& left) {
        std::erase_if(left, [&](size_t i) {
            std::optional<uint64_t> here = own_has(items[i].name);
            if (here) report.outcomes[i] = PutOutcome::kExists;
            if (here == kManifestBytes) report.manifest_sized.push_back(i);
            return here.has_value();
        });
    };
    // What no node has is put as a replacement: of what nodes may have that are away.
    options.replace |= options.unique;
    // The own node first among them is the usual way, but for the spilling.
    std::vector<Named> wanted = preferred(options);
    PutSteps::Plan plan{.replace = options.replace, .ack = options.ack};
    plan.own_wanted = !wanted.empty() && wanted.front().node == nullptr;
    plan.elsewhere_wanted = !wanted.empty() && !plan.own_wanted;
    std::vector<RemovedManifest> replaced;
    std::vector<RemovedManifest> seen_here;  // after the place in the order was taken
    std::optional<RemovalSteps> removal;     // of what is replaced
    std::vector<PutItem> ordered;            // items, with their versions
    Error own_error;
    using Wants = PutSteps::Wants;
    PutSteps steps(items.size(), plan);
    while (steps.wants() != Wants::kDone) {
        std::vector<size_t> left = steps.left();
        switch (steps.wants()) {
            case Wants::kRemove: {
                std::vector<std::string_view> names = names_of(left);
                // What is here before the place in the order is taken is older.
                const bool replaces_here = !steps.removes_here() && !options.unique;
                if (replaces_here) own_manifests(names, replaced);
                removal.emplace(hashes(names), others->own, steps.removes_here() && !options.unique,
                                locations_, recent_, options.unique);
                tell_removal(*others, names, *removal, replaced);
                // What has come since may be newer, so it counts once the own node has put the new bytes in
                // its place. What comes between this look and them is older: its client hears that it was
                // overtaken, and frees it.
                if (replaces_here) own_manifests(names, seen_here);
                if (options.unique && !removal->no_master().empty()) {
                    return Error{
                        Code::kUnavailable,
                        "nothing is stored, since only the master knows whether a node has the key: " +
                            removal->no_master()};
                }
                ordered.assign(items.begin(), items.end());
                for (size_t i = 0; i < removal->versions().size(); ++i) {
                    if (is_free(removal->taken(i))) ordered[i].version = removal->versions()[i];
                }
                items = ordered;
                if (options.unique) {
                    std::erase_if(left, [&](size_t i) {
                        if (is_free(removal->taken(i))) return false;
                        report.outcomes[i] = PutOutcome::kExists;
                        if (removal->taken(i) == Taken::kHeld) report.held.push_back(i);
                        return true;
                    });
                }
                steps.removed(std::move(left));
                break;
            }
            case Wants::kPutWanted:
                if (!options.replace) leave_what_is_here(left);
                for (const Named& at : wanted) {
                    if (left.empty() || at.node == nullptr) break;
                    put_at(*at.node, at.member, items, options, left, report);
                }
                steps.put(std::move(left));
                break;
            case Wants::kSpill:
                // The own node is full and another is not.
                if (own_is_full(bytes) && others->room.may_ask()) {
                    leave_what_is_here(left);
                    size_t asked = left.size();
                    put_elsewhere(*others, items, options, left, report, false);
                    left = still_refused();
                    // The whole pool is full: for a while puts evict at the own node without asking.
                    if (asked != 0 && left.size() == asked) others->room.nowhere();
                }
                steps.put(std::move(left));
                break;
            case Wants::kPutHere: {
                std::vector<PutItem> own_items;
                for (size_t i : left) own_items.push_back(items[i]);
                Result<PutReport> own = own_.put(own_items, how(options, options.ack));
                if (own) {
                    for (size_t k = 0; k < left.size(); ++k) {
                        report.outcomes[left[k]] = own->outcomes[k];
                        bool here = own->outcomes[k] == PutOutcome::kStored;
                        if (removal && options.ack && here) removal->placed_here(left[k]);
                        if (!here) continue;
                        std::ranges::copy_if(seen_here, std::back_inserter(replaced),
                                             [&](const auto& seen) { return seen.item == left[k]; });
                    }
                    for (size_t k : own->manifest_sized) report.manifest_sized.push_back(left[k]);
                    report.refusal = own->refusal;
                    report.stored_bytes += own->stored_bytes;
                    report.known.raise(own->known);
                } else if (no_answer(own.error())) {
                    own_error = own.error();
                    report.unanswered = true;
                    for (size_t i : left) {
                        if (removal) removal->not_answered_here(i);
                    }
                } else {
                    if (removal) end_removal(*others, names_of(all), *removal);  // others may put the keys
                    return own;
                }
                steps.put(still_refused());
                break;
            }
            case Wants::kPutElsewhere:
                put_elsewhere(*others, items, options, left, report, true);
                steps.put(still_refused());
                break;
            case Wants::kDone:
                break;
        }
    }
    if (!own_error.text.empty() && !still_refused().empty()) return own_error;
    if (options.replicas > 1) replicate(*others, items, options, wanted, report);
    auto free_replaced = [&](const PutReport& put) {
        std::vector<Manifest> striped;
        for (const RemovedManifest& manifest : replaced) {
            // The stripes of an object that was not replaced after all are still its own.
            if (put.outcomes[manifest.item] != PutOutcome::kStored) continue;
            add_genuine(items[manifest.item].name, manifest, striped);
        }
        remove_stripes(*others, striped);
    };
    if (removal) {
        end_replacement(*others, items, *removal, report, replaced);
        // The master had taken it for given up before the bytes were here. Where a node did not answer,
        // clients may have read them and removed or replaced them since: a second attempt would bring them
        // back.
        bool given_up = std::ranges::find(report.outcomes, PutOutcome::kOlder) != report.outcomes.end();
        if (given_up && !options.unique && !report.unanswered && attempt < kAttemptsMax) {
            Result<PutReport> again = put_some(given, options, attempt + 1);
            if (again) free_replaced(*again);
            return again;
        }
    }
    for (PutOutcome& outcome : report.outcomes) {
        if (outcome != PutOutcome::kOlder) continue;
        outcome = PutOutcome::kRefused;
        report.refusal = "the key was replaced or removed by others meanwhile";
    }
    free_replaced(report);
    return report;
}

PutHow Client::how(const PutOptions& options, bool ack) {
    std::shared_ptr<Pool> others = pool();
    PutHow how{.replace = options.replace, .ack = ack, .timeout_ms = options.timeout_ms};
    how.known = options.known;
    if (others != nullptr) how.known.fill(others->directory->newest());
    return how;
}

// At another node than the own one, where other nodes may have carried the put out.
PutHow Client::how(const PutOptions& options, const PutReport& report, bool is_copy) {
    PutHow how = this->how(options, true);
    how.known.raise(report.known);
    how.anew = !is_copy && !report.unanswered;
    how.ordered = is_copy && options.copies_ordered;
    return how;
}

// Those that can be reached, in the caller's order.
std::vector<Client::Named> Client::preferred(const PutOptions& options) {
    std::vector<Named> nodes;
    for (const std::string& name : options.nodes) {
        if (Result<Named> at = named(name)) nodes.push_back(std::move(*at));
    }
    return nodes;
}

bool Client::put_at(NodeClient& to, const Member& member, std::span<const PutItem> items,
                    const PutOptions& options, std::vector<size_t>& left, PutReport& report) {
    std::vector<PutItem> batch;
    for (size_t i : left) batch.push_back(items[i]);
    Result<PutReport> put = to.put(batch, how(options, report, false));
    if (!put) {
        report.refusal = put.error().text;
        report.unanswered |= no_answer(put.error());
        return false;
    }
    report.known.raise(put->known);
    std::vector<size_t> refused;
    for (size_t k = 0; k < left.size(); ++k) {
        report.outcomes[left[k]] = put->outcomes[k];
        if (put->outcomes[k] == PutOutcome::kRefused) {
            refused.push_back(left[k]);
            continue;
        }
        if (put->outcomes[k] == PutOutcome::kOlder) continue;
        if (put->outcomes[k] == PutOutcome::kStored) report.placed.emplace_back(left[k], member.id);
        if (std::ranges::find(put->manifest_sized, k) != put->manifest_sized.end()) {
            report.manifest_sized.push_back(left[k]);
        }
        Hash128 hash = own_.hasher()(items[left[k]].name);
        locations_.put(hash, member.identity.incarnation);
        recent_.add(now_ms(), hash, member.id);
    }
    if (!put->refusal.empty()) report.refusal = put->refusal;
    report.stored_bytes += put->stored_bytes;
    left = std::move(refused);
    return true;
}

std::optional<uint64_t> Client::own_has(std::string_view name) {
    std::shared_ptr<Session> session = own_.current();
    const IndexReader* index = session == nullptr ? nullptr : session->path().index();
    if (index == nullptr) return std::nullopt;
    std::optional<IndexHit> hit = index->find(session->space(), own_.hasher()(name), name);
    if (!hit) return std::nullopt;
    return hit->size;
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

// Drives PlaceSteps, which decide which nodes are asked.
void Client::put_elsewhere(Pool& pool, std::span<const PutItem> items, const PutOptions& options,
                           std::span<const size_t> which, PutReport& report, bool evict) {
    using Wants = PlaceSteps::Wants;
    Result<std::shared_ptr<const Members>> members = pool.directory->members();
    if (!members) return;
    for (std::vector<size_t>& chunk : in_chunks(items, which)) {
        PlaceSteps steps(std::move(chunk), pool.own, *members, evict);
        while (steps.wants() != Wants::kDone) {
            std::vector<size_t> left = steps.left();
            if (steps.wants() == Wants::kMembers) {
                steps.members(pool.directory->members(true));
            } else if (steps.wants() == Wants::kPlace) {
                uint64_t bytes = 0;
                for (size_t i : left) bytes += total(items[i].parts);
                steps.placed(pool.directory->place(bytes, 1, steps.where()));
            } else {
                put_at(*node(pool, steps.node()), steps.node(), items, options, left, report);
                steps.put(std::move(left));
            }
        }
    }
}

}  // namespace moonpool
