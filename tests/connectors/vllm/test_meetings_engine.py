"""A real vLLM with our scheduler class: the front of a hit is computed while its back is loaded over a slow
link, and the answers are a plain engine's, whatever happens in between."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.connectors.vllm.conftest import BLOCK_TOKENS, BYTES_PER_TOKEN, MEASURING, make_prompt, wait_joined
from tests.connectors.vllm.processes import Engine, Node
from tests.connectors.vllm.storing import counters, store

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

SCHEDULER = "moonpool.connectors.vllm.meeting_scheduler.Scheduler"
NOTHING_LEFT = {"used_blocks": 0, "requests": 0, "pins": 0, "saves": 0, "lookups": 0, "leases": 0}
TOKENS = 1600
HIT_TOKENS = (TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS
LINK = 3000 * BYTES_PER_TOKEN  # bytes per second
CLOSE = 1e-4  # of log-probabilities
EXPLAIN: dict[str, Any] = {"moonpool": {"explain": True}}


class SecondRunner(Engine):
    """With vLLM's model runner V2."""

    driver = Path(__file__).with_name("second_runner_driver.py")
    forked = False


@pytest.fixture(
    scope="module",
    params=[(Engine, False), (Engine, True), (SecondRunner, False), (SecondRunner, True)],
    ids=["in turn", "ahead", "V2 in turn", "V2 ahead"],
)
def engines(
    request: pytest.FixtureRequest,
    vllm_python: str,
    models: list[Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Engine, Engine]]:
    """A plain engine, and one with the scheduler class and a node, which plans a step when the last one has
    ended, or before, with either of vLLM's model runners."""
    logs = tmp_path_factory.mktemp("meetings")
    with ExitStack() as stack:
        runtime = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moonpool-")))
        plain = Engine(vllm_python, models[0], runtime, logs / "plain.log")
        stack.callback(plain.close)
        node = Node(runtime).start()
        stack.callback(node.stop)
        kind, ahead = request.param
        met = kind(
            vllm_python,
            models[0],
            runtime,
            logs / "met.log",
            kv_transfer_config=MEASURING,
            scheduler_cls=SCHEDULER,
            schedule_ahead=ahead,
        )
        stack.callback(met.close)
        wait_joined(met)
        assert met.call("runs") == [kind is SecondRunner, ahead]
        yield plain, met


@pytest.fixture
def met(engines: tuple[Engine, Engine]) -> Iterator[Engine]:
    """The engine with the scheduler class; what it measures at first is that both take as long."""
    engine = engines[1]
    try:
        yield engine
    finally:
        engine.call("shape_loads", per_second=0)


def answers(engine: Engine, prompts: list[list[int]], **how: Any) -> list[dict[str, Any]]:
    answer = engine.call("generate", prompts=prompts, chances=True, **how)
    return list(answer["outputs"])


def begin(met: Engine, prompts: list[list[int]], **link: Any) -> None:
    """The pool has the prompts, the engine has not, and the link is slow."""
    store(met, met, prompts)
    met.call("shape_loads", per_second=LINK, **link)
    met.call("measure_loads", per_second=LINK)
    met.call("measure_prefill", per_second=3000)


def assert_equal(plain: Engine, prompts: list[list[int]], outputs: list[dict[str, Any]]) -> None:
    for expected, output in zip(answers(plain, prompts), outputs, strict=True):
        assert output["tokens"] == expected["tokens"]
        assert output["chances"] == pytest.approx(expected["chances"], abs=CLOSE)


def assert_nothing_left(met: Engine) -> None:
    assert met.call("drain") == NOTHING_LEFT
    assert counters(met)["survived_errors_total"] == 0


def test_the_front_is_computed_while_the_back_is_loaded(engines: tuple[Engine, Engine], met: Engine) -> None:
    plain, prompt = engines[0], make_prompt(9_000, TOKENS)
    begin(met, [prompt])
    before = counters(met)

    (output,) = answers(met, [prompt], params=[EXPLAIN])

    assert_equal(plain, [prompt], [output])
    assert output["pool"]["decision"]["reason"] == "both"
    came = output["pool"]["pool_tokens"]
    assert 0 < came < HIT_TOKENS
    assert output["cached"] == came  # in vLLM's own count, too
    assert output["pool"]["load_errors"] == 0
    after = counters(met)
    assert after["met_tokens_total"] - before["met_tokens_total"] == came
    assert after["loaded_tokens_total"] - before["loaded_tokens_total"] == came  # nothing was loaded in vain
    assert after["loads_total"] - before["loads_total"] > 1
    assert_nothing_left(met)
    (again,) = answers(met, [prompt])  # what was loaded has its names in the engine's own cache
    assert again["cached"] == HIT_TOKENS
    assert_equal(plain, [prompt], [again])


