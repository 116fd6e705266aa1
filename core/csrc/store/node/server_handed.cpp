// The half of Server that goes from one process to another of the same node: give() in the old one, and what
// create() and start() do with a predecessor in the new one.
//
// give(), on its caller's thread, while clients wait for at most some hundred milliseconds:
//
//   1. The agents towards the masters stand still, with their connections open; no memory is reserved; no
//      connection is accepted.
//   2. Connections are muted one by one, each between two frames: what a client sends later stays in its
//      socket, for the other process. One that is in the middle of something has kQuietMs to end that; the
//      SSD tier ends what it writes and reads, in kDiskMs, and gives up its directories. Afterwards each
//      connection is muted or has ended, so that nothing of the node changes behind its description.
//   3. On the loop: the node is described, and the shared index is made invalid. No process can write to an
//      index that another one made, so the new one has its own, and clients of the old one must find nothing
//      there when memory is used again. They ask the node instead, and connect anew for the new index.
//
// The node is given whole or not at all: until let_go() nothing that the new process does has an effect here,
// and take_back() undoes 3, 2 and 1. What cannot go along ends in 2, with what it holds: connections in TLS,
// and those in the middle of a PUT, of a wait for a disk, or of the bytes of a READ. But for the last, whose
// frame is half out, an ERROR says why. Its client connects anew, with whichever process serves. No client of
// the own host is among them: their frames are short, and their bytes move in memory.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <future>
#include <thread>

#include "store/node/connection.hpp"
#include "store/node/server.hpp"

