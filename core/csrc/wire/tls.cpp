// OpenSSL is opened at run time, so this file declares the constants that it needs itself. Each stream has
// one BIO of its own (Wire), which OpenSSL reads from and writes to: give() receives from the socket into
// OpenSSL's own buffer, keep() collects what is encrypted in sending_, which goes to the socket by flush().
// OpenSSL never touches a descriptor. Memory BIOs in their place would copy each byte two times more.
//
// The error queue of OpenSSL belongs to the thread: it is cleared before each call whose result is
// examined, or an error of another connection on this thread would be taken for this one's.
//
// OpenSSL may ask for one record each time (listen()); behind it give() says that there is no more, so that
// records without text are counted here. The state of the record being read: have_ counts the bytes of it
// that came from the socket, header included; header_ holds its first five bytes, whose last two are the
// length, and given_ counts those that OpenSSL has. Between two records have_ counts what came of the next
// one's header along with the first.
#include "wire/tls.hpp"

#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <utility>

#include "base/mutex.hpp"
#include "wire/address.hpp"
#include "wire/openssl.hpp"

namespace moonpool {

namespace {

// Values of OpenSSL's headers, the same in 1.1.1 and 3.
constexpr int kCtrlMode = 33, kCtrlSessionCache = 44, kCtrlHostName = 55, kCtrlMinVersion = 123,
              kCtrlCertificatesMax = 51;
constexpr long kModeReleaseBuffers = 0x10, kTls12 = 0x0303;
constexpr uint64_t kOptions = (1u << 14) | (1u << 17) | (1u << 30);  // no tickets, compression, renegotiation
constexpr int kPem = 1, kErrorWantRead = 2, kErrorZeroReturn = 6;
constexpr int kVerifyPeer = 1, kVerifyMust = 2;
constexpr unsigned kHostFlags = 0x04 | 0x20;  // no partial wildcards; alternative names, never the subject
constexpr long kNotYetValid = 9, kExpired = 10, kHostMismatch = 62, kIpMismatch = 64;
constexpr int kBioSource = 0x0400, kBioFlush = 11, kBioFlags = 0x0F, kBioReadAgain = 0x01 | 0x08;
constexpr unsigned long kAlert = 1000;  // a reason above it is an alert of the other side

// More than any cipher adds to a record; a length beyond it is no TLS.
constexpr size_t kRecordOverheadMax = 2048;
constexpr size_t kRecordUsualOverhead = 64;  // of what is current; others cost one more copy
constexpr uint8_t kTlsAlert = 21;
// What a caller may show before it is known: a chain has some thousand bytes.
constexpr long kCallerCertificatesMax = 32 << 10;
constexpr size_t kKeptBytes = 4096;                 // of a buffer that is not in use
constexpr size_t kSendBytes = 8 * kTlsRecordBytes;  // are encrypted, then the socket gets them
constexpr int kEmptyRecordsMax = 16;  // in one call, without a byte for the caller: others wait meanwhile
// In a row, after the handshake. Each key update costs an answer of ours; no side that means well sends many.
constexpr int kTextlessRecordsMax = 32;

// Of RFC 7301: names with their length before them.
constexpr unsigned char kHttp[] = "\x08http/1.1";
constexpr unsigned kHttpSize = sizeof(kHttp) - 1;
constexpr int kAlpnChosen = 0, kAlpnRefused = 2;

// A client that offers protocols, and not this one, would speak another.
int choose_http(ssl_st*, const unsigned char** chosen, unsigned char* chosen_size,
                const unsigned char* offered, unsigned offered_size, void*) {
    for (unsigned at = 0; at + kHttpSize <= offered_size; at += 1u + offered[at]) {
        if (std::memcmp(offered + at, kHttp, kHttpSize) != 0) continue;
        *chosen = offered + at + 1;
        *chosen_size = kHttpSize - 1;
        return kAlpnChosen;
    }
    return kAlpnRefused;
}

int no_password(char*, int, int, void*) { return 0; }  // never ask the terminal

// What holds for every connection of a context: TLS 1.2 at least, no sessions that are resumed, no tickets.
ssl_ctx_st* new_context(const OpenSsl& lib, bool is_server) {
    lib.ERR_clear_error();
    ssl_ctx_st* context = lib.SSL_CTX_new(is_server ? lib.TLS_server_method() : lib.TLS_client_method());
    if (context == nullptr) return nullptr;
    lib.SSL_CTX_ctrl(context, kCtrlMinVersion, kTls12, nullptr);
    // A thousand clients wait most of the time.
    lib.SSL_CTX_ctrl(context, kCtrlMode, kModeReleaseBuffers, nullptr);
    lib.SSL_CTX_ctrl(context, kCtrlSessionCache, 0, nullptr);
    lib.SSL_CTX_set_options(context, kOptions);
    lib.SSL_CTX_set_num_tickets(context, 0);
    lib.SSL_CTX_set_default_passwd_cb(context, no_password);
    return context;
}

// OpenSSL's reasons for a missing file are long and vague; access() gives the plain one.
Error unusable(const OpenSsl& lib, const char* key, const std::string& file, const std::string& remedy) {
    std::string reason = lib.reason(lib.ERR_peek_last_error());
    if (::access(file.c_str(), R_OK) != 0) reason = std::strerror(errno);
    lib.ERR_clear_error();
    return Error{Code::kInvalidArgument,
                 std::string(key) + " = " + file + " cannot be used: " + reason + "; " + remedy};
}

Status show(const OpenSsl& lib, ssl_ctx_st* context, const TlsFiles& files) {
    const TlsUse& use = *files.use;
    if (lib.SSL_CTX_use_certificate_chain_file(context, files.cert.c_str()) != 1) {
        return unusable(lib, use.cert, files.cert, "it must be a certificate in PEM form");
    }
    if (lib.SSL_CTX_use_PrivateKey_file(context, files.key.c_str(), kPem) != 1) {
        return unusable(
            lib, use.key, files.key,
            "it must be the key of " + std::string(use.cert) + ", in PEM form, without a password");
    }
    return success();
}

Status trust(const OpenSsl& lib, ssl_ctx_st* context, const TlsFiles& files) {
    if (lib.SSL_CTX_load_verify_locations(context, files.ca.c_str(), nullptr) == 1) return success();
    return unusable(lib, files.use->ca, files.ca, "it must hold certificates in PEM form");
}

Error no_stream(const OpenSsl& lib) {
    return Error{Code::kOs, "TLS cannot begin: " + lib.reason(lib.ERR_get_error())};
}

// Frees a context that was not finished.
struct FreeContext {
    const OpenSsl* lib;
    void operator()(ssl_ctx_st* context) const { lib->SSL_CTX_free(context); }
};
using NewContext = std::unique_ptr<ssl_ctx_st, FreeContext>;

Result<ssl_ctx_st*> server_context(const OpenSsl& lib, const TlsFiles& files) {
    NewContext context(new_context(lib, true), FreeContext{&lib});
    if (context == nullptr) return no_stream(lib);
    if (Status status = show(lib, context.get(), files); !status) return status.error();
    if (!files.ca.empty()) {
        if (Status status = trust(lib, context.get(), files); !status) return status.error();
        // Without kVerifyMust a client that shows no certificate would pass.
        lib.SSL_CTX_set_verify(context.get(), kVerifyPeer | kVerifyMust, nullptr);
        lib.SSL_CTX_ctrl(context.get(), kCtrlCertificatesMax, kCallerCertificatesMax, nullptr);
    }
    if (files.use->http) lib.SSL_CTX_set_alpn_select_cb(context.get(), choose_http, nullptr);
    return context.release();
}

Result<ssl_ctx_st*> client_context(const OpenSsl& lib, const TlsFiles& files) {
    NewContext context(new_context(lib, false), FreeContext{&lib});
    if (context == nullptr) return no_stream(lib);
    if (!files.cert.empty()) {
        if (Status status = show(lib, context.get(), files); !status) return status.error();
    }
    if (files.ca.empty()) {
        lib.SSL_CTX_set_default_verify_paths(context.get());
    } else if (Status status = trust(lib, context.get(), files); !status) {
        return status.error();
    }
    lib.SSL_CTX_set_verify(context.get(), kVerifyPeer, nullptr);
    if (files.use->http && lib.SSL_CTX_set_alpn_protos(context.get(), kHttp, kHttpSize) != 0) {
        return no_stream(lib);
    }
    return context.release();
}

}  // namespace

// The BIO of a stream. OpenSSL calls it within SSL_do_handshake, SSL_read, SSL_write and SSL_shutdown, on the
// thread that called those.
struct TlsStream::Wire {
    static int read(bio_st* bio, char* into, int size) {
        TlsStream& self = of(bio);
        self.lib_.BIO_clear_flags(bio, kBioFlags);
        int n = self.give(reinterpret_cast<std::byte*>(into), static_cast<size_t>(std::max(size, 0)));
        // Also at the end of the socket's bytes: OpenSSL would take that for an error of its own.
        if (n <= 0) self.lib_.BIO_set_flags(bio, kBioReadAgain);
        return n;
    }
    static int write(bio_st* bio, const char* from, int size) {
        TlsStream& self = of(bio);
        self.lib_.BIO_clear_flags(bio, kBioFlags);
        const auto* bytes = reinterpret_cast<const std::byte*>(from);
        return self.keep(bytes, static_cast<size_t>(std::max(size, 0))) ? size : -1;
    }
    static long control(bio_st*, int what, long, void*) { return what == kBioFlush ? 1 : 0; }

