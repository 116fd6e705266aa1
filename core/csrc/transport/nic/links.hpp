// Links: those of one transport. A NIC has room for so many connections; where it is full, the one that has
// been idle for longest goes, so that a new peer is reached. What ports have carried is summed over all
// links, also those that have ended.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/mutex.hpp"

namespace moonpool::transport::nic {

class Link;

// What rails of one port of this host have carried, of all peers; up: how many are connected now.
struct PortTotals {
    uint64_t bytes = 0, pieces = 0, faults = 0, up = 0;
};
using Ports = std::map<std::string, PortTotals>;

// The lock here is taken before those of links.
class Links {
   public:
    void add(const std::shared_ptr<Link>& link);
    // A link that was added, at its end.
    void remove(const Link& link);
    Ports ports() const;
    // Ends the connection of a device that has been idle for longest. False: none is idle. The caller holds
    // the lock of no link.
    bool end_idle(size_t device);

   private:
    mutable Mutex mutex_;
    std::vector<std::weak_ptr<Link>> links_ GUARDED_BY(mutex_);
    std::vector<const Link*> counted_ GUARDED_BY(mutex_);  // each until remove()
    Ports ended_ GUARDED_BY(mutex_);                       // of links that have gone
};

}  // namespace moonpool::transport::nic
