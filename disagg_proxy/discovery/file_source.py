"""Engines listed in a file, TOML, JSON or YAML, which is read again whenever it changes.

The file has a table ``engines`` with one ``EngineRecord`` for each. A file that cannot be read, or that has
any error, changes nothing: its last good content stays in force. A program that edits the file replaces it as
a whole (rename), as editors and Kubernetes do; a half-written file nearly always fails to parse, too.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from moonpool.core.errors import ConfigError
from moonpool.disagg_proxy.discovery.engine_record import EngineRecord
from moonpool.disagg_proxy.discovery.source import DiscoveredEngine, SourceListener

LOOK_EVERY_S = 0.5
FILE_BYTES_MAX = 16 << 20
_UNKNOWN = re.compile(r"unknown field `(\w+)`")
_WRONG = re.compile(r"at `\$.*\.(\w+)`$")
_SETTLED_S = 2.0  # a younger file may change again with an equal mtime


class _File(msgspec.Struct, forbid_unknown_fields=True):
    engines: list[EngineRecord]


class FileSource:
    """The source ``file:PATH``. Checks the file every look_every_s seconds."""

    def __init__(self, path: str, *, look_every_s: float = LOOK_EVERY_S) -> None:
        self.name = f"file:{path}"
        self._path = Path(path)
        self._look_every_s = look_every_s

    async def run(self, listener: SourceListener) -> None:
        """See ``Source.run``."""
        mark: tuple[int, ...] | None = None
        text: bytes | None = None
        lost = False
        while True:
            try:
                seen, read = await asyncio.to_thread(self._read, mark)
            except OSError as error:
                listener.failed(f"it cannot be read: {error.strerror or error}")
                mark, lost = None, True
            else:
                mark = seen
                if read is not None and (read != text or lost):
                    text, lost = read, False
                    try:
                        listener.found(parse(self._path.suffix, text))
                    except ConfigError as error:
                        listener.failed(str(error))
            await asyncio.sleep(self._look_every_s)

    def _read(self, mark: tuple[int, ...] | None) -> tuple[tuple[int, ...] | None, bytes | None]:
        """(stat of the file, content); the content is None if the stat equals ``mark``."""
        status = os.stat(self._path)
        seen = (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size)
        if seen == mark:
            return mark, None
        with self._path.open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
        settled = time.time() - status.st_mtime > _SETTLED_S
        return seen if settled else None, content


def parse(suffix: str, content: bytes) -> list[DiscoveredEngine]:
    """The engines of a file. suffix: .json, .toml, .yaml or .yml. Raises ConfigError, with the line
    number if it is known."""
    if len(content) > FILE_BYTES_MAX:
        raise _bad(f"it is larger than {FILE_BYTES_MAX} bytes")
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise _bad(f"line {content[: error.start].count(10) + 1}: it is no UTF-8") from error
    try:
        table = msgspec.convert(_table(suffix, text), _File)
    except msgspec.ValidationError as error:
        raise _bad(f"{_line_of_row(text, str(error))}{error}") from error
    found: list[DiscoveredEngine] = []
    names: set[str] = set()
    for row in table.engines:
        try:
            each = row.found()
        except ConfigError as error:
            raise _bad(f"{_line_of(text, row.url)}{error}") from error
        if each.name in names:
            raise _bad(f"{_line_of(text, row.url)}two engines are called {each.name!r}")
        names.add(each.name)
        found.append(each)
    return found


def _table(suffix: str, text: str) -> Any:
    if suffix == ".json":
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise _bad(f"line {error.lineno}: {error.msg}") from error
        except RecursionError as error:
            raise _bad("it is nested without end") from error
    if suffix == ".toml":
        try:
            return tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            end = f"at line {text.count(chr(10)) + 1}, the last"
            raise _bad(str(error).replace("at end of document", end)) from error
    if suffix not in (".yaml", ".yml"):
        raise _bad("its name ends in .toml, .json or .yaml")
    try:
        import yaml
    except ImportError as error:
        raise _bad("YAML needs PyYAML: pip install 'moonpool[yaml]', or write TOML or JSON") from error
    try:
        return yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark is not None else 0
        raise _bad(f"line {line}: {error.problem}") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise _bad(str(error)) from error


def _line_of(text: str, needle: str) -> str:
    """``line N: `` of the last line that contains ``needle``; "" if no line does."""
    lines = [number for number, line in enumerate(text.splitlines(), 1) if needle and needle in line]
    return f"line {lines[-1]}: " if lines else ""


def _line_of_row(text: str, error: str) -> str:
    """The line of the unknown or mistyped member that ``error`` names."""
    member = _UNKNOWN.search(error) or _WRONG.search(error)
    return _line_of(text, member[1]) if member else ""


def _bad(sentence: str) -> ConfigError:
    return ConfigError(sentence, operation="discovery")
