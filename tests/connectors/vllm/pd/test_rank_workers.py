"""Hand-overs between engines of different tensor-parallel sizes, over real memory and sockets: every rank has
its heads, and no lease ends before all that read under it are done."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from moonpool.connectors.vllm.pd.consumer_worker import GAPS, OLDER, PIECE_BLOCKS
from moonpool.connectors.vllm.pd.handover_worker import HandoverWorker
from moonpool.connectors.vllm.pd.incoming import Piece
from moonpool.connectors.vllm.pd.kv_transfer_params import LEFT, Meeting
from moonpool.connectors.vllm.pd.peer_connection import PeerConnection
from moonpool.connectors.vllm.pd.rank_pairs import Share
from moonpool.connectors.vllm.pd.step_plan import End, HandoverStep, Open, Refuse
from moonpool.connectors.vllm.reach import NULL_BLOCK
from moonpool.core.errors import Unavailable
from tests.connectors.vllm.pd.rank_memory import LAYOUTS, Shape
from tests.connectors.vllm.pd.rank_worlds import LEASE, RankedEngine, engine
from tests.connectors.vllm.pd.worlds import DEADLINE_S, PROMPT, eventually

SIZES = [pair for pair in itertools.product((1, 2, 4), (1, 2, 4)) if pair[0] != pair[1]]
THERE, HERE = [7, 8, 9, 1, 2, 4], [3, 4, 5, 9, 0, 11]
X = "x-1"


def engines(stack: ExitStack, theirs: int, ours: int, **more: Any) -> tuple[RankedEngine, RankedEngine]:
    heads = more.pop("heads", 2)
    prefill = stack.enter_context(engine("P", theirs, heads=heads, computed=True, **more))
    return prefill, stack.enter_context(engine("D", ours, heads=heads, **more))


def all_good(decode: RankedEngine, blocks: int) -> None:
    assert [(each.good, each.error) for each in decode.ended()] == [(blocks, "")] * len(decode.workers)


@pytest.mark.parametrize(("theirs", "ours"), SIZES)
@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("form", ["two-step", "concurrent"])
def test_each_rank_has_its_heads(theirs: int, ours: int, heads: int, form: str) -> None:
    """With one head, as of MLA, all ranks have it; with two, of four ranks two have each."""
    with ExitStack() as stack:
        prefill, decode = engines(stack, theirs, ours, heads=heads)
        if form == "two-step":
            decode.take(prefill.offer(THERE), HERE[1:], first=1)
        else:
            url = stack.enter_context(prefill.page())
            prefill.opens(X)
            decode.take(Meeting("P", url, X), HERE[1:], first=1)
            prefill.computes(0, THERE[:2], final=False)
            prefill.computes(2, THERE[2:], final=True)
        all_good(decode, 5)
        decode.assert_has(HERE[1:], prefill, THERE[1:])
        decode.drop()
        prefill.wait_handed()
        assert prefill.is_valid() == [False] * theirs


@pytest.mark.parametrize(("theirs", "ours"), [((1, 3), (1, 1)), ((1, 1), (2, 3)), ((2, 2), (1, 1))])
@pytest.mark.parametrize("form", ["two-step", "concurrent"])
def test_pipeline_stages(theirs: tuple[int, int], ours: tuple[int, int], form: str) -> None:
    """Prefill's, or decode's, which has no stages itself. Sizes: tensor-parallel ranks and stages."""
    with ExitStack() as stack:
        prefill = stack.enter_context(engine("P", theirs[0], pp_size=theirs[1], computed=True))
        decode = stack.enter_context(engine("D", ours[0], pp_size=ours[1]))
        if form == "two-step":
            decode.take(prefill.offer(THERE), HERE)
        else:
            url = stack.enter_context(prefill.page())
            prefill.opens(X)
            decode.take(Meeting("P", url, X), HERE)
            prefill.computes(0, THERE, final=True)
        all_good(decode, 6)
        decode.assert_has(HERE, prefill, THERE)
        decode.drop()
        prefill.wait_handed()


def test_stages_that_lack_a_layer() -> None:
    """As of a prefill engine that names some of its stages only: no block counts."""
    with ExitStack() as stack:
        prefill = stack.enter_context(engine("P", 1, pp_size=3, computed=True))
        decode = stack.enter_context(engine("D", 1))
        source = replace(prefill.offer(THERE), ranks=prefill.addresses[:2])
        decode.take(source, HERE)
        (ended,) = decode.ended()
        assert (ended.good, ended.error) == (0, GAPS)


@pytest.mark.parametrize("first", ["r", "other"])
def test_two_requests_take_other_shares_over_one_connection(first: str) -> None:
    """What a request takes is its own: the other one's offer says of the same workers that they are two
    tensor-parallel ranks of two stages. Each is read in the other's presence, in either order."""
    with ExitStack() as stack:
        prefill, decode = engines(stack, 4, 1, heads=4)
        good = prefill.offer(THERE)
        wrong = replace(prefill.offer(THERE, lease=78, slot=6), tp_size=2)
        decode.hold(good, 6)
        decode.hold(wrong, 6, name="other")
        ends = {}
        for name in sorted(("r", "other"), key=lambda each: each != first):
            decode.pull({"r": HERE, "other": [6, 7, 8, 1, 2, 10]}[name], name=name)
            (ends[name],) = decode.ended()
        assert (ends["r"].good, ends["r"].error) == (6, "")
        assert ends["other"].good == 0
        decode.assert_has(HERE, prefill, THERE)


