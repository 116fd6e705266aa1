"""What files hold: every byte counts, and nothing is believed of a file that changed."""

from __future__ import annotations

import fcntl
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from moonpool.connectors import adapters, files
from moonpool.connectors.files import PIECE_BYTES, SETTLED_NS, File, Identity, Kept, Reading
from moonpool.core.errors import ConfigError

DEADLINE_S = 60.0


def read(path: Path, kept: Kept) -> Reading:
    reading = Reading([File(path.name, path, Identity.of(path))], kept)
    assert reading.over.wait(DEADLINE_S)
    return reading


def command(cache: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "moonpool.connectors.adapters", folder],
        env={**os.environ, "MOONPOOL_CACHE": str(cache)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    return Kept(tmp_path / "kept")


@pytest.fixture
def aged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of this test count as written long ago."""
    monkeypatch.setattr(files, "SETTLED_NS", -SETTLED_NS)


def test_vectors(tmp_path: Path, kept: Kept) -> None:
    """Those of docs/keys.md."""
    for content, digest in (
        (b"", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"),
        (b"abc", "4f8b42c22dd3729b519ba6f68d2da7cc5b2d606d05daed5ad5128cc03e6c6358"),
        (bytes(PIECE_BYTES + 1), "9463cfd27faaf44cdf117dd645b6e53aecad93c7d54d779112fdc67c990f5197"),
    ):
        path = tmp_path / f"{len(content)}"
        path.write_bytes(content)
        assert read(path, kept).digests[0].hex() == digest
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_bytes(b"{}")
    (folder / "adapter_model.safetensors").write_bytes(b"abc")
    said = "36036531360daf158c2fef0ed61065b0f17c30022c1dbc423e50357c990d4d96"
    assert adapters.adapter_digest(folder) == said
    told = command(tmp_path, folder)
    assert (told.returncode, told.stdout) == (0, f"{said} {folder}\n")
    wrong = command(tmp_path, tmp_path)
    assert wrong.returncode == 2
    assert "cannot tell which bytes the adapter" in wrong.stderr


def test_every_byte_counts(tmp_path: Path, kept: Kept, rng: random.Random) -> None:
    path = tmp_path / "file"
    size = 2 * PIECE_BYTES + 12345
    with open(path, "wb") as file:
        file.truncate(size)
    seen = {read(path, kept).digests}
    places = {0, PIECE_BYTES - 1, PIECE_BYTES, size - 1, rng.randrange(size)}
    for place in places:
        with open(path, "r+b") as file:
            file.seek(place)
            file.write(b"\1")
        seen.add(read(path, kept).digests)
    assert len(seen) == len(places) + 1


@pytest.mark.usefixtures("aged")
def test_a_file_is_read_once(tmp_path: Path, kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"a" * 1000)
    first = read(path, kept)
    monkeypatch.setattr(Reading, "_read", lambda reading: pytest.fail("it was read again"))
    again = read(path, kept)
    assert again.digests == first.digests
    assert (first.bytes_read, again.bytes_read) == (1000, 0)


def _of_another(entry: Path) -> None:
    said = json.loads(entry.read_bytes())
    said["identity"][1] += 1
    entry.write_text(json.dumps(said))


def _of_other_bytes(entry: Path) -> None:
    said = json.loads(entry.read_bytes())
    said["sha256"] = "00" * 32
    entry.write_text(json.dumps(said))


@pytest.mark.usefixtures("aged")
@pytest.mark.parametrize(
    "spoil",
    [
        lambda entry: entry.write_bytes(entry.read_bytes()[:-9]),
        lambda entry: entry.write_bytes(b"\xff\x00"),
        lambda entry: entry.write_bytes(b"[]"),
        lambda entry: entry.unlink(),
        _of_another,
        _of_other_bytes,
    ],
    ids=["short", "noise", "no object", "gone", "another file's", "other bytes"],
)
def test_what_is_broken_is_made_anew(tmp_path: Path, kept: Kept, spoil: Callable[[Path], None]) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"a" * 1000)
    first = read(path, kept)
    (entry,) = (each for each in (tmp_path / "kept").iterdir() if not each.name.startswith("lock"))
    spoil(entry)
    again = read(path, kept)
    assert again.digests == first.digests
    assert again.bytes_read == 1000
    assert read(path, kept).bytes_read == 0


def test_a_file_of_a_moment_ago_is_not_kept(tmp_path: Path, kept: Kept) -> None:
    """It could be changed again and say the same time."""
    path = tmp_path / "file"
    path.write_bytes(b"a")
    os.utime(path, ns=(0, time.time_ns() + 10**9 * 3600))  # also where another host's clock is ahead
    assert read(path, kept).digests
    assert read(path, kept).bytes_read == 1


def test_a_file_that_changes_while_it_is_read(tmp_path: Path, kept: Kept) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"a" * 1000)
    before = File("file", path, Identity.of(path))
    draft = tmp_path / "draft"
    draft.write_bytes(b"b" * 1000)
    os.utime(draft, ns=(before.identity.mtime_ns, before.identity.mtime_ns))
    draft.replace(path)
    reading = Reading([before], kept)
    assert reading.over.wait(DEADLINE_S)
    assert not reading.digests
    assert "changed while it was read" in reading.trouble
    path.unlink()
    gone = Reading([before], kept)
    assert gone.over.wait(DEADLINE_S)
    assert gone.trouble


@pytest.mark.parametrize("wrong", ["a file", "others may write"])
def test_without_a_folder_to_keep_them(tmp_path: Path, kept: Kept, wrong: str) -> None:
    place, path = tmp_path / "kept", tmp_path / "file"
    path.write_bytes(b"a" * 1000)
    if wrong == "a file":
        place.write_bytes(b"")
    else:
        place.mkdir()
        place.chmod(0o777)
    assert read(path, kept).digests
    assert read(path, kept).bytes_read == 1000
    assert place.is_file() or not list(place.iterdir())


@pytest.mark.usefixtures("aged")
def test_a_process_goes_on_where_one_that_was_killed_stopped(
    tmp_path: Path, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several files those that were read are kept, whatever becomes of the others."""
    monkeypatch.setattr(files, "_threads", lambda: 1)
    paths = [tmp_path / name for name in ("first", "second", "third")]
    for path in paths:
        path.write_bytes(path.name.encode() * 1000)
    several = [File(path.name, path, Identity.of(path)) for path in paths]
    paths[2].unlink()
    ended = Reading(several, kept)
    assert ended.over.wait(DEADLINE_S)
    assert not ended.digests
    assert read(paths[0], kept).bytes_read == read(paths[1], kept).bytes_read == 0


@pytest.mark.usefixtures("aged")
def test_one_process_reads_and_the_others_wait(tmp_path: Path, kept: Kept) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"a" * 1000)
    one = File("file", path, Identity.of(path))
    with kept.turn([one], time.monotonic() + DEADLINE_S):
        waits = Reading([one], Kept(tmp_path / "kept"))
        assert not waits.over.wait(0.05)
        kept.keep(one.identity, b"d" * 32)  # what the first one found
    assert waits.over.wait(DEADLINE_S)
    assert waits.digests == (b"d" * 32,)
    assert waits.bytes_read == 0


def test_a_wait_for_another_process_has_a_deadline(tmp_path: Path, kept: Kept) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"a")
    one = File("file", path, Identity.of(path))
    with kept.turn([one], time.monotonic() + DEADLINE_S):
        entered = threading.Event()

        def second() -> None:
            with kept.turn([one], time.monotonic()):
                entered.set()

        threading.Thread(target=second).start()
        assert entered.wait(DEADLINE_S)
        (lock,) = (tmp_path / "kept").iterdir()
        with open(lock) as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_what_is_kept_is_bounded(tmp_path: Path, kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "ENTRIES_MAX", 20)
    for number in range(60):
        kept.keep(Identity(1, number, 3, 4, 5), b"d" * 32)
    assert len(list((tmp_path / "kept").iterdir())) <= 20
    assert kept.find(Identity(1, 59, 3, 4, 5)) == b"d" * 32


def test_no_adapter(tmp_path: Path) -> None:
    for name in (None, "adapter_config.json"):
        if name:
            (tmp_path / name).write_bytes(b"{}")
        with pytest.raises(ConfigError, match="and weights beside it is needed"):
            adapters.adapter_digest(tmp_path)
    with pytest.raises(ConfigError, match="No such file"):
        adapters.adapter_digest(tmp_path / "none")
