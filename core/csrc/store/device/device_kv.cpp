#include "store/device/device_kv.hpp"

#include <algorithm>
#include <bit>
#include <chrono>
#include <utility>

#include "device/address.hpp"
#include "store/device/direct_mover.hpp"
#include "store/device/kernel_mover.hpp"
#include "store/device/load_job.hpp"
#include "store/device/save_job.hpp"

namespace moonpool {

namespace {

constexpr uint64_t kStagedAlign = 16;       // the kernel moves words of 16 bytes where all is aligned to them
constexpr uint64_t kChunkMin = 512u << 10;  // below it a copy engine does not reach the link's speed
constexpr uint32_t kSaveLanes = 1;

uint64_t align(uint64_t n, uint64_t to) { return (n + to - 1) / to * to; }

Status check_memory(const PartTable& table, std::span<const uint32_t> blocks, int ordinal) {
    for (size_t c = 0; c < table.columns(); ++c) {
        for (const StridedRow& row : table.rows(c)) {
            uint64_t bytes = 0;
            if (row.length > UINT32_MAX || __builtin_mul_overflow(row.stride, blocks[c] - 1, &bytes) ||
                __builtin_add_overflow(bytes, row.length, &bytes)) {
                return Error{Code::kInvalidArgument, "a row of the KV cache is longer than memory can be"};
            }
            Result<device::Address> is = device::classify(row.address, bytes);
            if (!is) return is.error();
            if (is->kind != device::AddressKind::kDevice || is->device != ordinal) {
                return Error{Code::kInvalidArgument, "the KV cache does not lie in memory of device " +
                                                         std::to_string(ordinal) +
                                                         ", as the CUDA driver says"};
            }
        }
    }
    return success();
}

}  // namespace

Result<std::shared_ptr<DeviceKv>> DeviceKv::open(int ordinal, const PartTable& table,
                                                 std::vector<uint32_t> blocks,
                                                 const DeviceKvOptions& options) {
    if (table.columns() == 0 || blocks.size() != table.columns() || std::ranges::count(blocks, 0u) != 0) {
        return Error{Code::kInvalidArgument, "a KV cache has columns, and each of them has blocks"};
    }
    auto device = device::Device::open(ordinal);
    if (!device) return device.error();
    if (Status checked = check_memory(table, blocks, ordinal); !checked) return checked.error();

    bool direct = DirectMover::fits(table, options.direct_row_bytes);
    uint64_t largest = 0;
    std::vector<std::vector<StridedRow>> columns;  // of the ring's table: an object lies whole, at its index
    for (size_t c = 0; c < table.columns(); ++c) largest = std::max(largest, table.object_bytes(c));
    uint64_t slot = std::bit_ceil(std::max(
        options.slot_bytes, (direct ? 0 : KernelMover::list_bytes(1)) + align(largest, kStagedAlign)));
    auto slots = static_cast<uint32_t>(std::max<uint64_t>(options.ring_bytes / slot, 2));
    if (slots * slot > UINT32_MAX) {
        return Error{Code::kTooLarge, "the pinned ring may have at most 4 GiB"};
    }
    auto ring = device::PinnedRing::open(*device, {.slot_bytes = slot, .slots = slots, .slots_min = 2});
    if (!ring) return ring.error();
    for (size_t c = 0; c < table.columns(); ++c) {
        columns.push_back({{(*ring)->address(), 1, table.object_bytes(c)}});
    }

    std::shared_ptr<DeviceKv> kv(new DeviceKv(*device, std::move(blocks), options));
    kv->ring_ = std::move(*ring);
    kv->ring_table_ = std::make_unique<PartTable>(std::move(columns));
    if (direct) {
        kv->mover_ = std::make_unique<DirectMover>(table);
    } else {
        auto mover = KernelMover::open(*device, *kv->ring_, table, options.kernel_blocks);
        if (!mover) return mover.error();
        kv->mover_ = std::move(*mover);
    }
    kv->save_share_ = std::make_unique<device::RingShare>(kv->ring_->slots() / 2);
    auto puts = PutQueue::open();
    if (!puts) return puts.error();
    kv->puts_ = std::move(*puts);
    CopyLanes::Options lanes{.lanes = options.load_lanes,
                             .thread_name = "moonpool-load",
                             .staging = kv->mover_->needs_staging(),
                             .refused_ms = options.refused_ms};
    auto loads = CopyLanes::open(*device, *kv->ring_, lanes);
    if (!loads) return loads.error();
    lanes.lanes = kSaveLanes;
    lanes.thread_name = "moonpool-save";
    lanes.share = kv->save_share_.get();
    auto saves = CopyLanes::open(*device, *kv->ring_, lanes);
    if (!saves) return saves.error();
    kv->loads_ = std::move(*loads);
    kv->saves_ = std::move(*saves);
    return kv;
}

// In a child of fork() the lanes exist in the parent only, which may hold their mutexes, too.
DeviceKv::~DeviceKv() {
    if (device_->in_child()) {
        (void)loads_.release();
        (void)saves_.release();
        (void)puts_.release();
        (void)ring_.release();
        return;
    }
    (void)close(CopyLanes::kCloseMs);
}

Status DeviceKv::close(int timeout_ms) {
    using std::chrono::steady_clock;
    if (device_->in_child()) return success();
    auto deadline = steady_clock::now() + std::chrono::milliseconds(timeout_ms);
    for (CopyLanes* lanes : {loads_.get(), saves_.get()}) {
        if (lanes != nullptr) lanes->begin_close(deadline);
    }
    bool loads = loads_ == nullptr || loads_->join();
    bool saves = saves_ == nullptr || saves_->join();
    if (puts_ != nullptr) puts_->close(deadline);
    set_arena(nullptr);  // a load that could not be ended has leaked it
    auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - steady_clock::now());
    Status ring = ring_ == nullptr ? success() : ring_->close(std::max(static_cast<int>(left.count()), 0));
    if (loads && saves) return ring;
    mover_->leak();
    return Error{Code::kTimeout, "the card did not end its copies in " + std::to_string(timeout_ms) +
                                     " ms; the memory that they use stays allocated until this process ends"};
}

