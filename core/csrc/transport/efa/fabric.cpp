#include "transport/efa/fabric.hpp"

#include <dirent.h>
#include <dlfcn.h>
#include <limits.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>

#include "base/fork_fresh.hpp"
#include "base/mutex.hpp"
#include "transport/nic/messages.hpp"

namespace moonpool::transport::efa {

namespace {

constexpr const char* kKernelNics = "/sys/class/infiniband";
constexpr std::string_view kRdm = "-rdm";  // what libfabric adds to the kernel's name: "rdmap0s6-rdm"
constexpr uint32_t kApi = fi::version(1, 9);

bool kernel_has_efa() {
    DIR* folder = ::opendir(kKernelNics);
    if (folder == nullptr) return false;
    bool found = false;
    while (const dirent* entry = ::readdir(folder)) {
        std::string driver = std::string(kKernelNics) + "/" + entry->d_name + "/device" + "/driver";
        char target[PATH_MAX] = {};
        if (::readlink(driver.c_str(), target, sizeof(target) - 1) <= 0) continue;
        const char* name = std::strrchr(target, '/');
        found = found || std::strcmp(name == nullptr ? target : name + 1, "efa") == 0;
    }
    ::closedir(folder);
    return found;
}

// Debian's libfabric brings libpsm, which takes over SIGINT, SIGTERM and the signals of crashes when it is
// loaded: the process keeps its own.
void* open_without_signals(const std::string& path) {
    std::array<struct sigaction, 32> kept{};
    for (int signal = 1; signal < 32; ++signal) (void)::sigaction(signal, nullptr, &kept[signal]);
    void* library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    for (int signal = 1; signal < 32; ++signal) (void)::sigaction(signal, &kept[signal], nullptr);
    return library;
}

Result<std::unique_ptr<Fabric>> load_fabric(const std::string& path) {
    void* library = open_without_signals(path);
    if (library == nullptr) {
        const char* why = ::dlerror();
        return Error{Code::kUnavailable, std::string("there is no libfabric here (") +
                                             (why != nullptr ? why : path.c_str()) +
                                             "); install libfabric1, or the EFA installer's libfabric"};
    }
    auto made = std::make_unique<Fabric>();
    std::string missing;
    // Versions of a symbol differ in the structs that they take: abi.hpp has those of 1.3.
    auto find = [&](auto& place, const char* name, const char* version) {
        void* found = ::dlvsym(library, name, version);
        if (found == nullptr && missing.empty()) missing = std::string(name) + " of " + version;
        place = reinterpret_cast<std::remove_reference_t<decltype(place)>>(found);
    };
    find(made->getinfo, "fi_getinfo", "FABRIC_1.3");
    find(made->freeinfo, "fi_freeinfo", "FABRIC_1.3");
    find(made->dupinfo, "fi_dupinfo", "FABRIC_1.3");
    find(made->open, "fi_fabric", "FABRIC_1.1");
    find(made->strerror, "fi_strerror", "FABRIC_1.0");
    if (!missing.empty()) return Error{Code::kUnavailable, "the library " + path + " lacks " + missing};
    return made;
}

struct FabricLibraries {
    Mutex mutex;
    std::map<std::string, std::unique_ptr<Fabric>> loaded GUARDED_BY(mutex);
};
ForkFresh<FabricLibraries> fabric_libraries;

// What is needed of a provider; null: libfabric has no memory left. To be freed.
fi::Info* make_hints(const Fabric& library) {
    fi::Info* hints = library.dupinfo(nullptr);
    if (hints == nullptr) return nullptr;
    hints->caps = fi::kMsg | fi::kRma;
    hints->mode = fi::kContext | fi::kContext2;
    hints->ep_attr->type = fi::kReliableDatagram;
    hints->domain_attr->threading = fi::kThreadSafe;
    hints->domain_attr->mr_mode = fi::kMrLocal | fi::kMrVirtual | fi::kMrAllocated | fi::kMrProviderKey;
    return hints;
}

// The providers of this host that would do, for people; "none".
std::string providers_text(const Fabric& library) {
    std::vector<std::string> names;
    fi::Info* hints = make_hints(library);
    fi::Info* found = nullptr;
    if (hints != nullptr && library.getinfo(kApi, nullptr, nullptr, 0, hints, &found) == 0) {
        for (const fi::Info* info = found; info != nullptr; info = info->next) {
            std::string name = info->fabric_attr->provider;  // "tcp;ofi_rxm": the name of a part is enough
            name.resize(std::min(name.find(';'), name.size()));
            if (std::ranges::find(names, name) == names.end()) names.push_back(std::move(name));
        }
    }
    if (found != nullptr) library.freeinfo(found);
    if (hints != nullptr) library.freeinfo(hints);
    std::string text;
    for (const std::string& name : names) text += (text.empty() ? "\"" : ", \"") + name + "\"";
    return text.empty() ? "none" : text;
}

// What this host has of a provider, or why it has nothing; to be freed.
Result<fi::Info*> ask_info(const Fabric& library, const FabricOptions& options) {
    fi::Info* hints = make_hints(library);
    if (hints == nullptr) return Error{Code::kUnavailable, "libfabric has no memory left"};
    hints->fabric_attr->provider = ::strdup(options.provider.c_str());
    fi::Info* found = nullptr;
    const char* source = options.source.empty() ? nullptr : options.source.c_str();
    int code = library.getinfo(kApi, source, nullptr, source == nullptr ? 0 : fi::kSource, hints, &found);
    library.freeinfo(hints);
    if (code != 0 || found == nullptr) {
        return Error{Code::kUnavailable, "libfabric's provider \"" + options.provider +
                                             "\" has no reliable datagrams here (" + library.text(code) +
                                             "); efa_provider may name one of: " + providers_text(library)};
    }
    return found;
}

// The kernel's name of an EFA device is enough.
bool is_called(const std::string& domain, const std::string& name) {
    return domain == name || domain == name + std::string(kRdm);
}

// Of what libfabric found, none of which is called so.
Error no_device(const std::string& name, const fi::Info* found) {
    std::vector<std::string> names;
    for (const fi::Info* info = found; info != nullptr; info = info->next) {
        if (std::ranges::find(names, info->domain_attr->name) == names.end()) {
            names.emplace_back(info->domain_attr->name);
        }
    }
    std::string text = "no device of libfabric on this host is called \"" + name + "\"; it has";
    for (const std::string& each : names) text += (&each == &names.front() ? " " : ", ") + each;
    return Error{Code::kInvalidArgument, text};
}

}  // namespace

Result<const Fabric*> open_fabric(const FabricOptions& options) {
    if (options.provider == "efa" && !kernel_has_efa()) {
        return Error{Code::kUnavailable, std::string("this host has no EFA device (") + kKernelNics +
                                             " shows none of the driver efa)"};
    }
    FabricLibraries& all = fabric_libraries.get();
    MutexLock lock(all.mutex);
    std::unique_ptr<Fabric>& kept = all.loaded[options.library];
    if (kept == nullptr) {
        Result<std::unique_ptr<Fabric>> loaded = load_fabric(options.library);
        if (!loaded) return loaded.error();
        kept = std::move(*loaded);
    }
    return kept.get();
}

Status has_nic(const FabricOptions& options) {
    Result<const Fabric*> library = open_fabric(options);
    if (!library) return library.error();
    Result<fi::Info*> found = ask_info(**library, options);
    if (!found) return found.error();
    (*library)->freeinfo(*found);
    return success();
}

Result<std::vector<std::shared_ptr<Domain>>> Domain::open_all(const FabricOptions& options) {
    Result<const Fabric*> library = open_fabric(options);
    if (!library) return library.error();
    return open_all(**library, options);
}

Result<std::vector<std::shared_ptr<Domain>>> Domain::open_all(const Fabric& library,
                                                              const FabricOptions& options) {
    Result<fi::Info*> found = ask_info(library, options);
    if (!found) return found.error();
    auto is_found = [&found](const std::string& name) {
        for (const fi::Info* info = *found; info != nullptr; info = info->next) {
            if (is_called(info->domain_attr->name, name)) return true;
        }
        return false;
    };
    auto missing = std::ranges::find_if_not(options.devices, is_found);
    if (missing != options.devices.end()) {
        Error error = no_device(*missing, *found);
        library.freeinfo(*found);
        return error;
    }
    auto is_wanted = [&options](const fi::Info& info) {
        return options.devices.empty() || std::ranges::any_of(options.devices, [&](const auto& name) {
                   return is_called(info.domain_attr->name, name);
               });
    };
    std::vector<std::shared_ptr<Domain>> domains;
    Error error{Code::kUnavailable, "no domain"};
    for (fi::Info* info = *found; info != nullptr; info = info->next) {
        if (!is_wanted(*info)) continue;
        // One NIC may be there in several forms: the provider prefers the first.
        if (std::ranges::find(domains, info->domain_attr->name, &Domain::name_) != domains.end()) continue;
        std::shared_ptr<Domain> domain(new Domain(library, library.dupinfo(info)));
        domain->name_ = domain->near.device = info->domain_attr->name;
        if (domain->near.device.ends_with(kRdm))
            domain->near.device.resize(domain->name_.size() - kRdm.size());
        if (Status opened = domain->open(); !opened) {
            error = opened.error();
            continue;
        }
        domains.push_back(std::move(domain));
        if (options.provider != "efa" && options.devices.empty())
            break;  // the others are further addresses of this host
    }
    library.freeinfo(*found);
    if (domains.empty()) return error;
    return domains;
}

void keep_nearest(std::vector<std::shared_ptr<Domain>>& domains, const std::string& machine) {
    std::vector<nic::NearPort> near;
    for (const auto& domain : domains) near.push_back(domain->near);
    nic::rank_ports(nic::machine_for(near, machine), near);
    std::vector<std::shared_ptr<Domain>> kept;
    for (size_t i : nic::choose_ports(near, nic::kDevicesMax)) {
        domains[i]->near = std::move(near[i]);
        kept.push_back(std::move(domains[i]));
    }
    domains = std::move(kept);
}

Status Domain::open() {
    fi::Fabric* fabric = nullptr;
    if (int code = library_.open(info_->fabric_attr, &fabric, nullptr); code != 0) {
        return Error{Code::kUnavailable, "libfabric does not open " + name_ + ": " + library_.text(code)};
    }
    fabric_.reset(fabric);
    fi::Domain* domain = nullptr;
    if (int code = fabric->ops->domain(&fabric->fid, info_, &domain, nullptr); code != 0) {
        return Error{Code::kUnavailable,
                     "libfabric opens no domain of " + name_ + ": " + library_.text(code)};
    }
    domain_.reset(domain);
    return success();
}

Domain::~Domain() {
    domain_.reset();
    fabric_.reset();
    library_.freeinfo(info_);
}

Result<Domain::Made> Domain::make_key(uint64_t address, uint64_t bytes) {
    constexpr uint64_t kAccess = fi::kRead | fi::kWrite | fi::kRemoteRead | fi::kRemoteWrite;
    // Where the provider chooses no keys they are random: none can be guessed.
    std::random_device random;
    const size_t key_bits = 8 * std::min<size_t>(info_->domain_attr->mr_key_size, 8);
    fi::Mr* mr = nullptr;
    int code = 0;
    for (int attempt = 0; attempt < 3 && mr == nullptr; ++attempt) {  // a key may be in use
        uint64_t key = uint64_t{random()} << 32 | random();
        if (key_bits < 64) key &= (uint64_t{1} << key_bits) - 1;
        code = domain_->mr->reg(&domain_->fid, reinterpret_cast<const void*>(address), bytes, kAccess, 0, key,
                                0, &mr, nullptr);
        if (code != 0) mr = nullptr;
    }
    if (mr == nullptr) {
        std::string text = library_.text(code);
        if (code == -ENOMEM || code == -EPERM)
            text += " (raise the limit of locked memory: ulimit -l unlimited)";
        return Error{Code::kUnavailable, std::move(text)};
    }
    bool wanted = (info_->domain_attr->mr_mode & fi::kMrLocal) != 0;
    return Made{mr, wanted ? reinterpret_cast<uint64_t>(mr->descriptor) : 0, mr->key};
}

bool Domain::end_key(void* handle) {
    auto* fid = static_cast<fi::Fid*>(handle);
    return fid->ops->close(fid) == 0;
}

}  // namespace moonpool::transport::efa
