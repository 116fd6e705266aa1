// Client, for objects of which parts lie on cards: group by group, by the same put and get as any other
// object.
//
// What holds: a get writes to a card only bytes of an object that was read whole. When a call returns the
// cards have ended all of its copies, or have not done so within its timeout. When a group fails, those
// before it were stored.
#include <algorithm>
#include <string>

#include "store/client/card_groups.hpp"
#include "store/client/client.hpp"

namespace moonpool {

namespace {

template <class Item>
std::vector<CardStage::Parts> parts_of(std::span<const Item> items) {
    std::vector<CardStage::Parts> parts;
    for (const Item& item : items) parts.push_back(item.parts);
    return parts;
}

template <class Item>
std::vector<Item> with_staged_parts(std::span<const Item> items, const CardStage& stage) {
    std::vector<Item> out(items.begin(), items.end());
    for (size_t i = 0; i < out.size(); ++i) out[i].parts = stage.parts(i);
    return out;
}

// copies are of each item or of none: then each has one.
void append(PutReport& report, PutReport group) {
    if (!report.copies.empty() || !group.copies.empty()) {
        report.copies.resize(report.outcomes.size(), 1);
        group.copies.resize(group.outcomes.size(), 1);
        report.copies.insert(report.copies.end(), group.copies.begin(), group.copies.end());
    }
    report.outcomes.insert(report.outcomes.end(), group.outcomes.begin(), group.outcomes.end());
    report.stored_bytes += group.stored_bytes;
    if (!group.refusal.empty()) report.refusal = std::move(group.refusal);
    if (!group.short_of_copies.empty()) report.short_of_copies = std::move(group.short_of_copies);
}

}  // namespace

Result<PutReport> Client::put_from_cards(std::span<const PutItem> items, const PutOptions& options) {
    if (Status open = check_open(); !open) return open.error();
    const int timeout_ms = options.timeout_ms > 0 ? options.timeout_ms : options_.timeout_ms;
    WaitBudget budget(WaitBudget::of_a_call(timeout_ms));
    // A call with a wrong name stores nothing. A node that is away is each group's own matter.
    Status named = own_.check_names(items);
    if (!named && named.error().code == Code::kInvalidArgument) return named.error();
    PutReport report;
    const std::vector<CardStage::Parts> parts = parts_of(items);
    Status done = through_cards(
        cards_, parts, timeout_ms, [](CardStage& stage, size_t) { return stage.copy_in(); },
        [&](CardStage& stage, size_t first) -> Status {
            if (Status there = stage.wait(); !there) return there;
            std::vector<PutItem> group = with_staged_parts(items.subspan(first, stage.size()), stage);
            Result<PutReport> put_some = put(group, options);
            if (!put_some) return put_some.error();
            append(report, std::move(*put_some));
            return success();
        });
    if (!done) return done.error();
    return report;
}

Result<std::vector<int64_t>> Client::get_to_cards(std::span<const GetItem> items, const ReadSome& read) {
    if (Status open = check_open(); !open) return open.error();
    WaitBudget budget(wait_budget_ms());
    std::vector<int64_t> sizes;
    const std::vector<CardStage::Parts> parts = parts_of(items);
    Status done = through_cards(
        cards_, parts, options_.timeout_ms,
        [&](CardStage& stage, size_t first) -> Status {
            std::vector<GetItem> group = with_staged_parts(items.subspan(first, stage.size()), stage);
            Result<std::vector<int64_t>> got = read(first, group);
            if (!got) return got.error();
            sizes.insert(sizes.end(), got->begin(), got->end());
            return stage.copy_out(*got);
        },
        [](CardStage& stage, size_t) { return stage.wait(); });
    if (!done) return done.error();
    return sizes;
}

}  // namespace moonpool
