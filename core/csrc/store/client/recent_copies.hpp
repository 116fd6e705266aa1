// RecentCopies: where this client put copies in the last moments, which the directory may not know yet. A
// removal or replacement by the same client must reach them all the same. Older entries, and those that
// others crowd out, are forgotten: by then the directory knows.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "base/mutex.hpp"
#include "base/xxh3.hpp"
#include "directory/types.hpp"

namespace moonpool {

class RecentCopies {
   public:
    void add(uint64_t now_ms, const Hash128& hash, NodeId node) {
        MutexLock lock(mutex_);
        if (slots_.empty()) slots_.resize(kSlots);
        Slot& slot = slots_[hash.high % kSlots];
        if (slot.hash != hash || expired(now_ms, slot)) slot = Slot{hash, 0, {}, 0};
        slot.at_ms = now_ms;
        slot.nodes[slot.n++ % slot.nodes.size()] = node;
    }
    // Nodes have other numbers from now on.
    void clear() {
        MutexLock lock(mutex_);
        slots_.clear();
    }
    // The node is told to remove its copy.
    void forget(const Hash128& hash, NodeId node) {
        MutexLock lock(mutex_);
        if (slots_.empty()) return;
        Slot& slot = slots_[hash.high % kSlots];
        if (slot.hash != hash) return;
        size_t left = 0;
        for (size_t i = 0; i < std::min(slot.n, slot.nodes.size()); ++i) {
            if (slot.nodes[i] != node) slot.nodes[left++] = slot.nodes[i];
        }
        slot.n = left;
    }
    // Appends to `out`.
    void find(uint64_t now_ms, const Hash128& hash, std::vector<NodeId>& out) {
        MutexLock lock(mutex_);
        if (slots_.empty()) return;
        const Slot& slot = slots_[hash.high % kSlots];
        if (slot.hash != hash || expired(now_ms, slot)) return;
        for (size_t i = 0; i < std::min(slot.n, slot.nodes.size()); ++i) out.push_back(slot.nodes[i]);
    }

   private:
    static constexpr size_t kSlots = 1u << 14;
    static constexpr uint64_t kAgeMaxMs = 5000;
    struct Slot {
        Hash128 hash{};
        uint64_t at_ms = 0;
        std::array<NodeId, 8> nodes{};
        size_t n = 0;
    };
    static bool expired(uint64_t now_ms, const Slot& slot) { return now_ms - slot.at_ms > kAgeMaxMs; }

    Mutex mutex_;
    std::vector<Slot> slots_ GUARDED_BY(mutex_);  // made with the first entry
};

}  // namespace moonpool
