// Client, reading: from the own node, and what is missing there from the nearest holder, or the next one.
//
// Threads: the caller's, and for several holders at once those of each(), which end with the call. No lock
// is held while a node or the master is asked.
//
// What holds of an answer: a size of 0 or more means that all bytes of the object are at their
// destination, and match its checksum where they crossed a network or verify was asked for. kMiss means
// that every node which may have the object has said that it has not; where one of them could not say, the
// call fails with its error and is no miss. A damaged copy is never an answer as long as another node may
// have a good one.
#include <algorithm>
#include <new>
#include <numeric>

#include "store/client/card_stage.hpp"
#include "store/client/client.hpp"
#include "store/client/client_frames.hpp"

namespace moonpool {

Result<std::vector<int64_t>> Client::get(std::span<const GetItem> items, bool verify) {
    if (any_on_cards(items)) {
        return get_to_cards(items, [&](size_t, auto some) { return get(some, verify); });
    }
    WaitBudget budget(wait_budget_ms());
    Result<std::vector<int64_t>> sizes = get_whole(items, verify);
    for (size_t i = 0; sizes && i < items.size(); ++i) {
        uint64_t room = total(items[i].parts);
        if ((*sizes)[i] < 0 || room >= static_cast<uint64_t>((*sizes)[i])) continue;
        auto need = static_cast<uint64_t>((*sizes)[i]);
        if (need ==
            kManifestBytes) {  // of a striped object the size of the whole is what the caller must know
            auto now = standing({&items[i].name, 1});
            if (now && now->front().manifest) need = now->front().manifest->size;
        }
        return too_small(items[i].name, room, need);
    }
    if (sizes) {
        if (Status status = fill_striped(items, verify, nullptr, *sizes); !status) return status.error();
    }
    return sizes;
}

Result<std::vector<int64_t>> Client::get_pinned(const Pinned& pinned, std::span<const size_t> places,
                                                std::span<const GetItem> items, bool verify) {
    if (any_on_cards(items)) {
        return get_to_cards(items, [&](size_t first, auto some) {
            return get_pinned(pinned, places.subspan(first, some.size()), some, verify);
        });
    }
    WaitBudget budget(wait_budget_ms());
    UnderPins pins{pinned, places};
    for (size_t i = 0; !pinned.striped.empty() && i < items.size(); ++i) {
        const StripedPin* pin = pins.of(i);
        uint64_t room = total(items[i].parts);
        if (pin != nullptr && room < pin->manifest.size) {
            return too_small(items[i].name, room, pin->manifest.size);
        }
    }
    Result<std::vector<int64_t>> sizes = NodeClient::get_pinned(pinned, places, items, verify);
    if (sizes) {
        if (Status status = fill_striped(items, verify, &pins, *sizes); !status) return status.error();
    }
    return sizes;
}

Result<std::vector<int64_t>> Client::get_whole(std::span<const GetItem> items, bool verify) {
    // Tolerant: one object that is too large, or damaged, must not keep the others from being read. It
    // becomes the error above or below.
    Result<std::vector<int64_t>> sizes = own_.get(items, verify, true);
    std::shared_ptr<Pool> others = pool();
    if (others == nullptr) {
        if (!sizes) return sizes;
        for (size_t i = 0; i < items.size(); ++i) {
            if ((*sizes)[i] == kDamagedRead) return corrupt(items[i].name);
        }
        return sizes;
    }
    // The own node may be gone for good while the pool lives: its answer is then one that is missing,
    // unless it was the caller's mistake.
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
        if (size == kDamagedRead) size = kMiss;  // no node had it whole
    }
    // With the own node away, a miss everywhere else is not known to be a miss.
    if (!own_answered && std::ranges::find(found, kMiss) != found.end()) return sizes.error();
    return found;
}

