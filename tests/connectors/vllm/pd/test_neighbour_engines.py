"""Two real engines, and no pool: what one has in its own prefix cache comes to the other, with the tokens of
an engine that computes all of it, whatever happens; and no block stays behind.

``neighbour`` computes each prompt first, without a pool and without a hand-over, as a plain engine does: its
tokens are those that are expected. The last tests stop and kill it.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.connectors.vllm.conftest import ASK, KV_CONFIG, make_prompt, tokens_of
from tests.connectors.vllm.processes import Engine
from tests.ports import held_ports

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

LEASE_S = 6.0
WAIT_S = 10.0
NOTHING_LEFT = {"used_blocks": 0, "requests": 0, "pins": 0, "saves": 0, "lookups": 0, "leases": 0}


@dataclass
class Pair:
    neighbour: Engine
    taker: Engine
    hint: dict[str, Any]

    def computed(self, prompts: list[list[int]], **more: Any) -> list[list[int]]:
        """The neighbour's answers; its cache has the prompts from then on."""
        return tokens_of(self.neighbour.call("generate", prompts=prompts, **more))

    def take(self, prompts: list[list[int]], *, answers: bool = True, **more: Any) -> dict[str, Any]:
        """The answer of the taker, which is told of the neighbour and has none of the prompts. answers:
        whether the neighbour makes steps, in which it answers one ask for each prompt; nothing is then left
        of them."""
        if answers:
            self.neighbour.send("serve_neighbours", asks=len(prompts))
        answer = self.taker.call("generate", prompts=prompts, params=[self.hint] * len(prompts), **more)
        if answers:
            assert self.neighbour.receive() == NOTHING_LEFT
        assert self.taker.call("drain", timeout_s=60) == NOTHING_LEFT
        return answer

    def counted(self, engine: Engine, name: str) -> float:
        return float(engine.call("metrics")[f"moonpool_connector_{name}_total"])


