"""Moonpool: one shared pool of computed KV cache for LLM engines.

This package is the facade. The public names below are imported on first use, so that ``import moonpool`` (which
every vLLM process does through its plugin entry point) costs nothing and pulls in no engine, no torch, no numpy.

    moonpool.core           the store, the node, configuration, the command line; core/csrc is the C++ half
    moonpool.connectors     thin adapters inside engines: vllm
    moonpool.disagg_proxy   the proxy in front of the engines
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

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
        Unavailable,
    )

_HOME = {
    "AuthError": "errors",
    "Closed": "errors",
    "ConfigError": "errors",
    "CorruptObject": "errors",
    "Error": "errors",
    "Forked": "errors",
    "InvalidArgument": "errors",
    "ProtocolError": "errors",
    "Timeout": "errors",
    "TooLarge": "errors",
    "Unavailable": "errors",
}  # public name -> module of moonpool.core that defines it

__all__ = [
    "AuthError",
    "Closed",
    "ConfigError",
    "CorruptObject",
    "Error",
    "Forked",
    "InvalidArgument",
    "ProtocolError",
    "Timeout",
    "TooLarge",
    "Unavailable",
    "__version__",
]


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'moonpool' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f"moonpool.core.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
