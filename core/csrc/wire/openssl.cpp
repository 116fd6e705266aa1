#include "wire/openssl.hpp"

#include <dlfcn.h>

namespace moonpool {

namespace {

constexpr OpenSslNames kPairs[] = {{"libssl.so.3", "libcrypto.so.3"}, {"libssl.so.1.1", "libcrypto.so.1.1"}};
constexpr uint64_t kNoAtExit = 0x00080000;  // of OPENSSL_init_ssl: threads of ours may outlive main()

}  // namespace

Result<OpenSsl> OpenSsl::load(std::span<const OpenSslNames> pairs) {
    std::string why;
    // One that the process has already, by Python's own ssl for example, rather than a second one.
    for (int mode : {RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD, RTLD_NOW | RTLD_LOCAL}) {
        for (const OpenSslNames& names : pairs) {
            void* crypto = ::dlopen(names.crypto, mode);
            void* ssl = crypto == nullptr ? nullptr : ::dlopen(names.ssl, mode);
            if (ssl == nullptr) {
                if (why.empty() && (mode & RTLD_NOLOAD) == 0) why = ::dlerror();
                continue;
            }
            OpenSsl lib;
            const char* missing = nullptr;
            auto find = [&missing](void* library, const char* name) {
                void* found = ::dlsym(library, name);
                if (found == nullptr) missing = name;
                return found;
            };
#define MOONPOOL_FIND(library, name) lib.name = reinterpret_cast<decltype(lib.name)>(find(library, #name));
#define MOONPOOL_FIND_SSL(result, name, arguments) MOONPOOL_FIND(ssl, name)
#define MOONPOOL_FIND_CRYPTO(result, name, arguments) MOONPOOL_FIND(crypto, name)
            MOONPOOL_SSL_FUNCTIONS(MOONPOOL_FIND_SSL)
            MOONPOOL_CRYPTO_FUNCTIONS(MOONPOOL_FIND_CRYPTO)
#undef MOONPOOL_FIND
#undef MOONPOOL_FIND_SSL
#undef MOONPOOL_FIND_CRYPTO
            if (missing == nullptr && lib.OPENSSL_init_ssl(kNoAtExit, nullptr) == 1) return lib;
            why =
                std::string(names.ssl) + " lacks " + (missing != nullptr ? missing : "what it needs itself");
        }
    }
    return Error{Code::kUnavailable, "TLS needs OpenSSL 3 or 1.1.1, which cannot be loaded (" + why +
                                         "); install it, for example with apt-get install libssl3, or "
                                         "configure no TLS"};
}

Result<const OpenSsl*> OpenSsl::get() {
    static const Result<OpenSsl>* const kept = new Result<OpenSsl>(load(kPairs));
    if (!*kept) return kept->error();
    return &**kept;
}

}  // namespace moonpool
