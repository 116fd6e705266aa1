"""Four proxies in front of the same engines, beside one: how many requests have their first token in time.

    python -m benchmarks.several_proxies [--quick] [--json FILE] [--peers-venv DIR]

8 mock engines, each with one prefill at a time (100 us a token); prompts of 200 to 4,000 tokens (log-normal,
no common prefix) come at random at 70 % of what the engines can do; in time is a first token within 0.5 s.
In turn: one process, four that exchange what they have in flight (--processes 4), four that know nothing of
each other (clients take turns). The last are the peer: what routers without an exchange would do.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from benchmarks.options import make_parser
from benchmarks.processes import Process, free_port
from benchmarks.report import Row, print_table, write_json

ENGINES = 8
PROXIES = 4
PREFILL_S_PER_TOKEN = 100e-6
MEDIAN_TOKENS, SPREAD = 800, 0.8
TOKENS = (200, 4000)
LOAD = 0.7
IN_TIME_S = 0.5
SEED = 20261121
WARM_UP = 0.2  # of the requests: proxies learn what a prefill costs


@dataclass(frozen=True)
class Outcome:
    in_time: float
    p50_s: float
    p99_s: float


def prompt_lengths(count: int, seed: int) -> list[int]:
    random_ = random.Random(seed)
    low, high = TOKENS
    return [int(min(max(random_.lognormvariate(0, SPREAD) * MEDIAN_TOKENS, low), high)) for _ in range(count)]


async def drive(urls: list[str], seconds: float) -> Outcome:
    """Open loop: requests come when they come, whatever became of those before."""
    mean = statistics.fmean(prompt_lengths(100_000, SEED))
    rate = LOAD * ENGINES / (mean * PREFILL_S_PER_TOKEN)
    random_ = random.Random(SEED)
    lengths = prompt_lengths(int(rate * seconds), SEED)
    took_s: list[float] = []
    addresses = itertools.cycle(urls)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)  # a new client each: all processes get some
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def ask(url: str, body: bytes, due_s: float) -> None:
            headers = {"Content-Type": "application/json"}
            async with session.post(f"{url}/v1/completions", data=body, headers=headers) as answer:
                async for _ in answer.content.iter_any():
                    took_s.append(time.perf_counter() - due_s)
                    break
                await answer.read()
                if answer.status != 200:
                    raise RuntimeError(f"{answer.status} from {url}")

        asking = []
        due_s = time.perf_counter()
        for length in lengths:
            due_s += random_.expovariate(rate)
            prompt = [random_.randrange(50_000) for _ in range(length)]
            body = json.dumps({"model": "mock", "prompt": prompt, "max_tokens": 1, "stream": True}).encode()
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            asking.append(asyncio.ensure_future(ask(next(addresses), body, due_s)))
        await asyncio.gather(*asking)
    measured = took_s[int(len(took_s) * WARM_UP) :]
    ordered = sorted(measured)
    return Outcome(
        sum(each <= IN_TIME_S for each in measured) / len(measured),
        ordered[len(ordered) // 2],
        ordered[int(len(ordered) * 0.99)],
    )


def run(arm: str, engines: list[str], seconds: float, folder: Path) -> Outcome:
    """arm: one, exchanging, apart."""
    with ExitStack() as stack:
        ports = [free_port() for _ in range(PROXIES if arm == "apart" else 1)]
        processes = []
        for port in ports:
            words = [sys.executable, "-m", "moonpool", "proxy", "--listen", f"127.0.0.1:{port}"]
            words += ["--policy", "conductor", "--tokenizer", "none"]
            words += [word for url in engines for word in ("--engine", url)]
            words += ["--processes", str(PROXIES)] if arm == "exchanging" else []
            processes.append(Process(words, folder / f"{arm}-{port}.log"))
            stack.callback(processes[-1].stop)
        for process in processes:
            process.wait_for_output("serving on")
        return asyncio.run(drive([f"http://127.0.0.1:{port}" for port in ports], seconds))


def rows_of(found: dict[str, list[Outcome]], seconds: float, *, judged: bool) -> list[Row]:
    """judged: in a few seconds proxies learn the engines' models, and shares move by a tenth and more."""

    def median(arm: str, name: str) -> float:
        return statistics.median(getattr(outcome, name) for outcome in found[arm])

    low, high = TOKENS
    each = f"{seconds:g} s, {low} to {high:,} tokens a prompt"
    work = f"{PROXIES} proxies, {ENGINES} engines at {LOAD:.0%} [{each}]"
    share = median("exchanging", "in_time")
    rows = [
        Row(
            f"first token within {IN_TIME_S:g} s: {work}",
            share * 100,
            "%",
            {"one": median("one", "in_time") * 100, "not exchanging": median("apart", "in_time") * 100},
            None,
            "at least 95 % of one proxy's",
            share >= 0.95 * median("one", "in_time") if judged else None,
        )
    ]
    for name, label in (("p50_s", "median"), ("p99_s", "99th percentile")):
        rows.append(
            Row(
                f"first token, {label}",
                median("exchanging", name) * 1e3,
                "ms",
                {"one": median("one", name) * 1e3, "not exchanging": median("apart", name) * 1e3},
                None,
                "",
                None,
            )
        )
    return rows


def main() -> None:
    parser = make_parser(__doc__, "one short round; under 50 s")
    arguments = parser.parse_args()
    rounds, seconds = (1, 9.0) if arguments.quick else (3, 30.0)
    found: dict[str, list[Outcome]] = {"one": [], "exchanging": [], "apart": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        timing = ["--prefill-us", str(PREFILL_S_PER_TOKEN * 1e6), "--step-tokens", "65536"]
        with ExitStack() as stack:
            engines, processes = [], []
            for number in range(ENGINES):
                port = free_port()
                words = [sys.executable, "-m", "moonpool", "mock-engine", "--port", str(port), *timing]
                processes.append(Process(words, folder / f"engine-{number}.log"))
                stack.callback(processes[-1].stop)
                engines.append(f"http://127.0.0.1:{port}")
            for process in processes:
                process.wait_for_output("on http")
            for _ in range(rounds):
                for arm, outcomes in found.items():
                    outcomes.append(run(arm, engines, seconds, folder))
                    print(arm, outcomes[-1], file=sys.stderr)
    rows = rows_of(found, seconds, judged=not arguments.quick)
    print_table("Several proxies", rows)
    write_json(arguments.json, rows)


if __name__ == "__main__":
    main()
