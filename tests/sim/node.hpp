// SimNode: a process with a real Pool (arena, allocator, ObjectTable), real Holdings and the real
// MemberProtocol, which answers the real frames of the store. What it answers itself repeats the rules of
// Connection (core/csrc/store/node), whose handlers are bound to sockets.
//
// With a disk it has the real SsdTier and log above a SimDisk. Each start compares what the disk brings back
// with what it must: after a kill all that the log had written, after a power failure what it had written
// before its last sync.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "directory/member_protocol.hpp"
#include "disk.hpp"
#include "faults.hpp"
#include "history.hpp"
#include "master.hpp"
#include "network.hpp"
#include "store/node/holdings.hpp"
#include "store/node/ssd_tier.hpp"
#include "store/shared/messages.hpp"
#include "stripe_books.hpp"

namespace moonpool::sim {

struct NodeOptions {
    bool has_disk = false;
    DiskFaults disk{};
    uint32_t memory_objects = 0;  // that memory has room for; 0: for all
    uint32_t full = 0;            // so many of a hundred replacements are refused
};

class SimNode final : public Process {
   public:
    SimNode(World& world, Network& network, const std::vector<SimMaster*>& masters, uint32_t host,
            const NodeOptions& options, const Planted& planted);
    ~SimNode() override { end(); }  // its log ends while all that it calls is there

    bool accept(std::shared_ptr<End> end);  // false: it is about to end
    // As at SIGTERM: serves no more, writes to the disk what is not written; then calls `then`, from outside
    // of the process.
    void shut_down(std::function<void()> then);
    bool is_shutting_down() const { return shutting_down_; }
    // The next end() takes its host's power, too.
    void power_fails() { power_fails_ = true; }
    bool has_disk() const { return options_.has_disk; }
    const std::vector<Finding>& findings() const { return findings_; }
    const NodeIdentity& identity() const { return identity_; }
    // The bytes of a key, as a process of its host reads them from the mapped memory.
    std::optional<std::string> read(const std::string& name) const;
    const Pool* pool() const { return pools_.empty() ? nullptr : pools_.begin()->second.get(); }
    bool in_pool(const SimMaster& master) const;  // and it has told that one all
    // Up to which removal of a range it is right, as processes of its host read it from the mapped memory.
    Version applied(uint32_t range) const {
        return removals_ == nullptr ? kNoVersion : removals_->applied(range);
    }
    // The last removal or replacement of a key that it was told of and remembers.
    Version last_removal(const std::string& name) const {
        return removals_ == nullptr ? kNoVersion : removals_->last(pool()->hash(space_, name));
    }
    // How many of its objects are of that range.
    uint64_t objects(const Range& range) const;
    uint64_t objects_on_disk(const Range& range) const;
    void break_master_link();

    // Groups of the stripes of which it had the manifest at its end, dropped it by order of a master, or
    // replaced it on its disk: no client frees them.
    const std::set<std::string>& lost_manifests() const { return lost_manifests_; }
    // Of those that it removed or replaced for a client, which may not have had its answer, or not have seen
    // what came into memory behind its look.
    const std::set<std::string>& removed_manifests() const { return removed_manifests_; }
    // What it has, in memory and on its disk, by name.
    void add_contents(Contents& all) const;
    // In any of its lives, the log let go of its oldest objects, or could not write some.
    bool disk_has_lost() const;

   private:
    struct Pinned {
        uint32_t slot;
        uint64_t generation;
    };
    struct Caller {  // a connection, and what it has pinned
        std::shared_ptr<End> end;
        std::map<uint64_t, std::vector<Pinned>> pins;
        bool waits = false;  // until the disk has what its last frame asks for
        std::deque<Bytes> behind{};
    };
    // What a disk has, as its log ranks it.
    using OnDisk = std::map<std::pair<uint64_t, uint64_t>, ssd::Log::Rank>;  // by hash

    // An agent: as MemberAgent, without its thread.
    struct Agent {
        explicit Agent(SimMaster* to) : master(to) {}

        SimMaster* master;
        std::unique_ptr<DeltaLog> log{};
        std::unique_ptr<MemberProtocol> protocol{};
        std::shared_ptr<End> link{};
        uint64_t dials = 0, turns = 0;
        int backoff_ms = 50;
    };

    void on_start() override;
    void on_end() override;

    void dial_master(Agent& agent);
    void on_link(Agent& agent, std::shared_ptr<End> end);
    void turn(Agent& agent);
    void link_failed(Agent& agent);
    MemberHooks hooks(const Range& range);
    bool drop(const Drops& drops, const Range& range);
    void drop_all_of_disk(Version before, const Range& range);

    void make_pool();
    void open_disk();
    void step_disk();
    void tick();
    OnDisk on_disk() const;
    uint64_t disk_counter(std::string_view name) const;
    OnDisk promised(bool after_power_failure) const;
    void compare_disk();
    void compare_memory();
    std::set<std::string> manifests() const;  // the groups of their stripes
    void note_replaced(const std::string& name);

    // The store.
    void drop_caller(uint64_t id);
    void unpin(const std::vector<Pinned>& pinned);
    void on_frame(uint64_t caller, const Bytes& frame);
    void handle(uint64_t caller, const Bytes& frame, bool resumed);
    void on_put(const FrameHeader& header, Reader body, Bytes& out);
    void on_read(const FrameHeader& header, Reader body, Bytes& out);
    void on_lookup(Caller& caller, const FrameHeader& header, Reader body, Bytes& out);
    // None: memory has it, too.
    std::optional<ssd::Found> on_disk_alone(std::string_view name) const;
    std::optional<std::string> waits_for(const Bytes& frame) const;
    bool park(uint64_t caller, const Bytes& frame);
    void on_remove(const FrameHeader& header, Reader body, Bytes& out);
    PutOutcome store(const std::string& name, std::string_view bytes, uint32_t crc, bool replace,
                     std::optional<Version> given);
    Pool& store_pool() { return *pools_.begin()->second; }

    Network& network_;
    const NodeOptions options_;
    const uint32_t ranges_;
    const Planted& planted_;
    NodeIdentity identity_;
    SimDisk disk_;
    std::optional<OnDisk> promised_;  // by the former life
    bool power_fails_ = false, shutting_down_ = false;
    std::vector<Finding> findings_;
    std::set<std::string> lost_manifests_, removed_manifests_;
    std::set<std::pair<std::string, std::string>> stored_;  // names and bytes, in any of its lives
    bool disk_has_lost_ = false;

    Holdings::Pools pools_;
    uint32_t space_ = 0;
    std::unique_ptr<Removals> removals_;
    std::unique_ptr<SsdTier> ssd_;
    OnDisk synced_;  // what the log had written before its last sync
    bool step_is_due_ = false;
    std::unique_ptr<Holdings> holdings_;
    MemberCounters counters_;
    std::vector<Agent> agents_;  // one for each master
    std::map<uint64_t, Caller> callers_;
    uint64_t next_caller_ = 1, next_pin_ = 1;
};

}  // namespace moonpool::sim
