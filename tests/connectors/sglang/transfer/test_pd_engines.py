"""A prefill and a decode server of real SGLang on CPU, over moonpool's engine. Every answer is held against
Hugging Face's for the same weights. The short form is in tests/disagg_proxy/test_with_sglang.py, which has
such a pair with the proxy in front."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import SEED
from tests.connectors.sglang.bed import make_bed
from tests.connectors.sglang.server import PAGE_TOKENS
from tests.connectors.sglang.transfer.pair import Half, Line, make_line, said

pytestmark = [pytest.mark.sglang, pytest.mark.heavy, pytest.mark.slow, pytest.mark.timeout(900)]

HEARTBEATS_S = 5 * 2  # SGLang's own: one each 5 s, and two that fail


def prompts() -> list[list[int]]:
    """Of several lengths: less than a page, whole pages, and such that begin alike."""
    source = random.Random(SEED)

    def some(length: int) -> list[int]:
        return [source.randrange(256) for _ in range(length)]

    start = some(250)
    return [some(7), some(10 * PAGE_TOKENS), some(180), start + some(70), start + some(83)]


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Line]:
    with make_bed(tmp_path_factory.mktemp("pd")) as bed, make_line(bed, prompts()) as line:
        yield line


def kill(half: Half) -> None:
    os.killpg(half._process.pid, signal.SIGKILL)


def test_prefill_and_decode(line: Line) -> None:
    line.answers_all()
    line.answers_at_once(3)


def test_aborted_requests_do_not_hold_up_others(line: Line) -> None:
    """One waits for its prefill, the other is being generated."""
    _, lonely = line.pair.ask(line.asked[2], "lonely", prefill=False)
    _, long = line.pair.ask(line.asked[3], "long", tokens=3000)
    time.sleep(1)  # until it generates; when it does not yet, it waits for prefill
    line.pair.abort("lonely")
    line.pair.abort("long")
    for aborted in (lonely, long):
        assert "abort" in said(aborted).lower()
    line.answers_all()


def test_prefill_dies_while_a_request_waits_for_it(line: Line) -> None:
    _, orphan = line.pair.ask(line.asked[2], prefill=False)
    time.sleep(1)  # until decode has the request
    killed_s = time.monotonic()
    kill(line.pair.prefill)
    answer = said(orphan)
    took_s = time.monotonic() - killed_s
    print(f"decode answered {took_s:.1f} s after prefill was killed: {answer:.300}", file=sys.stderr)
    assert "Lost connection with prefill" in answer
    assert took_s < 2 * HEARTBEATS_S + 5
    line.pair.prefill.restart()
    line.pair.prefill.wait()
    line.answers_all()


def test_decode_dies_while_prefill_may_write_to_it(line: Line) -> None:
    line.pair.ask(line.asked[3], tokens=3000)
    kill(line.pair.decode)
    line.pair.decode.restart()
    line.pair.decode.wait()
    line.answers_all()


def test_one_rank_hands_over_to_two(tmp_path: Path) -> None:
    """SGLang then cuts each page by heads: many small slices in a call."""
    with make_bed(tmp_path) as bed, make_line(bed, prompts(), tp_size=2) as line:
        line.answers_all()
        line.answers_at_once(2)
