"""Which weights a folder holds: equal files are equal, and any byte that differs shows. Until all bytes were
read nothing is said."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from moonpool.connectors import weights
from moonpool.connectors.identity import weights_revision
from moonpool.connectors.weights import Pending, wait_for, weights_digest
from moonpool.core.errors import ConfigError

SIZE = 1 << 20
DEADLINE_S = 60.0


def write(path: Path, size: int = SIZE) -> None:
    """A weight file of zeros, which takes no space."""
    header = b'{"x": 1}'
    with open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(size)


def change(path: Path, place: int, size: int = 1) -> None:
    """Until the file says so: the clock of files of older kernels stands still for up to 10 ms."""
    before_ns = os.stat(path).st_ctime_ns
    while os.stat(path).st_ctime_ns == before_ns:
        with open(path, "r+b") as file:
            file.seek(place)
            file.write(b"\1" * size)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    write(folder / "model.safetensors")
    return folder


def test_a_copy_is_the_same(model: Path, tmp_path: Path) -> None:
    other = shutil.copytree(model, tmp_path / "other")
    (other / "config.json").write_text("{ }")  # the config has its own place in the fingerprint
    (other / ".cache").mkdir()
    (other / ".cache" / "part.safetensors").write_bytes(b"x")
    assert weights_digest(other) == weights_digest(model)


@pytest.mark.parametrize("place", [0, 9, 100, SIZE // 2 + 4097, SIZE - 1], ids=str)
def test_one_byte_shows(model: Path, place: int) -> None:
    before = weights_digest(model)
    change(model / "model.safetensors", place)
    assert weights_digest(model) != before


@pytest.mark.parametrize(
    ("size", "tensor"),
    [(64 << 20, 512 << 10), pytest.param(3900 << 20, 8 << 20, marks=pytest.mark.heavy)],
    ids=["64 MiB", "3.9 GB"],
)
def test_one_tensor_shows(model: Path, size: int, tensor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model whose other tensors are what they were: a merged edit, a trained norm."""
    monkeypatch.setattr(weights, "SMALL_BYTES", size)
    shard = model / "model.safetensors"
    write(shard, size)
    before = weights_digest(model)
    change(shard, size // 2 - tensor + 1000, tensor)
    assert weights_digest(model) != before


def test_names_and_sizes_count(model: Path) -> None:
    before = weights_digest(model)
    with open(model / "model.safetensors", "ab") as file:
        file.write(b"\0")
    longer = weights_digest(model)
    (model / "model.safetensors").rename(model / "other.safetensors")
    assert len({before, longer, weights_digest(model)}) == 3


def test_one_file_and_small_files(tmp_path: Path) -> None:
    for size in (0, 1, 7, 8, 4096, 4097):
        file = tmp_path / f"{size}.gguf"
        file.write_bytes(b"a" * size)
        assert len(weights_digest(file)) == 64


def test_no_weights(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no weight file"):
        weights_digest(tmp_path)
    (tmp_path / "model.safetensors").symlink_to("nowhere")
    with pytest.raises(ConfigError, match="a weight file cannot be read"):
        weights_digest(tmp_path)


def test_large_files_are_read_in_the_background(model: Path, held: threading.Event) -> None:
    with pytest.raises(Pending, match=r"are being read to tell them from others \(0.00105 GB, about"):
        weights_digest(model)
    with pytest.raises(Pending) as caught:
        weights_revision("m", str(model), None)
    held.set()
    assert caught.value.reading.over.wait(DEADLINE_S)
    assert weights_revision("m", str(model), None) == f"files {weights_digest(model)}"


def test_a_start_that_waits_says_so(model: Path, held: threading.Event) -> None:
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        held.set()

    digest = wait_for(lambda: weights_digest(model), say)
    assert digest == weights_digest(model)
    assert "are being read" in said[0]


def test_changed_after_the_engine_began(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine may have read what was there before."""
    shard = model / "model.safetensors"
    began_ns = os.stat(shard).st_ctime_ns
    monkeypatch.setattr(weights, "started_ns", lambda: began_ns)
    weights_digest(model)
    monkeypatch.setattr(weights, "started_ns", lambda: began_ns - 10**9)
    with pytest.raises(ConfigError, match="was changed after this engine was started"):
        weights_digest(model)


def test_changed_while_they_were_read(model: Path, held: threading.Event) -> None:
    with pytest.raises(Pending) as caught:
        weights_digest(model)
    change(model / "model.safetensors", 5000)
    held.set()
    assert caught.value.reading.over.wait(DEADLINE_S)
    assert "changed while it was read" in caught.value.reading.trouble


def test_when_a_process_began(tmp_path: Path) -> None:
    """On the clock of files: between one that was written before it and one that it writes."""
    before, after = tmp_path / "before", tmp_path / "after"
    before.write_bytes(b"")
    code = (
        "import sys, pathlib\n"
        "from moonpool.connectors.weights import started_ns\n"
        "pathlib.Path(sys.argv[1]).write_bytes(b'')\n"
        "print(started_ns())"
    )
    told = subprocess.run(
        [sys.executable, "-c", code, after], capture_output=True, timeout=DEADLINE_S, check=True
    )
    began_ns = int(told.stdout)
    slack_ns = weights.CLOCK_NS
    assert os.stat(before).st_ctime_ns - slack_ns < began_ns < os.stat(after).st_ctime_ns + slack_ns
