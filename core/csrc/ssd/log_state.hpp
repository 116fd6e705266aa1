// LogState: what a log's callers and its thread share, under one mutex: the index, the spaces, the inboxes,
// and what is to be said of removals and of errors. No thread holds the mutex during I/O.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/mutex.hpp"
#include "ssd/index.hpp"
#include "ssd/jobs.hpp"
#include "ssd/log.hpp"
#include "ssd/record.hpp"

namespace moonpool::ssd {

struct LogState {
    struct Space {
        std::shared_ptr<const std::string> identity;  // null: free
        bool open = false;                            // a caller has its number
        uint32_t writes = 0;                          // on their way
    };
    struct Counters {
        uint64_t written = 0, written_bytes = 0, read = 0, read_bytes = 0, removed = 0;
        uint64_t evicted = 0, evicted_bytes = 0, copied = 0, copied_bytes = 0;
        uint64_t corrupt = 0, read_errors = 0, write_errors = 0, refused = 0, reclaimed = 0, syncs = 0;
    };

    LogState(LogOptions log_options, const Superblock& block);

    uint64_t begin_of(uint32_t slot) const { return kSegmentsBegin + slot * superblock.segment_bytes; }

    // The number of a space; forgets a few that nothing uses when it is a new one.
    uint32_t open_space(std::string_view identity) REQUIRES(mutex);
    // The number of the owner of such a space.
    uint32_t owner_of(std::string_view identity) REQUIRES(mutex);
    // The index forgets that write of a key, and the disk will.
    void drop(const Hash128& hash, uint64_t sequence) REQUIRES(mutex);
    // What is being written under that hash is dead on arrival; false: nothing is.
    bool forget_writing(const Hash128& hash) REQUIRES(mutex);
    void push_removal(uint64_t sequence) REQUIRES(mutex);
    // True when nothing newer came under its hash, and no removal.
    bool end_writing(const WriteJob& job) REQUIRES(mutex);
    bool is_writable() const REQUIRES(mutex) { return !read_only && !off; }
    // Writing has ended for good; `why`: the reason, without a full stop.
    void stop_writing(const std::string& why) EXCLUDES(mutex);

    const LogOptions options;
    const Superblock superblock;
    const uint32_t slots;  // segments of the file

    mutable Mutex mutex;
    Index index GUARDED_BY(mutex);
    std::vector<Space> spaces GUARDED_BY(mutex);
    std::unordered_map<std::string_view, uint32_t> space_ids GUARDED_BY(mutex);
    std::vector<uint32_t> free_spaces GUARDED_BY(mutex);
    // What a space's identity has before its first 0 -> the owner's number in the index, from 1 on.
    std::map<std::string, uint32_t, std::less<>> owners GUARDED_BY(mutex);
    uint32_t space_cursor GUARDED_BY(mutex) = 0;
    std::deque<ReadJobPtr> read_inbox GUARDED_BY(mutex);
    std::deque<WriteJobPtr> write_inbox GUARDED_BY(mutex);
    std::vector<AreaJob> area_inbox GUARDED_BY(mutex);
    uint32_t reads_waiting GUARDED_BY(mutex) = 0;  // until they are done
    uint32_t writes_waiting GUARDED_BY(mutex) = 0;
    struct Writing {
        uint64_t sequence, version;
    };
    // hash.low -> its newest write
    std::unordered_map<uint64_t, Writing> writing GUARDED_BY(mutex);
    std::vector<uint32_t> readers GUARDED_BY(mutex);  // of each slot
    std::deque<uint64_t> removals GUARDED_BY(mutex);  // sequences, not yet on their way to the disk
    uint64_t removals_pushed GUARDED_BY(mutex) = 0;
    std::string trouble GUARDED_BY(mutex);
    bool read_only GUARDED_BY(mutex) = false;  // the disk takes no more writes
    bool off GUARDED_BY(mutex) = false;        // nor is it read
    bool closing GUARDED_BY(mutex) = false;
    bool sleeping GUARDED_BY(mutex) = false;  // the thread waits for I/O, and must be woken
    uint32_t lost_cursor GUARDED_BY(mutex) = 0;
    std::vector<Hash128> gone GUARDED_BY(mutex);  // to be told to options.on_gone
    Counters counters GUARDED_BY(mutex);
    std::atomic<bool> reclaim_wanted{false};  // the index is full
};

}  // namespace moonpool::ssd
