"""Base classes under TensorRT-LLM's names, for processes without it: type checks and tests of this folder."""

from __future__ import annotations

from typing import Any


class KvCacheConnectorWorker:
    """The base class of TensorRT-LLM's connector workers."""

    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args
        self._metadata: Any = None

    def bind_connector_meta(self, metadata: object) -> None:
        """Keeps the step's plan."""
        self._metadata = metadata

    def get_connector_meta(self) -> object:
        """The step's plan."""
        return self._metadata


class KvCacheConnectorScheduler:
    """The base class of TensorRT-LLM's connector schedulers."""

    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args
