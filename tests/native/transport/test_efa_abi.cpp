// The binary interface of libfabric, as the transport `efa` has it written down, beside libfabric's headers:
// where they are installed (Debian: libfabric-dev), which nothing else here needs, this file does not compile
// if the two differ.
#if __has_include(<rdma/fi_rma.h>)
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>

#include "transport/efa/abi.hpp"

namespace fi = moonpool::transport::efa::fi;

#define MOONPOOL_SAME_SIZE(ours, theirs) static_assert(sizeof(ours) == sizeof(theirs))
#define MOONPOOL_SAME_PLACE(ours, field, theirs, member) \
    static_assert(offsetof(ours, field) == offsetof(theirs, member))

MOONPOOL_SAME_SIZE(fi::Info, fi_info);
MOONPOOL_SAME_SIZE(fi::TxAttr, fi_tx_attr);
MOONPOOL_SAME_SIZE(fi::EpAttr, fi_ep_attr);
MOONPOOL_SAME_SIZE(fi::FabricAttr, fi_fabric_attr);
MOONPOOL_SAME_SIZE(fi::Fid, fid);
MOONPOOL_SAME_SIZE(fi::Fabric, fid_fabric);
MOONPOOL_SAME_SIZE(fi::AvAttr, fi_av_attr);
MOONPOOL_SAME_SIZE(fi::Av, fid_av);
MOONPOOL_SAME_SIZE(fi::CqAttr, fi_cq_attr);
MOONPOOL_SAME_SIZE(fi::CqEntry, fi_cq_entry);
MOONPOOL_SAME_SIZE(fi::Cq, fid_cq);
MOONPOOL_SAME_SIZE(fi::RmaIov, fi_rma_iov);
MOONPOOL_SAME_SIZE(fi::RmaMessage, fi_msg_rma);
MOONPOOL_SAME_SIZE(fi::Mr, fid_mr);
MOONPOOL_SAME_SIZE(fi::Domain, fid_domain);
static_assert(sizeof(fi::CqError) >= sizeof(fi_cq_err_entry));

