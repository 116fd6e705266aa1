// moonpool._native: the C++ core as Python sees it. The only file that knows pybind11's module; arguments are
// taken while the GIL is held, the work is done without it.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <map>
#include <memory>
#include <numeric>
#include <unordered_map>

#include "base/crc32c.hpp"
#include "base/digest.hpp"
#include "base/xxh3.hpp"
#include "python/arguments.hpp"
#include "python/raise.hpp"
#include "python/view.hpp"
#include "store/client.hpp"
#include "store/server.hpp"
#include "store/space.hpp"
#include "store/worker.hpp"

namespace moonpool::python {

namespace {

PyTypeObject* view_type = nullptr;

py::bytes to_bytes(const void* data, size_t size) { return py::bytes(static_cast<const char*>(data), size); }

template <class T>
py::bytes to_bytes(const std::vector<T>& items) {
    return to_bytes(items.data(), items.size() * sizeof(T));
}

// At least one, since 0 means for ever to the kernel, and at most a day.
int milliseconds(double seconds) { return static_cast<int>(std::clamp(seconds, 0.001, 86400.0) * 1000); }

// ---- Server

class PyServer {
   public:
    PyServer(std::string socket_path, const std::vector<std::pair<std::string, uint64_t>>& tenants,
             const py::bytes& token, std::string name, uint32_t objects_max, uint64_t slab_bytes,
             uint32_t connections_max, uint64_t scrub_bytes_per_s, uint32_t key_bytes_max, uint32_t parts_max,
             uint32_t frame_bytes_max, uint32_t frame_keys_max, double object_share_max)
        : name_(std::move(name)) {
        ServerOptions options;
        options.socket_path = std::move(socket_path);
        options.token = std::string(token);
        for (const auto& [tenant, bytes] : tenants) {
            options.pools.push_back(PoolOptions{tenant, bytes, objects_max, slab_bytes});
        }
        options.limits.connections = connections_max;
        options.limits.key_bytes = key_bytes_max;
        options.limits.parts = parts_max;
        options.limits.frame_bytes = frame_bytes_max;
        options.limits.frame_keys = frame_keys_max;
        options.limits.object_share = object_share_max;
        options.scrub_bytes_per_s = scrub_bytes_per_s;
        server_ = unwrap(Server::create(std::move(options)), "node");
    }

    void start() {
        py::gil_scoped_release nogil;
        Status status = server_->start();
        py::gil_scoped_acquire gil;
        unwrap(std::move(status), "node");
    }
    void stop() {
        py::gil_scoped_release nogil;
        server_->stop();
    }
    std::map<std::string, uint64_t> metrics() {
        std::map<std::string, uint64_t> rows;
        py::gil_scoped_release nogil;
        for (auto& [name, value] : server_->snapshot()) rows.emplace(name, value);
        return rows;
    }
    py::dict histograms() {
        py::dict all;
        const NodeMetrics& m = server_->metrics();
        const std::pair<const char*, const LatencyHistogram*> rows[] = {{"lease_seconds", &m.lease},
                                                                        {"commit_seconds", &m.commit},
                                                                        {"lookup_seconds", &m.lookup},
                                                                        {"other_seconds", &m.other}};
        for (auto& [name, histogram] : rows) {
            std::vector<double> bounds(LatencyHistogram::kBoundsSeconds.begin(),
                                       LatencyHistogram::kBoundsSeconds.end());
            std::vector<uint64_t> counts;
            for (size_t i = 0; i <= bounds.size(); ++i) counts.push_back(histogram->count(i));
            all[name] = py::make_tuple(bounds, counts, histogram->sum_seconds());
        }
        return all;
    }
    bool check_integrity() {
        py::gil_scoped_release nogil;
        return server_->check_integrity();
    }
    const std::string& name() const { return name_; }
    const std::shared_ptr<Server>& server() const { return server_; }

   private:
    std::string name_;
    std::shared_ptr<Server> server_;
};

// ---- Client

struct PyPin {
    Pinned held;
    std::vector<std::string> names;  // one for each descriptor; generation 0: was not found, is not pinned

