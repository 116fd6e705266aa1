// What an engine's work takes, as Python sees it: moonpool._native.PrefillModel, HandoverModel, DecodeModel
// and the Regression below them.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/typing.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "conductor/cost_model.hpp"
#include "python/proxy_module.hpp"
#include "python/raise.hpp"

namespace moonpool::python {

namespace {

[[noreturn]] void raise_invalid(const char* why) { raise(Error{Code::kInvalidArgument, why}, "conductor"); }

std::shared_ptr<Regression> make_regression(const std::vector<double>& prior,
                                            const std::vector<double>& spread, double floor) {
    if (prior.empty() || prior.size() > Regression::kCoefficientsMax || prior.size() != spread.size()) {
        raise_invalid("a regression has one to eight coefficients, and as many spreads");
    }
    return std::make_shared<Regression>(prior, spread, floor);
}

void check_size(const Regression& regression, const std::vector<double>& features) {
    if (features.size() != regression.coefficients().size()) {
        raise_invalid("a number for each coefficient is wanted");
    }
}

py::typing::Tuple<py::float_, py::ellipsis> as_tuple(std::span<const double> values) {
    py::tuple out(values.size());
    for (size_t i = 0; i < values.size(); ++i) out[i] = py::float_(values[i]);
    return out;
}

// What a model's regression had in the release before, when it was of one engine alone.
template <typename Value>
auto own_only(const char* name, Value (Regression::*value)() const) {
    return [name, value](const PooledRegression& self) {
        std::string text = std::string("regression.") + name + " is regression.own." + name +
                           " now; the old name goes with the next release";
        if (PyErr_WarnEx(PyExc_DeprecationWarning, text.c_str(), 1) != 0) throw py::error_already_set();
        return (self.own().*value)();
    };
}

constexpr const char* kObserved =
    "Learns from one sample. The error of the prediction before, seconds - predicted; None for a sample that "
    "changes nothing.";
constexpr const char* kDoubt =
    "How far off ``predict`` may be for what has not been learnt yet: seconds, a standard deviation.";

}  // namespace

void bind_cost_models(py::module_& m) {
    py::class_<Regression, std::shared_ptr<Regression>>(
        m, "Regression",
        "Least squares that learns while it is used: y = sum of coefficient * feature, each coefficient at "
        "least 0. prior: the coefficients before any sample; spread: how far off each may be (standard "
        "deviation); floor: the smallest scale of y that matters, in y's unit.")
        .def(py::init(&make_regression), py::arg("prior"), py::arg("spread"), py::kw_only(), py::arg("floor"))
        .def_property_readonly("coefficients",
                               [](const Regression& self) { return as_tuple(self.coefficients()); })
        .def_property_readonly("samples", &Regression::samples, "How many were learnt from.")
        .def_property_readonly("odd", &Regression::odd, "How many were absurd.")
        .def_property_readonly("refused", &Regression::refused, "How many were no numbers.")
        .def(
            "predict",
            [](const Regression& self, const std::vector<double>& features) {
                check_size(self, features);
                return self.predict(features);
            },
            py::arg("features"))
        .def(
            "observe",
            [](Regression& self, const std::vector<double>& features, double y) {
                check_size(self, features);
                return self.observe(features, y);
            },
            py::arg("features"), py::arg("y"),
            "Learns from one sample. The error of the prediction before, y - predicted; None for a sample "
            "that changes nothing: no set of finite, non-negative numbers, or absurd.")
        .def(
            "start",
            [](Regression& self, const std::vector<double>& coefficients) {
                check_size(self, coefficients);
                return self.start(coefficients);
            },
            py::arg("coefficients"),
            "Begins with these coefficients in the place of the prior's, and as little known. False: there "
            "was a sample, or these are no numbers, and nothing changes.")
        .def(
            "check_integrity", [](const Regression& self) { raise_if(self.check_integrity()); },
            "Raises AssertionError when an invariant is broken.");

    py::class_<PooledRegression>(
        m, "PooledRegression",
        "A regression of one engine and one that engines of its kind share. The engine is predicted by its "
        "kind's, or by its own as far as that has been clearly better on its last samples.")
        .def_property_readonly("coefficients",
                               [](const PooledRegression& self) {
                                   PooledRegression::Coefficients mixed;
                                   return as_tuple(self.coefficients(mixed));
                               })
        .def_property_readonly("share", &PooledRegression::share, "Of its own in predictions, 0 to 1.")
        .def_property_readonly("own", &PooledRegression::own, py::return_value_policy::reference_internal)
        .def_property_readonly(
            "kind",
            [](const PooledRegression& self) {
                return std::const_pointer_cast<Regression>(self.shared_kind());
            },
            "Another one when the engine joins a kind.")
        .def("join_kind", &PooledRegression::join_kind, py::arg("other"),
             "From now on it is of the other's kind.")
        .def("leave_kind", &PooledRegression::leave_kind,
             "From now on it is of a kind of its own, which predicts as this engine was predicted, and is as "
             "open to samples as at the beginning.")
        .def(
            "start",
            [](PooledRegression& self, const std::vector<double>& coefficients) {
                check_size(self.own(), coefficients);
                return self.start(coefficients);
            },
            py::arg("coefficients"),
            "Its kind begins with these coefficients in the place of the prior's, and as little known. "
            "False: it has samples, or these are no numbers, and nothing changes.")
        .def(
            "predict",
            [](const PooledRegression& self, const std::vector<double>& features) {
                check_size(self.own(), features);
                return self.predict(features);
            },
            py::arg("features"))
        .def(
            "observe",
            [](PooledRegression& self, const std::vector<double>& features, double y) {
                check_size(self.own(), features);
                return self.observe(features, y);
            },
            py::arg("features"), py::arg("y"), "As Regression.observe.")
        .def_property_readonly("samples", own_only("samples", &Regression::samples),
                               "Deprecated: own.samples.")
        .def_property_readonly("odd", own_only("odd", &Regression::odd), "Deprecated: own.odd.")
        .def_property_readonly("refused", own_only("refused", &Regression::refused),
                               "Deprecated: own.refused.")
        .def(
            "check_integrity", [](const PooledRegression& self) { raise_if(self.check_integrity()); },
            "Raises AssertionError when an invariant is broken.");

    py::class_<PrefillModel, std::shared_ptr<PrefillModel>>(
        m, "PrefillModel",
        "Seconds that an engine needs before a request's first token, without waiting for its turn. tokens: "
        "of "
        "the prompt; own: leading ones in the engine's own cache; pool: those behind them that it fetches; "
        "ahead_s: of the sender's other fetches; queued: others are computed before; step_s: of a step of "
        "those "
        "that decode there meanwhile.")
        .def(py::init<>())
        .def_property_readonly("regression", &PrefillModel::regression)
        .def(
            "predict",
            [](const PrefillModel& self, int64_t tokens, int64_t own, int64_t pool, double ahead_s,
               bool queued, double step_s) {
                return self.predict({tokens, own, pool, ahead_s, queued, step_s});
            },
            py::arg("tokens"), py::arg("own") = 0, py::arg("pool") = 0, py::arg("ahead_s") = 0.0,
            py::kw_only(), py::arg("queued") = false, py::arg("step_s") = 0.0)
        .def(
            "doubt_s",
            [](const PrefillModel& self, int64_t tokens, int64_t own, int64_t pool, double ahead_s,
               bool queued, double step_s) {
                return self.doubt_s({tokens, own, pool, ahead_s, queued, step_s});
            },
            py::arg("tokens"), py::arg("own") = 0, py::arg("pool") = 0, py::arg("ahead_s") = 0.0,
            py::kw_only(), py::arg("queued") = false, py::arg("step_s") = 0.0, kDoubt)
        .def("transfer_s", &PrefillModel::transfer_s, py::arg("pool"),
             "Seconds of a fetch of so many tokens with nothing before them and nothing to hide behind.")
        .def(
            "observe",
            [](PrefillModel& self, int64_t tokens, int64_t own, int64_t pool, double seconds, double ahead_s,
               bool queued, double step_s) {
                return self.observe({tokens, own, pool, ahead_s, queued, step_s}, seconds);
            },
            py::arg("tokens"), py::arg("own"), py::arg("pool"), py::arg("seconds"), py::arg("ahead_s") = 0.0,
            py::kw_only(), py::arg("queued") = false, py::arg("step_s") = 0.0, kObserved);

    py::class_<HandoverModel, std::shared_ptr<HandoverModel>>(
        m, "HandoverModel", "Seconds from the end of prefill to the decode engine's first token.")
        .def(py::init<>())
        .def_property_readonly("regression", &HandoverModel::regression)
        .def("predict", &HandoverModel::predict, py::arg("tokens"))
        .def("observe", &HandoverModel::observe, py::arg("tokens"), py::arg("seconds"), kObserved);

    py::class_<DecodeModel, std::shared_ptr<DecodeModel>>(
        m, "DecodeModel",
        "Seconds between two tokens of a request that decodes in a batch. batch: requests that decode "
        "together, this one included; context_tokens: of all of them; stall_s: of prefill there for each of "
        "its "
        "tokens.")
        .def(py::init<>())
        .def_property_readonly("regression", &DecodeModel::regression)
        .def("predict", &DecodeModel::predict, py::arg("batch"), py::arg("context_tokens"),
             py::arg("stall_s") = 0.0)
        .def("step_s", &DecodeModel::step_s, py::arg("batch"), py::arg("context_tokens"),
             "Of a step of those that decode, averages over some time; 0 without any.")
        .def("observe", &DecodeModel::observe, py::arg("batch"), py::arg("context_tokens"),
             py::arg("seconds"), py::arg("stall_s") = 0.0, kObserved);
}

}  // namespace moonpool::python
