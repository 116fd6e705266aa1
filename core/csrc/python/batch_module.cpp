// Batches whose ends are told by one eventfd, as Python sees them: moonpool._native.BatchClient.
//
// The calls are those that LMCache makes of a native storage client (docs/lmcache.md): a submit returns a
// number at once and never raises for what a node does; drain_completions() says what became of each. The
// threads never take the GIL. A batch of many bytes is cut into one piece a thread.
//
// A node that does not answer is waited for by what is under way, once: all else fails at once, also what is
// queued, until the caller attaches a client anew.
//
// Threads: all methods are called with the GIL, so batches_, pieces_, ended_ and pool_ need no lock. The
// worker's threads run Batch::run() and touch only what is theirs: the range of `ok` and the one of
// `errors` that belong to their piece, and Pool::silent. A batch stays in batches_ until all of its pieces
// have ended, which is what makes the reference in hand_over() safe.

#include <pybind11/pybind11.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "python/answers.hpp"
#include "python/arguments.hpp"
#include "python/client_module.hpp"
#include "python/module.hpp"
#include "python/raise.hpp"
#include "store/client/worker.hpp"

namespace moonpool::python {

namespace {

constexpr uint64_t kPieceBytesMin = 4 << 20;  // below it a second thread costs more than it brings
constexpr uint32_t kThreadsMax = 64;
constexpr const char* kSilent = "the pool did not answer; it is asked again by and by";

enum class Verb : uint8_t { kGet, kSet, kExists, kDelete };

class BatchClient {
   public:
    BatchClient(uint32_t threads, uint32_t queue_max)
        : threads_(std::clamp(threads, 1U, kThreadsMax)), worker_(threads_, queue_max) {}

    // Operations of before fail at once: there is no node yet.
    void attach(const PyClient& client) { pool_ = std::make_shared<Pool>(client.client()); }
    void detach() {
        if (pool_ != nullptr) pool_->silent = true;
    }
    bool attached() const { return pool_ != nullptr && !pool_->silent; }
    int event_fd() const { return worker_.event_fd(); }

    uint64_t submit_batch_get(const py::object& keys, const py::object& buffers) {
        return submit(Verb::kGet, keys, buffers);
    }
    uint64_t submit_batch_set(const py::object& keys, const py::object& buffers) {
        return submit(Verb::kSet, keys, buffers);
    }
    uint64_t submit_batch_exists(const py::object& keys) { return submit(Verb::kExists, keys, py::list()); }
    uint64_t submit_batch_delete(const py::object& keys) { return submit(Verb::kDelete, keys, py::list()); }

    py::list drain_completions() {
        uint64_t told;
        (void)!::read(worker_.event_fd(), &told,
                      sizeof(told));  // before looking: what comes later tells anew
        for (uint64_t ticket : worker_.poll()) {
            auto piece = pieces_.extract(ticket);
            if (piece.empty()) continue;
            Batch& batch = *batches_.at(piece.mapped());
            if (--batch.open == 0) ended_.push_back(piece.mapped());
        }
        py::list out;
        for (uint64_t number : std::exchange(ended_, {})) {
            auto batch = batches_.extract(number);
            if (batch.empty()) continue;  // closed meanwhile: making the answers may run any finalizer
            out.append(batch.mapped()->answer(number));
        }
        return out;
    }

    void close() {
        {
            py::gil_scoped_release nogil;
            worker_.close();
        }
        pieces_.clear();
        batches_.clear();
        ended_.clear();
        pool_.reset();
    }

   private:
    struct Pool {
        std::shared_ptr<Client> client;
        std::atomic<bool> silent = false;  // from the first operation on that it did not answer

        explicit Pool(std::shared_ptr<Client> c) : client(std::move(c)) {}

        void heard(const Error& error) {
            if (error.code == Code::kUnavailable || error.code == Code::kTimeout ||
                error.code == Code::kAuth || error.code == Code::kProtocol) {
                silent = true;
            }
        }
    };

