// DirectoryClient: a process's way to the master's directory. Any thread may call; one call at a time is on
// the socket, and the caller drives it. What it answers is a hint: the pin at the holder decides.
//
// A master that is not there costs callers no time: a thread of the client's own dials, with a growing pause
// between the attempts, and until it has succeeded every call fails at once with kUnavailable. Only the very
// first call waits for the first attempt, at most timeout_ms.
//
// Of several masters one serves at a time; a standby refuses the connection until it has taken over. The
// thread tries one after the other, and those that a master has named since. A call whose connection ends, as
// when a master hands over to another one, asks again over the next one, once.
//
// Where the own node relays, the connection is one to that node, and the frames are the same. Where the node
// does not answer, the client asks the master itself, within the same call, and goes back to the node later.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/fork.hpp"
#include "base/mutex.hpp"
#include "base/result.hpp"
#include "base/service_thread.hpp"
#include "directory/master_addresses.hpp"
#include "directory/members_cache.hpp"
#include "directory/members_file.hpp"
#include "directory/ranges.hpp"
#include "directory/requests.hpp"
#include "wire/control_socket.hpp"
#include "wire/dial.hpp"
#include "wire/frame.hpp"
#include "wire/secrets.hpp"

namespace moonpool {

// The way to the master by a node of this host that relays (store/node/relay.hpp).
struct NodeRelay {
    std::string name;                     // of the node, for errors
    std::function<Result<Fd>()> connect;  // to its Unix socket; null: there is no such way
    // Whether the node relays, and answers as far as is known; false: the master is asked directly. Never
    // waits.
    std::function<bool()> answers;
};

struct DirectoryClientOptions {
    std::string master;  // "host:port", or several with commas between
    Range range{};       // of the shards, that they have
    Secrets token;
    std::string tenant = "default";
    std::string interface;                 // of this host, to dial from; empty: the kernel's choice
    std::shared_ptr<const TlsClient> tls;  // null: plain
    int timeout_ms = 500;                  // without progress; also of one attempt to connect
    int members_ms = 200;                  // members() asks again when its answer is older
    int backoff_first_ms = 100;            // pause after a failed attempt; it doubles,
    int backoff_longest_ms = 500;          // up to this
    NodeRelay relay{};
    int back_to_node_ms = 10000;  // after the node did not answer, it is tried again
    // The token is a tenant's key: another one that replaces it is proved over a new connection, before the
    // former is withdrawn and ends this one.
    bool follow_key = false;
};

class DirectoryClient {
   public:
    explicit DirectoryClient(DirectoryClientOptions options);
    ~DirectoryClient();
    DirectoryClient(const DirectoryClient&) = delete;

    // Begins to connect, as the first call does, and does not wait.
    void begin_to_dial();

    // Any number of keys: split into pipelined frames. meanwhile, here and below: called at most once, when
    // the first question is on its way and no answer to it has been waited for, while no other call reaches
    // the master; not called where there is no connection. It may ask other masters.
    Result<LocateAnswer> locate(std::span<const Hash128> hashes, const LocateOptions& options = {},
                                const std::function<void()>& meanwhile = nullptr);

    // The members of the pool. Cached for members_ms; while the master is away, the last answer there was.
    // fresh: asks in any case, and fails when there is no answer.
    Result<std::shared_ptr<const Members>> members(bool fresh = false);

    // Up to n alive nodes with room for `bytes` more of this client's tenant, most room first, each on
    // another host than the others and than those to avoid (where there are too few hosts: fewer nodes).
    Result<std::vector<NodeId>> place(uint64_t bytes, uint16_t n, const PlaceOptions& options = {});

    // The keys were removed, or replaced elsewhere. Holders that are not in touch with the master now drop
    // their copies when they return, before any client is sent to them; so do, at once, those of `unreached`:
    // nodes that the caller could not tell itself. The number of copies that are void now.
    Result<uint32_t> forget(std::span<const Hash128> hashes, std::span<const NodeId> unreached = {},
                            const std::function<void()>& meanwhile = nullptr);

    // The keys are about to be removed, or replaced at that node: their holders, and a place in the order for
    // each. unique: those that a node has stay.
    Result<OrderAnswer> order(std::span<const Hash128> hashes, const Incarnation* placing,
                              bool unique = false);
    // It was done. Of each key the last version that the master has given.
    Result<std::vector<Version>> ordered(const OrderDone& done,
                                         const std::function<void()>& meanwhile = nullptr);

    // The last version that the master had given, as of its last answer: what is put now comes after it.
    Version newest() const { return newest_.load(std::memory_order_relaxed); }

    bool connected() const { return connected_.load(std::memory_order_acquire); }
    bool by_node() const { return by_node_.load(std::memory_order_acquire); }  // while connected
    const std::string& master() const { return options_.master; }
    std::vector<std::string> learned() const { return addresses_.learned(); }  // masters, beside those
    void close();  // ends calls in progress; every later call fails with kClosed

   private:
    using Build = std::function<void(Writer&)>;
    using Parse = std::function<bool(Reader&)>;
    using Clock = std::chrono::steady_clock;

