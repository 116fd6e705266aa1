// The prefix index as Python sees it: moonpool._native.PrefixIndex.
//
// A decision's question (look) keeps the GIL: it waits for microseconds at most, and to get the GIL back
// could take milliseconds. What takes in events gives it up.
//
// Keys and digests cross the border as one bytes object, 16 bytes each: a prompt has thousands of blocks,
// and no Python object is made for any of them. Holders are numbers that the caller gives out (places of
// engines); this file knows no names.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/digest.hpp"
#include "conductor/prefix_index.hpp"
#include "conductor/sequence_hashes.hpp"
#include "python/arguments.hpp"
#include "python/proxy_module.hpp"
#include "python/raise.hpp"

namespace moonpool::python {

namespace {

// A Match holds what a question answered; its rows are made into bytes when they are asked for.
struct Match {
    PrefixMatch match;
    py::bytes row(KvTier tier) const { return to_bytes(match.by_tier[static_cast<size_t>(tier)]); }
};

std::span<const BlockKey> span_of(const ArrayOf<BlockKey>& array) { return array.span(); }

KvTier tier_of(uint32_t tier) {
    if (tier < kKvTiers) return static_cast<KvTier>(tier);
    raise(Error{Code::kInvalidArgument, "a tier is 0 (device), 1 (host) or 2 (disk)"}, "index");
}

class PyPrefixIndex {
   public:
    PyPrefixIndex(uint32_t block_tokens, uint32_t blocks_max, uint32_t holders_max)
        : index_(unwrap(PrefixIndex::create({block_tokens, blocks_max, holders_max}), "index")) {}

    uint32_t block_tokens() const { return index_->block_tokens(); }

    // Hashing a batch takes milliseconds: without the GIL, which the payload's buffer export makes safe.
    Ingested ingest(uint32_t holder, const py::object& payload, bool pool) {
        ArrayOf<uint8_t> bytes(payload, "payload");
        Result<Ingested> result = Ingested{};
        {
            py::gil_scoped_release nogil;
            result = index_->ingest(holder, bytes.span(), pool);
        }
        return unwrap(std::move(result), "ingest");
    }

    // The buffers stay exported while the GIL is released, so that a bytearray cannot be resized under the
    // index.
    void apply(uint32_t holder, uint32_t tier, const py::object& stored, const py::object& removed) {
        ArrayOf<BlockKey> in(stored, "stored"), out(removed, "removed");
        KvTier place = tier_of(tier);
        Status status = success();
        {
            py::gil_scoped_release nogil;
            status = index_->apply(holder, place, span_of(in), span_of(out));
        }
        unwrap(std::move(status), "apply");
    }

    // With the GIL: some microseconds, in the middle of a decision.
    void dispatched(uint32_t holder, const py::object& keys, double now_s, double ttl_s) {
        ArrayOf<BlockKey> array(keys, "keys");
        unwrap(index_->dispatched(holder, span_of(array), now_s, ttl_s), "dispatched");
    }

    Match match(const py::object& keys) const {
        ArrayOf<BlockKey> array(keys, "keys");
        py::gil_scoped_release nogil;
        return Match{index_->match(span_of(array))};
    }

    // Seed: the digest that stands before the first block (a LoRA, a salt), or empty.
    py::bytes keys(const py::object& token_ids, const py::bytes& seed) const {
        ArrayOf<uint32_t> tokens(token_ids, "token_ids");
        std::string_view before(seed);
        std::vector<Digest> digests;
        {
            py::gil_scoped_release nogil;
            digests = digests_of(tokens.span(), before);
        }
        return keys_of(digests);
    }

