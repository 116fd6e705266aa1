// Threads: the loop "mp-master" owns master_, links_, members_, clients_, and noted_. The
// Listener's threads authenticate a connection and then post it to the loop (adopt). Any other thread sees
// the master through call_on_loop(), which waits at most two seconds; the results are held by shared
// pointers, because the function may run after its caller has given up.
#include "directory/master_server.hpp"

#include <sys/epoll.h>

#include <chrono>

#include "directory/master_link.hpp"
#include "directory/range_handshake.hpp"
#include "wire/connection_places.hpp"

namespace moonpool {

namespace {

constexpr uint32_t kTickMs = 50, kCallMs = 2000;
constexpr std::chrono::milliseconds kSweep{5};  // of a tick, for rows of incarnations that ended

uint64_t unix_ms() {
    auto now = std::chrono::system_clock::now().time_since_epoch();
    return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::milliseconds>(now).count());
}

MasterPairOptions with_role(const MasterServerOptions& options) {
    MasterPairOptions pair = options.pair;
    pair.is_standby = options.elected || !options.standby_of.empty();
    return pair;
}

}  // namespace

MasterServer::MasterServer(MasterServerOptions options)
    : options_(std::move(options)),
      incarnation_(random_incarnation()),
      master_(options_.master, now_ms(), first_version(unix_ms()), options_.range),
      pair_(master_, with_role(options_), now_ms()),
      clients_max_(options_.clients_max),
      noted_nodes_max_(options_.master.membership.members_max) {}

MasterServer::~MasterServer() {
    stop();
    if (agent_ != nullptr && agent_->in_child()) (void)agent_.release();
}

Result<std::unique_ptr<MasterServer>> MasterServer::create(MasterServerOptions options) {
    if (options.token.empty()) return Error{Code::kInvalidArgument, "a master needs a cluster token"};
    if (!options.range.is_sound()) {
        return Error{Code::kInvalidArgument, "no master has the range " + options.range.text() +
                                                 "; there are 1 to " + std::to_string(kRangesMax) +
                                                 ", and the first is 0"};
    }
    std::unique_ptr<MasterServer> server(new MasterServer(std::move(options)));
    MasterServerOptions& o = server->options_;
    Result<std::unique_ptr<Listener>> listener = Listener::create(ListenerOptions{
        o.addresses, o.token, server->incarnation_, o.limits, o.tls, server->journal_, o.tenants});
    if (!listener) return listener.error();
    server->listener_ = std::move(*listener);
    EventLoopOptions loop_options;
    loop_options.name = "mp-master";
    loop_options.tick_ms = kTickMs;
    loop_options.on_tick = [raw = server.get()](uint64_t now) { raw->on_tick(now); };
    loop_options.ticks_per_handler = 8;
    loop_options.idle = [] { return false; };
    Result<std::unique_ptr<EventLoop>> loop = EventLoop::create(std::move(loop_options));
    if (!loop) return loop.error();
    server->loop_ = std::move(*loop);
    // The listener hands over only connections that have proved the cluster token, or to "directory" a key of
    // their tenant; the service that they name decides what they may ask.
    constexpr std::pair<std::string_view, Caller> kServices[] = {{kServiceMember, Caller::kNode},
                                                                 {kServiceDirectory, Caller::kClient},
                                                                 {kServiceStandby, Caller::kStandby}};
    for (const auto& [name, kind] : kServices) {
        Service service;
        service.welcome = [raw = server.get(), kind](std::string_view) -> Result<std::vector<std::byte>> {
            const Range& range = raw->options_.range;
            if (!range.is_all()) return range_needed(range);
            if (!raw->pair_.serves(kind)) return raw->not_served();
            std::vector<std::byte> out;
            raw->append_masters(out);
            return out;
        };
        service.instead = [raw = server.get()] { return raw->owner_elsewhere(); };
        service.serve = [raw = server.get(), kind](AuthenticatedConnection caller) {
            // std::function has to be copyable, and a connection is not.
            auto shared = std::make_shared<AuthenticatedConnection>(std::move(caller));
            raw->loop_->post([raw, shared, kind] { raw->adopt(std::move(*shared), kind); });
        };
        auto open_to_tenants = [kind, &service] {
            if (kind != Caller::kClient) return;
            service.welcome_tenant = [welcome = service.welcome](std::string_view tenant, const Access&) {
                return welcome(tenant);
            };
        };
        open_to_tenants();
        server->listener_->offer(std::string(name), service);
        service.welcome = [raw = server.get(), kind](std::string_view) -> Result<std::vector<std::byte>> {
            if (!raw->pair_.serves(kind)) return raw->not_served();
            std::vector<std::byte> out;
            Writer w(out);
            write_range(w, raw->options_.range);
            raw->append_masters(out);
            return out;
        };
        open_to_tenants();
        server->listener_->offer(service_of_ranges(name), service);
    }
    Service state;
    state.welcome = [raw = server.get()](std::string_view) -> Result<std::vector<std::byte>> {
        std::vector<std::byte> out;
        Writer w(out);
        MutexLock lock(raw->state_mutex_);
        raw->state_.write(w);
        return out;
    };
    state.serve = [](const AuthenticatedConnection&) {};
    server->listener_->offer(std::string(kServiceMaster), state);
    server->note_state(now_ms());
    server->make_agent();
    return server;
}

