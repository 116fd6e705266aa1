"""Base classes, under vLLM's names, for processes without vLLM: type checks, unit tests of the halves."""

from __future__ import annotations

import enum
import importlib
import sys
from typing import Any


def or_standins(name: str) -> Any:
    """The module of this name of vLLM's; without vLLM, or where it has none, this one."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("vllm", "torch"):
            raise
        return sys.modules[__name__]


class KVConnectorRole(enum.Enum):
    """Which process a connector is in."""

    SCHEDULER = 0
    WORKER = 1


class KVConnectorBase_V1:  # noqa: N801
    """The base class of vLLM's connectors."""

    _cache_hit_source: Any

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        self._vllm_config = vllm_config
        self._connector_metadata: Any = None

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Keeps the step's plan."""
        self._connector_metadata = connector_metadata

    def clear_connector_metadata(self) -> None:
        """Forgets the step's plan."""
        self._connector_metadata = None


class SupportsHMA:
    """Marks a connector that knows several KV cache groups."""


class KVConnectorMetadata:
    """The base of a step's plan."""


class KVConnectorWorkerMetadata:
    """The base of a worker's report."""


class KVConnectorHandshakeMetadata:
    """The base of a worker's handshake."""


class KVConnectorStats:
    """Counts of a connector."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        self.data = {} if data is None else data


class KVConnectorPromMetrics:
    """Prometheus metrics of a connector."""

    _gauge_cls: Any
    _counter_cls: Any
    _histogram_cls: Any

    def __init__(self, config: Any, types: Any, labelnames: list[str], values: Any) -> None:
        self._labelnames = labelnames
        self.per_engine_labelvalues = values


class ECConnectorRole(enum.Enum):
    """Which process a connector of encoder outputs is in."""

    SCHEDULER = 0
    WORKER = 1


class ECConnectorMetadata:
    """The base of a step's plan."""


class ECConnectorWorkerMetadata:
    """The base of a worker's report."""


class ECConnectorBase:
    """The base class of vLLM's connectors of encoder outputs."""

    is_producer: bool
    is_consumer: bool

    def __init__(self, vllm_config: Any, role: ECConnectorRole) -> None:
        self._vllm_config = vllm_config
        self._connector_metadata: Any = None
        self.is_producer = vllm_config.ec_transfer_config.is_ec_producer
        self.is_consumer = vllm_config.ec_transfer_config.is_ec_consumer

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Keeps the step's plan."""
        self._connector_metadata = connector_metadata

    def take_unavailable_requests(self) -> set[str]:
        """Requests whose items cannot be had."""
        return set()
