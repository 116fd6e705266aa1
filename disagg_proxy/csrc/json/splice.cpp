#include "json/splice.hpp"

#include <algorithm>

namespace moonpool::json {

namespace {

bool is_edited(const Member& member, std::span<const Edit> edits) {
    return std::any_of(edits.begin(), edits.end(),
                       [&](const Edit& edit) { return key_is(member, edit.key); });
}

// The comma before a member that is not the object's first: only blanks stand in between.
const char* comma_before(const char* member) {
    do --member;
    while (*member != ',');
    return member;
}

}  // namespace

void Splice::make(const Object& object, std::span<const Edit> edits) {
    pieces_.clear();
    tail_.clear();
    // A run is text that stays as it is: the opening brace, then members side by side.
    const char* run = object.text().data();
    const char* run_end = run + object.text().find('{') + 1;
    bool any = false;
    auto end_run = [&] {
        if (run != nullptr) pieces_.emplace_back(run, static_cast<size_t>(run_end - run));
        run = nullptr;
    };
    for (const Member& member : object.members()) {
        if (is_edited(member, edits)) {
            end_run();
            continue;
        }
        const char* first = member.key.data() - 1;
        if (run == nullptr) run = any ? comma_before(first) : first;
        run_end = member.value.data() + member.value.size();
        any = true;
    }
    end_run();
    for (const Edit& edit : edits) {
        if (edit.action == Edit::kDrop) continue;
        if (edit.action == Edit::kSetWherePresent && object.find(edit.key) == nullptr) continue;
        tail_.append(any ? ",\"" : "\"").append(edit.key).append("\":").append(edit.value);
        any = true;
    }
    tail_.append("}");
    pieces_.push_back(tail_);
    if (pieces_.size() <= kPiecesMax) return;
    tail_ = joined();
    pieces_.assign(1, tail_);
}

size_t Splice::bytes() const {
    size_t sum = 0;
    for (std::string_view piece : pieces_) sum += piece.size();
    return sum;
}

std::string Splice::joined() const {
    std::string out;
    out.reserve(bytes());
    for (std::string_view piece : pieces_) out.append(piece);
    return out;
}

}  // namespace moonpool::json
