"""Replays against a scripted server, a mock engine and a real proxy in front of mock engines."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moonpool.cli import run as command
from moonpool.core.errors import ConfigError, Unavailable
from moonpool.disagg_proxy.tools.mock_engine.server import MockEngine
from moonpool.disagg_proxy.tools.mock_engine.settings import MockSettings
from moonpool.disagg_proxy.tools.replay import plots, report
from moonpool.disagg_proxy.tools.replay.client import Ended, Events, Outcome
from moonpool.disagg_proxy.tools.replay.prompts import Prompts
from moonpool.disagg_proxy.tools.replay.results import Results
from moonpool.disagg_proxy.tools.replay.run import Plan, read_api_key, replay_here
from moonpool.disagg_proxy.tools.replay.sender import Bounds
from moonpool.disagg_proxy.tools.simulator.results import Slo

from .beds import Asked, Behaviour, server, trace_of, write_trace

DEADLINE_S = 20.0
FAST = 1e6  # times the trace's speed: all at once
FOUR = tuple((float(at), 1000, 3, [1, 10 + at]) for at in range(4))


def play(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await scenario()

    asyncio.run(bounded())


async def answer_well(asked: Asked) -> None:
    await asked.begin(b"X-Moonpool-Engine: e0\r\n")
    for _ in range(asked.body["max_tokens"]):
        await asked.token()
    await asked.end(len(asked.body["prompt"]), 16, asked.body["max_tokens"])


def outcomes_of(behave: Behaviour, tmp_path: Path, **options: Any) -> tuple[list[Outcome], Results]:
    """All four requests, sent at once."""
    found: list[Outcome] = []
    ended: list[Results] = []

    async def scenario() -> None:
        async with server(behave) as url:
            plan = Plan([url], speed=FAST, **options)
            done = await replay_here(plan, trace_of(tmp_path, *FOUR), Prompts(), each=found.append)
            ended.append(done.results)

    play(scenario)
    return found, ended[0]


def test_every_request_is_sent_as_the_trace_says(tmp_path: Path) -> None:
    bodies: list[dict[str, Any]] = []

    async def behave(asked: Asked) -> None:
        bodies.append(asked.body)
        assert "authorization" not in asked.headers
        await answer_well(asked)

    found, results = outcomes_of(behave, tmp_path)
    assert [len(body["prompt"]) for body in bodies] == [1000] * 4
    assert all(body["prompt"][:512] == bodies[0]["prompt"][:512] for body in bodies)
    assert len({tuple(body["prompt"]) for body in bodies}) == 4
    assert all(body["max_tokens"] == 3 and body["stream"] and body["ignore_eos"] for body in bodies)
    assert all(body["model"] == "first" for body in bodies)
    assert [each.ended for each in found] == [Ended.ANSWERED] * 4
    assert all(len(each.gaps_s) == 2 and each.ttft_s > 0 and each.engine == "e0" for each in found)
    summary = results.summary(Slo(30.0))
    assert (summary.sent, summary.answered, summary.good) == (4, 4, 1.0)
    assert (summary.prompt_tokens, summary.cached_tokens, summary.answer_tokens) == (4000, 64, 12)
    assert summary.reusable == 3 * 512 / 4000
    assert summary.hits == 64 / 4000


def test_refusals_failures_and_breaks_are_told_apart(tmp_path: Path) -> None:
    async def refuse(asked: Asked) -> None:
        await asked.say(429, b'{"error":{"message":"m","code":"ttft"}}')

    async def fail(asked: Asked) -> None:
        await asked.say(500, b"<html>")

    async def break_off(asked: Asked) -> None:
        await asked.begin()
        await asked.token()

    async def tell_of_an_error(asked: Asked) -> None:
        await asked.begin()
        await asked.send(b'data: {"error":{"message":"m"}}\n\n')

    async def babble(asked: Asked) -> None:
        await asked.begin()
        await asked.send(b"data: }{\n\n")

    async def end_without_a_token(asked: Asked) -> None:
        await asked.begin()
        await asked.send(b"data: [DONE]\n\n")

    async def hang_up(asked: Asked) -> None:
        asked.writer.transport.abort()

    for behave, ended, why in (
        (refuse, Ended.REFUSED, "ttft"),
        (fail, Ended.FAILED, "500"),
        (break_off, Ended.FAILED, "broken_off"),
        (tell_of_an_error, Ended.FAILED, "error_event"),
        (babble, Ended.FAILED, "bad_event"),
        (end_without_a_token, Ended.FAILED, "no_token"),
        (hang_up, Ended.FAILED, "lost"),
    ):
        found, results = outcomes_of(behave, tmp_path)
        assert {(each.ended, each.why) for each in found} == {(ended, why)}
        counts = results.refused if ended is Ended.REFUSED else results.failed
        assert counts == {why: 4}
        summary = results.summary(Slo(30.0))
        assert summary.good == 0.0
        assert math.isnan(summary.ttft_mean_s)
        assert math.isnan(summary.hits)


def test_an_answer_is_read_to_its_end(tmp_path: Path) -> None:
    """A client that closes behind [DONE] has left, for a server: the connection serves all requests."""
    connections: list[int] = []

    async def behave(asked: Asked) -> None:
        await asked.begin(b"Transfer-Encoding: chunked\r\n")
        for data in (b'data: {"choices":[{}]}\n\n', b"data: [DONE]\n\n"):
            await asked.send(b"%x\r\n%b\r\n" % (len(data), data))
        await asked.send(b"0\r\n\r\n")

    async def scenario() -> None:
        async with server(behave, connections=connections) as url:
            plan = Plan([url], speed=FAST, bounds=Bounds(concurrency=1))
            done = await replay_here(plan, trace_of(tmp_path, *FOUR), Prompts())
            assert done.results.ended == {Ended.ANSWERED: 4}
            while not connections:
                await asyncio.sleep(0)

    play(scenario)
    assert connections == [1 + 4]


def test_a_request_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    async def never(asked: Asked) -> None:
        await asyncio.Event().wait()

    found, _ = outcomes_of(never, tmp_path, deadline_s=0.05)
    assert {(each.ended, each.why) for each in found} == {(Ended.FAILED, "deadline")}


def test_no_more_are_out_than_the_bound_and_the_late_ones_are_told(tmp_path: Path) -> None:
    out = most = 0

    async def behave(asked: Asked) -> None:
        nonlocal out, most
        out += 1
        most = max(most, out)
        await asked.begin()
        await asked.token()
        out -= 1
        await asked.end(1, None, 1)

    found, results = outcomes_of(behave, tmp_path, bounds=Bounds(concurrency=1))
    assert most == 1
    assert [each.number for each in found] == [0, 1, 2, 3]
    assert found[3].sent_s >= found[2].end_s
    assert results.late_s[3] > 0
    assert results.summary(Slo(30.0)).told == 0  # nobody said what was cached


def test_requests_wait_for_their_time(tmp_path: Path) -> None:
    rows = [(0.0, 5, 1, [1]), (0.3, 5, 1, [2])]

    async def scenario() -> None:
        async with server(answer_well) as url:
            found: list[Outcome] = []
            await replay_here(Plan([url], speed=3.0), trace_of(tmp_path, *rows), Prompts(), each=found.append)
            assert [each.number for each in found] == [0, 1]
            assert found[1].sent_s >= 0.1

    play(scenario)


def test_a_stop_cuts_what_is_out_and_keeps_what_was_measured(tmp_path: Path) -> None:
    stop = asyncio.Event()

    async def behave(asked: Asked) -> None:
        if len(asked.body["prompt"]) == 5:
            await answer_well(asked)
            return
        await asked.begin()
        await asked.token()
        stop.set()
        await asyncio.Event().wait()

    rows = [(0.0, 5, 1, [1]), (0.1, 900, 9, [2, 3]), (1e6, 5, 1, [4])]

    async def scenario() -> None:
        async with server(behave) as url:
            found: list[Outcome] = []
            done = await replay_here(
                Plan([url]), trace_of(tmp_path, *rows), Prompts(), each=found.append, stop=stop
            )
            assert done.stopped
            assert [each.ended for each in found] == [Ended.ANSWERED, Ended.CUT]
            summary = done.results.summary(Slo(30.0))
            assert (summary.sent, summary.answered, summary.cut, summary.good) == (2, 1, 1, 1.0)

    play(scenario)


def test_the_bytes_of_a_stream_may_come_in_any_pieces() -> None:
    stream = b"data: one\n\n: a remark\n\ndata: two\r\n\r\ndata: three\ndata: more\n\n"
    wanted = [b"one", b"", b"two", b"three\nmore"]
    for size in range(1, len(stream) + 1):
        events = Events()
        found = [data for at in range(0, len(stream), size) for data in events.feed(stream[at : at + size])]
        assert found == wanted, size


def test_the_longest_tenth_of_the_gaps() -> None:
    outcome = Outcome(0, 0.0, 0.0, 1, 0, answer_tokens=41)
    outcome.gaps_s.extend([0.1] * 18 + [1.0, 3.0])
    assert outcome.tail_gap_s == pytest.approx(2.0)
    assert outcome.mean_gap_s == pytest.approx(5.8 / 40)  # pieces of two tokens


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [({"data": []}, "serves no model"), ({"no": 1}, "cannot be asked"), ([1], "cannot be asked")],
)
def test_a_server_without_models(rows: object, sentence: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with server(answer_well, rows) as url:
            with pytest.raises(Unavailable, match=sentence):
                await replay_here(Plan([url]), trace_of(tmp_path, *FOUR), Prompts())

    play(scenario)


def test_nobody_is_there(tmp_path: Path, free_port: int) -> None:
    async def scenario() -> None:
        with pytest.raises(Unavailable, match="cannot be asked for its models"):
            await replay_here(Plan([f"http://127.0.0.1:{free_port}"]), trace_of(tmp_path, *FOUR), Prompts())
        found: list[Outcome] = []
        plan = Plan([f"http://127.0.0.1:{free_port}"], model="named", speed=FAST)
        await replay_here(plan, trace_of(tmp_path, *FOUR), Prompts(), each=found.append)
        assert {each.why for each in found} == {"connect"}

    play(scenario)


@pytest.mark.parametrize(
    "wrong",
    [
        {"urls": []},
        {"urls": ["127.0.0.1:80"]},
        {"speed": 0.0},
        {"speed": math.nan},
        {"speed": math.inf},
        {"requests": -1},
        {"deadline_s": 0.0},
    ],
)
def test_impossible_plans(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Plan(**{"urls": ["http://a"], **wrong})
    with pytest.raises(ConfigError):
        Bounds(concurrency=0)


def test_api_keys_are_read_from_a_file(tmp_path: Path) -> None:
    seen: list[str] = []

    async def behave(asked: Asked) -> None:
        seen.append(asked.headers["authorization"])
        await answer_well(asked)

    (tmp_path / "key").write_text("# ours\n\n  alpha \n")
    outcomes_of(behave, tmp_path, api_key=read_api_key(tmp_path / "key"))
    assert seen == ["Bearer alpha"] * 4
    (tmp_path / "key").write_text("# nothing\n")
    with pytest.raises(ConfigError, match="no API key"):
        read_api_key(tmp_path / "key")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_api_key(tmp_path / "none")


def test_mock_engines_reuse_what_the_trace_shares(tmp_path: Path) -> None:
    """One engine with room for everything: it has what an endless cache has, in its smaller blocks."""
    rows = [
        (0.0, 1024, 2, [1, 2]),
        (1.0, 1500, 2, [1, 2, 3]),
        (2.0, 2048, 2, [1, 2, 4, 5]),
        (3.0, 2048, 2, [1, 2, 4, 5]),
        (4.0, 700, 2, [6, 7]),
    ]

    async def scenario() -> None:
        engine = MockEngine(replace(MockSettings(port=0)))
        url = await engine.open()
        found: list[Outcome] = []
        try:
            plan = Plan([url], speed=FAST, bounds=Bounds(concurrency=1))
            await replay_here(plan, trace_of(tmp_path, *rows), Prompts(), each=found.append)
        finally:
            await engine.close()
        assert [each.reusable for each in found] == [0, 1024, 1024, 1536, 0]
        assert [each.prompt_tokens for each in found] == [1024, 1500, 2048, 2048, 700]
        for each in found:
            assert 0 <= each.cached_tokens - each.reusable < 512
        assert found[3].cached_tokens == 2047  # the mock says that it computed the last token alone

    play(scenario)


def test_the_command_reports_draws_and_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], mock_engine_url: str
) -> None:
    path = write_trace(tmp_path, *FOUR)
    arguments = ["replay", str(path), "--url", mock_engine_url, "--speed", "1000", "--max-output", "2"]
    out = tmp_path / "run"
    files = ["--plot", f"{out}.html", "--json", f"{out}.json", "--lines", f"{out}.lines"]
    assert command([*arguments, *files]) == 0
    text = capsys.readouterr().out
    assert "4 sent" in text
    assert "4 answered" in text
    figures = json.loads(Path(f"{out}.json").read_text())
    assert (figures["answered"], figures["model"], figures["answer_tokens"]) == (4, "mock", 8)
    assert figures["slo"] == {"ttft_s": 30.0, "gap_s": None}
    lines = [json.loads(line) for line in Path(f"{out}.lines").read_text().splitlines()]
    assert sorted(line["number"] for line in lines) == [0, 1, 2, 3]
    assert {line["prompt_tokens"] for line in lines} == {1000}
    drawn = Path(f"{out}.html").read_text()
    assert drawn.count('class="dot"') == 4
    assert "http://" not in drawn  # nothing comes from elsewhere
    assert command([*arguments, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["sent"] == 4


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--token-ids", "five"], "takes LOW:HIGH"),
        (["--block-tokens", "1000"], "becomes 1 to 512 tokens"),
        (["--speed", "0"], "must be positive"),
        (["--plot", "run.gif"], ".html file"),
        (["--lines", "no/folder/run"], "cannot be written"),
        (["--json", "no/folder/run"], "cannot be written: there is no folder"),
        (["--api-key-file", "no/folder/key"], "cannot be read"),
    ],
)
def test_one_sentence_for_what_is_wrong(
    arguments: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_trace(tmp_path, *FOUR)
    assert command(["replay", str(path), "--url", "http://127.0.0.1:1", *arguments]) == 2
    assert sentence in capsys.readouterr().err


def test_a_replay_of_which_all_failed_has_failed(
    tmp_path: Path, free_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_trace(tmp_path, *FOUR)
    arguments = ["--url", f"http://127.0.0.1:{free_port}", "--model", "m", "--speed", "1000"]
    assert command(["replay", str(path), *arguments]) == 3
    assert "4: 4 connect" in capsys.readouterr().out


def test_an_unsorted_trace_is_named_with_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_trace(tmp_path, *reversed(FOUR))
    assert command(["replay", str(path), "--url", "http://127.0.0.1:1"]) == 2
    assert "line 2" in capsys.readouterr().err


def test_what_was_handed_over_is_not_taken_for_cached(tmp_path: Path) -> None:
    """Decode engines count it; the prefill engine's count is told by the proxy, if it knows."""
    told = iter((b"512", b"unknown", b"0", b""))

    async def behave(asked: Asked) -> None:
        cached = next(told)
        await asked.begin(b"X-Moonpool-Prefill-Cached: %b\r\n" % cached if cached else b"")
        await asked.token()
        await asked.end(len(asked.body["prompt"]), 999 if cached else 100, 1)

    found, results = outcomes_of(behave, tmp_path, bounds=Bounds(concurrency=1))
    assert [each.cached_tokens for each in found] == [512, -1, 0, 100]
    summary = results.summary(Slo())
    assert (summary.told, summary.cached_tokens) == (3, 612)


