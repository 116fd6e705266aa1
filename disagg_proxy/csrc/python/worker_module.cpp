// What the conductor knows of engines, as Python sees it: their load, what was learnt of their times, and
// the questions to all of them at once. All of it keeps the GIL: each call is shorter than giving it up.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/typing.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "conductor/candidates.hpp"
#include "conductor/worker_load.hpp"
#include "python/arguments.hpp"
#include "python/proxy_module.hpp"
#include "python/raise.hpp"

namespace moonpool::python {

namespace {

constexpr const char* kReasons[] = {"only",       "session",       "match", "turn",
                                    "least_time", "spares_others", "drawn"};

[[noreturn]] void refuse(const char* why) { raise(Error{Code::kInvalidArgument, why}, "conductor"); }

std::shared_ptr<WorkerView> make_worker_view(uint32_t place, int64_t room_tokens,
                                             std::shared_ptr<WorkerLoad> load,
                                             std::shared_ptr<PrefillModel> prefill,
                                             std::shared_ptr<DecodeModel> decode) {
    if (!load || !prefill || !decode) refuse("a worker has a load and its models");
    return std::make_shared<WorkerView>(place, room_tokens, std::move(load), std::move(prefill),
                                        std::move(decode));
}

std::shared_ptr<Candidates> make_candidates(std::vector<std::shared_ptr<WorkerView>> workers) {
    if (workers.empty()) refuse("there are no workers to choose among");
    return std::make_shared<Candidates>(std::move(workers));
}

// Numbers of tokens: an array of u32, which costs nothing, or any sequence of integers.
class TokenCounts {
   public:
    explicit TokenCounts(const py::object& counts) {
        if (PyObject_CheckBuffer(counts.ptr()) != 0) {
            array_.emplace(counts, "own");
            span_ = array_->span();
            return;
        }
        auto items = py::reinterpret_steal<py::object>(
            PySequence_Fast(counts.ptr(), "own must be a sequence of token counts"));
        if (!items) throw py::error_already_set();
        auto count = static_cast<size_t>(PySequence_Fast_GET_SIZE(items.ptr()));
        copied_.resize(count);
        PyObject** item = PySequence_Fast_ITEMS(items.ptr());
        for (size_t i = 0; i < count; ++i) {
            long value = PyLong_AsLong(item[i]);
            if (value == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
            if (value < 0 || value > UINT32_MAX) refuse("a token count is no negative number");
            copied_[i] = static_cast<uint32_t>(value);
        }
        span_ = copied_;
    }
    std::span<const uint32_t> span() const { return span_; }

   private:
    std::optional<ArrayOf<uint32_t>> array_;
    std::vector<uint32_t> copied_;
    std::span<const uint32_t> span_;
};

using Wanted = std::optional<std::shared_ptr<WorkerView>>;  // or none

py::tuple cheapest(Candidates& self, int64_t tokens, const py::object& own, int64_t pool, double now_s,
                   double ahead_s, double urgency, double marginal_delay, double reuse_probability,
                   double spare_s, double stalled, double gap_most_s, int64_t need_tokens,
                   const Wanted& without, const Wanted& last, int64_t last_own, double noise,
                   double unseen_s) {
    TokenCounts held(own);
    Cheapest best = self.cheapest({.tokens = tokens,
                                   .pool = pool,
                                   .now_s = now_s,
                                   .ahead_s = ahead_s,
                                   .urgency = urgency,
                                   .marginal_delay = marginal_delay,
                                   .reuse_probability = reuse_probability,
                                   .spare_s = spare_s,
                                   .stalled = stalled,
                                   .gap_most_s = gap_most_s,
                                   .need_tokens = need_tokens,
                                   .without = without ? without->get() : nullptr,
                                   .last = last ? last->get() : nullptr,
                                   .last_own = last_own,
                                   .noise = noise,
                                   .unseen_s = unseen_s},
                                  held.span());
    return py::make_tuple(best.which, kReasons[static_cast<size_t>(best.reason)], best.ttft_s, best.prefill_s,
                          best.transfer_s, best.own, best.fetches, best.lost_s, best.cost, best.gap_s);
}

}  // namespace

void bind_workers(py::module_& m) {
    py::class_<Prefilled>(m, "Prefilled", "A prefill has ended.")
        .def_readonly("tokens", &Prefilled::tokens)
        .def_readonly("own", &Prefilled::own)
        .def_readonly("pool", &Prefilled::pool)
        .def_readonly("seconds", &Prefilled::seconds,
                      "How long the engine had it in work, the wait before it left out.")
        .def_readonly("predicted_s", &Prefilled::predicted_s)
        .def_readonly("batch", &Prefilled::batch, "Requests that decoded there meanwhile, an average.")
        .def_readonly("context_tokens", &Prefilled::context_tokens, "Of these.");

    py::class_<Decoded>(m, "Decoded", "A request has ended; batch and context are averages over its time.")
        .def_readonly("batch", &Decoded::batch)
        .def_readonly("context_tokens", &Decoded::context_tokens)
        .def_readonly("gap_s", &Decoded::gap_s, "Between two of its tokens.")
        .def_readonly("stall_s", &Decoded::stall_s, "Of prefill there, for each of these gaps.");

    py::class_<LastReport, std::shared_ptr<LastReport>>(
        m, "LastReport",
        "When a proxy last got a report of any of its engines, and how many have prompts to "
        "compute: all of their loads share it.")
        .def(py::init<>());

    py::class_<WorkerLoad, std::shared_ptr<WorkerLoad>>(
        m, "WorkerLoad",
        "What one engine has to do: prefills in line, requests that decode. Requests are named by integers; "
        "a "
        "call about one that is not known changes nothing. Times are seconds of one clock.")
        .def(py::init<>())
        .def_property_readonly("prefills", &WorkerLoad::prefills)
        .def_property_readonly("prefill_tokens", &WorkerLoad::prefill_tokens,
                               "Tokens of the prompts in line, those that are reused included.")
        .def_property_readonly("prefill_rest_tokens", &WorkerLoad::prefill_rest_tokens,
                               "Those of them that are to be computed.")
        .def_property_readonly("decodes", &WorkerLoad::decodes)
        .def_property_readonly("requests", &WorkerLoad::requests)
        .def_property_readonly("context_tokens", &WorkerLoad::context_tokens,
                               "Tokens in the KV cache of the requests that decode now, as far as known.")
        .def("wait_s", &WorkerLoad::wait_s, py::arg("now_s"),
             "Seconds until a prefill that came now would begin.")
        .def("stall_s", &WorkerLoad::stall_s, py::arg("now_s"),
             "Seconds of prefill for each gap of a request that decodes here: a mean of the last answers, "
             "which fades from the end of the last one on.")
        .def_property_readonly(
            "lag_s", &WorkerLoad::lag_s,
            "By how many seconds reports of this engine are late: a mean of the last ones.")
        .def(
            "follow_reports",
            [](WorkerLoad& self, std::shared_ptr<LastReport> last) { self.follow_reports(std::move(last)); },
            py::arg("last"),
            "While several engines have work and the proxy gets no report of any, this one's line goes on as "
            "predicted.")
        .def("heard", &WorkerLoad::heard, py::arg("at_s"),
             "A report of this engine came, which says what has happened until then.")
        .def("reported", &WorkerLoad::reported, py::arg("age_s"),
             "A report came so many seconds after its event.")
        .def("prefill_began", &WorkerLoad::prefill_began, py::arg("request"), py::arg("tokens"),
             py::arg("own"), py::arg("pool"), py::arg("predicted_s"), py::arg("now_s"), py::kw_only(),
             py::arg("silent") = false,
             "silent: its end will not be heard of, so it is taken to last as long as predicted.")
        .def("prefill_ended", &WorkerLoad::prefill_ended, py::arg("request"), py::arg("now_s"), py::kw_only(),
             py::arg("done") = true,
             "done: it was computed; else the request is gone and nothing can be learnt from it.")
        .def("decode_began", &WorkerLoad::decode_began, py::arg("request"), py::arg("context"),
             py::arg("now_s"), py::kw_only(), py::arg("silent") = false,
             "silent: nothing was heard of its beginning, so what it waits for, its own prompt too, is no "
             "stall.")
        .def("decode_ended", &WorkerLoad::decode_ended, py::arg("request"), py::arg("tokens"),
             py::arg("now_s"), "tokens: how many were made, the first included; 0 when unknown.")
        .def("forget_all", &WorkerLoad::forget_all, "The engine is gone, and what it had to do with it.")
        .def(
            "check_integrity", [](const WorkerLoad& self) { raise_if(self.check_integrity()); },
            "Raises AssertionError when an invariant is broken.");

    py::class_<WorkerView, std::shared_ptr<WorkerView>>(
        m, "WorkerView",
        "What policies compare workers by, of one worker. room_tokens: what its KV cache holds, 0: not "
        "known; obeys: it computes what it is told not to fetch; pending_handover, pending_handover_tokens: "
        "requests, and tokens of their prompts, that others prefill for it; turn: when a policy last chose "
        "it.")
        .def(py::init(&make_worker_view), py::arg("place"), py::arg("room_tokens"), py::arg("load"),
             py::arg("prefill"), py::arg("decode"))
        .def_readwrite("room_tokens", &WorkerView::room_tokens)
        .def_readwrite("obeys", &WorkerView::obeys)
        .def_readwrite("pending_handover", &WorkerView::pending_handover)
        .def_readwrite("pending_handover_tokens", &WorkerView::pending_handover_tokens)
        .def_readwrite("turn", &WorkerView::turn)
        .def("gap_s", &WorkerView::gap_s, py::arg("tokens"), py::arg("stall_s") = 0.0,
             "Predicted seconds between the tokens of one more request with so long a prompt. stall_s: of "
             "prefill meanwhile, for each of them (WorkerLoad.stall_s).")
        .def(
            "prefill_s",
            [](const WorkerView& self, int64_t tokens, int64_t own, int64_t pool) {
                return self.prefill_s({tokens, own, pool});
            },
            py::arg("tokens"), py::arg("own") = 0, py::arg("pool") = 0,
            "Predicted seconds of a prefill that began now, beside those that decode there.")
        .def("has_room", &WorkerView::has_room, py::arg("tokens"),
             "Whether a request of so many tokens fits beside those that decode here; unknown counts as yes.")
        .def(
            "dispatched",
            [](WorkerView& self, int64_t request, int64_t tokens, int64_t own, int64_t pool, double ahead_s,
               double predicted_s, double now_s, bool silent) {
                Dispatched sent =
                    self.dispatched(request, {tokens, own, pool, ahead_s}, predicted_s, now_s, silent);
                return py::make_tuple(sent.wait_s, sent.prefill_s, sent.fetch_s);
            },
            py::arg("request"), py::arg("tokens"), py::arg("own"), py::arg("pool"), py::kw_only(),
            py::arg("ahead_s"), py::arg("predicted_s"), py::arg("now_s"), py::arg("silent"),
            "A request is sent here, and enters the load. ahead_s: of the sender's other fetches; "
            "predicted_s: of its prefill, 0: the model predicts it; silent: neither the end of its prefill "
            "nor the beginning of its decode will be heard of, so both are in the load from now on. (Seconds "
            "until its prefill begins, of its prefill, of its fetch with nothing before it.)");

    py::class_<Candidates, std::shared_ptr<Candidates>>(m, "Candidates",
                                                        "Instances to choose among, weighed all at once.")
        .def(py::init(&make_candidates), py::arg("workers"))
        .def("__len__", &Candidates::size)
        .def("cheapest", &cheapest, py::arg("tokens"), py::arg("own"), py::arg("pool"), py::arg("now_s"),
             py::kw_only(), py::arg("ahead_s") = 0.0, py::arg("urgency") = 1.0,
             py::arg("marginal_delay") = 0.0, py::arg("reuse_probability") = 0.0, py::arg("spare_s") = 0.0,
             py::arg("stalled") = 0.0, py::arg("gap_most_s") = INFINITY, py::arg("need_tokens") = 0,
             py::arg("without") = py::none(), py::arg("last") = py::none(), py::arg("last_own") = -1,
             py::arg("noise") = 0.0, py::arg("unseen_s") = 0.0,
             "The worker that is to compute a prompt: (which, reason, ttft_s, prefill_s, transfer_s, own, "
             "fetches, "
             "lost_s, cost, gap_s). The cost is infinite where none may; gap_s: between its tokens if it "
             "answers, "
             "too.")
        .def(
            "least_gap",
            [](const Candidates& self, int64_t tokens, int64_t need_tokens, double now_s) {
                LeastGap best = self.least_gap(tokens, need_tokens, now_s);
                return py::make_tuple(best.which, best.gap_s);
            },
            py::arg("tokens"), py::arg("need_tokens"), py::arg("now_s"),
            "Who is to answer, of those with room for need_tokens, or of all: (which, seconds between "
            "tokens).");
}

}  // namespace moonpool::python
