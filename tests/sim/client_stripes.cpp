// SimClient, operations on striped objects, of 2 to 4 stripes: StripePutSteps, StripeReadSteps,
// StripeLookupSteps, StripePinSteps and LostStripeSteps decide, and here are the questions around them, as
// Client has them. Each stripe, and the manifest, is put, read and removed by a call of its own, which is one
// of SimClient's usual ones.
//
// A stripe holds the value of its operation and its number, so a reader sees whether all are of one value.
#include <algorithm>
#include <cstring>

#include "base/crc32c.hpp"
#include "client.hpp"
#include "frames.hpp"
#include "store/client/lost_stripe_steps.hpp"
#include "store/client/stripe_lookup_steps.hpp"
#include "store/client/stripe_put_steps.hpp"
#include "store/client/stripe_read_steps.hpp"
#include "store/shared/descriptor.hpp"
#include "stripe_books.hpp"

namespace moonpool::sim {

namespace {

constexpr uint32_t kSpace = 0;
constexpr uint64_t kStripeBytes = 16;
constexpr uint64_t kPauseMaxMs = 128;  // as of Client::successor

std::span<const std::byte> as_bytes(const std::string& text) { return std::as_bytes(std::span(text)); }

// Calls then() when it has been called as often.
template <class Then>
std::function<void()> all_of(size_t calls, Then then) {
    auto left = std::make_shared<size_t>(calls);
    return [left, then] {
        if (--*left == 0) then();
    };
}

}  // namespace

struct SimClient::Striped : std::enable_shared_from_this<SimClient::Striped> {
    using Ref = std::shared_ptr<Striped>;
    using Incomplete = LostStripeSteps::Incomplete;
    template <class T>
    using Then = std::function<void(T)>;
    struct Looked {
        uint64_t pin = 0;  // 0: none
        std::vector<Descriptor> rows{};
    };
    struct Pinned {
        size_t node = 0;
        std::shared_ptr<End> held{};  // the connection that holds it
        uint64_t pin = 0;             // 0: a miss
        Descriptor what{};
        bool is_known = true;  // nothing kept a node from saying what it has
    };

    Striped(SimClient& of, CallRef ref) : c(of), call(std::move(ref)) {}

    SimClient& c;
    CallRef call;
    std::optional<StripePutSteps> put_steps;
    std::optional<SpreadSteps> spread_steps;
    std::optional<PlaceSteps> place_steps;
    std::optional<StripeReadSteps> read_steps;
    std::optional<StripeLookupSteps> lookup_steps;
    std::optional<StripePinSteps> pin_steps;
    std::optional<LostStripeSteps> lost_steps;
    Manifest manifest;               // of a put
    std::vector<std::string> parts;  // of a read
    std::vector<uint8_t> elsewhere;
    Pinned key_pin;
    std::vector<Pinned> pins;
    Operation::Outcome outcome = Operation::kUnknown;

    const std::string& name() const { return call->name; }
    void finish(Operation::Outcome is) { c.finish(call, is); }
    void find(Finding::Kind kind, const std::string& what) {
        c.findings_.push_back({kind, name() + ": " + what, call->operation.key});
    }

    // ---- Calls of which an operation is made up

    // then(call), when it has ended.
    CallRef part(Operation::Kind kind, const std::string& named, std::string bytes, Then<Call&> then) {
        Operation operation = call->operation;
        operation.kind = kind;
        auto made = std::make_shared<Call>(Call{operation, named, {}, std::move(bytes)});
        made->done = [raw = made.get(), then = std::move(then)](const Operation&) { then(*raw); };
        return made;
    }

    // The bytes under a name; "": a miss; none: it is not known.
    void read(const std::string& named, Then<std::optional<std::string>> then) {
        c.get(part(Operation::kGet, named, {}, [this, self = shared_from_this(), named, then](Call& got) {
            if (named == name()) call->operation.from = got.operation.from;
            bool is_known = got.operation.outcome == Operation::kDone;
            then(is_known ? std::optional(got.bytes) : std::nullopt);
        }));
    }

