"""Proxies that speak to each other, over real sockets."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import zmq

from moonpool.core.errors import ConfigError
from moonpool.core.service import zmq_curve
from moonpool.core.version_range import VersionRange
from moonpool.disagg_proxy.peers.peer_bus import PeerBus
from moonpool.disagg_proxy.peers.settings import PeerSettings
from moonpool.disagg_proxy.peers.wire import (
    VERSIONS,
    BlocksExpected,
    Change,
    Gone,
    Head,
    Kind,
    Sent,
    decode_head,
    encode,
)
from tests.token_file import NEW, OLD, STEPS, TokenFile, is_refused

DEADLINE_S = 20.0
WALL = 1_800_000_000.0
QUICK = {"gather_s": 0.001, "beat_s": 0.05, "silent_s": 0.6, "resolve_s": 0.1, "state_s": 0.01}


class Proxy:
    """A link, what it has in flight, and what it heard of others: by sender the requests it knows of."""

    def __init__(
        self, listen: str, *peers: str, token: bytes = b"", waits: bool = False, **more: float
    ) -> None:
        self.flight: dict[int, Sent] = {}
        self.known: dict[str, set[int]] = {}
        self.lags_s: list[float] = []
        self.changed = threading.Condition()
        settings = PeerSettings((listen,), peers, token, **{**QUICK, **more})  # type: ignore[arg-type]
        self.waits = waits
        self.bus = PeerBus(
            settings,
            hear=self._hear,
            lost=self._lost,
            state=self._state,
            waits=waits,
            wall=lambda: WALL,
        )

    def send(self, request: int) -> None:
        with self.changed:
            self.flight[request] = sent = Sent(request, "e0", "e0", 5, 0, 0, 1.0, False)
            self.bus.tell(sent)

    def end(self, request: int) -> None:
        with self.changed:
            del self.flight[request]
            self.bus.tell(Gone(request))

    def wait(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, DEADLINE_S), self.known

    def wait_for(self, *known: set[int]) -> None:
        self.wait(lambda: sorted(map(sorted, self.known.values())) == sorted(map(sorted, known)))

    def _hear(self, sender: str, kind: Kind, changes: list[Change], lag_s: float) -> None:
        with self.changed:
            self.lags_s.append(lag_s)
            known = self.known.setdefault(sender, set())
            if kind is Kind.STATE:
                known.clear()
            for change in changes:
                if isinstance(change, Sent):
                    assert change.request not in known, "told twice"
                    known.add(change.request)
                elif isinstance(change, Gone):
                    known.discard(change.request)
            self.changed.notify_all()

    def _lost(self, sender: str) -> None:
        with self.changed:
            self.known.pop(sender, None)
            self.changed.notify_all()

    def _state(self, then: Callable[[], None]) -> list[Change]:
        with self.changed:
            then()
            return list(self.flight.values())


@contextmanager
def proxies(*them: Proxy) -> Iterator[None]:
    with ExitStack() as stack:
        for each in them:
            stack.callback(each.bus.stop)
            each.bus.start(waits=each.waits)
        yield


@pytest.fixture
def at(tmp_path: Path) -> Callable[[str], str]:
    folder = Path(os.path.relpath(tmp_path))  # socket paths are short
    return lambda name: f"ipc://{min(str(folder), str(tmp_path), key=len)}/{name}"


def test_each_hears_of_all_others(at: Callable[[str], str]) -> None:
    names = [at(name) for name in "abc"]
    three = [Proxy(name, *(other for other in names if other != name)) for name in names]
    with proxies(*three):
        for number, proxy in enumerate(three):
            for request in range(100):
                proxy.send(request * 10 + number)
        whole = [{request * 10 + number for request in range(100)} for number in range(3)]
        for number, proxy in enumerate(three):
            proxy.wait_for(*(each for other, each in enumerate(whole) if other != number))
        for request in range(0, 1000, 10):
            three[0].end(request)
        three[1].wait_for(set(), whole[2])


def test_a_state_takes_back_no_blocks(at: Callable[[str], str]) -> None:
    """They wait to be told when the state is made, and are in none."""
    one = Proxy(at("a"))
    try:
        one.send(1)
        one.bus.tell(BlocksExpected("e0", 16, b"k" * 16))
        one.send(2)
        assert [sent.request for sent in one._state(one.bus._forget_told)] == [1, 2]  # type: ignore[union-attr]
        assert list(one.bus._outbox) == [BlocksExpected("e0", 16, b"k" * 16)]
    finally:
        one.bus.stop()


def test_who_comes_later_is_told_all_and_who_restarts_begins_anew(at: Callable[[str], str]) -> None:
    a, b = at("a"), at("b")
    early = Proxy(a, b)
    with proxies(early):
        for request in range(3):
            early.send(request)
        for _ in range(2):
            late = Proxy(b, a)
            with proxies(late):
                late.send(7)
                late.wait_for({0, 1, 2})
                early.wait_for({7})
            early.wait_for()  # it is silent: nothing of it is counted


def test_a_proxy_that_reads_nothing_holds_nobody_up_and_catches_up(at: Callable[[str], str]) -> None:
    speaker = Proxy(at("a"))
    stuck = threading.Event()
    go_on = threading.Event()
    listener = Proxy(at("b"), at("a"), queue_messages_max=5)
    heard = listener._hear

    def hear(sender: str, kind: Kind, changes: list[Change], lag_s: float) -> None:
        if changes and not go_on.is_set():
            stuck.set()
            assert go_on.wait(DEADLINE_S)
        heard(sender, kind, changes, lag_s)

    listener.bus._hear = hear
    with proxies(speaker, listener):
        speaker.send(0)
        assert stuck.wait(DEADLINE_S)
        for request in range(1, 60_000):  # more than all queues take
            speaker.send(request)
        go_on.set()
        listener.wait_for(set(range(60_000)))


def test_only_who_has_the_token_hears(at: Callable[[str], str]) -> None:
    token = b"t" * 32
    speaker = Proxy("127.0.0.1:0", token=token)
    where = f"127.0.0.1:{speaker.bus.where.rpartition(':')[2]}"
    same = Proxy(at("b"), where, token=token)
    other = Proxy(at("c"), where, token=b"u" * 32)
    none = Proxy(at("d"), where)
    with proxies(speaker, same, other, none):
        speaker.send(1)
        same.wait_for({1})
        assert not other.known
        assert not none.known


def test_one_secret_replaces_another_while_proxies_speak(at: Callable[[str], str], tmp_path: Path) -> None:
    """Each is ahead of the other in some step; a third one begins in between."""
    files = {name: TokenFile(tmp_path / name) for name in ("speaker", "hearer", "late")}
    speaker = Proxy("127.0.0.1:0", token=files["speaker"].token())
    where = f"127.0.0.1:{speaker.bus.where.rpartition(':')[2]}"
    hearer = Proxy(at("b"), where, token=files["hearer"].token())
    orders = (("speaker", "hearer", "late"), ("late", "hearer", "speaker"), ("hearer", "speaker", "late"))
    sent: set[int] = set()
    with proxies(speaker, hearer):
        for step, order in zip(STEPS, orders, strict=True):
            for name in order:
                files[name].replace(step)
                speaker.send(number := len(sent))
                sent.add(number)
                hearer.wait_for(sent)
                with proxies(late := Proxy(at(f"late{number}"), where, token=files["late"].token())):
                    late.wait_for(sent)
        assert is_refused(f"tcp://{where}", zmq_curve.PEERS, OLD)
        assert not is_refused(f"tcp://{where}", zmq_curve.PEERS, NEW)


def test_a_proxy_that_waits_for_its_address_serves_under_the_secret_of_then(tmp_path: Path) -> None:
    file = TokenFile(tmp_path / "token")
    before = Proxy("127.0.0.1:0", token=file.token())
    where = f"127.0.0.1:{before.bus.where.rpartition(':')[2]}"
    after = Proxy(where, token=file.token(), waits=True)
    until_s = time.monotonic() + DEADLINE_S
    with proxies(after):
        with proxies(before):
            file.replace(NEW)
            while after.bus._keys is None or after.bus._keys._secret != NEW:
                assert time.monotonic() < until_s
                time.sleep(0.01)
        while after.bus._unbound:
            assert time.monotonic() < until_s
            time.sleep(0.01)
        assert not is_refused(f"tcp://{where}", zmq_curve.PEERS, NEW)


def test_its_own_address_and_two_ways_to_one_proxy_count_once(at: Callable[[str], str]) -> None:
    a, b, again = at("a"), at("b"), at("again")
    one = Proxy(a, a, b)
    two = Proxy(b, a)
    other = Proxy(at("c"), b)
    os.symlink(b.removeprefix("ipc://").rpartition("/")[2], again.removeprefix("ipc://"))
    both = Proxy(at("d"), b, again)
    with proxies(one, two, other, both):
        for request in range(10):
            two.send(request)
        for each in (one, other, both):
            each.wait_for(set(range(10)))
        one.send(3)
        two.wait_for({3})
        until_s = time.monotonic() + DEADLINE_S
        while [row["connected"] for row in both.bus.stats().values()] != [1.0]:
            assert time.monotonic() < until_s, both.bus.stats()
            threading.Event().wait(0.01)


def test_a_gap_and_nonsense_are_noticed_and_mended(at: Callable[[str], str]) -> None:
    """A proxy of the test's own that skips a message, then says what cannot be read."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    pub = context.socket(zmq.XPUB)
    pub.setsockopt(zmq.XPUB_VERBOSE, 1)
    pub.bind(at("fake"))
    proxy = Proxy(at("a"), at("fake"), silent_s=DEADLINE_S)

    def say(sequence: int, kind: Kind, *changes: Change, sent_at: float = 0.0) -> None:
        pub.send_multipart(encode(Head(VERSIONS.highest, "fake", sequence, kind, sent_at), list(changes)))

    def sent(request: int) -> Sent:
        return Sent(request, "e0", "e0", 5, 0, 0, 1.0, False)

    with proxies(proxy):
        assert pub.poll(int(DEADLINE_S * 1000))
        assert pub.recv() == b"\x01"
        say(1, Kind.STATE, sent(1))
        proxy.wait_for({1})
        pub.send_multipart([b"nonsense", b""])
        pub.send_multipart([b"\x94\x01", b"", b"three"])
        say(3, Kind.CHANGES, sent(3))  # 2 is missing
        while pub.poll(int(DEADLINE_S * 1000)) and pub.recv() != b"\x01":
            pass
        say(4, Kind.STATE, sent(2), sent(3))
        proxy.wait_for({2, 3})
        (row,) = proxy.bus.stats().values()
        assert (row["missed_total"], row["malformed_total"], row["states_total"]) == (1, 2, 2)
        assert set(proxy.lags_s) == {0.0}  # of a proxy that does not say when it sends
        say(5, Kind.CHANGES, Gone(3), sent_at=WALL - 0.25)
        proxy.wait_for({2})
        assert proxy.lags_s[-1] == 0.25
        assert proxy.bus.stats()[at("fake")]["lag_seconds"] == pytest.approx(0.025)
    context.destroy(0)


