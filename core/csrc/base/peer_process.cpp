#include "base/peer_process.hpp"

#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <optional>

namespace moonpool {

namespace {

constexpr int kPeerPidfd = 77;  // SO_PEERPIDFD, which headers older than Linux 6.5 lack

std::optional<ucred> peer_of(int socket) {
    ucred peer{};
    socklen_t size = sizeof(peer);
    if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) return std::nullopt;
    return peer;
}

}  // namespace

pid_t pid_behind(int socket) {
    const std::optional<ucred> peer = peer_of(socket);
    return peer ? peer->pid : 0;
}

bool is_same_user(int socket) {
    const std::optional<ucred> peer = peer_of(socket);
    return peer && (peer->uid == ::geteuid() || peer->uid == 0);
}

Fd process_behind(int socket) {
    int process = -1;
    socklen_t size = sizeof(process);
    if (::getsockopt(socket, SOL_SOCKET, kPeerPidfd, &process, &size) == 0) return Fd(process);
    if (errno != ENOPROTOOPT) return Fd();
    pid_t pid = pid_behind(socket);
    return pid == 0 ? Fd() : Fd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
}

bool has_ended(const Fd& process) {
    pollfd asked{process.get(), POLLIN, 0};
    return ::poll(&asked, 1, 0) == 1;
}

}  // namespace moonpool
