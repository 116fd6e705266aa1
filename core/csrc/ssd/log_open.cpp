// Opening a log: its superblock, its queue, what recovery finds, and its thread. The only part that makes
// files.
#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <random>

#include "ssd/log_parts.hpp"

namespace moonpool::ssd {

namespace {

uint64_t default_segment_bytes(uint64_t bytes) {
    return std::clamp<uint64_t>(bytes / 64 / (1u << 20) * (1u << 20), 4u << 20, 64u << 20);
}

std::unique_ptr<std::byte, void (*)(void*)> aligned_block(uint64_t bytes) {
    auto* memory = static_cast<std::byte*>(std::aligned_alloc(kBlockBytes, bytes));
    std::memset(memory, 0, bytes);
    return {memory, std::free};
}

Superblock fresh_superblock(uint64_t segment_bytes) {
    std::random_device random;
    Superblock s;
    for (uint8_t& byte : s.id) byte = static_cast<uint8_t>(random());
    s.segment_bytes = segment_bytes;
    s.first_number = (uint64_t{random()} << 20) + 1;
    return s;
}

// Of a file as it is found; of a new log it stays zeroed.
int read_area(File& file, std::vector<std::byte>& area) {
    if (file.size() < kSegmentsBegin) return 0;
    auto memory = aligned_block(kAreaBytes);
    if (int error = file.read(kAreaBegin, memory.get(), kAreaBytes).error) return error;
    area.assign(memory.get(), memory.get() + kAreaBytes);
    return 0;
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
        if (int error = file.read(0, block.get(), kBlockBytes).error)
            return os_error("reading " + path, error);
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

Result<std::unique_ptr<Log>> Log::open(LogOptions options) {
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
    std::vector<std::byte> area(kAreaBytes);
    if (int error = read_area(**file, area)) return os_error("reading " + options.directory, error);

    auto parts = std::make_unique<Parts>(std::move(options), std::move(*file), *superblock);
    parts->area = std::move(area);
    const std::string& directory = parts->state.options.directory;
    uint64_t file_bytes = kSegmentsBegin + parts->state.slots * superblock->segment_bytes;
    if (int error = parts->io.file().reserve(file_bytes)) {
        if (error == ENOSPC) {
            return Error{Code::kOs, "the disk of " + directory + " has no room for " +
                                        std::to_string(file_bytes) + " bytes; make room or give it less"};
        }
        return os_error("reserving " + std::to_string(file_bytes) + " bytes in " + directory, error);
    }
    if (Status status = parts->io.open_queue(); !status) return status.error();
    if (!parts->reader.valid() || !parts->writer.valid()) return os_error("buffers");
    if (Status started = parts->start(); !started) return started.error();
    return std::unique_ptr<Log>(new Log(std::move(parts)));
}

Status Log::Parts::start() {
    Index index(state.slots);
    // Called by one of the recovery's threads at a time, which has the index.
    auto space_of = [this, &index](std::string_view identity) {
        MutexLock lock(state.mutex);
        uint32_t space = state.open_space(identity);
        index.set_owner(space, state.owner_of(identity));
        return space;
    };
    recovery = recover(io.file(), state.superblock, state.slots, state.options.records_max, index, space_of,
                       state.options.stepping ? 1 : kRecoveryThreads);
    {
        MutexLock lock(state.mutex);
        state.index = std::move(index);
        for (LogState::Space& space : state.spaces) space.open = false;  // recovery asked, and has ended
        for (uint64_t sequence : recovery.unnamed) state.push_removal(sequence);
    }
    segments.recovered(recovery.numbers, recovery.next_number);
    if (recovery.tail_is_due) segments.plan_tail();
    // Each start opens a segment, so many in a row leave no room.
    while (segments.free() < kSegmentsForReclaim && reclaimer.forget_oldest()) {
    }
    std::atomic<uint64_t>& sequence = *state.options.sequence;
    uint64_t known = sequence.load();
    while (known < recovery.sequence_max && !sequence.compare_exchange_weak(known, recovery.sequence_max)) {
    }
    io.begin_sync_clock();
    direct = io.file().direct();
    if (state.options.stepping) return success();
    return thread.start("mp-ssd", [this] { run(); });
}

}  // namespace moonpool::ssd
