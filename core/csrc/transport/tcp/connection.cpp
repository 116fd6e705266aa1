// The serving end of one TCP connection: reads TRANSFER frames, moves their bytes between the socket and
// the regions, and answers in the order of the questions.
//
// Thread: all of it runs on the I/O thread of `loop_`, but for fence(), which a connection of another loop
// calls. No call blocks: what the socket does not take or have now waits for epoll.
//
// Between two calls: in_[in_begin_, in_end_) is what came and was not parsed, never a part of a payload.
// While receiving_, in_ is empty or holds what stands behind the payload of `incoming_`, of which `left`
// bytes are to come. Every row of `incoming_` was checked against the regions once, when its frame was
// parsed (place_rows), and each piece again before its system call (may_touch): a region may be
// deregistered in between. out_bytes_ is the sum of the bytes of out_.
//
// This file parses frames and serves all but their payloads (connection_payload.cpp) and the way out
// (connection_answers.cpp).
//
// No region is entered for longer than one system call or one copy, so deregistering never waits for a
// slow peer.
#include "transport/tcp/connection.hpp"

#include <sched.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "wire/congestion.hpp"

namespace moonpool::transport::tcp {

namespace {

constexpr size_t kInBytes = 16384;  // read ahead of a frame's head: what is copied once more at most
// Beyond either of these the initiator is not read from until it has read its answers.
constexpr size_t kAnswersMax = 64;
constexpr uint64_t kAnswerBytesMax = 32u << 20;
constexpr int kRoundsMax = 8;        // then it is the turn of others
constexpr uint64_t kEndedMs = 2000;  // for the peer to read why

}  // namespace

Connection::Connection(Target& target, EventLoop& loop, Fd fd, std::unique_ptr<TlsStream> tls,
                       std::string peer)
    : target_(target),
      loop_(loop),
      fd_(std::move(fd)),
      tls_(std::move(tls)),
      peer_(std::move(peer)),
      since_ms_(now_ms()),
      pace_(target.context().options.limits, since_ms_) {
    in_.resize(kInBytes);
    leave_bbr_when_near(fd_.get());
}

Connection::~Connection() {
    if (greeted_) target_.strike_off(name_, this);
    target_.closed();
}

bool Connection::on_events(uint32_t events) {
    over_ = !move_on(events);
    return !over_;
}

bool Connection::move_on(uint32_t events) {
    if ((events & (EPOLLERR | EPOLLHUP)) != 0) return false;  // told also while nothing is watched
    if ((events & EPOLLOUT) != 0 && !flush()) return false;
    if (fenced_ || broken_) return false;
    for (int round = 0; round < kRoundsMax && !backlogged(); ++round) {
        Flow flow = receiving_ ? receive_payload() : receive();
        if (flow == Flow::kOver || broken_) return false;
        if (flow == Flow::kBlocked) break;
    }
    if (!flush()) return false;
    watch();
    if (socket().pending() && !backlogged()) come_again();
    return true;
}

void Connection::begin(const Status& ready) {
    if (!ready) {
        target_.context().counters.connections_refused_total.fetch_add(1);
        answer_error(0, ready.error().code, "the peer refuses the connection: " + ready.error().text);
        end();
    }
    if (!ready || socket().pending() || socket().unsent()) come_again();
}

// What TLS holds is no event of the socket. Others have their turn before.
void Connection::come_again() {
    if (std::exchange(comes_again_, true)) return;
    loop_.post([self = shared_from_this()] {
        self->comes_again_ = false;
        if (self->over_ || self->fenced_) return;
        if (!self->on_events(0)) self->leave();
    });
}

// Nothing is read while answers pile up, nothing is awaited that cannot come.
void Connection::watch() {
    bool sends = (!out_.empty() && out_.front().ready) || socket().unsent();
    uint32_t events = (backlogged() ? 0u : uint32_t{EPOLLIN}) | (sends ? uint32_t{EPOLLOUT} : 0u);
    if (events == watched_) return;
    watched_ = events;
    loop_.watch(fd_.get(), events);
}

bool Connection::backlogged() const {
    return out_.size() > kAnswersMax || out_bytes_ > kAnswerBytesMax || wants_slot_ || awaits_fence_ ||
           socket().unsent_bytes() > kUnsentBytesMax;
}

// Called by the loop now and then: ends a connection that is in the middle of a frame, or owes answers,
// and moves too slowly. An idle one may stay for ever.
bool Connection::on_tick(uint64_t now) {
    over_ = over_ || !is_in_time(now);  // what was posted before finds that it is over
    return !over_;
}

bool Connection::is_in_time(uint64_t now) {
    if (fenced_) return false;
    // A thread that waits for a card, or a fence, has a deadline of its own.
    if (!card_work_.empty() || awaits_slot_ || awaits_fence_) return true;
    if (ended_) return now - ended_ms_ <= kEndedMs;
    if (!greeted_) return now - since_ms_ <= target_.context().options.limits.handshake_ms;
    if (!is_inside()) pace_.restart(now);
    return !pace_.is_late(now);
}

// Both sides write before they read (sequentially consistent): either the I/O thread sees fenced_ before
// its next system call, or this thread sees writing_ and waits for that one call. The initiator then
// repeats its writes elsewhere, and no late byte of this connection comes after them.
void Connection::fence() {
    fenced_.store(true);
    while (writing_.load()) ::sched_yield();  // one call that does not block
    loop_.post([self = shared_from_this()] { self->loop_.remove(self->fd()); });
}

Connection::Flow Connection::receive() {
    if (in_begin_ == in_end_) in_begin_ = in_end_ = 0;
    if (in_.size() == in_end_) {
        // A large control frame: move what is left to the front, then grow with the bytes that came.
        std::memmove(in_.data(), in_.data() + in_begin_, in_end_ - in_begin_);
        in_end_ -= in_begin_;
        in_begin_ = 0;
        if (in_.size() - in_end_ < kInBytes / 2) in_.resize(in_.size() * 2);
    }
    iovec room{in_.data() + in_end_, in_.size() - in_end_};
    ssize_t n = tls_ == nullptr ? ::recv(fd_.get(), room.iov_base, room.iov_len, MSG_DONTWAIT)
                                : socket().receive(&room, 1, false, nullptr);
    if (n == 0) return Flow::kOver;
    if (n < 0) return errno == EAGAIN || errno == EINTR ? Flow::kBlocked : Flow::kOver;
    uint64_t now = now_ms();
    if (!is_inside()) pace_.restart(now);
    pace_.moved(static_cast<uint64_t>(n), now);
    in_end_ += static_cast<size_t>(n);
    if (ended_) {
        in_begin_ = in_end_ = 0;
        return Flow::kMoved;
    }
    // A read that did not fill the buffer has emptied the socket: the system call that would say so is
    // left out.
    bool short_read = in_end_ < in_.size() && tls_ == nullptr;
    if (!parse()) return Flow::kOver;
    if (receiving_ || !short_read) return Flow::kMoved;
    return Flow::kBlocked;  // epoll tells when there is more
}

// Serves every whole frame in in_, until a TRANSFER whose payload goes past it. False: drop the connection.
bool Connection::parse() {
    while (!ended_ && !receiving_ && !awaits_fence_ && in_end_ - in_begin_ >= sizeof(FrameHeader)) {
        size_t have = in_end_ - in_begin_;
        FrameHeader header;
        std::memcpy(&header, in_.data() + in_begin_, sizeof(header));
        if (header.magic != kMagic) return protocol_error("a frame does not start with the magic number");
        if (header.version != kVersion) return protocol_error("a frame has another version");
        if (!greeted_ && header.kind != Kind::kEngineHello) {
            return protocol_error("the first frame must be HELLO");
        }
        if (header.kind == Kind::kEngineTransfer) {
            if (header.length > 8 + kRowsMax * sizeof(TransferRow) + kPayloadBytesMax) {
                return protocol_error("a TRANSFER is over the limit");
            }
            if (have < kTransferHeadBytes) return true;
            if (!begin_transfer(header, have)) return true;
            continue;
        }
        // Before memory grows for it: a length is only a claim until its bytes have come.
        uint32_t limit = header.kind == Kind::kEngineNotify ? kNotifyBytesMax : 4096;
        if (header.length > limit) return protocol_error("a frame is over the limit");
        if (have < sizeof(header) + header.length) return true;
        Reader body(std::span<const std::byte>(in_).subspan(in_begin_ + sizeof(header), header.length));
        bool fine = serve(header, body);
        in_begin_ += sizeof(header) + header.length;
        // One large notification must not keep its buffer for the life of the connection.
        if (in_begin_ == in_end_ && in_.size() > (64u << 10)) {
            in_.assign(kInBytes, std::byte{});
            in_.shrink_to_fit();
            in_begin_ = in_end_ = 0;
        }
        if (!fine) return protocol_error("a frame breaks the format");
    }
    return true;
}

// False: nothing was taken, because the rows have not come in full or the frame breaks the format.
bool Connection::begin_transfer(const FrameHeader& header, size_t have) {
    const std::byte* frame = in_.data() + in_begin_;
    uint32_t n, zero;
    std::memcpy(&n, frame + sizeof(header), sizeof(n));
    std::memcpy(&zero, frame + sizeof(header) + 4, sizeof(zero));
    if (n == 0 || n > kRowsMax || zero != 0 || header.length < 8 + n * sizeof(TransferRow)) {
        protocol_error("a TRANSFER breaks the format");
        return false;
    }
    size_t head = kTransferHeadBytes + n * sizeof(TransferRow);
    if (have < head) return false;
    incoming_.rows.resize(n);
    std::memcpy(incoming_.rows.data(), frame + kTransferHeadBytes, n * sizeof(TransferRow));
    if (!place_rows(header)) {
        protocol_error("a TRANSFER breaks the format");
        return false;
    }
    in_begin_ += head;
    receiving_ = true;
    incoming_.cards = CardRows::find(incoming_.rows, incoming_.places, incoming_.regions);
    if (incoming_.cards == nullptr) {
        begin_payload();
    } else {
        find_slot();
    }
    return true;
}

void Connection::begin_payload() {
    // What was read ahead together with the head is copied; all that follows is received in place.
    size_t here = std::min<uint64_t>(in_end_ - in_begin_, incoming_.left);
    size_t from = in_begin_;
    in_begin_ += here;
    take_payload(in_.data() + from, here);
    if (incoming_.left == 0 && !broken_) finish_transfer();
}

// A slot for the writes of incoming_, at once or later.
void Connection::find_slot() {
    wants_slot_ = true;
    if (card_reads_ != 0) return;  // looked for again when they have ended
    Result<bool> has = incoming_.cards->need_slot();
    if (!has) return got_slot(has.error());
    if (*has) return got_slot(success());
    awaits_slot_ = true;
    target_.context().waiters.post(false, [self = shared_from_this()] {
        const Context& context = self->target_.context();
        Status got = self->incoming_.cards->wait_for_slot({context.options.timeout_ms, context.closing});
        self->loop_.post([self, got = std::move(got)] {
            self->awaits_slot_ = false;
            if (self->over_ || self->fenced_) return;
            self->got_slot(got);
            self->go_on();
        });
    });
}

// The payload of incoming_ may come.
void Connection::got_slot(const Status& got) {
    wants_slot_ = false;
    for (size_t i = 0; !got && i < incoming_.rows.size(); ++i) {
        const Region* place = incoming_.places[i];
        if (place == nullptr || !place->on_card() || incoming_.rows[i].direction != 1) continue;
        refuse_row(incoming_, i, Error{got.error().code, "was not copied: " + got.error().text});
    }
    begin_payload();
}

// Outside of an event: what a thread has waited for is there.
void Connection::go_on() {
    pace_.restart(now_ms());
    // What was read ahead is parsed without a new event; so is what came while nothing was read.
    bool fine = parse() && on_events(0);
    if (!fine) leave();
}

void Connection::leave() {
    over_ = true;
    loop_.remove(fd_.get());
}

bool Connection::serve(const FrameHeader& header, Reader body) {
    switch (header.kind) {
        case Kind::kEngineHello:
            return on_hello(header, body);
        case Kind::kEngineRegions: {
            std::optional<RegionsQuestion> question = decode_regions_question(body);
            if (!question) return false;
            std::vector<std::byte> out;
            Writer w(out);
            w.number(uint64_t{0});  // only shared memory has generations
            encode_regions(w, target_.context().regions->all()->list(), question->version);
            answer(header, out);
            return true;
        }
        case Kind::kEngineNotify: {
            std::string_view text = body.bytes(body.left());
            auto bytes = std::as_bytes(std::span(text.data(), text.size()));
            Status status = target_.context().deliver(peer_name_, bytes);
            if (status) {
                answer(header, {});
            } else {
                answer_error(header.request_id, status.error().code, status.error().text);
            }
            return true;
        }
        case Kind::kEngineFence:
            return on_fence(header, body);
        case Kind::kEngineAsk:
            return on_ask(header, body);
        default:
            return false;
    }
}

bool Connection::on_hello(const FrameHeader& header, Reader body) {
    std::optional<Hello> hello = decode_hello(body);
    if (!hello || greeted_) return false;
    // Another life of an engine at the same port: its addresses mean something else, so nothing may be
    // moved.
    if (hello->expected != target_.context().identity.segment) {
        answer_error(header.request_id, Code::kUnavailable,
                     "another engine lives at this address now; open it again");
        return true;
    }
    if (target_.context().shut_out->has(hello->segment)) {
        answer_error(header.request_id, Code::kAuth, ShutOut::error().text);
        return true;
    }
    Result<uint16_t> version =
        agree({"the engine that is called", kEngineVersions}, {"the caller", hello->versions}, kEngineFormat);
    if (!version) {
        if (const auto& journal = target_.context().options.journal) {
            journal->note(Level::kWarning, "protocol_refused", peer_, version.error().text);
        }
        answer_error(header.request_id, version.error().code, version.error().text);
        return true;
    }
    Target::Name name{hello->segment, hello->channel};
    if (!target_.enlist(name, shared_from_this())) return false;
    name_ = name;
    greeted_ = true;
    peer_name_ = hello->name;
    std::vector<std::byte> out;
    Writer(out).number(*version);
    answer(header, out);
    return true;
}

bool Connection::on_fence(const FrameHeader& header, Reader body) {
    auto n = body.number<uint32_t>();
    if (n > kFencesMax) return false;
    std::vector<uint32_t> channels;
    std::vector<CopiesUnderWay> busy;  // cards still write what came over them
    for (uint32_t i = 0; i < n; ++i) channels.push_back(body.number<uint32_t>());
    if (!body.done()) return false;
    for (uint32_t channel : channels) {
        // An initiator fences its own connections only: the segment is this connection's, not the frame's.
        if (channel == name_.channel) return false;  // it would wait for itself
        if (CopiesUnderWay copying = target_.fence({name_.segment, channel})) {
            if (copying->load() != 0) busy.push_back(std::move(copying));
        }
    }
    if (busy.empty()) {
        answer(header, {});
        return true;
    }
    awaits_fence_ = true;
    target_.context().waiters.post(false, [self = shared_from_this(), header, busy = std::move(busy)] {
        Status drained = self->wait_until_drained(busy);
        self->loop_.post([self, header, drained = std::move(drained)] {
            self->awaits_fence_ = false;
            if (self->over_) return;
            if (drained) {
                self->answer(header, {});
            } else {
                self->answer_error(header.request_id, drained.error().code, drained.error().text);
            }
            self->go_on();
        });
    });
    return true;
}

// Another transport of this engine answers.
bool Connection::on_ask(const FrameHeader& header, Reader body) {
    std::string transport(body.text16());
    if (!body.ok()) return false;
    std::string_view rest = body.bytes(body.left());
    auto bytes = std::as_bytes(std::span(rest.data(), rest.size()));
    awaits_fence_ = true;
    target_.context().card_waiters.post(
        false, [self = shared_from_this(), header, transport = std::move(transport),
                question = std::vector<std::byte>(bytes.begin(), bytes.end())] {
            Result<std::vector<std::byte>> answer =
                self->target_.context().ask(transport, self->name_.segment, Reader(question));
            self->loop_.post([self, header, answer = std::move(answer)] {
                self->awaits_fence_ = false;
                if (self->over_) return;
                if (answer) {
                    self->answer(header, *answer);
                } else {
                    self->answer_error(header.request_id, answer.error().code, answer.error().text);
                }
                self->go_on();
            });
        });
    return true;
}

// On a thread that may wait.
Status Connection::wait_until_drained(const std::vector<CopiesUnderWay>& fenced) const {
    const Context& context = target_.context();
    return ask_until(
        context.options.timeout_ms, "a card did not end what another connection writes",
        [&] { return context.closing.load(); },
        [&](int ms) -> Result<bool> {
            // Copies that no thread waits for any more end when they are asked for.
            device::CardCopier::collect_all();
            bool all = std::ranges::all_of(fenced, [](const auto& each) { return each->load() == 0; });
            if (!all) std::this_thread::sleep_for(std::chrono::milliseconds(std::min(ms, 1)));
            return all;
        });
}

}  // namespace moonpool::transport::tcp
