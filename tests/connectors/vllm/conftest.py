"""What the engine tests share: one set of real engines for the whole file, because each takes half a minute
to start."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.connectors.vllm.processes import Engine, Node
from tests.soft_card import compile_library

KV_CONFIG = {
    "kv_connector": "Mooncake",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    # The tests tell loads by their counts; this small model computes faster than some of them.
    "kv_connector_extra_config": {"lease_s": 6.0, "compute_if_faster": False},
}
MEASURING = {**KV_CONFIG, "kv_connector_extra_config": {"lease_s": 6.0}}
# A prompt that another engine takes over, in the two-step form.
ASK = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
TINY_MODEL = Path(__file__).parents[3] / "examples" / "demo" / "tiny_model.py"
JOIN_TIMEOUT_S = 20.0
BLOCK_TOKENS = 32
BYTES_PER_TOKEN = 4 * 2 * 2 * 64 * 4  # layers x (K and V) x KV heads x head size x float32
EARLY_PROMPT_TOKENS = 200


def make_prompt(seed: int, tokens: int) -> list[int]:
    """A prompt that no other seed begins with."""
    source = random.Random(seed)
    return [source.randrange(256) for _ in range(tokens)]


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The software device, which takes some seconds to compile."""
    return compile_library(tmp_path_factory.mktemp("soft"))


@dataclass
class Line:
    """One machine's line: a plain engine for reference, two that share the pool of ``node`` (the second with
    a KV cache that is too small for its load), and one with other weights. ``early``: what the second
    answered before there was a node."""

    plain: Engine
    first: Engine
    second: Engine
    other: Engine
    refused: Engine
    node: Node
    early: dict[str, list[int]] = field(default_factory=dict)

    def expected(self, prompts: list[list[int]], max_tokens: int | list[int] = 8) -> list[list[int]]:
        """What a plain engine answers."""
        return tokens_of(self.plain.call("generate", prompts=prompts, max_tokens=max_tokens))


def tokens_of(answer: dict[str, list[dict[str, list[int]] | None]]) -> list[list[int]]:
    return [output["tokens"] if output else [] for output in answer["outputs"]]


@pytest.fixture(scope="session")
def vllm_python() -> str:
    python = os.environ.get("MOONPOOL_VLLM_PYTHON")
    if not python:
        pytest.skip(
            "MOONPOOL_VLLM_PYTHON is not set: it names a Python with vLLM; `make test` makes one and sets it"
        )
    return python


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models of equal config and different weights."""
    folder = tmp_path_factory.mktemp("models")
    paths = [folder / "seed0", folder / "seed1"]
    for seed, path in enumerate(paths):
        subprocess.run([sys.executable, TINY_MODEL, path, str(seed)], check=True, timeout=60)
    return paths


@pytest.fixture(scope="session")
def line(vllm_python: str, models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Line]:
    logs = tmp_path_factory.mktemp("engines")
    with ExitStack() as stack:
        # Sockets have short paths only.
        runtime = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moonpool-")))
        nobody = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moonpool-")))

        def engine(name: str, model: Path, place: Path = runtime, **config: object) -> Engine:
            made = Engine(vllm_python, model, place, logs / f"{name}.log", **config)
            stack.callback(made.close)
            return made

        required = {**KV_CONFIG, "kv_connector_extra_config": {"require_pool": True}}
        line = Line(
            plain=engine("plain", models[0]),
            first=engine("first", models[0], kv_transfer_config=KV_CONFIG),
            second=engine(
                "second",
                models[0],
                kv_transfer_config=KV_CONFIG,
                max_model_len=2048,
                kv_cache_memory_bytes=80 * BLOCK_TOKENS * BYTES_PER_TOKEN,
            ),
            other=engine("other", models[1], kv_transfer_config=MEASURING),
            refused=engine("refused", models[0], nobody, kv_transfer_config=required),
            node=Node(runtime),
        )
        prompt = make_prompt(999, EARLY_PROMPT_TOKENS)
        answer = line.second.call("generate", prompts=[prompt])
        line.early = {"tokens": tokens_of(answer)[0], "expected": line.expected([prompt])[0]}
        line.node.start()
        stack.callback(line.node.stop)
        for joining in (line.first, line.second, line.other):
            wait_joined(joining)
        yield line


def wait_joined(engine: Engine) -> None:
    deadline_s = time.monotonic() + JOIN_TIMEOUT_S
    while not engine.call("joined"):
        assert time.monotonic() < deadline_s, "the engine did not join the pool"
        time.sleep(0.05)
