#include "wire/congestion.hpp"

#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <string_view>

namespace moonpool {

namespace {

constexpr uint32_t kNearUs = 500;  // hosts of one data centre, or of one machine

}  // namespace

void leave_bbr_when_near(int fd) {
    char name[16] = {};
    socklen_t size = sizeof(name) - 1;
    if (::getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, &size) != 0) return;
    if (!std::string_view(name).starts_with("bbr")) return;
    tcp_info info{};
    size = sizeof(info);
    if (::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return;
    // All bits set: no round trip was measured yet.
    if (info.tcpi_min_rtt > kNearUs) return;
    constexpr std::string_view kReno = "reno";
    (void)::setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, kReno.data(), kReno.size());
}

}  // namespace moonpool
