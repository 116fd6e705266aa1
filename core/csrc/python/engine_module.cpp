// moonpool._native.Engine: arguments are taken while the GIL is held, the work is done without it.
//
// transfer() and submit() are plain CPython methods: pybind11's dispatch of nine arguments costs as much as a
// small copy. Numbers come as lists or tuples of ints, or as contiguous buffers of 64-bit integers.
//
// Who may call: any thread, with the GIL. Calls that may wait (transfer, submit, wait, open, register,
// release, close) give it up; status, poll, cancel and the metrics look at the engine's state under short
// locks and keep it, since taking it anew costs more than the look.

#include "python/engine_module.hpp"

#include <pybind11/stl.h>
#include <pybind11/typing.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>

#include "base/journal.hpp"
#include "engine/engine.hpp"
#include "python/notes.hpp"
#include "python/raise.hpp"
#include "python/secrets.hpp"
#include "wire/address.hpp"

namespace moonpool::python {

namespace {

using transport::Direction;
using transport::Slice;

// ---- memory that the engine allocated

// A CPython type of its own. The memory lives as long as the last buffer on it: each export holds the
// object.
struct MemoryObject {
    PyObject_HEAD std::shared_ptr<transport::Memory> memory;
    Py_ssize_t size;
};

PyTypeObject* memory_type = nullptr;

int memory_getbuffer(PyObject* self, Py_buffer* buffer, int flags) {
    auto* object = reinterpret_cast<MemoryObject*>(self);
    return PyBuffer_FillInfo(buffer, self, object->memory->data(), object->size, 0, flags);
}

void memory_dealloc(PyObject* self) {
    reinterpret_cast<MemoryObject*>(self)->memory.~shared_ptr();
    PyTypeObject* type = Py_TYPE(self);
    // A heap type is counted by its objects: the type's reference goes with the object.
    type->tp_free(self);
    Py_DECREF(type);
}

PyTypeObject* make_memory_type() {
    static PyType_Slot slots[] = {
        {Py_tp_dealloc, reinterpret_cast<void*>(memory_dealloc)},
        {Py_bf_getbuffer, reinterpret_cast<void*>(memory_getbuffer)},
        {Py_tp_doc, const_cast<char*>("Memory that peers on this host can map; a writable buffer.")},
        {0, nullptr},
    };
    static PyType_Spec spec = {"moonpool._native.EngineMemory", sizeof(MemoryObject), 0,
                               Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
    return reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
}

// ---- arguments

[[noreturn]] void invalid(const std::string& text) { raise(Error{Code::kInvalidArgument, text}, "transfer"); }

uint64_t as_number(PyObject* item, const char* what) {
    uint64_t value = PyLong_AsUnsignedLongLong(item);
    // CPython's message would speak of an int that is too large; the caller wants to know which argument it
    // was.
    if (value == static_cast<uint64_t>(-1) && PyErr_Occurred() != nullptr) {
        PyErr_Clear();
        invalid(std::string(what) + " must be integers from 0 to 2**64 - 1");
    }
    return value;
}

// Calls put(i, value) for each number; `expected`: how many there must be, 0 when the first tells.
template <class Put, class Room>
size_t take_numbers(PyObject* object, const char* what, size_t expected, Room room, Put put) {
    auto check = [&](size_t n) {
        if (expected != SIZE_MAX && n != expected) {
            invalid(std::string(what) + " has " + std::to_string(n) + " items, others have " +
                    std::to_string(expected));
        }
        room(n);
    };
    if (PyList_CheckExact(object) || PyTuple_CheckExact(object)) {
        PyObject** items = PySequence_Fast_ITEMS(object);
        auto n = static_cast<size_t>(PySequence_Fast_GET_SIZE(object));
        check(n);
        uint64_t value = 0;
        for (size_t i = 0; i < n; ++i) {
            // Lengths are mostly one and the same object, which need not be read again.
            if (i == 0 || items[i] != items[i - 1]) value = as_number(items[i], what);
            put(i, value);
        }
        return n;
    }
    // A plain number stands for one of them.
    if (PyLong_Check(object)) {
        check(1);
        put(0, as_number(object, what));
        return 1;
    }
    Py_buffer view;
    if (PyObject_CheckBuffer(object) == 0 ||
        PyObject_GetBuffer(object, &view, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) != 0) {
        PyErr_Clear();
        invalid(std::string(what) + " must be a list of integers or a contiguous array of uint64");
    }
    // put() may raise.
    struct Release {
        Py_buffer* view;
        ~Release() { PyBuffer_Release(view); }
    } release{&view};
    // The last letter: a byte order may stand before it. Without a format the items are bytes.
    char format = view.format == nullptr ? 'B' : view.format[std::strlen(view.format) - 1];
    if (view.itemsize != 8 || std::strchr("QqLlN", format) == nullptr) {
        invalid(std::string(what) + " must be an array of 64-bit integers");
    }
    auto n = static_cast<size_t>(view.len) / 8;
    check(n);
    const auto* values = static_cast<const uint64_t*>(view.buf);
    for (size_t i = 0; i < n; ++i) put(i, values[i]);
    return n;
}

// The arguments of transfer() and submit().
struct Arguments {
    std::vector<uint32_t> segments;
    std::vector<Slice> slices;
    std::string notify;  // copied: it is used without the GIL
    bool has_notify = false;
    TransferRequest request;

    // Local addresses tell how many slices there are; all other columns must have as many, except segments
    // and ops, of which one may stand for all.
    void take(PyObject* const* args, Py_ssize_t n_positional, PyObject* names) {
        if (n_positional != 5) invalid("transfers take segments, ops, local, remote and lengths");
        segments.clear();
        has_notify = false;
        request = TransferRequest{};
        take_numbers(
            args[2], "local", SIZE_MAX, [&](size_t n) { slices.resize(n); },
            [&](size_t i, uint64_t value) { slices[i].local = value; });
        size_t n = slices.size();
        auto no_room = [](size_t) {};
        take_numbers(args[3], "remote", n, no_room,
                     [&](size_t i, uint64_t value) { slices[i].remote = value; });
        take_numbers(args[4], "lengths", n, no_room,
                     [&](size_t i, uint64_t value) { slices[i].length = value; });
        take_ops(args[1], n);
        take_numbers(
            args[0], "segments", PyLong_Check(args[0]) ? SIZE_MAX : n,
            [&](size_t count) { segments.resize(count); },
            [&](size_t i, uint64_t value) {
                segments[i] = value > UINT32_MAX ? 0 : static_cast<uint32_t>(value);
            });
        Py_ssize_t n_names = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
        for (Py_ssize_t i = 0; i < n_names; ++i) {
            take_keyword(PyUnicode_AsUTF8(PyTuple_GET_ITEM(names, i)), args[n_positional + i]);
        }
        // No slices, and so no segments: the request has one all the same.
        if (segments.empty()) segments.assign(1, 0);
        // The request points into these vectors, which belong to the thread's Arguments and stay until its
        // next call.
        request.segments = segments;
        request.slices = slices;
        if (has_notify) request.notify = notify;
    }

   private:
    void take_ops(PyObject* ops, size_t n) {
        const char* text = nullptr;
        Py_ssize_t size = 0;
        if (PyUnicode_Check(ops)) {
            text = PyUnicode_AsUTF8AndSize(ops, &size);
        } else if (PyBytes_Check(ops)) {
            text = PyBytes_AS_STRING(ops);
            size = PyBytes_GET_SIZE(ops);
        }
        if (text == nullptr || (size != 1 && static_cast<size_t>(size) != n)) {
            PyErr_Clear();
            invalid("ops must be \"r\" or \"w\" for all slices, or a letter for each");
        }
        for (size_t i = 0; i < n; ++i) {
            char op = text[size == 1 ? 0 : i];
            if (op != 'r' && op != 'w') invalid("ops must be made of the letters r and w");
            slices[i].direction = op == 'w' ? Direction::kWrite : Direction::kRead;
        }
    }

    void take_keyword(std::string_view name, PyObject* value) {
        if (name == "priority") {
            request.background = as_number(value, "priority") != 0;
        } else if (name == "deadline_s") {
            if (value == Py_None) return;
            double seconds = PyFloat_AsDouble(value);
            if (PyErr_Occurred() != nullptr || !(seconds > 0)) {
                PyErr_Clear();
                invalid("deadline_s must be a positive number of seconds");
            }
            request.timeout_ms = static_cast<int>(std::clamp(seconds, 0.001, 86400.0) * 1000);
        } else if (name == "notify") {
            if (value == Py_None) return;
            char* bytes;
            Py_ssize_t size;
            if (PyBytes_AsStringAndSize(value, &bytes, &size) != 0) {
                PyErr_Clear();
                invalid("notify must be bytes");
            }
            notify.assign(bytes, static_cast<size_t>(size));
            has_notify = true;
        } else {
            invalid("transfers take no argument named " + std::string(name));
        }
    }
};

const char* text_of(TicketState state) {
    switch (state) {
        case TicketState::kWaiting:
            return "waiting";
        case TicketState::kDone:
            return "done";
        case TicketState::kFailed:
            return "failed";
        case TicketState::kCancelled:
            return "cancelled";
    }
    return "failed";
}

// Unlike the store's: 0 is a look without a wait.
int milliseconds_from_zero(double seconds) {
    return static_cast<int>(std::clamp(seconds, 0.0, 86400.0) * 1000);
}

py::bytes slice_bytes(const TicketStatus& status) {
    return {reinterpret_cast<const char*>(status.slices.data()), status.slices.size()};
}

// moonpool.TransferError, with its fields.
[[noreturn]] void raise_failure(const TicketStatus& status, uint64_t asked) {
    const TransferFailure& failure = status.failure;
    py::object type = py::module_::import("moonpool.core.errors").attr("TransferError");
    py::object exception =
        type(failure.error.text, py::arg("operation") = "transfer", py::arg("peer") = failure.peer,
             py::arg("bytes") = asked, py::arg("cause") = failure.cause, py::arg("path") = failure.path,
             py::arg("bytes_done") = status.bytes_done, py::arg("states") = slice_bytes(status),
             py::arg("settled") = failure.settled);
    PyErr_SetObject(type.ptr(), exception.ptr());
    throw py::error_already_set();
}

// ---- the engine

template <class F>
// The GIL is held again when it returns, as unwrap() needs.
auto without_gil(F f) {
    py::gil_scoped_release nogil;
    return f();
}

// What an engine with TLS tells. Its own object: the thread that waits for notes keeps no engine alive.
struct EngineNotes {
    const std::shared_ptr<Journal> journal = std::make_shared<Journal>();
    std::atomic<bool> ended{false};  // the engine was closed, or is gone
};

class PyEngine {
   public:
    PyEngine(std::string name, std::vector<std::string> listen, const py::bytes& token, std::string tenant,
             uint32_t io_threads, uint32_t connections_per_peer,
             std::optional<std::vector<std::string>> transports, std::vector<std::string> outside_transports,
             std::vector<std::string> rdma_devices, std::string rdma_library, std::string efa_provider,
             std::vector<std::string> efa_devices, std::string interface, std::string host_id,
             double timeout_s, std::optional<std::shared_ptr<TlsServer>> tls_server,
             std::optional<std::shared_ptr<TlsClient>> tls_client) {
        EngineOptions options;
        options.name = std::move(name);
        options.listen = std::move(listen);
        options.token = secrets_of(token);
        options.tenant = std::move(tenant);
        options.io_threads = io_threads;
        options.connections_per_peer = connections_per_peer;
        options.transports = std::move(transports);
        options.outside_transports = std::move(outside_transports);
        options.rdma.devices = std::move(rdma_devices);
        options.rdma.library = std::move(rdma_library);
        // Providers of other networks have an address each, to which they bind.
        if (efa_provider != options.fabric.provider && !options.listen.empty()) {
            options.fabric.source = host_of(options.listen.front());
        }
        options.fabric.provider = std::move(efa_provider);
        options.fabric.devices = std::move(efa_devices);
        options.interface = std::move(interface);
        options.host_id = std::move(host_id);
        options.timeout_ms = std::max(1, milliseconds_from_zero(timeout_s));
        options.tls_server = tls_server.value_or(nullptr);
        options.tls_client = tls_client.value_or(nullptr);
        if (options.tls_server != nullptr || options.tls_client != nullptr) {
            notes_ = std::make_shared<EngineNotes>();
            options.journal = notes_->journal;
        }
        engine_ = unwrap(without_gil([&] { return Engine::create(std::move(options)); }), "engine");
    }
    // Threads of the engine end here, without the GIL, before Python's memory that they may copy goes.
    ~PyEngine() {
        py::gil_scoped_release nogil;
        end_notes();
        engine_.reset();
    }

    Engine& engine() { return *engine_; }

    // A dict keeps their order.
    py::typing::Dict<py::str, py::str> transports() {
        py::typing::Dict<py::str, py::str> rows;
        for (auto& [name, why] : engine_->transports()) rows[py::str(name)] = py::str(why);
        return rows;
    }

    py::object allocate(uint64_t bytes, const std::string& location) {
        auto memory = unwrap(without_gil([&] { return engine_->allocate(bytes, location); }), "allocate");
        auto* object = reinterpret_cast<MemoryObject*>(memory_type->tp_alloc(memory_type, 0));
        if (object == nullptr) throw py::error_already_set();
        // tp_alloc gives zeroed memory; the C++ member is constructed in it and destroyed by
        // memory_dealloc.
        new (&object->memory) std::shared_ptr<transport::Memory>(std::move(memory));
        object->size = static_cast<Py_ssize_t>(bytes);
        return py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(object));
    }
    // -> the kind of the memory, and the ordinal of its card, -1: of none.
    std::pair<std::string, int> describe(uint64_t address, uint64_t length) {
        MemoryRef found = unwrap(without_gil([&] { return engine_->describe(address, length); }), "register");
        return {kind_name(found.kind), found.device};
    }
    // -> its location, as peers are shown it.
    std::string register_region(uint64_t address, uint64_t length, const std::string& location) {
        std::string label;
        unwrap(without_gil([&] { return engine_->register_region(address, length, location, &label); }),
               "register");
        return label;
    }
    void deregister(uint64_t address) {
        unwrap(without_gil([&] { return engine_->deregister_region(address); }), "deregister");
    }

    void shut_out(const py::bytes& segment) {
        transport::SegmentId id = segment_of(segment);
        unwrap(without_gil([&] { return engine_->shut_out(id); }), "shut_out");
    }
    void admit(const py::bytes& segment) { unwrap(engine_->admit(segment_of(segment)), "admit"); }

    uint32_t open(const std::string& address) {
        return unwrap(without_gil([&] { return engine_->open(address); }), "open", address);
    }
    uint32_t open_file(const std::string& path, std::optional<uint64_t> size, bool writable) {
        io::OpenOptions options{writable, size};
        return unwrap(without_gil([&] { return engine_->open_file(path, options); }), "open_file");
    }
    void close_segment(uint32_t segment) {
        unwrap(without_gil([&] { return engine_->close_segment(segment); }), "close_segment");
    }
    py::tuple segment(uint32_t segment) {
        SegmentInfo info = unwrap(without_gil([&] { return engine_->segment(segment); }), "segment");
        py::list regions, chosen;
        for (const SegmentRegion& region : info.regions) {
            regions.append(py::make_tuple(region.address, region.length, moonpool::kind_name(region.kind),
                                          region.location));
            chosen.append(region.transport);
        }
        return py::make_tuple(info.name, id_bytes(info.id), info.host_id, info.address, regions, chosen);
    }

    // (transport, path or "", why there is none, {kind of the peer's memory: why it does not reach it}, and
    // of the jobs that were timed: how many, seconds for each slice, seconds for each byte; parts of it
    // that are not used, with the reasons; and its rails: (port, path, state, why it is not up, bytes,
    // pieces, faults, bytes a second))
    py::list paths(uint32_t segment) {
        py::list rows;
        for (const SegmentPath& path : unwrap(engine_->paths(segment), "paths")) {
            py::dict unreached;
            for (const auto& [kind, why] : path.unreached) {
                unreached[py::str(moonpool::kind_name(kind))] = why;
            }
            py::list rails;
            for (const moonpool::transport::RailReport& rail : path.rails) {
                rails.append(py::make_tuple(rail.port, rail.path, rail.state, rail.why, rail.bytes,
                                            rail.pieces, rail.faults, rail.bytes_per_ns * 1e9));
            }
            rows.append(py::make_tuple(path.transport, path.path, path.why, unreached, path.jobs,
                                       path.slice_ns / 1e9, path.byte_ns / 1e9, path.remarks, rails));
        }
        return rows;
    }

    uint64_t transfer(const TransferRequest& request) {
        TicketStatus status;
        Result<uint64_t> bytes = without_gil([&] { return engine_->transfer(request, &status); });
        // The transfer began and failed: the exception says which slices arrived. Otherwise it was refused
        // as a whole.
        if (!bytes && status.state != TicketState::kWaiting) {
            uint64_t asked = 0;
            for (const Slice& slice : request.slices) asked += slice.length;
            raise_failure(status, asked);
        }
        return unwrap(std::move(bytes), "transfer");
    }
    uint64_t submit(const TransferRequest& request) {
        return unwrap(without_gil([&] { return engine_->submit(request); }), "submit");
    }
    bool wait(uint64_t ticket, double timeout_s) {
        int timeout_ms = milliseconds_from_zero(timeout_s);
        return unwrap(without_gil([&] { return engine_->wait(ticket, timeout_ms); }), "wait");
    }
    // A copy of the ticket's state at one moment; the slices' states are a byte each.
    py::tuple status(uint64_t ticket) {
        TicketStatus status = unwrap(engine_->status(ticket), "status");
        const TransferFailure& failure = status.failure;
        return py::make_tuple(text_of(status.state), status.bytes_done, slice_bytes(status),
                              failure.error.text, failure.path, failure.peer, failure.cause, failure.settled);
    }
    void cancel(uint64_t ticket) { unwrap(engine_->cancel(ticket), "cancel"); }
    void release(uint64_t ticket) {
        unwrap(without_gil([&] { return engine_->release(ticket); }), "release");
    }
    bool has_abandoned_copies() {
        return unwrap(without_gil([&] { return engine_->has_abandoned_copies(); }), "has_abandoned_copies");
    }
    std::vector<uint64_t> poll() { return unwrap(engine_->poll(), "poll"); }

    void notify(uint32_t segment, const py::bytes& message) {
        std::string text(message);
        unwrap(without_gil([&] { return engine_->notify(segment, text); }), "notify");
    }
    py::list notifications() {
        py::list all;
        for (auto& [peer, message] : unwrap(engine_->notifications(), "notifications")) {
            all.append(py::make_tuple(peer, py::bytes(message)));
        }
        return all;
    }
    std::map<std::string, uint64_t> metrics() {
        unwrap(engine_->in_this_process(), "metrics");
        std::map<std::string, uint64_t> rows;
        for (auto& [name, value] : engine_->metrics()) rows.emplace(name, value);
        return rows;
    }
    py::bytes segment_id() { return id_bytes(engine_->segment_id()); }
    bool close() {
        py::gil_scoped_release nogil;
        bool left = static_cast<bool>(engine_->close());
        end_notes();
        return left;
    }
    std::shared_ptr<EngineNotes> notes() const { return notes_; }

   private:
    static py::bytes id_bytes(const transport::SegmentId& id) {
        return py::bytes(reinterpret_cast<const char*>(id.data()), id.size());
    }
    static transport::SegmentId segment_of(const py::bytes& bytes) {
        std::string_view text(bytes);
        transport::SegmentId id{};
        if (text.size() != id.size()) {
            raise(Error{Code::kInvalidArgument, "a segment id has " + std::to_string(id.size()) +
                                                    " bytes, not " + std::to_string(text.size())},
                  "shut_out");
        }
        std::ranges::copy(text, reinterpret_cast<char*>(id.data()));
        return id;
    }

    // Wakes the thread that waits for notes. A child of fork() has its parent's descriptor.
    void end_notes() {
        if (notes_ == nullptr || engine_ == nullptr || !engine_->in_this_process()) return;
        if (notes_->ended.exchange(true)) return;
        notes_->journal->note(Level::kDebug, "engine_closed", "", "the engine is closed");
    }

    std::shared_ptr<EngineNotes> notes_;  // null: in plain
    std::shared_ptr<Engine> engine_;
};

// The arguments of one call; a thread's vectors keep their room from call to call.
template <class F>
// The boundary to CPython: no C++ exception may pass it.
PyObject* call(PyObject* self, PyObject* const* args, Py_ssize_t n, PyObject* names, F f) {
    static thread_local Arguments arguments;
    try {
        auto& engine = py::cast<PyEngine&>(py::handle(self));
        arguments.take(args, n, names);
        return PyLong_FromUnsignedLongLong(f(engine, arguments));
    } catch (py::error_already_set& error) {
        error.restore();
    } catch (const std::exception& error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
    }
    return nullptr;
}

PyObject* engine_transfer(PyObject* self, PyObject* const* args, Py_ssize_t n, PyObject* names) {
    return call(self, args, n, names,
                [](PyEngine& engine, Arguments& a) { return engine.transfer(a.request); });
}

PyObject* engine_submit(PyObject* self, PyObject* const* args, Py_ssize_t n, PyObject* names) {
    return call(self, args, n, names,
                [](PyEngine& engine, Arguments& a) { return engine.submit(a.request); });
}

// By the descriptor protocol, as CPython does for its own types; pybind11 has no way to add a plain method.
void add_method(py::handle type, PyMethodDef* definition) {
    auto method = py::reinterpret_steal<py::object>(
        PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(type.ptr()), definition));
    if (!method) throw py::error_already_set();
    type.attr(definition->ml_name) = method;
}

}  // namespace

