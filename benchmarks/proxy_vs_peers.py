"""CPU that a router spends on a request: ours beside vllm-router, sglang-router, nginx, haproxy, same load;
and what our proxy adds to the time to the first token.

    python -m benchmarks.proxy_vs_peers [--peers-venv DIR] [--quick] [--json FILE]

README.md explains the rows. --peers-venv: where the peers' packages are (pip install vllm-router==0.1.17
sglang-router==0.3.2). nginx and haproxy are beside them where they are installed.
"""

from __future__ import annotations

import argparse
import random
import re
import socket
import statistics
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import uvloop

from benchmarks.processes import Failed, Process, free_port
from benchmarks.proxy import first_byte, load, prompts
from benchmarks.proxy.routers import PEERS, PEERS_IN_TWO_STEPS, Engine, command, cpu_s, event_options
from benchmarks.report import Row, print_table, write_json
from moonpool.disagg_proxy.tokens.local_source import THREAD_NAME

CLIENTS = 64
ENGINES = 4
FIRST_BYTE_PER_S = 100  # requests through the proxy, and as many straight to the engines
FIRST_BYTE_MS_MAX = 5.0


@dataclass(frozen=True)
class Work:
    """A row. share: the most of vllm-router's CPU that meets the target; less: the part of the requests of a
    round."""

    name: str
    prompt_bytes: int
    stream: bool
    two_steps: bool
    share: float
    less: int = 1


WORKS = (
    Work("answer in one piece", 2 << 10, False, False, 0.35),
    Work("answer in one piece", 64 << 10, False, False, 0.35, 4),
    Work("stream of 64 chunks", 2 << 10, True, False, 0.65, 10),
    Work("prefill and decode, in one piece", 2 << 10, False, True, 0.5, 2),
    Work("prefill and decode, in one piece", 64 << 10, False, True, 0.35, 4),
)
AWARE_SHARE, AWARE_LESS = 0.5, 2
Requests = Callable[[int], list[bytes]]


