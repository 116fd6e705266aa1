// The C API of transfer_engine_c.h over Engine: one Handle for each transfer_engine_t, which keeps what
// this API has and Engine has not: batches, the peers by their names, the last words about an error.
//
// What TensorRT-LLM's agent does with the answers shapes them: it takes every status but WAITING, PENDING
// and FAILED for success, so a transfer that was cancelled, or made no progress, is FAILED here; and it
// asks for the status of each request in a loop, so an ended transfer is looked at once and kept. Batches
// of transfers that failed it never frees.
//
// Threads: the caller's, any number at a time; the Handle has none. mutex_ guards batches and peers, and
// is not held while a peer is dialled or asked to take a message, nor while a transfer that was given up
// ends.
//
// What holds between two calls: a batch has as many requests used as its submits have lengths. Each submit
// is one ticket of the engine, or none when it had no bytes; once a ticket has ended it is released and
// its outcome stands in `done`. A batch that was not freed is kept at least until kBatchesKept younger
// ones exist, so a late question about it still finds an answer. No exception leaves a function of the
// API, since its callers may be C.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/mutex.hpp"
#include "base/utf8.hpp"
#include "capi/message.hpp"
#include "capi/surroundings.hpp"
#include "engine/engine.hpp"
#include "transfer_engine_c.h"
#include "wire/address.hpp"

#define MOONPOOL_EXPORT extern "C" __attribute__((visibility("default")))

namespace moonpool::capi {

namespace {

using transport::Direction;
using transport::Slice;
using transport::SliceState;

constexpr int kFailed = -1;
constexpr int kNotRegistered = -3;
constexpr int kOverlapped = -7;
constexpr int kNoPeer = -102;
constexpr int kInvalid = -600;
constexpr int kFreeMs = 10000;  // twice what a peer that hangs takes
constexpr size_t kBatchesMax = 65536;
constexpr size_t kBatchesKept = 4096;  // the last ones, however they ended
constexpr size_t kBatchRequestsMax = 1u << 20;
constexpr auto kSayEvery = std::chrono::seconds(1);

// One submit of a batch. `done`: which of its requests went well, once it has ended.
struct Submitted {
    std::optional<uint64_t> ticket;  // none: there were no bytes to move
    size_t first = 0;
    std::vector<uint64_t> lengths;
    std::vector<bool> done;
    bool ended = false;
};

struct Batch {
    size_t size = 0;
    size_t used = 0;
    std::vector<Submitted> submits;
    bool refused = false;  // a submit was

    // And its owner has heard of it.
    bool ended() const {
        return (refused || !submits.empty()) &&
               std::all_of(submits.begin(), submits.end(), [](const Submitted& one) { return one.ended; });
    }
};

class Handle {
   public:
    explicit Handle(std::shared_ptr<Engine> engine) : engine_(std::move(engine)) {}
    ~Handle() { (void)engine_->close(); }
    Handle(const Handle&) = delete;

    // Engine is thread-safe by itself.
    Engine& engine() { return *engine_; }

    int open(const std::string& name);
    int close_segment(segment_id_t segment);
    batch_id_t allocate(size_t size);
    int free_batch(batch_id_t batch);
    int submit(batch_id_t batch, std::span<const transfer_request_t> requests,
               const std::optional<std::string>& message);
    int status(batch_id_t batch, size_t number, transfer_status_t& status);

    // One sentence a second: a caller that asks in a loop must not fill a disk.
    int say(int code, const std::string& what, const std::string& why);

   private:
    Batch* find(batch_id_t batch) REQUIRES(mutex_);
    int check_room(batch_id_t batch, size_t count) REQUIRES(mutex_);
    Status look(Submitted& submitted) REQUIRES(mutex_);
    void forget_old() REQUIRES(mutex_);

