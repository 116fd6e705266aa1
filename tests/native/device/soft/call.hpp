// What each function of the driver begins with: the lock, the count, a failure that a test asked for, and the
// rules that all functions of a kind share.
#pragma once

#include <algorithm>
#include <mutex>
#include <string>

#include "state.hpp"

namespace moonpool::soft {

namespace cu = device::cu;
inline constexpr int kInvalidHandle = 400;

enum Needs : unsigned {
    kNothing = 0,
    kContext = 1,  // of the thread
    kUnsafe = 2,   // breaks the graph capture of another thread unless this one's mode is relaxed
    kUndoes = 4,   // has its effect also when the card is broken
};

// Each function begins with one. It holds the lock; a code that is not 0 is the function's answer.
class Call {
   public:
    explicit Call(const char* name, unsigned needs = kNothing) : lock_(state().mutex) {
        State& s = state();
        ++s.calls[name];
        if (auto refused = s.refusals.find(name); refused != s.refusals.end() && refused->second != 0) {
            code = refused->second;
            return;
        }
        if (auto failure = s.failures.find(name);
            failure != s.failures.end() && --failure->second.left == 0) {
            code = failure->second.code;
            s.failures.erase(failure);
            // One that lasts for ever is the card's end.
            if (code == cu::kIllegalAddress || code == cu::kLaunchFailed || code == cu::kEccUncorrectable) {
                s.broken = code;
            }
            return;
        }
        if ((needs & kContext) != 0 && (this_thread().contexts.empty() || current() == nullptr)) {
            code = cu::kInvalidContext;
            return;
        }
        s.some();
        if ((needs & kContext) != 0 && (needs & kUndoes) == 0) code = s.broken;
        if (code == 0 && (needs & kUnsafe) != 0) capture();
    }
    static Context* current() {
        return this_thread().contexts.empty() ? nullptr : this_thread().contexts.back();
    }

    int code = 0;

   private:
    void capture() {
        if (this_thread().capture_mode == cu::kCaptureModeRelaxed) return;
        for (Stream* stream : state().streams) {
            if (!stream->capturing) continue;
            stream->capture_broken = true;
            code = cu::kCaptureUnsupported;
        }
    }
    std::lock_guard<std::recursive_mutex> lock_;
};

inline bool known(Stream* stream, const char* call) {
    if (state().streams.count(stream) != 0) return true;
    state().violation(std::string(call) + (stream == nullptr ? " on the default stream" : " on no stream"));
    return false;
}
inline bool known(Event* event, const char* call) {
    if (state().events.count(event) != 0) return true;
    state().violation(std::string(call) + " of no event");
    return false;
}

}  // namespace moonpool::soft
