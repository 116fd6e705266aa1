"""Real SGLang servers on CPU, one after the other, with the pool as HiCache's third tier. Every answer is
held against Hugging Face's for the same weights."""

from __future__ import annotations

import json
import os
import random
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.connectors.sglang import sglang_cpu
from tests.connectors.sglang.server import HERE, PAGE_TOKENS, Server, environment
from tests.connectors.vllm.processes import Node

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PROMPT_TOKENS = 180
FULL_PAGES = PROMPT_TOKENS // PAGE_TOKENS
SEED = 12


def prompts(count: int) -> list[list[int]]:
    print(f"seed {SEED}")
    source = random.Random(SEED)
    return [[source.randrange(1, 512) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


def eventually(true: Callable[[], bool], what: str) -> None:
    """SGLang stores in the background, and says nowhere when it has."""
    deadline_s = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.1)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not os.environ.get("MOONPOOL_SGLANG_PYTHON"):
        pytest.skip("MOONPOOL_SGLANG_PYTHON is not set: it names a Python with SGLang, see docs/sglang.md")
    folder = tmp_path_factory.mktemp("sglang")
    sglang_cpu.install(folder / "plugin")
    return folder


@pytest.fixture
def runtime() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="moonpool-") as path:  # sockets have short paths only
        yield Path(path)


def reference(place: Path, runtime: Path, asked: list[list[int]]) -> list[list[int]]:
    """What Hugging Face says, with the model that this makes."""
    run = subprocess.run(
        [os.environ["MOONPOOL_SGLANG_PYTHON"], str(HERE / "reference.py"), str(place / "model")],
        input=json.dumps(asked).encode(),
        env=environment(runtime, place / "plugin"),
        stdout=subprocess.PIPE,
        timeout=300,
        check=True,
    )
    answers: list[list[int]] = json.loads(run.stdout)
    return answers


def test_sglangs_own_host_pools(place: Path, runtime: Path) -> None:
    node = Node(runtime).start()
    try:
        python, socket = os.environ["MOONPOOL_SGLANG_PYTHON"], str(runtime / "node.sock")
        run = subprocess.run(
            [python, "-m", "tests.connectors.sglang.real_pools", socket],
            cwd=runtime,
            env=environment(runtime, place / "plugin", HERE.parents[2]),
            stdout=subprocess.PIPE,
            timeout=300,
            check=True,
        )
    finally:
        node.stop()
    assert run.stdout.decode().splitlines()[-2:] == [
        "MHATokenToKVPoolHost layer_first page_first page_first_direct page_head",
        "MLATokenToKVPoolHost layer_first page_first page_first_direct",
    ]


def test_store_flush_hit_and_a_second_server(place: Path, runtime: Path) -> None:
    asked = prompts(4)
    expected = reference(place, runtime, asked)
    node = Node(runtime)

    def server(name: str, layout: str) -> Server:
        return Server(
            place / "model", runtime, place / "plugin", place / f"{name}.log", layout=layout, extra={}
        )

    first = server("first", "page_first_direct")
    try:
        first.wait()
        assert first.generate(asked[0]) == (expected[0], 0)  # there is no node
        assert "this engine serves without it and joins when a node appears" in first.logged()
        node.start()
        time.sleep(1)  # longer than the gap between two attempts to connect
        assert first.generate(asked[1]) == (expected[1], 0)
        eventually(lambda: node.metrics()["objects"] >= 2 * FULL_PAGES, "the prompt is not stored")
        first.forget()
        assert first.generate(asked[1]) == (expected[1], FULL_PAGES * PAGE_TOKENS)
        first.detach()
        first.forget()
        assert first.generate(asked[1]) == (expected[1], 0)
        first.attach()
        first.forget()
        assert first.generate(asked[1]) == (expected[1], FULL_PAGES * PAGE_TOKENS)
        metrics = first.metrics()
        assert metrics["moonpool_hicache_loaded_pages_total"] >= 2 * FULL_PAGES
        assert metrics.get("moonpool_hicache_survived_errors_total", 0) == 0
    except BaseException:
        print(first.tail())
        raise
    finally:
        first.close()

    second = server("second", "layer_first")
    try:
        second.wait()
        assert second.generate(asked[1]) == (expected[1], FULL_PAGES * PAGE_TOKENS)  # another's, other layout
        longer = asked[1][: 5 * PAGE_TOKENS] + asked[2][5 * PAGE_TOKENS :]
        assert second.generate(longer)[1] == 0  # its own first tier has the five pages
        node.kill()
        second.forget()
        assert second.generate(asked[1]) == (expected[1], 0)
        assert second.generate(asked[3]) == (expected[3], 0)
        assert "does not answer" in second.logged()
    except BaseException:
        print(second.tail())
        raise
    finally:
        second.close()
        node.stop()


def test_two_ranks_read_what_one_wrote(place: Path, runtime: Path) -> None:
    """Tensor-parallel sizes share. What two ranks sum up is rounded otherwise than by one, so the second
    server's answers are held against its own for the same prompt without the pool."""
    (prompt,) = prompts(1)
    reference(place, runtime, [prompt])
    node = Node(runtime).start()
    try:
        for tp_size in (1, 2):
            server = Server(
                place / "model",
                runtime,
                place / "plugin",
                place / f"tp{tp_size}.log",
                layout="page_first_direct",
                extra={},
                tp_size=tp_size,
            )
            try:
                server.wait()
                tokens, from_pool = server.generate(prompt)
                assert from_pool == (0 if tp_size == 1 else FULL_PAGES * PAGE_TOKENS)
                eventually(lambda: node.metrics()["objects"] >= 2 * FULL_PAGES, "the prompt is not stored")
                server.detach()
                server.forget()
                assert server.generate(prompt) == (tokens, 0)
            except BaseException:
                print(server.tail())
                raise
            finally:
                server.close()
    finally:
        node.stop()
