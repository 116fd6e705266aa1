// A notification of this API, (name, text), as bytes of the engine's: the msgpack array of two texts that the
// Python drop-in sends too, so that both understand each other. Pure.
#pragma once

#include <string>
#include <string_view>
#include <utility>

namespace moonpool::capi {

std::string pack_message(std::string_view name, std::string_view text);

// Of an engine that does not speak this API: its own name, and the bytes as they are.
std::pair<std::string, std::string> unpack_message(const std::string& peer, std::string_view bytes);

}  // namespace moonpool::capi
