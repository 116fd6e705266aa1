// Rail: one port here and one of the peer, with the queue pair between them. It posts pieces of slices in
// batches, by one call each:
//
//     write, write, read, ..., read of one byte          <- only the last one is signalled
//
// A reliable connection works in order, and a read answers for what the NIC wrote before it also where writes
// pass each other on their way to memory. So one completion says that all of a batch is there: none of it
// counts before. A batch without writes ends with its own last read.
//
// Not thread-safe: its link has the lock.
#pragma once

#include <array>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "base/mutex.hpp"
#include "transport/rdma/messages.hpp"
#include "transport/rdma/queue_pair.hpp"

namespace moonpool::transport::rdma {

struct Task;

// Bytes of a slice that are on their way.
struct Piece {
    Task* task = nullptr;
    size_t slice = 0;
    uint64_t at = 0, bytes = 0;
};

class Rail {
   public:
    enum class State : uint8_t { kDown, kConnecting, kUp, kEnding };

    Rail(std::shared_ptr<Port> port, uint8_t peer_port, const OfferedPort& peer, uint32_t number,
         uint64_t window_bytes)
        : port(std::move(port)),
          peer_port(peer_port),
          peer(peer),
          number(number),
          window_bytes_(window_bytes) {}

    const std::shared_ptr<Port> port;
    const uint8_t peer_port;  // in the peer's offer
    const OfferedPort peer;
    const uint32_t number;

    State state = State::kDown;
    std::string why = "it was not used yet";  // it is down
    int faults = 0;                           // of the path, until it has been good for a while
    uint64_t retry_ns = 0;                    // not before
    uint64_t good_since_ns = 0;
    std::vector<Piece> fenced;  // writes that may still land until the peer has ended the queue pair

    // What one side of a request is.
    struct Place {
        uint64_t address;
        uint32_t key;
    };

    // A queue pair for the peer to connect to; begin() takes it when both sides have.
    Result<std::unique_ptr<QueuePair>> make_pair();
    void begin(std::unique_ptr<QueuePair> pair, uint64_t now);

    bool has_room() const;
    void add(const Piece& piece, bool write, const Place& local, const Place& remote);
    // Posts what was added. An error: nothing more of it works, and all must be taken out by stop().
    Status post(uint64_t now);

    struct Fault {
        int status;
        std::optional<Piece> piece;  // the first that failed
        bool write = false;
    };
    // Hands over the pieces of batches that are complete; done() runs under the link's lock, as all of this.
    template <class Done>
    std::optional<Fault> poll(uint64_t now, Done done) NO_THREAD_SAFETY_ANALYSIS;

    // Ends the queue pair: this NIC touches no memory for it any more. -> what was under way, and whether
    // some of it are writes, which may still arrive.
    std::vector<Piece> stop(bool& writes);

    bool busy() const { return !batches_.empty(); }
    uint64_t bytes_open() const { return bytes_open_; }
    double bytes_per_ns() const { return bytes_per_ns_; }
    uint64_t progress_ns() const { return progress_ns_; }
    // How long the next batch should take, as measured.
    uint64_t expected_ns() const {
        if (bytes_per_ns_ <= 0 || batches_.empty()) return 0;
        return static_cast<uint64_t>(static_cast<double>(batches_.front().bytes) / bytes_per_ns_);
    }
    const std::shared_ptr<Completions>& completions() const { return completions_; }

   private:
    static constexpr size_t kPiecesMax = 64;  // of one batch
    static constexpr uint64_t kBatchBytes = 1u << 20;
    static constexpr uint64_t kMeasuredBytes = 64u
                                               << 10;  // of a smaller batch the time says nothing of the rate

    struct Batch {
        std::vector<Piece> pieces;
        bool writes = false;
        uint64_t bytes = 0;
        uint64_t posted_ns = 0;
        uint64_t first = 0, last = 0;  // numbers of its requests
    };

    uint64_t wr_id(uint64_t request) const { return uint64_t{life_} << 40 | request; }
    void complete(Batch& batch, uint64_t now);

    const uint64_t window_bytes_;
    std::shared_ptr<Completions> completions_;
    // Where the read of one byte goes.
    struct Scratch {
        std::array<std::byte, 64> bytes{};
        ib::Mr* mr = nullptr;
        std::shared_ptr<Device> device;
        ~Scratch() {
            if (mr != nullptr) (void)device->verbs.dereg_mr(mr);
        }
    };
    std::unique_ptr<Scratch> scratch_;
    std::unique_ptr<QueuePair> pair_;
    uint32_t life_ = 0;      // of the queue pair: completions of one before are ignored
    uint64_t requests_ = 0;  // of this life
    std::deque<Batch> batches_;
    std::vector<Batch> spare_;
    Batch adding_;
    std::array<ib::SendWr, kPiecesMax + 1> wrs_;
    std::array<ib::Sge, kPiecesMax + 1> sges_;
    Place last_write_{};
    uint64_t bytes_open_ = 0, requests_open_ = 0;
    uint64_t progress_ns_ = 0;
    double bytes_per_ns_ = 0;
};

template <class Done>
std::optional<Rail::Fault> Rail::poll(uint64_t now, Done done) {
    if (completions_ == nullptr) return std::nullopt;
    std::array<ib::Wc, 16> found;
    for (;;) {
        int n = completions_->poll(found);
        if (n < 0) return Fault{ib::kLocalOperation, std::nullopt};
        for (int i = 0; i < n; ++i) {
            const ib::Wc& wc = found[static_cast<size_t>(i)];
            if (wc.wr_id >> 40 != life_ || pair_ == nullptr) continue;
            uint64_t request = wc.wr_id & ((uint64_t{1} << 40) - 1);
            // In order: a completion answers for all before it.
            while (!batches_.empty() && (batches_.front().last < request ||
                                         (batches_.front().last == request && wc.status == 0))) {
                Batch batch = std::move(batches_.front());
                batches_.pop_front();
                complete(batch, now);
                done(std::span<const Piece>(batch.pieces));
                batch.pieces.clear();
                if (spare_.size() < 8) spare_.push_back(std::move(batch));
            }
            if (wc.status == 0) continue;
            Fault fault{wc.status, std::nullopt};
            if (!batches_.empty() && batches_.front().first <= request) {
                const Batch& batch = batches_.front();
                size_t index = std::min<size_t>(request - batch.first, batch.pieces.size() - 1);
                fault.piece = batch.pieces[index];
            }
            return fault;
        }
        if (n < static_cast<int>(found.size())) return std::nullopt;
    }
}

}  // namespace moonpool::transport::rdma
