// The half of CUDA IPC that serves: the handles of registered memory of cards, by which initiators of this
// host open it; and the gates (transport/host) that say when none of their copies reaches it any more.
//
// Handles are made when memory is registered: the driver may be busy, and no I/O thread waits for it.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "device/ipc.hpp"
#include "transport/host/server.hpp"

namespace moonpool::transport::cuda_ipc {

// A region as an initiator learns of it.
struct Row {
    uint64_t id = 0, address = 0, length = 0;  // as in RegionRow
    MemoryKind kind = MemoryKind::kDevice;
    // The rest of kDevice only.
    std::string why;  // it is not shared; empty: it is
    device::IpcExport exported;
    device::DeviceUuid card{};  // in every process; an ordinal would be another card's there

    bool contains(uint64_t at, uint64_t bytes) const {
        return at >= address && bytes <= length && at - address <= length - bytes;
    }
};
void encode(Writer& w, const Row& row);
// Sorted by address; nothing: the list breaks the format.
std::optional<std::vector<Row>> decode_rows(Reader r);

class Target : public host::Server {
   public:
    explicit Target(const Context& context);

    void share(const Region& region) EXCLUDES(rows_mutex_);
    // As Transport::revoke().
    uint64_t take_back(const Region& region) EXCLUDES(rows_mutex_);

   private:
    Result<host::Passed> answer(Kind kind, Reader question, Writer& answered) EXCLUDES(rows_mutex_);

    Mutex rows_mutex_;
    const std::shared_ptr<const RegionTable> table_;
    std::map<uint64_t, Row> rows_ GUARDED_BY(rows_mutex_);  // of memory of cards, by the region's id
};

}  // namespace moonpool::transport::cuda_ipc
