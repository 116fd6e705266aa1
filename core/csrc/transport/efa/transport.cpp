#include "transport/efa/transport.hpp"

#include <algorithm>

#include "transport/efa/messages.hpp"
#include "transport/efa/rail.hpp"
#include "transport/nic/link.hpp"

namespace moonpool::transport::efa {

namespace {

constexpr size_t kRailsMax = 8;            // to one peer
constexpr size_t kServedCompletions = 64;  // none comes

// This side of a connection that a peer uses.
class ServedEndpoint final : public nic::TargetEnd {
   public:
    ServedEndpoint(std::shared_ptr<Server> server, std::unique_ptr<Endpoint> endpoint)
        : server_(std::move(server)), endpoint_(std::move(endpoint)) {
        server_->add(endpoint_.get());
    }
    ~ServedEndpoint() override { server_->remove(endpoint_.get()); }

   private:
    const std::shared_ptr<Server> server_;
    const std::unique_ptr<Endpoint> endpoint_;
};

}  // namespace

Transport::~Transport() {
    if (progress_ != nullptr) progress_->stop();
    end();
}

std::string Transport::viable(const Context& context) {
    Status found = has_nic(context.options.fabric);
    return found ? "" : found.error().text;
}

Status Transport::start() {
    const FabricOptions& options = context_.options.fabric;
    Result<std::vector<std::shared_ptr<Domain>>> domains = Domain::open_all(options);
    if (!domains) return domains.error();
    keep_nearest(*domains, context_.options.machine);
    std::vector<std::shared_ptr<Server>> servers;
    for (const auto& domain : *domains) servers.push_back(std::make_shared<Server>(domain));
    Result<std::shared_ptr<Progress>> progress = Progress::start(servers);
    if (!progress) return progress.error();
    servers_ = std::move(servers);
    progress_ = std::move(*progress);
    std::vector<std::shared_ptr<nic::KeyMaker>> makers(domains->begin(), domains->end());
    serve_by(std::move(makers), options, {}, nic::KeySize::k64,
             [this](uint8_t port, Reader question, Writer& answer) { return serve(port, question, answer); });
    return success();
}

void Transport::offer(PeerInfo& self) const {
    if (servers_.empty()) return;
    Offer offer{context_.options.fabric.provider, {}};
    for (const auto& server : servers_) offer.nics.push_back(server->domain->device_name());
    self.offers[kName] = encode_offer(offer);
}

Result<std::shared_ptr<transport::Link>> Transport::connect(const PeerInfo& peer,
                                                            const std::shared_ptr<Control>& control,
                                                            int timeout_ms) {
    if (keys_ == nullptr) return Error{Code::kUnavailable, "no NIC of libfabric is of use here"};
    auto found = peer.offers.find(kName);
    if (found == peer.offers.end()) return Error{Code::kUnavailable, "the peer does not offer EFA"};
    std::optional<Offer> offer = decode_offer(found->second);
    if (!offer) return Error{Code::kProtocol, "the peer's offer of EFA is unreadable"};
    const FabricOptions& options = context_.options.fabric;
    if (offer->provider != options.provider) {
        return Error{Code::kUnavailable, "the peer's provider of libfabric is \"" + offer->provider +
                                             "\", and the one here \"" + options.provider + "\""};
    }
    // Those near to the memory of this host, others for each peer where several are; NIC i here and NIC i
    // there, where there are as many.
    std::vector<std::unique_ptr<nic::Rail>> rails;
    std::vector<nic::NearPort> near;
    for (const auto& server : servers_) near.push_back(server->domain->near);
    const size_t n = std::min({kRailsMax, servers_.size(), offer->nics.size()});
    uint32_t number = next_rail_.fetch_add(static_cast<uint32_t>(n));
    for (size_t here : nic::choose_ports(near, n, number / static_cast<uint32_t>(n))) {
        const size_t there = near.size() == offer->nics.size() ? here : number % offer->nics.size();
        rails.push_back(std::make_unique<Rail>(servers_[here]->domain, here, static_cast<uint8_t>(there),
                                               offer->nics[there], number++, options.window_bytes,
                                               progress_));
    }
    auto link =
        std::make_shared<nic::Link>(context_, nic::LinkOptions{kName, nic::KeySize::k64, options, links_},
                                    counters_, keys_, std::move(rails), control, timeout_ms);
    links_->add(link);
    return std::shared_ptr<transport::Link>(std::move(link));
}

Result<std::unique_ptr<nic::TargetEnd>> Transport::serve(uint8_t port, Reader question,
                                                         Writer& answer) const {
    std::optional<PeerEndpoint> initiator = decode_endpoint(question);
    if (!initiator || port >= servers_.size()) {
        return Error{Code::kProtocol, "an unreadable question about an endpoint of EFA"};
    }
    const std::shared_ptr<Server>& server = servers_[port];
    Result<std::unique_ptr<Endpoint>> made = Endpoint::create(server->domain, kServedCompletions);
    if (!made) return made.error();
    if (Status added = (*made)->add_peer(initiator->address); !added) return added.error();
    Result<std::vector<std::byte>> own = (*made)->address();
    if (!own) return own.error();
    std::vector<std::byte> text = encode_endpoint({server->domain->names_by_address(), std::move(*own)});
    answer.bytes(text.data(), text.size());
    auto end = std::make_unique<ServedEndpoint>(server, std::move(*made));
    progress_->wake_once();
    return std::unique_ptr<nic::TargetEnd>(std::move(end));
}

// A provider that works in software may be in the middle of a request when its key ends: the endpoints of all
// that know the key end, too, and their engines connect anew.
bool Transport::drained(uint64_t revocation) {
    if (!nic::Transport::drained(revocation)) return false;
    if (revocation != 0) target_->leave_region(revocation);
    return true;
}

}  // namespace moonpool::transport::efa
