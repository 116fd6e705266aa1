#include "device/outcome.hpp"

#include "device/cuda.hpp"

namespace moonpool::device {

Outcome outcome_of(int code) {
    switch (code) {
        case cu::kSuccess:
            return Outcome::kDone;
        case cu::kNotReady:
            return Outcome::kNotReady;
        case cu::kOutOfMemory:
            return Outcome::kNoMemory;
        case cu::kInvalidValue:
        case cu::kNotPermitted:
        case cu::kNotSupported:
        case 304:  // the operating system refused
            return Outcome::kNotAllowed;
        // cuda.h says of each of these that the process must end, or that the context can no longer be used.
        case cu::kDeinitialized:
        case cu::kEccUncorrectable:
        case 220:  // NVLink
        case 226:  // contained
        case cu::kIllegalAddress:
        case 702:  // a kernel ran too long
        case 709:  // the context was destroyed
        case 710:  // an assertion of a kernel
        case 714:  // stack
        case 715:  // instruction
        case 716:  // alignment
        case 717:  // address space
        case 718:  // program counter
        case cu::kLaunchFailed:
        case 721:  // tensor memory
            return Outcome::kForEver;
        default:
            return Outcome::kOther;
    }
}

Code code_of(Outcome outcome) {
    if (outcome == Outcome::kForEver) return Code::kUnavailable;
    return outcome == Outcome::kNotAllowed ? Code::kInvalidArgument : Code::kOs;
}

}  // namespace moonpool::device
