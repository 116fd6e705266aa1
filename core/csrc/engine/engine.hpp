// Engine: moves bytes between registered memory of processes, over whatever path is there. What C++ users
// include; moonpool.TransferEngine is the same for Python.
//
//   auto engine = *Engine::create({.listen = {"127.0.0.1:0"}, .token = token});
//   engine->register_region(address, length, "cpu:0");
//   uint32_t peer = *engine->open("10.0.0.7:7720");
//   engine->transfer({.segments = {&peer, 1}, .slices = slices});     // or submit(), wait(), status()
//
// Peers are found by a handshake at their address; nothing else needs to run. An engine belongs to one tenant
// and speaks to engines of that tenant only. Any thread may call; after close() every call fails with
// kClosed, in a child of fork() with kForked.
//
// Threads: `io_threads` serve peers and carry what was submitted; a caller of transfer() carries its transfer
// itself; copies and connections that no caller waits for run on working threads. Nothing waits longer than
// timeout_ms without progress.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/clock.hpp"
#include "base/journal.hpp"
#include "base/result.hpp"
#include "io/opened_file.hpp"
#include "transport/memory.hpp"
#include "transport/registry/registry.hpp"
#include "wire/listener.hpp"
#include "wire/secrets.hpp"

namespace moonpool {

// The maxima that are not those of the wire; what is over one is refused and says so.
inline constexpr size_t kEngineSegmentsMax = 4096;  // open at a time
inline constexpr size_t kEngineOutsideTransportsMax = 16;
inline constexpr size_t kEngineTicketsMax = 65536;        // not released
inline constexpr size_t kEngineSlicesMax = 1u << 20;      // of one transfer
inline constexpr size_t kEngineSlicesOpenMax = 4u << 20;  // of all that were submitted and still run
inline constexpr size_t kEngineInboxMessagesMax = 65536;  // notifications not fetched
inline constexpr size_t kEngineInboxBytesMax = 64u << 20;

struct EngineOptions {
    std::string name;
    std::vector<std::string> listen;  // host:port each; not with a listener
    Secrets token;
    std::string tenant = "default";
    uint32_t io_threads = 2;
    uint32_t connections_per_peer = 2;
    // Allowed ones; none given: all but those of the registry that have to be named.
    std::optional<std::vector<std::string>> transports;
    // Libraries with a transport each that is built outside of this tree (moonpool_transport.h), by their
    // absolute paths. Their links are tried before those of the transport that reaches every peer, TCP.
    std::vector<std::string> outside_transports;
    std::string interface;  // for connections to peers
    std::string host_id;    // engines with different ones never share memory
    int timeout_ms = 5000;
    Limits limits;                 // of what peers ask; tests have shorter times
    uint64_t frame_bytes = 0;      // of TCP; 0: its own choice. Tests make frames small, to have many borders
    std::string file_io = "auto";  // of files: io_uring, threads; auto: threads where io_uring is forbidden
    io::OpenForTransfers open_file = io::OpenedFile::open;  // tests give files that fail
    transport::RdmaOptions rdma;
    transport::FabricOptions fabric;
    // Of what a peer's links cost, by which they are ordered; null: they are tried in the order of the
    // registry.
    uint64_t (*link_clock_ns)() = now_ns;
    std::string machine;  // before /sys and /dev, where DAX devices are looked for; tests have machines
    std::span<const transport::Factory> registry = transport::registry();  // tests add to it
    // Connections of TCP, of control and of bytes, are inside TLS, those that come and those that are made;
    // null: in plain. A shared `listener` has its own.
    std::shared_ptr<const TlsServer> tls_server = nullptr;
    std::shared_ptr<const TlsClient> tls_client = nullptr;
    std::shared_ptr<Journal> journal = nullptr;  // of callers that the port refused; null: they are counted
    Listener* listener = nullptr;  // a port shared with others; offered to before its start(), outlives us
};

struct TransferRequest {
    std::span<const uint32_t> segments;  // one for all slices, or one for each
    std::span<const transport::Slice> slices;
    bool background = false;
    int timeout_ms = 0;                      // without progress; 0: the engine's
    std::optional<std::string_view> notify;  // told to the peers once all of the data is there
};

enum class TicketState { kWaiting, kDone, kFailed, kCancelled };

// Why a transfer did not go well: the first peer whose share did not.
struct TransferFailure {
    Error error;       // one sentence that names all of it
    std::string peer;  // as it was opened
    std::string path;  // that was tried last
    std::string cause;
    // No byte of it can reach memory any more, of a peer or of this process: each peer whose writes failed
    // has confirmed it. False: some may still, as those in the buffers of a connection that was given up.
    bool settled = true;
};

struct TicketStatus {
    TicketState state = TicketState::kWaiting;
    uint64_t bytes_done = 0;
    std::vector<transport::SliceState> slices;
    TransferFailure failure;
};

struct SegmentRegion {
    uint64_t address = 0;
    uint64_t length = 0;
    MemoryKind kind = MemoryKind::kHost;
    std::string location;
    std::string transport;  // the first that reaches it
};

struct SegmentInfo {
    std::string name;
    transport::SegmentId id{};
    std::string host_id;
    std::string address;
    std::vector<SegmentRegion> regions;
};

// How one transport reaches a peer, or why it does not.
struct SegmentPath {
    std::string transport;
    std::string path{};  // for people; empty: none
    std::string why{};   // there is none
    // What it has cost: a time for each slice and one for each byte, of so many jobs. 0: none was timed.
    uint64_t jobs = 0;
    double slice_ns = 0, byte_ns = 0;
    std::vector<transport::RailReport> rails{};  // where the path has such
    // Kinds of the peer's memory that the path does not reach, and why.
    std::vector<std::pair<MemoryKind, std::string>> unreached{};
    std::string remarks{};  // for people: parts of it that are not used, with the reasons
};

class Engine {
   public:
    static Result<std::shared_ptr<Engine>> create(EngineOptions options);
    ~Engine();
    Engine(const Engine&) = delete;

