"""The logs of what `moonpool up` runs or ran: `moonpool logs`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from moonpool.core.config import paths
from moonpool.core.config.config import Config
from moonpool.core.config.config_sources import nearest
from moonpool.core.errors import ConfigError, Unavailable
from moonpool.launch.up import is_running, read_state

OWN = "up"  # the supervisor's own log, of `up -d`
POLL_S = 0.2


def own_log() -> Path:
    """Where `moonpool up -d` writes what `moonpool up` prints."""
    return paths.runtime_dir() / "up.log"


def log_files(config: Config, names: Sequence[str] = ()) -> dict[str, Path]:
    """Name of the process -> its log, in the order of the start; of ``names`` alone where there are any.

    Where nothing runs these are the logs of the last run. Raises Unavailable when there are none, and
    ConfigError for a name without a log.
    """
    state = read_state() if is_running() else None
    if state is not None:
        found = {row.name: Path(row.log) for row in state.processes}
    else:
        folder = Path(config.up.log_dir).absolute() if config.up.log_dir else paths.runtime_dir() / "logs"
        found = {path.stem: path for path in sorted(folder.glob("*.log"))}
    if own_log().exists():
        found = {OWN: own_log(), **found}
    if not found:
        raise Unavailable(
            f"moonpool up has left no logs in {paths.runtime_dir()}; start it with: moonpool up -d",
            operation="logs",
        )
    for name in names:
        if name not in found:
            near = nearest(name, found)
            raise ConfigError(
                f"there is no log of {name}"
                + (f"; did you mean {near}?" if near else f"; there are logs of {', '.join(found)}"),
                operation="logs",
                key=name,
            )
    return {name: path for name, path in found.items() if not names or name in names}


class LogFile:
    """Reads a log line by line as it grows; a new file in its place, of a new start, is read from its
    beginning."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._rest = b""  # of a line that has no end yet

    def last(self, lines: int | None) -> list[str]:
        """The last ``lines`` of what is there, None: all."""
        found = self.more()
        return found if lines is None else found[len(found) - min(lines, len(found)) :]

    def more(self) -> list[str]:
        """Whole lines that were added since the last call."""
        added = self._read()
        if self._was_replaced():
            self.close()
            added += self._read()
        *whole, self._rest = (self._rest + added).split(b"\n")
        return [line.decode(errors="replace") for line in whole]

    def close(self) -> None:
        """A later call of more() opens it again."""
        if self._file is not None:
            self._file.close()
        self._file = None

    def _read(self) -> bytes:
        if self._file is None:
            try:
                self._file = open(self._path, "rb")  # noqa: SIM115  (it stays open)
            except FileNotFoundError:
                return b""
        return self._file.read()

    def _was_replaced(self) -> bool:
        if self._file is None:
            return False
        with suppress(FileNotFoundError):
            return self._path.stat().st_ino != _inode(self._file)
        return False


def follow(files: dict[str, LogFile], show: Callable[[str, str], None]) -> None:
    """Shows name and line of what is added, until `moonpool up` has ended."""
    runs = True
    while runs:
        runs = is_running()  # before the last look, so that it sees the last lines
        for name, file in files.items():
            for line in file.more():
                show(name, line)
        if runs:
            time.sleep(POLL_S)


def _inode(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_ino
