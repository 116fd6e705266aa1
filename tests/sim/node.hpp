// SimNode: a process with a real Pool (arena, allocator, ObjectTable), real Holdings and the real
// MemberProtocol, which answers the real frames of the store. What it answers itself repeats the rules of
// Connection (core/csrc/store/node), whose handlers are bound to sockets.
//
// Its disk is a model for now: now and then all that memory holds is written at once, and what was written
// last is there at the next start.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "directory/member_protocol.hpp"
#include "faults.hpp"
#include "master.hpp"
#include "network.hpp"
#include "store/node/holdings.hpp"
#include "store/shared/messages.hpp"

namespace moonpool::sim {

class SimNode final : public Process {
   public:
    SimNode(World& world, Network& network, const std::vector<SimMaster*>& masters, uint32_t host,
            bool has_disk, const Planted& planted);

    void accept(std::shared_ptr<End> end);
    const NodeIdentity& identity() const { return identity_; }
    // The bytes of a key, as a process of its host reads them from the mapped memory.
    std::optional<std::string> read(const std::string& name) const;
    const Pool* pool() const { return pools_.empty() ? nullptr : pools_.begin()->second.get(); }
    bool in_pool(const SimMaster& master) const;  // and it has told that one all
    // Up to which removal of a range it is right, as processes of its host read it from the mapped memory.
    Version applied(uint32_t range) const {
        return removals_ == nullptr ? kNoVersion : removals_->applied(range);
    }
    // How many of its objects are of that range.
    uint64_t objects(const Range& range) const;
    void break_master_link();

    void set_full(uint32_t percent) { full_ = percent; }

   private:
    struct Pinned {
        uint32_t slot;
        uint64_t generation;
    };
    struct Caller {  // a connection, and what it has pinned
        std::shared_ptr<End> end;
        std::map<uint64_t, Pinned> pins;
    };

    struct OnDisk {
        std::string bytes;
        Version version;
    };

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
    std::vector<Version> all_applied() const;

    // The store.
    void drop_caller(uint64_t id);
    void on_frame(uint64_t caller, const Bytes& frame);
    void on_put(const FrameHeader& header, Reader body, Bytes& out);
    void on_read(const FrameHeader& header, Reader body, Bytes& out);
    void on_lookup(Caller& caller, const FrameHeader& header, Reader body, Bytes& out);
    void on_remove(const FrameHeader& header, Reader body, Bytes& out);
    PutOutcome store(const std::string& name, std::string_view bytes, uint32_t crc, bool replace,
                     std::optional<Version> given, bool recovered);
    void write_disk();
    void load(const std::string& name, const OnDisk& on_disk);
    Pool& store_pool() { return *pools_.begin()->second; }

    Network& network_;
    const bool has_disk_;
    const Planted& planted_;
    uint32_t full_ = 0;  // Conditions::full
    NodeIdentity identity_;
    std::map<std::string, OnDisk> disk_;
    std::vector<Version> disk_applied_;  // of each range

    Holdings::Pools pools_;
    uint32_t space_ = 0;
    std::unique_ptr<Removals> removals_;
    std::unique_ptr<Holdings> holdings_;
    MemberCounters counters_;
    std::vector<Agent> agents_;  // one for each master
    std::map<uint64_t, Caller> callers_;
    uint64_t next_caller_ = 1, next_pin_ = 1;
};

}  // namespace moonpool::sim
