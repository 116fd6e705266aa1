// Objects with parts on cards, group by group, as many as one slot of pinned memory takes. While the caller
// works on one group, the cards copy the one before or behind it.
#pragma once

#include <memory>
#include <span>
#include <utility>

#include "store/client/card_stage.hpp"

namespace moonpool {

// start(stage, first) of each group, from object `first` on; finish(stage, first) once the next group was
// started. limit_ms: of the wait for a slot, and of each group's copies. Stops at the first error.
//
// A call holds no slot while it waits for one: several calls would wait for one another.
template <class Start, class Finish>
Status through_cards(device::CardCopiers& cards, std::span<const CardStage::Parts> objects, int limit_ms,
                     Start start, Finish finish) {
    std::unique_ptr<CardStage> before;
    size_t before_first = 0;
    auto finish_before = [&] {
        std::unique_ptr<CardStage> stage = std::move(before);
        return stage == nullptr ? success() : finish(*stage, before_first);
    };
    for (size_t first = 0, n = 0; first < objects.size(); first += n) {
        n = CardStage::fitting(objects.subspan(first));
        const auto group = objects.subspan(first, n);
        Result<std::unique_ptr<CardStage>> stage = CardStage::take(cards, group, 0, limit_ms);
        if (stage && *stage == nullptr) {
            if (Status finished = finish_before(); !finished) return finished;
            stage = CardStage::take(cards, group, limit_ms, limit_ms);
        }
        if (!stage) return stage.error();
        if (*stage == nullptr) return Error{Code::kOs, "no slot of pinned memory came back in time"};
        if (Status started = start(**stage, first); !started) return started;
        if (Status finished = finish_before(); !finished) return finished;
        before = std::move(*stage);
        before_first = first;
    }
    return finish_before();
}

}  // namespace moonpool
