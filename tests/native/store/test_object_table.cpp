// ObjectTable against a slow model: a list of objects, searched from end to end.
#include <doctest/doctest.h>

#include <algorithm>
#include <list>
#include <map>
#include <set>

#include "../random.hpp"
#include "store/node/object_table.hpp"
#include "store/shared/space.hpp"

using namespace moonpool;
using moonpool::testing::Random;

namespace {

constexpr uint64_t kObjectBytes = 64;
const KeyHasher kHash("default", "default", "");

struct Bed {
    explicit Bed(uint32_t slots, uint64_t bytes = 1 << 16)
        : leases(allocator),
          table(std::move(*IndexWriter::create(slots, random_incarnation())), allocator, leases) {
        allocator.grow(bytes);
    }

    // Commits an object in memory of its own; its lease is closed again, so the object alone holds it.
    ObjectTable::Commit commit(std::string_view name, uint32_t parent = kNoSlot, bool replace = false,
                               uint64_t size = kObjectBytes, const RetentionHints& keep = {}) {
        auto lease = leases.open(size, size, kObjectBytes);
        REQUIRE(lease);
        Extent extent{lease->offset, size};
        REQUIRE(leases.commit(extent));
        auto result = table.commit(0, kHash(name), name, extent, 0, parent, replace, keep);
        if (result != ObjectTable::Commit::kStored) leases.free(extent);
        leases.close(lease->offset);
        return result;
    }
    uint32_t find(std::string_view name) const { return table.find(0, kHash(name), name); }

    ExtentAllocator allocator;
    Leases leases;
    ObjectTable table;
};

struct ModelObject {
    std::string name;
    uint64_t id;      // its generation, in order of commits
    uint64_t parent;  // id or 0
    uint64_t used;
    int pins = 0;
    bool complete = true;  // else detached
};

class Model {
   public:
    ModelObject* find(const std::string& name) {
        for (auto& o : objects) {
            if (o.complete && o.name == name) return &o;
        }
        return nullptr;
    }
    bool has_child(uint64_t id) const {
        return std::any_of(objects.begin(), objects.end(), [&](auto& o) { return o.parent == id; });
    }
    // Least recently used, complete, not pinned, nobody's parent.
    ModelObject* victim() {
        ModelObject* best = nullptr;
        for (auto& o : objects) {
            if (o.complete && o.pins == 0 && !has_child(o.id) && (best == nullptr || o.used < best->used))
                best = &o;
        }
        return best;
    }
    void remove(ModelObject* o) {
        o->complete = false;
        drop_if_unused(o);
    }
    void drop_if_unused(ModelObject* o) {
        if (!o->complete && o->pins == 0) objects.remove_if([o](auto& x) { return &x == o; });
    }
    std::list<ModelObject> objects;
    uint64_t clock = 0;
};

}  // namespace

