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
    from moonpool.core.errors import AuthError as AuthError
    from moonpool.core.errors import Closed as Closed
    from moonpool.core.errors import ConfigError as ConfigError
    from moonpool.core.errors import CorruptObject as CorruptObject
    from moonpool.core.errors import Error as Error
    from moonpool.core.errors import Forked as Forked
    from moonpool.core.errors import InvalidArgument as InvalidArgument
    from moonpool.core.errors import ProtocolError as ProtocolError
    from moonpool.core.errors import Timeout as Timeout
    from moonpool.core.errors import TooLarge as TooLarge
    from moonpool.core.errors import TransferError as TransferError
    from moonpool.core.errors import Unavailable as Unavailable
    from moonpool.core.store.async_store import AsyncStore as AsyncStore
    from moonpool.core.store.store import Store as Store
    from moonpool.core.store.types import EXISTS as EXISTS
    from moonpool.core.store.types import STORED as STORED
    from moonpool.core.store.types import Copy as Copy
    from moonpool.core.store.types import Entry as Entry
    from moonpool.core.store.types import ObjectStat as ObjectStat
    from moonpool.core.store.types import Pin as Pin
    from moonpool.core.store.types import Prefix as Prefix
    from moonpool.core.store.types import Presence as Presence
    from moonpool.core.store.types import PutResult as PutResult
    from moonpool.core.store.types import PutStatus as PutStatus
    from moonpool.core.store.types import Unsure as Unsure
    from moonpool.core.transfer.async_engine import AsyncTransfer as AsyncTransfer
    from moonpool.core.transfer.async_engine import AsyncTransferEngine as AsyncTransferEngine
    from moonpool.core.transfer.engine import TransferEngine as TransferEngine
    from moonpool.core.transfer.region import Region as Region
    from moonpool.core.transfer.segment import Segment as Segment
    from moonpool.core.transfer.transfer import Transfer as Transfer
    from moonpool.core.transfer.types import Batch as Batch
    from moonpool.core.transfer.types import Notification as Notification
    from moonpool.core.transfer.types import PeerPath as PeerPath
    from moonpool.core.transfer.types import PeerRail as PeerRail
    from moonpool.core.transfer.types import Priority as Priority
    from moonpool.core.transfer.types import RemoteRegion as RemoteRegion
    from moonpool.core.transfer.types import Slice as Slice
    from moonpool.core.transfer.types import SliceState as SliceState
    from moonpool.core.transfer.types import TransferState as TransferState

__version__ = "0.1.0"

# Module of moonpool.core -> the public names that it defines.
_NAMES = {
    "errors": "AuthError Closed ConfigError CorruptObject Error Forked InvalidArgument ProtocolError Timeout "
    "TooLarge TransferError Unavailable",
    "store.async_store": "AsyncStore",
    "store.store": "Store",
    "store.types": "EXISTS STORED Copy Entry ObjectStat Pin Prefix Presence PutResult PutStatus Unsure",
    "transfer.async_engine": "AsyncTransfer AsyncTransferEngine",
    "transfer.engine": "TransferEngine",
    "transfer.region": "Region",
    "transfer.segment": "Segment",
    "transfer.transfer": "Transfer",
    "transfer.types": "Batch Notification PeerPath PeerRail Priority RemoteRegion Slice SliceState "
    "TransferState",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = ["__version__", *_HOME]


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
