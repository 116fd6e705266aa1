// The NIXL backend MOONPOOL: NIXL's agents move bytes of host memory over the transfer engine. What NIXL
// asks for is what Engine has: registered regions, peers by address, transfers that run by themselves,
// messages behind the data. NIXL carries the addresses from agent to agent, as "connection info".
//
// NIXL catches no exceptions, so each function that it calls does (`guarded`).
//
// Threads: NIXL's, several at a time for different requests; one request is used by one thread at a time.
// mutex_ guards peers_, and is not held while a peer is dialled. What holds: a peer has a segment while
// its engine has answered the last time; one that did not answer loses it (lost), and the next call that
// wants the peer dials again. A request whose ticket has ended keeps the outcome, which check() repeats
// for as long as NIXL asks.
#include "nixl/plugin.hpp"

#include <cstdio>
#include <exception>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/mutex.hpp"
#include "capi/surroundings.hpp"
#include "engine/engine.hpp"
#include "nixl/abi.hpp"
#include "nixl/host.hpp"
#include "wire/address.hpp"

namespace moonpool::nixl {

namespace {

using transport::Direction;
using transport::Slice;

constexpr char kListen[] = "listen";
constexpr char kLoopback[] = "127.0.0.1:0";
constexpr int kReleaseMs = 10000;  // twice what a peer that hangs takes

NixlStatus say(NixlStatus status, const std::string& what, const Error& error) {
    std::fprintf(stderr, "moonpool: %s: %s\n", what.c_str(), error.text.c_str());
    return status;
}

template <class Body>
NixlStatus guarded(const char* what, Body body) noexcept {
    try {
        return body();
    } catch (const std::exception& error) {  // no memory, no threads
        std::fprintf(stderr, "moonpool: %s: %s\n", what, error.what());
        return kNixlBackendError;
    }
}

struct Region final : NixlMetadata {
    explicit Region(uint64_t start) : NixlMetadata(true), address(start) {}
    uint64_t address;  // 0: a peer's, of which the address in each descriptor says all
};

struct Transfer final : NixlRequest {
    std::string agent;
    uint32_t segment = 0;
    std::optional<uint64_t> ticket;
    NixlStatus ended = kNixlSuccess;
};

Result<std::shared_ptr<Engine>> open_engine(const NixlSetup& setup) {
    auto given = setup.params->find(kListen);
    std::string listen = given == setup.params->end() ? kLoopback : given->second;
    Result<capi::Token> token = capi::cluster_token();
    if (!token) return token.error();
    if (!token->chosen && !capi::is_loopback(host_of(listen))) {
        return Error{Code::kAuth, "listen = " + listen +
                                      " can be reached from other hosts, which needs a cluster token: set "
                                      "MOONPOOL_CLUSTER_TOKEN_FILE"};
    }
    Result<capi::DataTls> tls = capi::data_tls();
    if (!tls) return tls.error();
    EngineOptions options;
    options.name = setup.agent;  // messages come from an agent by its name
    options.listen = {listen};
    options.token = token->secrets;
    options.tls_server = tls->server;
    options.tls_client = tls->client;
    return Engine::create(options);
}

class Backend final : public NixlEngine {
   public:
    explicit Backend(const NixlSetup& setup) : NixlEngine(setup) {
        auto engine = open_engine(setup);
        if (!engine) {
            say(kNixlBackendError, "the backend MOONPOOL", engine.error());
            broken_ = true;
            return;
        }
        engine_ = *engine;
        peers_[agent_].address = engine_->addresses().front();  // transfers within this agent
    }
    // What still runs ends here, at the engine's own deadline at the latest.
    ~Backend() override {
        if (engine_) (void)engine_->close();
    }

    bool supports_remote() const override { return true; }
    bool supports_local() const override { return true; }
    bool supports_messages() const override { return true; }
    std::vector<NixlMemory> memories() const override { return {kNixlDram, kNixlVram}; }

