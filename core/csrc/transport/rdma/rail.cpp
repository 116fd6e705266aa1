#include "transport/rdma/rail.hpp"

#include <sys/epoll.h>

#include <algorithm>
#include <cstring>

namespace moonpool::transport::rdma {

namespace {

// What the descriptor of a rail's completions tells, on an I/O thread.
class CompletionEvents final : public EventHandler {
   public:
    CompletionEvents(std::shared_ptr<Completions> completions, std::shared_ptr<EventHandler> watcher)
        : completions_(std::move(completions)), watcher_(std::move(watcher)) {}

    bool on_events(uint32_t events) override {
        completions_->take_events();
        return watcher_->on_events(events);
    }
    bool on_tick(uint64_t now) override { return watcher_->on_tick(now); }

   private:
    const std::shared_ptr<Completions> completions_;
    const std::shared_ptr<EventHandler> watcher_;
};

}  // namespace

std::string Rail::path() const {
    MutexLock lock(route_mutex_);
    return port_->name + " " + route_here_.text() + " to " + peer_.name + " " + route_there_.text();
}

std::string Rail::remarks() const {
    MutexLock lock(route_mutex_);
    const std::string rejected = port_->facts().rejected;
    return rejected + (not_by_.empty() || rejected.empty() ? "" : "; ") + not_by_;
}

// By one GID of the port after the other: which of them leads to the peer its answer shows, and the kernel,
// which looks for the way. The one that did last time comes first.
Status Rail::connect(const Ask& ask) {
    if (Status made = make_completions(); !made) return made;
    PortAddress last;
    {
        MutexLock lock(route_mutex_);
        last = route_here_;
    }
    std::vector<GidEntry> gids = port_->facts().gids_toward(peer_.gids);
    if (!no_route_yet_)
        std::ranges::stable_partition(gids, [&](const auto& own) { return own.gid == last.gid; });
    std::string not_by;
    Error error{Code::kUnavailable, ""};
    for (const GidEntry& own : gids) {
        Way way;
        Result<std::unique_ptr<QueuePair>> pair = connect_by(own, ask, way);
        if (pair) {
            coming_ = std::move(*pair);
            no_route_yet_ = false;
            MutexLock lock(route_mutex_);
            route_here_ = (*coming_).endpoint().port;
            route_there_ = way.there;
            not_by_ = std::move(not_by);
            return success();
        }
        error = pair.error();
        if (!way.may_be_another) return error;
        not_by += (not_by.empty() ? "" : "; ") + error.text;
    }
    MutexLock lock(route_mutex_);
    not_by_.clear();  // the link has them
    return Error{error.code, std::move(not_by)};
}

Result<std::unique_ptr<QueuePair>> Rail::connect_by(const GidEntry& own_gid, const Ask& ask, Way& way) {
    Result<std::unique_ptr<QueuePair>> pair = QueuePair::create(port_, completions_);
    if (!pair) return pair.error();
    (*pair)->use(own_gid);
    std::vector<std::byte> own;
    Writer w(own);
    encode(w, (*pair)->endpoint());
    Result<std::vector<std::byte>> answer = ask(own);
    if (!answer) {
        way.may_be_another = answer.error().code == Code::kUnavailable;
        return Error{Code::kUnavailable, "no queue pair of the peer: " + answer.error().text};
    }
    Reader r(*answer);
    Endpoint peer = decode_endpoint(r);
    if (!r.ok()) return Error{Code::kProtocol, "the peer sent an unreadable answer about its queue pair"};
    way.there = peer.port;
    way.may_be_another = true;
    if (Status made = (*pair)->connect(peer, true); !made) return made.error();
    return pair;
}

Status Rail::make_completions() {
    const std::shared_ptr<Device>& device = port_->device;
    if (scratch_ == nullptr) {
        auto scratch = std::make_unique<Scratch>();
        scratch->device = device;
        scratch->mr =
            device->verbs.reg_mr(device->pd, scratch->bytes.data(), scratch->bytes.size(), ib::kLocalWrite);
        if (scratch->mr == nullptr) {
            return Error{Code::kUnavailable, device->name + " takes no memory: " + verb_error_text(errno)};
        }
        scratch_ = std::move(scratch);
    }
    if (completions_ != nullptr) return success();
    // Of a queue pair that fails each request completes, also those that were not signalled.
    Result<std::shared_ptr<Completions>> made =
        Completions::create(device, static_cast<int>(kSendRequests) + 64, true);
    if (!made) return made.error();
    completions_ = std::move(*made);
    return success();
}

void Rail::begin_connected() {
    std::array<ib::Wc, 16> old;  // not every NIC takes back what a queue pair left
    while (completions_->poll(old) > 0) {
    }
    pair_ = std::move(coming_);
    ++life_;
    requests_ = 0;
}

void Rail::tell(std::shared_ptr<EventHandler> watcher) {
    auto events = std::make_shared<CompletionEvents>(completions_, std::move(watcher));
    loop_.post([&loop = loop_, events, fd = completions_->fd()] { loop.add(fd, EPOLLIN, events); });
}

bool Rail::has_room() const {
    return state == State::kUp && adding_.pieces.size() < kPiecesMax && adding_.bytes < batch_bytes() &&
           bytes_open_ + adding_.bytes < window_bytes_ &&
           requests_open_ + adding_.pieces.size() + 2 <= pair_->requests_max();
}

// A batch completes as one, and nothing is heard of the rail until then: what takes long is never so large
// that a slow rail cannot be told from a silent one.
uint64_t Rail::batch_bytes() const {
    double bytes = std::min(bytes_per_ns_ * kBatchNs, static_cast<double>(kBatchBytes));
    return std::max(static_cast<uint64_t>(bytes) / kMeasuredBytes, uint64_t{1}) * kMeasuredBytes;
}

void Rail::add(const Piece& piece, bool write, const Place& local, const Place& remote) {
    if (adding_.pieces.empty() && !spare_.empty()) {
        adding_ = std::move(spare_.back());
        spare_.pop_back();
        adding_.bytes = 0;
        adding_.writes = false;
    }
    size_t i = adding_.pieces.size();
    sges_[i] = {local.address, static_cast<uint32_t>(piece.bytes), static_cast<uint32_t>(local.key)};
    ib::SendWr& wr = wrs_[i];
    wr = {};
    wr.sg_list = &sges_[i];
    wr.num_sge = 1;
    wr.opcode = write ? ib::kWrite : ib::kRead;
    if (write && piece.bytes <= pair_->inline_bytes() && !local.on_card) wr.send_flags = ib::kInline;
    wr.wr.rdma = {remote.address, static_cast<uint32_t>(remote.key)};
    adding_.pieces.push_back(piece);
    adding_.bytes += piece.bytes;
    if (write) {
        adding_.writes = true;
        last_write_ = remote;
    }
}

Status Rail::post(uint64_t now) {
    size_t n = adding_.pieces.size();
    if (n == 0) return success();
    if (adding_.writes) {
        sges_[n] = {reinterpret_cast<uint64_t>(scratch_->bytes.data()), 1, scratch_->mr->lkey};
        wrs_[n] = {};
        wrs_[n].sg_list = &sges_[n];
        wrs_[n].num_sge = 1;
        wrs_[n].opcode = ib::kRead;
        wrs_[n].wr.rdma = {last_write_.address, static_cast<uint32_t>(last_write_.key)};
        ++n;
    }
    for (size_t i = 0; i < n; ++i) {
        wrs_[i].wr_id = wr_id(requests_ + i);
        wrs_[i].next = i + 1 < n ? &wrs_[i + 1] : nullptr;
    }
    wrs_[n - 1].send_flags |= ib::kSignaled;
    adding_.first = requests_;
    adding_.last = requests_ + n - 1;
    adding_.posted_ns = now;
    if (batches_.empty()) progress_ns_ = now;
    requests_ += n;
    requests_open_ += n;
    bytes_open_ += adding_.bytes;
    batches_.push_back(std::move(adding_));
    adding_ = {};
    ib::SendWr* bad = nullptr;
    int code = pair_->post(wrs_.data(), &bad);
    if (code == 0) return success();
    return Error{Code::kUnavailable, port_->name + " takes no request: " + std::strerror(code)};
}

void Rail::complete(const Batch& batch, uint64_t now) {
    note_completed(batch.bytes, batch.posted_ns, now);
    requests_open_ -= batch.last - batch.first + 1;
}

Rail::Fault Rail::fault(const ib::Wc& wc) const {
    Fault fault{port_->device->verbs.wc_status_str(wc.status) + (" (" + std::to_string(wc.status) + ")")};
    if (wc.status == ib::kRemoteAccess) fault.of = Fault::Of::kPeerMemory;
    if (wc.status <= ib::kLocalProtection) fault.of = Fault::Of::kOwnMemory;
    uint64_t request = wc.wr_id & ((uint64_t{1} << 40) - 1);
    if (!batches_.empty() && batches_.front().first <= request) {
        const Batch& batch = batches_.front();
        fault.piece = batch.pieces[std::min<size_t>(request - batch.first, batch.pieces.size() - 1)];
    }
    return fault;
}

std::optional<Rail::Fault> Rail::poll(uint64_t (*clock_ns)(), const Done& done) {
    std::array<ib::Wc, 16> found;
    for (uint64_t now = 0;;) {
        int n = completions_->poll(found);
        if (n < 0) return Fault{"the completion queue failed"};
        if (n == 0) return std::nullopt;
        if (now == 0) now = clock_ns();  // of one look
        for (int i = 0; i < n; ++i) {
            const ib::Wc& wc = found[static_cast<size_t>(i)];
            if (wc.wr_id >> 40 != life_) continue;
            uint64_t request = wc.wr_id & ((uint64_t{1} << 40) - 1);
            // In order: a completion answers for all before it.
            while (!batches_.empty() && (batches_.front().last < request ||
                                         (batches_.front().last == request && wc.status == 0))) {
                Batch batch = std::move(batches_.front());
                batches_.pop_front();
                complete(batch, now);
                done(batch.pieces);
                batch.pieces.clear();
                if (spare_.size() < 8) spare_.push_back(std::move(batch));
            }
            if (wc.status != 0) return fault(wc);
        }
        if (n < static_cast<int>(found.size())) return std::nullopt;
    }
}

std::vector<Piece> Rail::stop(bool& writes) {
    pair_.reset();
    std::vector<Piece> open;
    writes = false;
    batches_.push_back(std::move(adding_));
    adding_ = {};
    for (const Batch& batch : batches_) {
        open.insert(open.end(), batch.pieces.begin(), batch.pieces.end());
        writes = writes || batch.writes;
    }
    batches_.clear();
    bytes_open_ = requests_open_ = 0;
    return open;
}

}  // namespace moonpool::transport::rdma
