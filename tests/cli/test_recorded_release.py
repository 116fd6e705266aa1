"""What users wrote for the release of November 2026 means the same: files, variables and command lines.

recorded/ was written by the code of that release. Nothing in it is changed, whatever is added.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from moonpool.cli import run
from moonpool.core.config import config, logs

RECORDED = Path(__file__).parent / "recorded"
# Key -> its value by default, by every_key.toml, by every_variable.json; as `moonpool config show` prints it.
ROWS: dict[str, list[str]] = json.loads((RECORDED / "rows.json").read_text())
# Command line -> the settings that it changes, and where they came from. CONFIG stands for every_key.toml.
COMMAND_LINES: dict[str, dict[str, str]] = json.loads((RECORDED / "command_lines.json").read_text())


def shown(made: config.Config) -> dict[str, str]:
    """Key -> value, of the keys that the release knew."""
    return {key: value for key, value, _ in made.rows() if key in ROWS}


def recorded(column: int) -> dict[str, str]:
    return {key: values[column] for key, values in ROWS.items()}


def test_the_defaults_are_those_of_the_release() -> None:
    since = {"node.events": '"auto"', "proxy.suspect_engine_s": '"4s"'}  # what was changed on purpose
    assert shown(config.load(env={})) == recorded(0) | since


def test_a_file_with_every_key_means_the_same() -> None:
    file = RECORDED / "every_key.toml"
    written = tomllib.loads(file.read_text())
    secrets = {"cluster.token", "cluster.admin_token"}
    keys = {f"{section}.{key}" for section, table in written.items() for key in table}
    assert keys == set(ROWS) - secrets
    assert shown(config.load(file, env={})) == recorded(1)


def test_every_variable_means_the_same() -> None:
    variables = json.loads((RECORDED / "every_variable.json").read_text())
    assert shown(config.load(env=variables)) == recorded(2)


@pytest.mark.parametrize("line", COMMAND_LINES)
def test_a_command_line_means_the_same(line: str, monkeypatch: pytest.MonkeyPatch, runtime: Path) -> None:
    found: list[config.Config] = []

    def stop(settings: config.Config) -> None:
        found.append(settings)
        raise KeyboardInterrupt

    monkeypatch.setattr(logs, "set_up", stop)  # which a command calls with its settings
    file = str(RECORDED / "every_key.toml")
    assert run([file if word == "CONFIG" else word for word in line.split()]) == 130
    rows = found[0].rows()
    changed = {key: f"{value}  # {origin}" for key, value, origin in rows if origin != "default"}
    assert {key: row for key, row in changed.items() if f"# file {file}" not in row} == COMMAND_LINES[line]
    assert any(f"# file {file}" in row for row in changed.values()) == ("CONFIG" in line)
