"""What a process of ours logs, to standard error: the setting log.level, read once at its start."""

from __future__ import annotations

import logging
import sys

from moonpool.core.config import Config

FORMAT = "%(asctime)s %(levelname)s %(name)s: {who}%(message)s"


class StandardError(logging.Handler):
    """Writes to what sys.stderr is at that moment, and not to what it was when logging was set up."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)


def set_up(config: Config) -> None:
    """For the programs of Moonpool; a library inside somebody else's process leaves logging to that one."""
    begin(config.log.level.upper())


def begin(level: int | str, who: str = "") -> None:
    """who: goes before what is said, where several processes write to one place."""
    logging.basicConfig(level=level, format=FORMAT.format(who=who), force=True, handlers=[StandardError()])
