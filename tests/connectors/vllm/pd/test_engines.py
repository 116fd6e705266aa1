"""Real prefill and decode engines in separate processes: tokens through a hand-over are the tokens of a plain
engine, whatever happens, and no block stays behind.

The engines of the file: ``line`` is shared with test_engine.py (both of its engines have the pool); ``apart``
are a prefill and a decode engine without a pool and with little memory, which the last tests kill.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.connectors.vllm.conftest import (
    ASK,
    BLOCK_TOKENS,
    BYTES_PER_TOKEN,
    KV_CONFIG,
    Line,
    make_prompt,
    tokens_of,
)
from tests.connectors.vllm.processes import Engine
from tests.ports import held_ports

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

LENGTHS = [1, 2, 31, 32, 33, 34, 64, 65, 255, 256, 257, 1000]
LEASE_S = 6.0  # an offer waits for decode's first heartbeat while others are computed, and a second more
SCHEDULES = int(os.environ.get("PD_SCHEDULES", "12"))
STAGES = ("looking", "loading", "loaded", "running")
ORDER = [(form, stage) for form in ("two-step", "concurrent") for stage in STAGES]
APART_BLOCKS = 140  # one longest request, and not many of them
NOTHING_LEFT = {"used_blocks": 0, "requests": 0, "pins": 0, "saves": 0, "lookups": 0, "leases": 0}


@dataclass
class Apart:
    """tcp: a decode engine that may use TCP only."""

    prefill: Engine
    decode: Engine
    tcp: Engine
    engine_id: str
    bootstrap: str


def config(**extra: object) -> dict[str, Any]:
    return {**KV_CONFIG, "kv_connector_extra_config": {"compute_if_faster": False, **extra}}


@pytest.fixture(scope="module")
def apart(vllm_python: str, models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apart]:
    logs = tmp_path_factory.mktemp("apart")
    with ExitStack() as stack:
        (port,) = stack.enter_context(held_ports(1))
        nobody = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moonpool-")))

        def engine(name: str, **extra: object) -> Engine:
            made = Engine(
                vllm_python,
                models[0],
                nobody,
                logs / f"{name}.log",
                kv_transfer_config=config(**extra),
                kv_cache_memory_bytes=APART_BLOCKS * BLOCK_TOKENS * BYTES_PER_TOKEN,
            )
            stack.callback(made.close)
            return made

        prefill = engine("prefill", bootstrap_port=port, lease_s=LEASE_S)
        decode = engine("decode", lease_s=LEASE_S)
        tcp = engine("tcp", handover_transports="tcp", lease_s=LEASE_S)
        (answer,) = prefill_of(prefill, [make_prompt(1, 40)])
        for each in (decode, tcp):
            each.wait()
        assert_nothing_left(prefill)  # which nobody took
        yield Apart(prefill, decode, tcp, str(answer["remote_engine_id"]), f"http://127.0.0.1:{port}")


def prefill_of(engine: Engine, prompts: list[list[int]], **more: Any) -> list[dict[str, Any]]:
    """What a prefill engine answers in the two-step form; {} for what was aborted."""
    answer = engine.call("generate", prompts=prompts, max_tokens=1, params=[ASK] * len(prompts), **more)
    return [output["params"] if output else {} for output in answer["outputs"]]


def meetings(apart: Apart, names: list[str]) -> list[dict[str, Any]]:
    """What a proxy gives a decode engine in the concurrent form."""
    return [
        {
            "do_remote_prefill": True,
            "remote_engine_id": apart.engine_id,
            "remote_bootstrap_addr": apart.bootstrap,
            "transfer_id": name,
        }
        for name in names
    ]


def concurrently(
    apart: Apart, decode: Engine, prompts: list[list[int]], names: list[str], **more: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(prefill's answer, decode's answer) in the concurrent form."""
    asked = [{"do_remote_decode": True, "transfer_id": name} for name in names]
    decode.send("generate", prompts=prompts, params=meetings(apart, names), **more)
    prefilled = apart.prefill.call("generate", prompts=prompts, max_tokens=1, params=asked)
    with leases_end_by_word(apart.prefill, decode):
        return prefilled, decode.receive()


