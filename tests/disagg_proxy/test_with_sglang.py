"""The proxy in front of a real prefill and a real decode server of SGLang: it finds out what they are, asks
both at once, and its answers are those of Hugging Face for the same weights, as are the pair's own without
it. The model is in float32, so that they are the same to the last token.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest

from tests.connectors.forks import ForkedProcess
from tests.connectors.sglang.bed import make_bed
from tests.connectors.sglang.reference import MAX_TOKENS
from tests.connectors.sglang.server import PAGE_TOKENS
from tests.connectors.sglang.transfer.pair import Half, Line, make_line
from tests.disagg_proxy.events.beds import eventually
from tests.disagg_proxy.processes import Address, fetch, metrics, started, text_of, until_ready
from tests.ports import kept_port

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(900)]

PROMPTS = [text_of(seed, length) for seed, length in ((1, 7), (2, 10 * PAGE_TOKENS), (3, 700), (4, 701))]


class Speaking(Half):
    """With a tokenizer, and KV events."""

    def _start(self) -> ForkedProcess:
        events = {
            "publisher": "zmq",
            "endpoint": self._events,
            "replay_endpoint": f"{self._events}-replay",
            "topic": "kv-events",
        }
        self._command = [flag for flag in self._command if flag != "--skip-tokenizer-init"]
        self._command += [f"--kv-events-config={json.dumps(events)}", "--served-model-name=tiny"]
        return super()._start()

    @property
    def events(self) -> str:
        return f"{self.log.stem}={self._events},{self._events}-replay"

    @property
    def _events(self) -> str:
        return f"ipc://{self._environment['MOONPOOL_RUNTIME_DIR']}/{self.log.stem}"  # short


@dataclass
class Front:
    """The pair and the proxy; said: of each prompt what Hugging Face makes of it, and the logprobs of its
    tokens but the first."""

    line: Line
    proxy: Address
    said: dict[str, tuple[list[int], list[float]]]

    @property
    def prefill(self) -> Half:
        return self.line.pair.prefill

    @property
    def decode(self) -> Half:
        return self.line.pair.decode

    def ask(self, path: str, body: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """(the answer, the proxy's decision)"""
        status, headers, content = fetch(self.proxy, "POST", path, body)
        assert status == 200, content
        return json.loads(content), json.loads(headers["X-Moonpool-Decision"])

    def until_idle(self) -> None:
        """Neither server has a request, and the proxy's books are empty."""
        eventually(lambda: running(self.prefill) == 0, "prefill has no request")
        eventually(lambda: running(self.decode) == 0, "decode has no request")
        eventually(lambda: booked(self.proxy) == 0, "the books are empty")


def booked(proxy: Address) -> float:
    samples = metrics(proxy).items()
    return sum(value for (name, _), value in samples if name == "moonpool_proxy_books_requests")


def running(half: Half) -> float:
    loads: list[dict[str, float]] = json.loads(half.call("GET", "v1/loads"))["loads"]
    return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    asked = [list(prompt.encode()) for prompt in PROMPTS]
    with ExitStack() as stack:
        bed = stack.enter_context(make_bed(tmp_path_factory.mktemp("proxy")))
        line = stack.enter_context(make_line(bed, asked, kind=Speaking))
        said = dict(zip(PROMPTS, zip(line.expected, line.logprobs, strict=True), strict=True))
        proxy, log = ("127.0.0.1", kept_port()), bed.folder / "proxy.log"
        command = [sys.executable, "-m", "moonpool", "proxy", "--policy", "conductor"]
        command += ["--listen", f"{proxy[0]}:{proxy[1]}"]
        for half in (line.pair.prefill, line.pair.decode):  # no role is given
            assert isinstance(half, Speaking)
            command += ["--engine", f"{half.log.stem}=http://127.0.0.1:{half.port}", "--events", half.events]
        until_ready(started(stack, command, log, bed.runtime), proxy, log)
        try:
            yield Front(line, proxy, said)
        finally:
            print(log.read_text(errors="replace")[-4000:], file=sys.stderr)


def generate(prompt: Any, **more: Any) -> dict[str, Any]:
    name = "text" if isinstance(prompt, str) or isinstance(prompt[0], str) else "input_ids"
    sampling = {"temperature": 0, "max_new_tokens": MAX_TOKENS, "ignore_eos": True}
    return {name: prompt, "sampling_params": sampling, **more}


def completion(prompt: Any, **more: Any) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_tokens": MAX_TOKENS, "ignore_eos": True}
    return {"model": "tiny", "prompt": prompt, **sampling, **more}


def text(ids: list[int]) -> str:
    return bytes(token for token in ids if token < 256).decode(errors="replace")


def test_the_pair_alone(bed: Front) -> None:
    bed.line.answers_all()
    bed.line.answers_at_once(3)


def test_answers_are_those_of_one_engine(bed: Front) -> None:
    rows = json.loads(fetch(bed.proxy, "GET", "/engines")[2])["engines"]
    assert [(row["name"], row["role"]) for row in rows] == [("prefill", "prefill"), ("decode", "decode")]
    for prompt in PROMPTS:
        expected = bed.said[prompt][0]
        ids = list(prompt.encode())
        for asked in (prompt, ids):
            answer, why = bed.ask("/generate", generate(asked))
            assert answer["output_ids"] == expected
            assert (why["prefill"], why["engine"], why["handover"]) == ("prefill", "decode", "one_shot")
            assert why["prompt_tokens"] == len(ids)
        answer, _ = bed.ask("/v1/completions", completion(prompt))
        assert answer["choices"][0]["text"] == text(expected)
    bed.until_idle()


def test_streams(bed: Front) -> None:
    prompt = PROMPTS[2]
    expected = bed.said[prompt][0]
    status, _, content = fetch(bed.proxy, "POST", "/v1/completions", completion(prompt, stream=True))
    events = [line[6:] for line in content.split(b"\n\n") if line.startswith(b"data: {")]
    assert status == 200
    said = "".join(json.loads(event)["choices"][0]["text"] for event in events if b'"text"' in event)
    assert said == text(expected)
    status, _, content = fetch(bed.proxy, "POST", "/generate", generate(prompt, stream=True))
    events = [line[6:] for line in content.split(b"\n\n") if line.startswith(b"data: {")]
    assert json.loads(events[-1])["output_ids"] == expected
    chat = {
        "model": "tiny",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 4,
        "stream": True,
    }
    status, _, content = fetch(bed.proxy, "POST", "/v1/chat/completions", chat)
    assert status == 200
    assert content.endswith(b"data: [DONE]\n\n")
    assert b'"error"' not in content


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_a_batch(bed: Front, path: str) -> None:
    for prompts in (PROMPTS, [list(prompt.encode()) for prompt in PROMPTS]):
        answer, _ = bed.ask(path, (generate if path == "/generate" else completion)(prompts))
        expected = [bed.said[prompt][0] for prompt in PROMPTS]
        if path == "/generate":
            assert [each["output_ids"] for each in answer] == expected
        else:
            assert [each["text"] for each in answer["choices"]] == list(map(text, expected))


@pytest.mark.parametrize("streams", [False, True])
def test_logprobs_of_the_prompt(bed: Front, streams: bool) -> None:
    prompts = PROMPTS[:2]
    for prompt in prompts:
        body = generate(prompt, return_logprob=True, logprob_start_len=0, stream=streams)
        status, _, content = fetch(bed.proxy, "POST", "/generate", body)
        assert status == 200, content
        if streams:
            content = [line[6:] for line in content.split(b"\n\n") if line.startswith(b"data: {")][-1]
        answer = json.loads(content)
        told = answer["meta_info"]["input_token_logprobs"]
        assert [row[1] for row in told] == list(prompt.encode())
        assert told[0][0] is None
        assert [row[0] for row in told[1:]] == pytest.approx(bed.said[prompt][1], abs=1e-3)
        assert answer["output_ids"] == bed.said[prompt][0]


def test_what_is_predicted_comes_true(bed: Front) -> None:
    """Ids come from SGLang's /tokenize, blocks from its KV events."""
    prompt = text_of(9, 40 * PAGE_TOKENS)
    blind = "moonpool_proxy_blind_decisions_total", ""
    before = metrics(bed.proxy)[blind]  # batches are
    for own in (0, 39 * PAGE_TOKENS, 39 * PAGE_TOKENS):
        _, why = bed.ask("/v1/completions", completion(prompt))
        assert why["prompt_tokens"] == len(prompt)
        assert why["own_tokens"] >= own
        assert bool(why["own_tokens"]) == bool(own)
        bed.until_idle()
    samples = metrics(bed.proxy)
    assert samples[blind] == before
    assert samples["moonpool_proxy_cache_predictions_wrong_total", "prefill"] == 0


def test_clients_that_leave(bed: Front) -> None:
    """While decode waits, and while it answers."""
    for number in range(6):
        connection = http.client.HTTPConnection(*bed.proxy, timeout=60)
        body = completion(text_of(20 + number, 900), stream=True) | {"max_tokens": 2000}
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        if number % 2:
            assert connection.getresponse().read(10)
        connection.close()
    bed.until_idle()
    answer, _ = bed.ask("/generate", generate(PROMPTS[1]))
    assert answer["output_ids"] == bed.said[PROMPTS[1]][0]


def test_prefill_dies_while_decode_waits(bed: Front) -> None:
    """The last test: it is not started again. The client hears of it long before SGLang's decode engine
    does."""
    os.killpg(bed.prefill._process.pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as threads:
        asking = threads.submit(fetch, bed.proxy, "POST", "/generate", generate(PROMPTS[3]))
        eventually(
            lambda: metrics(bed.proxy)["moonpool_proxy_requests_in_flight", "decode"] == 1, "decode is asked"
        )
        killed_s = time.monotonic()
        os.killpg(bed.prefill._process.pid, signal.SIGKILL)
        status, _, content = asking.result(60)
    took_s = time.monotonic() - killed_s
    print(f"the client was told {took_s:.2f} s after prefill was killed: {content!r}", file=sys.stderr)
    assert status == 502
    assert b"prefill" in content
    assert took_s < 4
    eventually(lambda: running(bed.decode) == 0, "decode has let go")
    healthy = ("moonpool_proxy_engine_healthy", "prefill")
    eventually(lambda: metrics(bed.proxy)[healthy] == 0, "a check has found out about prefill")
    status, _, content = fetch(bed.proxy, "POST", "/generate", generate(PROMPTS[3]))
    assert status == 503
    assert b"no healthy prefill engine is left for decode" in content
