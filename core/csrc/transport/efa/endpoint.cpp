#include "transport/efa/endpoint.hpp"

#include <cerrno>

namespace moonpool::transport::efa {

Error Endpoint::failed(const char* what, ssize_t code) const {
    return Error{Code::kUnavailable,
                 domain_->device_name() + " " + what + ": " + domain_->library().text(code)};
}

Result<std::unique_ptr<Endpoint>> Endpoint::create(std::shared_ptr<Domain> domain, size_t requests) {
    std::unique_ptr<Endpoint> made(new Endpoint(std::move(domain)));
    if (Status opened = made->open(requests); !opened) return opened.error();
    return made;
}

Status Endpoint::open(size_t requests) {
    fi::Domain* domain = domain_->domain();
    fi::Cq* cq = nullptr;
    int code = -ENOSYS;
    for (int wait : {fi::kWaitFd, fi::kWaitNone}) {  // efa itself tells of nothing
        fi::CqAttr attr{};
        attr.size = requests;
        attr.format = fi::kFormatContext;
        attr.wait_obj = wait;
        code = domain->ops->cq_open(domain, &attr, &cq, nullptr);
        if (code != 0) continue;
        if (wait == fi::kWaitFd && cq->fid.ops->control(&cq->fid, fi::kGetWait, &fd_) != 0) fd_ = -1;
        break;
    }
    if (code != 0) return failed("gives no completion queue", code);
    cq_.reset(cq);
    fi::AvAttr addresses{};
    addresses.count = 1;
    fi::Av* av = nullptr;
    code = domain->ops->av_open(domain, &addresses, &av, nullptr);
    if (code != 0) return failed("gives no table of addresses", code);
    av_.reset(av);
    fi::Ep* ep = nullptr;
    code = domain->ops->endpoint(domain, domain_->info(), &ep, nullptr);
    if (code != 0) return failed("gives no endpoint", code);
    ep_.reset(ep);
    code = ep->fid.ops->bind(&ep->fid, &av->fid, 0);
    if (code == 0) code = ep->fid.ops->bind(&ep->fid, &cq->fid, fi::kTransmit | fi::kReceive);
    if (code == 0) code = ep->fid.ops->control(&ep->fid, fi::kEnable, nullptr);
    return code == 0 ? success() : Status(failed("does not enable an endpoint", code));
}

std::string Endpoint::error() {
    fi::CqError error{};
    ssize_t n = cq_->ops->readerr(cq_.get(), &error, 0);
    if (n <= 0) return "a completion queue failed: " + domain_->library().text(n);
    char text[128] = {};
    const char* more =
        cq_->ops->strerror(cq_.get(), error.provider_error, error.error_data, text, sizeof(text));
    std::string said = domain_->library().text(error.error);
    if (more != nullptr && said != more) said += std::string(" (") + more + ")";
    return said;
}

int Endpoint::wait_fd() const {
    fi::Fid* fid = &cq_->fid;
    return domain_->fabric()->ops->trywait(&domain_->fabric()->fid, &fid, 1) == 0 ? fd_ : -1;
}

Result<std::vector<std::byte>> Endpoint::address() const {
    std::vector<std::byte> own(256);
    size_t size = own.size();
    int code = ep_->cm->getname(&ep_->fid, own.data(), &size);
    if (code != 0) return failed("tells no address", code);
    own.resize(size);
    return own;
}

Status Endpoint::add_peer(std::span<const std::byte> peer) {
    Result<std::vector<std::byte>> own = address();
    if (!own) return own.error();
    // The provider reads as many bytes as its own addresses have.
    if (peer.size() != own->size()) {
        return Error{Code::kProtocol, "the peer's address has " + std::to_string(peer.size()) +
                                          " bytes, and those of this provider " +
                                          std::to_string(own->size())};
    }
    int n = av_->ops->insert(av_.get(), peer.data(), 1, &peer_, 0, nullptr);
    return n == 1 ? success() : Status(failed("does not take the peer's address", n < 0 ? n : -EINVAL));
}

}  // namespace moonpool::transport::efa
