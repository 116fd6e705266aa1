// Rail over libfabric: an endpoint here and one of the peer, which the peer made for this one alone. Requests
// complete each by itself, in any order; a write does when its bytes are in the peer's memory.
//
// When it stops, the endpoint here ends, and with it all that may touch local memory. Writes that have left
// may still land until the peer has ended its endpoint, on being asked to: the link repeats them only then,
// and fails them where the peer does not answer. So no late write lands on newer bytes.
#pragma once

#include <array>
#include <list>
#include <memory>
#include <string>
#include <vector>

#include "transport/efa/progress.hpp"
#include "transport/nic/rail.hpp"

namespace moonpool::transport::efa {

using nic::Piece;

class Rail final : public nic::Rail {
   public:
    Rail(std::shared_ptr<Domain> domain, size_t device, uint8_t peer_port, std::string peer_name,
         uint32_t number, uint64_t window_bytes, std::shared_ptr<Progress> progress)
        : nic::Rail(number, device, peer_port, peer_port, domain->near),
          domain_(std::move(domain)),
          peer_name_(std::move(peer_name)),
          window_bytes_(window_bytes),
          progress_(std::move(progress)) {}

    std::string name() const override { return domain_->device_name(); }
    std::string path() const override;
    Status connect(const Ask& ask) override;
    bool has_room() const override;
    void add(const Piece& piece, bool write, const Place& local, const Place& remote) override;
    Status post(uint64_t now) override;
    std::optional<Fault> poll(uint64_t (*clock_ns)(), const Done& done) override;
    std::vector<Piece> stop(bool& writes) override;
    bool busy() const override { return !posted_.empty() || !waiting_.empty(); }
    void tell(std::shared_ptr<EventHandler> watcher) override { progress_->watch(std::move(watcher)); }
    void arm() override {
        if (busy()) progress_->wake();
    }

   private:
    struct Request {
        std::array<uint64_t, 8> context;  // the provider's, while it is posted
        std::list<Request>::iterator self;
        Piece piece;
        bool write = false;
        Place local, remote;
        uint64_t posted_ns = 0;
    };
    using Requests = std::list<Request>;
    struct Connection {
        std::unique_ptr<Endpoint> endpoint;
        bool by_address = false;  // the peer's memory is named by its address
    };

    void begin_connected() override;
    uint64_t next_bytes() const override { return posted_.empty() ? 0 : posted_.front().piece.bytes; }
    ssize_t post(Request& request);
    void drain();
    Fault fault(std::string why);

    const std::shared_ptr<Domain> domain_;
    const std::string peer_name_;
    const uint64_t window_bytes_;
    const std::shared_ptr<Progress> progress_;
    // A request is in one of them: added, and not taken by the provider yet; under way; for use again.
    Requests waiting_, posted_, spare_;
    Connection coming_, connection_;  // they end before the requests
    bool idle_ = true;                // at the last post()
    std::string why_stuck_;           // not empty: the endpoint takes nothing any more
    uint64_t refused_since_ns_ = 0;   // it takes none while none is under way
    bool carried_ = false;            // something, in this life
};

}  // namespace moonpool::transport::efa
