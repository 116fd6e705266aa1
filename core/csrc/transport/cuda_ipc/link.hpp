// A peer on this host whose memory of cards is opened here by its handles, and copied by a card: to and from
// memory of a card, pinned memory, and through pinned memory all other memory of this process.
//
// A peer in this very process (tests, several engines) has memory that the driver does not open a second
// time: it is used as it is.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "device/ipc.hpp"
#include "transport/cuda_ipc/target.hpp"
#include "transport/host/client.hpp"
#include "transport/transport.hpp"

namespace moonpool::transport::cuda_ipc {

class Link final : public transport::Link {
   public:
    // peer: on this host, as it says.
    Link(const Context& context, TransportCounters& counters, const PeerInfo& peer);

    std::string path() const override;
    bool reaches(MemoryKind kind, std::string* why) const override;
    bool reaches_nothing() const override;
    bool copies_by_card() const override { return true; }
    bool runs_on_caller(const Job&) const override { return false; }  // it waits for a card
    Status run(Job& job) override;

   private:
    // An allocation of the peer, as this process sees it.
    struct Opened {
        std::shared_ptr<device::CardCopier> card;
        std::optional<device::IpcMemory> memory;  // none: the peer is this process
        uint64_t address = 0;                     // of its first byte
    };
    struct Allocation {
        std::set<uint64_t> ids;  // of the regions in it; while one of them is listed, it is the same memory
        std::shared_ptr<Opened> opened;
        std::weak_ptr<Opened> before;  // of other memory that had the same handle
        std::optional<Error> unseen;   // the card is not this process's
    };
    struct View {
        uint64_t generation = 0;
        std::vector<Row> rows;
        bool has_cards = false;  // one row or more is memory of a card
        const Row* find(uint64_t address, uint64_t bytes) const;
    };
    class Carrier;
    class Inside;

    // The session with the peer, which the first job begins: engines without a card begin none.
    enum class Session : uint8_t { kNone, kOpen, kRefused };

    // Call before any question to the peer.
    Status open(const Job& job);
    std::shared_ptr<const View> known_view() const EXCLUDES(view_mutex_);
    Result<std::shared_ptr<const View>> ask_view(const std::shared_ptr<const View>& old, const Job& job)
        EXCLUDES(mutex_);
    void keep_listed(const View& view) REQUIRES(mutex_);
    Result<std::shared_ptr<Opened>> opened(const Row& row) EXCLUDES(mutex_);
    Result<std::shared_ptr<Opened>> open_memory(const Row& row, Allocation& allocation) REQUIRES(mutex_);

    void collect_later(const std::shared_ptr<device::CardCopier>& card);

    const Context context_;
    TransportCounters& counters_;
    const PeerInfo peer_;
    // Shared with copies under way, which may end after the link.
    std::shared_ptr<std::atomic<uint32_t>> inside_ = std::make_shared<std::atomic<uint32_t>>(0);
    std::shared_ptr<std::atomic<bool>> collecting_ = std::make_shared<std::atomic<bool>>(false);

    Mutex mutex_;                                                       // what is open; before view_mutex_
    std::map<std::string, Allocation> allocations_ GUARDED_BY(mutex_);  // by card and handle
    mutable Mutex view_mutex_;
    std::shared_ptr<const View> view_ GUARDED_BY(view_mutex_);
    std::string unreached_ GUARDED_BY(view_mutex_);  // why the last region that was asked for is not open

    std::atomic<Session> session_{Session::kNone};  // stored behind what open() has written
    Error refused_;                                 // of the session
    host::Client client_;
};

}  // namespace moonpool::transport::cuda_ipc
