#include "json/scanner.hpp"

#include "base/move_view.hpp"
#include "json/text.hpp"
#include "json/values.hpp"

namespace moonpool::json {

namespace {

// Up to the closing brace; `take(member)` for each, until it says false.
template <class Take>
bool walk_object(Text& text, Take take) {
    text.skip_blanks();
    if (!text.take('{')) return text.fail("an object is expected");
    text.skip_blanks();
    if (text.take('}')) return true;
    while (true) {
        Member member;
        if (!text.skip_key(member.key, member.key_escaped)) return false;
        const char* first = text.at();
        if (!text.skip_value(member.kind, member.value_escaped, kDepthMax - 1)) return false;
        member.value = std::string_view(first, static_cast<size_t>(text.at() - first));
        if (!take(member)) return false;
        text.skip_blanks();
        if (text.take('}')) return true;
        if (!text.take(',')) return text.fail("a comma or the end of an object is expected");
        text.skip_blanks();
    }
}

}  // namespace

bool key_is(const Member& member, std::string_view name) {
    if (!member.key_escaped) return member.key == name;
    std::string key;
    append_resolved(key, member.key);
    return key == name;
}

void Object::clear() {
    text_ = {};
    members_.clear();
    if (members_.capacity() > kKeptMembers) members_.shrink_to_fit();
    error_ = "";
    error_at_ = 0;
    too_many_ = false;
}

bool Object::scan(std::string_view source, size_t members_max) {
    clear();
    text_ = source;
    Text text(source);
    bool sound = walk_object(text, [&](const Member& member) {
        too_many_ = members_.size() >= members_max;
        if (too_many_) return text.fail("the object has too many members");
        members_.push_back(member);
        return true;
    });
    if (sound) {
        text.skip_blanks();
        if (!text.at_end()) sound = text.fail("something follows the object");
    }
    if (sound) return true;
    members_.clear();
    error_ = text.why();
    error_at_ = static_cast<size_t>(text.at() - source.data());
    return false;
}

const Member* Object::find(std::string_view name) const {
    for (size_t i = members_.size(); i-- > 0;) {
        if (key_is(members_[i], name)) return &members_[i];
    }
    return nullptr;
}

void Object::move_views(const char* from, const char* to) {
    move_view(text_, from, to);
    for (Member& member : members_) {
        move_view(member.key, from, to);
        move_view(member.value, from, to);
    }
}

std::optional<Member> find_path(std::string_view text, std::initializer_list<std::string_view> path,
                                size_t members_max) {
    Object object;
    std::optional<Member> found;
    for (std::string_view name : path) {
        if (found && found->kind != Kind::kObject) return std::nullopt;
        if (!object.scan(found ? found->value : text, members_max)) return std::nullopt;
        const Member* member = object.find(name);
        if (member == nullptr) return std::nullopt;
        found = *member;
    }
    return found;
}

}  // namespace moonpool::json
