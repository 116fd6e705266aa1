#include "transport/outside/transport.hpp"

#include <algorithm>

#include "transport/frames.hpp"
#include "transport/outside/link.hpp"

namespace moonpool::transport::outside {

static_assert(MOONPOOL_OFFER_BYTES_MAX == kOfferBytesMax);

Instance::~Instance() {
    if (handle != nullptr) library->table.destroy(handle);
}

Status Transport::start() {
    auto instance = std::make_shared<Instance>();
    instance->library = library_;
    instance->name = context_.identity.name;
    instance->tenant = context_.identity.tenant;
    instance->host_id = context_.identity.host_id;
    instance->boot_id = context_.identity.boot_id;
    instance->shut_out = context_.shut_out;
    moonpool_engine_info& info = instance->info;
    info.struct_bytes = sizeof(info);
    info.timeout_ms = context_.options.timeout_ms;
    info.engine = reinterpret_cast<const moonpool_engine*>(instance.get());
    info.name = instance->name.c_str();
    info.tenant = instance->tenant.c_str();
    info.host_id = instance->host_id.c_str();
    info.boot_id = instance->boot_id.c_str();
    std::ranges::copy(context_.identity.segment, info.segment);
    Why why;
    instance->handle = library_->table.create(&host(), &info, why.buffer());
    if (instance->handle == nullptr) {
        return Error{Code::kUnavailable, library_->said() + " was not started: " + why.text()};
    }
    std::vector<std::byte> bytes(kOfferBytesMax);
    int64_t n =
        library_->table.offer(instance->handle, reinterpret_cast<uint8_t*>(bytes.data()), bytes.size());
    if (n > static_cast<int64_t>(bytes.size())) {
        return Error{Code::kProtocol, library_->said() + " broke its contract: its offer has " +
                                          std::to_string(n) + " bytes, the limit is " +
                                          std::to_string(bytes.size())};
    }
    offers_ = n >= 0;
    bytes.resize(offers_ ? static_cast<size_t>(n) : 0);
    offer_ = std::move(bytes);
    instance_ = std::move(instance);
    return success();
}

void Transport::offer(PeerInfo& self) const {
    if (offers_) self.offers[library_->name] = offer_;
}

Result<std::shared_ptr<transport::Link>> Transport::connect(const PeerInfo& peer,
                                                            const std::shared_ptr<Control>&, int timeout_ms) {
    if (instance_ == nullptr) return Error{Code::kUnavailable, library_->said() + " was not started"};
    auto offer = peer.offers.find(library_->name);
    if (offer == peer.offers.end()) {
        return Error{Code::kUnavailable, "the peer does not offer " + library_->name};
    }
    moonpool_peer told{};
    told.struct_bytes = sizeof(told);
    told.offer_bytes = static_cast<uint32_t>(offer->second.size());
    told.offer = reinterpret_cast<const uint8_t*>(offer->second.data());
    told.name = peer.name.c_str();
    told.address = peer.address.c_str();
    told.host_id = peer.host_id.c_str();
    told.boot_id = peer.boot_id.c_str();
    std::ranges::copy(peer.segment, told.segment);
    Why why;
    moonpool_link* link = library_->table.connect(instance_->handle, &told, timeout_ms, why.buffer());
    if (link == nullptr) return Error{Code::kUnavailable, why.text()};
    return std::shared_ptr<transport::Link>(
        std::make_shared<Link>(instance_, link, counters_, context_.counters));
}

// The lock orders a registration and a deregistration of one region: the library hears of both, or of none.
Status Transport::add_region(Region& region) {
    if (instance_ == nullptr || !reachable_by_cpu(region.kind)) return success();
    MutexLock lock(mutex_);
    if (region.closing()) return success();
    moonpool_region told{};
    told.struct_bytes = sizeof(told);
    told.id = region.id;
    told.address = reinterpret_cast<void*>(region.address);
    told.bytes = region.length;
    Why why;
    if (library_->table.add_region(instance_->handle, &told, why.buffer()) != MOONPOOL_OK) {
        return Error{Code::kUnavailable, library_->said() + " refuses the region: " + why.text()};
    }
    told_.insert(region.id);
    return success();
}

uint64_t Transport::revoke(const Region& region) {
    MutexLock lock(mutex_);
    if (told_.erase(region.id) == 0) return 0;
    library_->table.revoke_region(instance_->handle, region.id);
    return region.id;
}

bool Transport::drained(uint64_t revocation) {
    return revocation == 0 || library_->table.is_drained(instance_->handle, revocation) != 0;
}

void Transport::shut_out(const SegmentId& segment) {
    if (instance_ != nullptr) library_->table.shut_out(instance_->handle, segment.data());
}

bool Transport::is_out(const SegmentId& segment) {
    return instance_ == nullptr || library_->table.is_out(instance_->handle, segment.data()) != 0;
}

void Transport::close() {
    if (instance_ != nullptr) library_->table.close(instance_->handle);
}

}  // namespace moonpool::transport::outside
