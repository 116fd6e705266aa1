// The NICs of this host, as one engine opens them: Device, with its protection domain; Port, one of its ports
// by which peers are reached.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "base/fd.hpp"
#include "base/fork.hpp"
#include "base/mutex.hpp"
#include "base/result.hpp"
#include "transport/nic/keys.hpp"
#include "transport/nic/near_ports.hpp"
#include "transport/rdma/verbs.hpp"

namespace moonpool::transport::rdma {

using Gid = std::array<uint8_t, 16>;

// An entry of a port's table of GIDs.
struct GidEntry {
    Gid gid{};
    uint8_t index = 0;
};
inline constexpr size_t kGidsMax = 16;      // of a port
inline constexpr size_t kGidsTriedMax = 4;  // of those, for one connection

// How the other side reaches a port.
struct PortAddress {
    bool infiniband = false;  // by LID; else RoCE, by GID
    uint8_t mtu = 0;          // as in the ABI: 1 is 256 bytes, 5 is 4,096
    uint16_t lid = 0;
    Gid gid{};

    std::string text() const;  // "10.0.0.7" or "LID 3"
};

class Device final : public nic::KeyMaker {
   public:
    Device(const Verbs& verbs, ib::Context* context, ib::Pd* pd, std::string name);
    ~Device() override;
    Device(const Device&) = delete;

    const std::string& device_name() const override { return name; }
    Result<Made> make_key(uint64_t address, uint64_t bytes) override;
    // By dma-buf, which needs no module; else as memory of the host, which the module nvidia_peermem allows.
    Result<Made> make_card_key(const device::Device& card, uint64_t address, uint64_t bytes) override;
    bool end_key(void* handle) override;

    const Verbs& verbs;
    ib::Context* const context;
    ib::Pd* const pd;
    const std::string name;
    ib::DeviceAttr facts{};
    std::atomic<int> queue_pairs{0};
    // Soft RoCE has the CPU that it shares with everything else: on a busy machine it is late, not silent.
    bool is_soft() const { return facts.vendor_id == kSoftVendor; }

   private:
    static constexpr uint32_t kSoftVendor = 0xffffff;

    // Closed in children of fork(): a queue pair ends with the process that made it.
    Fd commands_, events_;
    ClosedInChildren commands_closed_{commands_}, events_closed_{events_};
};

// What the kernel may give a port anew at any time.
struct PortFacts {
    PortAddress address;
    std::vector<GidEntry> gids;  // by which peers may reach it; address has the first
    double gbit_s = 0;
    std::string rejected;  // GIDs that are not the first, each with the reason

    // Those by which a peer with one of these GIDs may be reached, kGidsTriedMax at most, in the order in
    // which a connection tries them: IPv4, IPv6, addresses of the link; of one kind those of the peer's
    // subnet first. At least one.
    std::vector<GidEntry> gids_toward(const std::vector<Gid>& peer) const;
};

class Port {
   public:
    std::shared_ptr<Device> device;
    size_t device_index = 0;  // among the engine's
    uint8_t number = 1;
    std::string name;  // "mlx5_0:1"
    nic::Tiers tiers;
    std::atomic<bool> up{true};

    PortFacts facts() const {
        MutexLock lock(mutex_);
        return facts_;
    }
    void set(PortFacts facts) {
        MutexLock lock(mutex_);
        facts_ = std::move(facts);
    }

    nic::NearPort near() const { return {name.substr(0, name.rfind(':')), facts().gbit_s, tiers}; }
    std::string text() const;  // "mlx5_0:1 10.0.0.7"

   private:
    mutable Mutex mutex_;
    PortFacts facts_ GUARDED_BY(mutex_);
};

struct Nics {
    std::vector<std::shared_ptr<Device>> devices;  // that have one of these ports
    std::vector<std::shared_ptr<Port>> ports;      // active, with an address
    std::vector<std::shared_ptr<Port>> waiting;    // not so, or not yet
    std::string why_not;                           // of what is not among `ports`
};

// An error: this host has no device, or none can be opened; kInvalidArgument: it has none of one of the
// names. names: of the devices that may be used; none: all.
// At least one of the ports is active, with an address.
Result<Nics> open_nics(const Verbs& verbs, const std::vector<std::string>& names = {});
// Asks the kernel. An error: why the port is of no use now.
Result<PortFacts> read_facts(const Port& port);
// Whether it has a device; opens none.
Status has_device(const Verbs& verbs);

std::string gid_text(const Gid& gid);
bool is_ipv4(const Gid& gid);
// Bits at the front that two addresses share: ports of one subnet have most.
int shared_bits(const Gid& a, const Gid& b);
// Of a verb that failed; of memory with what an operator can do.
std::string verb_error_text(int code);

}  // namespace moonpool::transport::rdma
