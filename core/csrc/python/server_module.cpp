// moonpool._native.Server: a node's data plane. Configuration, HTTP pages, logging, the publisher of KV
// events and the supervisor are Python (core/service); this file hands them the node's state.
//
// The pattern of every call: arguments are taken while the GIL is held (Names and Buffers keep the Python
// objects alive), the work is done without it, and the answer is made with it again. An error of the core
// becomes an exception in unwrap(), which needs the GIL.
//
// Of the methods only start(), stop(), metrics(), is_alive(), begin_events(), holdings(), hold() and
// check_integrity() wait for another thread.
// The others read atomics, or take a lock that is never held for long, and keep the GIL.
#include "python/server_module.hpp"

#include <pybind11/stl.h>

#include <cstring>

#include "memory/room.hpp"
#include "python/histograms.hpp"
#include "python/notes.hpp"
#include "python/raise.hpp"
#include "python/secrets.hpp"
#include "python/settings.hpp"

namespace moonpool::python {

namespace {

// What the table below fills: one set of options for the server, and one that is copied for each tenant.
struct NodeSettings {
    ServerOptions options;
    PoolOptions pool;  // as for each tenant
};

// The table of settings: their names in the configuration file, and where their values go (settings.hpp).
// Defaults and bounds stand in core/config alone.
template <class Visitor>
void visit(NodeSettings& settings, Visitor& visitor) {
    auto& [options, pool] = settings;
    visitor.field("connections_max", options.limits.connections);
    visitor.field("remote_connections_max", options.limits.remote_connections);
    visitor.field("pins_share_max", options.limits.pins_share);
    visitor.field("remote_pins_share_max", options.limits.remote_pins_share);
    visitor.seconds("remote_pin_idle_s", options.limits.remote_pin_idle_ms);
    visitor.field("key_bytes_max", options.limits.key_bytes);
    visitor.field("parts_max", options.limits.parts);
    visitor.field("frame_bytes_max", options.limits.frame_bytes);
    visitor.field("frame_keys_max", options.limits.frame_keys);
    visitor.field("object_share_max", options.limits.object_share);
    visitor.seconds("master_timeout_s", options.cluster.timeout_ms);
    visitor.seconds("clients_master_timeout_s", options.cluster.clients_timeout_ms);
    visitor.field("relay", options.cluster.relay);
    visitor.field("objects_max", pool.objects_max);
    visitor.field("slab_bytes", pool.slab_bytes);
    visitor.field("scrub_bytes_per_s", options.scrub_bytes_per_s);
    visitor.field("ssd_clean_share", options.ssd.clean_share);
    visitor.seconds("ssd_stop_s", options.ssd.stop_ms);
    visitor.field("ssd_io", options.ssd.io);
    visitor.field("ssd_depth", options.ssd.depth);
    visitor.field("ssd_records_max", options.ssd.records_max);
    visitor.field("ssd_segment_bytes", options.ssd.segment_bytes);
}

LimitsByTenant tenant_limits(const std::vector<TenantLimitsRow>& rows) {
    LimitsByTenant limits;
    for (const auto& [tenant, dram_min, dram_max, ssd_max, pins_max, bytes_per_s] : rows)
        limits[tenant] = {dram_min, dram_max, ssd_max, pins_max, bytes_per_s};
    return limits;
}

std::vector<std::string> node_setting_names() {
    NodeSettings settings;
    SettingNames found;
    visit(settings, found);
    return found.names;
}

}  // namespace

PyServer::PyServer(std::string socket_path, const std::vector<std::pair<std::string, uint64_t>>& tenants,
                   const py::bytes& token, const py::dict& settings, std::string name,
                   std::vector<std::string> listen, std::string host_id, std::string advertise,
                   std::string master, const std::vector<std::pair<std::string, uint64_t>>& ssd, bool events,
                   std::optional<std::shared_ptr<TlsClient>> tls, std::string size_option,
                   std::string memory_root, const std::map<std::string, std::string>& salts,
                   std::optional<std::shared_ptr<TlsServer>> data_tls,
                   const std::vector<TenantLimitsRow>& limits,
                   const std::optional<std::pair<int, std::vector<int>>>& predecessor)
    : name_(std::move(name)) {
    NodeSettings filled;
    SettingValues given(settings, "node");
    visit(filled, given);
    // Whatever is left in the dict is none of the node's settings.
    given.check();
    ServerOptions options = std::move(filled.options);
    options.socket_path = std::move(socket_path);
    options.token = secrets_of(token);
    for (const auto& [tenant, bytes] : tenants) {
        PoolOptions pool = filled.pool;
        pool.tenant = tenant;
        pool.arena_bytes = bytes;
        if (auto salt = salts.find(tenant); salt != salts.end()) pool.salt = salt->second;
        options.pools.push_back(std::move(pool));
    }
    options.tenant_limits = tenant_limits(limits);
    options.listen = std::move(listen);
    options.cluster.master = std::move(master);
    options.cluster.name = name_;
    options.cluster.host_id = std::move(host_id);
    options.cluster.address = std::move(advertise);
    options.cluster.tls = tls.value_or(nullptr);
    options.data_tls = data_tls.value_or(nullptr);
    options.ssd.directories = ssd;
    options.events = events;
    options.size_option = std::move(size_option);
    options.memory_root = std::move(memory_root);
    std::optional<Fd> description;
    std::vector<Fd> descriptors;
    if (predecessor) {
        description.emplace(predecessor->first);
        for (int fd : predecessor->second) descriptors.emplace_back(fd);
    }
    py::gil_scoped_release nogil;  // it may have a disk to read
    Result<std::unique_ptr<Server>> server = Error{};
    if (description) {
        auto from = Predecessor::read(std::move(*description), std::move(descriptors));
        if (from) {
            options.predecessor = std::move(*from);
        } else {
            server = from.error();
        }
    }
    if (!description || options.predecessor != nullptr) server = Server::create(std::move(options));
    py::gil_scoped_acquire gil;
    // Nothing serves yet: memory that cannot be had, a port in use, and a foreign disk are exceptions of
    // this constructor.
    server_ = unwrap(std::move(server), "node");
}

// The publisher is Python, and needs the server: its ports are known between the constructor and start().
void PyServer::tell_event_endpoints(std::string events, std::string replay) {
    server_->tell_event_endpoints(std::move(events), std::move(replay));
}

void PyServer::set_tenants(const std::vector<TenantKeyRow>& rows) { server_->set_tenants(tenant_rows(rows)); }

void PyServer::set_limits(const std::vector<TenantLimitsRow>& rows) {
    LimitsByTenant limits = tenant_limits(rows);
    py::gil_scoped_release nogil;
    Status status = server_->set_limits(std::move(limits));
    py::gil_scoped_acquire gil;
    unwrap(std::move(status), "tenants");
}

void PyServer::prepare() {
    py::gil_scoped_release nogil;
    Status status = server_->prepare();
    py::gil_scoped_acquire gil;
    unwrap(std::move(status), "node");
}

void PyServer::start() {
    py::gil_scoped_release nogil;
    Status status = server_->start();
    py::gil_scoped_acquire gil;
    unwrap(std::move(status), "node");
}

// Takes up to ssd_stop_s, while what is in memory only is written to the disks.
void PyServer::stop() {
    py::gil_scoped_release nogil;
    server_->stop();
}

py::tuple PyServer::give() {
    Result<Server::Given> given = Error{};
    {
        py::gil_scoped_release nogil;
        given = server_->give();
    }
    if (!given) raise(given.error(), "take over");
    return py::make_tuple(given->description.release(), given->descriptors);
}

void PyServer::take_back() {
    py::gil_scoped_release nogil;
    server_->take_back();
}

void PyServer::let_go() {
    py::gil_scoped_release nogil;
    server_->let_go();
}

bool PyServer::is_alive(double timeout_s) {
    py::gil_scoped_release nogil;
    return server_->is_alive(static_cast<uint32_t>(milliseconds(timeout_s)));
}

py::tuple PyServer::memory() const {
    Server::Memory memory = server_->memory();
    return py::make_tuple(memory.reserved_bytes, memory.bytes, memory.is_short);
}

py::list PyServer::take_notes() { return notes_of(server_->journal()); }

// Waits for the node's loop, at most two seconds; empty when it does not answer.
std::map<std::string, uint64_t> PyServer::metrics() {
    std::map<std::string, uint64_t> rows;
    py::gil_scoped_release nogil;
    for (auto& [name, value] : server_->snapshot()) rows.emplace(name, value);
    return rows;
}

py::dict PyServer::histograms() {
    const NodeMetrics& m = server_->metrics();
    const std::pair<const char*, const LatencyHistogram*> rows[] = {{"lease_seconds", &m.lease},
                                                                    {"commit_seconds", &m.commit},
                                                                    {"lookup_seconds", &m.lookup},
                                                                    {"other_seconds", &m.other}};
    return histogram_rows(rows);
}

// None: the node has no master. A node that has one, and is not in its pool, says why.
py::object PyServer::membership() {
    std::optional<MemberAgent::State> state = server_->membership();
    if (!state) return py::none();
    return py::make_tuple(state->joined, state->id == kNoNode ? -1 : int{state->id}, state->why_not,
                          static_cast<double>(state->answered_ms) / 1000);
}

py::list PyServer::ssd() {
    std::vector<SsdTier::Device> devices;
    {
        py::gil_scoped_release nogil;
        devices = server_->ssd();
    }
    py::list rows;
    for (const SsdTier::Device& device : devices) {
        py::dict row;
        row["directory"] = device.directory;
        row["io"] = device.io;
        row["io_reason"] = device.io_reason;
        row["trouble"] = device.trouble;
        rows.append(row);
    }
    return rows;
}

// BlockEvents has a lock of its own: the node's loop writes, the publisher's thread reads.
BlockEvents& PyServer::events() const {
    if (server_->events() == nullptr) {
        raise(Error{Code::kUnavailable, "this node does not tell events of blocks"}, "events");
    }
    return *server_->events();
}

bool PyServer::begin_events() {
    py::gil_scoped_release nogil;
    return server_->begin_events();
}

py::object PyServer::take_events() {
    std::vector<BlockEvents::Row> rows;
    // None: rows were lost for want of room, and only an inventory makes the reader's picture whole again.
    bool complete = events().take(rows);
    if (!complete) return py::none();
    return to_bytes(rows);
}

py::tuple PyServer::events_inventory(uint32_t cursor) const {
    std::vector<BlockEvents::Row> rows;
    events().inventory(cursor, rows);
    return py::make_tuple(cursor, to_bytes(rows));
}

// The rows of events are of one size, 40 bytes, so they have the number of a space, not its fingerprint.
py::list PyServer::events_fingerprints() const {
    py::list out;
    for (const std::string& fingerprint : events().fingerprints()) out.append(py::bytes(fingerprint));
    return out;
}

py::tuple PyServer::holdings(uint64_t cursor) {
    std::vector<HoldingRow> rows;
    bool answered = false;
    {
        py::gil_scoped_release nogil;
        answered = server_->holdings(cursor, rows);
    }
    if (!answered) raise(Error{Code::kTimeout, "the node's data plane did not answer"}, "drain");
    return py::make_tuple(cursor, to_bytes(rows));
}

py::list PyServer::settled() const {
    py::list out;
    for (const auto& [id, range, joined, beats] : server_->settled()) {
        out.append(py::make_tuple(id, range, joined, beats));
    }
    return out;
}

std::shared_ptr<OutgoingObjects> PyServer::hold(const py::bytes& given) {
    std::string_view bytes = given;
    if (bytes.size() % sizeof(HoldingRow) != 0) {
        raise(
            Error{Code::kInvalidArgument, "rows have " + std::to_string(sizeof(HoldingRow)) + " bytes each"},
            "drain");
    }
    std::vector<HoldingRow> rows(bytes.size() / sizeof(HoldingRow));
    std::memcpy(rows.data(), bytes.data(), bytes.size());
    std::shared_ptr<OutgoingObjects> held;
    {
        py::gil_scoped_release nogil;
        held = server_->hold(std::move(rows));
    }
    if (held == nullptr) raise(Error{Code::kTimeout, "the node's data plane did not answer"}, "drain");
    return held;
}

bool PyServer::check_integrity() {
    py::gil_scoped_release nogil;
    return server_->check_integrity();
}

// The two functions are for command lines, which want to know what fits before they start a node.
void bind_server(py::module_& m) {
    m.def(
        "room_for_arenas",
        [](const std::string& root) -> std::optional<uint64_t> {
            std::optional<AvailableMemory> memory = available_memory(root);
            if (!memory) return std::nullopt;
            return room_for_arenas(*memory);
        },
        py::arg("root") = "",
        "Bytes that arenas may take now, in all; None where the machine does not say. root: of /proc, /sys.");
    m.def(
        "check_room_for_arenas",
        [](uint64_t bytes, const std::string& option, const std::string& root) {
            unwrap(check_room(bytes, option, root), "node");
        },
        py::arg("bytes"), py::arg("option") = "", py::arg("root") = "",
        "Raises InvalidArgument where arenas of so many bytes do not fit; option: how a user gives the "
        "size.");
    py::class_<OutgoingObjects, std::shared_ptr<OutgoingObjects>>(
        m, "OutgoingObjects",
        "Objects of one space whose bytes a node keeps while they are copied to other nodes.")
        .def_property_readonly(
            "space", [](const OutgoingObjects& held) { return py::bytes(held.identity()); },
            "tenant, namespace and fingerprint, with a zero byte between; empty: no object is left.");
    py::class_<PyServer>(m, "Server",
                         "A node's data plane: one thread, one Unix socket, an arena for each tenant.")
        .def(
            py::init<std::string, const std::vector<std::pair<std::string, uint64_t>>&, const py::bytes&,
                     const py::dict&, std::string, std::vector<std::string>, std::string, std::string,
                     std::string, const std::vector<std::pair<std::string, uint64_t>>&, bool,
                     std::optional<std::shared_ptr<TlsClient>>, std::string, std::string,
                     const std::map<std::string, std::string>&, std::optional<std::shared_ptr<TlsServer>>,
                     const std::vector<TenantLimitsRow>&,
                     const std::optional<std::pair<int, std::vector<int>>>&>(),
            py::arg("socket_path"), py::arg("tenants"), py::arg("token"), py::arg("settings"), py::kw_only(),
            py::arg("name") = "default", py::arg("listen") = std::vector<std::string>(),
            py::arg("host_id") = "", py::arg("advertise") = "", py::arg("master") = "",
            py::arg("ssd") = std::vector<std::pair<std::string, uint64_t>>(), py::arg("events") = false,
            py::arg("tls") = py::none(), py::arg("size_option") = "--dram ", py::arg("memory_root") = "",
            py::arg("salts") = std::map<std::string, std::string>(), py::arg("data_tls") = py::none(),
            py::arg("limits") = std::vector<TenantLimitsRow>(), py::arg("predecessor") = py::none(),
            "settings: a value for each of setting_names(). salts: of the keys' hashes, by tenant. limits: "
            "as "
            "of set_limits(). predecessor: what give() of another process's returned, whose descriptors this "
            "one owns from now on.")
        .def_static("setting_names", &node_setting_names)
        .def("set_tenants", &PyServer::set_tenants, py::arg("rows"),
             "The tenants' own keys from now on: (tenant, role, keys). Connections by others end.")
        .def("set_limits", &PyServer::set_limits, py::arg("rows"),
             "The tenants' limits from now on, in bytes: (tenant, dram_min, dram_max, ssd_max, pins_max, "
             "bytes_per_s). An error leaves those from before in force.")
        .def_property_readonly("name", &PyServer::name)
        .def_property_readonly("addresses", &PyServer::addresses, "TCP addresses, with their real ports.")
        .def("tell_event_endpoints", &PyServer::tell_event_endpoints, py::arg("events"), py::arg("replay"),
             "Where other hosts subscribe to the node's KV events: its master tells. Call it before start().")
        .def("prepare", &PyServer::prepare,
             "Of one with a predecessor: all of start() that can fail. No client notices; stop() undoes it.")
        .def("start", &PyServer::start)
        .def("stop", &PyServer::stop)
        .def(
            "give", &PyServer::give,
            "For another process: (descriptor of a description, which the caller owns; descriptors of "
            "arenas, sockets and connections, which stay the server's). It serves no more until take_back().")
        .def("take_back", &PyServer::take_back, "After give(): it serves as before.")
        .def("let_go", &PyServer::let_go, "After give(): it has ended, and the other process serves.")
        .def_property_readonly("why_not_given", &PyServer::why_not_given, "Empty: give() may be called.")
        .def_property_readonly("learned_masters", &PyServer::learned_masters,
                               "Of each range, with commas: masters that are not in the list it was given.")
        .def("learn_masters", &PyServer::learn_masters, py::arg("of_ranges"),
             "learned_masters of the process before. Call it before start().")
        .def("is_alive", &PyServer::is_alive, py::arg("timeout_s"),
             "Whether the threads that serve answer within so many seconds.")
        .def("memory", &PyServer::memory,
             "(reserved bytes, bytes of all arenas, whether no more can be reserved)")
        .def_property_readonly("notes_fd", &PyServer::notes_fd, "Readable when take_notes() has some.")
        .def("take_notes", &PyServer::take_notes,
             "What happened, for a log: (level 0 to 3, kind, peer, text, left out before it)")
        .def("metrics", &PyServer::metrics, "Counters (*_total) and gauges by name.")
        .def("histograms", &PyServer::histograms,
             "name -> (upper bounds in s, counts with one more for +Inf, sum in s)")
        .def(
            "membership", &PyServer::membership,
            "(joined, node id or -1, why not, seconds since the master's last answer); None without a master")
        .def("ssd", &PyServer::ssd, "Of each SSD directory: how it is read and written, and its trouble.")
        .def_property_readonly("events_fd", &PyServer::events_fd, "Readable when take_events() has rows.")
        .def("begin_events", &PyServer::begin_events,
             "Keeps account of blocks from now on. False: the node was not ready; call it again.")
        .def("take_events", &PyServer::take_events,
             "What blocks came and went, in rows of 40 bytes; None: all is due anew, by events_inventory().")
        .def("events_inventory", &PyServer::events_inventory, py::arg("cursor"),
             "(next cursor, 0 behind the last; rows of blocks that are there)")
        .def("events_fingerprints", &PyServer::events_fingerprints,
             "Of each space, by its number in the rows.")
        .def("holdings", &PyServer::holdings, py::arg("cursor"),
             "(next cursor, 0 behind the last; the objects in memory, in rows of 40 bytes: pool, slot, "
             "generation, bytes, last use, space)")
        .def(
            "settled", &PyServer::settled,
            "Of each master (a number that stays, its range, whether the node has joined it, beats that were "
            "sent when it had been told all and whose answers are carried out); more may come.")
        .def("hold", &PyServer::hold, py::arg("rows"), py::keep_alive<0, 1>(),
             "Keeps the bytes of those that are still there, of one pool and space, until it is dropped.")
        .def("check_integrity", &PyServer::check_integrity, "Recounts every table; for tests.");
}

}  // namespace moonpool::python
