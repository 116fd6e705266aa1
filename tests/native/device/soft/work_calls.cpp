// The driver: copies, modules and kernels.
#include <cstring>
#include <initializer_list>
#include <memory>
#include <vector>

#include "call.hpp"
#include "twins.hpp"

using namespace moonpool::soft;
using namespace moonpool::device;

namespace {

// What copies of these addresses come to because a process has ended whose memory one of them is, 0: nothing.
int ended_owner(std::initializer_list<uint64_t> addresses) {
    State& s = state();
    for (uint64_t address : addresses) {
        uint64_t base = 0;
        const CardMemory* memory = s.owner_ended == 0 ? nullptr : s.find_card(address, &base);
        if (memory != nullptr && memory->opened != nullptr && memory->opened->owner_ended()) {
            return s.owner_ended;
        }
    }
    return 0;
}

// The copy of one range, between any cards. early: its source was read when it was queued.
std::function<void()> copy_step(uint64_t to, uint64_t from, size_t bytes, bool early) {
    std::shared_ptr<std::vector<char>> kept;
    if (early) {
        const char* source = state().reach(from, bytes, false, -1);
        if (source == nullptr) return [] {};
        kept = std::make_shared<std::vector<char>>(source, source + bytes);
    }
    return [=] {
        // One that is under way then ends the card for this process.
        if (int code = ended_owner({to, from}); code != 0) {
            state().broken = code;
            return;
        }
        char* target = state().reach(to, bytes, true, -1);
        const char* source = kept ? kept->data() : state().reach(from, bytes, false, -1);
        if (target != nullptr && source != nullptr) std::memcpy(target, source, bytes);
    };
}

}  // namespace

extern "C" {

int cuMemcpyAsync(uint64_t to, uint64_t from, size_t bytes, Stream* stream) {
    Call call("cuMemcpyAsync", kContext);
    if (call.code != 0) return call.code;
    if (!known(stream, "cuMemcpyAsync")) return kInvalidHandle;
    if (int code = ended_owner({to, from}); code != 0) return code;
    Operation copy;
    copy.steps.push_back(copy_step(to, from, bytes, false));
    state().queue(stream, std::move(copy));
    return state().broken;
}

int cuMemcpyBatchAsync(uint64_t* to, uint64_t* from, size_t* bytes, size_t count,
                       CuCopyAttributes* attributes, size_t* begins, size_t attribute_count, size_t*,
                       Stream* stream) {
    Call call("cuMemcpyBatchAsync", kContext);
    if (call.code != 0) return call.code;
    if (!known(stream, "cuMemcpyBatchAsync")) return kInvalidHandle;
    State& s = state();
    if (count == 0 || attribute_count != 1 || begins[0] != 0) return cu::kInvalidValue;
    Operation copies;
    for (size_t i = 0; i < count; ++i) {
        if (bytes[i] == 0) return cu::kInvalidValue;
        if (int code = ended_owner({to[i], from[i]}); code != 0) return code;
        bool any = attributes[0].source_order == 3;
        bool early =
            any && (s.policy == Policy::kEarly || (s.policy == Policy::kShuffled && s.below(2) == 0));
        copies.steps.push_back(copy_step(to[i], from[i], bytes[i], early));
    }
    s.queue(stream, std::move(copies));
    return s.broken;
}

int cuModuleLoadDataEx(Module** module, const void* image, unsigned count, int* options, void** values) {
    Call call("cuModuleLoadDataEx", kContext | kUnsafe);
    for (unsigned i = 0; call.code == cu::kInvalidPtx && i < count; ++i) {
        if (options[i] == cu::kJitErrorLog) std::strcpy(static_cast<char*>(values[i]), "ptxas fatal: soft");
    }
    if (call.code != 0) return call.code;
    std::string text = static_cast<const char*>(image);
    if (text.find(".version 7.8") == std::string::npos || text.find(".target sm_70") == std::string::npos) {
        return cu::kInvalidPtx;
    }
    *module = new Module{text};
    state().modules.insert(*module);
    return 0;
}

int cuModuleUnload(Module* module) {
    Call call("cuModuleUnload", kContext | kUndoes);
    if (call.code != 0) return call.code;
    if (state().modules.erase(module) == 0) return kInvalidHandle;
    delete module;
    return state().broken;
}

int cuModuleGetFunction(const Twin** function, Module* module, const char* name) {
    Call call("cuModuleGetFunction", kContext);
    if (call.code != 0) return call.code;
    if (module->text.find(std::string(".entry ") + name + "(") == std::string::npos) return cu::kNotFound;
    *function = find_twin(name);
    return *function != nullptr ? 0 : cu::kNotFound;
}

// The arguments are taken by value at the launch; the blocks run in any order.
int cuLaunchKernel(const Twin* twin, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                   unsigned block_y, unsigned block_z, unsigned, Stream* stream, void** arguments, void**) {
    Call call("cuLaunchKernel", kContext);
    if (call.code != 0) return call.code;
    if (!known(stream, "cuLaunchKernel")) return kInvalidHandle;
    if (grid_y * grid_z * block_y * block_z != 1 || block_x > 1024) return cu::kInvalidValue;
    auto values = std::make_shared<std::vector<std::vector<char>>>();
    for (size_t i = 0; i < twin->argument_bytes.size(); ++i) {
        const char* value = static_cast<const char*>(arguments[i]);
        values->emplace_back(value, value + twin->argument_bytes[i]);
    }
    Operation kernel;
    for (unsigned block = 0; block < grid_x; ++block) {
        kernel.steps.push_back([=, card = stream->card] {
            std::vector<void*> pointers;
            for (auto& value : *values) pointers.push_back(value.data());
            twin->run(block, grid_x, block_x, card, pointers.data());
        });
    }
    state().queue(stream, std::move(kernel));
    return state().broken;
}

}  // extern "C"