    void release() { held.pins.clear(); }  // views that were made under it go on holding it
};

class PyClient {
   public:
    PyClient(std::string socket_path, const py::bytes& token, std::string tenant, std::string name_space,
             const py::bytes& fingerprint, double timeout_s, const py::object& embedded) {
        ClientOptions options;
        options.socket_path = std::move(socket_path);
        options.token = std::string(token);
        options.tenant = std::move(tenant);
        options.name_space = std::move(name_space);
        options.fingerprint = std::string(fingerprint);
        options.timeout_ms = milliseconds(timeout_s);
        if (!embedded.is_none()) {
            options.dial = [server = embedded.cast<const PyServer&>().server()] { return server->dial(); };
        }
        peer_ = !embedded.is_none() ? "the embedded node" : options.socket_path;
        client_ = std::make_shared<Client>(std::move(options));
    }

    void connect() {
        py::gil_scoped_release nogil;
        Status status = client_->connect();
        py::gil_scoped_acquire gil;
        unwrap(std::move(status), "connect", peer_);
    }
    bool connected() {
        py::gil_scoped_release nogil;
        return client_->connected();
    }
    void close() {
        py::gil_scoped_release nogil;
        client_->close();
    }

    py::tuple put(const py::object& keys, const py::object& buffers, const py::object& parents, bool replace,
                  bool ack, double timeout_s) {
        Names names(keys);
        Buffers parts(buffers, false);
        Names parent_names = parents.is_none() ? Names() : Names(parents);
        check_counts(names.size(), parts.size(), "buffers");
        if (!parents.is_none()) check_counts(names.size(), parent_names.size(), "parents");
        std::vector<PutItem> items = put_items(names, parts, parent_names);
        py::gil_scoped_release nogil;
        Result<PutReport> report =
            client_->put(items, replace, ack, timeout_s > 0 ? milliseconds(timeout_s) : 0);
        py::gil_scoped_acquire gil;
        return put_answer(unwrap(std::move(report), "put", peer_));
    }

    py::list get_into(const py::object& keys, const py::object& buffers, bool verify) {
        Names names(keys);
        Buffers parts(buffers, true);
        check_counts(names.size(), parts.size(), "buffers");
        std::vector<GetItem> items = get_items(names, parts);
        py::gil_scoped_release nogil;
        Result<std::vector<int64_t>> sizes = client_->get(items, verify);
        py::gil_scoped_acquire gil;
        return get_answer(unwrap(std::move(sizes), "get", peer_));
    }

    py::list get_views(const py::object& keys, bool verify) {
        Names names(keys);
        Pinned pinned = unwrap(pin_names(names, verify), "get", peer_);
        return views_answer(pinned, all_places(names.size()));
    }

    py::tuple pin(const py::object& keys) {
        Names names(keys);
        Pinned pinned = unwrap(pin_names(names, false), "pin", peer_);
        return pin_answer(std::move(pinned), names);
    }

    // Keys under a pin taken before, as views or copied; None for a key that the pin does not cover.
    py::list pinned_views(const std::shared_ptr<PyPin>& pin, const py::object& keys, bool verify) {
        Names names(keys);
        std::vector<size_t> places = places_in(*pin, names);
        if (verify) {
            py::gil_scoped_release nogil;
            Status status = Client::verify(pin->held, places, names.views());
            py::gil_scoped_acquire gil;
            unwrap(std::move(status), "get", peer_);
        }
        return views_answer(pin->held, places);
    }

    py::list pinned_into(const std::shared_ptr<PyPin>& pin, const py::object& keys, const py::object& buffers,
                         bool verify) {
        Names names(keys);
        Buffers parts(buffers, true);
        check_counts(names.size(), parts.size(), "buffers");
        std::vector<size_t> places = places_in(*pin, names);
        std::vector<GetItem> items = get_items(names, parts);
        Pinned held = pin->held;  // another thread may release the pin meanwhile
        py::gil_scoped_release nogil;
        auto sizes = Client::get_pinned(held, places, items, verify);
        py::gil_scoped_acquire gil;
        return get_answer(unwrap(std::move(sizes), "get", peer_));
    }

    py::bytes exists(const py::object& keys) {
        Names names(keys);
        py::gil_scoped_release nogil;
        auto present = client_->exists(names.views());
        py::gil_scoped_acquire gil;
        return to_bytes(unwrap(std::move(present), "exists", peer_));
    }

