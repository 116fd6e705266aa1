// SimMaster: a process with the real Master and, for each connection, the real MasterProtocol.
#pragma once

#include <map>
#include <memory>

#include "directory/master_protocol.hpp"
#include "faults.hpp"
#include "network.hpp"

namespace moonpool::sim {

class SimMaster final : public Process {
   public:
    SimMaster(World& world, Network& network, uint32_t host, const MasterLimits& limits,
              const Planted& planted)
        : Process(world, "master", host), network_(network), limits_(limits), planted_(planted) {}

    void accept(std::shared_ptr<End> end, bool is_member);
    const Master* master() const { return master_.get(); }  // null: it does not run

   private:
    struct Link {
        std::shared_ptr<End> end;
        MasterProtocol protocol;
    };

    void on_start() override;
    void on_end() override;
    void tick();
    void on_frame(LinkId id, const Bytes& frame);
    void drop(LinkId id);

    Network& network_;
    const MasterLimits limits_;
    const Planted& planted_;
    std::unique_ptr<Master> master_;
    std::map<LinkId, Link> links_;
    LinkId next_link_ = 1;
};

}  // namespace moonpool::sim
