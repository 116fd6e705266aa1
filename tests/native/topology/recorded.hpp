// A recorded machine (tests/machines) as files that the topology reads.
#pragma once

#include <doctest/doctest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "../root.hpp"
#include "topology/machine.hpp"

namespace moonpool::testing {

// A machine's files below a folder of its own.
class Recorded {
   public:
    explicit Recorded(const std::string& name = "") {
        char folder[] = "/tmp/moonpool-machine-XXXXXX";
        REQUIRE(::mkdtemp(folder) != nullptr);
        root_ = folder;
        if (name.empty()) return;
        std::filesystem::path text = testing::root() / "tests" / "machines" / (name + ".txt");
        std::ifstream lines(text);
        REQUIRE_MESSAGE(lines, text.string());
        for (std::string line; std::getline(lines, line);) {
            if (line.empty() || line[0] == '#') continue;
            size_t file = line.find(" = ");
            size_t link = line.find(" -> ");
            if (file != std::string::npos) {
                std::string content = line.substr(file + 3);
                for (size_t at; (at = content.find("\\n")) != std::string::npos;)
                    content.replace(at, 2, "\n");
                write(line.substr(0, file), content + "\n");
            } else {
                this->link(line.substr(0, link), line.substr(link + 4));
            }
        }
    }
    ~Recorded() { std::filesystem::remove_all(root_); }

    void write(const std::string& path, const std::string& text) {
        std::filesystem::create_directories(std::filesystem::path(root_ + path).parent_path());
        std::ofstream(root_ + path) << text;
    }
    void link(const std::string& path, const std::string& target) {
        std::filesystem::create_directories(std::filesystem::path(root_ + path).parent_path());
        std::filesystem::create_symlink(target, root_ + path);
    }
    topology::Machine machine() const { return topology::read_machine(root_); }
    const std::string& root() const { return root_; }

   private:
    std::string root_;
};

}  // namespace moonpool::testing
