// io_uring by its system calls: three mmaps, and head and tail indices shared with the kernel. The kernel
// writes the tail of completions and the head of submissions; we write the other two. A read of an eventfd is
// always in the ring, so that wake() ends a wait for completions.
//
// The caller decides how many operations are in flight and what an error means, not this file. One thread
// alone calls submit() and reap(); wake() may come from any thread and touches nothing but the
// eventfd.
//
// An operation is in exactly one of three places: written to the ring but not yet given to the kernel
// (counted by pending_), at the kernel, or finished and handed out. in_flight_ keeps its description until
// the last, since a short transfer is submitted again for what is left.
#include "io/queue.hpp"

#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <bit>
#include <cerrno>
#include <cstring>
#include <deque>
#include <unordered_map>

namespace moonpool::io {

namespace {

constexpr uint64_t kWakeTag = UINT64_MAX;

// One of the ring's three shared memories: submissions, completions, and the entries that submissions name.
class Map {
   public:
    Map() = default;
    Map(int ring, uint64_t bytes, uint64_t what)
        : data_(::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring,
                       static_cast<off_t>(what))),
          bytes_(bytes) {}
    Map(Map&& other) noexcept
        : data_(std::exchange(other.data_, MAP_FAILED)), bytes_(std::exchange(other.bytes_, 0)) {}
    Map& operator=(Map&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(bytes_, other.bytes_);
        return *this;
    }
    ~Map() {
        if (valid()) ::munmap(data_, bytes_);
    }
    bool valid() const { return data_ != MAP_FAILED; }
    template <class T>
    T* at(uint32_t offset) const {
        return reinterpret_cast<T*>(static_cast<std::byte*>(data_) + offset);
    }

   private:
    void* data_ = MAP_FAILED;
    uint64_t bytes_ = 0;
};

// The kernel reads and writes these indices too. Acquire and release order them against the entries that
// they cover; the two sides share no other synchronisation.
uint32_t load(uint32_t* value) { return std::atomic_ref<uint32_t>(*value).load(std::memory_order_acquire); }
void store(uint32_t* to, uint32_t value) {
    std::atomic_ref<uint32_t>(*to).store(value, std::memory_order_release);
}

class Ring : public Queue {
   public:
    static Result<std::unique_ptr<Queue>> create(uint32_t depth) {
        auto queue = std::unique_ptr<Ring>(new Ring(depth));
        io_uring_params params{};
        queue->ring_.reset(
            static_cast<int>(::syscall(SYS_io_uring_setup, std::bit_ceil(depth + 2), &params)));
        if (!queue->ring_.valid()) {
            bool forbidden = errno == EPERM || errno == EACCES;
            return Error{Code::kUnavailable,
                         forbidden ? "the kernel forbids io_uring here (sysctl kernel.io_uring_disabled, or "
                                     "the container's seccomp profile)"
                                   : std::string("io_uring is not available: ") + std::strerror(errno)};
        }
        // Without NODROP the kernel loses completions when their ring is full, and the caller would wait
        // forever for them. Both features together date the kernel: READ and WRITE opcodes came with 5.6 as
        // well.
        if ((params.features & IORING_FEAT_NODROP) == 0 || (params.features & IORING_FEAT_RW_CUR_POS) == 0) {
            return Error{Code::kUnavailable, "the kernel's io_uring is older than Linux 5.6"};
        }
        int ring = queue->ring_.get();
        queue->sq_ =
            Map(ring, params.sq_off.array + params.sq_entries * sizeof(uint32_t), IORING_OFF_SQ_RING);
        queue->cq_ =
            Map(ring, params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe), IORING_OFF_CQ_RING);
        queue->sqes_ = Map(ring, params.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES);
        queue->wake_.reset(::eventfd(0, EFD_CLOEXEC));
        if (!queue->sq_.valid() || !queue->cq_.valid() || !queue->sqes_.valid() || !queue->wake_.valid()) {
            return Error{Code::kUnavailable,
                         std::string("io_uring is not available: ") + std::strerror(errno)};
        }
        queue->sq_offsets_ = params.sq_off;
        queue->cq_offsets_ = params.cq_off;
        queue->arm_wake();
        return std::unique_ptr<Queue>(std::move(queue));
    }

    void submit(const Operation& operation) override {
        in_flight_.emplace(operation.tag, InFlight{operation});
        push(operation);
    }

    // Collects first: a wait would be wrong when something has ended already. A wake() that came between
    // two calls is not lost, because its eventfd read has then completed, and awake_ says so.
    void reap(std::vector<Done>& done, int wait_ms) override {
        size_t before = done.size();
        collect(done);
        bool wait = wait_ms != 0 && done.size() == before && !awake_;
        if (pending_ != 0 || wait) enter(wait, wait_ms);
        collect(done);
        if (std::exchange(awake_, false)) arm_wake();
    }

    void wake() override {
        uint64_t one = 1;
        (void)!::write(wake_.get(), &one, sizeof(one));
    }

    uint32_t depth() const override { return depth_; }
    const char* name() const override { return "io_uring"; }

    ~Ring() override {
        // The eventfd's read must not outlive the number that it writes to.
        std::vector<Done> done;
        wake();
        // The kernel writes to wake_value_ when the read ends, and to buffers of the caller; the former is
        // ours to wait for, the latter the caller has waited for.
        while (ring_.valid() && wake_armed_) reap_once(done);
    }

   private:
    explicit Ring(uint32_t depth) : depth_(depth) {}

    void reap_once(std::vector<Done>& done) {
        enter(true, 1000);
        collect(done);
    }