    NixlStatus register_memory(const NixlNamedRange& range, const NixlMemory& memory,
                               NixlMetadata*& out) override {
        return guarded("registerMem", [&] {
            if (memory != kNixlDram && memory != kNixlVram) return kNixlNotSupported;
            // An address that no transfer may touch is refused now, with a reason, and not by a fault when a
            // peer wants it.
            Result<MemoryRef> found = engine_->describe(range.address, range.length);
            if (!found) return say(kNixlInvalid, "registerMem", found.error());
            if ((found->kind == MemoryKind::kDevice) != (memory == kNixlVram)) {
                return say(kNixlInvalid, "registerMem",
                           Error{Code::kInvalidArgument,
                                 memory == kNixlVram ? "VRAM_SEG with an address of the host's memory"
                                                     : "DRAM_SEG with an address of a CUDA card's memory"});
            }
            auto region = std::make_unique<Region>(range.address);
            Status done = engine_->register_region(range.address, range.length, "");
            if (!done) return say(kNixlInvalid, "registerMem", done.error());
            out = region.release();
            return kNixlSuccess;
        });
    }
    NixlStatus deregister_memory(NixlMetadata* metadata) override {
        return guarded("deregisterMem", [&] {
            std::unique_ptr<Region> region(static_cast<Region*>(metadata));
            Status done = engine_->deregister_region(region->address);
            return done ? kNixlSuccess : say(kNixlBackendError, "deregisterMem", done.error());
        });
    }

    NixlStatus connect(const std::string& agent) override {
        return guarded("connect", [&] {
            Result<uint32_t> segment = segment_of(agent);
            return segment ? kNixlSuccess : say(kNixlDisconnected, "connect " + agent, segment.error());
        });
    }
    NixlStatus disconnect(const std::string& agent) override {
        return guarded("disconnect", [&] {
            MutexLock lock(mutex_);
            auto found = peers_.find(agent);
            if (found == peers_.end()) return kNixlNotFound;
            drop(found->second);
            // Transfers within this agent stay possible.
            if (agent != agent_) peers_.erase(found);
            return kNixlSuccess;
        });
    }
    NixlStatus unload(NixlMetadata* metadata) override {
        if (auto* region = static_cast<Region*>(metadata); region->address == 0) delete region;
        return kNixlSuccess;  // one of this agent's own is deregister_memory's
    }

    NixlStatus prepare(const NixlOperation&, const NixlRanges& local, const NixlRanges& remote,
                       const std::string&, NixlRequest*& request, const NixlOptions*) const override {
        return guarded("prepXfer", [&] {
            if (local.items.size() != remote.items.size()) return kNixlInvalid;
            // Regions are registered and peers connected by other calls: a request itself needs nothing.
            request = new Transfer();
            return kNixlSuccess;
        });
    }
    NixlStatus post(const NixlOperation& operation, const NixlRanges& local, const NixlRanges& remote,
                    const std::string& agent, NixlRequest*& request,
                    const NixlOptions* options) const override {
        return guarded("postXfer", [&] {
            return start(operation, local, remote, agent, static_cast<Transfer&>(*request), options);
        });
    }
    NixlStatus check(NixlRequest* request) const override {
        return guarded("checkXfer", [&] { return look(static_cast<Transfer&>(*request)); });
    }
    NixlStatus release(NixlRequest* request) const override {
        return guarded("releaseReqH", [&] {
            auto* transfer = static_cast<Transfer*>(request);
            // Cancels one that runs and waits for its end: NIXL's caller may free the memory afterwards.
            if (transfer->ticket) {
                Result<bool> over = engine_->end(*transfer->ticket, kReleaseMs);
                if (over && !*over) {
                    return say(kNixlBackendError, "releaseReqH",
                               Error{Code::kTimeout,
                                     "a card still makes copies of this transfer; release it later"});
                }
                (void)engine_->release(*transfer->ticket);
            }
            delete transfer;
            return kNixlSuccess;
        });
    }

