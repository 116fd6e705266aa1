// Mutex, MutexLock, CondVar: the standard ones, with the attributes that clang's thread-safety analysis
// reads. `make lint` runs that analysis: a field marked GUARDED_BY(mutex_) that is read or written without
// mutex_, or a function marked REQUIRES(mutex_) that is called without it, is an error. Other compilers see
// no attribute.
//
//   class Counter {
//       void add() EXCLUDES(mutex_) { MutexLock lock(mutex_); add_locked(); }
//       void add_locked() REQUIRES(mutex_) { ++count_; }
//       Mutex mutex_;
//       uint64_t count_ GUARDED_BY(mutex_) = 0;
//   };
//
// A lambda is analysed as a function of its own: one that is called with the mutex held, as the predicate of
// CondVar::wait is, says so: `[&]() REQUIRES(mutex_) { return !queue_.empty(); }`.
#pragma once

#include <condition_variable>
#include <mutex>
#include <utility>

#if defined(__clang__)
#define MOONPOOL_THREAD_ATTRIBUTE(x) __attribute__((x))
#else
#define MOONPOOL_THREAD_ATTRIBUTE(x)
#endif

#define CAPABILITY(name) MOONPOOL_THREAD_ATTRIBUTE(capability(name))
#define SCOPED_CAPABILITY MOONPOOL_THREAD_ATTRIBUTE(scoped_lockable)
#define GUARDED_BY(mutex) MOONPOOL_THREAD_ATTRIBUTE(guarded_by(mutex))
#define REQUIRES(...) MOONPOOL_THREAD_ATTRIBUTE(requires_capability(__VA_ARGS__))
#define EXCLUDES(...) MOONPOOL_THREAD_ATTRIBUTE(locks_excluded(__VA_ARGS__))
#define ACQUIRE(...) MOONPOOL_THREAD_ATTRIBUTE(acquire_capability(__VA_ARGS__))
#define TRY_ACQUIRE(...) MOONPOOL_THREAD_ATTRIBUTE(try_acquire_capability(__VA_ARGS__))
#define RELEASE(...) MOONPOOL_THREAD_ATTRIBUTE(release_capability(__VA_ARGS__))
#define NO_THREAD_SAFETY_ANALYSIS MOONPOOL_THREAD_ATTRIBUTE(no_thread_safety_analysis)

namespace moonpool {

class CAPABILITY("mutex") Mutex {
   public:
    Mutex() = default;
    Mutex(const Mutex&) = delete;

    void lock() ACQUIRE() { mutex_.lock(); }
    bool try_lock() TRY_ACQUIRE(true) { return mutex_.try_lock(); }
    void unlock() RELEASE() { mutex_.unlock(); }

   private:
    friend class CondVar;
    std::mutex mutex_;
};

// Holds a mutex from its construction to its end, except between unlock() and lock().
class SCOPED_CAPABILITY MutexLock {
   public:
    explicit MutexLock(Mutex& mutex) ACQUIRE(mutex) : mutex_(mutex) { mutex_.lock(); }
    // Of a mutex that try_lock() has locked.
    MutexLock(Mutex& mutex, std::adopt_lock_t) REQUIRES(mutex) : mutex_(mutex) {}
    ~MutexLock() RELEASE() {
        if (held_) mutex_.unlock();
    }
    MutexLock(const MutexLock&) = delete;

    void lock() ACQUIRE() {
        mutex_.lock();
        held_ = true;
    }
    void unlock() RELEASE() {
        held_ = false;
        mutex_.unlock();
    }

   private:
    friend class CondVar;
    Mutex& mutex_;
    bool held_ = true;
};

// A condition variable whose waiters hold a MutexLock. The caller's predicate runs with that lock's mutex
// held.
class CondVar {
   public:
    void notify_one() { condition_.notify_one(); }
    void notify_all() { condition_.notify_all(); }

    // The analysis cannot tell which mutex a predicate needs here; it checks the predicate where it is
    // written.
    template <class Predicate>
    void wait(MutexLock& lock, Predicate predicate) NO_THREAD_SAFETY_ANALYSIS {
        Adopted adopted(lock);
        condition_.wait(adopted.lock, std::move(predicate));
    }
    // -> what the predicate says at the end: false when the time ran out first.
    template <class Duration, class Predicate>
    bool wait_for(MutexLock& lock, Duration duration, Predicate predicate) NO_THREAD_SAFETY_ANALYSIS {
        Adopted adopted(lock);
        return condition_.wait_for(adopted.lock, duration, std::move(predicate));
    }
    template <class TimePoint, class Predicate>
    bool wait_until(MutexLock& lock, TimePoint deadline, Predicate predicate) NO_THREAD_SAFETY_ANALYSIS {
        Adopted adopted(lock);
        return condition_.wait_until(adopted.lock, deadline, std::move(predicate));
    }

   private:
    // The held mutex in the form that std::condition_variable takes; it is held again afterwards.
    struct Adopted {
        explicit Adopted(MutexLock& held) : lock(held.mutex_.mutex_, std::adopt_lock) {}
        ~Adopted() { (void)lock.release(); }
        std::unique_lock<std::mutex> lock;
    };
    std::condition_variable condition_;
};

}  // namespace moonpool