void bind_engine(py::module_& m) {
    memory_type = make_memory_type();
    m.attr("EngineMemory") = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(memory_type));
    py::class_<EngineNotes, std::shared_ptr<EngineNotes>>(m, "EngineNotes")
        .def_property_readonly("ended", [](const EngineNotes& notes) { return notes.ended.load(); })
        .def_property_readonly(
            "notes_fd", [](const EngineNotes& notes) { return notes.journal->fd(); },
            "Readable when take_notes() has some, and at its end.")
        .def(
            "take_notes", [](EngineNotes& notes) { return notes_of(*notes.journal); },
            "What happened, for a log: (level 0 to 3, kind, peer, text, left out before it)");
    py::class_<PyEngine> engine(m, "Engine", "Moves bytes between registered memory of processes.");
    engine
        .def(py::init<std::string, std::vector<std::string>, const py::bytes&, std::string, uint32_t,
                      uint32_t, std::optional<std::vector<std::string>>, std::vector<std::string>,
                      std::vector<std::string>, std::string, std::string, std::vector<std::string>,
                      std::string, std::string, double, std::optional<std::shared_ptr<TlsServer>>,
                      std::optional<std::shared_ptr<TlsClient>>>(),
             py::arg("name"), py::arg("listen"), py::arg("token"), py::kw_only(),
             py::arg("tenant") = "default", py::arg("io_threads") = 2, py::arg("connections_per_peer") = 2,
             py::arg("transports") = py::none(), py::arg("outside_transports") = std::vector<std::string>(),
             py::arg("rdma_devices") = std::vector<std::string>(), py::arg("rdma_library") = "",
             py::arg("efa_provider") = "efa", py::arg("efa_devices") = std::vector<std::string>(),
             py::arg("interface") = "", py::arg("host_id") = "", py::arg("timeout_s") = 5.0,
             py::arg("tls_server") = py::none(), py::arg("tls_client") = py::none(),
             "tls_server, tls_client: of connections by TCP that come and that are made. None: in plain.")
        .def_property_readonly("name", [](PyEngine& e) { return e.engine().name(); })
        .def_property_readonly("addresses", [](PyEngine& e) { return e.engine().addresses(); })
        .def_property_readonly("segment_id", &PyEngine::segment_id)
        .def_property_readonly("eventfd", [](PyEngine& e) { return e.engine().event_fd(); })
        .def("transports", &PyEngine::transports)
        .def("allocate", &PyEngine::allocate, py::arg("nbytes"), py::arg("location") = "cpu:0")
        .def("describe", &PyEngine::describe, py::arg("address"), py::arg("length"))
        .def("register", &PyEngine::register_region, py::arg("address"), py::arg("length"),
             py::arg("location") = "")
        .def("deregister", &PyEngine::deregister, py::arg("address"))
        .def("shut_out", &PyEngine::shut_out, py::arg("segment_id"))
        .def("admit", &PyEngine::admit, py::arg("segment_id"))
        .def("open", &PyEngine::open, py::arg("address"))
        .def("open_file", &PyEngine::open_file, py::arg("path"), py::kw_only(), py::arg("size") = py::none(),
             py::arg("writable") = true)
        .def("close_segment", &PyEngine::close_segment, py::arg("segment"))
        .def("segment", &PyEngine::segment, py::arg("segment"))
        .def("paths", &PyEngine::paths, py::arg("segment"))
        .def("wait", &PyEngine::wait, py::arg("ticket"), py::arg("timeout_s"))
        .def("status", &PyEngine::status, py::arg("ticket"))
        .def("cancel", &PyEngine::cancel, py::arg("ticket"))
        .def("release", &PyEngine::release, py::arg("ticket"))
        .def("has_abandoned_copies", &PyEngine::has_abandoned_copies)
        .def("poll", &PyEngine::poll)
        .def("notify", &PyEngine::notify, py::arg("segment"), py::arg("message"))
        .def("notifications", &PyEngine::notifications)
        .def("metrics", &PyEngine::metrics)
        .def_property_readonly("notes", &PyEngine::notes, "None: in plain.")
        .def("close", &PyEngine::close,
             "Ends what runs. False: a device or a stopped peer may still access registered memory, which "
             "must "
             "not be freed; a further call waits again.");

// In the form of pybind11's signatures, from which the stub is made.
#define MOONPOOL_ARGUMENTS                                                                                   \
    "(self, segments: int | collections.abc.Sequence[int], ops: str | bytes, local: typing.Any, remote: "    \
    "typing.Any, lengths: typing.Any, *, priority: int = 0, deadline_s: float | None = None, notify: bytes " \
    "| None = None) -> int\n\n"
    static PyMethodDef transfer = {
        "transfer", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(engine_transfer)),
        METH_FASTCALL | METH_KEYWORDS,
        "transfer" MOONPOOL_ARGUMENTS "Moves the slices and waits for them; the bytes moved."};
    static PyMethodDef submit = {
        "submit", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(engine_submit)),
        METH_FASTCALL | METH_KEYWORDS, "submit" MOONPOOL_ARGUMENTS "The same without waiting; a ticket."};
#undef MOONPOOL_ARGUMENTS
    add_method(engine, &transfer);
    add_method(engine, &submit);
}

}  // namespace moonpool::python
