"""How long the scheduler waits for the answers of queries, and for which it does not wait at all."""

from __future__ import annotations

from moonpool.connectors.vllm.lookups import FORGET_TICKET_S, UNAWAITED_AFTER, WAIT_OBJECTS_MAX, WAIT_S
from moonpool.connectors.vllm.messages import NOTHING
from moonpool.connectors.vllm.scheduler import SchedulerHalf
from tests.connectors.vllm.fakes import (
    BLOCK_TOKENS,
    COLUMNS,
    Clock,
    FakeBlocks,
    FakePool,
    FakeRequest,
    FakeStep,
    admit,
    first_step,
    next_step,
    request,
    scheduler_half,
)

LOOKING = (None, False)
BLOCKS = 4  # full ones of request()


def slow(pool: FakePool, clock: Clock) -> None:
    """Nothing answers while the scheduler waits."""

    def on_wait() -> bool:
        clock.now_s += pool.waits[-1]
        return False

    pool.on_wait = on_wait


def asked(half: SchedulerHalf, name: str) -> FakeRequest:
    """A request that has arrived."""
    one = request(name=name)
    half.arrived(one)
    return one


def test_an_answer_that_comes_soon_costs_no_step() -> None:
    pool, clock = FakePool(), Clock()
    half, _ = scheduler_half(pool, clock=clock)
    one = asked(half, "r")

    def on_wait() -> bool:
        clock.now_s += WAIT_S / 4
        if len(pool.waits) == 2:  # first something else ends
            pool.answer_prefix(3)
        return True

    pool.on_wait = on_wait
    assert half.matched_tokens(one, 0) == (3 * BLOCK_TOKENS, True)
    assert len(pool.waits) == 2


def test_all_requests_of_a_step_share_one_wait_and_each_has_one() -> None:
    pool, clock = FakePool(), Clock()
    half, _ = scheduler_half(pool, clock=clock)
    first, second = asked(half, "a"), asked(half, "b")

    def answered() -> bool:
        clock.now_s += WAIT_S * 3 / 4
        pool.answer_prefix(0)  # the second one
        return True

    pool.on_wait = answered
    assert half.matched_tokens(second, 0) == (0, False)
    slow(pool, clock)
    began_s = clock.now_s
    assert half.matched_tokens(first, 0) == LOOKING
    assert 0 < clock.now_s - began_s < WAIT_S / 2  # what the first wait has left
    waits = len(pool.waits)
    for _ in range(2 * UNAWAITED_AFTER):
        half.build_step(FakeStep())
        assert half.matched_tokens(first, 0) == LOOKING
    assert len(pool.waits) == waits


def test_each_step_has_a_wait_of_its_own() -> None:
    pool, clock = FakePool(), Clock()
    half, _ = scheduler_half(pool, clock=clock)

    def answered() -> bool:
        clock.now_s += WAIT_S
        pool.answer_prefix(0)
        return True

    pool.on_wait = answered
    for number in range(3):
        one = asked(half, str(number))
        assert half.matched_tokens(one, 0) == (0, False)
        half.build_step(FakeStep())
    assert len(pool.waits) == 3


def test_a_pool_that_answers_late_is_seldom_waited_for() -> None:
    pool, clock = FakePool(), Clock()
    half, _ = scheduler_half(pool, clock=clock)
    slow(pool, clock)
    for number in range(2 * (UNAWAITED_AFTER + 1)):
        assert half.matched_tokens(asked(half, str(number)), 0) == LOOKING
        half.build_step(FakeStep())
    assert len(pool.waits) == 2


def test_a_long_prompt_is_not_waited_for() -> None:
    pool = FakePool()
    half, _ = scheduler_half(pool)
    tokens = WAIT_OBJECTS_MAX // len(COLUMNS) * BLOCK_TOKENS
    fits, long = request(tokens, "fits"), request(tokens + BLOCK_TOKENS, "long")
    for one in (long, fits):
        half.arrived(one)
        assert half.matched_tokens(one, 0) == LOOKING
    assert len(pool.waits) == 1


def covered(half: SchedulerHalf, local: int = BLOCKS * BLOCK_TOKENS) -> FakeRequest:
    """A request whose blocks the engine has, admitted while its query is not answered."""
    one = asked(half, "r")
    assert admit(half, one, local=local) == 0
    return one


