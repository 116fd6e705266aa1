// Threads. "mp-node" is the loop: it owns pools_, connections_, ssd_, events_ and all counters without an
// atomic. "mp-memory" (reserve_memory) asks the kernel for the arena's memory while the node serves
// already; it posts to the loop what it has got. The listener's threads and the SSD logs' threads post,
// too. NodeMember has a thread of its own and waits for the loop; the loop never waits for it.
//
// Order of the end (stop): member, listener, what is unsaved goes to the SSD, memory thread, loop,
// connections, logs. Each of them posts to those that come later in that list.
//
// This file starts and stops the parts; server_connections.cpp accepts and ends connections. What a frame
// means is Connection's matter, what is kept and evicted that of Pool and ObjectTable.
#include "store/node/server.hpp"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <future>

#include "directory/ranges.hpp"
#include "memory/available.hpp"
#include "memory/room.hpp"
#include "store/node/connection.hpp"

namespace moonpool {

namespace {

// The loop polls for 50 us after an event, since the next frame of a client often follows at once. kCallMs:
// how long other threads wait for an answer of the loop.
constexpr uint32_t kTickMs = 100, kSpinUs = 50, kCallMs = 2000;
constexpr uint32_t kEventSlotsPerPiece = 1024;  // others wait meanwhile, about 0.5 ms

// Open files are one supply for both kinds of connections: what the own host's may need is kept.
size_t remote_places(const Limits& limits, uint64_t other_files) {
    rlimit files{};
    if (::getrlimit(RLIMIT_NOFILE, &files) != 0) return limits.remote_connections;
    uint64_t kept = uint64_t{limits.connections} + 2 * limits.connections_unproved + other_files;
    uint64_t left = files.rlim_cur - std::min<uint64_t>(files.rlim_cur, kept);
    // Too few files for either: half of them.
    left = std::max<uint64_t>(left, files.rlim_cur / 2);
    return static_cast<size_t>(std::min<uint64_t>(left, limits.remote_connections));
}

Result<Fd> listen_on(const std::string& path) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    if (path.size() >= sizeof(address.sun_path)) {
        return Error{Code::kInvalidArgument, "the socket path " + path + " is longer than the " +
                                                 std::to_string(sizeof(address.sun_path) - 1) +
                                                 " bytes a Unix socket allows; choose a shorter one"};
    }
    std::memcpy(address.sun_path, path.data(), path.size());
    Fd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (!fd.valid()) return os_error("socket");
    // The socket file is for this user alone from its first moment on; a chmod afterwards would come too
    // late. The umask is the process's: other threads that create files in these microseconds get the
    // narrower mode, too.
    mode_t old_mask = ::umask(0177);
    int bound = ::bind(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address));
    ::umask(old_mask);
    if (bound != 0) return os_error("listening on " + path);
    if (::listen(fd.get(), 128) != 0) return os_error("listening on " + path);
    return fd;
}

}  // namespace

Server::Server(ServerOptions options)
    : options_(std::move(options)),
      incarnation_(options_.predecessor == nullptr ? random_incarnation()
                                                   : options_.predecessor->node.incarnation),
      removals_(std::max<uint32_t>(1, static_cast<uint32_t>(split_ranges(options_.cluster.master).size()))),
      connections_max_(options_.limits.connections),
      adopts_(options_.predecessor != nullptr) {}