TEST_CASE("object table: random commits, replaces, removals, pins and evictions agree with the model") {
    for (uint32_t slots : {8u, 40u}) {
        Random random(300 + slots);
        Bed bed(slots);
        Model model;
        struct Held {
            uint32_t slot;
            uint64_t generation;
            uint64_t id;
        };
        std::vector<Held> pins;
        std::set<uint64_t> generations;
        for (int step = 0; step < 20000; ++step) {
            std::string name = "k" + std::to_string(random.below(60));
            if (random.one_in(8)) name += std::string(100, 'x');  // over kInlineName: not in the shared index
            uint64_t verb = random.below(12);
            uint32_t slot = bed.find(name);
            ModelObject* known = model.find(name);
            REQUIRE((slot != kNoSlot) == (known != nullptr));
            if (verb < 5) {
                std::string parent_name = "k" + std::to_string(random.below(60));
                uint32_t parent = random.one_in(2) ? bed.find(parent_name) : kNoSlot;
                ModelObject* parent_object = parent == kNoSlot ? nullptr : model.find(parent_name);
                uint64_t parent_id = parent_object == nullptr ? 0 : parent_object->id;
                bool replace = random.one_in(3);
                bool full = model.objects.size() == slots;
                auto result = bed.commit(name, parent, replace);
                if (known != nullptr && !replace) {
                    REQUIRE(result == ObjectTable::Commit::kExists);
                } else {
                    bool makes_room = known != nullptr && known->pins == 0;
                    ModelObject* victim = full && !makes_room ? model.victim() : nullptr;
                    if (full && !makes_room && victim == nullptr) {
                        REQUIRE(result == ObjectTable::Commit::kNoSlot);
                        REQUIRE(bed.find(name) == slot);  // a refused replacement leaves the old one
                    } else {
                        REQUIRE(result == ObjectTable::Commit::kStored);
                        if (victim != nullptr) model.remove(victim);
                        if (known != nullptr) model.remove(known);
                        bool parent_there =
                            std::any_of(model.objects.begin(), model.objects.end(),
                                        [&](auto& o) { return o.id == parent_id && o.complete; });
                        uint32_t now = bed.find(name);
                        uint64_t id = bed.table.generation(now);
                        REQUIRE(generations.insert(id).second);  // never twice
                        uint64_t used = ++model.clock;
                        model.objects.push_back({name, id, parent_there ? parent_id : 0, used});
                    }
                }
            } else if (verb == 5 && slot != kNoSlot) {
                bed.table.remove(slot);
                model.remove(known);
            } else if (verb < 8 && slot != kNoSlot) {
                bed.table.pin(slot);
                pins.push_back({slot, bed.table.generation(slot), known->id});
                ++known->pins;
                known->used = ++model.clock;
            } else if (verb < 10 && !pins.empty()) {
                std::swap(pins[random.below(pins.size())], pins.back());
                Held held = pins.back();
                pins.pop_back();
                bed.table.unpin(held.slot, held.generation);
                for (auto& o : model.objects) {
                    if (o.id != held.id) continue;
                    if (--o.pins == 0 && o.complete) o.used = ++model.clock;
                    model.drop_if_unused(&o);
                    break;
                }
            } else if (verb == 10 && slot != kNoSlot) {
                bed.table.touch(slot);
                known->used = ++model.clock;
            } else if (verb == 11) {
                ModelObject* victim = model.victim();
                std::string victim_name = victim == nullptr ? "" : victim->name;
                REQUIRE(bed.table.evict_one() == (victim != nullptr));
                if (victim != nullptr) {
                    REQUIRE(bed.find(victim_name) == kNoSlot);
                    model.remove(victim);
                }
            }
            REQUIRE(bed.table.check_integrity());
            const TableCounters& c = bed.table.counters();
            uint64_t complete = 0, detached = 0, pinned = 0;
            for (auto& o : model.objects) {
                complete += o.complete;
                detached += !o.complete;
                pinned += o.pins != 0;
            }
            REQUIRE(c.objects == complete);
            REQUIRE(c.detached == detached);
            REQUIRE(c.pinned == pinned);
            REQUIRE(c.object_bytes == complete * kObjectBytes);
            REQUIRE(bed.allocator.free_bytes() == (1u << 16) - (complete + detached) * kObjectBytes);
        }
        for (const Held& held : pins) bed.table.unpin(held.slot, held.generation);
        while (bed.table.evict_one()) REQUIRE(bed.table.check_integrity());
        CHECK(bed.table.counters().objects == 0);
        CHECK(bed.allocator.free_bytes() == 1u << 16);
    }
}

TEST_CASE("object table: a chain goes leaf first, however old its root is") {
    Bed bed(16);
    uint32_t parent = kNoSlot;
    for (int i = 0; i < 6; ++i) {
        std::string name = "c" + std::to_string(i);
        REQUIRE(bed.commit(name, parent) == ObjectTable::Commit::kStored);
        parent = bed.find(name);
    }
    for (int i = 0; i < 6; ++i) bed.table.touch(bed.find("c" + std::to_string(i)));  // the leaf is the newest
    for (int i = 5; i >= 0; --i) {
        REQUIRE(bed.find("c" + std::to_string(i)) != kNoSlot);
        REQUIRE(bed.table.evict_one());
        REQUIRE(bed.find("c" + std::to_string(i)) == kNoSlot);
        REQUIRE(bed.table.check_integrity());
    }
    CHECK_FALSE(bed.table.evict_one());
}

TEST_CASE("object table: a pinned leaf protects its chain, a removed parent protects nobody") {
    Bed bed(16);
    bed.commit("root");
    bed.commit("leaf", bed.find("root"));
    uint32_t leaf = bed.find("leaf");
    bed.table.pin(leaf);
    CHECK_FALSE(bed.table.evict_one());
    bed.table.remove(bed.find("root"));
    bed.commit("root");  // of that name again, in the same slot: not the leaf's parent
    CHECK(bed.table.check_integrity());
    CHECK(bed.table.evict_one());
    CHECK(bed.find("root") == kNoSlot);
    bed.table.unpin(leaf, bed.table.generation(leaf));
    CHECK(bed.table.evict_one());
    CHECK(bed.table.check_integrity());
}

TEST_CASE("object table: a late unpin of a slot that was reused touches nobody") {
    Bed bed(1);
    bed.commit("a");
    uint32_t slot = bed.find("a");
    uint64_t old = bed.table.generation(slot);
    bed.table.pin(slot);
    bed.table.unpin(slot, old);
    REQUIRE(bed.commit("b") == ObjectTable::Commit::kStored);  // evicts a, takes its slot
    REQUIRE(bed.find("b") == slot);
    bed.table.pin(slot);
    bed.table.unpin(slot, old);
    CHECK(bed.table.pins(slot) == 1);
    CHECK(bed.commit("c") == ObjectTable::Commit::kNoSlot);
    bed.table.unpin(slot, bed.table.generation(slot));
    CHECK(bed.commit("c") == ObjectTable::Commit::kStored);
}