def take_over(
    prefill: Engine, decode: Engine, prompts: list[list[int]], params: list[dict[str, Any]], **more: Any
) -> dict[str, Any]:
    """Decode's answer in the two-step form."""
    with leases_end_by_word(prefill, decode):
        return decode.call("generate", prompts=prompts, params=params, **more)


def handed(answer: dict[str, Any]) -> list[int]:
    return [output["pool"]["handed_over_tokens"] for output in answer["outputs"]]


@contextmanager
def leases_end_by_word(prefill: Engine, decode: Engine) -> Iterator[None]:
    """Prefill goes on stepping while decode does something, like an engine that serves; in the end nothing is
    left in either, because decode said so. That leases also end by their time would else hide a lost
    word."""
    before = expired(prefill)
    prefill.send("drain", timeout_s=60)
    try:
        yield
        assert_nothing_left(decode)
    finally:
        left = prefill.receive()
    assert left == NOTHING_LEFT
    assert expired(prefill) == before


def expired(prefill: Engine) -> int:
    """How many leases have ended by their time."""
    return prefill.logged().count("no decode engine took a finished prefill in time")


def assert_nothing_left(*engines: Engine) -> None:
    for engine in engines:
        assert engine.call("drain", timeout_s=60) == NOTHING_LEFT


def fresh(*engines: Engine) -> None:
    """Prompts are computed or handed over again, not found in the engines' own caches."""
    for engine in engines:
        assert_nothing_left(engine)
        assert engine.call("reset_prefix_cache")


@pytest.mark.parametrize("path", ["decode", "tcp"])
def test_two_step(line: Line, apart: Apart, path: str) -> None:
    prompts = [make_prompt(2000 + position, length) for position, length in enumerate(LENGTHS)]
    decode: Engine = getattr(apart, path)
    answer = take_over(apart.prefill, decode, prompts, prefill_of(apart.prefill, prompts))

    assert tokens_of(answer) == line.expected(prompts)
    assert handed(answer) == [length - 1 for length in LENGTHS]


@pytest.mark.parametrize("path", ["decode", "tcp"])
def test_concurrent(line: Line, apart: Apart, path: str) -> None:
    seed = {"decode": 2100, "tcp": 2150}[path]
    prompts = [make_prompt(seed + position, length) for position, length in enumerate(LENGTHS)]
    names = [f"{path}-{position}" for position in range(len(prompts))]
    decode: Engine = getattr(apart, path)
    _, answer = concurrently(apart, decode, prompts, names)

    assert tokens_of(answer) == line.expected(prompts)
    assert handed(answer) == [len(prompt) - 1 for prompt in prompts]


def test_chunks_are_handed_over_while_later_ones_are_computed(line: Line, apart: Apart) -> None:
    prompts = [make_prompt(2190, 4000)]
    apart.decode.call("watch_reads")
    prefilled, answer = concurrently(apart, apart.decode, prompts, ["chunks"])

    assert tokens_of(answer) == line.expected(prompts)
    reads = apart.decode.call("reads")
    assert len(reads) > 4
    assert sum(seen < prefilled["ended_s"] for seen in reads) > len(reads) / 2


def test_only_what_decode_lacks_is_handed_over(line: Line, apart: Apart) -> None:
    stem = make_prompt(2200, 320)
    turns = [stem, stem + make_prompt(2201, 100)]
    for turn, expected_tokens in zip(turns, (319, 99), strict=True):
        answer = take_over(apart.prefill, apart.decode, [turn], prefill_of(apart.prefill, [turn]))
        assert tokens_of(answer) == line.expected([turn])
        assert handed(answer) == [expected_tokens]


def test_with_the_pool(line: Line) -> None:
    """Prefill finds the last turn in the pool, decode takes over what it lacks and stores its answer."""
    prompt = make_prompt(2300, 300)
    expected = line.expected([prompt], max_tokens=80)[0]
    fresh(line.first, line.second)
    params = prefill_of(line.first, [prompt])
    answer = take_over(line.first, line.second, [prompt], params, max_tokens=80)
    assert tokens_of(answer) == [expected]
    assert handed(answer) == [299]

    fresh(line.first, line.second)
    turn = prompt + expected + make_prompt(2301, 20)
    again = line.first.call("generate", prompts=[turn], params=[ASK], max_tokens=1)["outputs"][0]
    assert again["pool"]["pool_tokens"] == (300 + 80 - 1) // 32 * 32  # the answer's blocks, too
    answer = take_over(line.first, line.second, [turn], [again["params"]])
    assert tokens_of(answer) == line.expected([turn])
    assert handed(answer) == [len(turn) - 1]


