"""Moonpool: one shared pool of computed KV cache for LLM engines.

This package is the facade. The public names below are imported on first use, so that ``import moonpool``,
which every vLLM process does through its plugin entry point, costs nothing and pulls in no engine, torch or
numpy.

    moonpool.core           the store, the transfer engine, node and master; core/csrc is the C++ half
    moonpool.connectors     thin adapters inside engines
    moonpool.disagg_proxy   the proxy in front of the engines; disagg_proxy/csrc is the C++ half
    moonpool.launch         starts processes and keeps them running
    moonpool.cli            the command line

An import goes down only: cli > launch > disagg_proxy, connectors > core (tests/test_layers.py).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
    from moonpool.core.store.async_store import AsyncStore
    from moonpool.core.store.store import Store
    from moonpool.core.store.types import (
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
    from moonpool.core.transfer.async_engine import AsyncTransfer, AsyncTransferEngine
    from moonpool.core.transfer.engine import TransferEngine
    from moonpool.core.transfer.region import Region
    from moonpool.core.transfer.segment import Segment
    from moonpool.core.transfer.transfer import Transfer
    from moonpool.core.transfer.types import (
        Batch,
        Notification,
        Priority,
        RemoteRegion,
        Slice,
        SliceState,
        TransferState,
    )

__version__ = "0.1.0"

# Public name -> the module of moonpool.core that defines it.
_HOME = {
    "AsyncStore": "store.async_store",
    "AsyncTransfer": "transfer.async_engine",
    "AsyncTransferEngine": "transfer.async_engine",
    "AuthError": "errors",
    "Batch": "transfer.types",
    "Closed": "errors",
    "ConfigError": "errors",
    "Copy": "store.types",
    "CorruptObject": "errors",
    "EXISTS": "store.types",
    "Entry": "store.types",
    "Error": "errors",
    "Forked": "errors",
    "InvalidArgument": "errors",
    "Notification": "transfer.types",
    "ObjectStat": "store.types",
    "Pin": "store.types",
    "Prefix": "store.types",
    "Presence": "store.types",
    "Priority": "transfer.types",
    "ProtocolError": "errors",
    "PutResult": "store.types",
    "PutStatus": "store.types",
    "Region": "transfer.region",
    "RemoteRegion": "transfer.types",
    "STORED": "store.types",
    "Segment": "transfer.segment",
    "Slice": "transfer.types",
    "SliceState": "transfer.types",
    "Store": "store.store",
    "Timeout": "errors",
    "TooLarge": "errors",
    "Transfer": "transfer.transfer",
    "TransferEngine": "transfer.engine",
    "TransferError": "errors",
    "TransferState": "transfer.types",
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