@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (1, 2)])
def test_a_transfer_is_asked_for_while_a_long_read_lasts(sizes: tuple[int, int]) -> None:
    """Else it sends no heartbeat until the read has ended, and is given up meanwhile."""
    blocks = list(range(PIECE_BLOCKS + 4))
    asked = threading.Event()
    with ExitStack() as stack:
        prefill, decode = engines(stack, *sizes, transports=["tcp"], shape=Shape(blocks=len(blocks)))
        url = stack.enter_context(prefill.page())
        begun, late = [], []

        def slowly(worker: HandoverWorker) -> None:
            read_piece = worker._read_piece

            def slow(line: PeerConnection, piece: Piece, scratch: int) -> tuple[int, tuple[int, ...]]:
                """The first piece lasts until the other request is there, the next until it has asked."""
                begun.append(piece)
                if not piece.start and not asked.wait(DEADLINE_S):
                    late.append(piece)
                if piece.start:
                    eventually(lambda: all("x-2" in each._producer._waiting for each in prefill.workers))
                return read_piece(line, piece, scratch)

            worker._read_piece = slow  # type: ignore[method-assign]

        for worker in decode.workers:
            slowly(worker)
        prefill.opens(X)
        decode.take(Meeting("P", url, X), blocks)
        prefill.computes(0, blocks, final=True)
        eventually(lambda: len(begun) == max(sizes))
        decode.hold(Meeting("P", url, "x-2"), 1, name="other")
        asked.set()
        all_good(decode, len(blocks))
        assert not late


def test_a_request_that_needs_more_connections_than_are_left() -> None:
    """It takes none of them, and another one has room."""
    with ExitStack() as stack:
        prefill, decode = engines(stack, 4, 1)
        (taker,) = decode.workers
        taker._connections._numbers = taker._connections._numbers[-3:]
        decode.hold(prefill.offer(THERE), 6)
        assert taker.take_lost() == {"r"}
        assert taker._connections.all() == []
        other = stack.enter_context(engine("Q", 1, computed=True))
        decode.take(other.offer(THERE), HERE)
        all_good(decode, 6)


