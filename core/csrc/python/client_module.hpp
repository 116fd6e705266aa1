// One process's access to one node as Python sees it: moonpool._native.Client.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "python/answers.hpp"
#include "python/arguments.hpp"
#include "store/client/client.hpp"
#include "store/node/outgoing_objects.hpp"

namespace moonpool::python {

class PyClient {
   public:
    PyClient(std::string socket_path, const py::bytes& token, std::string tenant, std::string name_space,
             const py::bytes& fingerprint, double timeout_s, const py::object& embedded,
             std::optional<std::shared_ptr<TlsClient>> tls,
             std::optional<std::shared_ptr<TlsClient>> data_tls);
    void connect();
    bool connected();
    py::bytes incarnation();
    void close();
    py::tuple put(const py::object& keys, const py::object& buffers, const py::object& parents, bool replace,
                  bool ack, double timeout_s, uint32_t replicas, const py::object& nodes,
                  const py::object& groups, double soft_pin_s, bool unique);
    py::list get_into(const py::object& keys, const py::object& buffers, bool verify);
    py::list get_views(const py::object& keys, bool verify);
    py::tuple pin(const py::object& keys);
    // Keys under a pin taken before, as views or copied; None for a key that the pin does not cover.
    py::list pinned_views(const std::shared_ptr<PyPin>& pin, const py::object& keys, bool verify);
    py::list pinned_into(const std::shared_ptr<PyPin>& pin, const py::object& keys, const py::object& buffers,
                         bool verify);
    py::bytes exists(const py::object& keys);
    py::tuple longest_prefix(const py::object& keys, uint32_t width, bool pin);
    py::tuple remove(const py::object& keys, const std::optional<std::string>& node,
                     const std::vector<uint64_t>& generations);
    py::list list(const py::bytes& prefix, uint64_t limit);
    std::map<std::string, uint64_t> stat();
    // For each key None, or (size, [(node, host, address, size, generation, crc, pins, where, keep)]).
    py::list describe(const py::object& keys, bool everywhere);
    py::bytes key_hashes(const py::object& keys) const;
    // A byte for each row of the hold, and why the objects that found no place did not.
    py::tuple copy_out(const std::shared_ptr<OutgoingObjects>& held, bool evict);

    const std::shared_ptr<Client>& client() const { return client_; }
    const std::string& peer() const { return peer_; }

   private:
    std::vector<size_t> places_in(const PyPin& pin, const Names& names);

    std::shared_ptr<Client> client_;
    std::string peer_;
};

}  // namespace moonpool::python
