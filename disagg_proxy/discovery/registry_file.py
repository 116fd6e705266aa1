"""Registrations in a file: kept over a restart of the proxy, and shared by the processes of one.

    told() --> changes --sync(): lock, read, change, rename--> the file --sync(): it looks different--> rows

A process that changes the file holds a lock beside it and replaces it as a whole, so other processes never
read half of it. The file holds no times: a repeated registration gets another number, and a process that sees
the new number restarts its time. So a clock that jumps expires nothing, and after a restart a registration
has its full time again.
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
    """A registration in the file. made: a random number, drawn anew with each repetition."""

    told: Registration
    made: int


class PendingWrite(NamedTuple):
    """A change that is not written yet. row: None removes the key. renewed: an equal one was registered."""

    row: StoredRegistration | None
    renewed: bool


class _File(msgspec.Struct):
    registrations: list[StoredRegistration]


class RegistryFile:
    """``told`` and ``sync`` run on one event loop; file operations run on a thread."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.changes: dict[RegistrationKey, PendingWrite] = {}  # not written yet
        self._there: Mapping[RegistrationKey, StoredRegistration] = {}  # its content at the last read
        self._mark: tuple[int, ...] | None = None  # its stat at the last read
        self._broken: tuple[int, ...] | None = None  # its stat when it was logged as broken

    def told(self, key: RegistrationKey, row: StoredRegistration | None, *, renewed: bool = False) -> None:
        """Records a registration, or with None its end, for the next sync. renewed: an equal one existed, and
        is in the file unless another process has unregistered it."""
        before, there = self.changes.get(key), self._there.get(key)
        news = row is None or row.told.ttl_s > 0 or there is None or there.told != row.told
        if renewed and before is None and not news:  # it never expires, so no process needs the repetition
            return
        self.changes[key] = PendingWrite(row, renewed and (before is None or before.renewed))

    async def read(self) -> Mapping[RegistrationKey, StoredRegistration] | None:
        """The registrations in the file; None: unchanged since the last read. Raises OSError."""
        return await asyncio.to_thread(self._read)

    async def sync(
        self, known: Mapping[RegistrationKey, StoredRegistration], dead: Mapping[RegistrationKey, int]
    ) -> Mapping[RegistrationKey, StoredRegistration] | None:
        """Writes pending changes and reads the file; None: unchanged since the last read.

        known: registrations to restore a lost file from.
        dead:  expired ones to leave out, unless they were repeated since.
        Raises OSError; BlockingIOError while another process is writing.
        """
        changes = dict(self.changes)
        rows: Mapping[RegistrationKey, StoredRegistration] | None
        if changes or dead:
            try:
                rows = await asyncio.to_thread(self._change, changes, known, dead)
            except BlockingIOError:
                raise
            except OSError:
                self._mark = None  # its content was not returned to the caller: read it again
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
        """Drops changes that no longer matter: of publishers that came and went while the file could not be
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
                    rows[key] = row  # else another process unregistered or replaced it meanwhile
            self._write(msgspec.json.encode(_File(list(rows.values()))), on_disk=not heartbeats)
            self._mark, self._there = self._look(), rows
        if heartbeats:  # frequent, and no other process should wait for the disk
            with suppress(FileNotFoundError), self.path.open("rb") as file:
                os.fsync(file.fileno())
        return rows

    def _read(self) -> dict[RegistrationKey, StoredRegistration] | None:
        """None: unchanged, missing, or broken; a broken file is logged once."""
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
        """Identity, mtime and size of the file; None: it is missing."""
        try:
            status = os.stat(self.path)
        except FileNotFoundError:
            return None
        return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size

    def _write(self, content: bytes, *, on_disk: bool) -> None:
        """Replaces the file. on_disk: sync it first. Mode 0600, since a process that can write the file can
        add engines."""
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
        """Holds the lock. Raises BlockingIOError while another process holds it."""
        descriptor = os.open(f"{self.path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        finally:
            os.close(descriptor)
