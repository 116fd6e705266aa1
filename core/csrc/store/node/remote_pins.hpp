// RemotePins: what callers of other hosts have pinned in one tenant's arena, each object once however many of
// them have it. A pinned slot gets no other object before its last unpin, so its number tells the object.
#pragma once

#include <cstdint>
#include <unordered_map>

namespace moonpool {

class RemotePins {
   public:
    void add(uint32_t slot, uint64_t size) {
        if (counts_[slot]++ == 0) bytes_ += size;
    }
    void remove(uint32_t slot, uint64_t size) {
        auto it = counts_.find(slot);
        if (it == counts_.end() || --it->second != 0) return;
        counts_.erase(it);
        bytes_ -= size;
    }
    bool has(uint32_t slot) const { return counts_.contains(slot); }
    uint64_t bytes() const { return bytes_; }

   private:
    std::unordered_map<uint32_t, uint32_t> counts_;
    uint64_t bytes_ = 0;
};

}  // namespace moonpool
