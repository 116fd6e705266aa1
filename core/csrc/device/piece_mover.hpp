// PieceMover: copies of one card with the small pieces among them moved by the kernel (piece_plan.hpp says
// which and how). What that needs is taken when the first small pieces come: the kernel; for each set of
// copies under way a list, in pinned memory and on the card; and 8 MiB of the card where pieces cross the
// link.
//
//     PieceMover::Buffer buffer;
//     mover->queue(stream, copies, buffer);        then record an event
//     ...                                          the buffer is given back when that is over, never before
//
// A buffer belongs to one set of copies from queue() until all of them have ended, so no two use the same
// bytes, and none is written by the host while the card reads it. Where the card is too old, or refuses the
// PTX or the memory, and while more sets are under way than there may be buffers, all goes by copies.
//
// Any thread; queue() never waits for the card. The first call may load the kernel, some 10 ms.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/mutex.hpp"
#include "device/device_memory.hpp"
#include "device/objects_kernel.hpp"
#include "device/piece_plan.hpp"
#include "device/pinned_memory.hpp"

namespace moonpool::device {

class PieceMover : public std::enable_shared_from_this<PieceMover> {
    struct Memory {
        PinnedMemory list;
        DeviceMemory list_on_card;
        DeviceMemory staging;  // none until pieces cross the link
    };

   public:
    static constexpr uint64_t kStagingBytes = (8u << 20) + (64u << 10);  // a slot of a ring, and gaps
    static constexpr size_t kBuffersMax = 8;                             // as many as a ring has slots

    // Given back by its destructor.
    class Buffer {
       public:
        Buffer() = default;
        Buffer(Buffer&& other) noexcept = default;
        Buffer& operator=(Buffer&& other) noexcept;
        ~Buffer() { give_back(); }
        void give_back();

       private:
        friend class PieceMover;
        std::shared_ptr<PieceMover> mover_;
        std::unique_ptr<Memory> memory_;
    };

    explicit PieceMover(std::shared_ptr<const Device> device) : device_(std::move(device)) {}

    // As Stream::copy(), in the stream's order. used: empty before.
    Status queue(Stream& stream, std::span<const Copy> copies, Buffer& used);

    // Why pieces of one kind are copied one by one, in a sentence; "": they are not.
    std::string refusal() const EXCLUDES(mutex_);

   private:
    // False: none is free, or the card has refused one. staging: whether it needs that; where the card
    // refuses it, the buffer comes without.
    bool take(Buffer& buffer, bool staging) EXCLUDES(mutex_);
    Result<std::unique_ptr<Memory>> make() REQUIRES(mutex_);
    void put_back(std::unique_ptr<Memory> memory) EXCLUDES(mutex_);
    uint32_t blocks_for(const PieceList& list) const;

    const std::shared_ptr<const Device> device_;
    mutable Mutex mutex_;
    std::optional<ObjectsKernel> kernel_ GUARDED_BY(mutex_);  // once there, it stays
    std::vector<std::unique_ptr<Memory>> free_ GUARDED_BY(mutex_);
    size_t made_ GUARDED_BY(mutex_) = 0;
    std::string refusal_ GUARDED_BY(mutex_), staging_refusal_ GUARDED_BY(mutex_);  // asked once
};

}  // namespace moonpool::device
