// All of libplugin_MOONPOOL.so: the names that NIXL looks for. The plugin itself is in libtransfer_engine.so,
// which lies beside it in the wheel, so that the engine is installed once for both. It is opened by its path:
// another library of that name may be loaded already, or be found first.
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>

#include "nixl/abi.hpp"

extern "C" __attribute__((visibility("default"))) NixlPlugin* nixl_plugin_init() {
    Dl_info self{};
    if (::dladdr(reinterpret_cast<void*>(&nixl_plugin_init), &self) == 0) return nullptr;
    std::unique_ptr<char, decltype(&std::free)> here(::realpath(self.dli_fname, nullptr), &std::free);
    std::string path(here == nullptr ? self.dli_fname : here.get());
    path = path.substr(0, path.rfind('/') + 1) + "../lib/libtransfer_engine.so";
    void* library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    void* plugin = library == nullptr ? nullptr : ::dlsym(library, "moonpool_nixl_plugin");
    if (plugin == nullptr) {
        std::fprintf(stderr, "moonpool: the backend MOONPOOL: %s\n", ::dlerror());
        return nullptr;
    }
    return reinterpret_cast<NixlPlugin* (*)()>(plugin)();
}

extern "C" __attribute__((visibility("default"))) void nixl_plugin_fini() {}
