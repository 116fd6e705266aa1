#include "wire/secrets.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>

#include "base/fd.hpp"
#include "base/mutex.hpp"

namespace moonpool {

namespace {

constexpr size_t kTextBytesMax = 4096;
constexpr size_t kReplacedBytesMin =
    16;  // of secrets that replace others: a short line is a slip, not a secret
constexpr std::string_view kWhite = " \t\r\n\v\f";

using Seen = std::array<uint64_t, 6>;  // what another file of that name differs in; all 0: there is none

Seen look(const std::string& path) {
    struct stat is {};
    if (::stat(path.c_str(), &is) != 0) return {};
    return {is.st_dev,
            is.st_ino,
            is.st_mode,
            static_cast<uint64_t>(is.st_size),
            static_cast<uint64_t>(is.st_mtim.tv_sec),
            static_cast<uint64_t>(is.st_mtim.tv_nsec)};
}

std::string_view without_white(std::string_view text) {
    size_t first = text.find_first_not_of(kWhite);
    if (first == std::string_view::npos) return {};
    return text.substr(first, text.find_last_not_of(kWhite) - first + 1);
}

bool is_text(std::string_view text) {
    return std::all_of(text.begin(), text.end(), [](unsigned char c) {
        return (c >= 0x20 && c < 0x7f) || kWhite.find(static_cast<char>(c)) != std::string_view::npos;
    });
}

Result<std::vector<std::string>> all_long(std::vector<std::string> secrets, const std::string& place) {
    for (const std::string& secret : secrets) {
        if (secret.size() < kReplacedBytesMin) {
            return Error{Code::kInvalidArgument, place + " has " + std::to_string(secret.size()) +
                                                     " bytes: give each secret at least " +
                                                     std::to_string(kReplacedBytesMin)};
        }
    }
    return secrets;
}

Result<std::vector<std::string>> read(const std::string& path) {
    std::string place = "the cluster token file " + path;
    Fd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));  // a FIFO would block
    if (file.get() < 0) return os_error("cannot read " + place);
    struct stat info {};
    if (::fstat(file.get(), &info) != 0) return os_error("cannot look at " + place);
    if ((info.st_mode & 077) != 0) {
        return Error{Code::kInvalidArgument, place + " can be read by others; run: chmod 600 " + path};
    }
    std::array<char, kTextBytesMax + 1> text;
    ssize_t size = ::read(file.get(), text.data(), text.size());
    if (size < 0) return os_error("cannot read " + place);
    return secrets_in({text.data(), static_cast<size_t>(size)}, place);
}

}  // namespace

struct Secrets::Known {
    using List = std::shared_ptr<const std::vector<std::string>>;

    Mutex mutex;
    std::string path GUARDED_BY(mutex);  // empty: they do not change
    List list GUARDED_BY(mutex);
    Seen seen GUARDED_BY(mutex){};
    std::string trouble GUARDED_BY(mutex);

    void read_again() REQUIRES(mutex) {
        Seen is = look(path);
        // Nor does one count that is gone, as that beside a node's socket while the node is restarted.
        if (is == seen || is == Seen{}) return;
        seen = is;
        auto found = read(path);
        if (found && *found == *list) return trouble.clear();
        if (found) found = all_long(std::move(*found), "the cluster token file " + path);
        trouble = found ? "" : found.error().text + "; the secrets from before are in use";
        if (found) list = std::make_shared<const std::vector<std::string>>(std::move(*found));
    }
};

Secrets Secrets::of(std::vector<std::string> list) {
    Secrets secrets;
    secrets.known_ = std::make_shared<Known>();
    MutexLock lock(secrets.known_->mutex);
    secrets.known_->list = std::make_shared<const std::vector<std::string>>(std::move(list));
    return secrets;
}

Secrets::Secrets(const char* secret) : Secrets(of({secret})) {}

Result<Secrets> Secrets::of_text(std::string_view text, const std::string& place) {
    auto found = secrets_in(text, place);
    if (!found) return found.error();
    return of(std::move(*found));
}

Result<Secrets> Secrets::of_file(const std::string& path) {
    Seen seen = look(path);  // first: what changes while it is read is read again
    auto found = read(path);
    if (!found) return found.error();
    Secrets secrets = of(std::move(*found));
    MutexLock lock(secrets.known_->mutex);
    secrets.known_->path = path;
    secrets.known_->seen = seen;
    return secrets;
}

Secrets Secrets::following(const std::string& path, std::vector<std::string> known) {
    Secrets secrets = of(std::move(known));
    MutexLock lock(secrets.known_->mutex);
    secrets.known_->path = path;  // looked at by the first now()
    return secrets;
}

std::shared_ptr<const std::vector<std::string>> Secrets::now() const {
    MutexLock lock(known_->mutex);
    if (!known_->path.empty()) known_->read_again();
    return known_->list;
}

std::string Secrets::take_trouble() const {
    if (known_ == nullptr) return {};
    MutexLock lock(known_->mutex);
    return std::exchange(known_->trouble, "");
}

Result<std::vector<std::string>> secrets_in(std::string_view text, const std::string& place) {
    if (text.size() > kTextBytesMax) {
        return Error{Code::kInvalidArgument, place + " holds more than 4096 bytes"};
    }
    text = without_white(text);
    if (text.empty()) return Error{Code::kInvalidArgument, place + " is empty"};
    std::vector<std::string> lines;
    if (is_text(text)) {
        for (std::string_view rest = text; !rest.empty();) {
            size_t end = std::min(rest.find('\n'), rest.size());
            if (std::string_view line = without_white(rest.substr(0, end)); !line.empty())
                lines.emplace_back(line);
            rest.remove_prefix(std::min(end + 1, rest.size()));
        }
    }
    if (lines.size() != 2) return std::vector<std::string>{std::string(text)};
    return all_long(std::move(lines), place + " holds two secrets, of which one");
}

}  // namespace moonpool
