// Buffers: a fixed number of page-aligned buffers for transfers past the page cache.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace moonpool::io {

class Buffers {
   public:
    Buffers(uint32_t count, uint64_t bytes) : bytes_(bytes), all_bytes_(count * bytes) {
        void* memory =
            ::mmap(nullptr, all_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) return;
        memory_ = static_cast<std::byte*>(memory);
        for (uint32_t i = 0; i < count; ++i) free_.push_back(memory_ + i * bytes);
    }
    ~Buffers() {
        if (memory_ != nullptr) ::munmap(memory_, all_bytes_);
    }
    Buffers(const Buffers&) = delete;

    bool valid() const { return memory_ != nullptr; }
    uint64_t bytes() const { return bytes_; }  // of one
    std::byte* take() {
        if (free_.empty()) return nullptr;
        std::byte* buffer = free_.back();
        free_.pop_back();
        return buffer;
    }
    void give_back(std::byte* buffer) { free_.push_back(buffer); }
    size_t available() const { return free_.size(); }

   private:
    uint64_t bytes_, all_bytes_;
    std::byte* memory_ = nullptr;
    std::vector<std::byte*> free_;
};

}  // namespace moonpool::io