TEST_CASE("object table: the window of bytes that was used the longest ago is cleared") {
    Random random(400);
    for (int round = 0; round < 300; ++round) {
        constexpr uint64_t kBytes = 16 * kObjectBytes;
        Bed bed(32, kBytes);
        struct Placed {
            Extent extent;
            uint32_t slot;
            bool pinned;
        };
        std::vector<Placed> placed;
        for (int i = 0;; ++i) {
            uint64_t size = random.between(1, 3) * kObjectBytes;
            if (bed.allocator.largest() < size) break;
            std::string name = "o" + std::to_string(i);
            bed.commit(name, kNoSlot, false, size);
            uint32_t slot = bed.find(name);
            placed.push_back({{bed.table.entry(slot).offset, size}, slot, random.one_in(4)});
            if (placed.back().pinned) bed.table.pin(slot);
        }
        for (size_t i = 0; i < placed.size(); ++i) {
            if (placed[i].pinned || !random.one_in(3)) continue;
            bed.table.remove(placed[i].slot);
            placed.erase(placed.begin() + long(i--));
        }
        uint64_t wanted = random.between(1, 6) * kObjectBytes;
        // By hand: each window of that many bytes, its last use and the bytes of the objects that it touches.
        constexpr std::pair<uint64_t, uint64_t> kNone{UINT64_MAX, UINT64_MAX};
        std::pair<uint64_t, uint64_t> best = kNone;
        for (uint64_t begin = 0; begin + wanted <= kBytes; begin += kObjectBytes) {
            uint64_t used = 0, price = 0;
            bool possible = true;
            for (const Placed& p : placed) {
                if (p.extent.end() <= begin || p.extent.offset >= begin + wanted) continue;
                possible &= !p.pinned;
                used = std::max(used, bed.table.last_used(p.slot));
                price += p.extent.size;
            }
            if (possible) best = std::min(best, {used, price});
        }
        uint64_t before = bed.table.counters().evicted_bytes_total;
        REQUIRE(bed.table.evict_window(wanted) == (best != kNone));
        REQUIRE(bed.table.check_integrity());
        if (best == kNone) continue;
        REQUIRE(bed.allocator.largest() >= wanted);
        REQUIRE(bed.table.counters().evicted_bytes_total - before == best.second);
    }
}

TEST_CASE("object table: large objects go in the order of their age") {
    constexpr uint64_t kRoom = 8;
    Bed bed(32, kRoom * kObjectBytes);
    for (uint64_t i = 0; i < 5 * kRoom; ++i) {
        if (bed.allocator.largest() < kObjectBytes) REQUIRE(bed.table.evict_window(kObjectBytes));
        REQUIRE(bed.commit("o" + std::to_string(i)) == ObjectTable::Commit::kStored);
        for (uint64_t k = 0; k <= i; ++k) {
            REQUIRE((bed.find("o" + std::to_string(k)) != kNoSlot) == (k + kRoom > i));
        }
    }
}

TEST_CASE("object table: a chain that nobody read loses its end first, in windows too") {
    constexpr int kLength = 8;
    Bed bed(32, kLength * kObjectBytes);
    for (int i = 0; i < kLength; ++i) {
        uint32_t parent = i == 0 ? kNoSlot : bed.find("c" + std::to_string(i - 1));
        REQUIRE(bed.commit("c" + std::to_string(i), parent) == ObjectTable::Commit::kStored);
    }
    for (int left = kLength - 2; left >= 0; left -= 2) {
        REQUIRE(bed.table.evict_window(2 * kObjectBytes));
        REQUIRE(bed.table.check_integrity());
        for (int i = 0; i < kLength; ++i) {
            REQUIRE((bed.find("c" + std::to_string(i)) != kNoSlot) == (i < left));
        }
        REQUIRE(bed.commit("x" + std::to_string(left)) == ObjectTable::Commit::kStored);  // newer, and stays
        REQUIRE(bed.commit("y" + std::to_string(left)) == ObjectTable::Commit::kStored);
    }
}