    // Held by batches_ until it was told, and let go with the GIL: it has Python's buffers.
    struct Batch {
        Verb verb;
        Names names;
        Buffers buffers;
        std::vector<uint8_t> ok;          // of each key; each piece writes its own
        std::vector<std::string> errors;  // of each piece; empty: none
        size_t open = 0;                  // pieces that have not ended

        Batch(Verb v, const py::object& keys, const py::object& parts)
            : verb(v), names(keys), buffers(parts, v == Verb::kGet), ok(names.size()) {
            if (v == Verb::kGet || v == Verb::kSet) check_counts(names.size(), buffers.size(), "buffers");
        }

        uint64_t bytes() const {
            uint64_t sum = 0;
            for (size_t i = 0; i < buffers.size(); ++i) sum += size_of(i);
            return sum;
        }

        uint64_t size_of(size_t i) const {
            uint64_t sum = 0;
            for (const MemoryRef& part : buffers.parts(i)) sum += part.bytes;
            return sum;
        }

        void run(Pool& pool, size_t piece, size_t first, size_t end) {
            // Queued before the node fell silent: each would otherwise wait for it once more.
            if (pool.silent) {
                errors[piece] = kSilent;
                return;
            }
            Client& client = *pool.client;
            std::span<const std::string_view> keys = names.views().subspan(first, end - first);
            if (verb == Verb::kGet) return get(pool, piece, first, end);
            if (verb == Verb::kSet) return set(pool, piece, first, end);
            if (verb == Verb::kExists) {
                auto found = client.exists(keys);
                if (!found) return fail(pool, piece, found.error());
                for (size_t i = first; i < end; ++i) ok[i] = (*found)[i - first] == Presence::kHit;
            } else {
                auto removed = client.remove(keys);
                if (!removed) return fail(pool, piece, removed.error());
                for (size_t i = first; i < end; ++i) ok[i] = removed->flags[i - first] == 1;
            }
        }

        // An object of another size than its buffer is a miss: it is another form of the same key.
        void get(Pool& pool, size_t piece, size_t first, size_t end) {
            std::vector<GetItem> items;
            for (size_t i = first; i < end; ++i) items.push_back({names.views()[i], buffers.parts(i)});
            auto sizes = pool.client->get(items, false);
            if (!sizes && sizes.error().code == Code::kInvalidArgument) {
                // One that is larger than its buffer refuses the call; the others are asked for by
                // themselves.
                for (size_t i = first; i < end && items.size() > 1; ++i) get(pool, piece, i, i + 1);
                return;
            }
            if (!sizes) return fail(pool, piece, sizes.error());
            for (size_t i = first; i < end; ++i) {
                int64_t size = (*sizes)[i - first];
                ok[i] = size >= 0 && static_cast<uint64_t>(size) == size_of(i);
            }
        }

        void set(Pool& pool, size_t piece, size_t first, size_t end) {
            std::vector<PutItem> items;
            for (size_t i = first; i < end; ++i) items.push_back({names.views()[i], {}, buffers.parts(i)});
            auto report = pool.client->put(items, PutOptions{});
            if (!report) return fail(pool, piece, report.error());
            for (size_t i = first; i < end; ++i) ok[i] = report->outcomes[i - first] != PutOutcome::kRefused;
            errors[piece] = report->refusal;
        }

        void fail(Pool& pool, size_t piece, const Error& error) {
            pool.heard(error);
            errors[piece] = error.text;
        }

        // (number, ok, error, of each key whether it was there; None for a set, which goes as a whole)
        py::tuple answer(uint64_t number) const {
            std::string error;
            for (const std::string& text : errors) {
                if (error.empty()) error = text;
            }
            if (verb == Verb::kSet) {
                bool all = std::ranges::all_of(ok, [](uint8_t one) { return one != 0; });
                return py::make_tuple(number, all, readable(error), py::none());
            }
            py::list found(ok.size());
            for (size_t i = 0; i < ok.size(); ++i) found[i] = py::bool_(ok[i] != 0);
            return py::make_tuple(number, error.empty(), readable(error), found);
        }