def test_params_that_cannot_be_used_are_computed(line: Line, apart: Apart) -> None:
    """Another model's, another prompt's, another cluster's, another connector's, garbage: the right tokens,
    and no error."""
    prompt, other = make_prompt(2400, 200), make_prompt(2401, 200)
    wrong_model = prefill_of(line.other, [prompt])[0]
    wrong_prompt = prefill_of(apart.prefill, [other])[0]
    lying = prefill_of(apart.prefill, [prompt])[0]
    lying["remote_block_ids"] = [[10**6] * 7]
    nixl = {key: value for key, value in lying.items() if key != "moonpool"}
    cases = [(line.first, wrong_model)]  # of one cluster
    cases += [(apart.decode, params) for params in (wrong_model, wrong_prompt, lying, nixl)]
    cases.append((apart.decode, {"do_remote_prefill": True}))
    for decode, params in cases:
        answer = decode.call("generate", prompts=[prompt], params=[params])
        assert tokens_of(answer) == line.expected([prompt])
        assert answer["outputs"][0]["reason"] == "length"
        fresh(decode)
    assert "serves another model, other weights" in line.first.logged()
    assert "another cluster token" in apart.decode.logged()
    assert "computed another prompt" in apart.decode.logged()
    assert "not made by this connector" in apart.decode.logged()
    assert_nothing_left(apart.prefill)
    line.other.call("drain", timeout_s=60)
    for engine, why in ((apart.prefill, "computed another prompt"), (line.other, "serves another model")):
        (said,) = [
            row for row in engine.logged().splitlines() if "did not take a prompt over" in row and why in row
        ]
        assert "moonpool: vllm-" in said


def test_nobody_asks(apart: Apart) -> None:
    """A lease ends by itself, seconds after its prefill."""
    before = expired(apart.prefill)
    prefill_of(apart.prefill, [make_prompt(2500, 500)])
    assert_nothing_left(apart.prefill)
    assert expired(apart.prefill) == before + 1
    assert apart.prefill.call("metrics")["moonpool_connector_leases_expired_total"] >= 1


def test_nobody_prefills(line: Line, apart: Apart) -> None:
    prompt = make_prompt(2550, 200)
    answer = apart.decode.call("generate", prompts=[prompt], params=meetings(apart, ["never"]))
    assert tokens_of(answer) == line.expected([prompt])
    assert handed(answer) == [0]
    assert_nothing_left(apart.decode)


@pytest.mark.parametrize(("form", "stage"), ORDER)
def test_decode_aborts(line: Line, apart: Apart, form: str, stage: str) -> None:
    seed = 2600 + 10 * ORDER.index((form, stage))
    prompts = [make_prompt(seed + position, 500) for position in range(4)]
    more: dict[str, Any] = {"abort": [0, 2], "abort_when": stage}
    if form == "two-step":
        params = prefill_of(apart.prefill, prompts)
        answer = take_over(apart.prefill, apart.decode, prompts, params, **more)
    else:
        names = [f"{stage}-{position}" for position in range(4)]
        _, answer = concurrently(apart, apart.decode, prompts, names, **more)
    expected = line.expected(prompts)
    assert [tokens_of(answer)[position] for position in (1, 3)] == [expected[1], expected[3]]
    assert [answer["outputs"][position]["pool"]["handed_over_tokens"] for position in (1, 3)] == [499, 499]
    assert tokens_of(apart.decode.call("generate", prompts=prompts)) == expected


def test_decode_aborts_half_way(line: Line, apart: Apart) -> None:
    """One piece is here, the next one is being written to the blocks."""
    prompts = [make_prompt(2780, 1500), make_prompt(2781, 300)]
    params = prefill_of(apart.prefill, prompts)
    apart.tcp.call("hold_reads")
    answer = take_over(apart.prefill, apart.tcp, prompts, params, abort=[0], abort_when="half")
    assert answer["outputs"][0] is None
    assert tokens_of(answer)[1] == line.expected(prompts)[1]
    assert answer["outputs"][1]["pool"]["handed_over_tokens"] == 299
    assert tokens_of(apart.tcp.call("generate", prompts=prompts)) == line.expected(prompts)


