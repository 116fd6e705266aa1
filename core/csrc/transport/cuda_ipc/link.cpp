// The initiator's half of CUDA IPC.
//
// Threads: run() on working threads and on those of callers that wait, several at a time; never on an I/O
// thread, since it waits for the card.
//
// Between two calls: an allocation is open here only while the peer lists a region in it, or a copy that
// began then has not ended. A copy is inside the gate, inside its local regions and has the allocation open
// from before it is queued until the card has ended it, also when the job has given up: so the peer frees
// nothing that a card still reaches from here. When the peer has ended by the time its copies have, nothing
// of them counts as done: whether its memory outlives it, the driver does not say.
//
// A job that gave up on a card fails the slices under way: no other path may move them while these copies
// can still end.
//
// One thread at a time asks the peer, in the client's turn. Locks: mutex_ before view_mutex_.
#include "transport/cuda_ipc/link.hpp"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <iterator>
#include <thread>

#include "transport/card_batch.hpp"

namespace moonpool::transport::cuda_ipc {

namespace {

constexpr std::chrono::milliseconds kCollectAgain{10};
constexpr int kAsksMax = 1000;  // for the view in one batch: the peer deregisters faster than we can look

Error gone() { return Error{Code::kUnavailable, "the peer's process is gone"}; }

std::string name_of(const Row& row) {
    std::string name(reinterpret_cast<const char*>(row.card.data()), row.card.size());
    return name.append(reinterpret_cast<const char*>(row.exported.handle.bytes),
                       sizeof(row.exported.handle.bytes));
}

}  // namespace

// A batch's place inside the gate, kept by its copies.
class Link::Inside {
   public:
    // Null: as many copies are under way as a gate has places for.
    static std::shared_ptr<Inside> begin(Link& link, uint64_t generation) {
        std::shared_ptr<std::atomic<uint32_t>> count = link.inside_;
        if (count->fetch_add(1) >= host::kGateSlots) {
            count->fetch_sub(1);
            return nullptr;
        }
        return std::make_shared<Inside>(std::move(count), link.client_.gate(), generation);
    }
    Inside(std::shared_ptr<std::atomic<uint32_t>> count, std::shared_ptr<host::Gate> gate,
           uint64_t generation)
        : count_(std::move(count)), gate_(std::move(gate)), pass_(*gate_, generation) {}
    ~Inside() {
        pass_.leave();
        count_->fetch_sub(1);
    }
    Inside(const Inside&) = delete;
    bool open() const { return pass_.open(); }

