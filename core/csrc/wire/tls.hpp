// TLS for connections of control, of data and of HTTP, by the OpenSSL of the system: libssl and libcrypto (3,
// or 1.1.1) are opened when the first context is made, never before, and need not be there where no context
// is made.
//
// TlsServer, TlsClient: the files of one side, which they follow (tls_files.hpp); any thread may open streams
// from them.
// TlsStream: the TLS of one connection, over a socket that it does not own. It never waits and never raises
// SIGPIPE: OpenSSL sees memory only, and what goes to the socket goes by send(MSG_NOSIGNAL). One thread at a
// time.
//
// One record is read from the socket at a time, and at most the header of the next. So nothing that a poll of
// the socket could not tell is left inside after a receive() into kTlsRecordBytes or more.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/result.hpp"
#include "wire/tls_files.hpp"
#include "wire/tls_hello.hpp"

struct bio_st;

namespace moonpool {

inline constexpr size_t kTlsRecordBytes = 16384;  // of plain text, at most
inline constexpr uint8_t kTlsHandshake = 22;      // the first byte of a connection with TLS

class OpenSsl;

class TlsStream {
   public:
    enum class Step { kDone, kWait, kFailed };

    ~TlsStream();
    TlsStream(const TlsStream&) = delete;

    // As far as it goes without waiting. kWait: for bytes, and while unsent() for room in the socket.
    Step handshake(int fd);

    // After the handshake. Like recv(2) and send(2) with MSG_DONTWAIT; errno is EPROTO when TLS itself broke.
    // send() may keep what it took: until flush() has given it to the socket, unsent() is true.
    ssize_t receive(int fd, void* data, size_t size);
    ssize_t send(int fd, const void* data, size_t size);
    // Of several ranges: as much as is there, or as the socket takes. What failed behind some bytes, or ended
    // behind them, does so for each call that follows.
    ssize_t receive(int fd, const iovec* parts, size_t n);
    ssize_t send(int fd, const iovec* parts, size_t n);
    bool flush(int fd);  // false: errno says why, EAGAIN when the socket has no room
    bool unsent() const { return unsent_bytes() != 0; }
    size_t unsent_bytes() const { return sending_bytes_ - sent_; }
    // Tells the other side that nothing follows (close_notify), as far as the socket has room for it.
    void end(int fd);
    // The other side has said so: the end of its bytes is no cut.
    bool ended_well() const { return ended_well_; }

    // Plain text that was received and not yet asked for; a poll of the socket does not tell of it.
    bool pending() const { return pending_bytes() != 0; }
    size_t pending_bytes() const;
    bool inside_record() const { return have_ != 0; }
    bool heard() const { return spoke_; }  // anything of the other side
    // What came first is no TLS; none of it was read.
    bool not_tls() const { return not_tls_; }
    const TlsUse& use() const { return use_; }
    // The other side's certificate is not acceptable.
    bool untrusted() const { return verify_result_ != 0; }
    // The other side says that it does not accept the certificate of this one, or wants one.
    bool refused_ours() const;
    // Why it failed, in one sentence with the remedy.
    Error error(const std::string& peer) const;

   private:
    friend class TlsServer;
    friend class TlsClient;
    TlsStream(const OpenSsl& lib, ssl_st* ssl, const TlsUse& use, bool is_server, std::string name);

    // What OpenSSL calls when it wants or has bytes (tls.cpp).
    struct Wire;
    int give(std::byte* into, size_t size);
    bool keep(const std::byte* from, size_t size);
    bool make_room(size_t size);
    bool push(int fd);
    bool began_with_tls();
    int stop(ssize_t result, int error);
    void listen(int fd);
    void end_record(size_t bytes_of_next);
    Step fail();
    bool is_over() const { return broken_ || ended_well_ || lost_errno_ != 0; }
    ssize_t over() const;

    const OpenSsl& lib_;
    ssl_st* ssl_;
    const TlsUse& use_;
    bool is_server_;
    std::string name_;  // that the server's certificate must be for
    int fd_ = -1;       // of the call that is being made
    // One record is OpenSSL's to ask for, and it has not had all of it yet.
    bool may_read_ = false;
    // Why the socket gave no more, as recv(2) says it: 0 its end, -1 the errno beside it; 1: it did not say.
    ssize_t stopped_ = 1;
    int stopped_errno_ = 0;
    std::array<uint8_t, 5> header_{};
    size_t have_ = 0;     // bytes of the record that is being read, header included
    size_t given_ = 0;    // of its header, to OpenSSL
    TlsHello hello_;      // of a server's caller
    int textless_ = 0;    // records since the last with text
    bool spoke_ = false;  // the other side; it began with TLS
    bool not_tls_ = false;
    bool ended_ = false;
    bool ended_well_ = false;
    bool broken_ = false;                   // for good: fail() has kept why
    std::unique_ptr<std::byte[]> sending_;  // of OpenSSL, on its way to the socket
    size_t sending_room_ = 0, sending_bytes_ = 0;
    size_t sent_ = 0;
    long verify_result_ = 0;
    unsigned long reason_ = 0;  // OpenSSL's
    std::string own_reason_;    // where it was not OpenSSL that found a fault
    int lost_errno_ = 0;        // of the socket, which says it once
};

class TlsServer {
   public:
    // ca: callers must show a certificate that it vouches for; empty: they need none.
    static Result<std::shared_ptr<TlsServer>> create(const TlsFiles& files);
    Result<std::unique_ptr<TlsStream>> open() const;
    // As FollowedTls has it.
    std::string take_trouble() const { return context_->take_trouble(); }

   private:
    TlsServer(const OpenSsl& lib, const TlsUse& use) : lib_(lib), use_(use) {}
    const OpenSsl& lib_;
    const TlsUse& use_;
    std::unique_ptr<FollowedTls> context_;
};

class TlsClient {
   public:
    // cert and key empty: it shows none. ca empty: the system's authorities. name: what the server's
    // certificate must be for; empty: the host that is dialled.
    static Result<std::shared_ptr<TlsClient>> create(const TlsFiles& files, std::string name);
    Result<std::unique_ptr<TlsStream>> open(const std::string& address) const;
    // As FollowedTls has it.
    std::string take_trouble() const { return context_->take_trouble(); }

   private:
    TlsClient(const OpenSsl& lib, const TlsUse& use, std::string name)
        : lib_(lib), use_(use), name_(std::move(name)) {}
    const OpenSsl& lib_;
    const TlsUse& use_;
    std::string name_;
    std::unique_ptr<FollowedTls> context_;
};

}  // namespace moonpool
