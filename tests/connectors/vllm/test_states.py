"""Real vLLM engines of models with states (linear attention): what one stores, another loads, one snapshot of
each group with states, and answers as it does alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.connectors.vllm.configs import LLAMA
from tests.connectors.vllm.conftest import ASK, KV_CONFIG, make_prompt, tokens_of
from tests.connectors.vllm.node_objects import NodeObjects, assert_equal
from tests.connectors.vllm.processes import Bed, Engine, bed_with_node

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

RECOMPUTED_DIFFERENCE_MAX = 0.2  # where a preemption had other steps compute the same in bfloat16
FOREIGN_DIFFERENCE_MIN = 1e-2  # that other states make
KV_HEADS, HEAD_SIZE = 2, 32
TOKEN_BYTES = 2 * KV_HEADS * HEAD_SIZE * 2  # of a layer of attention: K and V in bfloat16
KEY_HEADS, VALUE_HEADS, STATE_SIZE, CONV = 1, 2, 64, 4
# The last inputs of the convolution, and a matrix for each head, in bfloat16.
STATE_BYTES = 2 * ((CONV - 1) * STATE_SIZE * (2 * KEY_HEADS + VALUE_HEADS) + VALUE_HEADS * STATE_SIZE**2)
BLOCK = 96  # tokens, so that the KV of a block is no smaller than a state
TOKENS = 8
LINEAR, WHOLE = "linear_attention", "full_attention"
SIZE = {
    **LLAMA,
    "head_dim": HEAD_SIZE,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "linear_key_head_dim": STATE_SIZE,
    "linear_value_head_dim": STATE_SIZE,
    "linear_num_key_heads": KEY_HEADS,
    "linear_num_value_heads": VALUE_HEADS,
}
LAYERS: dict[str, list[str]] = {
    "two_kinds": [LINEAR, WHOLE],
    "three_of_four": [LINEAR, LINEAR, LINEAR, WHOLE],
}


@dataclass
class Engines:
    bed: Bed
    folder: Path

    def model(self, name: str) -> Path:
        path = self.folder / name
        layers = LAYERS[name]
        config = {**SIZE, "num_hidden_layers": len(layers), "layer_types": layers}
        self.bed.call("make_model", path=str(path), kind="qwen3_next", config=config)
        return path

    def run(self, model: str, prompts: list[list[int]], *, pool: bool, **args: Any) -> dict[str, Any]:
        how = {"together": args.pop("together", False), "max_tokens": args.pop("max_tokens", TOKENS)}
        given = {"model": str(self.model(model)), "dtype": "bfloat16", **args}
        given["mamba_ssm_cache_dtype"] = "bfloat16"  # else the processor decides, and with it the block
        if pool:
            given.setdefault("kv_transfer_config", KV_CONFIG)
        return self.bed.run(given, prompts, **how)


@pytest.fixture(scope="module")
def engines(vllm_python: str) -> Iterator[Engines]:
    with bed_with_node(vllm_python) as (bed, folder):
        yield Engines(bed, folder)


def needed_bytes(model: str, tokens: int, local: int = 0) -> int:
    """What continuing behind so many tokens takes, without what is local: KV, and one snapshot of states."""
    states, full = LAYERS[model].count(LINEAR), LAYERS[model].count(WHOLE)
    if tokens == local:
        return 0
    return full * (tokens - local) * TOKEN_BYTES + states * STATE_BYTES


class Objects(NodeObjects):
    """Of a model with these layers."""

    def __init__(self, runtime: Path, mark: str, layers: list[str]) -> None:
        super().__init__(runtime, mark, BLOCK)
        self._layers = layers

    def of(self, prompt: list[int], block: int, kind: str) -> list[bytes]:
        """The objects of a block, in groups of layers of this kind."""
        found = self.of_block(prompt, block)
        return [name for name, first_layer in found.items() if self._layers[first_layer] == kind]

    def snapshots(self, prompt: list[int]) -> list[int]:
        """The lengths of a prompt, in blocks, of which there are snapshots."""
        last = len(prompt) // BLOCK
        return [block + 1 for block in range(last) if self.of(prompt, block, LINEAR)]


def check_model(engines: Engines, model: str, seed: int, snapshots: list[int], **args: Any) -> None:
    """snapshots: of a prompt of 1,000 tokens, where its steps end, in blocks."""
    prompts = [make_prompt(seed + length, length) for length in (95, 97, 192, 193, 1000)]
    longest = prompts[-1]
    lost, short, cut, wrong = (make_prompt(seed + 10 * number, 482) for number in (1, 2, 3, 4))
    first = engines.run(model, [*prompts, lost, short, cut, wrong], pool=True, **args)
    assert first["refusal"] == ""
    assert "takes part in no hand-over: its model has layers with states" in engines.bed.logged()
    objects = Objects(engines.folder / "run", first["mark"], LAYERS[model])
    assert objects.snapshots(longest) == snapshots
    objects.remove(objects.of(lost, 4, LINEAR)[-1])
    objects.shorten(objects.of(short, 4, LINEAR)[-1])
    objects.shorten(objects.of(cut, 2, WHOLE)[-1])
    for mine, yours in zip(objects.of(wrong, 4, LINEAR), objects.of(cut, 4, LINEAR), strict=True):
        objects.give(mine, of=yours)
    objects.close()

    branch = longest[:600] + make_prompt(seed + 1, 200)
    longer = longest + make_prompt(seed + 2, 200)
    asked = [*prompts, lost, short, cut, branch, longer, wrong]
    second = engines.run(model, asked, pool=True, **args)

    assert second["mark"] == first["mark"]
    taken = [(each["pool"], each["local"]) for each in second["outputs"]]
    before = [BLOCK * max((at for at in snapshots if at <= limit), default=0) for limit in (4, 6)]
    assert [pool for pool, _ in taken] == [0, 96, 96, 192, 960, before[0], 0, 0, before[1], 0, 480]
    assert taken[9] == (0, 960)  # it had the beginning itself
    assert [each["errors"] > 0 for each in second["outputs"]] == [False] * 6 + [True] * 2 + [False] * 3
    need = sum(needed_bytes(model, pool) for pool, _ in taken)
    failed = 2 * needed_bytes(model, 480)
    assert need <= second["loaded_bytes"] <= 1.1 * (need + failed)
    alone = engines.run(model, asked, pool=False, **args)
    assert_equal(second["outputs"][:-1], alone["outputs"][:-1])
    assert_equal(first["outputs"][:5], alone["outputs"][:5])
    # The state of another prompt in the place of its own is seen in the answer, so the others had theirs.
    foreign, own = second["outputs"][-1]["chances"], alone["outputs"][-1]["chances"]
    assert max(abs(one - other) for one, other in zip(foreign, own, strict=True)) > FOREIGN_DIFFERENCE_MIN


def test_steps_that_end_at_several_blocks(engines: Engines, rng: Any) -> None:
    check_model(
        engines, "three_of_four", rng.randrange(1 << 30), [2, 4, 6, 8, 10], max_num_batched_tokens=256
    )


@pytest.mark.heavy
def test_prompts_of_one_step(engines: Engines, rng: Any) -> None:
    """vLLM keeps one snapshot of each, at its last block boundary."""
    check_model(engines, "two_kinds", rng.randrange(1 << 30), [10])


@pytest.mark.heavy
def test_steps_shorter_than_a_block(engines: Engines, rng: Any) -> None:
    check_model(engines, "two_kinds", rng.randrange(1 << 30), list(range(1, 11)), max_num_batched_tokens=64)


@pytest.mark.heavy
def test_preemptions(engines: Engines, rng: Any) -> None:
    """With a KV cache that is too small for all answers, requests are preempted and ask the pool again. What
    they recompute differs by roundings, as in an engine without a pool, which may change a token."""
    prompts = [make_prompt(rng.randrange(1 << 30), 110) for _ in range(4)]
    options = {"lease_s": 6.0, "compute_if_faster": False, "save_decode": True}
    small = {
        "kv_cache_memory_bytes": 18 * BLOCK * TOKEN_BYTES,
        "kv_transfer_config": {**KV_CONFIG, "kv_connector_extra_config": options},
        "max_tokens": 250,
    }
    alone = engines.run("two_kinds", prompts, pool=False, max_tokens=250)
    for _ in range(2):
        answer = engines.run("two_kinds", prompts, pool=True, together=True, max_model_len=600, **small)
        assert answer["preemptions"] > 0
        for one, other in zip(answer["outputs"], alone["outputs"], strict=True):
            same = [mine == yours for mine, yours in zip(one["tokens"], other["tokens"], strict=True)]
            until = same.index(False) + 1 if False in same else len(same)
            differences = zip(one["chances"][:until], other["chances"][:until], strict=True)
            assert max(abs(chance - its) for chance, its in differences) < RECOMPUTED_DIFFERENCE_MAX
            assert until > TOKENS
    assert sum(each["pool"] for each in answer["outputs"]) > 0


@pytest.mark.heavy
def test_answers_together(engines: Engines, rng: Any) -> None:
    """Several requests in one step, with answers that are stored too."""
    options = {"lease_s": 6.0, "compute_if_faster": False, "save_decode": True}
    config = {**KV_CONFIG, "kv_connector_extra_config": options}
    prompts = [make_prompt(rng.randrange(1 << 30), 100 + 37 * number) for number in range(6)]
    how = {"together": True, "max_tokens": 120}
    first = engines.run("three_of_four", prompts, pool=True, kv_transfer_config=config, **how)
    again = [prompt + answer["tokens"] for prompt, answer in zip(prompts, first["outputs"], strict=True)]
    second = engines.run("three_of_four", again, pool=True, kv_transfer_config=config)
    assert all(
        answer["pool"] > len(prompt) for prompt, answer in zip(prompts, second["outputs"], strict=True)
    )
    alone = engines.run("three_of_four", prompts, pool=False, **how)
    assert [one["tokens"] for one in first["outputs"]] == [one["tokens"] for one in alone["outputs"]]


@pytest.mark.heavy
def test_prefill_and_decode_share_by_the_pool(engines: Engines, vllm_python: str, rng: Any) -> None:
    """Nothing is handed over. Aborted loads leave nothing behind."""
    prompts = [make_prompt(rng.randrange(1 << 30), length) for length in (97, 500, 700)]
    with ExitStack() as stack:

        def engine(name: str, **more: Any) -> Engine:
            config = {"dtype": "bfloat16", "max_num_batched_tokens": 256, "skip_tokenizer_init": True}
            config["mamba_ssm_cache_dtype"] = "bfloat16"  # as in Engines.run
            made = Engine(
                vllm_python,
                engines.model("two_kinds"),
                engines.folder / "run",
                engines.folder / f"{name}.log",
                **config,
                **more,
            )
            stack.callback(made.close)
            return made

        alone = tokens_of(engine("alone").call("generate", prompts=prompts))
        prefill = engine("prefill", kv_transfer_config=KV_CONFIG)
        asked = prefill.call("generate", prompts=prompts, max_tokens=1, params=[ASK] * len(prompts))
        assert set(prefill.call("drain").values()) == {0}
        assert "is not handed over: its model has layers with states" in prefill.logged()
        decode = engine("decode", kv_transfer_config=KV_CONFIG)
        params = [output["params"] for output in asked["outputs"]]
        answer = decode.call("generate", prompts=prompts, params=params)
        assert tokens_of(answer) == alone
        assert [output["pool"]["pool_tokens"] for output in answer["outputs"]] == [96, 480, 672]
        for stage in ("looking", "loading", "loaded", "running"):
            assert set(decode.call("drain").values()) == {0}
            assert decode.call("reset_prefix_cache")
            answer = decode.call("generate", prompts=prompts, abort=[1], abort_when=stage)
            assert [tokens_of(answer)[at] for at in (0, 2)] == [alone[at] for at in (0, 2)]
        assert set(decode.call("drain").values()) == {0}