TEST_CASE("object table: a window of one object takes what goes by age, leaves first") {
    constexpr uint64_t kObjects = 24;
    uint64_t same = 0, parents = 0;
    for (uint64_t round = 0; round < 60; ++round) {
        Random random(500 + round);
        Bed one(2 * kObjects, kObjects * kObjectBytes), window(2 * kObjects, kObjects * kObjectBytes);
        std::vector<std::string> names;
        std::set<std::string> pinned;
        for (int step = 0; step < 400; ++step) {
            uint64_t verb = names.empty() ? 0 : random.below(10);
            if (verb < 4 && names.size() == kObjects) {
                bool goes = one.table.evict_one();
                bool all_pinned = pinned.size() == names.size();
                REQUIRE(window.table.evict_window(kObjectBytes) == !all_pinned);
                REQUIRE(window.table.check_integrity());
                if (all_pinned) break;
                auto gone = std::ranges::find_if(
                    names, [&](const std::string& name) { return window.find(name) == kNoSlot; });
                REQUIRE(gone != names.end());
                REQUIRE_FALSE(pinned.contains(*gone));
                // Where all ends of chains are pinned, a window takes what they hang on all the same.
                if (!goes) one.table.remove(one.find(*gone));
                goes ? ++same : ++parents;
                REQUIRE(one.find(*gone) == kNoSlot);
                REQUIRE(one.table.counters().objects == window.table.counters().objects);
                names.erase(gone);
            }
            std::string any = names.empty() ? "" : names[random.below(names.size())];
            if (verb >= 6 && pinned.contains(any) && !random.one_in(4)) continue;
            std::string name = "k" + std::to_string(step);
            RetentionHints keep{{}, random.one_in(4) ? 1000u : 0u};
            for (Bed* bed : {&one, &window}) {
                uint32_t slot = any.empty() ? kNoSlot : bed->find(any);
                if (verb < 4) {
                    bed->commit(name, verb == 0 ? kNoSlot : slot, false, kObjectBytes, keep);
                } else if (verb < 6) {
                    bed->table.touch(slot);
                } else if (pinned.contains(any)) {
                    bed->table.unpin(slot, bed->table.generation(slot));
                } else {
                    bed->table.pin(slot);
                }
            }
            if (verb < 4) {
                names.push_back(name);
            } else if (verb >= 6 && pinned.erase(any) == 0) {
                pinned.insert(any);
            }
        }
    }
    CHECK(same > 1000);
    CHECK(parents > 0);
}

TEST_CASE("object table: a window takes what a pinned object hangs on last, and its end before the rest") {
    Bed bed(16, 8 * kObjectBytes);
    // Three pages of two pools: only those of one hang on each other.
    for (int page = 0; page < 3; ++page) {
        RetentionHints keep{Hash128{static_cast<uint64_t>(page) + 1, 2}, 0};
        std::string number = std::to_string(page);
        bed.commit("state" + number, kNoSlot, false, kObjectBytes, keep);
        uint32_t parent = page == 0 ? kNoSlot : bed.find("kv" + std::to_string(page - 1));
        bed.commit("kv" + number, parent, false, kObjectBytes, keep);
    }
    bed.commit("soft", kNoSlot, false, kObjectBytes, {{}, 1000});
    bed.commit("other");
    bed.table.pin(bed.find("kv2"));
    std::vector<std::string> left{"kv0", "kv1", "other", "soft", "state0", "state1", "state2"};
    auto next = [&] {
        REQUIRE(bed.table.evict_window(kObjectBytes));
        REQUIRE(bed.table.check_integrity());
        auto gone = std::ranges::find_if(left, [&](auto& name) { return bed.find(name) == kNoSlot; });
        REQUIRE(gone != left.end());
        std::string name = *gone;
        left.erase(gone);
        bed.commit("new-" + name);
        bed.table.pin(bed.find("new-" + name));
        return name;
    };
    CHECK(next() == "other");
    CHECK(next() == "soft");
    CHECK(next() == "state2");  // of the page that is read, which is broken up
    for (int i = 0; i < 2; ++i) CHECK(next().back() == '1');
    for (int i = 0; i < 2; ++i) CHECK(next().back() == '0');
    CHECK_FALSE(bed.table.evict_window(kObjectBytes));
}