MOONPOOL_SAME_PLACE(fi::Info, nic, fi_info, nic);
MOONPOOL_SAME_PLACE(fi::Info, tx_attr, fi_info, tx_attr);
MOONPOOL_SAME_PLACE(fi::Info, ep_attr, fi_info, ep_attr);
MOONPOOL_SAME_PLACE(fi::Info, domain_attr, fi_info, domain_attr);
MOONPOOL_SAME_PLACE(fi::Info, fabric_attr, fi_info, fabric_attr);
MOONPOOL_SAME_PLACE(fi::Info, src_addr, fi_info, src_addr);
MOONPOOL_SAME_PLACE(fi::TxAttr, size, fi_tx_attr, size);
MOONPOOL_SAME_PLACE(fi::EpAttr, max_msg_size, fi_ep_attr, max_msg_size);
MOONPOOL_SAME_PLACE(fi::DomainAttr, name, fi_domain_attr, name);
MOONPOOL_SAME_PLACE(fi::DomainAttr, threading, fi_domain_attr, threading);
MOONPOOL_SAME_PLACE(fi::DomainAttr, mr_mode, fi_domain_attr, mr_mode);
MOONPOOL_SAME_PLACE(fi::DomainAttr, mr_key_size, fi_domain_attr, mr_key_size);
MOONPOOL_SAME_PLACE(fi::FabricAttr, provider, fi_fabric_attr, prov_name);
MOONPOOL_SAME_PLACE(fi::OpsFid, close, fi_ops, close);
MOONPOOL_SAME_PLACE(fi::OpsFid, bind, fi_ops, bind);
MOONPOOL_SAME_PLACE(fi::OpsFid, control, fi_ops, control);
MOONPOOL_SAME_PLACE(fi::OpsFabric, domain, fi_ops_fabric, domain);
MOONPOOL_SAME_PLACE(fi::OpsFabric, trywait, fi_ops_fabric, trywait);
MOONPOOL_SAME_PLACE(fi::OpsAv, insert, fi_ops_av, insert);
MOONPOOL_SAME_PLACE(fi::CqAttr, format, fi_cq_attr, format);
MOONPOOL_SAME_PLACE(fi::CqAttr, wait_obj, fi_cq_attr, wait_obj);
MOONPOOL_SAME_PLACE(fi::CqAttr, wait_set, fi_cq_attr, wait_set);
MOONPOOL_SAME_PLACE(fi::CqError, error, fi_cq_err_entry, err);
MOONPOOL_SAME_PLACE(fi::CqError, error_data_size, fi_cq_err_entry, err_data_size);
MOONPOOL_SAME_PLACE(fi::OpsCq, read, fi_ops_cq, read);
MOONPOOL_SAME_PLACE(fi::OpsCq, readerr, fi_ops_cq, readerr);
MOONPOOL_SAME_PLACE(fi::OpsCq, strerror, fi_ops_cq, strerror);
MOONPOOL_SAME_PLACE(fi::RmaIov, key, fi_rma_iov, key);
MOONPOOL_SAME_PLACE(fi::RmaMessage, peer, fi_msg_rma, addr);
MOONPOOL_SAME_PLACE(fi::RmaMessage, remote, fi_msg_rma, rma_iov);
MOONPOOL_SAME_PLACE(fi::RmaMessage, context, fi_msg_rma, context);
MOONPOOL_SAME_PLACE(fi::OpsRma, readmsg, fi_ops_rma, readmsg);
MOONPOOL_SAME_PLACE(fi::OpsRma, writemsg, fi_ops_rma, writemsg);
MOONPOOL_SAME_PLACE(fi::OpsCm, getname, fi_ops_cm, getname);
MOONPOOL_SAME_PLACE(fi::Ep, cm, fid_ep, cm);
MOONPOOL_SAME_PLACE(fi::Ep, rma, fid_ep, rma);
MOONPOOL_SAME_PLACE(fi::Mr, key, fid_mr, key);
MOONPOOL_SAME_PLACE(fi::Mr, descriptor, fid_mr, mem_desc);
MOONPOOL_SAME_PLACE(fi::OpsDomain, av_open, fi_ops_domain, av_open);
MOONPOOL_SAME_PLACE(fi::OpsDomain, cq_open, fi_ops_domain, cq_open);
MOONPOOL_SAME_PLACE(fi::OpsDomain, endpoint, fi_ops_domain, endpoint);
MOONPOOL_SAME_PLACE(fi::OpsMr, reg, fi_ops_mr, reg);
MOONPOOL_SAME_PLACE(fi::Domain, mr, fid_domain, mr);

static_assert(fi::kRma == FI_RMA);
static_assert(fi::kMsg == FI_MSG);
static_assert(fi::kRead == FI_READ);
static_assert(fi::kWrite == FI_WRITE);
static_assert(fi::kReceive == FI_RECV);
static_assert(fi::kTransmit == FI_TRANSMIT);
static_assert(fi::kRemoteRead == FI_REMOTE_READ);
static_assert(fi::kRemoteWrite == FI_REMOTE_WRITE);
static_assert(fi::kCompletion == FI_COMPLETION);
static_assert(fi::kDeliveryComplete == FI_DELIVERY_COMPLETE);
static_assert(fi::kSource == FI_SOURCE);
static_assert(fi::kContext == FI_CONTEXT);
static_assert(fi::kContext2 == FI_CONTEXT2);
static_assert(fi::kMrLocal == FI_MR_LOCAL);
static_assert(fi::kMrVirtual == FI_MR_VIRT_ADDR);
static_assert(fi::kMrAllocated == FI_MR_ALLOCATED);
static_assert(fi::kMrProviderKey == FI_MR_PROV_KEY);
static_assert(fi::kReliableDatagram == FI_EP_RDM);
static_assert(fi::kThreadSafe == FI_THREAD_SAFE);
static_assert(fi::kWaitFd == FI_WAIT_FD);
static_assert(fi::kFormatContext == FI_CQ_FORMAT_CONTEXT);
static_assert(fi::kGetWait == FI_GETWAIT);
static_assert(fi::kEnable == FI_ENABLE);
static_assert(fi::kErrorAvailable == FI_EAVAIL);
#endif
