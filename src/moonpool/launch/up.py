"""`moonpool up`: a master, nodes, engines and the proxy of one host, from one configuration.

src/moonpool/launch/up_plan.py makes of a Config what is to run. run() gives that to the supervisor and keeps
RUNTIME/up.json, which tells other programs (`moonpool status`, tests, demos) what runs where.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import shlex
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from moonpool.core.config import paths
from moonpool.core.errors import ConfigError
from moonpool.core.service.processes import stay_through_hangup
from moonpool.launch.supervisor import Event, Supervisor
from moonpool.launch.up_plan import Plan

LOCK, STATE = "up.lock", "up.json"

_log = logging.getLogger("moonpool.up")


class ProcessState(msgspec.Struct, frozen=True, omit_defaults=True):
    """One process in up.json. url: "" when it has none; restarts: starts after the first."""

    name: str
    kind: str
    state: str
    pid: int | None
    url: str
    log: str
    restarts: int
    model: str = ""
    socket: str = ""


class UpState(msgspec.Struct, frozen=True):
    """The file RUNTIME/up.json. pid: what to send SIGTERM to. ready: everything was up at least once.

    node: the first of nodes.
    """

    pid: int
    ready: bool
    started_at: float
    runtime_dir: str
    log_dir: str
    node: ProcessState | None
    engines: list[ProcessState]
    proxy: ProcessState | None
    nodes: list[ProcessState] = []
    master: ProcessState | None = None

    @property
    def processes(self) -> list[ProcessState]:
        """All of them, in the order in which they start."""
        rows = (self.master, *self.nodes, *self.engines, self.proxy)
        return [row for row in rows if row is not None]


def run(
    plan: Plan,
    tell: Callable[[Event], None],
    *,
    pid: int | None = None,
    detached: Callable[[], None] | None = None,
) -> None:
    """Runs the plan until SIGTERM or SIGINT; a second one kills at once. Raises a moonpool Error when it
    cannot start.

    pid: whom to signal in order to end all of it (default: this process). detached: called once, when all is
    up, where this process has no terminal. The caller holds only_one().
    """
    for spec in plan.specs:
        set_aside(spec.log)
    try:
        asyncio.run(_run(plan, tell, os.getpid() if pid is None else pid, detached))
    finally:
        plan.ports.release()


def set_aside(log: Path) -> None:
    """Renames the log of an earlier run, if there is one, to NAME.old."""
    with suppress(FileNotFoundError):
        log.replace(log.with_name(log.name + ".old"))


async def _run(
    plan: Plan, tell: Callable[[Event], None], pid: int, detached: Callable[[], None] | None
) -> None:
    stop, hurry = asyncio.Event(), asyncio.Event()
    state_file = paths.runtime_dir() / STATE
    started_at = time.time()
    was_ready = False

    def asked() -> None:
        (hurry if stop.is_set() else stop).set()
        tell(Event("", "killing everything" if hurry.is_set() else "stopping; once more kills at once"))

    def write_state() -> None:
        nonlocal was_ready
        was_ready = was_ready or all(kept.first_ready.is_set() for kept in supervisor.kept)
        try:
            _write_state(state_file, _state(supervisor, plan, pid, started_at, was_ready))
        except OSError as error:  # a full disk ends no engine; the file tells what was true before
            _log.warning("%s is not up to date: %s", state_file, error.strerror)

    for signal_number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(signal_number) is not signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(signal_number, asked)
    stay_through_hangup(asyncio.get_running_loop(), asked)

    def say_next() -> None:
        for line in next_steps(plan, is_detached=detached is not None):
            tell(Event("", line))
        if detached is not None:
            detached()

    supervisor = Supervisor(
        plan.specs, plan.limits, tell, write_state, when_up=say_next, tag=f"up-{os.getpid()}"
    )
    try:
        await supervisor.run(stop, hurry)
    finally:
        with suppress(OSError):
            state_file.unlink(missing_ok=True)


def next_steps(plan: Plan, *, is_detached: bool = False) -> list[str]:
    """What an operator does with what is up, a line each."""
    lines = []
    proxy = next((spec.url for spec in plan.specs if spec.kind == "proxy"), "")
    if proxy:
        model = next((model for model in plan.models.values() if model), "MODEL")
        body = json.dumps({"model": model, "prompt": "Hello", "max_tokens": 16})
        lines.append(f"OpenAI API at {proxy}/v1, page at {proxy}/ui")
        lines.append(
            f"try it: curl {proxy}/v1/completions -H 'Content-Type: application/json' -d {shlex.quote(body)}"
        )
    elif plan.sockets:
        lines.append("engines of this host find the pool by themselves; by hand: moonpool put KEY FILE")
    end = "moonpool down" if is_detached else "Ctrl-C"
    return [*lines, f"watch it: moonpool status, moonpool logs -f; {end} ends all of it"]


def _state(supervisor: Supervisor, plan: Plan, pid: int, started_at: float, ready: bool) -> UpState:
    rows = [
        ProcessState(
            name=kept.spec.name,
            kind=kept.spec.kind,
            state=kept.state.value,
            pid=kept.pid,
            url=kept.spec.url,
            log=str(kept.spec.log),
            restarts=max(0, kept.starts - 1),
            model=plan.models.get(kept.spec.name, ""),
            socket=plan.sockets.get(kept.spec.name, ""),
        )
        for kept in supervisor.kept
    ]
    by_kind = {row.kind: row for row in reversed(rows)}
    return UpState(
        pid=pid,
        ready=ready,
        started_at=started_at,
        runtime_dir=str(paths.runtime_dir()),
        log_dir=str(plan.log_dir),
        node=by_kind.get("node"),
        engines=[row for row in rows if row.kind == "engine"],
        proxy=by_kind.get("proxy"),
        nodes=[row for row in rows if row.kind == "node"],
        master=by_kind.get("master"),
    )


def read_state() -> UpState | None:
    """What `moonpool up` of this runtime folder says of itself; None when none runs."""
    try:
        text = (paths.runtime_dir() / STATE).read_bytes()
        return msgspec.json.decode(text, type=UpState)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def _write_state(path: Path, state: UpState) -> None:
    draft = path.with_name(f".{path.name}-{os.getpid()}")
    draft.write_bytes(msgspec.json.format(msgspec.json.encode(state), indent=2) + b"\n")
    draft.replace(path)


@contextmanager
def only_one() -> Iterator[None]:
    """Held by the one `moonpool up` of a runtime folder and by the processes that it forks; the kernel frees
    it with the last of them. Raises ConfigError when another one holds it.
    """
    path = paths.runtime_dir(ensure=True) / LOCK
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if not _lock(descriptor, fcntl.LOCK_EX):
            raise ConfigError(
                f"another moonpool up runs with the runtime folder {path.parent}; end it with moonpool down, "
                f"or set {paths.RUNTIME_DIR_VARIABLE} to another folder",
                operation="up",
                key=paths.RUNTIME_DIR_VARIABLE,
                peer=str(path),
            )
        with suppress(OSError):
            path.with_name(STATE).unlink()  # of one that was killed: its pid may be another's now
        yield
    finally:
        os.close(descriptor)


def is_running() -> bool:
    """Whether a `moonpool up` holds this runtime folder, which it does from before its start to after the end
    of its last process."""
    try:
        descriptor = os.open(paths.runtime_dir() / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return not _lock(descriptor, fcntl.LOCK_SH)  # shared: two that ask do not see each other
    finally:
        os.close(descriptor)


def _lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
