#include "relay/relay.hpp"

#include <fcntl.h>
#include <malloc.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstring>

#include "http/head_writer.hpp"
#include "relay/listener.hpp"
#include "relay/reserved.hpp"
#include "relay/trace.hpp"

namespace moonpool::relay {

namespace {

constexpr size_t kSpareMax = 512;
// Buffers of this size and more are the kernel's as soon as they are freed, instead of holes in a heap.
constexpr size_t kMappedBytes = 1 << 20;
// Of the idle connections so many are looked at for one that is to be closed.
constexpr size_t kLookedAtMax = 256;
// So many connections above the limit get the time to read why they are refused; further ones are closed at
// once, so that a crowd cannot take the descriptors that the others need.
constexpr size_t kRefusedMax = 32;
constexpr size_t kPageBodiesShare = 8;  // of bodies_bytes_max, for the proxy's own pages besides

}  // namespace

void Relay::Wake::on_events(uint32_t) {
    uint64_t value;
    (void)!::read(fd.get(), &value, sizeof(value));
}

Relay::Relay(Settings given, Decider& decider)
    : settings(std::move(given)),
      observations(settings.limits.observations_max),
      routes(settings.registry, settings.relay_paths),
      decider_(decider),
      keys_(settings.api_keys),
      examiner_(settings.limits.body) {
    bodies.most = settings.limits.bodies_bytes_max;
    page_bodies.most = bodies.most / kPageBodiesShare;
    size_t places = std::max(settings.engines_max, settings.engines.size());
    statuses_ = std::make_unique<EngineStatus[]>(places);
    engine_names_.resize(places);
    engines.resize(places);
    for (size_t place = 0; place < settings.engines.size(); ++place) {
        const EngineSettings& engine = settings.engines[place];
        engines[place] = std::make_unique<Engine>(place, engine, settings.breaker, statuses_[place]);
        engine_names_[place] = engine.name;
    }
}

Result<std::unique_ptr<Relay>> Relay::start(Settings given, Decider& decider) {
    std::unique_ptr<Relay> relay(new Relay(std::move(given), decider));
    if (!relay->settings.access_log.empty()) {
        auto log = AccessLog::open(relay->settings.access_log);
        if (!log) return log.error();
        relay->access_log = std::move(*log);
    }
    relay->wake_.fd.reset(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
    if (::getrandom(relay->random_.data(), sizeof(relay->random_), 0) < 0 || !relay->wake_.fd.valid() ||
        !relay->poller.start() || !relay->poller.add(relay->wake_, EPOLLIN)) {
        return os_error("relay");
    }
    ::mallopt(M_MMAP_THRESHOLD, static_cast<int>(kMappedBytes));
    ::mallopt(M_TRIM_THRESHOLD, static_cast<int>(4 * kMappedBytes));
    relay->now = relay->clock();
    Status started = relay->thread_.start("moonpool-relay", [raw = relay.get()] { raw->run(); });
    if (!started) return started.error();
    return relay;
}

Relay::~Relay() { close(); }

// From any thread.

double Relay::clock() const {
    auto since = std::chrono::steady_clock::now().time_since_epoch();
    auto ns = std::chrono::duration_cast<std::chrono::nanoseconds>(since).count();
    return static_cast<double>(ns + advanced_ns_.load(std::memory_order_relaxed)) * 1e-9;
}

void Relay::post(std::function<void()> function) {
    {
        std::lock_guard lock(mutex_);
        if (ended_) return;
        posted_.push_back(std::move(function));
    }
    uint64_t one = 1;
    (void)!::write(wake_.fd.get(), &one, sizeof(one));
}

void Relay::call(const std::function<void()>& function) {
    if (is_this_thread()) return function();
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false;
    {
        std::unique_lock lock(mutex_);
        if (ended_) {
            lock.unlock();
            return function();
        }
        posted_.push_back([&] {
            function();
            std::lock_guard guard(mutex);
            done = true;
            changed.notify_one();
        });
    }
    uint64_t one = 1;
    (void)!::write(wake_.fd.get(), &one, sizeof(one));
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return done; });
}

