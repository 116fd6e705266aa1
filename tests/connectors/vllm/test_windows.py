"""Real vLLM engines of models with sliding windows: what one stores, another loads, only as much as its
layers look at, and answers as it does alone."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moonpool.connectors.vllm.reach import FULL, Reach
from tests.connectors.vllm.configs import LLAMA
from tests.connectors.vllm.conftest import ASK, KV_CONFIG, make_prompt, tokens_of
from tests.connectors.vllm.node_objects import NodeObjects, assert_equal
from tests.connectors.vllm.processes import Bed, Engine, bed_with_node
from tests.ports import held_ports

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

BLOCK = 32  # tokens
WINDOW = 64
KV_HEADS, HEAD_SIZE = 2, 32
TOKEN_BYTES = 2 * KV_HEADS * HEAD_SIZE * 4  # of one layer: K and V in float32
BLOCK_BYTES = TOKEN_BYTES * BLOCK
TOKENS = 8
CHUNKS = {"max_num_batched_tokens": 96}  # prompts of several steps, in which the window moves on
SIZE = {**LLAMA, "head_dim": HEAD_SIZE, "sliding_window": WINDOW}
SLIDING, WHOLE = "sliding_attention", "full_attention"
GEMMA = {**SIZE, "num_hidden_layers": 4, "query_pre_attn_scalar": HEAD_SIZE, "tie_word_embeddings": True}
THREE_OF_FOUR = {"layer_types": [SLIDING, SLIDING, SLIDING, WHOLE]}
GEMMA4 = {**GEMMA, **THREE_OF_FOUR, "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 260}
GEMMA4 |= {"global_head_dim": 2 * HEAD_SIZE}
ONE_HEAD = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}


@dataclass(frozen=True)
class Model:
    """full, sliding: the layers that look at everything, and those with a window. blocks, bytes: tokens of a
    block, and bytes of a token and layer, of the full layers and of the others."""

    kind: str
    config: dict[str, Any]
    full: tuple[int, ...]
    sliding: tuple[int, ...]
    window: int = WINDOW
    blocks: tuple[int, int] = (BLOCK, BLOCK)
    bytes: tuple[int, int] = (TOKEN_BYTES, TOKEN_BYTES)

    @property
    def hits(self) -> int:
        """Tokens of which hits are multiples."""
        return math.lcm(*self.blocks)

    def cut(self, tokens: int) -> int:
        """The longest hit of a prompt of so many tokens."""
        return (tokens - 1) // self.hits * self.hits


MODELS: dict[str, Model] = {
    "gemma3": Model("gemma3_text", {**GEMMA, **THREE_OF_FOUR}, (3,), (0, 1, 2)),
    "gemma2": Model("gemma2", {**GEMMA, "layer_types": [SLIDING, WHOLE] * 2}, (1, 3), (0, 2)),
    "mistral": Model("mistral", SIZE, (), (0, 1, 2)),
    "gpt_oss": Model(
        "gpt_oss",
        {**SIZE, "layer_types": [SLIDING, WHOLE, SLIDING], "num_local_experts": 4, "num_experts_per_tok": 2},
        (1,),
        (0, 2),
    ),
    # The full layers' heads are twice as large: vLLM gives the others blocks of twice the tokens.
    "gemma4": Model(
        "gemma4_text",
        GEMMA4,
        (3,),
        (0, 1, 2),
        blocks=(BLOCK, 2 * BLOCK),
        bytes=(2 * TOKEN_BYTES, TOKEN_BYTES),
    ),
    # One full head of twice the size: blocks are alike, and the groups have unlike numbers of heads.
    "gemma4_heads": Model("gemma4_text", {**GEMMA4, **ONE_HEAD}, (3,), (0, 1, 2)),
    # Unlike heads, and the full layers' blocks have twice the tokens; a window needs half of such a block.
    "gemma4_both": Model(
        "gemma4_text",
        {**GEMMA4, **ONE_HEAD, "num_key_value_heads": 4, "sliding_window": BLOCK},
        (3,),
        (0, 1, 2),
        window=BLOCK,
        blocks=(2 * BLOCK, BLOCK),
        bytes=(TOKEN_BYTES, 2 * TOKEN_BYTES),
    ),
}


@dataclass
class Engines:
    bed: Bed
    folder: Path

    def model(self, name: str) -> Path:
        path, model = self.folder / name, MODELS[name]
        self.bed.call("make_model", path=str(path), kind=model.kind, config=model.config)
        return path

    def run(self, model: str, prompts: list[list[int]], *, pool: bool, **args: Any) -> dict[str, Any]:
        how = {"together": args.pop("together", False), "max_tokens": args.pop("max_tokens", TOKENS)}
        given = {"model": str(self.model(model)), **CHUNKS, **args}
        if pool:
            given.setdefault("kv_transfer_config", KV_CONFIG)
        return self.bed.run(given, prompts, **how)


@pytest.fixture(scope="module")
def engines(vllm_python: str) -> Iterator[Engines]:
    with bed_with_node(vllm_python) as (bed, folder):
        yield Engines(bed, folder)


def needed_bytes(model: Model, tokens: int, local: int = 0) -> int:
    """What the layers of a model look at in so many tokens, without those that are local."""
    total = 0
    kinds = zip((model.full, model.sliding), (FULL, Reach(window=model.window)), strict=True)
    for (layers, reach), block, token_bytes in zip(kinds, model.blocks, model.bytes, strict=True):
        first = int(reach.first_block(np.array(tokens // block), block)) * block
        total += len(layers) * token_bytes * (tokens - max(first, local))
    return total


class Objects(NodeObjects):
    """Of a model of which these layers look at everything."""

    def __init__(self, runtime: Path, mark: str, full_layers: tuple[int, ...]) -> None:
        super().__init__(runtime, mark, BLOCK)
        self._full_layers = full_layers

    def one(self, prompt: list[int], end: int, *, window: bool) -> bytes:
        """The last object of a block that ends behind so many tokens, in a group of layers with a window or
        in the other."""
        first_layers = self.of_block(prompt, end // BLOCK - 1)
        return max(name for name in first_layers if (first_layers[name] not in self._full_layers) == window)


def check_model(engines: Engines, name: str, seed: int, **args: Any) -> None:
    model = MODELS[name]
    lengths = (31, 63, 64, 65, 1000)
    prompts = [make_prompt(seed + length, length) for length in lengths]
    longest = prompts[-1]
    branch = longest[:330] + make_prompt(seed + 1, 200)
    lost, gap, short, cut = (make_prompt(seed + 10 * number, 300) for number in (1, 2, 3, 4))
    first = engines.run(name, [*prompts, lost, gap, short, cut], pool=True, **args)
    assert first["refusal"] == ""
    last = model.cut(300)
    before, full_block = last - model.hits, model.blocks[0]
    objects = Objects(engines.folder / "run", first["mark"], model.full)
    objects.remove(objects.one(lost, last, window=True))
    objects.remove(objects.one(gap, before + full_block if model.full else last, window=not model.full))
    objects.shorten(objects.one(short, last, window=True))
    objects.shorten(objects.one(cut, last, window=not model.full))
    objects.close()

    asked = [branch, longest[:650], *prompts, lost, gap, short, cut]
    second = engines.run(name, asked, pool=True, **args)

    assert second["mark"] == first["mark"]
    taken = [(each["pool"], each["local"]) for each in second["outputs"]]
    found = [320, 640, *map(model.cut, lengths), before, before, 0, 0]
    assert [pool + local for pool, local in taken] == found
    assert taken[6] == (model.cut(1000) - 640, 640)  # it had the beginning itself
    assert [each["errors"] > 0 for each in second["outputs"]] == [False] * 9 + [True] * 2
    need = sum(needed_bytes(model, pool + local, local) for pool, local in taken)
    failed = 2 * needed_bytes(model, last)
    assert need <= second["loaded_bytes"] <= 1.1 * (need + failed)
    alone = engines.run(name, asked, pool=False, **args)
    assert_equal(second["outputs"], alone["outputs"])
    assert_equal(first["outputs"], alone["outputs"][2:])


def test_full_and_window_layers(engines: Engines, rng: Any) -> None:
    check_model(engines, "gemma3", rng.randrange(1 << 30))


def test_groups_with_unlike_blocks(engines: Engines, rng: Any) -> None:
    check_model(engines, "gemma4", rng.randrange(1 << 30))


@pytest.mark.heavy
@pytest.mark.parametrize("model", [name for name in MODELS if name not in ("gemma3", "gemma4")])
def test_other_models(engines: Engines, rng: Any, model: str) -> None:
    check_model(engines, model, rng.randrange(1 << 30))


@pytest.mark.heavy
def test_ranks_of_which_some_hold_copies(engines: Engines, vllm_python: str, rng: Any) -> None:
    """Two ranks with half of the windows' heads each, and both with the one full head. Engines of one rank
    have other objects."""
    lengths = (200, 300)
    prompts = [make_prompt(rng.randrange(1 << 30), length) for length in lengths]
    expected = engines.run("gemma4_both", prompts, pool=False)
    for ranks, pooled in ((2, False), (2, True), (1, False)):
        engine = Engine(
            vllm_python,
            engines.model("gemma4_both"),
            engines.folder / "run",
            engines.folder / f"copies-{ranks}-{pooled}",
            kv_transfer_config=KV_CONFIG,
            skip_tokenizer_init=True,
            tensor_parallel_size=ranks,
            **CHUNKS,
        )
        try:
            answer = engine.call("generate", prompts=prompts)
            assert set(engine.call("drain").values()) == {0}
        finally:
            engine.close()
        assert tokens_of(answer) == tokens_of(expected)
        found = [each["pool"]["pool_tokens"] for each in answer["outputs"]]
        # A rank's windows have as many bytes as its copy, so that its blocks are alike.
        assert found == [(length - 1) // BLOCK * BLOCK * pooled for length in lengths]


@pytest.mark.heavy
@pytest.mark.parametrize("model", ["gemma2", "gemma4"])
def test_preemptions(engines: Engines, rng: Any, model: str) -> None:
    """With a KV cache that is too small for all answers, requests are preempted and ask the pool again."""
    prompts = [make_prompt(rng.randrange(1 << 30), 100) for _ in range(6)]
    options = {"lease_s": 6.0, "compute_if_faster": False, "save_decode": True}
    small = {
        "kv_cache_memory_bytes": 60 * 2 * BLOCK_BYTES,
        "kv_transfer_config": {**KV_CONFIG, "kv_connector_extra_config": options},
        "max_tokens": 250,
    }
    alone = engines.run(model, prompts, pool=False, max_tokens=250)
    for _ in range(2):
        answer = engines.run(model, prompts, pool=True, together=True, max_model_len=600, **small)
        assert answer["preemptions"] > 0
        assert_equal(answer["outputs"], alone["outputs"])
    assert sum(each["pool"] for each in answer["outputs"]) > 0


@pytest.mark.heavy
@pytest.mark.parametrize("model", ["gemma3", "gemma4"])
def test_aborts(engines: Engines, vllm_python: str, rng: Any, model: str) -> None:
    prompts = [make_prompt(rng.randrange(1 << 30), 700) for _ in range(4)]
    config = {"kv_transfer_config": KV_CONFIG, "max_num_batched_tokens": 96, "skip_tokenizer_init": True}
    engine = Engine(
        vllm_python,
        engines.model(model),
        engines.folder / "run",
        engines.folder / f"aborts-{model}",
        **config,
    )
    try:
        first = tokens_of(engine.call("generate", prompts=prompts))
        for stage in ("looking", "loading", "loaded", "running"):
            engine.call("drain")
            assert engine.call("reset_prefix_cache")
            answer = engine.call("generate", prompts=prompts, abort=[1, 2], abort_when=stage)
            tokens = tokens_of(answer)
            assert (tokens[0], tokens[3]) == (first[0], first[3])
            assert answer["outputs"][0]["pool"]["pool_tokens"] == MODELS[model].cut(700)
            left = engine.call("drain")
            assert all(count == 0 for count in left.values()), (stage, left)
    finally:
        engine.close()


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("model", "prefill_ranks", "decode_ranks"),
    [
        *(("gemma3", 1, 1), ("mistral", 1, 1), ("gemma3", 2, 1), ("gemma3", 1, 2)),
        *(("gemma4", 1, 1), ("gemma4_both", 1, 1), ("gemma4", 2, 1), ("gemma4_both", 2, 2)),
    ],
)
def test_hand_overs(
    engines: Engines, vllm_python: str, rng: Any, model: str, prefill_ranks: int, decode_ranks: int
) -> None:
    """Without a pool, in both forms: what decode has of a prompt is its hand-over and its own cache's. ranks:
    tensor-parallel ones."""
    # At the end of the request of 96 tokens a block has left the window, of which decode needs a token.
    lengths = (33, 64, 65, 95, 96, 97, 300, 1000)
    prompts = [make_prompt(rng.randrange(1 << 30), length) for length in lengths]
    alone = engines.run(model, prompts, pool=False)
    with ExitStack() as stack:
        (port,) = stack.enter_context(held_ports(1))
        alone_in = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moonpool-")))

        def engine(name: str, ranks: int, **extra: Any) -> Engine:
            config = {**KV_CONFIG, "kv_connector_extra_config": {"lease_s": 30.0, **extra}}
            made = Engine(
                vllm_python,
                engines.model(model),
                alone_in,
                engines.folder / f"{model}-{name}-{ranks}",
                kv_transfer_config=config,
                skip_tokenizer_init=True,
                tensor_parallel_size=ranks,
                **CHUNKS,
            )
            stack.callback(made.close)
            return made

        prefill, decode = (
            engine("prefill", prefill_ranks, bootstrap_port=port),
            engine("decode", decode_ranks),
        )

        def check(answer: dict[str, Any]) -> None:
            for output, expected, length in zip(answer["outputs"], alone["outputs"], lengths, strict=True):
                assert output["tokens"] == expected["tokens"]
                assert output["pool"]["handed_over_tokens"] == length - 1
            assert set(decode.call("drain").values()) == {0}
            assert set(prefill.call("drain", timeout_s=60).values()) == {0}

        prefilled = prefill.call("generate", prompts=prompts, max_tokens=1, params=[ASK] * len(prompts))
        params = [output["params"] for output in prefilled["outputs"]]
        check(decode.call("generate", prompts=prompts, params=params))
        for each in (prefill, decode):
            assert each.call("reset_prefix_cache")
        names = [f"transfer-{length}" for length in lengths]
        where = {
            "do_remote_prefill": True,
            "remote_engine_id": params[0]["remote_engine_id"],
            "remote_bootstrap_addr": f"http://127.0.0.1:{port}",
        }
        decode.send("generate", prompts=prompts, params=[{**where, "transfer_id": name} for name in names])
        asked = [{"do_remote_decode": True, "transfer_id": name} for name in names]
        prefill.call("generate", prompts=prompts, max_tokens=1, params=asked)
        prefill.send("drain", timeout_s=60)
        answer = decode.receive()
        prefill.receive()
        check(answer)
