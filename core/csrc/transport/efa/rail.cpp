#include "transport/efa/rail.hpp"

#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <string_view>
#include <utility>

#include "base/clock.hpp"
#include "transport/efa/messages.hpp"

namespace moonpool::transport::efa {

namespace {

constexpr size_t kRequestsMax = 256;         // of one rail, posted or waiting
constexpr uint64_t kRefusedNs = 50'000'000;  // so long a connected endpoint takes nothing
constexpr uint64_t kDrainNs = 100'000'000;

}  // namespace

std::string Rail::path() const {
    return domain_->info()->fabric_attr->provider + (" " + domain_->device_name()) + " to " + peer_name_;
}

Status Rail::connect(const Ask& ask) {
    Result<std::unique_ptr<Endpoint>> made = Endpoint::create(domain_, 2 * kRequestsMax);
    if (!made) return made.error();
    Result<std::vector<std::byte>> own = (*made)->address();
    if (!own) return own.error();
    Result<std::vector<std::byte>> answer = ask(encode_endpoint({false, std::move(*own)}));
    if (!answer) return Error{Code::kUnavailable, "no endpoint of the peer: " + answer.error().text};
    std::optional<PeerEndpoint> peer = decode_endpoint(Reader(*answer));
    if (!peer) return Error{Code::kProtocol, "the peer sent an unreadable answer about its endpoint"};
    if (Status added = (*made)->add_peer(peer->address); !added) return added;
    coming_ = {std::move(*made), peer->by_address};
    return success();
}

void Rail::begin_connected() {
    connection_ = std::move(coming_);
    carried_ = false;
}

bool Rail::has_room() const {
    return state == State::kUp && bytes_open_ < window_bytes_ &&
           posted_.size() + waiting_.size() < kRequestsMax;
}

void Rail::add(const Piece& piece, bool write, const Place& local, const Place& remote) {
    if (spare_.empty()) spare_.emplace_back().self = spare_.begin();
    Request& request = spare_.front();
    request.self = spare_.begin();
    request.piece = piece;
    request.write = write;
    request.local = local;
    request.remote = remote;
    bytes_open_ += piece.bytes;
    waiting_.splice(waiting_.end(), spare_, request.self);
}

Status Rail::post(uint64_t now) {
    if (std::exchange(idle_, !busy())) progress_ns_ = now;  // from here on it may be silent
    while (!waiting_.empty()) {
        Request& request = waiting_.front();
        ssize_t code = post(request);
        if (code == -EAGAIN) break;  // full, or not connected yet: again at the next poll()
        if (code != 0) {             // the next poll() says so
            why_stuck_ = name() + " takes no request: " + domain_->library().text(code);
            break;
        }
        request.posted_ns = now;
        posted_.splice(posted_.end(), waiting_, request.self);
    }
    return success();
}

ssize_t Rail::post(Request& request) {
    iovec local{reinterpret_cast<void*>(request.local.address), request.piece.bytes};
    auto* descriptor = reinterpret_cast<void*>(request.local.key);
    fi::RmaIov remote{connection_.by_address ? request.remote.address : request.remote.offset,
                      request.piece.bytes, request.remote.key};
    fi::RmaMessage message{};
    message.local = &local;
    message.descriptors = &descriptor;
    message.locals = 1;
    message.peer = connection_.endpoint->peer();
    message.remote = &remote;
    message.remotes = 1;
    message.context = &request;
    return request.write ? connection_.endpoint->write(message) : connection_.endpoint->read(message);
}

// What fails of an endpoint that has carried something before was rather refused by the peer than lost: the
// peer ends it also when it takes back memory.
Rail::Fault Rail::fault(std::string why) {
    Fault fault{std::move(why)};
    if (!posted_.empty()) {
        fault.piece = posted_.front().piece;
    } else if (!waiting_.empty()) {
        fault.piece = waiting_.front().piece;
    }
    if (carried_ && fault.piece) fault.of = Fault::Of::kPeerMemory;
    return fault;
}

std::optional<Rail::Fault> Rail::poll(uint64_t (*clock_ns)(), const Done& done) {
    std::array<fi::CqEntry, 16> entries;
    uint64_t now = 0;
    for (;;) {
        ssize_t n = connection_.endpoint->take_completions(entries);
        if (n == -EAGAIN || n == 0) break;
        if (n == -fi::kErrorAvailable) return fault(connection_.endpoint->error());
        if (n < 0) return fault("a completion queue failed: " + domain_->library().text(n));
        if (now == 0) now = clock_ns();  // of one look
        for (ssize_t i = 0; i < n; ++i) {
            auto* request = static_cast<Request*>(entries[static_cast<size_t>(i)].context);
            spare_.splice(spare_.begin(), posted_, request->self);
            note_completed(request->piece.bytes, request->posted_ns, now);
            carried_ = true;
            done({&request->piece, 1});
        }
    }
    if (now == 0) now = clock_ns();
    if (why_stuck_.empty()) (void)post(now);
    if (!why_stuck_.empty()) return fault(why_stuck_);
    // A connected endpoint takes requests while none is under way, unless the peer has ended its own: then
    // the provider connects for ever.
    if (!carried_ || waiting_.empty() || !posted_.empty()) {
        refused_since_ns_ = now;
    } else if (now > refused_since_ns_ + kRefusedNs) {
        return fault("the peer has ended its endpoint");
    }
    return std::nullopt;
}

// libfabric 1.17 ends the process when an endpoint of its provider ofi_rxm is closed while a request has not
// left it: its tcp provider reports such a request without the context that ofi_rxm looks at. What is under
// way to a peer that lives is over within moments.
void Rail::drain() {
    const std::string_view provider = domain_->info()->fabric_attr->provider;
    if (provider.find("ofi_rxm") == std::string_view::npos) return;
    std::array<fi::CqEntry, 16> entries;
    size_t left = posted_.size();
    for (const uint64_t end = now_ns() + kDrainNs; left != 0 && now_ns() < end;) {
        ssize_t n = connection_.endpoint->take_completions(entries);
        if (n == -EAGAIN || n == 0) {
            ::sched_yield();
        } else if (n > 0) {
            left -= std::min(left, static_cast<size_t>(n));
        } else if (n == -fi::kErrorAvailable) {
            (void)connection_.endpoint->error();
            --left;
        } else {
            return;
        }
    }
}

std::vector<Piece> Rail::stop(bool& writes) {
    drain();
    connection_.endpoint.reset();
    std::vector<Piece> open;
    writes = std::ranges::any_of(posted_, &Request::write);
    for (Requests* requests : {&posted_, &waiting_}) {
        for (const Request& request : *requests) open.push_back(request.piece);
        spare_.splice(spare_.end(), *requests);
    }
    bytes_open_ = 0;
    why_stuck_.clear();
    idle_ = true;
    return open;
}

}  // namespace moonpool::transport::efa
