// Waits for a card that end: by the card, by a deadline, or because the work is to stop.
#pragma once

#include <string>

#include "base/clock.hpp"
#include "base/result.hpp"
#include "device/card_copier.hpp"

namespace moonpool::transport {

// Asks ask(ms), which waits that long at most, until it says true. Errors: its own; kClosed once stopped() is
// true; kTimeout after timeout_ms, with `what` as the sentence's beginning.
template <class Stopped, class Ask>
Status ask_until(int timeout_ms, const char* what, Stopped stopped, Ask ask) {
    constexpr int kLookMs = 20;  // how often stopped() is asked
    const uint64_t until_ns = now_ns() + static_cast<uint64_t>(timeout_ms) * 1000000;
    for (;;) {
        Result<bool> over = ask(kLookMs);
        if (!over) return over.error();
        if (*over) return success();
        if (stopped()) return Error{Code::kClosed, "stopped"};
        if (now_ns() >= until_ns) {
            return Error{Code::kTimeout, std::string(what) + " within " + std::to_string(timeout_ms) + " ms"};
        }
    }
}

// A slot of pinned memory, waiting for one to come back. own: see CardCopier::take.
template <class Stopped>
Result<device::RingSlot> take_slot(device::CardCopier& copier, int timeout_ms, bool own, Stopped stopped) {
    device::RingSlot taken;
    Status got =
        ask_until(timeout_ms, "no slot of pinned memory came back", stopped, [&](int ms) -> Result<bool> {
            Result<device::RingSlot> slot = copier.take(ms, own);
            if (!slot && slot.error().code == Code::kTimeout) return false;
            if (!slot) return slot.error();
            taken = std::move(*slot);
            return true;
        });
    if (!got) return got.error();
    return taken;
}

}  // namespace moonpool::transport
