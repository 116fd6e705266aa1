// Outside: a transport of a library that is built outside of this tree (moonpool_transport.h). This is the
// engine's side of that interface; it is made once for each library that an engine is given.
#pragma once

#include <memory>
#include <set>
#include <string>
#include <vector>

#include "base/mutex.hpp"
#include "transport/outside/library.hpp"
#include "transport/transport.hpp"

namespace moonpool::transport::outside {

// The library's object, which lives as long as a link needs it.
struct Instance {
    std::shared_ptr<const Library> library;
    moonpool_transport* handle = nullptr;

    ~Instance();
    // What the library was told of the engine, by pointers into this object.
    std::string name, tenant, host_id, boot_id;
    std::shared_ptr<const ShutOut> shut_out;
    moonpool_engine_info info{};
};

class Transport final : public transport::Transport {
   public:
    Transport(const Context& context, std::shared_ptr<const Library> library)
        : context_(context), library_(std::move(library)) {}

    Status start() override;
    void offer(PeerInfo& self) const override;
    Result<std::shared_ptr<transport::Link>> connect(const PeerInfo& peer,
                                                     const std::shared_ptr<Control>& control,
                                                     int timeout_ms) override;
    Status add_region(Region& region) override;
    uint64_t revoke(const Region& region) override;
    bool drained(uint64_t revocation) override;
    void shut_out(const SegmentId& segment) override;
    bool is_out(const SegmentId& segment) override;
    void close() override;

   private:
    const Context context_;
    const std::shared_ptr<const Library> library_;
    std::shared_ptr<Instance> instance_;  // null before start(), and when it failed
    std::vector<std::byte> offer_;
    bool offers_ = false;
    Mutex mutex_;
    std::set<uint64_t> told_ GUARDED_BY(mutex_);  // regions that the library knows
};

}  // namespace moonpool::transport::outside
