#include "transport/registry/registry.hpp"

#include "transport/cuda_ipc/transport.hpp"
#include "transport/cufile/transport.hpp"
#include "transport/efa/messages.hpp"
#include "transport/efa/transport.hpp"
#include "transport/file/transport.hpp"
#include "transport/loopback/transport.hpp"
#include "transport/rdma/messages.hpp"
#include "transport/rdma/transport.hpp"
#include "transport/shm/transport.hpp"
#include "transport/tcp/transport.hpp"

namespace moonpool::transport {

namespace {

std::string everywhere(const Context&) { return ""; }

template <class T>
std::unique_ptr<Transport> make(const Context& context) {
    return std::make_unique<T>(context);
}

// The order is fixed: those that touch a byte the fewest times first, and last the one that reaches every
// peer. Within one process a transfer is one copy and no system call; on one host one copy, or one system
// call for many ranges; over RDMA and EFA the NICs copy once on each side; over TCP the kernels copy twice,
// and both sides make system calls.
constexpr Factory kTransports[] = {
    {"loopback", everywhere, make<loopback::Transport>},
    {"shm", shm::Transport::viable, make<shm::Transport>},
    {"cuda_ipc", cuda_ipc::Transport::viable, make<cuda_ipc::Transport>},
    {rdma::kName, rdma::Transport::viable, make<rdma::Transport>},
    {efa::kName, efa::Transport::viable, make<efa::Transport>},
    {"tcp", everywhere, make<tcp::Transport>},
    {"file", everywhere, make<file::Transport>, true},
    {"cufile", cufile::Transport::viable, make<cufile::Transport>, true},
};

}  // namespace

std::span<const Factory> registry() { return kTransports; }

std::string names_text(std::span<const std::string> names) {
    std::string text;
    for (size_t i = 0; i < names.size(); ++i) {
        if (i != 0) text += i + 1 == names.size() ? " and " : ", ";
        text += names[i];
    }
    return text;
}

}  // namespace moonpool::transport
