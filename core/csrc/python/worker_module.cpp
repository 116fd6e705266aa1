// Threads that run a client's operations, as Python sees them: moonpool._native.Worker.
//
// How an operation passes through: submit_x() takes the arguments with the GIL into an Op, run() does the
// work on a worker thread without it, poll() collects tickets and makes the answer with the GIL. An
// engine's step therefore never waits for the pool.
//
// The Op stays in pending_ from submit to poll; the thread has a bare pointer only. Nothing but poll() and
// close() takes it out, both with the GIL, and close() waits for running operations first. Without threads
// (inline_) submit() itself runs the operation and poll() hands out what it left.
//
// The first four operations are for engines' connectors: names of equal size in one bytes object, places as
// u32 and u16 columns, memory as a PartTable that was described once. They build no Python object per
// block. The others are for the asynchronous store and take what Client takes.
//
// An operation that fails does not raise: its answer carries the reason, since the caller that submitted it
// is long past the call.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <future>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "python/answers.hpp"
#include "python/arguments.hpp"
#include "python/client_module.hpp"
#include "python/module.hpp"
#include "python/raise.hpp"
#include "store/client/worker.hpp"
#include "store/device/device_kv.hpp"

namespace moonpool::python {

namespace {

// error: why there is no answer; why: there is one, but not of every node that was to be asked.
struct PrefixAnswer {
    uint64_t blocks = 0;
    uint64_t pin_id = 0;
    py::bytes holders, descriptors;
    std::string error, why;
};

// seconds: from when its thread took the load until its last copy was over; without what it waited for.
struct LoadAnswer {
    py::bytes ok;
    uint64_t bytes_loaded = 0;
    double seconds = 0;
    std::string error;
};

// blocks: how many leading ones were found; lookup_error: why it is unknown; lookup_why: as PrefixAnswer's;
// error: why others of those that were found were not loaded.
struct FetchAnswer {
    uint64_t blocks = 0;
    py::bytes ok;
    uint64_t bytes_loaded = 0;
    std::string lookup_error, lookup_why, error;
};

// Of a save from a card: no block is read any more. Its SaveAnswer comes later, under the same ticket.
struct SaveStaged {};

struct SaveAnswer {
    uint64_t stored = 0, existed = 0, refused = 0, bytes_stored = 0;
    std::string error;
};

// n names of equal size, one behind the other.
// A rest that is no whole name is left out; callers' sizes were checked with the columns.
std::vector<std::string_view> split(std::string_view names, size_t name_size) {
    std::vector<std::string_view> out;
    if (name_size == 0) return out;
    out.reserve(names.size() / name_size);
    for (size_t at = 0; at + name_size <= names.size(); at += name_size)
        out.push_back(names.substr(at, name_size));
    return out;
}

// The KV cache that objects are copied to and from: described row by row, or a card's.
using KvMemory = std::variant<std::shared_ptr<PartTable>, std::shared_ptr<DeviceKv>>;

class PyWorker {
   public:
    PyWorker(const PyClient& client, uint32_t threads, uint32_t queue_max)
        : client_(client.client()),
          peer_(client.peer()),
          inline_(threads == 0),
          worker_(threads, queue_max) {}

    int event_fd() const { return worker_.event_fd(); }

    py::list poll() {
        py::list out;
        // First, so that of what is done all that was staged is known: an operation ends after it is staged.
        std::vector<uint64_t> done = inline_ ? std::exchange(done_, {}) : worker_.poll();
        for (uint64_t ticket : take_staged()) out.append(py::make_tuple(ticket, SaveStaged{}));
        for (uint64_t ticket : done) {
            // Making an answer may run Python code (a finalizer, a signal), which may call back into this
            // object; so the operation is out of the map before.
            auto node = pending_.extract(ticket);
            if (!node.empty()) out.append(py::make_tuple(ticket, node.mapped()->answer()));
        }
        return out;
    }

    // Operations that have not started are dropped. closed_ first, so that no inline operation begins
    // meanwhile.
    void close() {
        closed_ = true;
        {
            py::gil_scoped_release nogil;
            worker_.close();
        }
        (void)take_staged();
        pending_.clear();
        pins_.clear();
    }

    // A pin that was released, or never was, is no error: engines abort requests at any time.
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
                a.why = result->why;
                // In the form in which a scheduler sends it to the processes that load: which node, and
                // where in its arena.
                Handover handover = Client::hand_over(*result);
                a.holders = py::bytes(handover.holders);
                a.descriptors = to_bytes(handover.descriptors);
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

