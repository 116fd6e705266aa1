"""Real vLLM engines whose KV cache lies on a card of the software device: tokens through the pool are the
tokens of a plain engine."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.connectors.vllm.conftest import (
    ASK,
    BLOCK_TOKENS,
    BYTES_PER_TOKEN,
    KV_CONFIG,
    make_prompt,
    tokens_of,
    wait_joined,
)
from tests.connectors.vllm.processes import HERE, Engine, Node
from tests.connectors.vllm.storing import store
from tests.ports import held_ports
from tests.soft_card import COMPILER, compile_library

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler"),
]

EXTRA = {
    "gpu": True,
    "gpu_ring": "8MiB",
    "gpu_copy_threads": 2,
    "lease_s": 20.0,
    "compute_if_faster": False,
}


class DeviceEngine(Engine):
    driver = HERE / "device_engine_driver.py"


class Pair:
    """plain: without the pool; late: a card on which nothing runs before it is waited for; shuffled: one that
    runs things in any order, with a KV cache that is too small for its load; far: the same, which takes KV
    over TCP as if the other engines were on another host."""

    def __init__(
        self, plain: Engine, late: Engine, shuffled: Engine, far: Engine, node: Node, bootstrap: str
    ) -> None:
        self.plain, self.late, self.shuffled, self.far, self.node = plain, late, shuffled, far, node
        self.bootstrap = bootstrap  # of late

    def expected(self, prompts: list[list[int]], max_tokens: int = 8) -> list[list[int]]:
        """What the plain engine answers."""
        return tokens_of(self.plain.call("generate", prompts=prompts, max_tokens=max_tokens))


@pytest.fixture(scope="module")
def pair(vllm_python: str, models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    logs = tmp_path_factory.mktemp("device")
    library = str(compile_library(logs))
    with ExitStack() as stack:
        runtime = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moonpool-")))

        def engine(made: type[Engine], name: str, **config: object) -> Engine:
            started = made(vllm_python, models[0], runtime, logs / f"{name}.log", **config)
            stack.callback(started.close)
            return started

        (port,) = stack.enter_context(held_ports(1))

        def on_card(**more: object) -> dict[str, Any]:
            extra = {**EXTRA, **more}
            return {
                "kv_transfer_config": {**KV_CONFIG, "kv_connector_extra_config": extra},
                "soft_library": library,
            }

        def shuffled(name: str, **more: object) -> Engine:
            return engine(
                DeviceEngine,
                name,
                **on_card(**more),
                soft_policy="shuffled",
                max_model_len=2048,
                kv_cache_memory_bytes=80 * BLOCK_TOKENS * BYTES_PER_TOKEN,
            )

        pair = Pair(
            engine(Engine, "plain"),
            engine(DeviceEngine, "late", **on_card(bootstrap_port=port), soft_policy="late"),
            shuffled("shuffled"),
            shuffled("far", handover_transports="tcp"),
            Node(runtime),
            f"http://127.0.0.1:{port}",
        )
        pair.node.start()
        stack.callback(pair.node.stop)
        wait_joined(pair.late)
        wait_joined(pair.shuffled)
        yield pair


@pytest.mark.parametrize("from_late", [True, False])
def test_tokens_through_the_pool_are_those_of_a_plain_engine(pair: Pair, from_late: bool) -> None:
    writer, reader = (pair.late, pair.shuffled) if from_late else (pair.shuffled, pair.late)
    lengths = [1, 31, 32, 33, 255, 256, 257, 700]
    prompts = [make_prompt(7000 + 100 * from_late + number, length) for number, length in enumerate(lengths)]
    expected = pair.expected(prompts)
    assert store(writer, reader, prompts) == expected

    answer = reader.call("generate", prompts=prompts)

    assert tokens_of(answer) == expected
    loadable = [(length - 1) // BLOCK_TOKENS * BLOCK_TOKENS for length in lengths]
    assert [output["pool"]["pool_tokens"] for output in answer["outputs"]] == loadable
    assert all(output["pool"]["load_errors"] == 0 for output in answer["outputs"])
    left = reader.call("drain")
    assert set(left.values()) == {0}


@pytest.mark.parametrize(
    ("form", "path"), [("two-step", "cuda_ipc"), ("two-step", "tcp"), ("concurrent", "cuda_ipc")]
)
def test_kv_is_handed_over_from_card_to_card(pair: Pair, form: str, path: str) -> None:
    lengths = [33, 64, 257, 700]
    first_seed = 7500 + 100 * len(form) + 50 * (path == "tcp")
    prompts = [make_prompt(first_seed + number, length) for number, length in enumerate(lengths)]
    expected = pair.expected(prompts)
    decode = pair.far if path == "tcp" else pair.shuffled
    if form == "two-step":
        answer = pair.late.call("generate", prompts=prompts, max_tokens=1, params=[ASK] * len(prompts))
        params = [output["params"] for output in answer["outputs"]]
        pair.late.send("drain", timeout_s=60)  # it goes on stepping
        answer = decode.call("generate", prompts=prompts, params=params)
    else:
        first = [make_prompt(7499, 40)]  # its offer names the engine; it is taken, too
        (known,) = pair.late.call("generate", prompts=first, max_tokens=1, params=[ASK])["outputs"]
        pair.late.send("drain", timeout_s=60)
        decode.call("generate", prompts=first, params=[known["params"]])
        pair.late.receive()
        names = [f"card-{number}" for number in range(len(prompts))]
        meetings = [
            {
                "do_remote_prefill": True,
                "remote_engine_id": known["params"]["remote_engine_id"],
                "remote_bootstrap_addr": pair.bootstrap,
                "transfer_id": name,
            }
            for name in names
        ]
        decode.send("generate", prompts=prompts, params=meetings)
        asked = [{"do_remote_decode": True, "transfer_id": name} for name in names]
        pair.late.call("generate", prompts=prompts, max_tokens=1, params=asked)
        pair.late.send("drain", timeout_s=60)
        answer = decode.receive()
    assert tokens_of(answer) == expected
    assert [output["pool"]["handed_over_tokens"] for output in answer["outputs"]] == [n - 1 for n in lengths]
    assert set(pair.late.receive().values()) == {0}
    assert set(decode.call("drain").values()) == {0}
    # A lease is a word of the host's memory, which shared memory reaches.
    assert set(decode.call("handed_by")) == {"cuda_ipc": {"cuda_ipc", "shm"}, "tcp": {"tcp"}}[path]


def test_preemptions_and_aborts_leave_nothing(pair: Pair) -> None:
    """Eight long answers in a KV cache for six: requests are preempted, resumed, saved and loaded in turn.
    Then one of three is aborted at each stage of its life."""
    prompts = [make_prompt(7300 + position, 260 + 8 * position) for position in range(8)]
    expected = pair.expected(prompts, 120)
    for _ in range(2):  # the first round saves while it preempts, the second loads
        assert pair.shuffled.call("reset_prefix_cache")
        answer = pair.shuffled.call("generate", prompts=prompts, max_tokens=120)
        assert tokens_of(answer) == expected
        assert answer["preemptions"] > 0
        assert set(pair.shuffled.call("drain").values()) == {0}
    for stage in ("looking", "loading", "running"):
        assert pair.shuffled.call("reset_prefix_cache")
        kept = pair.shuffled.call(
            "generate", prompts=prompts[:3], max_tokens=120, abort=[0], abort_when=stage
        )
        assert tokens_of(kept)[1:] == expected[1:3]
        assert set(pair.shuffled.call("drain").values()) == {0}
    metrics = pair.node.metrics()
    assert metrics["integrity"]
    assert metrics["objects_pinned"] == 0
