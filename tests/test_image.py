"""The image's Dockerfile, as far as it can be told without building it: what it copies is there and not
ignored, it runs as no root, and its health check asks the process."""

from __future__ import annotations

import fnmatch
import http.server
import importlib
import json
import os
import re
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("dockerfile_parse")
from dockerfile_parse import DockerfileParser

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "deploy" / "images"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def instructions() -> list[dict[str, Any]]:
    with (FOLDER / "Dockerfile").open("rb") as stream:
        structure: list[dict[str, Any]] = DockerfileParser(fileobj=stream).structure
    return [each for each in structure if each["instruction"] != "COMMENT"]


def of(name: str) -> list[str]:
    return [each["value"] for each in instructions() if each["instruction"] == name]


def copied() -> list[str]:
    """Paths of the context."""
    words = [value.split() for value in of("COPY") if not value.startswith("--from")]
    return [word for line in words for word in line[:-1]]


def test_what_is_copied_is_there_and_not_ignored() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    ignored = [line for line in lines if line and not line.startswith("#")]
    assert ignored[0] == "*"
    assert {line[1:] for line in ignored if line.startswith("!")} == set(copied())
    for path in copied():
        assert (ROOT / path).exists(), path
    patterns = [line for line in ignored[1:] if not line.startswith("!")]
    assert all(pattern.startswith("**/") for pattern in patterns)
    sources = [str(path) for path in (ROOT / "core" / "csrc").rglob("*.cpp")]
    assert not [name for name in sources for pattern in patterns if fnmatch.fnmatch(name, pattern)]


def test_all_that_a_wheel_is_made_of_is_copied() -> None:
    setup = (ROOT / "setup.py").read_text()
    folders = {match.split("/")[0] for match in re.findall(r'"((?:core|disagg_proxy|src)/[\w/*.]+)"', setup)}
    assert folders | {
        os.path.basename(os.readlink(link)) for link in (ROOT / "src/moonpool").iterdir() if link.is_symlink()
    } <= set(copied())
    modules = re.findall(r"^from scripts\.(\w+) import", setup, re.M)
    assert modules
    assert {f"scripts/{name}.py" for name in modules} <= set(copied())


def test_it_runs_as_no_root_and_gets_the_signal_itself() -> None:
    last = instructions()[max(i for i, each in enumerate(instructions()) if each["instruction"] == "FROM") :]
    values = {each["instruction"]: each["value"] for each in last}
    assert values["USER"] == "1000:1000"  # that of the manifests
    assert json.loads(values["ENTRYPOINT"]) == ["moonpool"]  # no shell, which would keep SIGTERM
    assert values["STOPSIGNAL"] == "SIGTERM"
    assert f"moonpool:{PROJECT['version']}" in (FOLDER / "Dockerfile").read_text()
    health = json.loads(values["HEALTHCHECK"].partition("CMD ")[2])
    assert health[1:] == ["/usr/local/bin/livez"]
    assert "deploy/images/livez.py /usr/local/bin/livez" in values["COPY"]
    extras = re.findall(r"\$\{wheel\}\[([\w,]+)\]", " ".join(of("RUN")))
    assert set(extras[0].split(",")) <= PROJECT["optional-dependencies"].keys()


@contextmanager
def page(status: int) -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/livez" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/livez"
        server.shutdown()


def health_of(url: str) -> int:
    command = [sys.executable, "-S", FOLDER / "livez.py"]
    return subprocess.run(command, env={"LIVEZ_URL": url}, timeout=60, check=False).returncode


def test_the_health_check_is_the_page_s_answer() -> None:
    with page(200) as url:
        assert health_of(url) == 0
    assert health_of(url) == 1  # nothing listens
    with page(503) as url:
        assert health_of(url) == 1


def asked_by(command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, file: Path) -> tuple[int, list[str]]:
    """(exit code, pages) of the health check beside a container's first process with that command, where a
    master is the only process on the host, and does not live."""
    monkeypatch.syspath_prepend(str(FOLDER))
    livez = importlib.import_module("livez")
    file.write_bytes(b"".join(word.encode() + b"\0" for word in command))
    asked: list[str] = []
    answers = {"http://127.0.0.1:7701/livez": False}
    monkeypatch.setattr(livez, "lives", lambda url: asked.append(url) or answers.get(url))
    return livez.main(file), asked


def test_the_health_check_asks_the_port_of_what_the_container_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from moonpool.core.config import config

    made = config.load(env={})
    default = {"node": made.node.http, "master": made.master.http, "proxy": made.proxy.listen}
    ports = {name: address.rpartition(":")[2] for name, address in default.items()}
    pages = {name: f"http://127.0.0.1:{port}/livez" for name, port in ports.items()}
    file = tmp_path / "cmdline"
    monkeypatch.delenv("LIVEZ_URL", raising=False)
    for before in ((), ("docker-init", "--")):
        for name, page in pages.items():
            command = (*before, "python3", "/usr/local/moonpool/bin/moonpool", name, "--name", "node")
            assert asked_by(command, monkeypatch, file) == (1, [page])
    everywhere = (1, [pages["node"], pages["master"]])  # the first that answers decides
    for command in (("python3", "moonpool", "up"), ("sh", "-c", "moonpool proxy"), ()):
        assert asked_by(command, monkeypatch, file) == everywhere
    monkeypatch.setenv("LIVEZ_URL", "http://127.0.0.1:9/livez")
    assert asked_by(("moonpool", "proxy"), monkeypatch, file) == (1, ["http://127.0.0.1:9/livez"])


def test_without_the_command_of_the_container_all_ports_are_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    livez = importlib.import_module("livez")
    assert str(livez.COMMAND) == "/proc/1/cmdline"
    assert livez.ports(tmp_path / "none") == list(livez.PORTS.values())


def test_without_a_program_that_builds_it_says_what_to_install(tmp_path: Path) -> None:
    env = {"PATH": str(tmp_path), "MOONPOOL_CACHE": str(tmp_path)}
    command = [sys.executable, "-m", "scripts.image"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "none of docker, podman, buildah is in PATH" in done.stderr


def test_podman_is_asked_for_each_machine_and_for_a_format_with_health_checks(tmp_path: Path) -> None:
    podman = tmp_path / "podman"
    podman.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    podman.chmod(0o755)
    env = {"PATH": str(tmp_path), "MOONPOOL_CACHE": str(tmp_path)}
    command = [sys.executable, "-m", "scripts.image", "x86_64", "aarch64", "--base", "mine"]
    subprocess.run(command, cwd=ROOT, env=env, check=True)
    version = PROJECT["version"]
    assert (tmp_path / "asked").read_text().splitlines() == [
        f"build --platform linux/{platform} --tag moonpool:{version}-{machine} --format docker "
        f"--build-arg BASE=mine -f {FOLDER / 'Dockerfile'} {ROOT}"
        for machine, platform in (("x86_64", "amd64"), ("aarch64", "arm64"))
    ]
