// The engines of this process, by their segment: how one finds the other without a socket.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "base/mutex.hpp"
#include "transport/identity.hpp"
#include "transport/region.hpp"
#include "transport/shut_out.hpp"

namespace moonpool::transport::loopback {

// The owner of a link to an engine, as that engine knows it.
struct Guest {
    SegmentId segment{};
    std::atomic<int> inside{0};  // jobs under way
};

// What a link may touch of another engine in this process. It outlives the engine's closing; its regions do
// not.
struct Target {
    Identity identity;
    std::shared_ptr<RegionTable> regions;
    std::shared_ptr<const ShutOut> shut_out;
    std::atomic<bool> closed{false};

    std::shared_ptr<Guest> welcome(const SegmentId& initiator);
    // No job of that engine is under way.
    bool is_out(const SegmentId& initiator);
    // Whether that guest, which is inside, has to leave.
    bool refuses(const Guest& guest) const { return shut_out->has(guest.segment); }

   private:
    Mutex mutex_;
    std::vector<std::weak_ptr<Guest>> guests_ GUARDED_BY(mutex_);
};

void enlist(const std::shared_ptr<Target>& target);
void strike_off(const SegmentId& segment);
std::shared_ptr<Target> find_target(const SegmentId& segment);

}  // namespace moonpool::transport::loopback
