// The kernels as C++, compiled from their one source. Each access is checked by State::reach().
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace moonpool::soft {

struct Twin {
    const char* name;
    std::vector<size_t> argument_bytes;
    // One block of `threads` threads, with the arguments of the launch.
    void (*run)(unsigned block, unsigned blocks, unsigned threads, int card, void** arguments);
};

// Null: no such kernel.
const Twin* find_twin(const std::string& name);

}  // namespace moonpool::soft
