// Threads. "moonpool-relay" runs run() and owns everything but what is marked otherwise. Other threads
// reach it in two ways: post() leaves a function in posted_ and wakes the poller; call() does the same and
// waits. mutex_ guards posted_, ended_ and empty_, nothing else, and is never held while a posted function
// runs.
//
// After the thread has ended (ended_), post() does nothing and call() runs the function on the caller's
// thread, which is then the only one. So the owner can look at counters after close().
//
// Objects that end inside of a turn are not deleted before clean(): events of the same turn, and callers
// further up the stack, may still refer to them.
#include "relay/relay.hpp"

#include <fcntl.h>
#include <malloc.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <utility>

#include "relay/listener.hpp"

namespace moonpool::relay {

namespace {

// Some milliseconds of work, with certificates whose keys are dear.
constexpr size_t kHandshakesPerTurn = 8;

}  // namespace

void Relay::Wake::on_events(uint32_t) {
    uint64_t value;
    (void)!::read(fd.get(), &value, sizeof(value));
}

// The parts get references to each other here, in the order of their declaration.
Relay::Relay(Settings given, Decider& decider)
    : decider_(decider),
      context_(std::move(given)),
      examiner_(context_.settings.limits.body),
      engines_(context_, decider),
      decisions_(context_, decider, examiner_,
                 [this](std::function<void()> function) { post(std::move(function)); }),
      requests_(examiner_),
      exchanges_(context_, engines_, decisions_),
      clients_(context_, engines_, requests_, exchanges_) {}

Result<std::unique_ptr<Relay>> Relay::start(Settings given, Decider& decider) {
    std::unique_ptr<Relay> relay(new Relay(std::move(given), decider));
    RelayContext& context = relay->context_;
    if (!context.settings.access_log.empty()) {
        auto log = AccessLog::open(context.settings.access_log);
        if (!log) return log.error();
        context.access_log = std::move(*log);
    }
    relay->wake_.fd.reset(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
    if (!relay->clients_.ids.start() || !relay->wake_.fd.valid() || !context.poller.start() ||
        !context.poller.add(relay->wake_, EPOLLIN)) {
        return os_error("relay");
    }
    // Bodies above this size are mappings of their own, which go back to the kernel when they are freed.
    // The dynamic threshold of glibc would keep them in the heap after the first one. It is a setting of
    // the whole process.
    ::mallopt(M_MMAP_THRESHOLD, static_cast<int>(RequestPool::kMappedBytes));
    ::mallopt(M_TRIM_THRESHOLD, static_cast<int>(4 * RequestPool::kMappedBytes));
    context.now = relay->clock();
    Status started = relay->thread_.start("moonpool-relay", [raw = relay.get()] { raw->run(); });
    if (!started) return started.error();
    return relay;
}

Relay::~Relay() {
    close();
    context_.retired.clear();  // before what a connection's end needs
}

// From any thread.

// Seconds of the monotonic clock, and what tests have added. Within a turn context_.now is used, so that
// all of it happens at one time.
double Relay::clock() const {
    auto since = std::chrono::steady_clock::now().time_since_epoch();
    auto ns = std::chrono::duration_cast<std::chrono::nanoseconds>(since).count();
    return static_cast<double>(ns + advanced_ns_.load(std::memory_order_relaxed)) * 1e-9;
}

void Relay::wake() {
    uint64_t one = 1;
    (void)!::write(wake_.fd.get(), &one, sizeof(one));
}

void Relay::post(std::function<void()> function) {
    {
        MutexLock lock(mutex_);
        if (ended_) return;
        posted_.push_back(std::move(function));
    }
    wake();
}

// For the engine at the place, unless it is leaving or gone by then.
void Relay::post_to(size_t place, std::function<void(Engine&)> function) {
    post([this, place, function = std::move(function)] {
        if (Engine* engine = engines_.staying(place)) function(*engine);
    });
}

void Relay::call(const std::function<void()>& function) {
    if (is_this_thread()) return function();
    Mutex mutex;
    CondVar changed;
    bool done = false;
    {
        MutexLock lock(mutex_);
        if (ended_) {
            lock.unlock();
            return function();
        }
        posted_.push_back([&] {
            function();
            // Notified under the lock: the waiter's frame, with mutex and condition, may be gone right
            // after it.
            MutexLock guard(mutex);
            done = true;
            changed.notify_one();
        });
    }
    wake();
    MutexLock lock(mutex);
    changed.wait(lock, [&] { return done; });
}

void Relay::listen(int fd) {
    ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK);
    call([&] {
        listeners_.push_back(std::make_unique<Listener>(context_, clients_, fd));
        // Connections that came before wait in the socket's queue.
        context_.poller.add(*listeners_.back(), EPOLLIN);
    });
}

// The caller chooses places; a place is free again after Decider::engine_gone. Posted functions run in
// order, so that what follows about the same place finds it.
void Relay::add_engine(size_t place, EngineSettings engine) {
    post([this, place, engine = std::move(engine)] { engines_.add(place, engine); });
}

void Relay::remove_engine(size_t place, double drain_s) {
    post([this, place, drain_s] { engines_.remove(place, drain_s); });
}

void Relay::engine_state(size_t place, bool healthy) {
    post_to(place, [this, healthy](Engine& engine) {
        engine.healthy = healthy;
        // An answer to a health check shows that the engine's process lives; it counts like traffic.
        if (!healthy) return;
        engine.answered_at = context_.now;
        engine.lates = 0;
    });
}

void Relay::engine_late(size_t place) {
    post_to(place, [](Engine& engine) { ++engine.lates; });
}

void Relay::engine_address(size_t place, const sockaddr_storage& address, socklen_t size) {
    post_to(place, [address, size](Engine& engine) {
        engine.address = address;
        engine.address_size = size;
        // The name resolves to another address now: idle connections may lead to another host. Those in use
        // end with their requests.
        engine.close_idle();
    });
}

void Relay::engine_models(size_t place, std::optional<std::vector<std::string>> models) {
    post([this, place, models = std::move(models)]() mutable {
        engines_.set_models(place, std::move(models));
    });
}

void Relay::engine_role(size_t place, Role role, double patience_s) {
    post_to(place, [role, patience_s](Engine& engine) {
        engine.role = role;
        engine.patience_s = patience_s;
    });
}

void Relay::set_api_keys(std::vector<ApiKey> keys) {
    call([&] { clients_.set_keys(std::move(keys)); });
}

Status Relay::reopen_access_log() {
    return context_.access_log == nullptr ? success() : context_.access_log->reopen();
}

void Relay::resume(uint64_t request, Decision decision) {
    post([this, request, decision = std::move(decision)]() mutable { decisions_.resume(request, decision); });
}

// First what waits in the listening sockets is accepted: these clients have connected to this proxy and
// would see a reset.
bool Relay::drain(double timeout_s) {
    call([this] {
        context_.draining = true;
        for (auto& listener : listeners_) listener->take_all();
        stop_listening();
        clients_.drain();
        look_whether_empty();
    });
    MutexLock lock(mutex_);
    return emptied_.wait_for(lock, std::chrono::duration<double>(timeout_s),
                             [this]() REQUIRES(mutex_) { return empty_; });
}

void Relay::close() {
    if (!thread_.started()) return;
    stopping_ = true;
    wake();
    (void)thread_.join();
    // After the thread: it hands bodies to the examiner, and frees them through it.
    examiner_.close();
    context_.access_log.reset();  // its last lines
}

void Relay::advance_clock_for_test(double seconds) {
    advanced_ns_ += static_cast<int64_t>(seconds * 1e9);
    call([this] {
        context_.now = clock();
        sweep();
    });
}

// The thread.

void Relay::run() {
    // The decider is Python's side: it makes the thread known to the interpreter.
    decider_.thread_started();
    const Settings& settings = context_.settings;
    double& now = context_.now;
    now = clock();
    double sweep_at = now + settings.deadlines.sweep_s;
    while (!stopping_) {
        double left_s = sweep_at - clock();
        // No longer than to the next sweep: deadlines have no timers of their own.
        context_.poller.wait(std::clamp(static_cast<int>(std::ceil(left_s * 1000)), 0, 1000));
        now = clock();  // what came is of now, not of the moment before the wait
        context_.handshakes = context_.engine_handshakes = kHandshakesPerTurn;
        context_.poller.hand_out();
        now = clock();
        run_posted();
        // Decisions can end requests, and ended requests let clients go on with what was held, which may
        // ask again: until neither has anything left. All questions of a round go to Python in one visit.
        while (clients_.go_on() || !decisions_.empty()) decisions_.decide();
        if (clients_.budget.unread_bytes() > settings.limits.unread_bytes_max) clients_.shed();
        if (now >= sweep_at) {
            sweep();
            decisions_.decide();
            sweep_at = now + settings.deadlines.sweep_s;
        }
        clean();
    }
    end_all();
    decider_.thread_ending();
}

void Relay::run_posted() {
    std::vector<std::function<void()>> posted;
    {
        MutexLock lock(mutex_);
        if (posted_.empty()) return;
        posted.swap(posted_);
    }
    for (auto& function : posted) function();
}

// Every sweep_s: deadlines of clients, exchanges and engines, and listeners that rested for want of
// descriptors.
void Relay::sweep() {
    clients_.sweep();
    engines_.sweep([this](const Engine& engine) { return exchanges_.may_use(engine); });
    for (auto& listener : listeners_) listener->sweep();
}

// After each turn: what ended in it can go now.
void Relay::clean() {
    look_whether_empty();
    context_.retired.clear();
    engines_.delete_retired();
    exchanges_.recycle();
    requests_.recycle();
}

void Relay::stop_listening() {
    for (auto& listener : listeners_) {
        context_.poller.close(*listener);
        context_.defer_delete(std::move(listener));
    }
    listeners_.clear();
}

// What threads have posted until now is run here, since they may wait for it in call(); what comes later
// finds ended_.
void Relay::end_all() {
    stop_listening();
    clients_.abort_all();
    engines_.close_all();
    decisions_.clear();
    clean();
    std::vector<std::function<void()>> posted;
    {
        MutexLock lock(mutex_);
        ended_ = true;
        posted.swap(posted_);
    }
    for (auto& function : posted) function();  // a thread may wait for it; it may take the mutex itself
}

// For drain(): also called in clean(), after each turn.
void Relay::look_whether_empty() {
    if (!context_.draining || !clients_.all().empty()) return;
    MutexLock lock(mutex_);
    empty_ = true;
    emptied_.notify_all();
}

bool Relay::check_integrity() const { return clients_.check_integrity() && engines_.check_integrity(); }

}  // namespace moonpool::relay
