#include "stripe_books.hpp"

#include <algorithm>
#include <cstring>
#include <map>
#include <set>

namespace moonpool::sim {

namespace {

bool may_leave(const Operation& o) {
    return o.left || o.outcome == Operation::kUnknown || o.outcome == Operation::kPartly ||
           o.outcome == Operation::kOpen;
}

bool is_change(const Operation& o) {
    return o.kind == Operation::kPut || o.kind == Operation::kReplace || o.kind == Operation::kRemove;
}

// Whether a stripe of that value may stay without a manifest: it was left by its own write, or by a change
// while its manifest may have stood. That ends with the first replacement or removal that comes after the
// write and reaches all nodes.
bool may_stay(uint64_t value, const std::vector<Operation>& history) {
    auto write =
        std::ranges::find_if(history, [&](const Operation& o) { return is_change(o) && o.value == value; });
    if (write == history.end()) return false;
    if (may_leave(*write)) return true;
    Micros gone = UINT64_MAX;
    for (const Operation& o : history) {
        const bool ends_it = o.kind == Operation::kReplace || o.kind == Operation::kRemove;
        if (ends_it && o.key == write->key && o.begin >= write->end && o.outcome == Operation::kDone)
            gone = std::min(gone, o.end);
    }
    return std::ranges::any_of(history, [&](const Operation& o) {
        return is_change(o) && o.key == write->key && o.end >= write->begin && o.begin <= gone &&
               may_leave(o);
    });
}

std::optional<Finding> exists_what_is_read(const std::vector<Operation>& history) {
    std::map<std::pair<uint32_t, uint32_t>, const Operation*> reads, questions;  // the last of each
    for (const Operation& o : history) {
        if (o.kind == Operation::kGet) reads[{o.client, o.key}] = &o;
        if (o.kind == Operation::kExists) questions[{o.client, o.key}] = &o;
    }
    for (const auto& [of, question] : questions) {
        const Operation &o = *question, &read = *reads[of];
        const bool both = o.outcome == Operation::kDone && read.outcome == Operation::kDone;
        if (both && (o.value != 0) == (read.value != 0)) continue;
        return Finding{Finding::kBooks, "not what was read: " + to_text(o), o.key, true};
    }
    return std::nullopt;
}

// A reader that finds a stripe lost removes what is left of the object, so afterwards all books agree: only
// the miss tells of live stripes that were freed.
std::optional<Finding> replaced_is_read(const std::vector<Operation>& history) {
    std::map<uint32_t, bool> stays;
    std::map<std::pair<uint32_t, uint32_t>, const Operation*> reads;  // the last of each
    for (const Operation& o : history) {
        if (o.kind == Operation::kGet) reads[{o.client, o.key}] = &o;
        if (!is_change(o)) continue;
        const bool is_done = o.kind == Operation::kReplace && o.outcome == Operation::kDone && !o.left;
        auto [of, is_first] = stays.try_emplace(o.key, true);
        of->second &= is_done;
    }
    for (const auto& [of, read] : reads) {
        auto key = stays.find(of.second);
        const bool is_miss = read->outcome == Operation::kDone && read->value == 0;
        if (key == stays.end() || !key->second || !is_miss) continue;
        return Finding{Finding::kBooks, "what was replaced is lost: " + to_text(*read), read->key, true};
    }
    return std::nullopt;
}

}  // namespace

const Secrets& cluster_secrets() {
    static const Secrets secrets("of the simulated cluster");
    return secrets;
}

std::string stripe_of(uint64_t value, uint64_t number) {
    std::string bytes(2 * sizeof(uint64_t), '\0');
    std::memcpy(bytes.data(), &value, sizeof(value));
    std::memcpy(bytes.data() + sizeof(value), &number, sizeof(number));
    return bytes;
}

std::optional<Finding> check_stripes(const Contents& all, const std::vector<Operation>& history,
                                     uint32_t keys, const LostInStripes& lost) {
    if (auto finding = lost.reads_miss ? std::nullopt : exists_what_is_read(history)) return finding;
    if (auto finding = lost.none ? replaced_is_read(history) : std::nullopt) return finding;
    std::set<std::string> named;
    for (uint32_t key = 0; key < keys; ++key) {
        const std::string name = "k" + std::to_string(key);
        auto under = all.find(name);
        if (under == all.end()) continue;
        for (const std::string& bytes : under->second) {
            auto manifest = decode_manifest(std::as_bytes(std::span(bytes)), cluster_secrets(), name);
            if (!manifest) continue;
            for (const std::string& stripe : manifest->stripe_names()) {
                // A stripe may be evicted behind the last read.
                if (!lost.reads_miss && !all.contains(stripe))
                    return Finding{Finding::kBooks, name + ": an object that lost a stripe stays", key, true};
                named.insert(stripe);
            }
        }
    }
    if (lost.any) return std::nullopt;
    for (const auto& [name, copies] : all) {
        if (!is_stripe(name) || named.contains(name)) continue;
        if (lost.manifests.contains(name.substr(0, name.size() - sizeof(uint64_t)))) continue;
        uint64_t value = 0;
        std::memcpy(&value, copies.begin()->data(), sizeof(value));
        if (may_stay(value, history)) continue;
        auto write = std::ranges::find_if(
            history, [&](const Operation& o) { return is_change(o) && o.value == value; });
        std::optional<uint32_t> key;
        if (write != history.end()) key = write->key;
        return Finding{Finding::kBooks,
                       "a stripe of value " + std::to_string(value) + " stays without a manifest", key, true};
    }
    return std::nullopt;
}

}  // namespace moonpool::sim
