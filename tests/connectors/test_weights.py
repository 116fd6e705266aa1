"""Which weights a folder holds: equal files are equal, and a change in any sampled place shows."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from moonpool.connectors.weights import SAMPLE_BYTES, SAMPLES, weights_digest
from moonpool.core.errors import ConfigError

SIZE = 1 << 20


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    header = b'{"x": 1}'
    body = len(header).to_bytes(8, "little") + header
    (folder / "model.safetensors").write_bytes(body + bytes(SIZE - len(body)))
    return folder


def test_a_copy_is_the_same(model: Path, tmp_path: Path) -> None:
    other = shutil.copytree(model, tmp_path / "other")
    (other / "config.json").write_text("{ }")  # the config has its own place in the fingerprint
    (other / ".cache").mkdir()
    (other / ".cache" / "part.safetensors").write_bytes(b"x")
    assert weights_digest(other) == weights_digest(model)


@pytest.mark.parametrize(
    "place", [0, 9, 100, SIZE - 1, (SIZE - SAMPLE_BYTES) * 31 // (SAMPLES - 1) + 17], ids=str
)
def test_a_change_shows(model: Path, place: int) -> None:
    before = weights_digest(model)
    with open(model / "model.safetensors", "r+b") as file:
        file.seek(place)
        old = file.read(1)[0]
        file.seek(place)
        file.write(bytes([old ^ 1]))
    assert weights_digest(model) != before


def test_names_and_sizes_count(model: Path) -> None:
    before = weights_digest(model)
    with open(model / "model.safetensors", "ab") as file:
        file.write(b"\0")
    longer = weights_digest(model)
    (model / "model.safetensors").rename(model / "other.safetensors")
    assert len({before, longer, weights_digest(model)}) == 3


def test_one_file_and_small_files(tmp_path: Path) -> None:
    for size in (0, 1, 7, 8, SAMPLE_BYTES, SAMPLE_BYTES + 1):
        file = tmp_path / f"{size}.gguf"
        file.write_bytes(b"a" * size)
        assert len(weights_digest(file)) == 64


def test_no_weights(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no weight file"):
        weights_digest(tmp_path)
