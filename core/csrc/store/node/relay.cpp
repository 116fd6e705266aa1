// Threads. "mp-relay" is the loop: it owns clients and links and all of their state. Each link has a thread
// "mp-relay-dial", which does nothing but connect and prove the token: both may take as long as the master
// pleases. The node's loop hands over processes (adopt) and never waits for the relay.
//
// States of a link:
//   first      its first attempt since it was made, or since it lost its master: processes wait for the
//   result,
//              half of timeout_ms at most
//   up         it has a connection; processes are welcomed and their questions passed on
//   down       the last attempt failed: processes are refused with that reason
//
// A question that is not answered in its client's time is answered with an ERROR, and its answer is dropped
// when it comes. When nothing has come for timeout_ms from a master that was asked, or for as long as the
// most patient process waits, the link is lost.
#include "store/node/relay.hpp"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <optional>
#include <utility>

#include "base/fork.hpp"
#include "directory/members_cache.hpp"
#include "directory/members_file.hpp"
#include "directory/questions.hpp"
#include "store/node/relay_dialer.hpp"
#include "wire/control_socket.hpp"
#include "wire/error_frame.hpp"
#include "wire/frame_pace.hpp"
#include "wire/frame_reader.hpp"
#include "wire/outgoing.hpp"

namespace moonpool {

namespace {

constexpr uint32_t kRelayTickMs = 20;
constexpr uint32_t kRelaySpinUs = 50;  // as the node's loop does: a process that was answered asks again
constexpr uint32_t kRelayAnswerMax = 64u << 20;
constexpr size_t kRelayBacklogStop = 1u << 20;  // over it, no more is read from the process
constexpr size_t kRelayBacklogMax = 64u << 20;  // over it, the process is given up
constexpr size_t kRelayKeptMax = 64u << 10;     // of a buffer, while nothing is in it
constexpr int kRelayRoundsMax = 8;              // of reading, then it is the turn of others

void write_relayed(std::vector<std::byte>& out, Kind kind, uint16_t flags, uint64_t request_id, Reader body) {
    size_t at = begin_frame(out, kind, flags, request_id);
    std::string_view bytes = body.bytes(body.left());
    Writer(out).bytes(bytes.data(), bytes.size());
    finish_frame(out, at);
}

}  // namespace

// One process of this host.
class RelayClient final : public EventHandler {
   public:
    RelayClient(Relay& relay, RelayCaller caller, RelayTable::ClientId id, std::shared_ptr<RelayLink> link);

    bool on_events(uint32_t events) override;
    bool on_tick(uint64_t now_ms) override;

    RelayTable::ClientId id() const { return id_; }
    int fd() const { return socket_.fd.get(); }
    bool welcomed() const { return welcomed_; }
    const std::string& tenant() const { return tenant_; }
    const Access& access() const { return access_; }
    const std::shared_ptr<RelayLink>& link() const { return link_; }
    // Each of these may end the connection.
    void welcome();
    void answer(Kind kind, uint64_t request_id, Reader body);
    void tell_masters(const MasterList& list);  // where it asked for it
    void refuse(const Error& why, uint64_t request_id);
    void fail(const Error& why);

   private:
    bool read();
    bool parse();
    bool on_frame(const FrameHeader& header, Reader body);
    bool flush();
    bool last_words(const Error& why);
    bool is_inside() const { return !in_.waiting().empty() || out_.waiting() != 0; }

    Relay& relay_;
    ControlSocket socket_;
    ClosedInChildren closed_in_children_{socket_.fd};
    const RelayTable::ClientId id_;
    const std::shared_ptr<RelayLink> link_;
    const std::string tenant_;
    const Access access_;
    const Mac proof_;
    const uint64_t auth_id_;
    FrameReader in_;
    Outgoing out_;
    bool welcomed_ = false, takes_masters_ = false;
    const uint64_t begun_ms_ = now_ms();
    FramePace pace_;
    uint32_t events_ = EPOLLIN;
};

// The way to the master of one range, of one tenant.
class RelayLink final : public EventHandler, public std::enable_shared_from_this<RelayLink> {
   public:
    RelayLink(Relay& relay, const std::string& tenant, const Range& range);

