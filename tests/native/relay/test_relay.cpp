// The whole relay under storms: engines that fail at every stage, clients that leave at every stage, plans of
// every kind. For the sanitizers: what is freed, and by which thread it is touched. What is answered is
// tests/disagg_proxy's part.
#include <arpa/inet.h>
#include <doctest/doctest.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <iterator>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/fd.hpp"
#include "base/mutex.hpp"
#include "relay/relay.hpp"

using namespace moonpool;
using namespace moonpool::relay;

namespace {

// With room and time for all that a test does.
Settings roomy() {
    Settings settings;
    settings.limits = {.client_connections_max = 10000,
                       .head_bytes_max = 32 << 10,
                       .body_bytes_max = 64 << 20,
                       .bodies_bytes_max = size_t{1} << 30,
                       .address_share = 0.5,
                       .pipelined_bytes_max = 64 << 10,
                       .write_buffer_bytes_max = 256 << 10,
                       .unread_bytes_max = 512 << 20,
                       .prefill_answer_bytes_max = 16 << 20,
                       .idle_upstreams_max = 256,
                       .observations_max = 65536,
                       .retries_max = 2,
                       .body = {.members_max = 1024, .prompts_max = 4096, .prompt_ids_max = 1 << 20}};
    settings.deadlines = {.head_s = 20,
                          .body_stall_s = 30,
                          .body_bytes_per_s_min = 1024,
                          .client_idle_s = 75,
                          .client_stall_s = 300,
                          .linger_s = 2,
                          .decide_s = 60,
                          .connect_s = 5,
                          .first_byte_s = 600,
                          .stream_stall_s = 600,
                          .suspect_engine_s = 5,
                          .silent_engine_s = 15,
                          .upstream_idle_s = 4,
                          .tcp_dead_peer_s = 30,
                          .sweep_s = 0.25};
    settings.breaker = {.failures_max = 5, .open_s = 2, .open_s_max = 30};
    return settings;
}

Fd listening(sockaddr_in& address) {
    Fd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    REQUIRE(::bind(fd.get(), reinterpret_cast<sockaddr*>(&address), size) == 0);
    REQUIRE(::listen(fd.get(), 128) == 0);
    ::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&address), &size);
    return fd;
}

bool send_all(int fd, const std::string& bytes) {
    return ::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size());
}

// Answers as chance has it: whole, in a stream, with 500, with garbage, or not at all.
class MockEngine {
   public:
    MockEngine() {
        listening_ = listening(address);
        acceptor_ = std::thread([this] {
            for (;;) {
                int fd = ::accept(listening_.get(), nullptr, nullptr);
                if (fd < 0) return;
                MutexLock lock(mutex_);
                serving_.emplace_back([this, fd] { serve(Fd(fd)); });
            }
        });
    }
    ~MockEngine() {
        ending_ = true;
        ::shutdown(listening_.get(), SHUT_RDWR);
        acceptor_.join();
        join_served();
    }
    // Once the relay has closed all of its connections.
    void join_served() {
        std::vector<std::thread> ended;
        {
            MutexLock lock(mutex_);
            ended.swap(serving_);
        }
        for (auto& thread : ended) thread.join();
    }
    sockaddr_in address{};

   private:
    void serve(Fd fd) {
        std::mt19937 chance(static_cast<unsigned>(fd.get()) * 7919u + ++served_);
        std::string received;
        char buffer[4096];
        while (!ending_) {
            pollfd waiting{fd.get(), POLLIN, 0};
            if (::poll(&waiting, 1, 20) == 0) continue;
            ssize_t n = ::recv(fd.get(), buffer, sizeof(buffer), 0);
            if (n <= 0) return;
            received.append(buffer, static_cast<size_t>(n));
            if (received.find("\"end\":") == std::string::npos || received.find('}') == std::string::npos) {
                continue;
            }
            received.clear();
            switch (chance() % 8) {
                case 0:
                    return;
                case 1:
                    send_all(fd.get(), "HTTP/1.1 500 Oh\r\nContent-Length: 2\r\n\r\n{}");
                    break;
                case 2:
                    send_all(fd.get(), "garbage\r\n\r\n");
                    return;
                case 3:
                    send_all(fd.get(),
                             "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
                             "Transfer-Encoding: chunked\r\n\r\n9\r\ndata: x\n\n\r\n");
                    if (chance() % 2 == 0) return;
                    send_all(fd.get(), "0\r\n\r\n");
                    break;
                case 4:
                    send_all(fd.get(), "HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\n{");
                    return;
                default:
                    send_all(fd.get(),
                             "HTTP/1.1 200 OK\r\nContent-Length: 30\r\n\r\n"
                             "{\"kv_transfer_params\":{\"a\":1}}");
            }
        }
    }

