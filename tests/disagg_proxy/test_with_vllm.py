"""A real prefill and a real decode engine behind the proxy: it knows the ids that they see and where their
blocks lie, and what it says of a choice is what the engines then do.

One pair of engines for the whole file, and a proxy for each source of token ids. The prefill engine has
vLLM's page ``render``; the decode engine answers ``tokenize`` only.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moonpool.core.store.keys import chain_seed
from moonpool.disagg_proxy.events.prefix_indexes import PrefixIndexes
from moonpool.disagg_proxy.events.settings import parse_event_sources
from moonpool.disagg_proxy.events.subscriber import Subscriber
from moonpool.disagg_proxy.tokens.engine_source import EngineSource
from moonpool.disagg_proxy.tokens.local_source import LocalSource, LocalTokenizer
from moonpool.disagg_proxy.tokens.source import TextPrompt, TokenSource
from moonpool.disagg_proxy.tools.replay.client import Outcome
from moonpool.disagg_proxy.tools.simulator.job import Job
from moonpool.disagg_proxy.tools.simulator.trace import BLOCK_TOKENS as TRACE_TOKENS
from tests.connectors.vllm.conftest import KV_CONFIG
from tests.connectors.vllm.processes import warm
from tests.disagg_proxy.events.beds import eventually
from tests.disagg_proxy.processes import Address, Body, fetch, metrics, started, text_of, until_ready
from tests.disagg_proxy.tools.simulator.real import conversations, measured, outcomes, simulated
from tests.ports import kept_port

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

TINY_MODEL = Path(__file__).parents[2] / "examples" / "demo" / "tiny_model.py"
ENGINES = ("prefill", "decode")
BLOCK_TOKENS = 32
CACHE_BYTES = 256 << 20  # 2,048 blocks: all of the longest replay here, and what was measured before it
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


@dataclass
class Pair:
    """engines: where each listens; events: as the proxy's option takes them; heard: our own follower of these
    streams, to know what the engines have told; pages: ports of the engines' bootstrap pages."""

    model: Path
    engines: dict[str, Address]
    events: list[str]
    heard: Subscriber
    indexes: PrefixIndexes
    pages: dict[str, int] = field(default_factory=dict)
    proxies: dict[str, Address] = field(default_factory=dict)
    logs: dict[str, Path] = field(default_factory=dict)

    def url(self, engine: str) -> str:
        host, port = self.engines[engine]
        return f"http://{host}:{port}"

    def held(self, engine: str, ids: list[int]) -> int:
        """Leading tokens of a prompt that the engine has told to have."""
        index = self.indexes.obtain(BLOCK_TOKENS)
        assert index is not None
        match = index.match(index.keys(np.array(ids, "<u4").tobytes(), chain_seed(None, None)))
        blocks = [*memoryview(match.device).cast("I"), 0, 0]
        return int(blocks[ENGINES.index(engine)]) * BLOCK_TOKENS

    def until_heard(self, proxy: str, engine: str, ids: list[int], tokens: int) -> None:
        """Until the engine has told that it holds these, and the proxy has heard all that we have."""
        eventually(lambda: self.held(engine, ids) == tokens, f"{engine} tells of {tokens} tokens")
        told = {name: row["sequence"] for name, row in self.heard.stats().items()}

        def is_heard() -> bool:  # engines may have told more meanwhile
            heard = self.heard_by(proxy)
            return all(heard[name] >= sequence for name, sequence in told.items())

        eventually(is_heard, f"the proxy hears {told}")

    def heard_by(self, proxy: str) -> dict[str, float]:
        samples = metrics(self.proxies[proxy])
        return {name: samples["moonpool_proxy_events_sequence", name] for name in ENGINES}


