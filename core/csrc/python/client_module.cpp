// moonpool._native.Client: the binding of the store's client, method by method. It decides nothing about
// where objects are or go; that is store/client. The form of the answers that Worker shares stands in
// answers.cpp.
//
// The pattern of every call: arguments are taken while the GIL is held (Names and Buffers keep the Python
// objects alive), the work is done without it, and the answer is made with it again. An error of the core
// becomes an exception in unwrap(), which needs the GIL.
//
// A PyClient may be used by several threads; Client orders them. Views that a call returned hold their pins
// by themselves, and outlive both the call and the PyClient.
#include "python/client_module.hpp"

#include <pybind11/stl.h>

#include <string_view>
#include <unordered_map>

#include "memory/copier.hpp"
#include "python/module.hpp"
#include "python/raise.hpp"
#include "python/secrets.hpp"
#include "python/server_module.hpp"

namespace moonpool::python {

PyClient::PyClient(std::string socket_path, const py::bytes& token, std::string tenant,
                   std::string name_space, const py::bytes& fingerprint, double timeout_s,
                   const py::object& embedded, std::optional<std::shared_ptr<TlsClient>> tls,
                   std::optional<std::shared_ptr<TlsClient>> data_tls) {
    ClientOptions options;
    // One argument for both kinds of addresses, as users write them: a path, or tcp://HOST:PORT.
    constexpr std::string_view kTcp = "tcp://";
    peer_ = !embedded.is_none() ? "the embedded node" : socket_path;
    if (socket_path.starts_with(kTcp)) {
        options.address = socket_path.substr(kTcp.size());
    } else {
        options.socket_path = std::move(socket_path);
    }
    options.token = secrets_of(token);
    options.tenant = std::move(tenant);
    options.name_space = std::move(name_space);
    options.fingerprint = std::string(fingerprint);
    options.timeout_ms = milliseconds(timeout_s);
    options.tls = tls.value_or(nullptr);
    options.data_tls = data_tls.value_or(nullptr);
    // A node in this process: the connection is a socket pair that the node makes. keep_alive below keeps
    // the Python object of the node for as long as the client.
    if (!embedded.is_none()) {
        options.dial = [server = embedded.cast<const PyServer&>().server()] { return server->dial(); };
    }
    // Shared, because Worker and BatchClient run operations on it after this object may have gone.
    client_ = std::make_shared<Client>(std::move(options));
}

void PyClient::connect() {
    py::gil_scoped_release nogil;
    Status status = client_->connect();
    py::gil_scoped_acquire gil;
    unwrap(std::move(status), "connect", peer_);
}

bool PyClient::connected() {
    py::gil_scoped_release nogil;
    return client_->connected();
}

py::bytes PyClient::incarnation() {
    Incarnation life = client_->incarnation();
    if (life == Incarnation{}) return py::bytes();
    return py::bytes(reinterpret_cast<const char*>(life.data()), life.size());
}

void PyClient::close() {
    py::gil_scoped_release nogil;
    client_->close();
}

// All arguments are checked before the first byte moves, so that a wrong call stores nothing. timeout_s of 0
// or less means the client's own.
py::tuple PyClient::put(const py::object& keys, const py::object& buffers, const py::object& parents,
                        bool replace, bool ack, double timeout_s, uint32_t replicas, const py::object& nodes,
                        const py::object& groups, double soft_pin_s, bool unique) {
    Names names(keys);
    Buffers parts(buffers, false);
    Names parent_names = parents.is_none() ? Names() : Names(parents);
    check_counts(names.size(), parts.size(), "buffers");
    if (!parents.is_none()) check_counts(names.size(), parent_names.size(), "parents");
    Names group_names = groups.is_none() ? Names() : Names(groups);
    if (!groups.is_none()) check_counts(names.size(), group_names.size(), "groups");
    std::vector<PutItem> items = put_items(names, parts, parent_names, group_names, soft_pin_s);
    PutOptions options{replace,           ack,   replicas, timeout_s > 0 ? milliseconds(timeout_s) : 0,
                       node_names(nodes), unique};
    py::gil_scoped_release nogil;
    Result<PutReport> report = client_->put(items, options);
    py::gil_scoped_acquire gil;
    return put_answer(unwrap(std::move(report), "put", peer_));
}

// The buffers are written while the GIL is released: the caller must leave them alone until the call
// returns.
py::list PyClient::get_into(const py::object& keys, const py::object& buffers, bool verify) {
    Names names(keys);
    Buffers parts(buffers, true);
    check_counts(names.size(), parts.size(), "buffers");
    std::vector<GetItem> items = get_items(names, parts);
    py::gil_scoped_release nogil;
    Result<std::vector<int64_t>> sizes = client_->get(items, verify);
    py::gil_scoped_acquire gil;
    return get_answer(unwrap(std::move(sizes), "get", peer_));
}

py::list PyClient::get_views(const py::object& keys, bool verify) {
    Names names(keys);
    py::gil_scoped_release nogil;
    auto views = client_->views(names.views(), verify);
    py::gil_scoped_acquire gil;
    return views_answer(unwrap(std::move(views), "get", peer_));
}

// The pin is a Python object; when it is dropped its destructor releases the pin at the node.
py::tuple PyClient::pin(const py::object& keys) {
    Names names(keys);
    py::gil_scoped_release nogil;
    auto pinned = client_->pin(names.views());
    py::gil_scoped_acquire gil;
    return pin_answer(unwrap(std::move(pinned), "pin", peer_), names);
}

py::list PyClient::pinned_views(const std::shared_ptr<PyPin>& pin, const py::object& keys, bool verify) {
    Names names(keys);
    std::vector<size_t> places = places_in(*pin, names);
    Pinned held = pin->held;  // another thread may release the pin meanwhile
    py::gil_scoped_release nogil;
    auto views = client_->views(held, places, names.views(), verify);
    py::gil_scoped_acquire gil;
    return views_answer(unwrap(std::move(views), "get", peer_));
}

// Under a pin no node is asked what it has: descriptors are known, and the copy begins at once.
py::list PyClient::pinned_into(const std::shared_ptr<PyPin>& pin, const py::object& keys,
                               const py::object& buffers, bool verify) {
    Names names(keys);
    Buffers parts(buffers, true);
    check_counts(names.size(), parts.size(), "buffers");
    std::vector<size_t> places = places_in(*pin, names);
    std::vector<GetItem> items = get_items(names, parts);
    Pinned held = pin->held;  // another thread may release the pin meanwhile
    py::gil_scoped_release nogil;
    auto sizes = client_->get_pinned(held, places, items, verify);
    py::gil_scoped_acquire gil;
    return get_answer(unwrap(std::move(sizes), "get", peer_));
}

py::bytes PyClient::exists(const py::object& keys) {
    Names names(keys);
    py::gil_scoped_release nogil;
    auto present = client_->exists(names.views());
    py::gil_scoped_acquire gil;
    return to_bytes(unwrap(std::move(present), "exists", peer_));
}

py::tuple PyClient::longest_prefix(const py::object& keys, uint32_t width, bool pin) {
    Names names(keys);
    py::gil_scoped_release nogil;
    auto prefix = client_->longest_prefix(names.views(), width, pin);
    py::gil_scoped_acquire gil;
    return prefix_answer(unwrap(std::move(prefix), "longest_prefix", peer_), names, width);
}

py::tuple PyClient::remove(const py::object& keys, const std::optional<std::string>& node,
                           const std::vector<uint64_t>& generations) {
    Names names(keys);
    if (!generations.empty()) check_counts(names.size(), generations.size(), "generations");
    py::gil_scoped_release nogil;
    // At one node, if given only copies of these generations; or at every node that has the key.
    Result<RemoveReport> report = RemoveReport{};
    if (!node) {
        report = client_->remove(names.views());
    } else if (auto removed = client_->remove_at(names.views(), *node, generations)) {
        report->flags = std::move(*removed);
    } else {
        report = removed.error();
    }
    py::gil_scoped_acquire gil;
    return remove_answer(unwrap(std::move(report), "remove", peer_));
}

// Names are bytes in Python, whatever they were when they were put.
py::list PyClient::list(const py::bytes& prefix, uint64_t limit) {
    std::string text(prefix);
    py::gil_scoped_release nogil;
    auto rows = client_->list(text, limit);
    py::gil_scoped_acquire gil;
    py::list out;
    for (ListRow& row : unwrap(std::move(rows), "list", peer_)) {
        out.append(py::make_tuple(py::bytes(row.name), row.size, row.generation, row.crc, row.pins));
    }
    return out;
}

// Of the node, as its own metrics page has them.
std::map<std::string, uint64_t> PyClient::stat() {
    py::gil_scoped_release nogil;
    auto rows = client_->stat();
    py::gil_scoped_acquire gil;
    std::map<std::string, uint64_t> out;
    for (auto& [name, value] : unwrap(std::move(rows), "stat", peer_)) out.emplace(name, value);
    return out;
}

py::bytes PyClient::key_hashes(const py::object& keys) const {
    Names names(keys);
    return to_bytes(client_->hashes(names.views()));
}

py::list PyClient::describe(const py::object& keys, bool everywhere) {
    Names names(keys);
    py::gil_scoped_release nogil;
    auto states = client_->describe(names.views(), everywhere);
    py::gil_scoped_acquire gil;
    py::list out;
    for (const ObjectState& state : unwrap(std::move(states), "stat", peer_)) {
        if (state.copies.empty()) {
            out.append(py::none());
            continue;
        }
        py::list copies;
        for (const Copy& copy : state.copies) {
            const Description& d = copy.what;
            copies.append(py::make_tuple(copy.node, copy.host_id, copy.address, d.size, d.generation, d.crc,
                                         d.pins, d.where, d.keep));
        }
        out.append(py::make_tuple(state.size, copies));
    }
    return out;
}

// Bytes are compared with their checksum first: the copy gets a checksum of its own.
py::tuple PyClient::copy_out(const std::shared_ptr<OutgoingObjects>& held, bool evict) {
    constexpr char kGone = 4, kDamaged = 5;
    std::string outcomes(held->rows(), kGone);
    std::vector<PutItem> items;
    std::vector<size_t> rows;
    Result<CopyReport> report = CopyReport{};
    {
        py::gil_scoped_release nogil;
        for (const OutgoingObjects::Object& object : held->objects()) {
            std::span<const MemoryRef> parts(&object.bytes, 1);
            Result<uint32_t> crc = checksum(parts, object.bytes.bytes);
            if (!crc || *crc != object.crc) {
                outcomes[object.row] = kDamaged;
                continue;
            }
            items.push_back({object.name, object.parent, parts, object.group, object.soft_ms, object.after});
            rows.push_back(object.row);
        }
        report = client_->copy_out(items, evict);
    }
    CopyReport done = unwrap(std::move(report), "drain", peer_);
    for (size_t i = 0; i < rows.size(); ++i) outcomes[rows[i]] = static_cast<char>(done.outcomes[i]);
    return py::make_tuple(py::bytes(outcomes), done.why);
}

// Where each name stands among those of the pin. A name that the pin does not have is a miss, not an error;
// a pin that was released is an error, since its memory may be another object's.
std::vector<size_t> PyClient::places_in(const PyPin& pin, const Names& names) {
    unwrap(client_->check_open(), "get", peer_);
    if (pin.held.pins.empty()) raise(Error{Code::kClosed, "this pin was released"}, "get", peer_);
    std::unordered_map<std::string_view, size_t> by_name;
    for (size_t i = 0; i < pin.names.size(); ++i) by_name.emplace(pin.names[i], i);
    std::vector<size_t> places;
    for (std::string_view name : names.views()) {
        auto it = by_name.find(name);
        places.push_back(it == by_name.end() ? kNotPinned : it->second);
    }
    return places;
}

void bind_client(py::module_& m) {
    // The type of the views is a plain CPython type, which has to exist before the first view.
    prepare_views();

    py::class_<PyPin, std::shared_ptr<PyPin>>(
        m, "Pin", "A right to read some objects; released by release() or when dropped.")
        .def("release", &PyPin::release)
        .def_property_readonly("names",
                               [](const PyPin& pin) {
                                   py::list names;
                                   for (const std::string& name : pin.names) names.append(py::bytes(name));
                                   return names;
                               })
        .def_property_readonly("objects", &PyPin::objects,
                               "(size, whether it lies on another host, whence reading takes a network) of "
                               "each name; -1: a miss")
        .def("hand_over", &PyPin::hand_over,
             "Of a longest_prefix: (holders, descriptors) for submit_load of this process, while the pin is "
             "kept; empty when it was released.");

    py::class_<PyClient>(m, "Client", "One process's access to one node, in one space.")
        .def(py::init<std::string, const py::bytes&, std::string, std::string, const py::bytes&, double,
                      const py::object&, std::optional<std::shared_ptr<TlsClient>>,
                      std::optional<std::shared_ptr<TlsClient>>>(),
             py::arg("socket_path"), py::arg("token"), py::arg("tenant") = "default",
             py::arg("namespace") = "default", py::arg("fingerprint") = py::bytes(),
             py::arg("timeout_s") = 2.0, py::arg("embedded") = py::none(), py::arg("tls") = py::none(),
             py::arg("data_tls") = py::none(), py::keep_alive<1, 8>(),
             "tls: to the pool's master. data_tls: to nodes of other hosts. None: in plain.")
        .def("connect", &PyClient::connect)
        .def_property_readonly("connected", &PyClient::connected)
        .def_property_readonly("incarnation", &PyClient::incarnation,
                               "Of the node that was there at the last call; empty when none was.")
        .def("close", &PyClient::close)
        .def("put", &PyClient::put, py::arg("keys"), py::arg("buffers"), py::arg("parents") = py::none(),
             py::arg("replace") = false, py::arg("ack") = true, py::arg("timeout_s") = -1.0,
             py::arg("replicas") = 1, py::arg("nodes") = py::none(), py::arg("groups") = py::none(),
             py::arg("soft_pin_s") = 0.0, py::arg("unique") = false)
        .def("get_into", &PyClient::get_into, py::arg("keys"), py::arg("buffers"), py::arg("verify") = false)
        .def("get_views", &PyClient::get_views, py::arg("keys"), py::arg("verify") = false)
        .def("pin", &PyClient::pin, py::arg("keys"))
        .def("pinned_views", &PyClient::pinned_views, py::arg("pin"), py::arg("keys"),
             py::arg("verify") = false)
        .def("pinned_into", &PyClient::pinned_into, py::arg("pin"), py::arg("keys"), py::arg("buffers"),
             py::arg("verify") = false)
        .def("exists", &PyClient::exists, py::arg("keys"))
        .def("longest_prefix", &PyClient::longest_prefix, py::arg("keys"), py::arg("width") = 1,
             py::arg("pin") = true)
        .def("remove", &PyClient::remove, py::arg("keys"), py::arg("node") = py::none(),
             py::arg("generations") = std::vector<uint64_t>())
        .def("list", &PyClient::list, py::arg("prefix"), py::arg("limit"))
        .def("stat", &PyClient::stat)
        .def("describe", &PyClient::describe, py::arg("keys"), py::arg("everywhere") = true)
        .def("key_hashes", &PyClient::key_hashes, py::arg("keys"),
             "Of each key the 16 bytes by which the directory knows it, with the tenant's salt.")
        .def("copy_out", &PyClient::copy_out, py::arg("held"), py::arg("evict"),
             "Copies to other hosts what none of them has. (a byte for each row: 0 copied, 1 another host "
             "had it, 2 no node took it, 3 ask again, 4 it is gone, 5 it is damaged; why no node took it)");
}

}  // namespace moonpool::python
