// Session: a client's side of one connection to one incarnation of a node: the handshake, the socket and its
// frames. The bytes of objects travel by its path (block_path.hpp). When the connection is lost the
// session is dead for good; NodeClient opens the next one. Views keep their session, and so what its path has
// mapped, alive: they stay readable after the node died.
//
// Any thread may call. One request is in flight at a time; copying happens outside the lock.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/fd.hpp"
#include "base/fork.hpp"
#include "base/mutex.hpp"
#include "base/result.hpp"
#include "base/wait_budget.hpp"
#include "store/client/block_path.hpp"
#include "store/shared/messages.hpp"
#include "store/shared/space.hpp"
#include "wire/auth.hpp"
#include "wire/frame.hpp"
#include "wire/secrets.hpp"
#include "wire/tls.hpp"

namespace moonpool {

struct ClientOptions {
    std::string socket_path;
    std::string address;               // instead of socket_path: host:port of a node's TCP port
    std::function<Result<Fd>()> dial;  // instead of socket_path: the embedded node
    Secrets token;
    std::string tenant = "default";
    std::string name_space = "default";
    std::string fingerprint;
    int timeout_ms = 2000;  // of a call's waits without progress, all together: see base/wait_budget.hpp
    std::optional<Incarnation> incarnation{};   // of the node; another life of it is not taken
    std::shared_ptr<const TlsClient> tls;       // to the node's master; null: plain
    std::shared_ptr<const TlsClient> data_tls;  // to nodes of other hosts; null: plain
    VersionRange versions = kWireVersions;      // of the wire format, that are spoken here
};

// A connection to the Unix socket of a node of this host, before the handshake.
Result<Fd> connect_to_node(const ClientOptions& options, std::chrono::steady_clock::time_point end,
                           const std::atomic<bool>* given_up);

// What a node of this host hands over with its WELCOME.
struct SharedMemory {
    Fd arena, index;
    uint64_t arena_bytes = 0, index_bytes = 0;
};

class Session {
   public:
    // Takes at most timeout_ms, and what is left of the caller's wait budget. given_up: set by another
    // thread, it fails at once.
    static Result<std::shared_ptr<Session>> open(const ClientOptions& options,
                                                 const std::atomic<bool>* given_up = nullptr);
    ~Session();
    Session(const Session&) = delete;

    bool alive() const { return alive_.load(std::memory_order_acquire); }
    bool check_alive();  // looks whether the node has hung up since the last call
    BlockPath& path() const { return *path_; }
    // Whether another process serves this connection now, over which the node's new index does not come.
    bool superseded() const {
        const IndexReader* index = path_->index();
        return index != nullptr && index->superseded();
    }
    // A pidfd of the node's process; none: it is this process, or of another host, or the kernel gives none.
    // Of this node for certain only if the session is found alive afterwards.
    Fd node_process() const;
    // Gives back what this client would write next, and lets the connection end with the last view and pin.
    void retire();
    // Whether one-way frames pile up because the node takes none.
    bool behind();

    // Builds the body with build(Writer&), sends it, and hands the answer to parse(Reader&). What was posted
    // goes out in the same system call, first.
    using Build = std::function<void(Writer&)>;
    using Parse = std::function<bool(Reader&)>;
    // timeout_ms: the longest wait without progress, 0: the session's own.
    Status call(Kind kind, const Build& build, const Parse& parse, int timeout_ms = 0);

    // One-way, and waits until the socket has taken it.
    Status send(Kind kind, const Build& build);

    // One-way: does not wait for a node that takes nothing, never fails; lost with the connection.
    void post(Kind kind, const Build& build);

    // Asks for bytes and receives them where target(row) says, a whole object or a piece. `crcs`: of each row
    // the checksum of what arrived, made at its destination; it continues what stands there, 0 where nothing
    // does. build writes the body of READ, with `n` rows.
    using Target = std::function<std::span<const MemoryRef>(size_t row)>;
    Status read(size_t n, const Build& build, const Target& target, std::vector<ReadRow>& rows,
                std::vector<uint32_t>& crcs);

