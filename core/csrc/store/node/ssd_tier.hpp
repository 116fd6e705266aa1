// SsdTier: the disks of a node. It keeps the coldest part of every arena written, so that eviction costs no
// object; knows what only the disks hold; and brings it back into memory on demand.
//
// All of it runs on the store's loop and returns at once; the logs have threads of their own, whose ends come
// back to the loop by `post`.
//
//   put: in DRAM --cold--> written (saved) --evicted--> on SSD only --wanted with a pin--> in DRAM, saved
//                     \--evicted before it was written--> lost, counted
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "directory/delta_log.hpp"
#include "directory/version.hpp"
#include "ssd/log_set.hpp"
#include "store/node/pool.hpp"

namespace moonpool {

struct SsdOptions {
    std::vector<std::pair<std::string, uint64_t>> directories;  // and the most bytes of each
    uint64_t segment_bytes = 0;                                 // 0: by the size
    uint32_t depth = 32;                                        // of each directory
    std::string io = "auto";
    uint32_t records_max = 0;               // of each directory; 0: by the size
    double clean_share = 0.25;              // of an arena: what is kept free or written
    uint32_t stop_ms = 10000;               // to write what is not written yet, at a stop
    uint32_t ranges = 1;                    // of the pool: each has an order of removals
    ssd::OpenFile open;                     // for tests
    std::optional<ssd::Stepping> stepping;  // for tests; with it step() is to be called
};

inline constexpr size_t kSsdDirectoriesMax = 8;

class SsdTier {
   public:
    using Pools = std::map<std::string, std::unique_ptr<Pool>, std::less<>>;
    using Post = std::function<void(std::function<void()>)>;

    // Reads what the directories hold. The error is one sentence.
    static Result<std::unique_ptr<SsdTier>> open(const SsdOptions& options, Pools& pools, Post post);
    ~SsdTier();
    SsdTier(const SsdTier&) = delete;

    // An object that can be had, though maybe not for long. Nothing when the arena could not hold it.
    std::optional<ssd::Found> find(Pool& pool, uint32_t space, std::string_view name);
    bool holds(Pool& pool, uint32_t space, std::string_view name) {
        return find(pool, space, name).has_value();
    }

    // It was removed or replaced: no copy may come back.
    bool forget(Pool& pool, uint32_t space, std::string_view name);
    bool forget(const Hash128& hash);
    // What has a lower version is removed, also what is being written or read. -> whether a copy stays.
    bool forget_older(const Hash128& hash, Version version);
    // Its row is told to the delta log once more. What is still being written is told when it has arrived.
    void tell_again(const Hash128& hash);

    // Brings an object into memory, then calls `then` with its slot, or kNoSlot when the disk failed or it
    // was removed meanwhile. False when it was not begun: it is not there, or memory is full of pins.
    using Then = std::function<void(uint32_t slot)>;
    bool promote(Pool& pool, uint32_t space, std::string_view name, Then then);

    // Objects of a space that memory does not have, from a cursor on. -> the next cursor, 0: the end.
    uint32_t list(Pool& pool, uint32_t space, uint32_t cursor, uint32_t scan, std::vector<ssd::Listed>& out);
    // All, device by device.
    size_t devices() const { return devices_.size(); }
    uint32_t hashes(size_t device, uint32_t cursor, uint32_t scan, std::vector<Hash128>& out) const;
    std::optional<ssd::Log::Rank> rank(size_t device, const Hash128& hash) const {
        return devices_[device]->rank(hash);
    }

    // Up to which removal in the order of all each one was carried out here: of directories that came back,
    // the least. It is written once a second at most, and at a stop.
    void set_applied(uint32_t range, Version version) {
        if (set_ != nullptr) set_->set_applied(range, version);
    }
    Version applied(uint32_t range) const { return set_->applied(range); }
    // What was found out of the directories when they were opened, in one sentence; mostly empty.
    const std::string& note_of_start() const { return set_->note_of_start(); }

    void set_delta_log(DeltaLog* log) { delta_log_ = log; }
    // The same for subscribers; mostly there are none.
    void set_listener(std::function<void(const Hash128&, bool added)> f) { listener_ = std::move(f); }

    // Bytes of a tenant's records, in all directories.
    uint64_t bytes_of(const Pool& pool) const;
    // Objects of it that went because it had its most bytes.
    uint64_t dropped_of(const Pool& pool) const { return tenant_of(pool).dropped_total; }

    void on_tick(uint64_t now_ms);
    void step();  // of all logs, with SsdOptions::stepping
    // Writes everything that is not written; `done` is called when there is nothing more to do.
    void flush(std::function<void()> done);
    // Ends the logs' threads; the loop has ended.
    void close();

    // ---- while another process takes over: pause(), is_idle(), close_logs(), and where it did not,
    // open_logs() on any thread, reopen()

