// IoQueue: reads, writes and syncs of one file in flight at a time. One thread submits and reaps; any thread
// may wake it. Two kinds: io_uring, and threads that call pread and pwrite.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/result.hpp"
#include "ssd/file.hpp"

namespace moonpool::ssd {

struct IoOperation {
    enum class Kind : uint8_t { kRead, kWrite, kSync };
    Kind kind = Kind::kRead;
    uint64_t offset = 0;
    std::byte* data = nullptr;
    uint32_t bytes = 0;
    uint64_t tag = 0;
};

struct IoDone {
    uint64_t tag = 0;
    int error = 0;  // an errno
};

class IoQueue {
   public:
    virtual ~IoQueue() = default;

    // The caller keeps at most depth() operations in flight.
    virtual void submit(const IoOperation& operation) = 0;
    // Appends what has ended. Waits for the first, for a wake() or for the time when there is nothing and
    // wait_ms is not 0.
    virtual void reap(std::vector<IoDone>& done, int wait_ms) = 0;
    virtual void wake() = 0;
    virtual uint32_t depth() const = 0;
    virtual const char* name() const = 0;
};

// Threads; works with every File.
std::unique_ptr<IoQueue> thread_queue(File& file, uint32_t depth);

// io_uring; the error says in one sentence why there is none.
Result<std::unique_ptr<IoQueue>> ring_queue(File& file, uint32_t depth);

}  // namespace moonpool::ssd