    // keys() and match() in one, with what a decision wants to know.
    py::tuple look(const py::object& token_ids, const py::bytes& seed, size_t holders,
                   const py::object& others) const {
        ArrayOf<uint32_t> tokens(token_ids, "token_ids");
        py::bytes keys = keys_of(digests_of(tokens.span(), std::string_view(seed)));
        ArrayOf<BlockKey> array(keys, "keys");
        PrefixMatch match = index_->match(span_of(array));
        const std::vector<uint32_t>& device = match.by_tier[static_cast<size_t>(KvTier::kDevice)];
        // u32 for each holder, as an earlier call of look() on another index gave them.
        ArrayOf<uint32_t> known(others, "others");
        if (known.span().size() > holders) {
            raise(Error{Code::kInvalidArgument, "others has more holders than are asked for"}, "look");
        }
        std::vector<uint32_t> own(known.span().begin(), known.span().end());
        own.resize(holders);
        for (size_t i = 0; i < std::min(holders, device.size()); ++i) {
            // Indexes of other block sizes are asked before this one; a holder counts with the best of
            // them.
            own[i] = std::max(own[i], device[i] * index_->block_tokens());
        }
        py::int_ pool(size_t{match.pool_any} * index_->block_tokens());
        return py::make_tuple(to_bytes(own), std::move(pool), std::move(keys));
    }

    void forget(uint32_t holder) {
        Status status = success();
        {
            py::gil_scoped_release nogil;
            status = index_->forget(holder);
        }
        unwrap(std::move(status), "forget");
    }

    void expire(double now_s) {
        py::gil_scoped_release nogil;
        index_->expire(now_s);
    }

    uint32_t entries(uint32_t holder) const { return index_->entries(holder); }

    py::dict stats() const {
        PrefixIndexStats s = index_->stats();
        py::dict out;
        const std::pair<const char*, uint64_t> rows[] = {
            {"holders", s.holders},
            {"blocks", s.blocks},
            {"entries", s.entries},
            {"entries_max", s.entries_max},
            {"expected", s.expected},
            {"expected_max", s.expected_max},
            {"memory_bytes", s.memory_bytes},
            {"stored_total", s.stored_total},
            {"removed_total", s.removed_total},
            {"cleared_total", s.cleared_total},
            {"unknown_total", s.unknown_total},
            {"skipped_total", s.skipped_total},
            {"refused_total", s.refused_total},
            {"evicted_total", s.evicted_total},
            {"expected_dropped_total", s.expected_dropped_total},
        };
        for (const auto& [name, value] : rows) out[name] = value;
        return out;
    }

    bool check_integrity() const {
        py::gil_scoped_release nogil;
        return index_->check_integrity();
    }

   private:
    std::vector<Digest> digests_of(std::span<const uint32_t> tokens, std::string_view seed) const {
        std::vector<Digest> digests(tokens.size() / index_->block_tokens());
        if (digests.empty()) return digests;
        block_digests(tokens, index_->block_tokens(),
                      std::span(reinterpret_cast<const uint8_t*>(seed.data()), seed.size()),
                      digests.front().data());
        return digests;
    }

    // The keys are the beginnings of the digests; they are written straight into the object that is
    // returned.
    static py::bytes keys_of(const std::vector<Digest>& digests) {
        auto out = py::reinterpret_steal<py::bytes>(
            PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(digests.size() * kKeyBytes)));
        if (!out) throw py::error_already_set();
        char* at = PyBytes_AS_STRING(out.ptr());
        for (size_t i = 0; i < digests.size(); ++i) {
            std::memcpy(at + i * kKeyBytes, digests[i].data(), kKeyBytes);
        }
        return out;
    }

    std::unique_ptr<PrefixIndex> index_;
};

// The proxy learns an engine's block size from its first events, and then makes an index of it.
py::object event_block_tokens(const py::object& payload) {
    ArrayOf<uint8_t> bytes(payload, "payload");
    KvEventBatch batch = unwrap(decode_kv_events(bytes.span()), "ingest");
    for (const KvEvent& event : batch.events) {
        bool named = event.kind == KvEvent::Kind::kStored && !event.tokens.empty();
        // An event without tokens, or of a group that sees a part of the prompt, may have another size.
        if (named && event.block_tokens != 0 && !event.part_of_attention) return py::int_(event.block_tokens);
    }
    return py::none();
}

}  // namespace