Result<std::unique_ptr<Server>> Server::create(ServerOptions options) {
    if (options.token.empty()) return Error{Code::kInvalidArgument, "a node needs a cluster token"};
    size_t ranges = split_ranges(options.cluster.master).size();
    if (ranges == 0 && !options.cluster.master.empty()) {
        return Error{Code::kInvalidArgument,
                     "cluster.master = " + options.cluster.master + " names no master"};
    }
    if (ranges > kRangesMax) {
        return Error{Code::kInvalidArgument, "cluster.master has " + std::to_string(ranges) +
                                                 " ranges of masters; there are at most " +
                                                 std::to_string(kRangesMax)};
    }
    if (options.pools.empty()) return Error{Code::kInvalidArgument, "a node needs at least one tenant"};
    uint64_t arenas_bytes = 0;
    for (const PoolOptions& pool : options.pools) arenas_bytes += pool.arena_bytes;
    // What the running node has reserved is there.
    if (options.predecessor != nullptr) {
        for (const HandedPool& pool : options.predecessor->node.pools)
            arenas_bytes -= std::min(arenas_bytes, pool.committed_bytes);
    }
    // Before anything is reserved: a size that the host cannot have is said with the option that gave it.
    Status fits =
        check_room(arenas_bytes, options.pools.size() == 1 ? options.size_option : "", options.memory_root);
    if (!fits) return fits.error();
    if (Status status = MemoryShares::check(options.pools, options.tenant_limits); !status)
        return status.error();
    std::unique_ptr<Server> server(new Server(std::move(options)));
    server->options_.cluster.journal = server->journal_;
    if (Status status = server->make_loop(); !status) return status.error();
    if (Status status = server->make_pools(); !status) return status.error();
    ServerOptions& o = server->options_;
    o.ssd.ranges = server->removals_.ranges();
    if (!o.ssd.directories.empty()) {
        Server* raw = server.get();
        Result<std::unique_ptr<SsdTier>> ssd =
            SsdTier::open(o.ssd, server->pools_, [raw](std::function<void()> f) { raw->post(std::move(f)); });
        if (!ssd) return ssd.error();
        server->ssd_ = std::move(*ssd);
        const std::string& note = server->ssd_->note_of_start();
        if (!note.empty()) server->journal_->note(Level::kWarning, "ssd_was_away", "", note);
    }
    if (o.events) {
        server->events_ = std::make_unique<BlockEvents>();
        // What is on a disk only has no name in memory, so such a node keeps account from its first object
        // on.
        if (server->ssd_ != nullptr) {
            server->listen_for_blocks();
            server->events_begun_ = true;
            for (auto& [tenant, pool] : server->pools_) {  // of a predecessor
                uint32_t slot = 0;
                do slot = server->enter_blocks(*pool, slot);
                while (slot != 0);
            }
        }
    }
    if (o.listen.empty()) return server;
    // Bound here, so that a port in use is said before any memory is reserved.
    ListenerOptions door{o.listen,         o.token,   server->incarnation_,         o.limits,  o.data_tls,
                         server->journal_, o.tenants, server->handed_tcp_sockets(), o.versions};
    Result<std::unique_ptr<Listener>> listener = Listener::create(std::move(door));
    if (!listener) return listener.error();
    server->listener_ = std::move(*listener);
    const std::string& real = server->listener_->addresses().front();
    std::string& advertised = o.cluster.address;
    if (advertised.empty()) {
        advertised = real;
        // A port of 0 asks the system for a free one; what is advertised gets the number that it gave.
    } else if (advertised.ends_with(":0")) {
        advertised.replace(advertised.size() - 1, 1, real, real.rfind(':') + 1);
    }
    return server;
}

Status Server::make_pools() {
    if (options_.predecessor != nullptr) {
        if (Status status = check_predecessor(); !status) return status;
    }
    for (PoolOptions pool_options : options_.pools) {
        // One setting for all tenants.
        pool_options.object_share = options_.limits.object_share;
        const TenantLimits limits = options_.tenant_limits[pool_options.tenant];
        const uint64_t configured_bytes = pool_options.arena_bytes;
        bool moves = MemoryShares::limits_memory(limits);
        if (const HandedPool* made = handed_pool(pool_options.tenant); made != nullptr) {
            moves = MemoryShares::apply_to(*made, pool_options, limits);
        } else {
            MemoryShares::apply(pool_options, limits);
        }
        Result<std::unique_ptr<Pool>> pool = options_.predecessor == nullptr
                                                 ? Pool::create(pool_options, incarnation_)
                                                 : adopt_pool(pool_options);
        if (!pool) return pool.error();
        auto [made, is_new] = pools_.emplace(pool_options.tenant, std::move(*pool));
        if (!is_new) return Error{Code::kInvalidArgument, "two tenants are named " + pool_options.tenant};
        made->second->set_limits(limits);
        if (moves) shares_.add(*made->second, configured_bytes, limits);
    }
    return success();
}

Status Server::make_loop() {
    EventLoopOptions options;
    options.name = "mp-node";
    options.tick_ms = kTickMs;
    options.on_tick = [this](uint64_t now) { on_tick(now); };
    options.idle = [] { return false; };
    options.spin_us = kSpinUs;
    Result<std::unique_ptr<EventLoop>> loop = EventLoop::create(std::move(options));
    if (!loop) return loop.error();
    loop_ = std::move(*loop);
    return success();
}