    Fd listening_;
    std::atomic<bool> ending_{false};
    std::atomic<unsigned> served_{0};
    std::thread acceptor_;
    Mutex mutex_;
    std::vector<std::thread> serving_ GUARDED_BY(mutex_);
};

class RandomDecider final : public Decider {
   public:
    std::atomic<Relay*> relay{nullptr};

    void decide(std::vector<Question>& questions) override {
        for (Question& question : questions) {
            Decision decision;
            decision.kind = Decision::Kind::kPlan;
            const auto& all = question.candidates;
            switch (question.page ? 9 : chance_() % 8) {
                case 0:
                    decision.kind = Decision::Kind::kFailed;
                    break;
                case 1:
                case 2:
                    if (all.size() > 1) decision.plan.prefill = all[1];
                    break;
                case 3:
                    if (all.size() > 1) {
                        decision.plan.prefill = all[1];
                        constexpr Form kForms[] = {Form::kConcurrent, Form::kOneShot, Form::kContextFirst,
                                                   Form::kGenerationFirst};
                        decision.plan.form = kForms[chance_() % std::size(kForms)];
                        decision.plan.members = {{"bootstrap_room", "7"}};
                        decision.plan.prefill_params = decision.plan.engine_params = "{}";
                    }
                    break;
                case 9:
                    decision.kind = Decision::Kind::kPage;
                    decision.page.body = "page";
                    break;
                default:
                    break;
            }
            if (!all.empty()) decision.plan.engine = all[0];
            if (chance_() % 4 == 0) {
                relay.load()->resume(question.request->id, decision);
                question.decision.kind = Decision::Kind::kLater;
            } else {
                question.decision = decision;
            }
        }
    }
    void engine_refused(size_t, const std::string&) override {}
    void engine_gone(size_t place) override {
        std::lock_guard lock(mutex_);
        gone_.push_back(place);
        changed_.notify_one();
    }

    // The next place that has become free, or none within ten seconds.
    std::optional<size_t> next_gone() {
        std::unique_lock lock(mutex_);
        if (!changed_.wait_for(lock, std::chrono::seconds(10), [this] { return !gone_.empty(); })) return {};
        size_t place = gone_.front();
        gone_.pop_front();
        return place;
    }

   private:
    std::mt19937 chance_{7};
    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<size_t> gone_;
};

void visit(const sockaddr_in& address, unsigned seed) {
    std::mt19937 chance(seed);
    for (int round = 0; round < 40; ++round) {
        std::string body = "{\"model\":\"m\",";
        // One that is read beside the relay's thread; of these some are refused.
        if (chance() % 4 == 0) body += "\"rid\":\"" + std::string(150 << 10, 'x') + "\",";
        if (chance() % 16 == 0) body.assign(160 << 10, 'x');
        body += "\"end\":1}";
        const std::string request =
            "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: " + std::to_string(body.size()) +
            "\r\n\r\n" + body;
        Fd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
        if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) continue;
        std::string sent = request;
        if (chance() % 4 == 0) sent += "GET /health HTTP/1.1\r\nHost: x\r\n\r\n" + request;
        if (chance() % 8 == 0) sent = sent.substr(0, chance() % sent.size());
        if (chance() % 16 == 0) sent[chance() % 20] = '\x01';
        if (!send_all(fd.get(), sent)) continue;
        if (chance() % 2 == 0) continue;  // leaves at once
        pollfd waiting{fd.get(), POLLIN, 0};
        char buffer[4096];
        while (::poll(&waiting, 1, chance() % 2 == 0 ? 1 : 50) > 0 &&
               ::recv(fd.get(), buffer, sizeof(buffer), 0) > 0) {
        }
    }
}

}  // namespace

