"""The dashboard asks for metrics that are there, by labels that they have."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from moonpool.disagg_proxy.events.settings import parse_event_sources

from .disagg_proxy.harness import Exchange, bed, with_deadline
from .ports import held_ports

DASHBOARD = Path(__file__).parent.parent / "deploy" / "grafana.json"
PROMTOOL = shutil.which("promtool")
_NAME = re.compile(r"\bmoonpool_[a-z0-9_]+")
_SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("_total",)}


def panels() -> list[dict[str, Any]]:
    return [each for each in json.loads(DASHBOARD.read_text())["panels"] if each["type"] != "row"]


def expressions() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel["targets"]]


def samples(page: str) -> dict[str, set[str]]:
    """The names that one can ask for, with their labels; none where nothing was counted yet."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(page):
        for suffix in _SUFFIXES.get(family.type, ("",)):
            found.setdefault(family.name + suffix, set())
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


@contextlib.asynccontextmanager
async def process(*arguments: str) -> AsyncIterator[str]:
    """The metrics of one of our processes."""
    started = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "moonpool", *arguments, "--http", "127.0.0.1:0", stdout=subprocess.PIPE
    )
    try:
        assert started.stdout is not None
        said = (await started.stdout.readline()).decode()
        (url,) = re.findall(r"http://\S+/metrics", said)
        with await asyncio.to_thread(urllib.request.urlopen, url, timeout=20) as answer:
            yield answer.read().decode()
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


def live_pages() -> list[str]:
    """The metrics of a node, a master and a proxy."""
    pages: list[str] = []

    async def gather() -> None:
        async with process("node", "--dram", "64MiB") as page:
            pages.append(page)
        async with process("master", "--listen", "127.0.0.1:0") as page:
            pages.append(page)
        pages.append(await of_a_proxy())

    with_deadline(gather, 60.0)()
    return pages


def test_every_panel_says_what_it_shows_and_overlaps_none() -> None:
    taken = set()
    for panel in panels():
        assert panel["title"]
        assert all(target["legendFormat"] and target["refId"] for target in panel["targets"])
        place = panel["gridPos"]
        cells = {
            (place["x"] + right, place["y"] + down)
            for right in range(place["w"])
            for down in range(place["h"])
        }
        assert max(right for right, _ in cells) < 24
        assert not cells & taken
        taken |= cells
    ids = [each["id"] for each in json.loads(DASHBOARD.read_text())["panels"]]
    assert len(set(ids)) == len(ids)
    for expression in expressions():
        for left, right in ("()", "[]", "{}"):
            assert expression.count(left) == expression.count(right), expression


@pytest.mark.skipif(PROMTOOL is None, reason="no promtool: apt-get install prometheus")
def test_prometheus_understands_each_expression_and_every_page(tmp_path: Path, runtime_dir: Path) -> None:
    """With the variables set as Grafana sets them."""
    assert PROMTOOL is not None
    rules = [
        {
            "record": f"panel:{number}",
            "expr": each.replace("$__rate_interval", "1m").replace("$engine", "engine-0|.*"),
        }
        for number, each in enumerate(expressions())
    ]
    file = tmp_path / "rules.yaml"  # JSON is YAML
    file.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    checked = subprocess.run([PROMTOOL, "check", "rules", file], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    assert f"SUCCESS: {len(rules)} rules found" in checked.stdout

    for page in live_pages():
        checked = subprocess.run(
            [PROMTOOL, "check", "metrics"], input=page, capture_output=True, text=True, check=False
        )
        assert checked.returncode == 0, checked.stderr


def test_each_metric_is_there_with_the_labels_that_are_asked_for(runtime_dir: Path) -> None:
    there: dict[str, set[str]] = {}

    for page in live_pages():
        there.update(samples(page))
    asked: set[str] = set()
    variables = json.loads(DASHBOARD.read_text())["templating"]["list"]
    for expression in [*expressions(), *(str(each["query"]) for each in variables)]:
        names = set(_NAME.findall(expression)) - {"moonpool_"}
        asked |= names
        labels = {
            label.strip()
            for group in re.findall(r"\bby \(([^)]*)\)", expression)
            for label in group.split(",")
        }
        labels |= set(re.findall(r'[{,]\s*(\w+)\s*=~?"', expression))
        for name in names:
            assert name in there, f"{name} is nobody's: {expression}"
            if there[name]:
                assert labels <= there[name] | {"le"}, f"{name} has {there[name]}: {expression}"
    assert len(asked) > 40
