// The thin waist under the engine. A Transport moves slices between this process and a peer's regions over
// one kind of path. An engine has one object of each; registry/registry.cpp lists them. Each lives in a
// folder of its own, with the same files:
//
//   transport.hpp  the Transport: what the engine asks of it
//   target.hpp     the half that serves: what others may do to this process's regions
//   link.hpp       the half that begins transfers: one peer, as this transport reaches it
//
// Its life: made, start(), offer(); then connect(), add_region() and revoke() in any order, from
// any thread; withdraw(), close(), destroyed. One that the user does not allow is made, and asked for nothing
// but control().
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/clock.hpp"
#include "base/event_loop.hpp"
#include "base/journal.hpp"
#include "base/result.hpp"
#include "memory/node_of_memory.hpp"
#include "transport/control.hpp"
#include "transport/counters.hpp"
#include "transport/identity.hpp"
#include "transport/link.hpp"
#include "transport/region.hpp"
#include "transport/shut_out.hpp"
#include "transport/workers.hpp"
#include "wire/limits.hpp"
#include "wire/secrets.hpp"
#include "wire/tls.hpp"

namespace moonpool::transport {

// Of transports whose NICs read and write the memory of both sides (nic/link.hpp).
struct NicOptions {
    uint64_t chunk_bytes = 1ull << 30;  // of memory that has one key
    uint64_t piece_bytes = 256u << 10;  // into which large slices are cut
    uint64_t window_bytes = 4u << 20;   // under way on one rail
    int silence_ms = 150;               // then a rail is given up
    uint64_t (*clock_ns)() = now_ns;    // of rails; a test has one of its own
    int (*node_of)(const void* address) = node_of_memory;
};

struct RdmaOptions : NicOptions {
    std::string library;               // libibverbs; empty: the system's, where the kernel has a device
    std::vector<std::string> devices;  // by name; none: all
};

struct FabricOptions : NicOptions {
    FabricOptions() {
        piece_bytes = 1u << 20;
        silence_ms = 2000;  // a provider repeats by itself what is lost
    }

    std::string library = "libfabric.so.1";
    std::string provider = "efa";
    std::vector<std::string> devices;  // by name; none: all
    std::string source;  // address or name of this host, for providers that have such; empty: none
};

struct ConnectOptions {
    Secrets token;
    std::shared_ptr<const TlsClient> tls = nullptr;  // of connections by TCP to peers; null: in plain
    std::shared_ptr<Journal> journal = nullptr;      // of trouble with its files; null: not told
    std::string interface;  // network device of connections to peers, empty: the route decides
    uint32_t connections_per_peer = 2;
    uint64_t frame_bytes = 0;      // of TCP; 0: its own choice
    std::string file_io = "auto";  // io_uring, threads
    int timeout_ms = 5000;         // without progress
    Limits limits;                 // of what peers ask; tests have shorter times
    RdmaOptions rdma;
    FabricOptions fabric;
    std::string machine;  // before /sys and /dev; "" but in tests
};

// What an engine gives to each of its transports; it outlives them.
struct Context {
    const Identity& identity;
    std::shared_ptr<RegionTable> regions;
    std::shared_ptr<const ShutOut> shut_out;
    Counters& counters;  // of the engine, over all transports
    std::function<Status(const std::string& peer, std::span<const std::byte> message)> deliver;
    // What copies to and from the card of that ordinal; an error: why there is none.
    std::function<Result<std::shared_ptr<device::CardCopier>>(int ordinal)> card;
    // A question of a peer for one transport, which may wait; and that the last connection of a peer has
    // ended.
    std::function<Result<std::vector<std::byte>>(std::string_view transport, const SegmentId& peer,
                                                 Reader question)>
        ask;
    std::function<void(const SegmentId& peer)> left;
    std::vector<EventLoop*> loops;  // at least one: they serve peers and carry posted jobs
    Workers& waiters;               // threads that may wait for the network
    Workers&
        card_waiters;  // threads that wait for what peers ask of cards and NICs, and for nothing of a peer
    const std::atomic<bool>& closing;  // the engine's
    ConnectOptions options;
};

using Metrics = std::vector<std::pair<std::string, uint64_t>>;

class Transport {
   public:
    virtual ~Transport() = default;

    // Serves peers from here on. After an error peers are offered nothing of it; it still connects to them.
    virtual Status start() { return success(); }
    // Writes into the handshake what peers need to connect by it.
    virtual void offer(PeerInfo& self) const { (void)self; }

    // A link to a peer; an error says in one sentence why it does not reach that peer. `control` may be asked
    // for what the handshake does not say.
    virtual Result<std::shared_ptr<Link>> connect(const PeerInfo& peer,
                                                  const std::shared_ptr<Control>& control,
                                                  int timeout_ms) = 0;

    // A region entered the table, and peers may see it already. An error refuses its registration.
    virtual Status add_region(Region& region) {
        (void)region;
        return success();
    }
    // The region has left the table and is closing. Peers begin nothing new with it by this transport; once
    // drained() is true of the number returned, nothing that they began reaches it any more.
    virtual uint64_t revoke(const Region& region) {
        (void)region;
        return 0;
    }
    virtual bool drained(uint64_t revocation) {
        (void)revocation;
        return true;
    }

    // That engine is among those that are shut out: it begins nothing more by this transport, and what it has
    // open ends. Once is_out(), nothing of it reaches a region any more.
    virtual void shut_out(const SegmentId& segment) { (void)segment; }
    virtual bool is_out(const SegmentId& segment) {
        (void)segment;
        return true;
    }

    // A question of a peer's transport of this name (Kind::kEngineAsk), on a thread that may wait for this
    // host.
    virtual Result<std::vector<std::byte>> answer(const SegmentId& peer, Reader question) {
        (void)peer, (void)question;
        return Error{Code::kProtocol, "this transport answers no questions"};
    }
    // No connection of that peer is left: it has gone, or is out of reach. On an I/O thread.
    virtual void peer_left(const SegmentId& peer) { (void)peer; }

    // The engine begins to close: no new peer finds this transport, and peers in this process leave it.
    virtual void withdraw() {}
    // No region is in the table, and no transfer of this process begins any more: peers lose their links.
    virtual void close() {}

    // Of the transport by which engines find each other; null: it is none.
    virtual ControlCarrier* control() { return nullptr; }

    // Appends what it counts, under its name in the registry.
    virtual void metrics(const std::string& name, Metrics& rows) const { append(name, counters_, rows); }

   protected:
    static void append(const std::string& name, const TransportCounters& counters, Metrics& rows) {
        rows.emplace_back(name + "_read_bytes_total", counters.read.bytes);
        rows.emplace_back(name + "_read_slices_total", counters.read.slices);
        rows.emplace_back(name + "_write_bytes_total", counters.write.bytes);
        rows.emplace_back(name + "_write_slices_total", counters.write.slices);
    }

    TransportCounters counters_;  // as the initiator
};

// One row of the registry. Rows of the store's table of paths (store/client/block_path.hpp) have this form,
// too; docs/design.md says what each table decides.
struct Factory {
    std::string_view name;                          // as users and metrics name it
    std::string (*viable)(const Context& context);  // why it cannot work on this host; empty: it can
    std::unique_ptr<Transport> (*make)(const Context& context);
    bool of_files = false;  // it reaches files, and no peers
};

}  // namespace moonpool::transport