Status MasterServer::start() {
    if (running_) return success();
    if (Status status = loop_->start(); !status) return status;
    running_ = true;
    if (Status status = listener_->start(); !status) return status;
    return agent_ == nullptr ? success() : agent_->start();
}

// The listener first, so that no connection is posted to a loop that has ended. When the loop does not end
// (a child of fork()), its links are left alone.
void MasterServer::stop() {
    if (!running_.exchange(false)) return;
    if (agent_ != nullptr) agent_->stop();
    listener_->stop();
    if (!loop_->stop()) return;
    links_.clear();
    fds_.clear();
}

// Nodes get what there is: without them there is no pool. Clients leave them a part of the open files.
bool MasterServer::has_room(AuthenticatedConnection& caller, bool is_member) {
    constexpr uint64_t kOtherFiles = 64;  // the listener, handshakes, logs, admin pages
    const uint64_t have = links_.size();
    ConnectionPlaces places = connection_places(have, kOtherFiles, nullptr);
    bool full = have >= places.most;
    if (!is_member && !full) {
        uint64_t for_nodes = std::max<uint64_t>(kOtherFiles, places.most / 16);
        full = have + for_nodes >= places.most;
        auto most = [&] {
            places = connection_places(have, kOtherFiles + for_nodes, options_.available_memory);
            return places.most - std::min<uint64_t>(places.most, members_);
        };
        auto answer = full ? SoftLimit::Answer::kFull : clients_max_.admit(clients_, most);
        full = answer == SoftLimit::Answer::kFull;
        if (answer == SoftLimit::Answer::kRaised)
            note_limit("connections of clients", "master.clients_max", clients_max_);
    }
    if (!full) return true;
    metrics_.connections_refused_total.fetch_add(1);
    std::string why = "the master already has " + std::to_string(have) + " connections, " + places.because;
    journal_->note(Level::kWarning, "connections_full", caller.peer, "a connection was refused: " + why);
    send_error(caller.fd.get(), Code::kTooLarge, why, caller.tls.get());
    return false;
}

void MasterServer::note_limit(const char* what, const char* setting, const SoftLimit& limit) {
    journal_->note(Level::kWarning, "limit_raised", "",
                   std::string("there are more ") + what + " than " + setting + " = " +
                       std::to_string(limit.set()) + "; the limit is " + std::to_string(limit.now()) +
                       " now. Set it to what you expect");
}

