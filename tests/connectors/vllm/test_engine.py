"""Real vLLM engines in separate processes: tokens through the pool are the tokens of a plain engine, whatever
happens."""

from __future__ import annotations

import itertools
import mmap
import time
from typing import Any

import pytest

from moonpool.connectors.vllm.lookups import ANSWER_TIMEOUT_S
from tests.connectors.vllm.conftest import (
    BLOCK_TOKENS,
    BYTES_PER_TOKEN,
    Line,
    make_prompt,
    tokens_of,
    wait_joined,
)
from tests.connectors.vllm.node_objects import arena
from tests.connectors.vllm.processes import Engine, EngineFailed
from tests.connectors.vllm.storing import counters, store

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

CHUNK_TOKENS = 256
REVIVE_TIMEOUT_S = 60.0
UNUSED_SEEDS = itertools.count(5000)
NOTHING_LEFT = {"used_blocks": 0, "requests": 0, "pins": 0, "saves": 0, "lookups": 0, "leases": 0}


def loadable(prompt: list[int]) -> int:
    """Tokens that can come from the pool: whole blocks, and one token is always computed."""
    return (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def pool_tokens(answer: dict[str, Any]) -> list[int]:
    return [output["pool"]["pool_tokens"] for output in answer["outputs"]]


def grown(before: dict[str, float], after: dict[str, float], name: str) -> float:
    return after.get(name, 0.0) - before.get(name, 0.0)


def assert_nothing_left(line: Line, engine: Engine) -> None:
    left = engine.call("drain")
    assert left == NOTHING_LEFT
    metrics = line.node.metrics()
    assert metrics["integrity"]
    assert metrics["objects_pinned"] == 0


def test_lengths_around_blocks_and_chunks(line: Line) -> None:
    edges = [
        BLOCK_TOKENS,
        2 * BLOCK_TOKENS,
        3 * BLOCK_TOKENS,
        CHUNK_TOKENS,
        CHUNK_TOKENS + 32,
        2 * CHUNK_TOKENS,
    ]
    lengths = [1, *(edge + offset for edge in edges for offset in (-1, 0, 1)), 1000]
    prompts = [make_prompt(100 + position, length) for position, length in enumerate(lengths)]
    expected = line.expected(prompts)
    assert store(line.second, line.first, prompts) == expected

    before, served = counters(line.first), line.node.metrics()["served_bytes_total"]
    answer = line.first.call("generate", prompts=prompts)

    assert tokens_of(answer) == expected
    assert pool_tokens(answer) == [loadable(prompt) for prompt in prompts]
    assert all(output["pool"]["load_errors"] == 0 for output in answer["outputs"])
    assert_nothing_left(line, line.first)
    after, total = counters(line.first), sum(map(loadable, prompts))
    assert grown(before, after, "loaded_tokens_total") == total
    assert grown(before, after, "loaded_bytes_total") == total * BYTES_PER_TOKEN
    assert line.node.metrics()["served_bytes_total"] - served == total * BYTES_PER_TOKEN
    assert grown(before, after, "load_errors_total") == 0
    assert grown(before, after, "prompt_tokens_total") == sum(lengths)
    assert after["lookup_seconds_count"] > 0
    assert after["load_seconds_count"] > 0
    metrics = line.first.call("metrics")
    assert metrics["vllm:prompt_tokens_cached_by_source_total host"] >= total


def test_shared_prefixes_and_partly_local_hits(line: Line) -> None:
    stem = make_prompt(200, 320)
    family = [stem + make_prompt(201 + child, 40 + 30 * child) for child in range(6)]
    expected = line.expected(family)
    assert store(line.first, line.second, family) == expected
    assert tokens_of(line.second.call("generate", prompts=family[:1])) == expected[:1]

    answer = line.second.call("generate", prompts=family[1:])  # the stem is local now, the tails are not

    assert tokens_of(answer) == expected[1:]
    for prompt, output in zip(family[1:], answer["outputs"], strict=True):
        assert output["pool"]["local_tokens"] == len(stem)
        assert output["pool"]["pool_tokens"] == loadable(prompt) - len(stem)
    assert_nothing_left(line, line.second)


def test_salt_separates(line: Line) -> None:
    prompt = make_prompt(250, 300)
    store(line.first, line.second, [prompt])

    salted = line.second.call("generate", prompts=[prompt], salt="other tenant")
    plain = line.second.call("generate", prompts=[prompt])

    assert pool_tokens(salted) == [0]
    assert pool_tokens(plain) == [loadable(prompt)]
    assert tokens_of(salted) == tokens_of(plain)


def test_requests_that_are_kept_out_of_the_pool(line: Line) -> None:
    """Not stored: the pool gets no object and tells of none. Not loaded: nothing is asked for. The tokens are
    the same."""
    prompt = make_prompt(280, 300)
    expected = line.expected([prompt])

    def ask(engine: Engine, **switches: Any) -> int:
        answer = engine.call("generate", prompts=[prompt], params=[{"moonpool": switches}])
        assert tokens_of(answer) == expected
        assert_nothing_left(line, engine)
        assert engine.call("reset_prefix_cache")
        return pool_tokens(answer)[0]

    objects = line.node.metrics()["objects"]
    before = counters(line.first)
    assert ask(line.first, store=False) == 0
    assert line.node.metrics()["objects"] == objects
    assert ask(line.second) == 0
    assert line.node.metrics()["objects"] > objects
    assert ask(line.first, store=False) == loadable(prompt)
    looked = counters(line.first)
    assert ask(line.first, load=False) == 0
    after = counters(line.first)
    assert grown(looked, after, "lookups_total") == 0
    assert grown(before, after, "switched_off_total store") == 2
    assert grown(before, after, "switched_off_total load") == 1
    assert ask(line.first, load="no", store=[], other=1) == loadable(prompt)
    said = [text for text in line.first.logged().splitlines() if "served as without it" in text]
    assert len(said) == 3, said


def test_preemption(line: Line) -> None:
    """Eight long answers in a KV cache for six: requests are preempted, resumed, saved and loaded in turn."""
    prompts = [make_prompt(300 + position, 260 + 8 * position) for position in range(8)]
    expected = line.expected(prompts, max_tokens=120)
    for _ in range(2):  # the first round saves while it preempts, the second loads
        assert line.second.call("reset_prefix_cache")
        answer = line.second.call("generate", prompts=prompts, max_tokens=120)
        assert tokens_of(answer) == expected
        assert answer["preemptions"] > 0
        assert_nothing_left(line, line.second)
    assert pool_tokens(answer) == [loadable(prompt) for prompt in prompts]


@pytest.mark.parametrize("stage", ["looking", "loading", "running"])
def test_abort(line: Line, stage: str) -> None:
    seed = 400 + 10 * len(stage)
    prompts = [make_prompt(seed + position, 500) for position in range(4)]
    expected = line.expected(prompts)
    store(line.first, line.second, prompts)

    answer = line.second.call("generate", prompts=prompts, abort=[0, 2], abort_when=stage)

    assert tokens_of(answer)[1] == expected[1]
    assert tokens_of(answer)[3] == expected[3]
    assert answer["outputs"][0] is None or answer["outputs"][0]["reason"] == "abort"
    assert_nothing_left(line, line.second)
    assert tokens_of(line.second.call("generate", prompts=prompts)) == expected


def test_other_weights_find_nothing(line: Line) -> None:
    prompts = [make_prompt(500 + position, 200) for position in range(3)]
    expected = store(line.first, line.second, prompts)

    answer = line.other.call("generate", prompts=prompts)
    assert pool_tokens(answer) == [0, 0, 0]
    assert tokens_of(answer) != expected
    line.other.call("drain")
    assert line.other.call("reset_prefix_cache")
    again = line.other.call("generate", prompts=prompts)  # what it stored itself, it finds

    assert pool_tokens(again) == [loadable(prompt) for prompt in prompts]
    assert tokens_of(again) == tokens_of(answer)


def test_steps_and_loads_are_timed(line: Line) -> None:
    before, loaded = counters(line.other), 0
    for number in range(3):
        prompt = make_prompt(550 + number, 300)
        line.other.call("generate", prompts=[prompt])
        line.other.call("drain")
        assert line.other.call("reset_prefix_cache")
        (tokens,) = pool_tokens(line.other.call("generate", prompts=[prompt]))
        loaded += tokens
    after = counters(line.other)
    assert grown(before, after, "timed_prefill_tokens_total") >= 3 * 250
    assert grown(before, after, "timed_prefill_seconds_total") > 0
    assert grown(before, after, "memory_loaded_bytes_total") == loaded * BYTES_PER_TOKEN
    assert (grown(before, after, "memory_load_seconds_total") > 0) == (loaded > 0)


def test_loads_that_were_measured_wrong_are_measured_again(line: Line) -> None:
    """All loads seem to take minutes: within 20 requests one of them shows that they do not. The reason of
    each decision is in the answer, on request, and in the metrics."""
    prompts = [make_prompt(570 + number, 300) for number in range(20)]
    expected = tokens_of(line.other.call("generate", prompts=prompts))
    line.other.call("drain")
    assert line.other.call("reset_prefix_cache")
    before, reasons = counters(line.other), []
    line.other.call("measure_loads", per_second=1e4)
    for prompt, tokens in zip(prompts, expected, strict=True):
        answer = line.other.call("generate", prompts=[prompt], params=[{"moonpool": {"explain": True}}])
        assert tokens_of(answer) == [tokens]
        decision = answer["outputs"][0]["pool"]["decision"]
        reasons.append(decision["reason"])
        if len(reasons) == 1:
            assert decision["load_s"] > 60 > decision["compute_s"] > 0
    assert reasons[:16] == ["load_slower"] * 15 + ["probe_load"]
    assert line.other.call("load_rate") > 1e6
    line.other.call("drain")
    after = counters(line.other)
    for reason in set(reasons):
        assert grown(before, after, f"load_decisions_total {reason}") == reasons.count(reason)


def test_a_flipped_byte_changes_the_answer(line: Line) -> None:
    """The bytes of the pool are truly used: nothing else could notice one that was changed behind its
    back."""
    prompt = make_prompt(600, 300)
    with arena(line.node.pid) as memory:
        before = memory[:]
        expected = store(line.first, line.second, [prompt])
        changed = stored_byte(before, memory)
        memory[changed] ^= 0x40  # an exponent bit of a float of the first block

        answer = line.second.call("generate", prompts=[prompt])

        memory[changed] ^= 0x40
    assert pool_tokens(answer) == [loadable(prompt)]
    assert tokens_of(answer) != expected
    assert line.second.call("reset_prefix_cache")
    assert tokens_of(line.second.call("generate", prompts=[prompt])) == expected


def test_every_load_failing(line: Line) -> None:
    prompts = [make_prompt(700 + position, 300 + position) for position in range(4)]
    expected = line.expected(prompts)
    store(line.first, line.second, prompts)
    before = counters(line.second)
    line.second.call("break_loads")
    try:
        answer = line.second.call("generate", prompts=prompts)
    finally:
        line.second.call("break_loads", broken=False)

    assert tokens_of(answer) == expected
    assert pool_tokens(answer) == [0, 0, 0, 0]
    assert all(output["pool"]["load_errors"] > 0 for output in answer["outputs"])
    assert grown(before, counters(line.second), "loaded_tokens_total") == 0
    assert_nothing_left(line, line.second)


def test_policy_fail_ends_the_request_and_nothing_else(line: Line) -> None:
    prompts = [make_prompt(750, 300), make_prompt(751, 300)]
    expected = line.expected(prompts)
    store(line.first, line.second, prompts[:1])
    line.second.call("break_loads")
    line.second.call("fail_requests", failing=True)
    try:
        answer = line.second.call("generate", prompts=prompts)
    finally:
        line.second.call("break_loads", broken=False)
        line.second.call("fail_requests", failing=False)

    assert answer["outputs"][0]["reason"] == "error"
    assert tokens_of(answer)[1] == expected[1]
    assert_nothing_left(line, line.second)
    assert tokens_of(line.second.call("generate", prompts=prompts)) == expected


def test_before_there_was_a_node(line: Line) -> None:
    """The second engine served without the pool, said so in one sentence, and joined when the node
    appeared."""
    assert line.early["tokens"] == line.early["expected"]
    warnings = [text for text in line.second.logged().splitlines() if "no pool at" in text]
    assert len(warnings) == 1
    assert "serves without it and joins when a node appears" in warnings[0]


def test_require_pool(line: Line) -> None:
    with pytest.raises(EngineFailed) as failure:
        line.refused.wait()
    assert any(cause.startswith("Unavailable: ") for cause in failure.value.causes)


@pytest.mark.parametrize("operation", ["submit_load", "submit_save"])
def test_node_killed(line: Line, operation: str) -> None:
    """kill -9 of the node right as a load or a save begins: the same tokens, and the pool comes back with the
    node."""
    seed = 800 + len(operation)
    prompts = [make_prompt(seed + position, 400 + position) for position in range(6)]
    expected = line.expected(prompts)
    if operation == "submit_load":
        store(line.first, line.second, prompts)
    line.second.call("kill_at", operation=operation, pid=line.node.pid)

    answer = line.second.call("generate", prompts=prompts)

    assert tokens_of(answer) == expected
    assert all(output["reason"] == "length" for output in answer["outputs"])
    left = line.second.call("drain")
    assert left == NOTHING_LEFT
    line.node.kill()
    line.node.start()
    again = [make_prompt(seed + 50, 300)]
    for engine in (line.first, line.second):
        wait_joined(engine)
        revive(engine)
    assert store(line.first, line.second, again) == line.expected(again)
    assert pool_tokens(line.second.call("generate", prompts=again)) == [loadable(again[0])]


def test_silent_node(line: Line) -> None:
    """A node that accepts and never answers costs a lookup's deadline, not more; saves end, and it is found
    again."""
    prompts = [make_prompt(900 + position, 300) for position in range(3)]
    expected = line.expected(prompts)
    store(line.first, line.second, prompts)
    line.node.pause()
    try:
        answer = line.second.call("generate", prompts=prompts)
        left = line.second.call("drain")
    finally:
        line.node.resume()

    assert tokens_of(answer) == expected
    assert pool_tokens(answer) == [0, 0, 0]
    assert left == NOTHING_LEFT
    slowest_s = max(answer["first_s"])
    print(f"slowest first token with a silent node: {slowest_s:.2f} s")
    assert slowest_s < 5 * (ANSWER_TIMEOUT_S + 0.5)
    revive(line.second)


def revive(engine: Engine) -> None:
    """Asks until it finds in the pool what it stored there: its clients, one that looks up and one that loads
    and saves, come back by themselves, each with the first call that may try."""
    deadline_s = time.monotonic() + REVIVE_TIMEOUT_S
    while True:
        prompt = make_prompt(next(UNUSED_SEEDS), 40)
        store(engine, engine, [prompt])
        if pool_tokens(engine.call("generate", prompts=[prompt], max_tokens=1)) == [loadable(prompt)]:
            return
        assert time.monotonic() < deadline_s, "the engine did not find its way back to the pool"


def stored_byte(before: bytes, memory: mmap.mmap) -> int:
    """Where the top byte of a float lies in the middle of what was stored: of the longest run of changed
    pages."""
    page = mmap.PAGESIZE
    runs: list[list[int]] = [[]]
    for start in range(0, len(before), page):
        if before[start : start + page] != memory[start : start + page]:
            runs[-1].append(start)
        elif runs[-1]:
            runs.append([])
    longest = max(runs, key=len)
    return longest[len(longest) // 2] + 3
