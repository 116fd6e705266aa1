"""What other proxies have in flight, in this one's books."""

from __future__ import annotations

import contextlib
import math
import random

import msgspec
import pytest

from moonpool._native import LastReport
from moonpool.core.version_range import VersionRange
from moonpool.disagg_proxy.conductor.choice import Choice, Request
from moonpool.disagg_proxy.conductor.inflight import InflightTracker
from moonpool.disagg_proxy.conductor.worker import Role, Worker
from moonpool.disagg_proxy.data_plane.observations import Observation, Outcome, Stage
from moonpool.disagg_proxy.peers.inflight_feed import InflightFeed, sent
from moonpool.disagg_proxy.peers.remote_inflight import RemoteInflight
from moonpool.disagg_proxy.peers.wire import (
    VERSIONS,
    Begun,
    BlocksExpected,
    Change,
    Gone,
    Head,
    Kind,
    Prefilled,
    Sent,
    decode_changes,
    decode_head,
    encode,
    version_for,
)
from moonpool.disagg_proxy.settings import parse_engines


def fleet() -> list[Worker]:
    roles = [Role.BOTH, Role.BOTH, Role.PREFILL, Role.DECODE]
    return [Worker(place, f"e{place}", role) for place, role in enumerate(roles)]


def shared_of(instances: list[Worker]) -> RemoteInflight:
    last = LastReport()
    for each in instances:
        each.load.follow_reports(last)
    return RemoteInflight(lambda name, _: {each.name: each for each in instances}.get(name))


def loads(instances: list[Worker], now_s: float) -> list[tuple[float, ...]]:
    rows: list[tuple[float, ...]] = []
    for each in instances:
        wait_s = round(each.load.wait_s(now_s), 9)  # first: silent prefills end when somebody asks
        books = each.load
        rows.append(
            (
                books.prefills,
                books.decodes,
                books.context_tokens,
                each.pending_handover,
                each.pending_handover_tokens,
                wait_s,
            )
        )
    return rows


def observation(request: int, stage: Stage, at_s: float, *, apart: bool) -> Observation:
    values = dict.fromkeys(Observation._fields, 0) | {
        "request": request,
        "tracked": 1,
        "prefill_done_s": at_s if stage is Stage.PREFILLED else 0.0,
        "first_byte_s": at_s if stage is Stage.BEGUN else 0.0,
        "last_byte_s": at_s if stage is Stage.ENDED else 0.0,
        "prompt_tokens": -1,
        "cached_tokens": -1,
        "status": 200,
        "outcome": Outcome.ANSWERED,
        "handed_over": int(apart),
        "stream": 1,
        "stage": stage,
    }
    return Observation(**values)


@pytest.mark.parametrize("seed", range(5))
def test_two_proxies_have_the_same_lines(seed: int) -> None:
    """Every request through either; told at once, both count the same, and in the end nothing."""
    random_ = random.Random(seed)
    print("seed", seed)
    ours, theirs = fleet(), fleet()
    tracker, shared = InflightTracker(ours), shared_of(theirs)
    now_s = 100.0
    said: list[Change] = []
    tracker.subscribe(InflightFeed(said.append))
    running: dict[int, tuple[Stage, bool]] = {}
    for step in range(400):
        now_s += random_.random() * 0.1
        if random_.random() < 0.5 or not running:
            request, apart, streams = step + 1, random_.random() < 0.5, random_.random() < 0.8
            choice = (
                Choice(ours[3], ours[2], 0.3)
                if apart
                else Choice(ours[random_.randrange(2)], None, random_.random())
            )
            tracker.on_dispatch(
                request, choice, Request(random_.randrange(1, 9999)), streams=streams, now_s=now_s
            )
            running[request] = (Stage.PREFILLED if apart else Stage.BEGUN, apart)
        else:
            request = random_.choice(list(running))
            stage, apart = running[request]
            tracker.observe(observation(request, stage, now_s, apart=apart))
            if stage is Stage.ENDED:
                del running[request]
            else:
                running[request] = (
                    Stage.BEGUN if stage is Stage.PREFILLED else Stage.ENDED,
                    apart,
                )
        shared.apply("other", said, now_s)
        said.clear()
        assert loads(theirs, now_s) == loads(ours, now_s), step
        assert len(shared) == len(tracker)
        shared.check_integrity()
    late = fleet()  # a proxy that starts now and is told all at once; again, nothing counts twice
    late_shared = shared_of(late)
    state = [sent(request, flight, now_s) for request, flight in tracker.in_flight().items()]
    for _ in range(2):
        late_shared.replace("other", state, now_s)
        assert [row[1:5] for row in loads(late, now_s)] == [row[1:5] for row in loads(ours, now_s)]
        # When a prefill of which nobody will hear began is not told, so that some may seem to last longer.
        assert all(new[0] >= old[0] for new, old in zip(loads(late, now_s), loads(ours, now_s), strict=True))
        assert len(late_shared) == len(tracker)
    assert shared.gone("other", now_s) == len(tracker)
    assert all(row == (0, 0, 0, 0, 0, 0.0) for row in loads(theirs, now_s))


