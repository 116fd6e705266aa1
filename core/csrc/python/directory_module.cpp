// The master and its clients as Python sees them: moonpool._native.MasterServer and DirectoryClient.
//
// The pattern of every call: arguments are taken while the GIL is held (Names and Buffers keep the Python
// objects alive), the work is done without it, and the answer is made with it again. An error of the core
// becomes an exception in unwrap(), which needs the GIL.
//
// Of the master only the data plane is here; its HTTP pages, configuration and logging are Python
// (core/service/master.py).

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "directory/master_server.hpp"
#include "directory/pool_directory.hpp"
#include "memory/available.hpp"
#include "python/arguments.hpp"
#include "python/histograms.hpp"
#include "python/module.hpp"
#include "python/notes.hpp"
#include "python/raise.hpp"
#include "python/secrets.hpp"
#include "python/settings.hpp"

namespace moonpool::python {

namespace {

const char* name_of(MasterRole role) {
    switch (role) {
        case MasterRole::kOwner:
            return "owner";
        case MasterRole::kStandby:
            return "standby";
        case MasterRole::kActing:
            return "acting";
        case MasterRole::kSuperseded:
            return "superseded";
    }
    return "";
}

const char* name_of(MemberState state) {
    switch (state) {
        case MemberState::kAlive:
            return "alive";
        case MemberState::kSuspect:
            return "suspect";
        case MemberState::kGone:
            return "gone";
        case MemberState::kJoining:
            return "joining";
    }
    return "";
}

// The table of settings: their names in the configuration file, and where their values go (settings.hpp).
// Defaults and bounds stand in core/config alone.
template <class Visitor>
void visit(MasterServerOptions& options, Visitor& visitor) {
    visitor.field("nodes_max", options.master.membership.members_max);
    visitor.field("clients_max", options.clients_max);
    visitor.field("keys_max", options.master.rows_max);
    visitor.field("removals_max", options.master.removals_max);
    visitor.field("frame_bytes_max", options.limits.frame_bytes);
    visitor.field("frame_keys_max", options.master.hashes_per_frame);
    visitor.seconds("suspect_after_s", options.master.membership.suspect_ms);
    visitor.seconds("gone_after_s", options.master.membership.gone_ms);
    visitor.seconds("take_over_after_s", options.pair.take_over_ms);
}

std::vector<std::string> master_setting_names() {
    MasterServerOptions options;
    SettingNames found;
    visit(options, found);
    return found.names;
}

class PyMasterServer {
   public:
    PyMasterServer(std::vector<std::string> addresses, const py::bytes& token, const py::dict& settings,
                   std::optional<std::shared_ptr<TlsServer>> tls, std::string standby_of,
                   std::optional<std::shared_ptr<TlsClient>> owner_tls, bool elected, std::string name,
                   std::pair<uint32_t, uint32_t> range, std::string advertise) {
        MasterServerOptions options;
        SettingValues given(settings, "master");
        visit(options, given);
        // Whatever is left in the dict is none of the master's settings.
        given.check();
        options.addresses = std::move(addresses);
        options.token = secrets_of(token);
        options.tls = tls.value_or(nullptr);
        options.standby_of = std::move(standby_of);
        options.owner_tls = owner_tls.value_or(nullptr);
        options.elected = elected;
        options.name = std::move(name);
        options.advertise = std::move(advertise);
        options.range = Range{range.first, range.second};
        // 0 s, which is 1 ms here: not by itself.
        if (options.pair.take_over_ms <= 1) options.pair.take_over_ms = UINT32_MAX;
        options.available_memory = [] {
            std::optional<AvailableMemory> memory = available_memory();
            return memory ? memory->available_bytes : UINT64_MAX;
        };
        // The port is bound here, so that a port in use is an exception of the constructor; it serves from
        // start() on.
        server_ = unwrap(MasterServer::create(std::move(options)), "master");
    }

