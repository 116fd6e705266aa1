"""Processes that end together with their owner and all their descendants.

A process that is asked to end may leave children behind, and a process that is killed always does. Three
features of Linux together leave none: an owner is a *subreaper*, so that orphans of its descendants become
its children and stay in its tree; each child leads a *session* of its own and carries a *tag* in its
environment, so that its descendants are known even after its end; and a *parent-death signal* ends the child
when the owner dies first.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import resource
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, NoReturn

_log = logging.getLogger(__name__)

TAG_VARIABLE = "MOONPOOL_CHILD"

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def allow_many_descriptors() -> None:
    """Raises the limit of open files as far as this process may: the usual 1,024 are fewer than the clients
    that a node or a master serves."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def stay_through_hangup(
    loop: asyncio.AbstractEventLoop, end: Callable[[], None], reload: Callable[[], None] | None = None
) -> None:
    """SIGHUP asks a process without a terminal to read its files again: ``reload`` does; None: it has none,
    and ignores the signal. With a terminal, the terminal was closed: ``end`` asks the process to stop.
    """
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # nohup set this
        return
    has_terminal = _is_terminal(0)

    def hung_up() -> None:
        if has_terminal:
            end()
        elif reload is not None:
            reload()
        else:
            _log.info("SIGHUP: nothing to do, going on")

    loop.add_signal_handler(signal.SIGHUP, hung_up)


def _is_terminal(descriptor: int) -> bool:
    try:
        return os.isatty(descriptor)
    except OSError:
        return False


def become_subreaper() -> None:
    """Makes this process the parent of its descendants' orphans from now on."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int, signal_number: signal.Signals) -> None:
    """Called in a new child: ``signal_number`` comes when ``parent`` dies, at once when it is dead."""
    _prctl(_PR_SET_PDEATHSIG, signal_number)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal_number)


def _prctl(option: int, argument: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(argument), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {os.strerror(code)}")


class Entry(NamedTuple):
    """The kernel's facts about one living process."""

    pid: int
    parent: int
    session: int


def living_processes() -> dict[int, Entry]:
    """All processes of this host (this pid namespace) that are not zombies."""
    found: dict[int, Entry] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError):
                text = Path(f"/proc/{name}/stat").read_text()
                state, parent, _group, session, *_ = text[text.rindex(")") + 2 :].split(" ", 4)
                if state not in "ZX":
                    found[int(name)] = Entry(int(name), int(parent), int(session))
    return found


def descendants(root: int, processes: Mapping[int, Entry] | None = None) -> list[Entry]:
    """The living processes below ``root``, parents before their children."""
    processes = living_processes() if processes is None else processes
    children: dict[int, list[Entry]] = {}
    for entry in processes.values():
        children.setdefault(entry.parent, []).append(entry)
    found = list(children.get(root, ()))
    for entry in found:  # grows while it is walked
        found.extend(children.get(entry.pid, ()))
    return found


def send(pids: Sequence[int], signal_number: signal.Signals) -> None:
    """Signals each process that is still there; those that have ended are skipped."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal_number)


class Process:
    """One child: its leader's ``pid``, and ``exited``, which becomes its exit code (negative: the signal)."""

    def __init__(self, popen: subprocess.Popen[bytes], tag: str) -> None:
        self.pid = popen.pid
        self.tag = tag
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._popen = popen

    def finish(self, code: int) -> None:
        """Records the exit code, once."""
        self._popen.returncode = code
        if not self.exited.done():
            self.exited.set_result(code)


