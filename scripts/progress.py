"""Steps with elapsed time on the terminal; the long output of commands goes to a log file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

HEARTBEAT_S = 15.0
TAIL_LINES = 25
STARTED_VARIABLE = "MOONPOOL_STARTED_AT"  # seconds since the epoch; lets a child process go on with our clock


class Failed(SystemExit):
    """A step failed and the reason has been printed; the process ends with this exit code."""


class Progress:
    """Prints "[ 12.3 s] what happens now"; owns the log that commands write into."""

    def __init__(self, log: Path) -> None:
        self.started_s = float(os.environ.setdefault(STARTED_VARIABLE, repr(time.time())))
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_bytes(b"")

    def say(self, text: str) -> None:
        print(f"[{time.time() - self.started_s:6.1f} s] {text}", flush=True)

    def fail(self, text: str, code: int = 1) -> Failed:
        """Prints why it ended; `raise progress.fail(...)`."""
        sys.stdout.flush()
        print(f"\nerror: {text}", file=sys.stderr, flush=True)
        return Failed(code)

    def run(
        self,
        what: str,
        command: Sequence[str | Path],
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        """Runs one command with its output in the log; says what it does, and every 15 s how far it is."""
        self.say(what)
        code, output = self.attempt(command, env, cwd)
        if code != 0:
            tail = "\n".join(output.splitlines()[-TAIL_LINES:])
            raise self.fail(
                f"{what}: `{' '.join(map(str, command))}` ended with {code}. "
                f"Its last lines:\n\n{tail}\n\nThe whole log: {self.log}"
            )

    def attempt(
        self, command: Sequence[str | Path], env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> tuple[int, str]:
        """Runs one command with its output in the log -> (exit code, its output)."""
        with self.log.open("ab") as log:
            log.write(f"\n$ {' '.join(map(str, command))}\n".encode())
            log.flush()
            begin = log.tell()
            process = subprocess.Popen(
                [str(word) for word in command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(env) if env is not None else None,
                cwd=cwd,
                start_new_session=True,
            )
        try:
            while True:
                try:
                    code = process.wait(HEARTBEAT_S)
                    break
                except subprocess.TimeoutExpired:
                    self.say(f"    ... {self._last_line(begin)}")
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        with self.log.open("rb") as log:
            log.seek(begin)
            return code, log.read().decode(errors="replace")

    def _last_line(self, begin: int) -> str:
        with self.log.open("rb") as log:
            log.seek(max(begin, self.log.stat().st_size - 2000))
            lines = log.read().decode(errors="replace").split("\n")
        return next((line.strip()[:100] for line in reversed(lines) if line.strip()), "working")
