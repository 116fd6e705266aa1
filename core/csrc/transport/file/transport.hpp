// File: files and block devices of this host are segments of their own, which no engine serves.
#pragma once

#include "base/mutex.hpp"
#include "transport/file/pump.hpp"
#include "transport/transport.hpp"

namespace moonpool::transport::file {

class Transport final : public transport::Transport {
   public:
    explicit Transport(const Context& context) : io_(context.options.file_io) {}

    Result<std::shared_ptr<transport::Link>> connect(const PeerInfo& peer,
                                                     const std::shared_ptr<Control>& control,
                                                     int timeout_ms) override;
    void close() override;

   private:
    Result<std::shared_ptr<Pump>> pump();

    const std::string io_;
    Mutex mutex_;
    std::shared_ptr<Pump> pump_ GUARDED_BY(mutex_);  // from the first file on
};

}  // namespace moonpool::transport::file