TEST_CASE("object table: a group goes whole while anything else can go, soft pins last, the rest by use") {
    struct Thing {
        uint32_t slot;
        uint64_t generation;
        int group;        // -1: none
        uint64_t parent;  // a generation, or 0
        uint64_t used;
        int pins = 0;
        bool held = false;
        uint32_t soft_ms = 0;
        uint64_t soft_until = 0;
        bool used_since = false;
    };
    int broken = 0;
    for (int round = 0; round < 30; ++round) {
        Random random(900 + static_cast<uint64_t>(round));
        Bed bed(64);
        std::map<std::string, Thing> things;
        std::vector<Thing> detached;  // evicted while they were written
        std::map<int, uint64_t> group_used;
        uint64_t clock = 0, now = 1000;
        bed.table.on_time(now);
        auto use = [&](Thing& t) {
            t.used = ++clock;
            t.used_since = true;
            if (t.soft_ms != 0 && t.soft_until == 0) {
                t.soft_until = now + t.soft_ms;
                t.used_since = false;
            }
            if (t.group >= 0) group_used[t.group] = clock;
        };
        auto members = [&](int group) {
            std::vector<std::string> names;
            for (auto& [name, t] : things) {
                if (t.group == group) names.push_back(name);
            }
            return names;
        };
        auto gone = [&](const std::string& name) {
            int group = things.at(name).group;
            if (things.at(name).held) detached.push_back(things.at(name));
            things.erase(name);
            if (group >= 0 && members(group).empty()) group_used.erase(group);
        };
        auto has_child = [&](const Thing& of, bool outside) {
            for (const Thing& child : detached) {
                if (child.parent == of.generation) return true;
            }
            return std::ranges::any_of(things, [&](auto& row) {
                bool counts = !outside || of.group < 0 || row.second.group != of.group;
                return row.second.parent == of.generation && counts;
            });
        };
        // What goes next, by looking at everything: a unit is a group, or an object without one.
        auto victim = [&] {
            std::vector<std::string> best;
            std::pair<int, uint64_t> best_rank{2, 0};
            std::set<int> seen;
            for (auto& [name, t] : things) {
                if (t.group >= 0 && !seen.insert(t.group).second) continue;
                std::vector<std::string> unit = t.group >= 0 ? members(t.group) : std::vector{name};
                bool stays = false, soft = false, all_held = true;
                for (const std::string& one : unit) {
                    const Thing& o = things.at(one);
                    stays |= o.pins != 0 || has_child(o, true);
                    soft |= o.soft_until != 0;
                    all_held &= o.held;
                }
                stays |= all_held;
                std::pair<int, uint64_t> rank{soft, t.group >= 0 ? group_used.at(t.group) : t.used};
                if (stays || rank >= best_rank) continue;
                best_rank = rank;
                best = unit;
            }
            return best;
        };
        for (int step = 0; step < 1500; ++step) {
            if (!detached.empty() && random.one_in(3)) {
                bed.table.release(detached.back().slot, detached.back().generation);
                detached.pop_back();
            }
            std::string name = "k" + std::to_string(random.below(40));
            auto known = things.find(name);
            uint64_t verb = random.below(14);
            if (verb < 5 && (known == things.end() || (known->second.pins == 0 && !known->second.held))) {
                if (things.size() == 40) continue;
                Thing t{};
                t.group = random.one_in(3) ? -1 : static_cast<int>(random.below(6));
                auto parent = things.find("k" + std::to_string(random.below(40)));
                bool has_parent = random.one_in(2) && parent != things.end() && parent != known;
                t.parent = has_parent ? parent->second.generation : 0;
                if (random.one_in(4)) t.soft_ms = 1 + static_cast<uint32_t>(random.below(50));
                RetentionHints keep;
                if (t.group >= 0) keep.group = Hash128{static_cast<uint64_t>(t.group), 7};
                keep.soft_ms = t.soft_ms;
                uint32_t above = has_parent ? parent->second.slot : kNoSlot;
                REQUIRE(bed.commit(name, above, true, kObjectBytes, keep) == ObjectTable::Commit::kStored);
                if (known != things.end()) gone(name);
                t.slot = bed.find(name);
                t.generation = bed.table.generation(t.slot);
                things[name] = t;
                use(things[name]);
                things[name].used_since = false;
            } else if (known == things.end()) {
                continue;
            } else if (verb == 5 && known->second.pins == 0 && !known->second.held) {
                bed.table.remove(known->second.slot);
                gone(name);
            } else if (verb < 8) {
                bed.table.touch(known->second.slot);
                use(known->second);
            } else if (verb == 8) {
                bed.table.pin(known->second.slot);
                ++known->second.pins;
                use(known->second);
            } else if (verb < 11 && known->second.pins != 0) {
                bed.table.unpin(known->second.slot, known->second.generation);
                if (--known->second.pins == 0) use(known->second);
            } else if (verb == 11) {
                known->second.held ? bed.table.release(known->second.slot, known->second.generation)
                                   : bed.table.retain(known->second.slot);
                known->second.held = !known->second.held;
            } else if (verb == 12) {
                now += random.below(20);
                bed.table.on_time(now);
                for (auto& [other, t] : things) {
                    if (t.soft_until == 0 || t.soft_until > now) continue;
                    t.soft_until = t.used_since ? now + t.soft_ms : 0;
                    t.used_since = false;
                }
            } else {
                std::vector<std::string> expected = victim();
                bool leaf = std::ranges::any_of(things, [&](auto& row) {
                    return row.second.pins == 0 && !row.second.held && !has_child(row.second, false);
                });
                REQUIRE(bed.table.evict_one() == (leaf || !expected.empty()));
                if (expected.empty() && leaf) {
                    // No unit can go: what can of one group, and nothing that is above what stays.
                    std::set<int> groups;
                    for (auto& [one, t] : things) {
                        if (bed.find(one) != kNoSlot) continue;
                        expected.push_back(one);
                        groups.insert(t.group);
                        REQUIRE(t.pins == 0);
                    }
                    REQUIRE((groups.size() == 1 && *groups.begin() >= 0));
                    std::set<uint64_t> lost;
                    for (const std::string& one : expected) lost.insert(things.at(one).generation);
                    for (const std::string& one : expected) gone(one);
                    for (auto& [one, t] : things) {
                        REQUIRE_FALSE(lost.contains(t.parent));
                        bool could = t.group == *groups.begin() && t.pins == 0 && !has_child(t, false);
                        REQUIRE_FALSE(could);
                    }
                    ++broken;
                    expected.clear();
                }
                for (const std::string& one : expected) {
                    REQUIRE(bed.find(one) == kNoSlot);
                    gone(one);
                }
            }
            REQUIRE(bed.table.check_integrity());
            REQUIRE(bed.table.counters().objects == things.size());
            for (auto& [one, t] : things) {
                REQUIRE(bed.find(one) == t.slot);
                REQUIRE(bed.table.soft_pinned(t.slot) == (t.soft_until != 0));
                REQUIRE(bed.table.grouped(t.slot) == (t.group >= 0));
            }
        }
    }
    CHECK(broken > 10);
}

