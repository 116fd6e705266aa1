#include "relay/access_log.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <ctime>
#include <utility>

#include "relay/tcp.hpp"

namespace moonpool::relay {

namespace {

constexpr auto kInterval = std::chrono::milliseconds(200);
// How long the end waits for a reader of the log that does not read.
constexpr auto kLastLines = std::chrono::seconds(1);
// What a pipe takes at once when it takes anything (PIPE_BUF).
constexpr size_t kPieceBytes = 4096;

// Standard output, so that a write to it never waits: a pipe or a terminal is opened anew, for all holders of
// a copy would share its flag. A file is not: what was opened anew has a place of its own in it, and other
// code that writes there through descriptors 1 and 2 would write over our lines.
int open_stdout() {
    struct stat what {};
    if (::fstat(STDOUT_FILENO, &what) == 0 && (S_ISFIFO(what.st_mode) || S_ISCHR(what.st_mode))) {
        int fd = ::open("/proc/self/fd/1", O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
        if (fd >= 0) return fd;
    }
    return ::fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, 0);
}

// As it can stand between quotes in a line.
void append_safely(std::string& out, std::string_view text) {
    for (char octet : text.substr(0, 1024)) {
        bool plain = octet > 0x20 && octet < 0x7f && octet != '"' && octet != '\\';
        out += plain ? octet : '?';
    }
}

std::string time_now() {
    timespec now{};
    ::clock_gettime(CLOCK_REALTIME, &now);
    tm parts{};
    ::gmtime_r(&now.tv_sec, &parts);
    char date[32], text[48];
    ::strftime(date, sizeof(date), "%Y-%m-%dT%H:%M:%S", &parts);
    std::snprintf(text, sizeof(text), "%s.%03ldZ", date, now.tv_nsec / 1000000);
    return text;
}

const char* name_of(int32_t place, const std::vector<std::string>& engines) {
    return place < 0 ? "-" : engines[static_cast<size_t>(place)].c_str();
}

}  // namespace

Result<std::unique_ptr<AccessLog>> AccessLog::open(const std::string& path) {
    std::unique_ptr<AccessLog> log(new AccessLog(path));
    Result<Fd> file = log->open_file();
    if (!file) return file.error();
    log->fd_ = std::move(*file);
    Status started = log->thread_.start("moonpool-access", [raw = log.get()] { raw->write_forever(); });
    if (!started) return started.error();
    return log;
}

Result<Fd> AccessLog::open_file() const {
    constexpr int kFlags = O_WRONLY | O_CREAT | O_APPEND | O_NONBLOCK | O_CLOEXEC;
    Fd file(path_ == "-" ? open_stdout() : ::open(path_.c_str(), kFlags, 0640));
    if (!file.valid()) return os_error("access log " + path_);
    return file;
}

Status AccessLog::reopen() {
    if (path_ == "-") return success();
    Result<Fd> file = open_file();
    if (!file) return file.error();
    MutexLock lock(mutex_);
    next_ = std::move(*file);
    old_bytes_ = lines_.size();
    return success();
}

AccessLog::~AccessLog() {
    if (!thread_.started()) return;
    {
        MutexLock lock(mutex_);
        ending_ = true;
        ended_at_ = std::chrono::steady_clock::now();
    }
    changed_.notify_one();
    (void)thread_.join();
}

void AccessLog::add(const Request& request, int client_fd, int status, uint64_t bytes, double now,
                    const Observation* observation, const std::vector<std::string>& engines) {
    std::string line = time_now() + ' ' + peer_of(client_fd) + " \"";
    append_safely(line, request.head.method);
    line += ' ';
    append_safely(line, request.head.target);
    char text[256];
    double first_s = observation != nullptr && observation->first_byte > 0
                         ? observation->first_byte - request.arrived_at
                         : now - request.arrived_at;
    std::snprintf(text, sizeof(text), "\" %d %llu %.6f %.6f %s %s ", status,
                  static_cast<unsigned long long>(bytes), first_s, now - request.arrived_at,
                  name_of(observation == nullptr ? -1 : observation->decode, engines),
                  name_of(observation == nullptr ? -1 : observation->prefill, engines));
    line += text;
    append_safely(line, request.request_id);
    line += '\n';
    MutexLock lock(mutex_);
    if (lines_.size() + line.size() > kBytesMax) {
        ++dropped_;
        return;
    }
    lines_ += line;
}

void AccessLog::write_forever() {
    std::string writing;
    for (bool ending = false; !ending;) {
        Fd next;
        size_t old_bytes = 0;
        {
            MutexLock lock(mutex_);
            changed_.wait_for(lock, kInterval, [&]() REQUIRES(mutex_) { return ending_; });
            ending = ending_;
            writing.swap(lines_);
            next = std::move(next_);
            old_bytes = next.valid() ? std::exchange(old_bytes_, 0) : writing.size();
        }
        std::string_view lines = writing;
        write_all(lines.substr(0, old_bytes));
        if (next.valid()) fd_ = std::move(next);
        write_all(lines.substr(old_bytes));
        writing.clear();
    }
}

void AccessLog::write_all(std::string_view lines) {
    while (!lines.empty() && wait_for_room()) {
        ssize_t n = ::write(fd_.get(), lines.data(), std::min(lines.size(), kPieceBytes));
        if (n < 0 && (errno == EAGAIN || errno == EINTR)) continue;
        if (n <= 0) break;
        lines.remove_prefix(static_cast<size_t>(n));
    }
    dropped_ += static_cast<uint64_t>(std::count(lines.begin(), lines.end(), '\n'));
}

// The reader of the log may be slow, or have stopped: the lines wait, but not the end of the proxy.
bool AccessLog::wait_for_room() {
    for (;;) {
        pollfd room{fd_.get(), POLLOUT, 0};
        if (::poll(&room, 1, static_cast<int>(kInterval.count())) > 0) return true;
        MutexLock lock(mutex_);
        if (ending_ && std::chrono::steady_clock::now() >= ended_at_ + kLastLines) return false;
    }
}

}  // namespace moonpool::relay