    void push(const Operation& operation) {
        io_uring_sqe sqe{};
        sqe.fd = operation.file->fd();
        sqe.user_data = operation.tag;
        if (operation.kind == Operation::Kind::kSync) {
            sqe.opcode = IORING_OP_FSYNC;
            sqe.fsync_flags = IORING_FSYNC_DATASYNC;
        } else {
            sqe.opcode = operation.kind == Operation::Kind::kRead ? IORING_OP_READ : IORING_OP_WRITE;
            sqe.addr = reinterpret_cast<uint64_t>(operation.data);
            sqe.len = operation.bytes;
            sqe.off = operation.offset;
        }
        push(sqe);
    }

    // One read of the eventfd is in the ring at all times. It completes with the first wake() and is armed
    // again by reap(), so several wakes between two turns cost one completion.
    void arm_wake() {
        io_uring_sqe sqe{};
        sqe.fd = wake_.get();
        sqe.user_data = kWakeTag;
        sqe.opcode = IORING_OP_READ;
        sqe.addr = reinterpret_cast<uint64_t>(&wake_value_);
        sqe.len = sizeof(wake_value_);
        wake_armed_ = true;
        push(sqe);
    }

    void push(const io_uring_sqe& sqe) {
        uint32_t* tail = sq_.at<uint32_t>(sq_offsets_.tail);
        uint32_t mask = *sq_.at<uint32_t>(sq_offsets_.ring_mask);
        // The ring is full: give the kernel what is there. We are its only writer, so that tail is read
        // without an atomic.
        if (*tail - load(sq_.at<uint32_t>(sq_offsets_.head)) > mask) enter(false, 0);
        uint32_t at = *tail & mask;
        sqes_.at<io_uring_sqe>(0)[at] = sqe;
        sq_.at<uint32_t>(sq_offsets_.array)[at] = at;
        store(tail, *tail + 1);
        ++pending_;
    }

    void enter(bool wait, int wait_ms) {
        // Given first; then waited for, with poll() where there is a deadline: a ring's descriptor is
        // readable when something has completed.
        while (pending_ != 0) {
            long n = ::syscall(SYS_io_uring_enter, ring_.get(), pending_, 0, 0, nullptr, 0);
            if (n >= 0) pending_ -= static_cast<uint32_t>(n);
            if (n < 0 && errno != EINTR && errno != EAGAIN && errno != EBUSY) break;
            if (n < 0 && errno != EINTR) break;  // the kernel is short of memory: reap first
        }
        if (!wait) return;
        pollfd readable{ring_.get(), POLLIN, 0};
        ::poll(&readable, 1, wait_ms);
    }

    void collect(std::vector<Done>& done) {
        uint32_t* head = cq_.at<uint32_t>(cq_offsets_.head);
        uint32_t mask = *cq_.at<uint32_t>(cq_offsets_.ring_mask);
        uint32_t at = *head;
        uint32_t tail = load(cq_.at<uint32_t>(cq_offsets_.tail));
        const io_uring_cqe* cqes = cq_.at<io_uring_cqe>(cq_offsets_.cqes);
        std::vector<Operation> again;
        for (; at != tail; ++at) {
            const io_uring_cqe& cqe = cqes[at & mask];
            if (cqe.user_data == kWakeTag) {
                awake_ = true;
                wake_armed_ = false;
                continue;
            }
            auto it = in_flight_.find(cqe.user_data);
            if (it == in_flight_.end()) continue;
            InFlight& one = it->second;
            Operation& operation = one.left;
            const bool sync = operation.kind == Operation::Kind::kSync;
            if (cqe.res == -EAGAIN || cqe.res == -EINTR) {
                again.push_back(operation);
                continue;
            }
            if (!sync && cqe.res > 0) {
                auto moved = static_cast<uint32_t>(cqe.res);
                one.moved += moved;
                operation.offset += moved;
                operation.data += moved;
                operation.bytes -= moved;
            }
            // The kernel may stop early, as read() and write() may. The contract of Queue is all or an error.
            const bool read = operation.kind == Operation::Kind::kRead;
            bool ends = !sync && operation.bytes != 0 && cqe.res >= 0 &&
                        (cqe.res == 0 || (read && stopped_at_the_end(*operation.file, one.moved)));
            if (!sync && cqe.res > 0 && operation.bytes != 0 && !ends) {
                again.push_back(operation);
                continue;
            }
            // A write that moves no byte is an error of the disk.
            int error = cqe.res < 0 ? -cqe.res : !ends ? 0 : read ? kFileEnds : EIO;
            done.push_back(Done{cqe.user_data, error, one.moved});
            in_flight_.erase(it);
        }
        // Only now may the kernel write over the entries that were read above.
        store(head, at);
        for (const Operation& operation : again) push(operation);
    }

    uint32_t depth_;
    Fd ring_, wake_;
    Map sq_, cq_, sqes_;
    io_sqring_offsets sq_offsets_{};
    io_cqring_offsets cq_offsets_{};
    uint32_t pending_ = 0;  // pushed, not yet given to the kernel
    bool awake_ = false, wake_armed_ = false;
    uint64_t wake_value_ = 0;
    struct InFlight {
        Operation left;  // what was not moved yet
        uint32_t moved = 0;
    };
    std::unordered_map<uint64_t, InFlight> in_flight_;
};

}  // namespace

Result<std::unique_ptr<Queue>> ring_queue(uint32_t depth) { return Ring::create(depth); }

}  // namespace moonpool::io

#else

namespace moonpool::io {

Result<std::unique_ptr<Queue>> ring_queue(uint32_t) {
    return Error{Code::kUnavailable, "moonpool was built without the kernel's header of io_uring"};
}

}  // namespace moonpool::io

#endif
