"""Registrations in a file: kept over a restart of the proxy, and shared by the processes of one.

    told() --> changes --sync(): lock, read, change, rename--> the file --sync(): it looks different--> rows

A process that changes the file holds a lock beside it and replaces it as a whole, so no other sees half of
it. It holds no times: a registration that is made again has another number there, and a process that sees
that counts its time anew.
So a clock that jumps ends nothing, and what was registered before a restart has all its time again.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from moonpool.disagg_proxy.discovery.registration import Registration, RegistrationKey

FILE_BYTES_MAX = 64 << 20
_log = logging.getLogger("moonpool.proxy")


class StoredRegistration(msgspec.Struct, frozen=True):
    """A registration. made: any number, another each time that it is made."""

    told: Registration
    made: int


class PendingWrite(NamedTuple):
    """row: None: it is to go. renewed: it was there, and says the same."""

    row: StoredRegistration | None
    renewed: bool


class _File(msgspec.Struct):
    registrations: list[StoredRegistration]


class RegistryFile:
    """``told`` and ``sync`` on one event loop; files are touched in a thread."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.changes: dict[RegistrationKey, PendingWrite] = {}  # that are not written yet
        self._there: Mapping[RegistrationKey, StoredRegistration] = {}  # what it had
        self._mark: tuple[int, ...] | None = None  # what it looked like then
        self._broken: tuple[int, ...] | None = None  # and when it was said to be broken

    def told(self, key: RegistrationKey, row: StoredRegistration | None, *, renewed: bool = False) -> None:
        """A publisher registered, or, None, unregistered here. renewed: it was registered before, and it is
        in the file unless others were told to forget it."""
        before, there = self.changes.get(key), self._there.get(key)
        news = row is None or row.told.ttl_s > 0 or there is None or there.told != row.told
        if renewed and before is None and not news:  # no process counts its time
            return
        self.changes[key] = PendingWrite(row, renewed and (before is None or before.renewed))

    async def read(self) -> Mapping[RegistrationKey, StoredRegistration] | None:
        """What others have written; None: nothing is new. Raises OSError."""
        return await asyncio.to_thread(self._read)

    async def sync(
        self, known: Mapping[RegistrationKey, StoredRegistration], dead: Mapping[RegistrationKey, int]
    ) -> Mapping[RegistrationKey, StoredRegistration] | None:
        """Writes what was told, and reads what others have written; None: nothing is new. known: rows for a
        file that is lost; dead: to be left out, if they were not made again since. Raises OSError, of these
        BlockingIOError while another process is writing."""
        changes = dict(self.changes)
        rows: Mapping[RegistrationKey, StoredRegistration] | None
        if changes or dead:
            try:
                rows = await asyncio.to_thread(self._change, changes, known, dead)
            except BlockingIOError:
                raise
            except OSError:
                self._mark = None  # what it had is not handed on: it is read anew
                self._forget(changes, known)
                raise
        else:
            rows = await self.read()
        for key, change in changes.items():
            if self.changes[key] is change:  # else it changed while this was written
                del self.changes[key]
        return rows

    def _forget(
        self,
        changes: Mapping[RegistrationKey, PendingWrite],
        known: Mapping[RegistrationKey, StoredRegistration],
    ) -> None:
        """What need not be written any more: publishers that came and went while the file could not be
        written."""
        for key, change in changes.items():
            needless = key not in self._there and (change.row is None or key not in known)
            if needless and self.changes[key] is change:
                del self.changes[key]

    def _change(
        self,
        changes: Mapping[RegistrationKey, PendingWrite],
        known: Mapping[RegistrationKey, StoredRegistration],
        dead: Mapping[RegistrationKey, int],
    ) -> dict[RegistrationKey, StoredRegistration]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        heartbeats = all(change.renewed for change in changes.values())
        with self._locked():
            self._mark = None
            there = self._read()
            rows = dict(known if there is None else there)
            for key, made in dead.items():
                if key in rows and rows[key].made == made:
                    del rows[key]
            for key, (row, renewed) in changes.items():
                if row is None:
                    rows.pop(key, None)
                elif not renewed or (key in rows and rows[key].told.says(row.told)):
                    rows[key] = row  # else it has been unregistered, or something else, elsewhere meanwhile
            self._write(msgspec.json.encode(_File(list(rows.values()))), on_disk=not heartbeats)
            self._mark, self._there = self._look(), rows
        if heartbeats:  # they come all the time, and no other process should wait for the disk
            with suppress(FileNotFoundError), self.path.open("rb") as file:
                os.fsync(file.fileno())
        return rows

    def _read(self) -> dict[RegistrationKey, StoredRegistration] | None:
        """None: it looks as before, is not there, or is broken, which is said once."""
        mark = self._look()
        if mark is not None and mark == self._mark:
            return None
        self._there = {}
        if mark is None:
            return None
        try:
            with self.path.open("rb") as file:
                content = file.read(FILE_BYTES_MAX + 1)
            rows = msgspec.json.decode(content, type=_File).registrations
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            if mark != self._broken:
                _log.warning("%s has no registrations (%s); it will be written anew", self.path, error)
            self._mark = self._broken = mark
            return None
        self._mark = mark
        self._there = {row.told.key: row for row in rows}
        return dict(self._there)

    def _look(self) -> tuple[int, ...] | None:
        """None: it is not there."""
        try:
            status = os.stat(self.path)
        except FileNotFoundError:
            return None
        return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size

    def _write(self, content: bytes, *, on_disk: bool) -> None:
        """on_disk: before it takes the old one's place. A process that can write it can bring in engines: it
        is its user's alone."""
        part = self.path.with_name(f"{self.path.name}.part")
        with suppress(FileNotFoundError):
            part.unlink()
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
            file.flush()
            if on_disk:
                os.fsync(file.fileno())
        os.replace(part, self.path)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Raises BlockingIOError while another process has it."""
        descriptor = os.open(f"{self.path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        finally:
            os.close(descriptor)
