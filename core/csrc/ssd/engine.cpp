#include "ssd/engine.hpp"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <random>

#include "base/clock.hpp"
#include "base/crc32c.hpp"

namespace moonpool::ssd {

namespace {

constexpr uint32_t kErrorsInRowMax = 8;
constexpr uint32_t kSlotsUsableMin = 4;

uint64_t default_segment_bytes(uint64_t bytes) {
    return std::clamp<uint64_t>(bytes / 64 / (1u << 20) * (1u << 20), 4u << 20, 64u << 20);
}

std::unique_ptr<std::byte, void (*)(void*)> aligned_block(uint64_t bytes) {
    auto* memory = static_cast<std::byte*>(std::aligned_alloc(kBlockBytes, bytes));
    std::memset(memory, 0, bytes);
    return {memory, std::free};
}

std::string text_of(int error) { return std::strerror(error); }

Superblock fresh_superblock(uint64_t segment_bytes) {
    std::random_device random;
    Superblock s;
    for (uint8_t& byte : s.id) byte = static_cast<uint8_t>(random());
    s.segment_bytes = segment_bytes;
    s.first_number = (uint64_t{random()} << 20) + 1;
    return s;
}

// What the file says it is, or a new superblock where it is new, or made for another size.
Result<Superblock> load_superblock(File& file, const LogOptions& options) {
    const std::string path = options.directory + "/" + kLogFile;
    int locked = file.lock();
    if (locked == EWOULDBLOCK) {
        return Error{Code::kUnavailable, options.directory +
                                             " is in use by another node; give each node an " +
                                             "SSD directory of its own"};
    }
    if (locked != 0) return os_error("locking " + path, locked);
    auto block = aligned_block(kBlockBytes);
    std::span<const std::byte> bytes(block.get(), kBlockBytes);
    bool blank = file.size() == 0;
    if (!blank) {
        if (file.size() < kBlockBytes) {
            return Error{Code::kInvalidArgument, path +
                                                     " is no SSD log of moonpool; give another directory, "
                                                     "or remove the file"};
        }
        if (int error = file.read(0, block.get(), kBlockBytes)) return os_error("reading " + path, error);
        blank = std::all_of(bytes.begin(), bytes.end(), [](std::byte b) { return b == std::byte{0}; });
    }
    if (!blank) {
        Result<Superblock> found = decode_superblock(bytes);
        if (!found) {
            return Error{found.error().code,
                         path + " " + found.error().text + "; give another directory, or remove the file"};
        }
        bool same_shape = options.segment_bytes == 0 || options.segment_bytes == found->segment_bytes;
        uint64_t room = options.bytes - std::min(options.bytes, kSegmentsBegin);
        bool grown_only = kSegmentsBegin + room / found->segment_bytes * found->segment_bytes >= file.size();
        if (same_shape && grown_only && room / found->segment_bytes >= kSegmentsMin) return found;
    }
    uint64_t segment_bytes =
        options.segment_bytes != 0 ? options.segment_bytes : default_segment_bytes(options.bytes);
    Superblock fresh = fresh_superblock(segment_bytes);
    if (options.bytes < kSegmentsBegin + kSegmentsMin * segment_bytes) {
        return Error{Code::kInvalidArgument,
                     options.directory + " is to hold " + std::to_string(options.bytes) +
                         " bytes; an SSD directory needs at least " +
                         std::to_string(kSegmentsBegin + kSegmentsMin * segment_bytes)};
    }
    encode_superblock(fresh, block.get());
    int error = file.write(0, block.get(), kBlockBytes);
    if (error == 0) error = file.sync();
    if (error != 0) return os_error("writing " + path, error);
    return fresh;
}

}  // namespace

// ---- opening

Engine::Engine(LogOptions options, std::unique_ptr<File> file, Superblock superblock)
    : options_(std::move(options)),
      file_(std::move(file)),
      superblock_(superblock),
      slots_(static_cast<uint32_t>((options_.bytes - kSegmentsBegin) / superblock_.segment_bytes)),
      index_(slots_),
      readers_(slots_, 0),
      states_(slots_, SlotState::kFree),
      numbers_(slots_, 0) {}

Result<std::unique_ptr<Engine>> Engine::open(LogOptions options) {
    if (!options.open) options.open = open_file;
    options.depth = std::clamp<uint32_t>(options.depth, 1, 1024);
    options.io_bytes = static_cast<uint32_t>(
        std::clamp<uint64_t>(round_up_to_block(options.io_bytes), kBlockBytes, 16u << 20));
    options.segment_bytes = round_up_to_block(options.segment_bytes);
    if (options.records_max == 0) {
        options.records_max =
            static_cast<uint32_t>(std::clamp<uint64_t>(options.bytes / (32u << 10), 4096, 4u << 20));
    }
    if (!options.sequence) options.sequence = std::make_shared<std::atomic<uint64_t>>(0);
    Result<std::unique_ptr<File>> file = options.open(options.directory + "/" + kLogFile);
    if (!file) return file.error();
    Result<Superblock> superblock = load_superblock(**file, options);
    if (!superblock) return superblock.error();

    std::unique_ptr<Engine> engine(new Engine(std::move(options), std::move(*file), *superblock));
    uint64_t file_bytes = kSegmentsBegin + engine->slots_ * superblock->segment_bytes;
    if (int error = engine->file_->reserve(file_bytes)) {
        if (error == ENOSPC) {
            return Error{Code::kOs, "the disk of " + engine->directory() + " has no room for " +
                                        std::to_string(file_bytes) + " bytes; make room or give it less"};
        }
        return os_error("reserving " + std::to_string(file_bytes) + " bytes in " + engine->directory(),
                        error);
    }
    const LogOptions& o = engine->options_;
    uint32_t depth = 2 * o.depth + 8;  // reads, writes, and what goes with segments
    if (o.io != "threads") {
        Result<std::unique_ptr<IoQueue>> ring = ring_queue(*engine->file_, depth);
        if (ring) {
            engine->queue_ = std::move(*ring);
        } else if (o.io == "io_uring") {
            return Error{Code::kUnavailable, ring.error().text + "; use io = threads or auto"};
        } else {
            engine->io_reason_ = ring.error().text;
        }
    }
    if (!engine->queue_) engine->queue_ = thread_queue(*engine->file_, depth);
    engine->read_buffers_ = std::make_unique<Buffers>(o.depth, o.io_bytes);
    engine->write_buffers_ = std::make_unique<Buffers>(o.depth, o.io_bytes);
    if (!engine->read_buffers_->valid() || !engine->write_buffers_->valid()) return os_error("buffers");
    Status started =
        engine->start(recover(*engine->file_, *superblock, engine->slots_, o.records_max, engine->index_,
                              [&](std::string_view identity) { return engine->space(identity); }));
    if (!started) return started.error();
    return engine;
}

Status Engine::start(Recovery recovery) {
    recovery_ = std::move(recovery);
    for (Space& space : spaces_) space.open = false;  // recovery asked, and has ended
    next_number_ = recovery_.next_number;
    numbers_ = recovery_.numbers;
    for (uint32_t slot = 0; slot < slots_; ++slot) {
        if (numbers_[slot] == 0) {
            free_.push_back(slot);
        } else {
            states_[slot] = SlotState::kClosed;
        }
    }
    // Each start opens a segment, so many in a row leave no room.
    while (free_.size() < kSegmentsForReclaim && forget_oldest()) {
    }
    free_count_ = free_.size();
    uint64_t known = options_.sequence->load();
    while (known < recovery_.sequence_max &&
           !options_.sequence->compare_exchange_weak(known, recovery_.sequence_max)) {
    }
    synced_ms_ = now_ms();
    direct_ = file_->direct();
    return thread_.start("mp-ssd", [this] { run(); });
}

Engine::~Engine() {
    if (fork_.in_child()) {
        (void)thread_.join();
        (void)queue_.release();
        return;
    }
    close();
}

void Engine::close() {
    if (fork_.in_child()) return;  // the thread is the parent's
    {
        std::lock_guard lock(mutex_);
        closing_ = true;
    }
    if (!thread_.started()) return;
    queue_->wake();
    (void)thread_.join();
    file_.reset();  // another may have the directory now; no thread submits to the queue any more
}

// ---- the callers' side

uint32_t Engine::space(std::string_view identity) {
    std::unique_lock lock(mutex_, std::defer_lock);
    if (thread_.started()) lock.lock();  // recovery asks too, alone
    auto it = space_ids_.find(identity);
    if (it == space_ids_.end()) {
        forget_unused_spaces();
        auto id = static_cast<uint32_t>(spaces_.size());
        if (free_spaces_.empty()) {
            spaces_.emplace_back();
        } else {
            id = free_spaces_.back();
            free_spaces_.pop_back();
        }
        spaces_[id].identity = std::make_shared<const std::string>(identity);
        it = space_ids_.emplace(*spaces_[id].identity, id).first;
    }
    spaces_[it->second].open = true;
    return it->second;
}

void Engine::leave_space(uint32_t space) {
    std::lock_guard lock(mutex_);
    spaces_[space].open = false;
}

// A few for each new one: what is not needed is never more than a fraction of what is.
void Engine::forget_unused_spaces() {
    constexpr int kLooks = 8;
    for (int i = 0; i < kLooks && !spaces_.empty(); ++i, ++space_cursor_) {
        space_cursor_ %= static_cast<uint32_t>(spaces_.size());
        Space& space = spaces_[space_cursor_];
        bool used = space.open || space.writes != 0 || index_.count_in(space_cursor_) != 0;
        if (space.identity == nullptr || used) continue;
        space_ids_.erase(*space.identity);
        space = Space{};
        free_spaces_.push_back(space_cursor_);
    }
}

std::optional<Found> Engine::find(const Key& key, bool with_parent) {
    std::lock_guard lock(mutex_);
    uint32_t at = off_ ? kNoEntry : index_.find(key.space, key.hash, key.name);
    if (at == kNoEntry) return std::nullopt;
    Entry& e = index_.entry(at);
    e.used = true;
    return Found{e.sequence, e.size, e.crc, with_parent ? std::string(e.parent()) : std::string()};
}

bool Engine::write(const Key& key, std::string_view parent, std::vector<std::span<const std::byte>> parts,
                   uint32_t crc, Done done) {
    auto job = std::make_shared<WriteJob>();
    job->space = key.space;
    job->hash = key.hash;
    job->name = key.name;
    job->parent = parent;
    job->parts = std::move(parts);
    job->crc = crc;
    job->done = std::move(done);
    for (std::span<const std::byte> part : job->parts) job->size += part.size();
    bool wake;
    {
        std::lock_guard lock(mutex_);
        bool full = writes_waiting_ >= options_.queue_max;
        if (index_.count() + writes_waiting_ >= options_.records_max) {
            full = true;
            reclaim_wanted_ = true;
        }
        Record shape;
        shape.space = *spaces_[key.space].identity;
        shape.name = key.name;
        shape.parent = parent;
        shape.size = job->size;
        uint64_t most =
            superblock_.segment_bytes - 2 * kBlockBytes;  // header, footer, and the summary's part
        bool fits = job->size < most && shape.encodable() &&
                    shape.bytes() + round_up_to_block(SummaryWriter::bytes_for(shape)) <= most;
        if (closing_ || read_only_ || off_ || full || !fits) {
            ++counters_.refused;
            return false;
        }
        job->sequence = options_.sequence->fetch_add(1) + 1;
        uint32_t old = index_.find(key.hash);
        if (old != kNoEntry) drop(key.hash, index_.entry(old).sequence);
        forget_writing(key.hash);
        writing_[key.hash.low] = job->sequence;
        ++writes_waiting_;
        job->identity = spaces_[key.space].identity;
        ++spaces_[key.space].writes;
        write_inbox_.push_back(std::move(job));
        wake = std::exchange(sleeping_, false);
    }
    if (wake) queue_->wake();
    return true;
}

bool Engine::read(const Key& key, std::span<std::byte> to, Done done) {
    auto job = std::make_shared<ReadJob>();
    bool wake;
    {
        std::lock_guard lock(mutex_);
        uint32_t at = index_.find(key.space, key.hash, key.name);
        if (closing_ || off_ || at == kNoEntry || reads_waiting_ >= options_.queue_max) return false;
        Entry& e = index_.entry(at);
        if (e.size != to.size()) return false;
        e.used = true;
        job->sequence = e.sequence;
        job->hash = e.hash;
        job->place = e.place;
        job->offset = begin_of(e.place.slot) + uint64_t{e.place.block} * kBlockBytes + e.data_offset;
        job->to = to;
        job->crc = e.crc;
        job->done = std::move(done);
        ++readers_[e.place.slot];
        ++reads_waiting_;
        read_inbox_.push_back(std::move(job));
        wake = std::exchange(sleeping_, false);
    }
    if (wake) queue_->wake();
    return true;
}

bool Engine::remove(const Key& key) {
    {
        std::lock_guard lock(mutex_);
        uint32_t at = index_.find(key.hash);
        bool another = at != kNoEntry && index_.find(key.space, key.hash, key.name) == kNoEntry;
        if (another) return false;
    }
    return remove(key.hash);
}

bool Engine::remove(const Hash128& hash) {
    bool wake, was_there;
    {
        std::lock_guard lock(mutex_);
        uint32_t at = index_.find(hash);
        was_there = at != kNoEntry;
        if (was_there) {
            drop(hash, index_.entry(at).sequence);
            ++counters_.removed;
        }
        was_there |= forget_writing(hash);
        wake = was_there && std::exchange(sleeping_, false);
    }
    if (wake) queue_->wake();
    return was_there;
}

std::optional<uint64_t> Engine::sequence(const Hash128& hash) const {
    std::lock_guard lock(mutex_);
    uint32_t at = off_ ? kNoEntry : index_.find(hash);
    if (at == kNoEntry) return std::nullopt;
    return index_.entry(at).sequence;
}

uint32_t Engine::hashes(uint32_t cursor, uint32_t scan, std::vector<Hash128>& out) const {
    std::lock_guard lock(mutex_);
    uint32_t end = off_ ? 0 : index_.slots();
    for (; cursor < end && scan > 0; ++cursor, --scan) {
        if (index_.entry(cursor).sequence != 0) out.push_back(index_.entry(cursor).hash);
    }
    return cursor < end ? cursor : 0;
}

std::vector<Hash128> Engine::take_lost(uint32_t scan) {
    std::lock_guard lock(mutex_);
    std::vector<Hash128> lost;
    if (!off_) return lost;
    for (; scan > 0 && index_.count() != 0; --scan, ++lost_cursor_) {
        if (lost_cursor_ >= index_.slots()) lost_cursor_ = 0;  // a write may have ended behind it
        if (index_.entry(lost_cursor_).sequence == 0) continue;
        lost.push_back(index_.entry(lost_cursor_).hash);
        index_.erase(lost_cursor_);
    }
    return lost;
}

void Engine::tell_gone() {
    if (gone_.empty()) return;
    std::vector<Hash128> gone = std::exchange(gone_, {});
    if (options_.on_gone) options_.on_gone(gone);
}

// The index forgets it, and the disk will.
void Engine::drop(const Hash128& hash, uint64_t sequence) {
    uint32_t at = index_.find(hash);
    if (at == kNoEntry || index_.entry(at).sequence != sequence) return;
    index_.erase(at);
    push_removal(sequence);
}

// What is being written is dead on arrival. It is removed once more when it has arrived, so that a removal
// stands behind it; but only this one comes before a sync that is asked for next.
bool Engine::forget_writing(const Hash128& hash) {
    auto it = writing_.find(hash.low);
    if (it == writing_.end()) return false;
    push_removal(it->second);
    writing_.erase(it);
    return true;
}

void Engine::push_removal(uint64_t sequence) {
    if (read_only_) return;
    removals_.push_back(sequence);
    ++removals_pushed_;
}

void Engine::sync(Done done) {
    auto job = std::make_shared<WriteJob>();
    job->kind = WriteJob::Kind::kSync;
    job->done = std::move(done);
    bool wake = false, refused;
    {
        std::lock_guard lock(mutex_);
        refused = closing_ || read_only_ || off_;
        if (!refused) {
            ++writes_waiting_;
            job->removals_before = removals_pushed_;
            write_inbox_.push_back(job);
            wake = std::exchange(sleeping_, false);
        }
    }
    if (refused) return job->done(Outcome::kRefused);
    if (wake) queue_->wake();
}

uint32_t Engine::list(uint32_t space, uint32_t cursor, uint32_t scan, std::vector<Listed>& out) const {
    std::lock_guard lock(mutex_);
    uint32_t end = off_ ? 0 : index_.slots();
    for (; cursor < end && scan > 0; ++cursor, --scan) {
        const Entry& e = index_.entry(cursor);
        if (e.sequence == 0 || e.space != space) continue;
        out.push_back(Listed{e.sequence, e.size, e.crc, std::string(e.name())});
    }
    return cursor < end ? cursor : 0;
}

bool Engine::accepts_writes() const {
    std::lock_guard lock(mutex_);
    return !read_only_ && !off_ && !closing_;
}

std::string Engine::trouble() const {
    std::lock_guard lock(mutex_);
    return trouble_;
}

uint64_t Engine::object_bytes_max() const {
    return superblock_.segment_bytes - 3 * kBlockBytes - 2 * uint64_t{kHeaderBytesMax};
}

std::vector<std::pair<const char*, uint64_t>> Engine::counters() const {
    std::lock_guard lock(mutex_);
    const Counters& c = counters_;
    return {
        {"ssd_objects", index_.count()},
        {"ssd_object_bytes", index_.object_bytes()},
        {"ssd_spaces", space_ids_.size()},
        {"ssd_bytes", slots_ * superblock_.segment_bytes},
        {"ssd_live_bytes", index_.live_bytes()},
        {"ssd_free_bytes", free_count_ * superblock_.segment_bytes},
        {"ssd_reads_waiting", reads_waiting_},
        {"ssd_writes_waiting", writes_waiting_},
        {"ssd_read_only", read_only_ ? 1u : 0u},
        {"ssd_off", off_ ? 1u : 0u},
        {"ssd_buffered", direct_ ? 0u : 1u},
        {"ssd_written_total", c.written},
        {"ssd_written_bytes_total", c.written_bytes},
        {"ssd_read_total", c.read},
        {"ssd_read_bytes_total", c.read_bytes},
        {"ssd_removed_total", c.removed},
        {"ssd_evicted_total", c.evicted},
        {"ssd_evicted_bytes_total", c.evicted_bytes},
        {"ssd_copied_total", c.copied},
        {"ssd_copied_bytes_total", c.copied_bytes},
        {"ssd_corrupt_total", c.corrupt},
        {"ssd_read_errors_total", c.read_errors},
        {"ssd_write_errors_total", c.write_errors},
        {"ssd_write_refused_total", c.refused},
        {"ssd_reclaimed_segments_total", c.reclaimed},
        {"ssd_syncs_total", c.syncs},
        {"ssd_recovered_damaged_segments", recovery_.damaged},
        {"ssd_recovered_scanned_segments", recovery_.scanned},
        {"ssd_recovered_bytes_read", recovery_.bytes_read},
    };
}

bool Engine::check_integrity() const {
    std::lock_guard lock(mutex_);
    return index_.check_integrity() && index_.count() <= options_.records_max;
}

// ---- the thread

void Engine::run() {
    for (;;) {
        bool closing = take_inbox();
        if (closing) refuse_waiting();
        start_reads();
        step_reclaim();
        queue_removals();
        append_writes();
        sync_when_due();
        step_barriers();
        tell_gone();
        int wait_ms = 0;
        {
            std::lock_guard lock(mutex_);
            bool more = !read_inbox_.empty() || !write_inbox_.empty() || closing_ != closing;
            more |= !removals_.empty() && !removals_in_flight_ && !read_only_;
            if (!more) {
                sleeping_ = true;
                wait_ms = static_cast<int>(std::clamp<uint32_t>(options_.sync_ms, 1, 1000));
            }
        }
        if (closing && finished()) break;
        reap(wait_ms);
    }
}

// Moves what callers have given to the thread's own queues. -> whether the log is closing
bool Engine::take_inbox() {
    std::lock_guard lock(mutex_);
    sleeping_ = false;
    for (ReadJobPtr& job : read_inbox_) reads_.push_back(std::move(job));
    for (WriteJobPtr& job : write_inbox_) writes_.push_back(std::move(job));
    read_inbox_.clear();
    write_inbox_.clear();
    return closing_;
}

void Engine::refuse_waiting() {
    for (const ReadJobPtr& job : std::exchange(reads_, {})) {
        job->error = ECANCELED;
        if (job->ios == 0) finish_read(job);
    }
    for (const WriteJobPtr& job : std::exchange(writes_, {})) {
        {
            std::lock_guard lock(mutex_);
            --writes_waiting_;
            end_writing(*job);
        }
        if (job->done) job->done(Outcome::kRefused);
    }
    reclaim_.copies.clear();
}

// Closing: seals what is open, and waits for all that is in flight.
bool Engine::finished() {
    if (!in_flight_.empty() || !barriers_.empty() || sealing_ || batch_.used != 0) return false;
    {
        std::lock_guard lock(mutex_);
        if (read_only_ || off_) return true;
        // Removals that found no room, though nothing is on its way any more, stay unwritten.
        if (!removals_.empty() && internal_writes_.empty()) return false;
    }
    if (!head_.open || head_.bad) return true;
    if (std::function<void(int)> seal = close_head()) {
        after_writes([this, seal] { sync_file(seal); });
        step_barriers();
    }
    return false;
}

void Engine::reap(int wait_ms) {
    done_.clear();
    queue_->reap(done_, wait_ms);
    for (const IoDone& done : std::exchange(done_, {})) {
        auto it = in_flight_.find(done.tag);
        if (it == in_flight_.end()) continue;
        std::function<void(int)> then = std::move(it->second);
        in_flight_.erase(it);
        writes_in_flight_.erase(done.tag);
        then(done.error);
    }
}

uint64_t Engine::submit_io(IoOperation::Kind kind, uint64_t offset, std::byte* data, uint64_t bytes,
                           std::function<void(int)> done) {
    uint64_t tag = next_tag_++;
    in_flight_.emplace(tag, std::move(done));
    if (kind == IoOperation::Kind::kWrite) {
        writes_in_flight_.insert(writes_in_flight_.end(), tag);
        last_write_tag_ = tag;
        dirty_ = true;
    }
    queue_->submit(IoOperation{kind, offset, data, static_cast<uint32_t>(bytes), tag});
    return tag;
}

void Engine::write_block(uint64_t offset, std::shared_ptr<std::byte> memory, uint64_t bytes,
                         std::function<void(int)> done) {
    std::byte* data = memory.get();
    submit_io(IoOperation::Kind::kWrite, offset, data, bytes,
              [memory, done = std::move(done)](int error) { done(error); });
}

void Engine::after_writes(std::function<void()> run) {
    barriers_.push_back(Barrier{last_write_tag_, std::move(run)});
}

void Engine::step_barriers() {
    for (size_t i = 0; i < barriers_.size();) {
        bool passed = writes_in_flight_.empty() || *writes_in_flight_.begin() > barriers_[i].after;
        if (!passed) {
            ++i;
            continue;
        }
        std::function<void()> run = std::move(barriers_[i].run);
        barriers_.erase(barriers_.begin() + static_cast<ptrdiff_t>(i));
        run();
    }
}

void Engine::sync_file(std::function<void(int)> done) {
    submit_io(IoOperation::Kind::kSync, 0, nullptr, 0, [this, done = std::move(done)](int error) {
        {
            std::lock_guard lock(mutex_);
            ++counters_.syncs;
        }
        if (error != 0) stop_writing("syncing " + directory() + " failed: " + text_of(error));
        done(error);
    });
}

void Engine::sync_when_due() {
    if (!dirty_ || sync_in_flight_ || now_ms() - synced_ms_ < options_.sync_ms) return;
    dirty_ = false;
    sync_in_flight_ = true;
    after_writes([this] {
        sync_file([this](int) {
            sync_in_flight_ = false;
            synced_ms_ = now_ms();
        });
    });
}

void Engine::on_write_error(uint32_t slot, int error) {
    {
        std::lock_guard lock(mutex_);
        ++counters_.write_errors;
    }
    if (head_.open && head_.slot == slot) head_.bad = true;
    if (states_[slot] != SlotState::kHead) states_[slot] = SlotState::kBad;
    size_t usable = static_cast<size_t>(std::count_if(
        states_.begin(), states_.end(), [](SlotState state) { return state != SlotState::kBad; }));
    bool for_good = error == ENOSPC || error == EROFS || error == EDQUOT;
    if (for_good || ++write_errors_in_row_ >= kErrorsInRowMax || usable < kSlotsUsableMin) {
        stop_writing("writing to " + directory() + " failed: " + text_of(error));
    }
}

void Engine::stop_writing(const std::string& why) {
    std::lock_guard lock(mutex_);
    if (read_only_) return;
    read_only_ = true;
    removals_.clear();
    trouble_ = why + "; what it holds is still read, nothing more is written";
}

}  // namespace moonpool::ssd
