#include "scenario.hpp"

#include <optional>

// Evaluates to the value; returns the error.
#define TRY(expression)                   \
    ({                                    \
        auto tried = (expression);        \
        if (!tried) return tried.error(); \
        std::move(*tried);                \
    })

namespace moonpool::testing {

namespace {

using namespace moonpool::device;

constexpr KvShape kShape{.layers = 2, .heads = 2, .tokens = 2, .blocks = 4, .content = 24};
constexpr unsigned kGroup = 2;  // objects
constexpr unsigned kGroups = 4;
constexpr uint64_t kGroupBytes = kGroup * kShape.object_bytes();
constexpr uint64_t kTables = 4096, kOf = 4096;
static_assert(kShape.bytes() <= kOf);
static_assert(kGroups * kGroup == kShape.blocks * kShape.heads);

}  // namespace

struct Scenario::Parts {
    std::optional<Stream> compute, copies, kernels;
    std::optional<Event> computed, owned_before, end;
    DeviceMemory kv, other, tables;
    PinnedMemory host;  // truth | garbage | what the forward saw | tables
    std::unique_ptr<PinnedRing> ring;
    std::optional<Staging> staging;
    std::optional<ObjectsKernel> kernel;
    uint64_t rows[2] = {}, begins = 0, objects = 0;  // on the card

