// Connection: the payloads of TRANSFER frames, from the socket into the regions.
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/tsan.hpp"
#include "transport/tcp/connection.hpp"

namespace moonpool::transport::tcp {

namespace {

// Where bytes go that have no place.
std::byte* scratch() {
    static thread_local std::byte bytes[65536];
    return bytes;
}
constexpr size_t kScratchBytes = 65536;

constexpr const char* kUnmappedText = "is registered but not mapped";

// A plain peer's bytes enter memory that other threads may use at that moment. What orders such uses is the
// peers' agreement, which ThreadSanitizer does not see.
ssize_t read_parts(int fd, const iovec* parts, int count) {
    OrderedByThePeer scope;
    return ::readv(fd, parts, count);
}

}  // namespace

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

}  // namespace moonpool::transport::tcp
