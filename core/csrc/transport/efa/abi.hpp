// The binary interface of libfabric 1.9 and later (libfabric.so.1, symbols of FABRIC_1.3 and before), as far
// as it is used here, written down from its public headers: nothing of libfabric is needed to compile.
// Objects are structs that begin with a `Fid`, and most calls go through their tables of functions, of which
// only those in use have a type; the others keep their places.
//
// tests/native/transport/test_efa_abi.cpp compares it with the headers where they are installed.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <cstddef>
#include <cstdint>

namespace moonpool::transport::efa::fi {

inline constexpr uint32_t version(uint32_t major, uint32_t minor) { return major << 16 | minor; }

// Bits of capabilities and of flags.
inline constexpr uint64_t kMsg = 1ull << 1, kRma = 1ull << 2;
inline constexpr uint64_t kRead = 1ull << 8, kWrite = 1ull << 9, kReceive = 1ull << 10,
                          kTransmit = 1ull << 11;
inline constexpr uint64_t kRemoteRead = 1ull << 12, kRemoteWrite = 1ull << 13;
inline constexpr uint64_t kCompletion = 1ull << 24, kDeliveryComplete = 1ull << 28;
inline constexpr uint64_t kSource = 1ull << 57;
inline constexpr uint64_t kContext = 1ull << 59, kContext2 = 1ull << 52;  // modes
// Of memory.
inline constexpr int kMrLocal = 1 << 2, kMrVirtual = 1 << 4, kMrAllocated = 1 << 5, kMrProviderKey = 1 << 6;

inline constexpr int kReliableDatagram = 3;  // enum fi_ep_type
inline constexpr int kThreadSafe = 1;        // enum fi_threading
inline constexpr int kWaitNone = 0, kWaitFd = 3;
inline constexpr int kFormatContext = 1;
inline constexpr int kGetWait = 5, kEnable = 6;  // commands of control()
// Errors are those of errno, negative; this one is libfabric's.
inline constexpr int kErrorAvailable = 259;

struct Fid;
using Unused = void (*)();

struct OpsFid {
    size_t size;
    int (*close)(Fid* fid);
    int (*bind)(Fid* fid, Fid* to, uint64_t flags);
    int (*control)(Fid* fid, int command, void* argument);
};
struct Fid {
    size_t kind;
    void* context;
    OpsFid* ops;
};

struct TxAttr {
    uint64_t caps, mode, op_flags, msg_order, comp_order;
    size_t inject_size, size, iov_limit, rma_iov_limit;
    uint32_t traffic_class;
};
struct EpAttr {
    int type;
    uint32_t protocol, protocol_version;
    size_t max_msg_size, msg_prefix_size;
    size_t max_order_raw_size, max_order_war_size, max_order_waw_size;
    uint64_t mem_tag_format;
    size_t tx_ctx_cnt, rx_ctx_cnt, auth_key_size;
    uint8_t* auth_key;
};
struct DomainAttr {
    Fid* domain;
    char* name;
    int threading, control_progress, data_progress, resource_mgmt, av_type;
    int mr_mode;
    size_t mr_key_size;
    // More follows, which is left alone.
};
struct FabricAttr {
    Fid* fabric;
    char* name;
    char* provider;
    uint32_t provider_version, api_version;
};
struct Info {
    Info* next;
    uint64_t caps, mode;
    uint32_t addr_format;
    size_t src_addrlen, dest_addrlen;
    void *src_addr, *dest_addr;
    Fid* handle;
    TxAttr* tx_attr;
    void* rx_attr;
    EpAttr* ep_attr;
    DomainAttr* domain_attr;
    FabricAttr* fabric_attr;
    Fid* nic;
};

struct Domain;
struct OpsFabric {
    size_t size;
    int (*domain)(Fid* fabric, Info* info, Domain** out, void* context);
    Unused passive_ep, eq_open, wait_open;
    int (*trywait)(Fid* fabric, Fid** fids, int count);
};
struct Fabric {
    Fid fid;
    OpsFabric* ops;
    uint32_t api_version;
};

struct AvAttr {
    int type, rx_ctx_bits;
    size_t count, ep_per_node;
    const char* name;
    void* map_addr;
    uint64_t flags;
};
struct Av;
struct OpsAv {
    size_t size;
    int (*insert)(Av* av, const void* address, size_t count, uint64_t* out, uint64_t flags, void* context);
};
struct Av {
    Fid fid;
    OpsAv* ops;
};

struct CqAttr {
    size_t size;
    uint64_t flags;
    int format, wait_obj, signaling_vector, wait_cond;
    Fid* wait_set;
};
struct CqEntry {
    void* context;
};
struct CqError {
    void* context;
    uint64_t flags;
    size_t length;
    void* buffer;
    uint64_t data, tag;
    size_t excess;
    int error, provider_error;
    void* error_data;
    size_t error_data_size;
    uint64_t later[4];  // of libraries that write more
};
struct Cq;
struct OpsCq {
    size_t size;
    ssize_t (*read)(Cq* cq, void* entries, size_t count);
    Unused readfrom;
    ssize_t (*readerr)(Cq* cq, CqError* out, uint64_t flags);
    Unused sread, sreadfrom, signal;
    const char* (*strerror)(Cq* cq, int provider_error, const void* data, char* text, size_t size);
};
struct Cq {
    Fid fid;
    OpsCq* ops;
};

struct RmaIov {
    uint64_t address;
    size_t length;
    uint64_t key;
};
struct RmaMessage {
    const iovec* local;
    void** descriptors;
    size_t locals;
    uint64_t peer;
    const RmaIov* remote;
    size_t remotes;
    void* context;
    uint64_t data;
};
struct Ep;
struct OpsRma {
    size_t size;
    Unused read, readv;
    ssize_t (*readmsg)(Ep* ep, const RmaMessage* message, uint64_t flags);
    Unused write, writev;
    ssize_t (*writemsg)(Ep* ep, const RmaMessage* message, uint64_t flags);
};
struct OpsCm {
    size_t size;
    Unused setname;
    int (*getname)(Fid* ep, void* address, size_t* size);
};
struct Ep {
    Fid fid;
    void* ops;
    OpsCm* cm;
    void* msg;
    OpsRma* rma;
};

struct Mr {
    Fid fid;
    void* descriptor;
    uint64_t key;
};
struct OpsDomain {
    size_t size;
    int (*av_open)(Domain* domain, AvAttr* attr, Av** out, void* context);
    int (*cq_open)(Domain* domain, CqAttr* attr, Cq** out, void* context);
    int (*endpoint)(Domain* domain, Info* info, Ep** out, void* context);
};
struct OpsMr {
    size_t size;
    int (*reg)(Fid* domain, const void* at, size_t bytes, uint64_t access, uint64_t offset, uint64_t key,
               uint64_t flags, Mr** out, void* context);
};
struct Domain {
    Fid fid;
    OpsDomain* ops;
    OpsMr* mr;
};

static_assert(sizeof(Info) == 120 && sizeof(EpAttr) == 96 && sizeof(FabricAttr) == 32);
static_assert(sizeof(TxAttr) == 80 && sizeof(CqAttr) == 40 && sizeof(AvAttr) == 48);
static_assert(sizeof(RmaMessage) == 64 && offsetof(DomainAttr, mr_mode) == 36);

}  // namespace moonpool::transport::efa::fi
