#include "relay/transport.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace moonpool::relay {

// Small pieces share a record: one of its own for each would cost a system call and some thirty bytes. The
// copy is little beside the encryption.
ptrdiff_t Transport::seal_some(int fd, const iovec* pieces, size_t count) {
    char record[kTlsRecordBytes];
    ptrdiff_t taken = 0;
    size_t piece = 0, at = 0;  // in the piece
    for (;;) {
        size_t size = 0;
        while (piece < count && size < sizeof(record)) {
            size_t more = std::min(pieces[piece].iov_len - at, sizeof(record) - size);
            if (more > 0) std::memcpy(record + size, static_cast<char*>(pieces[piece].iov_base) + at, more);
            size += more;
            at += more;
            if (at < pieces[piece].iov_len) break;  // the record is full
            ++piece;
            at = 0;
        }
        if (size == 0) return taken;
        ssize_t n = tls_->send(fd, record, size);  // all of it, or nothing
        if (n < 0) return errno == EAGAIN ? taken : kBroken;
        taken += n;
        if (tls_->unsent()) return taken;
    }
}

bool Transport::flush_tls(int fd) { return tls_->flush(fd) || errno == EAGAIN; }

}  // namespace moonpool::relay