// The callbacks run on the loop, within the change of the table or the tier that they report, so that the
// order of events is that of the changes.
void Server::listen_for_blocks() {
    for (auto& [tenant, pool] : pools_) {
        pool->table().set_listener(
            [events = events_.get(), of = pool.get()](uint32_t space, const Hash128& hash,
                                                      std::string_view name, bool added) {
                if (added) {
                    events->stored(of->identity(space), hash, name);
                } else {
                    events->removed(hash, Tier::kDram);
                }
            });
    }
    if (ssd_ == nullptr) return;
    ssd_->set_listener([events = events_.get()](const Hash128& hash, bool added) {
        if (added) {
            events->on_disk(hash);
        } else {
            events->removed(hash, Tier::kSsd);
        }
    });
}

// First the listeners, then what is there, piece by piece: an object that comes meanwhile may be entered
// twice, which changes nothing, and one that goes is no longer there when its piece is due.
bool Server::begin_events() {
    if (events_ == nullptr || events_begun_) return true;
    if (!call_on_loop([this] { listen_for_blocks(); })) return false;
    for (auto& [tenant, pool] : pools_) {
        auto slot = std::make_shared<uint32_t>(0);
        do {
            bool ran = call_on_loop([this, of = pool.get(), slot] { *slot = enter_blocks(*of, *slot); });
            if (!ran) return false;
        } while (*slot != 0);
    }
    events_begun_ = true;
    return true;
}

// A piece from this slot on; returns the next piece's first slot, 0 behind the last one.
uint32_t Server::enter_blocks(const Pool& pool, uint32_t slot) {
    const ObjectTable& table = pool.table();
    const uint32_t end = std::min(table.slots_used(), slot + kEventSlotsPerPiece);
    for (; slot < end; ++slot) {
        if (!table.committed(slot)) continue;
        const IndexEntry& entry = table.entry(slot);
        Hash128 hash{entry.hash_low, entry.hash_high};
        events_->stored(pool.identity(entry.space), hash, table.name(slot));
    }
    return slot < table.slots_used() ? slot : 0;
}

std::vector<std::string> Server::addresses() const {
    return listener_ == nullptr ? std::vector<std::string>() : listener_->addresses();
}

// What a client must know of the node and of its tenant's pool; later versions append.
void Server::write_welcome(Writer& w, Pool& pool, const Access& access) const {
    // The sizes of the two mappings come first: a client of this host maps them by the descriptors that
    // travel with this frame.
    w.number(pool.arena_bytes());
    w.number(pool.table().index().bytes());
    w.number(pool.slab_bytes());
    w.number(pool.object_bytes_max());
    w.number(options_.limits.key_bytes);
    w.number(options_.limits.parts);
    w.number(options_.limits.frame_bytes);
    w.number(options_.limits.frame_keys);
    w.text16(options_.cluster.name);
    w.text16(options_.cluster.host_id);
    w.text16(options_.cluster.address);
    w.text16(member_ != nullptr ? member_->masters() : options_.cluster.master);
    w.number(kFeatures | (may_relay() ? kFeatureRelay : 0) | (access.may_write() ? 0 : kFeatureReadOnly) |
             (access.is_cluster ? 0 : kFeatureTenantKey));
    w.number(options_.cluster.clients_timeout_ms);
    w.text16(pool.salt());
}

// The Unix socket: a new one, or that of the process before, which clients are connected to already.
Status Server::listen_locally() {
    if (options_.socket_path.empty()) return success();
    Result<Fd> socket = adopts_ ? adopt_local_socket() : listen_on(options_.socket_path);
    if (!socket) return socket.error();
    local_ = std::make_shared<LocalListener>(*this, std::move(*socket));
    if (!adopts_ && !loop_->add(local_->fd.get(), EPOLLIN, local_)) return os_error("epoll");
    return success();
}

Server::~Server() {
    stop();
    if (ssd_ != nullptr) ssd_->close();  // its threads post here
}

