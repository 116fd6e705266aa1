"""What it costs an engine to know which weights it has: all bytes of its files, once on a host.

    python -m benchmarks.identity [--gb 16] [--folder DIR] [--quick] [--json FILE]

Writes files of --gb gigabytes in four shards and asks for their digest, each time in a new process, as an
engine does at its start: with nothing in the page cache, with everything there (as when the engine has loaded
them, or is just about to), when they are known, and as eight engines that start together. The limit is the
same bytes read by one thread that does nothing with them. No peer has a row: the connectors that come with
vLLM, LMCache and Mooncake key by the model's name, which costs nothing and tells no weights apart.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.options import make_parser
from benchmarks.report import Row, print_table, write_json

SHARDS = 4
BUFFER_BYTES = 64 << 20
ENGINES = 8
KNOWN_ROUNDS = 5
TIMEOUT_S = 3600.0
QUICK_GB = 1.0

ENGINE = """
import sys, time
from pathlib import Path
from moonpool.connectors.weights import wait_for, weights_digest
begun_s = time.perf_counter()
digest = wait_for(lambda: weights_digest(Path(sys.argv[1])), lambda text: None)
print(time.perf_counter() - begun_s, digest)
"""


def write(folder: Path, size: int) -> list[Path]:
    buffer = os.urandom(min(BUFFER_BYTES, size // SHARDS))
    paths = [folder / f"model-{number + 1}-of-{SHARDS}.safetensors" for number in range(SHARDS)]
    for path in paths:
        with open(path, "wb") as file:
            while file.tell() < size // SHARDS:
                file.write(buffer)
            file.flush()
            os.fsync(file.fileno())
    return paths


def drop(paths: list[Path]) -> None:
    """Out of the page cache."""
    for path in paths:
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_s(paths: list[Path]) -> float:
    """One thread that reads and does nothing else."""
    buffer, begun_s = bytearray(1 << 20), time.perf_counter()
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - begun_s


def engines_s(folder: Path, cache: Path, count: int = 1) -> float:
    """Until the last of ``count`` processes that start together knows. Raises RuntimeError when one does not,
    or when they disagree."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", ENGINE, str(folder)],
            env={**os.environ, "MOONPOOL_CACHE": str(cache)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(count)
    ]
    answers = [process.communicate(timeout=TIMEOUT_S)[0].split() for process in processes]
    if any(len(answer) != 2 for answer in answers) or len({answer[1] for answer in answers}) != 1:
        raise RuntimeError(f"the digests are {answers}")
    return max(float(answer[0]) for answer in answers)


def measure(folder: Path, gigabytes: float) -> list[Row]:
    paths = write(folder, int(gigabytes * 1e9))
    size = sum(path.stat().st_size for path in paths)
    time.sleep(2.5)  # files of the last two seconds are not kept
    work = f"[{size / 1e9:.3g} GB in {SHARDS} files]"
    rows: list[Row] = []

    def row(what: str, ours_s: float, limit_s: float | None = None) -> None:
        rows.append(Row(f"{what} {work}", ours_s, "s", {}, limit_s, "", None))

    drop(paths)
    limit_s = read_s(paths)
    drop(paths)
    row("never read on this host, nothing in the page cache", engines_s(folder, folder / "a"), limit_s)
    read_s(paths)
    limit_s = read_s(paths)
    row("never read on this host, all in the page cache", engines_s(folder, folder / "b"), limit_s)
    known = [engines_s(folder, folder / "b") for _ in range(KNOWN_ROUNDS)]
    row("known", statistics.median(known))
    row(f"{ENGINES} engines that start together, never read", engines_s(folder, folder / "c", ENGINES))
    row(f"{ENGINES} engines that start together, known", engines_s(folder, folder / "c", ENGINES))
    return rows


def main() -> None:
    parser = make_parser(__doc__, f"{QUICK_GB:g} GB, under 50 s")
    parser.add_argument("--gb", type=float, default=16.0, help="gigabytes of weights (16)")
    parser.add_argument("--folder", type=Path, help="where to write them; a temporary folder without it")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="moonpool-identity-", dir=options.folder))
    try:
        rows = measure(folder, QUICK_GB if options.quick else options.gb)
    finally:
        shutil.rmtree(folder)
    print_table("Which weights an engine has, at its start", rows, "read alone")
    write_json(options.json, rows)


if __name__ == "__main__":
    main()
