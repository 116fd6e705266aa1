"""The systemd units: their commands and options exist, and systemd knows each part of their sandbox."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer.main

from moonpool.cli.entry import make_app
from moonpool.core.config import config
from moonpool.disagg_proxy.from_config import proxy_settings

ROOT = Path(__file__).parent.parent
UNITS = sorted((ROOT / "deploy" / "systemd").glob("*.service"))
ANALYZE = shutil.which("systemd-analyze")
EXPOSURE_MAX = 20  # tenths of what `systemd-analyze security` computes, of 100; unconfined services have 96

needs_systemd = pytest.mark.skipif(ANALYZE is None, reason="no systemd-analyze: apt-get install systemd")


def settings(unit: Path) -> dict[str, list[str]]:
    """Of a unit, by name: each of its values."""
    found: dict[str, list[str]] = {}
    for name, value in re.findall(r"^(\w+)=(.*)$", unit.read_text(), re.M):
        found.setdefault(name, []).append(value)
    return found


def sandbox(unit: Path) -> str:
    return unit.read_text().partition("# Sandbox:")[2]


def test_there_is_a_unit_for_each_service() -> None:
    assert [unit.stem for unit in UNITS] == ["moonpool-master", "moonpool-node", "moonpool-proxy"]
    assert len({sandbox(unit) for unit in UNITS}) == 1
    assert "NoNewPrivileges=yes" in sandbox(UNITS[0])


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_the_command_and_its_options_exist(unit: Path) -> None:
    (line,) = settings(unit)["ExecStart"]
    program, name, *words = shlex.split(line)
    assert Path(program).name == "moonpool"
    assert unit.stem == f"moonpool-{name}"
    app: Any = typer.main.get_command(make_app())
    command = app.commands[name]
    known = {option for each in command.get_params(typer.Context(command)) for option in each.opts}
    assert {word for word in words if word.startswith("--")} <= known
    assert (
        "MOONPOOL_RUNTIME_DIR=/run/" + settings(unit)["RuntimeDirectory"][0] in settings(unit)["Environment"]
    )


def test_the_time_to_stop_is_longer_than_what_a_stop_takes_by_default() -> None:
    made = config.load(env={})
    stop_s = {
        "node": made.node.stop_delay_s + made.node.ssd_stop_s,
        "master": made.master.stop_delay_s,
        "proxy": made.proxy.deadlines.stop_delay_s + made.proxy.deadlines.drain_s,
    }
    for unit in UNITS:
        (given_s,) = settings(unit)["TimeoutStopSec"]
        assert int(given_s) > stop_s[unit.stem.removeprefix("moonpool-")] + 10


def test_the_configuration_in_the_documentation_serves_all_three(runtime: Path, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "cluster.md").read_text().partition("## systemd")[2]
    (text,) = re.findall(r"^```toml\n(.*?)^```", page, re.M | re.S)
    assert {"cluster", "node", "master", "proxy"} == tomllib.loads(text).keys()
    for name, secret in (("token", "0123456789abcdef"), ("api-keys", "a key")):
        file = tmp_path / name
        file.touch(0o600)
        file.write_text(secret)
        text = text.replace(f"/etc/moonpool/{name}", str(file))
    file = tmp_path / "moonpool.toml"
    file.write_text(text)
    made = config.load(file, env={})
    assert proxy_settings(made).engines
    assert made.node.listen == "0.0.0.0:7710"


@needs_systemd
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_systemd_takes_it_and_finds_little_exposed(unit: Path, tmp_path: Path) -> None:
    assert ANALYZE is not None
    there = tmp_path / unit.name  # with a program that is there
    there.write_text(re.sub(r"^ExecStart=\S+", f"ExecStart={sys.executable}", unit.read_text(), flags=re.M))
    checked = subprocess.run([ANALYZE, "verify", there], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    assert str(there) not in checked.stderr  # of a name or a value that it does not know
    judged = subprocess.run(
        [ANALYZE, "security", "--offline=true", f"--threshold={EXPOSURE_MAX}", there],
        capture_output=True,
        text=True,
        check=False,
    )
    assert judged.returncode == 0, judged.stdout[-200:]
