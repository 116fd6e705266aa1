#include "history.hpp"

#include <algorithm>
#include <map>

namespace moonpool::sim {

namespace {

constexpr Micros kBeat = 300 * kMs;    // and what follows it
constexpr Micros kWaited = 100 * kMs;  // an operation that lasts longer

std::string seconds(Micros at) {
    std::string text = std::to_string(at / kMs);
    return text + "." + std::to_string(at % kMs / 100) + " ms";
}

// All operations of one value.
struct Value {
    const Operation* write = nullptr;
    Micros first_end = UINT64_MAX, last_begin = 0;
    Micros settled_begin = 0;      // the same of the write, and of reads that began after its end
    Micros in_force = UINT64_MAX;  // from the end of its acknowledged write on it is the last one

    void add(const Operation& o) {
        if (o.outcome == Operation::kDone || o.outcome == Operation::kPartly)
            first_end = std::min(first_end, o.end);
        last_begin = std::max(last_begin, o.begin);
    }
    bool removal() const { return write != nullptr && write->kind == Operation::kRemove; }
};

bool acknowledged(const Operation& write) {
    return write.outcome == Operation::kDone || write.outcome == Operation::kPartly;
}

// A read of a value. A node that is out of touch gives its own host what it has.
bool is_counted_read(const Operation& o, Micros healed) {
    return o.kind == Operation::kGet && o.outcome == Operation::kDone && o.value != 0 &&
           !(o.away && o.begin < healed);
}

// Until then clients read a copy, though a removal or replacement of which its node was not told is
// acknowledged. What a node told of while that waited: until the beat after its end; those of other hosts
// that have read it there, too. A removed put that waited for a node that stood still: until that has joined
// again, on the copy's own host.
Micros late_until(const Operation& put, const Operation& next, const Operation& read) {
    const bool put_waited = next.kind == Operation::kRemove && put.kind != Operation::kReplace &&
                            put.end - put.begin > kWaited && !read.from;
    const bool next_waited = next.end - next.begin > kBeat;
    return std::max(put_waited ? put.end + kRejoin : 0, next_waited ? next.end + kBeat : 0);
}

std::optional<Finding> check_key(uint32_t key, const std::vector<const Operation*>& operations,
                                 Micros healed) {
    std::map<uint64_t, Value> values;
    for (const Operation* o : operations) {
        if (o->outcome == Operation::kNothing || o->kind == Operation::kPin || o->kind == Operation::kExists)
            continue;
        bool read = o->kind == Operation::kGet;
        if (read && !is_counted_read(*o, healed)) continue;
        Value& value = values[o->value];
        value.add(*o);
        if (!read) value.write = o;
    }
    for (auto& [number, value] : values) {
        if (value.write == nullptr || value.first_end < value.write->begin)
            return Finding{Finding::kOtherBytes, "a value was read that no client had written", key};
        value.settled_begin = value.write->begin;
        // Some nodes may have what it removes until everything is well again.
        if (value.write->outcome == Operation::kPartly) value.first_end = std::max(value.first_end, healed);
        if (acknowledged(*value.write)) value.in_force = std::max(value.first_end, value.write->end);
    }
    // Reads of a value within its own write order nothing.
    for (const Operation* o : operations) {
        auto value = values.find(o->value);
        if (value == values.end() || !is_counted_read(*o, healed)) continue;
        if (o->begin >= value->second.write->end)
            value->second.settled_begin = std::max(value->second.settled_begin, o->begin);
    }
    for (auto a = values.begin(); a != values.end(); ++a) {
        // A write without an acknowledgement may take effect at any time.
        if (!acknowledged(*a->second.write) || a->second.removal()) continue;
        for (auto b = values.begin(); b != values.end(); ++b) {
            const Value &old = a->second, &next = b->second;
            if (a == b || !acknowledged(*next.write)) continue;
            if (!next.removal() &&
                (old.write->kind == Operation::kPut || next.write->kind == Operation::kPut))
                continue;
            if (next.in_force < old.write->begin) continue;  // that is the earlier one
            const bool removed = next.removal();
            // The master's order, where it gave both their places.
            const bool in_order =
                old.write->kind != Operation::kPut && old.write->version != 0 && next.write->version != 0;
            if (in_order ? old.write->version > next.write->version
                         : old.first_end >= (removed ? next.last_begin : next.settled_begin))
                continue;
            Micros last_begin = 0;  // of the reads that next forbids
            for (const Operation* o : operations) {
                if (o->value != a->first || !is_counted_read(*o, healed)) continue;
                if ((in_order || !removed) && o->begin < old.write->end) continue;
                if (next.write->forgotten_at <= o->end) continue;
                if (o->begin <= late_until(*old.write, *next.write, *o)) continue;
                last_begin = std::max(last_begin, o->begin);
            }
            if (next.in_force >= last_begin) continue;
            std::string what =
                "k" + std::to_string(key) + ": value " + std::to_string(a->first) + " was read after ";
            bool for_ever = last_begin >= healed;
            if (removed) {
                what += "its removal from " + seconds(next.write->begin) + " to " + seconds(next.write->end) +
                        " was acknowledged";
                return Finding{Finding::kRemovedValue, what, key, for_ever};
            }
            what += "value " + std::to_string(b->first) + " had taken its place";
            return Finding{Finding::kOldValue, what, key, for_ever};
        }
    }
    return std::nullopt;
}

bool overlap(const Operation& a, Micros begin, Micros end) { return a.begin < end && begin < a.end; }

// Of two unique puts that were stored the key was removed between them; and one of a key that was removed,
// and that no other operation puts, is stored.
std::optional<Finding> check_unique(uint32_t key, const std::vector<const Operation*>& operations) {
    auto any = [&](Micros begin, Micros end, auto is) {
        return std::ranges::any_of(operations,
                                   [&](const Operation* o) { return is(*o) && overlap(*o, begin, end); });
    };
    auto removes = [](const Operation& o) { return o.kind == Operation::kRemove; };
    // A replacement removes first.
    auto ends = [&](const Operation& o) { return removes(o) || o.kind == Operation::kReplace; };
    auto puts = [](const Operation& o) {
        return o.kind == Operation::kUnique || o.kind == Operation::kReplace || o.kind == Operation::kPut;
    };
    for (const Operation* late : operations) {
        if (late->kind != Operation::kUnique) continue;
        for (const Operation* early : operations) {
            if (early == late || early->begin > late->begin || early->outcome != Operation::kDone) continue;
            const bool before = early->kind == Operation::kUnique || early->end < late->begin;
            if (late->outcome == Operation::kDone && puts(*early) && before &&
                !any(early->begin, std::max(early->end, late->end),
                     [&](const Operation& o) { return &o != early && ends(o); })) {
                return Finding{Finding::kOldValue,
                               "k" + std::to_string(key) + ": value " + std::to_string(late->value) +
                                   " was put though value " + std::to_string(early->value) + " was there",
                               key};
            }
            auto other = [&](const Operation& o) { return &o != late && puts(o); };
            if (late->outcome == Operation::kNothing && removes(*early) && early->end < late->begin &&
                !any(early->begin, late->end, other)) {
                return Finding{Finding::kOldValue,
                               "k" + std::to_string(key) + ": value " + std::to_string(late->value) +
                                   " was not put though the key had been removed",
                               key};
            }
        }
    }
    return std::nullopt;
}

}  // namespace

std::string to_text(const Operation& o) {
    static const char* const kKinds[] = {"put", "replace", "get", "remove", "pin", "unique", "exists"};
    static const char* const kOutcomes[] = {"open", "done", "nothing", "unknown", "partly"};
    std::string text = seconds(o.begin) + " to " + seconds(o.end) + "  client-" + std::to_string(o.client) +
                       " " + kKinds[o.kind] + " k" + std::to_string(o.key);
    const bool puts =
        o.kind == Operation::kPut || o.kind == Operation::kReplace || o.kind == Operation::kUnique;
    if (puts) text += " = " + std::to_string(o.value);
    text += std::string(" -> ") + kOutcomes[o.outcome];
    if (o.kind == Operation::kGet && o.outcome == Operation::kDone) {
        text += o.value == 0 ? " a miss" : " " + std::to_string(o.value);
    }
    return text;
}

std::optional<Finding> check(const std::vector<Operation>& history, Micros healed, bool nothing_is_lost) {
    std::map<uint32_t, std::vector<const Operation*>> keys;
    for (const Operation& o : history) keys[o.key].push_back(&o);
    for (auto& [key, operations] : keys) {
        if (auto finding = check_key(key, operations, healed)) return finding;
        if (!nothing_is_lost) continue;
        if (auto finding = check_unique(key, operations)) return finding;
    }
    return std::nullopt;
}

}  // namespace moonpool::sim
