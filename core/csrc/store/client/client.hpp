// Client: the store as a process uses it, over one node or a whole pool of them.
//
// Everything goes to the process's own node first. What is not there is looked up in the directory of the
// master that this node belongs to, and fetched from the nearest node that has it: one of this host by its
// memory, another over TCP. A node without a master is a pool by itself, and then nothing here costs
// anything.
//
// The directory only hints; the answer comes from the nodes. When the master is away, what is on this host
// and what was found before goes on.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/mutex.hpp"
#include "device/card_copiers.hpp"
#include "directory/pool_directory.hpp"
#include "store/client/holders.hpp"
#include "store/client/location_cache.hpp"
#include "store/client/lost_stripe_steps.hpp"
#include "store/client/node_client.hpp"
#include "store/client/own_arena.hpp"
#include "store/client/peers.hpp"
#include "store/client/recent_copies.hpp"
#include "store/client/standing.hpp"
#include "store/client/stripe_put_steps.hpp"
#include "store/shared/stripes.hpp"

namespace moonpool {

struct PutOptions {
    bool replace = false;
    bool ack = true;
    uint32_t replicas = 1;  // on so many hosts
    int timeout_ms = 0;     // 0: the client's own
    // Where it should rather go, by name or address, the first that takes it; the copies to the next ones.
    // Any that is not to be reached, or has no room, is passed over.
    std::vector<std::string> nodes{};
    bool unique = false;    // no node of the pool has it: kExists is the pool's word, not the own node's
    RangeVersions known{};  // the removals that the call comes after: those known at its begin
    // Of the copies on other nodes: nodes may evict for them; another node of a host that has one may do.
    bool copies_evict = true, copies_on_same_host = true;
    bool copies_ordered = false;  // each only on a node that compares its version with removals
};

// What became of an object of the own node that shall lie on another host, too.
enum class CopyOutcome : uint8_t {
    kCopied = 0,
    kThere = 1,    // another host had it already
    kNowhere = 2,  // no other node took it
    kLater = 3,    // the own node has yet to hear of removals that others know of: ask again
};
struct CopyReport {
    std::vector<CopyOutcome> outcomes;
    std::string why;  // of one that is kNowhere
};

// An object as a whole: its copies, the own node's first. No copy: it is a miss.
struct Copy {
    std::string node, host_id, address;
    Description what;
};
struct ObjectState {
    uint64_t size = 0;  // of a striped object: of the whole; its copies are those of the manifest
    std::vector<Copy> copies;
};

// What a process that is to load pinned objects must know: their holders. Opaque outside of this class.
struct Handover {
    std::string holders;
    std::vector<Descriptor> descriptors;
};

class RemovalSteps;

class Client {
   public:
    explicit Client(ClientOptions options);
    ~Client();

    Status connect() { return own_.connect(); }
    bool connected() { return own_.connected(); }
    // Of the own node's life at the last call; zeros when there was none.
    Incarnation incarnation() {
        std::shared_ptr<Session> session = own_.current();
        return session == nullptr ? Incarnation{} : session->incarnation();
    }
    void close();
    Status check_open() const { return own_.check_open(); }

    // Parts may lie on cards, here and in get() and get_pinned(): their bytes go through pinned memory of the
    // host. What was queued on the card before is not waited for.
    Result<PutReport> put(std::span<const PutItem> items, const PutOptions& options);
    Result<std::vector<int64_t>> get(std::span<const GetItem> items, bool verify);
    // Of what was pinned before: places[i] is where item i stands in it, or kNotPinned.
    Result<std::vector<int64_t>> get_pinned(const Pinned& pinned, std::span<const size_t> places,
                                            std::span<const GetItem> items, bool verify);
    Result<std::vector<ObjectView>> views(const Pinned& pinned, std::span<const size_t> places,
                                          std::span<const std::string_view> names, bool verify);
    Result<Pinned> pin(std::span<const std::string_view> names);
    // Of the own node's objects only: no other node is asked.
    Result<Pinned> pin_own(std::span<const std::string_view> names) { return own_.pin(names); }
    // Objects to read in place; a null owner is a miss.
    Result<std::vector<ObjectView>> views(std::span<const std::string_view> names, bool verify);
    Result<std::vector<Presence>> exists(std::span<const std::string_view> names);
    Result<Prefix> longest_prefix(std::span<const std::string_view> names, uint32_t width, bool pin);
    Result<RemoveReport> remove(std::span<const std::string_view> names);
    // Of one node only, by its name or address; copies elsewhere stay. generations: none, or for each name
    // the one that it is about, as describe() says.
    Result<std::vector<uint8_t>> remove_at(std::span<const std::string_view> names, std::string_view node,
                                           std::span<const uint64_t> generations = {});
    // Every copy that the directory knows of, without a use of it. Fails when a miss is not certain.
    // everywhere: false: no other node is asked about what the own node has.
    Result<std::vector<ObjectState>> describe(std::span<const std::string_view> names, bool everywhere);
    Result<std::vector<ListRow>> list(std::string_view prefix, uint64_t limit);
    Result<std::vector<std::pair<std::string, uint64_t>>> stat() { return own_.stat(); }
    // By which the directory knows them.
    std::vector<Hash128> hashes(std::span<const std::string_view> names) const;

