"""The scheduler's half against a pool that answers when told to: pins, loads, saves and every way out."""

from __future__ import annotations

import dataclasses
import logging
import pickle

import pytest

from moonpool.connectors.vllm.free_block_wait import FREE_BLOCK_WAIT_S, WAIT_MAX_S
from moonpool.connectors.vllm.lookups import ANSWER_TIMEOUT_S
from moonpool.connectors.vllm.messages import NOTHING, Handshake, Report, Save
from moonpool.connectors.vllm.scheduler import LOOKUPS_AHEAD_MAX, SchedulerHalf
from moonpool.connectors.vllm.settings import Settings
from moonpool.core.errors import ConfigError, Unavailable
from moonpool.core.store.keys import block_digests, block_name, chain_seed
from tests.connectors.vllm.fakes import (
    BLOCK_TOKENS,
    COLUMNS,
    FINGERPRINT,
    HANDSHAKE,
    LIFE,
    LOG,
    Cached,
    Clock,
    FakeBlocks,
    FakeOutput,
    FakePool,
    FakeStep,
    New,
    admit,
    digest,
    engine_config,
    first_step,
    next_step,
    node_at,
    request,
    scheduler_half,
)

WIDTH = len(COLUMNS)


def names(tokens: list[int], seed: bytes = b"") -> list[bytes]:
    return [
        block_name(digest, ranges)
        for digest in block_digests(tokens, BLOCK_TOKENS, seed=seed)
        for ranges in COLUMNS
    ]


def finish_saves(half: SchedulerHalf, *saves: Save) -> None:
    half.step_ended(FakeOutput(kv_connector_worker_meta=Report(saved={save.job_id: 1 for save in saves})))


def test_one_query_with_all_objects_of_all_full_blocks() -> None:
    pool = FakePool()
    half, _ = scheduler_half(pool)
    one = request(18)
    half.arrived(one)
    assert len(pool.prefixes) == 1
    assert pool.prefixes[0][1:] == (b"".join(names(list(range(18)))), WIDTH)
    for _ in range(3):
        assert half.matched_tokens(one, 0) == (None, False)
    assert len(pool.prefixes) == 1


def test_hit_is_loaded_and_the_pin_released_after_the_load() -> None:
    pool = FakePool()
    half, _ = scheduler_half(pool)
    one = request(18)
    half.arrived(one)
    pool.answer_prefix(3)
    for _ in range(2):  # asking has no side effect
        assert half.matched_tokens(one, BLOCK_TOKENS) == (2 * BLOCK_TOKENS, True)
    assert admit(half, one, local=BLOCK_TOKENS) == 2 * BLOCK_TOKENS

    step = half.build_step(FakeStep())

    (load,) = step.loads
    assert load.request_id == "r"
    assert load.holders == LIFE
    assert load.block_ids == ((101, 102),)
    assert load.first_names == b"".join(names(list(range(18)))[WIDTH : 2 * WIDTH])
    assert load.descriptors == b"".join(bytes([index] * 32) for index in range(WIDTH, 3 * WIDTH))
    assert half.build_step(FakeStep()) is NOTHING
    assert pool.released == []
    half.step_ended(FakeOutput({"r"}, Report(loaded={"r": 2})))
    assert pool.released == [7]
    assert half.finished(one) == {
        "moonpool": {"pool_tokens": 2 * BLOCK_TOKENS, "local_tokens": BLOCK_TOKENS, "load_errors": 0}
    }
    assert half.lookups.pins == 0
    assert not half.has_pending_work()


def test_one_token_is_left_to_compute() -> None:
    pool = FakePool()
    half, _ = scheduler_half(pool)
    one = request(16)
    half.arrived(one)
    pool.answer_prefix(4)
    assert half.matched_tokens(one, 0) == (12, True)


def test_local_cache_covers_the_hit() -> None:
    pool = FakePool()
    half, _ = scheduler_half(pool)
    one = request(18)
    half.arrived(one)
    pool.answer_prefix(2)
    assert half.matched_tokens(one, 8) == (0, False)
    assert pool.released == []  # asked once more with less, it could still load
    admit(half, one, local=8)
    assert pool.released == [7]


