// Engine: what runs a Log. One thread owns the open segment, the buffers and the I/O queue; callers reach it
// by two queues and the index, which the mutex guards; no thread holds the mutex during I/O.
//
//   engine.cpp          the callers' side, the thread's loop, I/O and barriers
//   engine_write.cpp    records into the open segment; opening and sealing segments
//   engine_read.cpp     records from the disk, checked on their way
//   engine_reclaim.cpp  the oldest segment is emptied: what is worth it is copied, the rest is forgotten
#pragma once

#include <deque>
#include <mutex>
#include <set>
#include <unordered_map>

#include "base/fork.hpp"
#include "base/service_thread.hpp"
#include "ssd/buffers.hpp"
#include "ssd/index.hpp"
#include "ssd/io_queue.hpp"
#include "ssd/log.hpp"
#include "ssd/record.hpp"
#include "ssd/recovery.hpp"

namespace moonpool::ssd {

inline constexpr uint32_t kSegmentsForReclaim = 2;  // callers' writes leave these free

class Engine {
   public:
    static Result<std::unique_ptr<Engine>> open(LogOptions options);
    ~Engine();

    uint32_t space(std::string_view identity);
    void leave_space(uint32_t space);
    std::optional<Found> find(const Key& key, bool with_parent);
    bool write(const Key& key, std::string_view parent, std::vector<std::span<const std::byte>> parts,
               uint32_t crc, Done done);
    bool read(const Key& key, std::span<std::byte> to, Done done);
    bool remove(const Key& key);
    std::optional<uint64_t> sequence(const Hash128& hash) const;
    bool remove(const Hash128& hash);
    uint32_t hashes(uint32_t cursor, uint32_t scan, std::vector<Hash128>& out) const;
    std::vector<Hash128> take_lost(uint32_t scan);
    void sync(Done done);
    uint32_t list(uint32_t space, uint32_t cursor, uint32_t scan, std::vector<Listed>& out) const;
    void close();

    bool accepts_writes() const;
    std::string trouble() const;
    uint64_t object_bytes_max() const;
    const std::string& directory() const { return options_.directory; }
    std::vector<std::pair<const char*, uint64_t>> counters() const;
    const char* io_name() const { return queue_->name(); }
    std::string io_reason() const { return io_reason_; }
    bool check_integrity() const;

   private:
    struct WriteJob {
        enum class Kind : uint8_t { kObject, kCopy, kRemovals, kSync };
        Kind kind = Kind::kObject;
        uint64_t sequence = 0;
        uint32_t space = 0;
        std::shared_ptr<const std::string> identity;  // of the space
        Hash128 hash;
        std::string name, parent;
        std::vector<std::span<const std::byte>> parts;
        uint64_t size = 0;
        uint32_t crc = 0;
        std::vector<std::byte> own;  // the data, of a copy
        std::vector<uint64_t> removals;
        Place from;                    // of a copy
        uint64_t removals_before = 0;  // of a sync: they are to be written first
        Done done;

        Place place;
        uint32_t ios = 0;         // batches that hold some of it
        bool in_batches = false;  // all of it
        bool failed = false;
    };
    using WriteJobPtr = std::shared_ptr<WriteJob>;

    struct ReadJob {
        uint64_t sequence = 0;
        Hash128 hash;
        Place place;
        uint64_t offset = 0;  // of its data in the file
        std::span<std::byte> to;
        uint32_t crc = 0;
        Done done;

        uint64_t submitted = 0;  // up to here, in the file
        uint64_t consumed = 0;
        uint32_t crc_so_far = 0;
        uint32_t ios = 0;
        int error = 0;
        std::unordered_map<uint64_t, std::pair<std::byte*, uint32_t>> ready;  // by offset, ahead of its turn
    };
    using ReadJobPtr = std::shared_ptr<ReadJob>;

    enum class SlotState : uint8_t { kFree, kHead, kClosed, kReclaiming, kDraining, kDrained, kBad };

    struct Head {
        bool open = false;
        bool bad = false;  // a write to it failed
        bool header_durable = false;
        uint32_t slot = 0;
        uint64_t number = 0;
        uint64_t used = 0;
        SummaryWriter summary;
    };

    // Consecutive bytes of the open segment that go to the disk in one write.
    struct Batch {
        std::byte* buffer = nullptr;
        uint64_t offset = 0;
        uint64_t used = 0;
        std::vector<WriteJobPtr> jobs;
    };

    struct Reclaim {
        bool active = false;
        uint32_t slot = 0;
        std::deque<std::pair<Hash128, uint64_t>> copies;  // hash, sequence
        uint32_t in_flight = 0;
        uint64_t bytes_in_flight = 0;
    };

    struct Barrier {
        uint64_t after = 0;  // tag of a write
        std::function<void()> run;
    };

    struct Counters {
        uint64_t written = 0, written_bytes = 0, read = 0, read_bytes = 0, removed = 0;
        uint64_t evicted = 0, evicted_bytes = 0, copied = 0, copied_bytes = 0;
        uint64_t corrupt = 0, read_errors = 0, write_errors = 0, refused = 0, reclaimed = 0, syncs = 0;
    };

    Engine(LogOptions options, std::unique_ptr<File> file, Superblock superblock);
    Status start(Recovery recovery);

