// The path to a node of another host: bytes travel in READ and PUT frames, one round trip each, and every
// object that arrives is compared with its checksum. READ names an object or a pinned slot: the node looks it
// up, pins it, sends it and lets go of it.
#pragma once

#include <string>

#include "store/client/block_path.hpp"
#include "store/client/session.hpp"

namespace moonpool {

class TcpPath final : public BlockPath {
   public:
    static Result<std::unique_ptr<BlockPath>> open(Session& session, const ClientOptions& options);

    std::string route() const override;
    Result<PutReport> put(std::span<const PutItem> items, const PutHow& how) override;
    Status read(std::span<NamedRead> reads, bool verify) override;
    Status read(std::span<PinnedRead> reads, PinHolder holder, bool verify) override;
    // One after another: together the pins of objects this large could be more than the node allows.
    size_t pins_at_once() const override { return 1; }

   private:
    explicit TcpPath(Session& session) : session_(session) {}

    Status read_large(PinnedRead& read);
    Status read_frame(std::span<PinnedRead> reads);
    Status read_frame(std::span<NamedRead> reads);

    Session& session_;
};

}  // namespace moonpool
