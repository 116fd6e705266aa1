#include "transport/rdma/rail.hpp"

#include <algorithm>
#include <cstring>

#include "base/clock.hpp"

namespace moonpool::transport::rdma {

Result<std::unique_ptr<QueuePair>> Rail::make_pair() {
    const std::shared_ptr<Device>& device = port->device;
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
    if (completions_ == nullptr) {
        // Of a queue pair that fails each request completes, also those that were not signalled.
        Result<std::shared_ptr<Completions>> made =
            Completions::create(device, static_cast<int>(kSendRequests) + 64, true);
        if (!made) return made.error();
        completions_ = std::move(*made);
    }
    return QueuePair::create(port, completions_);
}

void Rail::begin(std::unique_ptr<QueuePair> pair, uint64_t now) {
    std::array<ib::Wc, 16> old;  // not every NIC takes back what a queue pair left
    while (completions_->poll(old) > 0) {
    }
    pair_ = std::move(pair);
    ++life_;
    requests_ = 0;
    good_since_ns = progress_ns_ = now;
    state = State::kUp;
}

bool Rail::has_room() const {
    return state == State::kUp && adding_.pieces.size() < kPiecesMax && adding_.bytes < kBatchBytes &&
           bytes_open_ + adding_.bytes < window_bytes_ &&
           requests_open_ + adding_.pieces.size() + 2 <= pair_->requests_max();
}

void Rail::add(const Piece& piece, bool write, const Place& local, const Place& remote) {
    if (adding_.pieces.empty() && !spare_.empty()) {
        adding_ = std::move(spare_.back());
        spare_.pop_back();
        adding_.bytes = 0;
        adding_.writes = false;
    }
    size_t i = adding_.pieces.size();
    sges_[i] = {local.address, static_cast<uint32_t>(piece.bytes), local.key};
    ib::SendWr& wr = wrs_[i];
    wr = {};
    wr.sg_list = &sges_[i];
    wr.num_sge = 1;
    wr.opcode = write ? ib::kWrite : ib::kRead;
    if (write && piece.bytes <= pair_->inline_bytes()) wr.send_flags = ib::kInline;
    wr.wr.rdma = {remote.address, remote.key};
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
        wrs_[n].wr.rdma = {last_write_.address, last_write_.key};
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
    return Error{Code::kUnavailable, port->name + " takes no request: " + std::strerror(code)};
}

void Rail::complete(Batch& batch, uint64_t now) {
    if (batch.bytes >= kMeasuredBytes) {
        uint64_t since = std::max(batch.posted_ns, progress_ns_);
        double rate =
            static_cast<double>(batch.bytes) / static_cast<double>(std::max<uint64_t>(now - since, 1000));
        bytes_per_ns_ = bytes_per_ns_ <= 0 ? rate : 0.8 * bytes_per_ns_ + 0.2 * rate;
    }
    progress_ns_ = now;
    bytes_open_ -= batch.bytes;
    requests_open_ -= batch.last - batch.first + 1;
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