def test_windows_and_stages_do_not_go_together(caplog: pytest.LogCaptureFixture) -> None:
    """A worker that refuses an offer says so in the log, and to all workers of prefill."""
    with ExitStack() as stack:
        prefill = stack.enter_context(engine("P", 1, pp_size=3, computed=True))
        decode = stack.enter_context(engine("D", 1, has_windows=True))
        decode.take(prefill.offer(THERE), HERE)
        (ended,) = decode.ended()
        assert ended.good == 0
        prefill.wait_handed()
        why = "the prefill engine P has 3 pipeline stages and this one 1; with sliding windows a hand-over"
        assert f"a prompt is not handed over: {why}" in caplog.text
        eventually(lambda: f"did not take a prompt over: {why}" in caplog.text)


def test_a_worker_of_prefill_that_cannot_be_reached_now(caplog: pytest.LogCaptureFixture) -> None:
    """The others end their lease, as this engine needs nothing of them."""
    with ExitStack() as stack:
        prefill, decode = engines(stack, 4, 1, heads=4)
        (taker,) = decode.workers
        source = prefill.offer(THERE)
        taker._connections._resting["P", prefill.addresses[1]] = (taker._clock() + 600, "it rests")
        decode.take(source, HERE)
        (ended,) = decode.ended()
        assert ended.good == 0
        for place in (0, 2, 3):
            eventually(lambda each=prefill.workers[place]: LEASE in each.take_heartbeats()[1])  # type: ignore[misc]
        assert "a prompt is not handed over: it rests" in caplog.text


def done_at(giver: HandoverWorker) -> list[str]:
    """The addresses of decode workers that say Done to this one, as they do."""
    done: list[str] = []
    hear = giver._producer.done

    def heard(message: Any, now_s: float) -> None:
        hear(message, now_s)
        done.append(message.reply)

    giver._producer.done = heard  # type: ignore[method-assign]
    return done


@pytest.mark.parametrize("leaves", ["refuses", "another engine"])
def test_one_worker_does_not_end_the_lease_of_another(leaves: str) -> None:
    """In the two-step form, where several requests may bring one offer: to an engine that refuses the second
    one while its other worker still reads, or to another engine, of which a worker is done."""
    with ExitStack() as stack:
        prefill, decode = engines(stack, 1, 2)
        (giver,) = prefill.workers
        source = prefill.offer(THERE)
        done = done_at(giver)
        decode.hold(source, 6)
        decode.pull(HERE, ranks=slice(0, 1))
        decode.ended(slice(0, 1))
        if leaves == "refuses":
            decode.begin(HandoverStep(refuses=(Refuse(source, "twice", decode.addresses[0]),)))
            eventually(lambda: len(done) == 2)
        else:
            decode.begin(HandoverStep())
            other = stack.enter_context(engine("E", 2))
            other.hold(source, 6)
            other.pull(HERE, ranks=slice(0, 1))
            other.ended(slice(0, 1))
            other.begin(HandoverStep())
            eventually(lambda: set(done) == {decode.addresses[0], other.addresses[0]})
        assert prefill.is_valid() == [True]
        decode.pull(HERE, ranks=slice(1, 2))
        assert [(each.good, each.error) for each in decode.ended(slice(1, 2))] == [(6, "")]
        decode.begin(HandoverStep())
        prefill.wait_handed()


@pytest.mark.parametrize("sizes", [(2, 2), (1, 2)])
def test_a_worker_that_could_not_read_the_page_at_first(sizes: tuple[int, int]) -> None:
    """It says later that it needs nothing: prefill keeps what this worker was to read until then."""
    with ExitStack() as stack:
        prefill, decode = engines(stack, *sizes)
        url = stack.enter_context(prefill.page())
        prefill.opens(X)
        fails = decode.workers[1]
        find, found = fails._find, []

        def find_later(key: Any, meeting: Meeting) -> str:
            found.append(meeting)
            if len(found) == 1:
                raise Unavailable("not now")
            return find(key, meeting)

        fails._find = find_later  # type: ignore[method-assign]
        decode.hold(Meeting("P", url, X), 6)
        eventually(lambda: fails.take_lost() == {"r"})
        decode.drop()
        prefill.wait_handed()


