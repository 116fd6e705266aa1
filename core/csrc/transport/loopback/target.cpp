#include "transport/loopback/target.hpp"

#include <map>

#include "base/fork.hpp"
#include "base/mutex.hpp"

namespace moonpool::transport::loopback {

namespace {

// The one table of the whole process: engines come and go independently, and none knows all the others. A
// child of fork() begins with an empty one: its parent's engines are none of its own, and the parent's lock
// may be held by a thread that the child does not have.
struct Directory {
    Mutex mutex;
    uint64_t generation = fork_generation();
    std::map<SegmentId, std::shared_ptr<Target>> targets GUARDED_BY(mutex);
};

std::atomic<Directory*> current{nullptr};

Directory& directory() {
    for (;;) {
        Directory* d = current.load();
        if (d != nullptr && d->generation == fork_generation()) return *d;
        auto* fresh = new Directory;
        if (current.compare_exchange_strong(d, fresh)) return *fresh;
        delete fresh;
    }
}

}  // namespace

void enlist(const std::shared_ptr<Target>& target) {
    Directory& d = directory();
    MutexLock lock(d.mutex);
    d.targets[target->identity.segment] = target;
}

void strike_off(const SegmentId& segment) {
    Directory& d = directory();
    MutexLock lock(d.mutex);
    d.targets.erase(segment);
}

std::shared_ptr<Target> find_target(const SegmentId& segment) {
    Directory& d = directory();
    MutexLock lock(d.mutex);
    auto it = d.targets.find(segment);
    return it == d.targets.end() ? nullptr : it->second;
}

}  // namespace moonpool::transport::loopback
