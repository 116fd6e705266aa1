#include "memory/room.hpp"

#include <algorithm>
#include <array>
#include <cstdio>
#include <optional>

namespace moonpool {

namespace {

constexpr uint64_t kMiB = 1ull << 20;
constexpr uint64_t kGiB = 1ull << 30;

// A round value somewhat below `room`: memory comes and goes between the refusal and the next try.
std::string value_that_fits(uint64_t room) {
    uint64_t bytes = room / 10 * 9;
    return bytes >= 4 * kGiB ? std::to_string(bytes / kGiB) + "GiB" : std::to_string(bytes / kMiB) + "MiB";
}

}  // namespace

uint64_t kept_free(const AvailableMemory& memory) {
    return std::clamp(memory.total_bytes / 32, 32 * kMiB, kGiB);
}

uint64_t room_for_arenas(const AvailableMemory& memory) {
    return memory.available_bytes - std::min(memory.available_bytes, kept_free(memory));
}

Status check_room(uint64_t bytes, const std::string& option, const std::string& root) {
    std::optional<AvailableMemory> memory = available_memory(root);
    if (!memory) return success();
    uint64_t room = room_for_arenas(*memory);
    if (bytes <= room) return success();
    std::string what = option.empty() ? "the arenas ask for " + size_text(bytes) + " of memory in all"
                                      : "the arena asks for " + size_text(bytes) + " of memory";
    what += ", and " + memory->limited_by + " has " + size_text(memory->available_bytes) + " available";
    if (room < 2 * kMiB) return Error{Code::kInvalidArgument, what + "; free some memory first"};
    std::string fits = value_that_fits(room);
    return Error{Code::kInvalidArgument,
                 what + "; " + (option.empty() ? fits + " in all" : option + fits) + " would fit"};
}

std::string size_text(uint64_t bytes) {
    constexpr std::array kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
    auto value = static_cast<double>(bytes);
    size_t unit = 0;
    while (value >= 1024 && unit + 1 < kUnits.size()) {
        value /= 1024;
        ++unit;
    }
    char text[48];
    std::snprintf(text, sizeof(text), unit == 0 ? "%.0f %s" : "%.1f %s", value, kUnits[unit]);
    return text;
}

}  // namespace moonpool
