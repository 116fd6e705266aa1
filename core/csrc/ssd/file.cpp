#include "ssd/file.hpp"

#include <fcntl.h>
#include <sys/stat.h>

#include <cerrno>
#include <filesystem>

namespace moonpool::ssd {

namespace {

// The directory is made, or is empty, or has the file already.
Status prepare_directory(const std::string& path) {
    namespace fs = std::filesystem;
    fs::path directory = fs::path(path).parent_path();
    if (::mkdir(directory.c_str(), 0700) != 0 && errno != EEXIST)
        return os_error("making " + directory.string());
    std::error_code error;
    if (fs::exists(path, error)) return success();
    fs::directory_iterator entries(directory, error);
    if (error) return Error{Code::kOs, "reading " + directory.string() + ": " + error.message()};
    for (const fs::directory_entry& entry : entries) {
        if (entry.path().filename() == "lost+found") continue;
        return Error{Code::kInvalidArgument, directory.string() + " holds files that are not moonpool's (" +
                                                 entry.path().filename().string() +
                                                 "); give an empty directory"};
    }
    return success();
}

}  // namespace

Result<std::unique_ptr<File>> open_file(const std::string& path) {
    if (Status fit = prepare_directory(path); !fit) return fit.error();
    constexpr int kFlags = O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW;
    bool direct = true;
    Fd fd(::open(path.c_str(), kFlags | O_DIRECT, 0600));
    if (!fd.valid() && errno == EINVAL) {
        direct = false;
        fd.reset(::open(path.c_str(), kFlags, 0600));
    }
    if (!fd.valid()) return os_error("opening " + path);
    struct stat about {};
    if (::fstat(fd.get(), &about) != 0) return os_error("opening " + path);
    return io::file_of(std::move(fd), direct, static_cast<uint64_t>(about.st_size));
}

}  // namespace moonpool::ssd