void MasterServer::adopt(AuthenticatedConnection caller, Caller kind) {
    if (!pair_.serves(kind)) return;  // it has become something else meanwhile
    // The rows may have been replaced since its proof.
    if (!options_.tenants->stands(caller.tenant, caller.access)) return;
    if (kind != Caller::kStandby && !has_room(caller, kind == Caller::kNode)) return;
    metrics_.connections_total.fetch_add(1);
    // The descriptor is the key: it is unique as long as the link that owns it is in the map.
    int key = caller.fd.get();
    auto link = std::make_shared<MasterLink>(*this, std::move(caller), next_link_++, kind, now_ms());
    if (!loop_->add(key, MasterLink::kFirstEvents, link)) return;
    count(kind) += 1;
    links_.emplace(key, link);
    fds_.emplace(link->id(), key);
    // Bytes behind the proof may have come with it, and may be the end of the connection already.
    if (!link->begin()) drop(key);
}

uint32_t& MasterServer::count(Caller kind) {
    return kind == Caller::kNode ? members_ : kind == Caller::kClient ? clients_ : standbys_;
}

// The loop keeps the handler alive until its current event is over, so a link may drop itself.
void MasterServer::drop(int fd) {
    auto it = links_.find(fd);
    if (it == links_.end()) return;
    metrics_.connections_dropped_total.fetch_add(1);
    --count(it->second->kind());
    holding_.erase(fd);
    loop_->remove(fd);
    fds_.erase(it->second->id());
    links_.erase(it);
    if (fd == standby_fd_) lose_standby("its connection broke");
}

void MasterServer::close_link(LinkId link) {
    auto it = fds_.find(link);
    if (it != fds_.end()) drop(it->second);
}

// Every 50 ms. Time passes for the members; what changed goes to the log; then up to 5 ms of sweeping, so
// that the end of a large node delays no request for longer.
void MasterServer::on_tick(uint64_t now) {
    master_.tick(now);
    tick_pair(now);
    end_withdrawn();
    note_members(now);
    note_state(now);
    auto end = std::chrono::steady_clock::now() + kSweep;
    while (master_.sweep() && std::chrono::steady_clock::now() < end) {
    }
}

// Links of clients whose tenant's key is no longer among the rows.
void MasterServer::end_withdrawn() {
    const uint64_t version = options_.tenants->version();
    if (std::exchange(tenants_seen_, version) == version) return;
    std::vector<std::shared_ptr<MasterLink>> all;
    for (auto& [fd, link] : links_) all.push_back(link);
    for (const std::shared_ptr<MasterLink>& link : all) {
        if (options_.tenants->stands(link->tenant(), link->access())) continue;
        Error why = key_withdrawn(link->tenant());
        journal_->note(Level::kWarning, "auth_refused", link->peer(), why.text);
        (void)link->fail(why.code, why.text);
        drop(link->fd());
    }
}

void MasterServer::note_state(uint64_t now) {
    Standby other = standby_now(now);
    MasterState state{.role = pair_.role(),
                      .attached = other.attached,
                      .is_whole = other.is_whole,
                      .nodes = static_cast<uint32_t>(master_.membership().size()),
                      .lag_ms = other.lag_ms,
                      .rows = master_.directory().counters().rows,
                      .first = master_.first(),
                      .newest = master_.newest(),
                      .other = std::move(other.name),
                      .range = options_.range,
                      .masters = masters_now()};
    tell_masters(state.masters);
    MutexLock lock(state_mutex_);
    state_ = std::move(state);
}

// On the listener's thread.
void MasterServer::append_masters(std::vector<std::byte>& welcome) {
    MutexLock lock(state_mutex_);
    state_.masters.write(Writer(welcome));
}

// When it has changed, and every second, for those that did not read what they were told.
void MasterServer::tell_masters(const MasterList& list) {
    constexpr uint64_t kAgainMs = 1000;
    if (list == told_masters_ && ticked_ms_ - told_masters_ms_ < kAgainMs) return;
    told_masters_ = list;
    told_masters_ms_ = ticked_ms_;
    std::vector<std::shared_ptr<MasterLink>> all;
    for (const auto& [fd, link] : links_) all.push_back(link);
    for (const auto& link : all) {
        if (links_.contains(link->fd()) && !link->tell_masters(list)) drop(link->fd());
    }
}

