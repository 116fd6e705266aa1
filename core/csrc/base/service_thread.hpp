// ServiceThread: a named thread that runs until its owner joins it. A child of fork() has the handle without
// the thread: there join() returns at once, and says so.
#pragma once

#include <pthread.h>

#include <functional>
#include <system_error>
#include <thread>
#include <utility>

#include "base/fork.hpp"
#include "base/result.hpp"

namespace moonpool {

class ServiceThread {
   public:
    ServiceThread() = default;
    ServiceThread(const ServiceThread&) = delete;
    ~ServiceThread() { join(); }  // its owner has told it to end

    // `name`: at most 15 characters, of which top(1) and debuggers tell. An error: the system has no thread
    // left.
    Status start(const char* name, std::function<void()> body) {
        fork_ = ForkGuard();
        try {
            thread_ = std::thread(std::move(body));
        } catch (const std::system_error& error) {
            return os_error("cannot start a thread", error.code().value());
        }
        ::pthread_setname_np(thread_.native_handle(), name);
        return success();
    }

    // Idempotent. False in a child of fork(): the thread and what it uses are the parent's, and stay as they
    // are.
    bool join() {
        if (!thread_.joinable()) return true;
        if (fork_.in_child()) {
            (void)new std::thread(std::move(thread_));  // a handle that is neither joined nor destroyed
            return false;
        }
        thread_.join();
        return true;
    }

    bool in_child() const { return fork_.in_child(); }
    bool is_this() const { return std::this_thread::get_id() == thread_.get_id(); }
    bool started() const { return thread_.joinable(); }

   private:
    ForkGuard fork_;
    std::thread thread_;
};

}  // namespace moonpool
