"""The log of what an engine with TLS tells: which callers its port refused, and files that it cannot use."""

from __future__ import annotations

import logging
import select
import threading
from typing import TYPE_CHECKING

from moonpool.core.config.logs import Notes

if TYPE_CHECKING:
    from moonpool import _native

_log = logging.getLogger("moonpool.transfer")


def log_notes(source: _native.EngineNotes) -> None:
    """Logs them until that engine is closed or gone, on a thread of its own, which sleeps meanwhile and keeps
    no engine alive.
    """
    threading.Thread(target=_run, args=(source,), name="moonpool-engine-notes", daemon=True).start()


def _run(source: _native.EngineNotes) -> None:
    notes = Notes(source, _log)
    poll = select.poll()
    poll.register(source.notes_fd, select.POLLIN)
    while not source.ended:
        poll.poll()
        notes.drain()
