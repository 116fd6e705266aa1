"""The audit log: who may do what, and what was done to the pool and its engines, one line an event.

    {"time": ..., "level": "info", "logger": "moonpool.audit", "event": "engine_registered", "pid": 17,
     "instance": "a", "url": "http://10.0.0.7:8000", "client": "engines", "request": "..."}

The logger is ``moonpool.audit``; ``log.audit_file`` names a file for its lines, else they stand in the
process's log. Whatever a peer sent is escaped as JSON demands, in ASCII, and cut at VALUE_CHARACTERS_MAX.
Secrets are never written: a key stands as the first digits of its SHA-256.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable

from moonpool.core.config.logs import AUDIT

VALUE_CHARACTERS_MAX = 256
REFUSALS_PER_S = 5.0
REFUSALS_AT_ONCE = 20
Value = str | int | float | None
_log = logging.getLogger(AUDIT)


def record(event: str, **values: Value) -> None:
    """Writes one event. values: members of the line; None: left out. On any thread."""
    shown: dict[str, Value] = {"pid": os.getpid()}
    for name, value in values.items():
        if isinstance(value, str) and len(value) > VALUE_CHARACTERS_MAX:
            value = f"{value[:VALUE_CHARACTERS_MAX]}..."
        if value is not None:
            shown[name] = value
    _log.info("%s", json.dumps({"event": event, **shown}), extra={"event": event, "audit": shown})


def key_digest(key: bytes) -> str:
    """What stands for a key: the first 8 hexadecimal digits of its SHA-256; "" for no key."""
    return f"sha256:{hashlib.sha256(key).hexdigest()[:8]}" if key else ""


class Refusals:
    """Refused requests, which a peer may send without end: of more than REFUSALS_PER_S the rest is counted,
    and the next line says how many there were. Thread safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: seconds."""
        self._clock = clock
        self._lock = threading.Lock()
        self._tokens = float(REFUSALS_AT_ONCE)
        self._at_s = clock()
        self._left_out = 0

    def record(self, event: str, **values: Value) -> None:
        """As the function ``record``, or counts the event. Adds left_out: events that were counted alone."""
        with self._lock:
            now_s = self._clock()
            self._tokens = min(self._tokens + (now_s - self._at_s) * REFUSALS_PER_S, REFUSALS_AT_ONCE)
            self._at_s = now_s
            if self._tokens < 1.0:
                self._left_out += 1
                return
            self._tokens -= 1.0
            left_out, self._left_out = self._left_out, 0
        record(event, **values, left_out=left_out or None)
