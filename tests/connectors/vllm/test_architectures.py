"""The architectures that vLLM runs, one tiny model of random weights each: what one engine stores, another
loads, and both answer as a plain engine does; or the connector says why it refuses the model, and the engine
answers all the same.

Those that nothing else covers run always, all of them with HEAVY=1. docs/engines.md has the table."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.connectors.vllm.configs import LLAMA
from tests.connectors.vllm.conftest import KV_CONFIG, make_prompt
from tests.connectors.vllm.node_objects import assert_equal, difference
from tests.connectors.vllm.processes import Bed, EngineFailed, bed_with_node

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

DOCS = Path(__file__).parents[3] / "docs" / "engines.md"
LOOKED_AT = "0.32"  # the vLLM that the table below is of; another one may lack some of it
CHANCE_DIFFERENCE_MIN = 1e-3  # that other tokens make in the blocks which are loaded
BLOCK = 32  # tokens
PROMPT_TOKENS = 300
CHANGED = slice(7 * BLOCK, 9 * BLOCK)  # the last blocks that are loaded, which windows look at too
TOKENS = 8
WINDOW = 64
ENGINE = {"max_model_len": 512, "max_num_batched_tokens": 512, "kv_cache_memory_bytes": 16 << 20}

SHAPE = {**LLAMA, "num_hidden_layers": 2}
SIZE = {**SHAPE, "head_dim": 32}
PLAIN_HEADS = {**SIZE, "num_key_value_heads": 4}
GPT = {"vocab_size": 260, "n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 2048}
GPT |= {"initializer_range": 0.08, "bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 258}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
SMALL_EXPERTS = {**EXPERTS, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
SLIDING, WHOLE, LINEAR = "sliding_attention", "full_attention", "linear_attention"
WINDOWS = {"sliding_window": WINDOW, "layer_types": [SLIDING, WHOLE]}
GEMMA = {**SIZE, "query_pre_attn_scalar": 32, "tie_word_embeddings": True}
LATENT = {
    **SHAPE,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 64,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 2,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
}
MAMBA = {"mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2}
MAMBA2 = {**MAMBA, "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_chunk_size": 64}
# vLLM's kernels of Mamba-2 on CPUs keep no states at block boundaries, and hybrids ask for them by default.
NO_CHECKPOINTS = {"enable_prefix_caching": False}
# Gated delta nets, whose kernels on CPUs want bfloat16; states small enough for blocks of 96 tokens.
DELTA = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
DELTA |= {"linear_num_key_heads": 1, "linear_num_value_heads": 2}
BFLOAT16 = {"dtype": "bfloat16"}
NO_SNAPSHOTS = "this engine runs with mamba_cache_mode none"
OWN_STEPS = "no function of the prompt"
NO_CONTEXT = "without chunked prefill and without prefix caching"


@dataclass(frozen=True)
class Architecture:
    """A model of transformers. refusal: what the connector says, as a regular expression; "": it pools.
    fails: what vLLM says, which does not run it on a CPU. always: runs without HEAVY=1, too. hits: tokens of
    which prefixes that are found are multiples."""

    kind: str
    config: dict[str, Any]
    args: dict[str, Any] = field(default_factory=dict)
    refusal: str = ""
    fails: str = ""
    always: bool = False
    hits: int = BLOCK


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", SIZE),
    "qwen2": Architecture("qwen2", SIZE),
    "qwen3": Architecture("qwen3", SIZE),
    "qwen2_moe": Architecture("qwen2_moe", {**SIZE, **SMALL_EXPERTS}),
    "qwen3_moe": Architecture("qwen3_moe", {**SIZE, **SMALL_EXPERTS}),
    "mistral": Architecture("mistral", {**SIZE, "sliding_window": WINDOW}),
    "mixtral": Architecture("mixtral", {**SIZE, **EXPERTS}),
    "gemma": Architecture("gemma", GEMMA),
    "gemma2": Architecture("gemma2", {**GEMMA, **WINDOWS}),
    "gemma3": Architecture("gemma3_text", {**GEMMA, **WINDOWS}),
    "gpt_oss": Architecture("gpt_oss", {**SIZE, **EXPERTS, **WINDOWS}),
    "phi": Architecture("phi", PLAIN_HEADS),
    "phi3": Architecture("phi3", SIZE),
    "phimoe": Architecture("phimoe", {**SIZE, **EXPERTS}, fails="too many values to unpack"),
    "gpt2": Architecture("gpt2", GPT),
    "gpt_bigcode": Architecture("gpt_bigcode", {**GPT, "multi_query": True}),
    "gpt_neox": Architecture("gpt_neox", PLAIN_HEADS),
    "gptj": Architecture("gptj", {**GPT, "rotary_dim": 16}),
    "bloom": Architecture("bloom", {**GPT, "hidden_size": 128}),
    "falcon": Architecture("falcon", {**SHAPE, "multi_query": True, "alibi": False}),
    "mpt": Architecture(
        "mpt",
        {"vocab_size": 260, "d_model": 128, "n_heads": 4, "n_layers": 2, "max_seq_len": 2048},
        fails="was supported in vLLM until v0.28.0",
    ),
    "opt": Architecture("opt", {**PLAIN_HEADS, "ffn_dim": 256, "word_embed_proj_dim": 128, "init_std": 0.08}),
    "stablelm": Architecture("stablelm", SIZE),
    "olmo": Architecture("olmo", SIZE),
    "olmo2": Architecture("olmo2", SIZE),
    "olmo3": Architecture("olmo3", {**SIZE, **WINDOWS}),
    "olmoe": Architecture("olmoe", {**SIZE, **EXPERTS}),
    "granite": Architecture("granite", SIZE),
    "granitemoe": Architecture("granitemoe", {**SIZE, **EXPERTS}),
    "cohere": Architecture("cohere", {**SIZE, "logit_scale": 1.0}),
    "cohere2": Architecture("cohere2", {**SIZE, **WINDOWS, "logit_scale": 1.0}),
    "starcoder2": Architecture("starcoder2", SIZE),
    "glm": Architecture("glm", SIZE),
    "glm4": Architecture("glm4", SIZE),
    "nemotron": Architecture("nemotron", SIZE),
    "exaone4": Architecture("exaone4", {**SIZE, **WINDOWS, "sliding_window_pattern": 2}),
    "ernie4_5": Architecture("ernie4_5", SIZE),
    "seed_oss": Architecture("seed_oss", SIZE),
    "smollm3": Architecture("smollm3", SIZE),
    "llama4": Architecture(
        "llama4_text",
        {
            **SIZE,
            **EXPERTS,
            "attention_chunk_size": WINDOW,
            "layer_types": ["chunked_attention", WHOLE],
            "no_rope_layers": [1, 0],
            "interleave_moe_layer_step": 1,
            "intermediate_size_mlp": 256,
            "num_experts_per_tok": 1,
        },
        always=True,
    ),
    "gemma3n": Architecture(
        "gemma3n_text",
        {
            **GEMMA,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "layer_types": [SLIDING, WHOLE, SLIDING, WHOLE],
            "sliding_window": WINDOW,
            "hidden_size_per_layer_input": 32,
            "vocab_size_per_layer_input": 260,
            "laurel_rank": 8,
            "activation_sparsity_pattern": [0.0] * 4,
            "intermediate_size": [256] * 4,
        },
    ),
    "gemma4": Architecture(
        "gemma4_text",
        {
            **GEMMA,
            **WINDOWS,
            "global_head_dim": 64,
            "hidden_size_per_layer_input": 32,
            "vocab_size_per_layer_input": 260,
        },
        hits=2 * BLOCK,  # heads of two sizes: a block of windows has as many bytes and twice the tokens
    ),
    "deepseek_v2": Architecture("deepseek_v2", LATENT, refusal=NO_CONTEXT),
    "deepseek_v3": Architecture("deepseek_v3", LATENT, refusal=NO_CONTEXT),
    "mamba": Architecture(
        "mamba", {"vocab_size": 260, "hidden_size": 128, "num_hidden_layers": 2}, fails="selective_scan_fwd"
    ),
    "mamba2": Architecture(
        "mamba2",
        {
            "vocab_size": 260,
            "hidden_size": 128,
            "num_hidden_layers": 2,
            "num_heads": 8,
            "head_dim": 32,
            "state_size": 16,
            "n_groups": 1,
            "chunk_size": 64,
        },
        args=NO_CHECKPOINTS,
        refusal=NO_SNAPSHOTS,
        always=True,
    ),
    "jamba": Architecture(
        "jamba",
        {
            **SIZE,
            **EXPERTS,
            **MAMBA,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
        },
        fails="selective_scan_fwd",
    ),
    "bamba": Architecture(
        "bamba",
        {**SIZE, **MAMBA2, "attn_layer_indices": [1]},
        fails="does not dispatch through the Transformers attention interface",
    ),
    "falcon_h1": Architecture(
        "falcon_h1", {**SIZE, **MAMBA2, "mamba_d_ssm": 256}, args=NO_CHECKPOINTS, refusal=NO_SNAPSHOTS
    ),
    "granitemoehybrid": Architecture(
        "granitemoehybrid",
        {**SIZE, **EXPERTS, **MAMBA2, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 64},
        args=NO_CHECKPOINTS,
        refusal=NO_SNAPSHOTS,
    ),
    "nemotron_h": Architecture(
        "nemotron_h",
        {
            **SIZE,
            "layers_block_type": ["mamba", "attention", "mlp"],
            "num_hidden_layers": 3,
            "ssm_state_size": 16,
            "mamba_num_heads": 8,
            "mamba_head_dim": 32,
            "n_groups": 1,
            "chunk_size": 64,
        },
        args=NO_CHECKPOINTS,
        refusal=NO_SNAPSHOTS,
    ),
    "lfm2": Architecture(
        "lfm2",
        {
            **SIZE,
            "conv_dim": 128,
            "block_dim": 128,
            "layer_types": ["conv", WHOLE],
            "block_auto_adjust_ff_dim": False,
        },
        refusal=OWN_STEPS,
    ),
    "qwen3_next": Architecture(
        "qwen3_next",
        {
            **SIZE,
            **SMALL_EXPERTS,
            "layer_types": [LINEAR, WHOLE],
            **DELTA,
        },
        args={**BFLOAT16, "mamba_ssm_cache_dtype": "bfloat16"},  # else the processor decides, and the block
    ),
    "olmo_hybrid": Architecture(
        "olmo_hybrid",
        {**SIZE, "layer_types": [LINEAR, WHOLE], **DELTA},
        fails="has no attribute 'set_allocator'",
    ),
}


def named(fails: bool) -> list[Any]:
    """The parameters of a test of all architectures that vLLM runs here, or of the others."""
    return [
        pytest.param(name, marks=[] if each.always else [pytest.mark.heavy])
        for name, each in ARCHITECTURES.items()
        if bool(each.fails) == fails
    ]


@dataclass
class Engines:
    bed: Bed
    folder: Path
    version: str

    def run(self, name: str, prompts: list[list[int]], *, pool: bool) -> dict[str, Any]:
        each = ARCHITECTURES[name]
        path = str(self.folder / name)
        self.bed.call("make_model", path=path, kind=each.kind, config=each.config)
        args = {"model": path, **ENGINE, **each.args}
        if pool:
            args["kv_transfer_config"] = KV_CONFIG
        return self.bed.run(args, prompts, max_tokens=TOKENS)


@pytest.fixture(scope="module")
def engines(vllm_python: str) -> Iterator[Engines]:
    with bed_with_node(vllm_python) as (bed, folder):
        yield Engines(bed, folder, bed.call("version"))


@pytest.mark.parametrize("name", named(fails=False))
def test_answers_are_those_of_a_plain_engine(engines: Engines, rng: Any, name: str) -> None:
    seed = rng.randrange(1 << 30)
    prompt = make_prompt(seed, PROMPT_TOKENS)
    other = list(prompt)
    other[CHANGED] = make_prompt(seed + 1, len(other[CHANGED]))
    prompts = [prompt, other, make_prompt(seed + 2, 200)]

    try:
        alone = engines.run(name, prompts, pool=False)["outputs"]
    except EngineFailed as error:
        if engines.version.startswith(LOOKED_AT):
            raise
        pytest.skip(f"vLLM {engines.version} does not run it ({error.causes})")
    assert difference(alone[0], alone[1]) > CHANCE_DIFFERENCE_MIN, "the answer does not depend on the KV"
    first = engines.run(name, prompts, pool=True)
    assert_equal(first["outputs"], alone)
    if refusal := ARCHITECTURES[name].refusal:
        assert re.search(refusal, first["refusal"])
        assert f"this engine runs without the pool: {first['refusal']}" in engines.bed.logged()
        assert first["loaded_bytes"] == 0
        return
    assert first["refusal"] == ""
    second = engines.run(name, prompts, pool=True)
    assert second["mark"] == first["mark"]
    taken = [(each["pool"], each["local"]) for each in second["outputs"]]
    hits = ARCHITECTURES[name].hits
    long, short = (PROMPT_TOKENS - 1) // hits * hits, 199 // hits * hits
    assert [pool + local for pool, local in taken] == [long, long, short]
    assert taken[0][1] == taken[2][1] == 0 < taken[1][0]
    assert_equal(second["outputs"], alone)


@pytest.mark.parametrize("name", named(fails=True))
def test_what_vllm_does_not_run_here(engines: Engines, name: str) -> None:
    """So that the table has an architecture as soon as vLLM runs it."""
    if not engines.version.startswith(LOOKED_AT):
        pytest.skip(f"the table is of vLLM {LOOKED_AT}")
    with pytest.raises(EngineFailed) as failed:
        engines.run(name, [make_prompt(1, PROMPT_TOKENS)], pool=False)
    assert re.search(ARCHITECTURES[name].fails, "\n".join(failed.value.causes))


def test_the_docs_say_what_became_of_each() -> None:
    _, _, section = DOCS.read_text().partition("## Architectures on vLLM")
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    for name, each in ARCHITECTURES.items():
        (row,) = (line for line in rows if f"`{name}`" in line)
        result = "not run" if each.fails else "refused" if each.refusal else "equal"
        assert row.split(" | ")[2].startswith(result), name