    NixlStatus public_data(const NixlMetadata*, std::string& out) const override {
        out = "MOONPOOL";  // a peer needs nothing but the address
        return kNixlSuccess;
    }
    NixlStatus connection_info(std::string& out) const override {
        return guarded("getConnInfo", [&] {
            out = engine_->addresses().front();
            return kNixlSuccess;
        });
    }
    NixlStatus load_connection(const std::string& agent, const std::string& info) override {
        return guarded("loadRemoteConnInfo", [&] {
            MutexLock lock(mutex_);
            Peer& peer = peers_[agent];
            drop(peer);  // it may be another process of that name, at the same address, too
            peer.address = info;
            return kNixlSuccess;
        });
    }
    NixlStatus load_remote(const NixlNamedRange&, const NixlMemory& memory, const std::string&,
                           NixlMetadata*& out) override {
        return guarded("loadRemoteMD", [&] {
            if (memory != kNixlDram && memory != kNixlVram) return kNixlNotSupported;
            out = new Region(0);
            return kNixlSuccess;
        });
    }
    NixlStatus load_local(NixlMetadata* metadata, NixlMetadata*& out) override {
        out = metadata;
        return kNixlSuccess;
    }

    NixlStatus messages(NixlMessages& out) override {
        return guarded("getNotifs", [&] {
            auto arrived = engine_->notifications();
            if (!arrived) return say(kNixlBackendError, "getNotifs", arrived.error());
            for (auto& one : *arrived) out.push_back(std::move(one));
            return kNixlSuccess;
        });
    }
    NixlStatus send_message(const std::string& agent, const std::string& message) const override {
        return guarded("genNotif", [&] {
            Result<uint32_t> segment = segment_of(agent);
            if (!segment) return say(kNixlDisconnected, "genNotif", segment.error());
            Status told = engine_->notify(*segment, message);
            if (told) return kNixlSuccess;
            lost(agent, *segment);
            return say(kNixlDisconnected, "genNotif", told.error());
        });
    }

   private:
    struct Peer {
        std::string address;
        std::optional<uint32_t> segment;
    };

    Result<uint32_t> segment_of(const std::string& agent) const;
    void drop(Peer& peer) const REQUIRES(mutex_) {
        if (peer.segment) (void)engine_->close_segment(*peer.segment);
        peer.segment.reset();
    }
    // A peer did not answer: the next call that wants it dials again.
    void lost(const std::string& agent, uint32_t segment) const {
        MutexLock lock(mutex_);
        auto found = peers_.find(agent);
        if (found != peers_.end() && found->second.segment == segment) drop(found->second);
    }
    NixlStatus start(const NixlOperation& operation, const NixlRanges& local, const NixlRanges& remote,
                     const std::string& agent, Transfer& transfer, const NixlOptions* options) const;
    NixlStatus look(Transfer& transfer) const;

