"""Keeps an engine alive when a connector's code raises: an exception in a hook ends the engine, while a
connector that steps aside costs a cache miss. The only place of the connectors with a broad ``except`` beside
connector.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

from moonpool.connectors.vllm.metrics import Tally

TRACEBACKS_MAX = 5

T = TypeVar("T")


class Guard:
    """Calls what must not raise, and counts what did (survived_errors)."""

    def __init__(self, log: logging.Logger, tally: Callable[[], Tally | None]) -> None:
        """tally: returns what counts, if there is one by now."""
        self._log = log
        self._tally = tally
        self.survived = 0

    def __call__(
        self, default: T, call: Callable[..., T], *args: Any, otherwise: Callable[[], object] | None = None
    ) -> T:
        """What ``call(*args)`` returns, or ``default`` when it raises.

        otherwise: called after an exception, to keep the engine consistent.
        """
        try:
            return call(*args)
        except Exception:
            return self.survive(default, otherwise)

    def survive(self, default: T, otherwise: Callable[[], object] | None = None) -> T:
        """Called in an ``except Exception``: logs and counts it, then calls ``otherwise``."""
        self.survived += 1
        tally = self._tally()
        if tally is not None:
            tally.add("survived_errors")
        if self.survived <= TRACEBACKS_MAX:
            self._log.exception(
                "moonpool: unexpected error; the engine goes on without this part of the pool"
            )
        if otherwise is not None:
            self(None, otherwise)
        return default
