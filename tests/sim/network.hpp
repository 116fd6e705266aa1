// Network: connections between processes. What is sent over one arrives in order; what is sent over two may
// overtake. A cut of a direction keeps what is sent there until it heals, as TCP does. The end of a
// connection is told to its peer once or twice, or only when the peer next sends something (the host was
// switched off).
#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "world.hpp"

namespace moonpool::sim {

using Bytes = std::vector<std::byte>;

// One side of a connection.
class End : public std::enable_shared_from_this<End> {
   public:
    std::function<void(const Bytes& frame)> on_frame;
    std::function<void()> on_end;  // may be called twice

    void send(Bytes frame);
    void close();  // on_end is not called
    bool open() const { return open_; }
    Process& owner() const { return *owner_; }

   private:
    friend class Network;
    class Network* network_ = nullptr;
    Process* owner_ = nullptr;
    uint64_t life_ = 0;
    std::shared_ptr<End> peer_;  // until both are closed
    bool open_ = true;
    Micros last_arrival_ = 0;  // of what was sent to this end
    std::deque<Bytes> held_;   // sent from this end into a cut,
    bool end_held_ = false;    // and so is its end
};

class Network {
   public:
    explicit Network(World& world) : world_(world) {}
    ~Network();
    Network(const Network&) = delete;

    // Calls `accept` there, which may say no, and then `then` with the end of the caller: null when it was
    // refused. In a cut nothing is called.
    using Accept = std::function<bool(std::shared_ptr<End>)>;
    void dial(Process& from, Process& to, Accept accept, std::function<void(std::shared_ptr<End>)> then);

    void cut(uint32_t from, uint32_t to) { cuts_.emplace(from, to); }
    void heal(uint32_t from, uint32_t to);
    void heal_all();
    bool is_cut(uint32_t from, uint32_t to) const { return cuts_.contains({from, to}); }
    // Or it was a while ago: what was held back has just arrived.
    bool was_cut(uint32_t from, uint32_t to, Micros within) const {
        auto healed = healed_.find({from, to});
        return is_cut(from, to) || (healed != healed_.end() && healed->second + within >= world_.now());
    }

    // The process has ended; silently: its host is gone, too, and nothing tells its peers.
    void ended(Process& process, bool silently);
    uint64_t frames() const { return frames_; }

   private:
    friend class End;
    Micros delay(uint32_t from, uint32_t to);
    void transmit(End& from, Bytes frame);
    void tell_end(const std::shared_ptr<End>& end);
    void forget_closed();
    bool lives(const End& end) const { return end.owner_->running() && end.owner_->life() == end.life_; }
    void arrive(const std::shared_ptr<End>& from, const std::shared_ptr<End>& to, const Bytes& frame);

    World& world_;
    std::set<std::pair<uint32_t, uint32_t>> cuts_;            // of hosts
    std::map<std::pair<uint32_t, uint32_t>, Micros> healed_;  // and when they ended last
    std::vector<std::shared_ptr<End>> ends_;
    uint64_t frames_ = 0;
};

}  // namespace moonpool::sim