    std::shared_ptr<Engine> engine_;
    mutable Mutex mutex_;
    mutable std::map<std::string, Peer> peers_ GUARDED_BY(mutex_);
};

// Dials without the lock: a peer that hangs must not stop the others.
Result<uint32_t> Backend::segment_of(const std::string& agent) const {
    MutexLock lock(mutex_);
    auto found = peers_.find(agent);
    if (found == peers_.end()) return Error{Code::kInvalidArgument, "the agent " + agent + " is not known"};
    if (found->second.segment) return *found->second.segment;
    std::string address = found->second.address;
    lock.unlock();
    Result<uint32_t> opened = engine_->open(address);
    if (!opened) return opened.error();
    lock.lock();
    found = peers_.find(agent);
    bool same = found != peers_.end() && found->second.address == address;
    if (same && !found->second.segment) return *(found->second.segment = *opened);
    (void)engine_->close_segment(*opened);  // another thread was faster, or it was told of another address
    if (same) return *found->second.segment;
    return Error{Code::kUnavailable, "the agent " + agent + " is another by now"};
}

NixlStatus Backend::start(const NixlOperation& operation, const NixlRanges& local, const NixlRanges& remote,
                          const std::string& agent, Transfer& transfer, const NixlOptions* options) const {
    if (transfer.ticket) {  // posted again
        (void)engine_->release(*transfer.ticket);
        transfer.ticket.reset();
    }
    transfer.ended = kNixlBackendError;  // until it is known better
    if (local.items.size() != remote.items.size()) return transfer.ended = kNixlInvalid;
    Result<uint32_t> segment = segment_of(agent);
    // Nothing was begun; the next post dials again.
    if (!segment) return transfer.ended = say(kNixlDisconnected, "postXfer", segment.error());
    std::vector<Slice> slices;
    slices.reserve(local.items.size());
    for (size_t i = 0; i < local.items.size(); ++i) {
        if (local.items[i].length != remote.items[i].length) return transfer.ended = kNixlInvalid;
        if (local.items[i].length == 0) continue;
        slices.push_back({local.items[i].address, remote.items[i].address, local.items[i].length,
                          operation == kNixlRead ? Direction::kRead : Direction::kWrite});
    }
    bool tells = options != nullptr && options->has_message;
    if (slices.empty()) {
        return transfer.ended = tells ? send_message(agent, options->message) : kNixlSuccess;
    }
    TransferRequest moved;
    moved.segments = {&*segment, 1};
    moved.slices = slices;
    if (tells) moved.notify = options->message;
    transfer.agent = agent;
    transfer.segment = *segment;
    Result<uint64_t> ticket = engine_->submit(moved);
    if (!ticket) return transfer.ended = say(kNixlBackendError, "postXfer", ticket.error());
    transfer.ticket = *ticket;
    // A small one has ended by now; NIXL then needs no check().
    return look(transfer);
}

NixlStatus Backend::look(Transfer& transfer) const {
    if (!transfer.ticket) return transfer.ended;
    Result<bool> ended = engine_->is_over(*transfer.ticket);
    if (!ended) {  // the engine is closed: said once, also to a caller in a loop
        transfer.ticket.reset();
        return transfer.ended = say(kNixlBackendError, "checkXfer", ended.error());
    }
    if (!*ended) return kNixlInProgress;
    Result<TicketStatus> status = engine_->status(*transfer.ticket);
    (void)engine_->release(*transfer.ticket);
    transfer.ticket.reset();
    transfer.ended = kNixlSuccess;
    if (!status || status->state != TicketState::kDone) {
        Error why = status ? status->failure.error : status.error();
        // Where the memory is wrong, and the peer is there, dialling again would not help, and others use the
        // segment.
        bool there = why.code == Code::kInvalidArgument && engine_->segment(transfer.segment);
        if (!there) lost(transfer.agent, transfer.segment);
        transfer.ended = say(kNixlDisconnected, "a transfer", why);
    }
    return transfer.ended;
}

NixlEngine* create(const NixlSetup* setup) {
    Backend* backend = nullptr;
    (void)guarded("the backend MOONPOOL", [&] {
        backend = new Backend(*setup);
        return kNixlSuccess;
    });
    return backend;  // none: NIXL says that it cannot be made
}

NixlPlugin plugin{
    kNixlPluginApi,
    create,
    [](NixlEngine* engine) { delete engine; },
    [] { return "MOONPOOL"; },
    [] { return "0.1.0"; },
    [] {
        return NixlParams{{kListen, kLoopback}};
    },
    [] {
        return std::vector<NixlMemory>{kNixlDram, kNixlVram};
    },
};

}  // namespace

NixlPlugin* plugin_for(const Status& host) {
    if (host) return &plugin;
    say(kNixlNotSupported, "the backend MOONPOOL", host.error());
    return nullptr;
}

}  // namespace moonpool::nixl

// What libplugin_MOONPOOL.so calls: see entry.cpp.
extern "C" __attribute__((visibility("default"))) NixlPlugin* moonpool_nixl_plugin() {
    NixlPlugin* plugin = nullptr;
    (void)moonpool::nixl::guarded("the backend MOONPOOL", [&] {
        plugin = moonpool::nixl::plugin_for(moonpool::nixl::check_loaded());
        return kNixlSuccess;
    });
    return plugin;
}