@pytest.fixture(scope="module")
def pair(vllm_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("pair")
    model = folder / "tiny"
    subprocess.run([sys.executable, TINY_MODEL, model], check=True)
    with ExitStack() as stack:
        # Sockets have short paths only.
        runtime = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moonpool-")))
        events = [f"{name}=ipc://{runtime}/{name},ipc://{runtime}/{name}-replay" for name in ENGINES]
        indexes = PrefixIndexes(blocks_max=10_000)
        heard = Subscriber(
            parse_event_sources(events), indexes, {name: place for place, name in enumerate(ENGINES)}
        )
        heard.start()
        stack.callback(heard.stop)
        pair = Pair(model, {}, events, heard, indexes)
        running = {}
        for name in ENGINES:
            pair.engines[name] = ("127.0.0.1", kept_port())
            pair.pages[name] = kept_port()
            pair.logs[name] = folder / f"{name}.log"
            command = engine_command(vllm_python, pair, name, runtime)
            running[name] = started(stack, command, pair.logs[name], runtime, warm(vllm_python))
        for name, process in running.items():
            until_ready(process, pair.engines[name], pair.logs[name])
        for name, option in (("engine", []), ("local", ["--tokenizer", f"tiny={model}"])):
            pair.proxies[name] = ("127.0.0.1", kept_port())
            pair.logs[f"{name} proxy"] = folder / f"{name}-proxy.log"
            command = proxy_command(pair, pair.proxies[name]) + option
            process = started(stack, command, pair.logs[f"{name} proxy"], runtime)
            until_ready(process, pair.proxies[name], pair.logs[f"{name} proxy"])
        yield pair


def engine_command(python: str, pair: Pair, name: str, runtime: Path) -> list[str]:
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"ipc://{runtime}/{name}",
        "replay_endpoint": f"ipc://{runtime}/{name}-replay",
        "topic": "kv-events",
    }
    host, port = pair.engines[name]
    command = [python, "-m", "vllm.entrypoints.cli.main", "serve", str(pair.model)]
    command += ["--host", host, "--port", str(port), "--served-model-name", "tiny", "--dtype", "float32"]
    command += ["--max-model-len", "4096", "--max-num-seqs", "8", "--block-size", str(BLOCK_TOKENS)]
    command += ["--kv-cache-memory-bytes", str(CACHE_BYTES), "--enforce-eager", "--seed", "0"]
    more = {"bootstrap_port": pair.pages[name], "neighbour_wait_s": 10.0}
    extra = KV_CONFIG["kv_connector_extra_config"] | more  # type: ignore[operator]
    connector = {**KV_CONFIG, "kv_connector_extra_config": extra}
    command += ["--kv-transfer-config", json.dumps(connector), "--kv-events-config", json.dumps(events)]
    command += ["--enable-prompt-tokens-details"]
    return command + (["--enable-scale-out"] if name == "prefill" else [])


def proxy_command(pair: Pair, listen: Address) -> list[str]:
    command = [sys.executable, "-m", "moonpool", "proxy", "--policy", "conductor"]
    command += ["--listen", f"{listen[0]}:{listen[1]}"]
    for name in ENGINES:
        command += [f"--{name}", f"{name}={pair.url(name)}"]
    for stream in pair.events:
        command += ["--events", stream]
    return [*command, "--switch-header", "store"]


def ask(pair: Pair, proxy: str, path: str, body: Body) -> tuple[Body, dict[str, Any]]:
    """(the answer, the proxy's decision)"""
    body = {"model": "tiny", "max_tokens": 4, "temperature": 0} | body
    status, headers, content = fetch(pair.proxies[proxy], "POST", path, body)
    assert status == 200, content
    decision = json.loads(headers["X-Moonpool-Decision"])
    assert headers["X-Moonpool-Engine"] == decision["engine"] == "decode"
    return json.loads(content), decision


def text_in(answer: Body) -> str:
    return str(answer["choices"][0]["message"]["content"])


def blocks(tokens: int) -> int:
    return tokens // BLOCK_TOKENS * BLOCK_TOKENS


def user(text: str) -> Body:
    return {"role": "user", "content": text}


