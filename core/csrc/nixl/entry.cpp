// All of libplugin_MOONPOOL.so: the names that NIXL looks for. The plugin itself is in libtransfer_engine.so,
// which lies beside it in the wheel and is loaded with it, so that the engine is installed once for both.
#include "nixl/abi.hpp"

extern "C" NixlPlugin* moonpool_nixl_plugin();

extern "C" __attribute__((visibility("default"))) NixlPlugin* nixl_plugin_init() {
    return moonpool_nixl_plugin();
}

extern "C" __attribute__((visibility("default"))) void nixl_plugin_fini() {}
