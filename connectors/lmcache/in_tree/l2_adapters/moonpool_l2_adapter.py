"""LMCache imports every ``*_l2_adapter`` that it finds here when it looks for a type: ``{"type":
"moonpool"}``.
"""

from __future__ import annotations

from typing import Any

from lmcache.v1.distributed.internal_api import L1MemoryDesc
from lmcache.v1.distributed.l2_adapters.config import L2AdapterConfigBase, register_l2_adapter_type
from lmcache.v1.distributed.l2_adapters.factory import register_l2_adapter_factory

from moonpool.connectors.lmcache.adapter import MoonpoolL2Adapter

# What LMCache itself takes from an adapter's JSON.
_NOT_OURS = ("type", "eviction", "serde", "shared", "persist_enabled", "affinity_tag", "max_capacity_gb")


class MoonpoolL2AdapterConfig(L2AdapterConfigBase):  # type: ignore[misc]
    """The adapter's options as they stand in the JSON."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> MoonpoolL2AdapterConfig:
        """Raises ValueError for a serde without a form: what is stored then is not what lookups ask for."""
        if d.get("serde") is not None and not d.get("form"):
            raise ValueError(
                'moonpool: with a "serde" the adapter needs "form", what the stored bytes are, such as "fp8 '
                'of bfloat16"'
            )
        return cls({key: value for key, value in d.items() if key not in _NOT_OURS})

    @classmethod
    def help(cls) -> str:
        """The options in words, for LMCache's command line."""
        return (
            "Moonpool L2 adapter config fields (all optional):\n"
            "- node (str): socket path or name of a node of this host (default: the default node)\n"
            "- tenant, namespace (str): whose chunks (default 'default')\n"
            "- form (str): what the stored bytes are; needed with a serde, and for KV that is kept as uint8\n"
            "- threads (int): that copy (default 4)\n"
            "- require_pool (bool): refuse to start without a node (default false)\n"
            "- timeout_s (float): longest wait without progress (default 2)"
        )


def _create(config: L2AdapterConfigBase, l1_memory_desc: L1MemoryDesc | None = None) -> MoonpoolL2Adapter:
    assert isinstance(config, MoonpoolL2AdapterConfig)
    return MoonpoolL2Adapter(config.options, l1_memory_desc=l1_memory_desc)


register_l2_adapter_type("moonpool", MoonpoolL2AdapterConfig)
register_l2_adapter_factory("moonpool", _create)
