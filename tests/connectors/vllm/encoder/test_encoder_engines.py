"""Real engines that share the outputs of their encoders: what one has encoded, another one loads, and both
answer as a plain engine does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.connectors.vllm.conftest import JOIN_TIMEOUT_S, KV_CONFIG, make_prompt
from tests.connectors.vllm.node_objects import assert_equal, difference
from tests.connectors.vllm.processes import Bed, Engine, bed_with_node

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

CHANCE_DIFFERENCE_MIN = 1e-3  # that other items make
BLOCK = 32  # tokens
TOKENS = 8
STEM, MIDDLE, TAIL = 70, 41, 120  # tokens of text before, between and behind the items
PLACEHOLDER = {"idefics3": 260, "qwen2_audio": 259, "qwen2_vl": 261}
LIMITS = {"idefics3": {"image": 2}, "qwen2_audio": {"audio": 2}, "qwen2_vl": {"image": 2, "video": 0}}
MODELS = [
    "idefics3",
    pytest.param("qwen2_vl", marks=pytest.mark.heavy),
    pytest.param("qwen2_audio", marks=pytest.mark.heavy),
]
ENGINE = {
    "max_model_len": 1024,
    "max_num_batched_tokens": 512,
    "kv_cache_memory_bytes": 16 << 20,
    "skip_tokenizer_init": False,
}
BOTH = {"ec_connector": "Mooncake", "ec_role": "ec_both"}
BY_PATH = {
    "ec_connector": "Moonpool",
    "ec_role": "ec_both",
    "ec_connector_module_path": "moonpool.connectors.vllm.encoder.connector",
}


@dataclass
class Engines:
    bed: Bed
    folder: Path

    def model(self, kind: str, seed: int = 0) -> str:
        path = str(self.folder / f"{kind}{seed}")
        self.bed.call("make_media_model", path=path, kind=kind, seed=seed)
        return path

    def run(
        self, kind: str, prompts: list[Any], seed: int = 0, fault: str = "", **args: Any
    ) -> dict[str, Any]:
        given = {"model": self.model(kind, seed), **ENGINE, "limit_mm_per_prompt": LIMITS[kind], **args}
        return self.bed.run(given, prompts, max_tokens=TOKENS, fault=fault, node_pid=self.bed.node_pid)

    def alone(self, kind: str, prompts: list[Any], seed: int = 0) -> list[dict[str, Any]]:
        outputs: list[dict[str, Any]] = self.run(kind, prompts, seed)["outputs"]
        return outputs


@pytest.fixture(scope="module")
def engines(vllm_python: str) -> Iterator[Engines]:
    with bed_with_node(vllm_python) as (bed, folder):
        yield Engines(bed, folder)


def prompt(kind: str, ids: list[int], *items: int, **more: Any) -> dict[str, Any]:
    return {"model": kind, "ids": ids, "items": items, **more}


def runs(answer: dict[str, Any]) -> list[int]:
    return [each["encoder_runs"] for each in answer["outputs"]]


@pytest.mark.parametrize("kind", MODELS)
def test_what_one_engine_has_encoded_another_one_loads(engines: Engines, rng: Any, kind: str) -> None:
    seed = rng.randrange(1 << 30)
    stem, middle, tail = (make_prompt(seed + part, size) for part, size in enumerate((STEM, MIDDLE, TAIL)))
    hole = [PLACEHOLDER[kind]]
    a, b = seed, seed + 1
    prompts = [
        prompt(kind, stem + hole + tail, a),
        prompt(kind, [*stem, 7, 7, *hole, *tail], b),
        prompt(kind, stem + hole + middle + hole + tail, a, b),
        prompt(kind, stem + hole + middle + hole + tail, b, a),
        prompt(kind, middle + hole, a, uuids=["a client's own"]),
    ]
    alone = engines.alone(kind, prompts)
    assert difference(alone[2], alone[3]) > CHANCE_DIFFERENCE_MIN, "answers do not depend on items"

    first = engines.run(kind, prompts[:2], ec_transfer_config=BOTH)
    assert_equal(first["outputs"], alone[:2])
    assert runs(first) == [1, 1]
    assert first["encoder"]["saves"] >= 1  # the last one may end with the engine

    second = engines.run(kind, prompts, ec_transfer_config=BY_PATH)
    assert_equal(second["outputs"], alone)
    assert runs(second) == [0] * len(prompts)
    counts = second["encoder"]
    # One load for each of vLLM's own names: its own cache has the others.
    assert (counts["encoded"], counts["loads"], counts["load_errors"]) == (0, 3, 0)
    assert counts["hits"] == 7
    assert counts["loaded_bytes"] > 0


def test_with_the_kv_connector(engines: Engines, rng: Any) -> None:
    """The items have names for both, and only what the pool lacks is computed."""
    seed, kind = rng.randrange(1 << 30), "idefics3"
    hole, tail = [PLACEHOLDER[kind]], make_prompt(seed + 1, TAIL)
    prompts = [
        prompt(kind, make_prompt(seed, STEM) + hole + tail, seed),
        prompt(kind, make_prompt(seed + 2, STEM) + hole + tail, seed),
    ]
    alone = engines.alone(kind, prompts)
    both = {"ec_transfer_config": BOTH, "kv_transfer_config": KV_CONFIG}
    first = engines.run(kind, prompts[:1], **both)
    assert_equal(first["outputs"], alone[:1])
    second = engines.run(kind, prompts, **both)
    assert second["refusal"] == ""
    assert_equal(second["outputs"], alone)
    assert runs(second) == [0, 0]
    assert second["encoder"]["loads"] == 1, "the blocks of the first prompt came from the pool with its image"
    full = (alone[0]["length"] - 1) // BLOCK * BLOCK
    assert [each["pool"] for each in second["outputs"]] == [full, 0]


@pytest.mark.parametrize("fault", ["gone", "shorter", "flipped", "other"])
def test_what_cannot_be_loaded_is_encoded(engines: Engines, rng: Any, fault: str) -> None:
    """Between the lookup and the load the object is removed, cut, damaged, or exchanged with another
    item's."""
    seed, kind = rng.randrange(1 << 30), "idefics3"
    ids = [*make_prompt(seed, STEM), PLACEHOLDER[kind], *make_prompt(seed + 1, TAIL)]
    prompts = [prompt(kind, ids, seed), prompt(kind, ids, seed + 1)]
    alone = engines.alone(kind, prompts)
    assert difference(*alone) > CHANCE_DIFFERENCE_MIN
    engines.run(kind, prompts, ec_transfer_config=BOTH)
    damaged = engines.run(kind, prompts, ec_transfer_config=BOTH, fault=fault)
    assert_equal(damaged["outputs"], alone)
    assert runs(damaged) == [1, 1]
    counts = damaged["encoder"]
    assert (counts["hits"], counts["loads"], counts["load_errors"]) == (2, 0, 2)