    std::shared_ptr<Engine> engine_;
    Mutex mutex_;  // before say_mutex_
    std::map<batch_id_t, Batch> batches_ GUARDED_BY(mutex_);
    std::map<std::string, uint32_t> peers_ GUARDED_BY(mutex_);
    batch_id_t next_batch_ GUARDED_BY(mutex_) = 1;
    size_t forget_at_ GUARDED_BY(mutex_) = kBatchesKept;  // batches
    Mutex say_mutex_;
    std::chrono::steady_clock::time_point said_ GUARDED_BY(say_mutex_){};
};

void print(const char* what, const char* why) { std::fprintf(stderr, "moonpool: %s: %s\n", what, why); }

// What a function of the API answers: no C++ exception may reach a caller of C.
template <class Body, class Answer>
Answer guarded(const char* what, Answer failed, Body body) noexcept {
    try {
        return body();
    } catch (const std::exception& error) {  // no memory, no threads
        print(what, error.what());
        return failed;
    }
}

int Handle::say(int code, const std::string& what, const std::string& why) {
    MutexLock lock(say_mutex_);
    auto now = std::chrono::steady_clock::now();
    if (now - said_ >= kSayEvery) {
        said_ = now;
        print(what.c_str(), why.c_str());
    }
    return code;
}

int Handle::open(const std::string& name) {
    std::optional<uint32_t> known;
    {
        MutexLock lock(mutex_);
        if (auto found = peers_.find(name); found != peers_.end()) known = found->second;
    }
    if (known) {
        // Asked of the peer itself: where its process has gone, the segment is closed and opened anew.
        if (engine_->segment(*known)) return static_cast<int>(*known);
        MutexLock lock(mutex_);  // another process is there by now, or none
        if (auto found = peers_.find(name); found != peers_.end() && found->second == *known) {
            (void)engine_->close_segment(*known);
            peers_.erase(found);
        }
    }
    Result<uint32_t> opened = engine_->open(name);
    if (!opened) return say(kNoPeer, "openSegment", opened.error().text);
    MutexLock lock(mutex_);
    auto [place, first] = peers_.try_emplace(name, *opened);
    if (!first) (void)engine_->close_segment(*opened);  // another thread was faster
    return static_cast<int>(place->second);
}

int Handle::close_segment(segment_id_t segment) {
    MutexLock lock(mutex_);
    std::erase_if(peers_, [&](const auto& peer) { return peer.second == static_cast<uint32_t>(segment); });
    Status closed = engine_->close_segment(static_cast<uint32_t>(segment));
    return closed ? 0 : say(kInvalid, "closeSegment", closed.error().text);
}

batch_id_t Handle::allocate(size_t size) {
    MutexLock lock(mutex_);
    // At a number that doubles: what a caller never frees is looked through now and then, not with every
    // batch.
    if (batches_.size() >= forget_at_) forget_old();
    // Bounded, since callers are known that free no batch whose transfer failed.
    if (size == 0 || size > kBatchRequestsMax || batches_.size() >= kBatchesMax) {
        say(kInvalid, "allocateBatchID",
            "a batch has 1 to " + std::to_string(kBatchRequestsMax) + " requests, and there are at most " +
                std::to_string(kBatchesMax) + " batches");
        return INVALID_BATCH;
    }
    batches_[next_batch_].size = size;
    return next_batch_++;
}

void Handle::forget_old() {
    std::erase_if(batches_, [next = next_batch_](const auto& one) {
        return one.first + kBatchesKept < next && one.second.ended();
    });
    forget_at_ = std::max(kBatchesKept, 2 * batches_.size());
}

Batch* Handle::find(batch_id_t batch) {
    auto found = batches_.find(batch);
    return found == batches_.end() ? nullptr : &found->second;
}

int Handle::free_batch(batch_id_t batch) {
    MutexLock lock(mutex_);
    auto freed = batches_.extract(batch);
    if (freed.empty()) return say(kInvalid, "freeBatchID", "there is no such batch");
    lock.unlock();  // what still runs takes up to a second to end, and others must not wait for it
    bool all_over = true;
    for (Submitted& one : freed.mapped().submits) {
        // Cancels what still runs, so that no byte moves for a batch that its owner has freed.
        if (!one.ticket || one.ended) continue;
        Result<bool> over = engine_->end(*one.ticket, kFreeMs);
        if (over && !*over) {
            all_over = false;
            continue;
        }
        (void)engine_->release(*one.ticket);
        one.ended = true;
        one.done.assign(one.lengths.size(), false);
    }
    if (all_over) return 0;
    lock.lock();
    batches_.insert(std::move(freed));
    return say(kFailed, "freeBatchID", "a card still makes copies of the batch's transfers; free it later");
}

// Looked at before the requests are: a count that is no batch's may be no array's either.
int Handle::check_room(batch_id_t batch, size_t count) {
    Batch* found = find(batch);
    if (found == nullptr) return say(kInvalid, "submitTransfer", "there is no such batch");
    if (count > found->size - found->used) {
        return say(kInvalid, "submitTransfer", "the batch has no room for so many requests");
    }
    return 0;
}

int Handle::submit(batch_id_t batch, std::span<const transfer_request_t> requests,
                   const std::optional<std::string>& message) {
    MutexLock lock(mutex_);
    if (int wrong = check_room(batch, requests.size())) return wrong;
    std::vector<Slice> slices;
    std::vector<uint32_t> segments;
    Submitted submitted;
    for (const transfer_request_t& one : requests) {
        if (one.opcode != OPCODE_READ && one.opcode != OPCODE_WRITE) {
            return say(kInvalid, "submitTransfer", "an opcode is 0 or 1, not " + std::to_string(one.opcode));
        }
        submitted.lengths.push_back(one.length);
        // Done without a slice. The lengths tell later which request had one.
        if (one.length == 0) continue;
        segments.push_back(static_cast<uint32_t>(one.target_id));
        slices.push_back({reinterpret_cast<uint64_t>(one.source), one.target_offset, one.length,
                          one.opcode == OPCODE_READ ? Direction::kRead : Direction::kWrite});
    }
    if (slices.empty() && message && !requests.empty()) {
        lock.unlock();  // a peer that hangs is waited for
        Status told = engine_->notify(static_cast<uint32_t>(requests.front().target_id), *message);
        lock.lock();
        if (int wrong = check_room(batch, requests.size())) return wrong;  // freed, or filled, meanwhile
        if (!told) {
            // A batch with nothing but a refused submit can be forgotten, too.
            find(batch)->refused = true;
            return say(kFailed, "submitTransferWithNotify", told.error().text);
        }
    }
    Batch* found = find(batch);
    found->submits.reserve(found->submits.size() + 1);  // nothing may fail once it runs
    found->refused = true;
    if (!slices.empty()) {
        TransferRequest request;
        request.segments = segments;
        request.slices = slices;
        if (message) request.notify = *message;
        Result<uint64_t> ticket = engine_->submit(request);
        if (!ticket) return say(kFailed, "submitTransfer", ticket.error().text);
        submitted.ticket = *ticket;
    }
    found->refused = false;
    submitted.first = found->used;
    submitted.ended = !submitted.ticket;
    // Requests without bytes are done at once.
    submitted.done.assign(submitted.ended ? submitted.lengths.size() : 0, true);
    found->used += requests.size();
    found->submits.push_back(std::move(submitted));
    return 0;
}

// Whether it has ended, and how: asked of the engine until it has.
Status Handle::look(Submitted& submitted) {
    if (submitted.ended) return success();
    Result<bool> ended = engine_->is_over(*submitted.ticket);
    if (!ended) return ended.error();
    if (!*ended) return success();
    Result<TicketStatus> status = engine_->status(*submitted.ticket);
    if (!status) return status.error();
    if (status->state != TicketState::kDone) say(0, "a transfer failed", status->failure.error.text);
    std::vector<bool> done;
    // Slices are in the order of the requests that had bytes.
    auto slice = status->slices.begin();
    for (uint64_t length : submitted.lengths) {
        done.push_back(length == 0 || *slice++ == SliceState::kDone);
    }
    submitted.done = std::move(done);
    submitted.ended = true;
    // The ticket is not needed any more; what became of each request is kept here until the batch is
    // freed.
    return engine_->release(*submitted.ticket);
}

int Handle::status(batch_id_t batch, size_t number, transfer_status_t& status) {
    MutexLock lock(mutex_);
    status = {STATUS_FAILED, 0};
    Batch* found = find(batch);
    if (found == nullptr) return say(kInvalid, "getTransferStatus", "there is no such batch");
    for (Submitted& one : found->submits) {
        if (number < one.first || number - one.first >= one.lengths.size()) continue;
        if (Status looked = look(one); !looked) return say(kFailed, "getTransferStatus", looked.error().text);
        if (!one.ended) {
            status.status = STATUS_PENDING;
            return 0;
        }
        size_t place = number - one.first;
        bool done = one.done[place];
        status = {done ? STATUS_COMPLETED : STATUS_FAILED, done ? one.lengths[place] : 0};
        return 0;
    }
    return say(kInvalid, "getTransferStatus",
               "the batch has no request " + std::to_string(number) + " that was submitted");
}

Handle* handle_of(transfer_engine_t engine) { return static_cast<Handle*>(engine); }

// "host:port" to listen at: the name, with the port given beside it where it has none.
std::string listen_address(const std::string& name, uint64_t port) {
    if (name.starts_with('[') ? name.find("]:") != std::string::npos
                              : std::count(name.begin(), name.end(), ':') == 1) {
        return name;
    }
    // An IPv6 address has colons of its own, and wants brackets before a port.
    bool bare = name.find(':') != std::string::npos && !name.starts_with('[');
    return (bare ? "[" + name + "]" : name) + ":" + std::to_string(port);
}

Result<std::shared_ptr<Engine>> create(const std::string& metadata, const std::string& name,
                                       const std::string& ip, uint64_t port) {
    if (metadata != "P2PHANDSHAKE") {
        return Error{Code::kInvalidArgument, "metadata = \"" + metadata +
                                                 "\": engines find each other by address; pass P2PHANDSHAKE"};
    }
    std::string place = !name.empty() ? name : !ip.empty() ? ip : "127.0.0.1";
    if (port > 65535) return Error{Code::kInvalidArgument, "there is no port " + std::to_string(port)};
    std::string address = listen_address(place, port);
    Result<Token> token = cluster_token();
    if (!token) return token.error();
    if (!token->chosen && !is_loopback(host_of(address))) {
        return Error{Code::kAuth, address +
                                      " can be reached from other hosts, which needs a cluster token: set "
                                      "MOONPOOL_CLUSTER_TOKEN_FILE, or use 127.0.0.1"};
    }
    Result<DataTls> tls = data_tls();
    if (!tls) return tls.error();
    EngineOptions options;
    std::array<char, 256> host{};
    // Peers see messages under this name.
    (void)::gethostname(host.data(), host.size() - 1);
    options.name = std::string(host.data()) + "-" + std::to_string(::getpid());
    options.listen = {address};
    options.token = token->secrets;
    options.tls_server = tls->server;
    options.tls_client = tls->client;
    return Engine::create(options);
}

char* copied(const std::string& text) { return ::strdup(text.c_str()); }

std::string packed(const notify_msg_t& message) {
    return pack_message(message.name == nullptr ? "" : message.name,
                        message.msg == nullptr ? "" : message.msg);
}

}  // namespace

}  // namespace moonpool::capi

