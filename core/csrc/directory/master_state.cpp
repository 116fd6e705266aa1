#include "directory/master_state.hpp"

#include <utility>

#include "directory/range_handshake.hpp"

namespace moonpool {

void MasterState::write(Writer& w) const {
    w.number(static_cast<uint8_t>(role));
    w.number(static_cast<uint8_t>(attached));
    w.number(static_cast<uint8_t>(is_whole));
    w.number(uint8_t{0});
    w.number(nodes);
    w.number(lag_ms);
    w.number(rows);
    w.number(first);
    w.number(newest);
    w.text16(other);
    write_range(w, range);
    masters.write(w);
}

MasterState MasterState::read(Reader& r) {
    MasterState state;
    state.role = static_cast<MasterRole>(r.number<uint8_t>());
    state.attached = r.number<uint8_t>() != 0;
    state.is_whole = r.number<uint8_t>() != 0;
    r.number<uint8_t>();
    state.nodes = r.number<uint32_t>();
    state.lag_ms = r.number<uint64_t>();
    state.rows = r.number<uint64_t>();
    state.first = r.number<Version>();
    state.newest = r.number<Version>();
    state.other = std::string(r.text16());
    if (r.ok() && r.left() != 0) state.range = read_range(r);
    if (r.ok() && r.left() != 0 && !state.masters.read(r)) state.masters = {};
    return state;
}

Result<MasterState> ask_master_state(DialOptions options) {
    options.service = std::string(kServiceMaster);
    Result<Dialed> dialed = dial(options);
    if (!dialed) return dialed.error();
    Reader r(dialed->welcome);
    MasterState state = MasterState::read(r);
    if (!r.ok() || state.role > MasterRole::kSuperseded || !state.range.is_sound()) {
        return Error{Code::kProtocol, options.address + " does not say what a master says of itself"};
    }
    return state;
}

}  // namespace moonpool
