// TLS of a cluster's connections as Python sees it: moonpool._native.TlsServer and TlsClient, the files of
// one side.

#include <pybind11/pybind11.h>

#include <memory>
#include <string>
#include <utility>

#include "python/module.hpp"
#include "python/raise.hpp"
#include "wire/tls.hpp"

namespace moonpool::python {

namespace {

const TlsUse* use_of(bool data) { return data ? &kDataTls : &kControlTls; }

}  // namespace

void bind_tls(py::module_& m) {
    py::class_<TlsServer, std::shared_ptr<TlsServer>>(m, "TlsServer",
                                                      "What a master or a node shows, and whom it trusts.")
        .def(
            py::init([](std::string cert, std::string key, std::string ca, bool data) {
                return unwrap(
                    TlsServer::create({std::move(cert), std::move(key), std::move(ca), use_of(data)}), "tls");
            }),
            py::arg("cert"), py::arg("key"), py::arg("ca") = "", py::kw_only(), py::arg("data") = false,
            "Paths of PEM files. ca: callers must show a certificate that it vouches for; empty: none. data: "
            "it is a node's port, as sentences say.");
    py::class_<TlsClient, std::shared_ptr<TlsClient>>(m, "TlsClient",
                                                      "How a master or a node is dialled by TLS.")
        .def(
            py::init([](std::string ca, std::string name, std::string cert, std::string key, bool data) {
                return unwrap(
                    TlsClient::create({std::move(cert), std::move(key), std::move(ca), use_of(data)},
                                      std::move(name)),
                    "tls");
            }),
            py::arg("ca") = "", py::arg("name") = "", py::arg("cert") = "", py::arg("key") = "",
            py::kw_only(), py::arg("data") = false,
            "Paths of PEM files. ca empty: the system's authorities. name: that the other side's certificate "
            "must have; empty: the host that is dialled. cert and key: what is shown to it. data: nodes are "
            "dialled, as sentences say.");
}

}  // namespace moonpool::python
