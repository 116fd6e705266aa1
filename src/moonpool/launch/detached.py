"""Runs something in the background, away from the terminal: `moonpool up -d`.

    the command      forks, copies the log as it grows, and ends when the background says that it is up
      pipe  ^
    the background   leads a session of its own, reads nothing, prints into the log, and goes on

The pipe carries one byte when all is up. Its end without that byte is the end of the background process.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import BinaryIO, NoReturn

from moonpool.core.errors import Unavailable
from moonpool.core.service.exit_codes import EXIT_INTERRUPTED
from moonpool.launch.up import set_aside

COPY_INTERVAL_S = 0.1


def run_detached(act: Callable[[Callable[[], None]], int], log: Path) -> int:
    """Runs ``act`` in the background, and shows its log on standard error until it calls its argument.

    SIGINT and SIGTERM before that end the background process. Returns 0 when all is up, the exit code of
    ``act`` when that failed, EXIT_INTERRUPTED after a signal. Raises Unavailable when another process ended
    it. Call it before there are threads or an event loop.
    """
    set_aside(log)
    sys.stdout.flush()
    sys.stderr.flush()
    reader, writer = os.pipe()
    written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    child = os.fork()
    if child == 0:
        os.close(reader)
        _run_in_background(act, written, writer)
    os.close(written)
    os.close(writer)
    interrupted = False

    def end(_number: int, _frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        os.kill(child, signal.SIGTERM)

    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, end)
    with open(reader, "rb", buffering=0) as pipe, open(log, "rb") as shown:
        while not select.select([pipe], [], [], COPY_INTERVAL_S)[0]:
            _copy(shown)
        is_up = bool(pipe.read(1))
        _copy(shown)
    if is_up:
        return 0
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if interrupted:
        return EXIT_INTERRUPTED
    if code == 0:
        raise Unavailable("it was ended before all was up", operation="up")
    return code if code > 0 else 128 - code


def _copy(log: BinaryIO) -> None:
    """What was added to the log, in the order in which it came."""
    sys.stderr.write(log.read().decode(errors="replace"))
    sys.stderr.flush()


def _run_in_background(act: Callable[[Callable[[], None]], int], log: int, pipe: int) -> NoReturn:
    code = 1
    try:
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        for source, target in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        code = act(lambda: _say_up(pipe))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _say_up(pipe: int) -> None:
    with suppress(BrokenPipeError):  # the command was killed meanwhile; what is up stays up
        os.write(pipe, b".")
