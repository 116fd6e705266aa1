"""Digests of files: SHA-256 over all bytes, computed by background threads and cached by each file's
identity, so that a host reads a file once.

    digest(file) = SHA-256( SHA-256(piece 0) || SHA-256(piece 1) || ... ), pieces of 16 MiB

A digest is valid only when the file's identity is the same before the first byte is read and after the last.

Threads: any thread may call. ``Reading`` starts daemon threads of low priority; each process of a host waits
for a file lock before it reads, so that one process reads and the others take its result from the cache.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import json
import os
import platform
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from moonpool.core.config.paths import cache_dir, write_private
from moonpool.core.errors import ConfigError

PIECE_BYTES = 16 << 20
READ_BYTES = 1 << 20
THREADS_MAX = 8
SETTLED_NS = 2_000_000_000  # file systems count time in steps of up to this
SLOWEST_BYTES_S = 20e6  # a disk below that is taken for one that hangs
PATIENCE_S = 120.0
TURN_POLL_S = 0.2
ENTRIES_MAX = 4096
LOCKS = 1024
NICE = 10


class Identity(NamedTuple):
    """What identifies the bytes of a file without reading them: each write changes ctime_ns at least."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, place: Path | int) -> Identity:
        """place: a path, or a file descriptor. Raises OSError."""
        info = os.stat(place)
        return cls(info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)

    @property
    def changed_ns(self) -> int:
        """The time stamp of the last change of the file, in nanoseconds."""
        return max(self.mtime_ns, self.ctime_ns)


class File(NamedTuple):
    """name: what the file is called among those it is read with."""

    name: str
    path: Path
    identity: Identity


class Kept:
    """A folder of cached digests, one small file for each identity, at most ENTRIES_MAX. An entry that is
    missing or damaged reads as None; an entry that cannot be written is dropped. Neither is an error."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, identity: Identity) -> bytes | None:
        """The cached digest of the file with this identity, or None."""
        try:
            said = json.loads(self._place(identity).read_bytes())
            digest = bytes.fromhex(said["sha256"])
            whole = said["identity"] == list(identity) and said["check"] == _check(identity, digest)
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return digest if whole else None

    def keep(self, identity: Identity, digest: bytes) -> None:
        """Adds an entry, atomically; removes the oldest quarter when there are too many."""
        entry = {"identity": list(identity), "sha256": digest.hex(), "check": _check(identity, digest)}
        with contextlib.suppress(OSError):
            self._ensure()
            write_private(self._place(identity), json.dumps(entry).encode())
            self._shrink()

    @contextlib.contextmanager
    def turn(self, files: Sequence[File], deadline_s: float) -> Iterator[None]:
        """A lock on this set of files across the processes of the host. The caller goes on without it when
        it cannot be made, or when another process still holds it at ``deadline_s`` (time.monotonic())."""
        mark = hashlib.sha256(repr([file.identity for file in files]).encode()).digest()
        try:
            self._ensure()
            number = int.from_bytes(mark[:4], "little") % LOCKS
            lock = os.open(self._folder / f"lock-{number}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            yield
            return
        try:
            while time.monotonic() < deadline_s:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(TURN_POLL_S)
                except OSError:  # a file system without locks
                    break
            yield
        finally:
            os.close(lock)

    def _place(self, identity: Identity) -> Path:
        return self._folder / hashlib.sha256(repr(tuple(identity)).encode()).hexdigest()[:32]

    def _ensure(self) -> None:
        """Raises OSError, also for a folder in which others may write."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = self._folder.stat()
        if info.st_uid != os.geteuid() or info.st_mode & 0o022:
            raise PermissionError(f"others may write in {self._folder}")

    def _shrink(self) -> None:
        entries = [entry for entry in os.scandir(self._folder) if not entry.name.startswith("lock-")]
        if len(entries) > ENTRIES_MAX:
            entries.sort(key=lambda entry: entry.stat().st_mtime_ns)
            for entry in entries[: ENTRIES_MAX // 4]:
                os.unlink(entry.path)


class Reading:
    """Reads ``files`` in daemon threads. Once ``over`` is set, ``digests`` holds their digests in order, or
    ``trouble`` holds one sentence why there are none. The deadline is PATIENCE_S plus the time that
    SLOWEST_BYTES_S needs."""

    def __init__(self, files: Sequence[File], kept: Kept | None = None) -> None:
        self.files = tuple(files)
        self.over = threading.Event()
        self.digests: tuple[bytes, ...] = ()
        self.trouble = ""
        self.bytes = sum(file.identity.size for file in files)
        self.bytes_read = 0
        self.started_s = time.monotonic()
        self.seconds = 0.0
        self._deadline_s = self.started_s + PATIENCE_S + self.bytes / SLOWEST_BYTES_S
        self._kept = kept or Kept(cache_dir() / "weights")
        self._lock = threading.Lock()
        if not self._all_kept():
            threading.Thread(target=self._run, name="moonpool-files", daemon=True).start()

    def progress(self) -> str:
        """How far it is, in a few words."""
        done, size = self.bytes_read, self.bytes / 1e9
        took_s = time.monotonic() - self.started_s
        if not done:
            return f"{size:.3g} GB, about {self.bytes / 1e9:.0f} s at 1 GB/s"
        left_s = (self.bytes - done) * took_s / done
        return f"{done / 1e9:.3g} of {size:.3g} GB in {took_s:.0f} s, about {left_s:.0f} s left"

    def _all_kept(self) -> bool:
        digests = [self._kept.find(file.identity) for file in self.files]
        if None in digests:
            return False
        self._end(digest for digest in digests if digest is not None)
        return True

    def _end(self, digests: Iterable[bytes] = (), trouble: str = "") -> None:
        self.digests, self.trouble = tuple(digests), trouble
        self.seconds = time.monotonic() - self.started_s
        self.over.set()

    def _run(self) -> None:
        try:
            with self._kept.turn(self.files, self._deadline_s):
                if self._all_kept():  # another process read them meanwhile
                    return
                digests = self._read()
            self._end(digests)
        except Exception as error:  # whatever it is, the waiting threads must learn of it
            self._end(trouble=str(error) or repr(error))

    def _read(self) -> list[bytes]:
        """Caches each file's digest as soon as the file is read, so that the next process goes on where one
        that was killed stopped."""
        begun_ns = time.time_ns()
        digests = [self._kept.find(file.identity) for file in self.files]
        self.bytes_read = sum(
            file.identity.size for file, digest in zip(self.files, digests, strict=True) if digest is not None
        )
        lacking = [index for index, digest in enumerate(digests) if digest is None]
        pieces = ((index, at) for index in lacking for at in _offsets(self.files[index]))
        found: dict[int, dict[int, bytes]] = {index: {} for index in lacking}
        errors: list[Exception] = []

        def work() -> None:
            lower_priority()
            buffer = memoryview(bytearray(READ_BYTES))
            while not errors:
                with self._lock:
                    index, at = next(pieces, (-1, 0))
                if index < 0:
                    return
                try:
                    piece = self._piece(index, at, buffer)
                    with self._lock:
                        found[index][at] = piece
                        is_last = len(found[index]) == len(_offsets(self.files[index]))
                    if is_last:
                        digests[index] = self._whole(index, found.pop(index), begun_ns)
                except Exception as error:
                    errors.append(error)

        threads = [
            threading.Thread(target=work, name="moonpool-files", daemon=True) for _ in range(_threads())
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, self._deadline_s - time.monotonic()))
            if thread.is_alive():
                errors.append(TimeoutError(f"{self.files[0].path.parent} could not be read in time"))
        if errors:
            raise errors[0]
        for file in self.files:
            if Identity.of(file.path) != file.identity:
                raise _changed(file.path)
        return [digest or _digest_of({}) for digest in digests]  # without one: an empty file

    def _whole(self, index: int, pieces: Mapping[int, bytes], begun_ns: int) -> bytes:
        """The digest of a file of which all pieces were read. Raises ConfigError when it has changed."""
        file, digest = self.files[index], _digest_of(pieces)
        if Identity.of(file.path) != file.identity:
            raise _changed(file.path)
        # A file changed a moment ago may change again within one step of its time stamp.
        if begun_ns - file.identity.changed_ns > SETTLED_NS:
            self._kept.keep(file.identity, digest)
        return digest

    def _piece(self, index: int, offset: int, buffer: memoryview) -> bytes:
        file = self.files[index]
        digest = hashlib.sha256()
        descriptor = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            end = min(offset + PIECE_BYTES, file.identity.size)
            while offset < end:
                if time.monotonic() > self._deadline_s:
                    raise TimeoutError(f"{file.path} could not be read in time")
                count = os.preadv(descriptor, [buffer[: end - offset]], offset)
                if count == 0:
                    raise _changed(file.path)
                digest.update(buffer[:count])
                offset += count
                with self._lock:
                    self.bytes_read += count
            if Identity.of(descriptor) != file.identity:
                raise _changed(file.path)
        finally:
            os.close(descriptor)
        return digest.digest()


