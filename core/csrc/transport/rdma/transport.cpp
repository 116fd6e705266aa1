#include "transport/rdma/transport.hpp"

#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <bit>

#include "transport/nic/link.hpp"
#include "transport/rdma/rail.hpp"

namespace moonpool::transport::rdma {

namespace {

constexpr size_t kRailsMax = 8;  // to one peer

// Bits at the front that an address here shares with the nearest one there: ports of one subnet have most.
// -1: the ports are of different kinds.
int nearness(const PortFacts& here, const OfferedPort& there) {
    if (here.address.infiniband != there.address.infiniband) return -1;
    const GidEntry own = here.gids_toward(there.gids).front();
    int most = -1;
    for (const Gid& gid : there.gids) {
        if (!here.address.infiniband && is_ipv4(own.gid) != is_ipv4(gid)) continue;
        most = std::max(most, shared_bits(own.gid, gid));
    }
    return most;
}

// Of those that may reach the peer the kRailsMax that are nearest to the memory of this host; port i here and
// port i there, unless another one of the peer is nearer.
std::vector<std::unique_ptr<nic::Rail>> pair_ports(const std::vector<std::shared_ptr<Port>>& own,
                                                   const std::vector<OfferedPort>& peer,
                                                   std::atomic<uint32_t>& next, const Context& context) {
    std::vector<std::unique_ptr<nic::Rail>> rails;
    std::vector<bool> taken(peer.size());
    std::vector<size_t> places;
    std::vector<nic::NearPort> usable;
    for (size_t i = 0; i < own.size(); ++i) {
        const PortFacts facts = own[i]->facts();
        auto reached = [&](const OfferedPort& port) { return nearness(facts, port) >= 0; };
        if (std::ranges::none_of(peer, reached)) continue;
        places.push_back(i);
        usable.push_back(own[i]->near());
    }
    for (size_t chosen : nic::choose_ports(usable, kRailsMax)) {
        const size_t i = places[chosen];
        const PortFacts here = own[i]->facts();
        std::optional<size_t> best;
        int most = -1;
        for (size_t k = 0; k < peer.size(); ++k) {
            const int near = taken[k] ? -1 : nearness(here, peer[k]);
            if (near < 0) continue;
            const int bits = 2 * near + (i == k ? 1 : 0);
            if (bits <= most) continue;
            most = bits;
            best = k;
        }
        if (!best) continue;
        taken[*best] = true;
        uint32_t number = next.fetch_add(1);
        rails.push_back(std::make_unique<Rail>(own[i], static_cast<uint8_t>(*best), peer[*best], number,
                                               context.options.rdma.window_bytes,
                                               *context.loops[number % context.loops.size()]));
    }
    return rails;
}

std::vector<nic::NearPort> near_of(const std::vector<std::shared_ptr<Port>>& ports) {
    std::vector<nic::NearPort> near;
    for (const auto& port : ports) near.push_back(port->near());
    return near;
}

// No more ports than an engine offers, and no more devices than it may have: those of ports in use before
// those of ports that wait. A device that is left with no port is closed.
void keep_nearest(Nics& nics) {
    std::vector<std::shared_ptr<Device>> devices;
    auto keeps = [&](const std::shared_ptr<Port>& port) {
        auto found = std::ranges::find(devices, port->device);
        if (found == devices.end() && devices.size() == nic::kDevicesMax) return false;
        port->device_index = static_cast<size_t>(found - devices.begin());
        if (found == devices.end()) devices.push_back(port->device);
        return true;
    };
    std::vector<std::shared_ptr<Port>> ports;
    for (size_t i : nic::choose_ports(near_of(nics.ports), kPortsMax)) ports.push_back(nics.ports[i]);
    nics.ports.clear();
    std::ranges::copy_if(ports, std::back_inserter(nics.ports), keeps);
    std::erase_if(nics.waiting, [&](const auto& port) { return !keeps(port); });
    nics.devices = std::move(devices);
}

// Empty: a NIC here may get keys for memory of a card.
std::string why_no_card_keys(const Verbs& verbs, const std::string& machine) {
    if (verbs.reg_dmabuf_mr != nullptr) return "";
    for (const char* module : {"nvidia_peermem", "nv_peer_mem"}) {
        if (::access((machine + "/sys/module/" + module).c_str(), F_OK) == 0) return "";
    }
    return "no NIC here takes memory of a card: libibverbs lacks ibv_reg_dmabuf_mr, which rdma-core 34 "
           "has, and the kernel module nvidia_peermem is not loaded (modprobe nvidia-peermem)";
}

}  // namespace

// What a NIC says by itself: ports that go down and come back, and that have other addresses from now on.
class Transport::PortEvents final : public EventHandler {
   public:
    PortEvents(std::shared_ptr<Device> device, std::vector<std::shared_ptr<Port>> ports,
               std::shared_ptr<PortList> in_use, std::weak_ptr<nic::Keys> keys)
        : device_(std::move(device)),
          ports_(std::move(ports)),
          in_use_(std::move(in_use)),
          keys_(std::move(keys)) {}

