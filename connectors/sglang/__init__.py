"""The storage backend ``MoonpoolHiCache`` for SGLang's HiCache: real engines whose third cache tier is the
pool. docs/sglang.md is its manual.

    backend      the class SGLang talks to; survives what goes wrong below
    short_name   makes ``--hicache-storage-backend moonpool`` mean that class
    extra_config the JSON that names that class to SGLang
    layout       where the bytes of (layer, head, page) lie in SGLang's host memory, as plain values
    sidecars     the pools that some models have beside their KV
    identity     what of this engine goes into the fingerprint
    settings     the keys of the extra config, checked
    pool         the connection to the node: made when there is one, lost and found again
    metrics      counters in the engine's own /metrics
    compat       every difference between SGLang versions

Threads: SGLang's prefetch and backup threads call here, never its scheduler, and move the bytes themselves,
in native code without the interpreter's lock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moonpool.connectors.sglang.backend import MoonpoolHiCache

__all__ = ["MoonpoolHiCache"]


def __getattr__(name: str) -> Any:
    """The class only when it is asked for: every process of SGLang's loads the plugin in this package, and
    most of them need neither torch nor the native half."""
    if name == "MoonpoolHiCache":
        from moonpool.connectors.sglang.backend import MoonpoolHiCache

        return MoonpoolHiCache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
