// TLS: the stream over sockets that give and take what they like, hostile bytes, who is trusted, and the
// listening port.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <filesystem>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "../certificates.hpp"
#include "../random.hpp"
#include "wire/address.hpp"
#include "wire/control_socket.hpp"
#include "wire/dial.hpp"
#include "wire/listener.hpp"
#include "wire/openssl.hpp"

using namespace moonpool;
using moonpool::testing::certificate;
using moonpool::testing::Random;
using moonpool::testing::tls_client;
using moonpool::testing::tls_server;

namespace {

struct Pair {
    Fd near, far;
    Pair() {
        int fds[2];
        REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, fds) == 0);
        near.reset(fds[0]);
        far.reset(fds[1]);
    }
};

// Both ends of a connection, and what carries bytes between them: as few at a time as the test likes, and
// changed if it likes.
struct Wire {
    using Spoil = std::function<void(bool up, std::vector<char>& piece)>;

    Pair left, right;
    std::vector<char> carried[2];  // taken out of one socket, not yet given to the other
    std::unique_ptr<TlsStream> client = std::move(*tls_client("authority", "localhost")->open("localhost:1"));
    std::unique_ptr<TlsStream> server = std::move(*tls_server()->open());

    int client_fd() const { return left.near.get(); }
    int server_fd() const { return right.near.get(); }

    // Whether anything moved.
    bool carry(bool up, size_t bytes_max, const Spoil& spoil = {}) {
        std::vector<char>& piece = carried[up];
        if (piece.empty()) {
            piece.resize(bytes_max);
            ssize_t n = ::recv((up ? left : right).far.get(), piece.data(), piece.size(), 0);
            piece.resize(static_cast<size_t>(std::max<ssize_t>(n, 0)));
            if (spoil && !piece.empty()) spoil(up, piece);
        }
        ssize_t n = ::send((up ? right : left).far.get(), piece.data(), piece.size(), MSG_NOSIGNAL);
        if (n > 0) piece.erase(piece.begin(), piece.begin() + n);
        return n > 0;
    }
};

using Step = TlsStream::Step;

// Until both sides are done, or one has failed, or nothing moves any more.
std::pair<Step, Step> shake(Wire& wire, Random& random, size_t piece_max, const Wire::Spoil& spoil = {}) {
    Step up = Step::kWait, down = Step::kWait;
    for (int quiet = 0; quiet < 3;) {
        if (up == Step::kWait) up = wire.client->handshake(wire.client_fd());
        if (down == Step::kWait) down = wire.server->handshake(wire.server_fd());
        bool moved = wire.carry(true, random.between(1, piece_max), spoil);
        moved |= wire.carry(false, random.between(1, piece_max), spoil);
        quiet = moved ? 0 : quiet + 1;
        if (up == Step::kFailed || down == Step::kFailed) break;
        if (up == Step::kDone && down == Step::kDone && !moved) break;
    }
    return {up, down};
}

struct Desk {  // where callers arrive
    std::mutex mutex;
    std::condition_variable arrived;
    std::vector<AuthenticatedConnection> callers;
    std::function<void()> busy;  // what keeps the listener's thread before each welcome

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
    std::shared_ptr<Journal> journal = std::make_shared<Journal>();
    std::unique_ptr<Listener> listener;

    explicit House(std::shared_ptr<const TlsServer> tls, Limits limits = {}) {
        ListenerOptions options;
        options.addresses = {"127.0.0.1:0"};
        options.token = "secret";
        options.incarnation = random_incarnation();
        options.limits = limits;
        options.tls = std::move(tls);
        options.journal = journal;
        Result<std::unique_ptr<Listener>> made = Listener::create(std::move(options));
        REQUIRE_MESSAGE(made.ok(), (made.ok() ? "" : made.error().text));
        listener = std::move(*made);
        auto welcome = [this](std::string_view) -> Result<std::vector<std::byte>> {
            std::unique_lock lock(desk.mutex);
            if (auto busy = desk.busy) {
                lock.unlock();
                busy();
            }
            return std::vector<std::byte>{std::byte{42}};
        };
        listener->offer(std::string(kServiceMember), Service{welcome, [this](AuthenticatedConnection caller) {
                                                                 std::lock_guard lock(desk.mutex);
                                                                 desk.callers.push_back(std::move(caller));
                                                                 desk.arrived.notify_one();
                                                             }});
        REQUIRE(listener->start().ok());
    }
    DialOptions to(std::shared_ptr<const TlsClient> tls) const {
        DialOptions options;
        options.address = listener->addresses().front();
        options.token = "secret";
        options.service = kServiceMember;
        options.timeout_ms = 5000;
        options.tls = std::move(tls);
        return options;
    }
    Fd stranger() const {
        Result<Fd> fd = connect_tcp(listener->addresses().front(), 5000);
        REQUIRE(fd.ok());
        set_socket_timeouts(fd->get(), 10000);
        return std::move(*fd);
    }
};

