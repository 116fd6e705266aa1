#include "transport/rdma/queue_pair.hpp"

#include <fcntl.h>

#include <algorithm>
#include <cstring>
#include <random>

namespace moonpool::transport::rdma {

namespace {

constexpr uint32_t kInlineBytes = 64;
constexpr int kReadsMax = 16;
// A packet is sent again after 67 ms, six times: a silent peer is an error within 0.5 s. Seven would mean
// "for ever" to soft RoCE.
constexpr uint8_t kAckTimeout = 14, kSendAgain = 6;
constexpr uint8_t kSoftAckTimeout = 17;  // 0.5 s
constexpr uint8_t kHops = 64;

}  // namespace

Result<std::shared_ptr<Completions>> Completions::create(std::shared_ptr<Device> device, int entries,
                                                         bool tells) {
    const Verbs& verbs = device->verbs;
    ib::Channel* channel = nullptr;
    if (tells) {
        channel = verbs.create_comp_channel(device->context);
        if (channel == nullptr) {
            return Error{Code::kUnavailable,
                         device->name + " gives no completion channel: " + verb_error_text(errno)};
        }
        ::fcntl(channel->fd, F_SETFL, ::fcntl(channel->fd, F_GETFL) | O_NONBLOCK);
    }
    ib::Cq* cq = verbs.create_cq(device->context, entries, nullptr, channel, 0);
    if (cq == nullptr) {
        Error error{Code::kUnavailable,
                    device->name + " gives no completion queue: " + verb_error_text(errno)};
        if (channel != nullptr) (void)verbs.destroy_comp_channel(channel);
        return error;
    }
    return std::shared_ptr<Completions>(new Completions(std::move(device), channel, cq));
}

Completions::~Completions() {
    (void)device_->verbs.destroy_cq(cq_);
    if (channel_ != nullptr) (void)device_->verbs.destroy_comp_channel(channel_);
}

void Completions::take_events() {
    ib::Cq* cq = nullptr;
    void* user = nullptr;
    while (device_->verbs.get_cq_event(channel_, &cq, &user) == 0) device_->verbs.ack_cq_events(cq, 1);
}

Result<std::unique_ptr<QueuePair>> QueuePair::create(std::shared_ptr<Port> port,
                                                     std::shared_ptr<Completions> completions) {
    Device& device = *port->device;
    std::unique_ptr<QueuePair> made(new QueuePair(port, std::move(completions)));
    if (device.queue_pairs.fetch_add(1) >= std::min(kQueuePairsMax, std::max(device.facts.max_qp / 2, 1))) {
        return Error{Code::kTooLarge, device.name + " has too many queue pairs in use"};
    }
    ib::QpInit init{};
    init.send_cq = init.recv_cq = made->completions_->cq();
    uint32_t requests = std::min(kSendRequests, static_cast<uint32_t>(std::max(device.facts.max_qp_wr, 1)));
    init.cap = {requests, 1, 1, 1, kInlineBytes};
    init.qp_type = ib::kReliable;
    made->qp_ = device.verbs.create_qp(device.pd, &init);
    if (made->qp_ == nullptr) {  // some NICs send nothing inline
        init.cap = {requests, 1, 1, 1, 0};
        made->qp_ = device.verbs.create_qp(device.pd, &init);
    }
    if (made->qp_ == nullptr) {
        Code code = errno == ENOMEM ? Code::kTooLarge : Code::kUnavailable;
        return Error{code, device.name + " gives no queue pair: " + verb_error_text(errno)};
    }
    made->inline_bytes_ = init.cap.max_inline_data;
    made->requests_max_ = std::min(requests, init.cap.max_send_wr);
    made->psn_ = std::random_device()() & 0xffffff;
    return made;
}

QueuePair::~QueuePair() {
    if (qp_ != nullptr) (void)port_->device->verbs.destroy_qp(qp_);
    port_->device->queue_pairs.fetch_sub(1);
}

Endpoint QueuePair::endpoint() const {
    Endpoint own{facts_.address, qp_->qp_num, psn_, 1};
    own.port.gid = own_.gid;
    own.reads = static_cast<uint8_t>(std::clamp(port_->device->facts.max_qp_rd_atom, 1, kReadsMax));
    return own;
}

Status QueuePair::connect(const Endpoint& peer, bool sends) {
    const Verbs& verbs = port_->device->verbs;
    const Endpoint own = endpoint();
    auto failed = [&](const char* step, int code) {
        return Error{Code::kUnavailable, port_->name + " " + own.port.text() + " does not reach " +
                                             peer.port.text() + ": " + step + ": " + verb_error_text(code)};
    };
    ib::QpAttr attr{};
    attr.qp_state = ib::kInit;
    attr.port_num = port_->number;
    attr.qp_access_flags = ib::kLocalWrite | ib::kRemoteWrite | ib::kRemoteRead;
    int code = verbs.modify_qp(qp_, &attr, ib::kState | ib::kPkey | ib::kPort | ib::kAccess);
    if (code != 0) return failed("initialising", code);
    attr = {};
    attr.qp_state = ib::kReadyToReceive;
    attr.path_mtu = std::min(own.port.mtu, peer.port.mtu);
    attr.dest_qp_num = peer.number;
    attr.rq_psn = peer.psn;
    attr.max_dest_rd_atomic = own.reads;
    attr.min_rnr_timer = 12;
    attr.ah_attr.port_num = port_->number;
    attr.ah_attr.dlid = peer.port.lid;
    // Between InfiniBand subnets and over RoCE packets carry GIDs.
    bool by_gid =
        !own.port.infiniband || std::memcmp(own.port.gid.data(), peer.port.gid.data(), sizeof(uint64_t)) != 0;
    if (by_gid) {
        attr.ah_attr.is_global = 1;
        std::memcpy(attr.ah_attr.grh.dgid.raw, peer.port.gid.data(), peer.port.gid.size());
        attr.ah_attr.grh.sgid_index = own_.index;
        attr.ah_attr.grh.hop_limit = kHops;
    }
    code = verbs.modify_qp(
        qp_, &attr, ib::kState | ib::kAv | ib::kMtu | ib::kDest | ib::kRqPsn | ib::kReadsIn | ib::kMinRnr);
    if (code != 0) return failed("finding the way", code);
    if (!sends) return success();
    attr = {};
    attr.qp_state = ib::kReadyToSend;
    attr.timeout = port_->device->is_soft() ? kSoftAckTimeout : kAckTimeout;
    attr.retry_cnt = kSendAgain;
    attr.rnr_retry = kSendAgain;
    attr.sq_psn = psn_;
    attr.max_rd_atomic = std::min(own.reads, peer.reads);
    code = verbs.modify_qp(
        qp_, &attr, ib::kState | ib::kTimeout | ib::kRetries | ib::kRnrRetries | ib::kSqPsn | ib::kReadsOut);
    return code == 0 ? success() : Status(failed("making ready", code));
}

}  // namespace moonpool::transport::rdma
