// Tree: the files of /sys and /proc below a root folder, read without trust. A recorded or a hostile tree
// (links in circles or out of it, folders, pipes and endless files where numbers should be, names and texts
// of any bytes) costs what is wrong its value, and nothing else. Nothing here blocks or throws.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace moonpool::topology {

inline constexpr size_t kNamesMax = 8192;       // of one folder; further ones are left out
inline constexpr size_t kTextBytesMax = 65536;  // of one file

class Tree {
   public:
    explicit Tree(std::string root);

    // A file's text without white space around it, other than printable ASCII replaced by '?'. Nothing where
    // it cannot be read.
    std::optional<std::string> text(const std::string& path) const;
    // The decimal or 0x number that the text begins with.
    std::optional<int64_t> number(const std::string& path) const;
    // The names in a folder, "node2" before "node10".
    std::vector<std::string> names(const std::string& path) const;
    // The path below the root that a path leads to, all links followed; "" where it leads nowhere, round in a
    // circle, or out of the tree.
    std::string real(const std::string& path) const;

   private:
    std::string root_;
    std::string real_root_;
};

// The numbers of a list like "0-3,8"; those up to 65,535 only.
std::vector<int> numbers_of(std::string_view list);

// "mlx5_2" before "mlx5_10".
bool natural_less(std::string_view a, std::string_view b);

}  // namespace moonpool::topology