   private:
    std::shared_ptr<std::atomic<uint32_t>> count_;
    std::shared_ptr<host::Gate> gate_;
    host::Pass pass_;
};

const Row* Link::View::find(uint64_t address, uint64_t bytes) const {
    auto it = std::ranges::upper_bound(rows, address, {}, &Row::address);
    if (it == rows.begin()) return nullptr;
    --it;
    return it->contains(address, bytes) ? &*it : nullptr;
}

Link::Link(const Context& context, TransportCounters& counters, const PeerInfo& peer)
    : context_(context), counters_(counters), peer_(peer), client_(*context.loops.front()) {}

// A peer that refused once is not asked again: another path goes on. One that stands still is.
Status Link::open(const Job& job) {
    if (session_.load() == Session::kOpen) return success();
    if (session_.load() == Session::kRefused) return refused_;
    Result<host::Client::Turn> turn = client_.turn(host::Patience::of(job));
    if (!turn) return turn.error();
    if (session_.load() == Session::kNone) {
        Status status = turn->open(peer_.cuda_ipc, peer_, context_.identity);
        if (!status) {
            Code code = status.error().code;
            if (code == Code::kTimeout || code == Code::kClosed) return status;
            refused_ = status.error();
        }
        session_.store(status ? Session::kOpen : Session::kRefused);
    }
    return session_.load() == Session::kOpen ? success() : Status(refused_);
}

std::string Link::path() const {
    if (session_.load() != Session::kOpen) return "cuda_ipc";
    return "cuda_ipc (process " + std::to_string(client_.process()) + ")";
}

bool Link::reaches(MemoryKind kind, std::string* why) const {
    std::string text;
    Session session = session_.load();
    if (session == Session::kRefused) {
        text = refused_.text;
    } else if (session == Session::kOpen && !client_.alive()) {
        text = gone().text;
    } else if (kind != MemoryKind::kDevice) {
        text = "CUDA IPC does not reach memory of the kind \"" + kind_name(kind) + "\"";
    } else {
        MutexLock lock(view_mutex_);
        text = unreached_;
    }
    if (why != nullptr) *why = text;
    return text.empty();
}

// The peer changes the generation before memory of a card that it registers can be named to anybody.
bool Link::reaches_nothing() const {
    Session session = session_.load();
    if (session != Session::kOpen) return session == Session::kRefused;
    std::shared_ptr<const View> view = known_view();
    return view != nullptr && !view->has_cards && view->generation == client_.gate()->page().generation;
}

std::shared_ptr<const Link::View> Link::known_view() const {
    MutexLock lock(view_mutex_);
    return view_;
}

Result<std::shared_ptr<const Link::View>> Link::ask_view(const std::shared_ptr<const View>& old,
                                                         const Job& job) {
    Result<host::Client::Turn> turn = client_.turn(host::Patience::of(job));
    if (!turn) return turn.error();
    if (std::shared_ptr<const View> now = known_view(); now != old) return now;  // another thread has asked
    if (Status status = turn->ask(Kind::kCudaRegions, {}); !status) return status.error();
    Reader r(turn->answer());
    auto next = std::make_shared<View>();
    next->generation = r.number<uint64_t>();
    std::optional<std::vector<Row>> rows = decode_rows(r);
    if (!rows) return Error{Code::kProtocol, "the peer sent an unreadable list of its memory of cards"};
    next->rows = std::move(*rows);
    next->has_cards =
        std::ranges::any_of(next->rows, [](const Row& row) { return row.kind == MemoryKind::kDevice; });
    MutexLock lock(mutex_);
    keep_listed(*next);
    MutexLock inner(view_mutex_);
    view_ = next;
    unreached_.clear();
    return std::shared_ptr<const View>(next);
}

// Ids are never used twice, and a region that stays keeps its allocation. Of others the memory may have been
// freed, and the handle may be another allocation's by now.
void Link::keep_listed(const View& view) {
    std::map<std::string, std::set<uint64_t>> listed;
    for (const Row& row : view.rows) {
        if (row.kind == MemoryKind::kDevice && row.why.empty()) listed[name_of(row)].insert(row.id);
    }
    for (auto at = allocations_.begin(); at != allocations_.end();) {
        Allocation& allocation = at->second;
        std::set<uint64_t>& now = listed[at->first];
        if (std::ranges::any_of(allocation.ids, [&](uint64_t id) { return now.contains(id); })) {
            allocation.ids = now;
        } else {
            if (allocation.opened != nullptr) allocation.before = allocation.opened;
            allocation.opened.reset();
            allocation.unseen.reset();
            allocation.ids.clear();
        }
        bool over = allocation.opened == nullptr && allocation.before.expired();
        at = over ? allocations_.erase(at) : std::next(at);
    }
}

Result<std::shared_ptr<Link::Opened>> Link::opened(const Row& row) {
    if (!row.why.empty()) return Error{Code::kUnavailable, row.why};
    MutexLock lock(mutex_);
    Allocation& allocation = allocations_[name_of(row)];
    if (allocation.opened != nullptr) return allocation.opened;
    if (allocation.unseen) return *allocation.unseen;
    if (!allocation.before.expired()) {
        return Error{Code::kUnavailable, "copies of memory that the peer had before have not ended"};
    }
    allocation.ids.insert(row.id);
    return open_memory(row, allocation);
}

Result<std::shared_ptr<Link::Opened>> Link::open_memory(const Row& row, Allocation& allocation) {
    Result<int> ordinal = device::Device::find(row.card);
    if (!ordinal) {
        allocation.unseen = ordinal.error();
        return ordinal.error();
    }
    Result<std::shared_ptr<device::CardCopier>> card = context_.card(*ordinal);
    if (!card) return card.error();
    auto made = std::make_shared<Opened>();
    made->card = *card;
    made->address = row.exported.base;
    if (client_.process() != ::getpid()) {
        Result<device::IpcMemory> memory = device::IpcMemory::open((*card)->device(), row.exported.handle);
        if (!memory) return memory.error();
        made->memory.emplace(std::move(*memory));
        made->address = made->memory->address();
    }
    allocation.opened = made;
    return made;
}

// The peer may wait for copies that a job gave up, and nothing else of this process asks whether they ended.
void Link::collect_later(const std::shared_ptr<device::CardCopier>& card) {
    if (inside_->load() == 0 || collecting_->exchange(true)) return;
    context_.waiters.post(true, [card, collecting = collecting_, &closing = context_.closing] {
        while (card->collect() && !closing) std::this_thread::sleep_for(kCollectAgain);
        collecting->store(false);
    });
}

// One job on its way: a batch at a time, each inside the gate for itself, so that no thread of the peer waits
// long to deregister.
class Link::Carrier {
   public:
    Carrier(Link& link, Job& job) : link_(link), job_(job), tally_(link.counters_) {}

