"""Simulations in several processes, ended from outside."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

STUCK = """
import os, threading

class Stuck:
    uses_tokens = True

    def choose(self, request, instances, now_s):
        os.write(1, b"here\\n")
        threading.Event().wait()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda one: one.name)
def test_no_process_is_left_however_it_ends(number: signal.Signals, tmp_path: Path) -> None:
    """A terminal's Ctrl-C comes to all of them, SIGTERM and SIGKILL to the first alone."""
    row = {"timestamp": 0, "input_length": 500, "output_length": 1, "hash_ids": [1]}
    (tmp_path / "one.jsonl").write_text(json.dumps(row))
    (tmp_path / "stuck.py").write_text(STUCK)
    policies = "stuck:Stuck,stuck:Stuck/local,stuck:Stuck,stuck:Stuck/local"
    command = [sys.executable, "-m", "moonpool", "simulate", "one.jsonl", "--processes", "2"]
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    with subprocess.Popen(
        [*command, "--policy", policies],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        try:
            assert [process.stdout.readline() for _ in range(2)] == ["here\n"] * 2
            if number == signal.SIGINT:
                os.killpg(process.pid, number)
            else:
                process.send_signal(number)
            said, _ = process.communicate(timeout=30)  # to the end: nobody has its standard output any more
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    assert said == ""
    assert process.returncode == (130 if number == signal.SIGINT else -number)


def test_whatever_way_processes_are_started_by_default() -> None:
    """Python 3.14 has a server fork them, which is no parent that ends with the simulation."""
    code = """
import multiprocessing

from moonpool.disagg_proxy.tools.simulator.workers import get_shared, workers

multiprocessing.set_start_method("forkserver")
with workers(2, 10) as pool:
    print(pool.submit(get_shared).result())
"""
    said = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert said.stdout == "10\n", said.stderr
