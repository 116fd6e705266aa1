"""The far side of `moonpool bench transfer --file`: a file or a block device."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moonpool.core.bench.memory import OWN
from moonpool.core.bench.transfer import Bench
from moonpool.core.errors import InvalidArgument
from moonpool.core.transfer.engine import TransferEngine


class FileBench(Bench):
    """Between an engine's memory and a file. The system copies, in the time of this process."""

    def __init__(
        self, engine: TransferEngine, path: Path, working_set: int, kind: str = OWN, *, writable: bool
    ) -> None:
        size = working_set if writable and not path.is_block_device() else None
        segment = engine.open_file(path, size=size, writable=writable)
        super().__init__(engine, segment, working_set, kind)
        (self.remote,) = self.segment.regions
        if working_set > self.remote.length:
            raise InvalidArgument(
                f"{path} has {self.remote.length} bytes, less than the working set of {working_set}: lower "
                f"--working-set",
                operation="bench",
            )
        if writable:
            self.memory.fill()
            engine.write(self.segment, self.local.address, self.remote.address, working_set)

    def peer_cpu_ns(self) -> int:
        """None: there is no other process."""
        return 0


@contextmanager
def chosen(path: Path, writes: bool, overwrite: bool) -> Iterator[tuple[Path, bool]]:
    """Where to measure, and whether bytes may be written there. A directory gets a file of its own, which
    ends with the measurement, as does a file that was not there before.

    Raises InvalidArgument where bytes of a user would be overwritten.
    """
    if path.is_dir():
        with tempfile.TemporaryDirectory(prefix="moonpool-bench-", dir=path) as folder:
            yield Path(folder, "segment"), True
        return
    if path.exists():
        if writes and not overwrite:
            raise InvalidArgument(
                f"{path} is there, and --direction write or --verify would overwrite it: name a directory, "
                f"or say --overwrite",
                operation="bench",
            )
        yield path, overwrite
        return
    if not path.parent.is_dir():
        raise InvalidArgument(f"there is no directory {path.parent}", operation="bench")
    # Made here and now, so that the file that is removed at the end is ours.
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    try:
        yield path, True
    finally:
        path.unlink(missing_ok=True)
