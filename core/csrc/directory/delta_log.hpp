// DeltaLog: what changed in a node since its agent last told the master. The store's loop pushes, the agent
// takes; neither waits for the other longer than for a push.
//
// Bounded: when the agent is behind by `max` rows, or has no master to tell, the rows are dropped and a full
// inventory is due instead.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <vector>

#include "base/mutex.hpp"
#include "directory/ranges.hpp"
#include "directory/types.hpp"

namespace moonpool {

struct DeltaRow {
    Hash128 hash;
    Tier tier = Tier::kDram;
    bool added = true;

    friend bool operator==(const DeltaRow&, const DeltaRow&) = default;
};

class DeltaLog {
   public:
    // wake() is called, by the pushing thread, when the first row comes to an empty log, or when it
    // overflows. next: of the same node, for another master; what is pushed here is pushed there, too. range:
    // of the master; rows of others are not kept.
    explicit DeltaLog(size_t max, std::function<void()> wake = {}, DeltaLog* next = nullptr,
                      const Range& range = {})
        : max_(max), range_(range), wake_(std::move(wake)), next_(next) {}
    DeltaLog(const DeltaLog&) = delete;

    void push(const Hash128& hash, Tier tier, bool added) {
        if (range_.contains(hash) && keep(hash, tier, added) && wake_) wake_();
        if (DeltaLog* next = next_.load(std::memory_order_acquire)) next->push(hash, tier, added);
    }
    // While rows are pushed: one more behind the last, which tells its master all at first. It lives as long
    // as this one is pushed to.
    void append(DeltaLog& next) { next_.store(&next, std::memory_order_release); }

    // Moves the rows to `out`, which is empty and lends its memory. False: an inventory is due instead.
    bool take(std::vector<DeltaRow>& out) {
        MutexLock lock(mutex_);
        if (inventory_due_) return false;
        std::swap(rows_, out);
        return true;
    }

    // From now on rows are kept again: an inventory that is taken later, piece by piece and each told before
    // the rows that come after it, is complete with them.
    void begin_inventory() {
        MutexLock lock(mutex_);
        rows_.clear();
        inventory_due_ = false;
    }
    // No thread takes rows: none are kept until the next inventory.
    void pause() {
        MutexLock lock(mutex_);
        decltype(rows_)().swap(rows_);
        inventory_due_ = true;
    }

    size_t size() const {
        MutexLock lock(mutex_);
        return rows_.size();
    }
    // Whether all that was pushed has been taken, and no inventory is due.
    bool is_taken() const {
        MutexLock lock(mutex_);
        return !inventory_due_ && rows_.empty();
    }
    uint64_t overflows() const {
        MutexLock lock(mutex_);
        return overflows_;
    }

   private:
    // Whether its agent has to be woken.
    bool keep(const Hash128& hash, Tier tier, bool added) {
        MutexLock lock(mutex_);
        if (inventory_due_) return false;
        bool first = rows_.empty();
        if (rows_.size() == max_) {
            decltype(rows_)().swap(rows_);
            inventory_due_ = true;
            ++overflows_;
            return true;
        }
        rows_.push_back({hash, tier, added});
        return first;
    }

    const size_t max_;
    const Range range_;
    const std::function<void()> wake_;
    std::atomic<DeltaLog*> next_;
    mutable Mutex mutex_;
    std::vector<DeltaRow> rows_ GUARDED_BY(mutex_);
    bool inventory_due_ GUARDED_BY(mutex_) = true;  // the first thing that a master hears
    uint64_t overflows_ GUARDED_BY(mutex_) = 0;
};

}  // namespace moonpool
