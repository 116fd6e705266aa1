// Secrets: the cluster token as a process knows it. There are two while one replaces the other: this side
// proves the first, and believes a peer that proves any. Those of a file are looked at for each handshake:
// where the file was replaced, handshakes from then on use what it holds now, and connections that stand
// stay. A file that cannot be used changes nothing until it changes again.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.hpp"

namespace moonpool {

class Secrets {
   public:
    Secrets() = default;  // none
    // One that does not change.
    Secrets(const char* secret);  // NOLINT(google-explicit-constructor)
    // Those of a text, which do not change. `place`: what errors call it.
    static Result<Secrets> of_text(std::string_view text, const std::string& place);
    // Those of a file of mode 0600, which is followed.
    static Result<Secrets> of_file(const std::string& path);
    // The same, of a file of which these are known, whatever it holds now.
    static Secrets following(const std::string& path, std::vector<std::string> known);

    bool empty() const { return known_ == nullptr; }
    // As they are now, the one to prove first; at least one, unless empty(). Any thread.
    std::shared_ptr<const std::vector<std::string>> now() const;
    // Why what the file holds now is not in use, told once; empty: it is.
    std::string take_trouble() const;

   private:
    struct Known;
    static Secrets of(std::vector<std::string> list);
    std::shared_ptr<Known> known_;  // shared by copies: a file is read once for all of them
};

// The secrets in a text: its lines, one or two, without the white space around them. Bytes that are no text,
// or more lines, are one secret, as they stand. `place`: what errors call it.
Result<std::vector<std::string>> secrets_in(std::string_view text, const std::string& place);

}  // namespace moonpool
