// Threads. "mp-node" is the loop: it owns pools_, connections_, ssd_, events_ and all counters without an
// atomic. "mp-memory" (reserve_memory) asks the kernel for the arena's memory while the node serves
// already; it posts to the loop what it has got. The listener's threads and the SSD logs' threads post,
// too. NodeMember has a thread of its own and waits for the loop; the loop never waits for it.
//
// Order of the end (stop): member, listener, what is unsaved goes to the SSD, memory thread, loop,
// connections, logs. Each of them posts to those that come later in that list.
//
// This file accepts and ends connections and starts and stops the parts. What a frame means is Connection's
// matter, what is kept and evicted that of Pool and ObjectTable.
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
#include "wire/connection_places.hpp"

namespace moonpool {

namespace {

// The loop polls for 50 us after an event, since the next frame of a client often follows at once. kCallMs:
// how long other threads wait for an answer of the loop.
constexpr uint32_t kTickMs = 100, kSpinUs = 50, kCallMs = 2000;
constexpr uint64_t kOtherFiles = 64;            // arenas, logs, disks, the master, admin pages
constexpr uint32_t kEventSlotsPerPiece = 1024;  // others wait meanwhile, about 0.5 ms

// A process that may read our memory must run as our user, or as root.
bool same_user(int fd) {
    ucred peer{};
    socklen_t size = sizeof(peer);
    if (::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) return false;
    return peer.uid == ::geteuid() || peer.uid == 0;
}

// Open files are one supply for both kinds of connections: what the own host's may need is kept.
size_t remote_places(const Limits& limits) {
    rlimit files{};
    if (::getrlimit(RLIMIT_NOFILE, &files) != 0) return limits.remote_connections;
    uint64_t kept = uint64_t{limits.connections} + 2 * limits.connections_unproved + kOtherFiles;
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
    ListenerOptions door{o.listen,         o.token,   server->incarnation_,        o.limits, o.data_tls,
                         server->journal_, o.tenants, server->handed_tcp_sockets()};
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
        MemoryShares::apply(pool_options, limits);
        Result<std::unique_ptr<Pool>> pool = options_.predecessor == nullptr
                                                 ? Pool::create(pool_options, incarnation_)
                                                 : adopt_pool(pool_options);
        if (!pool) return pool.error();
        auto [made, is_new] = pools_.emplace(pool_options.tenant, std::move(*pool));
        if (!is_new) return Error{Code::kInvalidArgument, "two tenants are named " + pool_options.tenant};
        made->second->set_limits(limits);
        if (MemoryShares::limits_memory(limits)) shares_.add(*made->second, configured_bytes, limits);
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
    w.text16(options_.cluster.master);
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
    remote_connections_max_ = remote_places(options_.limits);
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
            if (ssd_ != nullptr) ssd_->set_applied(range, version);
        });
        // Of a predecessor's memory and of its directories the same is known.
        for (uint32_t range = 0; ssd_ != nullptr && range < removals_.ranges(); ++range)
            removals_.set_applied(range, ssd_->applied(range));
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

// For a client in the same process (embedded node): a socket pair takes the place of the Unix socket. The
// client still does the whole handshake.
Result<Fd> Server::dial() {
    int pair[2];
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0) return os_error("socketpair");
    Fd ours(pair[0]), theirs(pair[1]);
    int flags = ::fcntl(ours.get(), F_GETFL);
    ::fcntl(ours.get(), F_SETFL, flags | O_NONBLOCK);
    if (!running_) return Error{Code::kUnavailable, "the embedded node was stopped"};
    auto end = std::make_shared<Fd>(std::move(ours));
    if (!loop_->post([this, end] { adopt(std::move(*end)); })) {
        return Error{Code::kUnavailable, "the embedded node was stopped"};
    }
    return theirs;
}

void Server::accept_all(int listener) {
    for (;;) {
        Fd fd(::accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
        if (!fd.valid()) {
            // A peer that hung up while it waited in the queue says nothing about the next one.
            if (errno == EINTR || errno == ECONNABORTED) continue;
            if (errno == EMFILE || errno == ENFILE) {
                // Out of descriptors: give up the spare one to tell the peer, rather than spin on a readable
                // listener.
                spare_.reset();
                Fd refused(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC));
                if (refused.valid())
                    send_error(refused.get(), Code::kTooLarge, "the node is out of file descriptors");
                metrics_.connections_refused_total.fetch_add(1);
                refused.reset();
                spare_.reset(::open("/dev/null", O_RDONLY | O_CLOEXEC));
            }
            return;
        }
        if (!same_user(fd.get())) {
            metrics_.connections_refused_total.fetch_add(1);
            journal_->note(Level::kWarning, "auth_refused", "unix", "a process of another user was refused");
            send_error(fd.get(), Code::kAuth, "this node serves processes of its own user only");
            continue;
        }
        adopt(std::move(fd));
    }
}