    // after: of a card's KV cache, what the load writes after.
    uint64_t submit_load(const py::bytes& holders, const py::bytes& descriptors, KvMemory parts,
                         const py::object& indices, const py::object& columns, bool verify,
                         const std::optional<Mark>& after) {
        struct Op : Pending {
            std::string holders;
            std::vector<Descriptor> descriptors;
            KvMemory parts;
            std::vector<uint32_t> indices;
            std::vector<uint16_t> columns;
            bool verify;
            Mark after;
            LoadReport report;
            double seconds = 0;
            void run(Client& client) override {
                auto began = std::chrono::steady_clock::now();
                load(client);
                seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
            }
            void load(Client& client) {
                if (auto* kv = std::get_if<std::shared_ptr<DeviceKv>>(&parts)) {
                    report = (*kv)->load(client, {holders, descriptors, indices, columns, verify, after});
                } else {
                    const PartTable& table = *std::get<std::shared_ptr<PartTable>>(parts);
                    report = client.load(holders, descriptors, table, indices, columns, verify);
                }
            }
            py::object answer() override {
                return py::cast(LoadAnswer{to_bytes(report.ok), report.bytes, seconds, report.error});
            }
        };
        auto op = std::make_shared<Op>();
        std::string_view rows(descriptors);
        op->holders = std::string(holders);
        // These bytes came back from another process; their sizes are all that can be checked here.
        if (op->holders.size() < sizeof(Incarnation) || rows.size() % sizeof(Descriptor) != 0) {
            raise(Error{Code::kInvalidArgument,
                        "holders are as a prefix query gave them, descriptors 32 bytes for each object"},
                  "load", peer_);
        }
        op->descriptors.resize(rows.size() / sizeof(Descriptor));
        std::memcpy(op->descriptors.data(), rows.data(), rows.size());
        take_places(indices, columns, op->descriptors.size(), op->indices, op->columns);
        op->parts = std::move(parts);
        op->verify = verify;
        op->after = after.value_or(nullptr);
        return submit(op);
    }

    // submit_prefix and submit_load in one, for a caller that waits: its pins last as long as the copies.
    uint64_t submit_fetch(const py::bytes& names, size_t name_size, uint32_t width,
                          std::shared_ptr<PartTable> parts, const py::object& indices,
                          const py::object& columns) {
        struct Op : Pending {
            std::string names;
            size_t name_size;
            uint32_t width;
            std::shared_ptr<PartTable> parts;
            std::vector<uint32_t> indices;
            std::vector<uint16_t> columns;
            uint64_t blocks = 0;
            std::string lookup_error, lookup_why;
            LoadReport report;
            void run(Client& client) override {
                Result<Prefix> prefix = client.longest_prefix(split(names, name_size), width, true);
                if (!prefix) {
                    lookup_error = prefix.error().text;
                    return;
                }
                blocks = prefix->blocks;
                lookup_why = prefix->why;
                // The caller gave places for all names; only those of found blocks are used.
                size_t n = std::min({indices.size(), blocks * size_t{width}, prefix->descriptors.size()});
                if (n == 0) return;
                Handover found = Client::hand_over(*prefix);
                report = client.load(found.holders, std::span(found.descriptors).first(n), *parts,
                                     std::span(indices).first(n), std::span(columns).first(n), false);
            }
            py::object answer() override {
                // One flag for each name, found or not.
                report.ok.resize(indices.size(), 0);
                return py::cast(FetchAnswer{blocks, to_bytes(report.ok), report.bytes, lookup_error,
                                            lookup_why, report.error});
            }
        };
        auto op = std::make_shared<Op>();
        op->names = std::string(names);
        op->name_size = name_size;
        op->width = width;
        size_t n = name_size == 0 ? 0 : op->names.size() / name_size;
        take_places(indices, columns, n, op->indices, op->columns);
        op->parts = std::move(parts);
        return submit(op);
    }

