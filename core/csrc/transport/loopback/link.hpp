// A peer that lives in this process: a copy.
#pragma once

#include "transport/loopback/target.hpp"

namespace moonpool::transport::loopback {

class Link final : public transport::Link {
   public:
    static Result<std::shared_ptr<transport::Link>> connect(const PeerInfo& peer, const Identity& self,
                                                            Counters& counters);

    std::string_view transport() const override { return "loopback"; }
    std::string path() const override { return "loopback"; }
    bool reaches(MemoryKind kind, std::string* why) const override;
    Status run(Job& job) override;

    Link(std::shared_ptr<Target> target, Counters& counters)
        : target_(std::move(target)), counters_(counters) {}

   private:
    std::shared_ptr<Target> target_;
    Counters& counters_;
};

}  // namespace moonpool::transport::loopback
