// A line between clients and one server that can hold back what the server says.
#pragma once

#include <doctest/doctest.h>
#include <poll.h>
#include <sys/socket.h>

#include <atomic>
#include <cstddef>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/fd.hpp"
#include "wire/address.hpp"

namespace moonpool::testing {

class Gate {
   public:
    explicit Gate(std::string server) : server_(std::move(server)) {
        Result<std::vector<SocketAddress>> any = resolve("127.0.0.1:0", true);
        REQUIRE(any);
        Result<Fd> listening = listen_tcp(any->front(), "127.0.0.1:0");
        REQUIRE(listening);
        listener_ = std::move(*listening);
        address_ = local_address(listener_.get());
        thread_ = std::thread([this] { run(); });
    }
    ~Gate() {
        ends_ = true;
        thread_.join();
    }
    Gate(const Gate&) = delete;

    const std::string& address() const { return address_; }
    void hold() { holds_ = true; }
    void open() { holds_ = false; }
    size_t asked() const { return asked_; }  // bytes that clients have sent

   private:
    struct Line {
        Fd client, server;
    };

    static bool move(const Fd& from, const Fd& to, size_t& n) {
        std::byte bytes[65536];
        ssize_t got = ::recv(from.get(), bytes, sizeof(bytes), MSG_DONTWAIT);
        if (got < 0) return errno == EAGAIN;
        n += static_cast<size_t>(got);
        return got != 0 && ::send(to.get(), bytes, static_cast<size_t>(got), MSG_NOSIGNAL) == got;
    }

    void run() {
        while (!ends_) {
            const bool holds = holds_;
            std::vector<pollfd> polled{{listener_.get(), POLLIN, 0}};
            for (const Line& line : lines_) {
                polled.push_back({line.client.get(), POLLIN, 0});
                polled.push_back({line.server.get(), static_cast<short>(holds ? 0 : POLLIN), 0});
            }
            if (::poll(polled.data(), polled.size(), 5) <= 0) continue;
            for (size_t i = lines_.size(); i-- > 0;) {
                size_t said = 0, heard = 0;
                bool alive = polled[1 + 2 * i].revents == 0 || move(lines_[i].client, lines_[i].server, said);
                asked_ += said;
                if (!holds && polled[2 + 2 * i].revents != 0)
                    alive = alive && move(lines_[i].server, lines_[i].client, heard);
                if (!alive) lines_.erase(lines_.begin() + static_cast<ptrdiff_t>(i));
            }
            if (polled[0].revents == 0) continue;
            Fd client(::accept(listener_.get(), nullptr, nullptr));
            Result<Fd> server = connect_tcp(server_, 5000);
            if (client.valid() && server) lines_.push_back({std::move(client), std::move(*server)});
        }
    }

    const std::string server_;
    std::string address_;
    Fd listener_;
    std::vector<Line> lines_;
    std::atomic<bool> holds_{false}, ends_{false};
    std::atomic<size_t> asked_{0};
    std::thread thread_;
};

}  // namespace moonpool::testing