    void start() {
        py::gil_scoped_release nogil;
        Status status = server_->start();
        py::gil_scoped_acquire gil;
        unwrap(std::move(status), "master");
    }
    void set_tenants(const std::vector<TenantKeyRow>& rows) { server_->set_tenants(tenant_rows(rows)); }
    // Returns when no thread of the server runs any more.
    void stop() {
        py::gil_scoped_release nogil;
        server_->stop();
    }
    std::vector<std::string> addresses() const { return server_->addresses(); }
    py::bytes incarnation() const {
        return to_bytes(server_->incarnation().data(), server_->incarnation().size());
    }
    std::map<std::string, uint64_t> metrics() {
        std::map<std::string, uint64_t> rows;
        py::gil_scoped_release nogil;
        // Waits for the master's loop, at most two seconds; empty when it does not answer.
        for (auto& [name, value] : server_->snapshot()) rows.emplace(name, value);
        return rows;
    }
    // Atomics: no loop is asked.
    py::dict histograms() {
        const MasterServerMetrics& m = server_->metrics();
        const std::pair<const char*, const LatencyHistogram*> rows[] = {
            {"join_seconds", &m.join},       {"delta_seconds", &m.delta},   {"beat_seconds", &m.beat},
            {"members_seconds", &m.members}, {"locate_seconds", &m.locate}, {"place_seconds", &m.place},
            {"forget_seconds", &m.forget}};
        return histogram_rows(rows);
    }
    std::pair<uint64_t, std::vector<MasterServer::NodeRow>> nodes() {
        py::gil_scoped_release nogil;
        MasterServer::Nodes nodes = server_->nodes();
        return {nodes.epoch, std::move(nodes.rows)};
    }
    bool check_integrity() {
        py::gil_scoped_release nogil;
        return server_->check_integrity();
    }
    bool is_alive(double timeout_s) {
        py::gil_scoped_release nogil;
        return server_->is_alive(static_cast<uint32_t>(milliseconds(timeout_s)));
    }
    const char* role() const { return name_of(server_->role()); }
    // The other one of the two: address, whether it is there, whether the standby knows all, lag.
    std::tuple<std::string, bool, bool, double> standby() {
        py::gil_scoped_release nogil;
        MasterServer::Standby now = server_->standby();
        return {now.name, now.attached, now.is_whole, static_cast<double>(now.lag_ms) / 1000};
    }
    bool follow(const std::string& owner) {
        py::gil_scoped_release nogil;
        return server_->follow(owner);
    }
    void set_valid_for(std::optional<double> seconds) {
        server_->set_valid_for(seconds ? static_cast<uint64_t>(milliseconds(*seconds)) : UINT64_MAX);
    }
    bool set_elected_standby(std::optional<std::string> name) {
        py::gil_scoped_release nogil;
        return server_->set_elected_standby(std::move(name));
    }
    void ask_hand_over(double timeout_s) {
        py::gil_scoped_release nogil;
        Status status = server_->ask_hand_over(milliseconds(timeout_s));
        py::gil_scoped_acquire gil;
        unwrap(std::move(status), "promote");
    }
    bool hears_owner() const { return server_->hears_owner(); }
    std::string gives_to() {
        py::gil_scoped_release nogil;
        return server_->gives_to();
    }
    bool give() {
        py::gil_scoped_release nogil;
        return server_->give();
    }
    bool keep() {
        py::gil_scoped_release nogil;
        return server_->keep();
    }
    bool take_over() {
        py::gil_scoped_release nogil;
        return server_->take_over();
    }
    py::list take_notes() { return notes_of(server_->journal()); }
    int notes_fd() const { return server_->journal().fd(); }

   private:
    std::unique_ptr<MasterServer> server_;
};

class PyDirectoryClient {
    template <class F>
    // One exchange with the master. The GIL is held again before unwrap() may raise.
    auto call(const char* operation, F f) {
        auto result = [&] {
            py::gil_scoped_release nogil;
            return f();
        }();
        return unwrap(std::move(result), operation, client_->master());
    }

   public:
    PyDirectoryClient(std::string master, const py::bytes& token, std::string tenant, double timeout_s,
                      std::string interface, std::optional<std::shared_ptr<TlsClient>> tls) {
        DirectoryClientOptions options;
        options.master = std::move(master);
        options.token = secrets_of(token);
        options.tenant = std::move(tenant);
        options.timeout_ms = milliseconds(timeout_s);
        options.interface = std::move(interface);
        options.tls = tls.value_or(nullptr);
        client_ = std::make_unique<PoolDirectory>(options);
    }

