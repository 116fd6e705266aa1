// Removals: what a node knows of the order of removals and replacements (directory/version.hpp), and whether
// a put comes before or after them. On the store's loop; applied() on any thread.
//
// A put says how much of the order its client knew when the call began. It comes after all that; a removal of
// the key that is later voids it, and so may one up to applied(), for a node is told only of what concerned
// it. Such a put is refused as older, and its client, if it still waits, begins it anew. So a frame that a
// node reads late, long after its client gave up, brings nothing back.
//
// Each range of shards has an order of its own, from its own master, and a part of the log.
#pragma once

#include <array>
#include <atomic>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "directory/drop_list.hpp"
#include "directory/ranges.hpp"
#include "directory/removal_log.hpp"
#include "store/node/handed_node.hpp"

namespace moonpool {

class Removals {
   public:
    static constexpr size_t kMax = 1u << 17;  // 131,072 keys: some 16 MiB

    explicit Removals(uint32_t ranges = 1)
        : ranges_(ranges), logs_(ranges, RemovalLog(std::max<size_t>(kMax / ranges, 1))) {}

    uint32_t ranges() const { return ranges_; }

    // Told of every change of applied(), and of confirmed().
    using Told = std::function<void(uint32_t range, Version)>;
    void set_on_applied(Told f) { on_applied_ = std::move(f); }
    void set_on_confirmed(Told f) { on_confirmed_ = std::move(f); }

    Version applied(uint32_t range) const { return applied_[range].load(std::memory_order_relaxed); }
    void set_applied(uint32_t range, Version version) {
        if (version <= applied(range)) return;
        applied_[range].store(version, std::memory_order_relaxed);
        if (on_applied_) on_applied_(range, version);
    }
    // Up to where all copies of the node are right, also those of which its master had not heard when it
    // said applied(). Not above that. With it the node, or another process with its memory or its disk, comes
    // back.
    Version confirmed(uint32_t range) const { return confirmed_[range].load(std::memory_order_relaxed); }
    void confirm(uint32_t range, Version version) {
        if (version <= confirmed(range)) return;
        confirmed_[range].store(version, std::memory_order_relaxed);
        if (on_confirmed_) on_confirmed_(range, version);
    }
    // Of what another process held.
    void begin_at(uint32_t range, Version version) {
        set_applied(range, version);
        confirm(range, version);
    }

    // The key is removed, or replaced, at that place; kNoVersion, UINT64_MAX: none is known.
    void add(const Hash128& hash, Version version) {
        if (version != kNoVersion && version != UINT64_MAX) logs_[range_of(hash, ranges_)].add(hash, version);
    }
    Version last(const Hash128& hash) const { return logs_[range_of(hash, ranges_)].find(hash).version; }

    // The version of an object that is put. given: as its client says; none: it is of the release before, and
    // what the node knows now counts. None: it is older than a removal.
    std::optional<Version> of_put(const Hash128& hash, std::optional<Version> given) const {
        Version known = newest_for(hash);
        if (given && *given < known) return std::nullopt;
        return given.value_or(known);
    }
    // With which a put of that key comes after all that the node knows.
    Version newest_for(const Hash128& hash) const {
        return std::max(applied(range_of(hash, ranges_)), last(hash));
    }

    // Those of a range before that version, from a cursor on, for a new master: see MemberHooks.
    Version before(uint32_t range, Version version, Version& cursor, size_t most,
                   std::vector<Drop>& rows) const {
        const RemovalLog& log = logs_[range];
        bool more = log.each_after(cursor, [&](const Hash128& hash, const Removal& removal) {
            if (removal.version >= version) return false;
            // Those of one version stay together, as the cursor is a version.
            if (rows.size() >= most && rows.back().version != removal.version) return true;
            rows.push_back({hash, removal.version});
            return false;
        });
        cursor = more ? rows.back().version : kNoVersion;
        return log.complete_since();
    }

    // All that is known, for another process that goes on with it.
    std::vector<HandedRange> give() const {
        std::vector<HandedRange> ranges(ranges_);
        for (uint32_t range = 0; range < ranges_; ++range) {
            HandedRange& to = ranges[range];
            to.applied = confirmed(range);
            to.complete_since = logs_[range].complete_since();
            logs_[range].each_after(kNoVersion, [&](const Hash128& hash, const Removal& removal) {
                to.removals.push_back({hash, removal.version});
                return false;
            });
        }
        return ranges;
    }
    // Into an empty one of as many ranges.
    void adopt(const std::vector<HandedRange>& ranges) {
        for (uint32_t range = 0; range < ranges_; ++range) {
            logs_[range].lose(ranges[range].complete_since);
            for (const HandedRemoval& removal : ranges[range].removals)
                logs_[range].add(removal.hash, removal.version);
            begin_at(range, ranges[range].applied);
        }
    }

    size_t size() const {
        size_t size = 0;
        for (const RemovalLog& log : logs_) size += log.size();
        return size;
    }

   private:
    const uint32_t ranges_;
    std::vector<RemovalLog> logs_;  // of each range
    std::array<std::atomic<Version>, kRangesMax> applied_{}, confirmed_{};
    Told on_applied_, on_confirmed_;
};

}  // namespace moonpool
