#include "transport/host/gate.hpp"

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstring>

#include "memory/seal.hpp"
#include "wire/auth.hpp"

namespace moonpool::transport::host {

Result<std::unique_ptr<Gate>> Gate::create(uint64_t generation) {
    auto gate = std::make_unique<Gate>();
    gate->fd_.reset(::memfd_create("moonpool-gate", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (!gate->fd_.valid()) return os_error("memfd_create");
    if (::ftruncate(gate->fd_.get(), kGateBytes) != 0) return os_error("ftruncate of a memfd");
    if (Status status = seal_memory(gate->fd_.get(), false); !status) return status.error();
    Result<Mapping> mapping = Mapping::map(gate->fd_.get(), kGateBytes, true);
    if (!mapping) return mapping.error();
    gate->mapping_ = std::move(*mapping);
    Nonce nonce = random_nonce();
    std::memcpy(&gate->page().nonce, nonce.data(), sizeof(uint64_t));
    gate->page().generation.store(generation);
    return gate;
}

Result<std::unique_ptr<Gate>> Gate::open(int fd) {
    struct stat info {};
    int seals = ::fcntl(fd, F_GET_SEALS);
    if (::fstat(fd, &info) != 0 || info.st_size != static_cast<off_t>(kGateBytes) || seals < 0 ||
        (seals & F_SEAL_SHRINK) == 0) {
        return Error{Code::kProtocol, "the peer passed a descriptor that is no gate"};
    }
    auto gate = std::make_unique<Gate>();
    Result<Mapping> mapping = Mapping::map(fd, kGateBytes, true);
    if (!mapping) return mapping.error();
    gate->mapping_ = std::move(*mapping);
    return gate;
}

bool Gate::drained(uint64_t generation) const {
    for (const auto& slot : page().slots) {
        uint64_t inside = slot.inside.load();
        if (inside != 0 && inside < generation) return false;
    }
    return true;
}

bool Gate::occupied() const {
    return std::ranges::any_of(page().slots, [](const auto& slot) { return slot.inside.load() != 0; });
}

Pass::Pass(Gate& gate, uint64_t generation) {
    GatePage& page = gate.page();
    static thread_local size_t favourite = 0;  // uncontended but for the first time
    size_t at = favourite;
    for (;;) {
        uint64_t free = 0;
        if (page.slots[at].inside.compare_exchange_strong(free, generation)) break;
        at = (at + 1) % kGateSlots;
        if (at == favourite) ::sched_yield();  // 64 threads are inside; one of them leaves soon
    }
    favourite = at;
    slot_ = &page.slots[at].inside;
    if (page.generation.load() != generation || page.closed.load() != 0) leave();
}

}  // namespace moonpool::transport::host
