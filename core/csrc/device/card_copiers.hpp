// CardCopiers: the copier of each card that its owner has met, by ordinal, opened when it is first asked for.
//
// Threads: any. The lock is held while a copier is opened, some milliseconds: its ring is pinned then.
#pragma once

#include <map>
#include <memory>

#include "base/mutex.hpp"
#include "device/card_copier.hpp"

namespace moonpool::device {

class CardCopiers {
   public:
    // An error, in one sentence, is asked for anew by the next call.
    Result<std::shared_ptr<CardCopier>> at(int ordinal) EXCLUDES(mutex_);
    // Whether copies that were given up have not ended yet.
    bool has_abandoned() EXCLUDES(mutex_);
    // Their pinned memory goes with the last that uses them.
    void clear() EXCLUDES(mutex_);

   private:
    Mutex mutex_;
    std::map<int, std::shared_ptr<CardCopier>> copiers_ GUARDED_BY(mutex_);
};

}  // namespace moonpool::device