@pytest.mark.parametrize("proxy", ["engine", "local"])
def test_what_is_predicted_comes_true(pair: Pair, proxy: str) -> None:
    """A conversation, completions of text and of ids; long ones in two steps, short rests where they are
    decoded."""
    seed = 10 * list(pair.proxies).index(proxy)
    tokenizer = LocalTokenizer(pair.model)

    def turn(kind: str, body: Body, prefill: str | None, own: int) -> tuple[Body, list[int]]:
        """Asks, and waits until the engines have told of the new blocks. own: tokens that the engine which
        computes the prompt has in its own cache."""
        ids = body.get("prompt")
        if not isinstance(ids, list):
            told = tokenizer.ids(TextPrompt(kind, "tiny", json.dumps(body).encode()))
            ids = np.frombuffer(told or b"", "<u4").tolist()
        answer, decision = ask(pair, proxy, PATHS[kind], body)
        usage = answer["usage"]
        assert len(ids) == usage["prompt_tokens"] == decision["prompt_tokens"]
        # After a hand-over vLLM's decode engine reports what prefill had cached.
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert (decision["prefill"], decision["own_tokens"], cached) == (prefill, own, own)
        for engine in {prefill or "decode", "decode"}:
            pair.until_heard(proxy, engine, ids, blocks(len(ids)))
        return answer, ids

    talk = [user(text_of(seed + 1, 800))]
    first, first_ids = turn("chat", {"messages": talk}, "prefill", 0)
    talk = [*talk, {"role": "assistant", "content": text_in(first)}, user("and then?")]
    second, _ = turn("chat", {"messages": talk}, None, blocks(len(first_ids)))
    talk = [*talk, {"role": "assistant", "content": text_in(second)}, user(text_of(seed + 2, 400))]
    turn("chat", {"messages": talk}, "prefill", blocks(len(first_ids)))
    text = text_of(seed + 3, 700)
    turn("completions", {"prompt": text}, "prefill", 0)
    _, ids = turn("completions", {"prompt": text + text_of(seed + 4, 20)}, None, blocks(700))
    ids = ids + [97 + place % 7 for place in range(300)]
    turn("completions", {"prompt": ids}, "prefill", blocks(700))
    turn("chat", {"messages": [user(f"hi {proxy}")]}, None, 0)

    def compared() -> list[float]:
        samples = metrics(pair.proxies[proxy])
        return [samples["moonpool_proxy_cache_predictions_total", engine] for engine in ENGINES]

    eventually(lambda: compared() == [4, 3], "every answer is held against what was predicted")
    samples = metrics(pair.proxies[proxy])
    assert samples["moonpool_proxy_blind_decisions_total", ""] == 0
    for engine in ENGINES:
        assert samples["moonpool_proxy_cache_predictions_wrong_total", engine] == 0
    assert "what was predicted" not in pair.logs[f"{proxy} proxy"].read_text()


def test_both_sources_know_the_ids_that_the_engine_sees(pair: Pair) -> None:
    """vLLM's pages render and tokenize, and its tokenizer and template here; the ids' digests are those of
    its events.
    """
    messages = [
        {"role": "system", "content": "Speak as a pirate. \u2620"},
        user("Who goes\nthere? \u00e9"),
        {"role": "assistant", "content": "Arr."},
        {"role": "user", "content": [{"type": "text", "text": text_of(91, 200)}]},
    ]
    bodies = {
        "chat": {"messages": messages},
        "completions": {"prompt": text_of(92, 200) + "<s>\u2620 tail"},
    }
    for kind, body in bodies.items():
        answer, _ = ask(pair, "engine", PATHS[kind], body | {"return_token_ids": True})
        seen = answer["prompt_token_ids"] if kind == "chat" else answer["choices"][0]["prompt_token_ids"]
        prompt = TextPrompt(kind, "tiny", json.dumps({"model": "tiny", **body}).encode())
        assert asyncio.run(known(pair, prompt)) == {"render": seen, "tokenize": seen, "local": seen}
        pair.until_heard("engine", "decode", seen, blocks(len(seen)))


