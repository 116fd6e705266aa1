// TlsHello: how much the first messages of a caller claim to be. OpenSSL makes room for the whole of a
// message as soon as its header is there: the nine bytes of a ClientHello that claims 128 KiB would cost 158
// KB before anything is known of the caller. A real one has a few hundred bytes, some thousand with
// post-quantum keys.
//
// Looked at are the one or two ClientHellos (the second one answers a HelloRetryRequest), which may come in
// any number of records. Whatever follows is encrypted, or bounded by OpenSSL itself.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

namespace moonpool {

class TlsHello {
   public:
    static constexpr size_t kBytesMax = 16384;

    // The next bytes of handshake records. False: a ClientHello claims more than kBytesMax.
    bool fits(const std::byte* at, size_t size) {
        while (size > 0 && hellos_ < kHellosMax) {
            if (left_ > 0) {
                size_t passed = std::min(left_, size);
                left_ -= passed;
                at += passed;
                size -= passed;
                continue;
            }
            header_[have_++] = std::to_integer<uint8_t>(*at++);
            --size;
            if (have_ < header_.size()) continue;
            have_ = 0;
            if (header_[0] != kClientHello) {
                hellos_ = kHellosMax;
                return true;
            }
            ++hellos_;
            left_ = size_t{header_[1]} << 16 | size_t{header_[2]} << 8 | header_[3];
            if (left_ > kBytesMax) return false;
        }
        return true;
    }

   private:
    static constexpr uint8_t kClientHello = 1;
    static constexpr int kHellosMax = 2;

    std::array<uint8_t, 4> header_{};  // of a message: its type, and its length without the header
    size_t have_ = 0;                  // bytes of it
    size_t left_ = 0;                  // of the message
    int hellos_ = 0;
};

}  // namespace moonpool
