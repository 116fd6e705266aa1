// moonpool._native: the C++ half of core and proxy as Python sees it.

#include "python/module.hpp"
#include "python/proxy_module.hpp"

PYBIND11_MODULE(_native, m) {
    m.doc() = "The C++ half of Moonpool. Users take moonpool.Store; this module is its lower half.";
    moonpool::python::bind_core(m);
    moonpool::python::bind_proxy(m);
}