@pytest.mark.parametrize(("lowest", "highest"), [(0, 0), (1, 1), (1, 2)], ids=["before", "same", "next"])
def test_a_proxy_of_an_adjacent_release(at: Callable[[str], str], lowest: int, highest: int) -> None:
    """It is heard, and hears in a version that it reads which ones this one reads."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    pub, sub = context.socket(zmq.XPUB), context.socket(zmq.SUB)
    pub.bind(at("fake"))
    proxy = Proxy(at("a"), at("fake"))
    sub.subscribe(b"")
    sub.connect(at("a"))
    with proxies(proxy):
        assert pub.poll(int(DEADLINE_S * 1000))
        sent = Sent(1, "e0", "e0", 5, 0, 0, 1.0, False)
        pub.send_multipart(encode(Head(1, "fake", 1, Kind.STATE, 0.0, lowest, highest), [sent]))
        proxy.wait_for({1})
        assert sub.poll(int(DEADLINE_S * 1000))
        head = decode_head(sub.recv_multipart()[0])
        assert (head.version, head.lowest, head.highest) == (1, 1, 1)
    context.destroy(0)


def test_a_version_before_it_was_heard_is_no_fault_and_a_lasting_one_is_logged(
    at: Callable[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    """A proxy behind the same address is upgraded twice."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    pub, sub = context.socket(zmq.XPUB), context.socket(zmq.SUB)
    pub.bind(at("fake"))
    proxy = Proxy(at("a"), at("fake"), silent_s=DEADLINE_S)
    sub.subscribe(b"")
    sub.connect(at("a"))

    def wait(done: Callable[[], bool]) -> None:
        until_s = time.monotonic() + DEADLINE_S
        while not done():
            assert time.monotonic() < until_s, caplog.text
            threading.Event().wait(0.01)

    with proxies(proxy), caplog.at_level("INFO", logger="moonpool.proxy"):
        assert pub.poll(int(DEADLINE_S * 1000))
        for _ in range(3):
            pub.send_multipart(encode(Head(2, "fake", 1, Kind.STATE, 0.0, 1, 2), []))
        wait(lambda: "has yet to hear it" in caplog.text)
        (peer,) = proxy.bus._peers.values()
        assert peer.reads == VersionRange(1, 2)  # as the next message of this proxy is to be one of these
        (row,) = proxy.bus.stats().values()
        assert row["malformed_total"] == 0
        assert not [record for record in caplog.records if record.levelname == "WARNING"]
        for _ in range(3):
            pub.send_multipart(encode(Head(2, "fake", 1, Kind.STATE, 0.0, 2, 3), []))
        wait(lambda: proxy.bus.stats()[at("fake")]["malformed_total"] == 3)
        assert caplog.text.count("none in common; upgrade this proxy") == 1
    context.destroy(0)