    Status run() {
        if (Status status = link_.open(job_); !status) return status;
        view_ = link_.known_view();
        for (size_t i = 0; i < job_.slices.size(); ++i) {
            if (!job_.is_waiting(i)) continue;
            if (Status status = carry(i); !status) return status;
        }
        if (Status status = flush(); !status) return status;
        if (job_.waiting == 0) return success();
        return unreached_ ? *unreached_ : gone();
    }

   private:
    Status carry(size_t i) {
        const Slice& slice = job_.slices[i];
        Region& local = *job_.locals[i];
        if (!local.contains(slice.local, slice.length)) {
            job_.fail(i, Code::kProtocol, kOutsideText);
            return success();
        }
        for (uint64_t at = 0; at < slice.length;) {
            if (job_.stopped()) return Error{Code::kClosed, "stopped"};
            if (batch_ && batch_->room() == 0) {
                if (Status status = flush(); !status) return status;
                if (!job_.is_waiting(i)) return success();
            }
            // Inside the gate from here on, with a view that is true.
            if (Status status = enter(); !status) return status;
            const Row* row = view_->find(slice.remote + at, slice.length - at);
            if (row == nullptr) {
                // The peer may have registered it since the view was taken: asked for once in a job.
                if (refreshed_) {
                    job_.fail(i, Code::kInvalidArgument,
                              "the range " + range_text(slice) + " lies in no registered region of the peer");
                    return success();
                }
                refreshed_ = true;
                if (Status status = refresh(); !status) return status;
                if (!job_.is_waiting(i)) return success();
                continue;
            }
            if (row->kind != MemoryKind::kDevice) {
                unreached_ = Error{Code::kUnavailable, ""};
                (void)link_.reaches(row->kind, &unreached_->text);
                return success();
            }
            if (row != row_ || remote_ == nullptr) {
                Result<std::shared_ptr<Opened>> opened = link_.opened(*row);
                if (!opened) {
                    unreached_ = opened.error();
                    MutexLock lock(link_.view_mutex_);
                    if (view_ == link_.view_) link_.unreached_ = unreached_->text;
                    return success();
                }
                row_ = row;
                remote_ = *opened;
            }
            const std::shared_ptr<device::CardCopier>& copier = local.on_card() ? local.card : remote_->card;
            if (batch_ && batch_->copier() != copier.get()) {
                if (Status status = flush(); !status) return status;
                if (!job_.is_waiting(i)) return success();
                continue;
            }
            if (Status status = add(i, at, copier); !status) return status;
            if (!job_.is_waiting(i)) return success();
        }
        return success();
    }

