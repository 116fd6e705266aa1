// libibverbs, opened at run time. What is missing, in the library or on the host, is one sentence.
#pragma once

#include <string>

#include "base/result.hpp"
#include "transport/rdma/abi.hpp"

namespace moonpool::transport::rdma {

// name, version of its symbol, result, arguments
#define MOONPOOL_VERBS(X)                                                                            \
    X(get_device_list, "IBVERBS_1.1", ib::Device**, (int* n))                                        \
    X(free_device_list, "IBVERBS_1.1", void, (ib::Device * *devices))                                \
    X(get_device_name, "IBVERBS_1.1", const char*, (ib::Device * device))                            \
    X(open_device, "IBVERBS_1.1", ib::Context*, (ib::Device * device))                               \
    X(close_device, "IBVERBS_1.1", int, (ib::Context * context))                                     \
    X(query_device, "IBVERBS_1.1", int, (ib::Context * context, ib::DeviceAttr * device))            \
    X(query_port, "IBVERBS_1.1", int, (ib::Context * context, uint8_t port, ib::PortAttr * out))     \
    X(query_gid, "IBVERBS_1.1", int, (ib::Context * context, uint8_t port, int index, ib::Gid* out)) \
    X(alloc_pd, "IBVERBS_1.1", ib::Pd*, (ib::Context * context))                                     \
    X(dealloc_pd, "IBVERBS_1.1", int, (ib::Pd * pd))                                                 \
    X(reg_mr, "IBVERBS_1.1", ib::Mr*, (ib::Pd * pd, void* at, size_t bytes, int access))             \
    X(dereg_mr, "IBVERBS_1.1", int, (ib::Mr * mr))                                                   \
    X(create_comp_channel, "IBVERBS_1.0", ib::Channel*, (ib::Context * context))                     \
    X(destroy_comp_channel, "IBVERBS_1.0", int, (ib::Channel * channel))                             \
    X(create_cq, "IBVERBS_1.1", ib::Cq*,                                                             \
      (ib::Context * context, int entries, void* user, ib::Channel* channel, int vector))            \
    X(destroy_cq, "IBVERBS_1.1", int, (ib::Cq * cq))                                                 \
    X(get_cq_event, "IBVERBS_1.1", int, (ib::Channel * channel, ib::Cq * *cq, void** user))          \
    X(ack_cq_events, "IBVERBS_1.1", void, (ib::Cq * cq, unsigned n))                                 \
    X(create_qp, "IBVERBS_1.1", ib::Qp*, (ib::Pd * pd, ib::QpInit * init))                           \
    X(modify_qp, "IBVERBS_1.1", int, (ib::Qp * qp, ib::QpAttr * attr, int fields))                   \
    X(destroy_qp, "IBVERBS_1.1", int, (ib::Qp * qp))                                                 \
    X(get_async_event, "IBVERBS_1.1", int, (ib::Context * context, ib::AsyncEvent * event))          \
    X(ack_async_event, "IBVERBS_1.1", void, (ib::AsyncEvent * event))                                \
    X(wc_status_str, "IBVERBS_1.1", const char*, (int status))
// Not in every library of use: null there.
#define MOONPOOL_VERBS_OPTIONAL(X)                                                               \
    X(fork_init, "IBVERBS_1.1", int, ())                                                         \
    X(is_fork_initialized, "IBVERBS_1.13", int, ())                                              \
    X(reg_mr_iova2, "IBVERBS_1.8", ib::Mr*,                                                      \
      (ib::Pd * pd, void* at, size_t bytes, uint64_t iova, unsigned access))                     \
    X(reg_dmabuf_mr, "IBVERBS_1.12", ib::Mr*,                                                    \
      (ib::Pd * pd, uint64_t offset, size_t bytes, uint64_t iova, int fd, int access))           \
    X(query_gid_ex, "IBVERBS_1.11", int,                                                         \
      (ib::Context * context, uint32_t port, uint32_t index, ib::GidEntry * out, uint32_t flags, \
       size_t bytes))

struct Verbs {
#define MOONPOOL_VERB(name, version, result, arguments) result(*name) arguments = nullptr;
    MOONPOOL_VERBS(MOONPOOL_VERB)
    MOONPOOL_VERBS_OPTIONAL(MOONPOOL_VERB)
#undef MOONPOOL_VERB
};

inline constexpr const char* kVerbsLibrary = "libibverbs.so.1";

// The library at `path` ("": kVerbsLibrary), opened once in a process and never closed: it has threads and
// handlers of its own. The usual one is not opened on a host whose kernel shows no device.
Result<const Verbs*> open_verbs(const std::string& path);

}  // namespace moonpool::transport::rdma