    bool on_events(uint32_t events) override;

    Status open() { return dialer_.want(); }
    void stop() { dialer_.stop(); }
    void check(uint64_t now_ms);
    // Welcomes the process, or refuses it, or lets it wait for what the attempt under way brings.
    void greet(RelayClient& client);
    uint64_t life() const { return file_ ? life_ : 0; }  // for the WELCOME
    uint16_t version() const { return version_; }        // of the wire format, to the master
    Result<Fd> members_fd() const { return file_->read_only_fd(); }
    // Nothing: the question is on its way.
    std::optional<Error> ask(const RelayTable::Asked& asked, uint32_t wait_ms, Reader body);
    void end(RelayTable::ClientId client) { table_.end(client); }
    const MasterList& masters() const { return masters_; }
    bool is_first() const { return state_ == State::kFirst; }
    Error why_not() const;

   private:
    enum class State { kFirst, kUp, kDown };
    void dialed(Result<Dialed>& dialed);
    void lost(const Error& why);
    void hear(const MasterList& list);
    bool read();
    bool on_frame(const FrameHeader& header, Reader body);
    bool flush();
    void refresh();
    bool on_members(const FrameHeader& header, Reader body);
    void publish(uint8_t flags, Version newest);
    void for_each_client(const std::function<void(RelayClient&)>& visit);
    const std::string& master() const { return relay_.masters_[range_.index]; }
    Error broken(const std::string& how) const {
        return Error{Code::kUnavailable, "the connection to the master at " + master() + how};
    }

    Relay& relay_;
    const Range range_;
    State state_ = State::kFirst;
    std::optional<Error> why_not_;
    ControlSocket socket_;
    ClosedInChildren closed_in_children_{socket_.fd};
    std::string peer_;
    uint16_t version_ = kVersion;  // of the wire format, that it takes
    FrameReader in_;
    Outgoing out_;
    RelayTable table_;
    uint64_t heard_ms_ = 0;
    uint32_t events_ = EPOLLIN;

    // The list of members, of which processes want to know that it is as of now: of one question to the
    // master, all that have asked before it.
    std::optional<MembersWriter> file_;  // nothing: the kernel gave none
    uint64_t life_ = 0;                  // of the connection, counted from 1
    MembersCache members_{0};
    std::optional<uint64_t> published_epoch_;  // of the rows in file_
    std::vector<uint64_t> waiting_, told_;     // numbers in table_: of the next question, of that under way
    std::optional<uint64_t> refresh_;          // the number of the question under way

