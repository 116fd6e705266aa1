// The half of NodeClient that asks what is there: pins and views of it, prefixes, lists, descriptions.
//
// Threads: any; no lock is held here. Each call keeps its session, and with it the pins that it takes and
// the mapped memory that its views show.
//
// What holds: questions of more keys than a frame takes go out in several frames, of which each is
// answered by itself: the node may change between two of them. So what was pinned by the first stays
// pinned, and what the second says is of a later moment. Every descriptor that a node sends was checked to
// lie in its arena before it is used as an address. An answer that does not fit its question ends the
// session.
#include <algorithm>
#include <cstring>
#include <map>
#include <new>

#include "store/client/client_frames.hpp"
#include "store/client/node_client.hpp"

namespace moonpool {

namespace {

std::string pins_refused(const Session& s) {
    return "pins hold as much of the memory of " + s.peer() +
           " as they may (node.pins_share_max, node.remote_pins_share_max)";
}

Status lookup(Session& s, std::span<const std::string_view> names, uint8_t flags, uint32_t width,
              LookupFound& answer, std::vector<Descriptor>& descriptors) {
    return s.call(
        Kind::kLookup,
        [&](Writer& w) {
            LookupHead{s.space(), flags, static_cast<uint16_t>(width), static_cast<uint32_t>(names.size())}
                .write(w);
            write_names(w, names);
        },
        [&](Reader& r) {
            answer = LookupFound::read(r);
            uint32_t n = answer.descriptors;
            // The count must be that of the bytes which follow, and no more than was asked for.
            if (!r.ok() || r.left() != uint64_t{n} * sizeof(Descriptor) || n > names.size()) return false;
            for (uint32_t i = 0; i < n; ++i) {
                auto d = r.number<Descriptor>();
                if (d.offset > s.arena_bytes() || d.size > s.arena_bytes() - d.offset) return false;
                descriptors.push_back(d);
            }
            return true;
        });
}

}  // namespace

Result<Pinned> NodeClient::pin(std::span<const std::string_view> names) {
    Result<std::shared_ptr<Session>> opened = session();
    if (!opened) return opened.error();
    Session& s = **opened;
    if (Status status = check_names(s, names); !status) return status.error();
    Pinned pinned;
    Status status = in_frames(s, names, 1, [&](size_t begin, size_t end) -> Result<bool> {
        LookupFound answer;
        Status sent = lookup(s, names.subspan(begin, end - begin), kLookupPin, 1, answer, pinned.descriptors);
        if (!sent) return sent.error();
        // The pin has an owner before anything else can fail, so it is released in any case.
        auto pin = answer.pin_id == 0 ? nullptr : std::make_shared<Pin>(*opened, answer.pin_id);
        if (pinned.descriptors.size() != end) {
            return Error{Code::kProtocol, s.peer() + " answered for other keys"};
        }
        for (size_t i = begin; i < end; ++i) {
            // Generation 0: the node has no such object.
            bool hit = pin != nullptr && pinned.descriptors[i].generation != 0;
            pinned.under.push_back(hit ? static_cast<uint32_t>(pinned.pins.size()) : kNoPin);
        }
        if (pin != nullptr) pinned.pins.push_back(std::move(pin));
        // Some are there and were not pinned: not misses, so the caller is told why there may be more.
        if (answer.pins_refused) pinned.why = pins_refused(s);
        return true;
    });
    if (!status) return status.error();
    return pinned;
}

// Bytes that cannot be read in place are read into memory of the view's own; what arrived damaged, or was
// gone by then, is a miss.
Result<std::vector<ObjectView>> NodeClient::views(const Pinned& pinned, std::span<const size_t> places) {
    std::vector<ObjectView> views(places.size());
    std::map<Session*, std::vector<size_t>> to_read;
    for (size_t i = 0; i < places.size(); ++i) {
        if (places[i] == kNotPinned || !pinned.has(places[i])) continue;
        const Descriptor& d = pinned.descriptors[places[i]];
        const std::shared_ptr<Pin>& pin = pinned.pin_of(places[i]);
        if (const std::byte* bytes = pin->session()->path().in_place(d)) {
            // In place no byte is copied, and the node would not learn of the use.
            pin->session()->note_read(d.slot, d.size);
            views[i] = ObjectView{pin, bytes, d.size};
        } else {
            to_read[pin->session().get()].push_back(i);
        }
    }
    for (auto& [session, which] : to_read) {
        std::vector<MemoryRef> parts(which.size());
        std::vector<std::shared_ptr<std::byte[]>> memory(which.size());
        std::vector<PinnedRead> reads;
        for (size_t k = 0; k < which.size(); ++k) {
            const Descriptor& d = pinned.descriptors[places[which[k]]];
            // The size is the node's word: no memory for it is an error, not an exception.
            memory[k].reset(new (std::nothrow) std::byte[d.size]);
            if (memory[k] == nullptr) {
                return Error{Code::kOs, "no memory for an object of " + std::to_string(d.size) + " bytes"};
            }
            parts[k] = MemoryRef::host(memory[k].get(), d.size);
            reads.push_back({d, {&parts[k], 1}});
        }
        Status status = session->path().read(reads, PinHolder::kThisProcess, true);
        if (!status) return status.error();
        for (size_t k = 0; k < which.size(); ++k) {
            if (reads[k].outcome != PinnedRead::kRead) continue;
            views[which[k]] = ObjectView{memory[k], memory[k].get(), parts[k].bytes};
        }
    }
    return views;
}

Result<std::vector<uint8_t>> NodeClient::exists(std::span<const std::string_view> names, bool use) {
    Result<std::shared_ptr<Session>> opened = session();
    if (!opened) return opened.error();
    Session& s = **opened;
    if (Status status = check_names(s, names); !status) return status.error();
    std::vector<uint8_t> present(names.size(), 0);
    std::vector<std::string_view> ask;
    std::vector<size_t> ask_index;
    auto there = [](uint64_t size) { return size == kManifestBytes ? kManifestSized : kThere; };
    // The index answers without the node, which then learns of no use. Hits only: it leaves out what is on
    // the SSD, and names that are too long.
    const IndexReader* index = use ? nullptr : s.path().index();
    for (size_t i = 0; i < names.size(); ++i) {
        if (index != nullptr) {
            if (auto hit = index->find(s.space(), hasher()(names[i]), names[i])) {
                present[i] = there(hit->size);
                continue;
            }
        }
        ask.push_back(names[i]);
        ask_index.push_back(i);
    }
    std::vector<Descriptor> descriptors;
    Status status = in_frames(s, ask, 1, [&](size_t begin, size_t end) -> Result<bool> {
        LookupFound answer;
        descriptors.clear();
        Status sent = lookup(s, {ask.data() + begin, end - begin}, 0, 1, answer, descriptors);
        if (!sent) return sent.error();
        for (size_t i = 0; i < descriptors.size(); ++i) {
            if (descriptors[i].generation != 0) present[ask_index[begin + i]] = there(descriptors[i].size);
        }
        return true;
    });
    if (!status) return status.error();
    return present;
}

Result<Prefix> NodeClient::longest_prefix(std::span<const std::string_view> names, uint32_t width, bool pin) {
    Result<std::shared_ptr<Session>> opened = session();
    if (!opened) return opened.error();
    Session& s = **opened;
    if (Status status = check_names(s, names); !status) return status.error();
    // The objects of one block go in one frame: a block counts only when all are there.
    uint32_t width_max = std::min<uint32_t>(s.frame_keys_max(), UINT16_MAX);
    if (width == 0 || width > width_max || names.size() % width != 0) {
        return Error{Code::kInvalidArgument,
                     "longest_prefix needs a width from 1 to " + std::to_string(width_max) +
                         " and a multiple of it in keys; got width " + std::to_string(width) + " and " +
                         std::to_string(names.size()) + " keys"};
    }
    Prefix prefix;
    prefix.incarnation = s.incarnation();
    auto flags = static_cast<uint8_t>(kLookupPrefix | (pin ? kLookupPin : 0));
    Status status = in_frames(s, names, width, [&](size_t begin, size_t end) -> Result<bool> {
        LookupFound answer;
        Status sent = lookup(s, names.subspan(begin, end - begin), flags, width, answer, prefix.descriptors);
        if (!sent) return sent.error();
        bool pinned = answer.pin_id != 0;
        prefix.under.resize(prefix.descriptors.size(),
                            pinned ? static_cast<uint32_t>(prefix.pins.size()) : kNoPin);
        if (pinned) prefix.pins.push_back(std::make_shared<Pin>(*opened, answer.pin_id));
        if (answer.pins_refused) prefix.why = pins_refused(s);
        // A prefix that ends in this frame ends the questions.
        return answer.hits == end - begin;
    });
    if (!status) return status.error();
    prefix.blocks = prefix.descriptors.size() / width;
    return prefix;
}

Result<std::vector<ListRow>> NodeClient::list(std::string_view prefix, uint64_t limit) {
    Result<std::shared_ptr<Session>> opened = session();
    if (!opened) return opened.error();
    Session& s = **opened;
    std::vector<ListRow> rows;
    // No key begins with more bytes than a key may have.
    if (limit == 0 || prefix.size() > s.key_bytes_max()) return rows;
    uint32_t cursor = 0;
    do {
        Status status = s.call(
            Kind::kList,
            [&](Writer& w) {
                w.number(s.space());
                w.number(cursor);
                w.number(static_cast<uint32_t>(std::min<uint64_t>(limit - rows.size(), 4096)));
                w.text16(prefix);
            },
            [&](Reader& r) {
                // Where the node's table goes on; 0 at its end.
                cursor = r.number<uint32_t>();
                auto n = r.number<uint32_t>();
                for (uint32_t i = 0; i < n && r.ok(); ++i) {
                    ListedObject row = ListedObject::read(r);
                    rows.push_back({std::string(row.name), row.size, row.generation, row.crc, row.pins});
                }
                return r.done();
            });
        if (!status) return status.error();
    } while (cursor != 0 && rows.size() < limit);
    return rows;
}

Result<std::vector<std::pair<std::string, uint64_t>>> NodeClient::stat() {
    Result<std::shared_ptr<Session>> opened = session();
    if (!opened) return opened.error();
    std::vector<std::pair<std::string, uint64_t>> rows;
    Status status = (*opened)->call(
        Kind::kStat, [](Writer&) {},
        [&](Reader& r) {
            auto n = r.number<uint32_t>();
            for (uint32_t i = 0; i < n && r.ok(); ++i) {
                std::string name(r.text16());
                rows.emplace_back(std::move(name), r.number<uint64_t>());
            }
            return r.done();
        });
    if (!status) return status.error();
    return rows;
}

Result<std::vector<Description>> NodeClient::describe(std::span<const std::string_view> names) {
    Result<std::shared_ptr<Session>> opened = session();
    if (!opened) return opened.error();
    Session& s = **opened;
    if (Status status = check_names(s, names); !status) return status.error();
    std::vector<Description> all;
    all.reserve(names.size());
    auto ask = [&](std::span<const std::string_view> some) {
        return s.call(
            Kind::kDescribe,
            [&](Writer& w) {
                w.number(s.space());
                w.number(static_cast<uint32_t>(some.size()));
                write_names(w, some);
            },
            [&](Reader& r) {
                if (r.number<uint32_t>() != some.size()) return false;
                for (size_t i = 0; i < some.size(); ++i) {
                    auto d = r.number<Description>();
                    // Sizes become signed numbers further up, where a miss is -1.
                    if (d.size > INT64_MAX) return false;
                    all.push_back(d);
                }
                return r.done();
            });
    };
    // A node of the release before is asked for what it can say: pins are not among it.
    auto look_up = [&](std::span<const std::string_view> some) {
        LookupFound answer;
        std::vector<Descriptor> found;
        Status sent = lookup(s, some, 0, 1, answer, found);
        if (sent && found.size() != some.size()) {
            return Status(Error{Code::kProtocol, s.peer() + " answered for other keys"});
        }
        for (const Descriptor& d : found) {
            bool on_ssd = (d.generation & kOnSsd) != 0;
            // Where it lies the older node says in a bit of the generation.
            uint8_t where = d.generation == 0 ? uint8_t{0} : on_ssd ? kInSsd : kInMemory;
            all.push_back(Description{d.size, d.generation, d.crc, 0, where, 0, {}});
        }
        return sent;
    };
    Status status = in_frames(s, names, 1, [&](size_t begin, size_t end) -> Result<bool> {
        std::span<const std::string_view> some = names.subspan(begin, end - begin);
        Status sent = s.knows(kFeatureDescribe) ? ask(some) : look_up(some);
        if (!sent) return sent.error();
        return true;
    });
    if (!status) return status.error();
    return all;
}

}  // namespace moonpool
