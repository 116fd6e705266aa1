// LogIo: a log's file and I/O queue: operations with callbacks, barriers behind writes, and syncs. The log's
// thread alone calls it and runs the callbacks (reap), but for wake().
#pragma once

#include <functional>
#include <memory>
#include <set>
#include <unordered_map>
#include <vector>

#include "base/clock.hpp"
#include "io/queue.hpp"
#include "ssd/log_state.hpp"

namespace moonpool::ssd {

// Memory, zeroed, for what is not one of the fixed buffers: closing a segment must not wait for one.
std::shared_ptr<std::byte> shared_block(uint64_t bytes);

class LogIo {
   public:
    using Ended = std::function<void(int error)>;  // 0: it went well, else an errno

    LogIo(LogState& log, std::unique_ptr<File> file) : log_(log), file_(std::move(file)) {}

    File& file() { return *file_; }
    bool is_open() const { return file_ != nullptr; }
    // io_uring or threads, as the options say; the error says what to do instead.
    Status open_queue();
    const char* queue_name() const { return queue_->name(); }
    const std::string& queue_reason() const { return queue_reason_; }
    void wake() { queue_->wake(); }  // any thread
    // The directory may be another's from now on. The queue takes no more operations.
    void close_file() { file_.reset(); }
    void abandon_queue() { (void)queue_.release(); }  // in a child of fork(): it is the parent's

    void submit(io::Operation::Kind kind, uint64_t offset, std::byte* data, uint64_t bytes, Ended done);
    void write_block(uint64_t offset, std::shared_ptr<std::byte> memory, uint64_t bytes, Ended done);
    // Calls `run` once the writes that are in flight now have ended.
    void after_writes(std::function<void()> run);
    void step_barriers();
    // What was written is safe against a power failure when `done` is called with 0.
    void sync_file(Ended done);
    void begin_sync_clock() { synced_ms_ = time_ms(); }
    void sync_when_due();  // every sync_ms, when something was written
    // Waits for at most wait_ms, and calls back what has ended.
    void reap(int wait_ms);

    size_t writes_in_flight() const { return writes_in_flight_.size(); }
    bool at_rest() const { return in_flight_.empty() && barriers_.empty(); }

   private:
    struct Barrier {
        uint64_t after = 0;  // tag of a write
        std::function<void()> run;
    };

    uint64_t time_ms() const { return log_.options.stepping ? log_.options.stepping->now_ms() : now_ms(); }

    LogState& log_;
    std::unique_ptr<File> file_;
    std::unique_ptr<io::Queue> queue_;
    std::string queue_reason_;                       // why it is not io_uring, when that was to be tried
    std::unordered_map<uint64_t, Ended> in_flight_;  // by tag
    std::set<uint64_t> writes_in_flight_;
    std::vector<io::Done> done_;
    std::vector<Barrier> barriers_;
    uint64_t next_tag_ = 1, last_write_tag_ = 0;
    bool dirty_ = false, sync_in_flight_ = false;
    uint64_t synced_ms_ = 0;
};

}  // namespace moonpool::ssd