Error refusal(const DialOptions& options) {
    Result<Dialed> dialed = dial(options);
    REQUIRE(!dialed.ok());
    CHECK(dialed.error().text.find('\n') == std::string::npos);
    return dialed.error();
}

bool says(const Error& error, const std::string& text) {
    INFO(error.text);
    bool found = error.text.find(text) != std::string::npos;
    CHECK(found);
    return found;
}

// Everything the other side says until it hangs up.
std::string read_all(int fd) {
    std::string all;
    char buffer[4096];
    ssize_t n;
    while ((n = ::recv(fd, buffer, sizeof(buffer), 0)) > 0) all.append(buffer, static_cast<size_t>(n));
    CHECK(n == 0);
    return all;
}

std::vector<std::byte> client_hello() {
    Pair pair;
    auto stream = std::move(*tls_client()->open("127.0.0.1:1"));
    REQUIRE(stream->handshake(pair.near.get()) == Step::kWait);
    std::vector<std::byte> bytes(8192);
    ssize_t n = ::recv(pair.far.get(), bytes.data(), bytes.size(), 0);
    REQUIRE(n > 100);
    bytes.resize(static_cast<size_t>(n));
    return bytes;
}

}  // namespace

TEST_CASE("tls: what goes in comes out, however few bytes the sockets move at a time") {
    for (size_t piece_max : {size_t{1}, size_t{7}, size_t{3000}, size_t{100000}}) {
        Random random(piece_max);
        Wire wire;
        REQUIRE(shake(wire, random, piece_max) == std::pair(Step::kDone, Step::kDone));
        // Both ways at once; pieces and buffers of any size.
        size_t total = piece_max == 1 ? 3000 : 300000;
        std::vector<char> sent[2], got[2];
        for (int side : {0, 1}) {
            sent[side].resize(total);
            random.fill(sent[side].data(), total);
        }
        size_t begun[2] = {0, 0};
        for (size_t steps = 0; got[0].size() < total || got[1].size() < total; ++steps) {
            REQUIRE(steps < 100 * total);
            for (int side : {0, 1}) {
                TlsStream& from = side == 0 ? *wire.client : *wire.server;
                TlsStream& to = side == 0 ? *wire.server : *wire.client;
                int from_fd = side == 0 ? wire.client_fd() : wire.server_fd();
                int to_fd = side == 0 ? wire.server_fd() : wire.client_fd();
                size_t left = total - begun[side];
                if (left != 0) {
                    size_t size = std::min<size_t>(left, random.between(1, 40000));
                    ssize_t n = from.send(from_fd, sent[side].data() + begun[side], size);
                    REQUIRE((n > 0 || errno == EAGAIN));
                    if (n > 0) begun[side] += static_cast<size_t>(n);
                } else {
                    REQUIRE((from.flush(from_fd) || errno == EAGAIN));
                }
                while (wire.carry(side == 0, piece_max) && random.one_in(2)) {
                }
                std::vector<char> buffer(random.one_in(2) ? kTlsRecordBytes : random.between(1, 100));
                ssize_t n = to.receive(to_fd, buffer.data(), buffer.size());
                REQUIRE((n > 0 || (n < 0 && errno == EAGAIN)));
                if (n > 0) got[side].insert(got[side].end(), buffer.begin(), buffer.begin() + n);
                if (buffer.size() == kTlsRecordBytes) CHECK(!to.pending());
            }
        }
        CHECK(got[0] == sent[0]);
        CHECK(got[1] == sent[1]);
        // And the end is an end.
        wire.left.far.reset();
        wire.right.far.reset();
        char byte;
        CHECK(wire.client->receive(wire.client_fd(), &byte, 1) == 0);
        // Into a socket that is closed: an error, never a signal.
        ssize_t n;
        while ((n = wire.client->send(wire.client_fd(), &byte, 1)) > 0) {
        }
        CHECK(errno == EPIPE);
    }
}

