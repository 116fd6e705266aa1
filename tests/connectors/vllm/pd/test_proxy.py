"""A real prefill and a real decode engine behind ``moonpool proxy``, in both forms of the hand-over: the
tokens of one engine alone, handed over and not computed twice, and no block that stays behind.

One pair of engines for the whole file, and a proxy for each form. The last test kills the prefill engine.
PD_PREFILL_RANKS=2 gives it so many data-parallel ranks, which take much longer to start.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import random
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

from tests.connectors.forks import AnyProcess, ForkedProcess, Warm
from tests.connectors.vllm.conftest import BLOCK_TOKENS, make_prompt
from tests.connectors.vllm.processes import environment, warm
from tests.ports import held_ports, held_run

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

HEADERS = {"Content-Type": "application/json", "X-Moonpool-Decision": "1", "X-Request-Id": "the-same"}
FORMS = ("two_step", "concurrent")
RANKS = int(os.environ.get("PD_PREFILL_RANKS", "1"))
LENGTHS = (2, 31, 32, 33, 255, 257, 1000)
START_S = 400.0
ANSWER_S = 120.0
SETTLE_S = 30.0
CLIENTS = 40
AT_A_TIME = 8
ODD = ("moonpool_connector_handover_refused_total", "moonpool_connector_survived_errors_total")
USED = ("vllm:kv_cache_usage_perc", "vllm:num_requests_running", "vllm:num_requests_waiting")


@dataclass
class Line:
    """ports: of the engines and of the proxy of each form."""

    ports: dict[str, int]
    prefill: AnyProcess
    proxy_log: Path

    def ask(self, whom: str, prompt: list[int], **more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """(the answer, the proxy's decision)"""
        body = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": 8,
            "temperature": 0,
            "return_token_ids": True,
        }
        status, headers, content = fetch(self.ports[whom], "POST", "/v1/completions", body | more)
        assert status == 200, content
        return json.loads(content), json.loads(headers.get("X-Moonpool-Decision", "{}"))

    def forget(self) -> None:
        """Prompts are computed or handed over again, not found in the engines' own caches."""
        for engine in ("prefill", "decode"):
            self.until_unused(engine)
            assert fetch(self.ports[engine], "POST", "/reset_prefix_cache", {})[0] == 200

    def until_unused(self, engine: str) -> None:
        """The gauge is of the last step, so each look begins with one."""
        deadline_s = time.monotonic() + SETTLE_S
        while True:
            self.ask(engine, [1, 2, 3], max_tokens=1)
            rows = fetch(self.ports[engine], "GET", "/metrics")[2].decode().splitlines()
            used = sum(float(row.rsplit(" ", 1)[1]) for row in rows if row.startswith(USED))
            if used == 0:
                return
            assert time.monotonic() < deadline_s, f"{engine} still holds {used}"
            time.sleep(0.05)


@pytest.fixture(scope="module")
def line(vllm_python: str, models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Line]:
    folder = tmp_path_factory.mktemp("line")
    with ExitStack() as stack:
        # Sockets have short paths only.
        runtime = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moonpool-")))
        names = ("prefill", "decode", *FORMS)
        ports = dict(zip(names, stack.enter_context(held_ports(len(names))), strict=True))
        ports["bootstrap"] = stack.enter_context(held_run(RANKS))
        extra = {
            "bootstrap_port": ports["bootstrap"],
            "lease_s": 6.0,
            "neighbour_wait_s": 10.0,
            "compute_if_faster": False,
        }
        running = {}
        for name, role in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
            config = {"kv_connector": "Mooncake", "kv_role": role, "kv_connector_extra_config": extra}
            command = [vllm_python, "-m", "vllm.entrypoints.cli.main", "serve", str(models[0])]
            command += ["--host", "127.0.0.1", "--port", str(ports[name]), "--served-model-name", "tiny"]
            command += ["--dtype", "float32", "--max-model-len", "4096", "--block-size", str(BLOCK_TOKENS)]
            command += ["--max-num-batched-tokens", "256", "--kv-cache-memory-bytes", str(64 << 20)]
            command += ["--enforce-eager", "--seed", "0", "--kv-transfer-config", json.dumps(config)]
            if name == "prefill" and RANKS > 1:
                command += ["--data-parallel-size", str(RANKS)]
            running[name] = start(stack, command, folder / name, runtime, warm(vllm_python))
        for name, process in running.items():
            until_ready(process, ports[name], folder / name)
        for form in FORMS:
            prefill = f"p=http://127.0.0.1:{ports['prefill']}#bootstrap={ports['bootstrap']}"
            command = [sys.executable, "-m", "moonpool", "proxy", "--listen", f"127.0.0.1:{ports[form]}"]
            command += ["--prefill", prefill, "--decode", f"d=http://127.0.0.1:{ports['decode']}"]
            command += ["--policy", "round_robin", "--handover", form]
            until_ready(start(stack, command, folder / form, runtime), ports[form], folder / form)
        yield Line(ports, running["prefill"], folder / "concurrent")