def test_a_name_that_leads_nowhere_is_tried_again(at: Callable[[str], str]) -> None:
    proxy = Proxy(at("a"), "nowhere.invalid:7000", token=b"t" * 32)
    with proxies(proxy):
        until_s = time.monotonic() + DEADLINE_S
        while proxy.bus._resolved_s < 0 and time.monotonic() < until_s:
            threading.Event().wait(0.01)
        proxy.send(1)
        assert proxy.bus.stats() == {}


def test_an_address_that_is_taken_or_open_to_all_is_refused(at: Callable[[str], str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match="choose another --peer-listen"):
            Proxy(where)
    with pytest.raises(ConfigError, match="--token-file"):
        PeerSettings(("0.0.0.0:7000",))
    with pytest.raises(ConfigError, match="--token-file"):
        PeerSettings(("127.0.0.1:7000",), ("far.example:7000",))
    with pytest.raises(ConfigError, match="--peer-listen HOST:PORT"):
        PeerSettings((), ("127.0.0.1:7000",))
    with pytest.raises(ConfigError, match=r"proxy\.peer_listen = 0\.0\.0\.0:7000 .* has 15 bytes"):
        PeerSettings(("0.0.0.0:7000",), token=b"t" * 15)
    assert PeerSettings(("127.0.0.1:7000",), token=b"t" * 15)
    assert PeerSettings(("0.0.0.0:7000",), ("far.example:7000",), b"t" * 32)


@pytest.mark.parametrize("token", [b"", b"t" * 32])
def test_a_successor_is_heard_where_its_predecessor_was(at: Callable[[str], str], token: bytes) -> None:
    """As soon as that one lets go of the address, though it still has requests. Its own address may be among
    those that the successor listens to: what it heard there of the predecessor is nobody's then."""
    old = Proxy("127.0.0.1:0", token=token)
    where = f"127.0.0.1:{old.bus.where.rpartition(':')[2]}"
    new, other = Proxy(where, where, token=token, waits=True), Proxy(at("c"), where, token=token)
    with proxies(old, new, other):
        old.send(1)
        new.send(2)
        other.wait_for({1})
        new.wait_for({1})
        old.bus.let_go()
        other.wait_for({2})
        new.wait(lambda: not new.known)
        new.send(3)
        other.wait_for({2, 3})


def test_who_waits_for_an_address_says_so_before_it_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        bus = Proxy(f"127.0.0.1:{taken.getsockname()[1]}", waits=True).bus
        with pytest.raises(ConfigError, match="choose another --peer-listen"):
            bus.start()
        bus.stop()
