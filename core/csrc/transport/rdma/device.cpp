#include "transport/rdma/device.hpp"

#include <arpa/inet.h>
#include <fcntl.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <tuple>

#include "device/dma_buf.hpp"

namespace moonpool::transport::rdma {

namespace {

constexpr int kKeyAccess = ib::kLocalWrite | ib::kRemoteWrite | ib::kRemoteRead;

// IPv4, IPv6, and addresses of one link.
int rank_of(const Gid& gid) {
    if (is_ipv4(gid)) return 0;
    return gid[0] == 0xfe && (gid[1] & 0xc0) == 0x80 ? 2 : 1;
}

// The device list, freed with the scope.
class DeviceList {
   public:
    explicit DeviceList(const Verbs& verbs) : verbs_(verbs), list_(verbs.get_device_list(&count_)) {
        if (list_ == nullptr) error_ = errno;
    }
    ~DeviceList() {
        if (list_ != nullptr) verbs_.free_device_list(list_);
    }
    DeviceList(const DeviceList&) = delete;

    Status sound() const {
        if (list_ != nullptr && count_ > 0) return success();
        // A kernel without the module of user verbs says that the function is not implemented.
        std::string why = list_ != nullptr ? "" : std::string(" (") + std::strerror(error_) + ")";
        return Error{Code::kUnavailable, "libibverbs finds no RDMA device on this host" + why};
    }
    int count() const { return count_; }
    ib::Device* at(int i) const { return list_[i]; }

