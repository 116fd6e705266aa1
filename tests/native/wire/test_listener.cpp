// The listening port: who gets in, and that whoever does not keeps nobody out.
#include <doctest/doctest.h>
#include <poll.h>
#include <sys/socket.h>

#include <condition_variable>
#include <cstring>
#include <mutex>
#include <vector>

#include "wire/address.hpp"
#include "wire/dial.hpp"
#include "wire/listener.hpp"

using namespace moonpool;

namespace {

struct Desk {  // where callers arrive
    std::mutex mutex;
    std::condition_variable arrived;
    std::vector<AuthenticatedConnection> callers;

    AuthenticatedConnection next() {
        std::unique_lock lock(mutex);
        REQUIRE(arrived.wait_for(lock, std::chrono::seconds(10), [&] { return !callers.empty(); }));
        AuthenticatedConnection caller = std::move(callers.front());
        callers.erase(callers.begin());
        return caller;
    }
};

struct House {
    Desk desk;
    std::unique_ptr<Listener> listener;

    std::shared_ptr<Journal> journal = std::make_shared<Journal>();

    explicit House(Limits limits = {}, const std::string& address = "127.0.0.1:0") {
        ListenerOptions options;
        options.journal = journal;
        options.addresses = {address};
        options.token = "secret";
        options.incarnation = random_incarnation();
        options.limits = limits;
        Result<std::unique_ptr<Listener>> made = Listener::create(std::move(options));
        REQUIRE_MESSAGE(made.ok(), (made.ok() ? "" : made.error().text));
        listener = std::move(*made);
        listener->offer("store", Service{[](std::string_view tenant) -> Result<std::vector<std::byte>> {
                                             if (tenant == "nobody")
                                                 return Error{Code::kAuth, "no tenant named nobody"};
                                             return std::vector<std::byte>{std::byte{42}};
                                         },
                                         [this](AuthenticatedConnection caller) {
                                             std::lock_guard lock(desk.mutex);
                                             desk.callers.push_back(std::move(caller));
                                             desk.arrived.notify_one();
                                         }});
        REQUIRE(listener->start().ok());
    }
    DialOptions to() const {
        DialOptions options;
        options.address = listener->addresses().front();
        options.token = "secret";
        options.service = "store";
        options.timeout_ms = 5000;
        return options;
    }
};

// Everything the other side says until it hangs up.
std::string read_all(int fd) {
    std::string all;
    char buffer[4096];
    set_socket_timeouts(fd, 10000);
    ssize_t n;
    while ((n = ::recv(fd, buffer, sizeof(buffer), 0)) > 0) all.append(buffer, static_cast<size_t>(n));
    CHECK(n == 0);
    return all;
}

}  // namespace

TEST_CASE("listener: a caller with the token arrives where it wanted to") {
    House house;
    Result<Dialed> dialed = dial(house.to());
    REQUIRE_MESSAGE(dialed.ok(), (dialed.ok() ? "" : dialed.error().text));
    CHECK(dialed->welcome == std::vector<std::byte>{std::byte{42}});
    AuthenticatedConnection caller = house.desk.next();
    CHECK(caller.tenant == "default");
    CHECK(caller.peer == local_address(dialed->fd.get()));
    // The socket is whole: what is said behind the handshake reaches the new owner.
    REQUIRE(::send(dialed->fd.get(), "hello", 5, 0) == 5);
    pollfd readable{caller.fd.get(), POLLIN, 0};
    REQUIRE(::poll(&readable, 1, 10000) == 1);
    char text[5];
    REQUIRE(::recv(caller.fd.get(), text, 5, 0) == 5);
    CHECK(std::memcmp(text, "hello", 5) == 0);
    house.listener->stop();
    CHECK(::send(caller.fd.get(), "x", 1, MSG_NOSIGNAL) == 1);  // what was handed over is the owner's
}

TEST_CASE("listener: the same over IPv6") {
    House house({}, "[::1]:0");
    CHECK(house.listener->addresses().front().starts_with("[::1]:"));
    CHECK(dial(house.to()).ok());
}

