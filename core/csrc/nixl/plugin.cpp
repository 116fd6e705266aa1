// The NIXL backend MOONPOOL: NIXL's agents move bytes of host memory over the transfer engine. What NIXL asks
// for is what Engine has: registered regions, peers by address, transfers that run by themselves, messages
// behind the data. NIXL carries the addresses from agent to agent, as "connection info".
#include <cstdio>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "capi/surroundings.hpp"
#include "engine/engine.hpp"
#include "nixl/abi.hpp"
#include "wire/address.hpp"

namespace moonpool::nixl {

namespace {

using transport::Direction;
using transport::Slice;

constexpr char kListen[] = "listen";
constexpr char kLoopback[] = "127.0.0.1:0";

NixlStatus say(NixlStatus status, const std::string& what, const Error& error) {
    std::fprintf(stderr, "moonpool: %s: %s\n", what.c_str(), error.text.c_str());
    return status;
}

struct Region final : NixlMetadata {
    explicit Region(uint64_t start) : NixlMetadata(true), address(start) {}
    uint64_t address;  // 0: a peer's, of which the address in each descriptor says all
};

struct Transfer final : NixlRequest {
    std::optional<uint64_t> ticket;
    NixlStatus ended = kNixlSuccess;
};

bool is_loopback(const std::string& host) {
    return host == "localhost" || host == "::1" || host.starts_with("127.");
}

Result<std::shared_ptr<Engine>> open_engine(const NixlSetup& setup) {
    auto given = setup.params->find(kListen);
    std::string listen = given == setup.params->end() ? kLoopback : given->second;
    Result<capi::Token> token = capi::cluster_token();
    if (!token) return token.error();
    if (!token->chosen && !is_loopback(host_of(listen))) {
        return Error{Code::kAuth, "listen = " + listen +
                                      " can be reached from other hosts, which needs a cluster token: set "
                                      "MOONPOOL_CLUSTER_TOKEN_FILE"};
    }
    EngineOptions options{};
    options.name = setup.agent;  // messages come from an agent by its name
    options.listen = {listen};
    options.token = token->bytes;
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
    ~Backend() override {
        if (engine_) engine_->close();
    }

    bool supports_remote() const override { return true; }
    bool supports_local() const override { return true; }
    bool supports_messages() const override { return true; }
    std::vector<NixlMemory> memories() const override { return {kNixlDram}; }

    NixlStatus register_memory(const NixlNamedRange& range, const NixlMemory& memory,
                               NixlMetadata*& out) override {
        if (memory != kNixlDram) return kNixlNotSupported;
        if (Status checked = capi::check_memory(range.address, range.length); !checked) {
            return say(kNixlInvalid, "registerMem", checked.error());
        }
        Status done = engine_->register_region(range.address, range.length, "cpu:0");
        if (!done) return say(kNixlInvalid, "registerMem", done.error());
        out = new Region(range.address);
        return kNixlSuccess;
    }
    NixlStatus deregister_memory(NixlMetadata* metadata) override {
        std::unique_ptr<Region> region(static_cast<Region*>(metadata));
        Status done = engine_->deregister_region(region->address);
        return done ? kNixlSuccess : say(kNixlBackendError, "deregisterMem", done.error());
    }

    NixlStatus connect(const std::string& agent) override {
        Result<uint32_t> segment = segment_of(agent);
        return segment ? kNixlSuccess : say(kNixlDisconnected, "connect " + agent, segment.error());
    }
    NixlStatus disconnect(const std::string& agent) override {
        std::lock_guard lock(mutex_);
        auto found = peers_.find(agent);
        if (found == peers_.end()) return kNixlNotFound;
        if (found->second.segment) (void)engine_->close_segment(*found->second.segment);
        if (agent != agent_) peers_.erase(found);
        return kNixlSuccess;
    }
    NixlStatus unload(NixlMetadata* metadata) override {
        if (auto* region = static_cast<Region*>(metadata); region->address == 0) delete region;
        return kNixlSuccess;  // one of this agent's own is deregister_memory's
    }

    NixlStatus prepare(const NixlOperation&, const NixlRanges& local, const NixlRanges& remote,
                       const std::string&, NixlRequest*& request, const NixlOptions*) const override {
        if (local.items.size() != remote.items.size()) return kNixlInvalid;
        request = new Transfer();
        return kNixlSuccess;
    }
    NixlStatus post(const NixlOperation& operation, const NixlRanges& local, const NixlRanges& remote,
                    const std::string& agent, NixlRequest*& request,
                    const NixlOptions* options) const override;
    NixlStatus check(NixlRequest* request) const override;
    NixlStatus release(NixlRequest* request) const override {
        std::unique_ptr<Transfer> transfer(static_cast<Transfer*>(request));
        if (transfer->ticket) (void)engine_->release(*transfer->ticket);
        return kNixlSuccess;
    }

    NixlStatus public_data(const NixlMetadata*, std::string& out) const override {
        out = "MOONPOOL";  // a peer needs nothing but the address
        return kNixlSuccess;
    }
    NixlStatus connection_info(std::string& out) const override {
        out = engine_->addresses().front();
        return kNixlSuccess;
    }
    NixlStatus load_connection(const std::string& agent, const std::string& info) override {
        std::lock_guard lock(mutex_);
        Peer& peer = peers_[agent];
        if (peer.segment && peer.address != info) {  // another process of that name
            (void)engine_->close_segment(*peer.segment);
            peer.segment.reset();
        }
        peer.address = info;
        return kNixlSuccess;
    }
    NixlStatus load_remote(const NixlNamedRange&, const NixlMemory& memory, const std::string&,
                           NixlMetadata*& out) override {
        if (memory != kNixlDram) return kNixlNotSupported;
        out = new Region(0);
        return kNixlSuccess;
    }
    NixlStatus load_local(NixlMetadata* metadata, NixlMetadata*& out) override {
        out = metadata;
        return kNixlSuccess;
    }

    NixlStatus messages(NixlMessages& out) override {
        auto arrived = engine_->notifications();
        if (!arrived) return say(kNixlBackendError, "getNotifs", arrived.error());
        for (auto& one : *arrived) out.push_back(std::move(one));
        return kNixlSuccess;
    }
    NixlStatus send_message(const std::string& agent, const std::string& message) const override {
        Result<uint32_t> segment = segment_of(agent);
        if (!segment) return say(kNixlDisconnected, "genNotif", segment.error());
        Status told = engine_->notify(*segment, message);
        return told ? kNixlSuccess : say(kNixlDisconnected, "genNotif", told.error());
    }

   private:
    struct Peer {
        std::string address;
        std::optional<uint32_t> segment;
    };

    Result<uint32_t> segment_of(const std::string& agent) const {
        std::lock_guard lock(mutex_);
        auto found = peers_.find(agent);
        if (found == peers_.end())
            return Error{Code::kInvalidArgument, "the agent " + agent + " is not known"};
        if (!found->second.segment) {
            Result<uint32_t> opened = engine_->open(found->second.address);
            if (!opened) return opened.error();
            found->second.segment = *opened;
        }
        return *found->second.segment;
    }

    std::shared_ptr<Engine> engine_;
    mutable std::mutex mutex_;
    mutable std::map<std::string, Peer> peers_;
};

NixlStatus Backend::post(const NixlOperation& operation, const NixlRanges& local, const NixlRanges& remote,
                         const std::string& agent, NixlRequest*& request, const NixlOptions* options) const {
    auto* transfer = static_cast<Transfer*>(request);
    if (transfer->ticket) {  // posted again
        (void)engine_->release(*transfer->ticket);
        transfer->ticket.reset();
    }
    Result<uint32_t> segment = segment_of(agent);
    if (!segment) return say(kNixlDisconnected, "postXfer", segment.error());
    std::vector<Slice> slices;
    slices.reserve(local.items.size());
    for (size_t i = 0; i < local.items.size(); ++i) {
        if (local.items[i].length != remote.items[i].length) return kNixlInvalid;
        if (local.items[i].length == 0) continue;
        slices.push_back({local.items[i].address, remote.items[i].address, local.items[i].length,
                          operation == kNixlRead ? Direction::kRead : Direction::kWrite});
    }
    bool tells = options != nullptr && options->has_message;
    if (slices.empty()) return tells ? send_message(agent, options->message) : kNixlSuccess;
    TransferRequest moved;
    moved.segments = {&*segment, 1};
    moved.slices = slices;
    if (tells) moved.notify = options->message;
    Result<uint64_t> ticket = engine_->submit(moved);
    if (!ticket) return say(kNixlBackendError, "postXfer", ticket.error());
    transfer->ticket = *ticket;
    return check(request);
}

NixlStatus Backend::check(NixlRequest* request) const {
    auto* transfer = static_cast<Transfer*>(request);
    if (!transfer->ticket) return transfer->ended;
    Result<bool> ended = engine_->wait(*transfer->ticket, 0);
    if (!ended) return say(kNixlBackendError, "checkXfer", ended.error());
    if (!*ended) return kNixlInProgress;
    Result<TicketStatus> status = engine_->status(*transfer->ticket);
    (void)engine_->release(*transfer->ticket);
    transfer->ticket.reset();
    transfer->ended = kNixlSuccess;
    if (!status || status->state != TicketState::kDone) {
        transfer->ended =
            say(kNixlDisconnected, "a transfer", status ? status->failure.error : status.error());
    }
    return transfer->ended;
}

NixlPlugin plugin{
    kNixlPluginApi,
    [](const NixlSetup* setup) -> NixlEngine* { return new Backend(*setup); },
    [](NixlEngine* engine) { delete engine; },
    [] { return "MOONPOOL"; },
    [] { return "0.1.0"; },
    [] {
        return NixlParams{{kListen, kLoopback}};
    },
    [] { return std::vector<NixlMemory>{kNixlDram}; },
};

}  // namespace

}  // namespace moonpool::nixl

extern "C" __attribute__((visibility("default"))) NixlPlugin* nixl_plugin_init() {
    return &moonpool::nixl::plugin;
}

extern "C" __attribute__((visibility("default"))) void nixl_plugin_fini() {}