def test_a_request_that_the_engine_covers_waits_for_nothing_and_saves_what_the_pool_lost() -> None:
    pool = FakePool()
    half, blocks = scheduler_half(pool)
    one = covered(half)
    assert pool.waits == []
    assert half.build_step(first_step(one, computed=16, scheduled=2)) is NOTHING
    pool.answer_prefix(3)
    (save,) = half.build_step(next_step(one, computed=18, scheduled=1)).saves
    assert save.block_ids == ((103,),)
    assert pool.released == [7]
    assert half.lookups.pins == 0
    assert blocks.held() == [103]


def test_a_request_that_is_covered_but_for_one_block_is_looked_up() -> None:
    pool = FakePool()
    half, _ = scheduler_half(pool)
    assert half.matched_tokens(asked(half, "r"), (BLOCKS - 1) * BLOCK_TOKENS) == LOOKING


def test_a_request_of_one_step_is_looked_up_though_it_is_covered() -> None:
    """Blocks that the pool has lost could not be saved later."""
    pool = FakePool()
    half, _ = scheduler_half(pool)
    one = request(max_tokens=1)
    half.arrived(one)
    assert half.matched_tokens(one, BLOCKS * BLOCK_TOKENS) == LOOKING


def test_a_request_whose_query_is_forgotten_while_it_waits_is_saved() -> None:
    pool, clock = FakePool(), Clock()
    half, _ = scheduler_half(pool, clock=clock)
    one = asked(half, "r")
    clock.now_s += FORGET_TICKET_S + 0.1
    half.build_step(FakeStep())
    assert admit(half, one, local=BLOCKS * BLOCK_TOKENS) == 0
    (save,) = half.build_step(first_step(one, computed=16, scheduled=2)).saves
    assert save.block_ids == ((100, 101, 102, 103),)


def test_without_an_answer_all_blocks_of_a_covered_request_are_saved() -> None:
    for error in ("the node is gone", ""):
        pool, clock = FakePool(), Clock()
        half, _ = scheduler_half(pool, clock=clock)
        one = covered(half)
        assert half.build_step(first_step(one, computed=16, scheduled=2)) is NOTHING
        if error:
            pool.answer_prefix(0, error=error)
        clock.now_s += FORGET_TICKET_S + 0.1
        steps = [half.build_step(next_step(one, computed=18 + step, scheduled=1)) for step in range(2)]
        (save,) = [save for step in steps for save in step.saves]
        assert save.block_ids == ((100, 101, 102, 103),)


def test_the_answer_of_a_covered_request_that_was_preempted_does_not_count() -> None:
    pool = FakePool()
    half, _ = scheduler_half(pool)
    one = covered(half)
    one.num_preemptions = 1
    assert half.matched_tokens(one, 0) == LOOKING
    old, new = pool.prefixes
    pool.prefixes[:] = [old]
    pool.answer_prefix(1)
    assert half.matched_tokens(one, 0) == LOOKING
    assert pool.released == [7]
    pool.prefixes[:] = [new]
    pool.answer_prefix(3, pin_id=8)
    assert half.matched_tokens(one, 0) == (3 * BLOCK_TOKENS, True)


def test_a_covered_request_that_ends_leaves_no_pin() -> None:
    pool = FakePool()
    half, _ = scheduler_half(pool)
    one = covered(half)
    half.finished(one)
    pool.answer_prefix(4)
    half.build_step(FakeStep())
    assert pool.released == [7]
    assert half.lookups.pins == 0
    assert not half.has_pending_work()


def test_a_request_that_is_covered_while_another_waits_for_blocks_is_asked_once() -> None:
    """vLLM asks again when it found no room for the request."""
    pool = FakePool()
    half, _ = scheduler_half(pool)
    one = asked(half, "r")
    for _ in range(2):
        assert half.matched_tokens(one, BLOCKS * BLOCK_TOKENS) == (0, False)
    assert len(pool.prefixes) == 1
    pool.answer_prefix(4)
    assert half.matched_tokens(one, 0) == (4 * BLOCK_TOKENS, True)  # its local blocks are gone
    half.admitted(one, FakeBlocks((list(range(100, 120)),)), 4 * BLOCK_TOKENS)
    (load,) = half.build_step(FakeStep()).loads
    assert load.block_ids == ((100, 101, 102, 103),)
