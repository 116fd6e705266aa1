// Keys: the memory of this engine's regions, as its NICs know it. Threads in the background pin it in chunks
// and get the NICs' keys, so that registering a region costs nothing; a chunk without a key is reached by
// other paths. A key serves both sides: as the local one of own transfers, and as that of peers.
//
// A region is taken back by ending its keys: when the NIC has confirmed that, no peer reaches the memory.
#pragma once

#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/mutex.hpp"
#include "transport/region.hpp"
#include "transport/transport.hpp"
#include "transport/workers.hpp"

namespace moonpool::transport::nic {

enum class KeyState : uint8_t { kPending = 0, kKeyed = 1, kRefused = 2 };

struct Key {
    KeyState state = KeyState::kPending;
    uint64_t local = 0, remote = 0;  // as the NIC here and that of a peer name it
};

// A NIC, as keys need it. Thread-safe.
class KeyMaker {
   public:
    struct Made {
        void* handle = nullptr;
        uint64_t local = 0, remote = 0;
    };

    virtual ~KeyMaker() = default;
    virtual const std::string& device_name() const = 0;
    // Lets it read and write that memory, also for peers. The error: its reason, for people.
    virtual Result<Made> make_key(uint64_t address, uint64_t bytes) = 0;
    // The same for memory of a card.
    virtual Result<Made> make_card_key(const device::Device& card, uint64_t address, uint64_t bytes) {
        (void)card, (void)address, (void)bytes;
        return Error{Code::kUnavailable, "it has no keys for memory of a card"};
    }
    // Waits for the NIC: nothing lands behind it. False: it keeps the key.
    virtual bool end_key(void* handle) = 0;
    // Whether that is safe while requests of this engine use it: they fail.
    virtual bool ends_keys_in_use() const { return true; }
};

// The keys of one region: of each chunk, one for each device.
class KeyedRegion {
   public:
    KeyedRegion(std::shared_ptr<Region> region, uint64_t chunk_bytes, size_t devices);

    const std::shared_ptr<Region> region;
    const uint64_t chunk_bytes;
    const size_t devices;

    size_t chunks() const { return states_.size() / devices; }
    // The node of its memory, as NearPort has it; -1: not known. Never waits, as key() does not.
    int node(size_t chunk) const { return nodes_[chunk].load(std::memory_order_relaxed); }
    Key key(size_t chunk, size_t device) const;
    std::string why_refused() const;

   private:
    friend class Keys;
    // Of chunk c for device d at [c * devices + d]. The state is written last, and read first.
    std::vector<std::atomic<KeyState>> states_;
    std::vector<std::atomic<uint64_t>> local_, remote_;
    std::vector<std::atomic<int>> nodes_;  // of each chunk, by its first page
    std::vector<void*> registered_;        // null: none. Of the thread that keys the chunk, then of release()
    std::atomic<int> busy_{0};             // threads that key
    std::atomic<bool> revoked_{false};
    uint64_t revoked_ns_ = 0;
    mutable Mutex mutex_;
    std::string why_refused_ GUARDED_BY(mutex_);
};

class Keys {
   public:
    // cards: cards_of(); where there is nothing to choose, none.
    Keys(std::vector<std::shared_ptr<KeyMaker>> devices, const NicOptions& options,
         std::vector<std::string> cards, Workers& workers, const std::atomic<bool>& closing)
        : devices_(std::move(devices)),
          cards_(std::move(cards)),
          chunk_bytes_(options.chunk_bytes),
          node_of_(options.node_of),
          workers_(workers),
          closing_(closing) {}
    ~Keys();

    // Before anything is added: that device makes no keys until it is taken in.
    void leave_out(size_t device);
    void take_in(size_t device);
    void add(std::shared_ptr<Region> region);
    std::shared_ptr<KeyedRegion> find(uint64_t region_id) const;
    // Starts to take a region back; released() says whether no NIC reaches it any more.
    void revoke(uint64_t region_id);
    bool released(uint64_t region_id);

   private:
    struct Work {
        std::shared_ptr<KeyedRegion> keyed;
        size_t chunk;
        uint32_t devices;  // bit d: of device d
    };
    void begin(int threads);
    int threads_for(size_t chunks) REQUIRES(mutex_);
    void key_chunks();
    void key_chunk(KeyedRegion& keyed, size_t chunk, uint32_t devices);
    bool release(KeyedRegion& keyed);
    int node_of_card(const device::DeviceFacts& card) const;

    const std::vector<std::shared_ptr<KeyMaker>> devices_;
    const std::vector<std::string> cards_;
    const uint64_t chunk_bytes_;
    int (*const node_of_)(const void* address);
    Workers& workers_;
    const std::atomic<bool>& closing_;
    mutable Mutex mutex_;
    std::map<uint64_t, std::shared_ptr<KeyedRegion>> regions_ GUARDED_BY(mutex_);
    std::deque<Work> waiting_ GUARDED_BY(mutex_);
    uint32_t making_ GUARDED_BY(mutex_) = UINT32_MAX;  // bit d: device d makes keys
    int threads_ GUARDED_BY(mutex_) = 0;
};

}  // namespace moonpool::transport::nic
