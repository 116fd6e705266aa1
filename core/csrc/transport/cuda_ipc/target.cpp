#include "transport/cuda_ipc/target.hpp"

#include <cstring>

namespace moonpool::transport::cuda_ipc {

void encode(Writer& w, const Row& row) {
    w.number(row.id);
    w.number(row.address);
    w.number(row.length);
    w.number(static_cast<uint8_t>(row.kind));
    if (row.kind != MemoryKind::kDevice) return;
    w.text16(row.why);
    if (!row.why.empty()) return;
    w.number(row.exported.base);
    w.number(row.exported.bytes);
    w.bytes(row.card.data(), row.card.size());
    w.bytes(row.exported.handle.bytes, sizeof(row.exported.handle.bytes));
}

std::optional<std::vector<Row>> decode_rows(Reader r) {
    auto n = r.number<uint32_t>();
    if (!r.ok() || n > kRegionsMax) return std::nullopt;
    std::vector<Row> rows;
    uint64_t end = 0;
    for (uint32_t i = 0; i < n && r.ok(); ++i) {
        Row row;
        row.id = r.number<uint64_t>();
        row.address = r.number<uint64_t>();
        row.length = r.number<uint64_t>();
        row.kind = static_cast<MemoryKind>(r.number<uint8_t>());
        if (row.kind == MemoryKind::kDevice) row.why = r.text16();
        if (row.address < end || row.length == 0 || row.address + row.length < row.address) {
            return std::nullopt;
        }
        end = row.address + row.length;
        if (row.kind == MemoryKind::kDevice && row.why.empty()) {
            device::IpcExport& exported = row.exported;
            exported.base = r.number<uint64_t>();
            exported.bytes = r.number<uint64_t>();
            std::string_view card = r.bytes(row.card.size());
            std::string_view handle = r.bytes(sizeof(exported.handle.bytes));
            if (!r.ok()) return std::nullopt;
            std::memcpy(row.card.data(), card.data(), card.size());
            std::memcpy(exported.handle.bytes, handle.data(), handle.size());
            // No copy of ours reaches beyond what is opened.
            bool inside = row.address >= exported.base && exported.bytes >= row.length &&
                          row.address - exported.base <= exported.bytes - row.length;
            if (!inside) return std::nullopt;
        }
        rows.push_back(std::move(row));
    }
    if (!r.done()) return std::nullopt;
    return rows;
}

Target::Target(const Context& context)
    : Server(
          context, "moonpool-cuda-", true,
          [this](Kind kind, Reader question, Writer& answered) { return answer(kind, question, answered); }),
      table_(context.regions) {}

void Target::share(const Region& region) {
    Row row;
    row.id = region.id;
    row.address = region.address;
    row.length = region.length;
    row.card = region.card->facts().uuid;
    Result<device::IpcExport> made = device::export_memory(*region.card->device(), region.address);
    if (!made) {
        row.why = made.error().text;
    } else if (region.address - made->base > made->bytes ||
               region.length > made->bytes - (region.address - made->base)) {
        row.why = "the region is larger than the allocation that the CUDA driver shares";
    } else {
        row.exported = *made;
    }
    {
        MutexLock lock(rows_mutex_);
        rows_[row.id] = std::move(row);
    }
    // So that initiators ask again: none of theirs that looks for it goes another way.
    (void)revoke();
}

uint64_t Target::take_back(const Region& region) {
    {
        MutexLock lock(rows_mutex_);
        if (rows_.erase(region.id) == 0) return 0;  // no peer opens this region by its handle
    }
    return revoke();
}

Result<host::Passed> Target::answer(Kind kind, Reader question, Writer& answered) {
    if (kind != Kind::kCudaRegions || !question.done()) {
        return Error{Code::kProtocol, "no question of CUDA IPC"};
    }
    answered.number(generation());
    // The rows before the list: a region whose row take_back() has erased is out of the table, too, and is
    // not taken for one that is just being registered.
    MutexLock lock(rows_mutex_);
    RegionList all = table_->all()->list();
    answered.number(static_cast<uint32_t>(all.size()));
    for (const auto& region : all) {
        Row row;
        row.id = region->id;
        row.address = region->address;
        row.length = region->length;
        row.kind = region->kind;
        if (region->on_card()) {
            row.why = "the peer has just begun to register it";  // the generation tells when it has
            if (auto known = rows_.find(region->id); known != rows_.end()) row = known->second;
        }
        encode(answered, row);
    }
    return host::Passed{};
}

}  // namespace moonpool::transport::cuda_ipc
