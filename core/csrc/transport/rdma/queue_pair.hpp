// QueuePair: one end of a reliable connection between two ports, which it leaves at its end: from then on the
// NIC touches nothing for it.
#pragma once

#include <memory>
#include <span>

#include "transport/nic/target.hpp"
#include "transport/rdma/device.hpp"

namespace moonpool::transport::rdma {

// What the other side needs to connect to a queue pair.
struct Endpoint {
    PortAddress port;
    uint32_t number = 0;
    uint32_t psn = 0;   // of the first packet that it sends, 24 bits
    uint8_t reads = 1;  // that it answers, and sends, at a time
};

// Where completions of the queue pairs of one rail arrive, and the descriptor that tells of them.
class Completions {
   public:
    static Result<std::shared_ptr<Completions>> create(std::shared_ptr<Device> device, int entries,
                                                       bool tells);
    ~Completions();
    Completions(const Completions&) = delete;

    ib::Cq* cq() const { return cq_; }
    int fd() const { return channel_ == nullptr ? -1 : channel_->fd; }
    int poll(std::span<ib::Wc> out) {
        return device_->context->ops.poll_cq(cq_, static_cast<int>(out.size()), out.data());
    }
    // The descriptor tells of the next completion. Poll once more behind it.
    void arm() { (void)device_->context->ops.req_notify_cq(cq_, 0); }
    void take_events();

   private:
    Completions(std::shared_ptr<Device> device, ib::Channel* channel, ib::Cq* cq)
        : device_(std::move(device)), channel_(channel), cq_(cq) {}
    const std::shared_ptr<Device> device_;
    ib::Channel* const channel_;
    ib::Cq* const cq_;
};

inline constexpr int kQueuePairsMax = 4096;     // of a device
inline constexpr uint32_t kSendRequests = 512;  // at most, that one has open

class QueuePair final : public nic::TargetEnd {
   public:
    static Result<std::unique_ptr<QueuePair>> create(std::shared_ptr<Port> port,
                                                     std::shared_ptr<Completions> completions);
    ~QueuePair() override;
    QueuePair(const QueuePair&) = delete;

    // Before connect(): the GID of its port by which the peer is to reach it; else it is the port's first.
    void use(const GidEntry& own) { own_ = own; }
    // May wait for the kernel to find the way to the peer. `sends`: it begins transfers; else it answers
    // only. One that answers may be connected again after an error.
    Status connect(const Endpoint& peer, bool sends);
    Endpoint endpoint() const;
    uint32_t inline_bytes() const { return inline_bytes_; }
    uint32_t requests_max() const { return requests_max_; }
    // -> 0 or an errno; `bad`: the first that was not taken.
    int post(ib::SendWr* first, ib::SendWr** bad) {
        return port_->device->context->ops.post_send(qp_, first, bad);
    }

   private:
    QueuePair(std::shared_ptr<Port> port, std::shared_ptr<Completions> completions)
        : port_(std::move(port)),
          completions_(std::move(completions)),
          facts_(port_->facts()),
          own_(facts_.gids.front()) {}
    const std::shared_ptr<Port> port_;
    const std::shared_ptr<Completions> completions_;
    const PortFacts facts_;  // when it was made
    GidEntry own_;
    ib::Qp* qp_ = nullptr;
    uint32_t psn_ = 0;
    uint32_t inline_bytes_ = 0, requests_max_ = 0;
};

}  // namespace moonpool::transport::rdma
