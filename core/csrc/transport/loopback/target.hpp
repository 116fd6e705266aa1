// The engines of this process, by their segment: how one finds the other without a socket.
#pragma once

#include <atomic>
#include <memory>

#include "transport/identity.hpp"
#include "transport/region.hpp"

namespace moonpool::transport::loopback {

// What a link may touch of another engine in this process. It outlives the engine's closing; its regions do
// not.
struct Target {
    Identity identity;
    std::shared_ptr<RegionTable> regions;
    std::atomic<bool> closed{false};
};

void enlist(const std::shared_ptr<Target>& target);
void strike_off(const SegmentId& segment);
std::shared_ptr<Target> find_target(const SegmentId& segment);

}  // namespace moonpool::transport::loopback
