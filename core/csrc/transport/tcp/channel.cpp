#include "transport/tcp/channel.hpp"

#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "wire/address.hpp"
#include "wire/congestion.hpp"

#ifndef TCP_RTO_MAX_MS
#define TCP_RTO_MAX_MS 44
#endif

namespace moonpool::transport::tcp {

namespace {

constexpr uint32_t kWelcomeBackBytesMax = 4096;  // a version, or why not

// A target knows a connection by its engine and this number, and one engine may open a peer more than once.
uint32_t next_channel() {
    static std::atomic<uint32_t> last{0};
    return last.fetch_add(1) + 1;
}

class Greeting {
   public:
    Greeting(const SecureSocket& socket, const DialOptions& options)
        : socket_(socket), end_(deadline_in(options.timeout_ms)), given_up_(options.given_up) {}

    // Returns when the socket has all of it, with what TLS has made of it.
    Status send(const std::vector<std::byte>& bytes) {
        for (size_t sent = 0; sent < bytes.size() || socket_.unsent();) {
            iovec part{const_cast<std::byte*>(bytes.data()) + sent, bytes.size() - sent};
            ssize_t n = socket_.send(&part, 1, false);
            if (Status status = after(n, POLLOUT); !status) return status;
            sent += static_cast<size_t>(std::max<ssize_t>(n, 0));
        }
        return success();
    }
    Status receive(void* data, size_t size) {
        iovec part{data, size};
        while (part.iov_len != 0) {
            ssize_t n = socket_.receive(&part, 1, false, nullptr);
            if (n == 0) return Error{Code::kUnavailable, "the peer closed the connection"};
            if (Status status = after(n, POLLIN); !status) return status;
            part.iov_base = static_cast<std::byte*>(part.iov_base) + std::max<ssize_t>(n, 0);
            part.iov_len -= static_cast<size_t>(std::max<ssize_t>(n, 0));
        }
        return success();
    }

   private:
    // Of a system call: waits when it has to be made again.
    Status after(ssize_t n, short events) const {
        if (n >= 0 || errno == EINTR) return success();
        if (errno == EPROTO && socket_.tls != nullptr) return socket_.tls->error("the peer");
        if (errno != EAGAIN) {
            return Error{Code::kUnavailable, std::string("the connection is lost: ") + std::strerror(errno)};
        }
        Result<bool> ready = wait_for(socket_.fd, events, end_, given_up_);
        if (!ready) return ready.error();
        return *ready ? success()
                      : Status(Error{Code::kTimeout, "the peer did not answer the greeting in time"});
    }

    SecureSocket socket_;
    Deadline end_;
    const std::atomic<bool>* given_up_;
};

}  // namespace

void tell_trouble(const ChannelOptions& options) {
    if (options.dial.tls == nullptr || options.journal == nullptr) return;
    std::string why = options.dial.tls->take_trouble();
    if (!why.empty()) options.journal->note(Level::kError, "tls_files", options.dial.address, why);
}

Result<std::unique_ptr<Channel>> greet(const ChannelOptions& options, Dialed dialed) {
    if (dialed.tls != nullptr) {
        if (Status status = options.staging->reserve(); !status) return status.error();
    }
    int fd = dialed.fd.get();
    ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK);
    leave_bbr_when_near(fd);
    // A cable that was out for seconds is noticed to be back within one (Linux 6.15; others double the pause
    // each time).
    int rto_max_ms = 1000;
    (void)::setsockopt(fd, IPPROTO_TCP, TCP_RTO_MAX_MS, &rto_max_ms, sizeof(rto_max_ms));
    Hello hello;
    hello.segment = options.self;
    hello.expected = options.peer;
    hello.name = options.self_name;
    hello.channel = next_channel();
    auto channel =
        std::make_unique<Channel>(std::move(dialed.fd), std::move(dialed.tls), hello.channel,
                                  local_address(fd) + " -> " + peer_address(fd), options.frame_bytes);
    channel->staging = options.staging;
    std::vector<std::byte> frame;
    uint64_t id = channel->next_request++;
    begin_frame(frame, Kind::kEngineHello, 0, id);
    Writer w(frame);
    encode(w, hello);
    finish_frame(frame, 0);
    Greeting greeting(channel->socket(), options.dial);
    if (Status status = greeting.send(frame); !status) return status.error();
    FrameHeader header;
    if (Status status = greeting.receive(&header, sizeof(header)); !status) return status.error();
    if (header.magic != kMagic || header.version != kVersion || header.length > kWelcomeBackBytesMax) {
        return Error{Code::kProtocol, "the peer does not speak the engine's protocol"};
    }
    std::vector<std::byte> answer(header.length);
    if (Status status = greeting.receive(answer.data(), answer.size()); !status) return status.error();
    Reader reader(answer);
    if (header.kind == Kind::kError) return read_error(reader);
    if (header.kind != Kind::kEngineHello || header.request_id != id) {
        return Error{Code::kProtocol, "the peer sent an answer that does not fit the question"};
    }
    return channel;
}

}  // namespace moonpool::transport::tcp