def start(
    stack: ExitStack, command: list[str], log: Path, runtime: Path, warm: Warm | None = None
) -> AnyProcess:
    """warm: what the command is forked from."""
    env = environment(runtime) | {"VLLM_SERVER_DEV_MODE": "1"}  # for /reset_prefix_cache
    process: AnyProcess
    with log.open("wb") as output:
        if warm:
            process = ForkedProcess(
                warm,
                command[1:],
                env,
                stdout=output,
                stderr=output,
                start_new_session=True,
                spawns=True,
            )
        else:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=env,
                start_new_session=True,
            )
    stack.callback(end, process)
    return process


def end(process: AnyProcess) -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def until_ready(process: AnyProcess, port: int, log: Path) -> None:
    deadline_s = time.monotonic() + START_S
    while True:
        try:
            if fetch(port, "GET", "/health")[0] == 200:
                return
        except OSError:
            pass
        if process.poll() is not None or time.monotonic() > deadline_s:
            pytest.fail(f"not ready; the end of its log:\n{log.read_text(errors='replace')[-4000:]}")
        time.sleep(0.1)


def fetch(
    port: int, method: str, path: str, body: dict[str, Any] | None = None
) -> tuple[int, http.client.HTTPMessage, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_S)
    try:
        connection.request(method, path, None if body is None else json.dumps(body), HEADERS)
        response = connection.getresponse()
        return response.status, response.headers, response.read()
    finally:
        connection.close()


def tokens_of(answer: dict[str, Any]) -> list[int]:
    ids: list[int] = answer["choices"][0]["token_ids"]
    return ids


@pytest.mark.skipif(RANKS > 1, reason="which rank has the blocks is not known")
def test_an_idle_engine_gives_blocks_of_its_own_cache(line: Line) -> None:
    """It makes no step until it is asked. What a proxy tells the other engine is told here by hand."""
    prompt = make_prompt(7_900, 1000)
    expected = tokens_of(line.ask("prefill", prompt)[0])
    (member,) = json.loads(fetch(line.ports["bootstrap"], "GET", "/query")[2]).values()
    assert "cached" not in member  # as kv_producer it takes none
    page = f"http://127.0.0.1:{line.ports['bootstrap']}"
    cached_at = {"remote_engine_id": member["engine_id"], "remote_bootstrap_addr": page}
    answer, _ = line.ask("decode", prompt, kv_transfer_params={"moonpool": {"cached_at": cached_at}})
    assert tokens_of(answer) == expected
    assert answer["kv_transfer_params"]["moonpool"]["neighbour_tokens"] == 992
    line.forget()


def test_both_forms_give_the_tokens_of_one_engine(line: Line) -> None:
    """All at once, under one request id; and what prefill computed is not computed again."""
    prompts = [make_prompt(7_000 + place, length) for place, length in enumerate(LENGTHS)]
    expected = [tokens_of(line.ask("decode", prompt)[0]) for prompt in prompts]
    for form in FORMS:
        line.forget()
        with ThreadPoolExecutor(len(prompts)) as pool:
            answers = list(pool.map(lambda prompt, form=form: line.ask(form, prompt), prompts))
        for (answer, decision), tokens, prompt in zip(answers, expected, prompts, strict=True):
            assert tokens_of(answer) == tokens
            assert (decision["engine"], decision["prefill"], decision["handover"]) == ("d", "p", form)
            assert answer["kv_transfer_params"]["moonpool"]["handed_over_tokens"] == len(prompt) - 1
    line.forget()