    // build writes the body of PUT up to the bytes, which are then taken from `parts`. Without
    // `parse` nothing is waited for.
    Status put(const Build& build, std::span<const MemoryRef> parts, const Parse& parse, int timeout_ms);

    // Tells the node, with the next frame, what was read straight from the arena.
    void note_read(uint32_t slot, uint64_t bytes);
    void flush_reads();

    const Incarnation& incarnation() const { return incarnation_; }
    uint64_t arena_bytes() const { return arena_bytes_; }
    uint32_t space() const { return space_; }
    uint64_t slab_bytes() const { return slab_bytes_; }
    uint64_t object_bytes_max() const { return object_bytes_max_; }
    uint32_t key_bytes_max() const { return key_bytes_max_; }
    uint32_t parts_max() const { return parts_max_; }
    uint32_t frame_bytes_max() const { return frame_bytes_max_; }
    uint32_t frame_keys_max() const { return frame_keys_max_; }
    const std::string& peer() const { return peer_; }
    const std::string& node_name() const { return node_name_; }
    const std::string& host_id() const { return host_id_; }
    const std::string& address() const { return address_; }  // where other hosts reach the node
    const std::string& master() const { return master_; }    // empty: the node is alone
    // How long to wait for it; 0: the node does not say.
    uint32_t master_timeout_ms() const { return master_timeout_ms_; }
    const std::string& salt() const { return salt_; }  // of the tenant's keys; empty: none
    bool knows(uint32_t feature) const { return (features_ & feature) != 0; }
    // Before the first byte moves; the node refuses it as well.
    Status check_may_write() const {
        if (!knows(kFeatureReadOnly)) return success();
        return Error{Code::kAuth,
                     "this process has a reader's key, which may not put, replace or remove objects; "
                     "give it a key with the role writer or admin"};
    }

    // For the path while it opens: to a node's Unix socket, or to its TCP port.
    Status connect_here(const ClientOptions& options, SharedMemory& memory);
    Status connect_remote(const ClientOptions& options);

   private:
    class IoLock;
    class Turn;
    Session() = default;

    Status open_within(const ClientOptions& options, int most_ms, const std::atomic<bool>* given_up);
    Status open_space(const ClientOptions& options);
    bool read_welcome(Reader& welcome, uint64_t& arena_bytes, uint64_t& index_bytes);
    void flush_posted() EXCLUDES(io_mutex_, posted_mutex_);
    void take_posted(std::vector<std::byte>& out) EXCLUDES(posted_mutex_);
    // Of one wait, when a call may take timeout_ms: a node of a pool leaves time for the others.
    int one_wait(int timeout_ms) const {
        return master_.empty() ? timeout_ms : WaitBudget::of_one_peer(timeout_ms);
    }

