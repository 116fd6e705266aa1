// No engine: requests of 64 bytes posted to the software libibverbs of the tests, and polled, by a plain
// loop. Built with that library into one, which stands in for libibverbs.so.1.
#include <chrono>
#include <cstdint>
#include <vector>

#include "transport/rdma/abi.hpp"

using namespace moonpool::transport::rdma::ib;

extern "C" {
Device** ibv_get_device_list(int* count);
void ibv_free_device_list(Device** list);
Context* ibv_open_device(Device* device);
int ibv_close_device(Context* context);
int ibv_query_gid(Context* context, uint8_t port, int index, Gid* out);
Pd* ibv_alloc_pd(Context* context);
int ibv_dealloc_pd(Pd* pd);
Mr* ibv_reg_mr(Pd* pd, void* at, size_t bytes, int access);
int ibv_dereg_mr(Mr* mr);
Cq* ibv_create_cq(Context* context, int entries, void* user, Channel* channel, int vector);
int ibv_destroy_cq(Cq* cq);
Qp* ibv_create_qp(Pd* pd, QpInit* init);
int ibv_modify_qp(Qp* qp, QpAttr* attr, int fields);
int ibv_destroy_qp(Qp* qp);

// Seconds that `calls` writes of `batch` requests of `bytes` take, the last of each signalled; below 0:
// failed.
double verbs_loop(int batch, int bytes, int calls) {
    int found = 0;
    Device** devices = ibv_get_device_list(&found);
    if (devices == nullptr || found == 0) return -1;
    Context* context = ibv_open_device(devices[0]);
    ibv_free_device_list(devices);
    Pd* pd = ibv_alloc_pd(context);
    std::vector<char> from(static_cast<size_t>(batch * bytes), 1), to(from.size());
    Mr* mine = ibv_reg_mr(pd, from.data(), from.size(), kLocalWrite);
    Mr* theirs = ibv_reg_mr(pd, to.data(), to.size(), kLocalWrite | kRemoteWrite);
    Cq* cq = ibv_create_cq(context, 1024, nullptr, nullptr, 0);
    QpInit init{};
    init.send_cq = init.recv_cq = cq;
    init.cap = {1024, 1, 1, 1, 64};
    init.qp_type = kReliable;
    Qp* pair[2] = {ibv_create_qp(pd, &init), ibv_create_qp(pd, &init)};
    for (int side : {0, 1}) {
        QpAttr attr{};
        attr.qp_state = kInit;
        (void)ibv_modify_qp(pair[side], &attr, kState);
        attr.qp_state = kReadyToReceive;
        attr.path_mtu = 5;
        attr.dest_qp_num = pair[1 - side]->qp_num;
        (void)ibv_query_gid(context, 1, 3, &attr.ah_attr.grh.dgid);
        if (ibv_modify_qp(pair[side], &attr, kState | kDest | kMtu | kAv) != 0) return -1;
        attr.qp_state = kReadyToSend;
        attr.retry_cnt = 6;
        if (ibv_modify_qp(pair[side], &attr, kState) != 0) return -1;
    }
    std::vector<SendWr> requests(static_cast<size_t>(batch));
    std::vector<Sge> pieces(requests.size());
    for (size_t i = 0; i < requests.size(); ++i) {
        size_t at = i * static_cast<size_t>(bytes);
        pieces[i] = {reinterpret_cast<uint64_t>(from.data() + at), static_cast<uint32_t>(bytes), mine->lkey};
        SendWr& request = requests[i] = {};
        request.next = i + 1 < requests.size() ? &requests[i + 1] : nullptr;
        request.sg_list = &pieces[i];
        request.num_sge = 1;
        request.opcode = kWrite;
        request.send_flags = kInline | (request.next == nullptr ? kSignaled : 0);
        request.wr.rdma = {reinterpret_cast<uint64_t>(to.data() + at), theirs->rkey};
    }
    auto began = std::chrono::steady_clock::now();
    bool good = true;
    for (int call = 0; call < calls && good; ++call) {
        SendWr* bad = nullptr;
        good = context->ops.post_send(pair[0], requests.data(), &bad) == 0;
        Wc done{};
        int polled = 0;
        while (good && (polled = context->ops.poll_cq(cq, 1, &done)) == 0) {
        }
        good = good && polled == 1 && done.status == kOk;
    }
    std::chrono::duration<double> taken = std::chrono::steady_clock::now() - began;
    good = good && to == from;
    for (Qp* qp : pair) (void)ibv_destroy_qp(qp);
    (void)ibv_destroy_cq(cq);
    (void)ibv_dereg_mr(mine);
    (void)ibv_dereg_mr(theirs);
    (void)ibv_dealloc_pd(pd);
    (void)ibv_close_device(context);
    return good ? taken.count() : -1;
}
}