   private:
    const Verbs& verbs_;
    int count_ = 0;
    int error_ = 0;
    ib::Device** list_;
};

Status check_names(const Verbs& verbs, const DeviceList& list, const std::vector<std::string>& names) {
    std::vector<std::string> here;
    for (int i = 0; i < list.count(); ++i) here.emplace_back(verbs.get_device_name(list.at(i)));
    for (const std::string& name : names) {
        if (std::ranges::find(here, name) != here.end()) continue;
        std::string text = "no RDMA device of this host is called \"" + name + "\"; it has";
        for (size_t i = 0; i < here.size(); ++i) text += (i == 0 ? " " : ", ") + here[i];
        return Error{Code::kInvalidArgument, std::move(text)};
    }
    return success();
}

double speed_gbit_s(const ib::PortAttr& port) {
    double lanes = port.active_width == 1 ? 1 : port.active_width == 16 ? 2 : port.active_width == 2 ? 4 : 8;
    switch (port.active_speed) {
        case 1:
            return lanes * 2.5;
        case 2:
            return lanes * 5;
        case 4:
        case 8:
            return lanes * 10;
        case 16:
            return lanes * 14;
        case 32:
            return lanes * 25;
        case 64:
            return lanes * 50;
        case 128:
            return lanes * 100;
        default:
            return 0;
    }
}

// The GIDs by which peers reach a RoCE port: of version 2, over IPv4 before IPv6. Why each one is not the
// first stands in port.rejected.
bool choose_gids(const Port& of, PortFacts& port, int entries) {
    const Verbs& verbs = of.device->verbs;
    auto reject = [&](int index, const Gid& gid, const char* why) {
        port.rejected += (port.rejected.empty() ? "" : "; ") + std::string("GID ") + std::to_string(index) +
                         " (" + gid_text(gid) + ") " + why;
    };
    for (int i = 0; i < entries && i < 256; ++i) {
        ib::GidEntry entry{};
        bool typed = verbs.query_gid_ex != nullptr &&
                     verbs.query_gid_ex(of.device->context, of.number, static_cast<uint32_t>(i), &entry, 0,
                                        sizeof(entry)) == 0;
        if (!typed && verbs.query_gid(of.device->context, of.number, i, &entry.gid) != 0) continue;
        Gid gid;
        std::memcpy(gid.data(), entry.gid.raw, gid.size());
        if (std::all_of(gid.begin(), gid.end(), [](uint8_t b) { return b == 0; })) continue;  // a hole
        if (typed && entry.type == ib::kGidRoce1) {
            reject(i, gid, "is RoCE v1, which no router forwards");
            continue;
        }
        port.gids.push_back({gid, static_cast<uint8_t>(i)});
    }
    if (port.gids.empty()) return false;
    std::ranges::stable_sort(port.gids, {}, [](const GidEntry& entry) { return rank_of(entry.gid); });
    if (port.gids.size() > kGidsMax) port.gids.resize(kGidsMax);
    for (size_t i = 1; i < port.gids.size(); ++i)
        reject(port.gids[i].index, port.gids[i].gid, "comes behind another one");
    port.address.gid = port.gids.front().gid;
    return true;
}

}  // namespace

Result<PortFacts> read_facts(const Port& port) {
    const Verbs& verbs = port.device->verbs;
    auto why = [](std::string text) { return Error{Code::kUnavailable, std::move(text)}; };
    ib::PortAttr asked{};
    if (int code = verbs.query_port(port.device->context, port.number, &asked); code != 0) {
        return why(std::string("cannot be asked (") + std::strerror(code) + ")");
    }
    if (asked.state != ib::kPortActive) return why("is not active");
    // A NIC of EFA is a device of libibverbs, too, and takes no queue pair of this transport's kind.
    if (asked.link_layer != ib::kInfiniBand && asked.link_layer != ib::kEthernet) {
        return why("is neither InfiniBand nor RoCE (NICs of EFA are for the transport efa)");
    }
    PortFacts facts;
    facts.address.infiniband = asked.link_layer == ib::kInfiniBand;
    facts.address.mtu = static_cast<uint8_t>(asked.active_mtu);
    facts.address.lid = asked.lid;
    facts.gbit_s = speed_gbit_s(asked);
    if (!facts.address.infiniband) {
        if (choose_gids(port, facts, asked.gid_tbl_len)) return facts;
        return why("has no GID of use" + (facts.rejected.empty() ? "" : ": " + facts.rejected));
    }
    ib::Gid gid{};
    if (verbs.query_gid(port.device->context, port.number, 0, &gid) == 0) {
        std::memcpy(facts.address.gid.data(), gid.raw, sizeof(gid.raw));
    }
    facts.gids = {{facts.address.gid, 0}};
    if (facts.address.lid != 0) return facts;
    return why("has no LID: no subnet manager has given it one");
}

bool is_ipv4(const Gid& gid) {
    return std::all_of(gid.begin(), gid.begin() + 10, [](uint8_t b) { return b == 0; }) && gid[10] == 0xff &&
           gid[11] == 0xff;
}

int shared_bits(const Gid& a, const Gid& b) {
    int bits = 0;
    for (size_t i = 0; i < a.size(); ++i) {
        auto differing = static_cast<uint8_t>(a[i] ^ b[i]);
        bits += std::countl_zero(differing);
        if (differing != 0) break;
    }
    return bits;
}

std::string gid_text(const Gid& gid) {
    char text[INET6_ADDRSTRLEN] = {};
    if (is_ipv4(gid)) {
        ::inet_ntop(AF_INET, gid.data() + 12, text, sizeof(text));
    } else {
        ::inet_ntop(AF_INET6, gid.data(), text, sizeof(text));
    }
    return text;
}

std::string verb_error_text(int code) {
    std::string text = std::strerror(code);
    return code == ENOMEM ? text + "; raise the limit of locked memory (ulimit -l)" : text;
}

std::string PortAddress::text() const { return infiniband ? "LID " + std::to_string(lid) : gid_text(gid); }

std::string Port::text() const { return name + " " + facts().address.text(); }

std::vector<GidEntry> PortFacts::gids_toward(const std::vector<Gid>& peer) const {
    auto bits = [&](const GidEntry& entry, auto same) {
        int most = -1;
        for (const Gid& gid : peer) {
            if (same(gid) == same(entry.gid)) most = std::max(most, shared_bits(entry.gid, gid));
        }
        return most;
    };
    std::vector<GidEntry> ordered;
    for (const GidEntry& entry : gids) {
        if (bits(entry, is_ipv4) >= 0) ordered.push_back(entry);
    }
    if (ordered.empty()) return {gids.front()};  // and says that it does not reach the peer
    std::ranges::stable_sort(ordered, {}, [&](const GidEntry& entry) {
        const int most = bits(entry, rank_of);
        return std::tuple(most < 0, rank_of(entry.gid), -most);
    });
    if (ordered.size() > kGidsTriedMax) ordered.resize(kGidsTriedMax);
    return ordered;
}

Device::Device(const Verbs& v, ib::Context* c, ib::Pd* p, std::string n)
    : verbs(v), context(c), pd(p), name(std::move(n)), commands_(c->cmd_fd), events_(c->async_fd) {
    // An event is asked for when the descriptor says so, on a thread that must not wait.
    ::fcntl(c->async_fd, F_SETFL, ::fcntl(c->async_fd, F_GETFL) | O_NONBLOCK);
}

Device::~Device() {
    (void)commands_.release();  // the library closes them
    (void)events_.release();
    (void)verbs.dealloc_pd(pd);
    (void)verbs.close_device(context);
}

Status has_device(const Verbs& verbs) { return DeviceList(verbs).sound(); }

Result<Nics> open_nics(const Verbs& verbs, const std::vector<std::string>& names) {
    DeviceList list(verbs);
    if (Status sound = list.sound(); !sound) return sound.error();
    if (Status known = check_names(verbs, list, names); !known) return known.error();
    Nics nics;
    auto leave_out = [&](const std::string& name, const std::string& why) {
        nics.why_not += (nics.why_not.empty() ? "" : "; ") + name + " " + why;
    };
    for (int i = 0; i < list.count(); ++i) {
        std::string name = verbs.get_device_name(list.at(i));
        if (!names.empty() && std::ranges::find(names, name) == names.end()) {
            leave_out(name, "is not among the devices of this engine");
            continue;
        }
        ib::Context* context = verbs.open_device(list.at(i));
        if (context == nullptr) {
            leave_out(name, std::string("cannot be opened (") + std::strerror(errno) + ")");
            continue;
        }
        ib::Pd* pd = verbs.alloc_pd(context);
        if (pd == nullptr) {
            leave_out(name, std::string("gives no protection domain (") + std::strerror(errno) + ")");
            (void)verbs.close_device(context);
            continue;
        }
        auto device = std::make_shared<Device>(verbs, context, pd, name);
        if (int code = verbs.query_device(context, &device->facts); code != 0) {
            leave_out(name, std::string("cannot be asked (") + std::strerror(code) + ")");
            continue;
        }
        size_t before = nics.ports.size() + nics.waiting.size();
        for (uint8_t number = 1; number <= device->facts.ports; ++number) {
            auto port = std::make_shared<Port>();
            port->device = device;
            port->device_index = nics.devices.size();
            port->number = number;
            port->name = name + ":" + std::to_string(number);
            Result<PortFacts> facts = read_facts(*port);
            port->up = facts.ok();
            if (facts) {
                port->set(std::move(*facts));
                nics.ports.push_back(std::move(port));
            } else {
                leave_out(port->name, facts.error().text);
                nics.waiting.push_back(std::move(port));
            }
        }
        if (nics.ports.size() + nics.waiting.size() != before) nics.devices.push_back(std::move(device));
    }
    if (nics.ports.empty()) return Error{Code::kUnavailable, "no RDMA port is of use: " + nics.why_not};
    return nics;
}

// A message never relies on the order of writes: a read behind them comes first (rail.hpp).
Result<Device::Made> Device::make_key(uint64_t address, uint64_t bytes) {
    auto* at = reinterpret_cast<void*>(address);
    ib::Mr* made = nullptr;
    errno = EINVAL;
    if (verbs.reg_mr_iova2 != nullptr) {
        made = verbs.reg_mr_iova2(pd, at, bytes, address, kKeyAccess | ib::kRelaxedOrdering);
    }
    if (made == nullptr && errno == EINVAL) made = verbs.reg_mr(pd, at, bytes, kKeyAccess);
    if (made == nullptr) return Error{Code::kUnavailable, verb_error_text(errno)};
    return Made{made, made->lkey, made->rkey};
}

Result<Device::Made> Device::make_card_key(const device::Device& card, uint64_t address, uint64_t bytes) {
    if (!card.facts().orders_nic_writes) {
        return Error{Code::kUnavailable,
                     "the card's kernels may not see what a NIC has written "
                     "(GPU_DIRECT_RDMA_WRITES_ORDERING)"};
    }
    std::string why;
    if (verbs.reg_dmabuf_mr == nullptr) {
        why = "libibverbs lacks ibv_reg_dmabuf_mr, which rdma-core 34 has";
    } else if (Result<device::DmaBuf> buffer = device::export_dma_buf(card, address, bytes); !buffer) {
        why = buffer.error().text;
    } else {
        ib::Mr* made = verbs.reg_dmabuf_mr(pd, buffer->offset, bytes, address, buffer->fd.get(), kKeyAccess);
        if (made != nullptr) return Made{made, made->lkey, made->rkey};
        why = "the NIC takes no dma-buf of the card: " + verb_error_text(errno);
    }
    Result<Made> plain = make_key(address, bytes);
    if (plain) return plain;
    return Error{Code::kUnavailable, why + "; nor its addresses (" + plain.error().text +
                                         "), as with the kernel module nvidia_peermem: modprobe "
                                         "nvidia-peermem"};
}

bool Device::end_key(void* handle) { return verbs.dereg_mr(static_cast<ib::Mr*>(handle)) == 0; }

}  // namespace moonpool::transport::rdma
