// The core's half of moonpool._native. Only the folders python/ know pybind11; arguments are taken while the
// GIL is held, the work is done without it.

#include <pybind11/pybind11.h>

#include <cstring>
#include <span>
#include <string_view>

#include "base/crc32c.hpp"
#include "base/digest.hpp"
#include "base/xxh3.hpp"
#include "memory/available.hpp"
#include "python/arguments.hpp"
#include "python/engine_module.hpp"
#include "python/module.hpp"
#include "python/raise.hpp"
#include "store/shared/space.hpp"

namespace moonpool::python {

namespace {

py::bytes digests(const py::object& token_ids, uint32_t block_tokens, const py::bytes& seed,
                  const py::bytes& previous) {
    ArrayOf<uint32_t> tokens(token_ids, "token_ids");
    if (block_tokens == 0) raise(Error{Code::kInvalidArgument, "block_tokens must be at least 1"}, "digest");
    std::string_view before(previous);
    if (before.empty()) before = std::string_view(seed);
    size_t blocks = tokens.span().size() / block_tokens;
    auto out = py::reinterpret_steal<py::bytes>(
        PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(blocks * 32)));
    if (!out) throw py::error_already_set();
    block_digests(tokens.span(), block_tokens,
                  std::span(reinterpret_cast<const uint8_t*>(before.data()), before.size()),
                  reinterpret_cast<uint8_t*>(PyBytes_AS_STRING(out.ptr())));
    return out;
}

py::bytes key_hash(const std::string& tenant, const std::string& name_space, const py::bytes& fingerprint,
                   const py::bytes& name) {
    Hash128 hash = KeyHasher(tenant, name_space, std::string_view(fingerprint))(std::string_view(name));
    char out[16];
    std::memcpy(out, &hash.low, 8);
    std::memcpy(out + 8, &hash.high, 8);
    return py::bytes(out, 16);
}

uint32_t crc_of(const py::object& buffer, uint32_t crc) {
    ArrayOf<uint8_t> bytes(buffer, "buffer");
    std::span<const uint8_t> span = bytes.span();
    py::gil_scoped_release nogil;
    return crc32c(crc, span.data(), span.size());
}

py::object memory_available(const std::string& root) {
    std::optional<AvailableMemory> memory = available_memory(root);
    if (!memory) return py::none();
    return py::make_tuple(memory->available_bytes, memory->total_bytes, memory->limited_by);
}

}  // namespace

void bind_core(py::module_& m) {
    bind_tls(m);
    bind_accept(m);
    bind_server(m);
    bind_client(m);
    bind_kv_memory(m);
    bind_worker(m);
    bind_batch(m);
    bind_directory(m);
    bind_engine(m);
    bind_ssd(m);
    bind_ranges(m);
    bind_card_memory(m);
    bind_topology(m);

    m.def("block_digests", &digests, py::arg("token_ids"), py::arg("block_tokens"),
          py::arg("seed") = py::bytes(), py::arg("previous") = py::bytes(),
          "Digests of the full blocks of a u32 buffer, 32 bytes each.");
    m.def("key_hash", &key_hash, py::arg("tenant"), py::arg("namespace"), py::arg("fingerprint"),
          py::arg("name"), "XXH3-128 of a key, as 16 bytes: low then high half, little-endian.");
    m.def("crc32c", &crc_of, py::arg("buffer"), py::arg("crc") = 0);
    m.def("available_memory", &memory_available, py::arg("root") = "",
          "(available bytes, total bytes, what limits them): the machine's memory, or that of the control "
          "group that leaves the least. None where it cannot be read. root: a prefix of /proc and /sys.");
}

}  // namespace moonpool::python
