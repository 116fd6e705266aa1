// Reads a JSON object's members without building anything: one pass, spans into the text.
//
// What is passed over is validated to the last byte as RFC 8259 has it, but for one thing: bytes of 0x80 and
// above inside strings are not checked to be UTF-8. So a text that scans is JSON to every engine, and one
// that does not is left to the engine to refuse: NaN and Infinity, a byte order mark and UTF-16 (which
// Python's json takes) are refused here.
//
// A key may stand twice. Engines take the last one (Python's json does), and so does find(); an editor must
// treat all of them, as splice() does. A key may be written with escapes: compare by find() or key_is(),
// never by bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace moonpool::json {

// Nesting beyond this is refused, the outermost object counted.
inline constexpr size_t kDepthMax = 512;

enum class Kind : uint8_t { kNull, kFalse, kTrue, kInteger, kReal, kString, kArray, kObject };

// key:    the characters between its quotes, escapes not resolved.
// value:  from its first to its last character, quotes and brackets included.
// Both point into the text that was scanned.
struct Member {
    std::string_view key;
    std::string_view value;
    Kind kind = Kind::kNull;
    bool key_escaped = false;    // the key has escapes
    bool value_escaped = false;  // kString: the value has escapes
};

// Whether the member's key, escapes resolved, is `name`.
bool key_is(const Member& member, std::string_view name);

class Object {
   public:
    static constexpr size_t kNoLimit = std::numeric_limits<size_t>::max();
    static constexpr size_t kKeptMembers = 1024;

    // Replaces what was scanned before. text: one object with blanks around it, or a Member's value of kind
    // kObject. False: no such text, or more than members_max members; error() and error_at() say what and
    // where. Keeps its memory between calls, up to that of kKeptMembers.
    bool scan(std::string_view text, size_t members_max = kNoLimit);
    // As if nothing had been scanned.
    void clear();
    // Whether the last scan() met more members than it may.
    bool has_too_many() const { return too_many_; }

    std::string_view text() const { return text_; }
    std::span<const Member> members() const { return members_; }

    // The last member of this name, or nullptr.
    const Member* find(std::string_view name) const;

    const char* error() const { return error_; }
    size_t error_at() const { return error_at_; }

    // The text moved from `from` to `to` (a buffer grew): all views move along.
    void move_views(const char* from, const char* to);

   private:
    std::string_view text_;
    std::vector<Member> members_;
    const char* error_ = "";
    size_t error_at_ = 0;
    bool too_many_ = false;
};

// A member of a member ...: {"usage", "prompt_tokens_details", "cached_tokens"}. Scans each object on the
// way, so it is for what is asked once in a while. nullopt: no such member, or no such text.
std::optional<Member> find_path(std::string_view text, std::initializer_list<std::string_view> path,
                                size_t members_max = Object::kNoLimit);

}  // namespace moonpool::json
