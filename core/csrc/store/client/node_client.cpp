// NodeClient's life and its verbs that move bytes: put, get, load, remove. node_client_lookup.cpp has
// those that ask.
//
// Threads: any. mutex_ is held to find or open the session, never while a question is asked or bytes move:
// a call keeps its own reference to the session, and fails by itself when that is lost.
//
// What holds between two calls: session_ is null or the newest session; one that is dead is replaced by
// the next call, at most once per back-off step, so that a call to a node which is gone costs no dialling
// most of the time. A pin belongs to the session that took it: what was pinned is read over that session,
// also after another one has been opened. Once that one is dead, what lies in memory that is mapped here is
// read as before; anything else is a miss.
//
// In a child of fork() no lock is taken: the thread that holds it may exist in the parent only.
#include "store/client/node_client.hpp"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <map>
#include <numeric>

#include "base/clock.hpp"
#include "memory/copier.hpp"
#include "memory/kind_name.hpp"
#include "store/client/client_frames.hpp"

namespace moonpool {

namespace {

constexpr std::chrono::milliseconds kBackoffMin{250};
constexpr std::chrono::milliseconds kBackoffMax{2000};

// A load's parts are made for so many objects at a time: the addresses of many blocks' rows are many.
constexpr size_t kLoadAtOnce = 256;

Status check_memory(const BlockPath& path, std::span<const MemoryRef> parts) {
    for (const MemoryRef& part : parts) {
        if (reachable_by_cpu(part.kind) || path.moves(part.kind)) continue;
        return Error{Code::kInvalidArgument,
                     "the path " + path.route() + " moves no " + kind_name(part.kind) + " memory"};
    }
    return success();
}

// What get() says of an object: its size, or an error; of a tolerant one, kDamagedRead in place of the error.
Result<int64_t> size_read(const GetItem& item, NamedRead::Outcome outcome, uint64_t size, bool tolerant) {
    bool damaged = outcome == NamedRead::kDamaged;
    if (outcome == NamedRead::kTooSmall && !tolerant) return too_small(item.name, total(item.parts), size);
    if (damaged && !tolerant) return corrupt(item.name);
    return damaged ? kDamagedRead : static_cast<int64_t>(size);
}

}  // namespace

PartTable::PartTable(std::vector<std::vector<StridedRow>> columns) : columns_(std::move(columns)) {
    for (const auto& rows : columns_) {
        uint64_t bytes = 0;
        for (const StridedRow& row : rows) bytes += row.length;
        bytes_.push_back(bytes);
    }
}

void PartTable::append_parts(size_t column, uint64_t index, std::vector<MemoryRef>& out) const {
    const size_t first = out.size();
    for (const StridedRow& row : columns_[column]) {
        // Rows that follow each other in memory are one part: a copy of a few large parts is faster than
        // of many small ones.
        uint64_t address = row.address + index * row.stride;
        if (out.size() != first && out.back().address + out.back().bytes == address) {
            out.back().bytes += row.length;
        } else {
            out.push_back({.address = address, .bytes = row.length});
        }
    }
}

void Pin::release() {
    // Once, though release() and the destructor may meet.
    uint64_t id = id_.exchange(0);
    if (id == 0) return;
    session_->post(Kind::kRelease, [&](Writer& w) { w.number(id); });
}

NodeClient::NodeClient(ClientOptions options) : options_(std::move(options)) {
    MutexLock lock(mutex_);
    take_salt("");
}

void NodeClient::take_salt(const std::string& salt) {
    const KeysOf* now = keys_of_.load(std::memory_order_relaxed);
    if (now != nullptr && now->salt == salt) return;
    Secrets manifests = options_.token;
    if (!salt.empty()) manifests = Secrets(("moonpool manifest " + salt).c_str());
    all_keys_of_.push_back(std::make_unique<const KeysOf>(
        KeysOf{salt, KeyHasher(options_.tenant, options_.name_space, options_.fingerprint, salt),
               std::move(manifests)}));
    keys_of_.store(all_keys_of_.back().get(), std::memory_order_release);
}

Status NodeClient::check_may_write() {
    if (fork_.in_child()) return success();  // the call itself says so; a lock may be the parent's
    std::shared_ptr<Session> session = current();
    return session == nullptr ? success() : session->check_may_write();
}

Status NodeClient::connect() {
    Result<std::shared_ptr<Session>> s = session();
    return s ? success() : Status(s.error());
}

bool NodeClient::connected() {
    if (fork_.in_child()) return false;
    MutexLock lock(mutex_);
    return session_ != nullptr && session_->check_alive();
}

void NodeClient::close() {
    closed_ = true;
    if (fork_.in_child()) return;  // the mutex may be held by a thread that only the parent has
    MutexLock lock(mutex_);
    if (session_ != nullptr) session_->retire();
    session_.reset();
}

Status NodeClient::check_open() const {
    if (fork_.in_child()) {
        return Error{Code::kForked, "this handle belongs to the parent process; open a new one after fork"};
    }
    if (closed_) return Error{Code::kClosed, "this store is closed"};
    return success();
}

Result<std::shared_ptr<Session>> NodeClient::session() {
    if (Status status = check_open(); !status) return status.error();
    SessionLock lock(*this);
    if (closed_) return Error{Code::kClosed, "this store is closed"};  // while this call waited
    // Looked at before each call: a node that was restarted between two calls is dialled at once, and the
    // caller notices nothing.
    forget_dead_session();
    if (session_ != nullptr && !has_new_key() && !session_->superseded()) return session_;
    auto now = std::chrono::steady_clock::now();
    if (session_ == nullptr && now < retry_at_) return last_error_;
    if (WaitBudget::within(1) <= 0) {
        if (session_ != nullptr) return session_;
        return Error{Code::kTimeout, "others left no time of this call to connect"};
    }
    if (!options_.token.empty()) proved_ = options_.token.now()->front();
    Result<std::shared_ptr<Session>> opened = Session::open(options_, &closed_);
    if (closed_) return Error{Code::kClosed, "this store is closed"};  // while it was opened
    // By the former key, as long as that stands; or with the index of the process before.
    if (!opened && session_ != nullptr) return session_;
    if (!opened) {
        // While the node is away other calls fail at once with this error, rather than each wait for the
        // same.
        backoff_ = std::clamp(backoff_ * 2, kBackoffMin, kBackoffMax);
        retry_at_ = std::chrono::steady_clock::now() + backoff_;
        last_error_ = opened.error();
        return last_error_;
    }
    backoff_ = std::chrono::milliseconds{0};
    if (session_ != nullptr) {  // what was pinned over it is read over it
        session_->retire();
        lost_.push_back(session_);
    }
    session_ = *opened;
    take_salt(session_->salt());
    MutexLock newest_lock(newest_mutex_);
    newest_ = session_;
    return session_;
}

// A tenant's key that replaces another is proved over a new connection, before the other one is withdrawn and
// ends the connections that proved it. Looked at once a second.
bool NodeClient::has_new_key() {
    constexpr uint64_t kLookMs = 1000;
    if (!session_->knows(kFeatureTenantKey)) return false;
    const uint64_t now = now_ms();
    if (now < look_at_key_ms_) return false;
    look_at_key_ms_ = now + kLookMs;
    return options_.token.now()->front() != proved_;
}

void NodeClient::forget_dead_session() {
    if (session_ == nullptr || session_->check_alive()) return;
    std::erase_if(lost_, [](const std::weak_ptr<Session>& session) { return session.expired(); });
    lost_.push_back(session_);
    session_.reset();
}

Result<std::shared_ptr<Session>> NodeClient::session_of(const Incarnation& incarnation) {
    if (Status status = check_open(); !status) return status.error();
    {
        SessionLock lock(*this);
        forget_dead_session();
        for (const std::weak_ptr<Session>& session : lost_) {
            std::shared_ptr<Session> held = session.lock();
            if (held != nullptr && held->incarnation() == incarnation && !held->superseded()) return held;
        }
    }
    Result<std::shared_ptr<Session>> opened = session();
    // Slots and offsets are those of one life of a node. In another one they name other objects.
    if (opened && (*opened)->incarnation() != incarnation) {
        return Error{Code::kUnavailable, "the node was restarted since these objects were pinned"};
    }
    return opened;
}

Status NodeClient::check_names(const Session& session, std::span<const std::string_view> names) const {
    for (std::string_view name : names) {
        if (name.empty()) return Error{Code::kInvalidArgument, "a key must have at least one byte"};
        if (name.size() > session.key_bytes_max()) {
            return Error{Code::kInvalidArgument,
                         "a key of " + std::to_string(name.size()) + " bytes is over the limit of " +
                             std::to_string(session.key_bytes_max()) + " (node.key_bytes_max)"};
        }
    }
    return success();
}

Status NodeClient::check_names(const Session& session, const PutItem& item) const {
    std::string_view names[3] = {item.name, item.parent.empty() ? item.name : item.parent,
                                 item.group.empty() ? item.name : item.group};
    return check_names(session, names);
}

Status NodeClient::check_names(std::span<const std::string_view> names) {
    Result<std::shared_ptr<Session>> opened = session();
    return opened ? check_names(**opened, names) : Status(opened.error());
}

Status NodeClient::check_names(std::span<const PutItem> items) {
    Result<std::shared_ptr<Session>> opened = session();
    if (!opened) return opened.error();
    for (const PutItem& item : items) {
        if (Status status = check_names(**opened, item); !status) return status;
    }
    return success();
}

Status NodeClient::check_item(const Session& session, const PutItem& item) const {
    if (Status status = check_names(session, item); !status) return status;
    if (Status status = check_memory(session.path(), item.parts); !status) return status;
    if (item.parts.size() <= session.parts_max()) return success();
    return Error{Code::kInvalidArgument, "an object of " + std::to_string(item.parts.size()) +
                                             " parts is over the limit of " +
                                             std::to_string(session.parts_max()) + " (node.parts_max)"};
}

bool NodeClient::relays() {
    if (fork_.in_child()) return false;
    std::shared_ptr<Session> newest;
    {
        MutexLock lock(newest_mutex_);
        newest = newest_.lock();
    }
    if (newest == nullptr || !newest->alive()) return false;
    const IndexReader* index = newest->path().index();
    return index != nullptr && index->relays();
}

Result<PutReport> NodeClient::put(std::span<const PutItem> items, PutHow how) {
    Result<std::shared_ptr<Session>> opened = session();
    if (!opened) return opened.error();
    Session& s = **opened;
    if (Status status = s.check_may_write(); !status) return status.error();
    for (const PutItem& item : items) {
        if (Status status = check_item(s, item); !status) return status.error();
    }
    if (how.ordered && !has_versions(s)) {
        return Error{Code::kUnavailable,
                     s.peer() + " is of an older release, which compares no copy with the order of removals"};
    }
    const IndexReader* index = how.anew ? s.path().index() : nullptr;
    if (index != nullptr) {
        RangeVersions applied(index->ranges());
        for (uint32_t range = 0; range < applied.count(); ++range)
            applied.raise(range, index->applied(range));
        how.known.raise(applied);
    }
    how.hasher = &hasher();
    // All items are judged before the first byte is copied: a call is refused as a whole or not at all.
    Result<PutReport> report = s.path().put(items, how);
    if (report) report->known = how.known;
    if (report && !report->older.empty()) put_after_removals(s, items, how, *report);
    return report;
}

// The node knows of removals that this process had not heard of when the call began. Items without a version
// of their own begin anew, and come after these.
void NodeClient::put_after_removals(Session& s, std::span<const PutItem> items, const PutHow& how,
                                    PutReport& report) {
    std::vector<PutItem> again;
    std::vector<size_t> place;
    for (auto [i, newest] : report.older) {
        if (items[i].version != kNoVersion) continue;
        if (!how.anew) {
            report.outcomes[i] = PutOutcome::kRefused;
            report.refusal = "the key was removed while it was put";
            continue;
        }
        again.push_back(items[i]);
        again.back().version = newest;
        report.known.raise((*how.hasher)(items[i].name), newest);
        place.push_back(i);
    }
    report.older.clear();
    if (again.empty()) return;
    Result<PutReport> put = s.path().put(again, how);
    for (size_t k = 0; k < place.size(); ++k) {
        PutOutcome outcome = put ? put->outcomes[k] : PutOutcome::kOlder;
        if (outcome == PutOutcome::kOlder) {
            outcome = PutOutcome::kRefused;
            report.refusal = put ? "the key was removed while it was put" : put.error().text;
        }
        report.outcomes[place[k]] = outcome;
    }
    if (!put) return;
    report.stored_bytes += put->stored_bytes;
    if (!put->refusal.empty()) report.refusal = put->refusal;
    for (size_t k : put->manifest_sized) report.manifest_sized.push_back(place[k]);
}

Result<std::vector<int64_t>> NodeClient::get(std::span<const GetItem> items, bool verify, bool tolerant) {
    Result<std::shared_ptr<Session>> opened = session();
    if (!opened) return opened.error();
    Session& s = **opened;
    std::vector<NamedRead> reads;
    reads.reserve(items.size());
    for (const GetItem& item : items) {
        if (Status status = check_names(s, {&item.name, 1}); !status) return status.error();
        if (Status status = check_memory(s.path(), item.parts); !status) return status.error();
        reads.push_back({item.name, item.parts});
    }
    if (Status status = s.path().read(reads, verify); !status) return status.error();
    std::vector<int64_t> sizes(items.size(), kMiss);
    std::vector<size_t> unknown;
    for (size_t i = 0; i < items.size(); ++i) {
        const NamedRead& read = reads[i];
        if (read.outcome == NamedRead::kAskPin) unknown.push_back(i);
        if (read.outcome == NamedRead::kAskPin || read.outcome == NamedRead::kMiss) continue;
        Result<int64_t> size = size_read(items[i], read.outcome, read.size, tolerant);
        if (!size) return size.error();
        sizes[i] = *size;
    }
    // What the path could not say without the node, for example objects that are on the SSD: the pin loads
    // them into memory first.
    const size_t step = s.path().pins_at_once();
    std::vector<GetItem> asked;
    for (size_t begin = 0; begin < unknown.size(); begin += asked.size()) {
        asked.clear();
        for (size_t k = begin; k < unknown.size() && asked.size() < step; ++k) {
            asked.push_back(items[unknown[k]]);
        }
        Result<std::vector<int64_t>> found = pin_and_get(asked, verify, tolerant);
        if (!found) return found.error();
        for (size_t k = 0; k < asked.size(); ++k) sizes[unknown[begin + k]] = (*found)[k];
    }
    return sizes;
}

Result<std::vector<int64_t>> NodeClient::pin_and_get(std::span<const GetItem> items, bool verify,
                                                     bool tolerant) {
    std::vector<std::string_view> names;
    for (const GetItem& item : items) names.push_back(item.name);
    Result<Pinned> pinned = pin(names);
    if (!pinned) return pinned.error();
    std::vector<size_t> places(items.size());
    std::iota(places.begin(), places.end(), 0);
    return get_pinned(*pinned, places, items, verify, tolerant);
}

Status NodeClient::verify(const Pinned& pinned, std::span<const size_t> places,
                          std::span<const std::string_view> names) {
    for (size_t i = 0; i < places.size(); ++i) {
        if (places[i] == kNotPinned || !pinned.has(places[i])) continue;
        const Descriptor& d = pinned.descriptors[places[i]];
        const std::byte* bytes = pinned.pin_of(places[i])->session()->path().in_place(d);
        if (bytes == nullptr) continue;  // compared when they are read
        uint32_t crc = 0;
        if (Status summed = sum(MemoryRef::host(bytes, d.size), crc); !summed) return summed;
        if (crc != d.crc) return corrupt(names[i]);
    }
    return success();
}

// From the pins' own sessions: the node may have been replaced since the index was looked at.
Result<std::vector<int64_t>> NodeClient::get_pinned(const Pinned& pinned, std::span<const size_t> places,
                                                    std::span<const GetItem> items, bool verify,
                                                    bool tolerant) {
    std::vector<int64_t> sizes(items.size(), kMiss);
    // One call of the path for each session, so that its objects go in few frames.
    std::map<Session*, std::vector<size_t>> by_session;
    for (size_t i = 0; i < items.size(); ++i) {
        if (places[i] == kNotPinned || !pinned.has(places[i])) continue;
        uint64_t size = pinned.descriptors[places[i]].size;
        Session& s = *pinned.pin_of(places[i])->session();
        if (Status status = check_memory(s.path(), items[i].parts); !status) return status.error();
        if (total(items[i].parts) >= size) {
            by_session[&s].push_back(i);
            continue;
        }
        Result<int64_t> told = size_read(items[i], NamedRead::kTooSmall, size, tolerant);
        if (!told) return told.error();
        sizes[i] = *told;
    }
    for (auto& [s, which] : by_session) {
        std::vector<PinnedRead> reads;
        reads.reserve(which.size());
        for (size_t i : which) reads.push_back({pinned.descriptors[places[i]], items[i].parts});
        Status status = s->path().read(reads, PinHolder::kThisProcess, verify);
        if (!status) return status.error();
        for (size_t k = 0; k < which.size(); ++k) {
            // A miss: the pin was lost with its session.
            if (reads[k].outcome == PinnedRead::kGone) continue;
            auto outcome = reads[k].outcome == PinnedRead::kRead ? NamedRead::kRead : NamedRead::kDamaged;
            Result<int64_t> size = size_read(items[which[k]], outcome, reads[k].descriptor.size, tolerant);
            if (!size) return size.error();
            sizes[which[k]] = *size;
        }
    }
    return sizes;
}

Result<std::vector<uint8_t>> NodeClient::remove(std::span<const std::string_view> names,
                                                std::vector<RemovedManifest>& manifests,
                                                std::span<const uint64_t> generations) {
    return remove(names, generations.empty() ? RemoveBy::kName : RemoveBy::kGeneration, generations,
                  manifests);
}

Result<std::vector<uint8_t>> NodeClient::remove_older(std::span<const std::string_view> names,
                                                      std::span<const Version> versions,
                                                      std::vector<RemovedManifest>& manifests) {
    return remove(names, versions.empty() ? RemoveBy::kName : RemoveBy::kVersion, versions, manifests);
}

Result<std::vector<uint8_t>> NodeClient::remove(std::span<const std::string_view> names, RemoveBy by,
                                                std::span<const uint64_t> numbers,
                                                std::vector<RemovedManifest>& manifests) {
    Result<std::shared_ptr<Session>> opened = session();
    if (!opened) return opened.error();
    Session& s = **opened;
    if (Status status = s.check_may_write(); !status) return status.error();
    if (Status status = check_names(s, names); !status) return status.error();
    // To an older node a frame with numbers behind the names breaks the format.
    if (by == RemoveBy::kGeneration && !s.knows(kFeatureRemoveOne)) {
        return Error{Code::kUnavailable,
                     s.peer() + " is of an older release, which removes no one generation"};
    }
    if (by == RemoveBy::kVersion && !s.knows(kFeatureVersions)) by = RemoveBy::kName;
    std::vector<uint8_t> removed;
    auto ask = [&](size_t begin, size_t end) -> Result<bool> {
        Status sent = s.call(
            Kind::kRemove,
            [&](Writer& w) {
                w.number(s.space());
                auto n = static_cast<uint32_t>(end - begin);
                w.number(by == RemoveBy::kVersion ? n | kRemoveVersions : n);
                write_names(w, names.subspan(begin, end - begin));
                for (size_t i = begin; i < end && by != RemoveBy::kName; ++i) w.number(numbers[i]);
            },
            [&](Reader& r) {
                if (r.number<uint32_t>() != end - begin) return false;
                std::vector<size_t> shown;
                for (size_t i = begin; i < end; ++i) {
                    auto flag = r.number<uint8_t>();
                    // The node hands out what it removes of a manifest's size: only the client can tell
                    // whether it is one, and then removes the stripes.
                    if (flag == kRemovedManifest) shown.push_back(i);
                    removed.push_back(flag != kNotRemoved);
                }
                for (size_t i : shown) {
                    std::string_view bytes = r.bytes(kManifestBytes);
                    if (!r.ok()) return false;
                    RemovedManifest& manifest = manifests.emplace_back();
                    manifest.item = i;
                    std::memcpy(manifest.bytes.data(), bytes.data(), bytes.size());
                }
                return r.done();
            });
        if (!sent) return sent.error();
        return true;
    };
    Status status = in_frames(s, names, 1, ask, by == RemoveBy::kName ? 0 : sizeof(uint64_t));
    if (!status) return status.error();
    return removed;
}

void NodeClient::load(const Incarnation& incarnation, std::span<const Descriptor> descriptors,
                      std::span<const uint32_t> which, const PartTable& table,
                      std::span<const uint32_t> indices, std::span<const uint16_t> columns, bool verify,
                      LoadReport& report) {
    if (which.empty()) return;
    Result<std::shared_ptr<Session>> opened = session_of(incarnation);
    if (!opened) {
        report.error = opened.error().text;
        return;
    }
    load_over(**opened, descriptors, which, table, indices, columns, verify, report);
    if (!(*opened)->superseded()) return;
    // The old index has none of them any more, and says nothing of what is there.
    std::vector<uint32_t> again;
    std::ranges::copy_if(which, std::back_inserter(again), [&](uint32_t i) { return report.ok[i] == 0; });
    if (again.empty()) return;
    opened = session_of(incarnation);
    if (!opened || (*opened)->superseded()) return;
    report.error.clear();
    load_over(**opened, descriptors, again, table, indices, columns, verify, report);
}

void NodeClient::load_over(Session& s, std::span<const Descriptor> descriptors,
                           std::span<const uint32_t> which, const PartTable& table,
                           std::span<const uint32_t> indices, std::span<const uint16_t> columns, bool verify,
                           LoadReport& report) {
    std::vector<MemoryRef> parts;
    std::vector<size_t> ends;  // of each object's parts
    std::vector<PinnedRead> reads;
    std::vector<uint32_t> objects;
    for (size_t begin = 0; begin < which.size(); begin += kLoadAtOnce) {
        parts.clear();
        ends.clear();
        reads.clear();
        objects.clear();
        for (uint32_t i : which.subspan(begin, std::min(kLoadAtOnce, which.size() - begin))) {
            // Blocks of another layout under the same name would be copied to wrong places.
            if (columns[i] >= table.columns() || descriptors[i].size != table.object_bytes(columns[i])) {
                report.error = "a stored object has another size than this engine's blocks";
                continue;
            }
            table.append_parts(columns[i], indices[i], parts);
            ends.push_back(parts.size());
            objects.push_back(i);
        }
        for (size_t k = 0; k < objects.size(); ++k) {
            size_t first = k == 0 ? 0 : ends[k - 1];
            reads.push_back({descriptors[objects[k]], std::span(parts).subspan(first, ends[k] - first)});
        }
        // The scheduler's process holds the pin and may lose it at any time; the path looks after each
        // copy.
        Status status = s.path().read(reads, PinHolder::kAnotherProcess, verify);
        if (!status) {
            report.error = status.error().text;
            break;
        }
        for (size_t k = 0; k < objects.size(); ++k) {
            // One object that failed fails alone: the engine computes its block.
            if (reads[k].outcome == PinnedRead::kRead) {
                report.ok[objects[k]] = 1;
                report.bytes += reads[k].descriptor.size;
            } else {
                report.error = reads[k].outcome == PinnedRead::kGone
                                   ? "a pinned object was removed before it was loaded"
                                   : "the bytes of a stored object do not match their checksum";
            }
        }
    }
    s.flush_reads();
}

}  // namespace moonpool
