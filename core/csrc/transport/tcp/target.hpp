// The half of TCP that serves: connections of initiators, spread over the engine's I/O threads. The bytes of
// writes are received straight into the registered region, those of reads are sent straight from it; each
// region is entered for one system call at a time.
//
// An initiator that gives a connection up may have written on it what has not arrived yet. Before it repeats
// that elsewhere it fences the connection: after the answer nothing more of it reaches any region.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "base/event_loop.hpp"
#include "base/mutex.hpp"
#include "transport/tcp/staging.hpp"
#include "transport/transport.hpp"
#include "wire/listener.hpp"

namespace moonpool::transport::tcp {

inline constexpr size_t kConnectionsMax = 4096;

class Connection;

// Frames that cards write to a region. It outlives its connection where a card hangs.
using CopiesUnderWay = std::shared_ptr<std::atomic<int>>;

class Target {
   public:
    Target(const Context& context, std::shared_ptr<StagingPool> staging)
        : context_(context), staging_(std::move(staging)) {}

    // From any thread.
    void adopt(AuthenticatedConnection caller);

    const Context& context() const { return context_; }
    TransportCounters& counters() { return counters_; }  // what peers moved
    const TransportCounters& counters() const { return counters_; }

    // For connections, on their threads.
    struct Name {
        SegmentId segment{};
        uint32_t channel = 0;
        friend auto operator<=>(const Name&, const Name&) = default;
    };
    bool enlist(const Name& name, const std::shared_ptr<Connection>& connection);
    void strike_off(const Name& name, const Connection* connection);
    // -> what cards still write of what came over that connection, also when it is gone; null: nothing.
    CopiesUnderWay fence(const Name& name);
    // All connections of that initiator. is_out: cards write nothing of theirs any more, either.
    void shut_out(const SegmentId& segment);
    bool is_out(const SegmentId& segment);
    StagingPool& staging() { return *staging_; }
    void closed() { context_.counters.connections.fetch_sub(1); }

   private:
    const Context context_;
    const std::shared_ptr<StagingPool> staging_;  // of connections inside TLS
    TransportCounters counters_;
    std::atomic<size_t> next_{0};
    Mutex mutex_;
    std::map<Name, std::weak_ptr<Connection>> named_ GUARDED_BY(mutex_);
    std::map<Name, CopiesUnderWay> ended_ GUARDED_BY(mutex_);  // connections of which cards still write
};

}  // namespace moonpool::transport::tcp
