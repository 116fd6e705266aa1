// Runs on the relay's thread alone. leg_ is the request whose answer is read; null while the connection is
// idle or drained. Whatever ends the connection clears leg_ before it calls the leg: the leg may at once
// take another connection, or end the request.
//
// An idle connection that the engine closed cannot be told from one that it is about to close. So a reused
// connection that ends before a byte of an answer has come is stale, not failed (ended): the leg sends the
// request again over a fresh one, and the engine is not blamed.
//
// An engine that does not accept our certificate says so after our side of the handshake is over (TLS 1.3),
// in place of an answer: that counts as a handshake that failed, since it has read nothing of the request.
//
// Bytes behind a whole answer are an error, since one request at a time is under way: they would be taken
// for the next answer.
#include "relay/upstream.hpp"

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "relay/context.hpp"
#include "relay/engine.hpp"
#include "relay/leg.hpp"
#include "relay/tcp.hpp"

namespace moonpool::relay {

namespace {

constexpr size_t kTurnBytes = 512 << 10;  // sent to one engine before others have their turn

}  // namespace

int Upstream::connect(Leg& leg) {
    fd.reset(::socket(engine_.address.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (!fd.valid()) return errno;
    tune(fd.get(), context_.settings.deadlines.tcp_dead_peer_s);
    int result =
        ::connect(fd.get(), reinterpret_cast<const sockaddr*>(&engine_.address), engine_.address_size);
    // At most a few errors come at once (no route); the others come by on_events().
    if (result != 0 && errno != EINPROGRESS) return errno;
    leg_ = &leg;
    connecting_ = true;
    return context_.poller.add(*this, EPOLLOUT) ? 0 : errno;
}

void Upstream::on_events(uint32_t events) {
    if (transport_.shaking()) return shake_hands();
    if (connecting_) return finish_connecting();
    if ((events & EPOLLOUT) != 0) write_more();
    if (open() && (events & ~static_cast<uint32_t>(EPOLLOUT)) != 0) read_some();
}

void Upstream::finish_connecting() {
    // The next turn is told of it once more, and of an error, too.
    if (engine_.settings.tls != nullptr && context_.engine_handshakes == 0) return;
    int error = 0;
    socklen_t size = sizeof(error);
    // Any event while connecting says that it is over; this tells how.
    if (::getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &size) != 0) error = errno;
    Leg* leg = leg_;
    if (error != 0) {
        leg_ = nullptr;
        close();
        // This object is closed and out of the engine's lists: the leg may begin another one.
        leg->cannot_connect(error);
        return;
    }
    if (engine_.settings.tls != nullptr) {
        auto stream = engine_.settings.tls->open(engine_.settings.host);
        if (!stream) return refused_tls(stream.error().text);
        transport_.begin_tls(std::move(*stream));
        return shake_hands();
    }
    connecting_ = false;
    watch();
    leg->connected();
}

// As those of clients (Client::shake_hands), and counted apart: neither side's take the other's turn.
void Upstream::shake_hands() {
    if (context_.engine_handshakes == 0) return;
    --context_.engine_handshakes;
    TlsStream::Step step = transport_.shake(fd.get());
    if (step == TlsStream::Step::kFailed) {
        return refused_tls(transport_.tls()->error(engine_.settings.host).text);
    }
    connecting_ = step != TlsStream::Step::kDone;
    watch();
    if (!connecting_) leg_->connected();
}

void Upstream::refused_tls(std::string why) {
    Leg* leg = leg_;
    leg_ = nullptr;
    close();
    leg->cannot_speak(std::move(why));
}

void Upstream::send(Leg& leg) {
    leg_ = &leg;
    // An answer to HEAD has a length and no body.
    parser_.begin(leg.head_only);
    headed_ = event_stream_ = false;
    received_ = 0;
    partial_.clear();
    // Nothing is copied: the pieces stay in the leg until the message is sent, and the position is what is
    // left of its size.
    unsent_ = leg.message_bytes;
    write_more();
}

void Upstream::write_more() {
    if (!transport_.flush(fd.get())) return ended();
    if (leg_ == nullptr) return watch();
    size_t room = kTurnBytes;  // an engine that reads fast would else have all of a large body in one turn
    while (unsent_ > 0 && room > 0) {
        // The pieces of the message less what is sent: head first, then the body.
        // A body with edits has some twenty pieces at most; more would go with the next turn of the loop.
        std::array<iovec, 24> pieces;
        size_t count = 0, skip = leg_->message_bytes - unsent_, left = room;
        auto add = [&](std::string_view piece) {
            size_t passed = std::min(skip, piece.size());
            skip -= passed;
            piece.remove_prefix(passed);
            piece = piece.substr(0, left);
            if (piece.empty() || count == pieces.size()) return;
            left -= piece.size();
            pieces[count++] = {const_cast<char*>(piece.data()), piece.size()};
        };
        add(leg_->head);
        for (std::string_view piece : leg_->body) add(piece);
        ptrdiff_t n = transport_.write_some(fd.get(), pieces.data(), count);
        if (n == kBroken) return ended();
        if (n == 0) break;
        unsent_ -= static_cast<size_t>(n);
        room -= static_cast<size_t>(n);
    }
    watch();
}

void Upstream::read_some() {
    ssize_t n = transport_.receive(fd.get(), context_.scratch);
    if (n > 0 && (leg_ != nullptr || drained_until > 0))
        return feed({context_.scratch.data(), static_cast<size_t>(n)});
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
        if (transport_.unsent() > 0) write_more();  // what TLS itself answers
        return;
    }
    if (leg_ == nullptr) return close();  // the engine ended an idle connection, or speaks unasked
    // The orderly end of an answer without a length.
    if (n == 0 && headed_ && transport_.ended_well() && body_.finish()) return deliver(false, {}, true);
    const TlsStream* tls = transport_.tls();
    if (n < 0 && received_ == 0 && !reused_ && tls != nullptr && tls->refused_ours()) {
        return refused_tls(tls->error(engine_.settings.host).text);
    }
    ended();
}

void Upstream::ended() {
    Leg* leg = leg_;
    leg_ = nullptr;
    bool stale = reused_ && received_ == 0;
    close();
    if (leg == nullptr) return;
    if (stale) {
        leg->went_stale();
    } else {
        leg->failed(Reason::kLost, "closed the connection before its answer was complete");
    }
}

// A head in one piece is parsed where it lies; only a partial one is copied. The body is passed on as it
// came, chunk framing included.
void Upstream::feed(std::string_view bytes) {
    received_ += bytes.size();
    bool first = !headed_;
    if (first) {
        if (!partial_.empty()) bytes = partial_.append(bytes);
        switch (parser_.parse(bytes)) {
            case http::Step::kMore:
                if (partial_.empty()) partial_.assign(bytes);
                return;
            case http::Step::kRefused:
                return fail_answer("sent a broken answer: " + parser_.refusal().sentence);
            case http::Step::kDone:
                break;
        }
        const http::ResponseHead& head = parser_.head();
        headed_ = true;
        event_stream_ = head.event_stream;
        body_ = http::BodyReader(head.framing, head.content_length);
        bytes.remove_prefix(head.bytes);
    }
    std::string_view passed = body_.pass(bytes);
    if (body_.failed()) {
        return fail_answer(std::string("sent a broken answer: its chunked body is malformed: ") +
                           body_.why());
    }
    if (passed.size() < bytes.size()) {
        return fail_answer("sent a broken answer: the engine sent bytes behind its answer");
    }
    deliver(first, passed, body_.done());
}

void Upstream::deliver(bool first, std::string_view body, bool complete) {
    Leg* leg = leg_;
    if (complete) give_back();  // first, so that a pool that is asked next has it
    if (leg != nullptr) leg->received(first ? &parser_.head() : nullptr, body, complete);
}

// Back to the engine's pool, unless the engine will close it, has not read the whole request, or is
// leaving.
void Upstream::give_back() {
    leg_ = nullptr;
    paused_ = false;
    drained_until = 0;
    if (!parser_.head().keep_alive || unsent_ > 0 || transport_.unsent() > 0 || engine_.leaving() ||
        engine_.idle.size() >= context_.settings.limits.idle_upstreams_max) {
        return close();
    }
    reused_ = true;
    idle_since = context_.now;
    engine_.idle.push_back(this);
    watch();
}

void Upstream::fail_answer(std::string why) {
    Leg* leg = leg_;
    leg_ = nullptr;
    close();
    if (leg != nullptr) leg->failed(Reason::kBadAnswer, std::move(why));
}

void Upstream::let_go(Leg& leg) {
    if (leg_ != &leg) return;  // its answer is complete: the connection may be another's by now
    leg_ = nullptr;
    close();
}

// For one shot, where the prefill engine's own answer comes anyway: it is read and dropped, for linger_s at
// most, and the connection can be used again.
void Upstream::drain(Leg& leg) {
    if (leg_ != &leg) return;
    // The engine does not have the whole request, so it has nothing to finish.
    if (connecting_ || unsent_ > 0 || transport_.unsent() > 0) return let_go(leg);
    leg_ = nullptr;
    drained_until = context_.now + context_.settings.deadlines.linger_s;
}

void Upstream::close() {
    if (closed_) return;
    closed_ = true;
    if (open()) {  // not when there was no socket to be had
        transport_.say_end(fd.get());
        context_.poller.close(*this);
    }
    auto at = std::find(engine_.idle.begin(), engine_.idle.end(), this);
    if (at != engine_.idle.end()) engine_.idle.erase(at);
    // Deleted after the turn: this may be a call from inside of this object.
    context_.defer_delete(engine_.take_out(*this));
}

// A peek, so that the bytes stay for read_some(). An engine's process that crashed closes all its
// connections at once, and this is asked before the relay has seen their events.
bool Upstream::is_cut() const {
    char octet;
    ssize_t n = connecting_ ? 1 : ::recv(fd.get(), &octet, 1, MSG_PEEK | MSG_DONTWAIT);
    return n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR);
}

void Upstream::pause() {
    paused_ = true;
    watch();
}

void Upstream::resume() {
    paused_ = false;
    watch();
}

void Upstream::watch() {
    // Paused: nothing but errors is reported, and those end it.
    uint32_t reads = paused_ ? 0u : static_cast<uint32_t>(EPOLLIN) | EPOLLRDHUP;
    bool writes = unsent_ > 0 || transport_.unsent() > 0;
    context_.poller.watch(*this, reads | (writes ? static_cast<uint32_t>(EPOLLOUT) : 0u));
}

}  // namespace moonpool::relay