Status Server::prepare() {
    if (prepared_) return success();
    // A descriptor in reserve, for accept_all().
    spare_.reset(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    remote_connections_max_ = remote_places(options_.limits, kOtherFiles);
    // The first piece of every arena before the first client, the rest while it serves.
    constexpr uint64_t kFirstBytes = 256ull << 20;
    for (auto& [tenant, pool] : pools_) {
        // All of it may be reserved already, by the process before.
        Result<uint64_t> bytes = pool->commit_memory(kFirstBytes);
        if (!bytes) return bytes.error();
        pool->open_memory();
        // Other processes take memory, too, while this one reserves its own. It may go somewhat below what is
        // kept free at the start: its own index and the rest of this process come out of that.
        pool->guard_commits([this](uint64_t bytes) {
            std::optional<AvailableMemory> memory = available_memory(options_.memory_root);
            return !memory || bytes + kept_free(*memory) / 2 <= memory->available_bytes;
        });
    }
    if (Status status = listen_locally(); !status) return status;
    if (options_.predecessor != nullptr) removals_.adopt(options_.predecessor->node.ranges);
    // Made before the loop starts, since it registers with the pools' tables; its thread starts last, when
    // there is something to tell.
    if (!options_.cluster.master.empty()) {
        for (auto& [tenant, pool] : pools_) pool->table().publish_ranges(removals_.ranges());
        for (uint32_t range = 0; options_.predecessor != nullptr && range < removals_.ranges(); ++range) {
            for (auto& [tenant, pool] : pools_)
                pool->table().publish_applied(range, removals_.applied(range));
        }
        removals_.set_on_applied([this](uint32_t range, Version version) {
            for (auto& [tenant, pool] : pools_) pool->table().publish_applied(range, version);
        });
        removals_.set_on_confirmed([this](uint32_t range, Version version) {
            if (ssd_ != nullptr) ssd_->set_applied(range, version);
        });
        // Of a predecessor's memory and of its directories the same is known.
        for (uint32_t range = 0; ssd_ != nullptr && range < removals_.ranges(); ++range)
            removals_.begin_at(range, ssd_->applied(range));
        if (!adopts_) make_member();
    }
    if (may_relay()) {
        const ClusterOptions& cluster = options_.cluster;
        RelayOptions to{cluster.master, options_.token, cluster.interface, cluster.tls,
                        static_cast<int>(cluster.clients_timeout_ms)};
        to.frames = options_.limits;
        to.tenants = options_.tenants;
        Result<std::unique_ptr<Relay>> relay = Relay::create(std::move(to));
        if (!relay) return relay.error();
        relay_ = std::move(*relay);
        if (Status status = relay_->start(); !status) return status;
    }
    // The table has no clock: a soft pin of a put that comes before the first tick needs the time.
    for (auto& [tenant, pool] : pools_) pool->table().on_time(now_ms());
    look_whether_to_relay();
    adopt_connections();
    serves_ = !adopts_;
    if (Status status = loop_->start(); !status) return status;
    stopping_ = false;
    prepared_ = true;
    Status reserving = reserve_thread_.start("mp-memory", [this] { reserve_memory(); });
    if (!reserving) return reserving;
    return open_door();
}

// Of one that adopts only in start(): the addresses of its KV events are known late.
void Server::make_member() {
    member_ = std::make_unique<NodeMember>(
        options_.cluster, options_.token, options_.socket_path, incarnation_, pools_, ssd_.get(), removals_,
        [this](const std::function<void()>& f) { return run_for_member(f); },
        [this] { return giving_ == Giving::kNow; });
}

Status Server::start() {
    if (running_) return success();
    if (Status status = prepare(); !status) {
        end_prepared();
        return status;
    }
    if (adopts_ && !options_.cluster.master.empty()) make_member();
    started_ = true;
    running_ = true;
    if (adopts_) {
        post([this] {
            serves_ = true;
            open_adopted();
        });
        if (listener_ != nullptr) listener_->resume();
    }
    return member_ == nullptr ? success() : member_->start();
}

// What prepare() has begun, where start() does not follow.
void Server::end_prepared() {
    // After start() the first stop() ends it, also while another one waits, or in a child of fork().
    if (started_ || !prepared_.exchange(false)) return;
    if (listener_ != nullptr) listener_->stop();
    if (relay_ != nullptr) relay_->stop();
    stopping_ = true;
    (void)reserve_thread_.join();
    (void)loop_->stop();
    connections_.clear();
    local_.reset();
    // The socket's file is the process's that serves.
    if (!adopts_ && !options_.socket_path.empty()) ::unlink(options_.socket_path.c_str());
}

Status Server::open_door() {
    if (listener_ == nullptr) return success();
    auto welcome = [this](std::string_view tenant, const Access& access) -> Result<std::vector<std::byte>> {
        auto it = pools_.find(tenant);
        if (it == pools_.end()) {
            // On the listener's thread: pools_ does not change after create(), and write_welcome() reads
            // constants only.
            return Error{Code::kAuth, "this node has no such tenant"};
        }
        std::vector<std::byte> body;
        Writer w(body);
        write_welcome(w, *it->second, access);
        return body;
    };
    auto serve = [this](AuthenticatedConnection caller) {
        auto held = std::make_shared<AuthenticatedConnection>(std::move(caller));
        post([this, held] { adopt_remote(std::move(*held)); });
    };
    auto to_cluster = [welcome](std::string_view tenant) { return welcome(tenant, Access{}); };
    listener_->offer(std::string(kServiceStore), Service{to_cluster, serve, welcome});
    return listener_->start(adopts_);
}

// On "mp-memory". Touching the pages of a large arena takes the kernel seconds; piece by piece, each is
// opened for objects as soon as it is there. Where memory runs out the arena stays smaller, and the node
// serves with it.
void Server::reserve_memory() {
    for (auto& [tenant, pool] : pools_) {
        while (!stopping_) {
            Result<uint64_t> bytes = pool->commit_memory();
            if (!bytes) {
                memory_error_ = 1;
                journal_->note(Level::kError, "memory_short", "",
                               "the arena of tenant " + pool->tenant() + " stays at a part of its " +
                                   size_text(pool->start_bytes()) + ": " + bytes.error().text);
                post([p = pool.get()] { p->memory_is_short(); });
                break;
            }
            if (*bytes == 0) break;
            post([p = pool.get()] { p->open_memory(); });
        }
    }
    Memory m = memory();
    if (m.reserved_bytes == m.bytes) {
        journal_->note(Level::kInfo, "memory_ready", "",
                       "all " + size_text(m.bytes) + " of memory are reserved");
    }
    for (auto& [tenant, pool] : pools_) {
        // Afterwards small pages are merged to huge ones, which shortens copies; it is optional and comes
        // last.
        while (!stopping_ && pool->collapse_memory() != 0) {
        }
    }
}

Server::Memory Server::memory() const {
    Memory m{0, 0, memory_error_ != 0};
    for (const auto& [tenant, pool] : pools_) {
        m.reserved_bytes += pool->committed_bytes();
        m.bytes += pool->start_bytes();
    }
    return m;
}

bool Server::is_alive(uint32_t timeout_ms) {
    auto deadline = LivenessProbe::Clock::now() + std::chrono::milliseconds(timeout_ms);
    if (!running_ || !loop_->is_alive(deadline)) return false;
    return listener_ == nullptr || listener_->is_alive(deadline);
}

void Server::stop() {
    if (!running_.exchange(false)) return end_prepared();
    // A child of fork(): threads, sockets and files are the parent's. Only handles are given up.
    if (reserve_thread_.in_child()) {
        (void)loop_->stop();
        (void)reserve_thread_.join();
        return;
    }
    if (member_ != nullptr) member_->stop();
    if (listener_ != nullptr) listener_->stop();
    if (relay_ != nullptr) relay_->stop();
    save_all();
    // Only now: while objects are saved the loop still runs, and reserving goes on harmlessly.
    stopping_ = true;
    (void)reserve_thread_.join();
    (void)loop_->stop();
    connections_.clear();
    local_.reset();  // callers that wait to be accepted learn of the end
    prepared_ = false;
    if (ssd_ != nullptr) ssd_->close();
    if (!options_.socket_path.empty()) ::unlink(options_.socket_path.c_str());
}

// What is in memory only goes to the SSD, as far as the time allows.
void Server::save_all() {
    if (ssd_ == nullptr) return;
    auto done = std::make_shared<std::promise<void>>();
    std::future<void> finished = done->get_future();
    post([this, done] { ssd_->flush([done] { done->set_value(); }); });
    // The promise is shared with the loop, because the flush may end after this wait has.
    finished.wait_for(std::chrono::milliseconds(options_.ssd.stop_ms));
}

// On the loop while that runs: the logs are closed while another process takes over.
std::vector<SsdTier::Device> Server::ssd() {
    if (ssd_ == nullptr) return {};
    if (!running_) return ssd_->describe();
    auto devices = std::make_shared<std::vector<SsdTier::Device>>();
    if (!call_on_loop([this, devices] { *devices = ssd_->describe(); })) return {};
    return *devices;
}

// Every 100 ms on the loop. All parts are bounded: soft pins that end, the SSD tier's cleaning, and so many
// bytes of scrubbing as the setting allows in this time.
void Server::on_tick(uint64_t now) {
    if (!serves_) return;
    if (gives_) {  // nothing changes while another process reads what there is
        if (ssd_ != nullptr) ssd_->on_tick(now);
        return;
    }
    shares_.on_tick();
    for (auto& [tenant, pool] : pools_) {
        pool->table().on_time(now);
        pool->publish_free_bytes();
    }
    look_whether_to_relay();
    end_withdrawn();
    if (ssd_ != nullptr) ssd_->on_tick(now);
    if (ssd_ != nullptr && now - ssd_looked_ms_ >= 1000) {
        ssd_looked_ms_ = now;
        note_ssd_trouble();
    }
    uint64_t budget = options_.scrub_bytes_per_s * kTickMs / 1000;
    if (budget == 0) return;
    for (auto& [tenant, pool] : pools_) metrics_.scrub_dropped_total.fetch_add(pool->scrub(budget));
}

// Once it relays it goes on: a pool whose size wavers would have all processes connect anew each time.
void Server::look_whether_to_relay() {
    if (relay_ == nullptr || relays_) return;
    relays_ = options_.cluster.relay == "always" || (member_ != nullptr && member_->state().large_pool);
    if (!relays_) return;
    for (auto& [tenant, pool] : pools_) pool->table().publish_relays();
}

// Once a second, and into the journal only when the sentence has changed.
void Server::note_ssd_trouble() {
    for (const SsdTier::Device& device : ssd_->describe()) {
        std::string& noted = ssd_trouble_[device.directory];
        if (noted == device.trouble) continue;
        noted = device.trouble;
        journal_->note(Level::kError, "ssd_off", device.directory, device.trouble);
    }
}

bool Server::call_on_loop(std::function<void()> f) { return running_ && loop_->call(std::move(f), kCallMs); }

Status Server::set_limits(LimitsByTenant limits) {
    if (!prepared_) return take_limits(limits);
    auto answer = std::make_shared<Status>(success());
    auto given = std::make_shared<LimitsByTenant>(std::move(limits));
    bool ran = loop_->call([this, answer, given] { *answer = take_limits(*given); }, kCallMs);
    if (!ran) return Error{Code::kUnavailable, "the node did not take the tenants' limits in time"};
    return *answer;
}

// What a tenant of this node had no limits of when this process began stays as it is: a card may have pinned
// its memory. To an engine that did, the arena of a process that was taken over is as that of one that died.
Status Server::take_limits(const LimitsByTenant& limits) {
    Result<std::vector<std::string>> later = shares_.set(limits);
    if (!later) return later.error();
    for (auto& [tenant, pool] : pools_) {
        auto it = limits.find(tenant);
        const TenantLimits now = it == limits.end() ? TenantLimits{} : it->second;
        pool->set_limits(now);
        if (MemoryShares::limits_memory(now) && shares_.of(*pool) == nullptr) {
            later->push_back(
                "dram_min and dram_max of tenant " + tenant +
                ", which had neither when this process of the node began, are not in force: its "
                "memory was not made to move, as a card may have pinned it; they come into force "
                "when another process takes over (moonpool node --take-over), or the node starts "
                "anew");
        }
    }
    for (const std::string& sentence : *later) journal_->note(Level::kWarning, "limits_later", "", sentence);
    return success();
}

bool Server::check_integrity() {
    auto sound = std::make_shared<bool>(true);
    if (!prepared_) return false;
    bool ran = loop_->call(
        [this, sound] {
            for (auto& [tenant, pool] : pools_) *sound = *sound && pool->check_integrity();
            if (ssd_ != nullptr) *sound = *sound && ssd_->check_integrity();
            if (events_ != nullptr) *sound = *sound && events_->check_integrity();
        },
        kCallMs);
    return ran && *sound;
}

}  // namespace moonpool
