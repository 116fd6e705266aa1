// The callers' side of a log, and its thread's loop. Every call takes the state's mutex for some us and,
// where the thread sleeps, wakes it: one system call. Each turn of the loop goes round the parts once, and
// then waits for I/O.
//
// What a caller may rely on. After write() has returned true the key's older object is gone at once, and
// the new one is found only after its callback with kDone; between the two a find is a miss. After remove()
// has returned the key is a miss, and stays one after a crash as soon as a later sync() has been confirmed.
// read() holds the segment of its object (LogState::readers) so that it is not written over.
//
//   state          who sets it                                      effect
//   read_only      a failed write or sync, for good                 no write, no removal reaches the disk
//   off            many failed reads in a row, for good             finds are misses too; take_lost() empties
//   closing        close()                                          new calls are refused, the thread ends
//   sleeping       the thread, under the mutex, before it waits     the caller that finds it set wakes it
#include "ssd/log.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "ssd/log_parts.hpp"

namespace moonpool::ssd {

Log::Log(std::unique_ptr<Parts> parts) : parts_(std::move(parts)) {}
Log::~Log() = default;

void Log::close() { parts_->close(); }
const std::string& Log::directory() const { return parts_->state.options.directory; }
const LogId& Log::id() const { return parts_->state.superblock.id; }
std::span<const std::byte> Log::area() const { return parts_->area; }
const char* Log::io_name() const { return parts_->io.queue_name(); }
std::string Log::io_reason() const { return parts_->io.queue_reason(); }
void Log::step(bool wait) { parts_->step(wait); }
bool Log::is_stepped() const { return parts_->state.options.stepping.has_value(); }

// Callers keep the number for as long as they use the space: a number is given to another identity only
// after leave_space(), and after the last object of the space has gone.
uint32_t Log::space(std::string_view identity) {
    LogState& state = parts_->state;
    MutexLock lock(state.mutex);
    return state.open_space(identity);
}

void Log::leave_space(uint32_t space) {
    LogState& state = parts_->state;
    MutexLock lock(state.mutex);
    state.spaces[space].open = false;
}

// The index alone answers: no I/O. What was looked for counts as used, so that the reclaimer copies it when
// its segment is emptied.
std::optional<Found> Log::find(const Key& key, bool with_parent) {
    LogState& state = parts_->state;
    MutexLock lock(state.mutex);
    uint32_t at = state.off ? kNoEntry : state.index.find(key.space, key.hash, key.name);
    if (at == kNoEntry) return std::nullopt;
    Entry& e = state.index.entry(at);
    e.used = true;
    return Found{e.sequence, e.version, e.size, e.crc, with_parent ? std::string(e.parent()) : std::string()};
}

bool Log::write(const Key& key, std::string_view parent, std::vector<std::span<const std::byte>> parts,
                uint32_t crc, Done done, uint64_t version) {
    LogState& state = parts_->state;
    auto job = std::make_shared<WriteJob>();
    job->space = key.space;
    job->hash = key.hash;
    job->name = key.name;
    job->parent = parent;
    job->parts = std::move(parts);
    job->crc = crc;
    job->version = version;
    job->done = std::move(done);
    for (std::span<const std::byte> part : job->parts) job->size += part.size();
    bool wake;
    {
        MutexLock lock(state.mutex);
        // Writes under way count as records, for each will be one: the index must not exceed records_max
        // later. Segments with dead records free no entries, so a full index asks the reclaimer for room by
        // its own flag.
        bool full = state.writes_waiting >= state.options.queue_max;
        if (state.index.count() + state.writes_waiting >= state.options.records_max) {
            full = true;
            state.reclaim_wanted = true;
        }
        Record shape;
        shape.space = *state.spaces[key.space].identity;
        shape.name = key.name;
        shape.parent = parent;
        shape.size = job->size;
        // What does not fit into an empty segment never will. The first comparison is not made superfluous
        // by the last: it keeps the sums below from wrapping around for an absurd size.
        uint64_t most =
            state.superblock.segment_bytes - 2 * kBlockBytes;  // header, footer, and the summary's part
        bool fits = job->size < most && shape.encodable() &&
                    shape.bytes() + round_up_to_block(SummaryWriter::bytes_for(shape)) <= most;
        if (state.closing || state.read_only || state.off || full || !fits) {
            ++state.counters.refused;
            return false;
        }
        // From here on the order of sequences is the order of the writes to one key: all happens under the
        // mutex. A write that is still under way to the same key is dead on arrival (forget_writing), and
        // its record is removed once more when it has arrived.
        job->sequence = state.options.sequence->fetch_add(1) + 1;
        uint32_t old = state.index.find(key.hash);
        if (old != kNoEntry) state.drop(key.hash, state.index.entry(old).sequence);
        state.forget_writing(key.hash);
        state.writing[key.hash.low] = {job->sequence, version};
        ++state.writes_waiting;
        job->identity = state.spaces[key.space].identity;
        ++state.spaces[key.space].writes;
        state.write_inbox.push_back(std::move(job));
        // One caller wakes the thread, others that come before it runs do not.
        wake = std::exchange(state.sleeping, false);
    }
    if (wake) parts_->io.wake();
    return true;
}

// The place of the record is taken here, under the mutex, together with a hold on its segment: the
// reclaimer may move the entry afterwards, but the segment's bytes stay until the last reader has left.
bool Log::read(const Key& key, std::span<std::byte> to, Done done) {
    LogState& state = parts_->state;
    auto job = std::make_shared<ReadJob>();
    bool wake;
    {
        MutexLock lock(state.mutex);
        uint32_t at = state.index.find(key.space, key.hash, key.name);
        if (state.closing || state.off || at == kNoEntry || state.reads_waiting >= state.options.queue_max)
            return false;
        Entry& e = state.index.entry(at);
        if (e.size != to.size()) return false;
        e.used = true;
        job->sequence = e.sequence;
        job->hash = e.hash;
        job->place = e.place;
        job->offset = state.begin_of(e.place.slot) + uint64_t{e.place.block} * kBlockBytes + e.data_offset;
        job->to = to;
        job->crc = e.crc;
        job->done = std::move(done);
        ++state.readers[e.place.slot];
        ++state.reads_waiting;
        state.read_inbox.push_back(std::move(job));
        wake = std::exchange(state.sleeping, false);
    }
    if (wake) parts_->io.wake();
    return true;
}

bool Log::remove(const Key& key) {
    LogState& state = parts_->state;
    {
        MutexLock lock(state.mutex);
        uint32_t at = state.index.find(key.hash);
        // Two names may share a 128-bit hash only by an attack; the object of the other name is not this
        // caller's to remove.
        bool another = at != kNoEntry && state.index.find(key.space, key.hash, key.name) == kNoEntry;
        if (another) return false;
    }
    return remove(key.hash);
}

bool Log::remove(const Hash128& hash) {
    LogState& state = parts_->state;
    bool wake, was_there;
    {
        MutexLock lock(state.mutex);
        uint32_t at = state.index.find(hash);
        was_there = at != kNoEntry;
        if (was_there) {
            state.drop(hash, state.index.entry(at).sequence);
            ++state.counters.removed;
        }
        was_there |= state.forget_writing(hash);
        wake = was_there && std::exchange(state.sleeping, false);
    }
    if (wake) parts_->io.wake();
    return was_there;
}

bool Log::remove_older(const Hash128& hash, uint64_t version) {
    LogState& state = parts_->state;
    bool wake, stays = false;
    {
        MutexLock lock(state.mutex);
        uint64_t pushed = state.removals_pushed;
        if (uint32_t at = state.index.find(hash); at != kNoEntry) {
            stays = state.index.entry(at).version >= version;
            if (!stays) {
                state.drop(hash, state.index.entry(at).sequence);
                ++state.counters.removed;
            }
        }
        if (auto it = state.writing.find(hash.low); it != state.writing.end()) {
            bool newer = it->second.version >= version;
            stays |= newer;
            if (!newer) state.forget_writing(hash);
        }
        wake = pushed != state.removals_pushed && std::exchange(state.sleeping, false);
    }
    if (wake) parts_->io.wake();
    return stays;
}

uint64_t Log::bytes_of(std::string_view owner) const {
    const LogState& state = parts_->state;
    MutexLock lock(state.mutex);
    auto it = state.owners.find(owner);
    return it == state.owners.end() || state.off ? 0 : state.index.bytes_of(it->second);
}

uint32_t Log::trim(std::string_view owner, uint64_t bytes_max, uint32_t most, uint64_t newest) {
    LogState& state = parts_->state;
    uint32_t removed = 0;
    bool wake;
    {
        MutexLock lock(state.mutex);
        auto it = state.owners.find(owner);
        if (it == state.owners.end() || state.off) return 0;
        for (; removed < most && state.index.bytes_of(it->second) > bytes_max; ++removed) {
            const Entry& e = state.index.entry(state.index.oldest_of(it->second));
            if (e.sequence > newest) break;
            state.gone.push_back(e.hash);
            state.drop(e.hash, e.sequence);
            ++state.counters.removed;
        }
        wake = removed != 0 && std::exchange(state.sleeping, false);
    }
    if (wake) parts_->io.wake();
    return removed;
}

std::optional<uint64_t> Log::sequence(const Hash128& hash) const {
    std::optional<Rank> found = rank(hash);
    if (!found) return std::nullopt;
    return found->second;
}

std::optional<Log::Rank> Log::rank(const Hash128& hash) const {
    const LogState& state = parts_->state;
    MutexLock lock(state.mutex);
    uint32_t at = state.off ? kNoEntry : state.index.find(hash);
    if (at == kNoEntry) return std::nullopt;
    return Rank{state.index.entry(at).version, state.index.entry(at).sequence};
}

uint32_t Log::hashes(uint32_t cursor, uint32_t scan, std::vector<Hash128>& out) const {
    const LogState& state = parts_->state;
    MutexLock lock(state.mutex);
    uint32_t end = state.off ? 0 : state.index.slots();
    for (; cursor < end && scan > 0; ++cursor, --scan) {
        if (state.index.entry(cursor).sequence != 0) out.push_back(state.index.entry(cursor).hash);
    }
    return cursor < end ? cursor : 0;
}

// The node tells the directory of what it takes here. The index is emptied in steps of `scan`, because a
// large one would hold the mutex for too long.
std::vector<Hash128> Log::take_lost(uint32_t scan) {
    LogState& state = parts_->state;
    MutexLock lock(state.mutex);
    std::vector<Hash128> lost;
    if (!state.off) return lost;
    for (; scan > 0 && state.index.count() != 0; --scan, ++state.lost_cursor) {
        if (state.lost_cursor >= state.index.slots())
            state.lost_cursor = 0;  // a write may have ended behind it
        if (state.index.entry(state.lost_cursor).sequence == 0) continue;
        lost.push_back(state.index.entry(state.lost_cursor).hash);
        state.index.erase(state.lost_cursor);
    }
    return lost;
}

void Log::sync(Done done) {
    LogState& state = parts_->state;
    auto job = std::make_shared<WriteJob>();
    job->kind = WriteJob::Kind::kSync;
    job->done = std::move(done);
    bool wake = false, refused;
    {
        MutexLock lock(state.mutex);
        // Removals that were pushed before this call have to be on the disk first; the writer compares with
        // this number. The sync itself then covers them together with all data.
        refused = state.closing || state.read_only || state.off;
        if (!refused) {
            ++state.writes_waiting;
            job->removals_before = state.removals_pushed;
            state.write_inbox.push_back(job);
            wake = std::exchange(state.sleeping, false);
        }
    }
    if (refused) return job->done(Outcome::kRefused);
    if (wake) parts_->io.wake();
}

bool Log::write_area(uint32_t block, std::span<const std::byte> bytes, Done done) {
    LogState& state = parts_->state;
    AreaJob job;
    job.offset = kAreaBegin + uint64_t{block} * kBlockBytes;
    job.memory = shared_block(bytes.size());
    job.bytes = bytes.size();
    job.done = std::move(done);
    std::memcpy(job.memory.get(), bytes.data(), bytes.size());
    bool wake;
    {
        MutexLock lock(state.mutex);
        if (state.closing || state.read_only || state.off) return false;
        state.area_inbox.push_back(std::move(job));
        wake = std::exchange(state.sleeping, false);
    }
    if (wake) parts_->io.wake();
    return true;
}

uint32_t Log::list(uint32_t space, uint32_t cursor, uint32_t scan, std::vector<Listed>& out) const {
    const LogState& state = parts_->state;
    MutexLock lock(state.mutex);
    uint32_t end = state.off ? 0 : state.index.slots();
    for (; cursor < end && scan > 0; ++cursor, --scan) {
        const Entry& e = state.index.entry(cursor);
        if (e.sequence == 0 || e.space != space) continue;
        out.push_back(Listed{e.sequence, e.size, e.crc, std::string(e.name())});
    }
    return cursor < end ? cursor : 0;
}

bool Log::accepts_writes() const {
    const LogState& state = parts_->state;
    MutexLock lock(state.mutex);
    return !state.read_only && !state.off && !state.closing;
}

std::string Log::trouble() const {
    const LogState& state = parts_->state;
    MutexLock lock(state.mutex);
    return state.trouble;
}

uint64_t Log::object_bytes_max() const {
    const LogState& state = parts_->state;
    return state.superblock.segment_bytes - 3 * kBlockBytes - 2 * uint64_t{kHeaderBytesMax};
}

std::vector<std::pair<const char*, uint64_t>> Log::counters() const {
    const LogState& state = parts_->state;
    MutexLock lock(state.mutex);
    const LogState::Counters& c = state.counters;
    return {
        {"ssd_objects", state.index.count()},
        {"ssd_object_bytes", state.index.object_bytes()},
        {"ssd_spaces", state.space_ids.size()},
        {"ssd_bytes", state.slots * state.superblock.segment_bytes},
        {"ssd_live_bytes", state.index.live_bytes()},
        {"ssd_free_bytes", parts_->segments.free_bytes()},
        {"ssd_reads_waiting", state.reads_waiting},
        {"ssd_writes_waiting", state.writes_waiting},
        {"ssd_read_only", state.read_only ? 1u : 0u},
        {"ssd_off", state.off ? 1u : 0u},
        {"ssd_buffered", parts_->direct ? 0u : 1u},
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
        {"ssd_recovered_damaged_segments", parts_->recovery.damaged},
        {"ssd_recovered_scanned_segments", parts_->recovery.scanned},
        {"ssd_recovered_bytes_read", parts_->recovery.bytes_read},
    };
}

bool Log::check_integrity() const {
    const LogState& state = parts_->state;
    MutexLock lock(state.mutex);
    return state.index.check_integrity() && state.index.count() <= state.options.records_max;
}

// ---- the thread

// In a child of fork() neither the thread nor the ring is ours: closing either would end the parent's I/O.
Log::Parts::~Parts() {
    if (fork.in_child()) {
        (void)thread.join();
        io.abandon_queue();
        return;
    }
    close();
}

void Log::Parts::close() {
    if (fork.in_child()) return;  // the thread is the parent's
    {
        MutexLock lock(state.mutex);
        state.closing = true;
    }
    if (thread.started()) {
        io.wake();
        (void)thread.join();
    } else if (io.is_open() && state.options.stepping) {
        run();
    } else {
        return;
    }
    io.close_file();  // another may have the directory now; no thread submits to the queue any more
}

// The order of a turn matters: reads first, for callers wait for them; then the reclaimer, whose copies
// make room; then the removals, and the writes that need the room; last what becomes possible when writes
// have ended. The decision to sleep is made under the mutex, so that no caller can add work between the
// look and the wait.
void Log::Parts::run() {
    while (std::optional<int> wait_ms = turn()) io.reap(*wait_ms);
}

std::optional<int> Log::Parts::turn() {
    bool closing = take_inbox();
    write_area();
    if (closing) {
        reader.refuse();
        writer.refuse();
        reclaimer.stop_copying();
    }
    reader.start();
    reclaimer.step();
    writer.queue_removals();
    writer.append_writes();
    io.sync_when_due();
    io.step_barriers();
    tell_gone();
    int wait_ms = 0;
    {
        MutexLock lock(state.mutex);
        bool more = !state.read_inbox.empty() || !state.write_inbox.empty() || !state.area_inbox.empty() ||
                    state.closing != closing;
        // Removals that are queued while a record of them is on its way go with the next one, at its end.
        more |= !state.removals.empty() && !writer.removals_in_flight() && !state.read_only;
        if (!more) {
            state.sleeping = true;
            wait_ms = static_cast<int>(std::clamp<uint32_t>(state.options.sync_ms, 1, 1000));
        }
    }
    if (closing && finished()) return std::nullopt;
    return wait_ms;
}

void Log::Parts::step(bool wait) {
    for (int wait_ms : {0, 1}) {
        io.reap(wait_ms);
        while (turn() == 0) io.reap(0);
        if (!wait) return;
    }
}

// Moves what callers have given to the thread's own queues.
bool Log::Parts::take_inbox() {
    MutexLock lock(state.mutex);
    state.sleeping = false;
    for (ReadJobPtr& job : state.read_inbox) reader.add(std::move(job));
    for (WriteJobPtr& job : state.write_inbox) writer.add(std::move(job));
    state.read_inbox.clear();
    state.write_inbox.clear();
    return state.closing;
}

// What fails there fails for its caller alone: no segment is the worse for it.
void Log::Parts::write_area() {
    std::vector<AreaJob> jobs;
    {
        MutexLock lock(state.mutex);
        jobs.swap(state.area_inbox);
    }
    for (AreaJob& job : jobs) {
        io.write_block(job.offset, job.memory, job.bytes, [this, done = std::move(job.done)](int error) {
            if (error != 0) {
                MutexLock lock(state.mutex);
                ++state.counters.write_errors;
            }
            done(error == 0 ? Outcome::kDone : Outcome::kFailed);
        });
    }
}

// Closing: seals what is open, and waits for all that is in flight.
// Called once a turn while closing. The first call that finds nothing in flight seals the open segment,
// which puts new writes in flight; the next one that finds nothing is the end.
bool Log::Parts::finished() {
    if (!io.at_rest() || !writer.at_rest()) return false;
    {
        MutexLock lock(state.mutex);
        if (!state.is_writable()) return true;
        // Removals that found no room, though nothing is on its way any more, stay unwritten.
        if (!state.removals.empty() && !writer.has_internal()) return false;
    }
    return !writer.seal_open();
}

// Outside the mutex: the callback takes locks of the node.
void Log::Parts::tell_gone() {
    std::vector<Hash128> gone;
    {
        MutexLock lock(state.mutex);
        gone.swap(state.gone);
    }
    if (!gone.empty() && state.options.on_gone) state.options.on_gone(gone);
}

}  // namespace moonpool::ssd
