"""A differential test of identities: of two engines that differ in one argument, either the answers are equal
(tokens and their probabilities) when one takes what the other stored, or the fingerprints are not.

Fingerprints without the form of the bytes cost half a second, so all pairs are compared in them. Where they
are equal, engines run: those of a few pairs always, of all with HEAVY=1."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from moonpool.connectors.vllm import identity_arguments as arguments
from tests.connectors.vllm.configs import LLAMA
from tests.connectors.vllm.conftest import KV_CONFIG, make_prompt
from tests.connectors.vllm.processes import Bed, EngineFailed, bed_with_node

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

LOOKED_AT = "0.32"  # the vLLM whose fields are in connectors/vllm/identity_arguments.py
DOCS = Path(__file__).parents[3] / "docs" / "keys.md"
CHANCE_DIFFERENCE_MAX = 1e-3  # of log-probabilities, in float32; another formula changes them by tenths
PROMPT_TOKENS = (300, 200, 129)
TOKENS = 8

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(16)],
    "long_factor": [2.0 + 0.5 * i for i in range(16)],
    "original_max_position_embeddings": 2048,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
MLA = {
    **LLAMA,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 64,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 3,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", LLAMA),
    "longrope": (
        "phi3",
        {**LLAMA, "rope_parameters": LONGROPE, "original_max_position_embeddings": 2048},
    ),
    "dynamic": ("llama", {**LLAMA, "rope_parameters": DYNAMIC}),
    "mla": ("deepseek_v2", MLA),
}
HALF = {"dtype": "bfloat16"}
FP8 = {**HALF, "kv_cache_dtype": "fp8"}
ONLINE = {**HALF, "quantization": "online"}


@dataclass(frozen=True)
class Pair:
    """Two engines of one model: what both have, and what one has and the other. The other's environment."""

    name: str
    one: dict[str, Any] = field(default_factory=dict)
    other: dict[str, Any] = field(default_factory=dict)
    both: dict[str, Any] = field(default_factory=dict)
    model: str = "llama"
    environment: dict[str, str] = field(default_factory=dict)

    def args(self, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
        base = {"model": str(folder / self.model), **self.both}
        return {**base, **self.one}, {**base, **self.other}


def overridden(**config: Any) -> dict[str, Any]:
    return {"hf_overrides": config}


APART = [
    Pair("type", other=HALF),
    Pair("type of the KV", other={"kv_cache_dtype": "fp8"}, both=HALF),
    Pair("kinds of fp8", {"kv_cache_dtype": "fp8_e4m3"}, {"kv_cache_dtype": "fp8_e5m2"}, HALF),
    Pair("block", other={"block_size": 64}),
    Pair("hf_overrides", other=overridden(rms_norm_eps=0.01)),
    Pair("base of rope", other=overridden(rope_parameters={"rope_type": "default", "rope_theta": 5e5})),
    Pair(
        "scaling of rope", other=overridden(rope_parameters={"rope_type": "linear", "factor": 2.0}), both={}
    ),
    Pair("sliding window", other=overridden(sliding_window=64, layer_types=["sliding_attention"] * 3)),
    Pair("longrope across", {"max_model_len": 2048}, {"max_model_len": 4096}, model="longrope"),
    Pair("dynamic rope", {"max_model_len": 2048}, {"max_model_len": 4096}, model="dynamic"),
    Pair("quantisation", other={"quantization": "fp8"}, both=HALF),
    Pair("online or not", other={"quantization_config": {"linear": "fp8_per_tensor"}, **ONLINE}, both=HALF),
    Pair(
        "online, of linear layers",
        {"quantization_config": {"linear": "fp8_per_tensor"}},
        {"quantization_config": {"linear": "fp8_per_block"}},
        ONLINE,
    ),
    Pair(
        "online, by layer",
        {"quantization_config": {"targets": {"re:.*layers.0.*": "fp8_per_tensor"}}},
        {"quantization_config": {"targets": {"re:.*layers.1.*": "fp8_per_tensor"}}},
        ONLINE,
    ),
    Pair(
        "online, but for a layer",
        {"quantization_config": {"linear": "fp8_per_tensor"}},
        {"quantization_config": {"linear": "fp8_per_tensor", "ignore": ["model.layers.0.mlp.down_proj"]}},
        ONLINE,
    ),
    Pair("type of adapters", {"lora_dtype": "auto"}, {"lora_dtype": "bfloat16"}, {"enable_lora": True}),
    Pair(
        "part that adapters change",
        other={"lora_target_modules": ["q_proj"]},
        both={"enable_lora": True},
    ),
    Pair("what a platform is told", other={"additional_config": {"fast": True}}),
    Pair("type of inputs", environment={"VLLM_MARLIN_INPUT_DTYPE": "int8"}),
]

TOGETHER = [
    Pair("context", other={"max_model_len": 4096}),
    Pair("nothing", {"seed": 1}, {"seed": 2}),
    Pair("memory", other={"kv_cache_memory_bytes": 16 << 20, "max_num_seqs": 2, "seed": 7}),
    Pair("chunks", other={"max_num_batched_tokens": 96, "max_model_len": 2048}),
    Pair("without its own cache", other={"enable_prefix_caching": False}),
    Pair("adapters served", other={"enable_lora": True}),
    Pair("code of the model", other={"model_impl": "transformers"}),
    Pair("longrope, short", {"max_model_len": 1024}, {"max_model_len": 2048}, model="longrope"),
    Pair("longrope, long", {"max_model_len": 3072}, {"max_model_len": 4096}, model="longrope"),
    Pair("layers in any order", *({"kv_cache_dtype_skip_layers": list(each)} for each in ("02", "20")), FP8),
]

# Apart in the form of their bytes, which only an engine tells.
FORMS = [{"kv_cache_dtype_skip_layers": list(layers)} for layers in ("", "0", "1")]


@dataclass
class Engines:
    bed: Bed
    folder: Path
    _known: dict[str, dict[str, Any]] = field(default_factory=dict)

    def run(
        self, args: dict[str, Any], prompts: list[list[int]], *, pool: bool, environment: Any = None
    ) -> dict[str, Any]:
        given = {**args, "kv_transfer_config": KV_CONFIG} if pool else args
        answer: dict[str, Any] = self.bed.call(
            "run", args=given, environment=environment or {}, prompts=prompts, max_tokens=TOKENS
        )
        return answer

    def configured(self, args: dict[str, Any], environment: Any = None) -> dict[str, Any]:
        name = json.dumps([args, environment])
        if name not in self._known:
            self._known[name] = self.bed.call("configured", args=args, environment=environment or {})
        return self._known[name]


@pytest.fixture(scope="module")
def engines(vllm_python: str) -> Iterator[Engines]:
    with bed_with_node(vllm_python) as (bed, folder):
        for name, (kind, config) in MODELS.items():
            bed.call("make_model", path=str(folder / name), kind=kind, config=config)
        yield Engines(bed, folder)


def assert_equal_answers(engines: Engines, pair: Pair, seed: int) -> None:
    """What ``one`` stored, ``other`` takes, and answers as it does alone."""
    one, other = pair.args(engines.folder)
    prompts = [make_prompt(seed + length, length) for length in PROMPT_TOKENS]
    stored = engines.run(one, prompts, pool=True)
    taken = engines.run(other, prompts, pool=True, environment=pair.environment)
    # Twice, because the second time it takes them from its own cache, with the same roundings.
    alone = engines.run(other, prompts * 2, pool=False, environment=pair.environment)
    assert stored["mark"] == taken["mark"], "the form of the bytes tells them apart: the pair belongs there"
    again = alone["outputs"][len(prompts) :]
    for with_pool, without, length in zip(taken["outputs"], again, PROMPT_TOKENS, strict=True):
        assert with_pool["pool"] >= length - 2 * 32
        assert with_pool["tokens"] == without["tokens"]
        differences = zip(with_pool["chances"], without["chances"], strict=True)
        assert max(abs(one - two) for one, two in differences) < CHANCE_DIFFERENCE_MAX


def test_every_argument_is_known(engines: Engines) -> None:
    """A vLLM with a field that connectors/vllm/identity_arguments.py does not know: find out whether it
    changes the numbers of the KV, and say so there and in docs/keys.md."""
    found = engines.bed.call("fields", args={"model": str(engines.folder / "llama")})
    assert found["arguments"] == {}, "an engine as it comes has nothing that counts"
    if not found["version"].startswith(LOOKED_AT):
        return  # what others have beside counts when it is set
    sections = {*arguments.COUNTED, *arguments.COUNTED_WHOLE, *arguments.LEFT_OUT_SECTIONS}
    assert set(found["sections"]) - sections == set()
    for section, names in found["fields"].items():
        known = {*arguments.COUNTED[section], *arguments.LEFT_OUT[section]}
        assert set(names) - known == set(), section
    page = DOCS.read_text()
    for section in arguments.LEFT_OUT:
        for name in (*arguments.COUNTED[section], *arguments.LEFT_OUT[section]):
            assert f"`{name}`" in page, f"docs/keys.md does not say whether {section}.{name} counts"


def test_what_changes_the_numbers_tells_engines_apart(engines: Engines) -> None:
    for pair in APART:
        one, other = pair.args(engines.folder)
        try:
            marks = [engines.configured(one), engines.configured(other, pair.environment)]
        except EngineFailed as error:
            if "unexpected keyword argument" in str(error.causes):
                continue  # an older vLLM
            raise
        assert marks[0]["mark"] != marks[1]["mark"], pair.name


def test_what_does_not_keeps_them_together(engines: Engines) -> None:
    for pair in TOGETHER:
        one, other = pair.args(engines.folder)
        marks = [engines.configured(one), engines.configured(other, pair.environment)]
        assert marks[0] == marks[1], pair.name
        assert not marks[0]["refusal"]


def test_types_by_layer_tell_engines_apart(engines: Engines) -> None:
    """vLLM takes skipped layers by number; engines with other lists have KV of other types and sizes."""
    base = {"model": str(engines.folder / "llama"), **FP8}
    try:
        marks = [engines.run({**base, **form}, [], pool=True)["mark"] for form in FORMS]
    except EngineFailed as error:
        if "AVX-512" not in str(error.causes):
            raise
        pytest.skip("vLLM keeps no FP8 KV cache on this CPU: it has neither AVX-512 nor AMX")
    assert len(set(marks)) == len(FORMS)


def test_a_backend_that_cannot_continue_serves_without_the_pool(engines: Engines) -> None:
    """vLLM's reference backend for MLA on a CPU answers wrongly with context."""
    args = {"model": str(engines.folder / "mla"), "attention_backend": "CPU_MLA", "block_size": 16}
    answer = engines.run(args, [make_prompt(5, 300)], pool=True)
    assert "without chunked prefill and without prefix caching" in answer["refusal"]
    assert "moonpool: this engine runs without the pool: vLLM runs this MLA model" in engines.bed.logged()


def test_positions_that_depend_on_the_batch_are_not_pooled(engines: Engines) -> None:
    args = {"model": str(engines.folder / "longrope"), "model_impl": "transformers"}
    assert "no function of the prompt" in engines.configured(args)["refusal"]
    assert not engines.configured({**args, "model": str(engines.folder / "llama")})["refusal"]


def test_engines_of_one_fingerprint_answer_alike(engines: Engines, rng: Any) -> None:
    (pair,) = (pair for pair in TOGETHER if pair.name == "chunks")
    assert_equal_answers(engines, pair, rng.randrange(1 << 30))


@pytest.mark.heavy
@pytest.mark.parametrize("pair", TOGETHER, ids=lambda pair: pair.name)
def test_all_pairs_of_one_fingerprint_answer_alike(engines: Engines, rng: Any, pair: Pair) -> None:
    assert_equal_answers(engines, pair, rng.randrange(1 << 30))


@pytest.mark.heavy
def test_mla_where_vllm_continues(engines: Engines, rng: Any) -> None:
    """With AMX vLLM leaves prefix caching on: what it stands for is then asked of the pool as well."""
    args = {"model": str(engines.folder / "mla"), **HALF}
    if engines.configured(args)["refusal"]:
        pytest.skip("this machine has no AMX, so vLLM has no MLA that continues")
    try:
        assert_equal_answers(engines, Pair("mla", both=HALF, model="mla"), rng.randrange(1 << 30))
    except EngineFailed as error:
        pytest.skip(f"vLLM does not serve this model here ({error.causes})")
