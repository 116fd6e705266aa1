// MasterClaims: which master processes a node is connected to, so that it joins none twice where two of its
// addresses lead to the same one: the second JOIN would end the connection of the first, and so on for ever.
// Any thread.
#pragma once

#include <algorithm>
#include <vector>

#include "base/mutex.hpp"
#include "wire/auth.hpp"

namespace moonpool {

class MasterClaims {
   public:
    bool take(const Incarnation& master) {  // false: another connection has it
        MutexLock lock(mutex_);
        if (std::ranges::find(taken_, master) != taken_.end()) return false;
        taken_.push_back(master);
        return true;
    }
    bool has(const Incarnation& master) const {
        MutexLock lock(mutex_);
        return std::ranges::find(taken_, master) != taken_.end();
    }
    void give_back(const Incarnation& master) {
        MutexLock lock(mutex_);
        std::erase(taken_, master);
    }

   private:
    mutable Mutex mutex_;
    std::vector<Incarnation> taken_ GUARDED_BY(mutex_);
};

}  // namespace moonpool
