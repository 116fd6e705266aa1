// SimClient::Striped, put and replace.
#include "frames.hpp"
#include "striped.hpp"

namespace moonpool::sim {

void SimClient::Striped::put() {
    c.members([this, self = shared_from_this()](const Result<std::shared_ptr<const Members>>& members) {
        if (!members) return finish(Operation::kNothing);
        put_steps.emplace(call->operation.kind == Operation::kReplace);
        drive_put(*members);
    });
}

void SimClient::Striped::drive_put(const std::shared_ptr<const Members>& members) {
    using Wants = StripePutSteps::Wants;
    auto self = shared_from_this();
    auto on = [self, members] { self->drive_put(members); };
    switch (put_steps->wants()) {
        case Wants::kLook:
        case Wants::kLookAgain:
            return exists(name(), [this, self, on](Presence is) {
                put_steps->looked(std::vector{is}, is == Presence::kHit);
                on();
            });
        case Wants::kWhole:
            return whole([this, self, on](Presence is) {
                put_steps->whole(is);
                on();
            });
        case Wants::kSpread: {
            std::vector<NodeItems> nodes = SpreadSteps::takers(*members);
            if (nodes.empty()) return finish(Operation::kNothing);
            for (size_t i = 0; i < manifest.id.size(); ++i)
                manifest.id[i] = static_cast<uint8_t>(c.world_.random.below(256));
            manifest.size = (2 + call->operation.value % 3) * kStripeBytes;
            manifest.stripe_bytes = kStripeBytes;
            spread_steps.emplace(std::move(nodes), SpreadSteps::Places(manifest.stripes()), 1);
            return spread([this, self, on] {
                put_steps->spread(spread_steps->left());
                on();
            });
        }
        case Wants::kElsewhere:
            elsewhere.resize(manifest.stripes());
            place_steps.emplace(spread_steps->left(), c.place_.own, members, true);
            return place([this, self, on] {
                put_steps->put_elsewhere(elsewhere);
                on();
            });
        case Wants::kConfirm:
            return confirm([this, self, on] {
                put_steps->confirmed(spread_steps->at());
                on();
            });
        case Wants::kManifest:
            return put_manifest(on);
        case Wants::kFree:
            return remove_stripes({&manifest, 1}, [this, self, on] {
                put_steps->freed();
                on();
            });
        case Wants::kDone:
            if (put_steps->was_there() || put_steps->copies() == 0) outcome = Operation::kNothing;
            return finish(outcome);
    }
}

void SimClient::Striped::put_stripe(const At& node, size_t i,
                                    std::function<void(const Result<PutOutcome>&)> then) {
    CallRef stripe =
        part(Operation::kPut, manifest.stripe_name(i), stripe_of(call->operation.value, i), [](Call&) {});
    c.put_at(node, stripe, kNoVersion, c.known(c.hash_(stripe->name)), true, std::move(then));
}

void SimClient::Striped::note_place(size_t i, const Member& member) {
    if (member.identity.incarnation == c.place_.own) return;
    const Hash128 hash = c.hash_(manifest.stripe_name(i));
    c.recent_->add(c.now_ms(), hash, member.id);
    c.locations_->put(hash, member.identity.incarnation);
}

void SimClient::Striped::spread(const std::function<void()>& then) {
    if (spread_steps->wants() != SpreadSteps::Wants::kPut) return then();
    size_t items = 0;
    for (const NodeItems& node : spread_steps->nodes()) items += node.items.size();
    auto one = all_of(items, [this, self = shared_from_this(), then] {
        spread_steps->all_put();
        spread(then);
    });
    std::vector<std::pair<const NodeItems*, size_t>> asked;  // answers may come at once
    for (const NodeItems& node : spread_steps->nodes()) {
        for (size_t i : node.items) asked.emplace_back(&node, i);
    }
    for (auto [node, i] : asked) {
        put_stripe(c.at(node->member), i,
                   [this, self = shared_from_this(), node, i, one](const Result<PutOutcome>& outcome) {
                       if (outcome && spread_steps->put(*node, i, *outcome)) note_place(i, node->member);
                       one();
                   });
    }
}

void SimClient::Striped::place(const std::function<void()>& then) {
    auto self = shared_from_this();
    switch (place_steps->wants()) {
        case PlaceSteps::Wants::kPlace:
            return c.ask_place(place_steps->where(),
                               [this, self, then](const Result<std::vector<NodeId>>& nodes) {
                                   place_steps->placed(nodes);
                                   place(then);
                               });
        case PlaceSteps::Wants::kMembers:
            return c.ask_all_members(0, true, [this, self, then](const Status& status) {
                Result<std::shared_ptr<const Members>> fresh = c.list();
                if (!status) fresh = status.error();
                place_steps->members(fresh);
                place(then);
            });
        case PlaceSteps::Wants::kPut: {
            auto left = std::make_shared<std::vector<size_t>>();
            auto one = all_of(place_steps->left().size(), [this, self, left, then] {
                place_steps->put(*left);
                place(then);
            });
            Member to = place_steps->node();
            for (size_t i : std::vector(place_steps->left())) {
                put_stripe(c.at(to), i, [this, self, i, to, left, one](const Result<PutOutcome>& outcome) {
                    if (outcome && (*outcome == PutOutcome::kStored || *outcome == PutOutcome::kExists)) {
                        elsewhere[i] = 1;
                        note_place(i, to);
                    } else {
                        left->push_back(i);
                    }
                    one();
                });
            }
            return;
        }
        case PlaceSteps::Wants::kDone:
            return then();
    }
}

void SimClient::Striped::confirm(const std::function<void()>& then) {
    spread_steps->confirm();
    auto self = shared_from_this();
    auto one = all_of(spread_steps->nodes().size() + 1, [self, then] {
        self->spread_steps->all_kept();
        then();
    });
    for (const NodeItems& node : spread_steps->nodes()) {
        if (node.items.empty()) {
            one();
            continue;
        }
        std::vector<std::string> names;
        for (size_t i : node.items) names.push_back(manifest.stripe_name(i));
        exists_at(c.at(node.member), names, [self, &node, one](const Result<std::vector<uint8_t>>& flags) {
            self->spread_steps->kept(node, flags);
            one();
        });
    }
    one();
}

void SimClient::Striped::put_manifest(const std::function<void()>& then) {
    std::vector<std::byte> encoded = encode(manifest, cluster_secrets(), name());
    std::string bytes(reinterpret_cast<const char*>(encoded.data()), encoded.size());
    Operation::Kind kind = put_steps->replaces() ? Operation::kReplace : Operation::kPut;
    c.put(part(kind, name(), bytes, [this, self = shared_from_this(), then](Call& put) {
        call->operation.alone = put.operation.alone;
        call->operation.version = put.operation.version;
        outcome = put.operation.outcome;
        // The node may have the manifest, or get it yet: its stripes stay.
        if (put.is_unanswered) return finish(Operation::kUnknown);
        PutOutcome is = put.is_stored                                  ? PutOutcome::kStored
                        : put.operation.outcome == Operation::kNothing ? PutOutcome::kExists
                                                                       : PutOutcome::kRefused;
        auto on = [this, self, is, then] {
            put_steps->manifest_put(is);
            then();
        };
        if (!put.is_stored) return on();
        remove_stripes(shown(put), on);
    }));
}

}  // namespace moonpool::sim
