#include "transport/nic/keys.hpp"

#include <algorithm>
#include <cstdio>

#include "base/clock.hpp"
#include "transport/nic/near_ports.hpp"

namespace moonpool::transport::nic {

namespace {

constexpr int kThreads = 4;  // that pin memory at a time
// So long own transfers, which are ending, may use the keys of a region that is taken back.
constexpr uint64_t kOwnNs = 200'000'000;

}  // namespace

KeyedRegion::KeyedRegion(std::shared_ptr<Region> r, uint64_t bytes, size_t n)
    : region(std::move(r)),
      chunk_bytes(bytes),
      devices(n),
      states_((region->length + bytes - 1) / bytes * n),
      local_(states_.size()),
      remote_(states_.size()),
      nodes_(states_.size() / n),
      registered_(states_.size()) {
    for (auto& node : nodes_) node.store(-1, std::memory_order_relaxed);
}

Key KeyedRegion::key(size_t chunk, size_t device) const {
    size_t at = chunk * devices + device;
    Key key{states_[at].load(std::memory_order_acquire)};
    key.local = local_[at].load(std::memory_order_relaxed);
    key.remote = remote_[at].load(std::memory_order_relaxed);
    return key;
}

std::string KeyedRegion::why_refused() const {
    MutexLock lock(mutex_);
    return why_refused_;
}

Keys::~Keys() {
    std::map<uint64_t, std::shared_ptr<KeyedRegion>> left;
    {
        MutexLock lock(mutex_);
        left.swap(regions_);
    }
    for (const auto& [id, keyed] : left) (void)release(*keyed);
}

void Keys::add(std::shared_ptr<Region> region) {
    if (region == nullptr) return;
    auto keyed = std::make_shared<KeyedRegion>(std::move(region), chunk_bytes_, devices_.size());
    int threads = 0;
    {
        MutexLock lock(mutex_);
        regions_[keyed->region->id] = keyed;
        for (size_t chunk = 0; chunk < keyed->chunks(); ++chunk) waiting_.push_back({keyed, chunk, making_});
        threads = threads_for(keyed->chunks());
    }
    begin(threads);
}

void Keys::leave_out(size_t device) {
    MutexLock lock(mutex_);
    making_ &= ~(1u << device);
}

void Keys::take_in(size_t device) {
    int threads = 0;
    {
        MutexLock lock(mutex_);
        const uint32_t bit = 1u << device;
        if ((making_ & bit) != 0) return;
        making_ |= bit;
        size_t chunks = 0;
        for (const auto& [id, keyed] : regions_) {
            for (size_t chunk = 0; chunk < keyed->chunks(); ++chunk) waiting_.push_back({keyed, chunk, bit});
            chunks += keyed->chunks();
        }
        threads = threads_for(chunks);
    }
    begin(threads);
}

int Keys::threads_for(size_t chunks) {
    const int more = static_cast<int>(std::min<size_t>(static_cast<size_t>(kThreads - threads_), chunks));
    threads_ += more;
    return more;
}

void Keys::begin(int threads) {
    for (int i = 0; i < threads; ++i) workers_.post(true, [this] { key_chunks(); });
}

void Keys::key_chunks() {
    for (;;) {
        Work work;
        {
            MutexLock lock(mutex_);
            if (waiting_.empty() || closing_) {
                --threads_;
                return;
            }
            work = std::move(waiting_.front());
            waiting_.pop_front();
            work.keyed->busy_.fetch_add(1);
        }
        if (!work.keyed->revoked_.load()) key_chunk(*work.keyed, work.chunk, work.devices);
        work.keyed->busy_.fetch_sub(1);
    }
}

void Keys::key_chunk(KeyedRegion& keyed, size_t chunk, uint32_t devices) {
    uint64_t at = keyed.region->address + chunk * keyed.chunk_bytes;
    uint64_t bytes = std::min(keyed.chunk_bytes, keyed.region->address + keyed.region->length - at);
    const device::CardCopier* card = keyed.region->card.get();
    int node =
        card != nullptr ? node_of_card(card->device()->facts()) : node_of_(reinterpret_cast<const void*>(at));
    keyed.nodes_[chunk].store(node, std::memory_order_relaxed);
    for (size_t d = 0; d < keyed.devices; ++d) {
        if ((devices >> d & 1) == 0) continue;
        size_t place = chunk * keyed.devices + d;
        Result<KeyMaker::Made> made = card != nullptr ? devices_[d]->make_card_key(*card->device(), at, bytes)
                                                      : devices_[d]->make_key(at, bytes);
        KeyState state = KeyState::kKeyed;
        if (!made) {
            state = KeyState::kRefused;
            std::string why =
                devices_[d]->device_name() + " does not take " + std::to_string(bytes) + " bytes at 0x";
            char address[24];
            std::snprintf(address, sizeof(address), "%llx", static_cast<unsigned long long>(at));
            why += address + (": " + made.error().text);
            MutexLock lock(keyed.mutex_);
            if (keyed.why_refused_.empty()) keyed.why_refused_ = std::move(why);
        } else {
            keyed.registered_[place] = made->handle;
            keyed.local_[place].store(made->local, std::memory_order_relaxed);
            keyed.remote_[place].store(made->remote, std::memory_order_relaxed);
        }
        keyed.states_[place].store(state, std::memory_order_release);
    }
}

int Keys::node_of_card(const device::DeviceFacts& card) const {
    auto found = std::ranges::find(cards_, card.bus_id);
    return found == cards_.end() ? card.numa_node : kFirstCard + static_cast<int>(found - cards_.begin());
}

std::shared_ptr<KeyedRegion> Keys::find(uint64_t region_id) const {
    MutexLock lock(mutex_);
    auto it = regions_.find(region_id);
    return it == regions_.end() ? nullptr : it->second;
}

void Keys::revoke(uint64_t region_id) {
    std::shared_ptr<KeyedRegion> keyed = find(region_id);
    if (keyed == nullptr || keyed->revoked_.load()) return;
    keyed->revoked_ns_ = now_ns();
    keyed->revoked_ = true;  // both sides write before they read: no chunk is keyed behind release()
    MutexLock lock(mutex_);
    std::erase_if(waiting_, [&](const Work& work) { return work.keyed == keyed; });
}

bool Keys::released(uint64_t region_id) {
    std::shared_ptr<KeyedRegion> keyed = find(region_id);
    if (keyed == nullptr) return true;
    if (keyed->busy_.load() != 0) return false;
    // Own transfers that end within moments would lose their connection with the key.
    if (!keyed->region->drained()) {
        bool may =
            std::ranges::all_of(devices_, [](const auto& device) { return device->ends_keys_in_use(); });
        if (!may || now_ns() - keyed->revoked_ns_ < kOwnNs) return false;
    }
    if (!release(*keyed)) return false;
    MutexLock lock(mutex_);
    regions_.erase(region_id);
    return true;
}

// Ending a key waits for the NIC: nothing lands behind it.
bool Keys::release(KeyedRegion& keyed) {
    bool all = true;
    for (size_t i = 0; i < keyed.registered_.size(); ++i) {
        void*& made = keyed.registered_[i];
        if (made == nullptr) continue;
        keyed.states_[i].store(KeyState::kRefused, std::memory_order_release);
        if (devices_[i % keyed.devices]->end_key(made)) {
            made = nullptr;
        } else {
            all = false;
        }
    }
    return all;
}

}  // namespace moonpool::transport::nic
