#include "wire/tls_files.hpp"

#include <unistd.h>

#include "wire/openssl.hpp"

namespace moonpool {

namespace {

// A key of root's may be readable for a group, as
// those of Kubernetes' secrets are: a process of another user could not read it otherwise.
bool is_open_to_others(const std::string& file) {
    struct stat is {};
    if (file.empty() || ::stat(file.c_str(), &is) != 0) return false;
    const mode_t others = is.st_uid == 0 && ::geteuid() != 0 ? 037 : 077;
    return (is.st_mode & others) != 0;
}

}  // namespace

Status check_key(const TlsFiles& files) {
    if (!is_open_to_others(files.key)) return success();
    return Error{Code::kInvalidArgument, std::string(files.use->key) + " = " + files.key +
                                             " can be read by others; run: chmod 600 " + files.key};
}

// Streams that are open have a reference to the context of their own.
FollowedTls::~FollowedTls() {
    if (context_ != nullptr) lib_.SSL_CTX_free(context_);
}

FollowedTls::Seen FollowedTls::look() const {
    Seen seen{};
    size_t i = 0;
    for (const std::string* file : {&files_.cert, &files_.key, &files_.ca}) {
        struct stat is {};
        if (!file->empty() && ::stat(file->c_str(), &is) == 0) {
            seen[i] = {is.st_dev,
                       is.st_ino,
                       is.st_mode,
                       static_cast<uint64_t>(is.st_size),
                       static_cast<uint64_t>(is.st_mtim.tv_sec),
                       static_cast<uint64_t>(is.st_mtim.tv_nsec),
                       static_cast<uint64_t>(is.st_ctim.tv_sec),
                       static_cast<uint64_t>(is.st_ctim.tv_nsec)};
        }
        ++i;
    }
    return seen;
}

Status FollowedTls::load() {
    MutexLock lock(mutex_);
    seen_ = look();  // first: what changes while they are read is read again
    Result<ssl_ctx_st*> made = make_();
    if (!made) return made.error();
    context_ = *made;
    return success();
}

ssl_st* FollowedTls::open() {
    MutexLock lock(mutex_);
    if (Seen now = look(); now != seen_) {
        seen_ = now;
        // Each time, whichever file has changed: a key that was refused may not slip in with its certificate.
        Status closed = check_key(files_);
        Result<ssl_ctx_st*> made = closed ? make_() : closed.error();
        if (made) {
            lib_.SSL_CTX_free(std::exchange(context_, *made));
            trouble_.clear();
        } else {
            trouble_ = made.error().text + "; the files from before are in use";
            if (files_.tell != nullptr) files_.tell(trouble_);
        }
    }
    lib_.ERR_clear_error();
    return lib_.SSL_new(context_);
}

std::string FollowedTls::take_trouble() {
    MutexLock lock(mutex_);
    return std::exchange(trouble_, "");
}

}  // namespace moonpool
