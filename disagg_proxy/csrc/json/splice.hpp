// Edits members of a JSON object without copying the rest: the result is pieces for writev.
//
//     Object body;  body.scan(text);
//     Splice edited;
//     const Edit edits[] = {{Edit::kSet, "stream", "false"}, {Edit::kDrop, "stream_options"}};
//     edited.make(body, edits);
//     writev(edited.pieces())
//
// What is edited leaves its place, wherever and however often it stands, and what is set stands at the end:
//
//     {"a":1, "stream":true, "b":2}   ->   {"a":1 | , "b":2 | ,"stream":false}
//      ^------^ text       ^------^ text   ^---------------- one piece of our own
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "json/scanner.hpp"

namespace moonpool::json {

struct Edit {
    enum class Action {
        kSet,              // the member has this value, whether it was there or not
        kSetWherePresent,  // the same, only if it was there
        kDrop,             // the member is not there
    };
    static constexpr Action kSet = Action::kSet;
    static constexpr Action kSetWherePresent = Action::kSetWherePresent;
    static constexpr Action kDrop = Action::kDrop;

    Action action;
    std::string_view key;         // characters that need no escape
    std::string_view value = {};  // a whole JSON value; it is copied, not checked
};

class Splice {
   public:
    // Replaces what was made before. Each key at most once. The pieces point into the object's text and into
    // this object: both must stay where they are while the pieces are used.
    void make(const Object& object, std::span<const Edit> edits);

    std::span<const std::string_view> pieces() const { return pieces_; }
    size_t bytes() const;  // of all pieces together
    std::string joined() const;

    Splice() = default;
    Splice(const Splice&) = delete;
    Splice& operator=(const Splice&) = delete;

   private:
    std::vector<std::string_view> pieces_;
    std::string tail_;
};

// More pieces than this are made one: the sender looks at all of them for each write.
inline constexpr size_t kPiecesMax = 20;

}  // namespace moonpool::json