TEST_CASE("tls: no spoiled byte is ever taken for a good one") {
    int handshakes = 0, broken = 0;
    for (uint64_t round = 0; round < 150; ++round) {
        Random random(round);
        Wire wire;
        // A handshake moves about 2 KiB; then 1 KiB follows.
        size_t spoil_at = random.below(3500), passed = 0;
        bool spoil_up = random.one_in(2), spoiled = false;
        auto spoil = [&](bool up, std::vector<char>& piece) {
            if (up != spoil_up) return;
            if (!spoiled && spoil_at < passed + piece.size()) {
                spoiled = true;
                piece[spoil_at - passed] ^= static_cast<char>(1 << random.below(8));
            }
            passed += piece.size();
        };
        auto [up, down] = shake(wire, random, 500, spoil);
        if (up != Step::kDone || down != Step::kDone) {
            CHECK(spoiled);
            ++handshakes;
            for (const auto& side : {std::pair(up, wire.client.get()), std::pair(down, wire.server.get())}) {
                if (side.first == Step::kFailed) CHECK(!side.second->error("it").text.empty());
            }
            continue;
        }
        std::vector<char> sent(1000, 'x');
        TlsStream& from = spoil_up ? *wire.client : *wire.server;
        TlsStream& to = spoil_up ? *wire.server : *wire.client;
        int to_fd = spoil_up ? wire.server_fd() : wire.client_fd();
        REQUIRE(from.send(spoil_up ? wire.client_fd() : wire.server_fd(), sent.data(), sent.size()) == 1000);
        while (wire.carry(spoil_up, 100, spoil)) {
        }
        std::vector<char> got(kTlsRecordBytes);
        ssize_t n = to.receive(to_fd, got.data(), got.size());
        if (n > 0) {
            got.resize(static_cast<size_t>(n));
            CHECK(got == sent);
        } else {
            CHECK((errno == EPROTO || errno == EAGAIN));  // EAGAIN: a longer record was announced
            CHECK(spoiled);
            ++broken;
        }
    }
    MESSAGE(handshakes << " handshakes and " << broken << " records of 150 were spoiled");
    CHECK(handshakes > 0);
    CHECK(broken > 0);
}

TEST_CASE("tls: random bytes, whole and cut records, in any order") {
    for (uint64_t round = 0; round < 200; ++round) {
        Random random(round);
        Pair pair;
        bool server = random.one_in(2);
        auto stream =
            server ? std::move(*tls_server()->open()) : std::move(*tls_client()->open("127.0.0.1:1"));
        std::vector<std::byte> bytes;
        if (random.one_in(2)) bytes = client_hello();
        bytes.resize(random.below(bytes.size() + 1));
        for (uint64_t records = random.below(5); records > 0; --records) {
            uint64_t length = random.one_in(4) ? random.below(65536) : random.below(300);
            for (uint64_t b :
                 {random.between(19, 24), uint64_t{3}, random.below(5), length >> 8, length & 255}) {
                bytes.push_back(static_cast<std::byte>(b));
            }
            for (uint64_t i = random.below(length + 1); i > 0; --i) {
                bytes.push_back(static_cast<std::byte>(random.next()));
            }
        }
        Step step = Step::kWait;
        for (size_t at = 0; at < bytes.size() && step == Step::kWait;) {
            size_t piece = std::min<size_t>(random.between(1, 5000), bytes.size() - at);
            REQUIRE(::send(pair.far.get(), bytes.data() + at, piece, 0) == static_cast<ssize_t>(piece));
            at += piece;
            step = stream->handshake(pair.near.get());
        }
        CHECK(step != Step::kDone);
        if (step == Step::kFailed) CHECK(!stream->error("it").text.empty());
        pair.far.reset();
        for (int i = 0; i < 10000 && step == Step::kWait; ++i) step = stream->handshake(pair.near.get());
        CHECK(step == Step::kFailed);
    }
}

