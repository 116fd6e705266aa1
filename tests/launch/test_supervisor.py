"""Processes that are kept running and that end with all they started. Real processes; no waiting without an
event.

A Nursery adopts and in the end kills everything below its process. So each test that makes one runs in a fork
of its own, and tells what it found by its exit and a pipe.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import sys
import traceback
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest

from moonpool.core.config.sections import Up
from moonpool.core.service.backoff import Backoff
from moonpool.core.service.processes import Nursery, Process, descendants, living_processes, run_kept, send
from moonpool.launch.supervisor import Event, Spec, StartFailed, State, Supervisor

DEADLINE_S = 30

# A leader that stays, with a child in its session and one that escaped to a session of its own.
FAMILY = """
import signal, subprocess, sys
stay = "import signal, sys; print(sys.argv[1], flush=True); signal.pause()"
subprocess.Popen([sys.executable, "-c", stay, "near"])
subprocess.Popen([sys.executable, "-c", stay, "far"], start_new_session=True)
signal.pause()
"""
STUBBORN = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
while True: signal.pause()
"""
PAUSE = "import signal; print('ready', flush=True); signal.pause()"


def in_a_fork(body: Callable[[], Awaitable[None]]) -> None:
    """Runs ``body`` in a forked child; fails with its traceback when it raises or does not end in time."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:

            async def bounded() -> None:
                async with asyncio.timeout(DEADLINE_S):
                    await body()

            asyncio.run(bounded())
            code = 0
        except BaseException:
            os.write(writer, traceback.format_exc().encode())
        finally:
            os._exit(code)
    os.close(writer)
    with open(reader, "rb") as pipe:
        said = pipe.read().decode()
    _, status = os.waitpid(child, 0)
    if os.waitstatus_to_exitcode(status) != 0:
        pytest.fail(said or f"the fork ended with {status}")


class Output:
    """A named pipe in a log's place: what processes print can be awaited, and the end of the last of them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        os.mkfifo(path)
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        self._said = b""

    async def until(self, *words: bytes) -> None:
        """Returns when all ``words`` were printed."""
        readable = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._descriptor, readable.set)
        while not all(word in self._said for word in words):
            await readable.wait()
            readable.clear()
            with suppress(BlockingIOError):
                self._said += os.read(self._descriptor, 65536)
        asyncio.get_running_loop().remove_reader(self._descriptor)

    def until_its_writers_ended(self) -> None:
        poll = select.poll()
        poll.register(self._descriptor, 0)
        ended = poll.poll(DEADLINE_S * 1000)
        assert ended, "a process that prints here still runs"
        assert ended[0][1] & select.POLLHUP


def test_back_off_doubles_is_capped_and_starts_over_after_a_long_life() -> None:
    backoff = Backoff(initial_s=0.5, max_s=3.0, reset_s=60.0)
    now = 100.0
    pauses = []
    for life_s in (0.1, 0.1, 0.1, 0.1, 0.1, 60.0, 59.9):
        backoff.started(now)
        now += life_s
        again = backoff.died(now)
        pauses.append(round(again - now, 6))
        now = again
    assert pauses == [0.5, 1.0, 2.0, 3.0, 3.0, 0.5, 1.0]


def test_back_off_stays_finite_after_thousands_of_deaths() -> None:
    backoff = Backoff(initial_s=0.5, max_s=30.0, reset_s=60.0)
    backoff.started(0.0)
    assert [backoff.died(0.0) for _ in range(5000)][-1] == 30.0


@pytest.mark.parametrize(("initial_s", "max_s"), [(0.0, 1.0), (2.0, 1.0)])
def test_back_off_refuses_what_would_spin(initial_s: float, max_s: float) -> None:
    with pytest.raises(ValueError, match="back-off needs"):
        Backoff(initial_s=initial_s, max_s=max_s, reset_s=1.0)


def test_ending_a_process_ends_its_children_also_those_in_other_sessions(tmp_path: Path) -> None:
    async def body() -> None:
        nursery = Nursery()
        log = Output(tmp_path / "log")
        process = nursery.spawn([sys.executable, "-c", FAMILY], env=os.environ, output=log.path, tag="t")
        await log.until(b"near", b"far")
        assert len(nursery.members(process)) == 3
        await nursery.end(process, grace_s=DEADLINE_S, hurry=asyncio.Event())
        assert await process.exited == -signal.SIGTERM
        assert descendants(os.getpid()) == []

    in_a_fork(body)


