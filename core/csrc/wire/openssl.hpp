// OpenSsl: libssl and libcrypto of the system, opened at run time; only what tls.cpp uses. Nothing of OpenSSL
// is needed to build, and nothing of it to run where no TLS context is made.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "base/result.hpp"

struct ssl_st;
struct ssl_ctx_st;
struct bio_st;
struct bio_method_st;

namespace moonpool {

struct OpenSslNames {
    const char* ssl;
    const char* crypto;
};

// Chooses one of the protocols that a client offers.
using OpenSslAlpn = int(ssl_st*, const unsigned char** chosen, unsigned char* chosen_size,
                        const unsigned char* offered, unsigned offered_size, void*);

// The functions that are used, as OpenSSL 1.1.1 and 3 declare them.
#define MOONPOOL_SSL_FUNCTIONS(X)                                                          \
    X(int, OPENSSL_init_ssl, (uint64_t, const void*))                                      \
    X(const void*, TLS_server_method, ())                                                  \
    X(const void*, TLS_client_method, ())                                                  \
    X(ssl_ctx_st*, SSL_CTX_new, (const void*))                                             \
    X(void, SSL_CTX_free, (ssl_ctx_st*))                                                   \
    X(long, SSL_CTX_ctrl, (ssl_ctx_st*, int, long, void*))                                 \
    X(uint64_t, SSL_CTX_set_options, (ssl_ctx_st*, uint64_t))                              \
    X(int, SSL_CTX_set_num_tickets, (ssl_ctx_st*, size_t))                                 \
    X(void, SSL_CTX_set_verify, (ssl_ctx_st*, int, int (*)(int, void*)))                   \
    X(void, SSL_CTX_set_default_passwd_cb, (ssl_ctx_st*, int (*)(char*, int, int, void*))) \
    X(int, SSL_CTX_use_certificate_chain_file, (ssl_ctx_st*, const char*))                 \
    X(int, SSL_CTX_use_PrivateKey_file, (ssl_ctx_st*, const char*, int))                   \
    X(int, SSL_CTX_load_verify_locations, (ssl_ctx_st*, const char*, const char*))         \
    X(int, SSL_CTX_set_default_verify_paths, (ssl_ctx_st*))                                \
    X(int, SSL_CTX_set_alpn_protos, (ssl_ctx_st*, const unsigned char*, unsigned))         \
    X(void, SSL_CTX_set_alpn_select_cb, (ssl_ctx_st*, OpenSslAlpn*, void*))                \
    X(ssl_st*, SSL_new, (ssl_ctx_st*))                                                     \
    X(void, SSL_free, (ssl_st*))                                                           \
    X(void, SSL_set_bio, (ssl_st*, bio_st*, bio_st*))                                      \
    X(void, SSL_set_accept_state, (ssl_st*))                                               \
    X(void, SSL_set_connect_state, (ssl_st*))                                              \
    X(long, SSL_ctrl, (ssl_st*, int, long, void*))                                         \
    X(void*, SSL_get0_param, (ssl_st*))                                                    \
    X(int, SSL_do_handshake, (ssl_st*))                                                    \
    X(int, SSL_read, (ssl_st*, void*, int))                                                \
    X(int, SSL_write, (ssl_st*, const void*, int))                                         \
    X(int, SSL_shutdown, (ssl_st*))                                                        \
    X(int, SSL_get_error, (const ssl_st*, int))                                            \
    X(int, SSL_pending, (const ssl_st*))                                                   \
    X(long, SSL_get_verify_result, (const ssl_st*))
#define MOONPOOL_CRYPTO_FUNCTIONS(X)                                                 \
    X(int, BIO_get_new_index, ())                                                    \
    X(bio_method_st*, BIO_meth_new, (int, const char*))                              \
    X(int, BIO_meth_set_read, (bio_method_st*, int (*)(bio_st*, char*, int)))        \
    X(int, BIO_meth_set_write, (bio_method_st*, int (*)(bio_st*, const char*, int))) \
    X(int, BIO_meth_set_ctrl, (bio_method_st*, long (*)(bio_st*, int, long, void*))) \
    X(bio_st*, BIO_new, (const bio_method_st*))                                      \
    X(void, BIO_set_init, (bio_st*, int))                                            \
    X(void, BIO_set_data, (bio_st*, void*))                                          \
    X(void*, BIO_get_data, (bio_st*))                                                \
    X(void, BIO_set_flags, (bio_st*, int))                                           \
    X(void, BIO_clear_flags, (bio_st*, int))                                         \
    X(unsigned long, ERR_get_error, ())                                              \
    X(unsigned long, ERR_peek_last_error, ())                                        \
    X(void, ERR_clear_error, ())                                                     \
    X(const char*, ERR_reason_error_string, (unsigned long))                         \
    X(const char*, X509_verify_cert_error_string, (long))                            \
    X(int, X509_VERIFY_PARAM_set1_host, (void*, const char*, size_t))                \
    X(int, X509_VERIFY_PARAM_set1_ip_asc, (void*, const char*))                      \
    X(void, X509_VERIFY_PARAM_set_hostflags, (void*, unsigned))

class OpenSsl {
   public:
#define MOONPOOL_DECLARE(result, name, arguments) result(*name) arguments = nullptr;
    MOONPOOL_SSL_FUNCTIONS(MOONPOOL_DECLARE)
    MOONPOOL_CRYPTO_FUNCTIONS(MOONPOOL_DECLARE)
#undef MOONPOOL_DECLARE

    // The first pair that is there and has all that is needed.
    static Result<OpenSsl> load(std::span<const OpenSslNames> pairs);
    // Of OpenSSL 3, else 1.1; opened by the first call and kept for ever.
    static Result<const OpenSsl*> get();

    // What OpenSSL calls a failure.
    std::string reason(unsigned long code) const {
        const char* text = code == 0 ? nullptr : ERR_reason_error_string(code);
        return text != nullptr ? text : "of no known reason";
    }
};

}  // namespace moonpool