def test_a_trace_may_come_through_a_pipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], mock_engine_url: str
) -> None:
    lines = write_trace(tmp_path, *FOUR).read_bytes()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(lines,), daemon=True)
    writer.start()
    assert command(["replay", str(pipe), "--url", mock_engine_url, "--speed", "1000", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["answered"] == 4
    writer.join()


def test_ctrl_c_gives_the_report_so_far(tmp_path: Path, mock_engine_url: str) -> None:
    path = write_trace(tmp_path, FOUR[0], (1e6, 1000, 3, [1, 99]))
    lines = tmp_path / "lines"
    os.mkfifo(lines)
    arguments = ["replay", str(path), "--url", mock_engine_url, "--lines", str(lines), "--json", "-"]
    process = subprocess.Popen(
        [sys.executable, "-m", "moonpool", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        with lines.open("rb") as heard:
            assert json.loads(heard.readline())["ended"] == "answered"
            process.send_signal(signal.SIGINT)
            out, errors = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    figures = json.loads(out)
    assert (figures["sent"], figures["answered"], figures["stopped"]) == (1, 1, True)


@pytest.mark.parametrize(("cached", "is_warm"), [(500, True), (100, False)])
def test_caches_that_an_earlier_replay_warmed_are_named(cached: int, is_warm: bool) -> None:
    """Two replays of one trace say "98 % cached; caches without end would have 3 %"."""
    results = Results()
    results.add(
        Outcome(0, 0.0, 0.0, 1000, 100, Ended.ANSWERED, prompt_tokens=1000, cached_tokens=cached, end_s=1.0)
    )
    names = [name for name, _ in report.rows(results, Slo.of(30.0, 0.0))]
    assert ("warm" in names) == is_warm


def test_an_address_may_end_in_the_version_of_the_api(tmp_path: Path) -> None:
    """Clients of OpenAI's API are given http://host:port/v1."""

    async def scenario() -> None:
        async with server(answer_well) as url:
            plan = Plan([f"{url}/v1/"], model="m", speed=FAST)
            done = await replay_here(plan, trace_of(tmp_path, *FOUR), Prompts())
            assert done.results.summary(Slo.of(30.0, 0.0)).answered == 4

    play(scenario)


@pytest.mark.parametrize("last", [0.001, 0.7, 1.0, 1.9, 3.3, 8.0, 9.99, 10.0, 13.2, 59.0, 600.0, 86_399.0])
def test_times_on_the_axis_are_round(last: float) -> None:
    marks = plots.round_marks(last)
    assert 3 <= len(marks) <= 6
    assert marks[0] == 0
    assert marks[-1] <= last + 1e-9
    assert f"{marks[1]:e}"[0] in "125"


def test_times_of_thirteen_seconds_are_marked_by_fives() -> None:
    assert plots.round_marks(13.2) == [0, 5, 10]
