// A peer that lives in this process: a copy.
#pragma once

#include "transport/counters.hpp"
#include "transport/link.hpp"
#include "transport/loopback/target.hpp"

namespace moonpool::transport::loopback {

class Link final : public transport::Link {
   public:
    Link(std::shared_ptr<Target> target, TransportCounters& counters)
        : target_(std::move(target)), counters_(counters) {}

    std::string path() const override { return "loopback"; }
    bool reaches(MemoryKind kind, std::string* why) const override { return reached_by_cpu(kind, why); }
    bool runs_on_caller() const override { return true; }
    Status run(Job& job) override;

   private:
    std::shared_ptr<Target> target_;
    TransportCounters& counters_;
};

}  // namespace moonpool::transport::loopback
