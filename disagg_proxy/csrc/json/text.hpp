// Walks over JSON values: the machine behind Object, which only notes where members lie.
#pragma once

#include <cstddef>
#include <string_view>

#include "json/scanner.hpp"

namespace moonpool::json {

// A place in a text, and what is wrong there. Each skip_ begins at the first character of what it skips and
// ends behind its last; false: the text is not that, and why() says so for at().
class Text {
   public:
    explicit Text(std::string_view text) : at_(text.data()), end_(at_ + text.size()) {}

    const char* at() const { return at_; }
    bool at_end() const { return at_ == end_; }
    const char* why() const { return why_; }
    bool fail(const char* why) {
        why_ = why;
        return false;
    }

    void skip_blanks() {
        while (at_ != end_ && (*at_ == ' ' || *at_ == '\n' || *at_ == '\r' || *at_ == '\t')) ++at_;
    }
    // The character, if it stands here.
    bool take(char c) {
        if (at_ == end_ || *at_ != c) return false;
        ++at_;
        return true;
    }

    // "...": `escaped` tells whether there are escapes in it.
    bool skip_string(bool& escaped);
    // A key and its colon, with blanks behind; `key` is what stands between the quotes.
    bool skip_key(std::string_view& key, bool& escaped);
    // Any value; containers may nest `depth_max` deep. `escaped` as above for a string, else false.
    bool skip_value(Kind& kind, bool& escaped, size_t depth_max);

   private:
    bool skip_scalar(Kind& kind, bool& escaped);
    bool skip_container(size_t depth_max);
    bool skip_escape();
    void skip_short_integers();
    bool skip_number(Kind& kind);
    bool skip_digits();
    bool skip_word(std::string_view word);

    const char* at_;
    const char* end_;
    const char* why_ = "";
};

}  // namespace moonpool::json