using namespace moonpool;
using namespace moonpool::capi;

namespace {

std::string given(const char* text) { return text == nullptr ? "" : text; }

}  // namespace

MOONPOOL_EXPORT transfer_engine_t createTransferEngine(const char* metadata, const char* local_server_name,
                                                       const char* ip, uint64_t port, int) {
    return guarded("createTransferEngine", transfer_engine_t{}, [&]() -> transfer_engine_t {
        auto engine = create(given(metadata), given(local_server_name), given(ip), port);
        if (engine) return new Handle(std::move(*engine));
        print("createTransferEngine", engine.error().text.c_str());
        return nullptr;
    });
}

MOONPOOL_EXPORT void destroyTransferEngine(transfer_engine_t engine) {
    (void)guarded("destroyTransferEngine", 0, [&] {
        delete handle_of(engine);
        return 0;
    });
}

MOONPOOL_EXPORT int getLocalIpAndPort(transfer_engine_t engine, char* buffer, size_t length) {
    return guarded("getLocalIpAndPort", kFailed, [&] {
        if (engine == nullptr || buffer == nullptr) return kInvalid;
        const std::string& address = handle_of(engine)->engine().addresses().front();
        if (address.size() >= length) return handle_of(engine)->say(kInvalid, "getLocalIpAndPort", "no room");
        std::memcpy(buffer, address.c_str(), address.size() + 1);
        return 0;
    });
}

