// The part of libibverbs' ABI that the transport uses (IBVERBS_1.1, unchanged since 2008), declared by
// ourselves: nothing is included from rdma-core or linked with it. Sizes and places of the fields were
// compared with the headers of rdma-core 44; a structure that grew later has the larger size here.
#pragma once

#include <pthread.h>

#include <cstddef>
#include <cstdint>

namespace moonpool::transport::rdma::ib {

struct Device;
struct Context;
struct Cq;
struct Qp;

struct Channel {
    Context* context;
    int fd;
    int refcnt;
};
struct Pd {
    Context* context;
    uint32_t handle;
};
struct Mr {
    Context* context;
    Pd* pd;
    void* addr;
    size_t length;
    uint32_t handle, lkey, rkey;
};
union Gid {
    uint8_t raw[16];
    struct {
        uint64_t prefix, interface_id;
    } global;
};
struct GidEntry {
    Gid gid;
    uint32_t index, port, type, ndev_ifindex;
};
struct Sge {
    uint64_t addr;
    uint32_t length, lkey;
};
struct SendWr {
    uint64_t wr_id;
    SendWr* next;
    Sge* sg_list;
    int num_sge;
    int opcode;
    unsigned send_flags;
    uint32_t imm;
    union {
        struct {
            uint64_t remote_addr;
            uint32_t rkey;
        } rdma;
        uint64_t room[4];
    } wr;
    uint64_t tail[7];
};
struct Wc {
    uint64_t wr_id;
    int status, opcode;
    uint32_t vendor_err, byte_len, imm, qp_num, src_qp;
    unsigned flags;
    uint16_t pkey_index, slid;
    uint8_t sl, dlid_path_bits;
};
// Calls of the data path are found through the context.
struct Ops {
    void* before_poll[11];
    int (*poll_cq)(Cq*, int, Wc*);
    int (*req_notify_cq)(Cq*, int);
    void* before_post[12];
    int (*post_send)(Qp*, SendWr*, SendWr**);
    void* after_post[6];
};
struct Context {
    Device* device;
    Ops ops;
    int cmd_fd, async_fd, num_comp_vectors;
    pthread_mutex_t mutex;
    void* abi_compat;
};
struct Cq {
    Context* context;
    Channel* channel;
    void* cq_context;
    uint32_t handle;
    int cqe;
};
struct Qp {
    Context* context;
    void* qp_context;
    Pd* pd;
    Cq *send_cq, *recv_cq;
    void* srq;
    uint32_t handle, qp_num;
    int state, qp_type;
};
struct QpCap {
    uint32_t max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data;
};
struct QpInit {
    void* qp_context;
    Cq *send_cq, *recv_cq;
    void* srq;
    QpCap cap;
    int qp_type, sq_sig_all;
};
struct Grh {
    Gid dgid;
    uint32_t flow_label;
    uint8_t sgid_index, hop_limit, traffic_class;
};
struct Ah {
    Grh grh;
    uint16_t dlid;
    uint8_t sl, src_path_bits, static_rate, is_global, port_num;
};
struct QpAttr {
    int qp_state, cur_qp_state, path_mtu, path_mig_state;
    uint32_t qkey, rq_psn, sq_psn, dest_qp_num;
    unsigned qp_access_flags;
    QpCap cap;
    Ah ah_attr, alt_ah_attr;
    uint16_t pkey_index, alt_pkey_index;
    uint8_t en_sqd_async_notify, sq_draining, max_rd_atomic, max_dest_rd_atomic, min_rnr_timer, port_num,
        timeout, retry_cnt, rnr_retry, alt_port_num, alt_timeout;
    uint32_t rate_limit;
};
struct PortAttr {
    int state, max_mtu, active_mtu, gid_tbl_len;
    uint32_t port_cap_flags, max_msg_sz, bad_pkey, qkey_viol;
    uint16_t pkey_tbl_len, lid, sm_lid;
    uint8_t lmc, max_vl, sm_sl, subnet_timeout, init_type, active_width, active_speed, phys_state, link_layer,
        flags;
    uint16_t caps2;
    uint32_t speed_ex;
};
struct DeviceAttr {
    char fw[64];
    uint64_t node_guid, sys_guid, max_mr_size, page_size_cap;
    uint32_t vendor_id, part_id, hw_ver;
    int max_qp, max_qp_wr;
    unsigned flags;
    int max_sge, max_sge_rd, max_cq, max_cqe, max_mr, max_pd, max_qp_rd_atom, max_ee_rd_atom, max_res_rd_atom,
        max_qp_init_rd_atom;
    int rest[16];
    uint16_t max_pkeys;
    uint8_t ack_delay, ports;
};
struct AsyncEvent {
    void* element;  // of a port: its number, in the first int
    int type;
};
static_assert(sizeof(Mr) == 48 && sizeof(SendWr) == 128 && sizeof(Wc) == 48 && sizeof(QpInit) == 64);
static_assert(sizeof(QpAttr) == 144 && sizeof(DeviceAttr) == 232 && offsetof(DeviceAttr, ports) == 227 &&
              offsetof(Context, async_fd) == 268);

inline constexpr int kWrite = 0, kRead = 4;            // opcodes
inline constexpr unsigned kSignaled = 2, kInline = 8;  // flags of a request
inline constexpr int kLocalWrite = 1, kRemoteWrite = 2, kRemoteRead = 4, kRelaxedOrdering = 1 << 20;
inline constexpr int kReliable = 2;  // type of a queue pair
inline constexpr int kInit = 1, kReadyToReceive = 2, kReadyToSend = 3, kError = 6;
inline constexpr int kPortActive = 4, kInfiniBand = 1, kEthernet = 2;
inline constexpr int kEventFatal = 8, kEventPortActive = 9, kEventPortError = 10, kEventLid = 11,
                     kEventGid = 18;  // of addresses: they have changed
inline constexpr uint32_t kGidRoce1 = 1;
// Fields of a QpAttr.
inline constexpr int kState = 1 << 0, kAccess = 1 << 3, kPkey = 1 << 4, kPort = 1 << 5, kAv = 1 << 7,
                     kMtu = 1 << 8, kTimeout = 1 << 9, kRetries = 1 << 10, kRnrRetries = 1 << 11,
                     kRqPsn = 1 << 12, kReadsOut = 1 << 13, kMinRnr = 1 << 15, kSqPsn = 1 << 16,
                     kReadsIn = 1 << 17, kDest = 1 << 20;

// Statuses of a completion.
enum Status : int {
    kOk = 0,
    kLocalLength = 1,
    kLocalOperation = 2,
    kLocalProtection = 4,
    kFlushed = 5,
    kRemoteInvalid = 9,
    kRemoteAccess = 10,
    kRemoteOperation = 11,
    kRetriesOver = 12
};

}  // namespace moonpool::transport::rdma::ib
