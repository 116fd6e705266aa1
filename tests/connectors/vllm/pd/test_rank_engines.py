"""Real prefill and decode engines of different tensor- and pipeline-parallel sizes: what one computed on its
ranks the other goes on from on its own, with the tokens and log-probabilities of a plain engine, and no block
or lease stays behind.

The model has two KV heads: of four ranks two hold copies of each. Each engine takes half a minute to start.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.connectors.vllm.conftest import ASK, BLOCK_TOKENS, BYTES_PER_TOKEN, KV_CONFIG, make_prompt
from tests.connectors.vllm.node_objects import assert_equal
from tests.connectors.vllm.processes import Engine
from tests.ports import held_ports

pytestmark = [pytest.mark.engine, pytest.mark.heavy, pytest.mark.timeout(1800)]

# Prefill's sizes and decode's: tensor-parallel ranks, then pipeline stages.
PAIRS = [
    *(
        (theirs, ours)
        for theirs, ours in itertools.product(((1, 1), (2, 1), (4, 1)), repeat=2)
        if theirs != ours
    ),
    ((1, 2), (1, 1)),
    ((1, 1), (1, 2)),
    ((1, 2), (2, 1)),
]
Size = tuple[int, int]
LENGTHS = (1, 2, 31, 32, 33, 65, 257, 1000)
BLOCKS = 140  # one longest request, and not many of them: answers are preempted
FORMS = ("two-step", "concurrent")
LEASE_S = 10.0  # of four ranks on two cores the first step takes seconds
NOTHING_LEFT = {"used_blocks": 0, "requests": 0, "pins": 0, "saves": 0, "lookups": 0, "leases": 0}


@dataclass
class Line:
    """An engine alone, and a pair."""

    plain: Engine
    prefill: Engine
    decode: Engine
    engine_id: str
    bootstrap: str

    def ask(self, form: str, prompts: list[list[int]], name: str, **more: Any) -> dict[str, Any]:
        """Decode's answer. Prefill goes on stepping meanwhile, like an engine that serves; in the end nothing
        is left in either, because decode said so: no lease has ended by its time."""
        before = self.expired()
        if form == "two-step":
            answer = self.prefill.call("generate", prompts=prompts, max_tokens=1, params=[ASK] * len(prompts))
            params = [output["params"] for output in answer["outputs"]]
            self.prefill.send("drain", timeout_s=60)
            self.decode.send("generate", prompts=prompts, params=params, chances=True, **more)
        else:
            names = [f"{name}-{position}" for position in range(len(prompts))]
            params = [self.meeting(each) for each in names]
            self.decode.send("generate", prompts=prompts, params=params, chances=True, **more)
            asked = [{"do_remote_decode": True, "transfer_id": each} for each in names]
            self.prefill.call("generate", prompts=prompts, max_tokens=1, params=asked)
            self.prefill.send("drain", timeout_s=60)
        answer = self.decode.receive()
        assert self.decode.call("drain", timeout_s=60) == NOTHING_LEFT
        assert self.prefill.receive() == NOTHING_LEFT
        assert self.expired() == before
        return dict(answer)

    def meeting(self, name: str) -> dict[str, Any]:
        return {
            "do_remote_prefill": True,
            "remote_engine_id": self.engine_id,
            "remote_bootstrap_addr": self.bootstrap,
            "transfer_id": name,
        }

    def expired(self) -> int:
        return self.prefill.logged().count("no decode engine took a finished prefill in time")

    def expected(self, prompts: list[list[int]], max_tokens: int = 8) -> list[dict[str, Any]]:
        answer = self.plain.call("generate", prompts=prompts, max_tokens=max_tokens, chances=True)
        return list(answer["outputs"])


@pytest.fixture(scope="module")
def plain(vllm_python: str, models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with tempfile.TemporaryDirectory(prefix="moonpool-") as no_pool:
        engine = Engine(vllm_python, models[0], Path(no_pool), tmp_path_factory.mktemp("plain") / "log")
        yield engine
        engine.close()


@contextmanager
def line(
    sizes: tuple[Size, Size], plain: Engine, vllm_python: str, model: Path, folder: Path
) -> Iterator[Line]:
    with ExitStack() as stack:
        (port,) = stack.enter_context(held_ports(1))
        no_pool = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moonpool-")))

        def engine(name: str, size: Size, **extra: Any) -> Engine:
            extra = {"compute_if_faster": False, "lease_s": LEASE_S, **extra}
            made = Engine(
                vllm_python,
                model,
                no_pool,
                folder / name,
                kv_transfer_config={**KV_CONFIG, "kv_connector_extra_config": extra},
                kv_cache_memory_bytes=BLOCKS * BLOCK_TOKENS * BYTES_PER_TOKEN // (min(size[0], 2) * size[1]),
                tensor_parallel_size=size[0],
                pipeline_parallel_size=size[1],
            )
            stack.callback(made.close)
            return made

        prefill = engine("prefill", sizes[0], bootstrap_port=port)
        decode = engine("decode", sizes[1])
        answer = prefill.call("generate", prompts=[make_prompt(1, 40)], params=[ASK], max_tokens=1)
        params = answer["outputs"][0]["params"]
        assert len(params["moonpool"]["handover"]["ranks"]) == sizes[0][0] * sizes[0][1]
        decode.call("generate", prompts=[make_prompt(1, 40)], params=[params])
        assert prefill.call("drain", timeout_s=60) == NOTHING_LEFT
        engine_id = str(params["remote_engine_id"])
        yield Line(plain, prefill, decode, engine_id, f"http://127.0.0.1:{port}")


@pytest.mark.parametrize(
    "sizes", PAIRS, ids=lambda sizes: "-to-".join("x".join(map(str, size)) for size in sizes)
)
def test_engines_of_unlike_sizes(
    sizes: tuple[Size, Size], plain: Engine, vllm_python: str, models: list[Path], tmp_path: Path
) -> None:
    with line(sizes, plain, vllm_python, models[0], tmp_path) as pair:
        for number, form in enumerate(FORMS):
            check_hand_overs(pair, form, 3000 + 100 * number)
            check_preemption(pair, form, 3050 + 100 * number)
        check_aborts(pair)
        check_prefill_aborts(pair)
        check_death(pair)


def check_hand_overs(pair: Line, form: str, seed: int) -> None:
    """All that decode lacks, and of a next turn only that."""
    prompts = [make_prompt(seed + position, length) for position, length in enumerate(LENGTHS)]
    answer = pair.ask(form, prompts, f"first-{form}")
    assert_equal(answer["outputs"], pair.expected(prompts))
    assert handed(answer) == [length - 1 for length in LENGTHS]

    turns = [prompts[-2] + make_prompt(seed + 20, 100)]
    answer = pair.ask(form, turns, f"turn-{form}")
    assert_equal(answer["outputs"], pair.expected(turns))
    assert handed(answer) == [356 - 256]


def check_preemption(pair: Line, form: str, seed: int) -> None:
    """Decode has more answers than fit."""
    prompts = [make_prompt(seed + position, 900) for position in range(4)]
    answer = pair.ask(form, prompts, f"preempted-{form}", max_tokens=260)
    assert_equal(answer["outputs"], pair.expected(prompts, max_tokens=260))
    assert answer["preemptions"] > 0


def check_aborts(pair: Line) -> None:
    """Requests that decode drops end their leases, too."""
    for number, (form, stage) in enumerate(
        (form, stage) for form in FORMS for stage in ("looking", "loading")
    ):
        prompts = [make_prompt(3300 + 10 * number + position, 400) for position in range(3)]
        answer = pair.ask(form, prompts, f"{form}-{stage}", abort=[1], abort_when=stage)
        expected = pair.expected(prompts)
        assert answer["outputs"][1] is None
        assert_equal([answer["outputs"][0], answer["outputs"][2]], [expected[0], expected[2]])


def check_prefill_aborts(pair: Line) -> None:
    """All ranks of decode compute the request that prefill dropped."""
    prompts = [make_prompt(3400 + position, 700) for position in range(2)]
    names = ["abort-0", "abort-1"]
    pair.decode.send("generate", prompts=prompts, params=list(map(pair.meeting, names)), chances=True)
    asked = [{"do_remote_decode": True, "transfer_id": name} for name in names]
    pair.prefill.call(
        "generate", prompts=prompts, params=asked, max_tokens=1, abort=[0], abort_when="looking"
    )
    pair.prefill.send("drain", timeout_s=60)
    answer = pair.decode.receive()
    assert_equal(answer["outputs"], pair.expected(prompts))
    assert handed(answer) == [0, 699]
    assert pair.decode.call("drain", timeout_s=60) == NOTHING_LEFT
    assert pair.prefill.receive() == NOTHING_LEFT


def check_death(pair: Line) -> None:
    """The prefill engine dies with what it offered: computed, and never an error."""
    prompt = make_prompt(3500, 500)
    answer = pair.prefill.call("generate", prompts=[prompt], params=[ASK], max_tokens=1)
    params = answer["outputs"][0]["params"]
    pair.prefill.close()
    answer = pair.decode.call("generate", prompts=[prompt], params=[params], chances=True)
    assert_equal(answer["outputs"], pair.expected([prompt]))
    assert answer["outputs"][0]["reason"] == "length"
    assert pair.decode.call("drain", timeout_s=60) == NOTHING_LEFT


def handed(answer: dict[str, Any]) -> list[int]:
    return [output["pool"]["handed_over_tokens"] for output in answer["outputs"]]
