"""Installed on purpose, small, and never beside the original."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from mooncake._guard import conflict
from setuptools import find_packages

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "connectors" / "mooncake"


@pytest.fixture(params=["mooncake-transfer-engine", "mooncake_transfer_engine_non_cuda"])
def original(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder where something says that it is the original."""
    info = tmp_path / "site" / f"{request.param.replace('-', '_')}-0.3.13.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {request.param}\nVersion: 0.3.13\n")
    return info.parent


def run(*words: object, path: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(path), os.environ["PYTHONPATH"]])}
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_neither_build_nor_import_beside_the_original(original: Path, tmp_path: Path) -> None:
    sentence = conflict([str(original)])
    assert "pip uninstall" in sentence
    assert original.name == "site"
    build = run("setup.py", "--name", path=original, cwd=PACKAGE)
    assert build.returncode == 1
    assert build.stderr.strip() == sentence
    imported = run("-c", "import mooncake.store", path=original, cwd=tmp_path)
    assert imported.returncode == 1
    assert imported.stderr.strip().splitlines()[-1] == f"ImportError: {sentence}"


@pytest.mark.parametrize(
    ("variable", "folder"),
    [
        ("VIRTUAL_ENV", "lib/python3.99/site-packages"),
        ("PYTHONUSERBASE", f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"),
    ],
)
def test_a_build_under_another_interpreter(
    original: Path, tmp_path: Path, variable: str, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As uv does it: the environment is named and is not the interpreter's own."""
    place = tmp_path / "environment" / folder
    place.parent.mkdir(parents=True)
    original.rename(place)
    monkeypatch.setenv(variable, str(tmp_path / "environment"))
    build = run("setup.py", "--name", path=tmp_path, cwd=PACKAGE)
    assert build.returncode == 1
    assert "pip uninstall" in build.stderr


def test_no_conflict_without_it(tmp_path: Path) -> None:
    assert conflict([str(tmp_path)]) == ""
    assert conflict() == ""


def test_moonpool_itself_does_not_bring_it() -> None:
    assert not [name for name in find_packages(str(ROOT / "src")) if "mooncake" in name]


@pytest.mark.slow
def test_what_pip_installs(tmp_path: Path) -> None:
    source = tmp_path / "source"
    subprocess.run(["cp", "-r", str(PACKAGE), str(source)], check=True)
    site = tmp_path / "site"
    words = ("-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target", site, source)
    installed = run(*words, path=tmp_path, cwd=tmp_path)
    assert installed.returncode == 0, installed.stdout + installed.stderr
    assert not (source / "build").exists()
    assert {path.name for path in site.iterdir()} == {"mooncake", "moonpool_mooncake-0.1.0.dist-info", "bin"}
    assert {path.name for path in (site / "bin").iterdir()} == {
        "mc_store_rest_server",
        "mooncake_client",
        "mooncake_http_metadata_server",
        "mooncake_master",
        "transfer_engine_bench",
        "transfer_engine_topology_dump",
    }
    assert {path.name for path in (site / "mooncake").glob("*.py")} == {
        path.name for path in (PACKAGE / "mooncake").glob("*.py")
    }
    shown = run("-c", "import mooncake.engine, mooncake; print(mooncake.__file__)", path=site, cwd=tmp_path)
    assert shown.stdout.strip() == str(site / "mooncake" / "__init__.py"), shown.stderr
    again = run(site / "bin" / "mooncake_master", "--help", path=site, cwd=tmp_path)
    assert "--rpc_port" in again.stdout, again.stderr


def test_importing_it_brings_no_engine_and_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys, mooncake.engine, mooncake.store;"
        "print(sorted({'torch', 'vllm', 'sglang', 'aiohttp', 'setuptools'} & sys.modules.keys()))"
    )
    shown = run("-c", code, path=tmp_path, cwd=tmp_path)
    assert shown.stdout.strip() == "[]", shown.stderr