    bool on_events(uint32_t) override {
        ib::AsyncEvent event{};
        while (device_->verbs.get_async_event(device_->context, &event) == 0) {
            auto number = static_cast<int>(reinterpret_cast<uintptr_t>(event.element) & 0xffffffff);
            const int type = event.type;
            for (const auto& port : ports_) {
                if (type == ib::kEventFatal) port->up = false;
                if (port->number != number) continue;
                if (type == ib::kEventPortError) port->up = false;
                if (type == ib::kEventPortActive || type == ib::kEventLid || type == ib::kEventGid) {
                    read_again(port, type == ib::kEventPortActive);
                }
            }
            device_->verbs.ack_async_event(&event);
        }
        return true;
    }

   private:
    // Queue pairs that there are keep their addresses; the next ones have what the port has now.
    void read_again(const std::shared_ptr<Port>& port, bool active) {
        Result<PortFacts> facts = read_facts(*port);
        const bool in_use = in_use_->has(port);
        if (facts) port->set(std::move(*facts));
        if (in_use && active) port->up = true;  // its addresses may come later
        if (!facts || in_use) return;
        if (std::shared_ptr<nic::Keys> keys = keys_.lock()) keys->take_in(port->device_index);
        port->up = true;
        in_use_->add(port);
    }

    const std::shared_ptr<Device> device_;
    const std::vector<std::shared_ptr<Port>> ports_;
    const std::shared_ptr<PortList> in_use_;
    const std::weak_ptr<nic::Keys> keys_;
};

std::string Transport::viable(const Context& context) {
    Result<const Verbs*> verbs = open_verbs(context.options.rdma.library);
    if (!verbs) return verbs.error().text;
    Status found = has_device(**verbs);
    return found ? "" : found.error().text;
}

Status Transport::start() {
    Result<const Verbs*> verbs = open_verbs(context_.options.rdma.library);
    if (!verbs) return verbs.error();
    Result<Nics> nics = open_nics(**verbs, context_.options.rdma.devices);
    if (!nics) return nics.error();
    auto all_of = [](const Nics& of) {
        std::vector<std::shared_ptr<Port>> all = of.ports;
        all.insert(all.end(), of.waiting.begin(), of.waiting.end());
        return all;
    };
    std::vector<std::shared_ptr<Port>> all = all_of(*nics);
    std::vector<nic::NearPort> near = near_of(all);
    const topology::Machine machine = nic::machine_for(near, context_.options.machine);
    nic::rank_ports(machine, near);
    for (size_t i = 0; i < all.size(); ++i) all[i]->tiers = std::move(near[i].tiers);
    keep_nearest(*nics);
    all = all_of(*nics);
    devices_ = std::move(nics->devices);
    ports_->set(nics->ports);
    std::vector<std::shared_ptr<nic::KeyMaker>> makers(devices_.begin(), devices_.end());
    serve_by(std::move(makers), context_.options.rdma, nic::cards_of(machine), nic::KeySize::k32,
             [this](uint8_t port, Reader question, Writer& answer) { return serve(port, question, answer); });
    EventLoop& loop = *context_.loops.front();
    for (size_t i = 0; i < devices_.size(); ++i) {
        const std::shared_ptr<Device>& device = devices_[i];
        auto of_device = [&](const auto& port) { return port->device == device; };
        if (std::ranges::none_of(nics->ports, of_device)) keys_->leave_out(i);
        std::vector<std::shared_ptr<Port>> ports;
        std::ranges::copy_if(all, std::back_inserter(ports), of_device);
        auto events = std::make_shared<PortEvents>(device, std::move(ports), ports_, keys_);
        loop.post([&loop, events, fd = device->context->async_fd] { loop.add(fd, EPOLLIN, events); });
    }
    return success();
}

Result<std::unique_ptr<nic::TargetEnd>> Transport::serve(uint8_t number, Reader question,
                                                         Writer& answer) const {
    Endpoint initiator = decode_endpoint(question);  // a later version may append
    const std::vector<std::shared_ptr<Port>> ports = ports_->all();
    if (!question.ok() || number >= ports.size()) {
        return Error{Code::kProtocol, "an unreadable question about a queue pair"};
    }
    const std::shared_ptr<Port>& port = ports[number];
    // No completion comes of what peers do.
    Result<std::shared_ptr<Completions>> none = Completions::create(port->device, 1, false);
    if (!none) return none.error();
    Result<std::unique_ptr<QueuePair>> pair = QueuePair::create(port, *none);
    if (!pair && pair.error().code == Code::kTooLarge && links_->end_idle(port->device_index)) {
        pair = QueuePair::create(port, *none);
    }
    if (!pair) return pair.error();
    std::string why;
    bool connected = false;
    for (const GidEntry& own : port->facts().gids_toward({initiator.port.gid})) {
        (*pair)->use(own);
        Status made = (*pair)->connect(initiator, false);
        connected = made.ok();
        if (connected) break;
        why += (why.empty() ? "" : "; ") + made.error().text;
    }
    if (!connected) return Error{Code::kUnavailable, std::move(why)};
    encode(answer, (*pair)->endpoint());
    return std::unique_ptr<nic::TargetEnd>(std::move(*pair));
}

void Transport::offer(PeerInfo& self) const { self.offers[kName] = encode_offer(ports_->all()); }

Result<std::shared_ptr<transport::Link>> Transport::connect(const PeerInfo& peer,
                                                            const std::shared_ptr<Control>& control,
                                                            int timeout_ms) {
    if (keys_ == nullptr) return Error{Code::kUnavailable, "no RDMA port is of use here"};
    auto offer = peer.offers.find(kName);
    if (offer == peer.offers.end()) return Error{Code::kUnavailable, "the peer does not offer RDMA"};
    std::optional<std::vector<OfferedPort>> ports = decode_offer(offer->second);
    if (!ports) return Error{Code::kProtocol, "the peer's offer of RDMA is unreadable"};
    std::vector<std::unique_ptr<nic::Rail>> rails = pair_ports(ports_->all(), *ports, next_rail_, context_);
    if (rails.empty()) {
        return Error{
            Code::kUnavailable,
            "no port here and of the peer are of one kind (InfiniBand, RoCE over IPv4, RoCE over IPv6)"};
    }
    auto link = std::make_shared<nic::Link>(
        context_,
        nic::LinkOptions{kName, nic::KeySize::k32, context_.options.rdma, links_,
                         why_no_card_keys(devices_.front()->verbs, context_.options.machine)},
        counters_, keys_, std::move(rails), control, timeout_ms);
    links_->add(link);
    return std::shared_ptr<transport::Link>(std::move(link));
}

}  // namespace moonpool::transport::rdma
