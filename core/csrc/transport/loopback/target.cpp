#include "transport/loopback/target.hpp"

#include <algorithm>
#include <map>

#include "base/fork_fresh.hpp"
#include "base/mutex.hpp"

namespace moonpool::transport::loopback {

namespace {

// The one table of the whole process: engines come and go independently, and none knows all the others.
struct Directory {
    Mutex mutex;
    std::map<SegmentId, std::shared_ptr<Target>> targets GUARDED_BY(mutex);
};
ForkFresh<Directory> directory;

}  // namespace

std::shared_ptr<Guest> Target::welcome(const SegmentId& initiator) {
    auto guest = std::make_shared<Guest>();
    guest->segment = initiator;
    MutexLock lock(mutex_);
    std::erase_if(guests_, [](const auto& known) { return known.expired(); });
    guests_.push_back(guest);
    return guest;
}

bool Target::is_out(const SegmentId& initiator) {
    MutexLock lock(mutex_);
    return std::ranges::none_of(guests_, [&](const auto& known) {
        std::shared_ptr<Guest> guest = known.lock();
        return guest != nullptr && guest->segment == initiator && guest->inside.load() != 0;
    });
}

void enlist(const std::shared_ptr<Target>& target) {
    Directory& d = directory.get();
    MutexLock lock(d.mutex);
    d.targets[target->identity.segment] = target;
}

void strike_off(const SegmentId& segment) {
    Directory& d = directory.get();
    MutexLock lock(d.mutex);
    d.targets.erase(segment);
}

std::shared_ptr<Target> find_target(const SegmentId& segment) {
    Directory& d = directory.get();
    MutexLock lock(d.mutex);
    auto it = d.targets.find(segment);
    return it == d.targets.end() ? nullptr : it->second;
}

}  // namespace moonpool::transport::loopback
