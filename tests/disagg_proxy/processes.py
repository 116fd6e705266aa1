"""Engines and proxies as processes, and what is asked of them."""

from __future__ import annotations

import http.client
import json
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.connectors.forks import AnyProcess, ForkedProcess, Warm
from tests.connectors.vllm.processes import environment

START_S = 400.0
ANSWER_S = 120.0
Address = tuple[str, int]
Body = dict[str, Any]


def started(
    stack: ExitStack, command: list[str], log: Path, runtime: Path, warm: Warm | None = None
) -> AnyProcess:
    """warm: what the command is forked from; its first word is the same interpreter."""
    process: AnyProcess
    with log.open("wb") as output:
        env = environment(runtime)
        if warm:
            process = ForkedProcess(warm, command[1:], env, stdout=output, stderr=output, spawns=True)
        else:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env
            )

    def end() -> None:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    stack.callback(end)
    return process


def until_ready(process: AnyProcess, address: Address, log: Path) -> None:
    deadline_s = time.monotonic() + START_S
    while True:
        try:
            if fetch(address, "GET", "/health")[0] == 200:
                return
        except OSError:
            pass
        if process.poll() is not None or time.monotonic() > deadline_s:
            pytest.fail(f"not ready; the end of its log:\n{log.read_text(errors='replace')[-4000:]}")
        time.sleep(0.1)


def fetch(
    address: Address, method: str, path: str, body: Body | None = None, **more: str
) -> tuple[int, http.client.HTTPMessage, bytes]:
    connection = http.client.HTTPConnection(*address, timeout=ANSWER_S)
    try:
        headers = {"Content-Type": "application/json", "X-Moonpool-Decision": "1"}
        headers |= {name.replace("_", "-"): value for name, value in more.items()}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        return response.status, response.headers, response.read()
    finally:
        connection.close()


def metrics(address: Address) -> dict[tuple[str, str], float]:
    """By name and by the label that tells engines, streams or sources of tokens apart."""
    text = fetch(address, "GET", "/metrics")[2].decode()
    return {
        (
            sample.name,
            sample.labels.get("stream") or sample.labels.get("source") or sample.labels.get("engine", ""),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def text_of(seed: int, tokens: int) -> str:
    """A token is a byte."""
    return "".join(chr(97 + (seed * 7919 + place * place * 31 + place // 9) % 26) for place in range(tokens))