@pytest.mark.parametrize("has_windows", [False, True])
def test_a_share_that_leaves_heads_out(has_windows: bool) -> None:
    """Whatever made it so, no block counts: all heads have to come, of all blocks that are needed."""
    with ExitStack() as stack:
        prefill = stack.enter_context(engine("P", 1, computed=True))
        decode = stack.enter_context(engine("D", 1, has_windows=has_windows))
        (taker,) = decode.workers
        of_offer = taker._finder.of_offer
        taker._finder.of_offer = lambda source: tuple(  # type: ignore[method-assign]
            replace(peer, share=Share(0, 0, 1, 1)) for peer in of_offer(source)
        )
        here = [NULL_BLOCK, *HERE[1:4]] if has_windows else HERE[:4]
        decode.take(prefill.offer(THERE[:4]), here)
        (ended,) = decode.ended()
        assert (ended.good, ended.error) == (0, GAPS)


@pytest.mark.parametrize("layouts", list(itertools.permutations(LAYOUTS, 2)), ids="-".join)
@pytest.mark.parametrize(("theirs", "ours"), [(1, 2), (2, 1)])
def test_layouts_may_differ_as_well(theirs: int, ours: int, layouts: tuple[str, str]) -> None:
    with (
        engine("P", theirs, heads=4, layout=layouts[0], computed=True) as prefill,
        engine("D", ours, heads=4, layout=layouts[1]) as decode,
    ):
        decode.take(prefill.offer(THERE), HERE)
        all_good(decode, 6)
        decode.assert_has(HERE, prefill, THERE)


@pytest.mark.parametrize("form", ["two-step", "concurrent"])
@pytest.mark.parametrize("leaves", ["takes all", "drops"])
def test_a_lease_lasts_until_every_reader_is_done(form: str, leaves: str) -> None:
    with ExitStack() as stack:
        prefill, decode = engines(stack, 1, 2)
        (giver,) = prefill.workers
        done = done_at(giver)
        if form == "two-step":
            decode.hold(prefill.offer(THERE), 6)
        else:
            url = stack.enter_context(prefill.page())
            prefill.opens(X)
            decode.hold(Meeting("P", url, X), 6)
            prefill.computes(0, THERE, final=True)
        first, second = decode.workers
        if leaves == "drops":
            first.begin(HandoverStep(drops=("r",)))
        else:
            decode.pull(HERE, ranks=slice(0, 1))
            assert [each.good for each in decode.ended(slice(0, 1))] == [6]
            first.begin(HandoverStep())
        eventually(lambda: done == [first.address])
        assert prefill.is_valid() == [True]
        assert not giver.take_heartbeats()[1]

        decode.pull(HERE, ranks=slice(1, 2))
        assert [(each.good, each.error) for each in decode.ended(slice(1, 2))] == [(6, "")]
        second.begin(HandoverStep())
        prefill.wait_handed()
        assert prefill.is_valid() == [False]


@pytest.mark.parametrize("ours", [1, 2])
def test_one_prefill_worker_is_gone(ours: int) -> None:
    """What it holds does not come, so no block counts where its heads are needed; the others end their
    lease."""
    with ExitStack() as stack:
        prefill, decode = engines(stack, 4, ours, heads=4)
        source = prefill.offer(THERE)
        prefill.workers[3].close()
        decode.take(source, HERE)
        ended = decode.ended()
        assert ended[-1].good == 0
        assert ended[-1].error
        assert [each.good for each in ended[:-1]] == [6] * (ours - 1)  # the scheduler's half takes the least
        decode.drop()
        for worker in prefill.workers[:3]:
            eventually(lambda each=worker: LEASE in each.take_heartbeats()[1])  # type: ignore[misc]


