// A message that is refused, and what is said about it.
#pragma once

#include <string>

namespace moonpool::http {

// status:   the HTTP status to answer a client with; 502 where an engine's answer is refused.
// reason:   a short label for the metric moonpool_proxy_rejected_total (a literal).
// sentence: what is wrong and, where there is one, the remedy.
struct Refusal {
    int status = 0;
    const char* reason = "";
    std::string sentence;
};

// How a call on bytes that may not all be there yet ended.
enum class Step {
    kMore,     // not whole: call again when there are more bytes
    kDone,     // whole
    kRefused,  // refusal() says why; feed no more
};

}  // namespace moonpool::http