def test_engines_of_other_weights_never_share(engines: Engines, rng: Any) -> None:
    seed, kind = rng.randrange(1 << 30), "idefics3"
    prompts = [prompt(kind, [*make_prompt(seed, STEM), PLACEHOLDER[kind]], seed)]
    alone, others = engines.alone(kind, prompts), engines.alone(kind, prompts, seed=1)
    assert difference(alone[0], others[0]) > CHANCE_DIFFERENCE_MIN
    engines.run(kind, prompts, ec_transfer_config=BOTH)
    other = engines.run(kind, prompts, seed=1, ec_transfer_config=BOTH)
    assert_equal(other["outputs"], others)
    assert runs(other) == [1]
    assert other["encoder"]["hits"] == 0


def test_roles(engines: Engines, rng: Any) -> None:
    """An engine that only encodes stores; one that only consumes loads, encodes what is not there, and stores
    nothing."""
    seed, kind = rng.randrange(1 << 30), "idefics3"
    ids = [*make_prompt(seed, STEM), PLACEHOLDER[kind], *make_prompt(seed + 1, TAIL)]
    prompts = [prompt(kind, ids, seed), prompt(kind, ids, seed + 1)]
    alone = engines.alone(kind, prompts)
    producer = engines.run(kind, prompts[:1], ec_transfer_config={**BOTH, "ec_role": "ec_producer"})
    assert runs(producer) == [1]
    for _ in range(2):
        consumer = engines.run(kind, prompts, ec_transfer_config={**BOTH, "ec_role": "ec_consumer"})
        assert_equal(consumer["outputs"], alone)
        assert runs(consumer) == [0, 1]
        assert consumer["encoder"]["saves"] == 0
    again = engines.run(kind, prompts[:1], ec_transfer_config={**BOTH, "ec_role": "ec_producer"})
    assert runs(again) == [0]


