// Reads values whose spans a scanner gave; all expect text that was scanned.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "json/scanner.hpp"

namespace moonpool::json {

// The integer, when it is one (kInteger) and fits.
std::optional<int64_t> integer_of(const Member& member);

// true or false; nullopt for anything else.
std::optional<bool> bool_of(const Member& member);

// The content of a kString member, escapes resolved; nullopt for another kind. Bytes that are no UTF-8 come
// through; an escaped surrogate that has no other half comes out as its three bytes, which Python decodes
// with errors="surrogatepass" to what its json makes of it.
std::optional<std::string> string_of(const Member& member);

// The same without a copy where there are no escapes: the view points into the text or into `scratch`.
// Only for kString.
std::string_view string_of(const Member& member, std::string& scratch);

// Appends what stands between a string's quotes, escapes resolved; raw was scanned.
void append_resolved(std::string& out, std::string_view raw);

// Appends text as a JSON string with its quotes. text: UTF-8 (other bytes are written as they are).
void append_string(std::string& out, std::string_view text);

// Replaces out by the token ids of a prompt: an array of integers from 0 to 2^32 - 1, or an array that holds
// exactly one such array. False (out empty): anything else, an empty array too.
bool token_ids_of(const Member& member, std::vector<uint32_t>& out);

// Replaces out by the elements of an array, each from its first to its last character. False (out empty):
// another kind of value.
bool elements_of(std::string_view array, std::vector<std::string_view>& out);

// How many elements an array has, counted up to `most` and one more; 0 for another kind of value.
size_t count_elements(std::string_view array, size_t most);

}  // namespace moonpool::json
