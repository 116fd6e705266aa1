// TLS of control connections as Python sees it: moonpool._native.TlsServer and TlsClient, the files of one
// side.

#include <pybind11/pybind11.h>

#include <memory>
#include <string>
#include <utility>

#include "python/module.hpp"
#include "python/raise.hpp"
#include "wire/tls.hpp"

namespace moonpool::python {

void bind_tls(py::module_& m) {
    py::class_<TlsServer, std::shared_ptr<TlsServer>>(m, "TlsServer",
                                                      "What a master shows, and whom it trusts.")
        .def(py::init([](std::string cert, std::string key, std::string ca) {
                 return unwrap(TlsServer::create({std::move(cert), std::move(key), std::move(ca)}), "tls");
             }),
             py::arg("cert"), py::arg("key"), py::arg("ca") = "",
             "Paths of PEM files. ca: callers must show a certificate that it vouches for; empty: none.");
    py::class_<TlsClient, std::shared_ptr<TlsClient>>(m, "TlsClient", "How a master is dialled by TLS.")
        .def(py::init([](std::string ca, std::string name, std::string cert, std::string key) {
                 return unwrap(
                     TlsClient::create({std::move(cert), std::move(key), std::move(ca)}, std::move(name)),
                     "tls");
             }),
             py::arg("ca") = "", py::arg("name") = "", py::arg("cert") = "", py::arg("key") = "",
             "Paths of PEM files. ca empty: the system's authorities. name: that the master's certificate "
             "must "
             "have; empty: the host that is dialled. cert and key: what is shown to it.");
}

}  // namespace moonpool::python