TEST_CASE("tls: a socket that has failed has failed for each later call") {
    Fd listening(::socket(AF_INET, SOCK_STREAM, 0));
    sockaddr_in at{};
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(at);
    REQUIRE(::bind(listening.get(), reinterpret_cast<sockaddr*>(&at), size) == 0);
    REQUIRE(::listen(listening.get(), 1) == 0);
    REQUIRE(::getsockname(listening.get(), reinterpret_cast<sockaddr*>(&at), &size) == 0);
    Fd near(::socket(AF_INET, SOCK_STREAM, 0));
    REQUIRE(::connect(near.get(), reinterpret_cast<sockaddr*>(&at), size) == 0);
    Fd far(::accept(listening.get(), nullptr, nullptr));
    REQUIRE(far.valid());
    auto client = std::move(*tls_client("authority", "localhost")->open("localhost:1"));
    auto server = std::move(*tls_server()->open());
    Step up = Step::kWait, down = Step::kWait;
    while (up != Step::kDone || down != Step::kDone) {
        if (up == Step::kWait) up = client->handshake(near.get());
        if (down == Step::kWait) down = server->handshake(far.get());
        REQUIRE(up != Step::kFailed);
        REQUIRE(down != Step::kFailed);
    }
    REQUIRE(client->send(near.get(), "0123456789", 10) == 10);
    char text[20];
    pollfd look{far.get(), POLLIN, 0};
    REQUIRE(::poll(&look, 1, 10000) == 1);
    REQUIRE(server->receive(far.get(), text, sizeof(text)) == 10);
    const linger hard{1, 0};
    REQUIRE(::setsockopt(near.get(), SOL_SOCKET, SO_LINGER, &hard, sizeof(hard)) == 0);
    near.reset();  // the kernel tells the other end of it once
    REQUIRE(::poll(&look, 1, 10000) == 1);
    for (int i = 0; i < 3; ++i) {
        errno = 0;
        CHECK(server->receive(far.get(), text, sizeof(text)) == -1);
        CHECK(errno == ECONNRESET);
    }
    CHECK_FALSE(server->ended_well());
}

TEST_CASE("tls: a ClientHello that is too long is called so") {
    Pair pair;
    auto stream = std::move(*tls_server()->open());
    // A record of 8 bytes: a ClientHello of 1 MiB begins.
    const unsigned char bytes[] = {22, 3, 1, 0, 8, 1, 0x10, 0, 0, 3, 3, 0, 0};
    REQUIRE(::send(pair.far.get(), bytes, sizeof(bytes), 0) == static_cast<ssize_t>(sizeof(bytes)));
    REQUIRE(stream->handshake(pair.near.get()) == Step::kFailed);
    says(stream->error("the caller"), "TLS with the caller broke: its ClientHello is too long");
}

TEST_CASE("tls: a caller arrives inside TLS, and the stream goes on with its new owner") {
    for (bool mutual : {false, true}) {
        House house(tls_server("master", mutual));
        Result<Dialed> dialed = dial(house.to(tls_client("authority", "", mutual ? "caller" : "")));
        REQUIRE_MESSAGE(dialed.ok(), (dialed.ok() ? "" : dialed.error().text));
        CHECK(dialed->welcome == std::vector<std::byte>{std::byte{42}});
        AuthenticatedConnection caller = house.desk.next();
        REQUIRE(caller.tls != nullptr);
        ControlSocket here{std::move(dialed->fd), std::move(dialed->tls), 5000};
        ControlSocket there{std::move(caller.fd), std::move(caller.tls), 5000};
        // More than the sockets hold.
        std::vector<char> sent(8u << 20, 'x'), got(sent.size());
        std::thread sender([&] {
            for (size_t at = 0; at < sent.size();) {
                ssize_t n = here.send(sent.data() + at, sent.size() - at, true);
                if (n <= 0) return;
                at += static_cast<size_t>(n);
            }
        });
        size_t at = 0;
        while (at < got.size()) {
            ssize_t n = there.receive(got.data() + at, got.size() - at, true);
            if (n <= 0) break;
            at += static_cast<size_t>(n);
        }
        sender.join();
        CHECK(at == got.size());
        CHECK(got == sent);
        // Nothing comes: the wait has an end.
        here.timeout_ms = 20;
        char byte;
        CHECK(here.receive(&byte, 1, true) == -1);
        CHECK(errno == EAGAIN);
    }
}

