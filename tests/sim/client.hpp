// SimClient: a process that uses the pool. RemovalSteps, SearchSteps and PutSteps, with the real
// LocationCache, RecentCopies and MembersCache, decide what is asked of whom; here are the connections,
// deadlines and frames around them, as Client, DirectoryClient and NodeClient have them. One call at a time
// asks a node; a deadline is that of one wait, without the budget of a whole call.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "directory/member_views.hpp"
#include "directory/members_cache.hpp"
#include "history.hpp"
#include "node.hpp"
#include "store/client/put_steps.hpp"
#include "store/client/removal_steps.hpp"
#include "store/client/search_steps.hpp"
#include "store/shared/messages.hpp"
#include "store/shared/space.hpp"
#include "store/shared/stripes.hpp"

namespace moonpool::sim {

class SimClient final : public Process {
   public:
    // masters: of each range
    SimClient(World& world, Network& network, std::vector<std::vector<SimMaster*>> masters,
              std::vector<SimNode*> nodes, uint32_t host, const Planted& planted);
    ~SimClient() override { let_go_of_removals(); }

    // `done` is called with the operation's outcome, unless the process ends before.
    void run(Operation operation, std::function<void(const Operation&)> done);
    // striped.hpp. So many of a hundred keys have striped objects, always the same keys.
    void set_stripes(uint32_t percent) { stripes_ = percent; }
    // Groups of the stripes of which a node has shown it the manifest that it removed.
    const std::set<std::string>& shown_manifests() const { return shown_manifests_; }
    // Of these some node or master did not answer the removal of a stripe.
    const std::set<std::string>& unfreed_manifests() const { return unfreed_manifests_; }
    bool is_striped(uint32_t key) const { return (key / 2 * 61 + 30) % 100 < stripes_; }
    const std::vector<Finding>& findings() const { return findings_; }
    uint32_t range_of_key(uint32_t key) const;  // whose master it asks

   private:
    using Answer = std::function<void(const Result<Bytes>&)>;
    // A connection and its questions.
    struct Line {
        std::shared_ptr<End> end;
        std::map<uint64_t, Answer> open;  // by request
        bool dialing = false, connected_before = false;
        Incarnation life{};  // of the node that it leads to
        uint64_t attempts = 0;
        Micros retry_at = 0, backoff = 0;
        std::vector<std::function<void(const Status&)>> waiting;  // for the connection
    };
    struct Call {
        Operation operation;
        std::string name;
        std::function<void(const Operation&)> done;
        std::string bytes{};                   // to put, or that were read
        std::vector<RemovedManifest> shown{};  // what nodes removed under the name
        bool is_stored = false;
        bool is_unanswered = false;  // a put that ended with the error of its own node, which did not answer
    };
    using CallRef = std::shared_ptr<Call>;
    struct Search {
        CallRef call;
        std::vector<int64_t> sizes{kMiss};
        std::optional<SearchSteps> steps;
        bool own_answered = false;
    };
    struct Removal {
        CallRef call;
        std::optional<RemovalSteps> steps;
        size_t waits_for = 0;
        std::function<void()> then;  // when it is told, and when it has ended
    };
    using RemovalRef = std::shared_ptr<Removal>;

    struct Put {
        CallRef call;
        std::optional<PutSteps> steps;
        std::optional<PlaceSteps> place;
        RemovalRef removal;            // of what is replaced
        Version version = kNoVersion;  // of the replacement
        Version known = kNoVersion;    // the removals that it comes after
        size_t attempts = 0;
        Operation::Outcome outcome = Operation::kUnknown;
        bool older = false, unanswered = false, own_unanswered = false;
        size_t unique = 0;  // which attempt to put what no node has; 0: it does not ask
        bool held = false;  // as far as the master has heard
        std::vector<RemovedManifest> seen_here{};  // at the own node, after the replacement had its place
    };

    struct Striped;  // operations on striped keys

    void on_start() override;
    void on_end() override;
    void let_go_of_removals();

    // Connections: lines_[0] and on to the master of each range, and behind them to each node.
    uint32_t ranges() const { return static_cast<uint32_t>(masters_.size()); }
    bool is_master(const Line& line) const { return &line < &lines_[ranges()]; }
    Line& node_line(size_t node) { return lines_[ranges() + node]; }
    void connect(Line& line, std::function<void(const Status&)> then);
    void dial(Line& line);
    void dialed(Line& line, std::shared_ptr<End> end);
    void answered(Line& line, const Bytes& frame);
    void lost(Line& line, const Error& why);
    void ask(Line& line, Kind kind, std::function<void(Writer&)> build, Answer answer);
    // A node, and which life of it; none: any.
    struct At {
        size_t node;
        std::optional<Incarnation> life{};
    };
    void ask(const At& at, Kind kind, std::function<void(Writer&)> build, Answer answer);
    At at(const Member& member) const;

