"""`moonpool up -d`, `moonpool logs` and `moonpool down`: a group in the background, as a person runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from moonpool.cli import run
from moonpool.core.service.processes import descendants
from moonpool.launch.log_files import LogFile, own_log
from moonpool.launch.up import is_running, only_one, read_state

from .up_bed import DEADLINE_S, ENGINE, assert_gone, toml, watch

MOONPOOL = [sys.executable, "-P", "-m", "moonpool"]
# As a group leaves it that was killed whole.
STALE = {
    "ready": True,
    "started_at": 0.0,
    "runtime_dir": "",
    "log_dir": "",
    "node": None,
    "engines": [],
    "proxy": None,
}


def up(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*MOONPOOL, "up", "-d", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


@pytest.fixture
def ended(runtime: Path) -> Iterator[None]:
    """Whatever the test leaves running is killed."""
    yield
    if is_running():
        run(["down", "--kill"])


def file_of(folder: Path, text: str) -> str:
    file = folder / "background.toml"
    file.write_text('[up]\nnode = false\nbackoff_initial_s = 0.05\n[proxy]\nlisten = "127.0.0.1:0"\n' + text)
    return str(file)


def test_a_group_in_the_background_its_logs_and_its_end(
    runtime: Path, ended: None, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*arguments: str) -> tuple[int, str, str]:
        code = run(arguments)
        return code, *capsys.readouterr()

    asked = ("--mock", "1", "--config", file_of(runtime, ""))
    begun = up(*asked)
    assert begun.returncode == 0, begun.stderr
    assert "engine-0: started, pid" in begun.stderr
    assert "moonpool down ends all of it" in begun.stderr
    state = json.loads((runtime / "up.json").read_text())
    assert urllib.request.urlopen(f"{state['proxy']['url']}/health", timeout=10).status == 200
    assert os.getsid(state["pid"]) == state["pid"]
    watched = watch([state["pid"], *(entry.pid for entry in descendants(state["pid"]))])
    assert len(watched) == 2 + 2

    second = up(*asked)
    assert second.returncode == 2
    assert "another moonpool up runs" in second.stderr
    assert "moonpool down" in second.stderr
    assert json.loads((runtime / "up.json").read_text())["pid"] == state["pid"]

    _, one, _ = said("logs", "proxy")
    assert state["proxy"]["url"] in one
    assert " | " not in one
    every = said("logs")[1].splitlines()
    for name in ("proxy    | ", "engine-0 | ", "up       | "):
        assert [line for line in every if line.startswith(name)]
    assert said("logs", "-n", "1", "up")[1].count("\n") == 1
    code, _, problem = said("logs", "engine0")
    assert (code, "did you mean engine-0?" in problem) == (2, True)

    follow = [*MOONPOOL, "logs", "-f", "-n", "1", "up"]
    with subprocess.Popen(follow, stdout=subprocess.PIPE) as follows:
        assert follows.stdout is not None
        assert b"watch it" in follows.stdout.readline()
        os.kill(state["engines"][0]["pid"], signal.SIGKILL)
        assert b"engine-0: was killed by signal 9" in follows.stdout.readline()
        code, gone, _ = said("down")
        assert (code, "proxy, engine-0" in gone) == (0, True)
        assert b"stopping" in follows.stdout.read()
        assert follows.wait(DEADLINE_S) == 0
    assert_gone(watched)
    assert not (runtime / "up.json").exists()

    code, _, problem = said("down")
    assert (code, "no moonpool up runs" in problem) == (3, True)
    assert "stopping" in said("logs", "up")[1]  # of the last run


def test_a_group_that_cannot_start_says_why_and_leaves_nothing(runtime: Path, ended: None) -> None:
    own_log().write_text("of the run before\n")
    more = '[[up.engine]]\nname = "bad"\ncommand = ["sh", "-c", "echo no such model; exit 2"]\n'
    begun = up("--config", file_of(runtime, more))
    assert begun.returncode == 3
    assert "bad exited with code 2 before it was ready" in begun.stderr
    assert begun.stderr.rstrip().endswith("no such model")
    assert not is_running()
    assert "of the run before" not in own_log().read_text()
    assert own_log().with_name("up.log.old").read_text() == "of the run before\n"


def test_what_a_killed_group_left_is_signalled_by_none(runtime: Path) -> None:
    """Its pid may be another process's now: here, this one's."""
    (runtime / "up.json").write_text(json.dumps({**STALE, "pid": os.getpid()}))
    assert run(["down"]) == 3
    with only_one():
        assert is_running()
        assert read_state() is None


def test_ctrl_c_before_all_is_up_ends_it(runtime: Path, ended: None) -> None:
    file = file_of(runtime, '[[up.engine]]\ncommand = ["sleep", "1000"]\n')
    with subprocess.Popen([*MOONPOOL, "up", "-d", "--config", file], stderr=subprocess.PIPE) as begun:
        assert begun.stderr is not None
        assert b"engine-0: started" in begun.stderr.readline()
        begun.send_signal(signal.SIGINT)
        assert b"stopping" in begun.stderr.read()
        assert begun.wait(DEADLINE_S) == 130
    assert not is_running()


def test_down_waits_as_long_as_it_may_and_kills_when_told(
    runtime: Path, ended: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """The engine ignores SIGTERM."""
    script = runtime / "stubborn.py"
    script.write_text("import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + ENGINE)
    command = json.dumps([sys.executable, str(script), "{host}", "{port}"])
    file = toml(runtime, engines=0, more=f"[[up.engine]]\ncommand = {command}\n")
    assert up("--config", str(file)).returncode == 0
    assert run(["down", "--timeout", "0.3"]) == 3
    assert "moonpool down --kill" in capsys.readouterr().err
    assert run(["down", "--kill"]) == 0
    assert not is_running()


def test_a_log_is_read_in_whole_lines_and_from_its_beginning_when_replaced(tmp_path: Path) -> None:
    path = tmp_path / "engine.log"
    log = LogFile(path)
    assert log.more() == []
    path.write_text("one\ntwo\nhal")
    assert log.last(1) == ["two"]
    with path.open("a") as file:
        file.write("f\n")
    assert log.more() == ["half"]
    path.rename(tmp_path / "engine.log.old")
    path.write_text("new\n")
    assert log.more() == ["new"]
    log.close()
