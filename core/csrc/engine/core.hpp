// What an engine is made of, behind its public face. The life of it is in core.cpp, its transfers in
// core_transfers.cpp; engine.cpp is the face.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/event_loop.hpp"
#include "base/mutex.hpp"
#include "device/card_copiers.hpp"
#include "engine/engine.hpp"
#include "engine/inbox.hpp"
#include "engine/peer.hpp"
#include "engine/tickets.hpp"
#include "transport/outside/library.hpp"
#include "transport/transport.hpp"
#include "wire/listener.hpp"

namespace moonpool {

namespace engine {

inline constexpr uint32_t kWorkersMax = 16;
// They mostly wait: to dial, one thread for a peer; to carry memory of cards through slots, four for a peer.
inline constexpr uint32_t kWaitersMax = 256;

// What the listener calls: it may outlive the engine.
struct Reception {
    Mutex mutex;
    transport::ControlCarrier* carrier GUARDED_BY(mutex) = nullptr;
};

Status check_message(std::string_view message);
Error takes_no_message(const Peer& peer);

inline Error forked() {
    return Error{Code::kForked, "this engine belongs to the parent process; make a new one after fork"};
}

}  // namespace engine

using engine::Outcome;
using engine::Peer;
using engine::Share;
using engine::Ticket;
using transport::Job;
using transport::Region;
using transport::Regions;
using transport::Slice;
using transport::SliceState;

struct Engine::Core {
    // A transport of the registry, in this engine.
    struct Entry {
        std::string_view name;
        std::unique_ptr<transport::Transport> transport;
        bool allowed = false;     // by the options
        bool of_files = false;    // it reaches files, and no peers
        std::string not_viable;   // why it cannot work on this host; empty: it can
        std::string unavailable;  // why it does not serve, in one sentence; empty: it does
    };

    explicit Core(EngineOptions o)
        : options(std::move(o)),
          inbox(kEngineInboxMessagesMax, kEngineInboxBytesMax),
          workers(engine::kWorkersMax),
          waiters(engine::kWaitersMax),
          card_waiters(engine::kWorkersMax) {}

    EngineOptions options;
    ForkGuard fork;
    std::atomic<bool> closing{false};
    std::atomic<int> calls{0};  // inside of us
    Mutex close_mutex;
    bool close_begun GUARDED_BY(close_mutex) = false;
    bool regions_taken GUARDED_BY(close_mutex) = false;
    bool closed GUARDED_BY(close_mutex) = false;  // and nothing is left
    // Tickets that had not ended when close() told their callers so: their jobs go on.
    std::vector<std::shared_ptr<Ticket>> unended GUARDED_BY(close_mutex);
    // close() has not seen the end of all that runs: threads and devices still use this object, which is
    // never freed then.
    std::atomic<bool> in_use{false};

    transport::Counters counters;
    transport::Identity identity;
    std::shared_ptr<transport::RegionTable> regions = std::make_shared<transport::RegionTable>();
    std::shared_ptr<transport::ShutOut> shut_out = std::make_shared<transport::ShutOut>();
    std::vector<std::string> addresses;
    // Out of the table, but something may still touch it.
    struct Leaving {
        std::shared_ptr<Region> region;
        std::vector<uint64_t> revocations;  // of each transport
    };
    Mutex undrained_mutex;
    std::vector<Leaving> undrained GUARDED_BY(undrained_mutex);
    device::CardCopiers cards;  // of which memory was registered
    engine::Inbox inbox;
    engine::Tickets tickets;

    std::vector<std::shared_ptr<const transport::outside::Library>> outside;  // before what has their names
    std::vector<Entry> transports;                 // in the order in which their links are tried
    transport::ControlCarrier* carrier = nullptr;  // one of them
    std::vector<std::unique_ptr<EventLoop>> loops;
    transport::Workers workers;       // copy, and wait for no peer
    transport::Workers waiters;       // wait for the network, a few for each peer
    transport::Workers card_waiters;  // what peers ask of cards and NICs: it waits for nothing of a peer
    std::shared_ptr<engine::Reception> reception = std::make_shared<engine::Reception>();
    std::unique_ptr<Listener> listener;

