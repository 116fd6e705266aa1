// The table of the driver, and each reason why there is none.
#include <fstream>
#include <set>

#include "bed.hpp"
#include "device/address.hpp"

using namespace moonpool;
using namespace moonpool::testing;
using device::Driver;

namespace {

// The software device's exported symbols, but for some.
Driver::Symbols without(std::set<std::string> missing) {
    return [missing](const char* name) -> void* {
        return missing.count(name) != 0 ? nullptr : ::dlsym(soft_device().library, name);
    };
}

bool mapped(const std::string& path) {
    std::ifstream maps("/proc/self/maps");
    std::string text(std::istreambuf_iterator<char>(maps), {});
    return text.find(path) != std::string::npos;
}

}  // namespace

TEST_CASE("device: the driver is a table, and every function that is needed is in it") {
    Bed bed;
    const Driver* driver = device::must(Driver::get());
    CHECK(driver->version >= device::kDriverVersionMin);
#define MOONPOOL_CHECK(name, version, symbol, arguments) CHECK(bool(driver->name));
    MOONPOOL_CUDA_NEEDED(MOONPOOL_CHECK)
#undef MOONPOOL_CHECK
    CHECK(driver == Driver::if_loaded());
    CHECK(driver->describe(700).find("illegal memory access was encountered (CUDA error 700)") !=
          std::string::npos);
    if (!is_real()) CHECK(driver->has_batch_copies());
    bed.end();
}

TEST_CASE("device: a driver that is missing, no driver, too old or incomplete says so in a sentence") {
    soft_device().soft_reset(0, 1);
    auto reason = [](const std::string& path) {
        Driver::use_library_for_tests(path);
        Result<const Driver*> driver = Driver::get();
        REQUIRE_FALSE(driver);
        CHECK(driver.error().code == Code::kUnavailable);
        CHECK(Driver::if_loaded() == nullptr);
        return driver.error().text;
    };
    CHECK(reason("libmoonpool-absent.so.1").find("there is no CUDA driver here (libmoonpool-absent.so.1: ") ==
          0);
    CHECK(reason("libm.so.6").find("the library lacks cuDriverGetVersion") == 0);
    soft_device().soft_set_version(11040);
    CHECK(reason(soft_library()) == "the CUDA driver supports CUDA 11.4, and Moonpool needs 11.8 or newer");
    soft_device().soft_set_version(12080);
    soft_device().soft_hide("cuLaunchKernel");
    CHECK(reason(soft_library()) == "the CUDA driver (CUDA 12.8) lacks cuLaunchKernel");
    soft_device().soft_reset(0, 1);
    soft_device().soft_set_cards(0);
    Driver::use_library_for_tests(soft_library());
    CHECK(Driver::get().error().text == "the CUDA driver shows this process no device");
    soft_device().soft_reset(0, 1);
    soft_device().soft_fail("cuInit", 1, 999);
    CHECK(Driver::get().error().text.find("the CUDA driver cannot be initialised: ") == 0);
    CHECK(Driver::get().ok());  // the next time
}

TEST_CASE("device: functions are looked up by version, or by symbol where the driver has no lookup") {
    soft_device().soft_reset(0, 1);
    CHECK(device::must(Driver::load(without({}))).has_batch_copies());
    CHECK(device::must(Driver::load(without({}))).has_ipc());
    soft_device().soft_hide("cuIpcGetMemHandle");
    CHECK_FALSE(device::must(Driver::load(without({}))).has_ipc());
    soft_device().soft_set_version(12040);  // batches came with 12.8
    Driver old = device::must(Driver::load(without({})));
    CHECK_FALSE(old.has_batch_copies());
    CHECK(bool(old.cuLaunchKernel));
    int asked = soft_device().soft_calls("cuGetProcAddress");
    Driver plain = device::must(Driver::load(without({"cuGetProcAddress_v2", "cuGetProcAddress"})));
    CHECK(soft_device().soft_calls("cuGetProcAddress") == asked);
    CHECK(bool(plain.cuMemAlloc));
    CHECK(plain.has_batch_copies());  // the symbol is there
    Result<Driver> lacking =
        Driver::load(without({"cuGetProcAddress_v2", "cuGetProcAddress", "cuMemFree_v2"}));
    REQUIRE_FALSE(lacking);
    CHECK(lacking.error().text == "the CUDA driver (CUDA 12.4) lacks cuMemFree");
}

TEST_CASE("device: a question about an address opens no library") {
    if (is_real()) return;
    char name[] = "/tmp/moonpool-softcuda-XXXXXX";
    int fd = ::mkstemp(name);
    REQUIRE(fd >= 0);
    {
        std::ifstream from(soft_library(), std::ios::binary);
        std::ofstream to(name, std::ios::binary);
        to << from.rdbuf();
    }
    ::close(fd);
    Driver::use_library_for_tests(name);
    int here = 0;
    CHECK(device::must(device::classify(reinterpret_cast<uint64_t>(&here), sizeof(here))).kind ==
          device::AddressKind::kUnknown);
    CHECK(Driver::if_loaded() == nullptr);
    CHECK(Driver::if_loaded() == nullptr);  // known without a look
    CHECK_FALSE(mapped(name));
    // The application loads it, and the next question finds it.
    REQUIRE(::dlopen(name, RTLD_NOW | RTLD_LOCAL) != nullptr);
    CHECK(Driver::if_loaded() != nullptr);
    CHECK(Driver::get().ok());
    CHECK(mapped(name));
    CHECK(Driver::if_loaded() != nullptr);
    ::unlink(name);
}