def test_what_is_told_late_happened_when_it_did_and_says_what_is_not_told_yet() -> None:
    """Ten requests a second with a tenth of a second of prefill each, told half a second late."""
    late, prompt = fleet(), fleet()
    theirs, at_once = shared_of(late), shared_of(prompt)
    for number in range(600):
        at_s = 100.0 + number / 10
        told = [Sent(number, "e0", "e0", 100, 0, 0, 0.1, False)]
        theirs.apply("other", told, at_s + 0.5, lag_s=0.5)
        at_once.apply("other", told, at_s)
        for shared, lag_s in ((theirs, 0.5), (at_once, 0.0)):
            shared.apply("other", [Begun(number, True)], at_s + 0.09 + lag_s, lag_s=lag_s)
    assert loads(late, 161.0) == loads(prompt, 161.0)
    busy_s = 0.5  # of half a second
    assert late[0].remote_arrivals.unseen_s(160.5) == pytest.approx(busy_s, rel=0.05)
    assert prompt[0].remote_arrivals.unseen_s(160.5) == 0.0
    assert late[1].remote_arrivals.unseen_s(160.5) == 0.0
    state = [Sent(1, "e1", "e1", 100, 0, 0, 3.0, False, age_s=1.0)]
    theirs.replace("third", state, 200.0, lag_s=0.5)
    assert late[1].load.wait_s(200.0) == pytest.approx(1.5)


def test_a_state_ends_what_it_does_not_name_and_moves_what_went_elsewhere() -> None:
    instances = fleet()
    shared = shared_of(instances)
    first = [Sent(1, "e0", "e0", 100, 0, 0, 1.0, False), Sent(2, "e0", "e0", 100, 0, 0, 1.0, False)]
    shared.apply("a", first, 10.0)
    shared.replace("a", [Sent(2, "e1", "e1", 100, 0, 0, 1.0, False)], 10.5)
    assert [each.load.prefills for each in instances] == [0, 1, 0, 0]
    shared.replace("a", [], 11.0)
    assert [each.load.requests for each in instances] == [0, 0, 0, 0]


def test_a_long_line_that_is_told_late_is_as_short_as_it_is() -> None:
    instances = fleet()
    shared = shared_of(instances)
    shared.replace("a", [Sent(1, "e0", "e0", 100, 0, 0, 5.0, False, age_s=3.0)], 10.0)
    assert instances[0].load.wait_s(10.0) == pytest.approx(2.0)