class Bed:
    """Mock engines, and the routers that are put in front of them. quiet: engines that told of blocks at
    start, and no more; telling: they tell of each prompt."""

    def __init__(self, stack: ExitStack, venv: Path | None) -> None:
        self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self._stack = stack
        self._venv = venv
        self.quiet = [self._engine() for _ in range(ENGINES)]
        self.telling = [self._engine(tells=True) for _ in range(ENGINES)]

    def routers(self, *, two_steps: bool) -> dict[str, tuple[Process, int]]:
        """All there are, with round robin: processes and ports."""
        names = ("ours", *(PEERS_IN_TWO_STEPS if two_steps else PEERS))
        engines = self.quiet if two_steps else self.quiet[:2]
        found = {name: self._router(name, engines, two_steps=two_steps) for name in names}
        return {name: router for name, router in found.items() if router is not None}

    def aware(
        self, engines: list[Engine], *options: str | Path, two_steps: bool = True
    ) -> tuple[Process, int]:
        """Ours, which chooses by where the prefix lies, from the events of the engines."""
        half = ENGINES // 2
        names = [f"engine-{i}" for i in range(ENGINES)]
        if two_steps:
            names = [f"{role}-{i}" for role in ("prefill", "decode") for i in range(half)]
        events = event_options(engines, names)
        router = self._router(
            "ours", engines, "--policy", "conductor", *events, *options, two_steps=two_steps
        )
        assert router is not None
        return router

    def _router(
        self, name: str, engines: list[Engine], *options: str | Path, two_steps: bool
    ) -> tuple[Process, int] | None:
        """None where it is not there. options: for ours."""
        port = free_port()
        options = options or ("--policy", "round_robin")
        words = command(name, port, engines, self._venv, self.folder, two_steps=two_steps, options=options)
        return None if words is None else (self._start(words, port, f"{name}-{port}"), port)

    def _engine(self, *, tells: bool = False) -> Engine:
        port, events, replay = free_port(), *(f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
        words = [sys.executable, "-m", "benchmarks.proxy.mock_engine", str(port), events, replay]
        self._start([*words, *(["tells"] if tells else [])], port, f"engine-{port}")
        return Engine(f"http://127.0.0.1:{port}", events, replay)

    def _start(self, words: Sequence[str | Path], port: int, name: str) -> Process:
        process = Process(words, self.folder / f"{name}.log")
        self._stack.callback(process.stop)
        process.wait_for_port(socket.AF_INET, ("127.0.0.1", port))
        return process


def measure(venv: Path | None, rounds: int, requests: int) -> list[Row]:
    """Raises Failed, RuntimeError, TimeoutError."""
    rows = []
    with ExitStack() as stack:
        bed = Bed(stack, venv)
        for two_steps in (False, True):
            routers = bed.routers(two_steps=two_steps)
            rows += [
                measure_work(work, routers, rounds, requests // work.less)
                for work in WORKS
                if work.two_steps is two_steps
            ]
        rows += measure_aware(bed, routers, rounds, requests // AWARE_LESS)
        rows += measure_first_byte(bed, requests // 4)
    return rows


def measure_work(work: Work, routers: dict[str, tuple[Process, int]], rounds: int, count: int) -> Row:
    sent = [prompts.plain(work.prompt_bytes, stream=work.stream)] * count
    loads: dict[str, Requests] = dict.fromkeys(routers, lambda number: sent)
    ours, peers = medians(routers, loads, rounds, stream=work.stream)
    engines = "2 + 2 engines" if work.two_steps else "2 engines"
    what = f"{work.name} [{count} x {work.prompt_bytes >> 10} KiB, {CLIENTS} clients, {engines}], CPU"
    return row(what, ours, peers, work.share)


def measure_aware(bed: Bed, routers: dict[str, tuple[Process, int]], rounds: int, count: int) -> list[Row]:
    """Ours with the whole choice, about prompts that are new, and beside it vllm-router as it was: round
    robin, and a prompt that says nothing."""
    rng = random.Random(1)
    ids, texts = prompts.Ids(rng), prompts.Texts(rng, bed.folder)
    plain = [prompts.plain(2 << 10, stream=False)] * count
    tokenizer = ("--tokenizer", f"{prompts.MODEL}={texts.folder}")
    works = (
        ("token ids", ids.request, bed.aware(bed.quiet)),
        ("token ids, engines tell", ids.request, bed.aware(bed.telling)),
        ("text", texts.request, bed.aware(bed.quiet, *tokenizer)),
    )
    rows = []
    for name, make, (process, port) in works:
        found = {**routers, "ours": (process, port)}
        loads: dict[str, Requests] = dict.fromkeys(found, lambda number: plain)
        loads["ours"] = lambda number, make=make: [make() for _ in range(count)]  # type: ignore[misc]
        ours, peers = medians(found, loads, rounds, stream=False)
        tokenizer_us = cpu_s(process.pid, THREAD_NAME) / ((rounds + 1) * count) * 1e6
        check_told(port)
        what = f"prefill and decode by cache, {name} [{count} x 2 KiB, {CLIENTS} clients, 2 + 2 engines], CPU"
        share = None if name.endswith("tell") else AWARE_SHARE
        rows.append(row(what, ours, peers, share, beyond=tokenizer_us))
    rows.append(
        Row("  of it the tokeniser's threads", tokenizer_us, "us", dict.fromkeys(PEERS, ""), None, "", None)
    )
    return rows


def measure_first_byte(bed: Bed, count: int) -> list[Row]:
    _, port = bed.aware(bed.telling, two_steps=False)
    ids = prompts.Ids(random.Random(3))
    targets = {"direct": [int(engine.url.rsplit(":", 1)[1]) for engine in bed.telling], "ours": [port]}
    found = uvloop.run(first_byte.measure(targets, lambda: ids.request(stream=True), count, FIRST_BYTE_PER_S))
    check_told(port)
    quantiles = {name: statistics.quantiles(times, n=100) for name, times in found.items()}
    rows = []
    for percent in (50, 99):
        added_ms = (quantiles["ours"][percent - 1] - quantiles["direct"][percent - 1]) * 1e3
        target, met = ("", None) if percent == 50 else ("<= 5", added_ms <= FIRST_BYTE_MS_MAX)
        rows.append(
            Row(
                f"added to the first token, p{percent} [{count} streams, {FIRST_BYTE_PER_S}/s, and as many "
                f"beside them, {ENGINES} engines that tell]",
                added_ms,
                "ms",
                dict.fromkeys(PEERS, ""),
                None,
                target,
                met,
            )
        )
    return rows


def medians(
    routers: dict[str, tuple[Process, int]], loads: dict[str, Requests], rounds: int, *, stream: bool
) -> tuple[float, dict[str, float | str]]:
    """Microseconds of CPU for a request: ours, and the peers'. loads: the requests of a round. Routers take
    turns."""
    spent: dict[str, list[float]] = {name: [] for name in routers}
    for number in range(rounds + 1):
        for name, (process, port) in routers.items():
            requests = loads[name](number)
            before_s = cpu_s(process.pid)
            uvloop.run(load.run(port, CLIENTS, requests, stream=stream))
            if number > 0:  # the first warms up
                spent[name].append((cpu_s(process.pid) - before_s) / len(requests) * 1e6)
    ours = statistics.median(spent.pop("ours"))
    peers: dict[str, float | str] = dict.fromkeys(PEERS, "not run")
    peers.update({name: statistics.median(figures) for name, figures in spent.items()})
    return ours, peers


def row(
    what: str, ours: float, peers: dict[str, float | str], share: float | None, beyond: float = 0.0
) -> Row:
    """share: of vllm-router's CPU; None: no target. beyond: microseconds that do not count for it."""
    if share is None:
        return Row(what, ours, "us", peers, None, "", None)
    anchor = peers["vllm-router"]
    met = ours - beyond <= share * anchor if isinstance(anchor, float) else None
    target = f"<= {share:g}x vllm-router" + (" beyond the tokeniser" if beyond else "")
    return Row(what, ours, "us", peers, None, target, met)


def check_told(port: int) -> None:
    """Raises RuntimeError when the proxy at this port did not hear the engines' events."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    stored = sum(float(value) for value in re.findall(r"events_blocks_stored_total\{.*\} (\S+)", text))
    lost = sum(float(value) for value in re.findall(r"events_lost_total\{.*\} (\S+)", text))
    if not stored or lost:
        raise RuntimeError(f"the proxy heard of {stored:.0f} blocks, and lost its streams {lost:.0f} times")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers-venv", type=Path)
    parser.add_argument("--quick", action="store_true", help="under 50 s")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rounds, requests = (2, 2000) if options.quick else (5, 10000)
    try:
        rows = measure(options.peers_venv, rounds, requests)
    except (Failed, RuntimeError, TimeoutError) as error:
        print(f"proxy_vs_peers: {error}", file=sys.stderr)
        return 1
    print_table(f"Router's CPU per request; medians of {rounds} rounds", rows)
    if options.json:
        write_json(options.json, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
