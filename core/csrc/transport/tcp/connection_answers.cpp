// Connection: answers, and the bytes of reads behind them, on their way out.
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/tsan.hpp"
#include "transport/tcp/connection.hpp"
#include "wire/error_frame.hpp"

namespace moonpool::transport::tcp {

namespace {

// A plain peer's bytes leave memory that other threads may use at that moment: see connection_payload.cpp.
ssize_t send_parts(int fd, const msghdr& message) {
    OrderedByThePeer scope;
    return ::sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

}  // namespace

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
