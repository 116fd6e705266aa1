#include "store/device/kernel_mover.hpp"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

namespace moonpool {

namespace {

constexpr int kUploadTimeoutMs = 10'000;
constexpr uint64_t kListAlign = 256;
// One block as large as they come: beside an engine that decodes, each multiprocessor costs more than the
// threads on it. With 4 lanes on an H200 a block each moves what the link does (39 GB/s of 512-byte rows).
constexpr uint32_t kThreads = device::ObjectsKernel::kThreadsMax, kWarps = kThreads / 32;
constexpr uint32_t kSplitMin = 4;

void write_list(const ChunkInFlight& in, std::span<const KvPlace> objects) {
    auto* list = reinterpret_cast<device::KvObject*>(in.slot.bytes().data());
    for (const KvPlace& object : objects) *list++ = {object.offset, object.block, object.column};
}

Status wait_for(device::Stream& stream, const device::Event* after) {
    return after == nullptr ? success() : stream.wait_for(*after);
}

}  // namespace

uint64_t KernelMover::list_bytes(size_t objects) {
    return (objects * sizeof(device::KvObject) + kListAlign - 1) / kListAlign * kListAlign;
}

Result<std::unique_ptr<KernelMover>> KernelMover::open(std::shared_ptr<const device::Device> device,
                                                       device::PinnedRing& ring, const PartTable& table,
                                                       uint32_t kernel_blocks) {
    auto kernel = device::ObjectsKernel::load(device);
    if (!kernel) return kernel.error();
    std::unique_ptr<KernelMover> mover(new KernelMover(std::move(device), std::move(*kernel), kernel_blocks));
    if (Status uploaded = mover->upload(ring, table); !uploaded) return uploaded.error();
    return mover;
}

Status KernelMover::to_kv(const ChunkInFlight& in, std::span<const KvPlace> objects,
                          const device::Event* after) const {
    write_list(in, objects);
    if (Status s = in.stream->copy(to_staging(in, objects), device::SourceOrder::kAny); !s) return s;
    if (Status s = wait_for(*in.stream, after); !s) return s;
    return launch(in, objects.size(), device::Move::kToKv);
}

// What the slot has is one copy, up to an object that lies in the arena. Those are copied one by one: two
// that are neighbours there may lie in two pinned parts.
std::vector<device::Copy> KernelMover::to_staging(const ChunkInFlight& in,
                                                  std::span<const KvPlace> objects) const {
    const uint64_t slot = in.slot.address();
    std::vector<device::Copy> copies{{in.staged, slot, list_bytes(objects.size())}};
    bool in_slot = true;
    for (const KvPlace& object : objects) {
        const uint64_t to = in.staged + object.offset, bytes = object_bytes_[object.column];
        const bool here = object.host == slot + object.offset;
        if (here && in_slot) {
            copies.back().bytes = to + bytes - copies.back().to;
        } else {
            copies.push_back({to, object.host, bytes});
        }
        in_slot = here;
    }
    return copies;
}

Status KernelMover::to_slot(const ChunkInFlight& in, std::span<const KvPlace> objects,
                            const device::Event* after) const {
    write_list(in, objects);
    uint64_t list = list_bytes(objects.size());
    if (Status s = in.stream->copy({in.staged, in.slot.address(), list}); !s) return s;
    if (Status s = wait_for(*in.stream, after); !s) return s;
    if (Status s = launch(in, objects.size(), device::Move::kToStaging); !s) return s;
    return in.stream->copy({in.slot.address() + list, in.staged + list, in.packing.bytes - list});
}

Status KernelMover::launch(const ChunkInFlight& in, size_t objects, device::Move move) const {
    return kernel_.launch(
        *in.stream,
        {.rows = rows_.address(),
         .begins = begins_,
         .objects = in.staged,  // the list is the first thing there
         .count = static_cast<uint32_t>(objects),
         .split = std::max(kSplitMin,
                           kWarps * kernel_blocks_ / static_cast<uint32_t>(std::max<size_t>(objects, 1))),
         .staging = in.staged,
         .move = move},
        kernel_blocks_, kThreads);
}

// By way of the ring, in pieces that fit its slots.
Status KernelMover::upload(device::PinnedRing& ring, const PartTable& table) {
    std::vector<device::KvRow> rows;
    std::vector<uint32_t> begins{0};
    for (size_t c = 0; c < table.columns(); ++c) {
        uint32_t offset = 0;
        for (const StridedRow& row : table.rows(c)) {
            auto length = static_cast<uint32_t>(row.length);
            rows.push_back({row.address, row.stride, length, offset});
            offset += length;
        }
        begins.push_back(static_cast<uint32_t>(rows.size()));
        object_bytes_.push_back(offset);
    }
    uint64_t rows_bytes = rows.size() * sizeof(device::KvRow);
    std::string image(rows_bytes + begins.size() * sizeof(uint32_t), '\0');
    std::memcpy(image.data(), rows.data(), rows_bytes);
    std::memcpy(image.data() + rows_bytes, begins.data(), image.size() - rows_bytes);

    auto memory = device::DeviceMemory::allocate(device_, image.size());
    if (!memory) return memory.error();
    rows_ = std::move(*memory);
    begins_ = rows_.address() + rows_bytes;
    auto stream = device::Stream::create(device_, device::Stream::Priority::kDefault);
    if (!stream) return stream.error();
    auto event = device::Event::create(device_);
    if (!event) return event.error();
    for (size_t at = 0; at < image.size(); at += ring.slot_bytes()) {
        auto slot = ring.take(kUploadTimeoutMs);
        if (!slot) return slot.error();
        size_t n = std::min<size_t>(image.size() - at, ring.slot_bytes());
        std::memcpy(slot->bytes().data(), image.data() + at, n);
        slot->used_on(*stream);
        if (Status s = stream->copy({rows_.address() + at, slot->address(), n}); !s) return s;
    }
    if (Status s = event->record(stream->handle()); !s) return s;
    Result<bool> over = event->wait(kUploadTimeoutMs);
    if (!over) return over.error();
    if (*over) return success();
    rows_.leak();
    return Error{Code::kTimeout, "the card did not end a copy of some kilobytes in 10 s"};
}

}  // namespace moonpool