MOONPOOL_EXPORT int registerLocalMemory(transfer_engine_t engine, void* address, size_t length,
                                        const char* location, int) {
    return guarded("registerLocalMemory", kFailed, [&] {
        if (engine == nullptr) return kInvalid;
        Handle& handle = *handle_of(engine);
        uint64_t start = reinterpret_cast<uint64_t>(address);
        if (Result<MemoryRef> memory = handle.engine().describe(start, length); !memory) {
            return handle.say(kInvalid, "registerLocalMemory", memory.error().text);
        }
        std::string place = given(location);
        if (!is_utf8(place)) {
            return handle.say(kInvalid, "registerLocalMemory", "the location is not UTF-8");
        }
        Status done = handle.engine().register_region(start, length, place == "*" ? "" : place);
        return done ? 0 : handle.say(kOverlapped, "registerLocalMemory", done.error().text);
    });
}

MOONPOOL_EXPORT int unregisterLocalMemory(transfer_engine_t engine, void* address) {
    return guarded("unregisterLocalMemory", kFailed, [&] {
        if (engine == nullptr) return kInvalid;
        Status done = handle_of(engine)->engine().deregister_region(reinterpret_cast<uint64_t>(address));
        return done ? 0 : handle_of(engine)->say(kNotRegistered, "unregisterLocalMemory", done.error().text);
    });
}