// Which members came, fell silent, were heard again or went, since the last look.
void MasterServer::note_members(uint64_t now) {
    const Membership& membership = master_.membership();
    if (membership.epoch() == noted_epoch_) return;
    Membership::Changes changes = membership.changes(noted_epoch_).value_or(Membership::Changes{});
    if (changes.ended.empty() && changes.turned.empty() && changes.moved.empty()) {
        // More ended since than are remembered: all are looked at.
        for (const auto& [id, who] : noted_) changes.ended.push_back(id);
        for (const Member& member : membership.current(now).rows) changes.moved.push_back(member.id);
    }
    noted_epoch_ = membership.epoch();
    if (std::exchange(noted_nodes_max_, membership.limit().now()) != membership.limit().now())
        note_limit("nodes", "master.nodes_max", membership.limit());
    auto say = [&](Level level, const char* kind, const Noted& who, const std::string& what) {
        journal_->note(level, kind, who.address, "node " + who.name + " " + what);
    };
    // A node that has said that it leaves was taken out by note_left().
    for (NodeId id : changes.ended) {
        auto it = noted_.find(id);
        if (it == noted_.end()) continue;
        bool is_back = membership.state(id) != MemberState::kGone &&
                       membership.identity(id).incarnation == it->second.incarnation;
        if (is_back) continue;
        say(Level::kWarning, "member_gone", it->second,
            "is gone; what it held is no longer in the directory");
        noted_.erase(it);
    }
    changes.moved.insert(changes.moved.end(), changes.turned.begin(), changes.turned.end());
    for (NodeId id : changes.moved) {
        const NodeIdentity& identity = membership.identity(id);
        Noted who{membership.state(id), identity.incarnation, identity.name + " on host " + identity.host_id,
                  identity.address};
        auto before = noted_.find(id);
        bool is_new = before == noted_.end();
        bool suspect = who.state == MemberState::kSuspect;
        bool was_suspect = !is_new && before->second.state == MemberState::kSuspect;
        if (is_new) say(Level::kInfo, "member_joined", who, "has joined, as number " + std::to_string(id));
        if (suspect && !was_suspect) {
            say(Level::kWarning, "member_suspect", who, "is suspect: its connection broke, or it is silent");
        }
        if (!suspect && was_suspect) say(Level::kInfo, "member_back", who, "is heard again");
        noted_.insert_or_assign(id, std::move(who));
    }
}

// A member that is not noted yet has come and gone between two looks.
void MasterServer::note_left(NodeId id) {
    auto it = noted_.find(id);
    if (it == noted_.end()) return;
    journal_->note(Level::kInfo, "member_left", it->second.address,
                   "node " + it->second.name + " has left; what it held is no longer in the directory");
    noted_.erase(it);
}

bool MasterServer::is_alive(uint32_t timeout_ms) {
    auto deadline = LivenessProbe::Clock::now() + std::chrono::milliseconds(timeout_ms);
    return running_ && loop_->is_alive(deadline) && listener_->is_alive(deadline);
}

bool MasterServer::call_on_loop(std::function<void()> f) {
    return running_ && loop_->call(std::move(f), kCallMs);
}

bool MasterServer::check_integrity() {
    auto sound = std::make_shared<bool>(false);
    return call_on_loop([this, sound] { *sound = master_.check_integrity(); }) && *sound;
}

MasterServer::Nodes MasterServer::nodes() {
    auto nodes = std::make_shared<Nodes>();
    auto list = [this, nodes] {
        uint64_t now = now_ms();
        const Membership& membership = master_.membership();
        Members members = membership.current(now);
        nodes->epoch = members.epoch;
        for (Member& member : members.rows) {
            NodeRow row;
            row.dram_keys = master_.directory().rows(member.id, Tier::kDram);
            row.ssd_keys = master_.directory().rows(member.id, Tier::kSsd);
            row.member = std::move(member);
            nodes->rows.push_back(std::move(row));
        }
        // The last that went first; the remembered ones have no number, for it may be another's by now.
        for (auto past = membership.past().rbegin(); past != membership.past().rend(); ++past) {
            NodeRow row;
            row.member = Member{kNoNode, MemberState::kGone, past->identity, {}, now - past->heard_ms};
            nodes->rows.push_back(std::move(row));
        }
    };
    return call_on_loop(list) ? std::move(*nodes) : Nodes{};
}

