"""CPU that a router spends on a request: ours beside vllm-router, sglang-router, nginx, haproxy, same load;
and what our proxy adds to the time to the first token.

    python -m benchmarks.proxy_vs_peers [--peers-venv DIR] [--quick] [--json FILE]

README.md explains the rows. --peers-venv: where the peers' packages are (pip install vllm-router==0.1.17
sglang-router==0.3.2). nginx and haproxy are beside them where they are installed.
"""

from __future__ import annotations

import random
import re
import statistics
import sys
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import uvloop

from benchmarks.options import make_parser
from benchmarks.processes import Failed, Process
from benchmarks.proxy import first_byte, load, prompts
from benchmarks.proxy.bed import ENGINES, Bed
from benchmarks.proxy.routers import PEERS, cpu_s
from benchmarks.report import NOT_RUN, Row, print_table, write_json
from moonpool.disagg_proxy.tokens.local_source import LocalTokenizer
from moonpool.disagg_proxy.tokens.source import TextPrompt

CLIENTS = 64
FIRST_BYTE_PER_S = 100  # requests through the proxy, and as many straight to the engines
FIRST_BYTE_MS_MAX = 5.0


@dataclass(frozen=True)
class Work:
    """A row. form: of the hand-over from prefill to decode, "" for none; share: the most of the anchor's CPU
    that meets the target; less: the part of the requests of a round."""

    name: str
    prompt_bytes: int
    stream: bool
    form: str
    share: float
    less: int = 1


WORKS = (
    Work("answer in one piece", 2 << 10, False, "", 0.35),
    Work("answer in one piece", 64 << 10, False, "", 0.35, 4),
    Work("stream of 64 chunks", 2 << 10, True, "", 0.65, 10),
    Work("prefill and decode, in one piece", 2 << 10, False, "two_step", 0.5, 2),
    Work("prefill and decode, in one piece", 64 << 10, False, "two_step", 0.35, 4),
    Work("SGLang's prefill and decode, in one piece", 2 << 10, False, "one_shot", 0.5, 2),
    Work("SGLang's prefill and decode, in one piece", 64 << 10, False, "one_shot", 0.35, 4),
)
ANCHORS = {"": "vllm-router", "two_step": "vllm-router", "one_shot": "sglang-router"}
AWARE_SHARE, AWARE_LESS = 0.5, 2
ALONE = 400  # prompts
Requests = Callable[[int], list[bytes]]


def measure(venv: Path | None, rounds: int, requests: int) -> list[Row]:
    """Raises Failed, RuntimeError, TimeoutError."""
    rows = []
    with ExitStack() as stack:
        bed = Bed(stack, venv)
        routers = {form: bed.routers(form) for form in ANCHORS}
        rows += [measure_work(work, routers[work.form], rounds, requests // work.less) for work in WORKS]
        rows += measure_aware(bed, routers["two_step"], rounds, requests // AWARE_LESS)
        rows += measure_first_byte(bed, requests // 4)
    return rows


def measure_work(work: Work, routers: dict[str, tuple[Process, int]], rounds: int, count: int) -> Row:
    sent = [prompts.plain(work.prompt_bytes, stream=work.stream)] * count
    loads: dict[str, Requests] = dict.fromkeys(routers, lambda number: sent)
    ours, peers = medians(routers, loads, rounds, stream=work.stream)
    engines = "2 + 2 engines" if work.form else "2 engines"
    what = f"{work.name} [{count} x {work.prompt_bytes >> 10} KiB, {CLIENTS} clients, {engines}], CPU"
    return row(what, ours, peers, work.share, ANCHORS[work.form])


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
        tokenizer_us = alone_us(texts) if name == "text" else 0.0
        check_told(port)
        what = f"prefill and decode by cache, {name} [{count} x 2 KiB, {CLIENTS} clients, 2 + 2 engines], CPU"
        share = None if name.endswith("tell") else AWARE_SHARE
        rows.append(row(what, ours, peers, share, beyond=tokenizer_us))
    rows.append(
        Row(
            "  of it the tokeniser, measured alone",
            tokenizer_us,
            "us",
            dict.fromkeys(PEERS, ""),
            None,
            "",
            None,
        )
    )
    return rows


def alone_us(texts: prompts.Texts) -> float:
    """CPU that the tokeniser and the chat template take for one of these prompts, in a process that does
    nothing else: what a proxy that knows the tokens cannot do without. A mean, as the proxy's CPU is."""
    tokenizer, spent = LocalTokenizer(texts.folder), []
    for _ in range(2 * ALONE):
        prompt = TextPrompt("chat", prompts.MODEL, texts.request().partition(b"\r\n\r\n")[2])
        began_s = time.thread_time()
        tokenizer.ids(prompt)
        spent.append(time.thread_time() - began_s)
    return statistics.fmean(spent[ALONE:]) * 1e6  # the first half warms up


def measure_first_byte(bed: Bed, count: int) -> list[Row]:
    _, port = bed.aware(bed.telling, form="")
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
    peers: dict[str, float | str] = dict.fromkeys(PEERS, NOT_RUN)
    peers.update({name: statistics.median(figures) for name, figures in spent.items()})
    return ours, peers


def row(
    what: str,
    ours: float,
    peers: dict[str, float | str],
    share: float | None,
    anchor: str = "vllm-router",
    beyond: float = 0.0,
) -> Row:
    """share: of the anchor's CPU; None: no target. beyond: microseconds that do not count for it."""
    if share is None:
        return Row(what, ours, "us", peers, None, "", None)
    its = peers[anchor]
    met = ours - beyond <= share * its if isinstance(its, float) else None
    target = f"<= {share:g}x {anchor}" + (" beyond the tokeniser" if beyond else "")
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
    parser = make_parser(__doc__, "under 50 s", "a venv with the peers")
    options = parser.parse_args()
    rounds, requests = (2, 2000) if options.quick else (5, 10000)
    try:
        rows = measure(options.peers_venv, rounds, requests)
    except (Failed, RuntimeError, TimeoutError) as error:
        print(f"proxy_vs_peers: {error}", file=sys.stderr)
        return 1
    print_table(f"Router's CPU per request; medians of {rounds} rounds", rows)
    write_json(options.json, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
