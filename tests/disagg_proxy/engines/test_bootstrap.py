"""What a bootstrap page says, what is remembered of it, and which settings lead to one."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from moonpool.core.errors import ConfigError
from moonpool.disagg_proxy.engines import health
from moonpool.disagg_proxy.engines.bootstrap import (
    RETRY_S_MAX,
    Bootstrap,
    Rank,
    is_next,
    parameters,
    read_page,
)
from moonpool.disagg_proxy.engines.bootstrap_conflicts import BootstrapConflicts
from moonpool.disagg_proxy.engines.bootstrap_trust import DISTRUST_S, LATE_MAX, LATE_S
from moonpool.disagg_proxy.engines.engine import bootstrap_of
from moonpool.disagg_proxy.engines.health import _ranks_at
from moonpool.disagg_proxy.settings import EngineSpec, ProxySettings, parse_engines
from tests.disagg_proxy.harness import with_deadline

URL = "http://h:8998"
ONE = (Rank("a", URL),)


def page(**members: str) -> bytes:
    return json.dumps(
        {key[1:]: {"engine_id": name, "worker_addr": {}} for key, name in members.items()}
    ).encode()


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_pages_of_one_engine_and_of_several_ranks() -> None:
    assert read_page(page(r0="x"), URL) == (Rank("x", URL),)
    assert read_page(page(r1="x_dp1", r0="x_dp0"), URL) == (Rank("x_dp0", URL, 0), Rank("x_dp1", URL, 1))
    assert read_page(page(r0="x", r1="y"), URL) == (Rank("x", URL, 0), Rank("y", URL, 1))
    assert read_page(page(r3="x_dp3"), URL) == (Rank("x_dp3", URL, 0),)  # alone behind its address
    assert read_page(page(r0="x_dp0", r1="y_dp1"), URL) == (Rank("x_dp0", URL, 0),)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"[]",
        b"\xff",
        b'{"0":1}',
        b'{"0":{}}',
        b'{"x":{"engine_id":"a"}}',
        page(r0=""),
        b"[" * 10_000,
        page(r0="x" * 300),
        b'{"0":{"engine_id":7}}',
    ],
)
def test_what_is_no_page(body: bytes) -> None:
    assert read_page(body, URL) == ()


@asynccontextmanager
async def pages(bodies: Sequence[bytes | None]) -> AsyncIterator[int]:
    """Served at neighbouring ports; yields the first. None: says nothing."""
    gone = asyncio.Event()

    async def serve(body: bytes | None, port: int) -> asyncio.Server:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"GET /query ")
            if body is None:
                await gone.wait()
                return writer.close()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
            await writer.drain()
            writer.close()

        return await asyncio.start_server(answer, "127.0.0.1", port)

    while True:
        async with AsyncExitStack() as stack:
            try:
                first = 0
                for place, body in enumerate(bodies):
                    server = await serve(body, first + place if first else 0)
                    stack.callback(server.close)
                    first = first or server.sockets[0].getsockname()[1]
            except (OSError, OverflowError):
                continue  # a neighbour is taken
            yield first
            gone.set()
            return


@with_deadline
async def test_further_ranks_are_found_at_the_next_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "_NEXT_RANK_S", 5.0)  # each answers
    others = [page(r0="x_dp0"), page(r1="x_dp1"), page(r2="x_dp2"), page(r3="other_dp3")]
    async with pages(others) as port:
        ranks = await _ranks_at("127.0.0.1", port, 5.0)
        assert [(rank.engine_id, rank.number) for rank in ranks] == [("x_dp0", 0), ("x_dp1", 1), ("x_dp2", 2)]
        assert [rank.url for rank in ranks] == [f"http://127.0.0.1:{port + place}" for place in range(3)]
    async with pages([page(r0="x"), page(r0="y")]) as port:  # two engines of one host
        assert [rank.engine_id for rank in await _ranks_at("127.0.0.1", port, 5.0)] == ["x"]


@with_deadline
async def test_the_page_of_another_engine_ends_the_ranks() -> None:
    """Two engines of one deployment, each an address of its own here."""
    async with pages([page(r0="x_dp0"), page(r1="x_dp1")]) as port:
        specs = [EngineSpec(f"p{n}", f"http://127.0.0.1:{n + 1}", "prefill", str(port + n)) for n in range(2)]
        settings = ProxySettings(engines=(*specs, EngineSpec("d", "http://127.0.0.1:3", "decode")))
        for spec, name in zip(specs, ("x_dp0", "x_dp1"), strict=True):
            known = bootstrap_of(spec, settings, BootstrapConflicts(settings.engines))
            assert known is not None
            ranks = await _ranks_at(*known.address, 5.0, known.pages)
            assert [rank.engine_id for rank in ranks] == [name]


@with_deadline
async def test_a_port_that_drops_packets_costs_no_rank() -> None:
    """As behind a firewall: it accepts, and never answers."""
    async with pages([page(r0="x_dp0"), page(r1="x_dp1"), None]) as port:
        ranks = await _ranks_at("127.0.0.1", port, 5.0)
        assert [rank.engine_id for rank in ranks] == ["x_dp0", "x_dp1"]
        with pytest.raises(TimeoutError):
            await _ranks_at("127.0.0.1", port + 2, 0.05)


@with_deadline
async def test_a_lack_of_our_own_in_the_middle_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def get(address: tuple[str, int], path: str) -> tuple[int, bytes, tuple[str, int]]:
        if address[1] == 2:
            raise OSError(errno.EMFILE, "Too many open files")
        return 200, page(r0="x_dp0"), address

    monkeypatch.setattr(health, "_get", get)
    with pytest.raises(OSError, match="open files"):
        await _ranks_at("h", 1, 5.0)


def test_a_rank_that_is_not_seen_once_is_no_restart() -> None:
    known = Bootstrap("p", ("h", 1), expected=True, retry_s=1.0)
    two = read_page(page(r0="x_dp0", r1="x_dp1"), URL)
    for ranks in (two, two[:1], two):
        known.answered(ranks, 0.0)
        assert known.take() in ranks
        known.check_integrity()
    assert (known.restarts, known.stale) == (0, 0)
    known.answered(read_page(page(r0="y_dp0"), URL), 0.0)
    assert known.restarts == 1


def test_the_next_rank_is_of_the_same_engine() -> None:
    assert is_next(Rank("x_dp0", URL), Rank("x_dp1", URL))
    for other in ("x", "y_dp1", "x_dp2", "x_dp0"):
        assert not is_next(Rank("x_dp0", URL), Rank(other, URL))


def test_ranks_take_turns_and_restarts_are_counted() -> None:
    known = Bootstrap("p", ("h", 1), expected=True, retry_s=1.0)
    assert known.take() is None
    two = read_page(page(r0="x_dp0", r1="x_dp1"), URL)
    known.answered(two, 0.0)
    assert {known.take(), known.take()} == set(two)
    known.answered(two, 0.0)
    assert (known.restarts, known.stale) == (0, 0)
    known.take()
    known.engine_left()
    assert known.take() is None
    known.answered(read_page(page(r0="y_dp0", r1="y_dp1"), URL), 0.0)
    assert (known.restarts, known.stale) == (1, 1)
    known.check_integrity()


def test_a_missing_page_is_asked_for_less_often_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    for expected in (True, False):
        caplog.clear()
        known, now_s, asked = Bootstrap("p", ("h", 1), expected=expected, retry_s=1.0), 0.0, 0
        while now_s < 600:
            if known.is_due(now_s):
                known.failed("refused", now_s)
                asked += 1
            now_s += 1.0
        assert 600 / RETRY_S_MAX <= asked < 30
        assert len(warnings_in(caplog)) == expected
    caplog.clear()
    known.answered(ONE, now_s)
    known.failed("refused", now_s)  # it was there: now somebody counts on it
    known.failed("refused", now_s)
    (warning,) = warnings_in(caplog)
    assert "#bootstrap=PORT" in warning


def late(known: Bootstrap, count: int, now_s: float, *, concurrent: bool = True) -> None:
    for _ in range(count):
        known.met(7, LATE_S + 1, concurrent=concurrent, now_s=now_s)


def test_a_page_of_another_engine_is_found_out(caplog: pytest.LogCaptureFixture) -> None:
    known = Bootstrap("p", ("h", 1), expected=False, retry_s=1.0)
    known.answered(ONE, 0.0)
    late(known, LATE_MAX - 1, 10.0)
    assert known.up
    late(known, 5, 10.0)
    assert len(warnings_in(caplog)) == 1
    for now_s, up in ((11.0, False), (10.0 + DISTRUST_S, True)):
        known.answered(ONE, now_s)
        assert known.up == up
    late(known, LATE_MAX, 500.0)
    known.answered((Rank("b", URL),), 501.0)  # the engine restarted
    assert known.take() == Rank("b", URL)
    known.check_integrity()


def test_a_page_is_believed_again_when_two_steps_are_as_late() -> None:
    known = Bootstrap("p", ("h", 1), expected=False, retry_s=1.0)
    known.answered(ONE, 0.0)
    late(known, LATE_MAX, 10.0)
    late(known, LATE_MAX - 1, 11.0, concurrent=False)
    known.answered(ONE, 11.0)
    assert not known.up
    late(known, 1, 12.0, concurrent=False)
    known.answered(ONE, 12.0)
    assert known.up
    late(known, 100, 13.0)
    assert known.up  # nor is it doubted again at once
    known.check_integrity()


def test_two_engines_whose_pages_say_the_same_take_two_steps(caplog: pytest.LogCaptureFixture) -> None:
    """localhost and 127.0.0.1, or two names of one host: the settings cannot tell."""
    first, second, third = pages = [
        Bootstrap(name, (name, 1), expected=False, retry_s=1.0) for name in ("a", "b", "c")
    ]
    first.answered(ONE, 0.0, pages)
    third.answered((Rank("other", URL),), 0.0, pages)
    assert first.up
    for now_s in range(5):
        second.answered(ONE, now_s, pages)
        assert (first.up, second.up, third.up) == (False, False, True)
        first.answered(ONE, now_s, pages)
        assert (first.up, second.up, third.up) == (False, False, True)
    assert not first.is_due(4.5)  # less often, as one that does not answer
    assert len(warnings_in(caplog)) == 2
    assert "is the page of engine a, too" in caplog.text
    second.answered((Rank("own", URL),), 6.0, pages)
    first.answered(ONE, 6.0, pages)
    assert (first.up, second.up) == (True, True)


def test_the_parameters_of_both() -> None:
    prefill, decode = map(json.loads, parameters(Rank('a"b', URL), "t"))
    assert prefill == {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "t"}
    assert decode == {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_engine_id": 'a"b',
        "remote_bootstrap_addr": URL,
        "transfer_id": "t",
    }


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("http://a:1", ("a", 8998)),
        ("http://a:1#bootstrap=2", ("a", 2)),
        ("p=http://a:1/#bootstrap=b:2", ("b", 2)),
        ("http://[::1]:1", ("::1", 8998)),
        ("http://a:1#bootstrap=[::2]:3", ("::2", 3)),
        ("http://a:1#bootstrap=0", None),
    ],
)
def test_where_the_page_is(text: str, address: tuple[str, int] | None) -> None:
    (spec,) = parse_engines([text], "prefill")
    assert spec.bootstrap_address == address
    assert spec.address[1] == 1


@pytest.mark.parametrize("option", ["x", "-1", "99999", "a:", ":1", "http://a:1"])
def test_what_is_no_place_for_a_page(option: str) -> None:
    with pytest.raises(ConfigError, match="#bootstrap=PORT"):
        parse_engines([f"http://a:1#bootstrap={option}"], "prefill")


def test_only_prefill_engines_have_a_page() -> None:
    with pytest.raises(ConfigError, match="a decode engine has no bootstrap page"):
        parse_engines(["http://a:1#bootstrap=2"], "decode")
    assert parse_engines(["http://a:1"])[0].bootstrap_address is None


DECODE = EngineSpec("d", "http://d:1", "decode")


def test_engines_that_would_share_a_page_take_two_steps() -> None:
    """Whose id is it? A wrong one would let decode wait for nothing."""
    specs = tuple(EngineSpec(f"p{n}", f"http://h:{n}", "prefill") for n in (1, 2))
    settings = ProxySettings(engines=(*specs, DECODE))
    all_of_them = BootstrapConflicts(settings.engines)
    assert [
        bootstrap_of(spec, settings, BootstrapConflicts(settings.engines)) for spec in settings.engines
    ] == [None] * 3
    with pytest.raises(ConfigError, match="several prefill engines"):
        ProxySettings(engines=(*specs, DECODE), handover="concurrent")
    given = EngineSpec("p3", "http://h:3", "prefill", "8998")
    with pytest.raises(ConfigError, match="several prefill engines"):
        ProxySettings(engines=(specs[0], given, DECODE))
    apart = EngineSpec("p4", "http://h:4", "prefill", "8999")
    settings = ProxySettings(engines=(specs[0], apart, DECODE))
    all_of_them = BootstrapConflicts(settings.engines)
    found = [bootstrap_of(spec, settings, all_of_them) for spec in settings.engines]
    assert [known and known.address[1] for known in found] == [8998, 8999, None]


@pytest.mark.parametrize(
    ("prefill", "decode", "works"),
    [
        ("http://localhost:1", "http://10.0.0.3:1", False),
        ("http://127.0.0.1:1", "http://d:1", False),
        ("http://[::1]:1", "http://d:1", False),
        ("http://p:1#bootstrap=127.0.0.1:8998", "http://d:1", False),
        ("http://localhost:1#bootstrap=p:8998", "http://d:1", True),
        ("http://localhost:1", "http://127.0.0.1:2", True),
        ("http://10.0.0.2:1", "http://10.0.0.3:1", True),
        ("http://10.0.0.2:1", "http://localhost:1", True),
    ],
)
def test_a_page_that_decode_engines_cannot_reach(
    prefill: str, decode: str, works: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """They would ask themselves, and compute every prompt anew."""
    (spec,) = parse_engines([prefill], "prefill")
    settings = ProxySettings(engines=(spec, *parse_engines([decode], "decode")))
    assert (bootstrap_of(spec, settings, BootstrapConflicts(settings.engines)) is not None) == works
    assert len(warnings_in(caplog)) == (not works)


def test_two_steps_need_no_bootstrap() -> None:
    spec = EngineSpec("p", "http://h:1", "prefill")
    two_step = ProxySettings(engines=(spec, DECODE), handover="two_step")
    assert bootstrap_of(spec, two_step, BootstrapConflicts(two_step.engines)) is None