TEST_CASE("object table: the end of a chain in an open lease does not keep the rest of it") {
    // As of a writer that stored a conversation, and fills its slab no further.
    Bed bed(16);
    REQUIRE(bed.commit("first") == ObjectTable::Commit::kStored);
    REQUIRE(bed.commit("second", bed.find("first")) == ObjectTable::Commit::kStored);
    auto slab = bed.leases.open(4 * kObjectBytes, 4 * kObjectBytes, kObjectBytes);
    REQUIRE(slab);
    Extent extent{slab->offset, kObjectBytes};
    REQUIRE(bed.leases.commit(extent));
    REQUIRE(bed.table.commit(0, kHash("last"), "last", extent, 0, bed.find("second"), false, {}) ==
            ObjectTable::Commit::kStored);
    REQUIRE(bed.commit("newer") == ObjectTable::Commit::kStored);
    CHECK(bed.table.evict_for_memory());
    CHECK(bed.find("last") == kNoSlot);
    CHECK(bed.table.evict_for_memory());
    CHECK(bed.find("second") == kNoSlot);
    CHECK(bed.find("newer") != kNoSlot);
}

TEST_CASE("object table: groups that are children of each other go all the same") {
    Bed bed(4);
    RetentionHints a{Hash128{1, 1}, 0}, b{Hash128{2, 2}, 0};
    bed.commit("a1", kNoSlot, false, kObjectBytes, a);
    bed.commit("b1", bed.find("a1"), false, kObjectBytes, b);
    bed.commit("a2", bed.find("b1"), false, kObjectBytes, a);
    bed.commit("b2", bed.find("a2"), false, kObjectBytes, b);
    REQUIRE(bed.commit("new") == ObjectTable::Commit::kStored);  // in the place of the only leaf
    CHECK(bed.find("b2") == kNoSlot);
    bed.table.pin(bed.find("new"));
    for (const char* name : {"a2", "b1", "a1"}) {
        REQUIRE(bed.table.evict_for_memory());
        CHECK(bed.find(name) == kNoSlot);
        CHECK(bed.table.check_integrity());
    }
    CHECK_FALSE(bed.table.evict_one());
}

TEST_CASE("object table: one reader of each group is in nobody's way") {
    constexpr uint32_t kGroups = 8, kEach = 4;
    Bed bed(kGroups * kEach);
    for (uint32_t i = 0; i < kGroups * kEach; ++i) {
        RetentionHints keep{Hash128{i / kEach, 5}, 0};
        bed.commit("g" + std::to_string(i), kNoSlot, false, kObjectBytes, keep);
        if (i % kEach == 0) bed.table.pin(bed.find("g" + std::to_string(i)));
    }
    for (uint32_t i = 0; i < kGroups; ++i) {  // the group used the longest ago is broken up, and no other
        REQUIRE(bed.table.evict_for_memory());
        CHECK(bed.table.counters().objects == kGroups * kEach - (i + 1) * (kEach - 1));
        CHECK(bed.table.group_members(bed.find("g" + std::to_string(i * kEach))).empty());
        CHECK(bed.table.check_integrity());
    }
    CHECK_FALSE(bed.table.evict_for_memory());
    CHECK(bed.table.counters().pinned == kGroups);
}

