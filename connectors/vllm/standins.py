"""Empty base classes, under vLLM's names, for processes without vLLM: unit tests of the halves."""

from __future__ import annotations

import enum
from typing import Any


class KVConnectorRole(enum.Enum):
    SCHEDULER = 0
    WORKER = 1


class KVConnectorBase_V1:  # noqa: N801
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        self._connector_metadata: Any = None

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        self._connector_metadata = connector_metadata

    def clear_connector_metadata(self) -> None:
        self._connector_metadata = None


class SupportsHMA: ...


class KVConnectorMetadata: ...


class KVConnectorWorkerMetadata: ...


class KVConnectorHandshakeMetadata: ...


class KVConnectorStats:
    def __init__(self, data: dict[str, Any] | None = None) -> None:
        self.data = {} if data is None else data


class KVConnectorPromMetrics:
    def __init__(self, config: Any, types: Any, labelnames: list[str], values: Any) -> None:
        self._labelnames = labelnames
        self.per_engine_labelvalues = values
