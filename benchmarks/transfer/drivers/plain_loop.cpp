// The plain loop that TCP transports are measured against: blocking sockets, one message with the payload, an
// answer of 64 bytes, nothing else. Both sides know beforehand where each message belongs.
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <ctime>
#include <vector>

namespace {

constexpr std::size_t ANSWER = 64;
constexpr std::size_t IOVECS = 1024;

double now_s() {
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

// All of the blocks, sent or received: a blocking call may still move only a part.
bool move_all(int fd, std::vector<iovec>& blocks, bool send) {
    std::size_t done = 0;
    while (done < blocks.size()) {
        msghdr message{};
        message.msg_iov = &blocks[done];
        message.msg_iovlen = std::min(blocks.size() - done, IOVECS);
        ssize_t moved = send ? sendmsg(fd, &message, MSG_NOSIGNAL) : recvmsg(fd, &message, MSG_WAITALL);
        if (moved <= 0) return false;
        while (done < blocks.size() && static_cast<std::size_t>(moved) >= blocks[done].iov_len) {
            moved -= static_cast<ssize_t>(blocks[done++].iov_len);
        }
        if (moved > 0) {
            blocks[done].iov_base = static_cast<char*>(blocks[done].iov_base) + moved;
            blocks[done].iov_len -= static_cast<std::size_t>(moved);
        }
    }
    return true;
}

bool move_all(int fd, void* data, std::size_t size, bool send) {
    std::vector<iovec> one{{data, size}};
    return move_all(fd, one, send);
}

void blocks_at(std::uint64_t base, const std::uint64_t* offsets, std::uint64_t batch, std::uint64_t block,
               std::vector<iovec>& blocks) {
    blocks.clear();
    for (std::uint64_t i = 0; i < batch; ++i) {
        blocks.push_back(
            {reinterpret_cast<void*>(base + offsets[i]), block});  // NOLINT: an address by design
    }
}

}  // namespace

extern "C" {

// The receiving side of one connection, until it ends. A run: {block, batch, messages}, the offsets of all
// its blocks, then the messages.
int plain_serve(int fd, std::uint64_t base) {
    std::array<char, ANSWER> answer{};
    std::array<std::uint64_t, 3> run{};
    std::vector<std::uint64_t> offsets;
    std::vector<iovec> blocks;
    while (move_all(fd, run.data(), sizeof run, false)) {
        auto [block, batch, messages] = run;
        offsets.resize(batch * messages);
        if (!move_all(fd, offsets.data(), offsets.size() * sizeof offsets[0], false)) return -1;
        for (std::uint64_t i = 0; i < messages; ++i) {
            blocks_at(base, &offsets[i * batch], batch, block, blocks);
            if (!move_all(fd, blocks, false) || !move_all(fd, answer.data(), ANSWER, true)) return -1;
        }
    }
    return 0;
}

// The sending side of one run whose header has been sent; spent_s: of each message.
int plain_send(int fd, std::uint64_t base, const std::uint64_t* offsets, std::uint64_t block,
               std::uint64_t batch, std::uint64_t messages, double* spent_s) {
    std::array<char, ANSWER> answer{};
    std::vector<iovec> blocks;
    for (std::uint64_t i = 0; i < messages; ++i) {
        const double start_s = now_s();
        blocks_at(base, &offsets[i * batch], batch, block, blocks);
        if (!move_all(fd, blocks, true) || !move_all(fd, answer.data(), ANSWER, false)) return -1;
        spent_s[i] = now_s() - start_s;
    }
    return 0;
}

}  // extern "C"
