#include "transport/rdma/verbs.hpp"

#include <dirent.h>
#include <dlfcn.h>

#include <map>
#include <memory>

#include "base/fork_fresh.hpp"
#include "base/mutex.hpp"

namespace moonpool::transport::rdma {

namespace {

constexpr const char* kDevices = "/sys/class/infiniband";

bool kernel_has_devices() {
    DIR* folder = ::opendir(kDevices);
    if (folder == nullptr) return false;
    bool found = false;
    while (const dirent* entry = ::readdir(folder)) found = found || entry->d_name[0] != '.';
    ::closedir(folder);
    return found;
}

void* find_symbol(void* library, const std::string& name, const char* version) {
    void* found = ::dlvsym(library, name.c_str(), version);
    return found != nullptr ? found : ::dlsym(library, name.c_str());
}

Result<std::unique_ptr<Verbs>> load(const std::string& path) {
    void* library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
        const char* why = ::dlerror();
        return Error{Code::kUnavailable, std::string("there is no libibverbs here (") +
                                             (why != nullptr ? why : path.c_str()) +
                                             "); install rdma-core's libibverbs1"};
    }
    auto verbs = std::make_unique<Verbs>();
    std::string missing;
#define MOONPOOL_FIND_VERB(name, version, result, arguments) \
    verbs->name = reinterpret_cast<result(*) arguments>(find_symbol(library, "ibv_" #name, version));
#define MOONPOOL_FIND_NEEDED_VERB(name, version, result, arguments) \
    MOONPOOL_FIND_VERB(name, version, result, arguments)            \
    if (verbs->name == nullptr && missing.empty()) missing = "ibv_" #name;
    MOONPOOL_VERBS(MOONPOOL_FIND_NEEDED_VERB)
    MOONPOOL_VERBS_OPTIONAL(MOONPOOL_FIND_VERB)
#undef MOONPOOL_FIND_NEEDED_VERB
#undef MOONPOOL_FIND_VERB
    // The header of rdma-core gives this one another name.
    verbs->query_gid_ex = reinterpret_cast<decltype(verbs->query_gid_ex)>(
        find_symbol(library, "_ibv_query_gid_ex", "IBVERBS_1.11"));
    if (!missing.empty()) return Error{Code::kUnavailable, "the library " + path + " lacks " + missing};
    // Kernels before 5.12 copy pinned pages for a child only when they are told beforehand.
    bool needed = verbs->is_fork_initialized == nullptr || verbs->is_fork_initialized() != 2;
    if (needed && verbs->fork_init != nullptr) (void)verbs->fork_init();
    return verbs;
}

struct Libraries {
    Mutex mutex;
    std::map<std::string, std::unique_ptr<Verbs>> loaded GUARDED_BY(mutex);
};
ForkFresh<Libraries> libraries;

}  // namespace

Result<const Verbs*> open_verbs(const std::string& path) {
    if (path.empty() && !kernel_has_devices()) {
        return Error{Code::kUnavailable,
                     std::string("this host has no RDMA device (") + kDevices + " is empty or missing)"};
    }
    const std::string name = path.empty() ? kVerbsLibrary : path;
    Libraries& all = libraries.get();
    MutexLock lock(all.mutex);
    std::unique_ptr<Verbs>& kept = all.loaded[name];
    if (kept == nullptr) {
        Result<std::unique_ptr<Verbs>> loaded = load(name);
        if (!loaded) return loaded.error();
        kept = std::move(*loaded);
    }
    return kept.get();
}

}  // namespace moonpool::transport::rdma