namespace moonpool {

namespace {

constexpr uint32_t kMemberMs = 2000;      // for an answer of the loop
constexpr uint32_t kQuietMs = 300;        // for what is in the middle of something
constexpr uint32_t kDiskMs = 3000;        // for what is being written to, or read from, a disk
constexpr uint32_t kReopenMs = 10'000;    // until the other process has given up the directories
constexpr uint32_t kDescribeMs = 60'000;  // 1 ms for each 1,000 objects is what it takes
constexpr const char* kReplacedText =
    "another process takes over from this node (moonpool node --take-over), which ended what was under way "
    "here for over 300 ms; try again";
constexpr uint64_t kDescribedBytesMax = 64ull << 30;

Result<Fd> memory_file(std::span<const std::byte> bytes) {
    Fd fd(::memfd_create("moonpool-take-over", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (!fd.valid()) return os_error("memfd_create");
    for (size_t done = 0; done < bytes.size();) {
        ssize_t n = ::write(fd.get(), bytes.data() + done, bytes.size() - done);
        if (n < 0 && errno != EINTR) return os_error("writing what the node holds");
        if (n > 0) done += static_cast<size_t>(n);
    }
    return fd;
}

}  // namespace

Result<std::shared_ptr<Predecessor>> Predecessor::read(Fd bytes, std::vector<Fd> descriptors) {
    struct stat file {};
    if (::fstat(bytes.get(), &file) != 0) return os_error("reading what the running node holds");
    const auto size = static_cast<uint64_t>(file.st_size);
    if (size > kDescribedBytesMax) {
        return Error{Code::kProtocol, "the running node's description of itself is not sound: its size"};
    }
    std::vector<std::byte> all;
    // As it is read, so that a file that claims more than it has takes no memory.
    constexpr size_t kStep = 8u << 20;
    while (all.size() < size) {
        const size_t at = all.size();
        all.resize(std::min<uint64_t>(size, at + kStep));
        ssize_t n = ::pread(bytes.get(), all.data() + at, all.size() - at, static_cast<off_t>(at));
        if (n < 0) return os_error("reading what the running node holds");
        all.resize(at + static_cast<size_t>(n));
        if (n == 0) break;
    }
    Result<HandedNode> node = HandedNode::read(all);
    if (!node) return node.error();
    if (descriptors.size() != node->descriptors()) {
        return Error{Code::kProtocol,
                     "the running node's description of itself is not sound: its descriptors"};
    }
    auto predecessor = std::make_shared<Predecessor>();
    predecessor->node = std::move(*node);
    predecessor->descriptors = std::move(descriptors);
    return predecessor;
}

// ---- the new process

Status Server::check_predecessor() const {
    const HandedNode& node = options_.predecessor->node;
    if (node.ranges.size() != removals_.ranges()) {
        return Error{Code::kInvalidArgument, "the running node is of a pool of " +
                                                 std::to_string(node.ranges.size()) +
                                                 " ranges of masters; give this one the same cluster.master"};
    }
    if (node.pools.size() != options_.pools.size()) {
        return Error{Code::kInvalidArgument, "the running node has other tenants (node.tenants)"};
    }
    if (node.tcp_sockets != options_.listen.size()) {
        return Error{Code::kInvalidArgument, "the running node listens at other addresses (node.listen)"};
    }
    return success();
}

const HandedPool* Server::handed_pool(const std::string& tenant) const {
    if (options_.predecessor == nullptr) return nullptr;
    const std::vector<HandedPool>& pools = options_.predecessor->node.pools;
    auto pool = std::ranges::find(pools, tenant, &HandedPool::tenant);
    return pool == pools.end() ? nullptr : &*pool;
}

// Descriptors: of each pool its arena, the Unix socket, the TCP sockets, the connections.
Result<std::unique_ptr<Pool>> Server::adopt_pool(const PoolOptions& options) {
    Predecessor& from = *options_.predecessor;
    auto pool = std::ranges::find(from.node.pools, options.tenant, &HandedPool::tenant);
    if (pool == from.node.pools.end())
        return Error{Code::kInvalidArgument, "the running node has no tenant " + options.tenant};
    Pool::Handed handed{
        *pool, std::move(from.descriptors[static_cast<size_t>(pool - from.node.pools.begin())]), {}, {}};
    for (const HandedConnection& connection : from.node.connections) {
        if (connection.tenant != options.tenant) continue;
        handed.leases.insert(handed.leases.end(), connection.leases.begin(), connection.leases.end());
        for (const auto& [id, pinned] : connection.pins) {
            for (const HandedPin& pin : pinned) ++handed.pins[pin.slot];
        }
    }
    return Pool::adopt(options, incarnation_, std::move(handed));
}

std::vector<Fd> Server::handed_tcp_sockets() {
    std::vector<Fd> sockets;
    if (options_.predecessor == nullptr) return sockets;
    Predecessor& from = *options_.predecessor;
    for (uint32_t i = 0; i < from.node.tcp_sockets; ++i)
        sockets.push_back(std::move(from.descriptors[from.node.pools.size() + 1 + i]));
    return sockets;
}

Result<Fd> Server::adopt_local_socket() {
    Fd socket = std::move(options_.predecessor->descriptors[options_.predecessor->node.pools.size()]);
    return socket;
}

// Before the loop runs, which gets to know them by open_adopted().
void Server::adopt_connections() {
    if (options_.predecessor == nullptr) return;
    Predecessor& from = *options_.predecessor;
    next_pin_ = from.node.next_pin;
    size_t at = from.node.pools.size() + 1 + from.node.tcp_sockets;
    for (const HandedConnection& handed : from.node.connections) {
        Fd fd = std::move(from.descriptors[at++]);
        auto pool = pools_.find(handed.tenant);
        int key = fd.get();
        auto connection = std::make_shared<Connection>(*this, std::move(fd), now_ms(), handed,
                                                       handed.proved ? pool->second.get() : nullptr);
        connections_.emplace(key, connection);
        remote_connections_ += handed.remote ? 1 : 0;
    }
    for (auto& [tenant, pool] : pools_) pool->drop_unused_spaces();
    options_.predecessor.reset();  // an object's name is some hundred bytes there
}

// On the loop. What a client has sent, or the socket did not take, is looked at at once.
void Server::open_adopted() {
    std::vector<std::shared_ptr<Connection>> all;
    for (auto& [fd, connection] : connections_) all.push_back(connection);
    for (const std::shared_ptr<Connection>& connection : all) {
        if (connection->listen_again()) {
            connection->on_events(EPOLLOUT | EPOLLIN);
        } else {
            drop(connection->fd());
        }
    }
    // Once more, so that the kernel names this process to callers.
    (void)::listen(local_->fd.get(), 128);
    (void)loop_->add(local_->fd.get(), EPOLLIN, local_);
}

// ---- the old process

// On a member's agent's thread. What a master has voided is carried out before the node is described, or by
// the other process, whom the master tells again.
bool Server::run_for_member(const std::function<void()>& f) {
    for (;;) {
        giving_.wait(Giving::kNow);
        if (giving_ == Giving::kGone) return false;
        auto ran = std::make_shared<bool>(false);
        bool came = loop_->call(
            [this, f, ran] {
                if (described_) return;
                f();
                *ran = true;
            },
            kMemberMs);
        if (!came || *ran) return came;
    }
}

std::string Server::why_not_given() const {
    if (options_.socket_path.empty()) return "it has no socket";
    if (!running_) return "it does not serve";
    if (ssd_off_) return "its SSD directories are closed since a take-over failed; restart it";
    return "";
}

void Server::mute(Connection& connection) {
    muted_.insert(connection.fd());
    loop_->remove(connection.fd());
}

void Server::mute_quiet() {
    if (!gives_) loop_->remove(local_->fd.get());
    gives_ = true;
    if (ssd_ != nullptr) ssd_->pause();
    for (auto& [fd, connection] : connections_) {
        if (!muted_.contains(fd) && connection->is_quiet() && !connection->ends_here()) mute(*connection);
    }
}

// Those that another process cannot go on with; of the own host there is none, as is_quiet() says.
void Server::end_unfinished() {
    std::vector<int> unfinished;
    for (auto& [fd, connection] : connections_) {
        if (!connection->can_be_given()) {
            unfinished.push_back(fd);
        } else if (!muted_.contains(fd)) {
            mute(*connection);
        }
    }
    for (int fd : unfinished) {
        muted_.erase(fd);
        // Its client may be about to send for a while; unread bytes behind a close would take the reason
        // away.
        if (!connections_.at(fd)->end_unfinished(kReplacedText)) drop(fd, true);
    }
}

// Every connection is muted.
HandedNode Server::describe(std::vector<int>& descriptors) {
    HandedNode node;
    node.incarnation = incarnation_;
    node.next_pin = next_pin_;
    for (auto& [tenant, pool] : pools_) {
        node.pools.push_back(pool->give());
        descriptors.push_back(pool->arena_fd());
    }
    descriptors.push_back(local_->fd.get());
    if (listener_ != nullptr) {
        for (int socket : listener_->sockets()) descriptors.push_back(socket);
        node.tcp_sockets = static_cast<uint32_t>(listener_->sockets().size());
    }
    node.ranges = removals_.give();
    for (auto& [fd, connection] : connections_) {
        if (connection->ends_here()) continue;
        node.connections.push_back(connection->give());
        descriptors.push_back(fd);
    }
    waiting_.clear();  // their clients connect anew
    for (auto& [tenant, pool] : pools_) pool->table().supersede();
    described_ = true;
    return node;
}

// Whether nothing is half done, as far as the other process cannot do without it: connections of other hosts
// are dropped after kQuietMs, but what a client of this host holds, and what a disk is doing, is waited for.
bool Server::is_quiet(bool has_waited) const {
    if (ssd_ != nullptr && !ssd_->is_idle()) return false;
    return std::ranges::all_of(connections_, [&](const auto& entry) {
        return muted_.contains(entry.first) ||
               (has_waited && (entry.second->remote() || entry.second->can_be_given()));
    });
}

Status Server::quieten() {
    struct Look {
        std::atomic<bool> quiet{false};
    };
    auto look = std::make_shared<Look>();
    const auto began = std::chrono::steady_clock::now();
    for (;;) {
        const auto waited = std::chrono::steady_clock::now() - began;
        const bool has_waited = waited > std::chrono::milliseconds(kQuietMs);
        bool ran = loop_->call(
            [this, look, has_waited] {
                mute_quiet();
                if (!is_quiet(has_waited)) return;
                end_unfinished();
                look->quiet = true;
            },
            kDescribeMs);
        if (!ran) return Error{Code::kTimeout, "the node's data plane did not answer"};
        if (look->quiet) return success();
        if (waited > std::chrono::milliseconds(kDiskMs))
            return Error{Code::kTimeout,
                         "its disk, or a client, was in the middle of something for too long"};
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
}

// Its directories are free then.
Status Server::close_ssd() {
    if (ssd_ == nullptr) return success();
    auto saved = std::make_shared<std::promise<void>>();
    std::future<void> done = saved->get_future();
    post([this, saved] { ssd_->save([saved] { saved->set_value(); }); });
    (void)done.wait_for(std::chrono::milliseconds(kDiskMs));  // else some removals are carried out once more
    if (loop_->call([this] { ssd_->close_logs(); }, kDescribeMs)) return success();
    return Error{Code::kTimeout, "the node's data plane did not answer"};
}

void Server::reopen_ssd() {
    if (ssd_ == nullptr) return;
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(kReopenMs);
    for (;;) {
        auto logs = std::make_shared<Result<SsdTier::Logs>>(ssd_->open_logs());
        if (*logs) {
            (void)loop_->call([this, logs] { ssd_->reopen(std::move(**logs)); }, kDescribeMs);
            return;
        }
        if (std::chrono::steady_clock::now() > end) {
            // For good: what is removed from now on is not noted there.
            ssd_off_ = true;
            journal_->note(
                Level::kError, "ssd_off", "",
                "the SSD directories stay closed until the node starts anew: " + logs->error().text);
            return;
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
}

Result<Server::Given> Server::give() {
    if (std::string why = why_not_given(); !why.empty()) return Error{Code::kInvalidArgument, why};
    giving_ = Giving::kNow;
    stopping_ = true;
    (void)reserve_thread_.join();
    if (listener_ != nullptr) listener_->pause(kQuietMs);
    ssd_closed_ = false;
    Status quiet = quieten();
    if (quiet) {
        ssd_closed_ = ssd_ != nullptr;
        quiet = close_ssd();
    }
    if (!quiet) {
        take_back();
        return quiet.error();
    }
    struct Described {
        std::vector<std::byte> bytes;
        std::vector<int> descriptors;
    };
    auto described = std::make_shared<Described>();
    bool ran = loop_->call(
        [this, described] {
            HandedNode node = describe(described->descriptors);
            described->bytes = node.write();
        },
        kDescribeMs);
    Result<Fd> file = Error{Code::kTimeout, "the node's data plane did not answer"};
    if (ran) file = memory_file(described->bytes);
    if (!file) {
        take_back();
        return file.error();
    }
    return Given{std::move(*file), std::move(described->descriptors)};
}

void Server::take_back() {
    if (!running_) return;
    if (std::exchange(ssd_closed_, false)) reopen_ssd();
    post([this] {
        if (!std::exchange(gives_, false)) return;
        described_ = false;
        if (ssd_ != nullptr) ssd_->resume();
        for (auto& [tenant, pool] : pools_) pool->table().take_back();
        for (int fd : std::exchange(muted_, {})) {
            auto it = connections_.find(fd);
            if (it != connections_.end() && !it->second->listen_again()) drop(fd);
        }
        (void)loop_->add(local_->fd.get(), EPOLLIN, local_);
        for (const auto& caller : std::exchange(waiting_, {})) adopt_remote(std::move(*caller));
    });
    if (listener_ != nullptr) listener_->resume();
    stopping_ = false;
    (void)reserve_thread_.start("mp-memory", [this] { reserve_memory(); });
    giving_ = Giving::kNo;
    giving_.notify_all();
}

// As stop(), but the other process has the sockets and the memory, and the node goes on.
void Server::let_go() {
    if (!running_.exchange(false)) return;
    // Told before they are let go on, so that none connects anew.
    if (member_ != nullptr) member_->abandon();
    giving_ = Giving::kGone;
    giving_.notify_all();
    if (member_ != nullptr) member_->stop();
    if (listener_ != nullptr) listener_->stop();
    if (relay_ != nullptr) relay_->stop();
    (void)loop_->stop();
    connections_.clear();
    waiting_.clear();
    local_.reset();
    prepared_ = false;
}

}  // namespace moonpool