def not_stored(path: str, text: str) -> tuple[Body, tuple[str, ...]]:
    """A body for the path, and the engines that get it."""
    text += " once upon a time" * 60
    if path == "/v1/completions":
        return {"prompt": text}, ENGINES
    if path == "/v1/chat/completions":
        return {"messages": [user(text)]}, ENGINES
    if path == "/v1/responses":
        return {"input": text, "max_output_tokens": 16}, ("decode",)
    return {"messages": [user(text)], "max_tokens": 4}, ("decode",)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_a_request_that_is_not_to_be_stored_says_so_to_each_engine(pair: Pair, path: str) -> None:
    """On every path whose kv_transfer_params vLLM gives to its connector; what a client writes there does not
    arrive."""

    def counts() -> dict[str, float]:
        rows = {}
        for engine in ENGINES:
            for row in fetch(pair.engines[engine], "GET", "/metrics")[2].decode().splitlines():
                if row.startswith("moonpool_connector_switched_off_total{") and 'switch="store"' in row:
                    rows[engine] = float(row.rsplit(" ", 1)[1])
        return rows

    body, told = not_stored(path, f"a forged request to {path}")
    body["kv_transfer_params"] = {"moonpool": {"store": False, "load": False}}
    before = counts()
    assert fetch(pair.proxies["local"], "POST", path, {"model": "tiny"} | body)[0] == 200
    body, _ = not_stored(path, f"one that is kept out to {path}")
    body["kv_transfer_params"] = {"moonpool": {"store": True}}
    answer = fetch(pair.proxies["local"], "POST", path, {"model": "tiny"} | body, X_Moonpool_Store="off")
    assert answer[0] == 200, answer[2]
    expected = {engine: before[engine] + (engine in told) for engine in ENGINES}
    eventually(lambda: counts() == expected, f"only {told} are told, once each")


async def known(pair: Pair, prompt: TextPrompt) -> dict[str, list[int]]:
    """By each source of ids."""
    sources: dict[str, TokenSource] = {
        "render": EngineSource(lambda _: [pair.url("prefill")]),
        "tokenize": EngineSource(lambda _: [pair.url("decode")]),
    }
    found = {name: await source.ids(prompt) or b"" for name, source in sources.items()}
    found["local"] = LocalSource({"tiny": pair.model}).ids(prompt) or b""
    for source in sources.values():
        await source.close()
    return {name: np.frombuffer(ids, "<u4").tolist() for name, ids in found.items()}