    // hashes: 16 bytes each, as one buffer, so that a prompt of thousands of blocks costs no Python object
    // per block. The answer is turned into Python row by row, when it is asked for.
    LocateAnswer locate(const py::object& hashes, bool prefix, uint16_t width, bool suspects,
                        uint8_t holders_max) {
        ArrayOf<Hash128> array(hashes, "hashes");
        return call("locate", [&]() -> Result<LocateAnswer> {
            auto answer = client_->locate(array.span(), LocateOptions{prefix, width, suspects, holders_max});
            // No holder would be said of a key whose master does not answer.
            if (answer && !answer->unreached.empty()) return answer->unreached.begin()->second;
            return answer;
        });
    }
    // A copy: the client goes on replacing its own list. former: while a restarted master fills, also the
    // members that its predecessor told of and that it does not list, yet.
    std::pair<uint64_t, std::vector<Member>> members(bool fresh, bool former) {
        std::shared_ptr<const Members> members = call("members", [&] { return client_->members(fresh); });
        std::vector<Member> rows = members->rows;
        if (former && members->before != nullptr) {
            for (const Member& member : members->before->rows) {
                auto is_it = [&](const Member& row) {
                    return row.identity.name == member.identity.name &&
                           row.identity.host_id == member.identity.host_id;
                };
                if (std::ranges::none_of(members->rows, is_it)) rows.push_back(member);
            }
        }
        return {members->epoch, std::move(rows)};
    }
    std::vector<NodeId> place(uint64_t bytes, uint16_t n, std::vector<NodeId> avoid_nodes,
                              std::vector<std::string> avoid_hosts, bool evict) {
        PlaceOptions options{std::move(avoid_nodes), std::move(avoid_hosts), evict};
        return call("place", [&] { return client_->place(bytes, n, options); });
    }
    uint32_t forget(const py::object& hashes, const std::vector<NodeId>& unreached) {
        ArrayOf<Hash128> array(hashes, "hashes");
        return call("forget", [&] { return client_->forget(array.span(), unreached); });
    }
    bool connected() const { return client_->connected(); }
    void close() {
        py::gil_scoped_release nogil;
        client_->close();
    }