@pytest.mark.parametrize(
    "lie",
    [
        Sent(1, "e0", "e0", -5, 0, 0, 1.0, False),
        Sent(1, "e0", "e0", 5, 6, 0, 1.0, False),
        Sent(1, "e0", "e0", 5, 4, 2, 1.0, False),
        Sent(1, "e0", "e0", 5, 8, -4, 1.0, False),
        Sent(1, "e0", "e0", 1 << 50, 0, 0, 1.0, False),
        Sent(1, "e0", "e0", 5, 0, 0, math.inf, False),
        Sent(1, "e0", "e0", 5, 0, 0, math.nan, False),
        Sent(1, "e0", "e0", 5, 0, 0, -1.0, False),
        Sent(1, "e0", "e0", 5, 0, 0, 1e9, False),
        Sent(1, "e0", "e0", 5, 0, 0, 1.0, False, age_s=-1.0),
        Sent(1, "e0", "nobody", 5, 0, 0, 1.0, False),
        Sent(1, "nobody", "e0", 5, 0, 0, 1.0, False),
    ],
)
def test_what_cannot_be_is_counted_and_left_out(lie: Sent) -> None:
    instances = fleet()
    shared = shared_of(instances)
    shared.apply("a", [lie, Prefilled(1), Begun(1, True), Begun(99, True), Gone(7), Gone(1)], 1.0)
    assert shared.unknown == 1
    assert len(shared) == 0
    assert all(row == (0, 0, 0, 0, 0, 0.0) for row in loads(instances, 1.0))


def test_lists_of_engines_may_have_another_order() -> None:
    """Names that are made of an engine's position mean nothing elsewhere."""

    def instances_of(*texts: str) -> list[Worker]:
        specs = parse_engines(texts)
        return [Worker(place, each.name, known_as=each.known_as) for place, each in enumerate(specs)]

    mine = instances_of("http://u2:1", "x=http://u3:1", "http://u1:1")
    theirs = instances_of("http://u1:1", "http://u2:1", "x=http://proxied:2", "http://u4:1")
    told: list[Change] = []
    tracker = InflightTracker(theirs)
    tracker.subscribe(InflightFeed(told.append))
    for number, each in enumerate(theirs):
        asked = Request(tokens=100 * (number + 1))
        tracker.on_dispatch(number, Choice(each, prefill_s=1.0), asked, streams=True, now_s=0.0)
    shared = RemoteInflight(lambda name, _: {each.known_as: each for each in mine}.get(name))
    shared.apply("a", told, 0.0)
    shared.replace("a", told, 0.0)
    held = [each.load.prefill_ended(-1 - number, 1.0) for each, number in zip(mine, (1, 2, 0), strict=True)]
    assert [ended and ended.tokens for ended in held] == [200, 300, 100]
    assert shared.unknown == 2  # u4, twice


def test_books_that_only_others_fill_are_whole() -> None:
    instances = fleet()
    tracker, shared = InflightTracker(instances), shared_of(instances)
    shared.apply("a", [Sent(1, "e0", "e0", 5, 0, 0, 1.0, False)], 1.0)
    with pytest.raises(AssertionError, match="none was sent"):
        tracker.check_integrity()
    tracker.check_integrity(len(shared))


def test_no_proxy_can_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moonpool.disagg_proxy.peers.remote_inflight.REQUESTS_MAX", 10)
    shared = shared_of(fleet())
    shared.apply("a", [Sent(each, "e0", "e0", 5, 0, 0, 1.0, False) for each in range(30)], 1.0)
    assert (len(shared), shared.unknown) == (10, 20)


def test_what_nobody_reports_any_more_ends() -> None:
    instances = fleet()
    shared = shared_of(instances)
    shared.apply("a", [Sent(1, "e0", "e0", 5, 0, 0, 1.0, False)], 1.0)
    shared.apply("a", [Sent(2, "e1", "e1", 5, 0, 0, 1.0, False), Begun(2, True)], 1.0)
    shared.expire(1.0, 0.0, 2.0)
    assert len(shared) == 2
    shared.expire(1.5, 0.0, 2.0)
    assert len(shared) == 1
    assert instances[1].load.decodes == 1  # a stream may take long
    shared.expire(1.5, 1.5, 2.0)
    assert len(shared) == instances[1].load.decodes == 0
    assert instances[0].load.requests == 0