TEST_CASE("tls: what cannot be trusted is refused in one sentence that says what to do") {
    struct Row {
        const char *cert, *ca, *name, *shown;
        bool mutual;
        Code code;
        const char* says;
    };
    const Row rows[] = {
        {"master", "test-cert", "", "", false, Code::kAuth,
         "is not trusted (unable to get local issuer certificate); set cluster.tls_ca"},
        {"test-cert", "authority", "", "", false, Code::kAuth,
         "set cluster.tls_ca to the authorities that vouch"},
        {"master-expired", "authority", "", "", false, Code::kAuth, "has expired; make a new one"},
        {"master-future", "authority", "", "", false, Code::kAuth, "is not valid yet; compare the clocks"},
        {"master-elsewhere", "authority", "", "", false, Code::kAuth,
         "is not for 127.0.0.1; dial it by a name"},
        {"master", "authority", "master.example", "", false, Code::kAuth, "is not for master.example"},
        {"master", "authority", "", "", true, Code::kAuth, "does not accept the certificate of this process"},
        {"master", "authority", "", "test-cert", true, Code::kAuth, "set cluster.tls_control = \"mutual\""},
        {"master", "authority", "", "master-expired", true, Code::kAuth, "certificate expired"},
    };
    for (const Row& row : rows) {
        CAPTURE(row.cert);
        CAPTURE(row.says);
        House house(tls_server(row.cert, row.mutual));
        Error error = refusal(house.to(tls_client(row.ca, row.name, row.shown)));
        CHECK(error.code == row.code);
        says(error, row.says);
    }
    for (const char* name : {"localhost", "127.0.0.1", "::1"}) {
        CHECK(dial(House(tls_server()).to(tls_client("authority", name))).ok() == true);
    }
    CHECK(dial(House(tls_server("master-elsewhere")).to(tls_client("authority", "master.example"))).ok());
}

TEST_CASE("tls: a port with TLS refuses who speaks in plain, and the other way round; nobody gives way") {
    House with(tls_server()), without(nullptr);
    auto began = std::chrono::steady_clock::now();
    Error error = refusal(with.to(nullptr));
    CHECK(error.code == Code::kProtocol);
    says(error, "this port speaks TLS only; set cluster.tls_control");
    MESSAGE("told after " << std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count()
                          << " s");
    error = refusal(without.to(tls_client()));
    CHECK(error.code == Code::kProtocol);
    says(error, "does not speak TLS, and this process must");

    // Frames in plain, though the token is right, from one who does not wait to be asked.
    Fd loud = with.stranger();
    FrameHeader header;
    header.kind = Kind::kAuth;
    REQUIRE(::send(loud.get(), &header, sizeof(header), MSG_NOSIGNAL) == sizeof(header));
    std::string said = read_all(loud.get());
    CHECK(said.find("TLS only") != std::string::npos);
    CHECK(said[5] == static_cast<char>(Kind::kError));  // and no challenge before it
    Fd hello = without.stranger();
    std::vector<std::byte> bytes = client_hello();
    REQUIRE(::send(hello.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) > 0);
    CHECK(read_all(hello.get()).find("the caller speaks TLS, and this port does not") != std::string::npos);

    CHECK(with.listener->counters().protocol_errors_total == 2);
    CHECK(dial(with.to(tls_client())).ok());
    CHECK(dial(without.to(nullptr)).ok());
    // A wrong token inside TLS.
    DialOptions guess = with.to(tls_client());
    guess.token = "guess";
    says(refusal(guess), "the cluster token is wrong");
}

namespace {

// Whether all of it was done before a caller without TLS is taken for silent; else it proves nothing.
bool speaks_while_the_listener_is_busy() {
    auto tls = tls_client();
    std::vector<std::byte> hello = client_hello();
    std::atomic<bool> in_time{false};
    House house(tls_server());
    auto began = std::chrono::steady_clock::now();
    Fd early = house.stranger();
    auto greeted = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (house.listener->counters().accepted_total == 0 && std::chrono::steady_clock::now() < greeted) {
        std::this_thread::yield();
    }
    REQUIRE(house.listener->counters().accepted_total == 1);
    {
        std::lock_guard lock(house.desk.mutex);
        house.desk.busy = [&] {
            CHECK(::send(early.get(), hello.data(), hello.size(), MSG_NOSIGNAL) > 0);
            in_time = std::chrono::steady_clock::now() - began < std::chrono::milliseconds(200);
            pollfd nothing{-1, 0, 0};
            ::poll(&nothing, 1, 300);  // longer than a caller without TLS is waited for
        };
    }
    CHECK(dial(house.to(tls)).ok());
    char first = 0;
    REQUIRE(::recv(early.get(), &first, 1, 0) == 1);
    if (!in_time) return false;
    CHECK(first == static_cast<char>(kTlsHandshake));
    CHECK(house.listener->counters().protocol_errors_total == 0);
    return true;
}

}  // namespace