    void stand(Then<std::optional<Standing>> then) {
        read(name(), [this, self = shared_from_this(), then](std::optional<std::string> bytes) {
            if (!bytes) return then(std::nullopt);
            int64_t size = bytes->empty() ? kMiss : static_cast<int64_t>(bytes->size());
            then(standing_of(size, as_bytes(*bytes), cluster_secrets(), name()));
        });
    }

    void successor(uint64_t pause_ms, Then<std::optional<Standing>> then) {
        stand([this, self = shared_from_this(), pause_ms, then](std::optional<Standing> now) {
            if (!now || now->size >= 0 || pause_ms > kPauseMaxMs) return then(now);
            c.later(pause_ms * kMs, [self, pause_ms, then] { self->successor(2 * pause_ms, then); });
        });
    }

    void look(const At& node, std::vector<std::string> names, bool pin, Then<const Result<Looked>&> then) {
        auto build = [names, pin](Writer& w) {
            LookupHead{kSpace, pin ? kLookupPin : uint8_t{0}, 1, static_cast<uint32_t>(names.size())}.write(
                w);
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

    void exists_at(const At& node, const std::vector<std::string>& names,
                   Then<const Result<std::vector<uint8_t>>&> then) {
        look(node, names, false, [then](const Result<Looked>& looked) {
            if (!looked) return then(looked.error());
            std::vector<uint8_t> flags;
            for (const Descriptor& row : looked->rows) flags.push_back(row.generation != 0);
            then(flags);
        });
    }

    void release(const std::shared_ptr<End>& held, uint64_t pin) {
        if (pin == 0) return;
        held->send(make_frame(Kind::kRelease, kFlagOneWay, 0, [&](Writer& w) { w.number(pin); }));
    }

    // As Client::exists_whole of one name.
    struct Asked {
        std::string name;
        Presence present = Presence::kUnknown;
        std::vector<NodeId> tried{};
        Result<LocateAnswer> located = LocateAnswer{};
        size_t attempts = 0;
    };
    void exists(const std::string& named, Then<Presence> then) {
        auto asked = std::make_shared<Asked>(Asked{.name = named});
        exists_at({c.host()}, {named},
                  [this, self = shared_from_this(), asked, then](const Result<std::vector<uint8_t>>& own) {
                      if (own && own->front() != 0) return then(Presence::kHit);
                      asked->present = own ? Presence::kMiss : Presence::kUnknown;
                      LocateOptions question;
                      question.suspects = true;
                      const Hash128 hash = c.hash_(asked->name);
                      c.locate({hash}, question,
                               [this, self, asked, then, hash,
                                own = own.ok()](const Result<LocateAnswer>& located) {
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
    void ask_holder(const std::shared_ptr<Asked>& asked, const Then<Presence>& then) {
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

    // As Client::pin_whole of one name.
    void pin(const std::string& named, Then<const Pinned&> then) {
        pin_at({c.host()}, named, [this, self = shared_from_this(), named, then](const Pinned& own) {
            if (own.pin != 0) return then(own);
            c.locate({c.hash_(named)}, {},
                     [this, self, named, then, own](const Result<LocateAnswer>& located) {
                         Pinned missed = own;
                         missed.is_known &= located.ok();
                         if (!located) return then(missed);
                         pin_at_holder(named, {}, *located, missed, then);
                     });
        });
    }
    void pin_at_holder(const std::string& named, std::vector<NodeId> tried, const LocateAnswer& located,
                       const Pinned& missed, const Then<const Pinned&>& then) {
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
    void pin_at(const At& node, const std::string& named, Then<const Pinned&> then) {
        look(node, {named}, true,
             [this, self = shared_from_this(), node, then](const Result<Looked>& looked) {
                 if (!looked) return then(Pinned{.is_known = false});
                 then(Pinned{node.node, c.node_line(node.node).end, looked->pin, looked->rows[0]});
             });
    }
    bool holds(const Pinned& pinned) const {
        const std::shared_ptr<End>& end = c.node_line(pinned.node).end;
        return end != nullptr && end == pinned.held;
    }
    void read_pinned(const Pinned& pinned, std::function<void(const Result<std::string>&)> then) {
        ReadAsk ask{.how = kReadPinned, .from = 0, .room = 128, .name = {}};
        ask.generation = pinned.what.generation;
        ask.slot = pinned.what.slot;
        c.read_at({pinned.node}, ask, std::move(then));
    }
    void release(const Pinned& pinned) {
        if (pinned.pin != 0 && holds(pinned)) release(pinned.held, pinned.pin);
    }

    void remove_stripes(std::span<const Manifest> manifests, std::function<void()> then) {
        std::vector<std::string> names;
        for (const Manifest& of : manifests) {
            for (std::string& named : of.stripe_names()) names.push_back(std::move(named));
        }
        if (c.planted_.stripes_unremoved || names.empty()) return then();
        auto one = all_of(names.size(), std::move(then));
        for (const std::string& named : names) {
            c.remove(part(Operation::kRemove, named, {}, [self = shared_from_this(), one](Call& removed) {
                self->call->operation.left |= removed.operation.outcome != Operation::kDone;
                one();
            }));
        }
    }
    // Those that nodes removed under the key.
    std::vector<Manifest> shown(const Call& by) const {
        std::vector<Manifest> all;
        for (const RemovedManifest& removed : by.shown) {
            std::optional<Manifest> genuine = decode_manifest(removed.bytes, cluster_secrets(), name());
            if (genuine && std::ranges::find(all, *genuine) == all.end()) all.push_back(*genuine);
        }
        return all;
    }

    // ---- An object that lacks a stripe

    // then(): lost_steps has ended.
    void settle(LostStripeSteps steps, std::function<void()> then) {
        lost_steps.emplace(std::move(steps));
        drive_lost(std::move(then));
    }
    void settle(const Manifest& lacks, std::function<void()> then) {
        settle(LostStripeSteps({{name(), lacks}}, c.place_.own, c.hash_, *c.locations_), std::move(then));
    }
    void drive_lost(std::function<void()> then) {
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
    // As Client::drop_manifests at one node.
    void drop_manifest(const At& node, const std::function<void()>& then) {
        pin_at(node, name(), [this, self = shared_from_this(), node, then](const Pinned& pinned) {
            if (pinned.pin == 0) return then();
            read_pinned(pinned, [this, self, node, pinned, then](const Result<std::string>& bytes) {
                release(pinned);
                bool is_lost = bytes && decode_manifest(as_bytes(*bytes), cluster_secrets(), name()) ==
                                            lost_steps->lost().front().manifest;
                if (!is_lost) return then();
                auto build = [named = name(), pinned](Writer& w) {
                    w.number(kSpace);
                    w.number(uint32_t{1});
                    w.text16(named);
                    w.number(pinned.what.generation);
                };
                c.ask(node, Kind::kRemove, build, [self, then](const Result<Bytes>&) { then(); });
            });
        });
    }

    // ---- Get

    void get() {
        stand([this, self = shared_from_this()](std::optional<Standing> now) {
            if (!now) return finish(Operation::kUnknown);
            if (now->size < 0) return end_get(0);
            if (!now->manifest) return is_no_manifest();
            read_steps.emplace(*now->manifest);
            drive_read();
        });
    }
    void is_no_manifest() {
        find(Finding::kOtherBytes, "there is no manifest under a striped key");
        finish(Operation::kUnknown);
    }
    void end_get(uint64_t value) {
        call->operation.value = value;
        finish(Operation::kDone);
    }
    void drive_read() {
        using Wants = StripeReadSteps::Wants;
        auto self = shared_from_this();
        auto standing = [this, self](std::optional<Standing> now) {
            if (!now) return finish(Operation::kUnknown);
            read_steps->standing(*now);
            drive_read();
        };
        switch (read_steps->wants()) {
            case Wants::kStripes:
                return read_stripes();
            case Wants::kWhole:
                return is_no_manifest();
            case Wants::kSuccessor:
                return successor(1, standing);
            case Wants::kOther:
                return stand(standing);
            case Wants::kLost:
                return settle(read_steps->manifest(), [this, self] {
                    read_steps->settled(lost_steps->present().front());
                    drive_read();
                });
            case Wants::kFreeOrphans:
                return settle(LostStripeSteps::free_orphans({name(), read_steps->manifest()}, c.place_.own,
                                                            c.hash_, *c.locations_),
                              [this, self] {
                                  read_steps->freed();
                                  drive_read();
                              });
            case Wants::kDone:
                return end_get(read_steps->size() < 0 ? 0 : value_of(parts));
        }
    }
    void read_stripes() {
        std::vector<std::string> names = read_steps->manifest().stripe_names();
        if (!c.planted_.stripes_mixed) parts.clear();
        parts.resize(names.size());
        auto is_known = std::make_shared<bool>(true);
        auto one = all_of(names.size() + 1, [this, self = shared_from_this(), is_known] {
            if (!*is_known) return finish(Operation::kUnknown);
            bool all = true;
            for (const std::string& bytes : parts) all &= bytes.size() == kStripeBytes;
            read_steps->stripes_read(all);
            drive_read();
        });
        for (size_t i = 0; i < names.size(); ++i) {
            if (!parts[i].empty()) {
                one();
                continue;
            }
            read(names[i], [self = shared_from_this(), i, is_known, one](std::optional<std::string> bytes) {
                *is_known &= bytes.has_value();
                if (bytes) self->parts[i] = *bytes;
                one();
            });
        }
        one();
    }
    // What an object of these stripes holds.
    uint64_t value_of(const std::vector<std::string>& stripes) {
        uint64_t value = 0;
        std::memcpy(&value, stripes.front().data(), sizeof(value));
        for (size_t i = 0; i < stripes.size(); ++i) {
            if (stripes[i] != stripe_of(value, i))
                find(Finding::kOtherBytes, "stripes of two values were read");
        }
        return value;
    }

    // ---- Exists, remove

    void exist() {
        exists(name(), [this, self = shared_from_this()](Presence is) {
            if (is != Presence::kHit || c.planted_.stripes_unasked) return end_exist(is);
            whole([this, self](Presence is_whole) { end_exist(is_whole); });
        });
    }
    void end_exist(Presence is) {
        call->operation.value = is == Presence::kHit;
        finish(is == Presence::kUnknown ? Operation::kUnknown : Operation::kDone);
    }
    void whole(Then<Presence> then) {
        lookup_steps.emplace(1);
        drive_lookup(then);
    }
    void drive_lookup(const Then<Presence>& then) {
        using Wants = StripeLookupSteps::Wants;
        auto self = shared_from_this();
        switch (lookup_steps->wants()) {
            case Wants::kStanding:
                return stand([this, self, then](std::optional<Standing> now) {
                    Result<std::vector<Standing>> known = Error{Code::kUnavailable, "no answer"};
                    if (now) known = std::vector{*now};
                    lookup_steps->standing(known);
                    drive_lookup(then);
                });
            case Wants::kStripes: {
                auto present = std::make_shared<std::vector<Presence>>(lookup_steps->names().size());
                auto one = all_of(present->size(), [this, self, present, then] {
                    lookup_steps->stripes(*present);
                    drive_lookup(then);
                });
                // Answers may come at once, and with the last one these names are others.
                std::vector<std::string> names = lookup_steps->names();
                for (size_t i = 0; i < names.size(); ++i) {
                    exists(names[i], [present, i, one](Presence is) {
                        (*present)[i] = is;
                        one();
                    });
                }
                return;
            }
            case Wants::kLost:
                return settle(lookup_steps->lost().front().second, [this, self, then] {
                    lookup_steps->settled(lost_steps->present());
                    drive_lookup(then);
                });
            case Wants::kDone:
                return then(lookup_steps->present().front());
        }
    }

    void remove() {
        c.remove(part(Operation::kRemove, name(), {}, [this, self = shared_from_this()](Call& removed) {
            call->operation.alone = removed.operation.alone;
            outcome = removed.operation.outcome;
            remove_stripes(shown(removed), [this, self] { finish(outcome); });
        }));
    }

    // ---- Put

    void put() {
        c.members([this, self = shared_from_this()](const Result<std::shared_ptr<const Members>>& members) {
            if (!members) return finish(Operation::kNothing);
            put_steps.emplace(call->operation.kind == Operation::kReplace);
            drive_put(*members);
        });
    }
    void drive_put(const std::shared_ptr<const Members>& members) {
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
    void put_stripe(const At& node, size_t i, std::function<void(const Result<PutOutcome>&)> then) {
        CallRef stripe =
            part(Operation::kPut, manifest.stripe_name(i), stripe_of(call->operation.value, i), [](Call&) {});
        c.put_at(node, stripe, kNoVersion, c.known(c.hash_(stripe->name)), true, std::move(then));
    }
    void note_place(size_t i, const Member& member) {
        if (member.identity.incarnation == c.place_.own) return;
        const Hash128 hash = c.hash_(manifest.stripe_name(i));
        c.recent_->add(c.now_ms(), hash, member.id);
        c.locations_->put(hash, member.identity.incarnation);
    }
    void spread(const std::function<void()>& then) {
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
    void place(const std::function<void()>& then) {
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
                    put_stripe(c.at(to), i,
                               [this, self, i, to, left, one](const Result<PutOutcome>& outcome) {
                                   if (outcome &&
                                       (*outcome == PutOutcome::kStored || *outcome == PutOutcome::kExists)) {
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
    void confirm(const std::function<void()>& then) {
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
            exists_at(c.at(node.member), names,
                      [self, &node, one](const Result<std::vector<uint8_t>>& flags) {
                          self->spread_steps->kept(node, flags);
                          one();
                      });
        }
        one();
    }
    void put_manifest(const std::function<void()>& then) {
        std::vector<std::byte> encoded = encode(manifest, cluster_secrets(), name());
        std::string bytes(reinterpret_cast<const char*>(encoded.data()), encoded.size());
        Operation::Kind kind = put_steps->replaces() ? Operation::kReplace : Operation::kPut;
        c.put(part(kind, name(), bytes, [this, self = shared_from_this(), then](Call& put) {
            call->operation.alone = put.operation.alone;
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

    // ---- Pin: reads what was pinned after a while: all of it has to be there.

    void pin() {
        pin(name(), [this, self = shared_from_this()](const Pinned& pinned) {
            if (pinned.pin == 0) return finish(pinned.is_known ? Operation::kNothing : Operation::kUnknown);
            key_pin = pinned;
            read_pinned(pinned, [this, self](const Result<std::string>& bytes) {
                if (!bytes) return end_pin(Operation::kUnknown);
                std::optional<Manifest> found = decode_manifest(as_bytes(*bytes), cluster_secrets(), name());
                if (!found) return end_pin(Operation::kUnknown);
                pin_steps.emplace(*found);
                drive_pin();
            });
        });
    }
    void end_pin(Operation::Outcome is) {
        release(key_pin);
        for (const Pinned& pinned : pins) release(pinned);
        finish(is);
    }
    void drive_pin() {
        using Wants = StripePinSteps::Wants;
        auto self = shared_from_this();
        switch (pin_steps->wants()) {
            case Wants::kPinStripes:
                return pin_stripes();
            case Wants::kPinKey:
                return pin_key();
            case Wants::kLost:
                return settle(pin_steps->manifest(), [this, self] {
                    pin_steps->settled(lost_steps->present().front());
                    drive_pin();
                });
            case Wants::kDone:
                if (pin_steps->outcome() != StripePinSteps::Outcome::kPinned)
                    return end_pin(Operation::kNothing);
                return c.later(c.world_.random.between(1, 300) * kMs, [self] { self->check_pins(); });
        }
    }
    void pin_stripes() {
        std::vector<std::string> names = pin_steps->manifest().stripe_names();
        pins.assign(names.size(), {});
        auto one = all_of(names.size(), [this, self = shared_from_this()] {
            bool all = true, is_known = true;
            for (const Pinned& pinned : pins) {
                all &= pinned.what.generation != 0;
                is_known &= pinned.is_known;
            }
            if (!all) {
                for (const Pinned& pinned : pins) release(pinned);
                pins.clear();
            }
            pin_steps->stripes(all, is_known);
            drive_pin();
        });
        for (size_t i = 0; i < names.size(); ++i) {
            pin(names[i], [this, self = shared_from_this(), i, one](const Pinned& pinned) {
                pins[i] = pinned;
                if (c.planted_.stripes_unpinned && i != 0) {
                    release(pinned);
                    pins[i].pin = 0;
                }
                one();
            });
        }
    }
    void pin_key() {
        pin(name(), [this, self = shared_from_this()](const Pinned& pinned) {
            if (pinned.pin == 0) {
                pin_steps->key(std::nullopt);
                return drive_pin();
            }
            read_pinned(pinned, [this, self, pinned](const Result<std::string>& bytes) {
                std::optional<Standing> now;
                if (bytes && !bytes->empty())
                    now = standing_of(static_cast<int64_t>(bytes->size()), as_bytes(*bytes),
                                      cluster_secrets(), name());
                if (now && now->manifest != pin_steps->manifest()) {
                    release(key_pin);
                    key_pin = pinned;
                } else {
                    release(pinned);
                }
                pin_steps->key(now);
                drive_pin();
            });
        });
    }
    void check_pins() {
        auto all = std::make_shared<std::vector<std::string>>(pins.size());
        auto is_known = std::make_shared<bool>(true);
        auto one = all_of(pins.size(), [this, self = shared_from_this(), all, is_known] {
            for (const Pinned& pinned : pins) *is_known &= holds(pinned);
            if (!*is_known) return end_pin(Operation::kUnknown);
            bool lost = false;
            for (size_t i = 0; i < pins.size(); ++i) {
                const std::string& bytes = (*all)[i];
                lost |= bytes.size() != pins[i].what.size ||
                        crc32c(0, bytes.data(), bytes.size()) != pins[i].what.crc;
            }
            if (lost) {
                find(Finding::kPinLost, "a stripe that was pinned is not there");
            } else {
                value_of(*all);
            }
            end_pin(Operation::kDone);
        });
        for (size_t i = 0; i < pins.size(); ++i) {
            if (!holds(pins[i])) {
                *is_known = false;
                one();
                continue;
            }
            read_pinned(pins[i], [all, is_known, i, one](const Result<std::string>& bytes) {
                *is_known &= bytes.ok();
                if (bytes) (*all)[i] = *bytes;
                one();
            });
        }
    }
};

void SimClient::run_striped(const CallRef& call) {
    auto striped = std::make_shared<Striped>(*this, call);
    // The own node's life is known once it has been spoken to.
    connect(node_line(host()), [this, striped](const Status&) {
        switch (striped->call->operation.kind) {
            case Operation::kGet:
                return striped->get();
            case Operation::kExists:
                return striped->exist();
            case Operation::kRemove:
                return striped->remove();
            case Operation::kPin:
                return striped->pin();
            case Operation::kPut:
            case Operation::kReplace:
                return striped->put();
        }
    });
}

// As Client::own_manifests.
void SimClient::show_own_manifest(const Call& call, std::vector<RemovedManifest>& shown) const {
    if (lines_[ranges() + host()].end == nullptr) return;
    std::optional<std::string> bytes = nodes_[host()]->read(call.name);
    if (!bytes || bytes->size() != kManifestBytes) return;
    std::memcpy(shown.emplace_back().bytes.data(), bytes->data(), bytes->size());
}

}  // namespace moonpool::sim
