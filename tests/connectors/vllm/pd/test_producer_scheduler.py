"""Prefill's half in the scheduler's process: leases, references and what the workers are told."""

from __future__ import annotations

import random
from typing import Any

import pytest

from moonpool.connectors.vllm.metrics import Tally
from moonpool.connectors.vllm.pd.kv_transfer_params import Offer, Unusable, parse_decode
from moonpool.connectors.vllm.pd.producer_scheduler import Identity, ProducerScheduler
from moonpool.connectors.vllm.pd.step_plan import Grown
from moonpool.connectors.vllm.reach import FULL, Reach
from tests.connectors.vllm.fakes import (
    BLOCK_TOKENS,
    FINGERPRINT,
    LOG,
    Cached,
    Clock,
    FakeBlockPool,
    FakeRequest,
    FakeStep,
    FakeTables,
    New,
    Status,
)

PROMPT = bytes(32)
TOKEN = b"secret"
BLOCKS = list(range(100, 120))


class Bed:
    def __init__(self, ranks: int = 1, reaches: tuple[Reach, ...] = (), splits: tuple[int, ...] = ()) -> None:
        self.clock, self.tally, self.pool = Clock(), Tally(), FakeBlockPool()
        places = tuple(f"127.0.0.1:{4000 + rank}" for rank in range(ranks))
        self.producer = ProducerScheduler(
            Identity("engine-1", FINGERPRINT, places, ranks, BLOCK_TOKENS, TOKEN),
            reaches=reaches,
            splits=splits,
            silence_s=10.0,
            tally=self.tally,
            log=LOG,
            clock=self.clock,
        )
        self.producer.bind(self.pool)
        self.tables = FakeTables()
        self.producer.bind_tables(self.tables)

    def request(self, tokens: int = 18, name: str = "r", **params: Any) -> FakeRequest:
        one = FakeRequest(name, list(range(tokens)))
        one.kv_transfer_params = {"do_remote_decode": True, **params}
        self.producer.arrived(one, PROMPT)
        return one

    def first_step(self, one: FakeRequest, scheduled: int) -> Any:
        new = New(one.request_id, (list(BLOCKS),), 0)
        return self.producer.plan(FakeStep([new], num_scheduled_tokens={one.request_id: scheduled}))

    def next_step(
        self, one: FakeRequest, computed: int, scheduled: int, resumed: list[int] | None = None
    ) -> Any:
        fresh = None if resumed is None else (resumed,)
        cached = Cached([one.request_id], {one.request_id} if resumed else set(), [fresh], [computed])
        return self.producer.plan(FakeStep([], cached, {one.request_id: scheduled}))

    def finish(self, one: FakeRequest, status: str = "FINISHED_LENGTH_CAPPED") -> dict[str, Any] | None:
        one.status, one.num_computed_tokens = Status(status), one.num_prompt_tokens
        return self.producer.finished(one)

    def idle_step(self) -> Any:
        step = self.producer.plan(FakeStep())
        assert self.producer.leases.check_integrity()
        return step


def test_two_step() -> None:
    bed = Bed()
    one = bed.request(18)
    step = bed.first_step(one, 18)
    assert len(step.opens) == 1
    assert step.grown == ()
    assert bed.pool.held() == []

    offer = parse_decode(bed.finish(one), TOKEN)

    assert isinstance(offer, Offer)
    assert offer.blocks == (tuple(BLOCKS[:5]),)  # 17 tokens: decode computes the last one
    assert (offer.tokens, offer.ranks, offer.tp_size) == (18, ("127.0.0.1:4000",), 1)
    assert (offer.lease, offer.slot) == (step.opens[0].lease, step.opens[0].slot)
    assert bed.pool.held() == BLOCKS[:5]
    assert bed.producer.has_work
    assert bed.producer.heartbeats({offer.lease}, {offer.lease: 1})
    assert bed.pool.held() == []
    assert bed.idle_step().ends == ()
    assert bed.producer.is_idle


