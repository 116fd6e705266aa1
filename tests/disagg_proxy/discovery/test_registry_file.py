"""Registrations that are kept in a file: over a restart, and by several registries at one time."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from moonpool.disagg_proxy.discovery import registry as module
from moonpool.disagg_proxy.discovery import registry_file
from moonpool.disagg_proxy.discovery.registry import EventStreams, Registry
from moonpool.disagg_proxy.discovery.registry_file import RegistryFile
from moonpool.disagg_proxy.events.settings import EventSource
from tests.disagg_proxy.discovery.heard import Heard, heard
from tests.disagg_proxy.discovery.registering import register
from tests.disagg_proxy.harness import MockEngine, bed, until, with_deadline


class NoStreams:
    def follow(self, name: str, source: EventSource) -> int | None:
        return None

    def drop(self, name: str, holder: int) -> None:
        raise AssertionError(name)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_EVERY_S", 0.001)
    monkeypatch.setattr(module, "LAST_S", 10.0)  # a disk may be slow


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "registered.json"


def body(name: str, url: str = "", **more: object) -> bytes:
    return json.dumps({"instance_id": name, "url": url or f"http://{name}:1", **more}).encode()


class FewStreams:
    """So many may be followed."""

    def __init__(self, count: int) -> None:
        self.free = list(range(count))

    def follow(self, name: str, source: EventSource) -> int | None:
        return self.free.pop() if self.free else None

    def drop(self, name: str, holder: int) -> None:
        self.free.append(holder)


@contextlib.asynccontextmanager
async def registry(
    path: Path, clock: Clock | None = None, streams: EventStreams | None = None
) -> AsyncIterator[tuple[Registry, Heard]]:
    made = Registry(streams or NoStreams(), clock=clock or Clock(), file=RegistryFile(str(path)))
    async with heard(made) as listener:
        await until(lambda: bool(listener.sets))
        yield made, listener


class Raises:
    def __init__(self, error: Exception) -> None:
        self.error = error

    def __call__(self, *_: object) -> None:
        raise self.error


def told_all(made: Registry, *bodies: bytes) -> None:
    """Within one look of the others: nothing is awaited."""
    for each in bodies:
        registers = b"url" in each or b"endpoint" in each
        assert (register(made, each) if registers else made.unregister(each)).status == 200


def names(made: Registry) -> set[str]:
    return {key.instance_id for key in made.publishers}


async def written(made: Registry) -> None:
    assert made._file is not None
    await until(lambda: not made._file.changes)  # type: ignore[union-attr]


@with_deadline
async def test_a_restart_forgets_nobody(path: Path) -> None:
    async with registry(path) as (made, _):
        for name in ("a", "b", "c"):
            assert register(made, body(name, role="prefill", bootstrap=7)).status == 200
        assert made.unregister(b'{"instance_id": "b"}').status == 200
        await written(made)
        before = made._engines()
    assert path.stat().st_mode & 0o777 == 0o600
    async with registry(path) as (made, listener):
        assert listener.sets[0] == ["a", "c"]  # with the first that it says
        assert made._engines() == before


@with_deadline
async def test_what_was_answered_just_before_the_end_is_kept(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while another process is writing, or this one was."""
    monkeypatch.setattr(module, "LOOK_EVERY_S", 60.0)
    async with registry(path) as (made, _):
        told_all(made, body("a"), body("b"))
    async with registry(path) as (made, listener):
        assert listener.sets[0] == ["a", "b"]
        told_all(made, b'{"instance_id": "a"}', body("c"))
        lock = path.with_name(f"{path.name}.lock").open("rb")
        fcntl.flock(lock, fcntl.LOCK_EX)
        asyncio.get_running_loop().call_later(0.05, lock.close)
    async with registry(path) as (_, listener):
        assert listener.sets[0] == ["b", "c"]


@with_deadline
async def test_what_one_is_told_all_know(path: Path) -> None:
    async with registry(path) as (one, of_one), registry(path) as (two, of_two):
        assert register(one, body("a")).status == 200
        assert register(two, body("b")).status == 200
        await until(lambda: names(one) == names(two) == {"a", "b"})
        assert register(two, body("a", "http://elsewhere:1")).status == 200
        await until(
            lambda: {each.spec.url for each in one._engines()} == {"http://elsewhere:1", "http://b:1"}
        )
        assert one.unregister(b'{"instance_id": "b"}').status == 200
        await until(lambda: names(two) == {"a"})
        assert of_two.ended[-1] == {"b"}  # it said so itself: there is no grace for it
        assert of_one.last == of_two.last


