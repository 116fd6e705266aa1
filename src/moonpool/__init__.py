"""Moonpool: one shared pool of computed KV cache for LLM engines.

This package is the facade. The public names below are imported on first use, so that ``import moonpool``,
which every vLLM process does through its plugin entry point, costs nothing and pulls in no engine, torch or
numpy.

    moonpool.core           the store, the node, configuration, the command line; core/csrc is the C++ half
    moonpool.connectors     thin adapters inside engines: vllm
    moonpool.disagg_proxy   the proxy in front of the engines
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moonpool.core.async_store import AsyncStore
    from moonpool.core.errors import (
        AuthError,
        Closed,
        ConfigError,
        CorruptObject,
        Error,
        Forked,
        InvalidArgument,
        ProtocolError,
        Timeout,
        TooLarge,
        Unavailable,
    )
    from moonpool.core.store import Store
    from moonpool.core.store_types import (
        EXISTS,
        STORED,
        Entry,
        Pin,
        Prefix,
        Presence,
        PutResult,
        PutStatus,
    )

__version__ = "0.1.0"

# Public name -> the module of moonpool.core that defines it.
_HOME = {
    "AsyncStore": "async_store",
    "AuthError": "errors",
    "Closed": "errors",
    "ConfigError": "errors",
    "CorruptObject": "errors",
    "EXISTS": "store_types",
    "Entry": "store_types",
    "Error": "errors",
    "Forked": "errors",
    "InvalidArgument": "errors",
    "Pin": "store_types",
    "Prefix": "store_types",
    "Presence": "store_types",
    "ProtocolError": "errors",
    "PutResult": "store_types",
    "PutStatus": "store_types",
    "STORED": "store_types",
    "Store": "store",
    "Timeout": "errors",
    "TooLarge": "errors",
    "Unavailable": "errors",
}

__all__ = [
    "EXISTS",
    "STORED",
    "AsyncStore",
    "AuthError",
    "Closed",
    "ConfigError",
    "CorruptObject",
    "Entry",
    "Error",
    "Forked",
    "InvalidArgument",
    "Pin",
    "Prefix",
    "Presence",
    "ProtocolError",
    "PutResult",
    "PutStatus",
    "Store",
    "Timeout",
    "TooLarge",
    "Unavailable",
    "__version__",
]


if not TYPE_CHECKING:  # a checker that saw this would take every misspelt name for an object

    def __getattr__(name: str) -> object:
        home = _HOME.get(name)
        if home is None:
            raise AttributeError(f"module 'moonpool' has no attribute {name!r}")
        value: object = getattr(importlib.import_module(f"moonpool.core.{home}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
