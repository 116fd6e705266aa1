#include "device/driver.hpp"

#include <dlfcn.h>
#include <link.h>

#include <memory>
#include <vector>

#include "base/fork.hpp"
#include "base/mutex.hpp"

namespace moonpool::device {

namespace {

constexpr const char* kLibrary = "libcuda.so.1";

std::string version_text(int version) {
    return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

Error no_driver(const std::string& why) { return Error{Code::kUnavailable, why}; }

// cuGetProcAddress, of CUDA 11.3 or of 12, with the same meaning; without it the exported symbols.
class Lookup {
   public:
    explicit Lookup(const Driver::Symbols& symbols) : symbols_(symbols) {
        by_version_12_ = reinterpret_cast<ByVersion12>(symbols("cuGetProcAddress_v2"));
        by_version_ = reinterpret_cast<ByVersion>(symbols("cuGetProcAddress"));
    }
    void* find(const char* name, int version, const char* symbol) const {
        void* found = nullptr;
        int code = 0;
        if (by_version_12_ != nullptr) {
            int why = 0;
            code = by_version_12_(name, &found, version, 0, &why);
        } else if (by_version_ != nullptr) {
            code = by_version_(name, &found, version, 0);
        } else {
            found = symbols_(symbol);
        }
        return code == cu::kSuccess ? found : nullptr;
    }

   private:
    using ByVersion = int (*)(const char* name, void** found, int version, uint64_t flags);
    using ByVersion12 = int (*)(const char* name, void** found, int version, uint64_t flags, int* why);
    const Driver::Symbols& symbols_;
    ByVersion by_version_ = nullptr;
    ByVersion12 by_version_12_ = nullptr;
};

// How many libraries this process has ever loaded.
uint64_t libraries_loaded() {
    uint64_t loaded = 0;
    auto look = [](dl_phdr_info* info, size_t, void* out) {
        *static_cast<uint64_t*>(out) = info->dlpi_adds;
        return 1;  // the count is the same in all of them
    };
    (void)::dl_iterate_phdr(look, &loaded);
    return loaded;
}

// The library in use and its table, which is made once and kept.
class Library {
   public:
    void use(const std::string& path) EXCLUDES(mutex_) {
        MutexLock lock(mutex_);
        path_ = path;
        table_ = nullptr;
        initialised_ = false;
        absent_at_ = 0;
    }
    // mode: RTLD_NOLOAD, or 0.
    Result<const Driver*> table(int mode) EXCLUDES(mutex_) {
        MutexLock lock(mutex_);
        return table_locked(mode);
    }
    Result<const Driver*> initialised() EXCLUDES(mutex_) {
        MutexLock lock(mutex_);
        Result<const Driver*> table = table_locked(0);
        if (initialised_ && forked_.in_child()) {
            return Error{Code::kForked,
                         "this process is a child of fork(), whose parent had initialised CUDA; "
                         "start it by spawn"};
        }
        if (!table || initialised_) return table;
        int code = (*table)->cuInit(0);
        if (code == cu::kNoDevice) return no_driver("the CUDA driver shows this process no device");
        if (code != cu::kSuccess) {
            return no_driver("the CUDA driver cannot be initialised: " + (*table)->describe(code));
        }
        initialised_ = true;
        forked_ = ForkGuard();
        return table;
    }

   private:
    Result<const Driver*> table_locked(int mode) REQUIRES(mutex_) {
        if (table_ != nullptr) return table_;
        // Looking for what is not loaded takes 20 us, and each registration of memory looks.
        uint64_t libraries = (mode & RTLD_NOLOAD) == 0 ? 0 : libraries_loaded();
        if (libraries != 0 && libraries == absent_at_) {
            return no_driver("there is no CUDA driver here (not loaded)");
        }
        absent_at_ = libraries;
        // Never closed again: the driver has threads of its own.
        void* library = ::dlopen(path_.empty() ? kLibrary : path_.c_str(), RTLD_NOW | RTLD_LOCAL | mode);
        if (library == nullptr) {
            const char* why = (mode & RTLD_NOLOAD) == 0 ? ::dlerror() : nullptr;
            return no_driver(std::string("there is no CUDA driver here (") +
                             (why != nullptr ? why : "not loaded") + ")");
        }
        Result<Driver> loaded = Driver::load([library](const char* name) { return ::dlsym(library, name); });
        if (!loaded) return loaded.error();
        tables_.push_back(std::make_unique<Driver>(*loaded));
        table_ = tables_.back().get();
        return table_;
    }

    Mutex mutex_;
    std::string path_ GUARDED_BY(mutex_);
    const Driver* table_ GUARDED_BY(mutex_) = nullptr;
    bool initialised_ GUARDED_BY(mutex_) = false;
    // It is not loaded as long as no library is; 0: that is not known.
    uint64_t absent_at_ GUARDED_BY(mutex_) = 0;
    ForkGuard forked_ GUARDED_BY(mutex_);  // of the process that initialised it
    std::vector<std::unique_ptr<Driver>> tables_ GUARDED_BY(mutex_);
};

Library& library() {
    static auto* kept = new Library;
    return *kept;
}

}  // namespace

Result<Driver> Driver::load(const Symbols& symbols) {
    Driver driver;
    auto version = reinterpret_cast<int (*)(int*)>(symbols("cuDriverGetVersion"));
    if (version == nullptr) return no_driver("the library lacks cuDriverGetVersion: it is no CUDA driver");
    int code = version(&driver.version);
    if (code != cu::kSuccess || driver.version < kDriverVersionMin) {
        return no_driver("the CUDA driver supports CUDA " + version_text(driver.version) +
                         ", and Moonpool needs " + version_text(kDriverVersionMin) + " or newer");
    }
    Lookup lookup(symbols);
    const char* missing = nullptr;
#define MOONPOOL_FIND(name, version, symbol, arguments) \
    driver.name = reinterpret_cast<decltype(driver.name)>(lookup.find(#name, version, #symbol));
#define MOONPOOL_FIND_NEEDED(name, version, symbol, arguments) \
    MOONPOOL_FIND(name, version, symbol, arguments)            \
    if (driver.name == nullptr && missing == nullptr) missing = #name;
    MOONPOOL_CUDA_NEEDED(MOONPOOL_FIND_NEEDED)
    MOONPOOL_CUDA_OPTIONAL(MOONPOOL_FIND)
#undef MOONPOOL_FIND_NEEDED
#undef MOONPOOL_FIND
    if (missing != nullptr) {
        return no_driver("the CUDA driver (CUDA " + version_text(driver.version) + ") lacks " + missing);
    }
    return driver;
}

std::string Driver::describe(int code) const {
    const char* text = nullptr;
    if (cuGetErrorString(code, &text) != cu::kSuccess || text == nullptr) text = "an unknown error";
    return std::string(text) + " (CUDA error " + std::to_string(code) + ")";
}

Result<const Driver*> Driver::get() { return library().initialised(); }

const Driver* Driver::if_loaded() {
    Result<const Driver*> table = library().table(RTLD_NOLOAD);
    return table ? *table : nullptr;
}

void Driver::use_library_for_tests(const std::string& path) { library().use(path); }

}  // namespace moonpool::device
