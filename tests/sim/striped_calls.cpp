// SimClient::Striped, the calls of which an operation is made up.
#include <algorithm>
#include <cstring>

#include "frames.hpp"
#include "striped.hpp"

namespace moonpool::sim {

namespace {

constexpr uint32_t kSpace = 0;
constexpr uint64_t kPauseMaxMs = 128;  // as of Client::successor

}  // namespace

SimClient::CallRef SimClient::Striped::part(Operation::Kind kind, const std::string& named, std::string bytes,
                                            Then<Call&> then) {
    Operation operation = call->operation;
    operation.kind = kind;
    auto made = std::make_shared<Call>(Call{operation, named, {}, std::move(bytes)});
    made->done = [raw = made.get(), then = std::move(then)](const Operation&) { then(*raw); };
    return made;
}

void SimClient::Striped::read(const std::string& named, Then<std::optional<std::string>> then) {
    c.get(part(Operation::kGet, named, {}, [this, self = shared_from_this(), named, then](Call& got) {
        if (named == name()) call->operation.from = got.operation.from;
        bool is_known = got.operation.outcome == Operation::kDone;
        then(is_known ? std::optional(got.bytes) : std::nullopt);
    }));
}

void SimClient::Striped::stand(Then<std::optional<Standing>> then) {
    read(name(), [this, self = shared_from_this(), then](std::optional<std::string> bytes) {
        if (!bytes) return then(std::nullopt);
        int64_t size = bytes->empty() ? kMiss : static_cast<int64_t>(bytes->size());
        then(standing_of(size, as_bytes(*bytes), cluster_secrets(), name()));
    });
}

void SimClient::Striped::successor(uint64_t pause_ms, Then<std::optional<Standing>> then) {
    stand([this, self = shared_from_this(), pause_ms, then](std::optional<Standing> now) {
        if (!now || now->size >= 0 || pause_ms > kPauseMaxMs) return then(now);
        c.later(pause_ms * kMs, [self, pause_ms, then] { self->successor(2 * pause_ms, then); });
    });
}

void SimClient::Striped::look(const At& node, std::vector<std::string> names, bool pin,
                              Then<const Result<Looked>&> then) {
    auto build = [names, pin](Writer& w) {
        LookupHead{kSpace, pin ? kLookupPin : uint8_t{0}, 1, static_cast<uint32_t>(names.size())}.write(w);
        for (const std::string& named : names) w.text16(named);
    };
    c.ask(node, Kind::kLookup, build, [n = names.size(), then](const Result<Bytes>& answer) {
        if (!answer) return then(answer.error());
        Reader r = body_of(*answer);
        LookupFound found = LookupFound::read(r);
        Looked looked{found.pin_id, {}};
        for (size_t i = 0; i < n; ++i) looked.rows.push_back(r.number<Descriptor>());
        then(looked);
    });
}

void SimClient::Striped::exists_at(const At& node, const std::vector<std::string>& names,
                                   Then<const Result<std::vector<uint8_t>>&> then) {
    look(node, names, false, [then](const Result<Looked>& looked) {
        if (!looked) return then(looked.error());
        std::vector<uint8_t> flags;
        for (const Descriptor& row : looked->rows) flags.push_back(row.generation != 0);
        then(flags);
    });
}

void SimClient::Striped::release(const std::shared_ptr<End>& held, uint64_t pin) {
    if (pin == 0) return;
    held->send(make_frame(Kind::kRelease, kFlagOneWay, 0, [&](Writer& w) { w.number(pin); }));
}

void SimClient::Striped::exists(const std::string& named, Then<Presence> then) {
    auto asked = std::make_shared<Asked>(Asked{.name = named});
    exists_at({c.host()}, {named},
              [this, self = shared_from_this(), asked, then](const Result<std::vector<uint8_t>>& own) {
                  if (own && own->front() != 0) return then(Presence::kHit);
                  asked->present = own ? Presence::kMiss : Presence::kUnknown;
                  LocateOptions question;
                  question.suspects = true;
                  const Hash128 hash = c.hash_(asked->name);
                  c.locate(
                      {hash}, question,
                      [this, self, asked, then, hash, own = own.ok()](const Result<LocateAnswer>& located) {
                          if (!located) return then(Presence::kUnknown);
                          asked->located = located;
                          const Members& members = *located->members;
                          for (const Member& member : members.rows) {
                              if (own && member.identity.incarnation == c.place_.own)
                                  asked->tried.push_back(member.id);
                          }
                          bool unknown = members.is_filling(hash);
                          for (const Holder& holder : located->keys[0]) {
                              const Member* silent = members.find(holder.node);
                              unknown |= silent != nullptr &&
                                         members.state(*silent, hash) != MemberState::kAlive &&
                                         !(own && silent->identity.incarnation == c.place_.own);
                          }
                          if (unknown) asked->present = Presence::kUnknown;
                          ask_holder(asked, then);
                      });
              });
}

void SimClient::Striped::ask_holder(const std::shared_ptr<Asked>& asked, const Then<Presence>& then) {
    const Members& members = *asked->located->members;
    const Hash128 hash = c.hash_(asked->name);
    const Member* member = nearest(c.place_, members, hash, asked->located->keys[0], asked->tried, 0);
    if (member == nullptr && asked->attempts == 0) member = known_place(*c.locations_, members, hash);
    if (member == nullptr || asked->attempts++ == kAttemptsMax) return then(asked->present);
    asked->tried.push_back(member->id);
    exists_at(c.at(*member), {asked->name},
              [self = shared_from_this(), asked, then](const Result<std::vector<uint8_t>>& flags) {
                  if (!flags) asked->present = Presence::kUnknown;
                  if (flags && flags->front() != 0) return then(Presence::kHit);
                  self->ask_holder(asked, then);
              });
}

void SimClient::Striped::pin(const std::string& named, Then<const Pinned&> then) {
    pin_at({c.host()}, named, [this, self = shared_from_this(), named, then](const Pinned& own) {
        if (own.pin != 0) return then(own);
        c.locate({c.hash_(named)}, {}, [this, self, named, then, own](const Result<LocateAnswer>& located) {
            Pinned missed = own;
            missed.is_known &= located.ok();
            if (!located) return then(missed);
            pin_at_holder(named, {}, *located, missed, then);
        });
    });
}

void SimClient::Striped::pin_at_holder(const std::string& named, std::vector<NodeId> tried,
                                       const LocateAnswer& located, const Pinned& missed,
                                       const Then<const Pinned&>& then) {
    const Hash128 hash = c.hash_(named);
    const Member* member = nearest(c.place_, *located.members, hash, located.keys[0], tried, hash.low);
    if (member == nullptr) member = known_place(*c.locations_, *located.members, hash);
    if (member != nullptr && std::ranges::find(tried, member->id) != tried.end()) member = nullptr;
    if (member == nullptr || tried.size() == kAttemptsMax) return then(missed);
    tried.push_back(member->id);
    pin_at(c.at(*member), named,
           [self = shared_from_this(), named, tried, located, missed, then](const Pinned& got) {
               if (got.pin != 0) return then(got);
               Pinned all = missed;
               all.is_known &= got.is_known;
               self->pin_at_holder(named, tried, located, all, then);
           });
}

void SimClient::Striped::pin_at(const At& node, const std::string& named, Then<const Pinned&> then) {
    look(node, {named}, true, [this, self = shared_from_this(), node, then](const Result<Looked>& looked) {
        if (!looked) return then(Pinned{.is_known = false});
        then(Pinned{node.node, c.node_line(node.node).end, looked->pin, looked->rows[0]});
    });
}

bool SimClient::Striped::holds(const Pinned& pinned) const {
    const std::shared_ptr<End>& end = c.node_line(pinned.node).end;
    return end != nullptr && end == pinned.held;
}

void SimClient::Striped::read_pinned(const Pinned& pinned,
                                     std::function<void(const Result<std::string>&)> then) {
    ReadAsk ask{.how = kReadPinned, .from = 0, .room = 128, .name = {}};
    ask.generation = pinned.what.generation;
    ask.slot = pinned.what.slot;
    c.read_at({pinned.node}, ask, std::move(then));
}

void SimClient::Striped::release(const Pinned& pinned) {
    if (pinned.pin != 0 && holds(pinned)) release(pinned.held, pinned.pin);
}

void SimClient::Striped::remove_stripes(std::span<const Manifest> manifests, std::function<void()> then) {
    struct Stripe {
        std::string name, group;
    };
    std::vector<Stripe> stripes;
    for (const Manifest& of : manifests) {
        for (std::string& named : of.stripe_names()) stripes.push_back({std::move(named), of.group_name()});
    }
    if (c.planted_.stripes_unremoved || stripes.empty()) return then();
    auto one = all_of(stripes.size(), std::move(then));
    for (const Stripe& stripe : stripes) {
        c.remove(part(Operation::kRemove, stripe.name, {},
                      [self = shared_from_this(), group = stripe.group, one](Call& removed) {
                          if (removed.operation.outcome != Operation::kDone) {
                              self->call->operation.left = true;
                              self->c.unfreed_manifests_.insert(group);
                          }
                          one();
                      }));
    }
}

std::vector<Manifest> SimClient::Striped::shown(const Call& by) const {
    std::vector<Manifest> all;
    for (const RemovedManifest& removed : by.shown) {
        std::optional<Manifest> genuine = decode_manifest(removed.bytes, cluster_secrets(), name());
        if (genuine && std::ranges::find(all, *genuine) == all.end()) all.push_back(*genuine);
    }
    return all;
}

// As Client::own_manifests.
void SimClient::show_own_manifest(const Call& call, std::vector<RemovedManifest>& shown) const {
    if (lines_[ranges() + host()].end == nullptr) return;
    std::optional<std::string> bytes = nodes_[host()]->read(call.name);
    if (!bytes || bytes->size() != kManifestBytes) return;
    std::memcpy(shown.emplace_back().bytes.data(), bytes->data(), bytes->size());
}

}  // namespace moonpool::sim
