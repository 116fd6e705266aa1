"""The signature of a release: what a named key has signed is accepted, and nothing else."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs openssh-client")


def key(folder: Path, name: str) -> Path:
    path = folder / name
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(path)]
    subprocess.run(command, check=True, timeout=60)
    return path


@pytest.fixture
def sign(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("scripts.sign")


@pytest.fixture
def dist(tmp_path: Path) -> Path:
    folder = tmp_path / "dist"
    folder.mkdir()
    (folder / "moonpool-0.1.0.tar.gz").write_bytes(b"source")
    (folder / "moonpool-0.1.0.whl").write_bytes(b"wheel")
    return folder


@pytest.fixture
def signers(tmp_path: Path) -> Path:
    public = key(tmp_path, "release").with_suffix(".pub").read_text()
    file = tmp_path / "allowed_signers"
    file.write_text(f"release@example.org {public}")
    return file


def test_what_was_signed_is_accepted_by_us_and_by_the_usual_tools(
    sign: ModuleType, dist: Path, signers: Path, tmp_path: Path
) -> None:
    assert sign.sign(dist, tmp_path / "release") == 2
    assert sign.check(dist, signers) == ("release@example.org", 2)
    assert sign.sign(dist, tmp_path / "release") == 2  # once more, over the first
    assert sign.check(dist, signers) == ("release@example.org", 2)
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=dist, check=True, timeout=60)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda dist: (dist / "moonpool-0.1.0.whl").write_bytes(b"other"), "has other bytes than the signed"),
        (lambda dist: (dist / "moonpool-0.1.0.whl").unlink(), "lacks moonpool-0.1.0.whl"),
        (lambda dist: (dist / "more.whl").write_bytes(b"more"), "more.whl in .* is not signed"),
        (lambda dist: (dist / "SHA256SUMS").write_text(""), "is no signature of"),
        (lambda dist: (dist / "SHA256SUMS.sig").unlink(), "SHA256SUMS.sig is missing"),
        (lambda dist: (dist / "SHA256SUMS.sig").write_text("x"), "is not of a key in"),
    ],
)
def test_what_is_not_as_signed_is_refused(
    sign: ModuleType, dist: Path, signers: Path, tmp_path: Path, change: object, why: str
) -> None:
    sign.sign(dist, tmp_path / "release")
    assert callable(change)
    change(dist)
    with pytest.raises(sign.Refused, match=why):
        sign.check(dist, signers)


def test_another_key_or_purpose_is_refused(
    sign: ModuleType, dist: Path, signers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sign.sign(dist, key(tmp_path, "stranger"))
    with pytest.raises(sign.Refused, match="is not of a key in"):
        sign.check(dist, signers)
    with monkeypatch.context() as patch:
        patch.setattr(sign, "NAMESPACE", "git")
        sign.sign(dist, tmp_path / "release")
    with pytest.raises(sign.Refused, match="is no signature of"):
        sign.check(dist, signers)


def test_the_command_says_what_is_wrong(dist: Path, tmp_path: Path) -> None:
    def run(*arguments: str, **environment: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "scripts.sign", *arguments]
        ended = subprocess.run(
            command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=60
        )
        return ended.returncode, ended.stderr

    assert run("--key", str(tmp_path / "none"), str(dist))[0] == 1
    empty = tmp_path / "empty"
    empty.mkdir()
    code, said = run("--key", str(tmp_path / "none"), str(empty))
    assert (code, said) == (1, f"error: {empty} has no files to sign; `make wheel` makes them\n")
    code, said = run("--key", str(tmp_path / "none"), str(dist), PATH="/nowhere")
    assert (code, said) == (1, "error: there is no ssh-keygen; install the package openssh-client\n")