def test_two_contents_under_one_uuid(engines: Engines, rng: Any) -> None:
    """vLLM's own cache goes by the UUID and may answer with the other image; no other engine learns that."""
    seed, kind = rng.randrange(1 << 30), "idefics3"
    ids = [*make_prompt(seed, STEM), PLACEHOLDER[kind], *make_prompt(seed + 1, TAIL)]
    alone = engines.alone(kind, [prompt(kind, ids, seed), prompt(kind, ids, seed + 1)])
    liar = [prompt(kind, ids, item, uuids=["one"]) for item in (seed, seed + 1)]
    engines.run(kind, liar, ec_transfer_config=BOTH, mm_processor_cache_gb=0)
    honest = engines.run(
        kind, [prompt(kind, ids, seed + 1), prompt(kind, ids, seed)], ec_transfer_config=BOTH
    )
    assert_equal(honest["outputs"], alone[::-1])
    assert runs(honest) == [1, 0]


def test_a_node_killed_while_serving(engines: Engines, vllm_python: str, rng: Any) -> None:
    seed, kind = rng.randrange(1 << 30), "idefics3"
    ids = [*make_prompt(seed, STEM), PLACEHOLDER[kind], *make_prompt(seed + 1, TAIL)]
    prompts = [prompt(kind, ids, seed), prompt(kind, ids, seed + 1)]
    alone = engines.alone(kind, prompts)
    with bed_with_node(vllm_python) as (bed, folder):
        others = Engines(bed, folder)
        others.run(kind, prompts, ec_transfer_config=BOTH)
        killed = others.run(kind, prompts, ec_transfer_config=BOTH, fault="killed")
    assert_equal(killed["outputs"], alone)
    assert runs(killed) == [1, 1]


class Serving:
    """One engine that goes on serving, and what it counts."""

    def __init__(self, python: str, model: str, runtime: Path, log: Path, **config: Any) -> None:
        self.engine = Engine(python, Path(model), runtime, log, **ENGINE, **config)
        deadline_s = time.monotonic() + JOIN_TIMEOUT_S
        while config.get("ec_transfer_config") and not self.engine.call("encoder_joined"):
            assert time.monotonic() < deadline_s, "the engine did not join the pool"

    def ask(self, *prompts: Any) -> list[dict[str, Any]]:
        outputs: list[dict[str, Any]] = []
        for one in prompts:
            outputs += self.engine.call("generate", prompts=[one], max_tokens=TOKENS, chances=True)["outputs"]
        return outputs

    def counts(self) -> tuple[int, int, int]:
        """How many items were given to the encoder, loaded, and found but not loaded."""
        self.engine.call("drain")
        metrics = self.engine.call("metrics")
        encoded, loads, errors = (
            int(metrics[f"moonpool_encoder_{name}_total"]) for name in ("encoded", "loads", "load_errors")
        )
        return encoded, loads, errors


@pytest.fixture
def serving(vllm_python: str, engines: Engines, tmp_path: Path) -> Iterator[Callable[..., Serving]]:
    made: list[Serving] = []

    def start(kind: str = "idefics3", **config: Any) -> Serving:
        log = tmp_path / f"engine{len(made)}"
        model = engines.model(kind)
        config["limit_mm_per_prompt"] = LIMITS[kind]
        made.append(Serving(vllm_python, model, engines.folder / "run", log, **config))
        return made[-1]

    yield start
    for one in made:
        one.engine.close()


