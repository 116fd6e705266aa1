// A peer by NICs, which read and write the memory of both sides: neither process copies a byte. RDMA and
// libfabric's reliable datagrams are two kinds of such; each has rails of its own.
//
//   jobs --> tasks --> pieces, cut at 256 KiB and where keys end --> rails --> NIC
//                         ^ again, when a rail fails                  |
//   done <-- all pieces of a slice <---------------- completions <----'
//
// Rails pull pieces as they complete others, so that each carries what it is fast enough for. Those that are
// near the piece's memory come first, as long as they keep up. Any thread drives all of it, under one lock: a
// caller of run() while it waits, else the I/O thread that the completions wake. What waits for the peer or
// for the kernel (connecting, asking for keys, ending a connection at the peer) is done by one helper at a
// time, on a thread for such.
//
// A task ends only when none of its pieces is under way. A rail that fails loses its connection at once,
// after which its NIC touches no local memory; writes that it had sent may still arrive, so they are
// repeated, here or over another path, only when the peer has ended its side, too. A task whose deadline
// passes before that fails, and is not settled.
//
// link.cpp drives; link_rails.cpp chooses rails, link_pieces.cpp keeps the books of slices, link_help.cpp
// asks the peer.
#pragma once

#include <chrono>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/clock.hpp"
#include "base/event_loop.hpp"
#include "base/mutex.hpp"
#include "transport/link.hpp"
#include "transport/nic/links.hpp"
#include "transport/nic/messages.hpp"
#include "transport/nic/rail.hpp"
#include "transport/transport.hpp"

namespace moonpool::transport::nic {

// A job that the link carries.
struct Task {
    struct Range {
        size_t slice = 0;
        uint64_t at = 0, bytes = 0;
    };
    // First in, first out. It mostly has one, for which nothing is allocated.
    class Ranges {
       public:
        bool empty() const { return !has_one_ && rows_.empty(); }
        Range& front() { return has_one_ ? one_ : rows_[first_]; }
        void push_back(const Range& range) {
            if (empty()) {
                one_ = range;
                has_one_ = true;
            } else {
                rows_.push_back(range);
            }
        }
        void pop_front() {
            if (std::exchange(has_one_, false) || ++first_ < rows_.size()) return;
            rows_.clear();
            first_ = 0;
        }
        uint64_t bytes() const {
            uint64_t sum = has_one_ ? one_.bytes : 0;
            for (size_t i = first_; i < rows_.size(); ++i) sum += rows_[i].bytes;
            return sum;
        }

       private:
        Range one_;  // before the rows
        bool has_one_ = false;
        std::vector<Range> rows_;  // empty, or some from first_ on
        size_t first_ = 0;
    };

    Task(Job& j, std::shared_ptr<Job> kept, transport::Link::Finished f)
        : job(j),
          owned(std::move(kept)),
          finished(std::move(f)),
          held(owned == nullptr ? nullptr : j.regions) {}

    Job& job;
    const std::shared_ptr<Job> owned;  // null: of a caller that waits
    const transport::Link::Finished finished;
    Operation held;                   // the local regions, which the job of a caller that waits keeps
    size_t next = 0;                  // slices from here on were not begun
    Ranges again;                     // before those
    std::vector<Range> unknown;       // in memory of the peer whose keys are not known here
    std::vector<Range> keyless;       // whose memory gets its keys at this moment
    size_t open = 0;                  // pieces under way, or behind a fence
    std::map<size_t, uint64_t> rest;  // of slices that were cut: bytes that are not done
    // Of the last piece's region; and of those before.
    std::pair<const Region*, std::shared_ptr<KeyedRegion>> keyed_last;
    std::unordered_map<const Region*, std::shared_ptr<KeyedRegion>> keyed_others;
    int faults = 0;                 // rails that failed meanwhile
    std::map<size_t, int> refused;  // by a NIC, though the peer lists the memory
    Error left_undone{Code::kUnavailable, "left undone"};
    bool over = false;
    Status status = success();
};

// What is the transport's, of all of its links.
struct LinkOptions {
    const char* transport = "";  // in the registry and on the wire
    KeySize key_size = KeySize::k64;
    NicOptions nic;
    std::shared_ptr<Links> links;
    // Why the NICs here have no keys for memory of cards; empty: they may have.
    std::string no_card_keys = "it has no keys for memory of cards";
};

class Link final : public transport::Link, public std::enable_shared_from_this<Link> {
   public:
    // rails: one at least.
    Link(const Context& context, const LinkOptions& options, TransportCounters& counters,
         std::shared_ptr<Keys> keys, std::vector<std::unique_ptr<Rail>> rails,
         std::shared_ptr<Control> control, int timeout_ms);
    ~Link() override;

    std::string path() const override;
    std::string remarks() const override;
    std::vector<RailReport> rails() const override;
    bool reaches(MemoryKind kind, std::string* why) const override;
    bool reaches_nothing() const override;
    bool takes_slots() const override { return false; }  // NICs have keys for regions only
    bool copies_by_card() const override { return options_.no_card_keys.empty(); }
    bool runs_on_caller(const Job&) const override { return false; }  // it waits for a NIC
    Status run(Job& job) override;
    bool post(const std::shared_ptr<Job>& job, const Finished& finished) override;
    bool settled() const override;
    bool settle(int timeout_ms) override;
    void close() override;

    // Of its connections on a device the one that is idle for longest: since when, by the NICs' clock,
    // UINT64_MAX: none is idle; and its end. False: none was idle any more.
    uint64_t idle_since(size_t device) const;
    bool end_idle(size_t device);

