// Relay: a cable between two engines that a test can cut, pull or make short. It listens, and carries each
// connection to the target, byte by byte.
#pragma once

#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <atomic>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "wire/address.hpp"

namespace moonpool::testing {

class Relay {
   public:
    explicit Relay(std::string target) : target_(std::move(target)) {
        SocketAddress any = resolve("127.0.0.1:0", true)->front();
        listener_ = std::move(*listen_tcp(any, "relay"));
        address_ = local_address(listener_.get());
        thread_ = std::thread([this] { run(); });
    }
    ~Relay() {
        stopping_ = true;
        thread_.join();
    }
    Relay(const Relay&) = delete;

    const std::string& address() const { return address_; }

    // Connection i (from 0) is reset once it has carried that many bytes towards the target.
    void reset_after(size_t connection, uint64_t bytes) { plan(connection, bytes, false); }
    // It carries nothing more, in either direction, until join().
    void cut_after(size_t connection, uint64_t bytes) { plan(connection, bytes, true); }
    // The same now, until join(connection).
    void cut(size_t connection) { cut_ |= uint64_t{1} << connection; }
    void join(size_t connection) { cut_ &= ~(uint64_t{1} << connection); }
    void reset(size_t connection) { reset_ |= uint64_t{1} << connection; }
    void cut_all() { cut_all_ = true; }
    void join() {
        cut_all_ = false;
        joined_ = true;
    }

    size_t connections() const { return connections_; }
    // What connection i has carried from the target, and to it.
    uint64_t brought(size_t connection) const { return brought_[connection]; }
    uint64_t took(size_t connection) const { return took_[connection]; }

   private:
    struct Plan {
        uint64_t bytes = UINT64_MAX;
        bool cut = false;
    };
    struct Cable {
        Fd ends[2];
        std::vector<char> waiting[2];  // for ends[i]
        uint64_t carried = 0;
        Plan plan;
        bool held = false;
        bool over = false;
        size_t number = 0;
        uint64_t bit = 0;  // of its number
    };

    void plan(size_t connection, uint64_t bytes, bool cut) {
        std::lock_guard lock(mutex_);
        if (plans_.size() <= connection) plans_.resize(connection + 1);
        plans_[connection] = {bytes, cut};
    }

    void run() {
        std::deque<Cable> cables;
        while (!stopping_) {
            std::vector<pollfd> fds = {{listener_.get(), POLLIN, 0}};
            for (Cable& cable : cables) {
                for (int i = 0; i < 2; ++i) {
                    bool held = (cable.held && !joined_) || cut_all_ || (cut_ & cable.bit) != 0;
                    short events = static_cast<short>((cable.waiting[1 - i].empty() ? POLLIN : 0) |
                                                      (cable.waiting[i].empty() ? 0 : POLLOUT));
                    fds.push_back({held ? -1 : cable.ends[i].get(), events, 0});
                }
            }
            (void)::poll(fds.data(), fds.size(), 5);
            for (size_t c = 0; c < cables.size(); ++c) {
                for (int i = 0; i < 2 && !cables[c].over; ++i) {
                    if (fds[1 + 2 * c + static_cast<size_t>(i)].revents != 0) serve(cables[c], i);
                }
            }
            for (Cable& cable : cables) {
                if ((reset_ & cable.bit) != 0) end_hard(cable);
            }
            std::erase_if(cables, [](const Cable& cable) { return cable.over; });
            if (fds[0].revents != 0 && !cut_all_) accept(cables);
        }
    }

    void accept(std::deque<Cable>& cables) {
        Fd fd(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
        Result<Fd> on = connect_tcp(target_, 5000);
        if (!fd.valid() || !on) return;
        Cable cable;
        cable.ends[0] = std::move(fd);
        cable.ends[1] = std::move(*on);
        std::lock_guard lock(mutex_);
        size_t number = connections_++;
        if (number < plans_.size()) cable.plan = plans_[number];
        cable.number = std::min<size_t>(number, 63);
        cable.bit = uint64_t{1} << cable.number;
        cables.push_back(std::move(cable));
    }

    void serve(Cable& cable, int i) {
        std::vector<char>& in = cable.waiting[i];
        if (!in.empty()) {
            ssize_t n = ::send(cable.ends[i].get(), in.data(), in.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
            if (n > 0) in.erase(in.begin(), in.begin() + n);
        }
        std::vector<char>& out = cable.waiting[1 - i];
        if (!out.empty()) return;
        out.resize(65536);
        ssize_t n = ::recv(cable.ends[i].get(), out.data(), out.size(), MSG_DONTWAIT);
        out.resize(static_cast<size_t>(std::max<ssize_t>(n, 0)));
        if (n == 0 || (n < 0 && errno != EAGAIN)) cable.over = true;
        if (i != 0) {
            brought_[cable.number] += out.size();
            return;
        }
        cable.carried += out.size();
        took_[cable.number] += out.size();
        if (cable.carried < cable.plan.bytes) return;
        if (cable.plan.cut) {
            cable.held = true;
        } else {
            end_hard(cable);
        }
    }
    static void end_hard(Cable& cable) {
        linger hard{1, 0};
        for (Fd& end : cable.ends) ::setsockopt(end.get(), SOL_SOCKET, SO_LINGER, &hard, sizeof(hard));
        cable.over = true;
    }

    std::string target_, address_;
    Fd listener_;
    std::atomic<bool> stopping_{false}, cut_all_{false}, joined_{false};
    std::atomic<uint64_t> cut_{0}, reset_{0};  // a bit for each connection
    std::atomic<size_t> connections_{0};
    std::array<std::atomic<uint64_t>, 64> brought_{}, took_{};
    std::mutex mutex_;
    std::vector<Plan> plans_;
    std::thread thread_;
};

}  // namespace moonpool::testing