TEST_CASE("tls: who has spoken is not taken for silent because the listener was busy") {
    int tries = 1;
    while (!speaks_while_the_listener_is_busy() && tries < 20) ++tries;
    MESSAGE(tries << " tries");
}

TEST_CASE("tls: half a handshake, a slow one and garbage keep nobody out") {
    Limits limits;
    limits.connections_unproved = 8;
    limits.handshake_ms = 1500;
    House house(tls_server(), limits);
    std::vector<std::byte> hello = client_hello();
    std::vector<Fd> half;
    for (int i = 0; i < 30; ++i) {
        half.push_back(house.stranger());
        REQUIRE(::send(half.back().get(), hello.data(), 40, MSG_NOSIGNAL) == 40);
    }
    CHECK(dial(house.to(tls_client())).ok());
    CHECK(house.listener->counters().refused_total >= 22);

    // One byte now and then, for as long as it is let.
    Fd slow = house.stranger();
    size_t sent = 0;
    pollfd over{slow.get(), POLLIN | POLLHUP, 0};
    auto began = std::chrono::steady_clock::now();
    while (sent < 40 && ::poll(&over, 1, 50) == 0) {
        REQUIRE(::send(slow.get(), hello.data() + sent++, 1, MSG_NOSIGNAL) == 1);
        CHECK(dial(house.to(tls_client())).ok());
    }
    char byte;
    CHECK(::recv(slow.get(), &byte, 1, 0) <= 0);
    auto took = std::chrono::steady_clock::now() - began;
    MESSAGE("cut off after " << std::chrono::duration<double>(took).count() << " s");
    CHECK(sent < 40);
    CHECK(house.listener->counters().handshake_timeouts_total > 0);

    // The hello of TLS and then nonsense; the answer is drained by nobody.
    Fd garbage = house.stranger();
    REQUIRE(::send(garbage.get(), hello.data(), hello.size(), MSG_NOSIGNAL) > 0);
    Random random(1);
    std::vector<char> noise(5000);
    random.fill(noise.data(), noise.size());
    ::send(garbage.get(), noise.data(), noise.size(), MSG_NOSIGNAL);
    CHECK(dial(house.to(tls_client())).ok());
}

TEST_CASE("tls: a dialler gives up on somebody who is silent, slow or no TLS") {
    Result<std::vector<SocketAddress>> any = resolve("127.0.0.1:0", true);
    Result<Fd> listener = listen_tcp(any->front(), "127.0.0.1:0");
    REQUIRE(listener.ok());
    DialOptions options;
    options.address = local_address(listener->get());
    options.token = "secret";
    options.service = kServiceMember;
    options.timeout_ms = 200;
    options.tls = tls_client();
    CHECK(refusal(options).code == Code::kTimeout);
    std::vector<std::byte> full;
    size_t at = begin_frame(full, Kind::kError, 0, 0);
    Writer(full).number(static_cast<uint16_t>(Code::kTooLarge));
    Writer(full).text16("it is full");
    finish_frame(full, at);
    const std::pair<std::string, const char*> rows[] = {
        {std::string(reinterpret_cast<const char*>(full.data()), full.size()),
         "gave up before it heard from here (it is full)"},
        {"HTTP/1.1 400 Bad Request\r\n\r\n                        ",
         "does not speak the protocol of Moonpool"},
        {std::string("\x15\x03\x03\0\x02\x02\x28", 7), "handshake failure"},
        {std::string("\x16\x03\x03\xff\xff", 5), "what came is no TLS"},
        {std::string("\x16\x03\x03\0\x05zzzzz", 10), "TLS with 127.0.0.1"},
        {"", "closed the connection during the TLS handshake"},
    };
    options.timeout_ms = 5000;
    for (const auto& [answer, sentence] : rows) {
        CAPTURE(sentence);
        std::thread peer([&, answer = answer] {
            pollfd waiting{listener->get(), POLLIN, 0};
            for (;;) {
                ::poll(&waiting, 1, 5000);
                Fd fd(::accept4(listener->get(), nullptr, nullptr, SOCK_CLOEXEC));
                char hello[4096];
                // The one that was given up above is over at once.
                if (::recv(fd.get(), hello, sizeof(hello), 0) <= 0) continue;
                if (::recv(fd.get(), hello, sizeof(hello), MSG_PEEK | MSG_DONTWAIT) == 0) continue;
                ::send(fd.get(), answer.data(), answer.size(), MSG_NOSIGNAL);
                ::shutdown(fd.get(), SHUT_WR);
                while (::recv(fd.get(), hello, sizeof(hello), 0) > 0) {
                }
                return;
            }
        });
        Error error = refusal(options);
        peer.join();
        says(error, sentence);
    }
    std::atomic<bool> given_up{true};
    options.given_up = &given_up;
    CHECK(refusal(options).code == Code::kClosed);
}

