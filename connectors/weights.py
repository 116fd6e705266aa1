"""The identity of a model's weights: a digest over all bytes of its weight files.

Two models with equal configs and different weights must never share KV, and only a digest over every byte
tells them apart. Background threads read large files, once on a host; until the digest is known
``weights_digest`` raises ``Pending``, and the engine computes without the pool.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from moonpool.connectors.files import File, Identity, Reading, digest_of_files
from moonpool.core.errors import ConfigError, Unavailable

WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz"})
SMALL_BYTES = 256 << 20  # weights_digest waits for files up to this size, in bytes
SMALL_WAIT_S = 60.0
SAY_S = 10.0
READINGS_MAX = 64
CLOCK_STEP_NS = 20_000_000  # files changed twice within one step have the same time stamp
CLOCK_NS = 100_000_000  # between the clock of processes and that of files

T = TypeVar("T")

_readings: dict[tuple[File, ...], Reading] = {}
_loaded: dict[Path, tuple[File, ...]] = {}  # of each path that was loaded into an engine that served already
_lock = threading.Lock()


class Pending(Unavailable):
    """The weights are still being read. ``reading``: how far, and when it is over."""

    def __init__(self, what: str, reading: Reading) -> None:
        super().__init__(
            f"{what} are being read to tell them from others ({reading.progress()})", operation="fingerprint"
        )
        self.reading = reading


def weights_digest(path: Path) -> str:
    """Hexadecimal SHA-256 that names the weights in the folder, or in the one file, ``path``.

    Raises Pending until all bytes are read, and ConfigError when there is no weight file or when one changed
    after this process started, or after ``loaded``: the engine in it may have loaded the bytes of before.
    """
    named = files_at(path)
    newest = max(named, key=lambda file: file.identity.changed_ns)
    if path in _loaded:
        is_other = named != _loaded[path]
    else:
        is_other = newest.identity.changed_ns > started_ns() + CLOCK_NS
    if is_other:
        raise unidentified(
            f"{newest.path} was changed after this engine was started, so it cannot be told which bytes the "
            f"engine has; start it again"
        )
    reading = _reading(named)
    if reading.bytes <= SMALL_BYTES:
        reading.over.wait(SMALL_WAIT_S)
    if not reading.over.is_set():
        raise Pending(f"the weights in {path}", reading)
    if reading.trouble:
        raise unidentified(f"cannot tell which weights {path} holds: {reading.trouble}")
    return digest_of_files(named, reading.digests)


def files_at(path: Path) -> tuple[File, ...]:
    """The weight files in the folder, or the one file, ``path``, as they are now. Raises ConfigError when
    there are none."""
    files = [path] if path.is_file() else weight_files(path)
    if not files:
        raise unidentified(
            f"{path} holds no weight file ({', '.join(sorted(WEIGHT_SUFFIXES))}), so its weights cannot be "
            f"told from others"
        )
    try:
        return tuple(
            File(file.name if file == path else str(file.relative_to(path)), file, Identity.of(file))
            for file in files
        )
    except OSError as error:
        raise unidentified(f"a weight file cannot be read: {error}") from error


def settled_files(path: Path) -> tuple[File, ...]:
    """As files_at, once none can change again without changing its time stamp. Waits for one step of the file
    system's clock at most."""
    files = files_at(path)
    age_ns = time.time_ns() - max(file.identity.changed_ns for file in files)
    if 0 <= age_ns < CLOCK_STEP_NS:
        time.sleep((CLOCK_STEP_NS - age_ns) / 1e9)
        files = files_at(path)
    return files


def loaded(path: Path, files: tuple[File, ...]) -> None:
    """The engine in this process has loaded the weights of ``path`` while it served.

    files: as settled_files returned them before the load.
    """
    _loaded[path] = files


def unidentified(why: str) -> ConfigError:
    """The error for weights that cannot be told from others."""
    return ConfigError(why, operation="fingerprint", key="revision")


def weight_files(folder: Path) -> list[Path]:
    """The weight files below ``folder``, sorted by path; hidden folders are left out."""
    return sorted(
        Path(parent) / name
        for parent, folders, names in os.walk(folder, followlinks=True)
        if not any(part.startswith(".") for part in Path(parent).relative_to(folder).parts)
        for name in names
        if Path(name).suffix in WEIGHT_SUFFIXES
    )


def wait_for(ask: Callable[[], T], say: Callable[[str], object]) -> T:
    """Calls ``ask`` until it no longer raises Pending, and returns its result; calls ``say`` with the
    progress every SAY_S seconds. The deadline of the reading bounds the wait."""
    while True:
        try:
            return ask()
        except Pending as pending:
            say(f"{pending}; the start waits for it")
            pending.reading.over.wait(SAY_S)


def started_ns() -> int:
    """When this process began, on the clock of files."""
    with open("/proc/self/stat", "rb") as stat:
        ticks = int(stat.read().rpartition(b")")[2].split()[19])  # since the boot
    # A pause between the two clocks makes one look too early, which is the safe side.
    boot_ns = max(time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME) for _ in range(3))
    return boot_ns + ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")


def _reading(files: tuple[File, ...]) -> Reading:
    """The one of these files in this process."""
    with _lock:
        reading = _readings.pop(files, None)
        if reading is None or (reading.over.is_set() and reading.trouble):
            reading = Reading(files)
        _readings[files] = reading  # the last used is the last
        while len(_readings) > READINGS_MAX:
            del _readings[next(iter(_readings))]
        return reading
