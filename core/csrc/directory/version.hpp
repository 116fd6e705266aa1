// Version: the place of a removal or replacement in the one order of a directory. A copy of an object carries
// one, too: every removal up to it was known when the copy was written, so those that come later void it.
//
// A master counts on from the time of its start, so a later master gives later ones, also when all that the
// former one knew is lost: 44 bits of a term (milliseconds since 1970), 20 of a sequence, which may run over
// into the term. Where a node knows a later one than the master does, because a clock went back, the master
// goes on behind that (Master::join).
#pragma once

#include <cstdint>

namespace moonpool {

using Version = uint64_t;
inline constexpr Version kNoVersion = 0;  // older than all

inline constexpr int kSequenceBits = 20;

inline constexpr Version first_version(uint64_t unix_ms) { return unix_ms << kSequenceBits; }

}  // namespace moonpool
