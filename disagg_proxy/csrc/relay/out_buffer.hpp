// OutBuffer: the bytes that a peer has not taken yet.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "relay/transport.hpp"

namespace moonpool::relay {

class OutBuffer {
   public:
    size_t size() const { return bytes_.size() - sent_; }
    bool empty() const { return size() == 0; }
    void append(std::string_view bytes) { bytes_.append(bytes); }
    // Write what the socket takes, first what waits in the transport. False: it is broken.
    bool flush(Transport& transport, int fd);
    void clear();

   private:
    std::string bytes_;
    size_t sent_ = 0;
};

}  // namespace moonpool::relay