@pytest.fixture(scope="module")
def pair(vllm_python: str, models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    logs = tmp_path_factory.mktemp("neighbours")
    with ExitStack() as stack:
        (port,) = stack.enter_context(held_ports(1))
        no_pool = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moonpool-")))

        def engine(name: str, **extra: object) -> Engine:
            options = {"compute_if_faster": False, "lease_s": LEASE_S, "neighbour_wait_s": WAIT_S, **extra}
            config = {**KV_CONFIG, "kv_connector_extra_config": options}
            made = Engine(vllm_python, models[0], no_pool, logs / f"{name}.log", kv_transfer_config=config)
            stack.callback(made.close)
            return made

        neighbour, taker = engine("neighbour", bootstrap_port=port), engine("taker")
        offer = neighbour.call("generate", prompts=[make_prompt(1, 40)], max_tokens=1, params=[ASK])
        assert neighbour.call("drain", timeout_s=60) == NOTHING_LEFT
        cached_at = {
            "remote_engine_id": offer["outputs"][0]["params"]["remote_engine_id"],
            "remote_bootstrap_addr": f"http://127.0.0.1:{port}",
        }
        yield Pair(neighbour, taker.wait(), {"moonpool": {"cached_at": cached_at}})


def taken(answer: dict[str, Any]) -> list[int]:
    return [output["pool"].get("neighbour_tokens", 0) for output in answer["outputs"]]


def test_blocks_of_the_neighbours_cache(pair: Pair) -> None:
    prompts = [make_prompt(8_000 + place, length) for place, length in enumerate((257, 288, 300, 1000))]
    expected = pair.computed(prompts)
    answer = pair.take(prompts)

    assert tokens_of(answer) == expected
    assert taken(answer) == [256, 256, 288, 992]
    assert pair.counted(pair.taker, "neighbour_tokens") == 256 + 256 + 288 + 992
    assert pair.counted(pair.taker, "neighbour_bytes") > 0
    assert pair.counted(pair.neighbour, "neighbour_offers") == len(prompts)
    assert "the lease expired" not in pair.neighbour.logged()
    again = pair.taker.call("generate", prompts=prompts)  # they are in its own cache now
    assert [output["pool"]["local_tokens"] for output in again["outputs"]] == [256, 256, 288, 992]


def test_the_neighbour_has_the_beginning_and_the_taker_some_of_it(pair: Pair) -> None:
    stem, middle, rest = make_prompt(8_100, 128), make_prompt(8_101, 320), make_prompt(8_102, 200)
    pair.taker.call("generate", prompts=[stem])
    pair.computed([stem + middle])
    answer = pair.take([stem + middle + rest])
    assert taken(answer) == [320]
    assert answer["outputs"][0]["pool"]["local_tokens"] == 128
    assert tokens_of(answer) == pair.computed([stem + middle + rest])


def test_other_salts_and_other_prompts_find_nothing(pair: Pair) -> None:
    prompt = make_prompt(8_200, 300)
    expected = pair.computed([prompt], salt="tenant-a")
    refused = pair.counted(pair.neighbour, "neighbour_refused")
    for salt in ("tenant-b", None):
        answer = pair.take([prompt], salt=salt)
        assert (tokens_of(answer), taken(answer)) == (expected, [0])
    assert taken(pair.take([make_prompt(8_201, 300)])) == [0]
    assert pair.counted(pair.neighbour, "neighbour_refused") == refused + 3
    answer = pair.take([prompt], salt="tenant-a")
    assert (tokens_of(answer), taken(answer)) == (expected, [288])


def test_blocks_that_the_neighbour_claims_and_has_evicted_are_computed(pair: Pair) -> None:
    prompt = make_prompt(8_300, 500)
    expected = pair.computed([prompt])
    pair.neighbour.call("claim_evicted")
    errors = pair.counted(pair.taker, "neighbour_errors")
    answer = pair.take([prompt])
    assert (tokens_of(answer), taken(answer)) == (expected, [0])
    assert pair.counted(pair.taker, "neighbour_errors") == errors + 1


@pytest.mark.parametrize("stage", ["looking", "loading", "loaded", "running"])
def test_the_taker_aborts(pair: Pair, stage: str) -> None:
    seed = 8_400 + 10 * ["looking", "loading", "loaded", "running"].index(stage)
    prompts = [make_prompt(seed + place, 500) for place in range(3)]
    expected = pair.computed(prompts)
    pair.neighbour.send("serve_neighbours", asks=1 if stage == "looking" else 3)
    params = [pair.hint] * 3
    answer = pair.taker.call("generate", prompts=prompts, params=params, abort=[0, 2], abort_when=stage)
    assert tokens_of(answer)[1] == expected[1]
    assert answer["outputs"][1]["pool"]["neighbour_tokens"] == 480
    assert pair.taker.call("drain", timeout_s=60) == NOTHING_LEFT
    assert pair.neighbour.receive() == NOTHING_LEFT
    assert tokens_of(pair.taker.call("generate", prompts=prompts)) == expected


def test_a_neighbour_that_stands_still_or_dies(pair: Pair) -> None:
    """It takes no steps, then it is killed in the middle of a read, then it is gone: the tokens of a plain
    engine. After the first time it is not asked for some seconds, so each prompt is told of by another
    name."""
    still, read, gone = (make_prompt(8_500 + place, 800) for place in range(3))
    expected = pair.computed([still, read, gone])
    os.kill(pair.neighbour.process.pid, signal.SIGSTOP)
    answers = [pair.take([still], answers=False)]
    os.kill(pair.neighbour.process.pid, signal.SIGCONT)
    place = pair.hint["moonpool"]["cached_at"]["remote_bootstrap_addr"]
    pair.hint["moonpool"]["cached_at"]["remote_bootstrap_addr"] = f"{place}/"
    pair.neighbour.call("drain", timeout_s=60)  # what it was asked meanwhile
    pair.taker.call("kill_at_read", pid=pair.neighbour.process.pid, after=False)
    pair.neighbour.send("serve_neighbours", asks=2)  # that of before may come only now; it ends by the kill
    answers.append(pair.take([read], answers=False))
    pair.neighbour.process.wait(60)
    answers.append(pair.take([gone], answers=False))
    assert [tokens_of(answer)[0] for answer in answers] == expected
    assert [taken(answers[place]) for place in (0, 2)] == [[0], [0]]  # a dying process may still be read
    assert [answer["outputs"][0]["reason"] for answer in answers] == ["length"] * 3