    MasterList masters_{};  // as the master said last; processes hear it, too
    RelayDialer dialer_;
};

// ---- RelayClient

RelayClient::RelayClient(Relay& relay, RelayCaller caller, RelayTable::ClientId id,
                         std::shared_ptr<RelayLink> link)
    : relay_(relay),
      socket_{std::move(caller.fd), nullptr},
      id_(id),
      link_(std::move(link)),
      tenant_(std::move(caller.tenant)),
      access_(caller.access),
      proof_(caller.proof),
      auth_id_(caller.request_id),
      pace_(relay.options_.frames, begun_ms_) {}

bool RelayClient::on_events(uint32_t events) {
    bool alive = true;
    if ((events & EPOLLOUT) != 0) alive = flush() && parse();
    if (alive && (events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0) alive = read();
    if (!alive) relay_.drop(id_);
    return alive;
}

// False: the connection is over, and has been taken out by none yet.
bool RelayClient::read() {
    for (int round = 0; round < kRelayRoundsMax; ++round) {
        std::span<std::byte> room = in_.room(4096);
        ssize_t n = socket_.receive(room.data(), room.size(), false);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return n < 0 && errno == EAGAIN;
        if (!is_inside()) pace_.restart(now_ms());
        pace_.moved(static_cast<uint64_t>(n), now_ms());
        in_.received(static_cast<size_t>(n));
        if (!parse()) return false;
        if (static_cast<size_t>(n) < room.size() || out_.waiting() > kRelayBacklogStop) break;
    }
    in_.shrink(kRelayKeptMax);
    return true;
}

bool RelayClient::parse() {
    while (out_.waiting() <= kRelayBacklogStop) {
        std::optional<FrameHeader> header = in_.header();
        if (!header) break;
        if (std::optional<Error> wrong =
                unfit(*header, kQuestionBytesMax + RelayHead::kBytes, "node", "8 MiB")) {
            return last_words(*wrong);
        }
        std::optional<Reader> body = in_.body(*header);
        if (!body) break;
        if (!on_frame(*header, *body)) return false;
    }
    return flush();
}

bool RelayClient::on_frame(const FrameHeader& header, Reader body) {
    if (welcomed_ && header.kind == Kind::kMasters) {
        takes_masters_ = true;
        write_masters_frame(out_.bytes, link_->masters());
        return true;
    }
    RelayHead head = RelayHead::read(body);
    if (!welcomed_ || header.kind != Kind::kRelay || !body.ok() || !fits_question(head.kind, body)) {
        return last_words({Code::kProtocol, "a frame is no question to a master; the connection is closed"});
    }
    relay_.counters_.questions_total.fetch_add(1);
    // The link asks as the node: what this process may ask is judged here.
    std::optional<Error> why;
    if (!access_.may_write() && changes_objects(head.kind, body)) why = may_not_write(access_, tenant_);
    if (!why) why = link_->ask({id_, header.request_id, head.kind}, head.wait_ms, body);
    if (!why) return true;
    relay_.counters_.refused_total.fetch_add(1);
    write_error(out_.bytes, why->code, why->text, header.request_id);
    return true;
}

// It goes out by itself, and as a whole, with the descriptor on its first byte: nothing was sent before.
void RelayClient::welcome() {
    uint64_t life = link_->life();
    Fd members;
    if (life != 0) {
        Result<Fd> fd = link_->members_fd();
        if (fd) members = std::move(*fd);
    }
    std::vector<std::byte> frame;
    size_t at = begin_frame(frame, Kind::kWelcome, kFlagAnswer, auth_id_);
    Writer w(frame);
    // In which version the master takes what is passed on.
    w.number_at(at + offsetof(FrameHeader, lowest), link_->version());
    w.number_at(at + offsetof(FrameHeader, highest), link_->version());
    w.bytes(proof_.data(), proof_.size());
    w.number(members.valid() ? life : 0);
    link_->masters().write(w);
    finish_frame(frame, at);
    iovec part{frame.data(), frame.size()};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    if (members.valid()) {
        message.msg_control = control;
        message.msg_controllen = sizeof(control);
        cmsghdr* rights = CMSG_FIRSTHDR(&message);
        rights->cmsg_level = SOL_SOCKET;
        rights->cmsg_type = SCM_RIGHTS;
        rights->cmsg_len = CMSG_LEN(sizeof(int));
        int fd = members.get();
        std::memcpy(CMSG_DATA(rights), &fd, sizeof(fd));
    }
    welcomed_ = true;
    ssize_t sent = ::sendmsg(socket_.fd.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent != static_cast<ssize_t>(frame.size())) relay_.drop(id_);
}

void RelayClient::answer(Kind kind, uint64_t request_id, Reader body) {
    write_relayed(out_.bytes, kind, kFlagAnswer, request_id, body);
    if (!flush() || out_.waiting() > kRelayBacklogMax) relay_.drop(id_);
}

void RelayClient::tell_masters(const MasterList& list) {
    if (!takes_masters_) return;
    write_masters_frame(out_.bytes, list);
    if (!flush() || out_.waiting() > kRelayBacklogMax) relay_.drop(id_);
}

void RelayClient::refuse(const Error& why, uint64_t request_id) {
    write_error(out_.bytes, why.code, why.text, request_id);
    if (!flush()) relay_.drop(id_);
}

void RelayClient::fail(const Error& why) {
    last_words(why);
    relay_.drop(id_);
}

// What the socket does not take of them is lost; a client that does not read them finds the end.
bool RelayClient::last_words(const Error& why) {
    write_error(out_.bytes, why.code, why.text, 0);
    (void)out_.flush(socket_);
    return false;
}

bool RelayClient::flush() {
    size_t before = out_.waiting();
    if (!out_.flush(socket_)) return false;
    if (out_.waiting() < before) pace_.moved(before - out_.waiting(), now_ms());
    uint32_t events =
        (out_.waiting() != 0 ? EPOLLOUT : 0u) | (out_.waiting() <= kRelayBacklogStop ? EPOLLIN : 0u);
    if (events != events_) relay_.loop_->watch(fd(), events);
    events_ = events;
    return true;
}

bool RelayClient::on_tick(uint64_t now_ms) {
    if (!welcomed_ && now_ms - begun_ms_ > static_cast<uint64_t>(relay_.options_.timeout_ms) / 2) {
        fail(link_->why_not());
        return false;
    }
    if (!is_inside()) pace_.restart(now_ms);
    if (!pace_.is_late(now_ms)) return true;
    fail({Code::kTimeout, FramePace::late_text(relay_.options_.frames)});
    return false;
}

// ---- RelayLink

static RelayDialerOptions dialing(const RelayOptions& options, const std::string& master,
                                  const std::string& tenant, const Range& range) {
    RelayDialerOptions to;
    to.master = master;
    to.range = range;
    to.token = options.token;
    to.tenant = tenant;
    to.interface = options.interface;
    to.tls = options.tls;
    to.timeout_ms = options.timeout_ms;
    return to;
}

RelayLink::RelayLink(Relay& relay, const std::string& tenant, const Range& range)
    : relay_(relay),
      range_(range),
      table_(relay.options_.limits),
      dialer_(dialing(relay.options_, master(), tenant, range),
              [this](std::shared_ptr<Result<Dialed>> result) {
                  // Refused once the loop has ended; links live longer than it (Relay::stop).
                  relay_.loop_->post([this, result] { dialed(*result); });
              }) {
    Result<MembersWriter> file = MembersWriter::create();
    if (file) file_ = std::move(*file);
}

Error RelayLink::why_not() const {
    if (why_not_) return *why_not_;
    return Error{Code::kUnavailable, "the node has no connection to the master at " + master() + " yet"};
}

void RelayLink::greet(RelayClient& client) {
    if (state_ == State::kUp) return client.welcome();
    if (state_ == State::kDown) return client.fail(why_not());
}

// By id, since a visited client may end.
void RelayLink::for_each_client(const std::function<void(RelayClient&)>& visit) {
    std::vector<RelayTable::ClientId> ids;
    for (auto& [id, client] : relay_.clients_) {
        if (client->link().get() == this) ids.push_back(id);
    }
    for (RelayTable::ClientId id : ids) {
        if (RelayClient* client = relay_.client(id)) visit(*client);
    }
}

void RelayLink::dialed(Result<Dialed>& dialed) {
    if (dialed) {
        socket_ = {std::move(dialed->fd), std::move(dialed->tls), relay_.options_.timeout_ms};
        peer_ = dialed->peer;
        version_ = dialed->version;
        in_.clear();
        out_ = {};
        events_ = EPOLLIN;
        heard_ms_ = now_ms();
        std::optional<MasterList> masters = masters_of(dialed->welcome);
        if (masters) hear(*masters);
        if (relay_.loop_->add(socket_.fd.get(), events_, shared_from_this())) {
            state_ = State::kUp;
            if (masters) {
                write_masters_question(out_.bytes);
                (void)flush();
            }
            ++life_;
            members_.connected();
            relay_.counters_.connected.fetch_add(1);
            for_each_client([](RelayClient& client) { client.welcome(); });
            return;
        }
        socket_ = {};
        why_not_ = os_error("epoll");
        (void)dialer_.want();
    } else {
        // Whatever kept it from a master, for a process it is that the master is not there.
        Code code = dialed.error().code == Code::kAuth ? Code::kAuth : Code::kUnavailable;
        why_not_ = Error{code, dialed.error().text};
    }
    state_ = State::kDown;
    for_each_client([&](RelayClient& client) { client.fail(why_not()); });
}

// Which of them is the sender's own says nothing to a process, which has not dialed it.
void RelayLink::hear(const MasterList& list) {
    masters_ = dialer_.as_configured(list);
    for_each_client([this](RelayClient& client) { client.tell_masters(masters_); });
}

// All processes lose their connection with it: the next master may count its epochs anew.
void RelayLink::lost(const Error& why) {
    if (state_ != State::kUp) return;
    state_ = State::kFirst;
    why_not_ = why;
    relay_.counters_.connected.fetch_sub(1);
    relay_.counters_.links_lost_total.fetch_add(1);
    table_.clear();
    waiting_.clear();
    told_.clear();
    refresh_.reset();
    published_epoch_.reset();
    if (file_) file_->withdraw();
    relay_.loop_->remove(socket_.fd.get());
    socket_ = {};
    for_each_client([&](RelayClient& client) { client.fail(why); });
    if (Status status = dialer_.want(); !status) {
        state_ = State::kDown;
        why_not_ = status.error();
    }
}

// Of a MEMBERS question.
static bool takes_file(Reader body) {
    body.number<uint64_t>();
    return body.left() != 0 && (body.number<uint8_t>() & kMembersByFile) != 0;
}

std::optional<Error> RelayLink::ask(const RelayTable::Asked& asked, uint32_t wait_ms, Reader body) {
    if (std::optional<Error> why = table_.refusal(asked.client, body.left())) return why;
    const uint64_t now = now_ms();
    // A client that waits for longer than any setting says is taken at its word up to an hour.
    wait_ms = std::min<uint32_t>(wait_ms, 3600 * 1000);
    uint64_t number = table_.ask(now, asked, body.left(), wait_ms);
    if (asked.kind == Kind::kMembers && file_ && takes_file(body)) {
        waiting_.push_back(number);
        if (!refresh_) refresh();
        return std::nullopt;
    }
    write_relayed(out_.bytes, asked.kind, 0, number, body);
    // A socket that is lost tells the loop so, too; the clients are not ended inside of their own frame.
    (void)flush();
    return std::nullopt;
}

bool RelayLink::flush() {
    if (!out_.flush(socket_)) return false;
    uint32_t events = EPOLLIN | (out_.waiting() != 0 || socket_.unsent() ? EPOLLOUT : 0u);
    if (events != events_) relay_.loop_->watch(socket_.fd.get(), events);
    events_ = events;
    return true;
}

bool RelayLink::on_events(uint32_t events) {
    std::shared_ptr<RelayLink> alive = shared_from_this();
    int fd = socket_.fd.get();
    if ((events & EPOLLOUT) != 0 && !flush()) {
        lost(broken(" is lost"));
    } else if ((events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0 && !read() && state_ == State::kUp) {
        lost(broken(" is lost"));
    }
    return state_ == State::kUp && socket_.fd.get() == fd;
}

// False: the connection is over; where there is a reason to tell, lost() has been called with it.
bool RelayLink::read() {
    const size_t room_min = socket_.tls != nullptr ? kTlsRecordBytes : kRelayKeptMax;
    for (int round = 0; round < kRelayRoundsMax; ++round) {
        std::span<std::byte> room = in_.room(room_min);
        ssize_t n = socket_.receive(room.data(), room.size(), false);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return n < 0 && errno == EAGAIN;
        heard_ms_ = now_ms();
        in_.received(static_cast<size_t>(n));
        while (std::optional<FrameHeader> header = in_.header()) {
            if (unfit(*header, kRelayAnswerMax, "node", "")) {
                lost({Code::kProtocol, peer_ + " does not speak the protocol of a Moonpool master"});
                return false;
            }
            std::optional<Reader> body = in_.body(*header);
            if (!body) break;
            if (!on_frame(*header, *body)) return false;
        }
        // A record is never larger than the room; the socket may hold more of them.
        if (socket_.tls == nullptr && static_cast<size_t>(n) < room.size()) break;
    }
    in_.shrink(1u << 20);
    return true;
}

bool RelayLink::on_frame(const FrameHeader& header, Reader body) {
    if (header.kind == Kind::kError && header.request_id == 0) {
        lost(read_error(body));
        return false;
    }
    if (header.kind == Kind::kMasters) {
        MasterList list;
        if (!list.read(body)) return true;
        dialer_.hear(list);
        hear(list);
        return true;
    }
    if (refresh_ && header.request_id == *refresh_) return on_members(header, body);
    std::optional<RelayTable::Answered> answered = table_.answered(header.request_id);
    if (!answered || (header.kind != Kind::kError && header.kind != answered->kind)) {
        lost({Code::kProtocol, peer_ + " sent an answer that does not fit the question"});
        return false;
    }
    if (!answered->asked) return true;
    if (RelayClient* client = relay_.client(answered->asked->client)) {
        client->answer(header.kind, answered->asked->request_id, body);
    }
    return true;
}

void RelayLink::refresh() {
    relay_.counters_.members_total.fetch_add(1);
    refresh_ = table_.take_number();
    told_ = std::exchange(waiting_, {});
    size_t at = begin_frame(out_.bytes, Kind::kMembers, 0, *refresh_);
    Writer w(out_.bytes);
    members_.write_question(w);
    finish_frame(out_.bytes, at);
    (void)flush();
}

// The answer to the node's own question: into the memory that it shares, and word of it to those that asked.
bool RelayLink::on_members(const FrameHeader& header, Reader body) {
    std::vector<uint64_t> told = std::exchange(told_, {});
    refresh_.reset();
    std::vector<std::byte> word;
    if (header.kind != Kind::kError) {
        Reader head = body;
        auto epoch = head.number<uint64_t>();
        auto flags = head.number<uint8_t>();
        if (header.kind != Kind::kMembers || !members_.read(now_ms(), body)) {
            lost({Code::kProtocol, peer_ + " sent an answer that does not fit the question"});
            return false;
        }
        Version newest = body.left() < sizeof(Version) ? kNoVersion : body.number<Version>();
        flags = static_cast<uint8_t>(flags & kMembersFilling);
        publish(flags, newest);
        Writer w(word);
        w.number(epoch);
        w.number(static_cast<uint8_t>(flags | kMembersInFile));
        w.number(newest);
        body = Reader(word);
    }
    for (uint64_t number : told) {
        std::optional<RelayTable::Answered> answered = table_.answered(number);
        if (!answered || !answered->asked) continue;
        if (RelayClient* client = relay_.client(answered->asked->client)) {
            client->answer(header.kind, answered->asked->request_id, body);
        }
    }
    if (!waiting_.empty()) refresh();
    return true;
}

// Rows that do not fit, or for which there is no memory, leave nothing to read: a process asks by frames
// then.
void RelayLink::publish(uint8_t flags, Version newest) {
    const Members& members = *members_.current();
    const MembersHead head{
        .life = life_, .epoch = members.epoch, .flags = flags, .newest = newest, .heard_ms = now_ms()};
    if (published_epoch_ == members.epoch) {
        (void)file_->publish(head, std::nullopt);
        return;
    }
    std::vector<std::byte> rows;
    Writer w(rows);
    write_member_rows(w, members.rows);
    published_epoch_.reset();
    if (file_->publish(head, rows)) published_epoch_ = members.epoch;
}

void RelayLink::check(uint64_t now_ms) {
    if (state_ != State::kUp) return;
    const auto timeout_ms = static_cast<uint64_t>(relay_.options_.timeout_ms);
    if (std::optional<uint64_t> asked_ms = table_.oldest_ms()) {
        uint64_t since_ms = std::max(*asked_ms, heard_ms_);
        // A process that is patient keeps the connection that brings its answer.
        if (now_ms >= since_ms + timeout_ms && now_ms >= since_ms + table_.longest_wait_ms()) {
            return lost({Code::kTimeout, "the master at " + peer_ + " did not answer in time"});
        }
    }
    for (const RelayTable::Asked& late : table_.expire(now_ms)) {
        relay_.counters_.late_total.fetch_add(1);
        if (RelayClient* client = relay_.client(late.client)) {
            client->refuse({Code::kTimeout, "the master at " + peer_ + " did not answer in time"},
                           late.request_id);
        }
    }
}

// ---- Relay

Result<std::unique_ptr<Relay>> Relay::create(RelayOptions options) {
    std::unique_ptr<Relay> relay(new Relay(std::move(options)));
    EventLoopOptions loop_options;
    loop_options.name = "mp-relay";
    loop_options.tick_ms = kRelayTickMs;
    loop_options.spin_us = kRelaySpinUs;
    loop_options.on_tick = [raw = relay.get()](uint64_t now) { raw->on_tick(now); };
    Result<std::unique_ptr<EventLoop>> loop = EventLoop::create(std::move(loop_options));
    if (!loop) return loop.error();
    relay->loop_ = std::move(*loop);
    return relay;
}

Relay::~Relay() { stop(); }

Status Relay::start() { return loop_->start(); }

// The loop first: only it makes links. What their dialers post afterwards is refused.
void Relay::stop() {
    bool ended = loop_->stop();
    for (auto& [key, link] : links_) link->stop();
    if (!ended) return;  // a child of fork(): all of it is the parent's
    clients_.clear();
    links_.clear();
}

void Relay::adopt(RelayCaller caller) {
    auto shared = std::make_shared<RelayCaller>(std::move(caller));
    loop_->post([this, shared] { take(std::move(*shared)); });
}

void Relay::take(RelayCaller caller) {
    if (options_.tenants != nullptr && !options_.tenants->stands(caller.tenant, caller.access)) return;
    const std::pair key(caller.tenant, caller.range.index);
    auto it = links_.find(key);
    if (it == links_.end()) {
        auto link = std::make_shared<RelayLink>(*this, caller.tenant, caller.range);
        if (Status status = link->open(); !status) {
            std::vector<std::byte> out;
            write_error(out, status.error().code, status.error().text, 0);
            (void)!::send(caller.fd.get(), out.data(), out.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
            return;
        }
        it = links_.emplace(key, std::move(link)).first;
    }
    auto client = std::make_shared<RelayClient>(*this, std::move(caller), next_client_++, it->second);
    if (!loop_->add(client->fd(), EPOLLIN, client)) return;
    clients_.emplace(client->id(), client);
    counters_.connections.fetch_add(1);
    it->second->greet(*client);
}

RelayClient* Relay::client(RelayTable::ClientId id) {
    auto it = clients_.find(id);
    return it == clients_.end() ? nullptr : it->second.get();
}

void Relay::drop(RelayTable::ClientId id) {
    auto it = clients_.find(id);
    if (it == clients_.end()) return;
    std::shared_ptr<RelayClient> client = std::move(it->second);
    clients_.erase(it);
    client->link()->end(id);
    loop_->remove(client->fd());
    counters_.connections.fetch_sub(1);
}

// Processes whose tenant's key is no longer among the node's rows.
void Relay::end_withdrawn() {
    const uint64_t version = options_.tenants == nullptr ? 0 : options_.tenants->version();
    if (std::exchange(tenants_seen_, version) == version) return;
    std::vector<std::shared_ptr<RelayClient>> all;
    for (auto& [id, client] : clients_) all.push_back(client);
    for (const std::shared_ptr<RelayClient>& client : all) {
        if (!options_.tenants->stands(client->tenant(), client->access()))
            client->fail(key_withdrawn(client->tenant()));
    }
}

void Relay::on_tick(uint64_t now_ms) {
    end_withdrawn();
    for (auto& [key, link] : links_) link->check(now_ms);
}

std::vector<std::pair<std::string, uint64_t>> Relay::gauges() const {
    return {{"relay_connections", counters_.connections},
            {"relay_masters_connected", counters_.connected},
            {"relay_questions_total", counters_.questions_total},
            {"relay_late_total", counters_.late_total},
            {"relay_members_total", counters_.members_total},
            {"relay_refused_total", counters_.refused_total},
            {"relay_master_lost_total", counters_.links_lost_total}};
}

}  // namespace moonpool