    // group_bytes: an object's group has the name with which its own begins; 0: no groups. after: of a card's
    // KV cache, what the save reads after; then there is a SaveStaged before the SaveAnswer.
    uint64_t submit_save(const py::bytes& names, size_t name_size, const py::bytes& parents, KvMemory parts,
                         const py::object& indices, const py::object& columns, size_t group_bytes,
                         const std::optional<Mark>& after, double soft_pin_s) {
        struct Op : Pending {
            std::string names, parents;
            size_t name_size, group_bytes;
            uint32_t soft_ms;
            KvMemory parts;
            std::vector<uint32_t> indices;
            std::vector<uint16_t> columns;
            Mark after;
            PyWorker* owner;
            std::vector<std::string_view> keys, above;
            Result<PutReport> result = PutReport{};
            // From a card: the copies of the next save begin before the puts of this one are over.
            void start(Client& client, Worker::Running running) override {
                auto* kv = std::get_if<std::shared_ptr<DeviceKv>>(&parts);
                if (kv == nullptr) return run(client);
                name_objects();
                (*kv)->start_save(
                    client, {keys, above, group_bytes, indices, columns, after, soft_ms},
                    {.staged = [this] { owner->add_staged(this); },
                     .ended = [this, running](Result<PutReport> report) { result = std::move(report); }});
            }
            void name_objects() {
                keys = split(names, name_size);
                above = split(parents, name_size);
                // All zero bytes: the first block of a chain, which has no parent.
                for (std::string_view& parent : above) {
                    if (parent.find_first_not_of('\0') == std::string_view::npos) parent = {};
                }
            }
            void run(Client& client) override {
                if (std::holds_alternative<std::shared_ptr<DeviceKv>>(parts)) return run_to_end(client);
                name_objects();
                const PartTable& table = *std::get<std::shared_ptr<PartTable>>(parts);
                std::vector<std::vector<MemoryRef>> sources(keys.size());
                std::vector<PutItem> items;
                for (size_t i = 0; i < keys.size(); ++i) {
                    if (columns[i] >= table.columns()) {
                        result = Error{Code::kInvalidArgument, "a column is not in the part table"};
                        return;
                    }
                    // The parts of one object: the rows of its column, each moved on by the index.
                    table.append_parts(columns[i], indices[i], sources[i]);
                    items.push_back({keys[i], above.empty() ? std::string_view() : above[i], sources[i],
                                     keys[i].substr(0, group_bytes), soft_ms});
                }
                result = client.put(items, PutOptions{});
            }
            py::object answer() override {
                SaveAnswer a;
                if (!result) {
                    a.error = result.error().text;
                    a.refused = indices.size();
                    return py::cast(a);
                }
                // A block that another process stored before (existed) is as good as stored.
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
        if (group_bytes > name_size) {
            raise(Error{Code::kInvalidArgument, "group_bytes are more than a name has"}, "save", peer_);
        }
        op->group_bytes = group_bytes;
        op->soft_ms = soft_ms_of(soft_pin_s);
        take_places(indices, columns, n, op->indices, op->columns);
        op->parts = std::move(parts);
        op->after = after.value_or(nullptr);
        op->owner = this;
        return submit(op);
    }

    uint64_t submit_put(const py::object& keys, const py::object& buffers, const py::object& parents,
                        bool replace, bool ack, double timeout_s, uint32_t replicas, const py::object& nodes,
                        const py::object& groups, double soft_pin_s, bool unique) {
        struct Op : Pending {
            Names names, parent_names, groups;
            Buffers buffers;
            PutOptions options;
            double soft_pin_s = 0;
            Result<PutReport> result = PutReport{};
            Op(const py::object& k, const py::object& b, const py::object& p, const py::object& g)
                : names(k),
                  parent_names(p.is_none() ? Names() : Names(p)),
                  groups(g.is_none() ? Names() : Names(g)),
                  buffers(b, false) {}
            void run(Client& client) override {
                result = client.put(put_items(names, buffers, parent_names, groups, soft_pin_s), options);
            }
            py::object answer() override {
                return result ? py::object(put_answer(*result)) : failure(result.error(), "put");
            }
        };
        auto op = std::make_shared<Op>(keys, buffers, parents, groups);
        check_counts(op->names.size(), op->buffers.size(), "buffers");
        if (!parents.is_none()) check_counts(op->names.size(), op->parent_names.size(), "parents");
        if (!groups.is_none()) check_counts(op->names.size(), op->groups.size(), "groups");
        op->soft_pin_s = soft_pin_s;
        op->options = PutOptions{
            replace, ack, replicas, timeout_s > 0 ? milliseconds(timeout_s) : 0, node_names(nodes), unique};
        return submit(op);
    }

    uint64_t submit_get_into(const py::object& keys, const py::object& buffers, bool verify) {
        struct Op : Pending {
            Names names;
            Buffers buffers;
            bool verify = false;
            Result<std::vector<int64_t>> result = std::vector<int64_t>{};
            Op(const py::object& k, const py::object& b) : names(k), buffers(b, true) {}
            void run(Client& client) override { result = client.get(get_items(names, buffers), verify); }
            py::object answer() override {
                return result ? py::object(get_answer(*result)) : failure(result.error(), "get");
            }
        };
        auto op = std::make_shared<Op>(keys, buffers);
        check_counts(op->names.size(), op->buffers.size(), "buffers");
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
            Result<RemoveReport> removed = RemoveReport{};
            Result<std::vector<Presence>> present = std::vector<Presence>{};
            Result<std::vector<ObjectView>> views = std::vector<ObjectView>{};
            Result<Pinned> pinned = Pinned{};
            Result<Prefix> prefix = Prefix{};
            // Only the result that belongs to `what` is ever set; the others stay empty successes.
            explicit Op(const py::object& k) : names(k) {}
            void run(Client& client) override {
                if (what == "exists") present = client.exists(names.views());
                if (what == "remove") removed = client.remove(names.views());
                if (what == "views") views = client.views(names.views(), verify);
                if (what == "pin") pinned = client.pin(names.views());
                if (what == "prefix") prefix = client.longest_prefix(names.views(), width, pin);
            }
            py::object answer() override {
                // At most one of the five failed.
                if (!removed) return failure(removed.error(), what.c_str());
                if (!present) return failure(present.error(), what.c_str());
                if (!views) return failure(views.error(), what.c_str());
                if (!pinned) return failure(pinned.error(), what.c_str());
                if (!prefix) return failure(prefix.error(), what.c_str());
                if (what == "views") return views_answer(*views);
                if (what == "exists") return to_bytes(*present);
                if (what == "pin") return pin_answer(std::move(*pinned), names);
                if (what == "prefix") return prefix_answer(std::move(*prefix), names, width);
                return remove_answer(*removed);
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
        // The same; what goes on elsewhere keeps `running` there.
        virtual void start(Client& client, Worker::Running) { run(client); }
        void run_to_end(Client& client) {
            auto over = std::make_shared<std::promise<void>>();
            std::future<void> ended = over->get_future();
            start(client, Worker::Running(this, [over](const void*) { over->set_value(); }));
            ended.wait();
        }
        virtual py::object answer() = 0;  // with it
        uint64_t ticket = 0;              // with it, from the end of submit on
    };

    // On any thread, without the GIL.
    void add_staged(Pending* op) {
        MutexLock lock(staged_mutex_);
        staged_.push_back(op);
    }
    // With the GIL; without a call of Python, which could end what they point to.
    std::vector<uint64_t> take_staged() {
        MutexLock lock(staged_mutex_);
        std::vector<uint64_t> tickets;
        for (const Pending* op : std::exchange(staged_, {})) tickets.push_back(op->ticket);
        return tickets;
    }

    // An exception object, for the caller to raise where it waits.
    static py::object failure(const Error& error, const char* operation) {
        try {
            raise(error, operation);
        } catch (py::error_already_set& exception) {
            return exception.value();
        }
    }

    uint64_t submit(std::shared_ptr<Pending> op) {
        // The thread must not own the operation: the last owner needs the GIL to destroy it.
        Pending* raw = op.get();
        if (inline_) {
            if (closed_) raise(Error{Code::kClosed, "this worker is closed"}, "submit", peer_);
            {
                py::gil_scoped_release nogil;
                raw->run(*client_);
            }
            raw->ticket = ++last_inline_;
            pending_.emplace(last_inline_, std::move(op));
            done_.push_back(last_inline_);
            return last_inline_;
        }
        // The pointer is valid until poll() or close() takes the operation out, which is after it has run.
        Result<uint64_t> ticket = worker_.submit(
            [raw, client = client_](Worker::Running running) { raw->start(*client, std::move(running)); });
        uint64_t id = unwrap(std::move(ticket), "submit", peer_);
        raw->ticket = id;  // poll() reads it, with the GIL
        pending_.emplace(id, std::move(op));
        return id;
    }

    // The pins of a prefix stay until the engine releases them by this number, or the worker is closed.
    uint64_t keep(std::vector<std::shared_ptr<Pin>> pins) {
        uint64_t id = next_pin_++;
        pins_.emplace(id, std::move(pins));
        return id;
    }

    // Copies: the caller may change its arrays once submit has returned.
    void take_places(const py::object& indices, const py::object& columns, size_t n,
                     std::vector<uint32_t>& indices_out, std::vector<uint16_t>& columns_out) {
        ArrayOf<uint32_t> index_array(indices, "indices");
        ArrayOf<uint16_t> column_array(columns, "columns");
        check_counts(n, index_array.span().size(), "indices");
        check_counts(n, column_array.span().size(), "columns");
        indices_out.assign(index_array.span().begin(), index_array.span().end());
        columns_out.assign(column_array.span().begin(), column_array.span().end());
    }

    std::shared_ptr<Client> client_;
    std::string peer_;
    bool inline_;  // no threads: submit runs the operation itself, without the GIL
    bool closed_ = false;
    uint64_t last_inline_ = 0;
    std::vector<uint64_t> done_;
    std::unordered_map<uint64_t, std::shared_ptr<Pending>> pending_;
    std::unordered_map<uint64_t, std::vector<std::shared_ptr<Pin>>> pins_;
    uint64_t next_pin_ = 1;
    Mutex staged_mutex_;
    std::vector<Pending*> staged_ GUARDED_BY(staged_mutex_);  // each of them is in pending_
    Worker worker_;                                           // last: its threads end before what they use
};

}  // namespace

void bind_worker(py::module_& m) {
    py::class_<PrefixAnswer>(m, "PrefixAnswer")
        .def_readonly("blocks", &PrefixAnswer::blocks)
        .def_readonly("pin_id", &PrefixAnswer::pin_id)
        .def_readonly("holders", &PrefixAnswer::holders)
        .def_readonly("descriptors", &PrefixAnswer::descriptors)
        .def_readonly("error", &PrefixAnswer::error)
        .def_readonly("why", &PrefixAnswer::why);
    py::class_<LoadAnswer>(m, "LoadAnswer")
        .def_readonly("ok", &LoadAnswer::ok)
        .def_readonly("bytes_loaded", &LoadAnswer::bytes_loaded)
        .def_readonly("seconds", &LoadAnswer::seconds)
        .def_readonly("error", &LoadAnswer::error);
    py::class_<FetchAnswer>(m, "FetchAnswer")
        .def_readonly("blocks", &FetchAnswer::blocks)
        .def_readonly("ok", &FetchAnswer::ok)
        .def_readonly("bytes_loaded", &FetchAnswer::bytes_loaded)
        .def_readonly("lookup_error", &FetchAnswer::lookup_error)
        .def_readonly("lookup_why", &FetchAnswer::lookup_why)
        .def_readonly("error", &FetchAnswer::error);
    py::class_<SaveStaged>(m, "SaveStaged",
                           "No block of a save from a card is read any more; its SaveAnswer comes later.");
    py::class_<SaveAnswer>(m, "SaveAnswer")
        .def_readonly("stored", &SaveAnswer::stored)
        .def_readonly("existed", &SaveAnswer::existed)
        .def_readonly("refused", &SaveAnswer::refused)
        .def_readonly("bytes_stored", &SaveAnswer::bytes_stored)
        .def_readonly("error", &SaveAnswer::error);

    py::class_<PyWorker>(
        m, "Worker",
        "Threads that run a client's operations; tickets in, answers out by poll(). Without threads "
        "the caller's own runs them, inside of submit and without the GIL.")
        .def(py::init<const PyClient&, uint32_t, uint32_t>(), py::arg("client"), py::arg("threads") = 1,
             py::arg("queue_max") = 4096)
        .def_property_readonly("eventfd", &PyWorker::event_fd)
        .def("poll", &PyWorker::poll)
        .def("close", &PyWorker::close)
        .def("release", &PyWorker::release, py::arg("pin_id"))
        .def("submit_prefix", &PyWorker::submit_prefix, py::arg("names"), py::arg("name_size"),
             py::arg("width"))
        .def("submit_load", &PyWorker::submit_load, py::arg("holders"), py::arg("descriptors"),
             py::arg("parts"), py::arg("indices"), py::arg("columns"), py::arg("verify") = false,
             py::arg("after") = py::none())
        .def("submit_fetch", &PyWorker::submit_fetch, py::arg("names"), py::arg("name_size"),
             py::arg("width"), py::arg("parts"), py::arg("indices"), py::arg("columns"))
        .def("submit_save", &PyWorker::submit_save, py::arg("names"), py::arg("name_size"),
             py::arg("parents"), py::arg("parts"), py::arg("indices"), py::arg("columns"),
             py::arg("group_bytes") = 0, py::arg("after") = py::none(), py::arg("soft_pin_s") = 0.0)
        .def("submit_put", &PyWorker::submit_put, py::arg("keys"), py::arg("buffers"),
             py::arg("parents") = py::none(), py::arg("replace") = false, py::arg("ack") = true,
             py::arg("timeout_s") = -1.0, py::arg("replicas") = 1, py::arg("nodes") = py::none(),
             py::arg("groups") = py::none(), py::arg("soft_pin_s") = 0.0, py::arg("unique") = false)
        .def("submit_get_into", &PyWorker::submit_get_into, py::arg("keys"), py::arg("buffers"),
             py::arg("verify") = false)
        .def("submit_names", &PyWorker::submit_names, py::arg("what"), py::arg("keys"), py::arg("width") = 1,
             py::arg("pin") = true, py::arg("verify") = false);
}

}  // namespace moonpool::python