@pytest.mark.parametrize("late", [False, True])
def test_no_answer_in_time_is_a_miss(late: bool) -> None:
    pool, clock = FakePool(), Clock()
    half, _ = scheduler_half(pool, clock=clock)
    one = request()
    half.arrived(one)
    clock.now_s += ANSWER_TIMEOUT_S - 0.01
    assert half.matched_tokens(one, 0) == (None, False)
    clock.now_s += 0.02
    assert half.matched_tokens(one, 0) == (0, False)
    if late:
        pool.answer_prefix(4)
        assert half.has_pending_work()
        half.build_step(FakeStep())
        assert pool.released == [7]
        assert not half.has_pending_work()
        assert half.matched_tokens(one, 0) == (0, False)


@pytest.mark.parametrize("how", ["error", "broken", "gone"])
def test_a_pool_that_fails_is_a_miss(how: str) -> None:
    pool = FakePool(broken=Unavailable("gone") if how == "broken" else None)
    half, _ = scheduler_half(None if how == "gone" else pool)
    one = request()
    half.arrived(one)
    if how == "error":
        pool.answer_prefix(0, error="the node was lost")
    assert half.matched_tokens(one, 0) == (0, False)
    admit(half, one)
    assert half.finished(one) is not None
    stats = half.tally.take()
    assert stats is not None
    assert stats.data.get("lookups_unknown", 0) == (0 if how == "gone" else 1)


def test_abort_in_every_phase_keeps_no_pin() -> None:
    pool = FakePool()
    half, _ = scheduler_half(pool)
    looking, hit, loading = request(name="looking"), request(name="hit"), request(name="loading")
    half.arrived(looking)
    half.finished(looking)
    pool.answer_prefix(4, pin_id=1)
    half.build_step(FakeStep())
    assert pool.released == [1]

    half.arrived(hit)
    pool.answer_prefix(4, pin_id=2)
    half.matched_tokens(hit, 0)
    half.finished(hit)
    assert pool.released == [1, 2]

    half.arrived(loading)
    pool.answer_prefix(4, pin_id=3)
    admit(half, loading)
    assert len(half.build_step(FakeStep()).loads) == 1
    half.finished(loading)
    assert pool.released == [1, 2]  # its blocks are still being written to
    half.step_ended(FakeOutput({"loading"}, Report(loaded={"loading": 4})))
    assert pool.released == [1, 2, 3]
    assert half.lookups.pins == 0


def test_failed_load_is_computed_and_saved() -> None:
    pool = FakePool()
    half, blocks = scheduler_half(pool)
    one = request(18)
    half.arrived(one)
    pool.answer_prefix(4)
    admit(half, one)
    half.build_step(FakeStep())
    half.step_ended(FakeOutput({"r"}, Report(loaded={"r": 1})))
    half.admitted(one, FakeBlocks((list(range(100, 120)),)), 0)

    (save,) = half.build_step(first_step(one, computed=4, scheduled=14)).saves

    assert save.block_ids == ((101, 102, 103),)
    assert blocks.held() == [101, 102, 103]
    result = half.finished(one)
    assert result == {"moonpool": {"pool_tokens": 4, "local_tokens": 0, "load_errors": 3}}
    stats = half.tally.take()
    assert stats is not None
    assert stats.data["loaded_tokens"] == 4
    assert stats.data["load_errors"] == 3


def test_load_that_failed_whole_does_not_ask_again() -> None:
    pool = FakePool()
    half, _ = scheduler_half(pool)
    one = request(18)
    half.arrived(one)
    pool.answer_prefix(4)
    admit(half, one)
    half.build_step(FakeStep())
    half.step_ended(FakeOutput({"r"}, Report(loaded={"r": 0})))
    assert half.matched_tokens(one, 0) == (0, False)
    assert len(pool.prefixes) == 1


def test_ranks_report_in_different_steps_and_the_worst_counts() -> None:
    pool = FakePool()
    half, _ = scheduler_half(pool, workers=2)
    one = request(18)
    half.arrived(one)
    pool.answer_prefix(4)
    admit(half, one)
    half.build_step(FakeStep())
    half.step_ended(FakeOutput(None, Report(loaded={"r": 2})))
    half.step_ended(FakeOutput({"r"}, Report(loaded={"r": 4})))
    assert half.finished(one) == {"moonpool": {"pool_tokens": 8, "local_tokens": 0, "load_errors": 2}}


