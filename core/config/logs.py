"""What a process of ours logs, to standard error: the settings log.level and log.format, read at its start.

    text  2026-01-02 03:04:05,678 WARNING moonpool.node: 10.0.0.7:4711: the cluster token is wrong; ...
    json  {"time": ..., "level": "warning", "logger": "moonpool.node", "event": "auth_refused", "peer": ...,
           "message": ...}

One line a record, whatever a peer sent: what does not print is escaped, and a long message is cut. Lines of
the audit log (core/service/audit.py) go to log.audit_file instead, where it is set.
"""

from __future__ import annotations

import asyncio
import json
import logging
import logging.handlers
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from moonpool.core.config.config import Config
from moonpool.core.errors import ConfigError
from moonpool.core.printable import printable

if TYPE_CHECKING:
    from moonpool import _native

FORMAT = "%(asctime)s %(levelname)s %(name)s: {who}%(message)s"
MESSAGE_CHARACTERS_MAX = 2000
AUDIT = "moonpool.audit"  # the logger of the audit log
_LEVELS = (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR)  # by the numbers of the data plane


class StandardError(logging.Handler):
    """Writes to what sys.stderr is at that moment, and not to what it was when logging was set up."""

    def emit(self, record: logging.LogRecord) -> None:
        """Writes and flushes the line. OSError and ValueError are swallowed; ``logging`` calls it under the
        handler's lock, on the thread that logs.
        """
        with suppress(OSError, ValueError):  # a full disk, a reader that has gone: a log ends no process
            print(self.format(record), file=sys.stderr, flush=True)


class TextFormatter(logging.Formatter):
    """A line for people. A traceback of ours keeps its lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """Escapes what does not print, and cuts the message at MESSAGE_CHARACTERS_MAX. The traceback is added
        later, uncut.
        """
        record.message = printable(record.message, characters_max=MESSAGE_CHARACTERS_MAX)
        return super().formatMessage(record)


class JsonFormatter(logging.Formatter):
    """One JSON object a line. event, peer: of records that have them. A record of the audit log has its
    members in place of a message."""

    def __init__(self, who: str = "") -> None:
        super().__init__()
        self._who = who

    def format(self, record: logging.LogRecord) -> str:
        """One line: members without a value are left out, "time" is in UTC with milliseconds, and the message
        is escaped and cut as in text.
        """
        audited: dict[str, object] | None = getattr(record, "audit", None)
        message = self._who + record.getMessage()
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": getattr(record, "event", None),
            "peer": getattr(record, "peer", None),
            **(audited or {}),
            "message": None if audited else printable(message, characters_max=MESSAGE_CHARACTERS_MAX),
            "traceback": self.formatException(record.exc_info) if record.exc_info else None,
        }
        return json.dumps({name: value for name, value in fields.items() if value is not None})


def set_up(config: Config) -> None:
    """For the programs of Moonpool; a library inside another program's process leaves logging to that one."""
    begin(config.log.level.upper(), as_json=config.log.format == "json", audit_file=config.log.audit_file)


class AuditFile(logging.handlers.WatchedFileHandler):
    """Appends to a file, and opens it again when it was renamed or removed, as logrotate does."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Says on standard error what could not be written: a full disk ends no process."""
        with suppress(OSError, ValueError):
            print(f"log.audit_file: {self.format(record)} was not written", file=sys.stderr, flush=True)

    def close(self) -> None:
        """As of the base; what cannot be written is lost."""
        with suppress(OSError):
            super().close()


def begin(level: int | str, who: str = "", *, as_json: bool = False, audit_file: str = "") -> None:
    """who: goes before what is said, where several processes write to one place. audit_file: "": lines of the
    audit log stand with the others, at every level. Raises ConfigError where it cannot be opened."""
    handler = StandardError()
    handler.setFormatter(JsonFormatter(who) if as_json else TextFormatter(FORMAT.format(who=who)))
    logging.basicConfig(level=level, force=True, handlers=[handler])
    audit = logging.getLogger(AUDIT)
    audit.setLevel(logging.INFO)
    audit.propagate = not audit_file
    for before in audit.handlers[:]:
        audit.removeHandler(before)
        before.close()
    if audit_file:
        try:
            file = AuditFile(audit_file)
        except OSError as error:
            raise ConfigError(
                f"log.audit_file = {audit_file} cannot be written: {error.strerror or error}",
                operation="config",
                key="log.audit_file",
            ) from error
        file.setFormatter(JsonFormatter())
        audit.addHandler(file)


def audit_file() -> str:
    """The file that begin() was called with; "": none."""
    handlers = logging.getLogger(AUDIT).handlers
    return next((each.baseFilename for each in handlers if isinstance(each, AuditFile)), "")


def is_json() -> bool:
    """Whether begin() was called with as_json."""
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers)


class Notes:
    """Logs what a data plane tells, on the event loop that start() was called on."""

    def __init__(
        self,
        source: _native.Server | _native.MasterServer | _native.EngineNotes,
        logger: logging.Logger,
        heard: Callable[[str], None] = lambda kind: None,
    ) -> None:
        self._source = source
        self._logger = logger
        self._heard = heard
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Registers the source's descriptor with the running event loop, which then calls ``drain``."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._source.notes_fd, self.drain)

    def drain(self) -> None:
        """Logs all notes that wait and reports each one's kind to ``heard``. Does not block; on the event
        loop.
        """
        for level, kind, peer, text, left_out in self._source.take_notes():
            more = f" ({left_out:,} more like it were not logged)" if left_out else ""
            place = f"{peer}: " if peer else ""
            self._logger.log(
                _LEVELS[level], "%s%s%s", place, text, more, extra={"event": kind, "peer": peer or None}
            )
            self._heard(kind)

    def close(self) -> None:
        """Logs what is left, and looks no more."""
        if self._loop is not None:
            self._loop.remove_reader(self._source.notes_fd)
            self._loop = None
            self.drain()
