// Links: those of one transport. A NIC has room for so many connections; where it is full, the one that has
// been idle for longest goes, so that a new peer is reached.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "base/mutex.hpp"

namespace moonpool::transport::nic {

class Link;

class Links {
   public:
    void add(std::weak_ptr<Link> link);
    // Ends the connection of a device that has been idle for longest. False: none is idle. The caller holds
    // the lock of no link.
    bool end_idle(size_t device);

   private:
    Mutex mutex_;
    std::vector<std::weak_ptr<Link>> links_ GUARDED_BY(mutex_);
};

}  // namespace moonpool::transport::nic