def test_chunks_are_saved_as_they_fill_blocks() -> None:
    pool = FakePool()
    half, blocks = scheduler_half(pool)
    one = request(18)
    half.arrived(one)
    pool.answer_prefix(0)
    admit(half, one)
    every = names(list(range(18)))

    (first,) = half.build_step(first_step(one, computed=0, scheduled=6, blocks=2)).saves
    (second,) = half.build_step(next_step(one, computed=6, scheduled=7, fresh=[102, 103])).saves
    (third,) = half.build_step(next_step(one, computed=13, scheduled=5, fresh=[104])).saves

    assert [save.block_ids for save in (first, second, third)] == [((100,),), ((101, 102),), ((103,),)]
    assert first.names == b"".join(every[:WIDTH])
    assert first.parents == bytes(len(first.names))
    assert second.names == b"".join(every[WIDTH : 3 * WIDTH])
    assert second.parents == b"".join(every[: 2 * WIDTH])
    assert half.build_step(next_step(one, computed=18, scheduled=1)) is NOTHING
    assert not half.saves.tracked
    assert blocks.held() == [100, 101, 102, 103]
    half.finished(one)
    assert half.has_pending_work()
    assert half.has_pending_frees()
    finish_saves(half, first, second)
    assert blocks.held() == [103]
    finish_saves(half, third, third)  # a second report of a job that is done changes nothing
    assert blocks.held() == []
    assert not half.has_pending_work()


def test_what_the_pool_has_is_not_saved_again() -> None:
    pool = FakePool()
    half, _ = scheduler_half(pool)
    one = request(18)
    half.arrived(one)
    pool.answer_prefix(3)
    admit(half, one, local=12)
    (save,) = half.build_step(first_step(one, computed=12, scheduled=6)).saves
    assert save.block_ids == ((103,),)


def test_blocks_are_held_until_every_rank_is_done() -> None:
    half, blocks = scheduler_half(pool := FakePool(), workers=2)
    one = request(4)
    half.arrived(one)
    pool.answer_prefix(0)
    admit(half, one)
    (save,) = half.build_step(first_step(one, 0, 4)).saves
    finish_saves(half, save)
    assert blocks.held() == [100]
    finish_saves(half, save)
    assert blocks.held() == []


def test_preempted_request_asks_again_and_saves_from_its_new_blocks() -> None:
    pool = FakePool()
    half, _ = scheduler_half(pool)
    one = request(18)
    half.arrived(one)
    pool.answer_prefix(0)
    admit(half, one)
    (save,) = half.build_step(first_step(one, computed=0, scheduled=6)).saves
    assert half.build_step(FakeStep()) is NOTHING  # preempted: not scheduled

    one.num_preemptions = 1
    assert half.matched_tokens(one, 0) == (None, False)
    assert len(pool.prefixes) == 2
    pool.answer_prefix(1, pin_id=9)
    assert admit(half, one, local=4) == 0
    assert pool.released == [9]
    resumed = Cached(["r"], {"r"}, [([200, 201, 202, 203, 204],)], [4])
    (after,) = half.build_step(FakeStep([], resumed, {"r": 14})).saves

    assert save.block_ids == ((100,),)
    assert after.block_ids == ((201, 202, 203),)


def test_answers_are_saved_on_request_only() -> None:
    pool = FakePool()
    half, _ = scheduler_half(pool, settings=Settings(save_decode=True))
    one = request(6)
    half.arrived(one)
    pool.answer_prefix(0)
    admit(half, one)
    (first,) = half.build_step(first_step(one, computed=0, scheduled=6)).saves
    one.answer = [50]
    assert half.build_step(next_step(one, computed=6, scheduled=1)) is NOTHING
    one.answer = [50, 51]
    (second,) = half.build_step(next_step(one, computed=7, scheduled=1)).saves
    assert first.block_ids == ((100,),)
    assert second.block_ids == ((101,),)
    assert second.names == b"".join(names([*range(6), 50, 51])[WIDTH:])


def test_too_many_held_blocks_end_the_saves_of_a_request(caplog: pytest.LogCaptureFixture) -> None:
    pool = FakePool()
    half, blocks = scheduler_half(pool)
    one = request(BLOCK_TOKENS * 120)
    half.arrived(one)
    pool.answer_prefix(0)
    half.matched_tokens(one, 0)
    half.admitted(one, FakeBlocks((list(range(120)),)), 0)
    step = FakeStep([New("r", (list(range(120)),), 0)], num_scheduled_tokens={"r": 480})
    assert half.build_step(step) is NOTHING
    assert blocks.held() == []
    stats = half.tally.take()
    assert stats is not None
    assert stats.data["unsaved_blocks"] == 120
    assert "the last 120 blocks of a prompt are not saved: 0 of the engine's 400 blocks" in caplog.text
    for number in range(3):  # once a minute is enough
        more = request(BLOCK_TOKENS * 120, name=f"more {number}")
        half.arrived(more)
        pool.answer_prefix(0)
        half.matched_tokens(more, 0)
        half.admitted(more, FakeBlocks((list(range(120)),)), 0)
        new = New(more.request_id, (list(range(120)),), 0)
        half.build_step(FakeStep([new], num_scheduled_tokens={more.request_id: 480}))
    assert caplog.text.count("are not saved") == 1


