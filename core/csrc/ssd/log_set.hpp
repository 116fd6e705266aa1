// LogSet: the logs of one node's directories as one set. It knows which of them were away for a while, and
// lets nothing of them count that changed meanwhile (docs/ssd.md, "The set").
//
//   open     compares the directories: what is void is removed from its log; then the new opening is written
//   to all note     a key was put, replaced or removed: while a directory is away, the others remember it
//   on_tick  writes what is to be written, and sees which directory takes no more writes
//
// One thread calls all of it (the node's loop), but for open, which waits for the disks.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "base/mutex.hpp"
#include "ssd/log.hpp"
#include "ssd/set_block.hpp"

namespace moonpool::ssd {

class LogSet {
   public:
    // The logs must outlive it. `sequence`: theirs. orders: how many the caller has; what was applied of
    // another number of orders is not known.
    static Result<std::unique_ptr<LogSet>> open(std::vector<Log*> logs,
                                                const std::shared_ptr<std::atomic<uint64_t>>& sequence,
                                                size_t orders = 1);
    LogSet(const LogSet&) = delete;

    void note(const Hash128& hash);

    // Up to which place in each of its orders the caller has carried out removals, on all directories that
    // are there. It is on a disk only after those removals are.
    void set_applied(size_t order, uint64_t version);
    uint64_t applied(size_t order) const { return applied_[order]; }

    void on_tick(uint64_t now_ms);
    // Writes what is not written; `done` is called on any thread, with all that could be written on its way.
    void save(std::function<void()> done);

    uint64_t epoch() const { return opening_.epoch; }
    uint64_t away() const;                       // directories that are, or are there and take no more writes
    uint64_t voided() const { return voided_; }  // objects that no longer counted at the start
    const std::string& note_of_start() const { return note_; }  // one sentence; empty: nothing to say

   private:
    using State = SetMember::State;

    // What the logs' threads say of what is being written.
    struct Acks {
        explicit Acks(size_t logs) : failed(logs) {}
        std::atomic<bool> in_flight{false};
        std::vector<std::atomic<bool>> failed;  // of each log: its block may be the former one, or none
        Mutex mutex;
        std::vector<Opening> openings GUARDED_BY(mutex);  // that stand in the block of each
    };

    LogSet(std::vector<Log*> logs, size_t orders);

    Status compare();
    bool drop(size_t i, const ChangeFilter* only);
    void open_next();
    bool write_all();
    bool write_and_wait(size_t i, uint32_t block, std::span<const std::byte> bytes);
    std::vector<std::byte> block_of(size_t i) const;
    size_t there() const;
    void begin(bool with_block);

    std::vector<Log*> logs_;
    std::vector<bool> in_set_;  // of each log: it takes writes, and is told all
    std::vector<uint32_t>
        places_;  // of each log: where its next block goes, which is not where its last one is
    LogId set_{};
    Opening opening_;
    uint64_t revision_ = 0;
    std::vector<uint64_t> applied_;  // of each order
    std::vector<SetMember> members_;
    std::optional<ChangeFilter> filter_;  // none: nothing is away
    uint64_t voided_ = 0;
    std::string note_;

    std::shared_ptr<Acks> acks_;                 // the last writes may end when this has gone
    std::vector<std::function<void()>> wanted_;  // to be called when what is dirty now is written
    bool dirty_ = false;                         // the block
    uint64_t saved_ms_ = 0;
};

}  // namespace moonpool::ssd
