"""A prefill and a decode server of real SGLang on CPU, over moonpool's engine. Every answer is held against
Hugging Face's for the same weights."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.connectors.sglang import sglang_cpu
from tests.connectors.sglang.server import HERE, PAGE_TOKENS, _free_port, environment
from tests.connectors.sglang.transfer.installed import install
from tests.connectors.sglang.transfer.pair import Half, Pair, said

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SEED = 12
CANDIDATES = 24
SURE = 0.015  # four steps of bfloat16 between 0.5 and 1, where the best logits are
HEARTBEATS_S = 5 * 2  # SGLang's own: one each 5 s, and two that fail


@pytest.fixture
def place() -> Iterator[Path]:
    if not os.environ.get("MOONPOOL_SGLANG_PYTHON"):
        pytest.skip("MOONPOOL_SGLANG_PYTHON is not set: it names a Python with SGLang, see docs/sglang.md")
    with tempfile.TemporaryDirectory(prefix="moonpool-") as folder:
        sglang_cpu.install(Path(folder) / "plugin")
        install(Path(folder) / "moonpool")
        yield Path(folder)


def prompts() -> list[list[list[int]]]:
    """Candidates for each of several lengths: less than a page, whole pages, and such that begin alike."""
    print(f"seed {SEED}")
    source = random.Random(SEED)

    def some(length: int) -> list[int]:
        return [source.randrange(1, 512) for _ in range(length)]

    start = some(250)
    return [
        *([some(length) for _ in range(CANDIDATES)] for length in (7, 10 * PAGE_TOKENS, 180)),
        *([start + some(length) for _ in range(CANDIDATES)] for length in (70, 83)),
    ]


def decided(place: Path, plugins: tuple[Path, ...]) -> tuple[list[list[int]], list[list[int]]]:
    """One prompt of each length about which Hugging Face is sure, and its answers; makes the model."""
    groups = prompts()
    run = subprocess.run(
        [os.environ["MOONPOOL_SGLANG_PYTHON"], str(Path(__file__).with_name("decided.py")), place / "model"],
        input=json.dumps([one for group in groups for one in group]).encode(),
        env=environment(place, *plugins, HERE),
        stdout=subprocess.PIPE,
        timeout=300,
        check=True,
    )
    answers = iter(json.loads(run.stdout))
    surest = [max(((next(answers), one) for one in group), key=lambda pair: pair[0][1]) for group in groups]
    assert all(distance > SURE for (_, distance), _ in surest), [answer[1] for answer, _ in surest]
    return [prompt for _, prompt in surest], [tokens for (tokens, _), _ in surest]


def test_prefill_and_decode(place: Path) -> None:
    plugins = (place / "plugin", place / "moonpool")
    asked, expected = decided(place, plugins)
    port = _free_port()
    halves = [
        Half(mode, place / "model", place, plugins, place / f"{mode}.log", port)
        for mode in ("prefill", "decode")
    ]
    prefill, decode = halves
    try:
        for half in halves:
            half.wait()
            assert "moonpool: transfer engine at 127.0.0.1:" in half.logged()
        pair = Pair(prefill, decode)
        assert [pair.generate(prompt) for prompt in asked] == expected
        waiting = [pair.ask(prompt)[1] for prompt in asked * 3]
        assert [one.result()["output_ids"] for one in waiting] == expected * 3

        # Aborted: waiting for its prefill, and while decode generates. Others go on.
        _, lonely = pair.ask(asked[2], "lonely", prefill=False)
        _, long = pair.ask(asked[3], "long", tokens=3000)
        time.sleep(1)  # until it generates; when it does not yet, it waits for prefill
        pair.abort("lonely")
        pair.abort("long")
        for aborted in (lonely, long):
            assert "abort" in said(aborted).lower()
        assert [pair.generate(prompt) for prompt in asked] == expected

        # Prefill dies while a request waits for it.
        _, orphan = pair.ask(asked[2], prefill=False)
        time.sleep(1)  # until decode has the request
        killed_s = time.monotonic()
        os.killpg(prefill._process.pid, signal.SIGKILL)
        answer = said(orphan)
        took_s = time.monotonic() - killed_s
        print(f"decode answered {took_s:.1f} s after prefill was killed: {answer:.300}", file=sys.stderr)
        assert "Lost connection with prefill" in answer
        assert took_s < 2 * HEARTBEATS_S + 5

        prefill.restart()
        prefill.wait()
        assert [pair.generate(prompt) for prompt in asked] == expected
    except BaseException:
        for half in halves:
            print(half.tail(), file=sys.stderr)
        raise
    finally:
        for half in halves:
            half.close()


def test_one_rank_hands_over_to_two(place: Path) -> None:
    """SGLang then cuts each page by heads: many small slices in a call."""
    plugins = (place / "plugin", place / "moonpool")
    asked, expected = decided(place, plugins)
    port = _free_port()
    halves = [
        Half(mode, place / "model", place, plugins, place / f"{mode}.log", port, tp_size)
        for mode, tp_size in (("prefill", 1), ("decode", 2))
    ]
    try:
        for half in halves:
            half.wait()
        pair = Pair(*halves)
        assert [pair.generate(prompt) for prompt in asked] == expected
        waiting = [pair.ask(prompt)[1] for prompt in asked * 2]
        assert [one.result()["output_ids"] for one in waiting] == expected * 2
    except BaseException:
        for half in halves:
            print(half.tail(), file=sys.stderr)
        raise
    finally:
        for half in halves:
            half.close()
