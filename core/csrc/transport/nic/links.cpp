#include "transport/nic/links.hpp"

#include <algorithm>
#include <cstdint>

#include "transport/nic/link.hpp"

namespace moonpool::transport::nic {

void Links::add(std::weak_ptr<Link> link) {
    MutexLock lock(mutex_);
    std::erase_if(links_, [](const auto& each) { return each.expired(); });
    links_.push_back(std::move(link));
}

bool Links::end_idle(size_t device) {
    std::vector<std::shared_ptr<Link>> links;
    {
        MutexLock lock(mutex_);
        for (const auto& each : links_) {
            if (std::shared_ptr<Link> link = each.lock()) links.push_back(std::move(link));
        }
    }
    // One that is used before it is ended is looked for again among the others.
    while (!links.empty()) {
        auto since = [&](const auto& link) { return link->idle_since(device); };
        auto longest = std::ranges::min_element(links, {}, since);
        if ((*longest)->end_idle(device)) return true;
        links.erase(longest);
    }
    return false;
}

}  // namespace moonpool::transport::nic