TEST_CASE("without descriptors nobody is accepted, and the relay waits instead of spinning") {
    RandomDecider decider;
    Settings settings = roomy();
    settings.engines.push_back({"a", "h", Role::kBoth});
    settings.deadlines.sweep_s = 0.1;
    auto started = Relay::start(settings, decider);
    REQUIRE(started.ok());
    Relay& relay = **started;
    decider.relay = &relay;
    sockaddr_in address{};
    Fd listener = listening(address);
    relay.listen(::dup(listener.get()));
    Fd client(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));

    auto cpu_ms = [&] {
        timespec used{};
        relay.call([&] { ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used); });
        return used.tv_sec * 1000 + used.tv_nsec / 1'000'000;
    };
    rlimit before{};
    REQUIRE(::getrlimit(RLIMIT_NOFILE, &before) == 0);
    Fd highest(::dup(client.get()));  // all numbers below are in use
    rlimit none{static_cast<rlim_t>(highest.get()), before.rlim_max};
    pollfd waiting{client.get(), POLLIN, 0};
    // No check in between: the sanitizers want descriptors of their own.
    ::setrlimit(RLIMIT_NOFILE, &none);
    bool sent = ::connect(client.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0 &&
                send_all(client.get(), "GET /nowhere HTTP/1.1\r\nHost: x\r\n\r\n");
    auto began_ms = cpu_ms();
    bool answered = ::poll(&waiting, 1, 500) != 0;
    auto used_ms = cpu_ms() - began_ms;
    ::setrlimit(RLIMIT_NOFILE, &before);
    CHECK(sent);
    CHECK_FALSE(answered);
    CHECK(used_ms < 100);
    CHECK(::poll(&waiting, 1, 10000) == 1);  // it waited, and is answered now
    char buffer[64];
    ssize_t n = ::recv(client.get(), buffer, sizeof(buffer), 0);
    CHECK(std::string_view(buffer, static_cast<size_t>(std::max<ssize_t>(n, 0))).starts_with("HTTP/1.1 404"));
    relay.close();
}