def test_one_prefill_worker_has_lost_its_lease() -> None:
    """In the two-step form: what the other one gave is of no use."""
    with ExitStack() as stack:
        prefill, decode = engines(stack, 2, 1)
        source = prefill.offer(THERE)
        prefill.workers[1].begin(HandoverStep(ends=(End(LEASE, "lost"),)))
        decode.take(source, HERE)
        (ended,) = decode.ended()
        assert ended.good == 0
        assert "gave the blocks away" in ended.error
        decode.begin(HandoverStep())
        eventually(lambda: LEASE in prefill.workers[0].take_heartbeats()[1])


@pytest.mark.parametrize(("theirs", "ours"), [(1, 2), (2, 1), (4, 2)])
def test_prefill_begins_anew_after_a_preemption(theirs: int, ours: int) -> None:
    with ExitStack() as stack:
        prefill, decode = engines(stack, theirs, ours)
        url = stack.enter_context(prefill.page())
        prefill.opens(X)
        decode.take(Meeting("P", url, X), HERE)
        prefill.computes(0, THERE[:1], final=False)
        eventually(lambda: bool((decode.memories[0].kv[:, HERE[0]] == first_block(prefill, decode)).all()))
        again = HandoverStep(ends=(End(LEASE, "preempted"),), opens=(Open(78, 6, X, PROMPT),))
        prefill.begin(again)
        prefill.computes(0, THERE, final=True, lease=78)
        all_good(decode, 6)
        decode.assert_has(HERE[1:], prefill, THERE[1:])
        decode.drop()
        prefill.wait_handed(78)


def first_block(prefill: RankedEngine, decode: RankedEngine) -> Any:
    return prefill.whole[:, THERE[0]][:, list(decode.memories[0].heads)]


@pytest.mark.parametrize(("theirs", "ours"), [(1, 2), (2, 1), (1, 4)])
def test_an_aborted_prefill(theirs: int, ours: int) -> None:
    with ExitStack() as stack:
        prefill, decode = engines(stack, theirs, ours)
        url = stack.enter_context(prefill.page())
        prefill.opens(X)
        decode.take(Meeting("P", url, X), HERE)
        eventually(lambda: all(X in each._producer._waiting for each in prefill.workers))
        prefill.begin(HandoverStep(ends=(End(LEASE, "the prefill was aborted"),)))
        assert {(each.good, each.error) for each in decode.ended()} == {(0, "the prefill was aborted")}


@pytest.mark.parametrize(("theirs", "ours"), [(1, 2), (2, 1), (4, 1)])
@pytest.mark.parametrize("is_met", [False, True])
def test_decode_leaves_before_prefill_began(theirs: int, ours: int, is_met: bool) -> None:
    """Also before it knows the workers of prefill."""
    with ExitStack() as stack:
        prefill, decode = engines(stack, theirs, ours)
        url = stack.enter_context(prefill.page())
        decode.hold(Meeting("P", url, X), 6)
        if is_met:
            eventually(lambda: all(X in each._producer._waiting for each in prefill.workers))
        decode.drop()
        eventually(lambda: all(X in each._producer._waiting for each in prefill.workers))
        eventually(lambda: all(each._producer._waiting[X].has_left for each in prefill.workers))
        prefill.opens(X)
        prefill.wait_handed()


def test_a_worker_that_is_one_step_behind() -> None:
    """A block counts when all ranks of prefill have computed it."""
    with ExitStack() as stack:
        prefill, decode = engines(stack, 2, 1)
        url = stack.enter_context(prefill.page())
        prefill.opens(X)
        decode.take(Meeting("P", url, X), HERE)
        eventually(lambda: all(X in each._producer._waiting for each in prefill.workers))
        prefill.computes(0, THERE, final=True, ranks=slice(0, 1))
        eventually(lambda: LEASE in prefill.workers[0].take_heartbeats()[1] or tell(decode))
        assert not decode.workers[0].take_ended()
        prefill.computes(0, THERE, final=True, ranks=slice(1, 2))
        all_good(decode, 6)
        decode.assert_has(HERE, prefill, THERE)


def tell(decode: RankedEngine) -> bool:
    """A step, with which a worker says what it has read. False."""
    decode.begin(HandoverStep())
    return False


