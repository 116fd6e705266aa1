#include "transport/nic/links.hpp"

#include <algorithm>
#include <cstdint>

#include "transport/nic/link.hpp"

namespace moonpool::transport::nic {

namespace {

void add_rails(const Link& link, Ports& ports) {
    for (const RailReport& rail : link.rails()) {
        PortTotals& port = ports[rail.port];
        port.bytes += rail.bytes;
        port.pieces += rail.pieces;
        port.faults += rail.faults;
        port.up += rail.state == "up" ? 1 : 0;
    }
}

}  // namespace

void Links::add(const std::shared_ptr<Link>& link) {
    MutexLock lock(mutex_);
    std::erase_if(links_, [](const auto& each) { return each.expired(); });
    links_.push_back(link);
    counted_.push_back(link.get());
}

void Links::remove(const Link& link) {
    MutexLock lock(mutex_);
    if (std::erase(counted_, &link) == 0) return;
    add_rails(link, ended_);
    for (auto& [name, port] : ended_) port.up = 0;
}

Ports Links::ports() const {
    MutexLock lock(mutex_);
    Ports ports = ended_;
    for (const Link* link : counted_) add_rails(*link, ports);
    return ports;
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
