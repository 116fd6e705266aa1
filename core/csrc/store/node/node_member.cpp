#include "store/node/node_member.hpp"

#include <algorithm>

#include "base/clock.hpp"

namespace moonpool {

namespace {

constexpr size_t kLogRowsMax = 1u << 18;   // 6 MiB; beyond it the master is told everything anew
constexpr uint32_t kSlotsPerPiece = 4096;  // looked at in one go: others wait meanwhile, about 0.2 ms
constexpr uint32_t kDropsPerPiece = 1024;  // the same; each asks every disk

MemberAgentOptions agent_options(const ClusterOptions& options, const std::string& token,
                                 const std::string& socket_path, const Incarnation& incarnation) {
    MemberAgentOptions agent;
    agent.master = options.master;
    agent.token = token;
    agent.interface = options.interface;
    agent.tls = options.tls;
    agent.journal = options.journal;
    agent.identity = NodeIdentity{options.name, incarnation,    options.host_id,      options.address,
                                  socket_path,  options.events, options.events_replay};
    return agent;
}

}  // namespace

NodeMember::NodeMember(const ClusterOptions& options, const std::string& token,
                       const std::string& socket_path, const Incarnation& incarnation, Pools& pools,
                       SsdTier* ssd, RunOnLoop run_on_loop)
    : pools_(pools),
      ssd_(ssd),
      run_on_loop_(std::move(run_on_loop)),
      log_(kLogRowsMax, [this] { agent_.wake(); }),
      agent_(agent_options(options, token, socket_path, incarnation),
             MemberHooks{
                 [this](uint64_t& cursor, std::vector<DeltaRow>& rows) { return inventory(cursor, rows); },
                 [this](NodeLoad& l) { return load(l); },
                 [this](bool all, const std::vector<Hash128>& hashes) { return drop(all, hashes); }},
             log_) {
    for (auto& [tenant, pool] : pools_) pool->table().set_delta_log(&log_);
    if (ssd_ != nullptr) ssd_->set_delta_log(&log_);
}

NodeMember::~NodeMember() {
    agent_.stop();
    for (auto& [tenant, pool] : pools_) pool->table().set_delta_log(nullptr);
    if (ssd_ != nullptr) ssd_->set_delta_log(nullptr);
}

// The cursor: which pool, or behind them which directory of the SSD, and from which slot on.
bool NodeMember::inventory(uint64_t& cursor, std::vector<DeltaRow>& rows) {
    struct Piece {
        uint64_t cursor;
        std::vector<DeltaRow> rows;
    };
    auto piece = std::make_shared<Piece>(Piece{cursor, {}});
    bool done = run_on_loop_([this, piece] {
        uint64_t pool_number = piece->cursor >> 32;
        auto slot = static_cast<uint32_t>(piece->cursor);
        auto it = pools_.begin();
        std::advance(it, static_cast<std::ptrdiff_t>(std::min<uint64_t>(pool_number, pools_.size())));
        piece->cursor = 0;
        size_t devices = ssd_ == nullptr ? 0 : ssd_->devices();
        if (it == pools_.end()) {
            size_t device = pool_number - pools_.size();
            if (device >= devices) return;
            std::vector<Hash128> hashes;
            slot = ssd_->hashes(device, slot, kSlotsPerPiece, hashes);
            for (const Hash128& hash : hashes) piece->rows.push_back({hash, Tier::kSsd, true});
            if (slot != 0) {
                piece->cursor = pool_number << 32 | slot;
            } else if (device + 1 < devices) {
                piece->cursor = (pool_number + 1) << 32;
            }
            return;
        }
        const ObjectTable& table = it->second->table();
        uint32_t end = std::min(table.slots_used(), slot + kSlotsPerPiece);
        for (; slot < end; ++slot) {
            if (!table.committed(slot)) continue;
            const IndexEntry& entry = table.entry(slot);
            piece->rows.push_back({Hash128{entry.hash_low, entry.hash_high}, Tier::kDram, true});
        }
        if (slot < table.slots_used()) {
            piece->cursor = pool_number << 32 | slot;
        } else if (pool_number + 1 < pools_.size() + devices) {
            piece->cursor = (pool_number + 1) << 32;
        }
    });
    if (!done) return false;
    cursor = piece->cursor;
    rows = std::move(piece->rows);
    return true;
}

bool NodeMember::load(NodeLoad& load) {
    auto now = std::make_shared<NodeLoad>();
    bool done = run_on_loop_([this, now] {
        uint64_t ms = now_ms();
        for (auto& [tenant, pool] : pools_) {
            const ObjectTable& table = pool->table();
            UseClock& clock = use_clocks_[tenant];
            clock.sample(ms, table.uses());
            now->tenants.push_back(TenantLoad{tenant, pool->arena_bytes(), pool->room_bytes(),
                                              table.counters().objects,
                                              clock.age_ms(ms, table.oldest_use())});
        }
    });
    if (done) load = std::move(*now);
    return done;
}

bool NodeMember::drop(bool all, const std::vector<Hash128>& hashes) {
    if (all && !drop_all()) return false;
    if (hashes.empty()) return true;
    return run_on_loop_([this, hashes] {
        for (const Hash128& hash : hashes) drop_one(hash);
    });
}

// From everywhere at once: what is being written to a disk dies, and so does what is being read from it.
void NodeMember::drop_one(const Hash128& hash) {
    for (auto& [tenant, pool] : pools_) {
        uint32_t slot = pool->table().find(hash);
        if (slot != kNoSlot) pool->table().remove(slot);
    }
    if (ssd_ != nullptr) ssd_->forget(hash);
}

// Objects move between memory and disks while this goes on, a piece at a time. The disks come first, so that
// nothing more is brought from there into slots that were passed; memory next, with the writes that are not
// on a disk's list yet; then the disks again, for what was written and evicted between the two.
bool NodeMember::drop_all() {
    if (ssd_ == nullptr) return drop_all_of_memory();
    return drop_all_of_ssd() && drop_all_of_memory() && drop_all_of_ssd();
}

bool NodeMember::drop_all_of_memory() {
    for (auto& [tenant, pool] : pools_) {
        ObjectTable* table = &pool->table();
        auto slot = std::make_shared<uint32_t>(0);
        auto end = std::make_shared<uint32_t>(0);
        do {
            bool done = run_on_loop_([this, table, slot, end] {
                *end = table->slots_used();
                uint32_t stop = std::min(*end, *slot + kDropsPerPiece);
                for (; *slot < stop; ++*slot) {
                    if (!table->committed(*slot)) continue;
                    const IndexEntry& entry = table->entry(*slot);
                    Hash128 hash{entry.hash_low, entry.hash_high};
                    table->remove(*slot);
                    drop_one(hash);
                }
            });
            if (!done) return false;
        } while (*slot < *end);
    }
    return true;
}

bool NodeMember::drop_all_of_ssd() {
    for (size_t device = 0; device < ssd_->devices(); ++device) {
        auto cursor = std::make_shared<uint32_t>(0);
        do {
            bool done = run_on_loop_([this, device, cursor] {
                std::vector<Hash128> hashes;
                *cursor = ssd_->hashes(device, *cursor, kDropsPerPiece, hashes);
                for (const Hash128& hash : hashes) drop_one(hash);
            });
            if (!done) return false;
        } while (*cursor != 0);
    }
    return true;
}

std::vector<std::pair<std::string, uint64_t>> NodeMember::gauges() const {
    MemberAgent::State state = agent_.state();
    const MemberAgent::Counters& c = agent_.counters();
    return {
        {"master_joined", state.joined ? 1 : 0},
        {"master_silent_ms", state.answered_ms},
        {"master_joins_total", c.joins_total},
        {"master_connect_failures_total", c.connect_failures_total},
        {"master_inventories_total", c.inventories_total},
        {"master_rows_sent_total", c.rows_sent_total},
        {"master_rows_waiting", log_.size()},
        {"master_rows_waiting_max", kLogRowsMax},
        {"master_log_overflows_total", log_.overflows()},
        {"master_beats_total", c.beats_total},
        {"master_dropped_total", c.dropped_total},
    };
}

}  // namespace moonpool
