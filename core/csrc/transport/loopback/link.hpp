// A peer that lives in this process: a copy.
#pragma once

#include "transport/counters.hpp"
#include "transport/link.hpp"
#include "transport/loopback/target.hpp"

namespace moonpool::transport::loopback {

class Link final : public transport::Link {
   public:
    Link(std::shared_ptr<Target> target, std::shared_ptr<Guest> self, TransportCounters& counters)
        : target_(std::move(target)), self_(std::move(self)), counters_(counters) {}

    std::string path() const override { return "loopback"; }
    bool reaches(MemoryKind kind, std::string* why) const override {
        return kind == MemoryKind::kDevice || reached_by_cpu(kind, why);
    }
    bool copies_by_card() const override { return true; }
    bool only_copies() const override { return true; }
    bool runs_on_caller(const Job&) const override { return !target_->regions->ever_on_card(); }
    Status run(Job& job) override;

   private:
    class Cards;
    Status carry(Job& job);
    Status may_go_on(const Job& job) const;
    Status copy_by_card(Job& job, size_t slice, const std::shared_ptr<Region>& remote, Cards& cards);

    std::shared_ptr<Target> target_;
    std::shared_ptr<Guest> self_;
    TransportCounters& counters_;
};

}  // namespace moonpool::transport::loopback