TEST_CASE("tls: files that are replaced are those of the next connection, and useless ones change nothing") {
    namespace fs = std::filesystem;
    const fs::path folder = fs::temp_directory_path() / ("moonpool-tls-" + std::to_string(::getpid()));
    fs::create_directories(folder);
    const std::string cert = folder / "cert.pem", key = folder / "key.pem", ca = folder / "ca.pem";
    auto replace = [&](const std::string& file, const std::string& by) {
        fs::copy_file(by, folder / "new", fs::copy_options::overwrite_existing);
        fs::rename(folder / "new", file);
    };
    replace(cert, certificate("master"));
    replace(key, certificate("test-key"));
    fs::permissions(key, fs::perms::owner_read);
    replace(ca, certificate("test-cert"));
    House house(*TlsServer::create({cert, key, ""}));
    auto client = *TlsClient::create({"", "", ca}, "");
    says(refusal(house.to(client)), "is not trusted");
    replace(ca, certificate("authority"));
    Result<Dialed> first = dial(house.to(client));
    REQUIRE(first.ok());
    (void)house.journal->take();

    replace(cert, certificate("master-elsewhere"));
    says(refusal(house.to(client)), "is not for 127.0.0.1");
    (void)house.journal->take();
    replace(cert, certificate("test-key"));  // no certificate
    for (int i = 0; i < 3; ++i) says(refusal(house.to(client)), "is not for 127.0.0.1");
    std::vector<std::string> told;
    for (const Note& note : house.journal->take()) {
        if (note.kind == "tls_files") told.push_back(note.text);
    }
    REQUIRE(told.size() == 1);
    CHECK(told[0].find("it must be a certificate in PEM form; the files from before are in use") !=
          std::string::npos);
    fs::remove(cert);
    says(refusal(house.to(client)), "is not for 127.0.0.1");
    replace(cert, certificate("master"));
    CHECK(dial(house.to(client)).ok());
    fs::remove_all(folder);
}

TEST_CASE("tls: files and libraries that are not there") {
    auto wrong = [](const TlsFiles& files) {
        Result<std::shared_ptr<TlsServer>> made = TlsServer::create(files);
        REQUIRE(!made.ok());
        CHECK(made.error().code == Code::kInvalidArgument);
        return made.error();
    };
    std::string cert = certificate("master"), key = certificate("test-key");
    says(wrong({"/no/cert", key, ""}),
         "cluster.tls_cert = /no/cert cannot be used: No such file or directory; it must be");
    says(wrong({cert, "/no/key", ""}), "cluster.tls_key = /no/key cannot be used: No such file");
    says(wrong({cert, cert, ""}), "it must be the key of cluster.tls_cert, in PEM form, without a password");
    says(wrong({cert, key, "/no/ca"}), "cluster.tls_ca = /no/ca cannot be used: No such file");
    says(wrong({cert, key, key}), "it must hold certificates in PEM form");
    CHECK(!TlsClient::create({"", "", "/no/ca"}, "").ok());
    CHECK(!TlsClient::create({cert, "/no/key", ""}, "").ok());
    CHECK(TlsClient::create({}, "").ok());  // the system's authorities
    CHECK(refusal(House(tls_server()).to(*TlsClient::create({}, ""))).code == Code::kAuth);

    const OpenSslNames nowhere[] = {{"libssl.so.none", "libcrypto.so.none"}};
    Result<OpenSsl> missing = OpenSsl::load(nowhere);
    REQUIRE(!missing.ok());
    CHECK(missing.error().code == Code::kUnavailable);
    says(missing.error(), "TLS needs OpenSSL 3 or 1.1.1, which cannot be loaded (libcrypto.so.none");
    says(missing.error(), "install it");
    const OpenSslNames other[] = {{"libc.so.6", "libc.so.6"}};
    missing = OpenSsl::load(other);
    REQUIRE(!missing.ok());
    says(missing.error(), "libc.so.6 lacks ");
}
