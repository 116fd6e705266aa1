"""The log of what an engine's port tells: which callers it refused, and why."""

from __future__ import annotations

import logging
import select
import threading
from typing import TYPE_CHECKING

from moonpool.core.config.logs import Notes

if TYPE_CHECKING:
    from moonpool import _native

_log = logging.getLogger("moonpool.transfer")


def log_notes(native: _native.Engine) -> None:
    """Logs them until that engine is closed, on a thread of its own, which sleeps meanwhile."""
    threading.Thread(target=_run, args=(native,), name="moonpool-engine-notes", daemon=True).start()


def _run(native: _native.Engine) -> None:
    notes = Notes(native, _log)
    poll = select.poll()
    poll.register(native.notes_fd, select.POLLIN)
    while not native.closed:
        poll.poll()
        notes.drain()
