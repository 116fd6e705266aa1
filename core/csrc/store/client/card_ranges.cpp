#include "store/client/card_ranges.hpp"

#include <vector>

#include "base/copy.hpp"
#include "store/client/card_groups.hpp"

namespace moonpool {

Status copy_ranges(device::CardCopiers& cards, std::span<const MemoryRef> to, std::span<const MemoryRef> from,
                   int limit_ms) {
    const bool out = CardStage::needed(to);
    if (out && CardStage::needed(from)) {
        return Error{Code::kInvalidArgument, "one side of a copy has to be memory of the host"};
    }
    std::vector<CardStage::Parts> objects;  // one of each pair
    std::vector<int64_t> sizes;
    for (size_t i = 0; i < to.size(); ++i) {
        if (to[i].bytes != from[i].bytes) {
            return Error{Code::kInvalidArgument, "ranges of a copy have different lengths"};
        }
        objects.push_back((out ? to : from).subspan(i, 1));
        sizes.push_back(static_cast<int64_t>(to[i].bytes));
    }
    auto copy_all = [&](const CardStage& stage, size_t first) {
        for (size_t i = 0; i < stage.size(); ++i) {
            const MemoryRef& place = stage.parts(i).front();
            const MemoryRef& target = out ? place : to[first + i];
            const MemoryRef& source = out ? from[first + i] : place;
            moonpool::copy(target.data(), source.data(), target.bytes);
        }
    };
    return through_cards(
        cards, objects, limit_ms,
        [&](CardStage& stage, size_t first) -> Status {
            if (!out) return stage.copy_in();
            copy_all(stage, first);
            return stage.copy_out(std::span(sizes).subspan(first, stage.size()));
        },
        [&](CardStage& stage, size_t first) -> Status {
            Status ended = stage.wait();
            if (ended && !out) copy_all(stage, first);
            return ended;
        });
}

}  // namespace moonpool
