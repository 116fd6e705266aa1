// StandbyAgent: a standby master's way to its owner. Its thread dials, asks for all, hands each MIRROR frame
// on and answers with its number. An owner that is silent for silent_ms is lost; the thread dials again. It
// asks the owner for its place (ask_hand_over) behind the next frame.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "base/mutex.hpp"
#include "base/result.hpp"
#include "base/service_thread.hpp"
#include "directory/ranges.hpp"
#include "wire/control_socket.hpp"
#include "wire/frame.hpp"
#include "wire/secrets.hpp"

namespace moonpool {

struct StandbyAgentOptions {
    Secrets token;
    Range range{};                         // of the shards, that both have
    std::string name;                      // by which its owner tells it from other standbys
    std::string address;                   // host:port at which nodes and clients reach it
    std::shared_ptr<const TlsClient> tls;  // null: plain
    int silent_ms = 1000;
    int pause_ms = 100;  // between two attempts
};

// On the agent's thread; each gives up by itself, and false ends the connection.
struct StandbyHooks {
    std::function<std::string()> owner;  // host:port; empty: there is none to follow
    // The owner is there, and is reached at that address by others.
    std::function<bool(const std::string& address)> begin;
    std::function<bool(Reader frame, uint64_t& number)> follow;
    std::function<void(const std::string& why)> lost;  // it is not
    std::function<uint32_t()> told;                    // nodes that have told this standby all they hold
    std::function<void(Error why)> refused;            // the owner does not hand over
};

class StandbyAgent {
   public:
    StandbyAgent(StandbyAgentOptions options, StandbyHooks hooks);
    ~StandbyAgent();
    StandbyAgent(const StandbyAgent&) = delete;

    Status start();
    void stop();  // idempotent
    // In a child of fork() it must not be destroyed: the thread that waits in it is the parent's.
    bool in_child() const { return thread_.in_child(); }
    bool is_connected() const { return live_fd_ >= 0; }
    // Any thread. address: where this master is reached; empty: it asks no more.
    void ask_hand_over(const std::string& address) {
        MutexLock lock(mutex_);
        asks_for_ = address;
    }

   private:
    void run();
    Status follow_one(const std::string& owner);
    static Status send(ControlSocket& socket, std::span<const std::byte> bytes);
    static Status receive(ControlSocket& socket, void* data, size_t size);

    StandbyAgentOptions options_;
    StandbyHooks hooks_;
    std::atomic<bool> stopping_{false};
    std::atomic<int> live_fd_{-1};
    Mutex mutex_;
    std::string asks_for_ GUARDED_BY(mutex_);
    CondVar wake_;
    ServiceThread thread_;
};

}  // namespace moonpool