def test_blocks_that_another_request_uses_are_not_free_when_their_lease_ends() -> None:
    bed = Bed()
    one = bed.request(18)
    bed.first_step(one, 18)
    offer = parse_decode(bed.finish(one), TOKEN)
    assert isinstance(offer, Offer)
    bed.pool.touch([bed.pool.blocks[block] for block in BLOCKS[:5]])
    assert not bed.producer.heartbeats({offer.lease}, {offer.lease: 1})
    assert bed.pool.held() == BLOCKS[:5]


def test_silence_ends_a_lease_and_the_workers_hear_it_in_the_same_step() -> None:
    bed = Bed()
    one = bed.request()
    bed.first_step(one, 18)
    bed.finish(one)
    bed.clock.now_s += 9
    assert not bed.idle_step()
    assert bed.pool.held()
    bed.clock.now_s += 1
    (end,) = bed.idle_step().ends
    assert "expired" in end.why
    assert bed.pool.held() == []
    assert not bed.producer.has_work
    stats = bed.tally.take()
    assert stats is not None
    assert stats.data["leases_expired"] == 1


@pytest.mark.parametrize("status", ["FINISHED_ABORTED", "FINISHED_ERROR", "FINISHED_IGNORED"])
@pytest.mark.parametrize("transfer", [{}, {"transfer_id": "x"}])
def test_an_aborted_prefill_gives_nothing(status: str, transfer: dict[str, str]) -> None:
    bed = Bed()
    one = bed.request(**transfer)
    bed.first_step(one, 8)
    assert bed.finish(one, status) is None
    assert len(bed.idle_step().ends) == 1
    assert bed.pool.held() == []
    assert bed.producer.is_idle


def test_an_early_stop_is_handed_over() -> None:
    bed = Bed()
    one = bed.request()
    bed.first_step(one, 18)
    assert bed.finish(one, "FINISHED_STOPPED") is not None


def test_all_ranks_must_have_it() -> None:
    bed = Bed(ranks=2)
    one = bed.request()
    bed.first_step(one, 18)
    offer = parse_decode(bed.finish(one), TOKEN)
    assert isinstance(offer, Offer)
    bed.producer.heartbeats(set(), {offer.lease: 1})
    assert bed.pool.held()
    bed.producer.heartbeats(set(), {offer.lease: 1})
    assert bed.pool.held() == []