TEST_CASE("listener: a wrong token, tenant or service is told so") {
    House house;
    DialOptions options = house.to();
    options.token = "guess";
    Result<Dialed> dialed = dial(options);
    REQUIRE(!dialed.ok());
    CHECK(dialed.error().code == Code::kAuth);
    options = house.to();
    options.service = "kitchen";
    dialed = dial(options);
    REQUIRE(!dialed.ok());
    CHECK(dialed.error().text.find("kitchen") != std::string::npos);
    options = house.to();
    options.tenant = "nobody";
    dialed = dial(options);
    REQUIRE(!dialed.ok());
    CHECK(dialed.error().text.find("nobody") != std::string::npos);
    CHECK(house.listener->counters().auth_failures_total == 3);
    std::vector<Note> notes = house.journal->take();
    REQUIRE(notes.size() == 3);
    CHECK(notes[0].kind == "auth_refused");
    CHECK(notes[0].level == Level::kWarning);
    CHECK(notes[0].peer.starts_with("127.0.0.1:"));
    CHECK(notes[0].text.find("token is wrong") != std::string::npos);
    CHECK(dial(house.to()).ok());
    CHECK(house.journal->take().empty());
}

TEST_CASE("listener: whether its thread answers") {
    House house;
    auto soon = [] { return LivenessProbe::Clock::now() + std::chrono::seconds(60); };
    CHECK(house.listener->is_alive(soon()));
    CHECK(house.listener->is_alive(soon()));
    CHECK(dial(house.to()).ok());
    house.listener->stop();
    CHECK_FALSE(house.listener->is_alive(soon()));
}

TEST_CASE("listener: the proof for one service opens no other") {
    House house;
    CHECK(mac_tenant("a", "b") != mac_tenant("ab", ""));
    CHECK(mac_tenant("default", "store") != mac_tenant("default", "member"));
}

TEST_CASE("listener: strangers that say nonsense or nothing keep nobody out") {
    Limits limits;
    limits.connections_unproved = 4;
    limits.handshake_ms = 1500;
    House house(limits);
    std::vector<Fd> idle;
    for (int i = 0; i < 20; ++i) {
        Result<Fd> fd = connect_tcp(house.listener->addresses().front(), 5000);
        REQUIRE(fd.ok());
        idle.push_back(std::move(*fd));
    }
    CHECK(dial(house.to()).ok());

    Result<Fd> loud = connect_tcp(house.listener->addresses().front(), 5000);
    REQUIRE(loud.ok());
    REQUIRE(::send(loud->get(), "GET / HTTP/1.1\r\nHost: here\r\n\r\n", 30, MSG_NOSIGNAL) > 0);
    CHECK(read_all(loud->get()).find("magic number") != std::string::npos);

    Result<Fd> large = connect_tcp(house.listener->addresses().front(), 5000);
    REQUIRE(large.ok());
    FrameHeader header;
    header.kind = Kind::kAuth;
    header.length = 1u << 30;
    REQUIRE(::send(large->get(), &header, sizeof(header), MSG_NOSIGNAL) == sizeof(header));
    CHECK(read_all(large->get()).find("over the limit") != std::string::npos);

    Result<Fd> newer = connect_tcp(house.listener->addresses().front(), 5000);
    REQUIRE(newer.ok());
    header.version = kVersion + 1;
    REQUIRE(::send(newer->get(), &header, sizeof(header), MSG_NOSIGNAL) == sizeof(header));
    CHECK(read_all(newer->get()).find("version") != std::string::npos);

    Result<Fd> late = connect_tcp(house.listener->addresses().front(), 5000);
    REQUIRE(late.ok());
    CHECK(read_all(late->get()).find("handshake took over") != std::string::npos);
    CHECK(house.listener->counters().handshake_timeouts_total > 0);
    CHECK(house.listener->counters().refused_total >= 16);
    CHECK(dial(house.to()).ok());
}

TEST_CASE("dial: nobody there, no address, or somebody silent") {
    DialOptions options;
    options.token = "secret";
    options.service = "store";
    options.timeout_ms = 200;
    options.address = "127.0.0.1:1";
    Result<Dialed> dialed = dial(options);
    REQUIRE(!dialed.ok());
    CHECK(dialed.error().code == Code::kUnavailable);
    options.address = "here";
    dialed = dial(options);
    REQUIRE(!dialed.ok());
    CHECK(dialed.error().code == Code::kInvalidArgument);
    Result<std::vector<SocketAddress>> any = resolve("127.0.0.1:0", true);
    REQUIRE(any.ok());
    Result<Fd> silent = listen_tcp(any->front(), "127.0.0.1:0");
    REQUIRE(silent.ok());
    options.address = local_address(silent->get());
    dialed = dial(options);
    REQUIRE(!dialed.ok());
    CHECK(dialed.error().code == Code::kTimeout);
}
