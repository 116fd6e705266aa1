#include "store/client/node_client.hpp"

#include <algorithm>
#include <cstring>
#include <map>
#include <numeric>

#include "base/copy.hpp"
#include "base/crc32c.hpp"
#include "store/client/client_frames.hpp"

namespace moonpool {

namespace {

constexpr std::chrono::milliseconds kBackoffMin{250};
constexpr std::chrono::milliseconds kBackoffMax{2000};

void scatter(std::span<const Part> parts, const std::byte* from, uint64_t size) {
    for (const Part& part : parts) {
        uint64_t n = std::min(part.size, size);
        copy(part.data, from, n);
        from += n;
        size -= n;
    }
}

// Copies one range to several. The checksum of what was copied; without `verify` it is taken on trust.
uint32_t copy_out(std::span<const Part> parts, const std::byte* from, uint64_t size, bool verify,
                  uint32_t expected) {
    if (!verify) {
        scatter(parts, from, size);
        return expected;
    }
    uint32_t crc = 0;
    for (const Part& part : parts) {
        uint64_t n = std::min(part.size, size);
        crc = copy_crc32c(crc, part.data, from, n);
        from += n;
        size -= n;
    }
    return crc;
}

uint32_t gather_crc(std::byte* to, std::span<const Part> parts) {
    uint32_t crc = 0;
    for (const Part& part : parts) {
        crc = copy_crc32c(crc, to, part.data, part.size);
        to += part.size;
    }
    return crc;
}

}  // namespace

PartTable::PartTable(std::vector<std::vector<StridedRow>> columns) : columns_(std::move(columns)) {
    for (const auto& rows : columns_) {
        uint64_t bytes = 0;
        for (const StridedRow& row : rows) bytes += row.length;
        bytes_.push_back(bytes);
    }
}

void PartTable::parts(size_t column, uint64_t index, std::vector<Part>& out) const {
    out.clear();
    for (const StridedRow& row : columns_[column]) {
        auto* data = reinterpret_cast<std::byte*>(row.address + index * row.stride);
        if (!out.empty() && out.back().data + out.back().size == data) {
            out.back().size += row.length;
        } else {
            out.push_back(Part{data, row.length});
        }
    }
}

void Pin::release() {
    uint64_t id = id_.exchange(0);
    if (id == 0) return;
    session_->post(Kind::kRelease, [&](Writer& w) { w.number(id); });
}

NodeClient::NodeClient(ClientOptions options)
    : options_(std::move(options)), hash_(options_.tenant, options_.name_space, options_.fingerprint) {}

Status NodeClient::connect() {
    Result<std::shared_ptr<Session>> s = session();
    return s ? success() : Status(s.error());
}

bool NodeClient::connected() {
    if (fork_.in_child()) return false;
    std::lock_guard lock(mutex_);
    return session_ != nullptr && session_->check_alive();
}

void NodeClient::close() {
    closed_ = true;
    if (fork_.in_child()) return;  // the mutex may be held by a thread that only the parent has
    std::lock_guard lock(mutex_);
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
    auto lock = lock_session();
    if (closed_) return Error{Code::kClosed, "this store is closed"};  // while this call waited
    if (session_ != nullptr && session_->check_alive()) return session_;
    session_.reset();
    auto now = std::chrono::steady_clock::now();
    if (now < retry_at_) return last_error_;
    if (Patience::within(1) <= 0) return Error{Code::kTimeout, "others left no time of this call to connect"};
    Result<std::shared_ptr<Session>> opened = Session::open(options_, &closed_);
    if (closed_) return Error{Code::kClosed, "this store is closed"};  // while it was opened
    if (!opened) {
        backoff_ = std::clamp(backoff_ * 2, kBackoffMin, kBackoffMax);
        retry_at_ = std::chrono::steady_clock::now() + backoff_;
        last_error_ = opened.error();
        return last_error_;
    }
    backoff_ = std::chrono::milliseconds{0};
    session_ = *opened;
    return session_;
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

Status NodeClient::check_item(const Session& session, const PutItem& item) const {
    std::string_view names[3] = {item.name, item.parent.empty() ? item.name : item.parent,
                                 item.group.empty() ? item.name : item.group};
    if (Status status = check_names(session, names); !status) return status;
    if (item.parts.size() <= session.parts_max()) return success();
    return Error{Code::kInvalidArgument, "an object of " + std::to_string(item.parts.size()) +
                                             " parts is over the limit of " +
                                             std::to_string(session.parts_max()) + " (node.parts_max)"};
}

Result<PutReport> NodeClient::put(std::span<const PutItem> items, bool replace, bool ack, int timeout_ms) {
    Result<std::shared_ptr<Session>> opened = session();
    if (!opened) return opened.error();
    Session& s = **opened;
    uint64_t ahead = 0;
    if (s.remote()) return put_remote(*opened, items, replace, ack, timeout_ms);
    for (const PutItem& item : items) {
        if (Status status = check_item(s, item); !status) return status.error();
        ahead += Session::room_bytes(total(item.parts));
    }

    PutReport report;
    report.outcomes.assign(items.size(), PutOutcome::kRefused);
    struct Written {
        size_t item;
        Room room;
        uint32_t crc;
    };
    std::vector<Written> written;
    std::shared_ptr<Slab> own;
    FrameBudget budget(s, 64);
    const bool marks = has_marks(s, items);

    auto commit = [&]() -> Status {
        if (written.empty()) return success();
        auto build = [&](Writer& w) {
            commit_head(s, replace, marks, written.size()).write(w);
            for (const Written& x : written) {
                CommitRow{x.room.extent, x.crc, key_of(items[x.item])}.write(w, marks);
            }
        };
        Status status = success();
        if (ack || s.behind()) {
            auto parse = [&](Reader& r) {
                return read_outcomes(r, written.size(), [&](size_t i, PutOutcome outcome) {
                    report.outcomes[written[i].item] = outcome;
                });
            };
            status = s.call(Kind::kCommit, build, parse, timeout_ms);
        } else {
            status = s.send(Kind::kCommit, build);
            for (Written& x : written) report.outcomes[x.item] = PutOutcome::kStored;  // as far as we know
        }
        for (size_t i = written.size(); i-- > 0;) {
            Written& x = written[i];
            PutOutcome outcome = report.outcomes[x.item];
            if (outcome == PutOutcome::kStored) report.stored_bytes += x.room.extent.size;
            if (outcome == PutOutcome::kRefused)
                report.refusal = "the node's object table is full of pinned objects";
            if (status && outcome != PutOutcome::kStored) s.unreserve(x.room);
        }
        written.clear();
        budget.reset();
        return status;
    };

    for (size_t i = 0; i < items.size(); ++i) {
        const PutItem& item = items[i];
        uint64_t size = total(item.parts);
        ahead -= Session::room_bytes(size);
        if (!replace) {
            // Already there: nothing to copy. The node has the last word on what is not in the index.
            if (std::optional<IndexHit> hit = s.index().find(s.space(), hash_(item.name), item.name)) {
                report.outcomes[i] = PutOutcome::kExists;
                if (hit->size == kManifestBytes) report.manifest_sized.push_back(i);
                continue;
            }
        }
        uint64_t item_bytes = CommitRow::bytes(key_of(item), marks);
        if (!budget.fits(item_bytes)) {
            if (Status status = commit(); !status) return status.error();
        }
        std::string why;
        Result<Room> room = s.reserve(size, ahead, own, why, timeout_ms);
        if (room && room->slab == nullptr && size != 0 && !written.empty()) {
            // What this call has written so far cannot be evicted before it is committed.
            if (Status status = commit(); !status) return status.error();
            why.clear();
            room = s.reserve(size, 0, own, why, timeout_ms);
        }
        if (!room) return room.error();
        if (room->slab == nullptr && size != 0) {
            report.refusal = why;
            continue;
        }
        uint32_t crc = size == 0 ? 0 : gather_crc(s.arena() + room->extent.offset, item.parts);
        written.push_back({i, std::move(*room), crc});
        budget.add(item_bytes);
    }
    if (Status status = commit(); !status) return status.error();
    return report;
}

Result<std::vector<int64_t>> NodeClient::get(std::span<const GetItem> items, bool verify, bool tolerant) {
    Result<std::shared_ptr<Session>> opened = session();
    if (!opened) return opened.error();
    Session& s = **opened;
    if (s.remote()) return get_remote(s, items, tolerant);
    std::vector<int64_t> sizes(items.size(), kMiss);
    std::vector<size_t> ask;
    for (size_t i = 0; i < items.size(); ++i) {
        const GetItem& item = items[i];
        if (Status status = check_names(s, {&item.name, 1}); !status) return status.error();
        std::optional<IndexHit> hit = s.index().find(s.space(), hash_(item.name), item.name);
        if (!hit) {
            ask.push_back(i);
            continue;
        }
        uint64_t room = total(item.parts);
        if (room < hit->size && tolerant) {
            sizes[i] = static_cast<int64_t>(hit->size);
            continue;
        }
        if (room < hit->size) return too_small(item.name, room, hit->size);
        const std::byte* from = s.arena() + hit->offset;
        uint32_t crc = copy_out(item.parts, from, hit->size, verify, hit->crc);
        if (!hit->still_valid()) {
            ask.push_back(i);
            continue;
        }
        if (crc != hit->crc && tolerant) {
            sizes[i] = kDamagedRead;
            continue;
        }
        if (crc != hit->crc) return corrupt(item.name);
        s.note_read(hit->slot, hit->size);
        sizes[i] = static_cast<int64_t>(hit->size);
    }
    if (ask.empty()) return sizes;

    std::vector<std::string_view> names;
    std::vector<GetItem> asked;
    for (size_t i : ask) {
        names.push_back(items[i].name);
        asked.push_back(items[i]);
    }
    Result<Pinned> pinned = pin(names);
    if (!pinned) return pinned.error();
    std::vector<size_t> places(asked.size());
    std::iota(places.begin(), places.end(), 0);
    // From the pins' own session: the node may have been replaced since the index was looked at.
    Result<std::vector<int64_t>> found = get_pinned(*pinned, places, asked, verify);
    if (!found) return found.error();
    for (size_t k = 0; k < ask.size(); ++k) sizes[ask[k]] = (*found)[k];
    return sizes;
}

Status NodeClient::verify(const Pinned& pinned, std::span<const size_t> places,
                          std::span<const std::string_view> names) {
    for (size_t i = 0; i < places.size(); ++i) {
        if (places[i] == kNotPinned || !pinned.has(places[i])) continue;
        const Descriptor& d = pinned.descriptors[places[i]];
        const Session& s = *pinned.pin_of(places[i])->session();
        if (s.remote()) continue;  // verified when its bytes arrive
        if (crc32c(0, s.arena() + d.offset, d.size) != d.crc) return corrupt(names[i]);
    }
    return success();
}

Result<std::vector<int64_t>> NodeClient::get_pinned(const Pinned& pinned, std::span<const size_t> places,
                                                    std::span<const GetItem> items, bool verify) {
    std::vector<int64_t> sizes(items.size(), kMiss);
    std::map<Session*, std::vector<size_t>> remote;
    for (size_t i = 0; i < items.size(); ++i) {
        if (places[i] == kNotPinned || !pinned.has(places[i])) continue;
        const Descriptor& d = pinned.descriptors[places[i]];
        Session& s = *pinned.pin_of(places[i])->session();
        uint64_t room = total(items[i].parts);
        if (room < d.size) return too_small(items[i].name, room, d.size);
        if (s.remote()) {
            remote[&s].push_back(i);
            continue;
        }
        if (copy_out(items[i].parts, s.arena() + d.offset, d.size, verify, d.crc) != d.crc) {
            return corrupt(items[i].name);
        }
        s.note_read(d.slot, d.size);
        sizes[i] = static_cast<int64_t>(d.size);
    }
    for (auto& [s, wanted] : remote) {
        std::vector<PinnedRead> reads;
        for (size_t i : wanted) reads.push_back({pinned.descriptors[places[i]], items[i].parts});
        Status status = read_pinned(*s, reads);
        if (!status) return status.error();
        for (size_t k = 0; k < wanted.size(); ++k) {
            if (reads[k].outcome == PinnedRead::kDamaged) return corrupt(items[wanted[k]].name);
            if (reads[k].outcome == PinnedRead::kRead) {
                sizes[wanted[k]] = static_cast<int64_t>(reads[k].descriptor.size);
            }
        }
    }
    return sizes;
}

Result<std::vector<uint8_t>> NodeClient::remove(std::span<const std::string_view> names,
                                                std::vector<RemovedManifest>& manifests,
                                                std::span<const uint64_t> generations) {
    Result<std::shared_ptr<Session>> opened = session();
    if (!opened) return opened.error();
    Session& s = **opened;
    if (Status status = check_names(s, names); !status) return status.error();
    if (!generations.empty() && !s.knows(kFeatureRemoveOne)) {
        return Error{Code::kUnavailable,
                     s.peer() + " is of an older release, which removes no one generation"};
    }
    std::vector<uint8_t> removed;
    auto ask = [&](size_t begin, size_t end) -> Result<bool> {
        Status sent = s.call(
            Kind::kRemove,
            [&](Writer& w) {
                w.number(s.space());
                w.number(static_cast<uint32_t>(end - begin));
                write_names(w, names.subspan(begin, end - begin));
                for (size_t i = begin; i < end && !generations.empty(); ++i) w.number(generations[i]);
            },
            [&](Reader& r) {
                if (r.number<uint32_t>() != end - begin) return false;
                std::vector<size_t> shown;
                for (size_t i = begin; i < end; ++i) {
                    auto flag = r.number<uint8_t>();
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
    Status status = in_frames(s, names, 1, ask, generations.empty() ? 0 : sizeof(uint64_t));
    if (!status) return status.error();
    return removed;
}

void NodeClient::load(const Incarnation& incarnation, std::span<const Descriptor> descriptors,
                      std::span<const uint32_t> which, const PartTable& table,
                      std::span<const uint32_t> indices, std::span<const uint16_t> columns, bool verify,
                      LoadReport& report) {
    if (which.empty()) return;
    Result<std::shared_ptr<Session>> opened = session();
    if (!opened) {
        report.error = opened.error().text;
        return;
    }
    Session& s = **opened;
    if (s.incarnation() != incarnation) {
        report.error = "the node was restarted since these objects were pinned";
        return;
    }
    if (s.remote()) return load_remote(s, descriptors, which, table, indices, columns, report);
    std::vector<Part> parts;
    for (uint32_t i : which) {
        const Descriptor& d = descriptors[i];
        if (columns[i] >= table.columns() || d.size != table.object_bytes(columns[i]) ||
            d.offset > s.arena_bytes() || d.size > s.arena_bytes() - d.offset) {
            report.error = "a stored object has another size than this engine's blocks";
            continue;
        }
        std::optional<IndexHit> hit = s.index().at(d.slot, d.generation);
        if (!hit) {
            report.error = "a pinned object was removed before it was loaded";
            continue;
        }
        table.parts(columns[i], indices[i], parts);
        uint32_t crc = copy_out(parts, s.arena() + d.offset, d.size, verify, d.crc);
        if (!hit->still_valid()) {
            report.error = "a pinned object was removed while it was loaded";
            continue;
        }
        if (crc != d.crc) {
            report.error = "the bytes of a stored object do not match their checksum";
            continue;
        }
        s.note_read(d.slot, d.size);
        report.ok[i] = 1;
        report.bytes += d.size;
    }
    s.flush_reads();
}

}  // namespace moonpool
