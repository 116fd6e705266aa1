#include "python/proxy_module.hpp"

namespace moonpool::python {

void bind_proxy(py::module_& m) {
    bind_conductor(m);
    bind_cost_models(m);
    bind_workers(m);
    bind_parsers(m);
    bind_relay(m);
}

}  // namespace moonpool::python
