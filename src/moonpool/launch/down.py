"""`moonpool down`: ends what `moonpool up` of this runtime folder runs, and waits for it."""

from __future__ import annotations

import os
import select
import signal
import time
from contextlib import suppress

from moonpool.core.config import paths
from moonpool.core.errors import Timeout, Unavailable
from moonpool.launch.up import UpState, is_running, read_state

STATE_TIMEOUT_S = 5.0
LOOK_S = 0.05
AGAIN_S = 0.3  # between the signal that asks and the one that kills: two at once would be one


def down(*, timeout_s: float, kill: bool = False) -> UpState:
    """Ends all of it, and returns what ran. kill: without the grace of ``up.grace_s`` seconds.

    Raises Unavailable when none runs, and Timeout when it has not ended after ``timeout_s`` seconds; it goes
    on ending then.
    """
    deadline_s = time.monotonic() + timeout_s
    state, supervisor = _found()
    ended = False
    try:
        while not ended and (left_s := deadline_s - time.monotonic()) > 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(supervisor, signal.SIGTERM)
            ended = _ends(supervisor, min(left_s, AGAIN_S) if kill else left_s)
    finally:
        os.close(supervisor)
    if not ended:
        raise Timeout(
            f"moonpool up, pid {state.pid}, has not ended within {timeout_s:g} s; "
            "moonpool down --kill ends it at once",
            operation="down",
        )
    return state


def _found() -> tuple[UpState, int]:
    """What runs, and a descriptor of the process to signal, whose pid cannot go to another one meanwhile."""
    deadline_s = time.monotonic() + STATE_TIMEOUT_S
    while is_running():
        state = read_state()
        if state is not None:
            with suppress(ProcessLookupError):
                supervisor = os.pidfd_open(state.pid)
                now = read_state()
                if is_running() and now is not None and now.pid == state.pid:
                    return state, supervisor
                os.close(supervisor)
        if time.monotonic() > deadline_s:
            raise Unavailable(
                f"moonpool up runs with the runtime folder {paths.runtime_dir()} and has not written what; "
                "try again",
                operation="down",
            )
        time.sleep(LOOK_S)
    raise Unavailable(
        f"no moonpool up runs with the runtime folder {paths.runtime_dir()}; start one with: moonpool up -d",
        operation="down",
    )


def _ends(process: int, timeout_s: float) -> bool:
    """Whether the process with that descriptor ends within the time."""
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(max(0.0, timeout_s) * 1000))
