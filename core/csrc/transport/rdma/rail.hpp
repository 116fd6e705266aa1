// Rail: one port here and one of the peer, with the queue pair between them. It posts pieces of slices in
// batches, by one call each:
//
//     write, write, read, ..., read of one byte          <- only the last one is signalled
//
// A reliable connection works in order, and a read answers for what the NIC wrote before it also where writes
// pass each other on their way to memory. So one completion says that all of a batch is there: none of it
// counts before. A batch without writes ends with its own last read.
//
// When it stops, the queue pair ends.
#pragma once

#include <algorithm>
#include <array>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "base/mutex.hpp"
#include "transport/nic/rail.hpp"
#include "transport/rdma/messages.hpp"
#include "transport/rdma/queue_pair.hpp"

namespace moonpool::transport::rdma {

using nic::Piece;

class Rail final : public nic::Rail {
   public:
    // loop: tells of completions.
    Rail(std::shared_ptr<Port> port, uint8_t peer_port, const OfferedPort& peer, uint32_t number,
         uint64_t window_bytes, EventLoop& loop)
        : nic::Rail(number, port->device_index, peer.device, peer_port, port->near()),
          port_(std::move(port)),
          peer_(peer),
          window_bytes_(window_bytes),
          loop_(loop) {}

    std::string name() const override { return port_->name; }
    std::string path() const override EXCLUDES(route_mutex_);
    std::string remarks() const override EXCLUDES(route_mutex_);
    bool port_up() const override { return port_->up; }
    uint64_t patience() const override { return port_->device->is_soft() ? kSoftPatience : 1; }
    Status connect(const Ask& ask) override;
    bool has_room() const override;
    void add(const Piece& piece, bool write, const Place& local, const Place& remote) override;
    Status post(uint64_t now) override;
    std::optional<Fault> poll(uint64_t (*clock_ns)(), const Done& done) override;
    std::vector<Piece> stop(bool& writes) override;
    bool busy() const override { return !batches_.empty(); }
    uint64_t batch_bytes() const override;
    void tell(std::shared_ptr<EventHandler> watcher) override;
    void arm() override { completions_->arm(); }

   private:
    static constexpr uint64_t kSoftPatience = 6;  // times the silence of a NIC, of soft RoCE
    static constexpr size_t kPiecesMax = 64;      // of one batch
    static constexpr uint64_t kBatchBytes = 1u << 20;
    static constexpr double kBatchNs = 10e6;

    struct Batch {
        std::vector<Piece> pieces;
        bool writes = false;
        uint64_t bytes = 0;
        uint64_t posted_ns = 0;
        uint64_t first = 0, last = 0;  // numbers of its requests
    };

    uint64_t wr_id(uint64_t request) const { return uint64_t{life_} << 40 | request; }
    Status make_completions();
    struct Way {
        PortAddress there;
        bool may_be_another = false;  // after an error: by another GID
    };
    Result<std::unique_ptr<QueuePair>> connect_by(const GidEntry& own, const Ask& ask, Way& way);
    void begin_connected() override;
    uint64_t next_bytes() const override { return batches_.empty() ? 0 : batches_.front().bytes; }
    void complete(const Batch& batch, uint64_t now);
    Fault fault(const ib::Wc& wc) const;

    const std::shared_ptr<Port> port_;
    const OfferedPort peer_;
    // What a connection found out; as the ports have it until then.
    mutable Mutex route_mutex_;
    PortAddress route_here_ GUARDED_BY(route_mutex_) = port_->facts().address;
    PortAddress route_there_ GUARDED_BY(route_mutex_) = peer_.address;
    std::string not_by_ GUARDED_BY(route_mutex_);  // GIDs here that did not reach the peer, with the reasons
    const uint64_t window_bytes_;
    EventLoop& loop_;
    std::shared_ptr<Completions> completions_;
    // Where the read of one byte goes.
    struct Scratch {
        std::array<std::byte, 64> bytes{};
        ib::Mr* mr = nullptr;
        std::shared_ptr<Device> device;
        ~Scratch() {
            if (mr != nullptr) (void)device->verbs.dereg_mr(mr);
        }
    };
    std::unique_ptr<Scratch> scratch_;
    std::unique_ptr<QueuePair> coming_;  // of connect(), until begin()
    std::unique_ptr<QueuePair> pair_;
    bool no_route_yet_ = true;  // of connect()
    uint32_t life_ = 0;         // of the queue pair: completions of one before are ignored
    uint64_t requests_ = 0;     // of this life
    std::deque<Batch> batches_;
    std::vector<Batch> spare_;
    Batch adding_;
    std::array<ib::SendWr, kPiecesMax + 1> wrs_;
    std::array<ib::Sge, kPiecesMax + 1> sges_;
    Place last_write_{};
    uint64_t requests_open_ = 0;
};

}  // namespace moonpool::transport::rdma
