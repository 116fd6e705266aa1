#include "transport/loopback/target.hpp"

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
