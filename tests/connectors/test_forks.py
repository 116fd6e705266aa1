"""The tests' own fork server, with a module in the place of an engine."""

from __future__ import annotations

import fcntl
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.connectors.forks import ForkedProcess, ForkServer, Warm, fork_servers
from tests.core.store_bed import until

ROOT = Path(__file__).parents[2]
# An engine that is imported when no test has the gate locked, and knows who imported it.
ENGINE = """\
import fcntl, os
with open(os.environ["GATE"]) as gate:
    fcntl.flock(gate, fcntl.LOCK_SH)
IMPORTED_BY = os.getpid()
"""
SPAWNS = """\
import multiprocessing, os, sys, engine

def child(told, read):
    read.close()
    told.send((os.getppid(), engine.IMPORTED_BY, sys.argv, os.environ["SET_LATER"], os.read(0, 1)))
    told.recv()

if __name__ == "__main__":
    os.environ["SET_LATER"] = "yes"
    multiprocessing.set_start_method("spawn", force=True)
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(target=child, args=(theirs, ours))
    process.start()
    theirs.close()
    parent, imported_by, argv, later, stdin = ours.recv()
    assert parent == os.getpid(), "it is a child"
    assert imported_by == engine.IMPORTED_BY, "it did not import the engine"
    assert (argv, later, stdin) == (sys.argv, "yes", b"")
    if sys.argv[1] == "stay":
        print(os.getpid(), process.pid, flush=True)
        os.kill(os.getpid(), 19)
    ours.send("end")
    process.join(60)
    sys.exit(process.exitcode + 7)
"""


@pytest.fixture
def warm(tmp_path: Path) -> Warm:
    (tmp_path / "engine.py").write_text(ENGINE)
    (tmp_path / "spawns.py").write_text(SPAWNS)
    (tmp_path / "gate").touch()
    return Warm(
        sys.executable,
        ("engine",),
        (("PYTHONPATH", str(tmp_path)), ("GATE", str(tmp_path / "gate"))),
    )


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ForkServer]]:
    """Those that the test makes end with it."""
    made: list[ForkServer] = []
    make = ForkServer.__init__

    def making(server: ForkServer, warm: Warm) -> None:
        make(server, warm)
        made.append(server)

    monkeypatch.setattr(ForkServer, "__init__", making)
    yield made
    for server in made:
        server.close()
    fork_servers.cache_clear()


def start(warm: Warm, folder: Path, *arguments: str) -> ForkedProcess:
    with (folder / "log").open("wb") as log:
        env = dict(warm.variables)
        return ForkedProcess(warm, arguments, env, stdout=log, stderr=subprocess.STDOUT, spawns=True)


@pytest.mark.parametrize("how", ["script", "module"])
def test_what_it_spawns_has_the_engine_imported(
    warm: Warm, servers: list[ForkServer], tmp_path: Path, how: str
) -> None:
    script = [str(tmp_path / "spawns.py")] if how == "script" else ["-m", "spawns"]
    with (tmp_path / "gate").open() as gate:
        fcntl.flock(gate, fcntl.LOCK_EX)
        process = start(warm, tmp_path, *script, "end")
        assert process.poll() is None  # at once, while the engine is being imported
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
    assert process.wait(60) == 7, (tmp_path / "log").read_text()


def test_all_ends_with_the_test(warm: Warm, tmp_path: Path) -> None:
    """Also when it is killed."""
    code = (
        "import sys, os; from pathlib import Path;"
        "from tests.connectors.test_forks import start; from tests.connectors.forks import Warm;"
        f"start({warm!r}, Path({str(tmp_path)!r}), {str(tmp_path / 'spawns.py')!r}, 'stay').wait(60)"
    )
    test = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    log = tmp_path / "log"
    try:
        until(lambda: log.exists() and log.read_text().endswith("\n"), 60)
        pids = [int(word) for word in log.read_text().split()]
        assert all(is_running(pid) for pid in pids)
    finally:
        test.send_signal(signal.SIGKILL)
        test.wait()
    assert until(lambda: not any(is_running(pid) for pid in pids), 60)


def is_running(pid: int) -> bool:
    """No zombie either: it may have no parent here that would ask for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
