// Copies between ranges of memory of cards and of the host, which no object is made of: parts of objects that
// a process has at hand.
#pragma once

#include <span>

#include "base/result.hpp"
#include "device/card_copiers.hpp"
#include "memory/memory_ref.hpp"

namespace moonpool {

// Each range of `from` to the range of `to` at the same place, which has as many bytes; over on return. Of
// the two sides one at most lies on cards. limit_ms: of each of the cards' groups of copies.
Status copy_ranges(device::CardCopiers& cards, std::span<const MemoryRef> to, std::span<const MemoryRef> from,
                   int limit_ms);

}  // namespace moonpool
