#include "relay/out_buffer.hpp"

namespace moonpool::relay {

namespace {

constexpr size_t kUnsentBytesKept = 16 << 10;

}  // namespace

bool OutBuffer::flush(Transport& transport, int fd) {
    if (!transport.flush(fd)) return false;
    while (!empty()) {
        iovec piece{bytes_.data() + sent_, size()};
        ptrdiff_t n = transport.write_some(fd, &piece, 1);
        if (n == kBroken) return false;
        if (n == 0) {
            if (sent_ > size()) {  // at most as much is moved as was sent since the last time
                bytes_.erase(0, sent_);
                sent_ = 0;
            }
            return true;
        }
        sent_ += static_cast<size_t>(n);
    }
    clear();
    return true;
}

void OutBuffer::clear() {
    bytes_.clear();
    sent_ = 0;
    if (bytes_.capacity() > kUnsentBytesKept) bytes_.shrink_to_fit();
}

}  // namespace moonpool::relay
