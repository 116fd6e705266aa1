#include "memory/reachable.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <string_view>

#include "base/fd.hpp"
#include "memory/mapping.hpp"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace moonpool {

namespace {

constexpr uint64_t kProbeBytes = 4u << 20;

// A line of /proc/self/maps: "7f00-7f80 rw-p 00000000 00:00 0   path"
struct Row {
    uint64_t begin = 0, end = 0;
    bool read = false, write = false, file = false;
};

bool parse(std::string_view line, Row& row) {
    const char* last = line.data() + line.size();
    auto [dash, error] = std::from_chars(line.data(), last, row.begin, 16);
    if (error != std::errc() || dash == last || *dash != '-') return false;
    auto [space, error2] = std::from_chars(dash + 1, last, row.end, 16);
    if (error2 != std::errc() || last - space < 5) return false;
    row.read = space[1] == 'r';
    row.write = space[2] == 'w';
    // Behind offset and device comes the inode, which is 0 for anonymous memory.
    size_t at = static_cast<size_t>(space - line.data());
    for (int field = 0; field < 4; ++field) {
        at = line.find_first_not_of(' ', at);
        if (at == std::string_view::npos) return false;
        if (field == 3) row.file = line[at] != '0';
        at = std::min(line.find(' ', at), line.size());
    }
    return true;
}

// Walks the mappings, which are sorted, along the range.
class Walk {
   public:
    Walk(uint64_t begin, uint64_t end) : at_(begin), end_(end) {}

    // False: nothing more to look at.
    bool see(const Row& row) {
        if (row.end <= at_) return true;
        if (row.begin > at_) return stop(at_, "nothing is mapped");
        if (!row.read) return stop(at_, "memory is mapped without access, as that of a device is");
        if (!row.write) return stop(at_, "memory is mapped read-only");
        uint64_t end = std::min(row.end, end_);
        if (row.file) {
            auto* page = reinterpret_cast<void*>((end - 1) & ~(kPageBytes - 1));
            if (::madvise(page, kPageBytes, MADV_POPULATE_READ) != 0 && errno == EFAULT) {
                return stop(reinterpret_cast<uint64_t>(page), "a mapping goes on behind the end of its file");
            }
        }
        at_ = row.end;
        return at_ < end_;
    }
    std::optional<Unreachable> result() {
        if (at_ < end_ && !found_) stop(at_, "nothing is mapped");
        return found_;
    }

   private:
    bool stop(uint64_t address, const char* why) {
        found_ = Unreachable{address, why};
        return false;
    }
    uint64_t at_, end_;
    std::optional<Unreachable> found_;
};

std::optional<Unreachable> walk_maps(uint64_t begin, uint64_t end) {
    Walk walk(begin, end);
    Fd maps(::open("/proc/self/maps", O_RDONLY | O_CLOEXEC));
    if (!maps.valid()) return std::nullopt;  // no /proc: it is believed
    std::string text;
    for (;;) {
        size_t have = text.size();
        text.resize(have + 65536);
        ssize_t n = ::read(maps.get(), text.data() + have, 65536);
        int error = errno;
        text.resize(have + static_cast<size_t>(std::max<ssize_t>(n, 0)));
        if (n < 0 && error == EINTR) continue;
        if (n <= 0) return walk.result();
        size_t from = 0;
        for (size_t line; (line = text.find('\n', from)) != std::string::npos; from = line + 1) {
            Row row;
            if (parse(std::string_view(text).substr(from, line - from), row) && !walk.see(row)) {
                return walk.result();
            }
        }
        text.erase(0, from);
    }
}

}  // namespace

std::optional<Unreachable> find_unreachable(uint64_t address, uint64_t length) {
    if (length == 0) return std::nullopt;
    uint64_t begin = address & ~(kPageBytes - 1);
    uint64_t end = address + length;
    uint64_t bytes = end - begin;
    // The kernel itself, which changes no byte; for a large range it would take memory before it is used.
    if (bytes <= kProbeBytes &&
        ::madvise(reinterpret_cast<void*>(begin), round_up_to_page(bytes), MADV_POPULATE_WRITE) == 0) {
        return std::nullopt;
    }
    // Other threads map and unmap while the list is read: what it has not is looked up twice.
    std::optional<Unreachable> found = walk_maps(begin, end);
    if (found) found = walk_maps(begin, end);
    if (found) found->address = std::max(found->address, address);
    return found;
}

}  // namespace moonpool