    static Handover hand_over(const Prefix& prefix) { return hand_over(prefix, prefix.incarnation); }
    // own: the incarnation of the node that was asked first.
    static Handover hand_over(const Pinned& pinned, const Incarnation& own);
    // Copies what this process, or another one of this host, pinned and handed over. What this process holds
    // pinned in memory that is mapped here is copied also when its node does not live any more.
    LoadReport load(std::string_view holders, std::span<const Descriptor> descriptors, const PartTable& table,
                    std::span<const uint32_t> indices, std::span<const uint16_t> columns, bool verify);
    // Copies objects of the own node to a node of another host each, unless one has it; where the pool has no
    // other host, to another node. The bytes stay as they are meanwhile. An item's version is that of the
    // last removal of its range that the object has outlived: a later one voids the copy. An item without one
    // is kLater, and is copied nowhere. evict: also where a node evicts for it.
    Result<CopyReport> copy_out(std::span<const PutItem> items, bool evict);
    // The own node's, as it is now: for a card that reads what was handed over where it lies. An error: there
    // is no node, or none of this host.
    Result<std::unique_ptr<OwnArena>> own_arena();
    // Whether the own node lives on as it was when the arena was opened. Connects where there is no
    // connection, and takes a node that does not answer for alive while its process runs.
    bool lives(const OwnArena& arena);
    // Counts them as uses, at the node; lost where there is no connection.
    void note_reads(const OwnArena& arena, std::span<const OwnArena::Read> reads);
    // A descriptor of a hand-over as that life of the own node has it; none: another node has the object.
    static std::optional<Descriptor> of_own(std::string_view holders, Descriptor handed,
                                            const Incarnation& own);

   private:
    // When no node had room for more, the next put need not ask again at once.
    class RoomElsewhere {
       public:
        bool may_ask() const { return std::chrono::steady_clock::now() >= until_.load(); }
        void nowhere() { until_ = std::chrono::steady_clock::now() + std::chrono::milliseconds(250); }

       private:
        std::atomic<std::chrono::steady_clock::time_point> until_{};
    };
    // The way to the other nodes: the directory, and this client's own node in it.
    struct Pool : OwnPlace {
        std::unique_ptr<PoolDirectory> directory;
        RoomElsewhere room;
    };
    using Group = NodeItems;
    // The client of a node, which it keeps alive; the own one outlives it.
    std::shared_ptr<NodeClient> client_of(const Pool& pool, const Member& member) {
        bool own = member.identity.incarnation == pool.own;
        return own ? std::shared_ptr<NodeClient>(std::shared_ptr<void>(), &own_) : node(pool, member);
    }

    // A node that a caller named; null: the own one.
    struct Named {
        std::shared_ptr<NodeClient> node;
        Member member;
    };

    int wait_budget_ms() const { return WaitBudget::of_a_call(options_.timeout_ms); }
    std::shared_ptr<Pool> pool();
    Result<Named> named(std::string_view name_or_address);
    std::vector<Named> preferred(const PutOptions& options);
    std::shared_ptr<NodeClient> node(const Pool& pool, const Member& member) {
        return peers_.node(member, pool.host_id);
    }
    // Runs on each group, on threads of their own when there are several.
    static void each(std::vector<Group>& groups, const std::function<void(Group&)>& run);