    const std::string& name() const;
    const transport::SegmentId& segment_id() const;
    const std::vector<std::string>& addresses() const;  // with the real ports
    // Every transport, in the order in which their links are tried at first: why it cannot be used here,
    // empty when it can.
    std::vector<std::pair<std::string, std::string>> transports() const;

    // Memory that peers on this host map: registered from birth. location: "node:2": of that NUMA node;
    // "dax:/dev/dax0.0": a piece of that DAX device; any other is a label.
    Result<std::shared_ptr<transport::Memory>> allocate(uint64_t bytes, const std::string& location);
    // What the memory at an address of this process is: kHost, kPinned, or kDevice with its card. An error in
    // one sentence: no transfer may touch it.
    Result<MemoryRef> describe(uint64_t address, uint64_t length) const;
    // location: empty: "cpu:0", or "cuda:" and the card's ordinal here.
    // label: what peers are shown as its location.
    Status register_region(uint64_t address, uint64_t length, const std::string& location,
                           std::string* label = nullptr);
    // When it returns success, no transfer of any peer touches the memory any more. After kTimeout something
    // still does; it may be called again, to wait further.
    Status deregister_region(uint64_t address);

    // The engine of that segment reaches nothing here any more, by any path: it has to be admitted, or to be
    // made anew, which gives it another segment. When it returns success, no byte of what it had under way
    // comes in; after kTimeout some still may, and it may be called again. What this engine does with the
    // other's memory goes on.
    Status shut_out(const transport::SegmentId& segment);
    // Takes it back. The other engine opens this one again, and until then reaches it by TCP alone.
    Status admit(const transport::SegmentId& segment);

    // A peer at "host:port", or a file by its URL, "file:///path", as open_file() without options.
    Result<uint32_t> open(const std::string& address);
    // A file or a block device of this host: one region, of the kind "file", in which addresses are offsets.
    Result<uint32_t> open_file(const std::string& path, const io::OpenOptions& options = {});
    Status close_segment(uint32_t segment);
    Result<SegmentInfo> segment(uint32_t segment);  // asked of the peer
    // Of all transports, in the order in which a transfer of small slices tries them. Asks nothing of the
    // peer.
    Result<std::vector<SegmentPath>> paths(uint32_t segment);

    // The bytes moved; fails when any slice failed, and then tells in `status`, when one is given, how far it
    // came. A status that was left waiting means that nothing was begun.
    Result<uint64_t> transfer(const TransferRequest& request, TicketStatus* status = nullptr);

    Result<uint64_t> submit(const TransferRequest& request);  // a ticket
    Result<bool> wait(uint64_t ticket, int timeout_ms);       // whether it has ended
    // Whether it has ended and nothing of it touches memory any more, also if it failed: see
    // has_abandoned_copies(). Never waits.
    Result<bool> is_over(uint64_t ticket);
    Result<TicketStatus> status(uint64_t ticket);
    // Begins nothing new of it. Ended at the latest a second later, or when dialling a peer that hangs is
    // over.
    Status cancel(uint64_t ticket);
    // Cancels it and waits, up to the time, until it has ended, and a second more until it is over: see
    // is_over(). False: it is not yet.
    Result<bool> end(uint64_t ticket, int timeout_ms);
    Status release(uint64_t ticket);       // forgets it, having cancelled it when it still runs
    Result<std::vector<uint64_t>> poll();  // tickets that ended since the last call
    int event_fd() const;                  // readable when poll() or notifications() has something
    // Whether a card may still make copies of a transfer that has ended badly: until it does not, the memory
    // that such a transfer was to write must not be used again. Never waits.
    Result<bool> has_abandoned_copies();

    Status notify(uint32_t segment, std::string_view message);
    Result<std::vector<std::pair<std::string, std::string>>> notifications();  // (peer's name, message)

    Status in_this_process() const;                                 // kForked in a child of fork()
    std::vector<std::pair<std::string, uint64_t>> metrics() const;  // none in a child: its locks are lost
    bool check_integrity() const;
    // Ends what runs, at the latest after timeout_ms, or 3 s if that is more. kTimeout: a device or a peer
    // may still touch registered memory, which must not be freed. It may be called again, to wait further for
    // these: what it began the first time is not begun anew.
    Status close();

   private:
    struct Core;
    explicit Engine(std::unique_ptr<Core> core);
    std::unique_ptr<Core> core_;
};

}  // namespace moonpool
