"""`moonpool bench serve`: conversations against mock engines, which count what they had."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moonpool.cli import run as command
from moonpool.core.errors import ConfigError
from moonpool.disagg_proxy.tools.mock_engine.server import MockEngine
from moonpool.disagg_proxy.tools.mock_engine.settings import MockSettings
from moonpool.disagg_proxy.tools.replay.results import Results
from moonpool.disagg_proxy.tools.serve_bench import report
from moonpool.disagg_proxy.tools.serve_bench.conversations import Conversations, Shape

DEADLINE_S = 20.0
SMALL = [
    *("--sessions", "6", "--turns", "3", "--prefixes", "2", "--prefix-tokens", "256", "--turn-tokens", "64"),
    *("--answer-tokens", "4", "--concurrency", "2", "--seed", "7"),
]


@pytest.fixture
def engines() -> Iterator[list[MockEngine]]:
    """Two, on a thread of their own: the command runs its own loop."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def make() -> list[MockEngine]:
        made = [MockEngine(MockSettings(port=0)) for _ in range(2)]
        for each in made:
            await each.open()
        return made

    made = asyncio.run_coroutine_threadsafe(make(), loop).result(DEADLINE_S)
    yield made
    for each in made:
        asyncio.run_coroutine_threadsafe(each.close(), loop).result(DEADLINE_S)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(DEADLINE_S)
    loop.close()


def url_of(engine: MockEngine) -> str:
    return f"http://127.0.0.1:{engine.port}"


def figures(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert command(["bench", "serve", *SMALL, *arguments, "--json", "-"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_what_is_shared_is_cached_and_fresh_prompts_are_not(
    engines: list[MockEngine], capsys: pytest.CaptureFixture[str]
) -> None:
    found = figures(capsys, "--url", url_of(engines[0]) + "/v1")
    measured, baseline = found["measured"], found["baseline"]
    assert (measured["answered"], baseline["answered"]) == (18, 18)
    prompts = 6 * (3 * 256 + (1 + 2 + 3) * 64)
    # A turn has the prompt before it, a conversation the prefix, which its first two compute.
    expected = (4 * 256 + 6 * (256 + 64 + 256 + 128)) / prompts
    assert measured["reusable_share"] == pytest.approx(expected, abs=1e-3)
    assert measured["cached_share"] == pytest.approx(expected, abs=0.05)  # engines cache whole blocks
    assert baseline["cached_share"] == 0.0
    assert engines[0].counts["prompt_tokens"] == 2 * prompts
    assert set(found["ratios"]) >= {"ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "answer_tokens_per_s"}


def test_another_endpoint_gets_the_same_prompts(
    engines: list[MockEngine], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "serve.json"
    urls = ["--url", url_of(engines[0]), "--compare-url", url_of(engines[1])]
    assert command(["bench", "serve", *SMALL, *urls, "--json", str(file)]) == 0
    shown = capsys.readouterr().out
    for text in ("TTFT p50 s", "TTFT p90 s", "TTFT p99 s", "answer tokens/s", "cached share", "better by"):
        assert text in shown
    assert "errors" not in shown
    found = json.loads(file.read_text())
    assert found["measured"]["cached_share"] == found["baseline"]["cached_share"] > 0
    first, second = engines
    for name in ("requests", "prompt_tokens", "cached_tokens"):
        assert first.counts[name] == second.counts[name]


def test_without_a_baseline_there_is_one_column(
    engines: list[MockEngine], capsys: pytest.CaptureFixture[str]
) -> None:
    found = figures(capsys, "--url", url_of(engines[0]), "--baseline", "none")
    assert "baseline" not in found
    assert engines[0].counts["requests"] == 18
    again = figures(capsys, "--url", url_of(engines[0]), "--baseline", "none", "--seed", "8")
    assert again["measured"]["cached_share"] == found["measured"]["cached_share"]


def test_errors_are_counted_and_a_target_that_fails_all_is_code_3(
    engines: list[MockEngine], capsys: pytest.CaptureFixture[str], free_port: int
) -> None:
    engines[1].faults = {"status": 500}
    urls = ["--url", url_of(engines[0]), "--compare-url", url_of(engines[1])]
    assert command(["bench", "serve", *SMALL, *urls]) == 3
    assert "/v1/models answered 500" in capsys.readouterr().err
    assert engines[0].counts["requests"] == 0  # nothing is measured that nothing can be compared with
    assert command(["bench", "serve", *SMALL, *urls, "--model", "mock"]) == 3
    shown = capsys.readouterr().out
    assert "18 500" in shown
    assert "0 of 18" in shown
    assert command(["bench", "serve", "--url", f"http://127.0.0.1:{free_port}"]) == 3
    assert "cannot be asked for its models" in capsys.readouterr().err


def test_prompts_are_seeded_begin_alike_and_fresh_ones_do_not() -> None:
    shape = Shape(sessions=3, turns=2, prefixes=2, prefix_tokens=32, turn_tokens=16, seed=5)
    one, same = Conversations(shape), Conversations(shape)
    assert one.ids(0, 1) == same.ids(0, 1)
    assert one.ids(0, 1)[:48] == one.ids(0, 0)
    assert one.ids(0, 0)[:32] == one.ids(2, 0)[:32] != one.ids(1, 0)[:32]
    fresh = Conversations(shape, fresh=True)
    prompts = [fresh.ids(session, turn) for session in range(3) for turn in range(2)]
    assert [len(each) for each in prompts] == [48, 64] * 3
    assert len({tuple(each[:16]) for each in prompts}) == 6
    assert [fresh.reusable(0, 1), one.reusable(0, 0), one.reusable(0, 1)] == [0, 0, 48]


@pytest.mark.parametrize("wrong", [{"sessions": 0}, {"prefix_tokens": -1}, {"first_id": 9, "last_id": 9}])
def test_what_cannot_be_sent_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        Shape(**wrong)


def test_nothing_is_a_dash_and_divides_nothing() -> None:
    empty = report.Figures.of(Results())
    assert "seconds" not in report.ratios(empty, empty)
    assert json.loads(report.as_json(Results(), Results(), {}))["measured"]["ttft_p50_s"] is None