class Shared:
    """A registry that looks at the file when it is told to."""

    def __init__(self, path: Path) -> None:
        self.file = RegistryFile(str(path))
        self.registry = Registry(NoStreams(), clock=Clock(), file=self.file)

    async def look(self) -> set[str]:
        await self.registry._sync(self.file)
        return names(self.registry)


@with_deadline
async def test_what_one_was_told_to_forget_no_heartbeat_at_another_brings_back(path: Path) -> None:
    one, two = Shared(path), Shared(path)
    told_all(one.registry, body("a", ttl_s=10))
    assert await one.look() == await two.look() == {"a"}
    told_all(two.registry, body("a", ttl_s=10))  # as an engine does that then ends
    told_all(one.registry, b'{"instance_id": "a"}')
    assert await one.look() == await two.look() == await one.look() == set()
    told_all(two.registry, body("a", ttl_s=10), body("a", ttl_s=10))  # it is back, and has renewed that
    assert await two.look() == await one.look() == {"a"}
    path.unlink()
    told_all(two.registry, body("a", ttl_s=10))
    assert await two.look() == await one.look() == {"a"}
    assert "http://a:1" in path.read_text()


@with_deadline
async def test_no_heartbeat_from_before_brings_an_old_address_back(path: Path) -> None:
    one, two = Shared(path), Shared(path)
    told_all(one.registry, body("a", ttl_s=10))
    assert await one.look() == await two.look() == {"a"}
    told_all(two.registry, body("a", ttl_s=10))  # then it is started again, at another port
    told_all(one.registry, body("a", "http://a:2", ttl_s=10))
    for each in (one, two, one):
        await each.look()
    assert [each.registry._engines()[0].spec.url for each in (one, two)] == ["http://a:2"] * 2


@with_deadline
async def test_while_nothing_can_be_written_little_is_remembered(path: Path) -> None:
    one, lock = Shared(path), path.with_name(f"{path.name}.lock")
    told_all(one.registry, body("a"))
    await one.look()
    lock.unlink()
    lock.mkdir()
    for number in range(20):
        told_all(one.registry, body(f"b{number}"), b'{"instance_id": "b%d"}' % number)
    told_all(one.registry, body("stays"), b'{"instance_id": "a"}')
    assert await one.look() == {"stays"}
    assert {key.instance_id for key in one.file.changes} == {"stays", "a"}
    lock.rmdir()
    assert await one.look() == await Shared(path).look() == {"stays"}
    assert not one.file.changes


