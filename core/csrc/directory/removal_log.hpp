// RemovalLog: which keys were removed or replaced, in their one order. The master keeps one, for nodes that
// were away; each node keeps one of the removals that it was told, and hands it to a new master. Pure.
//
// It holds the last removal of each key, of `max` keys at most, and says since which place it is complete:
// copies that may have missed an earlier removal are void as a whole, which costs misses, never an old value.
//
// A removal has a version, which copies are compared with, and a place, which is what a node has applied up
// to. They are the same, but where a master learns of a removal that a former master gave: it is in none of
// the answers that nodes had until then, so it gets a new place.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <unordered_map>

#include "base/xxh3.hpp"
#include "directory/version.hpp"

namespace moonpool {

struct Removal {
    Version version = kNoVersion, place = kNoVersion;  // kNoVersion: none is known
    bool of_absent = false;  // no node in touch had the key: it voids what nodes have that are away
};

class RemovalLog {
   public:
    explicit RemovalLog(size_t max) : max_(max) {}

    void add(const Hash128& hash, Version version) { add(hash, version, version); }
    void add(const Hash128& hash, Version version, Version place, bool of_absent = false) {
        if (place <= complete_since_) return;
        auto [at, fresh] = newest_.try_emplace(hash, Removal{version, place, of_absent});
        if (!fresh) {
            if (at->second.version >= version) return;
            forget_place(hash, at->second.place);
            at->second = Removal{version, place, of_absent};
        }
        order_.emplace(place, hash);
        if (order_.size() > max_) lose(order_.begin()->first);
    }
    // Removals up to that place are not known any more.
    void lose(Version until) {
        complete_since_ = std::max(complete_since_, until);
        auto end = order_.upper_bound(until);
        for (auto at = order_.begin(); at != end; ++at) newest_.erase(at->second);
        order_.erase(order_.begin(), end);
    }

    // The last removal of that key.
    Removal find(const Hash128& hash) const {
        auto at = newest_.find(hash);
        return at == newest_.end() ? Removal{} : at->second;
    }
    // Whether every removal after that place is here.
    bool covers(Version since) const { return since >= complete_since_; }
    Version complete_since() const { return complete_since_; }
    Version newest_place() const { return order_.empty() ? kNoVersion : order_.rbegin()->first; }
    // f(hash, removal) for each removal after that place, oldest first, until it says true; whether it did.
    template <class F>
    bool each_after(Version since, F f) const {
        return std::any_of(order_.upper_bound(since), order_.end(),
                           [&](const auto& entry) { return f(entry.second, newest_.at(entry.second)); });
    }
    size_t size() const { return order_.size(); }

    bool check_integrity() const {
        return order_.size() == newest_.size() && order_.size() <= max_ &&
               std::ranges::all_of(order_, [this](const auto& e) { return find(e.second).place == e.first; });
    }

   private:
    struct Fold {
        size_t operator()(const Hash128& hash) const { return hash.high; }
    };

    void forget_place(const Hash128& hash, Version place) {
        auto at = order_.lower_bound(place);
        while (at->second != hash) ++at;
        order_.erase(at);
    }

    size_t max_;
    // A node may hear of two keys with one version: of a replacement that no master ordered.
    std::multimap<Version, Hash128> order_;
    std::unordered_map<Hash128, Removal, Fold> newest_;
    Version complete_since_ = kNoVersion;
};

}  // namespace moonpool