def digest_of_files(files: Sequence[File], digests: Sequence[bytes]) -> str:
    """Hexadecimal SHA-256 over each file's name, size and digest; see docs/keys.md."""
    whole = hashlib.sha256()
    for file, digest in zip(files, digests, strict=True):
        name = file.name.encode()
        whole.update(len(name).to_bytes(4, "little") + name)
        whole.update(file.identity.size.to_bytes(8, "little") + digest)
    return whole.hexdigest()


def lower_priority() -> None:
    """The calling thread gives way to others, in time and on the disk."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
    ioprio_set = {"x86_64": 251, "aarch64": 30}.get(platform.machine())
    if ioprio_set is not None:
        with contextlib.suppress(Exception):
            # (this thread, best effort, the last of its eight levels)
            ctypes.CDLL(None).syscall(ioprio_set, 1, 0, 2 << 13 | 7)


def _digest_of(pieces: Mapping[int, bytes]) -> bytes:
    """pieces: the digests by where they begin."""
    return hashlib.sha256(b"".join(pieces[at] for at in sorted(pieces))).digest()


def _offsets(file: File) -> range:
    return range(0, file.identity.size, PIECE_BYTES)


def _threads() -> int:
    return max(1, min(THREADS_MAX, len(os.sched_getaffinity(0)) // 2))


def _check(identity: Identity, digest: bytes) -> str:
    return hashlib.sha256(repr(tuple(identity)).encode() + digest).hexdigest()[:16]


def _changed(path: Path) -> ConfigError:
    return ConfigError(
        f"{path} changed while it was read, so it cannot be told which bytes the engine has; start it again",
        operation="fingerprint",
        key="revision",
    )
