"""The proxy in front of a real prefill and a real decode server of SGLang: it finds out what they are, asks
both at once, and its answers are those of Hugging Face for the same weights. The model is in float32, so that
they are the same to the last token.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.connectors.sglang import sglang_cpu
from tests.connectors.sglang.server import PAGE_TOKENS, _free_port, environment
from tests.connectors.sglang.transfer.installed import install
from tests.connectors.sglang.transfer.pair import Half
from tests.disagg_proxy.events.beds import eventually
from tests.disagg_proxy.test_with_vllm import Address, fetch, metrics, started, text_of, until_ready

pytestmark = [pytest.mark.sglang, pytest.mark.heavy, pytest.mark.slow, pytest.mark.timeout(900)]

TINY_MODEL = Path(__file__).parents[2] / "examples" / "demo" / "tiny_model.py"
TOKENS = 8
PROMPTS = [text_of(seed, length) for seed, length in ((1, 7), (2, 10 * PAGE_TOKENS), (3, 700), (4, 701))]
REFERENCE = """
import json, sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
count = int(sys.argv[2])
out = []
for text in json.load(sys.stdin):
    ids = torch.tensor([list(text.encode())])
    with torch.no_grad():
        made = model.generate(ids, max_new_tokens=count, min_new_tokens=count, do_sample=False)
        logprobs = model(ids).logits[0].log_softmax(-1)
    told = [float(logprobs[at - 1, ids[0, at]]) for at in range(1, ids.shape[1])]
    out.append((made[0, ids.shape[1] :].tolist(), told))
json.dump(out, sys.stdout)
"""


class Speaking(Half):
    """With a tokenizer, and KV events."""

    def _start(self) -> subprocess.Popen[bytes]:
        folder = self.log.parent
        events = {
            "publisher": "zmq",
            "endpoint": f"ipc://{folder}/{self.log.stem}",
            "replay_endpoint": f"ipc://{folder}/{self.log.stem}-replay",
            "topic": "kv-events",
        }
        self._command = [flag for flag in self._command if flag != "--skip-tokenizer-init"]
        self._command += [
            f"--kv-events-config={json.dumps(events)}",
            "--served-model-name=tiny",
            "--dtype=float32",
        ]
        return super()._start()

    @property
    def events(self) -> str:
        return f"{self.log.stem}=ipc://{self.log.parent}/{self.log.stem},ipc://{self.log.parent}/{self.log.stem}-replay"


@dataclass
class Bed:
    """said: of each prompt what Hugging Face makes of it, and the logprobs of its tokens but the first."""

    prefill: Speaking
    decode: Speaking
    proxy: Address
    said: dict[str, tuple[list[int], list[float]]]

    def ask(self, path: str, body: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """(the answer, the proxy's decision)"""
        status, headers, content = fetch(self.proxy, "POST", path, body)
        assert status == 200, content
        return json.loads(content), json.loads(headers["X-Moonpool-Decision"])

    def until_idle(self) -> None:
        """Neither server has a request, and the proxy's books are empty."""
        for half in (self.prefill, self.decode):
            eventually(lambda half=half: running(half) == 0, f"{half.log.stem} has no request")
        eventually(
            lambda: (
                sum(
                    value
                    for (name, _), value in metrics(self.proxy).items()
                    if name == "moonpool_proxy_books_requests"
                )
                == 0
            ),
            "the books are empty",
        )


def running(half: Half) -> float:
    loads = json.loads(half.call("GET", "v1/loads"))["loads"]
    return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)


@pytest.fixture(scope="module")
def bed() -> Iterator[Bed]:
    python = os.environ.get("MOONPOOL_SGLANG_PYTHON")
    if not python:
        pytest.skip("MOONPOOL_SGLANG_PYTHON is not set: it names a Python with SGLang, see docs/sglang.md")
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moonpool-")))
        sglang_cpu.install(place / "plugin")
        install(place / "moonpool")
        model = place / "tiny"
        subprocess.run([sys.executable, TINY_MODEL, model], check=True)
        port = _free_port()
        plugins = (place / "plugin", place / "moonpool")
        halves = []
        for mode in ("prefill", "decode"):
            halves.append(Speaking(mode, model, place, plugins, place / f"{mode}.log", port))
            stack.callback(halves[-1].close)
        reference = subprocess.run(
            [python, "-c", REFERENCE, model, str(TOKENS)],
            input=json.dumps(PROMPTS).encode(),
            env=environment(place),
            stdout=subprocess.PIPE,
            timeout=300,
            check=True,
        )
        said = dict(zip(PROMPTS, map(tuple, json.loads(reference.stdout)), strict=True))
        for half in halves:
            half.wait()
        proxy = ("127.0.0.1", _free_port())
        command = [sys.executable, "-m", "moonpool", "proxy", "--policy", "conductor"]
        command += ["--listen", f"{proxy[0]}:{proxy[1]}"]
        for half in halves:  # no role is given
            command += ["--engine", f"{half.log.stem}=http://127.0.0.1:{half.port}", "--events", half.events]
        until_ready(started(stack, command, place / "proxy.log", place), proxy, place / "proxy.log")
        try:
            yield Bed(*halves, proxy, said)
        except BaseException:
            for half in halves:
                print(half.tail(), file=sys.stderr)
            raise


def generate(prompt: Any, **more: Any) -> dict[str, Any]:
    name = "text" if isinstance(prompt, str) or isinstance(prompt[0], str) else "input_ids"
    sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    return {name: prompt, "sampling_params": sampling, **more}


def completion(prompt: Any, **more: Any) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
    return {"model": "tiny", "prompt": prompt, **sampling, **more}


def text(ids: list[int]) -> str:
    return bytes(token for token in ids if token < 256).decode(errors="replace")


def test_answers_are_those_of_one_engine(bed: Bed) -> None:
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


def test_streams(bed: Bed) -> None:
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
def test_a_batch(bed: Bed, path: str) -> None:
    for prompts in (PROMPTS, [list(prompt.encode()) for prompt in PROMPTS]):
        answer, _ = bed.ask(path, (generate if path == "/generate" else completion)(prompts))
        expected = [bed.said[prompt][0] for prompt in PROMPTS]
        if path == "/generate":
            assert [each["output_ids"] for each in answer] == expected
        else:
            assert [each["text"] for each in answer["choices"]] == list(map(text, expected))


@pytest.mark.parametrize("streams", [False, True])
def test_logprobs_of_the_prompt(bed: Bed, streams: bool) -> None:
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


def test_what_is_predicted_comes_true(bed: Bed) -> None:
    """Ids come from SGLang's /tokenize, blocks from its KV events."""
    prompt = text_of(9, 40 * PAGE_TOKENS)
    for own in (0, 39 * PAGE_TOKENS, 39 * PAGE_TOKENS):
        _, why = bed.ask("/v1/completions", completion(prompt))
        assert why["prompt_tokens"] == len(prompt)
        assert why["own_tokens"] >= own
        assert bool(why["own_tokens"]) == bool(own)
        bed.until_idle()
    samples = metrics(bed.proxy)
    assert samples["moonpool_proxy_blind_decisions_total", ""] == 0
    assert samples["moonpool_proxy_cache_predictions_wrong_total", "prefill"] == 0


def test_clients_that_leave(bed: Bed) -> None:
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


def test_prefill_dies_while_decode_waits(bed: Bed) -> None:
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
    status, _, content = fetch(bed.proxy, "POST", "/generate", generate(PROMPTS[3]))
    assert status == 503
    assert b"no healthy prefill engine is left for decode" in content