    // Questions.
    void ask_members(uint32_t range, std::function<void(const Status&)> then);
    // Of all ranges, one after the other: those that are due, or all.
    void ask_all_members(uint32_t range, bool all, std::function<void(const Status&)> then);
    std::shared_ptr<const Members> list();  // of all ranges; null: none was heard
    void hear_list(uint32_t range);
    Located translated(uint32_t range, const Located& holders);
    void members(std::function<void(const Result<std::shared_ptr<const Members>>&)> then);
    void locate(const std::vector<Hash128>& keys, const LocateOptions& options,
                std::function<void(const Result<LocateAnswer>&)> then);
    // fresh: a list that does not have the own node is asked for anew, once.
    void order(const RemovalSteps& steps, std::function<void(const Result<OrderAnswer>&)> then,
               bool fresh = true);
    void ordered(OrderDone done, std::function<void(const Result<std::vector<Version>>&)> then);
    void ask_place(const PlaceOptions& where, std::function<void(const Result<std::vector<NodeId>>&)> then);
    uint32_t range_of_hash(const Hash128& hash) const;
    void remove_at(const At& node, const CallRef& call, const std::vector<Version>& versions,
                   std::function<void(const Result<std::vector<uint8_t>>&)> then);
    void read_at(const At& node, const ReadAsk& what, std::function<void(const Result<std::string>&)> then);
    // anew: where the node knows of later removals it begins anew, and comes after these.
    void put_at(const At& node, const CallRef& call, Version replaces, Version known, bool anew,
                std::function<void(const Result<PutOutcome>&)> then);

    // Verbs.
    void get(const CallRef& call);
    void get_from_disk(const CallRef& call);
    void get_elsewhere(const CallRef& call, bool own_answered);
    void search(const std::shared_ptr<Search>& search);
    void remove(const CallRef& call);
    RemovalRef begin_removal(const CallRef& call, bool own_too, std::function<void()> then,
                             bool unique = false);
    void end_removal(const RemovalRef& removal, std::function<void()> then);
    void tell_witnesses(const RemovalRef& removal, std::function<void()> then);
    void go_on(const RemovalRef& removal);
    void one_told(const RemovalRef& removal);
    void end(const std::shared_ptr<Put>& put);
    void end_order(const std::shared_ptr<Put>& put);
    void end_overtaken(const std::shared_ptr<Put>& put, Version later);
    Operation::Outcome outcome_of(Call& call, const RemovalSteps& removal);
    Version known(const Hash128& hash) const;
    void hear(uint32_t range, Version newest);
    void put(const CallRef& call);
    // client_unique.cpp
    void put_unique(const CallRef& call, size_t attempt);
    void leave_taken(const std::shared_ptr<Put>& put);
    void end_unique(const std::shared_ptr<Put>& put);
    static std::vector<size_t> note(Put& put, const Result<PutOutcome>& outcome);
    void go_on(const std::shared_ptr<Put>& put);
    void place(const std::shared_ptr<Put>& put);
    void pin(const CallRef& call);
    void run_striped(const CallRef& call);
    void show_own_manifest(const Call& call, std::vector<RemovedManifest>& shown) const;
    void finish(const CallRef& call, Operation::Outcome outcome);

    Network& network_;
    std::vector<std::vector<SimMaster*>> masters_;  // of each range
    std::vector<size_t> next_master_;
    std::vector<SimNode*> nodes_;
    const Planted& planted_;
    uint32_t stripes_ = 0;
    std::set<std::string> shown_manifests_, unfreed_manifests_;
    KeyHasher hash_;
    OwnPlace place_;
    std::vector<Line> lines_;
    std::unique_ptr<LocationCache> locations_;
    std::unique_ptr<RecentCopies> recent_;
    std::vector<std::unique_ptr<MembersCache>> members_;  // of each range
    std::unique_ptr<MemberViews> views_;                  // of several
    uint64_t next_request_ = 1;
    std::vector<Version> newest_;                   // that the master of each range had given
    std::vector<std::weak_ptr<Removal>> removals_;  // that refer to their calls, as these do to them
    std::vector<Finding> findings_;
};

}  // namespace moonpool::sim
