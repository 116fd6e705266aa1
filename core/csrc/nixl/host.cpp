#include "nixl/host.hpp"

#include <dlfcn.h>
#include <link.h>

#include <array>

namespace moonpool::nixl {

namespace {

#define STRING "NSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"

// Of 1.5.1, in the order of the class.
constexpr std::array kNeeded{
    "_ZNK17nixlBackendEngine11prepMemViewERK12nixlDescListI18nixlRemoteMetaDescERPvPK23nixlBackendOptionalArg"
    "s",
    "_ZNK17nixlBackendEngine11prepMemViewERK12nixlDescListI12nixlMetaDescERPvPK23nixlBackendOptionalArgs",
    "_ZNK17nixlBackendEngine14releaseMemViewEPv",
    "_ZNK17nixlBackendEngine11getConnInfoER" STRING,
    "_ZN17nixlBackendEngine18loadRemoteConnInfoERK" STRING "S7_",
    "_ZN17nixlBackendEngine9getNotifsERSt6vectorISt4pairI" STRING "S7_ESaIS8_EE",
    "_ZNK17nixlBackendEngine8genNotifERK" STRING "S7_",
    "_ZNK17nixlBackendEngine8queryMemERK12nixlDescListI12nixlBlobDescERSt6vectorISt8optionalISt13unordered_"
    "mapI" STRING "SD_St4hashISD_ESt8equal_toISD_ESaISt4pairIKSD_SD_EEEESaISN_EE",
    "_ZNK17nixlBackendEngine16estimateXferCostERK14nixl_xfer_op_tRK12nixlDescListI12nixlMetaDescES7_RK" STRING
    "RKP15nixlBackendReqHRNSt6chrono8durationIlSt5ratioILl1ELl1000000EEEESP_R11nixl_cost_"
    "tPK21nixlAgentOptionalArgs",
};

// Of versions between, which had both.
constexpr std::array kOthers{
    "_ZNK17nixlBackendEngine16createGpuXferReqERK15nixlBackendReqHRK12nixlDescListI12nixlMetaDescES7_RPv",
    "_ZNK17nixlBackendEngine17releaseGpuXferReqEPv",
    "_ZNK17nixlBackendEngine16getGpuSignalSizeERm",
};

Error unknown(const std::string& why) {
    return Error{Code::kUnavailable, "this plugin is made for NIXL 1.5.1, and " + why};
}

int find_library(dl_phdr_info* info, size_t, void* found) {
    std::string path = info->dlpi_name;
    if (path.substr(path.rfind('/') + 1).rfind("libnixl.so", 0) != 0) return 0;
    *static_cast<std::string*>(found) = path;
    return 1;
}

}  // namespace

Status check_interface(const Exports& exports) {
    for (const char* name : kNeeded) {
        if (!exports(name)) return unknown(std::string("the one that loads it has no ") + name);
    }
    for (const char* name : kOthers) {
        if (exports(name)) return unknown(std::string("the one that loads it has ") + name);
    }
    return success();
}

Status check_loaded() {
    std::string path;
    ::dl_iterate_phdr(find_library, &path);
    void* library = path.empty() ? nullptr : ::dlopen(path.c_str(), RTLD_NOW | RTLD_NOLOAD);
    if (library == nullptr) return unknown("no libnixl.so is loaded");
    Status checked = check_interface([&](const char* name) { return ::dlsym(library, name) != nullptr; });
    ::dlclose(library);
    return checked;
}

}  // namespace moonpool::nixl
