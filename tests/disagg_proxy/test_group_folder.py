"""The folder of a group of processes."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest

from moonpool.disagg_proxy.group_folder import hold, new_folder

_MAKES = """
import sys
from moonpool.disagg_proxy.group_folder import new_folder
with new_folder() as path:
    print(path, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def own_temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def test_the_last_to_end_removes_it() -> None:
    with contextlib.ExitStack() as second:
        with new_folder() as path:
            second.enter_context(hold(path))
            Path(path, "socket").touch()
        assert Path(path, "socket").exists()
    assert not Path(path).exists()
    with pytest.raises(FileNotFoundError), hold(path):
        pass


def test_a_start_removes_what_those_who_were_killed_have_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (tmp_path / "moonpool-group-alien").symlink_to("/", target_is_directory=True)
    with subprocess.Popen(
        [sys.executable, "-c", _MAKES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        left = Path(other.stdout.readline().strip())
        with new_folder():
            assert left.exists()  # it lives
        other.kill()
        other.wait()
    assert left.exists()
    with new_folder() as mine:
        assert {each.name for each in tmp_path.iterdir()} == {Path(mine).name, "moonpool-group-alien"}