        // The text may be a node's: whatever it is, it becomes a sentence.
        static py::object readable(const std::string& text) {
            auto out = py::reinterpret_steal<py::object>(
                PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace"));
            if (!out) throw py::error_already_set();
            return out;
        }
    };

    uint64_t submit(Verb verb, const py::object& keys, const py::object& buffers) {
        auto batch = std::make_unique<Batch>(verb, keys, buffers);
        uint64_t number = next_++;
        Batch* raw = batch.get();
        batches_.emplace(number, std::move(batch));
        size_t n = raw->names.size();
        // One piece for each 4 MiB, at most one for each thread and each key. exists and delete have no
        // buffers and are one piece.
        size_t pieces = std::clamp<size_t>(raw->bytes() / kPieceBytesMin, 1,
                                           std::max<size_t>(std::min<size_t>(threads_, n), 1));
        raw->errors.resize(pieces);
        for (size_t piece = 0; piece < pieces; ++piece) {
            std::string refusal =
                hand_over(number, *raw, piece, n * piece / pieces, n * (piece + 1) / pieces);
            if (!refusal.empty()) raw->errors[piece] = std::move(refusal);
        }
        // No piece runs: the batch has ended already, and the caller is told by the same eventfd as ever,
        // not by an exception.
        if (raw->open == 0) {
            ended_.push_back(number);
            uint64_t one = 1;
            (void)!::write(worker_.event_fd(), &one, sizeof(one));
        }
        return number;
    }

    // Why the piece will not run, or nothing.
    std::string hand_over(uint64_t number, Batch& batch, size_t piece, size_t first, size_t end) {
        if (pool_ == nullptr) return "there is no node to connect to";
        if (pool_->silent) return kSilent;
        Result<uint64_t> ticket = worker_.submit(
            [&batch, pool = pool_, piece, first, end] { batch.run(*pool, piece, first, end); });
        if (!ticket) return ticket.error().text;
        ++batch.open;
        pieces_.emplace(*ticket, number);
        return {};
    }

    uint32_t threads_;
    std::shared_ptr<Pool> pool_;
    std::unordered_map<uint64_t, uint64_t> pieces_;  // ticket -> batch
    std::unordered_map<uint64_t, std::unique_ptr<Batch>> batches_;
    std::vector<uint64_t> ended_;
    uint64_t next_ = 1;
    Worker worker_;  // last: its threads end before what they use
};

}  // namespace

void bind_batch(py::module_& m) {
    py::class_<BatchClient>(
        m, "BatchClient", "Batches of operations by threads; numbers out, what became of them by an eventfd.")
        .def(py::init<uint32_t, uint32_t>(), py::arg("threads") = 2, py::arg("queue_max") = 4096)
        .def("attach", &BatchClient::attach, py::arg("client"),
             "From now on this client runs the operations.")
        .def("detach", &BatchClient::detach, "From now on operations fail at once.")
        .def_property_readonly("attached", &BatchClient::attached,
                               "False before a client was attached, and once it did not answer.")
        .def("event_fd", &BatchClient::event_fd)
        .def("submit_batch_get", &BatchClient::submit_batch_get, py::arg("keys"), py::arg("buffers"))
        .def("submit_batch_set", &BatchClient::submit_batch_set, py::arg("keys"), py::arg("buffers"))
        .def("submit_batch_exists", &BatchClient::submit_batch_exists, py::arg("keys"))
        .def("submit_batch_delete", &BatchClient::submit_batch_delete, py::arg("keys"))
        .def("drain_completions", &BatchClient::drain_completions,
             "Of each batch that ended: (number, ok, error, of each key whether it was there or None).")
        .def("close", &BatchClient::close);
}

}  // namespace moonpool::python
