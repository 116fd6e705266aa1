"""What a process of ours logs, to standard error: the settings log.level and log.format, read at its start.

    text  2026-01-02 03:04:05,678 WARNING moonpool.node: 10.0.0.7:4711: the cluster token is wrong; ...
    json  {"time": ..., "level": "warning", "logger": "moonpool.node", "event": "auth_refused", "peer": ...,
           "message": ...}

One line a record, whatever a peer sent: what does not print is escaped, and a long message is cut.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from moonpool.core.config.config import Config
from moonpool.core.printable import printable

if TYPE_CHECKING:
    from moonpool import _native

FORMAT = "%(asctime)s %(levelname)s %(name)s: {who}%(message)s"
MESSAGE_CHARACTERS_MAX = 2000
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
    """One JSON object a line. event, peer: of records that have them."""

    def __init__(self, who: str = "") -> None:
        super().__init__()
        self._who = who

    def format(self, record: logging.LogRecord) -> str:
        """One line: members without a value are left out, "time" is in UTC with milliseconds, and the message
        is escaped and cut as in text.
        """
        message = self._who + record.getMessage()
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": getattr(record, "event", None),
            "peer": getattr(record, "peer", None),
            "message": printable(message, characters_max=MESSAGE_CHARACTERS_MAX),
            "traceback": self.formatException(record.exc_info) if record.exc_info else None,
        }
        return json.dumps({name: value for name, value in fields.items() if value is not None})


def set_up(config: Config) -> None:
    """For the programs of Moonpool; a library inside another program's process leaves logging to that one."""
    begin(config.log.level.upper(), as_json=config.log.format == "json")


def begin(level: int | str, who: str = "", *, as_json: bool = False) -> None:
    """who: goes before what is said, where several processes write to one place."""
    handler = StandardError()
    handler.setFormatter(JsonFormatter(who) if as_json else TextFormatter(FORMAT.format(who=who)))
    logging.basicConfig(level=level, force=True, handlers=[handler])


def is_json() -> bool:
    """Whether begin() was called with as_json."""
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers)


class Notes:
    """Logs what a data plane tells, on the event loop that start() was called on."""

    def __init__(
        self,
        source: _native.Server | _native.MasterServer,
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