def test_what_outlives_a_killed_leader_is_still_known_and_ended(tmp_path: Path) -> None:
    async def body() -> None:
        nursery = Nursery()
        log, other_log = Output(tmp_path / "log"), Output(tmp_path / "other")
        other = nursery.spawn(
            [sys.executable, "-c", PAUSE], env=os.environ, output=other_log.path, tag="other"
        )
        process = nursery.spawn([sys.executable, "-c", FAMILY], env=os.environ, output=log.path, tag="t")
        await log.until(b"near", b"far")
        await other_log.until(b"ready")
        os.kill(process.pid, signal.SIGKILL)
        assert await process.exited == -signal.SIGKILL
        assert len(nursery.members(process)) == 2
        await nursery.end(process, grace_s=DEADLINE_S, hurry=asyncio.Event())
        assert [entry.pid for entry in descendants(os.getpid())] == [other.pid]
        nursery.close()
        assert descendants(os.getpid()) == []
        assert await other.exited == -signal.SIGKILL

    in_a_fork(body)


@pytest.mark.parametrize("how", ["grace", "hurry"])
def test_who_ignores_sigterm_is_killed_after_the_grace_or_in_a_hurry(tmp_path: Path, how: str) -> None:
    async def body() -> None:
        nursery = Nursery()
        log = Output(tmp_path / "log")
        process = nursery.spawn([sys.executable, "-c", STUBBORN], env=os.environ, output=log.path, tag="t")
        await log.until(b"ready")
        hurry = asyncio.Event()
        grace_s = 0.2 if how == "grace" else 10 * DEADLINE_S
        if how == "hurry":
            asyncio.get_running_loop().call_later(0.1, hurry.set)
        await nursery.end(process, grace_s=grace_s, hurry=hurry)
        assert await process.exited == -signal.SIGKILL

    in_a_fork(body)


