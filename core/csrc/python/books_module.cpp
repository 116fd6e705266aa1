// The books of one engine as Python sees them: moonpool._native.Books. They keep the GIL: each call is
// shorter than giving it up.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "conductor/books.hpp"
#include "python/module.hpp"

namespace moonpool::python {

void bind_books(py::module_& m) {
    py::class_<Prefilled>(m, "Prefilled", "A prefill has ended.")
        .def_readonly("tokens", &Prefilled::tokens)
        .def_readonly("own", &Prefilled::own)
        .def_readonly("pool", &Prefilled::pool)
        .def_readonly("seconds", &Prefilled::seconds,
                      "How long the engine had it in work, the wait before it left out.")
        .def_readonly("predicted_s", &Prefilled::predicted_s);

    py::class_<Decoded>(m, "Decoded", "A request has ended; batch and context are averages over its time.")
        .def_readonly("batch", &Decoded::batch)
        .def_readonly("context_tokens", &Decoded::context_tokens)
        .def_readonly("gap_s", &Decoded::gap_s, "Between two of its tokens.");

    py::class_<Books, std::shared_ptr<Books>>(
        m, "Books",
        "What one engine has to do: prefills in line, requests that decode. Requests are named by integers; "
        "a "
        "call about one that is not known changes nothing. Times are seconds of one clock.")
        .def(py::init<>())
        .def_property_readonly("prefills", &Books::prefills)
        .def_property_readonly("prefill_tokens", &Books::prefill_tokens,
                               "Tokens of the prompts in line, those that are reused included.")
        .def_property_readonly("prefill_rest_tokens", &Books::prefill_rest_tokens,
                               "Those of them that are to be computed.")
        .def_property_readonly("decodes", &Books::decodes)
        .def_property_readonly("requests", &Books::requests)
        .def_property_readonly("context_tokens", &Books::context_tokens,
                               "Tokens in the KV cache of the requests that decode now, as far as known.")
        .def("wait_s", &Books::wait_s, py::arg("now_s"), "Seconds until a prefill that came now would begin.")
        .def("prefill_began", &Books::prefill_began, py::arg("request"), py::arg("tokens"), py::arg("own"),
             py::arg("pool"), py::arg("predicted_s"), py::arg("now_s"), py::kw_only(),
             py::arg("silent") = false,
             "silent: its end will not be heard of, so it is taken to last as long as predicted.")
        .def("prefill_ended", &Books::prefill_ended, py::arg("request"), py::arg("now_s"), py::kw_only(),
             py::arg("done") = true,
             "done: it was computed; else the request is gone and nothing can be learnt from it.")
        .def("decode_began", &Books::decode_began, py::arg("request"), py::arg("context"), py::arg("now_s"))
        .def("decode_ended", &Books::decode_ended, py::arg("request"), py::arg("tokens"), py::arg("now_s"),
             "tokens: how many were made, the first included; 0 when unknown.")
        .def("forget_all", &Books::forget_all, "The engine is gone, and what it had to do with it.")
        .def(
            "check_integrity",
            [](const Books& self) {
                std::string wrong = self.check_integrity();
                if (wrong.empty()) return;
                PyErr_SetString(PyExc_AssertionError, wrong.c_str());
                throw py::error_already_set();
            },
            "Raises AssertionError when an invariant is broken.");
}

}  // namespace moonpool::python