   private:
    std::unique_ptr<PoolDirectory> client_;
};

// IndexError ends Python's iteration over an answer.
std::vector<std::pair<NodeId, uint8_t>> holders(const LocateAnswer& answer, size_t i) {
    if (i >= answer.keys.size()) throw py::index_error();
    std::vector<std::pair<NodeId, uint8_t>> rows;
    for (const Holder& holder : answer.keys[i]) {
        rows.emplace_back(holder.node, static_cast<uint8_t>(holder.tier));
    }
    return rows;
}

// Read-only rows; several are computed, since Python wants seconds and plain strings.
void bind_member(py::module_& m) {
    py::class_<TenantLoad>(m, "TenantLoad")
        .def_readonly("tenant", &TenantLoad::tenant)
        .def_readonly("arena_bytes", &TenantLoad::arena_bytes)
        .def_readonly("free_bytes", &TenantLoad::free_bytes)
        .def_readonly("objects", &TenantLoad::objects)
        .def_property_readonly("oldest_age_s", [](const TenantLoad& load) {
            return static_cast<double>(load.oldest_age_ms) / 1000;
        });
    py::class_<Member>(m, "Member", "A node as the master knows it.")
        .def_property_readonly("id", [](const Member& member) { return member.id; })
        .def_property_readonly("state", [](const Member& member) { return name_of(member.state); })
        .def_property_readonly("name", [](const Member& member) { return member.identity.name; })
        .def_property_readonly("host_id", [](const Member& member) { return member.identity.host_id; })
        .def_property_readonly("address", [](const Member& member) { return member.identity.address; })
        .def_property_readonly("socket_path",
                               [](const Member& member) { return member.identity.socket_path; })
        .def_property_readonly("events", [](const Member& member) { return member.identity.events; })
        .def_property_readonly("events_replay",
                               [](const Member& member) { return member.identity.events_replay; })
        .def_property_readonly("incarnation",
                               [](const Member& member) {
                                   return to_bytes(member.identity.incarnation.data(),
                                                   member.identity.incarnation.size());
                               })
        .def_property_readonly("tenants", [](const Member& member) { return member.load.tenants; })
        .def_property_readonly("ssd_bytes", [](const Member& member) { return member.load.ssd_bytes; })
        .def_property_readonly("ssd_free_bytes",
                               [](const Member& member) { return member.load.ssd_free_bytes; })
        .def_property_readonly(
            "silent_s", [](const Member& member) { return static_cast<double>(member.silent_ms) / 1000; });
    py::class_<MasterServer::NodeRow>(m, "NodeRow", "A member, and how many keys the directory has of it.")
        .def_readonly("member", &MasterServer::NodeRow::member)
        .def_readonly("dram_keys", &MasterServer::NodeRow::dram_keys)
        .def_readonly("ssd_keys", &MasterServer::NodeRow::ssd_keys);
}

}  // namespace

// Members first: the signatures of the classes below name them.
MasterState master_state(const std::string& address, const py::bytes& token, double timeout_s,
                         std::optional<std::shared_ptr<TlsClient>> tls) {
    DialOptions to;
    to.address = address;
    to.token = secrets_of(token);
    to.timeout_ms = milliseconds(timeout_s);
    to.tls = tls.value_or(nullptr);
    auto state = [&] {
        py::gil_scoped_release nogil;
        return ask_master_state(std::move(to));
    }();
    return unwrap(std::move(state), "status", address);
}

void bind_master_state(py::module_& m) {
    py::class_<MasterState>(m, "MasterState", "What a master says of itself.")
        .def_property_readonly("role", [](const MasterState& s) { return name_of(s.role); })
        .def_readonly("attached", &MasterState::attached, "The other one of the two is there.")
        .def_readonly("is_whole", &MasterState::is_whole, "The standby knows all that its owner knows.")
        .def_property_readonly(
            "range", [](const MasterState& s) { return std::pair(s.range.index, s.range.count); },
            "(index, count) of the range of shards that it has.")
        .def_readonly("nodes", &MasterState::nodes)
        .def_readonly("keys", &MasterState::rows, "Rows of the directory.")
        .def_property_readonly(
            "term", [](const MasterState& s) { return s.first >> kSequenceBits; },
            "When it began to order removals, ms since 1970.")
        .def_readonly("newest", &MasterState::newest, "The last version that it has given, or heard of.")
        .def_readonly("other", &MasterState::other,
                      "The name of an owner's standby; of a standby the address of its owner.")
        .def_property_readonly(
            "masters", [](const MasterState& s) { return s.masters.addresses; },
            "host:port of its range's masters, as it tells nodes and clients; empty: it is of the release "
            "before.")
        .def_property_readonly(
            "own_address", [](const MasterState& s) { return s.masters.own_address(); },
            "Which of them is its own; empty: it does not know.")
        .def_property_readonly(
            "lag_s", [](const MasterState& s) { return static_cast<double>(s.lag_ms) / 1000; },
            "For how long the standby has owed its word, s.");
    m.def("master_state", &master_state, py::arg("address"), py::arg("token"), py::kw_only(),
          py::arg("timeout_s") = 1.0, py::arg("tls") = py::none(),
          "Of the master at that address, also where it serves no clients.");
}

void bind_directory(py::module_& m) {
    bind_member(m);
    bind_master_state(m);
    py::class_<PyMasterServer>(m, "MasterServer", "The master's data plane: membership and directory.")
        .def(
            py::init<std::vector<std::string>, const py::bytes&, const py::dict&,
                     std::optional<std::shared_ptr<TlsServer>>, std::string,
                     std::optional<std::shared_ptr<TlsClient>>, bool, std::string,
                     std::pair<uint32_t, uint32_t>, std::string>(),
            py::arg("addresses"), py::arg("token"), py::arg("settings"), py::kw_only(),
            py::arg("tls") = py::none(), py::arg("standby_of") = "", py::arg("owner_tls") = py::none(),
            py::arg("elected") = false, py::arg("name") = "",
            py::arg("range") = std::pair<uint32_t, uint32_t>(0, 1), py::arg("advertise") = "",
            "settings: a value for each of setting_names(). standby_of: the owner that it follows. elected: "
            "follow() or take_over() says what it is; until then it serves none. name: by which an owner "
            "tells its standbys apart. range: (index, count) of the shards that it has. advertise: host:port "
            "by which others reach it; empty: as it listens.")
        .def_property_readonly("role", &PyMasterServer::role, "owner, standby, acting or superseded.")
        .def("standby", &PyMasterServer::standby,
             "(address, attached, whole, lag in s) of an owner's standby; of a standby, of itself and its "
             "owner")
        .def("follow", &PyMasterServer::follow, py::arg("owner"),
             "Another master is the owner. False: its loop does not answer.")
        .def("set_valid_for", &PyMasterServer::set_valid_for, py::arg("seconds"),
             "An owner orders nothing after so long, unless this is called again; None: for ever.")
        .def("set_elected_standby", &PyMasterServer::set_elected_standby, py::arg("name"),
             "The election names that standby, whose word alone counts from then on; \"\": none, and that of "
             "any "
             "standby counts; None: it is not known which, and that of none does. False: the loop does not "
             "answer.")
        .def("ask_hand_over", &PyMasterServer::ask_hand_over, py::arg("timeout_s"),
             "A standby that knows all takes the place of its owner, which becomes its standby. Raises the "
             "owner's refusal, or Timeout.")
        .def_property_readonly("hears_owner", &PyMasterServer::hears_owner,
                               "Whether this standby is connected to its owner.")
        .def("gives_to", &PyMasterServer::gives_to,
             "Of an elected owner: the name of the standby that it can hand over to now; empty: none asks.")
        .def("give", &PyMasterServer::give,
             "Hands over to that standby, which the election names. False: it is too late.")
        .def("keep", &PyMasterServer::keep, "Stays the owner. False: it is too late.")
        .def("take_over", &PyMasterServer::take_over,
             "The other one of the two is dead for good: a standby is the owner from now on, an owner that "
             "has "
             "lost its standby goes on alone. False: neither, or its loop does not answer.")
        .def_static("setting_names", &master_setting_names)
        .def("set_tenants", &PyMasterServer::set_tenants, py::arg("rows"),
             "The tenants' own keys from now on: (tenant, role, keys). Connections by others end.")
        .def_property_readonly("addresses", &PyMasterServer::addresses)
        .def_property_readonly("incarnation", &PyMasterServer::incarnation)
        .def("start", &PyMasterServer::start)
        .def("stop", &PyMasterServer::stop)
        .def("is_alive", &PyMasterServer::is_alive, py::arg("timeout_s"),
             "Whether the threads that serve answer within so many seconds.")
        .def_property_readonly("notes_fd", &PyMasterServer::notes_fd, "Readable when take_notes() has some.")
        .def("take_notes", &PyMasterServer::take_notes,
             "What happened, for a log: (level 0 to 3, kind, peer, text, left out before it)")
        .def("metrics", &PyMasterServer::metrics, "Counters (*_total) and gauges by name.")
        .def("histograms", &PyMasterServer::histograms,
             "name -> (upper bounds in s, counts with one more for +Inf, sum in s)")
        .def("nodes", &PyMasterServer::nodes,
             "(epoch, rows: the members by id, then what is remembered of those that are gone)")
        .def("check_integrity", &PyMasterServer::check_integrity, "Recounts every table; for tests.");

    py::class_<LocateAnswer>(m, "LocateAnswer", "The holders of each key: (node id, tier: 0 DRAM, 1 SSD).")
        .def("__len__", [](const LocateAnswer& answer) { return answer.keys.size(); })
        .def("__getitem__", &holders, py::arg("index"))
        .def_property_readonly("hits", [](const LocateAnswer& answer) {
            size_t hits = 0;
            for (size_t i = 0; i < answer.keys.size(); ++i) hits += !answer.keys[i].empty();
            return hits;
        });
    py::class_<PyDirectoryClient>(m, "DirectoryClient", "A process's way to the master's directory.")
        .def(py::init<std::string, const py::bytes&, std::string, double, std::string,
                      std::optional<std::shared_ptr<TlsClient>>>(),
             py::arg("master"), py::arg("token"), py::arg("tenant") = "default", py::arg("timeout_s") = 0.5,
             py::arg("interface") = "", py::arg("tls") = py::none())
        .def("locate", &PyDirectoryClient::locate, py::arg("hashes"), py::arg("prefix") = false,
             py::arg("width") = 1, py::arg("suspects") = false, py::arg("holders_max") = 0)
        .def("members", &PyDirectoryClient::members, py::arg("fresh") = false, py::arg("former") = false,
             "(epoch, rows by id). former: behind them, while a restarted master fills, the members that it "
             "had before and does not list, yet; their ids mean nothing")
        .def("place", &PyDirectoryClient::place, py::arg("bytes"), py::arg("n") = 1,
             py::arg("avoid_nodes") = std::vector<NodeId>{},
             py::arg("avoid_hosts") = std::vector<std::string>{}, py::arg("evict") = false)
        .def("forget", &PyDirectoryClient::forget, py::arg("hashes"),
             py::arg("unreached") = std::vector<NodeId>{})
        .def_property_readonly("connected", &PyDirectoryClient::connected)
        .def("close", &PyDirectoryClient::close);
}

}  // namespace moonpool::python