   private:
    class Watcher;
    std::shared_ptr<EventHandler> make_watcher();
    using Ended = std::vector<std::unique_ptr<Task>>;

    // Rails tell of completions, and nothing tells of time.
    static constexpr std::chrono::milliseconds kSleep{50};
    static constexpr int kFaultsMax = 3;      // of rails, in one task without another path
    static uint64_t back_off_ns(int faults);  // before a rail is tried again

    uint64_t clock() const { return options_.nic.clock_ns(); }
    uint64_t silence_ns() const { return static_cast<uint64_t>(options_.nic.silence_ms) * 1'000'000; }

    void add_task(std::unique_ptr<Task> task) REQUIRES(mutex_);
    // Carries all tasks on, without waiting. Whether something has completed.
    // wall_ns: now_ns(), read under the lock. look: at rails, too, that have nothing under way.
    bool drive(uint64_t wall_ns, bool look = true) REQUIRES(mutex_);
    bool drive() REQUIRES(mutex_) { return drive(now_ns()); }
    void drive_armed() REQUIRES(mutex_);
    // Before the lock is left: tells owners of the tasks that have ended, without it.
    void tell_ended() REQUIRES(mutex_);
    void on_completions();
    void on_tick();
    Rail* longest_idle(size_t device) const REQUIRES(mutex_);

    bool settle(Rail& rail) REQUIRES(mutex_);
    static void piece_done(const Piece& piece, Tally& tally);
    void on_fault(Rail& rail, const Rail::Fault& fault) REQUIRES(mutex_);
    void watch(Rail& rail, uint64_t now) REQUIRES(mutex_);
    // of_path: the rail waits before it is tried again.
    void stop(Rail& rail, const std::string& why, bool of_path) REQUIRES(mutex_);
    void put_back(const Piece& piece) REQUIRES(mutex_);
    // Whether it has posted something.
    bool fill(Rail& rail, uint64_t now) REQUIRES(mutex_);
    bool may_take(const Rail& rail, const Task& task) const REQUIRES(mutex_);
    bool last_to_end(const Rail& rail) const REQUIRES(mutex_);
    bool hoards(const Rail& rail, uint64_t now) const REQUIRES(mutex_);
    static bool is_better(const Rail& rail, const Rail& other, int node);
    void note_missed(const Rail& rail, int node) REQUIRES(mutex_);
    bool is_for_nearer(const Rail& rail, const Task& task, int node, uint64_t bytes) const REQUIRES(mutex_);
    bool take_piece(Rail& rail, Task& task) REQUIRES(mutex_);
    Task::Range* next_range(Task& task) const REQUIRES(mutex_);
    KeyedRegion* find_keyed(Task& task, const Region& local) const REQUIRES(mutex_);
    int node_of(Task& task) const REQUIRES(mutex_);
    const RemoteRegion* find_remote(uint64_t address, uint64_t bytes) const REQUIRES(mutex_);
    bool may_end(Task& task, uint64_t now) REQUIRES(mutex_);
    bool is_late(const Task& task) const REQUIRES(mutex_);
    void give_up_open(Task& task, uint64_t now) REQUIRES(mutex_);
    bool wants_rail(const Task& task) const REQUIRES(mutex_);
    bool may_connect(const Rail& rail, uint64_t now) const REQUIRES(mutex_);

    // The helper; without the lock while it waits.
    bool needs_help(uint64_t now) const REQUIRES(mutex_);
    void get_help() REQUIRES(mutex_);
    void help();
    Result<std::vector<std::byte>> ask(const std::vector<std::byte>& question) EXCLUDES(mutex_);
    void settle_rail(Rail& rail) REQUIRES(mutex_);
    bool all_settled() const REQUIRES(mutex_);
    static bool is_to_settle(const Rail& rail);
    bool end_rail() REQUIRES(mutex_);
    Rail* rail_to_connect() REQUIRES(mutex_);
    bool connect_rail() REQUIRES(mutex_);
    bool ask_keys() REQUIRES(mutex_);

    const Context context_;
    const LinkOptions options_;
    TransportCounters& counters_;
    const std::shared_ptr<Keys> keys_;
    const std::shared_ptr<Control> control_;
    const int timeout_ms_;

    mutable Mutex mutex_;
    CondVar changed_;
    const std::vector<std::unique_ptr<Rail>> rails_;  // what they point to is guarded by mutex_
    const bool uneven_;                               // some are nearer to memory of a node than others
    std::list<std::unique_ptr<Task>> tasks_ GUARDED_BY(mutex_);
    std::list<std::unique_ptr<Task>> spare_nodes_ GUARDED_BY(mutex_);  // one at most, of null
    Ended ended_ GUARDED_BY(mutex_);
    std::map<uint64_t, RemoteRegion> known_ GUARDED_BY(mutex_);  // of the peer, by address
    uint64_t keyless_until_ns_ GUARDED_BY(mutex_) = 0;
    uint64_t wall_ns_ GUARDED_BY(mutex_) = 0;    // of the last drive()
    uint64_t looked_ns_ GUARDED_BY(mutex_) = 0;  // at the rails, by the NICs' clock
    bool helping_ GUARDED_BY(mutex_) = false;
    int looking_ GUARDED_BY(mutex_) = 0;  // callers of run() that look for completions
    bool closed_ GUARDED_BY(mutex_) = false;
};

}  // namespace moonpool::transport::nic
