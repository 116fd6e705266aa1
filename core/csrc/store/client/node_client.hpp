// NodeClient: the verbs of the store against one node, from any process: names, limits, pins and checks. The
// session's BlockPath moves the bytes. `Client` makes one pool of many of these.
//
// Any thread may call. No call retries: when the node is lost, the call says so, and the next one tries to
// connect, at most once per back-off step. What a call can do without the node (read what is in the shared
// index) it does.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/mutex.hpp"
#include "store/client/items.hpp"
#include "store/client/search_steps.hpp"
#include "store/client/session.hpp"
#include "store/shared/stripes.hpp"

namespace moonpool {

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

inline constexpr uint32_t kNoPin = UINT32_MAX;

// The stripes of an object, all of them pinned.
struct StripedPin {
    Manifest manifest;
    std::vector<Descriptor> descriptors;  // of each stripe
    std::vector<uint32_t> under;          // its pin's place in Pinned::pins
};

struct Pinned {
    std::vector<std::shared_ptr<Pin>> pins;
    std::vector<Descriptor> descriptors;  // one per key asked; for a prefix, of its leading objects only
    std::vector<uint32_t> under;          // for each of them its pin's place in pins, or kNoPin: a miss
    std::string why;                      // why there may be more than this, "" when all was asked and pinned
    std::map<size_t, StripedPin> striped;  // by key: of those whose descriptor is a manifest's

    const std::shared_ptr<Pin>& pin_of(size_t i) const { return pins[under[i]]; }
    bool has(size_t i) const { return under[i] != kNoPin; }
};

struct Prefix : Pinned {  // blocks x width descriptors
    uint64_t blocks = 0;
    Incarnation incarnation{};  // of the node that was asked first
    // Without pins, which know it: for each block the name and the host id of the node with its first object.
    std::vector<std::pair<std::string, std::string>> found_at;
};

struct ListRow {
    std::string name;
    uint64_t size = 0;
    uint64_t generation = 0;
    uint32_t crc = 0;
    uint32_t pins = 0;
};

// Bytes to read in place: in the arena under a pin, or in memory of their own when they came over TCP.
struct ObjectView {
    std::shared_ptr<const void> owner;  // null: a miss
    const std::byte* data = nullptr;
    uint64_t size = 0;
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
    const std::vector<StridedRow>& rows(size_t column) const { return columns_[column]; }
    // Appends where the object of that column and index lies; rows that touch are one part.
    void append_parts(size_t column, uint64_t index, std::vector<MemoryRef>& out) const;

   private:
    std::vector<std::vector<StridedRow>> columns_;
    std::vector<uint64_t> bytes_;
};

struct LoadReport {
    std::vector<uint8_t> ok;  // 1: the bytes of that object are in place
    uint64_t bytes = 0;
    std::string error;  // empty when all are ok
};

class NodeClient {
   public:
    explicit NodeClient(ClientOptions options);

    // Connects now; otherwise the first call does.
    Status connect();
    bool connected();
    void close();
    Status check_open() const;  // kClosed, or kForked in a child of fork()

    // how.known: the removals that the caller knows of. An item with a version of its own that is older than
    // what the node knows has the outcome kOlder.
    Result<PutReport> put(std::span<const PutItem> items, PutHow how);
    // Whether a call would be refused for these names, or put() for those of an item.
    Status check_names(std::span<const std::string_view> names);
    Status check_names(std::span<const PutItem> items);

    // Copies into the caller's parts: the object's size, or kMiss. Too small a destination is an error and
    // writes nothing for that object; bytes after a shorter object stay as they are.
    // tolerant: for a caller that looks at each item. Bytes that were damaged on their way are kDamagedRead,
    // and an object larger than its parts has its size, and no bytes were written.
    Result<std::vector<int64_t>> get(std::span<const GetItem> items, bool verify, bool tolerant = false);

    // Pins what is there, without copying.
    Result<Pinned> pin(std::span<const std::string_view> names);
    // Of what was pinned: places[i] is where key i stands in it, or kNotPinned. Check bytes, or copy them
    // out.
    static Status verify(const Pinned& pinned, std::span<const size_t> places,
                         std::span<const std::string_view> names);
    static Result<std::vector<int64_t>> get_pinned(const Pinned& pinned, std::span<const size_t> places,
                                                   std::span<const GetItem> items, bool verify,
                                                   bool tolerant = false);
    static Result<std::vector<ObjectView>> views(const Pinned& pinned, std::span<const size_t> places);
    // 0: no; kThere, or kManifestSized for what may be striped. use: it counts as one.
    static constexpr uint8_t kThere = 1, kManifestSized = 2;
    Result<std::vector<uint8_t>> exists(std::span<const std::string_view> names, bool use = false);
    Result<Prefix> longest_prefix(std::span<const std::string_view> names, uint32_t width, bool pin);
    // Appends the manifests that were among them. generations: of each name, as describe() says it; another
    // one stays. None: whatever there is.
    Result<std::vector<uint8_t>> remove(std::span<const std::string_view> names,
                                        std::vector<RemovedManifest>& manifests,
                                        std::span<const uint64_t> generations = {});
    // Removes copies that are older than the version of their name; none: whatever there is.
    Result<std::vector<uint8_t>> remove_older(std::span<const std::string_view> names,
                                              std::span<const Version> versions,
                                              std::vector<RemovedManifest>& manifests);
    Result<std::vector<ListRow>> list(std::string_view prefix, uint64_t limit);
    Result<std::vector<std::pair<std::string, uint64_t>>> stat();
    // This node's copy of each object, without a use of it; where 0: it has none.
    Result<std::vector<Description>> describe(std::span<const std::string_view> names);

