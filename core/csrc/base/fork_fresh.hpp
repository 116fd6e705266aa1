// ForkFresh<T>: the one T of this process, made by its first use and never destroyed. A child of fork()
// begins with one of its own: what the parent's says is about the parent, and its lock may be held for ever
// by a thread that the child does not have.
//
//     ForkFresh<Directory> directory;          at namespace scope
//     MutexLock lock(directory.get().mutex);
//
// Threads: any. Nothing is locked.
#pragma once

#include <atomic>
#include <cstdint>

#include "base/fork.hpp"

namespace moonpool {

template <class T>
class ForkFresh {
   public:
    T& get() {
        for (;;) {
            One* one = now_.load();
            if (one != nullptr && one->generation == fork_generation()) return one->value;
            auto* fresh = new One;
            if (now_.compare_exchange_strong(one, fresh)) return fresh->value;
            delete fresh;  // another thread was faster
        }
    }

   private:
    struct One {
        T value;
        uint64_t generation = fork_generation();
    };
    std::atomic<One*> now_{nullptr};
};

}  // namespace moonpool
