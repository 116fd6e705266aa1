// AccessLog: one line for each request, in the words of docs/proxy.md. Lines are gathered in memory; a thread
// of its own writes them, so a slow disk or a pipe that no process reads holds up no request, and the proxy's
// end for a second at most. Beyond a bound lines are dropped and counted.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/fd.hpp"
#include "base/mutex.hpp"
#include "base/result.hpp"
#include "base/service_thread.hpp"
#include "relay/observations.hpp"
#include "relay/request.hpp"

namespace moonpool::relay {

class AccessLog {
   public:
    // path: "-" is standard output; a file is appended to.
    static Result<std::unique_ptr<AccessLog>> open(const std::string& path);
    ~AccessLog();  // writes what is there, if its reader takes it
    AccessLog(const AccessLog&) = delete;

    // observation: of a request that was sent to engines; else nullptr.
    void add(const Request& request, int client_fd, int status, uint64_t bytes, double now,
             const Observation* observation, const std::vector<std::string>& engines);
    // Opens the file by its name again, which a rotation has given to another one: lines from now on go
    // there. On an error they go where they went. Nothing to do for standard output.
    Status reopen();
    uint64_t dropped() const { return dropped_; }

   private:
    static constexpr size_t kBytesMax = 8 << 20;

    explicit AccessLog(std::string path) : path_(std::move(path)) {}
    Result<Fd> open_file() const;
    void write_forever();
    void write_all(std::string_view lines);
    bool wait_for_room();

    const std::string path_;
    Fd fd_;  // the writing thread's, once that runs
    Mutex mutex_;
    CondVar changed_;
    std::string lines_ GUARDED_BY(mutex_);
    Fd next_ GUARDED_BY(mutex_);  // for what comes behind the first `old_bytes_` of the lines; or none
    size_t old_bytes_ GUARDED_BY(mutex_) = 0;
    bool ending_ GUARDED_BY(mutex_) = false;
    std::chrono::steady_clock::time_point ended_at_ GUARDED_BY(mutex_);
    std::atomic<uint64_t> dropped_{0};
    ServiceThread thread_;
};

}  // namespace moonpool::relay