// Fills in what other nodes have: drives SearchSteps, which decide what is asked of whom.
void Client::find_elsewhere(Pool& pool, std::span<const GetItem> items, bool verify,
                            std::vector<int64_t>& sizes) {
    using Wants = SearchSteps::Wants;
    std::vector<Hash128> keys;
    keys.reserve(items.size());
    for (size_t i = 0; i < items.size(); ++i) {
        keys.push_back(sizes[i] < 0 ? own_.hasher()(items[i].name)
                                    : Hash128{});  // what is here is not asked for
    }
    SearchSteps steps(std::move(keys), pool, locations_, sizes);
    steps.members(pool.directory->members());
    while (steps.wants() != Wants::kDone) {
        if (steps.wants() == Wants::kLocate) {
            steps.located(pool.directory->locate(steps.question()));
            continue;
        }
        // One call for each node, at the same time. The groups have different items, so the threads write
        // to different places.
        each(steps.nodes(), [&](Group& group) {
            std::vector<GetItem> wanted;
            for (size_t i : group.items) wanted.push_back(items[i]);
            steps.answered(group, node(pool, group.member)->get(wanted, verify, true));
        });
        steps.all_answered();
    }
}

Result<std::vector<ObjectView>> Client::views(const Pinned& pinned, std::span<const size_t> places,
                                              std::span<const std::string_view> names, bool verify) {
    WaitBudget budget(wait_budget_ms());
    if (verify) {
        if (Status status = NodeClient::verify(pinned, places, names); !status) return status.error();
    }
    Result<std::vector<ObjectView>> views = NodeClient::views(pinned, places);
    UnderPins pins{pinned, places};
    if (views) {
        if (Status status = view_striped(names, verify, &pins, *views); !status) return status.error();
    }
    return views;
}

Result<std::vector<ObjectView>> Client::views(std::span<const std::string_view> names, bool verify) {
    WaitBudget budget(wait_budget_ms());
    std::string why;
    Result<Pinned> pinned = pin_whole(names, why);
    if (!pinned) return pinned.error();
    std::vector<size_t> places(names.size());
    std::iota(places.begin(), places.end(), 0);
    if (verify) {
        if (Status status = NodeClient::verify(*pinned, places, names); !status) return status.error();
    }
    Result<std::vector<ObjectView>> views = NodeClient::views(*pinned, places);
    // A pin says that the object is kept, not that its node lives until the bytes are here.
    bool lost = !views.ok();
    if (lost) {
        if (!no_answer(views.error())) return views;
        views = std::vector<ObjectView>(names.size());
    }
    std::shared_ptr<Pool> others = pool();
    if (others == nullptr) return views;
    // A holder died, or the bytes were damaged on their way: from wherever else they are. What is there may
    // be larger than what was pinned, and is then read once more.
    std::vector<size_t> at;
    std::vector<uint64_t> rooms;
    for (size_t i = 0; i < names.size(); ++i) {
        if ((*views)[i].owner != nullptr || !pinned->has(i)) continue;
        at.push_back(i);
        rooms.push_back(pinned->descriptors[i].size);
    }
    for (int attempt = 0; attempt < 2 && !at.empty(); ++attempt) {
        std::vector<std::shared_ptr<std::byte[]>> memory;
        std::vector<MemoryRef> parts;
        std::vector<GetItem> items;
        for (uint64_t room : rooms) {
            // An object may be as large as a node allows: too large for this process is an error of the
            // call, not its end.
            memory.emplace_back(new (std::nothrow) std::byte[room]);
            if (memory.back() == nullptr)
                return Error{Code::kOs, "no memory for " + std::to_string(room) + " bytes"};
            parts.push_back(MemoryRef::host(memory.back().get(), room));
        }
        for (size_t k = 0; k < at.size(); ++k) items.push_back({names[at[k]], {&parts[k], 1}});
        Result<std::vector<int64_t>> sizes = get_whole(items, verify);
        if (!sizes) return sizes.error();
        std::vector<size_t> larger;
        std::vector<uint64_t> larger_rooms;
        for (size_t k = 0; k < at.size(); ++k) {
            if ((*sizes)[k] < 0) continue;
            auto size = static_cast<uint64_t>((*sizes)[k]);
            if (size > rooms[k]) {
                larger.push_back(at[k]);
                larger_rooms.push_back(size);
            } else {
                (*views)[at[k]] = ObjectView{memory[k], memory[k].get(), size};
            }
        }
        at = std::move(larger);
        rooms = std::move(larger_rooms);
    }
    if (Status status = view_striped(names, verify, nullptr, *views); !status) return status.error();
    return views;
}

}  // namespace moonpool
