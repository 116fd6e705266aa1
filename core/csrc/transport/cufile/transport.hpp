// cuFile: files and memory of cards, by GPUDirect Storage, where libcufile can be opened.
#pragma once

#include "transport/transport.hpp"

namespace moonpool::transport::cufile {

class Transport final : public transport::Transport {
   public:
    explicit Transport(const Context&) {}
    static std::string viable(const Context&);

    Result<std::shared_ptr<transport::Link>> connect(const PeerInfo& peer,
                                                     const std::shared_ptr<Control>& control,
                                                     int timeout_ms) override;
};

}  // namespace moonpool::transport::cufile