void bind_conductor(py::module_& m) {
    py::class_<Ingested>(m, "Ingested", "What a batch of KV events came to, in blocks.")
        .def_readonly("stored", &Ingested::stored)
        .def_readonly("removed", &Ingested::removed)
        .def_readonly("cleared", &Ingested::cleared, "Times that the holder dropped everything.")
        .def_readonly("unknown", &Ingested::unknown, "Their parent, or they themselves, are not known.")
        .def_readonly("skipped", &Ingested::skipped,
                      "Not of this index: images, embeddings, another block size, another cache group.")
        .def_readonly("sent_s", &Ingested::sent_s, "Time of the batch, by the sender's clock.");

    py::class_<Match>(m, "PrefixMatch", "Leading blocks of a prompt, by holder: native u32 each.")
        .def_property_readonly(
            "blocks", [](const Match& self) { return self.row(KvTier::kDisk); },
            "In any tier; what was dispatched counts.")
        .def_property_readonly(
            "device", [](const Match& self) { return self.row(KvTier::kDevice); },
            "On the device; what was dispatched counts.")
        .def_property_readonly(
            "host", [](const Match& self) { return self.row(KvTier::kHost); },
            "On the device or in the memory of its host.")
        .def_property_readonly(
            "pool_host", [](const Match& self) { return self.match.pool_host; },
            "Leading blocks in the memory of the pool's nodes taken together.")
        .def_property_readonly(
            "pool_blocks", [](const Match& self) { return self.match.pool_any; },
            "The same with their disks.");

    py::class_<PyPrefixIndex>(m, "PrefixIndex",
                              "Who holds how many leading blocks of a prompt; of one model and block size.")
        .def(py::init<uint32_t, uint32_t, uint32_t>(), py::arg("block_tokens"), py::kw_only(),
             py::arg("blocks_max") = 1u << 20, py::arg("holders_max") = kHoldersMax)
        .def_property_readonly("block_tokens", &PyPrefixIndex::block_tokens)
        .def("keys", &PyPrefixIndex::keys, py::arg("token_ids"), py::arg("seed") = py::bytes(),
             "The keys of the full blocks of a u32 buffer, 16 bytes each.")
        .def("look", &PyPrefixIndex::look, py::arg("token_ids"), py::arg("seed"), py::arg("holders"),
             py::arg("others") = py::bytes(),
             "(tokens on the device by holder, u32, of the first so many; tokens in the pool; keys), in one. "
             "others: tokens that other indexes know, the larger count.")
        .def("ingest", &PyPrefixIndex::ingest, py::arg("holder"), py::arg("payload"), py::kw_only(),
             py::arg("pool") = false,
             "Takes one batch of KV events; pool: its hashes are digests. Raises ProtocolError.")
        .def("apply", &PyPrefixIndex::apply, py::arg("holder"), py::arg("tier"),
             py::arg("stored") = py::bytes(), py::arg("removed") = py::bytes(),
             "A pool's node has, or no longer has, these keys in a tier.")
        .def("dispatched", &PyPrefixIndex::dispatched, py::arg("holder"), py::arg("keys"), py::arg("now_s"),
             py::arg("ttl_s"), "A request with these keys was sent there.")
        .def("match", &PyPrefixIndex::match, py::arg("keys"))
        .def("forget", &PyPrefixIndex::forget, py::arg("holder"))
        .def("expire", &PyPrefixIndex::expire, py::arg("now_s"),
             "Ends what was dispatched and not confirmed in time.")
        .def("entries", &PyPrefixIndex::entries, py::arg("holder"), "Blocks that are known of a holder.")
        .def("stats", &PyPrefixIndex::stats, "Counters (*_total) and gauges by name.")
        .def("check_integrity", &PyPrefixIndex::check_integrity, "Recounts everything; for tests.");

    m.def(
        "sequence_hashes",
        [](const py::object& token_ids, uint32_t block_tokens, std::optional<uint64_t> parent) {
            if (block_tokens == 0) throw py::value_error("a block has at least one token");
            ArrayOf<uint32_t> tokens(token_ids, "token_ids");
            return sequence_hashes(tokens.span(), block_tokens, parent);
        },
        py::arg("token_ids"), py::arg("block_tokens"), py::arg("parent") = py::none(),
        "Rolling hashes of the full blocks of a u32 buffer, as Mooncake's indexer API has them. parent: of "
        "the "
        "block before.");
    m.attr("HOLDERS_MAX") = kHoldersMax;
    m.def("kv_event_block_tokens", &event_block_tokens, py::arg("payload"),
          "Tokens of a block, as the first event of a batch says that has tokens; None: no event has.");
}

}  // namespace moonpool::python