    // engine.cpp, on the thread
    void run();
    bool take_inbox();
    void reap(int wait_ms);
    uint64_t submit_io(IoOperation::Kind kind, uint64_t offset, std::byte* data, uint64_t bytes,
                       std::function<void(int)> done);
    void write_block(uint64_t offset, std::shared_ptr<std::byte> memory, uint64_t bytes,
                     std::function<void(int)> done);
    void after_writes(std::function<void()> run);  // those in flight now
    void sync_file(std::function<void(int)> done);
    void step_barriers();
    void sync_when_due();
    void on_write_error(uint32_t slot, int error);
    void stop_writing(const std::string& why);
    bool finished();
    void refuse_waiting();
    void tell_gone();
    uint64_t begin_of(uint32_t slot) const { return kSegmentsBegin + slot * superblock_.segment_bytes; }

    // engine_write.cpp
    void append_writes();
    bool append(const WriteJobPtr& job, bool internal);
    bool make_room(uint64_t record_bytes, uint64_t summary_bytes, bool internal);
    bool fits(uint64_t record_bytes, uint64_t summary_bytes) const;
    void put(const WriteJobPtr& job, std::span<const std::byte> bytes);
    void put_zeros(const WriteJobPtr& job, uint64_t bytes);
    void join_batch(const WriteJobPtr& job);
    void send_batch();
    void submit_batch(Batch batch);
    void end_batch(const Batch& batch, bool failed);
    bool waits_for_header() const { return head_.open && !head_.header_durable; }
    void on_header(int error);
    void finish_write(const WriteJobPtr& job);
    bool end_writing(const WriteJob& job);  // under the mutex; true when nothing newer came, and no removal
    void finish_removals(const WriteJobPtr& job);
    void open_head(std::function<void(int)> seal);
    std::function<void(int)> close_head();
    void write_summary(uint32_t slot, Footer footer, const std::vector<std::byte>& summary, uint64_t at);
    void queue_removals();

    // engine_read.cpp
    void start_reads();
    void submit_piece(const ReadJobPtr& job);
    void consume(const ReadJobPtr& job);
    void finish_read(const ReadJobPtr& job);
    void drop(const Hash128& hash, uint64_t sequence);  // under the mutex
    bool forget_writing(const Hash128& hash);           // under the mutex
    void push_removal(uint64_t sequence);               // under the mutex
    void forget_unused_spaces();                        // under the mutex

    // engine_reclaim.cpp
    void step_reclaim();
    void start_reclaim();
    void copy_next();
    void end_copy(uint64_t bytes);
    void drain();
    void free_drained(uint64_t tail);
    void forget_segment(uint32_t slot);  // under the mutex
    uint32_t oldest_closed() const;
    bool draining() const;
    bool free_one_at_once();
    bool forget_oldest();
    uint64_t tail() const;

    LogOptions options_;
    std::unique_ptr<File> file_;
    bool direct_ = true;
    Superblock superblock_;
    uint32_t slots_;
    std::unique_ptr<IoQueue> queue_;
    std::string io_reason_;
    ForkGuard fork_;

    mutable std::mutex mutex_;
    Index index_;
    struct Space {
        std::shared_ptr<const std::string> identity;  // null: free
        bool open = false;                            // a caller has its number
        uint32_t writes = 0;                          // on their way
    };
    std::vector<Space> spaces_;
    std::unordered_map<std::string_view, uint32_t> space_ids_;
    std::vector<uint32_t> free_spaces_;
    uint32_t space_cursor_ = 0;
    std::deque<ReadJobPtr> read_inbox_;
    std::deque<WriteJobPtr> write_inbox_;
    uint32_t reads_waiting_ = 0, writes_waiting_ = 0;  // until they are done
    std::unordered_map<uint64_t, uint64_t> writing_;   // hash.low -> sequence of its newest write
    std::vector<uint32_t> readers_;                    // of each slot
    std::deque<uint64_t> removals_;                    // sequences, not yet on their way to the disk
    uint64_t removals_pushed_ = 0;
    std::string trouble_;
    bool read_only_ = false, off_ = false;
    uint32_t lost_cursor_ = 0;
    bool closing_ = false, sleeping_ = false;
    Counters counters_;
    Recovery recovery_;

    // the thread's own
    std::deque<ReadJobPtr> reads_;
    std::deque<WriteJobPtr> writes_, internal_writes_;
    std::unordered_map<uint64_t, std::function<void(int)>> in_flight_;
    std::set<uint64_t> writes_in_flight_;
    std::vector<IoDone> done_;
    std::vector<Barrier> barriers_;
    std::unique_ptr<Buffers> read_buffers_, write_buffers_;
    uint64_t next_tag_ = 1, last_write_tag_ = 0;
    std::vector<SlotState> states_;
    std::vector<uint64_t> numbers_;
    std::deque<uint32_t> free_;
    std::atomic<uint64_t> free_count_{0};
    uint64_t next_number_ = 1;
    Head head_;
    Batch batch_;
    std::vector<Batch> held_;  // until the open segment's header is on the disk
    uint64_t batch_end_ = 0;   // in the file: where the next byte of the open segment goes
    bool sealing_ = false;
    Reclaim reclaim_;
    uint64_t tail_to_write_ = 0, tail_written_ = 0;
    bool removals_in_flight_ = false;
    uint64_t removals_written_ = 0;
    bool dirty_ = false, sync_in_flight_ = false;
    uint64_t synced_ms_ = 0;
    uint32_t write_errors_in_row_ = 0, read_errors_in_row_ = 0;
    std::vector<Hash128> gone_;                // to be told
    std::atomic<bool> reclaim_wanted_{false};  // the index is full

    ServiceThread thread_;
};

}  // namespace moonpool::ssd
