// RDMA: NICs of both hosts read and write registered memory, over RoCE v2 or InfiniBand.
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/mutex.hpp"
#include "transport/nic/transport.hpp"
#include "transport/rdma/messages.hpp"

namespace moonpool::transport::rdma {

class Transport final : public nic::Transport {
   public:
    explicit Transport(const Context& context) : nic::Transport(context, "RDMA") {}
    ~Transport() override { end(); }

    static std::string viable(const Context& context);
    Status start() override;
    void offer(PeerInfo& self) const override;
    Result<std::shared_ptr<transport::Link>> connect(const PeerInfo& peer,
                                                     const std::shared_ptr<Control>& control,
                                                     int timeout_ms) override;

   private:
    class PortEvents;
    Result<std::unique_ptr<nic::TargetEnd>> serve(uint8_t port, Reader question, Writer& answer) const;

    // Ports in use: in the order of the offer, to which later ones are added.
    class PortList {
       public:
        void set(std::vector<std::shared_ptr<Port>> ports) {
            MutexLock lock(mutex_);
            ports_ = std::move(ports);
        }
        std::vector<std::shared_ptr<Port>> all() const {
            MutexLock lock(mutex_);
            return ports_;
        }
        bool has(const std::shared_ptr<Port>& port) const {
            MutexLock lock(mutex_);
            return std::ranges::find(ports_, port) != ports_.end();
        }
        void add(const std::shared_ptr<Port>& port) {
            MutexLock lock(mutex_);
            if (ports_.size() < kPortsMax) ports_.push_back(port);
        }

       private:
        mutable Mutex mutex_;
        std::vector<std::shared_ptr<Port>> ports_ GUARDED_BY(mutex_);
    };

    std::vector<std::shared_ptr<Device>> devices_;  // none before start()
    const std::shared_ptr<PortList> ports_ = std::make_shared<PortList>();
};

}  // namespace moonpool::transport::rdma