def test_every_change_comes_through_the_wire() -> None:
    changes: list[Change] = [
        Sent(1, "e0", "e1", 5, 3, 2, 1.5, True, 0.5, True, True, "here:1", "there:1"),
        Prefilled(1),
        Begun(1, True),
        Gone(1),
        BlocksExpected("e0", 64, b"0123456789abcdef", "here:1"),
    ]
    head, body = encode(Head(VERSIONS.highest, "me", 7, Kind.STATE), changes)
    assert decode_head(head) == Head(VERSIONS.highest, "me", 7, Kind.STATE)
    assert decode_changes(body) == changes


def test_a_proxy_that_does_not_say_where_engines_are_is_understood() -> None:
    """As those of before, of the same version."""
    body = msgspec.msgpack.encode(
        [[0, 1, "e0", "e1", 5, 3, 2, 1.5, True, 0.5, True, True], [4, "e0", 64, b"0123456789abcdef"]]
    )
    assert decode_changes(body) == [
        Sent(1, "e0", "e1", 5, 3, 2, 1.5, True, 0.5, True, True),
        BlocksExpected("e0", 64, b"0123456789abcdef"),
    ]


@pytest.mark.parametrize("seed", range(3))
def test_bytes_that_lie_are_refused(seed: int) -> None:
    random_ = random.Random(seed)
    print("seed", seed)
    head, body = encode(
        Head(VERSIONS.highest, "me", 7, Kind.CHANGES), [Sent(1, "e0", "e1", 5, 3, 2, 1.5, True)]
    )
    for _ in range(2000):
        for whole, decode in ((head, decode_head), (body, decode_changes)):
            broken = bytearray(whole)
            broken[random_.randrange(len(broken))] = random_.randrange(256)
            with contextlib.suppress(ValueError):
                decode(bytes(broken[: random_.randrange(len(broken) + 1)]))


def test_proxies_of_adjacent_releases_send_what_all_of_them_read() -> None:
    one, both, two, later = (VersionRange(*each) for each in ((1, 1), (1, 2), (2, 2), (2, 3)))
    assert version_for([], both) == 2
    assert version_for([both, two, later], both) == 2
    assert version_for([both, one], both) == 1
    assert version_for([both, None], both) == 1  # not heard yet: it may be of the release before
    assert version_for([both, VersionRange(3, 3)], both) == 2
    assert version_for([later, None], both) == 2  # none of release 1 is there: that one reads it no more
    assert version_for([VersionRange(2, 3), both, None], VersionRange(1, 3)) == 2
    assert version_for([one, later, two], both) == 2  # none is read by all: by most of them
    assert version_for([one], two) == 2  # that one refuses it, and tells its operator

    def refusal(version: int, lowest: int, highest: int) -> str:
        with pytest.raises(ValueError, match="version") as caught:
            decode_head(encode(Head(version, "me", 7, Kind.STATE, 0.0, lowest, highest), [])[0])
        return str(caught.value)

    own = "this proxy speaks version 1 of the messages between proxies, that one"
    assert refusal(2, 2, 3).startswith(f"{own} versions 2 to 3, none in common; upgrade this proxy")
    assert refusal(2, 0, 0).startswith(f"{own} version 2, none in common; upgrade this proxy")
    none = "that one says a range of versions of the messages between proxies that is none"
    assert refusal(2, 3, 2) == none
    assert refusal(0, 0, 0).startswith(f"{own} version 0, none in common; upgrade that one")
    assert refusal(2, 1, 2) == "it sent version 2, which this proxy does not read, and has yet to hear it"
    assert decode_head(encode(Head(1, "me", 7, Kind.STATE, 0.0, 1, 2), [])[0]).reads == both
    assert decode_head(encode(Head(1, "me", 7, Kind.STATE), [])[0]).reads == one