MOONPOOL_EXPORT segment_id_t openSegment(transfer_engine_t engine, const char* segment_name) {
    return guarded("openSegment", kFailed, [&] {
        return engine == nullptr || segment_name == nullptr ? kInvalid
                                                            : handle_of(engine)->open(segment_name);
    });
}

MOONPOOL_EXPORT int closeSegment(transfer_engine_t engine, segment_id_t segment) {
    return guarded("closeSegment", kFailed,
                   [&] { return engine == nullptr ? kInvalid : handle_of(engine)->close_segment(segment); });
}

MOONPOOL_EXPORT batch_id_t allocateBatchID(transfer_engine_t engine, size_t size) {
    return guarded("allocateBatchID", batch_id_t{INVALID_BATCH},
                   [&] { return engine == nullptr ? INVALID_BATCH : handle_of(engine)->allocate(size); });
}

MOONPOOL_EXPORT int freeBatchID(transfer_engine_t engine, batch_id_t batch) {
    return guarded("freeBatchID", kFailed,
                   [&] { return engine == nullptr ? kInvalid : handle_of(engine)->free_batch(batch); });
}

MOONPOOL_EXPORT int submitTransfer(transfer_engine_t engine, batch_id_t batch, transfer_request_t* requests,
                                   size_t count) {
    return guarded("submitTransfer", kFailed, [&] {
        if (engine == nullptr || (requests == nullptr && count != 0)) return kInvalid;
        return handle_of(engine)->submit(batch, {requests, count}, std::nullopt);
    });
}

MOONPOOL_EXPORT int submitTransferWithNotify(transfer_engine_t engine, batch_id_t batch,
                                             transfer_request_t* requests, size_t count,
                                             notify_msg_t message) {
    return guarded("submitTransferWithNotify", kFailed, [&] {
        if (engine == nullptr || (requests == nullptr && count != 0)) return kInvalid;
        return handle_of(engine)->submit(batch, {requests, count}, packed(message));
    });
}

MOONPOOL_EXPORT int getTransferStatus(transfer_engine_t engine, batch_id_t batch, size_t number,
                                      transfer_status_t* status) {
    return guarded("getTransferStatus", kFailed, [&] {
        if (engine == nullptr || status == nullptr) return kInvalid;
        return handle_of(engine)->status(batch, number, *status);
    });
}

MOONPOOL_EXPORT int genNotifyInEngine(transfer_engine_t engine, segment_id_t target, notify_msg_t message) {
    return guarded("genNotifyInEngine", kFailed, [&] {
        if (engine == nullptr) return kInvalid;
        Status told = handle_of(engine)->engine().notify(static_cast<uint32_t>(target), packed(message));
        return told ? 0 : handle_of(engine)->say(kFailed, "genNotifyInEngine", told.error().text);
    });
}

MOONPOOL_EXPORT notify_msg_t* getNotifsFromEngine(transfer_engine_t engine, int* size) {
    if (size == nullptr) return nullptr;
    *size = kFailed;
    return guarded("getNotifsFromEngine", static_cast<notify_msg_t*>(nullptr), [&]() -> notify_msg_t* {
        if (engine == nullptr) {
            *size = kInvalid;
            return nullptr;
        }
        auto arrived = handle_of(engine)->engine().notifications();
        if (!arrived) {
            handle_of(engine)->say(kFailed, "getNotifsFromEngine", arrived.error().text);
            return nullptr;
        }
        int count = static_cast<int>(arrived->size());
        notify_msg_t* messages = nullptr;
        if (count != 0) {
            messages = static_cast<notify_msg_t*>(std::calloc(arrived->size(), sizeof(notify_msg_t)));
            if (messages == nullptr) throw std::bad_alloc();
        }
        for (int i = 0; i < count; ++i) {
            auto [name, text] = unpack_message((*arrived)[static_cast<size_t>(i)].first,
                                               (*arrived)[static_cast<size_t>(i)].second);
            messages[i] = {copied(name), copied(text)};
            if (messages[i].name == nullptr || messages[i].msg == nullptr) {
                freeNotifsMsgBuf(messages, i + 1);
                throw std::bad_alloc();
            }
        }
        *size = count;
        return messages;
    });
}

MOONPOOL_EXPORT void freeNotifsMsgBuf(notify_msg_t* messages, int size) {
    for (int i = 0; messages != nullptr && i < size; ++i) {
        std::free(messages[i].name);
        std::free(messages[i].msg);
    }
    std::free(messages);
}
