// Queue: reads, writes and syncs of files, many in flight at a time. One thread submits and reaps; any thread
// may wake it. Two kinds: io_uring, and threads that call the File.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/result.hpp"
#include "io/file.hpp"

namespace moonpool::io {

struct Operation {
    enum class Kind : uint8_t { kRead, kWrite, kSync };
    Kind kind = Kind::kRead;
    File* file = nullptr;  // stays until the operation has ended
    uint64_t offset = 0;
    std::byte* data = nullptr;
    uint32_t bytes = 0;
    uint64_t tag = 0;
};

struct Done {
    uint64_t tag = 0;
    int error = 0;       // an errno
    uint32_t bytes = 0;  // of a read: that are there, also when it is kFileEnds
};

class Queue {
   public:
    virtual ~Queue() = default;

    // The caller keeps at most depth() operations in flight.
    virtual void submit(const Operation& operation) = 0;
    // Appends what has ended. Waits for the first, for a wake() or for the time when there is nothing and
    // wait_ms is not 0.
    virtual void reap(std::vector<Done>& done, int wait_ms) = 0;
    virtual void wake() = 0;
    virtual uint32_t depth() const = 0;
    virtual const char* name() const = 0;
};

// Threads; works with every File. An error: the system has no thread left.
Result<std::unique_ptr<Queue>> thread_queue(uint32_t depth);

// io_uring, for files with a descriptor; the error says in one sentence why there is none.
Result<std::unique_ptr<Queue>> ring_queue(uint32_t depth);

}  // namespace moonpool::io
