#include "topology/tree.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <memory>
#include <utility>

#include "base/fd.hpp"

namespace moonpool::topology {

namespace {

constexpr int kListedNumberMax = 65535;

bool is_digit(char c) { return c >= '0' && c <= '9'; }

std::string canonical(const std::string& path) {
    std::error_code error;
    std::string found = std::filesystem::canonical(path, error).string();
    return error ? "" : found;
}

}  // namespace

Tree::Tree(std::string root) : root_(std::move(root)) {
    real_root_ = canonical(root_.empty() ? "/" : root_);
    if (real_root_ == "/") real_root_.clear();
}

std::optional<std::string> Tree::text(const std::string& path) const {
    // A pipe in the place of a file would keep its reader waiting.
    Fd file(::open((root_ + path).c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
    if (file.get() < 0) return std::nullopt;
    std::string text;
    while (text.size() < kTextBytesMax) {
        char part[4096];  // at most so much is in a file of sysfs, and of some NICs there are thousands
        ssize_t n = ::read(file.get(), part, std::min(sizeof(part), kTextBytesMax - text.size()));
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return std::nullopt;  // a folder, or the speed of a network device without a link
        if (n == 0) break;
        text.append(part, static_cast<size_t>(n));
    }
    text.erase(text.find_last_not_of(" \t\r\n") + 1);
    text.erase(0, std::min(text.find_first_not_of(" \t\r\n"), text.size()));
    for (char& c : text) {
        if (c != '\n' && c != '\t' && (c < ' ' || c > '~')) c = '?';
    }
    return text;
}

std::optional<int64_t> Tree::number(const std::string& path) const {
    std::optional<std::string> found = text(path);
    if (!found) return std::nullopt;
    std::string_view digits = *found;
    int base = 10;
    if (digits.starts_with("0x")) {
        base = 16;
        digits.remove_prefix(2);
    }
    int64_t value = 0;
    if (std::from_chars(digits.data(), digits.data() + digits.size(), value, base).ec != std::errc()) {
        return std::nullopt;
    }
    return value;
}

std::vector<std::string> Tree::names(const std::string& path) const {
    std::vector<std::string> found;
    std::unique_ptr<DIR, int (*)(DIR*)> folder(::opendir((root_ + path).c_str()), ::closedir);
    if (folder == nullptr) return found;
    while (const dirent* entry = ::readdir(folder.get())) {
        std::string_view name = entry->d_name;
        bool plain = std::ranges::all_of(name, [](char c) { return c > ' ' && c <= '~'; });
        if (name != "." && name != ".." && plain) found.emplace_back(name);
        if (found.size() == kNamesMax) break;
    }
    std::ranges::sort(found, natural_less);
    return found;
}

std::string Tree::real(const std::string& path) const {
    std::string found = canonical(root_ + path);
    if (!found.starts_with(real_root_ + "/")) return "";
    return found.substr(real_root_.size());
}

std::vector<int> numbers_of(std::string_view list) {
    std::vector<int> numbers;
    while (!list.empty()) {
        std::string_view part = list.substr(0, list.find(','));
        list.remove_prefix(std::min(part.size() + 1, list.size()));
        int first = -1;
        auto [end, bad] = std::from_chars(part.data(), part.data() + part.size(), first);
        if (bad != std::errc()) continue;
        part.remove_prefix(static_cast<size_t>(end - part.data()));
        int last = first;
        if (part.starts_with('-')) {
            part.remove_prefix(1);
            auto [_, wrong] = std::from_chars(part.data(), part.data() + part.size(), last);
            if (wrong != std::errc()) continue;
        }
        if (first < 0 || last > kListedNumberMax) continue;
        // Overlaps repeat numbers, which a long list of the same range must not make many.
        for (int n = first; n <= last && numbers.size() <= kListedNumberMax; ++n) numbers.push_back(n);
    }
    std::ranges::sort(numbers);
    numbers.erase(std::ranges::unique(numbers).begin(), numbers.end());
    return numbers;
}

bool natural_less(std::string_view a, std::string_view b) {
    while (!a.empty() && !b.empty()) {
        if (is_digit(a.front()) && is_digit(b.front())) {
            auto take = [](std::string_view& text) {
                text.remove_prefix(std::min(text.find_first_not_of('0'), text.size()));
                size_t end = 0;
                while (end < text.size() && is_digit(text[end])) ++end;
                std::string_view number = text.substr(0, end);
                text.remove_prefix(end);
                return number;
            };
            std::string_view one = take(a);
            std::string_view other = take(b);
            if (one.size() != other.size()) return one.size() < other.size();
            if (one != other) return one < other;
            continue;
        }
        if (a.front() != b.front()) return a.front() < b.front();
        a.remove_prefix(1);
        b.remove_prefix(1);
    }
    return a.size() < b.size();
}

}  // namespace moonpool::topology
