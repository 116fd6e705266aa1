// Endpoint: an address of its own at one NIC, with the peer's address and a queue of completions. Each pair
// of engines has one on each side, so that ending it ends what is under way between the two, and nothing
// else: libfabric has no other way to take back a request.
//
// Reading completions is also what carries a provider that works in software: the target does it, too
// (progress.hpp).
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "transport/efa/fabric.hpp"

namespace moonpool::transport::efa {

// Not thread-safe.
class Endpoint {
   public:
    // requests: that it has open at most.
    static Result<std::unique_ptr<Endpoint>> create(std::shared_ptr<Domain> domain, size_t requests);

    // Its own address, for peers.
    Result<std::vector<std::byte>> address() const;
    // That of the peer, of this form.
    Status add_peer(std::span<const std::byte> address);
    uint64_t peer() const { return peer_; }

    // -> 0, -EAGAIN or another error.
    ssize_t read(const fi::RmaMessage& message) {
        return ep_->rma->readmsg(ep_.get(), &message, fi::kCompletion);
    }
    ssize_t write(const fi::RmaMessage& message) {
        // It completes when the bytes are in the peer's memory, not when they have left.
        return ep_->rma->writemsg(ep_.get(), &message, fi::kCompletion | fi::kDeliveryComplete);
    }

    // -> how many requests are done, and their contexts; -EAGAIN; another error, which error() tells.
    ssize_t take_completions(std::span<fi::CqEntry> out) {
        return cq_->ops->read(cq_.get(), out.data(), out.size());
    }
    std::string error();
    // Whether a descriptor tells when there is something to read. If so: the one to wait for, or -1: it has
    // to be read first.
    bool tells() const { return fd_ >= 0; }
    int wait_fd() const;

   private:
    explicit Endpoint(std::shared_ptr<Domain> domain) : domain_(std::move(domain)) {}
    Status open(size_t requests);
    Error failed(const char* what, ssize_t code) const;

    const std::shared_ptr<Domain> domain_;
    Owned<fi::Cq> cq_;
    Owned<fi::Av> av_;
    Owned<fi::Ep> ep_;  // ends before those
    int fd_ = -1;
    uint64_t peer_ = 0;
};

}  // namespace moonpool::transport::efa