@with_deadline
async def test_what_others_wrote_is_known_though_nothing_could_be_written(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = Shared(path), Shared(path)
    told_all(one.registry, body("a"))
    assert await one.look() == await two.look() == {"a"}
    told_all(one.registry, body("b"))
    await one.look()
    told_all(two.registry, body("c"), b'{"instance_id": "c"}')
    with monkeypatch.context() as full:
        full.setattr(registry_file.os, "replace", Raises(OSError(errno.ENOSPC, "full")))
        await two.look()
    assert not two.file.changes  # nothing is left to be written, which would read it, too
    assert await two.look() == {"a", "b"}


@with_deadline
async def test_who_ends_while_nothing_can_be_written_is_not_remembered_for_ever(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PUBLISHERS_MAX", 4)
    path.with_name("a.lock").mkdir(parents=True)
    clock = Clock()
    async with registry(path.with_name("a"), clock) as (made, _):
        for number in range(0, 9, 3):
            told_all(made, *(body(f"b{number + each}", ttl_s=10) for each in range(3)))
            clock.now_s += 10.0
            made._changed.set()
            await until(lambda: not made.publishers)
        assert [key.instance_id for key in made._dead] == ["b5", "b6", "b7", "b8"]
        assert made._file is not None
        await until(lambda: not made._file.changes)  # type: ignore[union-attr]


def locked(path: Path) -> bool:
    """Whether somebody has the lock; a lock is its descriptor's, so here, too, it is another's."""
    with path.with_name(f"{path.name}.lock").open("rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


@with_deadline
async def test_a_heartbeat_lets_nobody_wait_for_the_disk_and_writes_only_what_others_need(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = Shared(path), Shared(path)
    synced: list[bool] = []
    monkeypatch.setattr(registry_file.os, "fsync", lambda _: synced.append(locked(path)))
    told_all(one.registry, body("a"), body("b", ttl_s=10))
    assert await one.look() == await two.look() == {"a", "b"}
    assert synced == [True]
    told_all(one.registry, body("a", ttl_s=10))  # a ttl is news
    told_all(two.registry, body("b", ttl_s=10))
    await one.look()
    await two.look()
    assert synced == [True, False, False]
    told_all(two.registry, body("a"))
    await two.look()
    before = path.read_text()
    told_all(two.registry, body("a"))
    assert not two.file.changes
    told_all(two.registry, body("b", ttl_s=10))
    await two.look()
    assert path.read_text() != before  # the others count its time from now on
    path.unlink()
    await two.look()
    told_all(two.registry, body("a"))
    await two.look()
    assert "http://a:1" in path.read_text()


@with_deadline
async def test_what_others_wrote_is_read_while_one_of_them_writes(path: Path) -> None:
    one, two, three = Shared(path), Shared(path), Shared(path)
    told_all(one.registry, body("a"))
    await one.look()
    told_all(three.registry, body("c"))
    with path.with_name(f"{path.name}.lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert await three.look() == {"a", "c"}
        assert await two.look() == {"a"}
    assert await three.look() == await two.look() == {"a", "c"}


@with_deadline
async def test_who_takes_the_place_of_one_that_went_is_there_everywhere(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its name, its stream: both within one look."""
    gone = b'{"instance_id": "%s"}'
    async with (
        registry(path, streams=FewStreams(1)) as (one, _),
        registry(path, streams=FewStreams(1)) as (two, of_two),
    ):
        stream_of = {
            name: json.dumps({"instance_id": name, "endpoint": "tcp://h:1"}).encode() for name in "st"
        }
        told_all(one, body("e"), stream_of["s"])
        await until(lambda: names(two) == {"e", "s"})
        told_all(one, gone % b"e", body("e", "http://other:1", dp_rank=1), gone % b"s", stream_of["t"])
        await until(lambda: two.publishers.keys() == one.publishers.keys())
        assert {(key.instance_id, key.dp_rank) for key in two.publishers} == {("e", 1), ("t", 0)}
        assert [each.spec.url for each in of_two.last] == ["http://other:1"]
    assert not caplog.records


@contextlib.asynccontextmanager
async def roomy_and_full(path: Path, clock: Clock | None = None) -> AsyncIterator[tuple[Registry, Registry]]:
    """Two that share a file: the first may follow two streams, the second, which has the clock, one."""
    async with (
        registry(path, streams=FewStreams(2)) as (one, _),
        registry(path, clock, FewStreams(1)) as (two, _),
    ):
        yield one, two


@with_deadline
async def test_who_found_no_room_is_taken_when_there_is(path: Path) -> None:
    clock = Clock()
    async with roomy_and_full(path, clock) as (one, two):
        for name, ttl_s in (("s", 10), ("t", 0)):
            told = {"instance_id": name, "endpoint": "tcp://h:1", "ttl_s": ttl_s}
            assert register(one, json.dumps(told).encode()).status == 200
        await until(lambda: bool(two._left_out))
        assert names(two) == {"s"}
        clock.now_s = 20.0  # s ends there, and the file stays as it is
        two._changed.set()
        await until(lambda: names(two) == {"t"})


@with_deadline
async def test_who_found_no_room_at_one_is_unregistered_everywhere(path: Path) -> None:
    async with roomy_and_full(path) as (one, two):
        for name in "st":
            told = {"instance_id": name, "endpoint": "tcp://h:1"}
            assert register(one, json.dumps(told).encode()).status == 200
        await until(lambda: bool(two._left_out))
        assert two.unregister(b'{"instance_id": "t"}').status == 200
        assert two.unregister(b'{"instance_id": "t"}').status == 404
        await until(lambda: names(one) == names(two) == {"s"})


@with_deadline
async def test_who_said_something_else_is_taken_when_what_it_said_before_is_over(path: Path) -> None:
    clock = Clock()
    stream = {"endpoint": "tcp://h:1"}
    async with roomy_and_full(path, clock) as (one, two):
        register(one, json.dumps({"instance_id": "s", "ttl_s": 10, **stream}).encode())
        register(one, body("a", ttl_s=10))
        await until(lambda: names(two) == {"s", "a"})
        register(one, json.dumps({"instance_id": "a", **stream}).encode())
        await until(lambda: bool(two._left_out))
        clock.now_s = 20.0  # both end there, and the file stays as it is
        two._changed.set()
        await until(
            lambda: {each.told.instance_id: each.told.url for each in two.publishers.values()} == {"a": ""}
        )


@with_deadline
async def test_who_is_not_made_again_ends_everywhere_and_in_the_file(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "DEAD_S", 0.0)
    clocks = Clock(), Clock()
    async with registry(path, clocks[0]) as (one, of_one), registry(path, clocks[1]) as (two, of_two):
        register(one, body("a", ttl_s=10))
        register(one, body("stays"))
        await until(lambda: names(two) == {"a", "stays"})
        for clock in clocks:
            clock.now_s = 9.0
        register(two, body("a", ttl_s=10))  # again, at another process
        await written(two)
        await until(lambda: one.publishers[next(iter(one.publishers))].expires_s == 19.0)
        for clock in clocks:
            clock.now_s = 20.0
        for each in (one, two):
            each._changed.set()
        await until(lambda: names(one) == names(two) == {"stays"})
        assert not any((*of_one.ended, *of_two.ended))  # it may come back: the grace counts
        clocks[0].now_s = 21.0
        await until(lambda: "http://a:1" not in path.read_text())
        register(two, body("a", ttl_s=10))
        await until(lambda: names(one) == {"a", "stays"})


@with_deadline
@pytest.mark.parametrize("broken", [b"", b"{", b'{"registrations": [{"told": {}}]}', b"\xff" * 100])
async def test_a_broken_file_is_none_and_is_said_once(
    path: Path, broken: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path.parent.mkdir()
    path.write_bytes(broken)
    async with registry(path) as (made, listener):
        assert listener.sets[0] == []
        assert register(made, body("a")).status == 200
        await written(made)
        assert [record.message.partition(" (")[0] for record in caplog.records] == [
            f"{path} has no registrations"
        ]
    async with registry(path) as (_, listener):
        assert listener.sets[0] == ["a"]


@with_deadline
async def test_a_file_that_breaks_or_goes_takes_nobody_along(path: Path) -> None:
    async with registry(path) as (one, _), registry(path) as (two, _):
        register(one, body("a"))
        await until(lambda: names(two) == {"a"})
        for ttl_s, spoil in enumerate((lambda: path.write_text("{"), path.unlink)):
            spoil()
            assert register(two, body("b", ttl_s=ttl_s)).status == 200
            await written(two)
            await until(lambda: names(one) == names(two) == {"a", "b"})
            assert {"http://a:1", "http://b:1"} <= set(path.read_text().split('"'))
        wrong = {"told": {"instance_id": "c", "url": "ftp:"}, "made": 1}
        path.write_text(json.dumps({"registrations": [wrong]}))
        await until(lambda: names(one) == names(two) == set())  # whoever writes it says what there is


@with_deadline
async def test_where_nothing_can_be_written_engines_serve_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "registered.json"
    one = MockEngine("one")
    await one.start()
    async with bed(
        0, discovery=("http",), policy="conductor", tokenizer=("none",), discovery_registry_file=str(path)
    ) as b:
        b.engines.append(one)
        assert (await b.ask("POST", "/register", body("one", one.spec.url))).status == 200
        await until(lambda: bool(b.proxy.engines) and b.proxy.engines[0].liveness.healthy)
        assert (await b.ask("POST", "/v1/completions", b"{}")).status == 200
        await until(lambda: any("cannot be kept in" in record.message for record in caplog.records))


@with_deadline
async def test_several_agree_whatever_they_are_told(path: Path, rng: random.Random) -> None:
    """Each name is told to one of them at a time, as an engine does."""
    async with contextlib.AsyncExitStack() as stack:
        all_: list[Registry] = []
        for _ in range(3):
            all_.append((await stack.enter_async_context(registry(path)))[0])
        expected: dict[str, str] = {}

        def same(each: Registry) -> bool:
            return {one.name: one.spec.url for one in each._engines()} == expected

        for _ in range(40):
            for name in rng.sample("abcdefgh", 4):
                told: Any = rng.choice(all_)
                if name in expected and rng.random() < 0.4:
                    if told.unregister(json.dumps({"instance_id": name}).encode()).status == 200:
                        del expected[name]
                else:
                    expected[name] = f"http://{name}:{rng.randrange(1, 4)}"
                    assert register(told, body(name, expected[name], ttl_s=rng.choice((0, 60)))).status == 200
                await asyncio.sleep(0)
            await until(lambda: all(map(same, all_)))
