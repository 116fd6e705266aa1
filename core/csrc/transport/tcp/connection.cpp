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

#include "base/tsan.hpp"
#include "wire/congestion.hpp"
#include "wire/error_frame.hpp"

namespace moonpool::transport::tcp {

namespace {

constexpr size_t kInBytes = 16384;  // read ahead of a frame's head: what is copied once more at most
// Beyond either of these the initiator is not read from until it has read its answers.
constexpr size_t kAnswersMax = 64;
constexpr uint64_t kAnswerBytesMax = 32u << 20;
constexpr int kRoundsMax = 8;        // then it is the turn of others
constexpr uint64_t kEndedMs = 2000;  // for the peer to read why

// Where bytes go that have no place.
std::byte* scratch() {
    static thread_local std::byte bytes[65536];
    return bytes;
}
constexpr size_t kScratchBytes = 65536;

constexpr const char* kUnmappedText = "is registered but not mapped";

// The two calls by which a plain peer's bytes enter and leave memory that other threads may use at that
// moment. What orders such uses is the peers' agreement, which ThreadSanitizer does not see.
ssize_t read_parts(int fd, const iovec* parts, int count) {
    OrderedByThePeer scope;
    return ::readv(fd, parts, count);
}

ssize_t send_parts(int fd, const msghdr& message) {
    OrderedByThePeer scope;
    return ::sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

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
    if (!is_inside()) {
        pace_.restart(now);
        if (tls_ != nullptr) tls_->shrink();
    }
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

// Every range is checked here, before a byte of it is touched. False: the frame contradicts itself.
bool Connection::place_rows(const FrameHeader& header) {
    Incoming& in = incoming_;
    in.request_id = header.request_id;
    in.regions = target_.context().regions->all();
    in.places.assign(in.rows.size(), nullptr);
    in.row = 0;
    in.at = in.left = 0;
    in.refused = 0;
    // Bounded too, though none of it comes now: it is what the answer will hold.
    uint64_t read_bytes = 0;
    Region* last = nullptr;
    for (size_t i = 0; i < in.rows.size(); ++i) {
        const TransferRow& row = in.rows[i];
        if (row.direction > 1) return false;
        (row.direction == 1 ? in.left : read_bytes) += row.length;
        // Rows of one frame mostly lie in one region: the search is made when they leave it.
        if (last == nullptr || !last->contains(row.address, row.length)) {
            const std::shared_ptr<Region>* found = find_region(*in.regions, row.address, row.length);
            last = found == nullptr ? nullptr : found->get();
        }
        in.places[i] = last;
        if (last == nullptr) refuse_row(i, "lies in no registered region of the peer");
    }
    return read_bytes <= kPayloadBytesMax &&
           header.length == 8 + in.rows.size() * sizeof(TransferRow) + in.left;
}

void Connection::refuse_row(size_t i, const char* why) {
    refuse_row(incoming_, i, Error{Code::kInvalidArgument, why});
}

void Connection::refuse_row(Incoming& in, size_t i, const Error& why) {
    if (std::exchange(in.places[i], nullptr) == nullptr && in.refused != 0) return;
    // The first refusal is told in words, of the others only which they are.
    if (in.refused++ != 0) return;
    const TransferRow& row = in.rows[i];
    Slice slice{0, row.address, row.length, Direction::kRead};
    in.refusal = Error{why.code, "the range " + range_text(slice) + " " + why.text};
}

// Where the bytes of a row that has a place are received.
std::byte* Connection::destination(size_t i, uint64_t at) const {
    if (incoming_.cards != nullptr) {
        if (std::byte* staged = incoming_.cards->staged(i)) return staged + at;
    }
    return reinterpret_cast<std::byte*>(incoming_.rows[i].address + at);
}

// Whether what is copied there may meet memory that its user has unmapped; a slot of pinned memory is ours.
bool Connection::may_fault(size_t i) const {
    bool staged = incoming_.cards != nullptr && incoming_.cards->staged(i) != nullptr;
    return !staged && !incoming_.places[i]->stays_mapped();
}

// Whether `bytes` at `at` of a row that has a place may be written now; else it is refused.
bool Connection::may_touch(size_t i, uint64_t at, uint64_t bytes, Visit& visit) {
    const TransferRow& row = incoming_.rows[i];
    switch (visit.reach(*incoming_.places[i], row.address, row.length, at, bytes)) {
        case Visit::Access::kGranted:
            return true;
        case Visit::Access::kClosing:
            refuse_row(i, "was deregistered by the peer");
            return false;
        case Visit::Access::kOutside:
            break;
    }
    refuse_row(i, kOutsideText);
    return false;
}

// The first bytes of a payload, which came together with its head.
void Connection::take_payload(const std::byte* bytes, size_t size) {
    if (tls_ != nullptr) return take_secured(bytes, size);
    writing_.store(true);
    while (size != 0 && !fenced_) {
        const TransferRow& row = incoming_.rows[incoming_.row];
        uint64_t n = row.direction == 1 ? std::min<uint64_t>(size, row.length - incoming_.at) : 0;
        if (n != 0 && incoming_.places[incoming_.row] != nullptr) {
            Visit visit;
            if (may_touch(incoming_.row, incoming_.at, n, visit)) {
                OrderedByThePeer scope;
                std::memcpy(destination(incoming_.row, incoming_.at), bytes, n);
            }
        }
        bytes += n;
        size -= n;
        advance(n);
        if (n == 0) {
            ++incoming_.row;
            incoming_.at = 0;
        }
    }
    writing_.store(false);
}

// Of a connection inside TLS: a record holds the head and what follows it, so this is no rare case.
void Connection::take_secured(const std::byte* bytes, size_t size) {
    while (size != 0) {
        Parts to;
        Visit visit;
        place_parts(to, kServedRangesMax, size, visit);
        writing_.store(true);
        ssize_t n = -1;
        if (!fenced_) {
            OrderedByThePeer scope;
            unmapped_.clear();
            if (to.may_fault) {
                n = socket().put(to.parts, to.count, bytes, size, &unmapped_);
            } else {
                n = 0;
                for (size_t i = 0; i < to.count; ++i) {
                    std::memcpy(to.parts[i].iov_base, bytes + n, to.parts[i].iov_len);
                    n += static_cast<ssize_t>(to.parts[i].iov_len);
                }
            }
        }
        writing_.store(false);
        visit.end();
        if (n <= 0) {  // fenced, or preadv(2) itself fails: nothing that follows has a place in the stream
            broken_ = true;
            return;
        }
        for (size_t part : unmapped_) refuse_row(to.rows[part], kUnmappedText);
        bytes += n;
        size -= static_cast<size_t>(n);
        advance(static_cast<uint64_t>(n));
    }
}

// Moves the cursor over bytes that came; never past the last row.
void Connection::advance(uint64_t size) {
    Incoming& in = incoming_;
    in.left -= size;
    while (size != 0) {
        if (in.rows[in.row].direction != 1) {
            ++in.row;
            continue;
        }
        uint64_t n = std::min<uint64_t>(size, in.rows[in.row].length - in.at);
        in.at += n;
        size -= n;
        if (in.at == in.rows[in.row].length) {
            ++in.row;
            in.at = 0;
        }
    }
}

// Where the next bytes of the payload go, at most `most` of them.
void Connection::place_parts(Parts& to, size_t ranges_max, uint64_t most, Visit& visit) {
    uint64_t room = 0;
    // Bytes of refused rows come all the same, since the initiator sent them with the frame; they are
    // received into a buffer that nothing reads, so that the next frame is found.
    for (size_t i = incoming_.row; i < incoming_.rows.size() && to.count < ranges_max; ++i) {
        const TransferRow& row = incoming_.rows[i];
        if (row.direction != 1) continue;
        to.rows[to.count] = i;
        uint64_t at = i == incoming_.row ? incoming_.at : 0;
        uint64_t n = std::min<uint64_t>(row.length - at, most - room);
        if (n == 0) continue;
        if (incoming_.places[i] == nullptr || !may_touch(i, at, n, visit)) {
            n = std::min<uint64_t>(n, kScratchBytes);
            to.parts[to.count++] = {scratch(), n};
            if (n < row.length - at) break;
        } else {
            to.parts[to.count++] = {destination(i, at), n};
            to.may_fault |= tls_ != nullptr && may_fault(i);
        }
        room += n;
        if (room == most) break;
    }
}

ssize_t Connection::secured(const Parts& to) {
    OrderedByThePeer scope;
    return socket().receive(to.parts, to.count, to.may_fault, &unmapped_);
}

Connection::Flow Connection::receive_payload() {
    Parts to;
    Visit visit;
    place_parts(to, one_by_one_ ? 1 : kServedRangesMax, kAccessBytesMax, visit);
    writing_.store(true);
    if (fenced_) {
        writing_.store(false);
        return Flow::kOver;
    }
    // From here on fence() waits for this call.
    unmapped_.clear();
    ssize_t n = tls_ == nullptr ? read_parts(fd_.get(), to.parts, static_cast<int>(to.count)) : secured(to);
    int error = errno;
    writing_.store(false);
    visit.end();
    for (size_t part : unmapped_) refuse_row(to.rows[part], kUnmappedText);
    if (n == 0) return Flow::kOver;
    if (n < 0) {
        if (error == EFAULT) {
            // Its owner unmapped a region that is registered. The kernel does not say which row it was: from
            // here on each has a call of its own.
            if (to.count == 1 && incoming_.places[to.rows[0]] != nullptr) {
                refuse_row(to.rows[0], kUnmappedText);
            }
            one_by_one_ = true;
            return Flow::kMoved;
        }
        return error == EAGAIN || error == EINTR ? Flow::kBlocked : Flow::kOver;
    }
    pace_.moved(static_cast<uint64_t>(n), now_ms());
    advance(static_cast<uint64_t>(n));
    if (incoming_.left == 0) {
        finish_transfer();
        return Flow::kMoved;
    }
    return Flow::kMoved;
}

void Connection::finish_transfer() {
    receiving_ = false;
    one_by_one_ = false;
    if (spare_.empty()) {
        out_.emplace_back();
    } else {
        out_.push_back(std::move(spare_.back()));
        spare_.pop_back();
    }
    Answer& answer = out_.back();
    if (incoming_.cards == nullptr) return write_answer(incoming_, answer);
    answer.ready = false;
    incoming_.cards->writes_begin(copying_);
    card_reads_ += incoming_.cards->has_reads();
    card_work_.push_back(std::make_shared<CardWork>(CardWork{std::move(incoming_), &answer}));
    incoming_ = Incoming();
    if (card_work_.size() == 1) start_card_work();
}

void Connection::start_card_work() {
    target_.context().card_waiters.post(false, [self = shared_from_this(), work = card_work_.front()] {
        const Context& context = self->target_.context();
        CardRows::Refused refused =
            work->frame.cards->move(self->fenced_, {context.options.timeout_ms, context.closing});
        self->loop_.post([self, refused = std::move(refused)] { self->end_card_work(refused); });
    });
}

void Connection::end_card_work(const CardRows::Refused& refused) {
    std::shared_ptr<CardWork> work = std::move(card_work_.front());
    card_work_.pop_front();
    if (over_ || fenced_) return card_work_.clear();  // nothing is written of frames that have not begun
    for (const auto& [row, why] : refused) refuse_row(work->frame, row, why);
    card_reads_ -= work->frame.cards->has_reads();
    write_answer(work->frame, *work->answer);
    if (!card_work_.empty()) start_card_work();
    if (wants_slot_ && !awaits_slot_) find_slot();
    go_on();
}

// What was done of a frame, all of whose bytes have come.
void Connection::write_answer(Incoming& in, Answer& answer) {
    answer.ready = true;
    begin_frame(answer.head, Kind::kEngineTransfer, kFlagAnswer, in.request_id);
    Writer w(answer.head);
    w.number(static_cast<uint32_t>(in.rows.size()));
    w.number(in.refused);
    // A refused row is told in the answer; the rows that were done are done, whatever became of others.
    Tally tally(target_.counters());
    for (size_t i = 0; i < in.rows.size(); ++i) {
        if (in.refused != 0) w.number(static_cast<uint8_t>(in.places[i] == nullptr));
        if (in.places[i] == nullptr) continue;
        tally.count(in.rows[i].direction == 1, in.rows[i].length);
        if (in.rows[i].direction == 1 || in.rows[i].length == 0) continue;
        std::byte* staged = in.cards == nullptr ? nullptr : in.cards->staged(i);
        if (staged == nullptr) {
            answer.rows.push_back({in.places[i], in.rows[i].address, in.rows[i].length});
        } else {
            answer.rows.push_back({nullptr, reinterpret_cast<uint64_t>(staged), in.rows[i].length});
        }
        answer.bytes += in.rows[i].length;
    }
    if (in.cards != nullptr) {
        answer.slot = in.cards->answer_slot();
        answer.card = in.cards->card();
    }
    if (in.refused != 0) {
        target_.context().counters.slices_refused_total.fetch_add(in.refused);
        w.number(static_cast<uint16_t>(in.refusal.code));
        w.text16(in.refusal.text);
    }
    auto length = static_cast<uint32_t>(answer.head.size() - sizeof(FrameHeader) + answer.bytes);
    std::memcpy(answer.head.data() + offsetof(FrameHeader, length), &length, sizeof(length));
    // Keeps the regions' records alive, not their memory: that may be deregistered before the answer goes
    // out, and flush() looks again.
    if (!answer.rows.empty()) answer.regions = in.regions;
    in.regions.reset();
    out_bytes_ += answer.bytes;
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
    Target::Name name{hello->segment, hello->channel};
    if (!target_.enlist(name, shared_from_this())) return false;
    name_ = name;
    greeted_ = true;
    peer_name_ = hello->name;
    std::vector<std::byte> out;
    Writer(out).number(kEngineVersion);
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

void Connection::answer(const FrameHeader& header, const std::vector<std::byte>& body) {
    Answer answer;
    begin_frame(answer.head, header.kind, kFlagAnswer, header.request_id);
    Writer(answer.head).bytes(body.data(), body.size());
    finish_frame(answer.head, 0);
    out_.push_back(std::move(answer));
}

void Connection::answer_error(uint64_t request_id, Code code, const std::string& text) {
    Answer answer;
    write_error(answer.head, code, text, request_id);
    out_.push_back(std::move(answer));
}

// Tells the peer, and reads on only to throw away: bytes left unread would turn the close into a reset, which
// could overtake the reason.
bool Connection::protocol_error(const std::string& text) {
    target_.context().counters.protocol_errors_total.fetch_add(1);
    answer_error(0, Code::kProtocol, text);
    end();
    return true;
}

void Connection::end() {
    ended_ = true;
    ended_ms_ = now_ms();
    receiving_ = false;
    in_begin_ = in_end_ = 0;
}

// A peer that reads slowly must not keep pinned memory that others wait for.
void Connection::free_slot(Answer& answer) {
    if (answer.slot == nullptr || answer.card == nullptr || answer.card->has_free_slot()) return;
    uint64_t bytes = 0;
    for (size_t i = answer.row; i < answer.rows.size(); ++i) {
        if (answer.rows[i].place == nullptr) bytes += answer.rows[i].length;
    }
    auto heap = std::make_shared<std::vector<std::byte>>(bytes);
    std::byte* to = heap->data();
    for (size_t i = answer.row; i < answer.rows.size(); ++i) {
        ReadRow& row = answer.rows[i];
        if (row.place != nullptr) continue;
        std::memcpy(to, reinterpret_cast<const std::byte*>(row.address), row.length);
        row.address = reinterpret_cast<uint64_t>(to);
        to += row.length;
    }
    answer.slot = std::move(heap);
    answer.card.reset();
}

// Sends what it can. False: the connection is over.
bool Connection::flush() {
    const size_t held = socket().unsent_bytes();
    bool lives = flush_answers();
    if (lives && socket().unsent() && !tls_->flush(fd_.get())) lives = errno == EAGAIN;
    // What TLS took before, and the socket takes now, is progress, too.
    if (held > socket().unsent_bytes()) pace_.moved(held - socket().unsent_bytes(), now_ms());
    if (!lives) return false;
    // The reason is out; the initiator reads it and closes, or on_tick() does.
    if (ended_ && out_.empty() && !socket().unsent()) {
        if (tls_ != nullptr) tls_->end(fd_.get());
        ::shutdown(fd_.get(), SHUT_WR);
    }
    return true;
}

bool Connection::flush_answers() {
    uint64_t turn = 0;
    while (!out_.empty() && out_.front().ready) {
        // The socket has room, and says so: encryption takes time that others wait for.
        if (tls_ != nullptr && turn >= kSecureTurnBytes) return true;
        Answer& answer = out_.front();
        iovec parts[kServedRangesMax];
        size_t count = 0;
        if (answer.head_sent < answer.head.size()) {
            parts[count++] = {answer.head.data() + answer.head_sent, answer.head.size() - answer.head_sent};
        }
        Visit visit;
        bool may_fault = false;
        for (size_t i = answer.row; i < answer.rows.size() && count < kServedRangesMax; ++i) {
            const ReadRow& row = answer.rows[i];
            uint64_t at = i == answer.row ? answer.at : 0;
            // Its bytes were promised, and the memory may be gone: only the connection can take that back.
            uint64_t rest = row.length - at;
            if (row.place != nullptr &&
                visit.reach(*row.place, row.address, row.length, at, rest) != Visit::Access::kGranted) {
                return false;
            }
            parts[count++] = {reinterpret_cast<void*>(row.address + at), rest};
            may_fault |= tls_ != nullptr && row.place != nullptr && !row.place->stays_mapped();
        }
        ssize_t n = 0;
        if (tls_ == nullptr) {
            msghdr message{};
            message.msg_iov = parts;
            message.msg_iovlen = count;
            n = send_parts(fd_.get(), message);
        } else {
            OrderedByThePeer scope;
            n = socket().send(parts, count, may_fault);
        }
        visit.end();
        if (n < 0) {
            if (errno == EINTR) continue;
            if (errno != EAGAIN) return false;
            free_slot(answer);
            return true;
        }
        pace_.moved(static_cast<uint64_t>(n), now_ms());
        turn += static_cast<uint64_t>(n);
        auto left = static_cast<uint64_t>(n);
        uint64_t head = std::min<uint64_t>(left, answer.head.size() - answer.head_sent);
        answer.head_sent += head;
        left -= head;
        while (left != 0) {
            uint64_t part = std::min(left, answer.rows[answer.row].length - answer.at);
            answer.at += part;
            left -= part;
            if (answer.at == answer.rows[answer.row].length) {
                ++answer.row;
                answer.at = 0;
            }
        }
        if (answer.head_sent < answer.head.size() || answer.row < answer.rows.size()) continue;
        out_bytes_ -= answer.bytes;
        // Their vectors are used again: an answer allocates nothing once a connection is warm.
        if (spare_.size() < 4) {
            answer.head.clear();
            answer.rows.clear();
            answer.regions.reset();
            answer.slot.reset();
            answer.card.reset();
            answer.head_sent = answer.row = 0;
            answer.at = answer.bytes = 0;
            spare_.push_back(std::move(answer));
        }
        out_.pop_front();
    }
    return true;
}

}  // namespace moonpool::transport::tcp
