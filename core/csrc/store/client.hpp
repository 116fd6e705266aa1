// Client: the store as one process sees it: put, get, exists, longest prefix, remove over one node, with
// reconnection.
//
// Any thread may call. No call retries: when the node is lost, the call says so, and the next one tries to
// connect, at most once per back-off step. What a call can do without the node (read what is in the shared
// index) it does.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "store/session.hpp"

namespace moonpool {

struct Part {
    std::byte* data = nullptr;
    uint64_t size = 0;
};

struct PutItem {
    std::string_view name;
    std::string_view parent;  // empty: none
    std::span<const Part> parts;
};

struct PutReport {
    std::vector<PutOutcome> outcomes;
    std::string refusal;  // why, for the items whose outcome is kRefused
    uint64_t stored_bytes = 0;
};

struct GetItem {
    std::string_view name;
    std::span<const Part> parts;
};

inline constexpr int64_t kMiss = -1;
inline constexpr size_t kNotPinned = SIZE_MAX;

// A counted right to read. Released by release(), or with the last holder.
class Pin {
   public:
    Pin(std::shared_ptr<Session> session, uint64_t id) : session_(std::move(session)), id_(id) {}
    ~Pin() { release(); }
    Pin(const Pin&) = delete;

    void release();
    const std::shared_ptr<Session>& session() const { return session_; }

   private:
    std::shared_ptr<Session> session_;
    std::atomic<uint64_t> id_;
};

struct PinnedRun {
    std::shared_ptr<Pin> pin;  // null: nothing was found
    size_t end = 0;            // it covers the descriptors before this one that no earlier run covers
};

struct Pinned {
    std::vector<PinnedRun> pins;          // one for each frame that the question took
    std::vector<Descriptor> descriptors;  // one per key asked; for a prefix, of its leading objects only

    const std::shared_ptr<Pin>& pin_of(size_t i) const {
        size_t run = 0;
        while (pins[run].end <= i) ++run;
        return pins[run].pin;
    }
};

struct Prefix : Pinned {  // blocks x width descriptors
    uint64_t blocks = 0;
    Incarnation incarnation{};
};

struct ListRow {
    std::string name;
    uint64_t size = 0;
    uint64_t generation = 0;
    uint32_t crc = 0;
    uint32_t pins = 0;
};

// Memory laid out by stride: the object of column c with index i is the concatenation, over the rows of c, of
// [address + i * stride, + length). A column of a paged KV cache is a range of heads and layers, an index is
// a block.
struct StridedRow {
    uint64_t address = 0;
    uint64_t stride = 0;
    uint64_t length = 0;
};

class PartTable {
   public:
    explicit PartTable(std::vector<std::vector<StridedRow>> columns);

    size_t columns() const { return columns_.size(); }
    uint64_t object_bytes(size_t column) const { return bytes_[column]; }
    void parts(size_t column, uint64_t index, std::vector<Part>& out) const;

   private:
    std::vector<std::vector<StridedRow>> columns_;
    std::vector<uint64_t> bytes_;
};

struct LoadReport {
    std::vector<uint8_t> ok;  // 1: the bytes of that object are in place
    uint64_t bytes = 0;
    std::string error;  // empty when all are ok
};

class Client {
   public:
    explicit Client(ClientOptions options);

    // Connects now; otherwise the first call does.
    Status connect();
    bool connected();
    void close();
    Status check_open() const;  // kClosed, or kForked in a child of fork()

    Result<PutReport> put(std::span<const PutItem> items, bool replace, bool ack, int timeout_ms = 0);

    // Copies into the caller's parts: the object's size, or kMiss. Too small a destination is an error and
    // writes nothing for that object; bytes after a shorter object stay as they are.
    Result<std::vector<int64_t>> get(std::span<const GetItem> items, bool verify);

    // Pins what is there, without copying.
    Result<Pinned> pin(std::span<const std::string_view> names);
    // Of what was pinned: places[i] is where key i stands in it, or kNotPinned. Check bytes, or copy them
    // out.
    static Status verify(const Pinned& pinned, std::span<const size_t> places,
                         std::span<const std::string_view> names);
    static Result<std::vector<int64_t>> get_pinned(const Pinned& pinned, std::span<const size_t> places,
                                                   std::span<const GetItem> items, bool verify);
    Result<std::vector<uint8_t>> exists(std::span<const std::string_view> names);
    Result<Prefix> longest_prefix(std::span<const std::string_view> names, uint32_t width, bool pin);
    Result<std::vector<uint8_t>> remove(std::span<const std::string_view> names);
    Result<std::vector<ListRow>> list(std::string_view prefix, uint64_t limit);
    Result<std::vector<std::pair<std::string, uint64_t>>> stat();

    // Copies pinned objects, described by whoever pinned them, into strided memory. Each is checked against
    // its generation after the copy, so a pin that was lost meanwhile is a failed load and never wrong bytes.
    LoadReport load(const Incarnation& incarnation, std::span<const Descriptor> descriptors,
                    const PartTable& table, std::span<const uint32_t> indices,
                    std::span<const uint16_t> columns, bool verify);

    // The live session, connecting if there is none and the back-off allows it.
    Result<std::shared_ptr<Session>> session();

   private:
    Status check_names(const Session& session, std::span<const std::string_view> names) const;

    ClientOptions options_;
    KeyHasher hash_;
    ForkGuard fork_;
    std::mutex mutex_;
    std::shared_ptr<Session> session_;
    std::chrono::steady_clock::time_point retry_at_{};
    std::chrono::milliseconds backoff_{0};
    Error last_error_;
    std::atomic<bool> closed_{false};
};

}  // namespace moonpool
