// SimClient::Striped, an object that lacks a stripe.
#include "frames.hpp"
#include "striped.hpp"

namespace moonpool::sim {

void SimClient::Striped::settle(LostStripeSteps steps, std::function<void()> then) {
    lost_steps.emplace(std::move(steps));
    drive_lost(std::move(then));
}

void SimClient::Striped::settle(const Manifest& lacks, std::function<void()> then) {
    settle(LostStripeSteps({{name(), lacks}}, c.place_.own, c.hash_, *c.locations_), std::move(then));
}

void SimClient::Striped::drive_lost(std::function<void()> then) {
    using Wants = LostStripeSteps::Wants;
    auto self = shared_from_this();
    auto on = [self, then] { self->drive_lost(then); };
    switch (lost_steps->wants()) {
        case Wants::kMembers:
            return c.ask_all_members(0, true, [this, self, on](const Status& status) {
                Result<std::shared_ptr<const Members>> fresh = c.list();
                if (!status) fresh = status.error();
                lost_steps->members(fresh);
                on();
            });
        case Wants::kAsk: {
            auto one = all_of(lost_steps->nodes().size(), [self, on] {
                self->lost_steps->all_answered();
                on();
            });
            for (const NodeItems& node : lost_steps->nodes()) {
                exists_at(c.at(node.member), lost_steps->names(),
                          [self, &node, one](const Result<std::vector<uint8_t>>& flags) {
                              self->lost_steps->answered(node, flags);
                              one();
                          });
            }
            return;
        }
        case Wants::kDrop: {
            if (c.planted_.stripes_left) return then();
            auto one = all_of(lost_steps->nodes().size(), [self, on] {
                self->lost_steps->dropped();
                on();
            });
            for (const NodeItems& node : lost_steps->nodes()) drop_manifest(c.at(node.member), one);
            return;
        }
        case Wants::kFree:
            return remove_stripes(lost_steps->freed(), [self, on] {
                self->lost_steps->done();
                on();
            });
        case Wants::kDone:
            return then();
    }
}

void SimClient::Striped::drop_manifest(const At& node, const std::function<void()>& then) {
    pin_at(node, name(), [this, self = shared_from_this(), node, then](const Pinned& pinned) {
        if (pinned.pin == 0) return then();
        read_pinned(pinned, [this, self, node, pinned, then](const Result<std::string>& bytes) {
            release(pinned);
            bool is_lost = bytes && decode_manifest(as_bytes(*bytes), cluster_secrets(), name()) ==
                                        lost_steps->lost().front().manifest;
            if (!is_lost) return then();
            auto build = [named = name(), pinned](Writer& w) {
                w.number(uint32_t{0});  // the space
                w.number(uint32_t{1});
                w.text16(named);
                w.number(pinned.what.generation);
            };
            c.ask(node, Kind::kRemove, build, [self, then](const Result<Bytes>&) { then(); });
        });
    });
}

}  // namespace moonpool::sim
