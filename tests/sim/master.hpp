// SimMaster: a process with the real Master, MasterPair and, for each connection, the real MasterProtocol.
#pragma once

#include <deque>
#include <map>
#include <memory>

#include "directory/master_pair.hpp"
#include "directory/master_protocol.hpp"
#include "faults.hpp"
#include "network.hpp"

namespace moonpool::sim {

class SimMaster final : public Process {
   public:
    // owner: whose standby it is; null: it is no standby.
    SimMaster(World& world, Network& network, uint32_t host, const MasterLimits& limits, const Range& range,
              const Planted& planted, SimMaster* owner = nullptr)
        : Process(world, owner == nullptr ? "master" : "standby", host),
          network_(network),
          limits_(limits),
          range_(range),
          planted_(planted),
          owner_(owner) {
        set_unix_offset(range.index * 1000);  // no two start at the same time of day
    }
    const Range& range() const { return range_; }

    // False: it does not serve such a one now. from: a standby.
    bool accept(std::shared_ptr<End> end, Caller kind, SimMaster* from = nullptr);
    const Master* master() const { return master_.get(); }  // null: it does not run
    Micros since() const { return since_; }                 // when it was started last
    bool is_owner() const { return pair_ != nullptr && pair_->role() == MasterRole::kOwner; }
    bool minds_standby() const { return pair_ != nullptr && pair_->waits(); }
    bool is_whole() const { return pair_ != nullptr && pair_->is_whole(); }
    void take_over();  // as an operator tells it
    // As well: its owner is to hand over, and becomes its standby.
    void ask_hand_over() { asks_ = true; }
    bool was_given() const { return was_given_; }  // it is the owner since then

   private:
    struct Held {
        MasterPair::Word word;
        Bytes frames;
    };
    struct Link {
        std::shared_ptr<End> end;
        MasterProtocol protocol;
        Caller kind;
        std::deque<Held> held;          // what waits for the standby's word, and all behind it
        std::deque<Bytes> postponed{};  // by a hand-over
    };

    void on_start() override;
    void on_end() override;
    void tick();
    void on_frame(LinkId id, const Bytes& frame);
    void drop(LinkId id);
    void drop_all(Caller kind);
    void attach(LinkId id);
    void lose_standby();
    void tell_standby();
    void release();
    void tick_hand_over();
    void end_hand_over();
    bool postpones(const Link& link, const Bytes& frame) const;
    void serve_postponed();
    bool follow(const Bytes& frame);
    std::optional<Error> unless_ignored(std::optional<Error> why) const;

    // The standby.
    void dial_owner();
    void on_owner(std::shared_ptr<End> end);
    void lose_owner();

    Network& network_;
    const MasterLimits limits_;
    const Range range_;
    const Planted& planted_;
    SimMaster* owner_;
    SimMaster* standby_process_ = nullptr;  // at the other end of standby_
    bool asks_ = false, was_given_ = false;
    std::unique_ptr<Master> master_;
    std::unique_ptr<MasterPair> pair_;
    std::map<LinkId, Link> links_;
    LinkId next_link_ = 1, standby_ = kNoLink;
    std::shared_ptr<End> to_owner_;
    uint64_t owner_heard_ms_ = 0, dials_ = 0;
    Micros since_ = 0;
};

}  // namespace moonpool::sim
