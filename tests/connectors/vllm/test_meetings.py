"""Hits whose front is computed while their back is loaded: by themselves in a simulated engine, and in both
halves of a connector."""

from __future__ import annotations

import itertools
import logging
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from moonpool.connectors.vllm import compat
from moonpool.connectors.vllm.connector import Mooncake
from moonpool.connectors.vllm.guard import Guard
from moonpool.connectors.vllm.load_decision import BOTH, LOADS_MIN, SLOWER, STEPS_MIN, Choice, Pace
from moonpool.connectors.vllm.meeting_scheduler import refusal, scheduler_class
from moonpool.connectors.vllm.meetings import CHUNK_TOKENS_MIN, Meetings
from moonpool.connectors.vllm.messages import NOTHING, Handshake, Load, LoadTime, PieceEnd, Report, Step
from moonpool.connectors.vllm.metrics import Tally
from moonpool.connectors.vllm.requests import Chain, Phase, RequestState
from moonpool.connectors.vllm.requests.state import Hit
from moonpool.connectors.vllm.scheduler import SchedulerHalf
from tests.connectors.vllm.fakes import (
    BLOCK_TOKENS,
    COLUMNS,
    FINGERPRINT,
    LIFE,
    Cached,
    Clock,
    FakeBlockPool,
    FakeBlocks,
    FakeOutput,
    FakePool,
    FakeRequest,
    FakeStep,
    Loaded,
    New,
    digest,
    node_at,
    scheduler_half,
)
from tests.connectors.vllm.worker_bed import memory, worker_half

PIN = 7
CHUNK = CHUNK_TOKENS_MIN // BLOCK_TOKENS  # blocks
HIT_BLOCKS = 16 * CHUNK
WIDTH = len(COLUMNS)


@dataclass
class Bed:
    """Meetings in an engine of one request at a time, and what came of them."""

    workers: int = 1
    released: list[int] = field(default_factory=list)
    again: list[RequestState] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clock, self.blocks, self.tally = Clock(), FakeBlockPool(4 * HIT_BLOCKS), Tally()
        self.meetings = Meetings(
            block_tokens=BLOCK_TOKENS,
            workers=self.workers,
            tally=self.tally,
            release=self.released.append,
            save_again=lambda state, request: self.again.append(state),
            clock=self.clock,
        )
        self.meetings.bind(self.blocks)

    def begin(self, name: str = "r", *, blocks: int = HIT_BLOCKS, ratio: float = 1.0) -> FakeRequest:
        """A request with a hit, and its first chunk planned by the engine."""
        request = FakeRequest(name, list(range(blocks * BLOCK_TOKENS + 1)))
        suffixes = b"".join(ranges.suffix() for ranges in COLUMNS)
        chain = Chain(BLOCK_TOKENS, suffixes, b"", digest)
        chain.extend(request.all_token_ids)
        state = RequestState(name, chain, phase=Phase.HIT)
        descriptors = b"".join(block.to_bytes(32 * WIDTH, "little") for block in range(blocks))
        state.hit = Hit(blocks, PIN, LIFE, descriptors)
        state.saved = blocks
        self.meetings.decide(state, Pace(1.0, 1.0 / ratio))
        assert self.meetings.tokens_to_place(request) == blocks * BLOCK_TOKENS
        self.scheduled = self.meetings.chunk_tokens(request, 0, request.num_tokens)
        assert 0 < self.scheduled < request.num_tokens
        placed = FakeBlocks((list(range(1, blocks + 2)),))
        assert self.meetings.begin(state, request, placed)
        assert state.hit is None
        return request

    def plan(self, request: FakeRequest) -> Sequence[Load]:
        """The pieces that begin with the step that was scheduled, which then counts as computed."""
        step = FakeStep(num_scheduled_tokens={request.request_id: self.scheduled} if self.scheduled else {})
        loads = list(self.meetings.plan(step))
        self.meetings.told()
        request.num_computed_tokens += self.scheduled
        return loads

    def schedule(self, request: FakeRequest) -> None:
        """As vLLM: first the jump, then the chunk."""
        self.meetings.jump()
        left = request.num_tokens - request.num_computed_tokens
        self.scheduled = self.meetings.chunk_tokens(request, request.num_computed_tokens, left)

    def end(self, load: Load, good: int | None = None, *, seconds: float = 0.0) -> None:
        count = load.blocks if good is None else good
        self.meetings.ended({load.piece: PieceEnd(1, count, LoadTime(seconds))})


