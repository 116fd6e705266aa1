#include "memory/dax_device.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include <algorithm>
#include <bit>
#include <charconv>
#include <fstream>
#include <optional>

namespace moonpool {

namespace {

constexpr std::string_view kDev = "/dev/";

// "dax", digits, a point, digits: it becomes part of a path, and may come from a peer.
bool is_dax_name(std::string_view name) {
    if (!name.starts_with("dax") || name.size() > 32) return false;
    name.remove_prefix(3);
    size_t point = name.find('.');
    if (point == 0 || point == std::string_view::npos || point + 1 == name.size()) return false;
    return std::ranges::all_of(name, [](char c) { return (c >= '0' && c <= '9') || c == '.'; }) &&
           std::ranges::count(name, '.') == 1;
}

// The number that a small file begins with.
template <class T>
std::optional<T> number_in(const std::string& path) {
    std::ifstream in(path);
    std::string text(24, '\0');
    in.read(text.data(), static_cast<std::streamsize>(text.size()));
    text.resize(static_cast<size_t>(in.gcount()));
    T value{};
    auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || (end != text.data() + text.size() && *end != '\n')) return std::nullopt;
    return value;
}

Error no_such(std::string_view path, const std::string& why) {
    return Error{Code::kInvalidArgument,
                 "no memory of the DAX device \"" + std::string(path) + "\" can be had: " + why};
}

}  // namespace

Result<DaxDevice> DaxDevice::find(std::string_view path, const std::string& root) {
    std::string_view name = path.starts_with(kDev) ? path.substr(kDev.size()) : path;
    if (!is_dax_name(name)) return no_such(path, "\"/dev/dax0.0\" is an example of one");
    DaxDevice device{std::string(name), root};
    const std::string folder = root + "/sys/bus/dax/devices/" + device.name + "/";
    std::optional<uint64_t> bytes = number_in<uint64_t>(folder + "size");
    if (!bytes) return no_such(path, "/sys/bus/dax/devices does not list it with a size");
    device.bytes = *bytes;
    // Kernels before 5.10 do not tell it, and made devices of 2 MiB.
    device.align = number_in<uint64_t>(folder + "align").value_or(2u << 20);
    device.node = number_in<int>(folder + "target_node").value_or(-1);
    if (device.align < 4096 || device.align > device.bytes || !std::has_single_bit(device.align) ||
        device.bytes > (uint64_t{1} << 46)) {
        return no_such(path, "its size of " + std::to_string(device.bytes) + " bytes and its alignment of " +
                                 std::to_string(device.align) + " make no sense");
    }
    device.bytes -= device.bytes % device.align;
    return device;
}

Result<Fd> DaxDevice::open() const {
    Fd fd(::open((root + path()).c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW));
    if (!fd.valid()) return no_such(path(), std::string("opening it failed: ") + std::strerror(errno));
    struct stat info {};
    if (::fstat(fd.get(), &info) != 0) return no_such(path(), std::strerror(errno));
    if (!root.empty()) return fd;  // a file stands in for it
    std::ifstream in("/sys/bus/dax/devices/" + name + "/dev");
    std::string number;
    in >> number;  // "252:0"
    if (!S_ISCHR(info.st_mode) ||
        number != std::to_string(major(info.st_rdev)) + ":" + std::to_string(minor(info.st_rdev))) {
        return no_such(path(), "it is not the device " + number + " that /sys/bus/dax/devices describes");
    }
    return fd;
}

}  // namespace moonpool
