// A machine with DAX devices, for which files stand in.
#pragma once

#include <doctest/doctest.h>
#include <stdlib.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace moonpool::testing {

class DaxMachine {
   public:
    DaxMachine() {
        char folder[] = "/tmp/moonpool-dax-XXXXXX";
        REQUIRE(::mkdtemp(folder) != nullptr);
        root_ = folder;
        std::filesystem::create_directories(root_ + "/dev");
    }
    ~DaxMachine() { std::filesystem::remove_all(root_); }
    DaxMachine(const DaxMachine&) = delete;

    void add(const std::string& name, uint64_t bytes) {
        std::ofstream(root_ + "/dev/" + name).close();
        REQUIRE(::truncate((root_ + "/dev/" + name).c_str(), static_cast<off_t>(bytes)) == 0);
        fact(name, "size", std::to_string(bytes));
        fact(name, "align", "2097152");
        fact(name, "target_node", "2");
    }
    void fact(const std::string& name, const std::string& file, const std::string& text) {
        std::filesystem::create_directories(root_ + "/sys/bus/dax/devices/" + name);
        std::ofstream(root_ + "/sys/bus/dax/devices/" + name + "/" + file) << text << "\n";
    }
    const std::string& root() const { return root_; }

   private:
    std::string root_;
};

}  // namespace moonpool::testing
