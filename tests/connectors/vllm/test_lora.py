"""Real vLLM engines with LoRA adapters: an engine finds the pool's KV of an adapter exactly when it serves
the same bytes, under any name."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.demo import tiny_model
from tests.connectors.vllm.conftest import BLOCK_TOKENS, KV_CONFIG, make_prompt, tokens_of, wait_joined
from tests.connectors.vllm.processes import Engine, Node

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

RANK = 8
PROMPT = make_prompt(8_000, 300)
LOADABLE = (len(PROMPT) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def write_adapter(folder: Path, seed: int) -> Path:
    """An adapter of the tiny model that changes keys and values; in the place of what was there."""
    random = np.random.default_rng(seed)
    sizes = {"q_proj": tiny_model.HEADS, "k_proj": tiny_model.KV_HEADS, "v_proj": tiny_model.KV_HEADS}
    tensors = {}
    for layer in range(tiny_model.LAYERS):
        for module, heads in sizes.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            for part, shape in (
                ("lora_A", (RANK, tiny_model.HIDDEN)),
                ("lora_B", (heads * tiny_model.HEAD_SIZE, RANK)),
            ):
                values = random.standard_normal(shape) * tiny_model.SPREAD
                tensors[f"{name}.{part}.weight"] = values.astype(np.float32)
    folder.mkdir(exist_ok=True)
    settings = {"r": RANK, "lora_alpha": 4 * RANK, "target_modules": list(sizes), "peft_type": "LORA"}
    (folder / "adapter_config.json").write_text(
        json.dumps(settings | {"task_type": "CAUSAL_LM", "bias": "none"})
    )
    draft = folder / "draft"
    draft.write_bytes(tiny_model.safetensors(tensors))
    draft.replace(folder / "adapter_model.safetensors")
    return folder


@dataclass
class Pair:
    """Two engines on one pool; adapters a and b, and the bytes of a once more."""

    first: Engine
    second: Engine
    a: str
    b: str
    again: str


@pytest.fixture(scope="module")
def pair(vllm_python: str, models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("adapters")
    a, b = write_adapter(folder / "a", 1), write_adapter(folder / "b", 2)
    again = shutil.copytree(a, folder / "again")
    with ExitStack() as stack:
        runtime = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moonpool-")))
        node = Node(runtime).start()
        stack.callback(node.stop)
        engines = []
        for name in ("first", "second"):
            engine = Engine(
                vllm_python,
                models[0],
                runtime,
                folder / f"{name}.log",
                kv_transfer_config=KV_CONFIG,
                enable_lora=True,
                max_loras=2,
                max_cpu_loras=4,
                max_lora_rank=RANK,
            )
            stack.callback(engine.close)
            engines.append(engine)
        for engine in engines:
            wait_joined(engine)
        yield Pair(*engines, str(a), str(b), str(again))


def ask(
    engine: Engine, name: str, number: int, path: str, salt: str | None = None, *, inplace: bool = False
) -> tuple[list[int], int]:
    """(tokens of the answer, how many of the prompt's came from the pool). inplace: as a server asks after a
    load_inplace, so that vLLM reads the files again in each step."""
    adapter = [name, number, path, None, inplace]
    answer = engine.call("generate", prompts=[PROMPT], adapter=adapter, salt=salt)
    engine.call("drain")
    pool: dict[str, Any] | None = answer["outputs"][0]["pool"]
    return tokens_of(answer)[0], pool["pool_tokens"] if pool else 0


def test_an_adapter_is_its_bytes(pair: Pair) -> None:
    first, second = pair.first, pair.second
    for engine, path in ((first, pair.a), (second, pair.b)):
        engine.call("load_adapter", name="ad", number=1, path=path)

    # One name, and another adapter behind it on each engine. A salt of its own: all is computed.
    of_a, of_b = ask(first, "ad", 1, pair.a, "x"), ask(second, "ad", 1, pair.b, "y")
    assert of_a[0] != of_b[0]
    assert (of_a[1], of_b[1]) == (0, 0)
    assert ask(first, "ad", 1, pair.a) == (of_a[0], 0)
    assert ask(second, "ad", 1, pair.b) == (of_b[0], 0)

    # The same bytes under another name, at another path.
    second.call("load_adapter", name="other", number=2, path=pair.again)
    assert ask(second, "other", 2, pair.again) == (of_a[0], LOADABLE)

    # Re-pointed within one engine: what this name stood for is in the pool, and so is what it stands for now.
    first.call("drop_adapter", number=1)
    first.call("load_adapter", name="ad", number=2, path=pair.b)
    assert ask(first, "ad", 2, pair.b) == (of_b[0], LOADABLE)

    # Replaced on disk after it was loaded: the engine goes on with what it has, and without the pool.
    write_adapter(Path(pair.again), 3)
    assert second.call("reset_prefix_cache")
    assert ask(second, "other", 2, pair.again) == (of_a[0], 0)
    assert "its files were changed after they were loaded" in second.logged()

    # Loaded again in place, where vLLM's own cache is empty: new bytes, whose KV no engine has stored.
    second.call("load_adapter", name="other", number=2, path=pair.again, inplace=True)
    assert second.call("reset_prefix_cache")
    of_c = ask(second, "other", 2, pair.again, "z", inplace=True)
    assert of_c[0] not in (of_a[0], of_b[0])
    assert ask(second, "other", 2, pair.again, inplace=True) == (of_c[0], 0)
    assert second.call("reset_prefix_cache")
    assert ask(second, "other", 2, pair.again, inplace=True) == (of_c[0], LOADABLE)


def test_an_adapter_that_comes_with_its_first_request(pair: Pair, tmp_path: Path) -> None:
    """As of a program that uses vLLM without a server: the first request is computed without the pool, since
    the engine reads the files after it came."""
    path = str(write_adapter(tmp_path / "late", 4))
    expected, _ = ask(pair.first, "late", 10, path)
    assert ask(pair.first, "late", 10, path) == (expected, 0)  # from the engine's own cache, and saved now
    assert ask(pair.second, "late", 20, path) == (expected, 0)
    assert pair.second.call("reset_prefix_cache")
    assert ask(pair.second, "late", 20, path) == (expected, LOADABLE)
