"""When a bootstrap page is doubted, and when the doubt is cleared."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from moonpool.disagg_proxy.data_plane.observations import Outcome
from moonpool.disagg_proxy.engines.bootstrap_trust import (
    DISTRUST_S,
    LATE_MAX,
    TOKEN_S,
    WINDOW,
    BootstrapTrust,
    Verdict,
    wait_of,
)
from tests.disagg_proxy.tracing.engines import TWO_STEPS

PATIENCE_S = 5.0  # of a decode engine's connector
SOON_S = 0.05


def verdicts(
    watch: BootstrapTrust, waits: Sequence[float], *, concurrent: bool, now_s: float = 0.0
) -> list[Verdict]:
    met = [watch.met(1, wait_s, concurrent=concurrent, now_s=now_s) for wait_s in waits]
    return [verdict for verdict in met if verdict is not Verdict.NONE]


@pytest.mark.parametrize(
    "waits",
    [
        [PATIENCE_S] * LATE_MAX,
        [SOON_S, PATIENCE_S] * LATE_MAX,  # two ranks in turn, or prompts that decode had itself
        [SOON_S, SOON_S, SOON_S, PATIENCE_S] * LATE_MAX,
    ],
)
def test_a_lying_page_is_doubted_though_some_answers_are_good(waits: list[float]) -> None:
    watch = BootstrapTrust()
    assert verdicts(watch, waits, concurrent=True) == [Verdict.DOUBT]
    assert verdicts(watch, [SOON_S] * 100, concurrent=False) == []  # two steps are well


def test_a_decode_engine_that_cannot_reach_the_page_is_found_among_others() -> None:
    watch, found = BootstrapTrust(), Verdict.NONE
    for _ in range(LATE_MAX):
        for decode in range(8):
            wait_s = PATIENCE_S if decode == 3 else SOON_S
            verdict = watch.met(decode, wait_s, concurrent=True, now_s=0.0)
            found = found if verdict is Verdict.NONE else verdict
    assert found is Verdict.DOUBT


def test_now_and_then_one_is_late() -> None:
    waits = ([PATIENCE_S] * (LATE_MAX - 1) + [SOON_S] * WINDOW) * 20
    assert verdicts(BootstrapTrust(), waits, concurrent=True) == []


def test_an_overloaded_decode_engine_is_not_the_pages_fault() -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)

    def load(count: int) -> list[float]:
        return [rng.uniform(3.0, 4.0) for _ in range(count)]

    watch = BootstrapTrust()
    assert verdicts(watch, load(LATE_MAX), concurrent=True) == [Verdict.DOUBT]
    assert watch.met(2, 9.0, concurrent=False, now_s=0.0) is Verdict.NONE  # another engine says nothing
    assert verdicts(watch, load(LATE_MAX), concurrent=False, now_s=1.0) == [Verdict.CLEAR]
    assert verdicts(watch, load(100), concurrent=True, now_s=DISTRUST_S) == []
    assert verdicts(watch, load(LATE_MAX), concurrent=True, now_s=DISTRUST_S + 1) == [Verdict.DOUBT]


def whole(wait_s: float, tokens: int, token_s: float) -> float:
    """What is seen of an answer that comes whole."""
    seen = TWO_STEPS._replace(
        stream=0,
        prefill_done_s=100.0,
        completion_tokens=tokens,
        last_byte_s=100.0 + wait_s + tokens * token_s,
    )
    found = wait_of(seen)
    assert found is not None
    return found


@pytest.mark.parametrize("token_s", [TOKEN_S, 0.04])
def test_a_lying_page_is_found_by_answers_that_come_whole(token_s: float) -> None:
    """Also where the engine is slower than it is thought to be: two steps take less by what decode waited."""
    watch = BootstrapTrust()
    concurrent = [whole(PATIENCE_S, 200, token_s) for _ in range(LATE_MAX)]
    assert verdicts(watch, concurrent, concurrent=True) == [Verdict.DOUBT]
    assert verdicts(watch, [whole(SOON_S, 200, token_s)] * 100, concurrent=False) == []


def test_a_slow_engine_is_no_lying_page() -> None:
    watch = BootstrapTrust()
    slow = [whole(SOON_S, 200, 0.04) for _ in range(LATE_MAX)]
    assert verdicts(watch, slow, concurrent=True) == [Verdict.DOUBT]
    assert verdicts(watch, slow, concurrent=False) == [Verdict.CLEAR]


@pytest.mark.parametrize(
    "changes",
    [
        {"prefill_done_s": 0.0},
        {"status": 500},
        {"stream": 1, "first_byte_s": 0.0},
        {"stream": 0, "outcome": Outcome.LEFT},
    ],
)
def test_what_tells_nothing(changes: dict[str, float]) -> None:
    assert wait_of(TWO_STEPS._replace(**changes)) is None  # type: ignore[arg-type]


def test_a_stream_tells_by_its_first_token() -> None:
    seen = TWO_STEPS._replace(stream=1, prefill_done_s=10.0, first_byte_s=10.5, last_byte_s=60.0)
    assert wait_of(seen) == 0.5
