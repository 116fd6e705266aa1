"""Names of other connectors for this one, for scripts that have them. A module path takes precedence over
vLLM's own connector of a name, so this is all that changes in such a script:

    {"kv_connector": "MooncakeStoreConnector",
     "kv_connector_module_path": "moonpool.connectors.vllm.takeover", ...}

Their options are translated where ours has the same, left out where it does not matter here (with one line in
the log), and refused with one sentence where they ask for what there is not. Ours may stand beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from moonpool.connectors.options import wrong
from moonpool.connectors.vllm import compat
from moonpool.connectors.vllm.connector import Mooncake
from moonpool.connectors.vllm.settings import PLACE, Settings

# (key, value) -> our options. Raises ConfigError.
Rule = Callable[[str, object], Mapping[str, object]]


def _left_out(key: str, value: object) -> Mapping[str, object]:
    return {}


def _named(name: str) -> Rule:
    return lambda key, value: {} if value in ("", None) else {name: value}


def _only(accepted: tuple[object, ...], why: str) -> Rule:
    def check(key: str, value: object) -> Mapping[str, object]:
        if value not in accepted:
            raise wrong(PLACE, key, f"cannot be {value!r}: {why}")
        return {}

    return check


def _protocol(key: str, value: object) -> Mapping[str, object]:
    transports = {"rdma": "all", "tcp": "loopback,shm,tcp"}
    if value not in transports:
        raise wrong(PLACE, key, f"must be rdma or tcp, not {value!r}; handover_transports has the others")
    return {"handover_transports": transports[str(value)]}


class Takeover(Mooncake):
    """The connector under the name and with the options of another one.

    rules: what becomes of each of its options.
    prefix: keys that begin so are left out, too; "": none.
    defaults: our options that differ from ours by default.
    """

    rules: ClassVar[Mapping[str, Rule]] = {}
    prefix: ClassVar[str] = ""
    defaults: ClassVar[Mapping[str, object]] = {}

    @classmethod
    def read_options(cls, extra: Mapping[str, Any]) -> Settings:
        """Raises ConfigError."""
        options, left_out = dict(cls.defaults), []
        for key, value in extra.items():
            rule = cls.rules.get(key)
            if rule is None and cls.prefix and key.startswith(cls.prefix):
                rule = _left_out
            options.update({key: value} if rule is None else rule(key, value))
            if rule is _left_out:
                left_out.append(key)
        if left_out:
            compat.logger("takeover").info(
                "moonpool: of the options of %s these mean nothing here: %s",
                cls.__name__,
                ", ".join(sorted(left_out)),
            )
        return Settings.parse(options)


class MooncakeStoreConnector(Takeover):
    """In the place of vLLM's connector to a Mooncake store: the pool, without hand-overs. The file that
    MOONCAKE_CONFIG_PATH names is not read: the node of the host is found by itself, or named by ``node``."""

    rules: ClassVar[Mapping[str, Rule]] = {
        "save_decode_cache": _named("save_decode"),
        "cache_prefix": _named("namespace"),
        "load_async": _only((True,), "no load blocks a step here"),
        "enable_lookup": _only((True,), "an engine that only saves has the kv_role kv_producer"),
        "custom_mem_pool": _only((None, "", False), "the KV cache is where vLLM puts it"),
        **dict.fromkeys(("lookup_async", "lookup_rpc_port", "preferred_segment"), _left_out),
        **dict.fromkeys(("enable_group_semantics", "enable_cross_layers_blocks"), _left_out),
        **dict.fromkeys(("store_tp_size", "enable_store_tp_lcm", "prefill_tp_sizes"), _left_out),
    }
    defaults: ClassVar[Mapping[str, object]] = {"handover": False}


class MooncakeConnector(Takeover):
    """In the place of vLLM's connector between prefill and decode engines: hand-overs in its concurrent form,
    and the pool where there is a node."""

    rules: ClassVar[Mapping[str, Rule]] = {
        "mooncake_protocol": _protocol,
        "bootstrap_server_address": _only(
            (None, ""), "the prefill engine serves that page itself; set bootstrap_port"
        ),
        **dict.fromkeys(("num_workers", "device_name"), _left_out),
    }


class LMCacheConnectorV1(Takeover):
    """In the place of vLLM's connector to LMCache: the pool, without hand-overs. LMCache's own configuration
    is not read."""

    rules: ClassVar[Mapping[str, Rule]] = dict.fromkeys(
        ("use_native", "use_layerwise", "discard_partial_chunks", "lmcache_rpc_port"), _left_out
    )
    prefix: ClassVar[str] = "lmcache."
    defaults: ClassVar[Mapping[str, object]] = {"handover": False}
