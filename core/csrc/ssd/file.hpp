// The SSD tier's one file in a directory of its own.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "base/result.hpp"
#include "io/file.hpp"

namespace moonpool::ssd {

using io::File;
using io::kBlockBytes;
using io::round_up_to_block;

// Opens or creates.
using OpenFile = std::function<Result<std::unique_ptr<File>>(const std::string& path)>;
Result<std::unique_ptr<File>> open_file(const std::string& path);

}  // namespace moonpool::ssd