class TestConcurrent:
    def test_each_chunk_is_told_and_held_as_it_becomes_complete(self) -> None:
        bed = Bed()
        one = bed.request(18, transfer_id="x")
        step = bed.first_step(one, 6)
        lease = step.opens[0].lease
        assert step.grown == (Grown(lease, 0, ((100,),), False),)
        assert bed.next_step(one, 6, 1).grown == ()
        assert bed.next_step(one, 7, 6).grown == (Grown(lease, 1, ((101, 102),), False),)
        assert bed.next_step(one, 13, 5).grown == (Grown(lease, 3, ((103, 104),), True),)
        assert bed.pool.held() == BLOCKS[:5]
        assert bed.finish(one) is None
        bed.clock.now_s += 9
        assert not bed.idle_step()
        bed.producer.heartbeats(set(), {lease: 1})
        assert bed.pool.held() == []

    def test_decode_has_it_before_the_request_ends(self) -> None:
        bed = Bed()
        one = bed.request(8, transfer_id="x")
        lease = bed.first_step(one, 8).opens[0].lease
        bed.producer.heartbeats(set(), {lease: 1})
        assert bed.pool.held() == []
        assert bed.finish(one) is None
        assert bed.producer.is_idle

    def test_decode_leaves_in_the_middle(self) -> None:
        bed = Bed()
        one = bed.request(18, transfer_id="x")
        lease = bed.first_step(one, 6).opens[0].lease
        bed.producer.heartbeats(set(), {lease: 1})
        assert bed.next_step(one, 6, 12).grown == ()
        assert bed.pool.held() == []

    def test_a_preemption_begins_anew_with_other_blocks(self) -> None:
        bed = Bed()
        one = bed.request(18, transfer_id="x")
        old = bed.first_step(one, 8).opens[0].lease
        one.num_preemptions = 1
        fresh = list(range(200, 220))
        step = bed.next_step(one, 0, 18, resumed=fresh)
        (end,), (begin,) = step.ends, step.opens
        assert end.lease == old
        assert begin.transfer == "x"
        assert step.grown == (Grown(begin.lease, 0, (tuple(fresh[:5]),), True),)
        assert bed.pool.held() == fresh[:5]

    @pytest.mark.parametrize("computed", [8, 18])
    def test_a_preempted_request_keeps_no_blocks_while_it_waits(self, computed: int) -> None:
        """It may wait for just these."""
        bed = Bed()
        one = bed.request(18, transfer_id="x")
        old = bed.first_step(one, computed).opens[0].lease
        assert bed.pool.held()
        one.num_preemptions = 1
        step = bed.idle_step()
        assert [end.lease for end in step.ends] == [old]
        assert [begin.transfer for begin in step.opens] == ["x"]
        assert bed.pool.held() == []
        assert not bed.idle_step()
        (grown,) = bed.next_step(one, 0, 18, resumed=list(range(200, 220))).grown
        assert (grown.first, grown.final) == (0, True)
        assert bed.finish(one) is None
        assert bed.producer.leases.offered == 1

    def test_what_decode_has_needs_no_second_lease(self) -> None:
        bed = Bed()
        one = bed.request(18, transfer_id="x")
        lease = bed.first_step(one, 18).opens[0].lease
        bed.producer.heartbeats(set(), {lease: 1})
        one.num_preemptions = 1
        assert not bed.idle_step()
        assert bed.next_step(one, 0, 18, resumed=list(range(200, 220))).grown == ()
        assert bed.finish(one) is None
        assert bed.pool.held() == []
        assert bed.producer.is_idle

    def test_one_transfer_id_at_a_time(self) -> None:
        bed = Bed()
        one = bed.request(transfer_id="x")
        with pytest.raises(Unusable, match="under way"):
            bed.request(name="s", transfer_id="x")
        bed.finish(one, "FINISHED_ABORTED")
        bed.request(name="t", transfer_id="x")


def test_slots_run_out() -> None:
    bed = Bed()
    bed.producer.leases._free.clear()
    with pytest.raises(Unusable, match="too many hand-overs"):
        bed.request()


def test_something_unexpected() -> None:
    bed = Bed()
    one = bed.request(transfer_id="x")
    bed.first_step(one, 8)
    bed.producer.forget("r")
    bed.producer.forget("r")
    assert len(bed.idle_step().ends) == 1
    assert bed.pool.held() == []
    assert bed.finish(one) is None


def test_a_name_that_comes_again() -> None:
    """vLLM never told the end of the first: its lease must not stay."""
    bed = Bed()
    first = bed.request(transfer_id="x")
    old = bed.first_step(first, 8).opens[0].lease
    again = bed.request(transfer_id="x")
    step = bed.first_step(again, 18)
    assert [end.lease for end in step.ends] == [old]
    assert bed.finish(again) is None
    assert len(bed.producer.leases) == 1
    assert bed.pool.held() == BLOCKS[:5]


def test_nothing_of_old_weights_is_given() -> None:
    bed = Bed()
    done, running, met = bed.request(name="a"), bed.request(name="b"), bed.request(name="c", transfer_id="x")
    bed.first_step(done, 18)
    assert bed.finish(done) is not None
    bed.first_step(running, 18)
    bed.first_step(met, 8)
    assert bed.pool.held()
    bed.producer.forget_all()
    assert bed.pool.held() == []
    assert len(bed.idle_step().ends) == 3
    assert bed.finish(running) is None
    assert bed.finish(met) is None
    assert bed.producer.is_idle
    assert bed.finish(bed.request(name="d")) is None  # it was never scheduled
    bed.idle_step()
    later = bed.request(name="e")
    bed.first_step(later, 18)
    assert bed.finish(later) is not None