    Mutex peers_mutex;
    std::unordered_map<uint32_t, std::shared_ptr<Peer>> peers GUARDED_BY(peers_mutex);
    uint32_t next_peer GUARDED_BY(peers_mutex) = 1;

    // ---- life

    Status start();
    Status open_outside();
    Status check_transports() const;
    Status start_transports();
    Status add_transport(Entry entry);
    Service service();
    Result<std::vector<std::byte>> ask(std::string_view transport, const transport::SegmentId& peer,
                                       Reader question);
    // Idempotent, and may be repeated after kTimeout. again_ms: how long a repeated one waits.
    Status close(int again_ms);
    void begin_close();
    void take_regions() REQUIRES(close_mutex);
    bool end_calls(std::chrono::steady_clock::time_point end) REQUIRES(close_mutex);
    bool end_tickets(std::chrono::steady_clock::time_point end) REQUIRES(close_mutex);
    int close_ms() const;
    bool allows(std::string_view transport) const {
        if (!options.transports) return true;
        return std::ranges::find(*options.transports, transport) != options.transports->end();
    }

    // ---- regions

    // What a region of that memory needs.
    Result<transport::RegionMemory> memory_of(const MemoryRef& memory);
    Status add_region(uint64_t address, uint64_t length, const std::string& location,
                      transport::RegionMemory memory);
    // Waits until nothing touches the memory. After kTimeout it may be asked for again, to wait further.
    Status remove_region(uint64_t address);
    // By all transports, before any of them is waited for.
    Leaving begin_revoke(std::shared_ptr<Region> region);
    bool has_left(const Leaving& leaving);
    Status shut_out_peer(const transport::SegmentId& segment);
    Status deliver(const std::string& peer, std::span<const std::byte> message) {
        std::string text(reinterpret_cast<const char*>(message.data()), message.size());
        Status status = inbox.put(peer, std::move(text));
        if (!status) {
            counters.notifications_refused_total.fetch_add(1);
            return status;
        }
        counters.notifications_received_total.fetch_add(1);
        tickets.wake();
        return status;
    }

    // ---- calls

    class Call;
    Result<std::shared_ptr<transport::Link>> connect(const Entry& entry, const transport::Contact& contact);
    Status check_room_for_peer();
    Result<uint32_t> add_peer(transport::Contact contact);
    Result<std::shared_ptr<Peer>> find_peer(uint32_t segment);
    Status place_locals(std::span<const Slice> slices, const Regions& known, std::span<Region*> locals);
    void prepare(Job& job, const TransferRequest& request);
    Result<uint64_t> transfer_alone(const TransferRequest& request, const std::shared_ptr<Peer>& peer,
                                    TicketStatus* status);
    Result<std::shared_ptr<Ticket>> make_ticket(const TransferRequest& request);
    void launch(const std::shared_ptr<Ticket>& ticket);
    void end_share(const std::shared_ptr<Ticket>& ticket);
    void conclude(const std::shared_ptr<Ticket>& ticket, const std::vector<Share*>& shares, bool whole);
    void end_ticket(const std::shared_ptr<Ticket>& ticket);
    bool may_be_unsettled(const Peer& peer, const Job& job);
    bool settle(Peer& peer, const Job& job);
    Status check_told(Peer& peer, const Result<std::vector<std::byte>>& answer);
    Status tell(Peer& peer, std::string_view message, int timeout_ms);
    static TransferFailure untold(Peer& peer, const Error& error) {
        std::string path = peer.control() == nullptr ? "" : peer.control()->path();
        return TransferFailure{error, peer.info().address, path, error.text, true};
    }
};

// Every public call is one: it fails after close(), and close() waits for it.
class Engine::Core::Call {
   public:
    explicit Call(Core& core) : core_(core) {
        if (core.fork.in_child()) {
            error_ = engine::forked();
            return;
        }
        core.calls.fetch_add(1);
        entered_ = true;
        if (core.closing.load()) error_ = Error{Code::kClosed, "this engine is closed"};
    }
    ~Call() {
        if (entered_) core_.calls.fetch_sub(1);
    }
    Call(const Call&) = delete;

    bool ok() const { return error_.text.empty(); }
    const Error& error() const { return error_; }

   private:
    Core& core_;
    bool entered_ = false;
    Error error_;
};

}  // namespace moonpool