@pytest.mark.parametrize("form", FORMS)
def test_clients_that_leave_free_everything(line: Line, form: str) -> None:
    """At once, in prefill, and while the answer streams."""
    # An answer that ends only after seconds: on a busy machine a short one is over before its client leaves.
    body = {"model": "tiny", "max_tokens": 2_000, "ignore_eos": True, "temperature": 0, "stream": True}
    for place, wait in enumerate(("nothing", "moment", "token")):
        prompt = make_prompt(7_100 + 10 * place + FORMS.index(form), 2_000)
        connection = http.client.HTTPConnection("127.0.0.1", line.ports[form], timeout=ANSWER_S)
        connection.request("POST", "/v1/completions", json.dumps(body | {"prompt": prompt}), HEADERS)
        if wait == "moment":
            line.ask("prefill", [4, 5, 6], max_tokens=1)  # an answer of the engine that computes it
        elif wait == "token":
            response = connection.getresponse()
            assert response.status == 200
            assert response.readline().startswith(b"data: {")
        connection.close()
    line.forget()
    rows = fetch(line.ports[form], "GET", "/metrics")[2].decode().splitlines()
    left = [row for row in rows if row.startswith("moonpool_proxy_client_disconnects_total")]
    # On a busy machine the first one is gone before the proxy has read its request, which then is none.
    assert sum(float(row.rsplit(" ", 1)[1]) for row in left) in (2, 3)
    assert any('stage="streaming"' in row for row in left)


@pytest.mark.parametrize("form", FORMS)
def test_a_crowd_that_leaves_at_random(line: Line, form: str, rng: random.Random) -> None:
    """Many clients at a time, most of which leave before they have heard the end: no block stays in use, the
    engines answer what comes next right, and nothing was mixed up or survived by luck."""
    later = [make_prompt(rng.randrange(1 << 40), length) for length in (33, 256, 900)]
    started_s = time.monotonic()
    expected = [tokens_of(line.ask("decode", prompt, cache_salt="alone")[0]) for prompt in later]
    line.ask(form, make_prompt(rng.randrange(1 << 40), 1500))
    seconds = time.monotonic() - started_s
    stayed = asyncio.run(asyncio.wait_for(crowd(line.ports[form], rng, seconds), ANSWER_S))
    print(f"{form}: {stayed} of {CLIENTS} stayed to the end; the others left within {seconds:.2f} s")
    assert 0 < stayed < CLIENTS
    line.forget()
    for prompt, tokens in zip(later, expected, strict=True):
        answer, _ = line.ask(form, prompt)
        assert tokens_of(answer) == tokens
        assert answer["kv_transfer_params"]["moonpool"]["handed_over_tokens"] == len(prompt) - 1
    for engine in ("prefill", "decode"):
        rows = fetch(line.ports[engine], "GET", "/metrics")[2].decode().splitlines()
        odd = [row for row in rows if row.startswith(ODD) and float(row.rsplit(" ", 1)[1])]
        assert odd == []
    line.forget()


async def crowd(port: int, rng: random.Random, longest_s: float) -> int:
    """How many clients stayed to the end."""
    room = asyncio.Semaphore(AT_A_TIME)

    async def one() -> bool:
        prompt = make_prompt(rng.randrange(1 << 40), rng.choice([1, 32, 33, 256, 600, 1500]))
        body = {"model": "tiny", "prompt": prompt, "temperature": 0, "ignore_eos": True}
        body |= {"max_tokens": rng.choice([1, 8, 60]), "stream": rng.random() < 0.5}
        stays_s = None if rng.random() < 0.2 else longest_s * rng.random() ** 2  # rather early
        async with room:
            return await visit(port, body, stays_s)

    return sum(await asyncio.gather(*(one() for _ in range(CLIENTS))))


async def visit(port: int, body: dict[str, Any], stays_s: float | None) -> bool:
    """A client that leaves after so many seconds, or hears the end. Whether it did."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    text = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(text)}\r\nConnection: close\r\n"
    writer.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + text)
    try:
        async with asyncio.timeout(stays_s):
            answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 200"), answer[:200]
        assert (b"data: [DONE]" if body["stream"] else b'"finish_reason":"length"') in answer
        return True
    except TimeoutError:
        return False
    finally:
        writer.transport.abort()


def test_a_prefill_engine_that_is_killed_costs_no_answer(line: Line) -> None:
    """In the middle of a prompt: the decode engine computes what has not come."""
    prompts = [make_prompt(7_200 + place, 3_000) for place in range(3)]
    expected = [tokens_of(line.ask("decode", prompt)[0]) for prompt in prompts]
    assert fetch(line.ports["decode"], "POST", "/reset_prefix_cache", {})[0] == 200
    with ThreadPoolExecutor(len(prompts)) as pool:
        asked = [pool.submit(line.ask, "concurrent", prompt) for prompt in prompts]
        line.ask("prefill", [7, 8, 9], max_tokens=1)
        os.killpg(line.prefill.pid, signal.SIGKILL)
        assert [tokens_of(answer.result()[0]) for answer in asked] == expected
    assert tokens_of(line.ask("concurrent", prompts[0])[0]) == expected[0]
    line.until_unused("decode")