    class CallTimeout;
    class Meanwhile;
    class IoLock;
    Status ready() REQUIRES(io_mutex_);
    Status with_master(const std::function<Status()>& question) REQUIRES(io_mutex_);
    bool keeps_way() REQUIRES(io_mutex_);
    bool has_ended() REQUIRES(io_mutex_);
    bool has_new_key() REQUIRES(io_mutex_);
    void dial_at_once() REQUIRES(io_mutex_);
    Status locate_now(std::span<const Hash128> hashes, const LocateOptions& options, LocateAnswer& answer,
                      Meanwhile& meanwhile) REQUIRES(io_mutex_);
    Status order_now(std::span<const Hash128> hashes, const Incarnation* placing, bool unique,
                     OrderAnswer& answer) REQUIRES(io_mutex_);
    Status ask(Kind kind, const Build& build, const Parse& parse, Meanwhile* meanwhile = nullptr)
        REQUIRES(io_mutex_);
    Status ask_in_pieces(Kind kind, std::span<const Hash128> hashes,
                         const std::function<void(Writer&, uint32_t)>& head, const Parse& parse,
                         const std::function<bool()>& more, Meanwhile* meanwhile = nullptr)
        REQUIRES(io_mutex_);
    uint64_t begin(Kind kind) REQUIRES(io_mutex_);
    Status send_all(std::span<const std::byte> bytes) REQUIRES(io_mutex_);
    Status receive_answer(Kind kind, uint64_t request_id, const Parse& parse) REQUIRES(io_mutex_);
    Status receive(void* data, size_t size) REQUIRES(io_mutex_);
    Status refresh_members() REQUIRES(io_mutex_);
    void hear(Reader& r);  // the newest version, behind an answer
    Error lost(Error error) REQUIRES(io_mutex_);
    Error peer_failed(Error error) REQUIRES(io_mutex_);
    Error refused(Error error) REQUIRES(io_mutex_);
    std::optional<Error> last_words() REQUIRES(io_mutex_);
    std::string peer() const;
    static Error forked();
    void dial_loop();
    // By the own node, with what came with the WELCOME.
    struct ByNode {
        uint64_t life = 0;  // of its connection to the master; 0: its list of members is not to be had
        Fd members;
    };
    Result<Dialed> dial_any(bool only_node, std::optional<ByNode>& by_node);
    Result<ControlSocket> ask_for_masters(Result<Dialed> dialed, bool by_node);
    Status hear_masters(const FrameHeader& header) REQUIRES(io_mutex_);
    Status fit_members(uint64_t epoch) REQUIRES(io_mutex_);
    bool take_members(std::optional<uint64_t> heard_ms) REQUIRES(io_mutex_);

    DirectoryClientOptions options_;
    MasterAddresses addresses_;
    ForkGuard fork_;
    std::atomic<bool> connected_{false};
    std::atomic<bool> by_node_{false};  // the connection is one to the own node; written under io_mutex_
    std::atomic<bool> left_{false};     // whether Dialing has a socket
    std::atomic<uint64_t> no_node_until_ms_{0};  // the own node did not answer
    std::atomic<bool> closed_{false};
    std::atomic<Version> newest_{kNoVersion};

    Mutex io_mutex_;
    ControlSocket socket_ GUARDED_BY(io_mutex_);
    ClosedInChildren closed_in_children_{socket_.fd};
    int waits_ms_ GUARDED_BY(io_mutex_) = 0;         // of one wait of the call in progress
    bool again_ GUARDED_BY(io_mutex_) = false;       // the question is to be asked over another connection
    uint64_t back_at_ms_ GUARDED_BY(io_mutex_) = 0;  // then the own node is tried again
    std::vector<std::byte> out_ GUARDED_BY(io_mutex_), body_ GUARDED_BY(io_mutex_);
    size_t frame_at_ GUARDED_BY(io_mutex_) = 0;
    uint64_t next_request_ GUARDED_BY(io_mutex_) = 1;
    std::string key_ GUARDED_BY(io_mutex_);              // with follow_key: the last one that was looked at
    uint64_t look_at_key_ms_ GUARDED_BY(io_mutex_) = 0;  // then it is looked at again
    MembersCache members_ GUARDED_BY(io_mutex_);
    std::optional<MembersReader> file_ GUARDED_BY(io_mutex_);  // of the own node, while it relays
    uint64_t life_ GUARDED_BY(io_mutex_) = 0;                  // that file_ is to be of

    // Between callers and the thread that dials. A child of fork() does not destroy it: the thread is not
    // there, and destroying a condition variable waits for the threads that wait on it.
    struct Dialing {
        Mutex mutex;
        CondVar wake, done;
        bool wanted GUARDED_BY(mutex) = false, once GUARDED_BY(mutex) = false;
        bool only_node GUARDED_BY(mutex) = false;  // wanted: there is a connection to the master itself
        ControlSocket socket GUARDED_BY(mutex);    // that a caller has yet to take
        std::optional<ByNode> by_node GUARDED_BY(mutex);  // of the socket, where it is to the own node
        ClosedInChildren closed_in_children{socket.fd};
        Error why_not GUARDED_BY(mutex);
        std::unique_ptr<ServiceThread> thread GUARDED_BY(mutex);
    };
    Status start_dialer(Dialing& dialing) REQUIRES(dialing.mutex);
    std::unique_ptr<Dialing> dialing_ = std::make_unique<Dialing>();
    std::atomic<int> live_fd_{-1};  // of socket_, for close(), which does not wait for a call in progress
};

}  // namespace moonpool
