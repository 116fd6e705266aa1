// How much memory may be taken: machines and control groups described as files.
#include <doctest/doctest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>

#include "memory/available.hpp"

using namespace moonpool;

namespace {

constexpr uint64_t kMiB = 1 << 20;

// A machine's /proc and /sys below a folder of its own.
class Machine {
   public:
    Machine() {
        char name[] = "/tmp/moonpool-machine-XXXXXX";
        REQUIRE(::mkdtemp(name) != nullptr);
        root_ = name;
        write("/proc/meminfo",
              "MemTotal:       16384000 kB\nMemFree:           1000 kB\nMemAvailable:    8192000 kB\n");
    }
    ~Machine() { std::filesystem::remove_all(root_); }
    void write(const std::string& path, const std::string& text) {
        std::filesystem::create_directories(std::filesystem::path(root_ + path).parent_path());
        std::ofstream(root_ + path) << text;
    }
    AvailableMemory available() {
        std::optional<AvailableMemory> memory = available_memory(root_);
        REQUIRE(memory);
        return *memory;
    }
    const std::string& root() const { return root_; }

   private:
    std::string root_;
};

}  // namespace

TEST_CASE("available memory: the machine's, where no control group limits") {
    Machine machine;
    CHECK(machine.available().available_bytes == 8000 * kMiB);
    CHECK(machine.available().total_bytes == 16000 * kMiB);
    CHECK(machine.available().limited_by == "the machine");
    machine.write("/proc/self/cgroup", "0::/user.slice\n");
    machine.write("/sys/fs/cgroup/user.slice/memory.max", "max\n");
    machine.write("/sys/fs/cgroup/user.slice/memory.current", "1\n");
    CHECK(machine.available().limited_by == "the machine");
    CHECK_FALSE(available_memory(machine.root() + "/nothing"));
}

TEST_CASE("available memory: version 2, the tightest group above the process, page cache counted as free") {
    Machine machine;
    machine.write("/proc/self/cgroup", "0::/pod/worker\n");
    machine.write("/sys/fs/cgroup/pod/worker/memory.max", std::to_string(900 * kMiB) + "\n");
    machine.write("/sys/fs/cgroup/pod/worker/memory.current", std::to_string(100 * kMiB) + "\n");
    machine.write("/sys/fs/cgroup/pod/memory.max", std::to_string(1000 * kMiB) + "\n");
    machine.write("/sys/fs/cgroup/pod/memory.current", std::to_string(700 * kMiB) + "\n");
    machine.write("/sys/fs/cgroup/pod/memory.stat",
                  "anon 1\nfile 2\ninactive_file " + std::to_string(50 * kMiB) + "\nactive_file " +
                      std::to_string(30 * kMiB) + "\nslab_reclaimable " + std::to_string(20 * kMiB) + "\n");
    AvailableMemory memory = machine.available();
    CHECK(memory.available_bytes == 400 * kMiB);  // the pod's: 1000 - (700 - 100)
    CHECK(memory.total_bytes == 900 * kMiB);
    CHECK(memory.limited_by == "the control group /pod");
    machine.write("/sys/fs/cgroup/pod/memory.current", std::to_string(2000 * kMiB) + "\n");
    CHECK(machine.available().available_bytes == 0);  // beyond its limit: nothing is left, not 2^64
}

TEST_CASE("available memory: version 1, also in a container that sees its own group as the root") {
    Machine machine;
    machine.write("/proc/self/cgroup", "5:cpu,cpuacct:/x\n4:hugetlb,memory:/a/abc\n0::/\n");
    std::string folder = "/sys/fs/cgroup/memory";
    SUBCASE("the path of the host exists") { folder += "/a/abc"; }
    SUBCASE("the mount is the group itself") {}
    machine.write(folder + "/memory.limit_in_bytes", std::to_string(512 * kMiB) + "\n");
    machine.write(folder + "/memory.usage_in_bytes", std::to_string(500 * kMiB) + "\n");
    machine.write(folder + "/memory.stat", "inactive_file 1\ntotal_inactive_file " +
                                               std::to_string(8 * kMiB) + "\ntotal_active_file 0\n");
    AvailableMemory memory = machine.available();
    CHECK(memory.available_bytes == 20 * kMiB);
    CHECK(memory.total_bytes == 512 * kMiB);
    CHECK(memory.limited_by.starts_with("the control group /"));
    machine.write(folder + "/memory.limit_in_bytes", "9223372036854771712\n");  // what v1 says for "none"
    CHECK(machine.available().limited_by == "the machine");
    CHECK(machine.available().total_bytes == 16000 * kMiB);
}

TEST_CASE("available memory: this machine has some") {
    std::optional<AvailableMemory> memory = available_memory();
    REQUIRE(memory);
    CHECK(memory->available_bytes > 0);
    CHECK(memory->total_bytes >= memory->available_bytes);
}