@pytest.mark.parametrize(("sessions", "turns"), [(10, 4), pytest.param(20, 8, marks=pytest.mark.heavy)])
def test_the_simulator_says_what_a_real_engine_does(pair: Pair, sessions: int, turns: int) -> None:
    """Hits to the token, first tokens within a factor of two, at a load of a half. The machine is measured in
    front of the replay: four lengths of prompts, a cached one, and answers alone and together. What else runs
    here may change in between, so it may try three times."""
    rows = conversations(sessions, turns, random.Random(sessions))
    url = pair.url("decode")

    async def both(seed: int) -> tuple[list[Outcome], list[Job]]:
        machine = await measured(url, BLOCK_TOKENS, seed)
        work_s = sum(machine.compute_s(job.arrival.tokens, job.own) for job in simulated(rows, machine, 1.0))
        speed = rows[-1].at_s / (2 * work_s)
        print(f"{machine}, {work_s:.1f} s of prefill, {speed:.2f} times the trace's speed")
        real = await outcomes(url, rows, BLOCK_TOKENS, speed=speed, at_once=64, seed=seed + 1)
        return real, simulated(rows, machine, speed)

    ratios = []
    for attempt in range(3):
        real, jobs = asyncio.run(both(1000 * sessions + 10 * attempt))
        hits = [outcome.cached_tokens * TRACE_TOKENS // BLOCK_TOKENS for outcome in real]
        assert hits == [job.own for job in jobs]
        assert sum(hits) > sum(row.tokens for row in rows) / 3
        medians = [statistics.median(each.ttft_s for each in found) for found in (real, jobs)]
        means = [statistics.fmean(each.ttft_s for each in found) for found in (real, jobs)]
        print(
            f"median TTFT {medians[0]:.4f} s, simulated {medians[1]:.4f}; mean {means[0]:.4f}, {means[1]:.4f}"
        )
        ratios.append(medians[1] / medians[0])
        if 0.5 <= ratios[-1] <= 2.0:
            return
    raise AssertionError(f"the simulated median over the real one: {ratios}")


def test_an_engine_takes_what_the_proxy_knows_to_be_in_anothers_own_cache(pair: Pair, tmp_path: Path) -> None:
    """There is no pool. The proxy hears of the blocks of one engine, and tells the other one, which asks
    it."""
    address, log = ("127.0.0.1", kept_port()), tmp_path / "log"
    command = [sys.executable, "-m", "moonpool", "proxy", "--listen", f"127.0.0.1:{address[1]}"]
    command += ["--policy", "tests.disagg_proxy.dispatch.by_session:BySession"]
    for name in ENGINES:
        command += ["--engine", f"{name}={pair.url(name)}#bootstrap={pair.pages[name]}"]
    for stream in pair.events:
        command += ["--events", stream]
    prompt = [place * 31 % 251 for place in range(1000)]

    def answer_of(session: str) -> tuple[Body, Body]:
        body = {
            "model": "tiny",
            "max_tokens": 8,
            "temperature": 0,
            "prompt": prompt,
            "return_token_ids": True,
        }
        status, headers, content = fetch(
            address, "POST", PATHS["completions"], body, X_Moonpool_Session=session
        )
        assert status == 200, content
        return json.loads(content), json.loads(headers["X-Moonpool-Decision"])

    with ExitStack() as stack:
        until_ready(started(stack, command, log, tmp_path), address, log)
        pair.proxies["neighbours"] = address
        stack.callback(pair.proxies.pop, "neighbours")
        up = [("moonpool_proxy_bootstrap_up", name) for name in ENGINES]
        eventually(lambda: all(metrics(address).get(one) == 1 for one in up), "the pages are known")
        first, decision = answer_of("0")
        assert (decision["engine"], decision.get("neighbour")) == ("prefill", None)
        pair.until_heard("neighbours", "prefill", prompt, 992)
        second, decision = answer_of("1")
        assert (decision["engine"], decision.get("neighbour")) == ("decode", "prefill")
        assert metrics(address)["moonpool_proxy_neighbours_named_total", ""] == 1
    assert second["choices"][0]["token_ids"] == first["choices"][0]["token_ids"]
    assert second["kv_transfer_params"]["moonpool"]["neighbour_tokens"] == 992
    assert first["kv_transfer_params"]["moonpool"]["local_tokens"] == 0


def test_no_block_stays_behind(pair: Pair) -> None:
    """The gauge is of the last step, so each look begins with one."""

    def used(engine: str) -> float:
        body = {"model": "tiny", "prompt": "x", "max_tokens": 1}
        assert fetch(pair.engines[engine], "POST", "/v1/completions", body)[0] == 200
        return sum(
            value
            for (name, _), value in metrics(pair.engines[engine]).items()
            if name in ("vllm:kv_cache_usage_perc", "vllm:num_requests_running", "vllm:num_requests_waiting")
        )

    for engine in ENGINES:
        eventually(lambda engine=engine: used(engine) == 0, f"{engine} has freed everything")
    for address in pair.proxies.values():

        def books(address: Address = address) -> list[float]:
            samples = metrics(address)
            return [samples["moonpool_proxy_books_requests", engine] for engine in ENGINES]

        eventually(lambda books=books: books() == [0, 0], "the proxy's books are empty")