    // One for the process, as OpenSSL is. Null: no memory.
    static const bio_method_st* method(const OpenSsl& lib) {
        static Mutex mutex;
        static const bio_method_st* kept = nullptr;
        MutexLock lock(mutex);
        if (kept != nullptr) return kept;
        bio_method_st* made = lib.BIO_meth_new(lib.BIO_get_new_index() | kBioSource, "moonpool");
        if (made == nullptr) return made;  // the next stream tries again
        lib.BIO_meth_set_read(made, read);
        lib.BIO_meth_set_write(made, write);
        lib.BIO_meth_set_ctrl(made, control);
        return kept = made;
    }

   private:
    static TlsStream& of(bio_st* bio) {
        // BIO_get_data is a function of the one OpenSSL that there is.
        return *static_cast<TlsStream*>((*OpenSsl::get())->BIO_get_data(bio));
    }
};

TlsStream::TlsStream(const OpenSsl& lib, ssl_st* ssl, const TlsUse& use, bool is_server, std::string name)
    : lib_(lib), ssl_(ssl), use_(use), is_server_(is_server), name_(std::move(name)) {
    const bio_method_st* method = Wire::method(lib_);
    // Without memory for one, the handshake fails.
    if (bio_st* bio = method == nullptr ? nullptr : lib_.BIO_new(method); bio != nullptr) {
        lib_.BIO_set_data(bio, this);
        lib_.BIO_set_init(bio, 1);
        lib_.SSL_set_bio(ssl_, bio, bio);
    }
    is_server ? lib_.SSL_set_accept_state(ssl_) : lib_.SSL_set_connect_state(ssl_);
}

// Frees the BIO as well; it belongs to ssl_ since SSL_set_bio.
TlsStream::~TlsStream() { lib_.SSL_free(ssl_); }

// OpenSSL may ask for a record of that socket.
void TlsStream::listen(int fd) {
    fd_ = fd;
    may_read_ = true;
    stopped_ = 1;
}

int TlsStream::stop(ssize_t result, int error) {
    stopped_ = result;
    stopped_errno_ = error;
    may_read_ = false;
    return -1;
}

// A peek at the first byte tells TLS from anything else and leaves it in the socket, so that a caller in
// plain can be answered in plain.
bool TlsStream::began_with_tls() {
    uint8_t first = 0;
    ssize_t n = ::recv(fd_, &first, 1, MSG_PEEK | MSG_DONTWAIT);
    if (n <= 0) {
        stop(n, errno);
        return false;
    }
    spoke_ = first == kTlsHandshake || first == kTlsAlert;
    if (!spoke_) {
        not_tls_ = broken_ = true;
        stop(-1, EPROTO);
    }
    return spoke_;
}

// Bytes of this one record, for OpenSSL, and never more but the header of the next, whose text then still
// lies in the socket, where a poll sees it, or has yet to come. -1: none now.
int TlsStream::give(std::byte* into, size_t size) {
    constexpr size_t kHeader = std::tuple_size_v<decltype(header_)>;
    if (!may_read_ || size == 0) return -1;
    if (!spoke_ && !began_with_tls()) return -1;
    while (have_ < kHeader) {
        ssize_t n = ::recv(fd_, header_.data() + have_, kHeader - have_, MSG_DONTWAIT);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return stop(n, errno);
        have_ += static_cast<size_t>(n);
    }
    const size_t length = size_t{header_[3]} << 8 | header_[4];
    if (length > kTlsRecordBytes + kRecordOverheadMax) {
        broken_ = true;
        return stop(-1, EPROTO);
    }
    if (given_ < kHeader) {
        size_t n = std::min(size, kHeader - given_);
        std::memcpy(into, header_.data() + given_, n);
        given_ += n;
        if (given_ == kHeader && length == 0) end_record(0);
        return static_cast<int>(n);
    }
    const size_t missing = kHeader + length - have_, wanted = std::min(size, missing);
    uint8_t next[kHeader];
    iovec parts[2] = {{into, wanted}, {next, kHeader}};
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = wanted == missing ? 2 : 1;
    ssize_t n;
    do {
        n = ::recvmsg(fd_, &message, MSG_DONTWAIT);
    } while (n < 0 && errno == EINTR);
    if (n <= 0) return stop(n, errno);
    const size_t got = static_cast<size_t>(n), own = std::min(got, wanted);
    if (is_server_ && header_[0] == kTlsHandshake && !hello_.fits(into, own)) {
        broken_ = true;
        own_reason_ = "its ClientHello is too long";
        return stop(-1, EPROTO);
    }
    have_ += own;
    if (own == missing) {
        end_record(got - own);
        std::memcpy(header_.data(), next, have_);
    }
    return static_cast<int>(own);
}

// OpenSSL has all of it; so many bytes of the next one came along.
void TlsStream::end_record(size_t bytes_of_next) {
    have_ = bytes_of_next;
    given_ = 0;
    may_read_ = false;
}

// Takes all of it, so that there is no partial write that OpenSSL would have to repeat. False: no memory;
// an exception may not pass through OpenSSL.
bool TlsStream::keep(const std::byte* from, size_t size) {
    if (size == 0) return true;
    if (!make_room(size)) return false;
    std::memcpy(sending_.get() + sending_bytes_, from, size);
    sending_bytes_ += size;
    return true;
}

// For so many bytes behind those that wait.
bool TlsStream::make_room(size_t size) {
    const size_t waiting = unsent_bytes();
    if (waiting + size > sending_room_) {
        const size_t room = std::max({waiting + size, 2 * sending_room_, kKeptBytes});
        std::unique_ptr<std::byte[]> larger(new (std::nothrow) std::byte[room]);
        if (larger == nullptr) return false;
        if (waiting != 0) std::memcpy(larger.get(), sending_.get() + sent_, waiting);
        sending_ = std::move(larger);
        sending_room_ = room;
    } else if (sending_bytes_ + size > sending_room_) {
        std::memmove(sending_.get(), sending_.get() + sent_, waiting);
    } else {
        return true;
    }
    sending_bytes_ = waiting;
    sent_ = 0;
    return true;
}

// Keeps what error() needs to say the reason later; the first error in the queue is the cause, the last
// ones are consequences.
TlsStream::Step TlsStream::fail() {
    if (!std::exchange(broken_, true)) {
        reason_ = lib_.ERR_get_error();
        verify_result_ = lib_.SSL_get_verify_result(ssl_);
    }
    lib_.ERR_clear_error();
    errno = EPROTO;
    return Step::kFailed;
}

TlsStream::Step TlsStream::handshake(int fd) {
    for (int records = 0; records < kEmptyRecordsMax; ++records) {
        listen(fd);
        lib_.ERR_clear_error();
        int result = lib_.SSL_do_handshake(ssl_);
        may_read_ = false;
        bool waits = result != 1 && lib_.SSL_get_error(ssl_, result) == kErrorWantRead;
        Step step = result == 1 ? Step::kDone : waits ? Step::kWait : fail();
        // Also after a failure: the alert that tells the other side why is among what is unsent.
        if (!flush(fd) && errno != EAGAIN && step != Step::kFailed) {
            ended_ = true;
            return Step::kFailed;
        }
        if (step != Step::kWait) return step;
        if (stopped_ > 0) continue;  // that record was not the last
        if (stopped_ < 0 && (stopped_errno_ == EAGAIN || stopped_errno_ == EINTR)) return Step::kWait;
        ended_ = stopped_ == 0 || stopped_errno_ != EPROTO;
        return Step::kFailed;
    }
    return Step::kWait;  // more lies in the socket, whose poll says so
}

// Some records carry no text (a key update, an alert): then the next one is read, up to kEmptyRecordsMax in
// one call.
ssize_t TlsStream::receive(int fd, void* data, size_t size) {
    if (is_over()) return over();
    int want = static_cast<int>(std::min<size_t>(size, 1u << 30));
    for (int records = 0; records < kEmptyRecordsMax; ++records) {
        stopped_ = 1;
        if (records != 0 || lib_.SSL_pending(ssl_) == 0) listen(fd);
        lib_.ERR_clear_error();
        int n = lib_.SSL_read(ssl_, data, want);
        may_read_ = false;
        if (n > 0) {
            textless_ = 0;
            return n;
        }
        int error = lib_.SSL_get_error(ssl_, n);
        if (error == kErrorZeroReturn) {
            ended_well_ = true;
            return 0;
        }
        if (error != kErrorWantRead) {
            fail();
            (void)flush(fd);  // the alert that tells the other side
            return over();
        }
        if (stopped_ < 0 && stopped_errno_ != EAGAIN && stopped_errno_ != EINTR) {
            lost_errno_ = stopped_errno_;
            return over();
        }
        if (stopped_ <= 0) {
            errno = stopped_errno_;
            return stopped_;
        }
        if (++textless_ > kTextlessRecordsMax) {
            broken_ = true;
            own_reason_ = "it sends records without text, again and again";
            return over();
        }
    }
    errno = EAGAIN;
    return -1;
}

// What is the end of the stream for the caller that meets it is so for all that follow.
ssize_t TlsStream::over() const {
    if (!broken_ && lost_errno_ == 0) return 0;
    errno = broken_ ? EPROTO : lost_errno_;
    return -1;
}

ssize_t TlsStream::send(int fd, const void* data, size_t size) {
    iovec part{const_cast<void*>(data), std::min(size, kTlsRecordBytes)};
    return send(fd, &part, 1);
}

ssize_t TlsStream::receive(int fd, const iovec* parts, size_t n) {
    ssize_t all = 0;
    for (size_t i = 0; i < n; ++i) {
        auto* at = static_cast<std::byte*>(parts[i].iov_base);
        for (size_t left = parts[i].iov_len; left != 0;) {
            ssize_t got = receive(fd, at, left);
            if (got <= 0) return all != 0 ? all : got;
            at += got;
            left -= static_cast<size_t>(got);
            all += got;
        }
    }
    return all;
}

// Several records go to the socket at once: the other side is woken once for them.
ssize_t TlsStream::send(int fd, const iovec* parts, size_t n) {
    if (broken_) return over();
    if (!flush(fd)) return -1;
    size_t bytes = 0;
    for (size_t i = 0; i < n && bytes < kSendBytes; ++i) bytes += parts[i].iov_len;
    // Once for all of a batch, instead of with each record. Without memory keep() fails.
    if (bytes > kTlsRecordBytes) {
        (void)make_room(std::min(bytes, kSendBytes) + (kSendBytes / kTlsRecordBytes) * kRecordUsualOverhead);
    }
    ssize_t all = 0;
    size_t batch = 0;
    for (size_t i = 0; i < n; ++i) {
        const auto* at = static_cast<const std::byte*>(parts[i].iov_base);
        for (size_t left = parts[i].iov_len; left != 0;) {
            lib_.ERR_clear_error();
            int took = lib_.SSL_write(ssl_, at, static_cast<int>(std::min(left, kTlsRecordBytes)));
            if (took <= 0) {
                fail();
                return all != 0 ? all : -1;
            }
            at += took;
            left -= static_cast<size_t>(took);
            all += took;
            batch += static_cast<size_t>(took);
            if (batch < kSendBytes) continue;
            batch = 0;
            if (!push(fd)) return errno == EAGAIN ? all : -1;
        }
    }
    return flush(fd) || errno == EAGAIN ? all : -1;
}

// As flush(), and keeps the memory.
bool TlsStream::push(int fd) {
    while (sent_ < sending_bytes_) {
        ssize_t n = ::send(fd, sending_.get() + sent_, sending_bytes_ - sent_, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return false;
        sent_ += static_cast<size_t>(n);
    }
    sent_ = sending_bytes_ = 0;
    return true;
}

// False with EAGAIN: the rest goes with the next call.
bool TlsStream::flush(int fd) {
    if (!push(fd)) return false;
    if (sending_room_ > kKeptBytes) {
        sending_.reset();
        sending_room_ = 0;
    }
    return true;
}

void TlsStream::end(int fd) {
    lib_.ERR_clear_error();
    (void)lib_.SSL_shutdown(ssl_);  // 0: the other side has yet to say the same, which is not waited for
    lib_.ERR_clear_error();
    (void)flush(fd);
}

size_t TlsStream::pending_bytes() const { return static_cast<size_t>(std::max(lib_.SSL_pending(ssl_), 0)); }

// 42 to 49 and 116: the alerts about certificates.
bool TlsStream::refused_ours() const {
    unsigned long reason = reason_ & 0xFFF;
    return !is_server_ && ((reason >= kAlert + 42 && reason <= kAlert + 49) || reason == kAlert + 116);
}

Error TlsStream::error(const std::string& peer) const {
    // The codes of verification are the same in OpenSSL 1.1.1 and 3; their own words would not name a
    // remedy.
    std::string theirs = "the certificate of " + peer;
    switch (verify_result_) {
        case 0:
            break;
        case kExpired:
            return Error{Code::kAuth, theirs + " has expired; " + use_.expired};
        case kNotYetValid:
            return Error{Code::kAuth, theirs + " is not valid yet; compare the clocks of the two hosts"};
        case kHostMismatch:
        case kIpMismatch:
            return Error{Code::kAuth, theirs + " is not for " + name_ +
                                          "; dial it by a name or address that the certificate has" +
                                          use_.misnamed};
        default:
            return Error{Code::kAuth, theirs + " is not trusted (" +
                                          lib_.X509_verify_cert_error_string(verify_result_) + "); set " +
                                          use_.ca + " to the authorities that vouch for it"};
    }
    if (not_tls_) return Error{Code::kProtocol, peer + " does not speak TLS"};
    if (ended_) return Error{Code::kUnavailable, peer + " closed the connection during the TLS handshake"};
    if (refused_ours()) {
        return Error{Code::kAuth, peer + " does not accept the certificate of this process (" +
                                      lib_.reason(reason_) + "); " + use_.unaccepted};
    }
    return Error{Code::kProtocol, "TLS with " + peer + " broke: " +
                                      (!own_reason_.empty() ? own_reason_
                                       : reason_ == 0       ? "what came is no TLS"
                                                            : lib_.reason(reason_))};
}

Result<std::shared_ptr<TlsServer>> TlsServer::create(const TlsFiles& files) {
    Result<const OpenSsl*> lib = OpenSsl::get();
    if (!lib) return lib.error();
    std::shared_ptr<TlsServer> server(new TlsServer(**lib, *files.use));
    server->context_ = std::make_unique<FollowedTls>(
        **lib, files, [lib = *lib, files] { return server_context(*lib, files); });
    if (Status loaded = server->context_->load(); !loaded) return loaded.error();
    return server;
}

Result<std::unique_ptr<TlsStream>> TlsServer::open() const {
    ssl_st* ssl = context_->open();
    if (ssl == nullptr) return no_stream(lib_);
    return std::unique_ptr<TlsStream>(new TlsStream(lib_, ssl, use_, true, ""));
}

Result<std::shared_ptr<TlsClient>> TlsClient::create(const TlsFiles& files, std::string name) {
    Result<const OpenSsl*> lib = OpenSsl::get();
    if (!lib) return lib.error();
    std::shared_ptr<TlsClient> client(new TlsClient(**lib, *files.use, std::move(name)));
    client->context_ = std::make_unique<FollowedTls>(
        **lib, files, [lib = *lib, files] { return client_context(*lib, files); });
    if (Status loaded = client->context_->load(); !loaded) return loaded.error();
    return client;
}

// The name is checked by OpenSSL during the handshake; addresses and names have different functions there.
// SNI is for names only.
Result<std::unique_ptr<TlsStream>> TlsClient::open(const std::string& address) const {
    std::string name = name_.empty() ? host_of(address) : name_;
    ssl_st* ssl = context_->open();
    if (ssl == nullptr) return no_stream(lib_);
    std::unique_ptr<TlsStream> stream(new TlsStream(lib_, ssl, use_, false, name));
    void* param = lib_.SSL_get0_param(ssl);
    unsigned char ip[sizeof(in6_addr)];
    bool is_ip = ::inet_pton(AF_INET, name.c_str(), ip) == 1 || ::inet_pton(AF_INET6, name.c_str(), ip) == 1;
    bool named = is_ip ? lib_.X509_VERIFY_PARAM_set1_ip_asc(param, name.c_str()) == 1
                       : lib_.X509_VERIFY_PARAM_set1_host(param, name.c_str(), 0) == 1;
    if (!is_ip) {
        lib_.X509_VERIFY_PARAM_set_hostflags(param, kHostFlags);
        named = named && lib_.SSL_ctrl(ssl, kCtrlHostName, 0, const_cast<char*>(name.c_str())) == 1;
    }
    if (name.empty() || !named) {
        return Error{Code::kInvalidArgument,
                     (name.empty() ? address : name) + " is no name of a host; dial one" + use_.misnamed};
    }
    return stream;
}

}  // namespace moonpool