def test_an_engine_says_what_is_not_pooled(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    scheduler_half(FakePool())
    assert "without the pool" not in caplog.text
    scheduler_half(FakePool(), media_refusal="it does not see them")
    assert (
        caplog.text.count("images, sounds and videos, and what follows them in a prompt, are computed") == 1
    )
    assert "such prompts are not handed over: it does not see them" in caplog.text
    scheduler_half(FakePool(), takes_embeddings=True)
    assert caplog.text.count("prompt embeddings are computed without the pool") == 1


def test_pins_that_wait_are_bounded() -> None:
    pool = FakePool()
    half, _ = scheduler_half(pool)
    for number in range(LOOKUPS_AHEAD_MAX + 10):
        half.arrived(request(name=f"r{number}"))
    assert len(pool.prefixes) == LOOKUPS_AHEAD_MAX
    last = request(name=f"r{LOOKUPS_AHEAD_MAX + 9}")
    assert half.matched_tokens(last, 0) == (None, False)  # asks when it is its turn
    assert len(pool.prefixes) == LOOKUPS_AHEAD_MAX + 1


@pytest.mark.parametrize(
    "fields",
    [{"prompt_embeds": object()}, {"resumable": True}],
    ids=["embeddings", "session"],
)
def test_requests_that_are_more_than_their_tokens_do_not_use_the_pool(fields: dict[str, object]) -> None:
    pool = FakePool()
    half, _ = scheduler_half(pool)
    one = request(**fields)
    half.arrived(one)
    assert pool.prefixes == []
    assert half.matched_tokens(one, 0) == (0, False)
    half.admitted(one, FakeBlocks(([],)), 0)
    assert half.finished(one) is None


def test_requests_that_must_compute_everything_still_save() -> None:
    pool = FakePool()
    half, _ = scheduler_half(pool)
    one = request(skip_reading_prefix_cache=True)
    half.arrived(one)
    assert pool.prefixes == []
    admit(half, one)
    assert len(half.build_step(first_step(one, 0, 18)).saves) == 1


def test_workers_that_are_pending_are_met_late(caplog: pytest.LogCaptureFixture) -> None:
    """The engine computes alone until the last of them knows which weights it has."""
    pool = FakePool()
    half, _ = scheduler_half(pool, meet=False, workers=3)
    known = dataclasses.replace(HANDSHAKE, rank=1)
    with caplog.at_level(logging.INFO):
        half.meet_workers([Handshake(pending="they are read"), known, Handshake(pending="they are read")])
    assert caplog.text.count("they are read; this engine computes alone until then") == 1
    early = request(name="early")
    half.arrived(early)
    assert half.matched_tokens(early, 0) == (0, False)
    half.admitted(early, FakeBlocks(([],)), 0)
    half.step_ended(FakeOutput(None, Report(handshakes=[HANDSHAKE])))
    half.arrived(request(name="second"))
    assert (pool.prefixes, half.pool()) == ([], None)
    report = Report(loaded={"x": 1})
    assert report.aggregate(Report(handshakes=[dataclasses.replace(HANDSHAKE, rank=2)])).handshakes
    half.step_ended(FakeOutput(None, report))
    half.arrived(request(name="third"))
    assert len(pool.prefixes) == 1
    assert half.finished(early) is None


def test_workers_whose_handshakes_vllm_did_not_deliver_are_greeted() -> None:
    pool = FakePool()
    half, _ = scheduler_half(pool, meet=False, workers=2)
    half.greet_workers()
    step = half.build_step(FakeStep())
    assert step.greets
    assert pickle.loads(pickle.dumps(step)) == step
    assert half.build_step(FakeStep()) is NOTHING
    half.step_ended(FakeOutput(kv_connector_worker_meta=Report(handshakes=[HANDSHAKE])))
    assert half.pool() is None
    half.step_ended(FakeOutput(kv_connector_worker_meta=Report(handshakes=[HANDSHAKE])))
    assert half.pool() is pool

    refused, _ = scheduler_half(pool, meet=False, refusal="no")
    refused.greet_workers()
    assert refused.build_step(FakeStep()) is NOTHING


def test_a_worker_that_cannot_tell_late(caplog: pytest.LogCaptureFixture) -> None:
    pool = FakePool()
    half, _ = scheduler_half(pool, meet=False, workers=2)
    half.meet_workers([HANDSHAKE, Handshake(pending="they are read")])
    half.step_ended(FakeOutput(None, Report(handshakes=[Handshake(refusal="they changed")])))
    assert "this engine runs without the pool: they changed" in caplog.text
    half.arrived(request())
    assert pool.prefixes == []


def test_the_salt_seeds_the_chain() -> None:
    """So does an adapter: see test_adapters.py."""
    pool = FakePool()
    half, _ = scheduler_half(pool)
    half.arrived(request(cache_salt="s"))
    assert pool.prefixes[0][1] == b"".join(names(list(range(18)), chain_seed(None, "s")))


def test_reset_forgets_what_is_stored() -> None:
    pool = FakePool()
    half, _ = scheduler_half(pool)
    half.arrived(request(name="before"))
    half.forget_everything_stored()
    half.arrived(request(name="after"))
    assert pool.prefixes[0][1] != pool.prefixes[1][1]


def test_after_a_reset_what_came_before_it_has_no_pool() -> None:
    """It would load KV of the old weights, and store KV of the new ones under the old names."""
    pool = FakePool()
    half, blocks = scheduler_half(pool)
    waits, runs = request(name="waits"), request(name="runs")
    half.arrived(waits)
    pool.answer_prefix(4)
    assert half.matched_tokens(waits, 0) == (16, True)
    half.arrived(runs)
    pool.answer_prefix(0)
    admit(half, runs)
    half.forget_everything_stored()
    assert pool.released == [7]
    assert half.matched_tokens(waits, 0) == (0, False)
    new = New("runs", (list(range(100, 120)),), 0)
    assert half.build_step(FakeStep([new], num_scheduled_tokens={"runs": 18})) is NOTHING
    assert blocks.held() == []
    for each in (waits, runs):
        half.finished(each)
    assert not half.has_pending_work()


def test_a_name_that_comes_again_keeps_no_pin() -> None:
    pool = FakePool()
    half, _ = scheduler_half(pool)
    half.arrived(request())
    pool.answer_prefix(4, pin_id=7)
    assert half.matched_tokens(request(), 0) == (16, True)
    half.arrived(request())
    assert pool.released == [7]
    assert half.lookups.pins == 0


def test_waiting_for_blocks_has_an_end() -> None:
    """A save that does not end must not keep vLLM from preempting."""
    clock, pool = Clock(), FakePool()
    half, blocks = scheduler_half(pool, clock=clock)
    one = request()
    half.arrived(one)
    pool.answer_prefix(0)
    admit(half, one)
    (first,) = half.build_step(first_step(one, 0, 6)).saves
    (second,) = half.build_step(next_step(one, computed=6, scheduled=7, fresh=[101, 102, 103])).saves
    half.finished(one)
    assert half.has_pending_frees()
    clock.now_s += 0.9 * FREE_BLOCK_WAIT_S
    assert half.has_pending_frees()
    clock.now_s += 0.1 * FREE_BLOCK_WAIT_S
    assert not half.has_pending_frees()
    finish_saves(half, first)  # it goes on
    assert half.has_pending_frees()
    for _ in range(9):
        clock.now_s += 0.3 * FREE_BLOCK_WAIT_S
        waits = half.has_pending_frees()
    assert not waits
    clock.now_s += 1.1 * FREE_BLOCK_WAIT_S  # no request lacked room for a while
    assert half.has_pending_frees()
    finish_saves(half, second)
    assert not half.has_pending_frees()
    assert blocks.held() == []


def test_a_save_that_freed_nothing_is_no_reason_to_wait_on() -> None:
    """Its request still runs in its blocks."""
    clock, pool = Clock(), FakePool()
    half, blocks = scheduler_half(pool, clock=clock)
    runs, ended = request(name="runs"), request(name="ended")
    saves = []
    for one, first in ((runs, 100), (ended, 200)):
        half.arrived(one)
        pool.answer_prefix(0)
        admit(half, one)
        new = New(one.request_id, (list(range(first, first + 5)),), 0)
        saves += half.build_step(FakeStep([new], num_scheduled_tokens={one.request_id: 18})).saves
    blocks.touch(blocks.blocks[100:105])  # the engine's own references
    half.finished(ended)
    assert half.has_pending_frees()
    clock.now_s += 0.9 * FREE_BLOCK_WAIT_S
    assert half.has_pending_frees()
    finish_saves(half, saves[0])
    clock.now_s += 0.2 * FREE_BLOCK_WAIT_S
    assert not half.has_pending_frees()


def test_waiting_for_one_save_after_another_has_an_end() -> None:
    """Each frees a block, and none makes room."""
    clock, pool = Clock(), FakePool()
    half, _ = scheduler_half(pool, clock=clock)
    saves = []
    for number in range(40):
        one = request(4, name=f"r{number}")
        half.arrived(one)
        pool.answer_prefix(0)
        admit(half, one)
        new = New(one.request_id, ([100 + number],), 0)
        saves += half.build_step(FakeStep([new], num_scheduled_tokens={one.request_id: 4})).saves
        half.finished(one)
    began_s = clock.now_s
    while half.has_pending_frees():
        clock.now_s += 0.25 * FREE_BLOCK_WAIT_S
        finish_saves(half, saves.pop())
    assert saves
    assert clock.now_s - began_s == pytest.approx(WAIT_MAX_S)
    clock.now_s += 1.1 * FREE_BLOCK_WAIT_S  # no request lacked room for a while
    assert half.has_pending_frees()


@pytest.mark.parametrize(("role", "loads", "saves"), [("may_load", 0, 1), ("may_save", 1, 0)])
def test_roles(role: str, loads: int, saves: int) -> None:
    pool = FakePool()
    half, _ = scheduler_half(pool, **{role: False})
    one = request()
    half.arrived(one)
    assert len(pool.prefixes) == loads
    if loads:
        pool.answer_prefix(0)
    admit(half, one)
    assert len(half.build_step(first_step(one, 0, 18)).saves) == saves


def test_a_load_that_cannot_be_planned_fails_and_does_not_hang() -> None:
    pool = FakePool()
    half, _ = scheduler_half(pool)
    one = request()
    half.arrived(one)
    pool.answer_prefix(4)
    assert half.matched_tokens(one, 0) == (16, True)
    half.fail_load("r", FakeBlocks(([100, 101, 102, 103],)), 16)
    assert pool.released == [7]
    (load,) = half.build_step(FakeStep()).loads
    assert load.width == 0
    assert load.block_ids == ((100, 101, 102, 103),)


def test_saves_that_cannot_be_planned_hold_nothing() -> None:
    pool = FakePool()
    half, blocks = scheduler_half(pool)
    good, bad = request(name="good"), request(name="bad")
    for one in (good, bad):
        half.arrived(one)
        pool.answer_prefix(0)
        admit(half, one)
    step = first_step(good, 0, 18)
    step.scheduled_new_reqs.append(New("bad", ([9999] * 5,), 0))
    step.num_scheduled_tokens["bad"] = 18
    with pytest.raises(IndexError):
        half.build_step(step)
    half.saves.give_up()
    assert blocks.held() == []
    assert half.build_step(step) is NOTHING


def test_workers_that_refuse() -> None:
    def half(require_pool: bool, **changes: object) -> SchedulerHalf:
        return SchedulerHalf(
            engine_config(**changes),
            Settings(require_pool=require_pool),
            open_node=node_at(FakePool()),
            digest=digest,
            log=LOG,
        )

    refusing = Handshake(refusal="the KV cache lies in cuda memory")
    quiet = half(False)
    quiet.meet_workers([refusing])
    quiet.arrived(request())
    assert quiet.matched_tokens(request(), 0) == (0, False)
    with pytest.raises(ConfigError, match="cuda memory"):
        half(True).meet_workers([refusing])
    with pytest.raises(ConfigError, match="disagree"):
        half(True).meet_workers([Handshake(FINGERPRINT, COLUMNS), Handshake(bytes(32), COLUMNS)])
    with pytest.raises(ConfigError, match="Mamba"):
        half(True, refusal="the model has Mamba layers").meet_workers([Handshake(FINGERPRINT, COLUMNS)])