    // At the socket.
    Status handshake(const std::string& secret, const ClientOptions& options, SharedMemory& memory)
        REQUIRES(io_mutex_);
    Status wait(short events) REQUIRES(io_mutex_);
    // As recvmsg(2) and sendmsg(2) on a socket that blocks for waits_ms_. TLS may keep a part of what was
    // taken; flush_tls() waits until the socket has it.
    ssize_t receive_some(const iovec* parts, size_t n, bool near) REQUIRES(io_mutex_);
    ssize_t send_some(const iovec* parts, size_t n, bool wait) REQUIRES(io_mutex_);
    Status flush_tls() REQUIRES(io_mutex_);
    bool tls_ready() REQUIRES(io_mutex_);  // the socket has room, and TLS has nothing for it
    bool ready(short events) REQUIRES(io_mutex_);
    Status send_all(const std::byte* data, size_t size) REQUIRES(io_mutex_);
    Status send_parts(std::span<const MemoryRef> parts) REQUIRES(io_mutex_);
    Status receive(void* data, size_t size) REQUIRES(io_mutex_);
    Status receive_bytes(const std::vector<ReadRow>& rows, const Target& target, std::vector<uint32_t>& crcs)
        REQUIRES(io_mutex_);
    Status receive_with_fds(void* data, size_t size, std::vector<Fd>& fds) REQUIRES(io_mutex_);
    Status receive_frame(FrameHeader& header, std::vector<Fd>* fds) REQUIRES(io_mutex_);
    Status receive_header(FrameHeader& header) REQUIRES(io_mutex_);
    Status check_header(const FrameHeader& header) REQUIRES(io_mutex_);
    Status exchange(Kind kind, const Build& build, const Parse& parse) REQUIRES(io_mutex_);
    Status ask(Kind kind, const Build& build, uint64_t& request_id) REQUIRES(io_mutex_);
    Status answer(Kind kind, uint64_t request_id, const Parse& parse) REQUIRES(io_mutex_);
    Status refused(const FrameHeader& header, uint64_t request_id) REQUIRES(io_mutex_);
    bool drain(bool wait) REQUIRES(io_mutex_);
    bool peer_took_some() REQUIRES(io_mutex_);
    Status lost(Error error) REQUIRES(io_mutex_);  // marks the session dead, gives the error back
    Status send_failed() REQUIRES(io_mutex_);
    Status receive_failed(ssize_t n) REQUIRES(io_mutex_);
    Status misfit() REQUIRES(io_mutex_);

    // Set while the session opens, on the one thread that knows it then; only read afterwards.
    Fd fd_;
    std::unique_ptr<TlsStream> tls_;  // null: plain. With io_mutex_, once the session is open
    ClosedInChildren closed_in_children_{fd_};
    ForkGuard fork_;
    std::string peer_, node_name_, host_id_, address_, master_, salt_;
    int timeout_ms_ = 2000;  // of one wait
    Incarnation incarnation_{};
    uint32_t space_ = 0;
    uint64_t arena_bytes_ = 0, slab_bytes_ = 0, object_bytes_max_ = 0;
    uint32_t key_bytes_max_ = 0, parts_max_ = 0, frame_bytes_max_ = 0, frame_keys_max_ = 0;
    uint32_t features_ = 0, master_timeout_ms_ = 0;

    std::atomic<bool> alive_{true};

    Mutex io_mutex_;  // a call's turn at the socket; before posted_mutex_
    // While it is opened: the end of the whole step, whatever arrives meanwhile, and the caller's flag.
    struct Opening {
        std::chrono::steady_clock::time_point end;
        const std::atomic<bool>* given_up;
    };
    std::optional<Opening> opening_ GUARDED_BY(io_mutex_);
    std::vector<std::byte> out_ GUARDED_BY(io_mutex_), body_ GUARDED_BY(io_mutex_);
    std::vector<std::byte> unsent_ GUARDED_BY(io_mutex_);
    uint64_t next_request_ GUARDED_BY(io_mutex_) = 1;
    int waits_ms_ GUARDED_BY(io_mutex_) = 2000;   // timeout_ms_, of the call that is in progress
    int socket_ms_ GUARDED_BY(io_mutex_) = 2000;  // what the socket was last told
    bool near_ GUARDED_BY(io_mutex_) = true;      // the answer that is awaited: worth polling for
    // Bytes of the put whose answer is awaited, when last looked at.
    int unacknowledged_ GUARDED_BY(io_mutex_) = 0;

    Mutex posted_mutex_;  // what waits to be sent along
    std::vector<std::byte> posted_ GUARDED_BY(posted_mutex_);
    std::vector<uint32_t> read_slots_ GUARDED_BY(posted_mutex_);
    uint64_t read_count_ GUARDED_BY(posted_mutex_) = 0, read_bytes_ GUARDED_BY(posted_mutex_) = 0;

    std::unique_ptr<BlockPath> path_;  // declared last: it ends while the rest is there
};

}  // namespace moonpool
