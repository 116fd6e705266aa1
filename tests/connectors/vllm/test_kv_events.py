"""The prefix index beside a real vLLM engine: what its KV events say is what its prefix cache then finds."""

from __future__ import annotations

import array
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from moonpool.core.store.keys import chain_seed
from moonpool.disagg_proxy.events.prefix_indexes import PrefixIndexes
from moonpool.disagg_proxy.events.settings import EventSource
from moonpool.disagg_proxy.events.subscriber import Subscriber
from tests.connectors.vllm.conftest import BLOCK_TOKENS, BYTES_PER_TOKEN, make_prompt
from tests.connectors.vllm.processes import Engine
from tests.disagg_proxy.events.beds import eventually

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


class Watched:
    """An engine with 80 blocks of KV cache, and an index that follows its events."""

    def __init__(self, python: str, model: Path, folder: Path, log: Path) -> None:
        pub, replay = f"ipc://{folder}/pub", f"ipc://{folder}/replay"
        self.engine = Engine(
            python,
            model,
            folder,
            log,
            max_model_len=2048,
            kv_cache_memory_bytes=80 * BLOCK_TOKENS * BYTES_PER_TOKEN,
            kv_events_config={
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": pub,
                "replay_endpoint": replay,
                "topic": "kv-events",
            },
        )
        self.indexes = PrefixIndexes(blocks_max=10_000)
        self.subscriber = Subscriber((EventSource("e0", pub, replay),), self.indexes, {"e0": 0})
        self.subscriber.start()

    def close(self) -> None:
        self.subscriber.stop()
        self.engine.close()

    def catch_up(self) -> None:
        last = self.engine.call("events_published")
        eventually(lambda: self.subscriber.stats()["e0"]["sequence"] == last, f"event {last}")

    def predicted(self, prompt: list[int], salt: str | None = None) -> int:
        """Tokens that the engine should find in its own cache; it computes one at least."""
        index = self.indexes.obtain(BLOCK_TOKENS)
        assert index is not None
        match = index.match(index.keys(array.array("I", prompt), chain_seed(None, salt)))
        blocks = memoryview(match.device).cast("I")[0] if match.device else 0
        return min(blocks, (len(prompt) - 1) // BLOCK_TOKENS) * BLOCK_TOKENS

    def cached(self, prompt: list[int], salt: str | None = None) -> int:
        """Tokens that it found."""
        answer = self.engine.call("generate", prompts=[prompt], max_tokens=4, salt=salt)
        return int(answer["outputs"][0]["cached"])


@pytest.fixture(scope="module")
def watched(
    vllm_python: str, models: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Watched]:
    with tempfile.TemporaryDirectory(prefix="moonpool-") as folder:  # sockets have short paths only
        made = Watched(vllm_python, models[0], Path(folder), tmp_path_factory.mktemp("events") / "engine.log")
        yield made
        made.close()


def test_the_match_is_what_the_engine_finds(watched: Watched) -> None:
    """Prompts of a family tree, one after the other, in a cache too small for all: some are found whole, some
    in part, some were evicted. Groups that run together leave several copies of a block."""
    stems = [make_prompt(700 + family, 300) for family in range(4)]
    found = set()
    for round_number in range(24):
        stem = stems[round_number * 7 % 4]
        prompt = stem[: 40 + 31 * round_number % 260] + make_prompt(800 + round_number % 9, 150)
        if round_number % 5 == 4:
            watched.engine.call("generate", prompts=[prompt, prompt, stem], max_tokens=4)
        watched.catch_up()
        predicted = watched.predicted(prompt)
        assert watched.cached(prompt) == predicted, f"round {round_number}"
        found.add(predicted)
    assert len(found) > 3
    row = watched.subscriber.stats()["e0"]
    assert row["blocks_removed_total"] > 0, "nothing was evicted: the cache is too large for this test"
    assert row["blocks_unknown_total"] == row["blocks_skipped_total"] == row["malformed_total"] == 0


def test_salts_and_a_reset(watched: Watched) -> None:
    prompt = make_prompt(990, 200)
    watched.cached(prompt, "tenant-7")
    watched.catch_up()
    assert watched.predicted(prompt) == 0
    predicted = watched.predicted(prompt, "tenant-7")
    assert predicted == 192
    assert watched.cached(prompt, "tenant-7") == predicted
    assert watched.engine.call("reset_prefix_cache")
    watched.engine.call("generate", prompts=[make_prompt(991, 8)], max_tokens=1)  # events leave with a step
    watched.catch_up()
    assert watched.predicted(prompt, "tenant-7") == 0
    assert watched.cached(prompt, "tenant-7") == 0