def test_several_at_once_and_prompts_that_go_on(engines: tuple[Engine, Engine], met: Engine) -> None:
    plain = engines[0]
    stored = [make_prompt(9_010 + number, TOKENS) for number in range(3)]
    begin(met, stored)
    longer = [prompt + make_prompt(9_020 + number, 300) for number, prompt in enumerate(stored)]
    prompts = [*longer, make_prompt(9_030, 500)]

    outputs = answers(met, prompts, params=[EXPLAIN] * 4)

    assert_equal(plain, prompts, outputs)
    assert "both" in [output["pool"].get("decision", {}).get("reason") for output in outputs]
    assert_nothing_left(met)


def test_a_part_of_the_hit_is_in_the_engines_own_cache(engines: tuple[Engine, Engine], met: Engine) -> None:
    plain, prompt = engines[0], make_prompt(9_040, TOKENS)
    begin(met, [prompt])
    answers(met, [prompt[: 10 * BLOCK_TOKENS + 1]], params=[{"moonpool": {"load": False}}])

    (output,) = answers(met, [prompt], params=[EXPLAIN])

    assert output["pool"]["local_tokens"] == 10 * BLOCK_TOKENS
    assert output["pool"]["decision"]["reason"] == "both"
    assert_equal(plain, [prompt], [output])
    assert_nothing_left(met)


@pytest.mark.parametrize("break_from", [1, 3])
def test_a_load_that_fails_is_computed(engines: tuple[Engine, Engine], met: Engine, break_from: int) -> None:
    plain, prompt = engines[0], make_prompt(9_050 + break_from, TOKENS)
    begin(met, [prompt], break_from=break_from)

    (output,) = answers(met, [prompt], params=[EXPLAIN])

    assert output["pool"]["decision"]["reason"] == "both"
    assert output["pool"]["load_errors"] > 0
    assert (output["pool"]["pool_tokens"] > 0) == (break_from > 1)
    assert_equal(plain, [prompt], [output])
    assert_nothing_left(met)


@pytest.mark.parametrize("stage", ["meeting", "met"])
def test_an_abort_leaves_nothing(engines: tuple[Engine, Engine], met: Engine, stage: str) -> None:
    plain = engines[0]
    prompts = [make_prompt(9_060, TOKENS), make_prompt(9_061, 200)]
    begin(met, prompts[:1])

    outputs = met.call("generate", prompts=prompts, abort=[0], abort_when=stage, chances=True)["outputs"]

    assert outputs[0] is None or outputs[0]["reason"] == "abort"
    assert_equal(plain, prompts[1:], outputs[1:])
    assert_nothing_left(met)
    (again,) = answers(met, prompts[:1])
    assert_equal(plain, prompts[:1], [again])
    assert_nothing_left(met)


@pytest.mark.parametrize("stage", ["meeting", "met"])
def test_a_preempted_request_begins_again(engines: tuple[Engine, Engine], met: Engine, stage: str) -> None:
    plain, prompt = engines[0], make_prompt(9_070, TOKENS)
    begin(met, [prompt])

    answer = met.call("generate", prompts=[prompt], preempt_when=stage, chances=True)

    assert answer["preemptions"] == 1
    assert_equal(plain, [prompt], answer["outputs"])
    assert_nothing_left(met)


def test_a_load_that_is_faster_by_far_is_awaited(engines: tuple[Engine, Engine], met: Engine) -> None:
    plain, prompt = engines[0], make_prompt(9_080, TOKENS)
    begin(met, [prompt])
    met.call("measure_loads", per_second=100 * LINK)  # a load that is faster by far

    (output,) = answers(met, [prompt], params=[EXPLAIN])

    assert output["pool"]["decision"]["reason"] == "load_faster"
    assert output["pool"]["pool_tokens"] == HIT_TOKENS
    assert_equal(plain, [prompt], [output])
    assert_nothing_left(met)
