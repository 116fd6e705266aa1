// Journal: what the threads of the data plane have to tell an operator: which peers joined, or were refused
// and why. They put notes here and go on; the process's own loop takes them out and logs them, where Python
// is when there is any. So no thread of the data plane ever waits for a log or for Python's lock.
//
// Bounded twice: at most kNotesMax notes wait, and of each kind at most kBurst come at once and one a second
// after that, so that a flood of strangers fills no disk. What was left out is counted and told with the next
// note of its kind.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "base/fd.hpp"
#include "base/mutex.hpp"

namespace moonpool {

enum class Level : uint8_t { kDebug, kInfo, kWarning, kError };

struct Note {
    Level level = Level::kInfo;
    std::string kind;       // one word for programs, as "join_refused"
    std::string peer;       // the other side's address; may be empty
    std::string text;       // one sentence for people
    uint64_t left_out = 0;  // notes of this kind that were not kept since the last one
};

class Journal {
   public:
    static constexpr size_t kNotesMax = 1024;
    static constexpr uint32_t kBurst = 10;

    Journal();

    // Any thread; never blocks for longer than another call of these takes. kind: a literal.
    void note(Level level, const char* kind, std::string peer, std::string text) EXCLUDES(mutex_);

    std::vector<Note> take() EXCLUDES(mutex_);
    int fd() const { return wake_.get(); }  // readable when there are notes
    uint64_t left_out_total() const EXCLUDES(mutex_);

   private:
    struct Budget {
        double tokens = kBurst;
        double filled_s = 0;
        uint64_t left_out = 0;
    };

    mutable Mutex mutex_;
    std::vector<Note> notes_ GUARDED_BY(mutex_);
    std::map<std::string, Budget> budgets_ GUARDED_BY(mutex_);
    uint64_t left_out_total_ GUARDED_BY(mutex_) = 0;
    Fd wake_;
};

}  // namespace moonpool