std::string DeviceKv::lost() const {
    if (int code = device_->lost(); code != 0) {
        return "the card is lost to this process: " + device_->driver().describe(code);
    }
    std::string broken = loads_->broken();
    return broken.empty() ? saves_->broken() : broken;
}

Result<Mark> DeviceKv::mark(uint64_t stream) {
    auto event = device::Event::create(device_);
    if (!event) return event.error();
    if (Status s = event->record(reinterpret_cast<device::CuStream*>(stream)); !s) return s.error();
    return std::make_shared<device::Event>(std::move(*event));
}

ArenaPins DeviceKv::pin_arena(Client& client, uint64_t bytes) {
    std::shared_ptr<PinnedArena> pinned = arena(client);
    if (pinned == nullptr) {
        auto opened = PinnedArena::open(device_, client, options_.arena);
        if (!opened) return {.why = opened.error().text};
        pinned = std::move(*opened);
        set_arena(pinned);
    }
    return pinned->grow(bytes);
}

std::shared_ptr<PinnedArena> DeviceKv::arena(Client& client) {
    std::shared_ptr<PinnedArena> pinned;
    {
        MutexLock lock(arena_mutex_);
        pinned = arena_;
    }
    if (pinned == nullptr || pinned->alive(client)) return pinned;
    set_arena(nullptr);  // the memory of a node that has ended is not kept from its successor
    return nullptr;
}

// The pins of the one before end outside of the lock, with its last owner.
void DeviceKv::set_arena(std::shared_ptr<PinnedArena> arena) {
    MutexLock lock(arena_mutex_);
    arena_.swap(arena);
}

LoadReport DeviceKv::load(Client& client, const DeviceLoad& load) {
    LoadReport report;
    report.ok.assign(load.descriptors.size(), 0);
    if (Status checked = check(load.blocks, load.columns); !checked) {
        report.error = checked.error().text;
        return report;
    }
    // Bytes that are to be compared with their checksum pass a CPU.
    auto job = std::make_shared<LoadJob>(*this, client, load, load.verify ? nullptr : arena(client));
    // Small enough that each lane gets some of it.
    uint64_t total = 0;
    for (uint16_t column : load.columns) total += object_bytes(column);
    uint64_t share = std::max(total / (2 * loads_->lanes()), kChunkMin);
    std::vector<Chunk> chunks = cut(job, load.columns, std::min(share, ring_->slot_bytes()));
    for (Chunk& chunk : chunks) loads_->submit(std::move(chunk));
    return job->wait();
}

void DeviceKv::start_save(Client& client, DeviceSave save, SaveCalls calls) {
    if (Status checked = check(save.blocks, save.columns); !checked) {
        calls.staged();
        calls.ended(checked.error());
        return;
    }
    std::span<const uint16_t> columns = save.columns;
    auto job = std::make_shared<SaveJob>(*this, *puts_, client, std::move(save), std::move(calls));
    std::vector<Chunk> chunks = cut(job, columns, ring_->slot_bytes());
    job->expect(chunks.size());
    for (Chunk& chunk : chunks) saves_->submit(std::move(chunk));
}

Packing DeviceKv::pack(std::span<const uint16_t> columns) const {
    Packing packing;
    packing.offsets.reserve(columns.size());
    packing.bytes = mover_->head_bytes(columns.size());
    for (uint16_t column : columns) {
        packing.offsets.push_back(static_cast<uint32_t>(packing.bytes));
        packing.bytes += align(object_bytes(column), kStagedAlign);
    }
    return packing;
}

std::vector<Chunk> DeviceKv::cut(const std::shared_ptr<CopyJob>& job, std::span<const uint16_t> columns,
                                 uint64_t bytes) const {
    std::vector<Chunk> chunks;
    uint64_t objects = 0;  // bytes of those in the chunk
    uint32_t begin = 0, n = static_cast<uint32_t>(columns.size());
    for (uint32_t i = 0; i < n; ++i) {
        uint64_t more = align(object_bytes(columns[i]), kStagedAlign);
        if (i > begin && mover_->head_bytes(i + 1 - begin) + objects + more > bytes) {
            chunks.emplace_back(job, begin, i);
            begin = i;
            objects = 0;
        }
        objects += more;
    }
    if (begin < n) chunks.emplace_back(job, begin, n);
    return chunks;
}

uint64_t DeviceKv::ring_offset(const device::RingSlot& slot) const {
    return slot.address() - ring_->address();
}

Status DeviceKv::check(std::span<const uint32_t> blocks, std::span<const uint16_t> columns) const {
    if (std::string text = lost(); !text.empty()) return Error{Code::kUnavailable, std::move(text)};
    bool inside = blocks.size() == columns.size();  // and of each object the block is one of its column's
    for (size_t i = 0; inside && i < blocks.size(); ++i) {
        inside = columns[i] < blocks_.size() && blocks[i] < blocks_[columns[i]];
    }
    if (inside) return success();
    return Error{Code::kInvalidArgument, "a block or a column is not one of this KV cache"};
}

}  // namespace moonpool