void Server::adopt(Fd fd) {
    size_t unproved = 0;
    Connection* oldest = nullptr;
    int oldest_fd = -1;
    for (auto& [other, connection] : connections_) {
        if (connection->proved()) continue;
        ++unproved;
        if (oldest == nullptr || connection->since_ms() < oldest->since_ms()) {
            oldest = connection.get();
            oldest_fd = other;
        }
    }
    // An idle connection without proof makes room for the next one; proved clients keep theirs.
    if (unproved >= options_.limits.connections_unproved) drop(oldest_fd, true);
    if (!has_room(fd.get(), nullptr, false)) return;
    int key = fd.get();
    auto connection = std::make_shared<Connection>(*this, std::move(fd), now_ms());
    if (!loop_->add(key, Connection::kFirstEvents, connection))
        return count(metrics_.connections_closed_total);
    connections_.emplace(key, connection);
    // The challenge is sent by the node: the client proves the token before the node parses anything else
    // of it.
    if (!connection->greet()) drop(key);
}

// Each kind has its own places: however many other hosts call, the engines of this one get in. Their limit
// rises where it is too low.
bool Server::has_room(int fd, TlsStream* tls, bool remote) {
    size_t have = remote ? remote_connections_ : connections_.size() - remote_connections_;
    std::string limit;
    if (!remote) {
        // Each process that asks the master has one there as well, and each kind has so many places.
        if (relay_ != nullptr) have = std::max(have, relay_->connections());
        auto memory_bytes = [this] {
            std::optional<AvailableMemory> memory = available_memory(options_.memory_root);
            return memory ? memory->available_bytes : UINT64_MAX;
        };
        auto answer = connections_max_.admit(have, [&] {
            auto places = connection_places(have, remote_connections_max_ + kOtherFiles, memory_bytes);
            limit = places.because;
            return places.most;
        });
        if (answer != SoftLimit::Answer::kFull) limit.clear();
        if (answer == SoftLimit::Answer::kRaised) {
            journal_->note(Level::kWarning, "limit_raised", "",
                           "there are more connections of this host than node.connections_max = " +
                               std::to_string(connections_max_.set()) + "; the limit is " +
                               std::to_string(connections_max_.now()) + " now. Set it to what you expect");
        }
    } else if (have >= remote_connections_max_) {
        limit = remote_connections_max_ < options_.limits.remote_connections
                    ? "as many as the limit of open files allows"
                    : "the limit (node.remote_connections_max)";
    }
    if (!limit.empty()) {
        metrics_.connections_refused_total.fetch_add(1);
        journal_->note(Level::kWarning, "connections_full", "",
                       "a connection was refused: there are " + std::to_string(have) + ", " + limit);
        send_error(fd, Code::kTooLarge,
                   "the node already has " + std::to_string(have) + " connections of " +
                       (remote ? "other hosts, " : "its host, ") + limit,
                   tls);
        return false;
    }
    metrics_.connections_total.fetch_add(1);
    return true;
}

void Server::adopt_remote(AuthenticatedConnection caller) {
    if (described_) return;  // the other process knows nothing of it
    if (gives_) return waiting_.push_back(std::make_shared<AuthenticatedConnection>(std::move(caller)));
    auto it = pools_.find(caller.tenant);
    // The listener has checked token and tenant, and has sent the welcome; the tenants' rows may have been
    // replaced since. Returning closes the socket.
    if (it == pools_.end() || !options_.tenants->stands(caller.tenant, caller.access) ||
        !has_room(caller.fd.get(), caller.tls.get(), true))
        return;
    int key = caller.fd.get();
    // Of which no event will tell: what came along with the handshake, and what of it is still to go out.
    bool more = caller.tls != nullptr && caller.tls->pending();
    bool unsent = caller.tls != nullptr && caller.tls->unsent();
    auto connection = std::make_shared<Connection>(*this, std::move(caller.fd), std::move(caller.tls),
                                                   now_ms(), *it->second, caller.access);
    if (!loop_->add(key, Connection::kFirstEvents, connection))
        return count(metrics_.connections_closed_total);
    connections_.emplace(key, connection);
    ++remote_connections_;
    if (more || unsent) connection->on_events((more ? EPOLLIN : 0u) | (unsent ? EPOLLOUT : 0u));
}

// The connection that waited goes on; it may end with that.
void Server::resume(Connection& connection, uint64_t now) {
    int fd = connection.fd();
    if (!connection.resume(now)) drop(fd);
}

// Off the loop, so that the descriptor can belong to another one.
std::optional<RelayCaller> Server::take_relayed(Connections::iterator it) {
    std::shared_ptr<Connection> connection = it->second;
    if (!connection->is_relayed()) return std::nullopt;
    loop_->remove(it->first);
    connections_.erase(it);
    return connection->take_relayed();
}

