#include "transport/cufile/library.hpp"

#include <dlfcn.h>

#include <memory>
#include <vector>

#include "base/mutex.hpp"

namespace moonpool::transport::cufile {

namespace {

struct Opened {
    Mutex mutex;
    std::string path GUARDED_BY(mutex) = "libcufile.so.0";
    const Library* library GUARDED_BY(mutex) = nullptr;
    bool driver GUARDED_BY(mutex) = false;
    std::vector<std::unique_ptr<Library>> kept GUARDED_BY(mutex);
};

Opened& opened() {
    static auto* kept = new Opened;  // threads of the library may outlast us
    return *kept;
}

}  // namespace

Result<const Library*> Library::get() {
    Opened& o = opened();
    MutexLock lock(o.mutex);
    if (o.library != nullptr) return o.library;
    void* handle = ::dlopen(o.path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) {
        const char* why = ::dlerror();
        return Error{Code::kUnavailable, std::string("GPUDirect Storage is not installed (") +
                                             (why == nullptr ? o.path.c_str() : why) + ")"};
    }
    auto library = std::make_unique<Library>();
    const char* missing = nullptr;
    auto find = [&](auto& function, const char* name) {
        function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(::dlsym(handle, name));
        if (function == nullptr) missing = name;
    };
    find(library->cuFileDriverOpen, "cuFileDriverOpen");
    find(library->cuFileHandleRegister, "cuFileHandleRegister");
    find(library->cuFileHandleDeregister, "cuFileHandleDeregister");
    find(library->cuFileRead, "cuFileRead");
    find(library->cuFileWrite, "cuFileWrite");
    if (missing != nullptr) {
        return Error{Code::kUnavailable, o.path + " lacks " + missing + ": it is no GPUDirect Storage"};
    }
    o.kept.push_back(std::move(library));
    o.library = o.kept.back().get();
    return o.library;
}

Status Library::open_driver() const {
    Opened& o = opened();
    MutexLock lock(o.mutex);
    if (o.driver) return success();
    if (CallError failed = cuFileDriverOpen(); failed.code != 0) {
        return Error{Code::kUnavailable, "cuFileDriverOpen failed with " + std::to_string(failed.code) +
                                             " (CUDA " + std::to_string(failed.cuda) + ")"};
    }
    o.driver = true;
    return success();
}

void Library::use_library_for_tests(const std::string& path) {
    Opened& o = opened();
    MutexLock lock(o.mutex);
    o.path = path.empty() ? "libcufile.so.0" : path;
    o.library = nullptr;
    o.driver = false;
}

}  // namespace moonpool::transport::cufile
