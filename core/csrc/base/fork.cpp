#include "base/fork.hpp"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <vector>

#include "base/mutex.hpp"

namespace moonpool {

namespace {

std::atomic<uint64_t> generation{0};

// Held over every fork(), so that a child finds the list whole.
Mutex& list_mutex() {
    static auto* mutex = new Mutex;
    return *mutex;
}
std::vector<Fd*>& list() REQUIRES(list_mutex()) {
    static auto* fds = new std::vector<Fd*>;
    return *fds;
}

// fork() has locked it in the parent, and unlocks it there.
void before_fork() NO_THREAD_SAFETY_ANALYSIS { list_mutex().lock(); }
void in_parent() NO_THREAD_SAFETY_ANALYSIS { list_mutex().unlock(); }
void in_child() NO_THREAD_SAFETY_ANALYSIS {
    generation.fetch_add(1);
    for (Fd* fd : list()) fd->reset();
    list().clear();
    list_mutex().unlock();
}

}  // namespace

uint64_t fork_generation() {
    static const int registered = ::pthread_atfork(before_fork, in_parent, in_child);
    (void)registered;
    return generation.load(std::memory_order_relaxed);
}

ClosedInChildren::ClosedInChildren(Fd& fd) : fd_(&fd) {
    fork_generation();  // sees to the registration
    MutexLock lock(list_mutex());
    list().push_back(fd_);
}

ClosedInChildren::~ClosedInChildren() {
    MutexLock lock(list_mutex());
    std::erase(list(), fd_);
}

}  // namespace moonpool