class Nursery:
    """Starts children, reaps them and every orphan below us, and ends a child with all its descendants.

    It reaps any child of this process, so nothing else here may wait for children. One per process, in one
    event loop.
    """

    def __init__(self) -> None:
        become_subreaper()
        self._children: dict[int, Process] = {}
        self._reaped = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._reap)

    def close(self) -> None:
        """Kills everything below us that is still there, and stops reaping."""
        while left := descendants(os.getpid()):
            send([entry.pid for entry in left], signal.SIGKILL)
            with suppress(ChildProcessError):
                self._collect(*os.waitpid(-1, 0))
        self._reap()
        asyncio.get_running_loop().remove_signal_handler(signal.SIGCHLD)

    def spawn(self, command: Sequence[str], *, env: Mapping[str, str], output: Path, tag: str) -> Process:
        """Starts ``command`` in a session of its own; what it prints is appended to the file ``output``.

        Raises OSError when the program cannot be started.
        """
        parent = os.getpid()
        with open(output, "ab") as log:
            popen = subprocess.Popen(
                list(command),
                env={**env, TAG_VARIABLE: tag},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=lambda: die_with_parent(parent, signal.SIGTERM),
            )
        process = Process(popen, tag)
        self._children[process.pid] = process
        return process

    def members(self, process: Process) -> list[int]:
        """The living processes that belong to ``process``: itself, its descendants, and those that outlived
        it.
        """
        processes = living_processes()
        below = {entry.pid for entry in descendants(process.pid, processes)} | {process.pid}
        return [
            entry.pid
            for entry in descendants(os.getpid(), processes)
            if entry.pid in below or entry.session == process.pid or _tag_of(entry.pid) == process.tag
        ]

    async def end(self, process: Process, *, grace_s: float, hurry: asyncio.Event) -> None:
        """SIGTERM to the leader, then to what outlived it; SIGKILL to all after ``grace_s`` seconds or on
        ``hurry``.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + grace_s
        asked: set[int] = set()
        while left := self.members(process):
            now = loop.time()
            if hurry.is_set() or now >= deadline:
                send(left, signal.SIGKILL)
                await self._something_reaped(hurry=None, timeout_s=1.0)
                continue
            ask = [process.pid] if process.pid in left else left
            send([pid for pid in ask if pid not in asked], signal.SIGTERM)
            asked.update(ask)
            await self._something_reaped(hurry=hurry, timeout_s=deadline - now)

    async def _something_reaped(self, *, hurry: asyncio.Event | None, timeout_s: float) -> None:
        waits = [asyncio.ensure_future(event.wait()) for event in (self._reaped, hurry) if event is not None]
        try:
            await asyncio.wait(waits, timeout=max(0.0, timeout_s), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def _reap(self) -> None:
        with suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                self._collect(*found)
        self._reaped.set()
        self._reaped = asyncio.Event()

    def _collect(self, pid: int, status: int) -> None:
        process = self._children.pop(pid, None)
        if process is not None:
            process.finish(os.waitstatus_to_exitcode(status))


def run_kept(run: Callable[[], int]) -> int:
    """Runs ``run`` in a forked child below a keeper, so that kill -9 of either leaves no descendant behind.

    The keeper, which is the calling process, hands SIGTERM, SIGINT and SIGHUP on, waits, and then kills what
    is left of the tree. When the keeper dies, the child gets SIGTERM. Returns the child's exit code (128 +
    signal when killed). Call it before there are threads or an event loop.
    """
    become_subreaper()
    keeper = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    handed_on = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = signal.pthread_sigmask(
        signal.SIG_BLOCK, handed_on
    )  # otherwise a signal that comes now would end the keeper alone
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        _run_below(keeper, run)
    for signal_number in handed_on:
        if signal.getsignal(signal_number) is not signal.SIG_IGN:
            signal.signal(signal_number, lambda number, _frame: send([child], signal.Signals(number)))
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    pid, status = os.waitpid(-1, 0)
    while pid != child:
        pid, status = os.waitpid(-1, 0)
    while left := descendants(keeper):
        send([entry.pid for entry in left], signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(-1, 0)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _run_below(keeper: int, run: Callable[[], int]) -> NoReturn:
    code = 1
    try:
        os.setpgid(0, 0)  # a terminal's Ctrl-C reaches the keeper only, which passes it on once
        die_with_parent(keeper, signal.SIGTERM)
        code = run()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _tag_of(pid: int) -> str | None:
    """The tag in the environment that ``pid`` was started with."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    mark = f"{TAG_VARIABLE}=".encode()
    return next((text[len(mark) :].decode() for text in variables if text.startswith(mark)), None)
