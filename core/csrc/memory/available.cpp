#include "memory/available.hpp"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <initializer_list>
#include <sstream>
#include <string_view>
#include <vector>

namespace moonpool {

namespace {

std::optional<std::string> contents(const std::string& path) {
    std::ifstream file(path);
    if (!file) return std::nullopt;
    std::ostringstream text;
    text << file.rdbuf();
    return std::move(text).str();
}

// A file of one number; nothing for "max", or where the file is not.
std::optional<uint64_t> number_in(const std::string& path) {
    std::optional<std::string> text = contents(path);
    uint64_t value = 0;
    if (!text || std::from_chars(text->data(), text->data() + text->size(), value).ec != std::errc()) {
        return std::nullopt;
    }
    return value;
}

// The number of the line that starts with `name` and a separator, as in "MemAvailable:   123 kB".
std::optional<uint64_t> field(std::string_view text, std::string_view name) {
    for (size_t at = 0; at < text.size();) {
        size_t end = std::min(text.find('\n', at), text.size());
        std::string_view line = text.substr(at, end - at);
        at = end + 1;
        if (!line.starts_with(name)) continue;
        line.remove_prefix(name.size());
        if (line.empty() || (line.front() != ':' && line.front() != ' ')) continue;
        line.remove_prefix(std::min(line.find_first_not_of(": \t"), line.size()));
        uint64_t value = 0;
        if (std::from_chars(line.data(), line.data() + line.size(), value).ec == std::errc()) return value;
    }
    return std::nullopt;
}

// The files of a version of control groups.
struct Version {
    const char* limit;
    const char* usage;
    std::initializer_list<const char*> reclaimable;  // lines of memory.stat: page cache, which gives way
};
const Version kV1{
    "/memory.limit_in_bytes", "/memory.usage_in_bytes", {"total_inactive_file", "total_active_file"}};
const Version kV2{"/memory.max", "/memory.current", {"inactive_file", "active_file", "slab_reclaimable"}};

void narrow(AvailableMemory& memory, const std::string& folder, const std::string& group,
            const Version& version) {
    std::optional<uint64_t> limit = number_in(folder + version.limit);
    if (!limit) return;
    uint64_t usage = number_in(folder + version.usage).value_or(0);
    std::string stat = contents(folder + "/memory.stat").value_or("");
    uint64_t reclaimable = 0;
    for (const char* name : version.reclaimable) reclaimable += field(stat, name).value_or(0);
    usage -= std::min(usage, reclaimable);
    memory.total_bytes = std::min(memory.total_bytes, *limit);
    uint64_t available = *limit - std::min(*limit, usage);
    if (available >= memory.available_bytes) return;
    memory.available_bytes = available;
    memory.limited_by = "the control group " + group;
}

// Each group from `path` up to the root of the hierarchy has a limit of its own. A container may see its own
// group as the root while `path` is the host's name for it: what does not exist is passed over.
void narrow_upwards(AvailableMemory& memory, const std::string& mount, std::string path,
                    const Version& version) {
    while (true) {
        if (path.ends_with('/')) path.pop_back();
        narrow(memory, mount + path, path.empty() ? "/" : path, version);
        if (path.empty()) return;
        path.erase(std::min(path.rfind('/'), path.size()));
    }
}

bool among(std::string_view list, std::string_view name) {
    for (size_t at = 0; at <= list.size();) {
        size_t end = std::min(list.find(',', at), list.size());
        if (list.substr(at, end - at) == name) return true;
        at = end + 1;
    }
    return false;
}

}  // namespace

std::optional<AvailableMemory> available_memory(const std::string& root) {
    std::optional<std::string> machine = contents(root + "/proc/meminfo");
    if (!machine) return std::nullopt;
    std::optional<uint64_t> available = field(*machine, "MemAvailable");
    std::optional<uint64_t> total = field(*machine, "MemTotal");
    if (!available || !total) return std::nullopt;
    AvailableMemory memory{*available * 1024, *total * 1024, "the machine"};
    std::istringstream groups(contents(root + "/proc/self/cgroup").value_or(""));
    for (std::string line; std::getline(groups, line);) {
        // id:controllers:path; version 2 is id 0 and names no controllers.
        size_t first = line.find(':');
        size_t second = line.find(':', first + 1);
        if (first == std::string::npos || second == std::string::npos) continue;
        std::string_view controllers = std::string_view(line).substr(first + 1, second - first - 1);
        std::string path = line.substr(second + 1);
        if (among(controllers, "memory")) {
            narrow_upwards(memory, root + "/sys/fs/cgroup/memory", path, kV1);
        } else if (controllers.empty()) {
            narrow_upwards(memory, root + "/sys/fs/cgroup", path, kV2);
            narrow_upwards(memory, root + "/sys/fs/cgroup/unified", path, kV2);
        }
    }
    return memory;
}

}  // namespace moonpool