def test_weights_that_are_replaced(engines: Engines, serving: Callable[..., Serving], rng: Any) -> None:
    """An output of other weights is never used, also not one that an engine has stored itself before."""
    seed, kind = rng.randrange(1 << 30), "idefics3"
    hole = [*make_prompt(seed, STEM), PLACEHOLDER[kind]]
    prompts = [prompt(kind, hole, seed), prompt(kind, hole, seed + 1)]
    of_0, of_1 = engines.alone(kind, prompts), engines.alone(kind, prompts, seed=1)
    assert difference(of_0[0], of_1[0]) > CHANCE_DIFFERENCE_MIN
    engines.run(kind, prompts[1:], seed=1, ec_transfer_config=BOTH)
    one = serving(ec_transfer_config=BOTH)
    assert_equal(one.ask(*prompts), of_0)
    assert one.counts() == (2, 0, 0)
    one.engine.call("reset_caches")
    assert_equal(one.ask(*prompts), of_0)
    assert one.counts() == (2, 2, 0)

    one.engine.call("call_workers", method="reload_weights", weights_path=engines.model(kind, 1))
    one.engine.call("reset_caches")
    assert not one.engine.call("encoder_joined")
    assert_equal(one.ask(*prompts), of_1)  # the first step tells that the worker has joined again
    assert one.engine.call("encoder_joined")
    assert one.counts()[1:] == (2, 0), "outputs of the weights before, or of an engine that began with these"
    one.engine.call("reset_caches")
    assert_equal(one.ask(prompts[1]), of_1[1:])
    assert one.counts()[1:] == (3, 0)

    one.engine.call("give_model", path=engines.model(kind))  # by a trainer, without a call of the engine
    one.engine.call("reset_caches")
    before = one.counts()
    assert_equal(one.ask(*prompts), of_0)
    assert one.counts()[1] == before[1]
    assert not one.engine.call("encoder_joined")


@pytest.mark.heavy
def test_two_ranks(engines: Engines, serving: Callable[..., Serving], rng: Any) -> None:
    """Workers in processes of their own load, and encode together what they cannot load."""
    seed, kind = rng.randrange(1 << 30), "idefics3"
    ids = [*make_prompt(seed, STEM), PLACEHOLDER[kind], *make_prompt(seed + 1, TAIL)]
    prompts = [prompt(kind, ids, seed), prompt(kind, ids, seed + 1)]
    alone = engines.alone(kind, prompts)
    engines.run(kind, prompts, ec_transfer_config=BOTH)
    two = serving(ec_transfer_config=BOTH, tensor_parallel_size=2)
    assert_equal(two.ask(prompts[0]), alone[:1])
    assert two.counts() == (0, 2, 0)
    two.engine.call("lose_outputs")
    assert_equal(two.ask(prompts[1]), alone[1:])
    assert two.counts() == (0, 2, 2)


@pytest.mark.heavy
def test_a_request_with_sizes_in_the_place_of_an_image_ends(
    serving: Callable[..., Serving], engines: Engines, rng: Any
) -> None:
    """vLLM's front end accepts it from a consumer, and nothing here could encode it."""
    seed, kind = rng.randrange(1 << 30), "qwen2_vl"
    ids = [*make_prompt(seed, STEM), PLACEHOLDER[kind], *make_prompt(seed + 1, TAIL)]
    alone = engines.alone(kind, [prompt(kind, ids, seed)])
    one = serving(kind, ec_transfer_config={**BOTH, "ec_role": "ec_consumer"})
    (refused,) = one.ask(prompt(kind, ids, seed, sizes=True))
    assert (refused["reason"], refused["tokens"]) == ("error", [])
    assert_equal(one.ask(prompt(kind, ids, seed)), alone)
    assert one.engine.logged().count("ends with an error") == 1
