"""Files as segments of ``TransferEngine``: opened by path, read and written by the calls that peers are."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from moonpool import (
    AsyncTransferEngine,
    Batch,
    InvalidArgument,
    Priority,
    Slice,
    SliceState,
    TransferEngine,
    TransferError,
)
from moonpool.core.errors import Forked

from .forked import run_child
from .store_bed import TOKEN

MIB = 1 << 20


@pytest.fixture
def engine() -> Iterator[TransferEngine]:
    with TransferEngine(token=TOKEN) as engine:
        yield engine


def test_a_file_is_read_and_written_as_a_peer_is(engine: TransferEngine, tmp_path: Path) -> None:
    path = tmp_path / "data"
    data = random.Random(1).randbytes(3 * MIB + 5)
    path.write_bytes(data)
    here = engine.allocate(4 * MIB)
    file = engine.open(f"file://{path}")
    assert (file.name, file.address, file.transport) == (str(path), f"file://{path}", "file")
    assert [(r.address, r.length, r.kind) for r in file.regions] == [(0, len(data), "file")]
    assert engine.read(file, here, file.at(0), len(data)) == len(data)
    assert here.view[: len(data)] == data
    here.view[:10] = b"0123456789"
    assert engine.write(file, here, file.at(4091), 10) == 10
    assert path.read_bytes() == data[:4091] + b"0123456789" + data[4101:]
    many = Batch("read", file, [here.at(n * 100) for n in range(50)], [n * 7 for n in range(50)], 100)
    transfer = engine.submit(many, priority=Priority.BACKGROUND, deadline_s=10)
    assert transfer.result(10) == 5000
    now = path.read_bytes()
    assert all(here.view[n * 100 : n * 100 + 100] == now[n * 7 : n * 7 + 100] for n in range(50))
    assert engine.metrics()["file_read_slices_total"] == 51
    file.close()
    with pytest.raises(InvalidArgument):
        engine.read(file, here, 0, 1)


def test_a_file_and_a_peer_in_one_transfer(engine: TransferEngine, tmp_path: Path) -> None:
    with TransferEngine("other", token=TOKEN) as other:
        there = other.allocate(MIB)
        there.view[:4] = b"peer"
        here = engine.allocate(MIB)
        here.view[:4] = b"disk"
        file = engine.open_file(tmp_path / "new", size=MIB)
        peer = engine.open(other.addresses[0])
        slices = [Slice("write", file, here, 0, 8192), Slice("read", peer, here.at(8192), peer.at(0), 4)]
        assert engine.transfer(slices) == 8196
        assert here.view[8192:8196] == b"peer"
    assert (tmp_path / "new").stat().st_size == MIB
    assert (tmp_path / "new").read_bytes()[:5] == b"disk\0"


def test_after_fork_the_child_is_refused_and_the_parent_goes_on(
    engine: TransferEngine, tmp_path: Path
) -> None:
    """Also with a transfer under way, whose io_uring the child has mapped."""
    path = tmp_path / "data"
    data = random.Random(2).randbytes(8 * MIB)
    path.write_bytes(data)
    here = engine.allocate(8 * MIB)
    file = engine.open_file(path)
    assert engine.read(file, here, 0, MIB) == MIB
    transfer = engine.submit(Batch("read", file, [here.at(0)], [0], 8 * MIB))

    def child() -> None:
        for call in (
            lambda: engine.read(file, here, 0, 10),
            lambda: engine.open_file(path),
            lambda: transfer.result(60),
        ):
            with pytest.raises(Forked):
                call()
        with TransferEngine(token=TOKEN) as own:
            room = own.allocate(MIB)
            assert own.read(own.open_file(path), room, MIB, MIB) == MIB
            assert room.view[:MIB] == data[MIB : 2 * MIB]
        engine.close()

    assert run_child(child) == 0
    assert transfer.result(60) == 8 * MIB
    assert here.view[: 8 * MIB] == data
    assert engine.read(file, here, 0, MIB) == MIB


def test_errors_name_the_file_and_the_reason(engine: TransferEngine, tmp_path: Path) -> None:
    here = engine.allocate(MIB)
    with pytest.raises(InvalidArgument, match="give a size to make it"):
        engine.open_file(tmp_path / "none")
    for path in (tmp_path, "", "a\0b", os.fsdecode(b"\xff")):
        with pytest.raises(InvalidArgument):
            engine.open_file(path)
    with pytest.raises(InvalidArgument, match="no file has -1 bytes"):
        engine.open_file(tmp_path / "none", size=-1)
    file = engine.open_file(tmp_path / "data", size=10000)
    with pytest.raises(TransferError, match="does not lie in the file, which has 10000 bytes") as caught:
        engine.write(file, [here.at(0), here.at(4096)], [0, 9000], [4096, 4096])
    assert caught.value.path == f"file {tmp_path / 'data'}"
    assert list(caught.value.states) == [SliceState.DONE, SliceState.FAILED]
    with pytest.raises(InvalidArgument, match="takes no message"):
        engine.write(file, here, 0, 8, notify=b"there")
    with pytest.raises(InvalidArgument, match="takes no message"):
        engine.notify(file, b"there")
    only_read = engine.open_file(tmp_path / "data", writable=False)
    assert engine.read(only_read, here, 0, 10000) == 10000
    with pytest.raises(TransferError, match="cannot be written: it was opened for reading only"):
        engine.write(only_read, here, 0, 8)
    os.truncate(tmp_path / "data", 100)
    with pytest.raises(TransferError, match="cut short, to 100 bytes"):
        engine.read(file, here, 0, 8192)
    file.refresh()
    assert file.regions[0].length == 100


async def _copy(path: Path) -> bytes:
    async with AsyncTransferEngine(token=TOKEN) as engine:
        here = await engine.allocate(MIB)
        here.view[:5] = b"async"
        file = await engine.open_file(path, size=MIB)
        assert await engine.write(file, here, file.at(0), MIB) == MIB
        here.view[:5] = bytes(5)
        await asyncio.gather(*(engine.read(file, here.at(n * 4096), n * 4096, 4096) for n in range(64)))
        return bytes(here.view[:5])


def test_asyncio(tmp_path: Path) -> None:
    assert asyncio.run(_copy(tmp_path / "data")) == b"async"
