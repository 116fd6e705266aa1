// The node's data plane as Python sees it: moonpool._native.Server.
#pragma once

#include <pybind11/pybind11.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "python/module.hpp"
#include "python/secrets.hpp"
#include "store/node/server.hpp"

namespace moonpool::python {

// (tenant, dram_min, dram_max, ssd_max, pins_max, bytes_per_s), in bytes; core/config/tenants_file.py has
// checked it.
using TenantLimitsRow = std::tuple<std::string, std::optional<uint64_t>, std::optional<uint64_t>,
                                   std::optional<uint64_t>, std::optional<uint64_t>, std::optional<uint64_t>>;

class PyServer {
   public:
    PyServer(std::string socket_path, const std::vector<std::pair<std::string, uint64_t>>& tenants,
             const py::bytes& token, const py::dict& settings, std::string name,
             std::vector<std::string> listen, std::string host_id, std::string advertise, std::string master,
             const std::vector<std::pair<std::string, uint64_t>>& ssd, bool events,
             std::optional<std::shared_ptr<TlsClient>> tls, std::string size_option, std::string memory_root,
             const std::map<std::string, std::string>& salts,
             std::optional<std::shared_ptr<TlsServer>> data_tls, const std::vector<TenantLimitsRow>& limits,
             const std::optional<std::pair<int, std::vector<int>>>& predecessor);
    void tell_event_endpoints(std::string events, std::string replay);
    void set_tenants(const std::vector<TenantKeyRow>& rows);
    void set_limits(const std::vector<TenantLimitsRow>& rows);
    void prepare();
    void start();
    void stop();
    // To another process: see Server::give().
    py::tuple give();
    void take_back();
    void let_go();
    std::string why_not_given() const { return server_->why_not_given(); }
    std::vector<std::string> learned_masters() const { return server_->learned_masters(); }
    void learn_masters(std::vector<std::string> of_ranges) { server_->learn_masters(std::move(of_ranges)); }
    bool is_alive(double timeout_s);
    py::tuple memory() const;
    py::list take_notes();
    int notes_fd() const { return server_->journal().fd(); }
    std::map<std::string, uint64_t> metrics();
    py::dict histograms();
    py::object membership();
    py::list ssd();
    bool check_integrity();
    // What the node has of whole KV blocks, in rows of 40 bytes: docs/events.md.
    int events_fd() const { return events().event_fd(); }
    bool begin_events();
    py::object take_events();
    py::tuple events_inventory(uint32_t cursor) const;
    py::list events_fingerprints() const;
    // What is copied to other nodes: store/node/outgoing_objects.hpp.
    py::tuple holdings(uint64_t cursor);
    py::list settled() const;
    std::shared_ptr<OutgoingObjects> hold(const py::bytes& rows);
    std::vector<std::string> addresses() const { return server_->addresses(); }
    const std::string& name() const { return name_; }
    const std::shared_ptr<Server>& server() const { return server_; }

   private:
    BlockEvents& events() const;

    std::string name_;
    std::shared_ptr<Server> server_;
};

}  // namespace moonpool::python