def test_preemption_on_both_sides(line: Line, apart: Apart) -> None:
    """Prefill answers requests of its own, which grow while the first prompt takes nearly all of the room
    that is left: half of that is handed over when it is preempted, and it begins anew with other blocks.
    Decode has more answers than fit."""
    own = [make_prompt(2820 + position, 250) for position in range(6)]
    prompts = [make_prompt(2830 + position, length) for position, length in enumerate((2800, 500, 500, 500))]
    names = [f"preempted-{position}" for position in range(len(prompts))]
    asked = [None] * len(own) + [{"do_remote_decode": True, "transfer_id": name} for name in names]
    apart.decode.send("generate", prompts=prompts, params=meetings(apart, names), max_tokens=150)
    given = apart.prefill.call(
        "generate", prompts=own + prompts, params=asked, max_tokens=[100] * len(own) + [1] * len(prompts)
    )
    with leases_end_by_word(apart.prefill, apart.decode):
        taken = apart.decode.receive()

    assert tokens_of(taken) == line.expected(prompts, max_tokens=150)
    assert handed(taken) == [len(prompt) - 1 for prompt in prompts]
    assert tokens_of(given)[: len(own)] == line.expected(own, max_tokens=100)
    assert given["preempted_gives"] > 0
    assert taken["preemptions"] > 0


def test_a_reset_of_the_prefix_cache_ends_hand_overs(line: Line, apart: Apart) -> None:
    """As after a change of weights: vLLM's own reset succeeds at once, though a lease kept blocks, and from
    the next step on what was offered is void."""
    prompts = [make_prompt(2840, 300)]
    params = prefill_of(apart.prefill, prompts)
    assert apart.prefill.call("reset_prefix_cache")
    assert apart.prefill.call("drain", timeout_s=LEASE_S / 3) == NOTHING_LEFT
    answer = apart.decode.call("generate", prompts=prompts, params=params)
    assert tokens_of(answer) == line.expected(prompts)
    assert handed(answer) == [0]
    assert_nothing_left(apart.prefill, apart.decode)


def test_prefill_aborts_concurrently(line: Line, apart: Apart) -> None:
    prompts = [make_prompt(2800 + position, 900) for position in range(3)]
    names = [f"abort-{position}" for position in range(3)]
    asked = [{"do_remote_decode": True, "transfer_id": name} for name in names]
    apart.decode.send("generate", prompts=prompts, params=meetings(apart, names))
    apart.prefill.call("generate", prompts=prompts, params=asked, abort=[0, 2], abort_when="looking")
    with leases_end_by_word(apart.prefill, apart.decode):
        answer = apart.decode.receive()
    assert tokens_of(answer) == line.expected(prompts)
    assert handed(answer) == [0, 899, 0]


def test_the_same_names_twice(line: Line, apart: Apart) -> None:
    """One transfer_id for two prompts: one of them is handed over, both are right."""
    prompts = [make_prompt(2850, 200), make_prompt(2851, 200)]
    _, answer = concurrently(apart, apart.decode, prompts, ["twin", "twin"])
    assert tokens_of(answer) == line.expected(prompts)
    assert handed(answer) == [199, 0]