void Relay::listen(int fd) {
    ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK);
    call([&] {
        listeners_.push_back(std::make_unique<Listener>(*this, fd));
        poller.add(*listeners_.back(), EPOLLIN);
    });
}

void Relay::add_engine(size_t place, EngineSettings engine) {
    post([this, place, engine = std::move(engine)] {
        if (engines[place]) return;  // it is not free
        engines[place] = std::make_unique<Engine>(place, engine, settings.breaker, statuses_[place]);
        engine_names_[place] = engine.name;
    });
}

void Relay::remove_engine(size_t place, double drain_s) {
    post([this, place, drain_s] {
        Engine* engine = staying(place);
        if (engine == nullptr) return;
        engine->healthy = false;
        engine->removal = ++removals_;
        engine->leaves_at = now + drain_s;
        drop_idle(*engine);
        look_at_models();
    });
}

void Relay::engine_state(size_t place, bool healthy) {
    post([this, place, healthy] {
        Engine* engine = staying(place);
        if (engine == nullptr) return;
        engine->healthy = healthy;
        if (!healthy) return;
        engine->answered_at = now;
        engine->lates = 0;
    });
}

void Relay::engine_late(size_t place) {
    post([this, place] {
        if (Engine* engine = staying(place)) ++engine->lates;
    });
}

void Relay::engine_address(size_t place, const sockaddr_storage& address, socklen_t size) {
    post([this, place, address, size] {
        Engine* engine = staying(place);
        if (engine == nullptr) return;
        engine->address = address;
        engine->address_size = size;
        drop_idle(*engine);
    });
}

void Relay::engine_models(size_t place, std::optional<std::vector<std::string>> models) {
    post([this, place, models = std::move(models)]() mutable {
        Engine* engine = staying(place);
        if (engine == nullptr) return;
        engine->models = std::move(models);
        look_at_models();
    });
}

void Relay::engine_role(size_t place, Role role, double patience_s) {
    post([this, place, role, patience_s] {
        Engine* engine = staying(place);
        if (engine == nullptr) return;
        engine->role = role;
        engine->patience_s = patience_s;
    });
}

void Relay::resume(uint64_t request, Decision decision) {
    post([this, request, decision = std::move(decision)]() mutable {
        auto it = later_.find(request);
        if (it == later_.end()) return not_wanted(request, decision);  // the client left meanwhile
        Exchange* exchange = it->second;
        later_.erase(it);
        exchange->decided(decision);
    });
}

// A policy that keeps books has written the plan down, and hears that nothing came of it.
void Relay::not_wanted(uint64_t request, const Decision& decision) {
    if (decision.kind != Decision::Kind::kPlan || decision.plan.note == 0) return;
    Observation left;
    left.request = request;
    left.note = decision.plan.note;
    left.prefill = decision.plan.prefill;
    left.decode = decision.plan.engine;
    left.arrived = left.last_byte = now;
    left.outcome = static_cast<uint8_t>(Outcome::kLeft);
    observations.add(left);
}

bool Relay::drain(double timeout_s) {
    call([this] {
        draining = true;
        for (auto& listener : listeners_) listener->take_all();
        stop_listening();
        for (size_t i = clients_.size(); i-- > 0;) {
            if (i < clients_.size()) clients_[i]->drain();
        }
        look_whether_empty();
    });
    std::unique_lock lock(mutex_);
    return emptied_.wait_for(lock, std::chrono::duration<double>(timeout_s), [this] { return empty_; });
}

void Relay::close() {
    if (!thread_.started()) return;
    stopping_ = true;
    uint64_t one = 1;
    (void)!::write(wake_.fd.get(), &one, sizeof(one));
    (void)thread_.join();
    examiner_.close();
    access_log.reset();  // its last lines
}

void Relay::advance_clock_for_test(double seconds) {
    advanced_ns_ += static_cast<int64_t>(seconds * 1e9);
    call([this] {
        now = clock();
        sweep();
    });
}

// The thread.

