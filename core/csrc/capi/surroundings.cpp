#include "capi/surroundings.hpp"

#include <arpa/inet.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>

#include "base/fd.hpp"

namespace moonpool::capi {

namespace {

constexpr size_t kTokenBytesMax = 4096;

std::string variable(const char* name) {
    const char* value = std::getenv(name);
    return value == nullptr ? "" : value;
}

Result<std::string> checked(std::string token, const std::string& place) {
    if (token.size() > kTokenBytesMax) {
        return Error{Code::kInvalidArgument, place + " holds more than 4096 bytes"};
    }
    constexpr std::string_view kWhite = " \t\r\n\v\f";
    size_t first = token.find_first_not_of(kWhite);
    if (first == std::string::npos) return Error{Code::kInvalidArgument, place + " is empty"};
    return token.substr(first, token.find_last_not_of(kWhite) - first + 1);
}

Result<std::string> from_file(const std::string& path) {
    std::string place = "the cluster token file " + path;
    Fd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));  // a FIFO would block
    if (file.get() < 0) return os_error("cannot read " + place);
    struct stat info {};
    if (::fstat(file.get(), &info) != 0) return os_error("cannot look at " + place);
    if ((info.st_mode & 077) != 0) {
        return Error{Code::kInvalidArgument, place + " can be read by others; run: chmod 600 " + path};
    }
    std::array<char, kTokenBytesMax + 1> text;
    ssize_t size = ::read(file.get(), text.data(), text.size());
    if (size < 0) return os_error("cannot read " + place);
    return checked(std::string(text.data(), static_cast<size_t>(size)), place);
}

std::string runtime_folder() {
    if (std::string folder = variable("MOONPOOL_RUNTIME_DIR"); !folder.empty()) return folder;
    if (::geteuid() == 0) return "/run/moonpool";
    if (std::string folder = variable("XDG_RUNTIME_DIR"); !folder.empty()) return folder + "/moonpool";
    return "/tmp/moonpool-" + std::to_string(::geteuid());
}

// The folder belongs to this user alone, else another user could have put the token there.
bool is_private(const std::string& folder) {
    struct stat info {};
    return ::lstat(folder.c_str(), &info) == 0 && S_ISDIR(info.st_mode) && info.st_uid == ::geteuid() &&
           (info.st_mode & 077) == 0;
}

}  // namespace

Result<Token> cluster_token() {
    std::string text = variable("MOONPOOL_CLUSTER_TOKEN"), path = variable("MOONPOOL_CLUSTER_TOKEN_FILE");
    if (!text.empty() && !path.empty()) {
        return Error{
            Code::kInvalidArgument,
            "both MOONPOOL_CLUSTER_TOKEN and MOONPOOL_CLUSTER_TOKEN_FILE are set; unset one of them"};
    }
    bool chosen = !text.empty() || !path.empty();
    std::string folder = runtime_folder();
    std::string shared = folder + "/token";
    if (!chosen && (!is_private(folder) || ::access(shared.c_str(), F_OK) != 0)) {
        return Error{
            Code::kAuth,
            "there is no cluster token: set MOONPOOL_CLUSTER_TOKEN_FILE to a file with one, the same "
            "for all engines, or start a moonpool node on this host"};
    }
    Result<std::string> token = !text.empty() ? checked(text, "the variable MOONPOOL_CLUSTER_TOKEN")
                                              : from_file(chosen ? path : shared);
    if (!token) return token.error();
    return Token{std::move(*token), chosen};
}

bool is_loopback(const std::string& host) {
    in_addr number{};
    if (::inet_pton(AF_INET, host.c_str(), &number) == 1) return (ntohl(number.s_addr) >> 24) == 127;
    return host == "localhost" || host == "::1";
}

}  // namespace moonpool::capi
