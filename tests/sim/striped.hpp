// SimClient::Striped: one operation on a striped object, of 2 to 4 stripes. StripePutSteps, StripeReadSteps,
// StripeLookupSteps, StripePinSteps and LostStripeSteps decide; the questions around them are here, as Client
// has them. Each stripe, and the manifest, is put, read and removed by a call of its own, which is one of
// SimClient's usual ones.
//
// A stripe holds the value of its operation and its number, so a reader sees whether all are of one value.
//
//   striped_calls.cpp   what an operation is made up of
//   striped_lost.cpp    an object that lacks a stripe
//   striped_get.cpp     get, exists, remove
//   striped_put.cpp
//   striped_pin.cpp
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "client.hpp"
#include "store/client/lost_stripe_steps.hpp"
#include "store/client/stripe_lookup_steps.hpp"
#include "store/client/stripe_put_steps.hpp"
#include "store/client/stripe_read_steps.hpp"
#include "store/shared/descriptor.hpp"
#include "stripe_books.hpp"

namespace moonpool::sim {

inline constexpr uint64_t kStripeBytes = 16;

inline std::span<const std::byte> as_bytes(const std::string& text) { return std::as_bytes(std::span(text)); }

// Calls then() when it has been called as often.
template <class Then>
std::function<void()> all_of(size_t calls, Then then) {
    auto left = std::make_shared<size_t>(calls);
    return [left, then] {
        if (--*left == 0) then();
    };
}

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
    CallRef part(Operation::Kind kind, const std::string& named, std::string bytes, Then<Call&> then);
    // The bytes under a name; "": a miss; none: it is not known.
    void read(const std::string& named, Then<std::optional<std::string>> then);
    void stand(Then<std::optional<Standing>> then);
    void successor(uint64_t pause_ms, Then<std::optional<Standing>> then);
    void look(const At& node, std::vector<std::string> names, bool pin, Then<const Result<Looked>&> then);
    void exists_at(const At& node, const std::vector<std::string>& names,
                   Then<const Result<std::vector<uint8_t>>&> then);
    void release(const std::shared_ptr<End>& held, uint64_t pin);
    // As Client::exists_whole of one name.
    struct Asked {
        std::string name;
        Presence present = Presence::kUnknown;
        std::vector<NodeId> tried{};
        Result<LocateAnswer> located = LocateAnswer{};
        size_t attempts = 0;
    };
    void exists(const std::string& named, Then<Presence> then);
    void ask_holder(const std::shared_ptr<Asked>& asked, const Then<Presence>& then);
    // As Client::pin_whole of one name.
    void pin(const std::string& named, Then<const Pinned&> then);
    void pin_at_holder(const std::string& named, std::vector<NodeId> tried, const LocateAnswer& located,
                       const Pinned& missed, const Then<const Pinned&>& then);
    void pin_at(const At& node, const std::string& named, Then<const Pinned&> then);
    bool holds(const Pinned& pinned) const;
    void read_pinned(const Pinned& pinned, std::function<void(const Result<std::string>&)> then);
    void release(const Pinned& pinned);
    void remove_stripes(std::span<const Manifest> manifests, std::function<void()> then);
    // Those that nodes removed under the key.
    std::vector<Manifest> shown(const Call& by) const;

    // ---- An object that lacks a stripe
    // then(): lost_steps has ended.
    void settle(LostStripeSteps steps, std::function<void()> then);
    void settle(const Manifest& lacks, std::function<void()> then);
    void drive_lost(std::function<void()> then);
    // As Client::drop_manifests at one node.
    void drop_manifest(const At& node, const std::function<void()>& then);

    // ---- Get
    void get();
    void is_no_manifest();
    void end_get(uint64_t value);
    void drive_read();
    void read_stripes();
    // What an object of these stripes holds.
    uint64_t value_of(const std::vector<std::string>& stripes);

    // ---- Exists, remove
    void exist();
    void end_exist(Presence is);
    void whole(Then<Presence> then);
    void drive_lookup(const Then<Presence>& then);
    void remove();

    // ---- Put
    void put();
    void drive_put(const std::shared_ptr<const Members>& members);
    void put_stripe(const At& node, size_t i, std::function<void(const Result<PutOutcome>&)> then);
    void note_place(size_t i, const Member& member);
    void spread(const std::function<void()>& then);
    void place(const std::function<void()>& then);
    void confirm(const std::function<void()>& then);
    void put_manifest(const std::function<void()>& then);

    // ---- Pin: reads what was pinned after a while: all of it has to be there.
    void pin();
    void end_pin(Operation::Outcome is);
    void drive_pin();
    void pin_stripes();
    void pin_key();
    void check_pins();
};

}  // namespace moonpool::sim
