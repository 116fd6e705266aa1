"""Moonpool: one shared pool of computed KV cache for LLM engines.

This package is the facade. The public names below are imported on first use, so that ``import moonpool``,
which every vLLM process does through its plugin entry point, costs nothing and pulls in no engine, torch or
numpy.

    moonpool.core           the store, the transfer engine, the command line; core/csrc is the C++ half
    moonpool.connectors     thin adapters inside engines: vllm
    moonpool.disagg_proxy   the proxy in front of the engines
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moonpool.core.async_engine import AsyncTransfer, AsyncTransferEngine
    from moonpool.core.async_store import AsyncStore
    from moonpool.core.engine import TransferEngine
    from moonpool.core.engine_types import (
        Batch,
        Notification,
        Priority,
        RemoteRegion,
        Slice,
        SliceState,
        TransferState,
    )
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
        TransferError,
        Unavailable,
    )
    from moonpool.core.region import Region
    from moonpool.core.segment import Segment
    from moonpool.core.store import Store
    from moonpool.core.store_types import (
        EXISTS,
        STORED,
        Copy,
        Entry,
        ObjectStat,
        Pin,
        Prefix,
        Presence,
        PutResult,
        PutStatus,
    )
    from moonpool.core.transfer import Transfer

__version__ = "0.1.0"

# Public name -> the module of moonpool.core that defines it.
_HOME = {
    "AsyncStore": "async_store",
    "AsyncTransfer": "async_engine",
    "AsyncTransferEngine": "async_engine",
    "AuthError": "errors",
    "Batch": "engine_types",
    "Closed": "errors",
    "ConfigError": "errors",
    "Copy": "store_types",
    "CorruptObject": "errors",
    "EXISTS": "store_types",
    "Entry": "store_types",
    "Error": "errors",
    "Forked": "errors",
    "InvalidArgument": "errors",
    "Notification": "engine_types",
    "ObjectStat": "store_types",
    "Pin": "store_types",
    "Prefix": "store_types",
    "Presence": "store_types",
    "Priority": "engine_types",
    "ProtocolError": "errors",
    "PutResult": "store_types",
    "PutStatus": "store_types",
    "Region": "region",
    "RemoteRegion": "engine_types",
    "STORED": "store_types",
    "Segment": "segment",
    "Slice": "engine_types",
    "SliceState": "engine_types",
    "Store": "store",
    "Timeout": "errors",
    "TooLarge": "errors",
    "Transfer": "transfer",
    "TransferEngine": "engine",
    "TransferError": "errors",
    "TransferState": "engine_types",
    "Unavailable": "errors",
}

__all__ = [
    "EXISTS",
    "STORED",
    "AsyncStore",
    "AsyncTransfer",
    "AsyncTransferEngine",
    "AuthError",
    "Batch",
    "Closed",
    "ConfigError",
    "Copy",
    "CorruptObject",
    "Entry",
    "Error",
    "Forked",
    "InvalidArgument",
    "Notification",
    "ObjectStat",
    "Pin",
    "Prefix",
    "Presence",
    "Priority",
    "ProtocolError",
    "PutResult",
    "PutStatus",
    "Region",
    "RemoteRegion",
    "Segment",
    "Slice",
    "SliceState",
    "Store",
    "Timeout",
    "TooLarge",
    "Transfer",
    "TransferEngine",
    "TransferError",
    "TransferState",
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