    // Begins nothing more, until resume().
    void pause() { paused_ = true; }
    void resume();
    bool is_idle() const { return writing_ == 0 && promotions_.empty(); }
    // Up to which removal the directories are right is written; then `done` is called.
    void save(std::function<void()> done);
    // The directories are another process's from now on. Only when is_idle(), and after save().
    void close_logs();
    struct Logs {
        std::vector<std::unique_ptr<ssd::Log>> devices;
        std::unique_ptr<ssd::LogSet> set;
        std::shared_ptr<std::atomic<uint64_t>> sequence;  // of the newest record of all logs
        uint64_t bytes = 0;
    };
    Result<Logs> open_logs();
    void reopen(Logs logs);

    std::vector<std::pair<std::string, uint64_t>> gauges() const;
    struct Device {
        std::string directory, io, io_reason, trouble;
    };
    std::vector<Device> describe() const;  // any thread
    bool check_integrity() const;

   private:
    // An object that no disk has, as of when it was last looked at.
    struct Dirty {
        uint32_t slot;
        uint64_t generation;
        uint64_t last_used;
        bool with_mate = false;  // it comes for a mate, which brought the others too
    };
    struct Tenant {
        Pool* pool = nullptr;
        std::string owner;           // of its spaces, as the logs know it
        uint64_t dropped_total = 0;  // for its limit of bytes
        std::deque<Dirty> dirty;     // coldest first, roughly: one that was used meanwhile goes to the back
        uint64_t writing_bytes = 0;
        // That came back from a disk and stand before what is not written yet: each drives out as many bytes
        // at the cold end.
        uint64_t promoted_bytes = 0;
        bool resting = false;  // until the next tick: all that was looked at is in use
        std::vector<std::vector<uint32_t>>
            spaces;  // [device][space of the pool] -> space of the log, or kNone
    };
    struct Promotion {
        Tenant* tenant;
        uint32_t space;
        std::string name;
        ssd::Found found;
        std::optional<Extent> lease;
        size_t device;
        std::vector<Then> waiting;
    };

    SsdTier(const SsdOptions& options, Post post) : options_(options), post_(std::move(post)) {}
    void take(Logs logs);
    void compare_memory(Tenant& tenant);
    Tenant& tenant_of(const Pool& pool) { return tenants_.find(pool.tenant())->second; }
    const Tenant& tenant_of(const Pool& pool) const { return tenants_.find(pool.tenant())->second; }
    bool make_room(Tenant& tenant, uint64_t bytes);
    void queue(Tenant& tenant, uint32_t slot);
    static void drop_dead(Tenant& tenant);
    static bool exceeds_limit(const Tenant& tenant, uint64_t bytes);
    bool trim(Tenant& tenant, uint64_t bytes_max, uint32_t most);
    ssd::Key key(Tenant& tenant, size_t device, uint32_t space, const Hash128& hash, std::string_view name);
    size_t home(const Hash128& hash) const;
    void keep_newest();
    void leave_space(Tenant& tenant, uint32_t space);

    void clean(Tenant& tenant);
    bool wants_cleaning(const Tenant& tenant) const;
    bool write_next(Tenant& tenant);
    void written(Tenant& tenant, size_t device, uint32_t slot, uint64_t generation, const Hash128& hash,
                 uint64_t bytes, ssd::Outcome outcome);
    void gone(const std::vector<Hash128>& hashes);
    void promoted(const Hash128& hash, ssd::Outcome outcome);
    void tell(const Hash128& hash, bool added);
    void leave_old_ones(Tenant& tenant);
    void end_flush();
    void cancel_write(const Hash128& hash);
    bool is_written(const Hash128& hash) const;  // to any directory

    SsdOptions options_;
    Post post_;
    std::vector<std::unique_ptr<ssd::Log>> devices_;
    std::unique_ptr<ssd::LogSet> set_;
    std::map<std::string, Tenant, std::less<>> tenants_;
    std::map<std::pair<uint64_t, uint64_t>, Promotion> promotions_;
    // What is being written: hash -> directory. kWritesMax at most.
    std::multimap<std::pair<uint64_t, uint64_t>, size_t> written_now_;
    DeltaLog* delta_log_ = nullptr;
    std::function<void(const Hash128&, bool)> listener_;
    uint32_t writing_ = 0;
    uint64_t writing_bytes_ = 0;
    std::shared_ptr<std::atomic<uint64_t>> sequence_;  // of the newest record of all logs
    bool paused_ = false;
    bool flushing_ = false;
    uint64_t before_flush_ = UINT64_MAX;  // sequence of the newest record that may go for another
    bool promoting_ = false;              // the commit under way is of an object that a disk has
    std::vector<std::function<void()>> flushed_;
    uint64_t promoted_total_ = 0, promoted_bytes_total_ = 0, promote_failed_total_ = 0;
    uint64_t not_saved_total_ = 0;
    uint64_t bytes_ = 0;  // of all directories
};

}  // namespace moonpool