def test_blocks_that_cannot_be_freed_leave_no_lease_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault in the middle of a plan: the next one tells what this one could not."""
    bed = Bed()
    one = bed.request()
    bed.first_step(one, 18)
    bed.finish(one)
    bed.clock.now_s += 10

    def fail(_blocks: Any) -> None:
        raise RuntimeError("unexpected")

    with monkeypatch.context() as broken:
        broken.setattr(bed.pool, "free_blocks", fail)
        with pytest.raises(RuntimeError):
            bed.idle_step()
    assert len(bed.idle_step().ends) == 1


class Scheduler:
    """As vLLM does it, to requests that come, run in chunks, are preempted, end and leave at random; and the
    workers, who know which leases are valid."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.bed, self.names = rng, Bed(), 0
        self.bed.pool = FakeBlockPool(80)
        self.bed.producer.bind(self.bed.pool)
        self.blocks: dict[str, list[int]] = {}
        self.requests: dict[str, FakeRequest] = {}
        self.computed: dict[str, int] = {}
        self.valid: dict[int, set[int]] = {}
        self.transfers: dict[int, str] = {}
        self.void: set[int] = set()
        self.seen: set[str] = set()

    def arrive(self) -> None:
        self.names += 1
        transfer = {"transfer_id": f"x{self.names}"} if self.rng.random() < 0.6 else {}
        one = self.bed.request(self.rng.randrange(1, 41), f"r{self.names}", **transfer)
        self.requests[one.request_id] = one

    def free(self, name: str) -> None:
        pool = self.bed.pool
        pool.free_blocks(pool.blocks[block] for block in self.blocks.pop(name, ()))
        self.computed.pop(name, None)

    def preempt(self) -> None:
        if self.computed:
            name = self.rng.choice(sorted(self.computed))
            self.free(name)
            self.requests[name].num_preemptions += 1

    def end(self, how: str) -> None:
        ready = [
            name
            for name, one in self.requests.items()
            if how == "FINISHED_ABORTED" or self.computed.get(name, 0) >= one.num_prompt_tokens
        ]
        if not ready:
            return
        one = self.requests.pop(self.rng.choice(ready))
        one.status = Status(how)
        one.num_computed_tokens = self.computed.get(one.request_id, 0)
        offer = parse_decode(self.bed.producer.finished(one), TOKEN)
        if isinstance(offer, Offer):
            assert offer.lease in self.valid
            assert list(offer.blocks[0]) == self.blocks[one.request_id][: len(offer.blocks[0])]
            self.valid[offer.lease] |= set(offer.blocks[0])
        self.free(one.request_id)

    def reset(self) -> None:
        self.bed.producer.forget_all()
        self.void |= self.valid.keys()

    def decode(self) -> None:
        """A heartbeat of some, and some that need no more."""
        heard = {lease for lease in self.valid if self.rng.random() < 0.5}
        handed = {lease for lease in self.valid if self.rng.random() < 0.2}
        for lease in handed:
            del self.valid[lease]
        self.bed.producer.heartbeats(heard, dict.fromkeys(handed, 1))

    def step(self) -> None:
        """A lease that is still valid when the step begins keeps blocks that nobody else was given, and none
        of a request that waits; what the workers are told of are the request's own."""
        pool, step, given = self.bed.pool, FakeStep(), set()
        for name, one in self.requests.items():
            free = [block.block_id for block in pool.blocks if not block.ref_cnt]
            known, done = self.blocks.get(name, []), self.computed.get(name, 0)
            chunk = self.rng.choice([1, 6, 18, 40])
            if done < one.num_prompt_tokens:
                chunk = min(chunk, one.num_prompt_tokens - done)
            more = -(-(done + chunk) // BLOCK_TOKENS) - len(known)
            if len(free) < more or self.rng.random() < 0.3:
                continue
            fresh = self.rng.sample(free, more)
            pool.touch([pool.blocks[block] for block in fresh])
            given |= set(fresh)
            step.num_scheduled_tokens[name] = chunk
            if name in self.computed:
                step.scheduled_cached_reqs.req_ids.append(name)
                step.scheduled_cached_reqs.new_block_ids.append((fresh,) if fresh else None)
                step.scheduled_cached_reqs.num_computed_tokens.append(done)
            elif one.num_preemptions and name in self.seen:
                step.scheduled_cached_reqs.req_ids.append(name)
                step.scheduled_cached_reqs.resumed_req_ids.add(name)
                step.scheduled_cached_reqs.new_block_ids.append((fresh,))
                step.scheduled_cached_reqs.num_computed_tokens.append(done)
            else:
                step.scheduled_new_reqs.append(New(name, (list(fresh),), done))
            self.seen.add(name)
            self.blocks[name], self.computed[name] = known + fresh, done + chunk
        plan = self.bed.producer.plan(step)
        for end in plan.ends:
            self.valid.pop(end.lease, None)
        ended = {end.lease for end in plan.ends}
        self.valid |= {begin.lease: set() for begin in plan.opens if begin.lease not in ended}
        assert not self.void & self.valid.keys()
        self.transfers |= {begin.lease: f"r{begin.transfer[1:]}" for begin in plan.opens}
        for lease, blocks in self.valid.items():
            assert not blocks & given
            assert all(pool.blocks[block].ref_cnt for block in blocks)
            assert not blocks or self.transfers[lease] not in self.requests.keys() - self.computed.keys()
        for grown in plan.grown:
            own = self.blocks[self.transfers[grown.lease]]
            assert list(grown.block_ids[0]) == own[grown.first : grown.first + len(grown.block_ids[0])]
            self.valid[grown.lease] |= set(grown.block_ids[0])


@pytest.mark.parametrize("_round", range(20))
def test_random_schedules(_round: int, rng: random.Random) -> None:
    """A block of a valid lease is never given to anybody else, and none stays behind."""
    one = Scheduler(rng)
    for _ in range(300):
        one.bed.clock.now_s += rng.choice([0.0, 0.1, 3.0])
        action = rng.choices(
            ["arrive", "step", "preempt", "end", "abort", "decode", "reset"], [3, 8, 1, 3, 1, 2, 0.1]
        )[0]
        if action == "end":
            one.end("FINISHED_LENGTH_CAPPED")
        elif action == "abort":
            one.end("FINISHED_ABORTED")
        else:
            getattr(one, action)()
        assert one.bed.producer.leases.check_integrity()
    while one.requests:
        one.end("FINISHED_ABORTED")
    one.bed.clock.now_s += 1000
    one.step()
    assert one.bed.pool.held() == []
    assert one.valid == {}
    assert one.bed.producer.is_idle


# Sliding windows

WINDOW = (FULL, Reach(window=2 * BLOCK_TOKENS))
FULL_BLOCKS = list(range(100, 105))


def step_with(bed: Bed, one: FakeRequest, window: list[int], computed: int, scheduled: int) -> Any:
    """A step in which the request has these blocks in the group with the window."""
    bed.tables.ids[one.request_id] = (FULL_BLOCKS[: len(window)], window)
    if computed:
        cached = Cached([one.request_id], set(), [None], [computed])
        return bed.producer.plan(FakeStep([], cached, {one.request_id: scheduled}))
    new = New(one.request_id, ([], []), 0)
    return bed.producer.plan(FakeStep([new], num_scheduled_tokens={one.request_id: scheduled}))


def test_two_step_with_a_window_keeps_what_decode_needs_before_vllm_takes_it() -> None:
    bed = Bed(reaches=WINDOW)
    one = bed.request(18)
    step_with(bed, one, [0, 111, 112, 113], 0, 16)
    assert bed.pool.held() == []
    step_with(bed, one, [0, 111, 112, 113, 114], 16, 2)  # the 17 tokens that decode takes end the prompt
    held = [*FULL_BLOCKS, 112, 113, 114]
    assert bed.pool.held() == held
    bed.tables.ids[one.request_id] = (FULL_BLOCKS, [0, 0, 0, 113, 114])

    offer = parse_decode(bed.finish(one), TOKEN)

    assert isinstance(offer, Offer)
    assert offer.blocks == (tuple(FULL_BLOCKS), (0, 0, 112, 113, 114))
    assert bed.pool.held() == held
    assert bed.producer.heartbeats({offer.lease}, {offer.lease: 1})
    assert bed.pool.held() == []


@pytest.mark.parametrize("end", ["gone", "preempted", "aborted"])
def test_blocks_that_are_kept_for_a_window_are_freed(end: str) -> None:
    bed = Bed(reaches=WINDOW)
    one = bed.request(18)
    step_with(bed, one, [0, 111, 0 if end == "gone" else 112, 113, 114], 0, 18)
    status = "FINISHED_LENGTH_CAPPED"
    if end == "preempted":
        one.num_preemptions += 1
    if end == "aborted":
        status = "FINISHED_ABORTED"
    if end != "aborted":
        bed.idle_step()
        assert bed.pool.held() == []
    assert bed.finish(one, status) is None
    bed.idle_step()
    assert bed.pool.held() == []
    assert not bed.producer.has_work


def test_concurrent_with_a_window_names_only_what_decode_needs() -> None:
    bed = Bed(reaches=WINDOW)
    one = bed.request(18, transfer_id="t")
    first = step_with(bed, one, [110, 111, 112], 0, 12)
    assert first.grown == (Grown(first.opens[0].lease, 0, ((100, 101, 102), (0, 0, 112)), False),)
    last = step_with(bed, one, [0, 111, 112, 113, 114], 12, 6)
    assert last.grown == (Grown(first.opens[0].lease, 3, ((103, 104), (113, 114)), True),)
    assert bed.pool.held() == [*FULL_BLOCKS, 112, 113, 114]
    assert bed.finish(one) is None
    bed.producer.heartbeats(set(), {first.opens[0].lease: 1})
    assert bed.pool.held() == []


def test_a_transfer_of_which_a_window_lacks_a_block_ends() -> None:
    bed = Bed(reaches=WINDOW)
    one = bed.request(18, transfer_id="t")
    step = step_with(bed, one, [0, 0, 0, 113, 114], 0, 18)
    assert step.grown == ()
    assert [end.why for end in step.ends] == ["the prefill engine lost track of its blocks"]
    assert bed.finish(one) is None
    assert bed.pool.held() == []


def test_of_blocks_with_parts_those_are_named_that_decode_needs() -> None:
    """The window's own blocks have half of the tokens; of 17 tokens decode needs its last two, and the tenth
    does not exist."""
    own = [0] * 7 + [117, 118]
    offered = (tuple(FULL_BLOCKS), (0, 0, 0, 0, 118), (0, 0, 0, 117, 0))
    bed = Bed(reaches=(FULL, Reach(window=4)), splits=(1, 2))
    two = bed.request(18)
    bed.tables.ids[two.request_id] = (FULL_BLOCKS, own)
    bed.first_step(two, 18)
    offer = parse_decode(bed.finish(two), TOKEN)
    assert isinstance(offer, Offer)
    assert offer.blocks == offered
    assert bed.pool.held() == [*FULL_BLOCKS, 117, 118]

    bed = Bed(reaches=(FULL, Reach(window=4)), splits=(1, 2))
    one = bed.request(18, transfer_id="t")
    bed.tables.ids[one.request_id] = (FULL_BLOCKS[:3], [111, 112, 113, 114, 115, 116])
    (first,) = bed.first_step(one, 12).grown
    assert first.block_ids == ((100, 101, 102), (0, 0, 0), (0, 0, 0))
    bed.tables.ids[one.request_id] = (FULL_BLOCKS, own)
    (last,) = bed.next_step(one, 12, 6).grown
    assert (last.first, last.block_ids) == (3, ((103, 104), (0, 118), (117, 0)))
    assert last.final
