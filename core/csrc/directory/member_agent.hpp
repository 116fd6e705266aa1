// MemberAgent: what keeps a node in the pool. Its own thread dials the master and drives MemberProtocol over
// the connection: join, inventory, changes, beats. It connects again for ever, at most backoff_longest_ms
// apart; a node without a master goes on serving its clients.
//
// Only this thread ever waits for the store's loop (in the hooks), and the loop never waits for this thread.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/fd.hpp"
#include "base/fork.hpp"
#include "base/journal.hpp"
#include "base/mutex.hpp"
#include "base/result.hpp"
#include "base/service_thread.hpp"
#include "directory/delta_log.hpp"
#include "directory/master_claims.hpp"
#include "directory/master_list.hpp"
#include "directory/member_protocol.hpp"
#include "directory/ranges.hpp"
#include "directory/types.hpp"
#include "wire/control_socket.hpp"
#include "wire/frame_reader.hpp"
#include "wire/secrets.hpp"

namespace moonpool {

struct MemberAgentOptions {
    std::string master;  // "host:port"; empty: none, until set_master()
    Range range{};       // of the shards, that the master has
    Secrets token;
    std::string interface;
    std::shared_ptr<const TlsClient> tls;  // null: plain
    NodeIdentity identity;
    int timeout_ms = 1000;  // without progress; then it connects anew
    int backoff_first_ms = 50;
    int backoff_longest_ms = 500;
    std::shared_ptr<Journal> journal;  // of joins and of what keeps it from them; null: none
    int batch_ms = 5;                  // changes wait so long for others to go with them, or longer
    // On the agent's thread: what a master that has proved the token says of where the masters are, and
    // which owner one that refused the node has named. Null: none hears it.
    std::function<void(const MasterList&, const std::string& at)> on_masters = nullptr;
    std::function<void(const std::string& owner, const std::string& at)> on_owner = nullptr;
    std::shared_ptr<MasterClaims> claims = nullptr;  // of all agents of a node; null: this is the only one
};

class MemberAgent {
   public:
    MemberAgent(MemberAgentOptions options, MemberHooks hooks, DeltaLog& log);
    ~MemberAgent();
    MemberAgent(const MemberAgent&) = delete;

    Status start();
    void stop();  // idempotent
    // The next stop() sends no LEAVE, as another process goes on in the node's place. At once, on any thread.
    void abandon();
    void wake();  // the log has rows: any thread, never blocks
    // Joins that master, once a connection that it has is over; empty: none then. False: it has a connection
    // to another one, which another agent is to replace. Any thread, never blocks.
    bool set_master(const std::string& address);
    // The master that it is connected to, else the one that it dials.
    std::string place() const {
        MutexLock lock(state_mutex_);
        return at_.empty() ? master_ : at_;
    }
    std::string master() const {
        MutexLock lock(state_mutex_);
        return master_;
    }

    struct State {
        bool joined = false;       // and its inventory is told
        NodeId id = kNoNode;       // of its last incarnation
        std::string why_not;       // the last reason to be without a master, while not joined
        uint64_t epoch = 0;        // of the membership, as of the last beat
        uint64_t answered_ms = 0;  // since the master's last answer
        bool large_pool = false;   // so that the master has to care how often it is asked
    };
    State state() const;
    using Counters = MemberCounters;
    const Counters& counters() const { return counters_; }
    void settle_soon() { protocol_.settle_soon(); }  // as MemberProtocol has it

   private:
    using Clock = std::chrono::steady_clock;

    // One connection, from JOIN to its end.
    struct Link {
        ControlSocket socket;
        std::string peer;  // the address, as it was dialed
        FrameReader in;
    };

    void run();
    void attempt(const std::string& master, int& backoff_ms);
    void pause(int ms);
    bool is_over(const std::string& master) const { return stopping_ || this->master() != master; }
    bool begin(const std::string& master);
    Status live(Link& link, bool asks_for_masters);
    Status wait(Link& link);
    Status read_answers(Link& link);
    Status send_frame(Link& link, std::span<const std::byte> frame);
    void note_progress();
    void set_why_not(const std::string& why);
    void note_tls_files();

    MemberAgentOptions options_;
    Counters counters_;
    Fd wake_;
    std::atomic<bool> stopping_{false};  // ends an attempt to connect, too
    std::atomic<bool> leaves_{true};     // at the end of the connection
    ServiceThread thread_;

    MemberProtocol protocol_;               // of the thread
    std::optional<Incarnation> elsewhere_;  // the master that another agent has joined; of the thread

    mutable Mutex state_mutex_;
    std::string master_ GUARDED_BY(state_mutex_);
    std::string at_ GUARDED_BY(state_mutex_);  // the master of its connection; empty: it has none
    State state_ GUARDED_BY(state_mutex_);
    Clock::time_point answered_at_ GUARDED_BY(state_mutex_){};
    uint64_t answers_ GUARDED_BY(state_mutex_) = 0;
};

}  // namespace moonpool
