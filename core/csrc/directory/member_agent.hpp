// MemberAgent: what keeps a node in the pool. Its own thread: dials the master, joins, tells the node's whole
// inventory, then what changes, and beats. Connects again for ever, at most backoff_longest_ms apart; a node
// without a master goes on serving its clients.
//
// Only this thread ever waits for the store's loop, and the loop never waits for this thread.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/fd.hpp"
#include "base/fork.hpp"
#include "base/journal.hpp"
#include "base/mutex.hpp"
#include "base/result.hpp"
#include "base/service_thread.hpp"
#include "directory/delta_log.hpp"
#include "directory/protocol.hpp"
#include "directory/types.hpp"
#include "wire/control_socket.hpp"
#include "wire/frame_reader.hpp"

namespace moonpool {

struct MemberAgentOptions {
    std::string master;  // "host:port"
    std::string token;
    std::string interface;
    std::shared_ptr<const TlsClient> tls;  // null: plain
    NodeIdentity identity;
    int timeout_ms = 1000;  // without progress; then it connects anew
    int backoff_first_ms = 50;
    int backoff_longest_ms = 500;
    std::shared_ptr<Journal> journal;  // of joins and of what keeps it from them; null: none
    int batch_ms = 5;                  // changes wait at most so long for others to go with them
};

// What the agent asks of its node, on its own thread. Each gives up by itself when the node does not answer;
// false ends the connection.
struct MemberHooks {
    // The next rows of the inventory, from `cursor` (0: the beginning) on, to `rows`; cursor is 0 again at
    // the end.
    std::function<bool(uint64_t& cursor, std::vector<DeltaRow>& rows)> inventory;
    std::function<bool(NodeLoad& load)> load;
    // Copies that are void: removed elsewhere while this node was away. all: everything is.
    std::function<bool(bool all, const std::vector<Hash128>& hashes)> drop;
};

class MemberAgent {
   public:
    MemberAgent(MemberAgentOptions options, MemberHooks hooks, DeltaLog& log);
    ~MemberAgent();
    MemberAgent(const MemberAgent&) = delete;

    Status start();
    void stop();  // idempotent
    void wake();  // the log has rows: any thread, never blocks

    struct State {
        bool joined = false;       // and its inventory is told
        NodeId id = kNoNode;       // of its last incarnation
        std::string why_not;       // the last reason to be without a master, while not joined
        uint64_t epoch = 0;        // of the membership, as of the last beat
        uint64_t answered_ms = 0;  // since the master's last answer
    };
    State state() const;
    struct Counters {
        std::atomic<uint64_t> joins_total{0}, connect_failures_total{0}, inventories_total{0};
        std::atomic<uint64_t> rows_sent_total{0}, beats_total{0}, dropped_total{0};
    };
    const Counters& counters() const { return counters_; }

   private:
    using Clock = std::chrono::steady_clock;

    // One connection, from JOIN to its end.
    struct Link {
        ControlSocket socket;
        std::string peer;
        uint64_t next_request = 1;
        uint32_t beat_ms = 200;
        uint32_t rows_max = 16384;
        Clock::time_point next_beat{}, asked_at{}, told_at{};
        bool beat_open = false;  // a BEAT without its answer
        bool inventory = false;  // is being told
        bool begun = false;      // and its first frame is sent
        uint64_t cursor = 0;
        FrameReader in;
    };

    void run();
    Status live(Link& link);
    Status join(Link& link);
    Status step(Link& link);
    Status tell_inventory(Link& link);
    Status tell_changes(Link& link);
    Status send_rows(Link& link, const std::vector<DeltaRow>& rows, uint8_t first_flags, uint8_t last_flags);
    Status send_beat(Link& link);
    void send_leave(Link& link);
    Status read_answers(Link& link, bool wait);
    Status on_answer(Link& link, const FrameHeader& header, Reader body);
    Status carry_out(const Drops& drops);
    Status send_frame(Link& link);  // out_
    void set_why_not(const std::string& why);

    MemberAgentOptions options_;
    MemberHooks hooks_;
    DeltaLog& log_;
    Counters counters_;
    Fd wake_;
    std::atomic<bool> stopping_{false};  // ends an attempt to connect, too
    ServiceThread thread_;

    // Of the thread.
    std::vector<std::byte> out_;
    std::vector<DeltaRow> rows_;
    uint64_t drops_done_ = 0;
    NodeId id_ = kNoNode;

    mutable Mutex state_mutex_;
    State state_ GUARDED_BY(state_mutex_);
    Clock::time_point answered_at_ GUARDED_BY(state_mutex_){};
};

}  // namespace moonpool
