// The one object of a process, and the one that a child of fork() begins with.
#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <set>
#include <thread>
#include <vector>

#include "base/fork_fresh.hpp"
#include "base/mutex.hpp"

using namespace moonpool;

namespace {

struct Counted {
    Mutex mutex;
    int value GUARDED_BY(mutex) = 0;
};
ForkFresh<Counted> counted;
ForkFresh<std::atomic<int>> raced;

}  // namespace

TEST_CASE("base: all threads of a process have one object") {
    std::vector<std::atomic<int>*> seen(8);
    std::vector<std::thread> threads;
    for (auto& place : seen) {
        threads.emplace_back([&place] {
            place = &raced.get();
            ++*place;
        });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK(std::set(seen.begin(), seen.end()).size() == 1);
    CHECK(raced.get() == 8);
}

TEST_CASE("base: a child of fork() has a new object, whose lock no thread of the parent holds") {
    Counted& mine = counted.get();
    MutexLock lock(mine.mutex);
    mine.value = 7;
    pid_t child = ::fork();
    REQUIRE(child >= 0);
    if (child == 0) {
        Counted& its = counted.get();
        bool fresh = &its != &mine;
        if (fresh) {
            MutexLock inner(its.mutex);
            fresh = its.value == 0;
        }
        ::_exit(fresh && &its == &counted.get() ? 0 : 1);
    }
    int status = -1;
    REQUIRE(::waitpid(child, &status, 0) == child);
    CHECK(status == 0);
    CHECK(&counted.get() == &mine);
    CHECK(mine.value == 7);
}
