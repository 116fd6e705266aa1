// What transports by NICs have in common: they key what is registered, and serve their peers' questions.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "transport/nic/keys.hpp"
#include "transport/nic/links.hpp"
#include "transport/nic/target.hpp"
#include "transport/transport.hpp"

namespace moonpool::transport::nic {

class Transport : public transport::Transport {
   public:
    Status add_region(Region& region) override;
    uint64_t revoke(const Region& region) override;
    bool drained(uint64_t revocation) override;
    Result<std::vector<std::byte>> answer(const SegmentId& peer, Reader question) override;
    void peer_left(const SegmentId& peer) override;
    void shut_out(const SegmentId& segment) override;
    void close() override;
    void metrics(const std::string& name, Metrics& rows) const override;

   protected:
    // what: it is called, for people: "RDMA".
    Transport(const Context& context, std::string what) : context_(context), what_(std::move(what)) {}

    // Once, in start(): what is registered from here on gets keys, and peers are served. cards: as of Keys.
    void serve_by(std::vector<std::shared_ptr<KeyMaker>> makers, const NicOptions& options,
                  std::vector<std::string> cards, KeySize key_size, Target::Make make);
    // In the destructor: before the NICs go.
    void end();

    const Context context_;
    std::shared_ptr<Keys> keys_;  // null: no NIC is of use here
    std::optional<Target> target_;
    std::atomic<uint32_t> next_rail_{0};
    const std::shared_ptr<Links> links_ = std::make_shared<Links>();

   private:
    const std::string what_;
};

}  // namespace moonpool::transport::nic
