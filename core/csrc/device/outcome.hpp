// Outcome: what a code of the driver means for the caller. Each sort has one answer:
//
//   kDone, kNotReady   no errors
//   kForEver           the context is broken and no later call succeeds: tell every request once, step aside
//   kNoMemory          try with less, then without
//   kNotAllowed        this machine or card does not do that: take the next poorer path
//   kOther             the call failed; others may succeed
#pragma once

#include "base/result.hpp"

namespace moonpool::device {

enum class Outcome { kDone, kNotReady, kForEver, kNoMemory, kNotAllowed, kOther };

Outcome outcome_of(int code);
// Of the Error that such an outcome becomes.
Code code_of(Outcome outcome);

}  // namespace moonpool::device