TEST_CASE("object table: what a soft pin kept goes by its age when that ends") {
    constexpr int kOld = 1000, kSoft = 300;
    Bed bed(2048, 2048 * kObjectBytes);
    bed.table.on_time(1);
    for (int i = 0; i < kOld; ++i) bed.commit("old" + std::to_string(i));
    for (int i = 0; i < kSoft; ++i) {
        bed.commit("soft" + std::to_string(i), kNoSlot, false, kObjectBytes, RetentionHints{{}, 10});
    }
    bed.commit("new");
    bed.table.on_time(100);
    CHECK(bed.table.check_integrity());
    auto goes = [&](const std::string& name) {
        uint64_t used = bed.table.last_used(bed.find(name));
        REQUIRE(bed.table.oldest_use() == used);
        REQUIRE(bed.table.evict_one());
        REQUIRE(bed.find(name) == kNoSlot);
    };
    for (int i = 0; i < kOld; ++i) goes("old" + std::to_string(i));
    bed.table.touch(bed.find("soft7"));
    CHECK(bed.table.check_integrity());
    for (int i = 0; i < kSoft; ++i) {
        if (i != 7) goes("soft" + std::to_string(i));
    }
    goes("new");
    goes("soft7");
    CHECK(bed.table.check_integrity());
}

TEST_CASE("object table: a group of which one member is written goes before soft pins and newer ones") {
    Bed bed(16);
    RetentionHints keep{Hash128{1, 2}, 0};
    bed.commit("soft", kNoSlot, false, kObjectBytes, RetentionHints{{}, 1000});
    for (const char* name : {"a", "b"}) bed.commit(name, kNoSlot, false, kObjectBytes, keep);
    bed.commit("newer");
    uint32_t a = bed.find("a");
    uint64_t generation = bed.table.generation(a);
    bed.table.retain(a);
    uint64_t free = bed.allocator.free_bytes();
    REQUIRE(bed.table.evict_one());
    CHECK(bed.find("a") == kNoSlot);
    CHECK(bed.find("b") == kNoSlot);
    CHECK(bed.find("newer") != kNoSlot);
    CHECK(bed.allocator.free_bytes() == free + kObjectBytes);
    CHECK(bed.table.readable(a, generation));  // for whoever writes it
    bed.table.release(a, generation);
    CHECK(bed.allocator.free_bytes() == free + 2 * kObjectBytes);
    CHECK(bed.table.check_integrity());
}

// All slots are taken; a replacement needs one, since what it replaces is still being written, and the group
// that goes for it is that of the old object.
TEST_CASE("object table: an object may be evicted with its group by its own replacement") {
    Bed bed(3);
    RetentionHints keep{Hash128{1, 2}, 0};
    for (const char* name : {"a", "b"}) bed.commit(name, kNoSlot, false, kObjectBytes, keep);
    bed.commit("newer");
    uint32_t a = bed.find("a");
    uint64_t generation = bed.table.generation(a);
    bed.table.retain(a);
    CHECK(bed.commit("a", kNoSlot, true) == ObjectTable::Commit::kStored);
    CHECK(bed.table.check_integrity());
    CHECK(bed.find("a") != a);
    CHECK(bed.find("b") == kNoSlot);
    CHECK(bed.find("newer") != kNoSlot);
    bed.table.release(a, generation);
    CHECK(bed.table.check_integrity());
}

TEST_CASE("object table: a window takes no group for the age of a member that nobody used") {
    Bed bed(16, 4 * kObjectBytes);
    RetentionHints keep{Hash128{1, 2}, 0};
    bed.commit("g0", kNoSlot, false, kObjectBytes, keep);
    bed.commit("x0");
    bed.commit("x1");
    bed.commit("g1", kNoSlot, false, kObjectBytes, keep);
    bed.table.touch(bed.find("g1"));
    REQUIRE(bed.table.evict_window(kObjectBytes));
    CHECK(bed.find("x0") == kNoSlot);
    CHECK(bed.find("g0") != kNoSlot);
    CHECK(bed.find("g1") != kNoSlot);
}

TEST_CASE("object table: a removed member that is read leaves its group") {
    Bed bed(16);
    RetentionHints keep{Hash128{1, 2}, 0};
    for (const char* name : {"a", "b", "c"}) bed.commit(name, kNoSlot, false, kObjectBytes, keep);
    uint32_t a = bed.find("a");
    uint64_t generation = bed.table.generation(a);
    bed.table.pin(a);
    bed.table.remove(a);
    CHECK(bed.table.group_members(bed.find("b")) == std::vector<uint32_t>{bed.find("c")});
    CHECK(bed.table.evict_one());
    CHECK(bed.table.counters().objects == 0);
    CHECK(bed.table.readable(a, generation));
    CHECK(bed.table.check_integrity());
    bed.table.unpin(a, generation);
    CHECK(bed.table.check_integrity());
}

