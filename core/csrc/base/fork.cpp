#include "base/fork.hpp"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <vector>

namespace moonpool {

namespace {

std::atomic<uint64_t> generation{0};

// Held over every fork(), so that a child finds the list whole.
std::mutex& list_mutex() {
    static auto* mutex = new std::mutex;
    return *mutex;
}
std::vector<Fd*>& list() {
    static auto* fds = new std::vector<Fd*>;
    return *fds;
}

void in_child() {
    generation.fetch_add(1);
    for (Fd* fd : list()) fd->reset();
    list().clear();
    list_mutex().unlock();
}

}  // namespace

uint64_t fork_generation() {
    static const int registered =
        ::pthread_atfork([] { list_mutex().lock(); }, [] { list_mutex().unlock(); }, in_child);
    (void)registered;
    return generation.load(std::memory_order_relaxed);
}

ClosedInChildren::ClosedInChildren(Fd& fd) : fd_(&fd) {
    fork_generation();  // sees to the registration
    std::lock_guard lock(list_mutex());
    list().push_back(fd_);
}

ClosedInChildren::~ClosedInChildren() {
    std::lock_guard lock(list_mutex());
    std::erase(list(), fd_);
}

}  // namespace moonpool
