// Rail: one NIC here and one of the peer, with the connection between them, as a link uses it. What is under
// way on it is pieces of slices; the link adds some, posts them together, and polls for those that are done.
//
//   kDown --connect(), begin()--> kUp --stop()--> kEnding --the peer has ended its side--> kDown
//
// Not thread-safe: its link has the lock, but for connect(), while the state is kConnecting.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/event_loop.hpp"
#include "base/result.hpp"
#include "transport/nic/near_ports.hpp"

namespace moonpool::transport::nic {

struct Task;

// Bytes of a slice that are on their way.
struct Piece {
    Task* task = nullptr;
    size_t slice = 0;
    uint64_t at = 0, bytes = 0;
};

class Rail {
   public:
    enum class State : uint8_t { kDown, kConnecting, kUp, kEnding };

    Rail(uint32_t number, size_t device, size_t peer_device, uint8_t peer_port, NearPort near)
        : number(number),
          device(device),
          peer_device(peer_device),
          peer_port(peer_port),
          near(std::move(near)) {}
    virtual ~Rail() = default;
    Rail(const Rail&) = delete;

    const uint32_t number;             // of the connection, as the peer is told
    const size_t device, peer_device;  // whose keys it uses
    const uint8_t peer_port;           // in the peer's offer
    const NearPort near;               // of the port here

    State state = State::kDown;
    std::string why = "it was not used yet";  // it is down
    int faults = 0;                           // of the path, until it has been good for a while
    uint64_t retry_ns = 0;                    // not before
    uint64_t good_since_ns = 0;
    uint64_t bytes_done = 0, pieces_done = 0, faults_total = 0;
    bool missed = false;        // it would carry what another one carries better, and is down
    bool watched = false;       // tell() was called
    std::vector<Piece> fenced;  // writes that may still land until the peer has ended its side
    bool unsettled = false;     // some of those were given up, and the peer has not ended its side yet
    uint64_t end_again_ns = 0;  // by now_ns(): the peer is not asked for that before

    // What one side of a request is.
    struct Place {
        uint64_t address;
        uint64_t key;
        uint64_t offset = 0;   // of the peer's side, from the beginning of the memory that has this key
        bool on_card = false;  // of the own side: no CPU reads it
    };
    struct Fault {
        enum class Of : uint8_t {
            kPath,
            kPeerMemory,  // the peer may have deregistered it
            kOwnMemory,
        };
        std::string why;
        Of of = Of::kPath;
        std::optional<Piece> piece{};  // the first that failed
    };

    virtual std::string name() const = 0;  // of the port here
    virtual std::string path() const = 0;  // "mlx5_0:1 10.0.0.7 to mlx5_1:1 10.0.0.8"
    // Of its ends, for people: addresses that are not used, each with the reason.
    virtual std::string remarks() const { return ""; }
    virtual bool port_up() const { return true; }
    // How many times the silence of a NIC it may be silent.
    virtual uint64_t patience() const { return 1; }

    // Makes a connection; ask() gives the peer what it needs of it, and returns the peer's answer. May wait.
    // kTooLarge: the NIC here has too many.
    using Ask = std::function<Result<std::vector<std::byte>>(std::span<const std::byte> question)>;
    virtual Status connect(const Ask& ask) = 0;
    void begin(uint64_t now) {
        begin_connected();
        good_since_ns = progress_ns_ = now;
        state = State::kUp;
    }

    virtual bool has_room() const = 0;
    virtual void add(const Piece& piece, bool write, const Place& local, const Place& remote) = 0;
    // Posts what was added. An error: nothing more of it works, and all must be taken out by stop().
    virtual Status post(uint64_t now) = 0;
    // Hands over pieces that are done, under the link's lock, as all of this.
    using Done = std::function<void(std::span<const Piece>)>;
    // The clock is read when completions have been found: they took until then.
    virtual std::optional<Fault> poll(uint64_t (*clock_ns)(), const Done& done) = 0;
    // Ends the connection: this NIC touches no local memory for it any more. -> what was under way, and
    // whether some of it are writes, which may still arrive.
    virtual std::vector<Piece> stop(bool& writes) = 0;
    virtual bool busy() const = 0;
    // At most so many bytes in a piece. The first ones may be small: on a slow rail a large one would take so
    // long that the rail seems silent.
    virtual uint64_t batch_bytes() const { return UINT64_MAX; }
    // Under way on one rail, while others were not measured yet.
    static constexpr uint64_t kFirstWindowBytes = 512u << 10;

    // From the first begin() on, `watcher` is told on a thread of the transport when something may have
    // completed that arm() was called before, and about ten times a second of the time.
    virtual void tell(std::shared_ptr<EventHandler> watcher) = 0;
    // The watcher is told of the next completion. Poll once more behind it.
    virtual void arm() = 0;

    uint64_t bytes_open() const { return bytes_open_; }
    double bytes_per_ns() const { return bytes_per_ns_; }
    uint64_t progress_ns() const { return progress_ns_; }
    // It was not looked at for so long that it cannot be called silent.
    void excuse(uint64_t now) { progress_ns_ = now; }
    // How long what completes next should take, as measured.
    uint64_t expected_ns() const {
        return bytes_per_ns_ <= 0 ? 0
                                  : static_cast<uint64_t>(static_cast<double>(next_bytes()) / bytes_per_ns_);
    }

   protected:
    static constexpr uint64_t kMeasuredBytes = 64u << 10;  // of fewer the time says nothing of the rate
    static constexpr double kGrowthMax = 4;                // of the rate, from one measurement to the next

    virtual void begin_connected() = 0;
    virtual uint64_t next_bytes() const = 0;

    // What was posted at that time has completed now. All that completes at one look is one measurement: of
    // the second of two that are found together, nothing says how long it took.
    void note_completed(uint64_t bytes, uint64_t posted_ns, uint64_t now) {
        if (bytes >= kMeasuredBytes) {
            if (now != sample_.at_ns) {
                sample_ = {now, std::max(posted_ns, progress_ns_), 0, bytes_per_ns_};
            }
            sample_.bytes += bytes;
            double rate = static_cast<double>(sample_.bytes) /
                          static_cast<double>(std::max<uint64_t>(now - sample_.since_ns, 1000));
            // A process that was not running finds one completion late, and the next one at once.
            if (sample_.before > 0) rate = std::min(rate, kGrowthMax * sample_.before);
            bytes_per_ns_ = sample_.before <= 0 ? rate : 0.8 * sample_.before + 0.2 * rate;
        }
        progress_ns_ = now;
        bytes_open_ -= bytes;
    }

    uint64_t bytes_open_ = 0;
    uint64_t progress_ns_ = 0;
    double bytes_per_ns_ = 0;

   private:
    struct Sample {
        uint64_t at_ns = 0, since_ns = 0, bytes = 0;
        double before = 0;  // bytes_per_ns_
    };
    Sample sample_;
};

}  // namespace moonpool::transport::nic