    // client_cards.cpp: objects of which parts lie on cards.
    Result<PutReport> put_from_cards(std::span<const PutItem> items, const PutOptions& options);
    // read: of some of the items, from the first of them on, with parts in memory of the host.
    using ReadSome =
        std::function<Result<std::vector<int64_t>>(size_t first, std::span<const GetItem> items)>;
    Result<std::vector<int64_t>> get_to_cards(std::span<const GetItem> items, const ReadSome& read);

    Result<std::vector<ObjectState>> describe_whole(std::span<const std::string_view> names, bool everywhere);
    void describe_elsewhere(Pool& pool, std::span<const std::string_view> names,
                            std::span<const size_t> which, std::vector<ObjectState>& states,
                            std::vector<std::string>& doubt);
    Result<std::vector<int64_t>> get_whole(std::span<const GetItem> items, bool verify);
    // The same verbs, for which a manifest is an object like any other.
    Result<Pinned> pin_whole(std::span<const std::string_view> names, std::string& why);
    Result<std::vector<Presence>> exists_whole(std::span<const std::string_view> names, bool use,
                                               std::vector<size_t>& manifest_sized);
    Result<Prefix> prefix_whole(std::span<const std::string_view> names, uint32_t width, bool pin);
    // client_stripes.cpp: reads objects that lie in pieces on several nodes. What stands under a key:
    Result<std::vector<Standing>> standing(std::span<const std::string_view> names);
    // The same of one key that had an object a moment ago: a replacement may be under way.
    Result<Standing> successor(std::string_view name);
    // Objects that were pinned before: item i of a call is the one at places[i].
    struct UnderPins {
        const Pinned& pinned;
        std::span<const size_t> places;

        const StripedPin* of(size_t i) const;  // null: no stripes are pinned for it
    };
    // pins: null: none were.
    Status fill_striped(std::span<const GetItem> items, bool verify, const UnderPins* pins,
                        std::vector<int64_t>& sizes);
    Status view_striped(std::span<const std::string_view> names, bool verify, const UnderPins* pins,
                        std::vector<ObjectView>& views);
    // Of one object, whose manifest was found: its size when room(size) has its bytes, or kMiss.
    template <class Room>
    Result<int64_t> read_striped(std::string_view name, const Manifest& manifest, bool verify, Room room);
    Result<bool> get_stripes(const Manifest& manifest, std::span<const MemoryRef> parts, bool verify);
    static Result<bool> get_pinned_stripes(const Pinned& pinned, const StripedPin& striped,
                                           std::span<const MemoryRef> parts, bool verify);
    // Appends it when it is no user's bytes, and once though copies of it lay on several nodes.
    void add_genuine(std::string_view name, const RemovedManifest& removed, std::vector<Manifest>& out) const;
    // Of what the own node has under those names; it is asked where its index does not say.
    void own_manifests(std::span<const std::string_view> names, std::vector<RemovedManifest>& manifests);
    // As far as nodes can be reached; what is left is evicted one day, since no client asks for it.
    void remove_stripes(Pool& pool, std::span<const Manifest> manifests);

    // client_stripes_lookup.cpp: whether objects of a manifest's size are there as a whole, and what becomes
    // of those that are not.
    using Incomplete = LostStripeSteps::Incomplete;
    std::vector<Presence> whole(std::span<const std::string_view> names);
    // Pins the stripes of what is striped, too, or makes it a miss.
    void pin_striped(Pinned& pinned, std::span<const std::string_view> names, std::string& why);
    bool pin_stripes(Pinned& pinned, size_t i, std::string_view name, const Manifest& manifest,
                     std::string& why);
    std::optional<Standing> pin_key(Pinned& pinned, size_t i, std::string_view name, const Manifest& before);
    // Of objects that lack a stripe as far as the directory knows (LostStripeSteps).
    std::vector<Presence> settle(std::vector<Incomplete> objects);
    // Frees the stripes of an object whose manifest is at no node.
    void free_orphans(std::string_view name, const Manifest& manifest);
    void drive(Pool& pool, LostStripeSteps& steps);
    void drop_manifests(Pool& pool, std::vector<Group>& nodes, std::span<const Incomplete> objects);