    unsigned char* truth() { return reinterpret_cast<unsigned char*>(host.data()); }
    unsigned char* garbage() { return truth() + kOf; }
    unsigned char* seen() { return truth() + 2 * kOf; }
    Status queue_earlier_owner() {
        auto from = reinterpret_cast<uint64_t>(garbage());
        if (Status s = compute->copy({other.address(), from, kShape.bytes()}); !s) return s;
        return owned_before->record(compute->handle());
    }
};

namespace {

Result<bool> wait(const Event& event, int timeout_ms) {
    bool over = TRY(event.wait(timeout_ms));
    if (!over) return Error{Code::kTimeout, "the card does not get there"};
    return true;
}

template <class Parts>
Result<Unit> upload_tables(Parts& parts, std::byte* host) {
    uint64_t at = 0;
    auto put = [&](const auto& values) {
        uint64_t begin = at;
        std::memcpy(host + at, values.data(), values.size() * sizeof(values[0]));
        at += (values.size() * sizeof(values[0]) + 15) / 16 * 16;
        return parts.tables.address() + begin;
    };
    RowTable kv = row_table(kShape, parts.kv.address()), other = row_table(kShape, parts.other.address());
    std::vector<KvObject> objects;
    for (unsigned i = 0; i < kShape.objects(); ++i) {
        objects.push_back({i % kGroup * kShape.object_bytes(), block_of(kShape, i), i % kShape.heads});
    }
    parts.rows[0] = put(kv.rows);
    parts.rows[1] = put(other.rows);
    parts.begins = put(kv.begins);
    parts.objects = put(objects);
    return parts.copies->copy({parts.tables.address(), reinterpret_cast<uint64_t>(host), at});
}

}  // namespace

Status Scenario::move_by_kernel(Parts& parts) {
    Stream &copies = *parts.copies, &kernels = *parts.kernels;
    Staging& staging = *parts.staging;
    Event& end = *parts.end;
    auto job = [&](unsigned group, size_t half, Move move) {
        return ObjectsJob{.rows = parts.rows[move == Move::kToKv ? 1 : 0],
                          .begins = parts.begins,
                          .objects = parts.objects + group * kGroup * sizeof(KvObject),
                          .count = kGroup,
                          .split = 2,
                          .staging = staging.address(half),
                          .move = move};
    };
    if (!with(Mistake::kSaveDoesNotWait)) TRY(kernels.wait_for(*parts.computed));
    std::vector<std::vector<unsigned char>> saved;
    for (unsigned group = 0; group < kGroups; ++group) {
        size_t half = group % Staging::kHalves;
        TRY(staging.begin(half, kernels));
        TRY(parts.kernel->launch(kernels, job(group, half, Move::kToStaging), 1, 256));
        TRY(staging.end(half, kernels));
        RingSlot slot = TRY(parts.ring->take(timeout_ms_));
        std::memset(slot.bytes().data(), 0x77, kGroupBytes);
        slot.used_on(copies);
        TRY(staging.begin(half, copies));
        if (with(Mistake::kEndBeforeCopy)) TRY(end.record(copies.handle()));
        Copy group_copies[kGroup];
        for (unsigned i = 0; i < kGroup; ++i) {
            uint64_t offset = i * kShape.object_bytes();
            group_copies[i] = {slot.address() + offset, staging.address(half) + offset,
                               kShape.object_bytes()};
        }
        TRY(copies.copy(group_copies,
                        with(Mistake::kSourceAtAnyTime) ? SourceOrder::kAny : SourceOrder::kStream));
        TRY(staging.end(half, copies));
        if (!with(Mistake::kEndBeforeCopy)) TRY(end.record(copies.handle()));
        if (!with(Mistake::kEndNotAwaited)) TRY(wait(end, timeout_ms_));
        auto* bytes = reinterpret_cast<unsigned char*>(slot.bytes().data());
        saved.emplace_back(bytes, bytes + kGroupBytes);
    }

    TRY(parts.queue_earlier_owner());
    if (!with(Mistake::kLoadDoesNotWait)) TRY(kernels.wait_for(*parts.owned_before));
    for (unsigned group = 0; group < kGroups; ++group) {
        size_t half = group % Staging::kHalves;
        {
            RingSlot slot = TRY(parts.ring->take(timeout_ms_));
            std::memcpy(slot.bytes().data(), saved[group].data(), kGroupBytes);
            if (!with(Mistake::kSlotWithoutStream)) slot.used_on(copies);
            if (!with(Mistake::kHalfOverwritten)) TRY(staging.begin(half, copies));
            TRY(copies.copy({staging.address(half), slot.address(), kGroupBytes}));
            TRY(staging.end(half, copies));
        }
        if (!with(Mistake::kKernelBeforeCopy)) TRY(staging.begin(half, kernels));
        bool last = group + 1 == kGroups;
        if (last && with(Mistake::kEndBeforeKernel)) TRY(end.record(kernels.handle()));
        TRY(parts.kernel->launch(kernels, job(group, half, Move::kToKv), 1, 256));
        TRY(staging.end(half, kernels));
        if (last && !with(Mistake::kEndBeforeKernel)) TRY(end.record(kernels.handle()));
    }
    return success();
}

Status Scenario::move_directly(Parts& parts) {
    Stream& copies = *parts.copies;
    Event& end = *parts.end;
    auto batch = [&](unsigned group, uint64_t slot, uint64_t cache, Move move) {
        RowTable table = row_table(kShape, cache);
        std::vector<Copy> rows;
        for (unsigned i = group * kGroup; i < (group + 1) * kGroup; ++i) {
            unsigned head = i % kShape.heads;
            for (uint32_t r = table.begins[head]; r < table.begins[head + 1]; ++r) {
                const KvRow& row = table.rows[r];
                uint64_t in_kv = row.address + block_of(kShape, i) * row.stride;
                uint64_t in_slot = slot + i % kGroup * kShape.object_bytes() + row.offset;
                rows.push_back(move == Move::kToKv ? Copy{in_kv, in_slot, row.bytes}
                                                   : Copy{in_slot, in_kv, row.bytes});
            }
        }
        return rows;
    };
    if (!with(Mistake::kSaveDoesNotWait)) TRY(copies.wait_for(*parts.computed));
    std::vector<std::vector<unsigned char>> saved;
    for (unsigned group = 0; group < kGroups; ++group) {
        RingSlot slot = TRY(parts.ring->take(timeout_ms_));
        std::memset(slot.bytes().data(), 0x77, kGroupBytes);
        slot.used_on(copies);
        if (with(Mistake::kEndBeforeCopy)) TRY(end.record(copies.handle()));
        TRY(copies.copy(batch(group, slot.address(), parts.kv.address(), Move::kToStaging),
                        with(Mistake::kSourceAtAnyTime) ? SourceOrder::kAny : SourceOrder::kStream));
        if (!with(Mistake::kEndBeforeCopy)) TRY(end.record(copies.handle()));
        if (!with(Mistake::kEndNotAwaited)) TRY(wait(end, timeout_ms_));
        auto* bytes = reinterpret_cast<unsigned char*>(slot.bytes().data());
        saved.emplace_back(bytes, bytes + kGroupBytes);
    }

    TRY(parts.queue_earlier_owner());
    if (!with(Mistake::kLoadDoesNotWait)) TRY(copies.wait_for(*parts.owned_before));
    for (unsigned group = 0; group < kGroups; ++group) {
        RingSlot slot = TRY(parts.ring->take(timeout_ms_));
        std::memcpy(slot.bytes().data(), saved[group].data(), kGroupBytes);
        if (!with(Mistake::kSlotWithoutStream)) slot.used_on(copies);
        bool last = group + 1 == kGroups;
        if (last && with(Mistake::kEndBeforeKernel)) TRY(end.record(copies.handle()));
        TRY(copies.copy(batch(group, slot.address(), parts.other.address(), Move::kToKv), SourceOrder::kAny));
        if (last && !with(Mistake::kEndBeforeKernel)) TRY(end.record(copies.handle()));
    }
    return success();
}

Result<bool> Scenario::run(const std::shared_ptr<Device>& device) {
    Parts parts;
    parts.compute.emplace(TRY(Stream::create(device, Stream::Priority::kDefault)));
    parts.copies.emplace(TRY(Stream::create(device, Stream::Priority::kDefault)));
    parts.kernels.emplace(TRY(Stream::create(device, Stream::Priority::kLowest)));
    parts.computed.emplace(TRY(Event::create(device)));
    parts.owned_before.emplace(TRY(Event::create(device)));
    parts.end.emplace(TRY(Event::create(device)));
    parts.kv = TRY(DeviceMemory::allocate(device, kShape.bytes()));
    parts.other = TRY(DeviceMemory::allocate(device, kShape.bytes()));
    parts.tables = TRY(DeviceMemory::allocate(device, kTables));
    parts.host = TRY(PinnedMemory::allocate(device, 3 * kOf + kTables));
    Stream &compute = *parts.compute, &copies = *parts.copies, &kernels = *parts.kernels;
    Event &computed = *parts.computed, &end = *parts.end;
    // Whatever ends it early: memory is given back when no stream uses it any more, or never.
    struct Cleanup {
        Parts& parts;
        const std::shared_ptr<Device>& device;
        int timeout_ms;
        ~Cleanup() {
            bool over = true;
            for (auto* stream : {&parts.compute, &parts.copies, &parts.kernels}) {
                Result<Event> last = Event::create(device);
                over &= last.ok() && last->record((*stream)->handle()).ok();
                if (!over) break;
                Result<bool> waited = last->wait(timeout_ms);
                over &= waited.ok() && *waited;
            }
            if (parts.ring != nullptr) (void)parts.ring->close(timeout_ms);
            if (parts.staging) (void)parts.staging->close(timeout_ms);
            if (over) return;
            for (DeviceMemory* memory : {&parts.kv, &parts.other, &parts.tables}) memory->leak();
            parts.host.leak();
        }
    } cleanup{parts, device, timeout_ms_};
    parts.ring = TRY(PinnedRing::open(device, {.slot_bytes = 4096, .slots = 4}));
    parts.staging.emplace(TRY(Staging::open(device, {.half_bytes = 4096, .half_bytes_min = 1024})));
    parts.kernel.emplace(TRY(ObjectsKernel::load(device)));
    unsigned char *truth = parts.truth(), *seen = parts.seen();
    auto address = [](const void* data) { return reinterpret_cast<uint64_t>(data); };
    Random random(2340);
    random.fill(truth, kOf);
    std::memset(parts.garbage(), 0x99, kOf);
    TRY(upload_tables(parts, parts.host.data() + 3 * kOf));
    TRY(end.record(copies.handle()));
    TRY(kernels.wait_for(end));

    // The forward; the save, the earlier owner of the blocks, and the load.
    TRY(compute.copy({parts.kv.address(), address(truth), kShape.bytes()}));
    TRY(computed.record(compute.handle()));
    TRY(way_ == Way::kKernel ? move_by_kernel(parts) : move_directly(parts));
    TRY(wait(end, timeout_ms_));

    // The forward reads what was loaded.
    TRY(compute.copy({address(seen), parts.other.address(), kShape.bytes()}));
    TRY(computed.record(compute.handle()));
    TRY(wait(computed, timeout_ms_));
    return std::memcmp(seen, truth, kShape.bytes()) == 0;
}

}  // namespace moonpool::testing
