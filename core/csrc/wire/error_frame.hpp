// The ERROR frame: why a request (its id) or a connection (id 0) failed, as a code and a sentence.
#pragma once

#include <string>
#include <vector>

#include "base/result.hpp"
#include "wire/frame.hpp"

namespace moonpool {

inline void write_error_body(Writer w, Code code, const std::string& text) {
    w.number(static_cast<uint16_t>(code));
    w.text16(text);
}

inline void write_error(std::vector<std::byte>& out, Code code, const std::string& text, uint64_t request_id,
                        uint16_t flags = kFlagAnswer) {
    size_t at = begin_frame(out, Kind::kError, flags, request_id);
    write_error_body(Writer(out), code, text);
    finish_frame(out, at);
}

inline Error read_error(Reader& body) {
    auto code = body.number<uint16_t>();
    std::string_view text = body.text16();
    if (!body.ok() || code > static_cast<uint16_t>(Code::kOs))
        return Error{Code::kProtocol, "an unreadable refusal"};
    return Error{static_cast<Code>(code), std::string(text)};
}

}  // namespace moonpool
