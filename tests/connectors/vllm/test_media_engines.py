"""Real engines with images and sounds in their prompts: what one stores, another loads by the content and the
place of each item, and both answer as a plain engine does.

One model runs always, all of them with HEAVY=1. docs/engines.md has the table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from moonpool.connectors.vllm import media_options
from tests.connectors.vllm.conftest import ASK, KV_CONFIG, make_prompt
from tests.connectors.vllm.node_objects import assert_equal, difference
from tests.connectors.vllm.processes import Bed, Engine, bed_with_node

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

DOCS = Path(__file__).parents[3] / "docs"
LOOKED_AT = "0.32"  # the vLLM whose options docs/keys.md has
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
# No cache of its own: what an engine does not compute comes from the pool. vLLM then names items by their
# request.
NO_CACHES = {"enable_prefix_caching": False, "mm_processor_cache_gb": 0}


@dataclass
class Engines:
    bed: Bed
    folder: Path

    def model(self, kind: str) -> str:
        path = str(self.folder / kind)
        self.bed.call("make_media_model", path=path, kind=kind)
        return path

    def run(self, kind: str, prompts: list[Any], *, pool: bool = True, **args: Any) -> list[dict[str, Any]]:
        given = {"model": self.model(kind), **ENGINE, "limit_mm_per_prompt": LIMITS[kind], **args}
        if pool:
            given["kv_transfer_config"] = KV_CONFIG
        answer = self.bed.run(given, prompts, max_tokens=TOKENS)
        assert answer["refusal"] == ""
        outputs: list[dict[str, Any]] = answer["outputs"]
        return outputs


@pytest.fixture(scope="module")
def engines(vllm_python: str) -> Iterator[Engines]:
    with bed_with_node(vllm_python) as (bed, folder):
        yield Engines(bed, folder)


def blocks(tokens: int) -> int:
    """The tokens of the full blocks of so many."""
    return tokens // BLOCK * BLOCK


@pytest.mark.parametrize("kind", MODELS)
def test_items_are_shared_by_content_and_place(engines: Engines, rng: Any, kind: str) -> None:
    seed = rng.randrange(1 << 30)
    stem, middle, tail = (make_prompt(seed + part, size) for part, size in enumerate((STEM, MIDDLE, TAIL)))
    hole = [PLACEHOLDER[kind]]
    a, b, c = seed, seed + 1, seed + 2

    def prompt(ids: list[int], *items: int, **more: Any) -> dict[str, Any]:
        return {"model": kind, "ids": ids, "items": items, **more}

    prompts = [
        prompt(stem + hole + tail, a),
        prompt(stem + hole + tail, b),
        prompt([*stem, 7, 7, *hole, *tail], a),
        prompt(stem + hole + middle + hole + tail, a, b),
        prompt(stem + hole + middle + hole + tail, b, a),
        stem + tail,
        prompt(stem + hole + tail, c, uuids=["a client's own"]),
    ]
    alone = engines.run(kind, prompts, pool=False)
    for one, other in ((0, 1), (3, 4), (1, 6)):
        assert difference(alone[one], alone[other]) > CHANCE_DIFFERENCE_MIN, "answers do not depend on items"
    item = alone[0]["length"] - STEM - TAIL
    assert item > BLOCK, "the items end in the block in which they begin"

    first = engines.run(kind, prompts[:1])
    assert_equal(first, alone[:1])
    second = engines.run(kind, prompts, **NO_CACHES)
    assert_equal(second, alone)
    assert all(each["local"] == 0 for each in second)
    text, one_item = blocks(STEM), blocks(STEM + item)
    expected = [blocks(alone[0]["length"] - 1), text, text, one_item, one_item, text, text]
    assert [each["pool"] for each in second] == expected

    third = engines.run(kind, [*prompts[:6], {**prompts[6], "uuids": ["another's"]}])
    assert_equal(third, alone)
    assert [each["pool"] + each["local"] for each in third] == [blocks(each["length"] - 1) for each in alone]
    assert third[0]["pool"] > 0
    assert all(each["errors"] == 0 for each in (*first, *second, *third))


@pytest.mark.heavy
def test_a_uuid_for_two_contents_is_not_believed(engines: Engines, rng: Any) -> None:
    """vLLM itself answers as it likes; the pool must not learn it."""
    seed = rng.randrange(1 << 30)
    ids = [*make_prompt(seed, STEM), PLACEHOLDER["idefics3"], *make_prompt(seed + 1, TAIL)]

    def prompt(item: int, *uuids: str) -> dict[str, Any]:
        return {"model": "idefics3", "ids": ids, "items": [item], "uuids": list(uuids)}

    alone = engines.run("idefics3", [prompt(seed), prompt(seed + 1)], pool=False)
    liar = [prompt(seed, "one"), prompt(seed + 1, "one")]
    engines.run("idefics3", liar, mm_processor_cache_gb=0)
    assert "two images came under one UUID" in engines.bed.logged()
    honest = engines.run("idefics3", [prompt(seed + 1), prompt(seed)], **NO_CACHES)
    assert [each["pool"] for each in honest] == [blocks(STEM), blocks(alone[0]["length"] - 1)]
    assert_equal(honest, alone[::-1])


@pytest.mark.heavy
def test_embeddings_of_images_are_items(engines: Engines, rng: Any) -> None:
    seed = rng.randrange(1 << 30)
    ids = [*make_prompt(seed, STEM), PLACEHOLDER["qwen2_vl"], *make_prompt(seed + 1, TAIL)]

    def prompt(item: int) -> dict[str, Any]:
        return {"model": "qwen2_vl", "ids": ids, "items": [item], "embeddings": True}

    prompts = [prompt(seed), prompt(seed + 1)]
    alone = engines.run("qwen2_vl", prompts, pool=False, enable_mm_embeds=True)
    assert difference(*alone) > CHANCE_DIFFERENCE_MIN
    assert_equal(engines.run("qwen2_vl", prompts[:1], enable_mm_embeds=True), alone[:1])
    second = engines.run("qwen2_vl", prompts, enable_mm_embeds=True, **NO_CACHES)
    assert_equal(second, alone)
    assert [each["pool"] for each in second] == [blocks(alone[0]["length"] - 1), blocks(STEM)]


@pytest.mark.heavy
def test_text_is_shared_where_items_have_no_name(engines: Engines, rng: Any) -> None:
    seed = rng.randrange(1 << 30)
    ids = [*make_prompt(seed, STEM), PLACEHOLDER["idefics3"], *make_prompt(seed + 1, TAIL)]
    prompts = [{"model": "idefics3", "ids": ids, "items": [seed]}]
    alone = engines.run("idefics3", prompts, pool=False)
    for pooled in (0, blocks(STEM)):
        answer = engines.run("idefics3", prompts, mm_processor_cache_type="shm")
        assert_equal(answer, alone)
        assert answer[0]["pool"] == pooled
    assert "with mm_processor_cache_type shm the scheduler does not see" in engines.bed.logged()


@pytest.mark.heavy
@pytest.mark.parametrize("kind", ["idefics3", "qwen2_vl"])
def test_prompts_with_images_are_handed_over(
    engines: Engines, vllm_python: str, rng: Any, kind: str, tmp_path: Path
) -> None:
    seed = rng.randrange(1 << 30)
    stem, tail = make_prompt(seed, STEM), make_prompt(seed + 1, TAIL)

    def prompt(behind: list[int], *items: int) -> dict[str, Any]:
        return {"model": kind, "ids": [*stem, PLACEHOLDER[kind], *behind], "items": items}

    prompts = [prompt(tail, seed), prompt(tail, seed + 1), prompt([], seed)]
    alone = engines.run(kind, prompts, pool=False)
    config = {**ENGINE, "limit_mm_per_prompt": LIMITS[kind], "kv_transfer_config": KV_CONFIG}
    model, runtime = Path(engines.model(kind)), tmp_path / "run"
    made = [Engine(vllm_python, model, runtime, tmp_path / name, **config) for name in ("p", "d")]
    prefill, decode = made
    try:
        asked = prefill.call("generate", prompts=prompts, max_tokens=1, params=[ASK] * len(prompts))
        params = [each["params"] for each in asked["outputs"]]
        answer = decode.call("generate", prompts=prompts, max_tokens=TOKENS, params=params)
        assert [each["tokens"] for each in answer["outputs"]] == [each["tokens"] for each in alone]
        handed = [each["pool"]["handed_over_tokens"] for each in answer["outputs"]]
        assert handed == [each["length"] - 1 for each in alone]

        asked = prefill.call("generate", prompts=prompts[:1], max_tokens=1, params=[ASK])
        params = [each["params"] for each in asked["outputs"]]
        other = decode.call("generate", prompts=[prompt(tail, seed + 2)], max_tokens=TOKENS, params=params)
        assert not (other["outputs"][0]["pool"] or {}).get("handed_over_tokens")
        assert "is not handed over" in decode.logged()
    finally:
        for engine in made:
            engine.close()


def test_every_option_is_known(engines: Engines) -> None:
    """A vLLM with an option for items that connectors/vllm/media_options.py does not know: find out whether
    it changes their KV, and say so there and in docs/keys.md."""
    if not engines.bed.call("version").startswith(LOOKED_AT):
        return  # what others have beside counts when it is set
    known = {*media_options.COUNTED, *media_options.LEFT_OUT}
    assert set(engines.bed.call("media_fields")) == known
    page = (DOCS / "keys.md").read_text()
    for name in known:
        assert f"`{name}`" in page, f"docs/keys.md does not say whether {name} counts"