std::vector<std::pair<std::string, uint64_t>> MasterServer::snapshot() {
    auto rows = std::make_shared<std::vector<std::pair<std::string, uint64_t>>>();
    bool ran = call_on_loop([this, rows] { *rows = gauges(); });
    return ran ? std::move(*rows) : std::vector<std::pair<std::string, uint64_t>>{};
}

// Names are those of the metrics without their prefix; users' dashboards depend on them.
std::vector<std::pair<std::string, uint64_t>> MasterServer::gauges() const {
    const MasterCounters& c = master_.counters();
    const Membership& membership = master_.membership();
    const ListenerCounters& d = listener_->counters();
    const MasterServerMetrics& m = metrics_;
    DirectoryCounters directory = master_.directory().counters();
    uint64_t suspects = membership.suspects();
    return {
        {"range_index", options_.range.index},
        {"range_count", options_.range.count},
        {"nodes_alive", membership.size() - suspects},
        {"nodes_suspect", suspects},
        {"nodes_max", membership.limit().now()},
        {"members_epoch", membership.epoch()},
        {"suspicions_total", c.suspicions_total},
        {"nodes_gone_total", c.nodes_gone_total},
        {"nodes_left_total", c.nodes_left_total},
        {"joins_total", c.joins_total},
        {"joins_refused_total", c.joins_refused_total},
        {"beats_total", c.beats_total},
        {"nodes_beat_ms", master_.beat_ms(options_.beat_ms)},
        {"nodes_batch_ms", master_.batch_ms()},
        {"inventories_total", c.inventories_total},
        {"directory_rows", directory.rows},
        {"directory_rows_void", directory.void_rows},
        {"directory_rows_max", options_.master.rows_max},
        {"directory_rows_refused_total", directory.refused_total},
        {"directory_bytes", directory.table_bytes},
        {"rows_added_total", c.rows_added_total},
        {"rows_removed_total", c.rows_removed_total},
        {"rows_void_total", c.rows_void_total},
        {"locate_keys_total", c.locate_keys_total},
        {"locate_hits_total", c.locate_hits_total},
        {"places_total", c.places_total},
        {"places_short_total", c.places_short_total},
        {"forgets_total", c.forgets_total},
        {"removals", master_.removals()},
        {"removals_max", options_.master.removals_max},
        {"orders_expired_total", c.orders_expired_total},
        {"drops_total", c.drops_total},
        {"drop_alls_total", c.drop_alls_total},
        {"log_left_out_total", journal_->left_out_total()},
        {"is_owner", pair_.role() == MasterRole::kOwner},
        {"is_following", pair_.role() == MasterRole::kStandby && pair_.is_whole()},
        {"standby_attached", standby_fd_ >= 0},
        {"standby_is_whole", master_.mirror().whole()},
        {"standby_lag_ms", pair_.lag_ms(now_ms())},
        {"standbys_lost_total", m.standbys_lost_total},
        {"takeovers_total", m.takeovers_total},
        {"connections_nodes", members_},
        {"connections_clients", clients_},
        {"connections_clients_max", clients_max_.now()},
        {"limits_raised_total", membership.limit().raised_total() + clients_max_.raised_total()},
        {"connections_total", m.connections_total},
        // Refusals and errors before and after the hand-over from the listener are one number for the
        // reader.
        {"connections_refused_total", m.connections_refused_total + d.refused_total},
        {"connections_dropped_total", m.connections_dropped_total},
        {"auth_failures_total", d.auth_failures_total},
        {"handshake_timeouts_total", d.handshake_timeouts_total},
        {"protocol_errors_total", m.protocol_errors_total + d.protocol_errors_total},
    };
}

}  // namespace moonpool