@pytest.mark.parametrize("seed", range(60))
def test_each_block_is_computed_or_loaded_and_never_both(seed: int) -> None:
    """Loads end in any order, late, in part or not at all; the engine computes chunks that are cut anywhere,
    and preempts or aborts. What a request is moved behind has come, and what it computes was never claimed,
    or has failed."""
    source = random.Random(seed)
    bed = Bed(workers=source.choice([1, 2]))
    blocks = source.randrange(2 * CHUNK, HIT_BLOCKS)
    request = bed.begin(blocks=blocks, ratio=source.choice([0.1, 0.5, 1.0, 2.0, 10.0]))
    fails, ends = source.choice([0.0, 0.0, 0.3]), source.choice(["", "", "preempt", "drop"])
    came: set[int] = set()
    claimed: set[int] = set()  # that are under way, or came
    flying: list[tuple[Load, int, int]] = []
    for step in itertools.count():
        assert step < 10_000
        if source.random() < 0.2:  # another request took a part of the budget
            self_scheduled = source.randrange(bed.scheduled + 1)
            bed.scheduled = self_scheduled
        first = request.num_computed_tokens
        if request.num_preemptions == 0 and first < blocks * BLOCK_TOKENS:
            computed = set(range(first // BLOCK_TOKENS, -(-(first + bed.scheduled) // BLOCK_TOKENS)))
            assert not computed & claimed
        for load in bed.plan(request):
            number = int.from_bytes(load.descriptors[: 32 * WIDTH], "little")
            taken = set(range(number, number + load.blocks))
            assert load.block_ids == (tuple(block + 1 for block in sorted(taken)),)
            assert not taken & claimed
            assert number * BLOCK_TOKENS >= request.num_computed_tokens
            claimed |= taken
            flying.append((load, number, bed.workers))
        bed.clock.now_s += source.random()
        source.shuffle(flying)
        while flying and source.random() < 0.5:
            load, number, ranks = flying.pop()
            good = source.randrange(load.blocks) if source.random() < fails else load.blocks
            for rank in range(ranks):
                bed.end(load, good if rank == 0 else load.blocks, seconds=source.random())
            came |= set(range(number, number + good))
            claimed -= set(range(number + good, number + load.blocks))
        if ends and request.num_computed_tokens > blocks * BLOCK_TOKENS // 3:
            if ends == "preempt":
                request.num_preemptions, request.num_computed_tokens = 1, 0
            bed.meetings.drop("r")
            break
        before = request.num_computed_tokens
        bed.schedule(request)
        jumped = range(before // BLOCK_TOKENS, request.num_computed_tokens // BLOCK_TOKENS)
        assert request.num_computed_tokens == before or set(jumped) <= came
        if request.num_computed_tokens >= blocks * BLOCK_TOKENS:
            break
    for load, _, ranks in flying:
        assert bed.released == []
        for _ in range(ranks):
            bed.end(load)
    assert not bed.meetings.busy
    assert bed.meetings.under_way == 0
    assert bed.released == [PIN]
    assert bed.blocks.held() == []


@pytest.mark.parametrize("ratio", [0.5, 1.0, 2.0])
def test_they_meet_where_both_have_taken_as_long(ratio: float) -> None:
    """A step computes a block in a second, and a link that is ``ratio`` times as fast carries one piece after
    the other: the request waits for little more than the better half."""
    bed = Bed()
    request = bed.begin(ratio=ratio)
    link_s, flying = bed.clock.now_s, []
    while True:
        for load in bed.plan(request):
            link_s = max(link_s, bed.clock.now_s) + load.blocks / ratio
            flying.append((link_s, load))
        bed.clock.now_s += bed.scheduled / BLOCK_TOKENS or 1.0
        for ended_s, load in [one for one in flying if one[0] <= bed.clock.now_s]:
            flying.remove((ended_s, load))
            bed.end(load, seconds=load.blocks / ratio)
        bed.schedule(request)
        if request.num_computed_tokens >= HIT_BLOCKS * BLOCK_TOKENS:
            break
    best_s = HIT_BLOCKS / (1 + ratio)
    assert bed.clock.now_s - 100.0 <= 1.15 * best_s


@pytest.mark.parametrize("ratio", [0.5, 1.0, 2.0])
def test_hits_that_are_loaded_at_once_share_the_link(ratio: float) -> None:
    """Two at once, whose steps compute a chunk of each, on one link. If each counted on all of the link, they
    would claim more than it carries, and wait."""
    bed = Bed()
    requests, chunks = [], {}
    for name in ("one", "other"):
        requests.append(bed.begin(name, ratio=ratio))
        chunks[name] = bed.scheduled
    link_s, flying = bed.clock.now_s, []
    while bed.meetings.busy:
        step = FakeStep(num_scheduled_tokens={name: tokens for name, tokens in chunks.items() if tokens})
        for load in bed.meetings.plan(step):
            link_s = max(link_s, bed.clock.now_s) + load.blocks / ratio
            flying.append((link_s, load))
        bed.meetings.told()
        bed.clock.now_s += sum(chunks.values()) / BLOCK_TOKENS or 1.0
        for ended_s, load in [one for one in flying if one[0] <= bed.clock.now_s]:
            flying.remove((ended_s, load))
            bed.end(load, seconds=load.blocks / ratio)
        for request in requests:
            request.num_computed_tokens += chunks[request.request_id]
        bed.meetings.jump()
        for request in requests:
            done = request.num_computed_tokens
            left = HIT_BLOCKS * BLOCK_TOKENS - done
            chunks[request.request_id] = bed.meetings.chunk_tokens(request, done, left) if left else 0
    best_s = 2 * HIT_BLOCKS / (1 + ratio)
    assert bed.clock.now_s - 100.0 <= 1.06 * best_s


def test_a_front_that_reached_a_piece_waits_and_a_failed_one_is_computed() -> None:
    bed = Bed()
    request = bed.begin(blocks=4 * CHUNK)
    loads = bed.plan(request)
    while True:
        bed.schedule(request)
        if not bed.scheduled:
            break
        loads += bed.plan(request)
    lowest = min(loads, key=lambda load: load.block_ids)
    assert request.num_computed_tokens == (lowest.block_ids[0][0] - 1) * BLOCK_TOKENS
    bed.end(lowest, lowest.blocks - 1)
    bed.schedule(request)  # behind what came of it, up to the next piece
    assert bed.scheduled == BLOCK_TOKENS
    (again,) = bed.again
    assert again.saved == request.num_computed_tokens // BLOCK_TOKENS
    assert again.load_errors == 1
    assert again.block_ids == [list(range(1, 4 * CHUNK + 2))]


def test_without_room_for_the_hit_there_is_no_meeting() -> None:
    bed = Bed()
    request = FakeRequest("r", list(range(HIT_BLOCKS * BLOCK_TOKENS + 1)))
    state = RequestState("r", Chain(BLOCK_TOKENS, b"", b"", digest), phase=Phase.HIT)
    state.hit = Hit(HIT_BLOCKS, PIN, LIFE, b"")
    state.choice = Choice(HIT_BLOCKS - 10, BOTH, 3.0, 2.0, 1.0)
    bed.meetings.decide(state, Pace(1.0, 1.0))
    assert not bed.meetings.waits_for_room(request)
    assert not bed.meetings.begin(state, request, FakeBlocks((list(range(HIT_BLOCKS - 1)),)))
    assert state.hit is not None
    assert not bed.meetings.busy
    assert bed.meetings.chunk_tokens(request, 0, 999) == 999
    assert bed.meetings.tokens_to_place(request) == 0
    assert state.choice == Choice(0, SLOWER, 3.0, 2.0)
    stats = bed.tally.take()
    assert stats is not None
    assert stats.data["load_decisions_load_slower"] == 1
    assert stats.data["declined_tokens"] == (HIT_BLOCKS - 10) * BLOCK_TOKENS
    assert "load_decisions_both" not in stats.data


def test_a_hit_waits_for_room_where_its_load_is_faster() -> None:
    bed = Bed()
    request = FakeRequest("r", list(range(HIT_BLOCKS * BLOCK_TOKENS + 1)))
    state = RequestState("r", Chain(BLOCK_TOKENS, b"", b"", digest), phase=Phase.HIT)
    state.hit = Hit(HIT_BLOCKS, PIN, LIFE, b"")
    state.choice = Choice(HIT_BLOCKS - 10, BOTH, 2.0, 3.0, 1.0)
    assert not bed.meetings.waits_for_room(request)  # not decided
    bed.meetings.decide(state, Pace(1.0, 1.0))
    assert connector_over(bed).waits_for_room(request)
    bed.meetings.drop("r")
    assert not bed.meetings.waits_for_room(request)


def test_a_pause_waits_only_for_pieces_under_way() -> None:
    """A paused engine steps without tokens until no work is left."""
    bed = Bed()
    request = bed.begin()
    loads = bed.plan(request)
    bed.scheduled = 0
    for load in loads:
        assert bed.plan(request) == []
        bed.end(load)
    assert bed.plan(request) == []
    assert bed.meetings.under_way == 0
    assert bed.meetings.busy
    others = FakeStep(num_scheduled_tokens={"other": 5})
    assert bed.meetings.plan(others)  # only the request itself found no room in the step


def test_a_step_that_could_not_be_planned_ends_its_pieces() -> None:
    bed = Bed(workers=2)
    request = bed.begin()
    assert bed.meetings.plan(FakeStep(num_scheduled_tokens={"r": bed.scheduled}))
    assert bed.blocks.held()
    bed.meetings.give_up()
    assert bed.blocks.held() == []
    assert bed.plan(request) == []
    bed.schedule(request)  # nothing is in the way any more
    assert bed.scheduled == request.num_tokens - request.num_computed_tokens
    assert bed.released == [PIN]


# Over them, what the scheduler class calls


def connector_over(bed: Bed) -> Mooncake:
    connector = Mooncake.__new__(Mooncake)
    connector._guard = Guard(logging.getLogger(), lambda: bed.tally)
    connector._sched = SimpleNamespace(meetings=bed.meetings)
    return connector


def fail(*args: Any, **named: Any) -> Any:
    raise RuntimeError("unexpected")


def test_after_an_error_nothing_is_computed_into_blocks_that_are_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bed = Bed()
    request = bed.begin()
    loads = bed.plan(request)
    monkeypatch.setattr(bed.meetings, "chunk_tokens", fail)
    connector = connector_over(bed)
    for load in loads:
        assert connector.chunk_tokens(request, request.num_computed_tokens, 9999) == 0
        bed.end(load)
    assert connector.chunk_tokens(request, request.num_computed_tokens, 9999) == 9999
    assert not bed.meetings.busy
    assert bed.released == [PIN]


def test_an_error_behind_a_move_loses_no_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """What moved is told, although its count or another meeting failed; and no request waits for ever."""
    bed = Bed()
    requests = [bed.begin(name) for name in ("moves", "breaks", "behind")]
    moves, breaks, behind = requests
    loads = {one.request_id: bed.plan(one) for one in requests}
    for load in [*loads["moves"], *loads["behind"]]:
        bed.end(load)
    lowest = min(load.block_ids[0][0] for load in loads["moves"]) - 1
    for one in requests:
        one.num_computed_tokens = lowest * BLOCK_TOKENS
    monkeypatch.setattr(compat, "count_loaded", fail)
    monkeypatch.setattr(
        bed.meetings,
        "_blocks_ahead",
        lambda meeting: (
            fail() if meeting.request is breaks else Meetings._blocks_ahead(bed.meetings, meeting)
        ),
    )
    connector = connector_over(bed)
    assert connector.before_schedule() == [(moves, (HIT_BLOCKS - lowest) * BLOCK_TOKENS)]
    assert connector.before_schedule() == []
    assert connector.chunk_tokens(behind, behind.num_computed_tokens, 9999) == 9999
    for load in loads["breaks"]:
        bed.end(load)
    assert connector.chunk_tokens(breaks, breaks.num_computed_tokens, 9999) == 9999
    assert not bed.meetings.busy


# In the scheduler's half


def measured_half(pool: FakePool, **changes: Any) -> tuple[SchedulerHalf, FakeBlockPool]:
    """A half whose engine has the scheduler class, and measured that both take as long."""
    clock = Clock()
    half, _ = scheduler_half(pool, clock=clock, meet=False, **changes)
    blocks = FakeBlockPool(4 * HIT_BLOCKS)
    half.bind_block_pool(blocks)
    half.meet_workers([Handshake(FINGERPRINT, COLUMNS, bytes_per_block=1000)])
    half.meetings.enabled = True
    for number in range(max(STEPS_MIN, LOADS_MIN)):
        half.step_begins(FakeStep(num_scheduled_tokens={"x": 1 + 1000 * BLOCK_TOKENS}))
        clock.now_s += 1.0
        half.step_computed()
        took = LoadTime(1.0, memory_bytes=1_000_000)
        half.step_ended(FakeOutput(kv_connector_worker_meta=Report(load_times={f"x{number}": took})))
    return half, blocks


def meet(half: SchedulerHalf, pool: FakePool, name: str = "r") -> tuple[FakeRequest, Step]:
    """A request whose first chunk is planned."""
    request = FakeRequest(name, list(range(HIT_BLOCKS * BLOCK_TOKENS + 1)))
    half.arrived(request)
    pool.answer_prefix(HIT_BLOCKS)
    assert half.matched_tokens(request, 0) == (0, False)
    assert half.matched_tokens(request, 0) == (0, False)  # asked again, it decides the same
    ids = (list(range(1, HIT_BLOCKS + 2)),)
    half.admitted(request, FakeBlocks(ids), 0)
    step = FakeStep([New(name, ids, 0)], num_scheduled_tokens={name: CHUNK_TOKENS_MIN})
    return request, half.build_step(step)


def ended(half: SchedulerHalf, step: Step, good: int | None = None) -> None:
    ends = {load.piece: PieceEnd(1, load.blocks if good is None else good) for load in step.loads}
    half.step_ended(FakeOutput(kv_connector_worker_meta=Report(pieces=ends)))


def test_a_hit_is_answered_with_nothing_and_loaded_in_pieces() -> None:
    pool = FakePool()
    half, blocks = measured_half(pool)
    request, step = meet(half, pool)
    request.kv_transfer_params = {"moonpool": {"explain": True}}
    assert step.loads
    assert all(load.piece for load in step.loads)
    assert step.loads[0].block_ids[0][-1] == HIT_BLOCKS  # the last block of the hit
    assert blocks.held()
    assert half.has_pending_work()
    assert half.has_pending_frees()
    ended(half, step)
    assert blocks.held() == []
    lowest = min(load.block_ids[0][0] for load in step.loads) - 1
    request.num_computed_tokens = lowest * BLOCK_TOKENS
    half.meetings.jump()
    assert half.meetings.take_moved() == [(request, (HIT_BLOCKS - lowest) * BLOCK_TOKENS)]
    assert pool.released == [PIN]
    answer = half.finished(request)
    assert answer is not None
    assert answer["moonpool"]["pool_tokens"] == (HIT_BLOCKS - lowest) * BLOCK_TOKENS
    assert answer["moonpool"]["decision"]["reason"] == BOTH
    stats = half.tally.take()
    assert stats is not None
    assert stats.data["load_decisions_both"] == 1
    assert stats.data["met_tokens"] == stats.data["loaded_tokens"]


@pytest.mark.parametrize("how", ["forgotten", "weights"])
def test_what_came_of_weights_that_are_gone_counts_for_nothing(how: str) -> None:
    """Pieces under way write to blocks that are computed, so the request waits for them first."""
    pool = FakePool()
    half, blocks = measured_half(pool)
    request, step = meet(half, pool)
    early, late = Step(step.loads[:1]), Step(step.loads[1:])
    assert late.loads
    ended(half, early)
    if how == "forgotten":
        half.forget_everything_stored()
    else:
        half._leave()
    boundary = (min(load.block_ids[0][0] for load in late.loads) - 1) * BLOCK_TOKENS
    request.num_computed_tokens = boundary
    half.meetings.jump()
    assert half.meetings.take_moved() == []
    assert half.meetings.chunk_tokens(request, boundary, 500) == 0
    request.num_computed_tokens = (early.loads[0].block_ids[0][0] - 1) * BLOCK_TOKENS
    half.meetings.jump()
    assert half.meetings.take_moved() == []  # although that piece has come
    request.num_computed_tokens = boundary
    ended(half, late)
    half.meetings.jump()
    assert half.meetings.take_moved() == []
    assert half.meetings.chunk_tokens(request, boundary, 500) == 500
    assert not half.meetings.busy
    assert blocks.held() == []
    assert pool.released == ([PIN] if how == "forgotten" else [])
    assert half.build_step(FakeStep(num_scheduled_tokens={"r": 500})) is NOTHING


@pytest.mark.parametrize("how", ["finished", "preempted", "forgotten and finished"])
def test_a_request_that_ends_leaves_its_pieces_their_blocks(how: str) -> None:
    pool = FakePool()
    half, blocks = measured_half(pool)
    request, step = meet(half, pool)
    if how == "preempted":
        request.num_preemptions = 1
        half.matched_tokens(request, 0)
    else:
        if how != "finished":
            half.forget_everything_stored()
        half.finished(request)
    assert not half.meetings.busy
    assert blocks.held()
    assert pool.released == []
    ended(half, step)
    assert blocks.held() == []
    assert pool.released == [PIN]


def test_what_failed_is_saved_when_it_was_computed() -> None:
    pool = FakePool()
    half, _ = measured_half(pool)
    request, step = meet(half, pool)
    ended(half, step, 0)
    first = Cached(["r"], set(), [None], [CHUNK_TOKENS_MIN])
    request.num_computed_tokens = CHUNK_TOKENS_MIN
    between = FakeStep(scheduled_cached_reqs=first, num_scheduled_tokens={"r": CHUNK_TOKENS_MIN})
    assert half.build_step(between) is NOTHING  # no more pieces
    done = request.num_computed_tokens = 2 * CHUNK_TOKENS_MIN
    left = HIT_BLOCKS * BLOCK_TOKENS - done
    cached = Cached(["r"], set(), [None], [done])
    later = half.build_step(FakeStep(scheduled_cached_reqs=cached, num_scheduled_tokens={"r": left}))
    (save,) = later.saves
    lowest = min(load.block_ids[0][0] for load in step.loads)
    assert save.block_ids == (tuple(range(lowest, HIT_BLOCKS + 1)),)
    assert later.loads == ()


def test_a_preempted_request_goes_behind_nothing_of_its_old_blocks() -> None:
    bed = Bed()
    request = bed.begin()
    loads = bed.plan(request)
    for load in loads:
        bed.end(load)
    request.num_preemptions = 1
    request.num_computed_tokens = (min(load.block_ids[0][0] for load in loads) - 1) * BLOCK_TOKENS
    bed.meetings.jump()
    assert bed.meetings.take_moved() == []
    assert not bed.meetings.busy
    assert bed.released == [PIN]


def test_some_requests_and_engines_never_meet() -> None:
    pool = FakePool()
    half, _ = measured_half(pool)
    half.meetings.enabled = False
    request = FakeRequest("r", list(range(HIT_BLOCKS * BLOCK_TOKENS + 1)))
    half.arrived(request)
    pool.answer_prefix(HIT_BLOCKS)
    assert half.matched_tokens(request, 0) == (HIT_BLOCKS * BLOCK_TOKENS, True)
    assert half.meetings_refusal() == ""


# In the worker's half


def test_pieces_are_reported_by_number_and_keep_no_request_waiting() -> None:
    pool = FakePool()
    half = worker_half(memory(), node_at(pool))
    suffixed = b"".join(bytes(32) + ranges.suffix() for ranges in COLUMNS)
    loads = [
        Load("r", WIDTH, suffixed, LIFE, bytes(32 * WIDTH * 2), ((first, first + 1),), piece=number)
        for number, first in ((1, 4), (2, 2), (3, 0))
    ]
    half.start_loads(Step(tuple(loads)))
    pool.answer(pool.loads[0][0], Loaded(bytes([1] * 2 * WIDTH), 64, seconds=0.5))
    pool.answer(pool.loads[1][0], Loaded(bytes([1] * WIDTH + [0] * WIDTH), 32, "lost"))
    half.poll()
    assert half.take_finished() == (set(), set())
    assert half.take_failed_blocks() == set()
    report = half.take_report()
    assert report is not None
    assert report.pieces[1].good == 2
    assert report.pieces[1].took is not None
    assert report.pieces[1].took.seconds == 0.5
    assert (report.pieces[2].good, report.pieces[2].took) == (1, None)
    assert report.loaded == report.load_times == {}
    half.fail_loads(Step((*loads, Load("r", WIDTH, suffixed, LIFE, b"", ((8,),), piece=4))))
    report = half.take_report()
    assert report is not None
    assert {number: end.good for number, end in report.pieces.items()} == {1: 0, 2: 0, 4: 0}


def test_a_failed_piece_is_computed_also_where_a_failed_load_is_an_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool = FakePool()
    half = worker_half(memory(), node_at(pool), recomputes=False)
    suffixed = b"".join(bytes(32) + ranges.suffix() for ranges in COLUMNS)
    for number, error in ((1, "lost"), (0, "gone")):
        half.start_loads(Step((Load("r", WIDTH, suffixed, LIFE, bytes(32 * WIDTH), ((4,),), piece=number),)))
        pool.answer(pool.loads[-1][0], Loaded(bytes(WIDTH), 0, error))
        half.poll()
    messages = [record.getMessage() for record in caplog.records]
    assert any("(lost); they are computed instead" in message for message in messages)
    assert any("(gone); they are an error" in message for message in messages)


def test_reports_of_ranks_add_up() -> None:
    slow, fast = LoadTime(2.0), LoadTime(1.0)
    one = Report(pieces={1: PieceEnd(1, 5, fast), 2: PieceEnd(1, 3)})
    both = one.aggregate(Report(pieces={1: PieceEnd(1, 4, slow), 3: PieceEnd(1, 1)}))
    assert both
    assert both.pieces == {1: PieceEnd(2, 4, slow), 2: PieceEnd(1, 3), 3: PieceEnd(1, 1)}


# The scheduler class, over a stand-in of vLLM's


class FakeManager:
    def __init__(self) -> None:
        self.allocated: list[tuple[int, bool]] = []
        self.cached: list[int] = []
        self.free = 10_000

    def allocate_slots(self, request: Any, num_new_tokens: int, **named: Any) -> list[int] | None:
        if num_new_tokens > self.free:
            return None
        self.allocated.append((num_new_tokens, named.get("delay_cache_blocks", False)))
        return [num_new_tokens]

    def get_blocks(self, request_id: str) -> FakeBlocks:
        return FakeBlocks(([1, 2],))

    def cache_blocks(self, request: Any, tokens: int) -> None:
        self.cached.append(tokens)


class FakeConnector:
    def __init__(self, allowed: bool = True) -> None:
        self.allowed, self.refusals, self.placed = allowed, [""], 0
        self.jumps: list[tuple[Any, int]] = []
        self.waits = False

    def allow_meetings(self, refusal: str) -> Any:
        self.refusals.append(refusal)
        return SimpleNamespace(busy=True) if self.allowed else None

    def before_schedule(self) -> list[tuple[Any, int]]:
        return self.jumps

    def chunk_tokens(self, request: Any, computed: int, wanted: int) -> int:
        return min(wanted, 100)

    def tokens_to_place(self, request: Any) -> int:
        return self.placed

    def waits_for_room(self, request: Any) -> bool:
        return self.waits


class FakeScheduler:
    """vLLM's, as far as the class uses it."""

    def __init__(self, connector: Any) -> None:
        self.connector, self.kv_cache_manager = connector, FakeManager()
        self.parallel_config = SimpleNamespace(pipeline_parallel_size=1)
        self.scheduler_config = SimpleNamespace(enable_chunked_prefill=True)
        self.vllm_config = SimpleNamespace(speculative_config=None)
        self.dcp_world_size = self.pcp_world_size = 1
        self.use_v2_model_runner = self.needs_kv_cache_zeroing = False

    def schedule(self) -> str:
        return "scheduled"

    def _reserve_prefill_lookahead(self, request: Any, computed: int, wanted: int) -> int:
        return wanted - 1

    def _build_kv_connector_meta(self, connector: Any, output: Any) -> str:
        return "meta"


def test_the_class_makes_room_for_the_hit_and_names_only_the_chunk() -> None:
    connector = FakeConnector()
    scheduler = scheduler_class(FakeScheduler)(connector)
    request, manager = FakeRequest("r", list(range(1000))), scheduler.kv_cache_manager
    connector.placed = 900
    assert manager.allocate_slots(request, 100, num_new_computed_tokens=50) == [850]
    assert (manager.allocated, manager.cached) == ([(850, True)], [150])
    manager.free = 500
    assert manager.allocate_slots(request, 100, num_new_computed_tokens=50) == [100]  # no room: as ever
    connector.waits = True
    assert manager.allocate_slots(request, 100, num_new_computed_tokens=50) is None
    connector.placed = 0
    assert manager.allocate_slots(request, 100) == [100]
    assert manager.allocated[1:] == [(100, False)] * 2
    assert scheduler._reserve_prefill_lookahead(request, 0, 300) == 100
    connector.jumps = [(request, 32)]
    assert scheduler.schedule() == "scheduled"


def test_an_engine_without_our_connector_is_as_ever(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        scheduler = scheduler_class(FakeScheduler)(None)
    assert "without effect" in caplog.text
    assert scheduler._reserve_prefill_lookahead(None, 0, 300) == 299
    assert scheduler.schedule() == "scheduled"
    refused = scheduler_class(FakeScheduler)(FakeConnector(allowed=False))
    assert refused.kv_cache_manager.allocate_slots(None, 5) == [5]
    assert refused._reserve_prefill_lookahead(None, 0, 300) == 299


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, ""),
        ({"vllm_config": SimpleNamespace(speculative_config=object())}, "speculates"),
        ({"vllm_config": SimpleNamespace(speculative_config=None, diffusion_config=object())}, "diffusion"),
        ({"parallel_config": SimpleNamespace(pipeline_parallel_size=2)}, "pipeline"),
        ({"pcp_world_size": 2}, "context"),
        ({"needs_kv_cache_zeroing": True}, "zeroed"),
        ({"scheduler_config": SimpleNamespace(enable_chunked_prefill=False)}, "chunked"),
    ],
)
def test_which_engines_are_refused(changes: dict[str, Any], why: str) -> None:
    scheduler = FakeScheduler(None)
    vars(scheduler).update(changes)
    found = refusal(scheduler, FakeScheduler)
    assert why in found
    assert bool(why) == bool(found)
    assert "_reserve_prefill_lookahead" in refusal(scheduler, type("Older", (), {"schedule": None}))


@pytest.mark.parametrize(
    ("diffusion", "ahead", "chosen"),
    [
        (None, False, "Scheduler"),
        (None, True, "AsyncScheduler"),
        (object(), False, "DiffusionScheduler"),
        (object(), True, "DiffusionAsyncScheduler"),
    ],
)
def test_which_of_the_classes_of_vllm_is_extended(
    monkeypatch: pytest.MonkeyPatch, diffusion: object, ahead: bool, chosen: str
) -> None:
    """That which vLLM chooses itself (VllmConfig)."""
    package: Any = ModuleType("vllm.v1.core.sched")
    for module, *names in (
        ("scheduler", "Scheduler"),
        ("async_scheduler", "AsyncScheduler"),
        ("diffusion_scheduler", "DiffusionScheduler", "DiffusionAsyncScheduler"),
    ):
        vllm_module = ModuleType(f"{package.__name__}.{module}")
        for name in names:
            setattr(vllm_module, name, name)
        setattr(package, module, vllm_module)
        monkeypatch.setitem(sys.modules, vllm_module.__name__, vllm_module)
    monkeypatch.setitem(sys.modules, package.__name__, package)
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(async_scheduling=ahead), diffusion_config=diffusion
    )
    assert compat.scheduler_base(config) == chosen
    del config.diffusion_config  # an older vLLM
    assert compat.scheduler_base(config) == ("AsyncScheduler" if ahead else "Scheduler")