TEST_CASE("without descriptors for an engine a request is refused and no engine is blamed") {
    MockEngine engine;
    RandomDecider decider;
    Settings settings = roomy();
    settings.engines.push_back({"a", "h", Role::kBoth});
    settings.breaker.failures_max = 1u << 30;
    auto started = Relay::start(settings, decider);
    REQUIRE(started.ok());
    Relay& relay = **started;
    decider.relay = &relay;
    sockaddr_storage there{};
    std::memcpy(&there, &engine.address, sizeof(engine.address));
    sockaddr_in address{};
    Fd listener = listening(address);
    relay.listen(::dup(listener.get()));
    auto engine_is_back = [&] {
        relay.engine_address(0, there, sizeof(engine.address));  // closes idle connections to it
        relay.engine_state(0, true);
    };
    // The sanitizer wants descriptors when it meets a class for the first time, also that of a thread that
    // ends.
    engine_is_back();
    visit(address, 1);
    size_t visitors = 1;
    auto gone = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (visitors > 0 && std::chrono::steady_clock::now() < gone) {
        relay.call([&] { visitors = relay.clients().all().size(); });
    }
    REQUIRE(visitors == 0);
    engine_is_back();
    engine.join_served();
    uint32_t failures = 0;
    relay.call([&] { failures = relay.engines().at(0).breaker.failures(); });
    Fd client(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    REQUIRE(::connect(client.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0);
    auto ask = [&](const char* request) {
        char buffer[2048];
        pollfd waiting{client.get(), POLLIN, 0};
        if (!send_all(client.get(), request) || ::poll(&waiting, 1, 10000) != 1) return std::string();
        ssize_t n = ::recv(client.get(), buffer, sizeof(buffer), 0);
        return std::string(buffer, static_cast<size_t>(std::max<ssize_t>(n, 0)));
    };
    REQUIRE(ask("GET /nowhere HTTP/1.1\r\nHost: x\r\n\r\n").starts_with("HTTP/1.1 404"));

    rlimit before{};
    REQUIRE(::getrlimit(RLIMIT_NOFILE, &before) == 0);
    rlimit none{3, before.rlim_max};
    ::setrlimit(RLIMIT_NOFILE, &none);
    std::string refused = ask("POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}");
    ::setrlimit(RLIMIT_NOFILE, &before);
    INFO(refused);
    CHECK(refused.starts_with("HTTP/1.1 503"));
    CHECK(refused.find("open_files") != std::string::npos);
    relay.call([&] {
        CHECK(relay.engines().at(0).healthy);
        CHECK(relay.engines().at(0).breaker.failures() <= failures);
        CHECK(relay.engines().at(0).legs.empty());
        CHECK(relay.check_integrity());
    });
    relay.close();
}

TEST_CASE("accepted connections have what the listening socket was told") {
    RandomDecider decider;
    Settings settings = roomy();
    settings.engines.push_back({"a", "h", Role::kBoth});
    settings.deadlines.tcp_dead_peer_s = 12;
    auto started = Relay::start(settings, decider);
    REQUIRE(started.ok());
    Relay& relay = **started;
    sockaddr_in address{};
    Fd listener = listening(address);
    relay.listen(::dup(listener.get()));
    Fd client(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    REQUIRE(::connect(client.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0);
    REQUIRE(send_all(client.get(), "GET /nowhere HTTP/1.1\r\nHost: x\r\n\r\n"));
    pollfd answered{client.get(), POLLIN, 0};
    REQUIRE(::poll(&answered, 1, 10000) == 1);
    std::vector<int> found;
    relay.call([&] {
        REQUIRE(relay.clients().all().size() == 1);
        constexpr std::pair<int, int> kOptions[] = {{IPPROTO_TCP, TCP_NODELAY},
                                                    {SOL_SOCKET, SO_KEEPALIVE},
                                                    {IPPROTO_TCP, TCP_KEEPIDLE},
                                                    {IPPROTO_TCP, TCP_USER_TIMEOUT}};
        for (auto [level, option] : kOptions) {
            int value = -1;
            socklen_t size = sizeof(value);
            ::getsockopt(relay.clients().all()[0]->fd.get(), level, option, &value, &size);
            found.push_back(value);
        }
    });
    CHECK(found == std::vector<int>{1, 1, 6, 12000});
    relay.close();
}

TEST_CASE("an access log that nobody reads keeps a bound and ends") {
    int ends[2];
    REQUIRE(::pipe2(ends, O_CLOEXEC | O_NONBLOCK) == 0);
    Fd reader(ends[0]), writer(ends[1]);
    auto log = AccessLog::open("/proc/self/fd/" + std::to_string(writer.get()));
    REQUIRE(log.ok());
    writer.reset();
    Request request;
    const std::string target(1000, 'a');
    request.head.method = "GET";
    request.head.target = target;
    request.request_id = "id";
    constexpr int kLines = 20000;  // more than twice what is held, once waiting and once being written
    for (int i = 0; i < kLines; ++i) (*log)->add(request, -1, 200, 0, 1.0, nullptr, {});
    CHECK((*log)->dropped() > 1000);
    CHECK((*log)->dropped() < kLines);
    auto began = std::chrono::steady_clock::now();
    log->reset();
    CHECK(std::chrono::steady_clock::now() - began < std::chrono::seconds(8));
    std::string said(1 << 20, 0);
    ssize_t n = ::read(reader.get(), said.data(), said.size());
    REQUIRE(n > 4096);
    said.resize(static_cast<size_t>(n));
    size_t whole = said.rfind('\n') + 1;
    size_t line = said.find('\n') + 1;
    CHECK(whole % line == 0);  // each as long as the first
}

TEST_CASE("engines join and leave in a storm, and each place is free again") {
    MockEngine first, second, third;
    const std::array<const MockEngine*, 3> engines{&first, &second, &third};
    RandomDecider decider;
    Settings settings = roomy();
    settings.engines_max = 4;
    settings.breaker.failures_max = 1u << 30;
    settings.deadlines.sweep_s = 0.002;
    settings.deadlines.linger_s = 0.02;
    auto started = Relay::start(settings, decider);
    REQUIRE(started.ok());
    Relay& relay = **started;
    decider.relay = &relay;
    size_t joined = 0;
    auto join = [&](size_t place) {
        const MockEngine& engine = *engines[joined++ % engines.size()];
        sockaddr_storage address{};
        std::memcpy(&address, &engine.address, sizeof(engine.address));
        relay.add_engine(place, {"e" + std::to_string(joined), "h", Role::kBoth});
        relay.engine_address(place, address, sizeof(engine.address));
        relay.engine_models(place, std::vector<std::string>{"m"});
        relay.engine_state(place, true);
    };
    for (size_t place = 0; place < 3; ++place) join(place);
    sockaddr_in address{};
    Fd listener = listening(address);
    relay.listen(::dup(listener.get()));
    std::vector<std::thread> visitors;
    std::atomic<unsigned> visiting{4};
    for (unsigned seed = 0; seed < 4; ++seed) {
        visitors.emplace_back([&, seed] {
            visit(address, seed);
            --visiting;
        });
    }
    std::mt19937 chance(11);
    bool all_came = true;
    for (size_t round = 0; visiting > 0 && all_came; ++round) {
        relay.remove_engine(round % 3, chance() % 2 ? 0.01 : 10.0);
        auto place = decider.next_gone();
        all_came = place == round % 3;
        if (all_came) join(*place);
        CHECK(relay.in_flight(round % 3) <= 4 * 40 * 2);  // all that four visitors ever send
        relay.call([&] { CHECK(relay.check_integrity()); });
    }
    for (auto& visitor : visitors) visitor.join();
    CHECK(all_came);
    CHECK(joined > 3);
    CHECK(relay.drain(10));
    relay.call([&] {
        CHECK(relay.check_integrity());
        CHECK(relay.engines().count() == 3);
    });
    relay.close();
}

TEST_CASE("a storm of clients, engines and plans leaves nothing behind") {
    MockEngine first, second, third;
    RandomDecider decider;
    Settings settings = roomy();
    settings.breaker.failures_max = 1u << 30;
    settings.deadlines.sweep_s = 0.005;
    settings.deadlines.linger_s = 0.05;
    settings.deadlines.upstream_idle_s = 0.05;
    for (const char* name : {"a", "b", "c"}) settings.engines.push_back({name, "h", Role::kBoth});
    auto started = Relay::start(settings, decider);
    REQUIRE(started.ok());
    Relay& relay = **started;
    decider.relay = &relay;
    size_t place = 0;
    for (const MockEngine* engine : {&first, &second, &third}) {
        sockaddr_storage address{};
        std::memcpy(&address, &engine->address, sizeof(engine->address));
        relay.engine_address(place, address, sizeof(engine->address));
        relay.engine_state(place++, true);
    }
    sockaddr_in address{};
    Fd listener = listening(address);
    relay.listen(::dup(listener.get()));
    std::vector<std::thread> visitors;
    for (unsigned seed = 0; seed < 6; ++seed) visitors.emplace_back([&, seed] { visit(address, seed); });
    for (auto& visitor : visitors) visitor.join();
    CHECK(relay.drain(10));
    relay.call([&] {
        CHECK(relay.check_integrity());
        CHECK(relay.clients().budget.body_bytes() == 0);
        CHECK(relay.clients().accepted() > 200);
        for (const auto& engine : relay.engines().all()) CHECK(engine->legs.empty());
    });
    relay.close();
}

TEST_CASE("a body of many turns arrives whole") {
    sockaddr_in there{};
    Fd engine = listening(there);
    RandomDecider decider;
    Settings settings = roomy();
    settings.engines.push_back({"a", "h", Role::kBoth});
    auto started = Relay::start(settings, decider);
    REQUIRE(started.ok());
    Relay& relay = **started;
    decider.relay = &relay;
    sockaddr_storage engine_address{};
    std::memcpy(&engine_address, &there, sizeof(there));
    relay.engine_address(0, engine_address, sizeof(there));
    relay.engine_state(0, true);
    sockaddr_in address{};
    Fd listener = listening(address);
    relay.listen(::dup(listener.get()));

    // Every eighth byte tells its place.
    std::string body = "{\"a\":\"";
    while (body.size() < (5 << 20)) body += std::to_string(1000000 + body.size());
    body += "\"}";
    std::string arrived;
    std::thread serving([&] {
        Fd fd(::accept(engine.get(), nullptr, nullptr));
        char buffer[65536];
        size_t whole = 0;
        while (whole == 0 || arrived.size() < whole) {
            ssize_t n = ::recv(fd.get(), buffer, sizeof(buffer), 0);
            if (n <= 0) return;
            arrived.append(buffer, static_cast<size_t>(n));
            size_t end = arrived.find("\r\n\r\n");
            if (whole == 0 && end != std::string::npos) whole = end + 4 + body.size();
        }
        send_all(fd.get(), "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}");
    });
    Fd client(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    REQUIRE(::connect(client.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0);
    CHECK(send_all(client.get(), "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: " +
                                     std::to_string(body.size()) + "\r\n\r\n" + body));
    pollfd waiting{client.get(), POLLIN, 0};
    CHECK(::poll(&waiting, 1, 30000) == 1);
    char answer[64] = {};
    CHECK(::recv(client.get(), answer, sizeof(answer) - 1, 0) > 0);
    CHECK(std::string_view(answer).starts_with("HTTP/1.1 200"));
    relay.close();  // ends the engine's connection, too
    serving.join();
    CHECK(arrived.ends_with(body));
}
