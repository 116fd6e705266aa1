"""What Prometheus finds at a node with an SSD, its master, and a proxy, all of them running."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import AsyncIterator, Iterable
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from moonpool.disagg_proxy.events.settings import parse_event_sources

from .disagg_proxy.harness import Exchange, bed, with_deadline
from .ports import held_ports

_SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("_total",)}


class Pages(NamedTuple):
    """Texts of /metrics."""

    node: str
    master: str
    proxy: str


@functools.cache  # several files of tests look at them, and they take some seconds
def live_pages() -> Pages:
    """Starts them in a runtime folder of their own, and ends them."""
    pages: list[Pages] = []

    async def gather() -> None:
        folder = tempfile.mkdtemp(prefix="mp-", dir="/tmp")
        try:
            async with process(folder, "master", "--listen", "127.0.0.1:0") as (wire, master):
                ssd = f"{folder}/ssd:64MiB"
                node = ("--dram", "64MiB", "--ssd", ssd, "--listen", "127.0.0.1:0", "--master", wire)
                async with process(folder, "node", *node) as (_, page):
                    pages.append(Pages(page, master, await of_a_proxy()))
        finally:
            shutil.rmtree(folder)

    with_deadline(gather, 60.0)()
    return pages[0]


@contextlib.asynccontextmanager
async def process(folder: str, *arguments: str) -> AsyncIterator[tuple[str, str]]:
    """The address of one of our processes as its ready line says it, and its metrics."""
    started = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "moonpool", *arguments, "--http", "127.0.0.1:0"),
        stdout=subprocess.PIPE,
        env=os.environ | {"MOONPOOL_RUNTIME_DIR": folder},
    )
    try:
        assert started.stdout is not None
        said = (await started.stdout.readline()).decode()
        (url,) = re.findall(r"http://\S+/metrics", said)
        (wire,) = re.findall(r"(?:master at|wire) (127\.0\.0\.1:\d+)", said)
        with await asyncio.to_thread(urllib.request.urlopen, url, timeout=20) as answer:
            yield wire, answer.read().decode()
    finally:
        started.kill()
        await started.wait()


async def of_a_proxy() -> str:
    """The metrics of one with a prefill and a decode engine that have handed a prompt over."""

    async def compute(exchange: Exchange) -> None:
        await exchange.answer(b'{"kv_transfer_params":{"from":"here"}}')

    async def decode(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.event('{"choices":[{"text":"a"}]}')
        await exchange.end_stream()

    with held_ports(1) as (port,):
        events = parse_event_sources([f"engine-0=tcp://127.0.0.1:{port}"])
        roles = ("prefill", "decode")
        async with bed(2, roles=roles, policy="conductor", events=events, tokenizer=("none",)) as b:
            b.engines[0].behave, b.engines[1].behave = compute, decode
            body = {"model": "m", "prompt": [1] * 500, "stream": True}
            assert (await b.ask("POST", "/v1/completions", json.dumps(body).encode())).status == 200
            await b.ask("GET", "/nowhere")
            return (await b.ask("GET", "/metrics")).body.decode()


def samples(pages: Iterable[str]) -> dict[str, set[str]]:
    """The names that one can ask for, with their labels; none where nothing was counted yet."""
    found: dict[str, set[str]] = {}
    for page in pages:
        for family in text_string_to_metric_families(page):
            for suffix in _SUFFIXES.get(family.type, ("",)):
                found.setdefault(family.name + suffix, set())
            for sample in family.samples:
                found.setdefault(sample.name, set()).update(sample.labels)
    return found


def unknown_names_and_labels(expression: str, there: dict[str, set[str]]) -> list[str]:
    """What a PromQL expression asks for that is not on the pages, nor added by Prometheus. ``there``: of
    samples()."""
    names = set(re.findall(r"\bmoonpool_[a-z0-9_]+", expression)) - {"moonpool_"}
    labels = {
        label.strip()
        for group in re.findall(r"\b(?:by|on|ignoring) ?\(([^)]*)\)", expression)
        for label in group.split(",")
    }
    labels |= set(re.findall(r'[{,]\s*(\w+)\s*[=!]~?"', expression))
    return [name for name in names if name not in there] + [
        f"{name} has {there[name]}, not {labels}"
        for name in names
        if there.get(name) and not labels <= there[name] | {"le", "job", "instance"}
    ]
