// Client, from the process that pinned to the process that loads.
#include <algorithm>
#include <cstring>

#include "base/mutex.hpp"
#include "store/client/client.hpp"
#include "store/client/client_frames.hpp"

namespace moonpool {

namespace {

constexpr int kOffsetBits = 48;  // of a descriptor's offset; above it a hand-over has the holder's place
constexpr size_t kHoldersMax = 1u << 16;

}  // namespace

// holders: the own node's incarnation, then each other holder's incarnation and route. A descriptor's holder
// stands above its offset: 0 is the own node.
Handover Client::hand_over(const Pinned& pinned, const Incarnation& own) {
    Handover out;
    out.holders.assign(reinterpret_cast<const char*>(own.data()), own.size());
    out.descriptors = pinned.descriptors;
    std::vector<Session*> others;
    for (size_t i = 0; i < out.descriptors.size(); ++i) {
        if (!pinned.has(i)) continue;
        Session* session = pinned.pin_of(i)->session().get();
        if (session->incarnation() == own) continue;
        size_t place = static_cast<size_t>(std::ranges::find(others, session) - others.begin());
        if (place == others.size()) {
            others.push_back(session);
            std::string route = session->path().route();
            out.holders.append(reinterpret_cast<const char*>(session->incarnation().data()),
                               session->incarnation().size());
            auto size = static_cast<uint16_t>(route.size());
            out.holders.append(reinterpret_cast<const char*>(&size), sizeof(size));
            out.holders.append(route);
        }
        uint64_t offset = out.descriptors[i].offset & ((1ull << kOffsetBits) - 1);
        out.descriptors[i].offset = offset | (static_cast<uint64_t>(place + 1) << kOffsetBits);
    }
    return out;
}

std::optional<Descriptor> Client::of_own(std::string_view holders, Descriptor handed,
                                         const Incarnation& own) {
    bool its_own = holders.size() >= own.size() && std::memcmp(holders.data(), own.data(), own.size()) == 0;
    if (!its_own || handed.offset >> kOffsetBits != 0) return std::nullopt;
    return handed;
}

Result<std::unique_ptr<OwnArena>> Client::own_arena() {
    Result<std::shared_ptr<Session>> session = own_.session();
    if (!session) return session.error();
    return OwnArena::open(**session);
}

// A connection says which life the node is in. Where there is none, the node may only be slow.
bool Client::lives(const OwnArena& arena) {
    WaitBudget budget(wait_budget_ms());
    Result<std::shared_ptr<Session>> session = own_.session();
    if (session) return (*session)->incarnation() == arena.incarnation() && !arena.superseded();
    return arena.process_runs();
}

void Client::note_reads(const OwnArena& arena, std::span<const OwnArena::Read> reads) {
    std::shared_ptr<Session> session = own_.current();
    // In another life of the node the slots are other objects'.
    if (session == nullptr || session->incarnation() != arena.incarnation()) return;
    for (const OwnArena::Read& read : reads) session->note_read(read.hit.slot, read.bytes);
    session->flush_reads();
}

LoadReport Client::load(std::string_view holders, std::span<const Descriptor> descriptors,
                        const PartTable& table, std::span<const uint32_t> indices,
                        std::span<const uint16_t> columns, bool verify) {
    WaitBudget budget(wait_budget_ms());
    LoadReport report;
    report.ok.assign(descriptors.size(), 0);
    if (Status status = own_.check_open(); !status) {
        report.error = status.error().text;
        return report;
    }
    struct Source {
        Incarnation incarnation{};
        std::string route;
        std::vector<uint32_t> which;
    };
    std::vector<Source> sources(1);
    Reader r(std::as_bytes(std::span(holders)));
    std::string_view own = r.bytes(sizeof(Incarnation));
    if (r.ok()) std::memcpy(sources[0].incarnation.data(), own.data(), own.size());
    while (r.ok() && !r.done() && sources.size() < kHoldersMax) {
        Source source;
        std::string_view incarnation = r.bytes(sizeof(Incarnation));
        source.route = std::string(r.bytes16());
        if (!r.ok()) break;
        std::memcpy(source.incarnation.data(), incarnation.data(), incarnation.size());
        sources.push_back(std::move(source));
    }
    if (!r.ok()) {
        report.error = "the description of the holders is not whole";
        return report;
    }
    std::vector<Descriptor> plain(descriptors.begin(), descriptors.end());
    for (size_t i = 0; i < plain.size(); ++i) {
        uint64_t place = plain[i].offset >> kOffsetBits;
        plain[i].offset &= (1ull << kOffsetBits) - 1;
        if (place >= sources.size()) {
            report.error = "a descriptor names a holder that is not described";
            continue;
        }
        sources[place].which.push_back(static_cast<uint32_t>(i));
    }
    Mutex merging;
    std::vector<Group> work;
    for (size_t i = 0; i < sources.size(); ++i) {
        if (sources[i].which.empty()) continue;
        work.emplace_back();
        work.back().items.push_back(i);
    }
    each(work, [&](Group& group) {
        Source& source = sources[group.items.front()];
        LoadReport part;
        part.ok.assign(plain.size(), 0);
        if (source.route.empty()) {
            own_.load(source.incarnation, plain, source.which, table, indices, columns, verify, part);
        } else {
            peers_.node(source.route, source.incarnation)
                ->load(source.incarnation, plain, source.which, table, indices, columns, verify, part);
        }
        MutexLock lock(merging);
        for (uint32_t i : source.which) report.ok[i] = part.ok[i];
        report.bytes += part.bytes;
        if (!part.error.empty()) report.error = part.error;
    });
    return report;
}

}  // namespace moonpool