def test_children_end_when_their_owner_is_killed(tmp_path: Path) -> None:
    """The parent-death signal alone, without a keeper."""
    log = Output(tmp_path / "log")
    owner = os.fork()
    if owner == 0:

        async def own() -> None:
            Nursery().spawn([sys.executable, "-c", PAUSE], env=os.environ, output=log.path, tag="t")
            await log.until(b"ready")
            os.kill(os.getpid(), signal.SIGKILL)

        try:
            asyncio.run(own())
        finally:
            os._exit(1)
    _, status = os.waitpid(owner, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    log.until_its_writers_ended()


class Group:
    """A supervisor in a task, whose events can be awaited."""

    def __init__(self, specs: list[Spec], **limits: float) -> None:
        self.events: list[Event] = []
        self._told = asyncio.Event()
        settings = Up(
            **{"backoff_initial_s": 0.05, "backoff_max_s": 0.1, "grace_s": float(DEADLINE_S), **limits}  # type: ignore[arg-type]
        )
        self.supervisor = Supervisor(specs, settings, self._tell)
        self.stop, self.hurry = asyncio.Event(), asyncio.Event()
        self.task = asyncio.ensure_future(self.supervisor.run(self.stop, self.hurry))

    def _tell(self, event: Event) -> None:
        self.events.append(event)
        self._told.set()

    async def told(self, text: str, times: int = 1) -> None:
        while sum(text in event.text for event in self.events) < times:
            self._told.clear()
            waiting = asyncio.ensure_future(self._told.wait())
            await asyncio.wait({waiting, self.task}, return_when=asyncio.FIRST_COMPLETED)
            if self.task.done():
                waiting.cancel()
                await self.task
                break

    async def end(self) -> None:
        self.stop.set()
        await self.task
        assert descendants(os.getpid()) == []


def spec(
    name: str, folder: Path, program: str, stage: int = 0, mark: str = "ready", is_base: bool = False
) -> Spec:
    log = folder / f"{name}.log"

    async def ready() -> bool:
        return mark in log.read_text()

    return Spec(
        name, "engine", (sys.executable, "-c", program), os.environ, log, ready, stage, is_base=is_base
    )


def test_a_killed_process_starts_again_after_its_orphans_are_gone(tmp_path: Path) -> None:
    async def body() -> None:
        group = Group([spec("a", tmp_path, FAMILY, mark="far"), spec("b", tmp_path, PAUSE)])
        await group.told("all is up")
        first, other = group.supervisor.kept
        old = descendants(first.pid or 0)
        assert first.pid is not None
        os.kill(first.pid, signal.SIGKILL)
        before = (first.pid, other.pid)
        await group.told("was killed by signal 9")
        assert not {entry.pid for entry in old} & set(living_processes())
        await group.told("ready after", times=3)
        assert first.starts == 2
        assert first.state is State.READY
        assert first.pid != before[0]
        assert other.pid == before[1]
        await group.end()

    in_a_fork(body)


def test_stages_start_in_order_and_what_the_others_stand_on_ends_last(tmp_path: Path) -> None:
    async def body() -> None:
        program = (
            "import signal, time\n"
            "signal.signal(signal.SIGTERM, lambda *_: (print(time.monotonic_ns()), exit(0)))\n"
            "print('ready', flush=True)\n"
            "while True: signal.pause()"
        )
        specs = [spec(name, tmp_path, program, stage, is_base=stage < 2) for stage, name in enumerate("mnep")]
        group = Group(specs)
        await group.told("all is up")
        order = [event.name for event in group.events if event.text.startswith("started")]
        assert order == ["m", "n", "e", "p"]
        ready = [event.text.split()[0] for event in group.events if event.name]
        assert ready == ["started,", "ready"] * 4
        await group.end()
        ended = {name: int((tmp_path / f"{name}.log").read_text().split()[-1]) for name in "mnep"}
        assert ended["m"] > ended["n"] > max(ended["e"], ended["p"])

    in_a_fork(body)


def test_who_dies_again_and_again_before_it_was_ready_ends_the_group_with_its_last_words(
    tmp_path: Path,
) -> None:
    async def body() -> None:
        group = Group(
            [spec("good", tmp_path, PAUSE), spec("bad", tmp_path, "print('no memory'); exit(7)", 1)]
        )
        with pytest.raises(StartFailed, match=r"bad exited with code 7 3 times (.|\n)*no memory") as caught:
            await group.task
        assert str(tmp_path / "bad.log") in str(caught.value)
        assert group.supervisor.kept[1].starts == 3
        assert descendants(os.getpid()) == []

    in_a_fork(body)


def test_who_was_called_wrongly_is_not_tried_again(tmp_path: Path) -> None:
    async def body() -> None:
        group = Group([spec("bad", tmp_path, "print('unknown flag'); exit(2)")])
        with pytest.raises(StartFailed, match=r"exited with code 2 before it was ready(.|\n)*unknown flag"):
            await group.task
        assert group.supervisor.kept[0].starts == 1

    in_a_fork(body)


def test_a_program_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    async def body() -> None:
        lost = Spec("lost", "engine", ("/no/such/program",), {}, tmp_path / "log", never)
        with pytest.raises(StartFailed, match="lost: cannot start /no/such/program: No such file"):
            await Group([lost]).task

    in_a_fork(body)


async def never() -> bool:
    return False


def test_who_is_not_ready_in_time_is_ended_and_tells_why(tmp_path: Path) -> None:
    async def body() -> None:
        slow = Spec("slow", "engine", (sys.executable, "-c", PAUSE), os.environ, tmp_path / "slow.log", never)
        group = Group([slow], ready_timeout_s=0.3, start_attempts_max=1, progress_interval_s=0.1)
        with pytest.raises(StartFailed, match="slow was not ready within 0 s"):
            await group.task
        assert any("starting for" in event.text for event in group.events)
        assert descendants(os.getpid()) == []

    in_a_fork(body)


def test_stopping_while_it_still_starts(tmp_path: Path) -> None:
    async def body() -> None:
        slow = Spec("slow", "engine", (sys.executable, "-c", PAUSE), os.environ, tmp_path / "slow.log", never)
        group = Group([slow])
        await group.told("started")
        await group.end()

    in_a_fork(body)


def test_a_keeper_hands_signals_on_and_returns_the_code_of_what_it_keeps() -> None:
    """run_kept() in a fork: SIGTERM reaches the inner process, which ends with 5."""
    reader, writer = os.pipe()
    keeper = os.fork()
    if keeper == 0:

        def inner() -> int:
            signal.signal(signal.SIGTERM, lambda *_: os._exit(5))
            os.write(writer, b"x")
            while True:
                signal.pause()

        os._exit(run_kept(inner))
    os.close(writer)
    assert os.read(reader, 1) == b"x"
    send([keeper], signal.SIGTERM)
    _, status = os.waitpid(keeper, 0)
    os.close(reader)
    assert os.waitstatus_to_exitcode(status) == 5


def test_a_keeper_hands_on_what_comes_before_it_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """A keeper that stands still right behind its fork(), and is told to end there."""
    reader, writer = os.pipe()
    fork = os.fork
    keeper = fork()
    if keeper == 0:

        def inner() -> int:
            signal.signal(signal.SIGTERM, lambda *_: os._exit(5))
            os.write(writer, b"x")
            while True:
                signal.pause()

        def fork_and_be_told() -> int:
            if child := fork():
                os.read(reader, 1)
                os.kill(os.getpid(), signal.SIGTERM)
            return child

        monkeypatch.setattr(os, "fork", fork_and_be_told)
        os._exit(run_kept(inner))
    os.close(writer)
    _, status = os.waitpid(keeper, 0)
    os.close(reader)
    assert os.waitstatus_to_exitcode(status) == 5


def test_a_process_handle_keeps_its_first_exit_code(tmp_path: Path) -> None:
    async def body() -> None:
        nursery = Nursery()
        process: Process = nursery.spawn(
            ["sh", "-c", "exit 3"], env=os.environ, output=tmp_path / "l", tag="t"
        )
        assert await process.exited == 3
        process.finish(4)
        assert await process.exited == 3
        nursery.close()

    in_a_fork(body)