def test_a_moved_request_is_given_again_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "new_request_data", lambda _scheduler, one, ids: New(one.request_id, ids, 64))
    connector = FakeConnector()
    scheduler = scheduler_class(FakeScheduler)(connector)
    moved, other, over = (FakeRequest(name, list(range(100))) for name in ("moved", "other", "over"))
    scheduler.requests = {"moved": moved, "other": other}
    scheduler.use_v2_model_runner = True
    connector.jumps = [(moved, 64), (over, 64)]
    scheduler.schedule()
    nothing = SimpleNamespace(scheduled_cached_reqs=cached(), scheduled_new_reqs=[])
    assert scheduler._build_kv_connector_meta(connector, nothing) == "meta"  # not scheduled in this step
    assert nothing.scheduled_new_reqs == []
    output = SimpleNamespace(scheduled_cached_reqs=cached("other", "moved"), scheduled_new_reqs=[])
    scheduler._build_kv_connector_meta(connector, output)
    assert output.scheduled_new_reqs == [New("moved", ([1, 2],), 64)]
    assert vars(output.scheduled_cached_reqs) == vars(cached("other"))
    again = SimpleNamespace(scheduled_cached_reqs=cached("moved"), scheduled_new_reqs=[])
    scheduler._build_kv_connector_meta(connector, again)
    assert again.scheduled_new_reqs == []