    // client_stripes_put.cpp
    bool too_large_for_one(const PutItem& item);
    Status put_striped(Pool& pool, const PutItem& item, const PutOptions& options, size_t i,
                       PutReport& report);
    void copy_striped(Pool& pool, const PutItem& item, const PutOptions& options, size_t i,
                      PutReport& report);
    Result<PutReport> put_manifest(const PutItem& object, const Manifest& manifest,
                                   const PutOptions& options);
    // Drives SpreadSteps until each stripe is at so many nodes, and until it is known which have stayed
    // there.
    void spread(Pool& pool, SpreadSteps& steps, std::span<const PutItem> stripes, int timeout_ms,
                std::string& refusal);
    void keep_what_is_there(Pool& pool, SpreadSteps& steps, std::span<const PutItem> stripes,
                            std::string& refusal);
    Result<PutReport> put_whole(std::span<const PutItem> items, const PutOptions& options);
    // Keys of one range, where there are several and the put replaces.
    Result<PutReport> put_some(std::span<const PutItem> given, const PutOptions& options, size_t attempt = 1);
    void remove_left_here(std::span<const std::string_view> names, RemovalSteps& removal,
                          std::vector<RemovedManifest>& manifests);
    // manifests: what lies under the keys no longer.
    void end_replacement(Pool& pool, std::span<const PutItem> items, RemovalSteps& removal, PutReport& report,
                         std::vector<RemovedManifest>& manifests);
    void remove_overtaken(Pool& pool, std::span<const std::string_view> names, std::span<const size_t> items,
                          RemovalSteps& removal, std::vector<RemovedManifest>& manifests);
    PutHow how(const PutOptions& options, const PutReport& report, bool is_copy);
    PutHow how(const PutOptions& options, bool ack);
    void find_elsewhere(Pool& pool, std::span<const GetItem> items, bool verify, std::vector<int64_t>& sizes);
    void pin_elsewhere(Pool& pool, std::span<const std::string_view> names, std::span<const size_t> missing,
                       Pinned& pinned, std::string& why);
    // Asks one other node to take `left`; those that it refused stay there. False: it did not answer.
    bool put_at(NodeClient& to, const Member& member, std::span<const PutItem> items,
                const PutOptions& options, std::vector<size_t>& left, PutReport& report);
    void put_elsewhere(Pool& pool, std::span<const PutItem> items, const PutOptions& options,
                       std::span<const size_t> which, PutReport& report, bool evict);
    // wanted: nodes that should rather have the copies.
    void replicate(Pool& pool, std::span<const PutItem> items, const PutOptions& options,
                   std::span<const Named> wanted, PutReport& report);
    void replicate_some(Pool& pool, std::span<const PutItem> items, const PutOptions& options,
                        std::span<const size_t> which, std::span<const Named> wanted, PutReport& report);
    std::vector<size_t> with_equal_bytes(std::span<const PutItem> items, std::span<const size_t> which);
    bool held_by_a_suspect(std::string_view name);
    void tell_removal(Pool& pool, std::span<const std::string_view> names, RemovalSteps& steps,
                      std::vector<RemovedManifest>& manifests);
    void end_removal(Pool& pool, std::span<const std::string_view> names, RemovalSteps& steps);
    Result<std::vector<uint8_t>> tell(Pool& pool, std::span<const std::string_view> names,
                                      RemovalSteps& steps, const Group& group,
                                      std::vector<RemovedManifest>& shown);
    // Of items by their number in `names` and `versions`, which may be empty: all copies go then. `shown` has
    // the same numbers.
    static Result<std::vector<uint8_t>> remove_older(NodeClient& at, std::span<const std::string_view> names,
                                                     std::span<const size_t> items,
                                                     std::span<const Version> versions,
                                                     std::vector<RemovedManifest>& shown);
    std::optional<uint64_t> own_has(std::string_view name);  // its size
    Result<PutReport> put_unique(std::span<const PutItem> items, const PutOptions& options);
    Result<PutReport> put_anew_what_is_lost(std::span<const PutItem> items, const PutOptions& options,
                                            PutReport report);
    static std::vector<std::vector<size_t>> in_chunks(std::span<const PutItem> items,
                                                      std::span<const size_t> which);
    bool own_is_full(uint64_t bytes);

    NodeClient own_;
    Peers peers_;
    LocationCache locations_;
    RecentCopies recent_;
    ClientOptions options_;
    device::CardCopiers cards_;
    Mutex mutex_;
    std::shared_ptr<Pool> pool_ GUARDED_BY(mutex_);
    Incarnation asked_ GUARDED_BY(mutex_){};  // the life of the own node whose master is known
    bool closed_ GUARDED_BY(mutex_) = false;
};

}  // namespace moonpool