    Status add(size_t i, uint64_t& at, const std::shared_ptr<device::CardCopier>& copier) {
        const Slice& slice = job_.slices[i];
        Region& local = *job_.locals[i];
        uint64_t remote = remote_->address + (slice.remote - row_->exported.base);
        // Of a peer in this process; the driver copies no range onto itself.
        if (local.on_card() && slice.local < remote + slice.length && remote < slice.local + slice.length) {
            job_.fail(i, Code::kInvalidArgument,
                      "a range of a card's memory overlaps the one it is copied to");
            return success();
        }
        if (!batch_) {
            batch_.emplace(job_, copier);
            batch_->keep(inside_);
        }
        if (!batch_->hold(local)) {
            job_.fail(i, Code::kInvalidArgument, "the local region was deregistered");
            return success();
        }
        if (kept_ != remote_.get()) {
            batch_->keep(remote_);
            kept_ = remote_.get();
        }
        uint64_t n = std::min(slice.length - at, batch_->room());
        CardBatch::Side here{slice.local + at, local.on_card() || local.pinned}, there{remote + at, true};
        const bool write = slice.direction == Direction::kWrite;
        at += n;
        batch_->add({i, write ? there : here, write ? here : there, n, at == slice.length});
        if (under_way_.empty() || under_way_.back() != i) under_way_.push_back(i);
        return success();
    }

    Status enter() {
        if (inside_ != nullptr) return success();
        row_ = nullptr;
        remote_.reset();
        for (int round = 0; round < kAsksMax; ++round) {
            if (!link_.client_.alive()) return gone();
            if (view_ != nullptr) {
                inside_ = Inside::begin(link_, view_->generation);
                if (inside_ == nullptr) {
                    return Error{Code::kUnavailable, "too many copies of the peer's memory are under way"};
                }
                if (inside_->open()) return success();
                inside_.reset();
            }
            Result<std::shared_ptr<const View>> view = link_.ask_view(view_, job_);
            if (!view) return view.error();
            view_ = *view;
        }
        return Error{Code::kUnavailable, "the peer's regions change too fast"};
    }

    Status refresh() {
        if (Status status = flush(); !status) return status;
        Result<std::shared_ptr<const View>> view = link_.ask_view(view_, job_);
        if (!view) return view.error();
        view_ = *view;
        return success();
    }

    // Waits for the copies that have gathered, and leaves the gate.
    Status flush() {
        Status status = success();
        std::shared_ptr<device::CardCopier> card;  // that may be at work longer
        if (batch_) {
            status = batch_->run(tally_, [&] { return link_.client_.alive_now() ? success() : gone(); });
            if (!status) {
                Region& local = *job_.locals[under_way_.front()];
                card = local.on_card() ? local.card : remote_->card;
            }
            if (!status && status.error().code == Code::kTimeout) {
                for (size_t i : under_way_) {
                    if (job_.is_waiting(i)) job_.fail(i, Code::kTimeout, status.error().text);
                }
            }
        }
        batch_.reset();
        inside_.reset();
        under_way_.clear();
        kept_ = nullptr;
        row_ = nullptr;
        remote_.reset();
        if (card != nullptr) link_.collect_later(card);
        return status;
    }

    Link& link_;
    Job& job_;
    Tally tally_;
    std::shared_ptr<const View> view_;
    std::shared_ptr<Inside> inside_;
    std::optional<CardBatch> batch_;
    std::vector<size_t> under_way_;  // slices in the batch
    const Row* row_ = nullptr;       // of view_, with its allocation
    std::shared_ptr<Opened> remote_;
    const Opened* kept_ = nullptr;  // by the batch
    bool refreshed_ = false;
    std::optional<Error> unreached_;  // of a slice that waits for another path
};

Status Link::run(Job& job) { return Carrier(*this, job).run(); }

}  // namespace moonpool::transport::cuda_ipc