class TestOthers:
    """Engines that cannot give or take, and other releases."""

    @pytest.mark.parametrize("form", ["two-step", "concurrent"])
    @pytest.mark.parametrize(("theirs", "ours"), [(2, 1), (1, 2), (4, 2)])
    def test_a_refusal_reaches_each_worker(self, form: str, theirs: int, ours: int) -> None:
        with ExitStack() as stack:
            prefill, decode = engines(stack, theirs, ours)
            url = stack.enter_context(prefill.page())
            source = prefill.offer(THERE) if form == "two-step" else Meeting("P", url, X)
            if form == "concurrent":
                prefill.opens(X)
            decode.begin(HandoverStep(refuses=(Refuse(source, LEFT, decode.addresses[0]),)))
            prefill.wait_handed()

    def test_sizes_that_do_not_go_together(self, caplog: pytest.LogCaptureFixture) -> None:
        """One sentence on both sides, and every worker of prefill is told."""
        why = "has 3 tensor-parallel ranks and this one 2; a hand-over needs one of these to divide the other"
        with ExitStack() as stack:
            prefill = stack.enter_context(engine("P", 3, heads=6, computed=True))
            decode = stack.enter_context(engine("D", 2, heads=6))
            url = stack.enter_context(prefill.page())
            prefill.opens(X)
            decode.take(Meeting("P", url, X), HERE)
            for ended in decode.ended():
                assert ended.good == 0
                assert why in ended.error
            prefill.wait_handed()
            eventually(lambda: f"did not take a prompt over: the prefill engine P {why}" in caplog.text)
            assert f"a prompt is not handed over: the prefill engine P {why}" in caplog.text

    @pytest.mark.parametrize("form", ["two-step", "concurrent"])
    @pytest.mark.parametrize("sizes", [(1, 2), (2, 1), (2, 2)])
    def test_prefill_of_the_release_before(
        self, form: str, sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It does not count readers, and its messages do not name their worker. So decode refuses what it
        would get wrong, and goes on with engines of equal size."""
        with ExitStack() as stack:
            prefill, decode = engines(stack, *sizes)
            for worker in prefill.workers:
                as_before(worker, monkeypatch)
            for worker in decode.workers:
                forget_counts(worker, monkeypatch)
            if form == "two-step":
                decode.take(prefill.offer(THERE), HERE)
            else:
                url = stack.enter_context(prefill.page())
                prefill.opens(X)
                decode.take(Meeting("P", url, X), HERE)
                prefill.computes(0, THERE, final=True)
            ended = decode.ended()
            if sizes == (2, 2) or (form, sizes) == ("two-step", (2, 1)):
                assert [(each.good, each.error) for each in ended] == [(6, "")] * sizes[1]
                decode.assert_has(HERE, prefill, THERE)
            else:
                assert [each.good for each in ended] == [0] * sizes[1]
                assert OLDER in [each.error for each in ended]
            decode.drop()
            prefill.wait_handed()


def as_before(worker: HandoverWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its messages are those of the release before: without the fields that came later, and it reads none."""
    send = worker._send

    def send_less(outbox: list[tuple[str, Any]]) -> None:
        send([(reply, msgspec.structs.replace(message, worker="")) for reply, message in outbox])

    monkeypatch.setattr(worker, "_send", send_less)
    producer = worker._producer
    for name in ("want", "done"):
        monkeypatch.setattr(producer, name, without_fields(getattr(producer, name)))


def without_fields(hear: Callable[[Any, float], Any]) -> Callable[[Any, float], Any]:
    return lambda message, now_s: hear(msgspec.structs.replace(message, taker="", readers=1), now_s)


def forget_counts(worker: HandoverWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it reads of prefill's memory does not say that readers are counted."""
    read = worker._tables_with

    def read_less(connection: PeerConnection, description: Any, source: Any) -> Any:
        return read(connection, msgspec.structs.replace(description, counts_readers=False), source)

    monkeypatch.setattr(worker, "_tables_with", read_less)