@pytest.mark.parametrize("schedule", range(SCHEDULES))
def test_random_schedules(line: Line, apart: Apart, schedule: int, rng: random.Random) -> None:
    """Hand-overs alone, the pool alone, and both; shared prefixes, both forms, both paths, aborts on either
    side, and little memory in all engines but the line's first: requests wait for room, or are preempted.
    PD_SCHEDULES=300 runs as many."""
    stems = [make_prompt(rng.randrange(1 << 40), rng.choice([0, 31, 32, 200, 256])) for _ in range(3)]
    count = rng.choice([1, 3, 6, 12])
    prompts = [
        rng.choice(stems)
        + make_prompt(rng.randrange(1 << 40), rng.choice([*LENGTHS[:11], rng.randrange(1, 700)]))
        for _ in range(count)
    ]
    more: dict[str, Any] = {"max_tokens": [rng.choice([1, 8, 60, 150]) for _ in prompts]}
    survivors = list(range(count))
    if rng.random() < 0.4:
        more["abort"] = [p for p in survivors if rng.random() < 0.4]
        more["abort_when"] = rng.choice(STAGES)
        survivors = [p for p in survivors if p not in more["abort"]]
    form = rng.choice(["two-step", "concurrent", "pool", "both"])
    decode = {"pool": line.second, "both": line.second}.get(form) or rng.choice([apart.decode, apart.tcp])
    prefill = apart.prefill if decode is not line.second else line.first
    print(form, len(prompts), {**more, "prompts": [len(prompt) for prompt in prompts]})
    leaves: list[int] = []
    if form == "concurrent":
        answer, leaves = beside_own_requests(apart, decode, prompts, rng, **more)
    elif form == "pool":
        prefill.call("generate", prompts=rng.sample(prompts, k=(count + 1) // 2), max_tokens=1)
        answer = decode.call("generate", prompts=prompts, **more)
    else:
        answer = take_over(prefill, decode, prompts, prefill_of(prefill, prompts), **more)
    expected = line.expected(prompts, max_tokens=more["max_tokens"])
    for position in survivors:
        assert tokens_of(answer)[position] == expected[position]
        assert answer["outputs"][position]["reason"] == "length"
    if form != "pool" and not leaves and len(survivors) == count:
        for prompt, output in zip(prompts, answer["outputs"], strict=True):
            assert output["pool"]["handed_over_tokens"] + output["pool"]["local_tokens"] >= len(prompt) - 1
    assert_nothing_left(prefill, decode)


def beside_own_requests(
    apart: Apart, decode: Engine, prompts: list[list[int]], rng: random.Random, **more: Any
) -> tuple[dict[str, Any], list[int]]:
    """Decode's answer in the concurrent form, while prefill answers requests of its own, and aborts some:
    which."""
    own = [make_prompt(rng.randrange(1 << 40), 250) for _ in range(rng.choice([0, 0, 6]))]
    names = [f"{rng.randrange(1 << 60):x}" for _ in prompts]
    asked = [None] * len(own) + [{"do_remote_decode": True, "transfer_id": name} for name in names]
    decode.send("generate", prompts=prompts, params=meetings(apart, names), **more)
    leaves = [p for p in range(len(asked)) if rng.random() < 0.2] if rng.random() < 0.3 else []
    apart.prefill.call(
        "generate",
        prompts=own + prompts,
        params=asked,
        max_tokens=[400] * len(own) + [1] * len(prompts),
        abort=leaves,
        abort_when=rng.choice(["looking", "running"]),
    )
    with leases_end_by_word(apart.prefill, decode):
        return decode.receive(), leaves


# From here on the engines that are apart are killed


def test_decode_is_killed(apart: Apart) -> None:
    """In the middle of a read, after it had been heard: prefill has its blocks back within seconds."""
    prompts = [make_prompt(2900 + position, 1000) for position in range(4)]
    params = prefill_of(apart.prefill, prompts)
    apart.tcp.call("kill_at_read", pid=0, after=True)
    apart.tcp.send("generate", prompts=prompts, params=params)
    apart.tcp.process.wait(60)
    assert_nothing_left(apart.prefill)


def test_prefill_is_killed(line: Line, apart: Apart) -> None:
    """After, in the middle of, and before a hand-over: the tokens of a plain engine, and never an error."""
    after, during, before, never = (make_prompt(2950 + position, 800) for position in range(4))
    offers = prefill_of(apart.prefill, [after, during, before])
    answers = [apart.decode.call("generate", prompts=[after], params=offers[:1])]
    apart.decode.call("kill_at_read", pid=apart.prefill.process.pid, after=False)
    answers.append(apart.decode.call("generate", prompts=[during], params=offers[1:2]))
    apart.prefill.process.wait(60)
    answers.append(apart.decode.call("generate", prompts=[before], params=offers[2:]))
    answers.append(apart.decode.call("generate", prompts=[never], params=meetings(apart, ["dead"])))

    tokens = [tokens_of(answer)[0] for answer in answers]
    assert tokens == line.expected([after, during, before, never])
    assert [answer["outputs"][0]["reason"] for answer in answers] == ["length"] * 4
    assert handed(answers[0]) == [799]
    assert [handed(answer)[0] for answer in answers[2:]] == [0, 0]
    assert_nothing_left(apart.decode)