void Server::drop(int fd, bool cut_off) {
    auto it = connections_.find(fd);
    if (it == connections_.end()) return;
    if (std::optional<RelayCaller> caller = take_relayed(it)) return relay_->adopt(std::move(*caller));
    // Dropped: the node ended it. Closed: the client did. Its destructor gives back what it held.
    cut_off |= it->second->cut_off();
    count(cut_off ? metrics_.connections_dropped_total : metrics_.connections_closed_total);
    remote_connections_ -= it->second->remote() ? 1 : 0;
    loop_->remove(fd);
    connections_.erase(it);
}

// Connections whose tenant's key is no longer among the rows.
void Server::end_withdrawn() {
    const uint64_t version = options_.tenants->version();
    if (std::exchange(tenants_seen_, version) == version) return;
    std::vector<std::shared_ptr<Connection>> all;
    for (auto& [fd, connection] : connections_) all.push_back(connection);
    for (const std::shared_ptr<Connection>& connection : all) {
        if (!connection->check_key()) drop(connection->fd(), true);
    }
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

// What a tenant of this node had no limits of when the node started stays as it is: a card may have pinned
// its memory.
Status Server::take_limits(const LimitsByTenant& limits) {
    Result<std::vector<std::string>> later = shares_.set(limits);
    if (!later) return later.error();
    for (auto& [tenant, pool] : pools_) {
        auto it = limits.find(tenant);
        const TenantLimits now = it == limits.end() ? TenantLimits{} : it->second;
        pool->set_limits(now);
        if (MemoryShares::limits_memory(now) && shares_.of(*pool) == nullptr) {
            later->push_back("dram_min and dram_max of tenant " + tenant +
                             ", which had neither before, come into force when the node starts anew");
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

std::vector<std::pair<std::string, uint64_t>> Server::snapshot() {
    auto rows = std::make_shared<std::vector<std::pair<std::string, uint64_t>>>();
    bool ran = call_on_loop([this, rows] {
        *rows = gauges();
        add_tenant_gauges(*rows);
    });
    if (!ran) return {};
    // The member's numbers are atomics, or have a mutex of their own: they need no loop.
    if (member_ != nullptr) {
        for (auto& row : member_->gauges()) rows->push_back(std::move(row));
    }
    if (relay_ != nullptr) {
        for (auto& row : relay_->gauges()) rows->push_back(std::move(row));
    }
    return *rows;
}

std::optional<MemberAgent::State> Server::membership() const {
    if (member_ == nullptr) return std::nullopt;
    return member_->state();
}

// On the loop. Names are those of the metrics without their prefix; several tenants are summed up.
std::vector<std::pair<std::string, uint64_t>> Server::gauges() {
    NodeMetrics& m = metrics_;
    TableCounters sum;
    uint64_t capacity = 0, free_bytes = 0, leased = 0, pins = 0, arena = 0, huge = 0, remote_pinned = 0,
             spaces = 0, objects_max = 0;
    for (auto& [tenant, pool] : pools_) {
        const TableCounters& c = pool->table().counters();
        sum.objects += c.objects;
        sum.object_bytes += c.object_bytes;
        sum.detached += c.detached;
        sum.pinned += c.pinned;
        sum.pinned_bytes += c.pinned_bytes;
        remote_pinned += pool->remote_pins().bytes();
        spaces += pool->spaces();
        sum.evicted_total += c.evicted_total;
        sum.evicted_bytes_total += c.evicted_bytes_total;
        sum.evicted_for_slots_total += c.evicted_for_slots_total;
        objects_max += pool->table().objects_max();
        capacity += pool->capacity();
        free_bytes += pool->free_bytes();
        arena += pool->start_bytes();
        huge += pool->huge_bytes();
    }
    for (auto& [fd, connection] : connections_) {
        leased += connection->leased_bytes();
        pins += connection->pins();
    }
    struct {
        uint64_t refused = 0, auth_failures = 0, protocol_errors = 0, handshake_timeouts = 0;
    } door;
    if (listener_ != nullptr) {
        const ListenerCounters& c = listener_->counters();
        door = {c.refused_total, c.auth_failures_total, c.protocol_errors_total, c.handshake_timeouts_total};
    }
    std::vector<std::pair<std::string, uint64_t>> rows = {
        {"objects", sum.objects},
        {"objects_max", objects_max},
        {"object_bytes", sum.object_bytes},
        {"objects_pinned", sum.pinned},
        {"objects_detached", sum.detached},
        {"spaces", spaces},
        {"pins", pins},
        {"pinned_bytes", sum.pinned_bytes},
        {"remote_pinned_bytes", remote_pinned},
        {"pins_refused_total", m.pins_refused_total},
        {"pins_idle_total", m.pins_idle_total},
        {"arena_bytes", arena},
        {"arena_ready_bytes", capacity},
        {"arena_free_bytes", free_bytes},
        {"arena_huge_page_bytes", huge},
        {"arena_memory_short", memory_error_.load()},
        {"log_left_out_total", journal_->left_out_total()},
        {"leased_bytes", leased},
        {"connections", connections_.size()},
        {"remote_connections", remote_connections_},
        {"connections_max", connections_max_.now()},
        {"limits_raised_total", connections_max_.raised_total()},
        {"connections_total", m.connections_total},
        {"connections_refused_total", m.connections_refused_total + door.refused},
        {"connections_dropped_total", m.connections_dropped_total},
        {"connections_closed_total", m.connections_closed_total},
        {"auth_failures_total", m.auth_failures_total + door.auth_failures},
        {"protocol_errors_total", m.protocol_errors_total + door.protocol_errors},
        {"handshake_timeouts_total", m.handshake_timeouts_total + door.handshake_timeouts},
        {"stored_total", m.stored_total},
        {"stored_bytes_total", m.stored_bytes_total},
        {"exists_total", m.exists_total},
        {"put_refused_total", m.put_refused_total},
        {"lease_refused_total", m.lease_refused_total},
        {"lookup_keys_total", m.lookup_keys_total},
        {"lookup_hits_total", m.lookup_hits_total},
        {"served_total", m.served_total},
        {"served_bytes_total", m.served_bytes_total},
        {"removed_total", m.removed_total},
        {"evicted_total", sum.evicted_total},
        {"evicted_bytes_total", sum.evicted_bytes_total},
        {"evicted_for_slots_total", sum.evicted_for_slots_total},
        {"scrub_dropped_total", m.scrub_dropped_total},
        {"tcp_sent_bytes_total", m.tcp_sent_bytes_total},
        {"tcp_received_bytes_total", m.tcp_received_bytes_total},
        {"tcp_damaged_total", m.tcp_damaged_total},
    };
    if (ssd_ != nullptr) {
        for (auto& row : ssd_->gauges()) rows.push_back(std::move(row));
    }
    if (events_ != nullptr) {
        BlockEvents::Counters c = events_->counters();
        rows.emplace_back("events_blocks", c.blocks);
        rows.emplace_back("events_objects", c.objects);
        rows.emplace_back("events_objects_max", BlockEvents::kObjectsMax);
        rows.emplace_back("events_ignored_total", c.ignored_total);
        rows.emplace_back("events_overflows_total", c.overflows_total);
    }
    return rows;
}

// Of each tenant, where there are several or one has limits: kTenantsShown at most. A name that a label
// cannot have is left out, too.
void Server::add_tenant_gauges(std::vector<std::pair<std::string, uint64_t>>& rows) const {
    constexpr size_t kTenantsShown = 256;
    if (pools_.size() == 1 && shares_.empty()) return;
    size_t shown = 0;
    for (const auto& [tenant, pool] : pools_) {
        if (shown == kTenantsShown) break;
        if (tenant.find_first_of("\"\\") != tenant.npos) continue;
        ++shown;
        auto add = [&, of = "{tenant=\"" + tenant + "\"}"](const char* name, uint64_t value) {
            rows.emplace_back(name + of, value);
        };
        const TenantLimits& limits = pool->limits();
        const MemoryShares::Bounds* bounds = shares_.of(*pool);
        const Pool::ShareCounters& c = pool->share_counters();
        add("tenant_dram_bytes", pool->held_bytes());
        add("tenant_dram_used_bytes", pool->capacity() - pool->free_bytes());
        add("tenant_dram_min_bytes", bounds == nullptr ? pool->arena_bytes() : bounds->min);
        add("tenant_dram_max_bytes", bounds == nullptr ? pool->arena_bytes() : bounds->max);
        add("tenant_pinned_bytes", pool->table().counters().pinned_bytes);
        if (limits.pins_max) add("tenant_pins_max_bytes", *limits.pins_max);
        add("tenant_evicted_total", pool->table().counters().evicted_total);
        add("tenant_evicted_for_others_total", c.evicted);
        add("tenant_evicted_for_others_bytes_total", c.evicted_bytes);
        add("tenant_refused_total", c.refused);
        if (limits.bytes_per_s) add("tenant_bytes_per_s_max", *limits.bytes_per_s);
        add("tenant_over_rate_total", c.over_rate);
        if (ssd_ == nullptr) continue;
        add("tenant_ssd_bytes", ssd_->bytes_of(*pool));
        if (limits.ssd_max) add("tenant_ssd_max_bytes", *limits.ssd_max);
        add("tenant_ssd_dropped_total", ssd_->dropped_of(*pool));
    }
    rows.emplace_back("tenants", pools_.size());
    rows.emplace_back("tenants_shown", shown);
}

}  // namespace moonpool
