#include "wire/connection_places.hpp"

#include <sys/resource.h>

#include <algorithm>

namespace moonpool {

namespace {

// Of buffers here and in the kernel, with TLS. Half of what is available goes to connections at most.
constexpr uint64_t kConnectionBytes = 64 << 10;

}  // namespace

ConnectionPlaces connection_places(uint64_t have, uint64_t kept_files,
                                   const std::function<uint64_t()>& available_memory) {
    ConnectionPlaces places{UINT64_MAX, ""};
    rlimit files{};
    if (::getrlimit(RLIMIT_NOFILE, &files) == 0) {
        places.most = files.rlim_cur - std::min<uint64_t>(files.rlim_cur, kept_files);
        places.because = "as many as the limit of open files allows; raise it (ulimit -n, LimitNOFILE=)";
    }
    if (available_memory == nullptr) return places;
    uint64_t more = available_memory() / 2 / kConnectionBytes;
    if (more < places.most - std::min(places.most, have)) {
        places.most = have + more;
        places.because = "as many as the available memory allows; give it more, or share the load";
    }
    return places;
}

}  // namespace moonpool
