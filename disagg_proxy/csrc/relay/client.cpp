// Runs on the relay's thread alone. What is and is not here: framing, limits, deadlines and the order of
// requests on one connection; which engine answers, and what, is the Exchange's matter.
//
// Between two events these hold:
//   - exchange_ is set exactly while the state is kAnswering and the answer is not whole
//   - request_ is set from the end of a head to the end of the answer
//   - bytes that were read too early stand in held_ from held_at_ on, and nothing is read past them
//   - the body counts against the budgets of this client's address by budgeted_, no more and no less
//
// Any call of write(), refuse() or abort() may close the connection, and any call into the exchange may end
// the request. So each function here looks at open() or the state again after such a call, and returns at
// once.
#include "relay/client.hpp"

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <utility>

#include "http/head_writer.hpp"
#include "relay/client_table.hpp"
#include "relay/context.hpp"
#include "relay/exchange.hpp"

namespace moonpool::relay {

namespace {

// Reserved at once, and all of it when so much of a body has come: memory for what will not come costs
// nothing until then, and a body that grew piece by piece would be copied again and again.
constexpr size_t kReservedBytesMax = 1 << 20;
constexpr size_t kReserveAllFrom = 8;  // the eighth part
constexpr std::string_view kJson = "application/json";
// The body of a refused request that is read and dropped.
constexpr int64_t kDroppedBytesMax = 64 << 10;
// Of the proxy's own pages, which ask for no key here.
constexpr size_t kPageBodyBytesMax = 16 << 20;

}  // namespace

Client::Client(RelayContext& context, ClientTable& table, int connection, size_t place, uint64_t peer)
    : index(place),
      address(peer),
      context_(context),
      table_(table),
      parser_({context.settings.limits.head_bytes_max, context.settings.limits.body_bytes_max}),
      of_address_(table.addresses.come(peer)) {
    fd.reset(connection);
}

Client::~Client() { table_.addresses.leave(address); }

// The first request gets the deadline of a head, not that of an idle connection: a stranger that only
// connects is let go sooner, and so is one that does not finish its handshake.
void Client::begin() {
    if (context_.settings.tls != nullptr) transport_.begin_tls(nullptr);
    deadline_ = context_.now + context_.settings.deadlines.head_s;  // of the first request
    wait_idle();
    if (!context_.poller.add(*this, static_cast<uint32_t>(EPOLLIN) | EPOLLRDHUP)) abort();
}

// Connections in these lists can be closed when places run short: strangers before clients that have been
// served.
void Client::wait_idle() { (past_ == Past::kServed ? table_.idle : table_.strangers).push(idle_); }

void Client::enter(ClientState state, double deadline_s) {
    state_.move_to(state);
    deadline_ = context_.now + deadline_s;
}

bool Client::busy() const {
    return in_head() || reading_body() || state_ == ClientState::kAnswering || held_.size() > held_at_;
}

Client::Look Client::look() const {
    return {busy(),
            state_ == ClientState::kLingering,
            held_back_,
            write_paused_,
            reading_body(),
            held_.size() - held_at_,
            reading_body() ? request_->body.size() : 0,
            unwritten()};
}

// Writing comes first: it may end a pause, after which what was held is read in order.
void Client::on_events(uint32_t events) {
    if (transport_.shaking()) return shake_hands();
    if ((events & EPOLLOUT) != 0) flush();
    if (open() && (events & ~static_cast<uint32_t>(EPOLLOUT)) != 0) read_some(events);
}

// The handshake of TLS. A step of it is some hundred times as dear as a read: so many strangers get one in
// each turn, the others in the next, and answers go on between them.
void Client::shake_hands() {
    if (context_.handshakes == 0) return;
    --context_.handshakes;
    if (transport_.tls() == nullptr) {
        auto stream = context_.settings.tls->open();
        if (!stream) return abort();
        transport_.begin_tls(std::move(*stream));
    }
    if (transport_.shake(fd.get()) == TlsStream::Step::kFailed) return handshake_failed();
    watch();
}

void Client::handshake_failed() {
    const TlsStream& tls = *transport_.tls();
    if (tls.not_tls()) {
        // None of it was read, and the client understands an answer in plain.
        transport_.end_tls();
        return refuse({400, "plain_http", "this port speaks TLS alone: use https://"});
    }
    if (!tls.heard()) return abort();  // a balancer that only connects has not failed
    context_.count_rejected("tls_handshake");
    context_.handshake_failure = tls.error(peer_of(fd.get())).text;
    // What still comes is read and dropped for a while, or a reset would overtake the alert that says why. It
    // can be closed for another connection's sake all the same.
    transport_.end_tls();
    enter(ClientState::kLingering, context_.settings.deadlines.linger_s);
    ::shutdown(fd.get(), SHUT_WR);
}

// Reading.

void Client::read_some(uint32_t events) {
    if (held_back_) {
        // Only its end or an error is reported; nothing is read from it, so nothing else would tell.
        if ((events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0) abort();
        return;
    }
    // The last answer is on its way; what the client still sends is of no interest, but a reset ends the
    // wait for it.
    if (state_ == ClientState::kClosing) {
        if ((events & (EPOLLHUP | EPOLLERR)) != 0) abort();
        return;
    }
    const size_t unsent = transport_.unsent();
    ssize_t n = transport_.receive(fd.get(), context_.scratch);
    if (n > 0) {
        // Lingering: bytes are read and dropped, so that the close does not become a reset that overtakes
        // the refusal.
        if (state_ != ClientState::kLingering) take({context_.scratch.data(), static_cast<size_t>(n)});
    } else if (n == 0) {
        end_of_input();
    } else if (errno != EAGAIN && errno != EINTR) {
        abort();
    }
    // What TLS itself answers (a key update) is counted and goes at once, also where no text has come.
    if (open() && transport_.unsent() > unsent) flush();
}

// The client ended its side. It may only have shut down its writing, but a client that left looks the same,
// and an engine that computes for a client that left is worse than a half-closed client without its answer.
void Client::end_of_input() {
    if (state_ == ClientState::kAnswering || unwritten() == 0) return abort();
    close_soon();
}

void Client::take(std::string_view data) {
    if (state_ == ClientState::kAnswering || write_paused_ || held_.size() > held_at_) return hold(data);
    size_t used = read(data);
    if (used < data.size() && !ending()) hold(data.substr(used));
}

// Read requests until there are no bytes left, or one is under way. Returns how many bytes were used.
size_t Client::read(std::string_view data) {
    size_t at = 0;
    while (at < data.size()) {
        // Everything is used up here: a partial head was copied to partial_, and behind a refusal nothing
        // is read.
        if (!reading_body() && !read_head(data, at)) return data.size();
        while (!body_.done() && at < data.size()) {
            auto piece = body_.take(data.substr(at));
            if (body_.failed()) {
                refuse({400, "malformed",
                        std::string("the request's chunked body is malformed: ") + body_.why()});
                return data.size();
            }
            at += piece.taken;
            if (state_ == ClientState::kDropping) continue;
            std::string& body = request_->body;
            // A length is the client's promise only. Memory for all of it is reserved when an eighth has
            // come.
            auto whole = static_cast<size_t>(std::max<int64_t>(request_->head.content_length, 0));
            if (body.capacity() < whole && body.size() >= whole / kReserveAllFrom) body.reserve(whole);
            body.append(piece.content);
            size_t most = context_.settings.limits.body_bytes_max;
            // The limit for prompts is far more than any page of the proxy takes.
            if (route_ == Route::kPage) most = std::min(most, kPageBodyBytesMax);
            if (body.size() > most) {
                refuse(http::body_too_large(most));
                return data.size();
            }
        }
        // Once for each piece of input, not for each chunk.
        if (!count_body()) return data.size();
        if (!body_.done()) {
            await_more();
            return data.size();
        }
        serve();
        // An answer that was made at once (a page, a refusal) lets the loop go on with the next request in
        // the same bytes.
        if (ending() || state_ == ClientState::kAnswering || write_paused_) return at;
    }
    return at;
}

// False: the head is not whole yet, or was refused.
bool Client::read_head(std::string_view data, size_t& at) {
    size_t before = partial_.size();
    std::string_view input = data.substr(at);
    if (before > 0) input = partial_.append(input);
    switch (parser_.parse(input)) {
        case http::Step::kRefused:
            refuse(parser_.refusal());
            return false;
        case http::Step::kMore:
            if (before == 0) partial_.assign(input);
            await_more();
            return false;
        case http::Step::kDone:
            break;
    }
    request_ = table_.requests.take();
    http::RequestHead& head = request_->head;
    // The views of the head's fields point into the input, which does not stay. They are moved to
    // the request's own copy of the head's bytes.
    std::swap(head, parser_.head());
    request_->head_bytes.assign(input.substr(0, head.bytes));
    head.move_views(input.data(), request_->head_bytes.data());
    at += head.bytes - before;
    partial_.clear();
    parser_.reset();
    body_ = http::BodyReader(head.framing, head.content_length);
    continued_ = false;
    read_bytes_ = 0;
    if (!judge()) return false;
    if (head.content_length > 0 && state_ == ClientState::kBody) {
        request_->body.reserve(std::min(static_cast<size_t>(head.content_length), kReservedBytesMax));
    }
    return true;
}

// Whether the request may be, by its head alone. False: it was refused, and nothing more of it is read.
bool Client::judge() {
    // Before anything can be refused: a refusal carries the id, too.
    table_.ids.give(*request_, context_);
    const http::RequestHead& head = request_->head;
    refusal_ = {};
    route_ = table_.routes.find(head.method, head.path, refusal_);
    if (route_ != Route::kRefused && route_ != Route::kPage && !table_.admit(*request_)) {
        route_ = Route::kRefused;
        refusal_ = {
            401, "invalid_api_key",
            "this proxy wants an API key: send Authorization: Bearer KEY with a key that its operator "
            "gave you"};
    }
    // What an engine would inflate is not what was looked at here.
    const http::Field* coding = http::find_field(head.fields, "content-encoding");
    if (route_ != Route::kRefused && coding != nullptr && !http::same_name(coding->value, "identity")) {
        route_ = Route::kRefused;
        refusal_ = {415, "encoded", "this proxy takes no body with a Content-Encoding; send it as it is"};
    }
    const Deadlines& limits = context_.settings.deadlines;
    // From here on this connection is not closed for the sake of another.
    if (route_ == Route::kRelay || route_ == Route::kModels) idle_.leave();
    if (route_ != Route::kRefused) {
        enter(ClientState::kBody, limits.body_stall_s);
        return true;
    }
    bool small = head.framing == http::Framing::kLength && head.content_length <= kDroppedBytesMax;
    // A small body is on its way already; reading it keeps the connection usable. A client that asks first
    // (100-continue) has not sent it.
    if (small && !head.expects_continue) {
        enter(ClientState::kDropping, limits.linger_s);
        return true;
    }
    refuse(std::exchange(refusal_, {}));
    return false;
}

void Client::hold(std::string_view data) {
    if (held_at_ > 0) {
        held_.erase(0, held_at_);
        held_at_ = 0;
    }
    held_.append(data);
    count_unread();
    if (held_.size() > context_.settings.limits.pipelined_bytes_max) {
        // Until the request under way is over. TCP then holds the client back.
        held_back_ = true;
        watch();
    }
}

void Client::go_on() {
    ready_ = false;
    if (ending() || state_ == ClientState::kAnswering || write_paused_) return;
    if (held_back_) {
        held_back_ = false;
        watch();
    }
    std::string_view held = std::string_view(held_).substr(held_at_);
    if (held.empty()) return;
    held_at_ += read(held);  // nothing is held anew meanwhile: no event is handled
    count_unread();
    if (held_at_ >= held_.size()) {
        held_ = std::string();
        held_at_ = 0;
    } else if (held_.size() - held_at_ > context_.settings.limits.pipelined_bytes_max && open()) {
        held_back_ = true;
        watch();
    }
}

// Part of a request is there: set its deadline, and say that the body may come if the client asks.
void Client::await_more() {
    const Deadlines& limits = context_.settings.deadlines;
    if (state_ == ClientState::kIdle && parser_.begun()) {
        enter(ClientState::kHead, limits.head_s);  // for the whole head, however it drips
    }
    if (state_ != ClientState::kBody) return;
    if (request_->head.expects_continue && !continued_) {
        continued_ = true;
        if (request_->body.empty()) write(http::kContinue, {});
    }
    // Bytes earn time, but no more of it than body_stall_s in advance: what came fast at first does not pay
    // for what drips now.
    size_t size = request_->body.size();
    double earned_s = static_cast<double>(size - read_bytes_) / limits.body_bytes_per_s_min;
    read_bytes_ = size;
    deadline_ = std::min(context_.now + limits.body_stall_s, deadline_ + earned_s);
}

bool Client::count_body() {
    size_t size = request_->body.size();
    if (size <= budgeted_) return true;
    if (auto refusal = table_.budget.take_body(body_for(), of_address_, size - budgeted_)) {
        refuse(*refusal);
        return false;
    }
    budgeted_ = size;
    return true;
}

void Client::give_budget() {
    table_.budget.give_body(body_for(), of_address_, budgeted_);
    budgeted_ = 0;
}

// Bytes that wait in this process for the client to read, or for its former request to end. The sum over
// all clients bounds memory; the worst are shed (ClientTable::shed).
void Client::count_unread() {
    size_t unread = open() ? unwritten() + held_.size() - held_at_ : 0;
    table_.budget.change_unread(unread_, unread);
    unread_ = unread;
}

// Answering.

bool Client::last() const { return context_.draining || !request_->head.keep_alive; }

void Client::serve() {
    bool refused = state_ == ClientState::kDropping;
    state_.move_to(ClientState::kAnswering);
    past_ = std::max(past_, refused || route_ == Route::kPage ? Past::kAsked : Past::kServed);
    // TTFT counts from here: the time that a client takes to send is its own.
    request_->arrived_at = context_.now;  // whole
    bool close = last();
    if (refused) return refuse_request(std::exchange(refusal_, {}), close);
    idle_.leave();
    exchange_ = table_.exchanges.take();
    // GET /v1/models is a page as soon as the engines have told their models; before, it is relayed like
    // any request.
    if (route_ == Route::kPage || (route_ == Route::kModels && table_.engines.models_known())) {
        exchange_->begin_page(*this, request_, close);
    } else {
        exchange_->begin(*this, request_, table_.routes.is_added(request_->head.path), close);
    }
}

void Client::answer(int status, std::string_view reason, std::string_view body, std::string_view type,
                    const std::vector<std::pair<std::string, std::string>>& headers, bool close) {
    if (!reason.empty()) context_.count_rejected(reason);
    // More headers than these are left out; a policy's own answer has a handful.
    std::array<http::OwnField, 16> own;
    size_t count = 0;
    std::string retry;
    if (status == 503 || status == 429) {
        retry = std::to_string(std::max(1, static_cast<int>(std::ceil(context_.settings.retry_after_s))));
        own[count++] = {"Retry-After", retry};
    } else if (status == 401) {
        own[count++] = {"WWW-Authenticate", "Bearer"};
    }
    for (const auto& [name, value] : headers) {
        if (count < own.size()) own[count++] = {name, value};
    }
    http::OwnAnswer made;
    made.status = status;
    made.body = body;
    made.content_type = type;
    made.request_id = request_->request_id;
    made.extra = std::span(own.data(), count);
    made.close = close;
    made.head_only = request_->head.method == "HEAD";
    std::string text;
    http::write_own_answer(text, made);
    if (context_.access_log) log(status, body.size());
    write(text, {});
}

void Client::answer_page(const Page& page) {
    bool close = last();
    std::string_view type = page.content_type.empty() ? kJson : std::string_view(page.content_type);
    answer(page.status, page.reason, page.body, type, page.headers, close);
    end_request(close);
}

// Refuse a request that was read whole: the connection stays usable.
void Client::refuse_request(const http::Refusal& refusal, bool close) {
    answer(refusal.status, refusal.reason, http::error_body(refusal.status, refusal.reason, refusal.sentence),
           kJson, {}, close);
    end_request(close);
}

void Client::exchange_refused(const http::Refusal& refusal) { refuse_request(refusal, last()); }

void Client::exchange_finished(bool close) {
    if (context_.access_log && exchange_ != nullptr) {
        log(exchange_->observation().status, exchange_->body_bytes());
    }
    end_request(close);
}

void Client::exchange_broken() {
    if (context_.access_log && exchange_ != nullptr) {
        log(exchange_->observation().status, exchange_->body_bytes());
    }
    abort();  // a reset rather than an orderly end: an answer that ends with the connection must not look
              // whole
}

void Client::end_request(bool close) {
    if (!open()) return;
    let_exchange_go();
    give_budget();
    table_.requests.give_back(std::move(request_));
    enter(ClientState::kIdle, context_.settings.deadlines.client_idle_s);
    wait_idle();
    if (close || context_.draining) {
        close_soon();
    } else if ((held_.size() > held_at_ || held_back_) && !ready_) {
        ready_ = true;
        table_.set_ready(*this);  // not from here: a refusal may come from inside of read()
    }
}

// Refuse what cannot be read on: answer, then wait a little so that the client can read why.
void Client::refuse(const http::Refusal& refusal) {
    if (transport_.shaking()) {  // no answer can be read before the handshake is over
        context_.count_rejected(refusal.reason);
        return abort();
    }
    if (!request_) request_ = table_.requests.take();
    table_.ids.give(*request_, context_);
    answer(refusal.status, refusal.reason, http::error_body(refusal.status, refusal.reason, refusal.sentence),
           kJson, {}, true);
    if (!open()) return;
    give_budget();
    table_.requests.give_back(std::move(request_));
    parser_.reset();
    partial_ = std::string();
    idle_.leave();
    enter(ClientState::kLingering, context_.settings.deadlines.linger_s);
    if (unwritten() == 0) end_output();  // else flush() does
}

// The end of our side tells the client that this was all. The socket itself stays for linger_s.
void Client::end_output() {
    transport_.say_end(fd.get());
    ::shutdown(fd.get(), SHUT_WR);
}

void Client::log(int status, uint64_t bytes) {
    context_.access_log->add(*request_, fd.get(), status, bytes, context_.now,
                             exchange_ != nullptr ? &exchange_->observation() : nullptr,
                             table_.engines.names());
}

// Writing.

// Tries the socket at once. Only what it does not take is copied; beyond write_buffer_bytes_max the engine
// is paused, and resumed at a quarter of it (flush), so that the two do not alternate with each packet.
void Client::write(std::string_view head, std::string_view body) {
    if (!open()) return;
    if (out_.empty()) {
        std::array<iovec, 2> pieces = {iovec{const_cast<char*>(head.data()), head.size()},
                                       iovec{const_cast<char*>(body.data()), body.size()}};
        ptrdiff_t n = head.size() + body.size() == 0 ? 0 : transport_.write_some(fd.get(), pieces.data(), 2);
        if (n == kBroken) return abort();
        auto sent = static_cast<size_t>(n);
        size_t of_head = std::min(sent, head.size());
        head.remove_prefix(of_head);
        body.remove_prefix(sent - of_head);
    }
    if (head.empty() && body.empty() && transport_.unsent() == 0) return;
    if (out_.empty()) took_at_ = context_.now;
    out_.append(head);
    out_.append(body);
    count_unread();
    watch();
    if (out_.size() > context_.settings.limits.write_buffer_bytes_max && !write_paused_) {
        write_paused_ = true;
        if (exchange_ != nullptr && !exchange_->over()) exchange_->pause();
    }
}

void Client::flush() {
    size_t before = unwritten();
    if (!out_.flush(transport_, fd.get())) return abort();
    if (unwritten() != before) took_at_ = context_.now;
    count_unread();
    if (unwritten() == 0 && state_ == ClientState::kClosing) return abort();
    if (unwritten() == 0 && state_ == ClientState::kLingering) end_output();
    watch();
    if (write_paused_ && out_.size() <= context_.settings.limits.write_buffer_bytes_max / 4) {
        write_paused_ = false;
        if (exchange_ != nullptr) {
            exchange_->resume();
        } else if (!ready_) {
            ready_ = true;
            table_.set_ready(*this);
        }
    }
}

void Client::watch() {
    uint32_t events = unwritten() == 0 ? 0u : static_cast<uint32_t>(EPOLLOUT);
    if (state_ != ClientState::kClosing) {
        events |= static_cast<uint32_t>(EPOLLRDHUP);
        if (!held_back_) events |= static_cast<uint32_t>(EPOLLIN);
    }
    context_.poller.watch(*this, events);
}

// Ending.

// Called every sweep_s for each client. A client that takes nothing of its answer for client_stall_s holds
// an engine's connection, and memory: it is cut.
void Client::sweep(double now) {
    if (write_paused_ && now - took_at_ >= context_.settings.deadlines.client_stall_s) {
        context_.count_rejected("client_stalled");
        return abort();
    }
    if (exchange_ != nullptr) {
        exchange_->sweep(now);
    } else if (now >= deadline_) {
        expire();
    }
}

void Client::expire() {
    if (ending()) return abort();
    if (state_ == ClientState::kDropping)
        return refuse(std::exchange(refusal_, {}));  // the rest did not come
    if (reading_body()) return refuse({408, "body_timeout", "the request's body did not arrive in time"});
    if (in_head() && !write_paused_) {
        return refuse({408, "head_timeout", "the request's head did not arrive in time"});
    }
    if (!write_paused_) close_soon();
}

void Client::drain() {
    if (exchange_ != nullptr) return exchange_->close_after();
    if (busy() || ending()) return;
    if (!transport_.shaking()) read_some(EPOLLIN);  // a request may have come while others were served
    if (busy() || ending()) return;
    if (past_ != Past::kNone) return close_soon();
    // It has just connected: its first request is on its way.
    deadline_ = std::min(deadline_, context_.now + context_.settings.deadlines.linger_s);
}

// Close once all is written; if the client does not take it, sweep aborts.
void Client::close_soon() {
    if (!open()) return;
    held_ = std::string();
    held_at_ = 0;
    count_unread();
    if (unwritten() == 0) return abort();
    enter(ClientState::kClosing, context_.settings.deadlines.client_stall_s);
    watch();
}

void Client::abort() {
    if (!open()) return;
    // With SO_LINGER 0 the close is a reset: a half answer must not look like a whole one that ends with
    // the connection.
    bool cut = exchange_ != nullptr || unwritten() != 0;
    if (cut) {
        // What is not sent is dropped and the client sees a reset.
        linger now{1, 0};
        ::setsockopt(fd.get(), SOL_SOCKET, SO_LINGER, &now, sizeof(now));
    } else {
        transport_.say_end(fd.get());
    }
    state_.move_to(ClientState::kClosed);
    idle_.leave();
    context_.poller.close(*this);
    if (Exchange* exchange = let_exchange_go()) exchange->cancel();
    give_budget();
    table_.requests.give_back(std::move(request_));
    held_ = std::string();
    held_at_ = 0;
    out_.clear();
    count_unread();
    table_.defer_delete(*this);
}

// The exchange goes back to its pool after this turn; until then its memory is valid, since it may be on
// the call stack.
Exchange* Client::let_exchange_go() {
    Exchange* exchange = exchange_;
    exchange_ = nullptr;
    if (exchange != nullptr) table_.exchanges.give_back(exchange);
    return exchange;
}

}  // namespace moonpool::relay