TEST_CASE("object table: a group is bounded, and what is over it stays by itself") {
    Bed bed(kGroupMembersMax + 8, (kGroupMembersMax + 8) * kObjectBytes);
    RetentionHints keep{Hash128{1, 2}, 0};
    for (uint32_t i = 0; i < kGroupMembersMax + 3; ++i) {
        bed.commit("k" + std::to_string(i), kNoSlot, false, kObjectBytes, keep);
    }
    CHECK(bed.table.group_members(bed.find("k0")).size() == kGroupMembersMax - 1);
    CHECK_FALSE(bed.table.grouped(bed.find("k" + std::to_string(kGroupMembersMax))));
    CHECK(bed.table.evict_one());
    CHECK(bed.table.counters().objects == 3);
    CHECK(bed.table.check_integrity());
}

TEST_CASE("object table: a window spares soft pins and split groups where it can") {
    constexpr uint64_t kBytes = 8 * kObjectBytes;
    for (bool tight : {false, true}) {
        Bed bed(16, kBytes);
        RetentionHints soft{{}, 1000}, group{Hash128{1, 2}, 0};
        bed.commit("s0", kNoSlot, false, kObjectBytes, soft);
        bed.commit("s1", kNoSlot, false, kObjectBytes, soft);
        bed.commit("g0", kNoSlot, false, kObjectBytes, group);
        bed.commit("g1", kNoSlot, false, kObjectBytes, group);
        bed.commit("x0");
        bed.commit("x1");
        bed.commit("x2");
        bed.commit("g2", kNoSlot, false, kObjectBytes, group);
        bed.table.pin(bed.find("g2"));
        if (tight) bed.table.pin(bed.find("x1"));
        REQUIRE(bed.table.evict_window(3 * kObjectBytes));
        CHECK(bed.table.check_integrity());
        CHECK(bed.find("g2") != kNoSlot);
        if (tight) {
            CHECK(bed.find("g0") == kNoSlot);
            CHECK(bed.find("g1") == kNoSlot);  // no useless half
        } else {
            for (const char* name : {"s0", "s1", "g0", "g1"}) CHECK(bed.find(name) != kNoSlot);
            for (const char* name : {"x0", "x1", "x2"}) CHECK(bed.find(name) == kNoSlot);
        }
    }
}

TEST_CASE("object table: its log tells what came and went") {
    Random random(77);
    Bed bed(64, 64 * 64);
    DeltaLog log(1 << 20);
    log.begin_inventory();
    bed.table.set_delta_log(&log);
    std::vector<std::string> names;
    for (int i = 0; i < 200; ++i) names.push_back("name-" + std::to_string(i));
    for (int step = 0; step < 3000; ++step) {
        const std::string& name = names[random.below(names.size())];
        if (random.one_in(4)) {
            if (uint32_t slot = bed.find(name); slot != kNoSlot) bed.table.remove(slot);
        } else {
            while (bed.table.counters().objects > 48) bed.table.evict_one();
            bed.commit(name, kNoSlot, random.one_in(2));
        }
    }
    CHECK(bed.table.counters().evicted_total > 0);
    std::vector<DeltaRow> rows;
    REQUIRE(log.take(rows));
    std::vector<Hash128> held;
    for (const DeltaRow& row : rows) {
        auto it = std::find(held.begin(), held.end(), row.hash);
        if (row.added) {
            // A replaced object never seemed gone: it is told again.
            if (it == held.end()) held.push_back(row.hash);
        } else {
            REQUIRE(it != held.end());  // what is gone was there
            held.erase(it);
        }
    }
    CHECK(held.size() == bed.table.counters().objects);
    for (const std::string& name : names) {
        bool told = std::find(held.begin(), held.end(), kHash(name)) != held.end();
        CHECK(told == (bed.find(name) != kNoSlot));
        CHECK(told == (bed.table.find(kHash(name)) != kNoSlot));
    }
    bed.table.set_delta_log(nullptr);
}

TEST_CASE("object table: an object has the version that it was put with, whatever its slot had before") {
    Bed bed(1);
    auto put = [&](Version version) {
        auto lease = bed.leases.open(kObjectBytes, kObjectBytes, kObjectBytes);
        REQUIRE(lease);
        Extent extent{lease->offset, kObjectBytes};
        REQUIRE(bed.leases.commit(extent));
        auto stored =
            bed.table.commit(0, kHash("k"), "k", extent, 0, kNoSlot, true, RetentionHints{}, version);
        REQUIRE(stored == ObjectTable::Commit::kStored);
        bed.leases.close(lease->offset);
        return bed.table.version(bed.find("k"));
    };
    CHECK(put(uint64_t{3} << 32 | 7) == (uint64_t{3} << 32 | 7));
    CHECK(put(0) == 0);
}