void Relay::run() {
    decider_.thread_started();
    now = clock();
    double sweep_at = now + settings.deadlines.sweep_s;
    while (!stopping_) {
        double left_s = sweep_at - clock();
        poller.wait(std::clamp(static_cast<int>(std::ceil(left_s * 1000)), 0, 1000));
        now = clock();  // what came is of now, not of the moment before the wait
        poller.hand_out();
        now = clock();
        run_posted();
        while (!ready.empty() || !questions_.empty()) {
            std::vector<Client*> going;
            going.swap(ready);
            for (Client* client : going) client->go_on();
            decide();
        }
        if (unread_bytes > settings.limits.unread_bytes_max) shed();
        if (now >= sweep_at) {
            sweep();
            decide();
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
        std::lock_guard lock(mutex_);
        if (posted_.empty()) return;
        posted.swap(posted_);
    }
    for (auto& function : posted) function();
}

void Relay::decide() {
    if (questions_.empty()) return;
    std::vector<Question> questions;
    questions.swap(questions_);
    applying_.swap(asking_);
    asking_.clear();
    decider_.decide(questions);
    for (size_t i = 0; i < questions.size(); ++i) {
        Exchange* exchange = applying_[i];
        if (exchange == nullptr) {
            not_wanted(questions[i].request->id, questions[i].decision);
            continue;
        }
        applying_[i] = nullptr;
        if (questions[i].decision.kind == Decision::Kind::kLater) {
            later_[questions[i].request->id] = exchange;
        } else {
            exchange->decided(questions[i].decision);
        }
    }
    applying_.clear();
}

void Relay::sweep() {
    std::vector<Client*> all;
    all.reserve(clients_.size());
    for (auto& client : clients_) all.push_back(client.get());
    for (Client* client : all) {
        if (client->open()) client->sweep(now);
    }
    for (auto& engine : engines) {
        if (engine) sweep_engine(*engine);
        if (engine && engine->leaving()) sweep_leaving(*engine);
    }
    for (auto& listener : listeners_) listener->sweep();
}

void Relay::sweep_engine(Engine& engine) {
    size_t expired = 0;
    double horizon = now - settings.deadlines.upstream_idle_s;
    while (expired < engine.idle.size() && engine.idle[expired]->idle_since <= horizon) ++expired;
    std::vector<Upstream*> old(engine.idle.begin(), engine.idle.begin() + static_cast<ptrdiff_t>(expired));
    for (const auto& upstream : engine.open) {
        if (upstream->drained_until > 0 && now >= upstream->drained_until) old.push_back(upstream.get());
    }
    for (Upstream* upstream : old) upstream->close();
    if (engine.leaving()) return;  // its health is not checked any more
    if (!engine.is_suspect() || engine.answered_at == 0) return;
    if (now - engine.answered_at < std::max(settings.deadlines.suspect_engine_s, engine.patience_s)) return;
    std::vector<Leg*> legs = engine.legs;
    for (Leg* leg : legs) {
        if (leg->engine == &engine) leg->engine_silent(engine.answered_at);
    }
}

void Relay::sweep_leaving(Engine& engine) {
    if (now >= engine.leaves_at) {
        std::vector<Leg*> legs = engine.legs;
        for (Leg* leg : legs) {
            if (leg->engine == &engine) leg->engine_removed();
        }
    }
    if (!engine.legs.empty() || !engine.open.empty()) return;
    auto uses = [&](const auto& exchange) { return exchange->may_use(engine); };
    if (std::any_of(exchanges_.begin(), exchanges_.end(), uses)) return;
    size_t place = engine.place;
    retired_engines_.push_back(std::move(engines[place]));
    decider_.engine_gone(place);
}

Engine* Relay::staying(size_t place) const {
    Engine* engine = engines[place].get();
    return engine == nullptr || engine->leaving() ? nullptr : engine;
}

void Relay::look_at_models() {
    models_known_ = std::any_of(engines.begin(), engines.end(), [](const auto& engine) {
        return engine && !engine->leaving() && engine->models.has_value();
    });
}

size_t Relay::engine_count() const {
    return static_cast<size_t>(std::count_if(
        engines.begin(), engines.end(), [](const auto& engine) { return engine && !engine->leaving(); }));
}

bool Relay::are_there(const Plan& plan) const {
    return staying(static_cast<size_t>(plan.engine)) != nullptr &&
           (plan.prefill < 0 || staying(static_cast<size_t>(plan.prefill)) != nullptr);
}

// After each turn: what ended in it can go now.
void Relay::clean() {
    retired_.clear();
    retired_engines_.clear();
    for (Exchange* exchange : spent_exchanges_) {
        exchange->release();
        spare_exchanges_.push_back(exchange);
    }
    spent_exchanges_.clear();
    for (auto& request : spent_requests_) {
        if (request.use_count() == 1 && request->body.capacity() >= kMappedBytes) {
            examiner_.free(std::exchange(request->body, {}));
        }
        if (request.use_count() != 1 || spare_requests_.size() >= kSpareMax) continue;
        request->clear();
        spare_requests_.push_back(std::move(request));
    }
    spent_requests_.clear();
}

void Relay::stop_listening() {
    for (auto& listener : listeners_) {
        poller.close(*listener);
        retired_.push_back(std::move(listener));
    }
    listeners_.clear();
}

void Relay::end_all() {
    stop_listening();
    while (!clients_.empty()) clients_.back()->abort();
    for (auto& engine : engines) {
        while (engine && !engine->open.empty()) engine->open.back()->close();
    }
    questions_.clear();
    clean();
    std::vector<std::function<void()>> posted;
    {
        std::lock_guard lock(mutex_);
        ended_ = true;
        posted.swap(posted_);
    }
    for (auto& function : posted) function();  // a thread may wait for it; it may take the mutex itself
}

void Relay::look_whether_empty() {
    if (!draining || !clients_.empty()) return;
    std::lock_guard lock(mutex_);
    empty_ = true;
    emptied_.notify_all();
}

// Connections.

void Relay::accept(int fd, const sockaddr_storage& peer) {
    ++accepted;
    const Limits& limits = settings.limits;
    clients_.push_back(std::make_unique<Client>(*this, fd, clients_.size(), Addresses::key_of(peer)));
    Client& client = *clients_.back();
    client.begin();
    if (!client.open()) return;
    // Where places are short, the oldest idle connection is closed for a new one.
    size_t most = limits.client_connections_max;
    if (clients_.size() > most && !close_idle(client, nullptr)) {
        client.refuse({503, "connections",
                       "the proxy has its limit of " + std::to_string(most) + " connections; try again"});
        if (clients_.size() > most + kRefusedMax) client.abort();
        return;
    }
    most = std::max<size_t>(1, static_cast<size_t>(static_cast<double>(most) * limits.address_share));
    if (client.of_address().connections > most && !close_idle(client, &client.address)) {
        client.refuse({429, "address_connections",
                       "your address has its share of " + std::to_string(most) +
                           " connections; close some, or have the operator raise proxy.address_share"});
        if (client.open() && client.of_address().connections > most + kRefusedMax) client.abort();
    }
}

// Too much waits for clients: those go that have taken nothing for longest, until there is some room again.
void Relay::shed() {
    std::vector<Client*> slowest;
    for (auto& client : clients_) {
        if (client->unread() > 0) slowest.push_back(client.get());
    }
    std::sort(slowest.begin(), slowest.end(),
              [](const Client* a, const Client* b) { return a->took_at() < b->took_at(); });
    for (Client* client : slowest) {
        if (unread_bytes <= settings.limits.unread_bytes_max / 8 * 7) return;
        if (!client->open()) continue;
        count_rejected("unread");
        client->abort();
    }
}

// Closes the connection that has been idle for longest, strangers' first. False: there is none.
bool Relay::close_idle(const Client& newcomer, const uint64_t* of_address) {
    size_t looked_at = 0;
    for (IdleList* list : {&strangers, &idle}) {
        for (IdleList::Hook* hook = list->first(); hook != nullptr; hook = hook->next()) {
            if (++looked_at > kLookedAtMax) return false;
            Client& client = *static_cast<Client::Idle*>(hook)->client;
            if (&client == &newcomer || (of_address != nullptr && client.address != *of_address)) continue;
            if (list == &idle && (client.look().busy || client.unread() > 0)) continue;
            count_rejected("idle_closed");
            client.abort();
            return true;
        }
    }
    return false;
}

void Relay::defer_delete(Client& client) {
    size_t index = client.index;
    retired_.push_back(std::move(clients_[index]));
    if (index + 1 < clients_.size()) {
        clients_[index] = std::move(clients_.back());
        clients_[index]->index = index;
    }
    clients_.pop_back();
    look_whether_empty();
}

void Relay::defer_delete(Engine& engine, Upstream& upstream) {
    size_t index = upstream.index;
    retired_.push_back(std::move(engine.open[index]));
    if (index + 1 < engine.open.size()) {
        engine.open[index] = std::move(engine.open.back());
        engine.open[index]->index = index;
    }
    engine.open.pop_back();
}

Upstream& Relay::new_upstream(Engine& engine) {
    engine.open.push_back(std::make_unique<Upstream>(*this, engine));
    engine.open.back()->index = engine.open.size() - 1;
    return *engine.open.back();
}

void Relay::drop_idle(Engine& engine) {
    while (!engine.idle.empty()) engine.idle.back()->close();
}

// Requests.

std::shared_ptr<Request> Relay::new_request() {
    if (spare_requests_.empty()) return std::make_shared<Request>();
    std::shared_ptr<Request> request = std::move(spare_requests_.back());
    spare_requests_.pop_back();
    return request;
}

void Relay::give_back(std::shared_ptr<Request>&& request) {
    if (request) spent_requests_.push_back(std::move(request));
}

Exchange* Relay::take_exchange() {
    if (spare_exchanges_.empty()) {
        exchanges_.push_back(std::make_unique<Exchange>(*this));
        return exchanges_.back().get();
    }
    Exchange* exchange = spare_exchanges_.back();
    spare_exchanges_.pop_back();
    return exchange;
}

void Relay::give_back(Exchange* exchange) { spent_exchanges_.push_back(exchange); }

uint64_t Relay::random() {  // xorshift128+
    uint64_t a = random_[0], b = random_[1];
    random_[0] = b;
    a ^= a << 23;
    random_[1] = a ^ b ^ (a >> 17) ^ (b >> 26);
    return random_[1] + b;
}

// Give a request its ids.
void Relay::adopt(Request& request) {
    if (request.id != 0) return;
    request.id = next_id_++;
    request.arrived_at = now;
    request.kind = kind_of_path(request.head.path);
    request.request_id = request.head.request_id;
    reserved[1] += hold_back_reserved(request.head.fields);
    if (is_reserved_id(request.request_id)) {
        request.request_id.clear();
        ++reserved[2];
    }
    if (request.request_id.empty()) {
        char digits[16];
        char* end = std::to_chars(digits, digits + sizeof(digits), request.id, 16).ptr;
        request.request_id.append(settings.instance).append("-").append(digits, end);
    }
    bool named = false;  // by the client
    for (http::Field& field : request.head.fields) {
        if (field.kind != http::FieldKind::kOther) continue;
        if (http::same_name(field.name, "x-moonpool-decision")) field.forward = false;
        if (!http::same_name(field.name, "traceparent")) continue;
        auto trace = parse_traceparent(field.value);
        field.forward = trace && !named && !settings.spans;
        if (!trace || named) continue;
        request.trace = *trace;
        named = true;
    }
    if (named && !settings.spans) return;
    for (size_t i = named ? 2 : 0; i < 3; ++i) {
        uint64_t word = random() | 1;  // never all zero
        std::memcpy(i < 2 ? request.trace.trace_id + 8 * i : request.trace.span_id, &word, 8);
    }
    write_traceparent(request.trace, request.traceparent);
}

bool Relay::key_fits(const Request& request) const {
    if (!keys_.any()) return true;
    const http::Field* field = http::find_field(request.head.fields, "authorization");
    return field != nullptr && keys_.fits(field->value);
}

void Relay::write_request_head(std::string& out, Request& request, const Engine& engine, size_t body_bytes,
                               const Plan* prefill) const {
    http::RequestHead& head = request.head;
    std::optional<uint64_t> length;
    if (body_bytes > 0 || head.content_length >= 0 || head.framing == http::Framing::kChunked) {
        length = body_bytes;
    }
    std::array<http::OwnField, 6> own;
    size_t count = 0;
    if (!request.traceparent.empty()) own[count++] = {"traceparent", request.traceparent};
    if (!engine.settings.authorization.empty()) {
        own[count++] = {"Authorization", engine.settings.authorization};
    }
    std::vector<http::Field*> kept;  // fields of the client that the engine must not see
    if (prefill != nullptr) {
        for (const auto& [name, value] : prefill->prefill_headers) {
            if (count < own.size()) own[count++] = {name, value};
        }
        for (http::Field& field : head.fields) {
            // Its answer is read here, so it must not come compressed.
            bool keep = field.forward && http::same_name(field.name, "accept-encoding");
            for (const auto& [name, value] : prefill->prefill_headers) {
                keep = keep || (field.forward && http::same_name(field.name, name));
            }
            if (keep) kept.push_back(&field);
        }
    }
    for (http::Field* field : kept) field->forward = false;
    http::write_request_head(out, head, engine.settings.host, request.request_id, length,
                             std::span(own.data(), count));
    for (http::Field* field : kept) field->forward = true;
}

// Whom a request may go to: healthy engines that serve its model and were not tried for it. Those that rest,
// or are late with their health checks, are left out as long as another of the same role is there. False: no
// engine, healthy or not, serves its model.
bool Relay::candidates(Request& request, const std::vector<uint16_t>& tried, std::vector<uint16_t>& out) {
    static const std::string kAny;
    const std::string& model = models_known_ && !request.body.empty() ? request.facts().model : kAny;
    bool known = false, any = false;
    std::array<bool, 3> works{};
    for (auto& engine : engines) {
        if (!engine || engine->leaving()) continue;
        any = true;
        if (!engine->serves(model)) continue;
        known = true;
        if (!engine->healthy) continue;
        auto place = static_cast<uint16_t>(engine->place);
        if (std::find(tried.begin(), tried.end(), place) != tried.end()) continue;
        out.push_back(place);
        if (engine->works(now)) works[static_cast<size_t>(engine->role)] = true;
    }
    std::erase_if(out, [&](uint16_t place) {
        const Engine& engine = *engines[place];
        return works[static_cast<size_t>(engine.role)] && !engine.works(now);
    });
    return known || !any;
}

void Relay::examine(Exchange& exchange, std::shared_ptr<Request> request) {
    examining_[request->id] = &exchange;
    bool form = routes.is_added(request->head.path);
    examiner_.add(std::move(request), form, [this](std::shared_ptr<Request> read, Examiner::Refusal refusal) {
        post([this, read = std::move(read), refusal = std::move(refusal)]() mutable {
            auto it = examining_.find(read->id);
            if (it == examining_.end()) return;  // the client left meanwhile
            Exchange* asked = it->second;
            examining_.erase(it);
            asked->examined(std::move(refusal));
        });
    });
}

void Relay::ask(Exchange& exchange, Question question) {
    questions_.push_back(std::move(question));
    asking_.push_back(&exchange);
}

void Relay::forget(Exchange& exchange) {
    std::replace(asking_.begin(), asking_.end(), &exchange, static_cast<Exchange*>(nullptr));
    std::replace(applying_.begin(), applying_.end(), &exchange, static_cast<Exchange*>(nullptr));
    for (auto* waiting : {&later_, &examining_}) {
        std::erase_if(*waiting, [&](const auto& item) { return item.second == &exchange; });
    }
}

void Relay::engine_refused(Engine& engine) {
    engine.healthy = false;
    decider_.engine_refused(engine.place, "refuses connections");
}

void Relay::count_rejected(std::string_view reason) {
    auto it = rejected.find(reason);
    if (it == rejected.end()) it = rejected.emplace(std::string(reason), 0).first;
    ++it->second;
}

int Relay::retry_after() const { return std::max(1, static_cast<int>(std::ceil(settings.retry_after_s))); }

bool Relay::check_integrity() const {
    size_t budget = 0;
    size_t unread = 0;
    for (const auto& client : clients_) {
        budget += client->budgeted();
        unread += client->unread();
    }
    return budget == bodies.held + page_bodies.held && bodies.held <= bodies.most &&
           page_bodies.held <= page_bodies.most && unread == unread_bytes &&
           std::all_of(engines.begin(), engines.end(),
                       [](const auto& engine) { return !engine || engine->check_integrity(); });
}

}  // namespace moonpool::relay
