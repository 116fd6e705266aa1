"""The script that builds wheels: what it is asked for, what it refuses, the compiler that it writes."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def wheels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setenv("MOONPOOL_CACHE", str(tmp_path / "cache"))
    return importlib.import_module("scripts.wheels")


@pytest.fixture
def progress(wheels: ModuleType, tmp_path: Path) -> object:
    return importlib.import_module("scripts.progress").Progress(tmp_path / "logs" / "log")


def program(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_help_says_what_it_builds() -> None:
    command = [sys.executable, "-m", "scripts.wheels", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    for word in ("--python", "--machine", "x86_64", "aarch64", "manylinux"):
        assert word in done.stdout


def test_an_interpreter_that_is_none_is_named(
    wheels: ModuleType, progress: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = program(tmp_path / "pypy", """echo '["pypy", 3, 11, "/"]'""")
    for path, told in (
        (tmp_path / "none", "is no interpreter that runs"),
        (other, "is pypy; wheels are built"),
    ):
        with pytest.raises(SystemExit):
            wheels._interpreter(progress, str(path))
        assert f"--python {path} {told}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "said", "passes"), [(0, "2_34", True), (0, "2_39", False), (1, "2_34", False)]
)
def test_a_wheel_that_needs_a_newer_glibc_than_its_tag_is_refused(
    wheels: ModuleType, progress: object, tmp_path: Path, code: int, said: str, passes: bool
) -> None:
    tag = wheels.tag("aarch64")
    assert tag == "manylinux_2_34_aarch64"
    tool = program(tmp_path / "env/bin/auditwheel", f'echo "\\"manylinux_{said}_aarch64\\""; exit {code}')
    wheel = tmp_path / f"moonpool-0.1.0-cp311-cp311-{tag}.whl"
    environment = wheels.Environment(tool.parent.parent)
    if passes:
        wheels.audit(progress, environment, wheel)
    else:
        with pytest.raises(SystemExit):
            wheels.audit(progress, environment, wheel)


def test_the_compiler_takes_libstdcxx_of_gxx_and_hides_it(
    wheels: ModuleType, progress: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Zig and a g++ that say what they are asked; flags that differ make another `--version`, by which
    setup.py tells objects apart."""
    compiler = importlib.import_module("scripts.cross_compiler")
    monkeypatch.setattr(compiler, "ROOT", tmp_path)
    environment = wheels.Environment(tmp_path / "env")
    program(environment.packages / "ziglang" / "zig", 'echo "$@"')
    gxx = """case $1 in
    -print-file-name=*) echo "/usr/gcc/${1#*=}" ;;
    *) printf '#include <...> search starts here:\\n /usr/gcc/c++/12\\n /usr/include\\n' ;;
    esac"""
    program(tmp_path / "bin" / "aarch64-linux-gnu-g++", gxx)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    made = compiler.write(progress, environment, "aarch64")

    def told(*words: str) -> str:
        return subprocess.run([made, *words], capture_output=True, text=True, check=True).stdout

    compiled = told("-O3", "-c", "a.cpp")
    assert "-target aarch64-linux-gnu.2.34" in compiled
    assert "-nostdinc++ -I/usr/gcc/c++/12 " in compiled
    assert "-I/usr/include " not in compiled
    linked = told("-shared", "a.o")
    assert linked.rstrip().endswith("arc4random.o /usr/gcc/libstdc++.a /usr/gcc/libgcc_s.so.1")
    script = next(word for word in linked.split() if word.startswith("-Wl,--version-script="))
    assert "local: _*;" in Path(script.partition("script=")[2]).read_text()
    before = told("--version")
    monkeypatch.setattr(compiler, "GLIBC", "2.35")
    compiler.write(progress, environment, "aarch64")
    assert told("--version") != before
