// A peer as a library outside of this tree reaches it. Its run() gives the library the slices that wait, with
// pointers into regions that it holds until the library returns, and takes each verdict as the library says
// it.
//
// A verdict names a batch by a number, never by a pointer, and is checked: a library that speaks of a batch
// that has ended, of a slice that is none, or twice of one, is told so and costs its own link, nothing else.
#pragma once

#include <atomic>
#include <memory>
#include <string>

#include "base/mutex.hpp"
#include "transport/counters.hpp"
#include "transport/link.hpp"
#include "transport/outside/transport.hpp"

namespace moonpool::transport::outside {

// What every library is given of the engine.
const moonpool_host& host();

class Link final : public transport::Link {
   public:
    Link(std::shared_ptr<Instance> instance, moonpool_link* handle, TransportCounters& moved,
         Counters& counters)
        : instance_(std::move(instance)), handle_(handle), moved_(moved), counters_(counters) {}
    ~Link() override { table().destroy_link(handle_); }

    std::string path() const override;
    bool reaches(MemoryKind kind, std::string* why) const override { return reached_by_cpu(kind, why); }
    bool reaches_nothing() const override { return broken_; }
    bool runs_on_caller(const Job&) const override { return false; }
    Status run(Job& job) override;
    bool settled() const override {
        return table().is_settled == nullptr || table().is_settled(handle_) != 0;
    }
    bool settle(int timeout_ms) override {
        if (settled()) return true;
        return table().settle != nullptr && table().settle(handle_, timeout_ms) != 0;
    }
    void close() override {
        if (!closed_.exchange(true)) table().close_link(handle_);
    }

   private:
    const moonpool_transport_table& table() const { return instance_->library->table; }
    Error end(const std::string& what);
    void keep_writes(Job& job, const std::string& why);

    const std::shared_ptr<Instance> instance_;
    moonpool_link* const handle_;
    TransportCounters& moved_;
    Counters& counters_;
    std::atomic<bool> closed_{false};
    std::atomic<bool> broken_{false};  // the library has lied about this link
    Mutex mutex_;
    std::string lie_ GUARDED_BY(mutex_);  // the first one
};

}  // namespace moonpool::transport::outside
