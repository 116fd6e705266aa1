"""Real SGLang servers on CPU, one after the other, with the pool as HiCache's third tier. Every answer is
held against Hugging Face's for the same weights."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.connectors.sglang.bed import (
    FULL_PAGES,
    Bed,
    HuggingFace,
    eventually,
    make_bed,
    prompts,
)
from tests.connectors.sglang.server import HERE, PAGE_TOKENS, Server, environment, run
from tests.connectors.sglang.transfer.installed import install
from tests.connectors.vllm.processes import Node

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(900)]

WHOLE = FULL_PAGES * PAGE_TOKENS
StartServer = Callable[..., Server]


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[Bed]:
    with make_bed(tmp_path) as bed:
        yield bed


@pytest.fixture
def node(bed: Bed) -> Iterator[Node]:
    """Not started."""
    node = Node(bed.runtime)
    yield node
    node.stop()


@pytest.fixture
def start(bed: Bed) -> Iterator[StartServer]:
    """start(name, layout=..., ...): a server that starts. What they logged last is printed at the end."""
    servers = []

    def start(name: str, layout: str = "page_first_direct", **more: Any) -> Server:
        log = bed.folder / f"{name}.log"
        servers.append(Server(bed.model, bed.runtime, bed.plugin, log, layout=layout, extra={}, **more))
        return servers[-1]

    yield start
    for server in servers:
        print(server.tail())
        server.close()


def stored(node: Node, count: int) -> None:
    """Waits until the pool has so many prompts: two KV heads are two objects a page."""
    eventually(lambda: node.metrics()["objects"] >= 2 * FULL_PAGES * count, "the prompts are not stored")


def test_sglangs_own_host_pools(bed: Bed, node: Node) -> None:
    node.start()
    said = run(
        ["-m", "tests.connectors.sglang.real_pools", str(bed.runtime / "node.sock")],
        environment(bed.runtime, bed.plugin, HERE.parents[2]),
        bed.folder / "pools.log",
        300,
    )
    assert [line for line in said.splitlines() if "TokenToKVPoolHost layer" in line] == [
        "MHATokenToKVPoolHost layer_first page_first page_first_direct page_head",
        "MLATokenToKVPoolHost layer_first page_first page_first_direct",
    ]


def test_store_flush_hit_and_what_a_lost_node_does(
    bed: Bed, node: Node, start: StartServer, rng: random.Random
) -> None:
    """The short form: one server, with the backend's short name at start and when it is attached."""
    install(bed.plugin)
    asked = prompts(rng, 3)
    server, reference = start("server", backend="moonpool"), HuggingFace(bed, asked)
    server.wait()
    early, prompt, last = zip(asked, reference.answers(), strict=True)

    def answers(prompt: tuple[list[int], list[int]], from_pool: int) -> None:
        """After its own two tiers are emptied."""
        server.forget()
        assert server.generate(prompt[0]) == (prompt[1], from_pool)

    def joins() -> bool:
        server.forget()
        assert server.generate(early[0])[0] == early[1]  # asks the pool, which has it if a save joined before
        return "joined the pool" in server.logged()

    def is_found() -> bool:
        """Whether the pool has the whole prompt. What is still to be stored may be dropped as it forgets."""
        server.forget()
        tokens, from_pool = server.generate(prompt[0])
        assert tokens == prompt[1]
        return from_pool == WHOLE

    assert not joins()  # there is no node
    assert "this engine serves without it and joins when a node appears" in server.logged()
    node.start()
    eventually(joins, "the server did not join")
    answers(prompt, 0)
    eventually(is_found, "the prompt is not stored")
    server.detach()
    answers(prompt, 0)
    server.attach()
    answers(prompt, WHOLE)
    metrics = server.metrics()
    assert metrics["moonpool_hicache_loaded_pages_total"] >= 2 * FULL_PAGES
    assert metrics.get("moonpool_hicache_survived_errors_total", 0) == 0
    node.kill()
    answers(prompt, 0)
    answers(last, 0)
    assert "does not answer" in server.logged()


@pytest.mark.heavy
def test_a_second_server_hits_what_another_layout_stored(
    bed: Bed, node: Node, start: StartServer, rng: random.Random
) -> None:
    asked = prompts(rng, 2)
    node.start()
    first, reference = start("first"), HuggingFace(bed, asked)
    first.wait()
    expected = reference.answers()
    assert first.generate(asked[0]) == (expected[0], 0)
    stored(node, 1)
    first.close()
    second = start("second", layout="layer_first").wait()
    assert second.generate(asked[0]) == (expected[0], WHOLE)
    longer = asked[0][: 5 * PAGE_TOKENS] + asked[1][5 * PAGE_TOKENS :]
    assert second.generate(longer)[1] == 0  # its own first tier has the five pages
    second.forget()
    assert second.generate(asked[1]) == (expected[1], 0)


@pytest.mark.heavy
def test_two_ranks_read_what_one_wrote(node: Node, start: StartServer, rng: random.Random) -> None:
    """Tensor-parallel sizes share. What two ranks sum up is rounded otherwise than by one, so the second
    server's answers are held against its own for the same prompt without the pool."""
    (prompt,) = prompts(rng, 1)
    node.start()
    for tp_size in (1, 2):
        server = start(f"tp{tp_size}", tp_size=tp_size).wait()
        tokens, from_pool = server.generate(prompt)
        assert from_pool == (0 if tp_size == 1 else WHOLE)
        stored(node, 1)
        server.detach()
        server.forget()
        assert server.generate(prompt) == (tokens, 0)
        server.close()