    py::tuple longest_prefix(const py::object& keys, uint32_t width, bool pin) {
        Names names(keys);
        py::gil_scoped_release nogil;
        auto prefix = client_->longest_prefix(names.views(), width, pin);
        py::gil_scoped_acquire gil;
        return prefix_answer(unwrap(std::move(prefix), "longest_prefix", peer_), names);
    }

    py::bytes remove(const py::object& keys) {
        Names names(keys);
        py::gil_scoped_release nogil;
        auto removed = client_->remove(names.views());
        py::gil_scoped_acquire gil;
        return to_bytes(unwrap(std::move(removed), "remove", peer_));
    }

    py::list list(const py::bytes& prefix, uint64_t limit) {
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

    std::map<std::string, uint64_t> stat() {
        py::gil_scoped_release nogil;
        auto rows = client_->stat();
        py::gil_scoped_acquire gil;
        std::map<std::string, uint64_t> out;
        for (auto& [name, value] : unwrap(std::move(rows), "stat", peer_)) out.emplace(name, value);
        return out;
    }

    const std::shared_ptr<Client>& client() const { return client_; }
    const std::string& peer() const { return peer_; }

    // ---- shared with the worker's answers

    static void check_counts(size_t keys, size_t others, const char* what) {
        if (keys == others) return;
        raise(Error{Code::kInvalidArgument,
                    std::to_string(keys) + " keys came with " + std::to_string(others) + " " + what},
              "arguments");
    }

    static std::vector<PutItem> put_items(const Names& names, const Buffers& parts, const Names& parents) {
        std::vector<PutItem> items;
        items.reserve(names.size());
        for (size_t i = 0; i < names.size(); ++i) {
            items.push_back({names.views()[i], parents.size() == 0 ? std::string_view() : parents.views()[i],
                             parts.parts(i)});
        }
        return items;
    }

    static std::vector<GetItem> get_items(const Names& names, const Buffers& parts) {
        std::vector<GetItem> items;
        items.reserve(names.size());
        for (size_t i = 0; i < names.size(); ++i) items.push_back({names.views()[i], parts.parts(i)});
        return items;
    }

    // (one outcome byte per key: 0 stored, 1 exists, 2 refused; why refused)
    static py::tuple put_answer(const PutReport& report) {
        return py::make_tuple(to_bytes(report.outcomes), report.refusal);
    }

    static py::list get_answer(const std::vector<int64_t>& sizes) {
        py::list out(sizes.size());
        for (size_t i = 0; i < sizes.size(); ++i) {
            out[i] = sizes[i] == kMiss ? py::object(py::none()) : py::object(py::int_(sizes[i]));
        }
        return out;
    }

    static Result<Pinned> pin_and_verify(Client& client, const Names& names, bool verify) {
        Result<Pinned> pinned = client.pin(names.views());
        if (!pinned || !verify) return pinned;
        Status status = Client::verify(*pinned, all_places(names.size()), names.views());
        return status ? std::move(pinned) : Result<Pinned>(status.error());
    }

    static std::vector<size_t> all_places(size_t n) {
        std::vector<size_t> places(n);
        std::iota(places.begin(), places.end(), 0);
        return places;
    }

    static py::list views_answer(const Pinned& pinned, const std::vector<size_t>& places) {
        py::list out(places.size());
        for (size_t i = 0; i < places.size(); ++i) {
            if (places[i] == kNotPinned || pinned.descriptors[places[i]].generation == 0) {
                out[i] = py::none();
                continue;
            }
            const Descriptor& d = pinned.descriptors[places[i]];
            const std::shared_ptr<Pin>& pin = pinned.pin_of(places[i]);
            pin->session()->note_read(d.slot, d.size);
            out[i] = make_view(view_type, pin, pin->session()->arena() + d.offset, d.size);
        }
        return out;
    }

    static py::tuple pin_answer(Pinned pinned, const Names& names) {
        std::string hits;
        for (const Descriptor& d : pinned.descriptors) hits.push_back(d.generation != 0);
        if (hits.find('\1') == std::string::npos) return py::make_tuple(py::bytes(hits), py::none());
        auto pin = std::make_shared<PyPin>();
        pin->names.assign(names.views().begin(), names.views().end());
        pin->held = std::move(pinned);
        return py::make_tuple(py::bytes(hits), pin);
    }

    static py::tuple prefix_answer(Prefix prefix, const Names& names) {
        if (prefix.pins.empty()) return py::make_tuple(prefix.blocks, py::none());
        auto pin = std::make_shared<PyPin>();
        for (size_t i = 0; i < prefix.descriptors.size(); ++i) pin->names.emplace_back(names.views()[i]);
        pin->held = std::move(prefix);
        return py::make_tuple(prefix.blocks, pin);
    }

   private:
    Result<Pinned> pin_names(const Names& names, bool verify) {
        py::gil_scoped_release nogil;
        return pin_and_verify(*client_, names, verify);
    }

    std::vector<size_t> places_in(const PyPin& pin, const Names& names) {
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

    std::shared_ptr<Client> client_;
    std::string peer_;
};

// ---- Worker

struct PrefixAnswer {
    uint64_t blocks = 0;
    uint64_t pin_id = 0;
    py::bytes incarnation, descriptors;
    std::string error;
};

struct LoadAnswer {
    py::bytes ok;
    uint64_t bytes_loaded = 0;
    std::string error;
};

struct SaveAnswer {
    uint64_t stored = 0, existed = 0, refused = 0, bytes_stored = 0;
    std::string error;
};

// n names of equal size, one behind the other.
std::vector<std::string_view> split(std::string_view names, size_t name_size) {
    std::vector<std::string_view> out;
    if (name_size == 0) return out;
    out.reserve(names.size() / name_size);
    for (size_t at = 0; at + name_size <= names.size(); at += name_size)
        out.push_back(names.substr(at, name_size));
    return out;
}

class PyWorker {
   public:
    PyWorker(const PyClient& client, uint32_t threads, uint32_t queue_max)
        : client_(client.client()), peer_(client.peer()), worker_(threads, queue_max) {}

    int event_fd() const { return worker_.event_fd(); }

    py::list poll() {
        py::list out;
        for (uint64_t ticket : worker_.poll()) {
            auto node = pending_.extract(ticket);
            if (!node.empty()) out.append(py::make_tuple(ticket, node.mapped()->answer()));
        }
        return out;
    }

    void close() {
        {
            py::gil_scoped_release nogil;
            worker_.close();
        }
        pending_.clear();
        pins_.clear();
    }

    void release(uint64_t pin_id) { pins_.erase(pin_id); }

    uint64_t submit_prefix(const py::bytes& names, size_t name_size, uint32_t width) {
        struct Op : Pending {
            std::string names;
            size_t name_size;
            uint32_t width;
            Result<Prefix> result = Prefix{};
            PyWorker* owner;
            void run(Client& client) override {
                result = client.longest_prefix(split(names, name_size), width, true);
            }
            py::object answer() override {
                PrefixAnswer a;
                if (!result) {
                    a.error = result.error().text;
                    return py::cast(a);
                }
                a.blocks = result->blocks;
                a.incarnation = to_bytes(result->incarnation.data(), result->incarnation.size());
                a.descriptors = to_bytes(result->descriptors);
                if (!result->pins.empty()) a.pin_id = owner->keep(std::move(result->pins));
                return py::cast(a);
            }
        };
        auto op = std::make_shared<Op>();
        op->names = std::string(names);
        op->name_size = name_size;
        op->width = width;
        op->owner = this;
        return submit(op);
    }

    uint64_t submit_load(const py::bytes& incarnation, const py::bytes& descriptors,
                         std::shared_ptr<PartTable> parts, const py::object& indices,
                         const py::object& columns, bool verify) {
        struct Op : Pending {
            Incarnation incarnation;
            std::vector<Descriptor> descriptors;
            std::shared_ptr<PartTable> parts;
            std::vector<uint32_t> indices;
            std::vector<uint16_t> columns;
            bool verify;
            LoadReport report;
            void run(Client& client) override {
                report = client.load(incarnation, descriptors, *parts, indices, columns, verify);
            }
            py::object answer() override {
                return py::cast(LoadAnswer{to_bytes(report.ok), report.bytes, report.error});
            }
        };
        auto op = std::make_shared<Op>();
        std::string_view life(incarnation), rows(descriptors);
        if (life.size() != op->incarnation.size() || rows.size() % sizeof(Descriptor) != 0) {
            raise(Error{Code::kInvalidArgument, "incarnation has 16 bytes, descriptors 32 for each object"},
                  "load", peer_);
        }
        std::memcpy(op->incarnation.data(), life.data(), life.size());
        op->descriptors.resize(rows.size() / sizeof(Descriptor));
        std::memcpy(op->descriptors.data(), rows.data(), rows.size());
        take_places(indices, columns, op->descriptors.size(), op->indices, op->columns);
        op->parts = std::move(parts);
        op->verify = verify;
        return submit(op);
    }

    uint64_t submit_save(const py::bytes& names, size_t name_size, const py::bytes& parents,
                         std::shared_ptr<PartTable> parts, const py::object& indices,
                         const py::object& columns) {
        struct Op : Pending {
            std::string names, parents;
            size_t name_size;
            std::shared_ptr<PartTable> parts;
            std::vector<uint32_t> indices;
            std::vector<uint16_t> columns;
            Result<PutReport> result = PutReport{};
            void run(Client& client) override {
                std::vector<std::string_view> keys = split(names, name_size),
                                              above = split(parents, name_size);
                std::vector<std::vector<Part>> sources(keys.size());
                std::vector<PutItem> items;
                for (size_t i = 0; i < keys.size(); ++i) {
                    if (columns[i] >= parts->columns()) {
                        result = Error{Code::kInvalidArgument, "a column is not in the part table"};
                        return;
                    }
                    parts->parts(columns[i], indices[i], sources[i]);
                    std::string_view parent = above.empty() ? std::string_view() : above[i];
                    // All zero bytes: the first block of a chain, which has no parent.
                    if (parent.find_first_not_of('\0') == std::string_view::npos) parent = {};
                    items.push_back({keys[i], parent, sources[i]});
                }
                result = client.put(items, false, true);
            }
            py::object answer() override {
                SaveAnswer a;
                if (!result) {
                    a.error = result.error().text;
                    a.refused = indices.size();
                    return py::cast(a);
                }
                for (PutOutcome outcome : result->outcomes) {
                    a.stored += outcome == PutOutcome::kStored;
                    a.existed += outcome == PutOutcome::kExists;
                    a.refused += outcome == PutOutcome::kRefused;
                }
                a.bytes_stored = result->stored_bytes;
                a.error = result->refusal;
                return py::cast(a);
            }
        };
        auto op = std::make_shared<Op>();
        op->names = std::string(names);
        op->parents = std::string(parents);
        op->name_size = name_size;
        size_t n = name_size == 0 ? 0 : op->names.size() / name_size;
        if (!op->parents.empty() && op->parents.size() != op->names.size()) {
            raise(Error{Code::kInvalidArgument, "parents must be empty or as long as names"}, "save", peer_);
        }
        take_places(indices, columns, n, op->indices, op->columns);
        op->parts = std::move(parts);
        return submit(op);
    }

    uint64_t submit_put(const py::object& keys, const py::object& buffers, const py::object& parents,
                        bool replace, bool ack, double timeout_s) {
        struct Op : Pending {
            Names names, parent_names;
            Buffers buffers;
            bool replace, ack;
            int timeout_ms = 0;
            Result<PutReport> result = PutReport{};
            Op(const py::object& k, const py::object& b, const py::object& p)
                : names(k), parent_names(p.is_none() ? Names() : Names(p)), buffers(b, false) {}
            void run(Client& client) override {
                result =
                    client.put(PyClient::put_items(names, buffers, parent_names), replace, ack, timeout_ms);
            }
            py::object answer() override {
                return result ? py::object(PyClient::put_answer(*result)) : failure(result.error(), "put");
            }
        };
        auto op = std::make_shared<Op>(keys, buffers, parents);
        PyClient::check_counts(op->names.size(), op->buffers.size(), "buffers");
        if (!parents.is_none()) PyClient::check_counts(op->names.size(), op->parent_names.size(), "parents");
        op->replace = replace;
        op->ack = ack;
        op->timeout_ms = timeout_s > 0 ? milliseconds(timeout_s) : 0;
        return submit(op);
    }

    uint64_t submit_get_into(const py::object& keys, const py::object& buffers, bool verify) {
        struct Op : Pending {
            Names names;
            Buffers buffers;
            bool verify = false;
            Result<std::vector<int64_t>> result = std::vector<int64_t>{};
            Op(const py::object& k, const py::object& b) : names(k), buffers(b, true) {}
            void run(Client& client) override {
                result = client.get(PyClient::get_items(names, buffers), verify);
            }
            py::object answer() override {
                return result ? py::object(PyClient::get_answer(*result)) : failure(result.error(), "get");
            }
        };
        auto op = std::make_shared<Op>(keys, buffers);
        PyClient::check_counts(op->names.size(), op->buffers.size(), "buffers");
        op->verify = verify;
        return submit(op);
    }

    // what: "exists", "remove", "views", "pin" or "prefix"
    uint64_t submit_names(const std::string& what, const py::object& keys, uint32_t width, bool pin,
                          bool verify) {
        struct Op : Pending {
            std::string what;
            Names names;
            uint32_t width = 1;
            bool pin = true, verify = false;
            Result<std::vector<uint8_t>> flags = std::vector<uint8_t>{};
            Result<Pinned> pinned = Pinned{};
            Result<Prefix> prefix = Prefix{};
            explicit Op(const py::object& k) : names(k) {}
            void run(Client& client) override {
                if (what == "exists") flags = client.exists(names.views());
                if (what == "remove") flags = client.remove(names.views());
                if (what == "views" || what == "pin") {
                    pinned = PyClient::pin_and_verify(client, names, verify);
                }
                if (what == "prefix") prefix = client.longest_prefix(names.views(), width, pin);
            }
            py::object answer() override {
                if (!flags) return failure(flags.error(), what.c_str());
                if (!pinned) return failure(pinned.error(), what.c_str());
                if (!prefix) return failure(prefix.error(), what.c_str());
                if (what == "views") {
                    return PyClient::views_answer(*pinned, PyClient::all_places(names.size()));
                }
                if (what == "pin") return PyClient::pin_answer(std::move(*pinned), names);
                if (what == "prefix") return PyClient::prefix_answer(std::move(*prefix), names);
                return to_bytes(*flags);
            }
        };
        auto op = std::make_shared<Op>(keys);
        op->what = what;
        op->width = width;
        op->pin = pin;
        op->verify = verify;
        return submit(op);
    }

   private:
    struct Pending {
        virtual ~Pending() = default;          // with the GIL: it lets go of Python buffers
        virtual void run(Client& client) = 0;  // on a worker thread, without it
        virtual py::object answer() = 0;       // with it
    };

    // An exception object, for the caller to raise where it waits.
    static py::object failure(const Error& error, const char* operation) {
        try {
            raise(error, operation);
        } catch (py::error_already_set& exception) {
            return exception.value();
        }
    }

    uint64_t submit(std::shared_ptr<Pending> op) {
        // The thread must not own the operation: whoever lets go last needs the GIL.
        Pending* raw = op.get();
        Result<uint64_t> ticket = worker_.submit([raw, client = client_] { raw->run(*client); });
        uint64_t id = unwrap(std::move(ticket), "submit", peer_);
        pending_.emplace(id, std::move(op));
        return id;
    }

    uint64_t keep(std::vector<PinnedRun> pins) {
        uint64_t id = next_pin_++;
        pins_.emplace(id, std::move(pins));
        return id;
    }

    void take_places(const py::object& indices, const py::object& columns, size_t n,
                     std::vector<uint32_t>& indices_out, std::vector<uint16_t>& columns_out) {
        ArrayOf<uint32_t> index_array(indices, "indices");
        ArrayOf<uint16_t> column_array(columns, "columns");
        PyClient::check_counts(n, index_array.span().size(), "indices");
        PyClient::check_counts(n, column_array.span().size(), "columns");
        indices_out.assign(index_array.span().begin(), index_array.span().end());
        columns_out.assign(column_array.span().begin(), column_array.span().end());
    }

    std::shared_ptr<Client> client_;
    std::string peer_;
    std::unordered_map<uint64_t, std::shared_ptr<Pending>> pending_;
    std::unordered_map<uint64_t, std::vector<PinnedRun>> pins_;
    uint64_t next_pin_ = 1;
    Worker worker_;  // last: its threads end before what they use
};

// ---- functions

py::bytes digests(const py::object& token_ids, uint32_t block_tokens, const py::bytes& seed,
                  const py::bytes& previous) {
    ArrayOf<uint32_t> tokens(token_ids, "token_ids");
    if (block_tokens == 0) raise(Error{Code::kInvalidArgument, "block_tokens must be at least 1"}, "digest");
    std::string_view before(previous);
    if (before.empty()) before = std::string_view(seed);
    size_t blocks = tokens.span().size() / block_tokens;
    auto out = py::reinterpret_steal<py::bytes>(
        PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(blocks * 32)));
    if (!out) throw py::error_already_set();
    block_digests(tokens.span(), block_tokens,
                  std::span(reinterpret_cast<const uint8_t*>(before.data()), before.size()),
                  reinterpret_cast<uint8_t*>(PyBytes_AS_STRING(out.ptr())));
    return out;
}

py::bytes key_hash(const std::string& tenant, const std::string& name_space, const py::bytes& fingerprint,
                   const py::bytes& name) {
    Hash128 hash = KeyHasher(tenant, name_space, std::string_view(fingerprint))(std::string_view(name));
    char out[16];
    std::memcpy(out, &hash.low, 8);
    std::memcpy(out + 8, &hash.high, 8);
    return py::bytes(out, 16);
}

uint32_t crc_of(const py::object& buffer, uint32_t crc) {
    ArrayOf<uint8_t> bytes(buffer, "buffer");
    std::span<const uint8_t> span = bytes.span();
    py::gil_scoped_release nogil;
    return crc32c(crc, span.data(), span.size());
}

}  // namespace

}  // namespace moonpool::python

PYBIND11_MODULE(_native, m) {
    using namespace moonpool;
    using namespace moonpool::python;

    m.doc() = "The C++ core of Moonpool. Users take moonpool.Store; this module is its lower half.";
    view_type = make_view_type();

    py::class_<PyServer>(m, "Server",
                         "A node's data plane: one thread, one Unix socket, an arena for each tenant.")
        .def(py::init<std::string, const std::vector<std::pair<std::string, uint64_t>>&, const py::bytes&,
                      std::string, uint32_t, uint64_t, uint32_t, uint64_t, uint32_t, uint32_t, uint32_t,
                      uint32_t, double>(),
             py::arg("socket_path"), py::arg("tenants"), py::arg("token"), py::kw_only(),
             py::arg("name") = "default", py::arg("objects_max") = 0, py::arg("slab_bytes") = 0,
             py::arg("connections_max") = 512, py::arg("scrub_bytes_per_s") = uint64_t{64} << 20,
             py::arg("key_bytes_max") = 1024, py::arg("parts_max") = 4096,
             py::arg("frame_bytes_max") = 8u << 20, py::arg("frame_keys_max") = 16384,
             py::arg("object_share_max") = 0.25)
        .def_property_readonly("name", &PyServer::name)
        .def("start", &PyServer::start)
        .def("stop", &PyServer::stop)
        .def("metrics", &PyServer::metrics, "Counters (*_total) and gauges by name.")
        .def("histograms", &PyServer::histograms,
             "name -> (upper bounds in s, counts with one more for +Inf, sum in s)")
        .def("check_integrity", &PyServer::check_integrity, "Recounts every table; for tests.");

    py::class_<PyPin, std::shared_ptr<PyPin>>(
        m, "Pin", "A right to read some objects; released by release() or when dropped.")
        .def("release", &PyPin::release)
        .def_property_readonly("names", [](const PyPin& pin) {
            py::list names;
            for (const std::string& name : pin.names) names.append(py::bytes(name));
            return names;
        });

    py::class_<PyClient>(m, "Client", "One process's access to one node, in one space.")
        .def(py::init<std::string, const py::bytes&, std::string, std::string, const py::bytes&, double,
                      const py::object&>(),
             py::arg("socket_path"), py::arg("token"), py::arg("tenant") = "default",
             py::arg("namespace") = "default", py::arg("fingerprint") = py::bytes(),
             py::arg("timeout_s") = 2.0, py::arg("embedded") = py::none(), py::keep_alive<1, 8>())
        .def("connect", &PyClient::connect)
        .def_property_readonly("connected", &PyClient::connected)
        .def("close", &PyClient::close)
        .def("put", &PyClient::put, py::arg("keys"), py::arg("buffers"), py::arg("parents") = py::none(),
             py::arg("replace") = false, py::arg("ack") = true, py::arg("timeout_s") = -1.0)
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
        .def("remove", &PyClient::remove, py::arg("keys"))
        .def("list", &PyClient::list, py::arg("prefix"), py::arg("limit"))
        .def("stat", &PyClient::stat);

    py::class_<PartTable, std::shared_ptr<PartTable>>(
        m, "PartTable", "Strided memory: columns of (address, stride, length) rows.")
        .def(py::init([](const std::vector<std::vector<std::tuple<uint64_t, uint64_t, uint64_t>>>& columns) {
                 std::vector<std::vector<StridedRow>> rows(columns.size());
                 for (size_t c = 0; c < columns.size(); ++c) {
                     for (const auto& [address, stride, length] : columns[c])
                         rows[c].push_back({address, stride, length});
                 }
                 return std::make_shared<PartTable>(std::move(rows));
             }),
             py::arg("columns"))
        .def("object_bytes", &PartTable::object_bytes, py::arg("column"));

    py::class_<PrefixAnswer>(m, "PrefixAnswer")
        .def_readonly("blocks", &PrefixAnswer::blocks)
        .def_readonly("pin_id", &PrefixAnswer::pin_id)
        .def_readonly("incarnation", &PrefixAnswer::incarnation)
        .def_readonly("descriptors", &PrefixAnswer::descriptors)
        .def_readonly("error", &PrefixAnswer::error);
    py::class_<LoadAnswer>(m, "LoadAnswer")
        .def_readonly("ok", &LoadAnswer::ok)
        .def_readonly("bytes_loaded", &LoadAnswer::bytes_loaded)
        .def_readonly("error", &LoadAnswer::error);
    py::class_<SaveAnswer>(m, "SaveAnswer")
        .def_readonly("stored", &SaveAnswer::stored)
        .def_readonly("existed", &SaveAnswer::existed)
        .def_readonly("refused", &SaveAnswer::refused)
        .def_readonly("bytes_stored", &SaveAnswer::bytes_stored)
        .def_readonly("error", &SaveAnswer::error);

    py::class_<PyWorker>(m, "Worker",
                         "Threads that run a client's operations; tickets in, answers out by poll().")
        .def(py::init<const PyClient&, uint32_t, uint32_t>(), py::arg("client"), py::arg("threads") = 1,
             py::arg("queue_max") = 4096)
        .def_property_readonly("eventfd", &PyWorker::event_fd)
        .def("poll", &PyWorker::poll)
        .def("close", &PyWorker::close)
        .def("release", &PyWorker::release, py::arg("pin_id"))
        .def("submit_prefix", &PyWorker::submit_prefix, py::arg("names"), py::arg("name_size"),
             py::arg("width"))
        .def("submit_load", &PyWorker::submit_load, py::arg("incarnation"), py::arg("descriptors"),
             py::arg("parts"), py::arg("indices"), py::arg("columns"), py::arg("verify") = false)
        .def("submit_save", &PyWorker::submit_save, py::arg("names"), py::arg("name_size"),
             py::arg("parents"), py::arg("parts"), py::arg("indices"), py::arg("columns"))
        .def("submit_put", &PyWorker::submit_put, py::arg("keys"), py::arg("buffers"),
             py::arg("parents") = py::none(), py::arg("replace") = false, py::arg("ack") = true,
             py::arg("timeout_s") = -1.0)
        .def("submit_get_into", &PyWorker::submit_get_into, py::arg("keys"), py::arg("buffers"),
             py::arg("verify") = false)
        .def("submit_names", &PyWorker::submit_names, py::arg("what"), py::arg("keys"), py::arg("width") = 1,
             py::arg("pin") = true, py::arg("verify") = false);

    m.def("block_digests", &digests, py::arg("token_ids"), py::arg("block_tokens"),
          py::arg("seed") = py::bytes(), py::arg("previous") = py::bytes(),
          "Digests of the full blocks of a u32 buffer, 32 bytes each.");
    m.def("key_hash", &key_hash, py::arg("tenant"), py::arg("namespace"), py::arg("fingerprint"),
          py::arg("name"), "XXH3-128 of a key, as 16 bytes: low then high half, little-endian.");
    m.def("crc32c", &crc_of, py::arg("buffer"), py::arg("crc") = 0);
}