def test_a_moved_request_that_was_preempted_is_given_by_vllm_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "new_request_data", lambda _scheduler, one, ids: New(one.request_id, ids, 64))
    connector = FakeConnector()
    scheduler = scheduler_class(FakeScheduler)(connector)
    moved = FakeRequest("moved", list(range(100)))
    scheduler.requests, scheduler.use_v2_model_runner = {"moved": moved}, True
    connector.jumps = [(moved, 64)]
    scheduler.schedule()
    resumed = New("moved", ([7],), 0)
    output = SimpleNamespace(scheduled_cached_reqs=cached(), scheduled_new_reqs=[resumed])
    scheduler._build_kv_connector_meta(connector, output)
    later = SimpleNamespace(scheduled_cached_reqs=cached("moved"), scheduled_new_reqs=[])
    scheduler._build_kv_connector_meta(connector, later)
    assert output.scheduled_new_reqs == [resumed]
    assert later.scheduled_new_reqs == []
    assert vars(later.scheduled_cached_reqs) == vars(cached("moved"))


def cached(*names: str) -> SimpleNamespace:
    """CachedRequestData; new_token_ids are for pipelines only."""
    count = len(names)
    return SimpleNamespace(
        req_ids=list(names),
        new_token_ids=[],
        new_block_ids=[None] * count,
        num_computed_tokens=[64] * count,
        num_output_tokens=[0] * count,
    )


def test_vllm_counts_what_was_loaded() -> None:
    request: Any = FakeRequest("r", list(range(100)))
    compat.count_loaded(request, 5)  # a vLLM without such counts
    told: list[int] = []
    request.prefill_stats = SimpleNamespace(
        num_prompt_tokens=100,
        num_local_cached_tokens=3,
        num_external_cached_tokens=4,
        set=lambda *counts: told.extend(counts),
    )
    compat.count_loaded(request, 5)
    assert told == [100, 3, 9]
