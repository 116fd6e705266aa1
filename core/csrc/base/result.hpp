// Result<T>: either a value or an Error. Nothing in the C++ core throws across a function border; the Python
// binding turns an Error into the exception class of its Code. (std::expected needs C++23; this is the part
// we use.)
#pragma once

#include <cerrno>
#include <cstring>
#include <string>
#include <utility>
#include <variant>

namespace moonpool {

enum class Code {
    kInvalidArgument,  // the caller's mistake: a limit, a closed range, a wrong size
    kUnavailable,      // the peer is not there, or went away in the middle
    kAuth,             // the token is missing or wrong
    kTimeout,          // no progress before the deadline
    kClosed,           // this handle was closed
    kForked,           // this handle belongs to the parent process
    kProtocol,         // the peer sent something that the wire format does not allow
    kTooLarge,         // over a stated limit
    kCorrupt,          // a checksum does not match
    kOs,               // the operating system refused; the text names the call and errno
};

struct Error {
    Code code = Code::kOs;
    std::string text;

    friend bool operator==(const Error&, const Error&) = default;
};

inline Error os_error(const std::string& what, int err = errno) {
    return Error{Code::kOs, what + ": " + std::strerror(err)};
}

struct Unit {};

template <class T = Unit>
class [[nodiscard]] Result {
   public:
    Result(T value) : state_(std::in_place_index<0>, std::move(value)) {}
    Result(Error error) : state_(std::in_place_index<1>, std::move(error)) {}

    bool ok() const { return state_.index() == 0; }
    explicit operator bool() const { return ok(); }

    T& value() { return std::get<0>(state_); }
    const T& value() const { return std::get<0>(state_); }
    T& operator*() { return value(); }
    const T& operator*() const { return value(); }
    T* operator->() { return &value(); }
    const T* operator->() const { return &value(); }

    Error& error() { return std::get<1>(state_); }
    const Error& error() const { return std::get<1>(state_); }

   private:
    std::variant<T, Error> state_;
};

using Status = Result<Unit>;
inline Status success() { return Unit{}; }

}  // namespace moonpool