    // Copies pinned objects, described by the process that pinned them, into strided memory: those of
    // `which`, or all. Each is checked after the copy, by the node's index or by its checksum, so a pin that
    // was lost meanwhile is a failed load and never wrong bytes. A session that is lost serves as long as a
    // pin of this process holds it: the arena stays mapped as it was.
    void load(const Incarnation& incarnation, std::span<const Descriptor> descriptors,
              std::span<const uint32_t> which, const PartTable& table, std::span<const uint32_t> indices,
              std::span<const uint16_t> columns, bool verify, LoadReport& report);

    // The live session, connecting if there is none and the back-off allows it.
    Result<std::shared_ptr<Session>> session();

    // The session of the last call, without connecting; null when there is none, and in a child of fork(),
    // where the mutex may be held by a thread that only the parent has.
    std::shared_ptr<Session> current() {
        if (fork_.in_child()) return nullptr;
        SessionLock lock(*this);
        return session_;
    }
    // Whether there is a session, its node has answered what it was asked last, and it relays to the master.
    // Never waits, unlike the others, which may find another thread that connects.
    bool relays();
    const ClientOptions& options() const { return options_; }
    // Of the node's last answer; before the first one, of a tenant without a salt. They stay valid as long as
    // this does.
    const KeyHasher& hasher() const { return keys_of_.load(std::memory_order_acquire)->hasher; }
    // By which manifests are made and known: the tenant's salt, which all of its keys have in common, or else
    // the token.
    const Secrets& manifest_secrets() const { return keys_of_.load(std::memory_order_acquire)->manifests; }
    Status check_may_write();  // as far as is known without the node's answer

   private:
    // Others wait here while one connects to a node that may not answer: that is a wait for the node.
    class SCOPED_CAPABILITY SessionLock {
       public:
        explicit SessionLock(NodeClient& client) ACQUIRE(client.mutex_) : mutex_(client.mutex_) {
            if (mutex_.try_lock()) return;
            auto since = std::chrono::steady_clock::now();
            mutex_.lock();
            WaitBudget::spent_since(since);
        }
        ~SessionLock() RELEASE() { mutex_.unlock(); }
        SessionLock(const SessionLock&) = delete;

       private:
        Mutex& mutex_;
    };
    Status check_names(const Session& session, std::span<const std::string_view> names) const;
    static void put_after_removals(Session& s, std::span<const PutItem> items, const PutHow& how,
                                   PutReport& report);
    enum class RemoveBy : uint8_t { kName, kGeneration, kVersion };
    Result<std::vector<uint8_t>> remove(std::span<const std::string_view> names, RemoveBy by,
                                        std::span<const uint64_t> numbers,
                                        std::vector<RemovedManifest>& manifests);
    Status check_names(const Session& session, const PutItem& item) const;
    Status check_item(const Session& session, const PutItem& item) const;
    Result<std::vector<int64_t>> pin_and_get(std::span<const GetItem> items, bool verify, bool tolerant);
    // The session under which objects of that life of the node were pinned.
    Result<std::shared_ptr<Session>> session_of(const Incarnation& incarnation);
    void forget_dead_session() REQUIRES(mutex_);

    // How keys are hashed, as the node says when a session opens. There is another one only after a node was
    // restarted with another salt.
    struct KeysOf {
        std::string salt;
        KeyHasher hasher;
        Secrets manifests;
    };
    void take_salt(const std::string& salt) REQUIRES(mutex_);
    bool has_new_key() REQUIRES(mutex_);
    static void load_over(Session& s, std::span<const Descriptor> descriptors,
                          std::span<const uint32_t> which, const PartTable& table,
                          std::span<const uint32_t> indices, std::span<const uint16_t> columns, bool verify,
                          LoadReport& report);

    ClientOptions options_;
    std::vector<std::unique_ptr<const KeysOf>> all_keys_of_ GUARDED_BY(mutex_);
    std::atomic<const KeysOf*> keys_of_{nullptr};
    ForkGuard fork_;
    Mutex mutex_;
    std::shared_ptr<Session> session_ GUARDED_BY(mutex_);
    std::string proved_ GUARDED_BY(mutex_);  // the first secret when session_ was opened
    uint64_t look_at_key_ms_ GUARDED_BY(mutex_) = 0;
    std::vector<std::weak_ptr<Session>> lost_
        GUARDED_BY(mutex_);  // those that pins still hold, and dead ones
    std::chrono::steady_clock::time_point retry_at_ GUARDED_BY(mutex_){};
    std::chrono::milliseconds backoff_ GUARDED_BY(mutex_){0};
    Error last_error_ GUARDED_BY(mutex_);
    Mutex newest_mutex_;                                       // after mutex_, and never held for long
    std::weak_ptr<Session> newest_ GUARDED_BY(newest_mutex_);  // session_
    std::atomic<bool> closed_{false};                          // ends an opening, too
};

}  // namespace moonpool
