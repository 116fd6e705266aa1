"""Real vLLM on a CUDA card: hits in the pool beside computing and beside vLLM's own OffloadingConnector, and
decode beside endless loads and saves.

    python -m benchmarks.gpu_engine [--vllm-python PYTHON] [--quick] [--json FILE]

Needs one card of 80 GB and about 110 GB of host memory; takes 200 s at most. Engines of a process each, all
at once, with a Llama-3.1-8B of random weights whose layers share memory (engine/dummy_model.py says why that
changes no time) and with graphs on; they take turns:

    recompute               no connector
    ours, ring              "gpu": copies through the pinned ring
    ours, pinned            "gpu_pin": "all", on the same node: loads what the first has saved
    OffloadingConnector     vLLM's default model runner
    OffloadingConnector v1  VLLM_USE_V2_MODEL_RUNNER=0, its stronger form in vLLM 0.26

Load time is the time to the first token of a hit in the pool, less that of the same prompt in the prefix
cache of the GPU right after it; medians of pairs. The answer after a load is compared with that of the engine
that computed everything, token by token and by the log-probability of each. A load that covered less than the
whole blocks of its prompt is not in a median, and neither is one with another answer; the row says how many.

Decode: 16 requests, and beside them two loads at any time and a fresh prompt whenever the last one is saved.
Compared are steps whose batch is the 16 alone (engine/background.py), beside copies and in quiet, of the same
engine, in turns. The last table is the time in all methods of the connector a step, with nothing to do.
"""

from __future__ import annotations

import math
import re
import shutil
import statistics
import sys
import tempfile
import time
import urllib.request
from argparse import Namespace
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.engine.card import Card, first_card, with_library_path
from benchmarks.engine.dummy_model import Shape, write_model
from benchmarks.engine.fleet import ON_CPU, Failed, Fleet, moonpool_config, prompt, vllm_python
from benchmarks.options import make_parser
from benchmarks.processes import Talker, end_on_sigterm, free_port
from benchmarks.report import NOT_RUN, Row, print_table, write_json

DRIVER = "benchmarks.engine.card_driver"
RECOMPUTE, RING, PINNED = "recompute", "ours, ring", "ours, pinned"
PEER, PEER_V1 = "OffloadingConnector", "OffloadingConnector v1"
OURS, PEERS = (RING, PINNED), (PEER, PEER_V1)
ENGINES = (RECOMPUTE, RING, PEER, PINNED, PEER_V1)  # the order in which they get memory of the card
GIB = 1 << 30
ON_CARD = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "PYTHONHASHSEED": "0",
    "VLLM_LOGGING_LEVEL": "INFO",  # the log says how much of the node's memory is pinned
}
TTFT_SHARE, ITL_SHARE, P99_SHARE, STEP_US = 0.1, 1.03, 1.10, 10.0
LOGPROB_NEAR = 0.05  # two engines' log-probabilities of the same token: bfloat16 rounds those near 2 to 0.016
ROUNDS_LEAST = 3
SETTLE_S, STALL_S = 30.0, 3.0  # waited for the node's memory at most, and without any progress
WARM_ROUNDS = 1


@dataclass(frozen=True)
class Scale:
    """What is run: on a card, or a small check of the script on a CPU."""

    shape: Shape
    block_tokens: int
    lengths: tuple[int, ...]
    background_tokens: int
    fresh_tokens: int
    decode_tokens: int  # prompts of the decoding requests
    kv_tokens: int
    batch_tokens: int
    requests: int
    prompts: int  # of each length, but of the longest one
    steps: int  # pure steps of a segment
    options: dict[str, Any]  # of vllm.LLM
    gpu: dict[str, Any]  # of our connector
    environment: dict[str, str]

    @property
    def longest(self) -> int:
        return max(self.lengths)


LLAMA = Shape(32, 4096, 14336, 32, 8, 128, 32000, "bfloat16")
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 24]}
ON_A_CARD = Scale(
    shape=LLAMA,
    block_tokens=16,
    lengths=(2048, 8192, 32768),
    background_tokens=16384,
    fresh_tokens=8192 - 16,
    decode_tokens=512,
    kv_tokens=88 * 1024,
    batch_tokens=8192,
    requests=16,
    prompts=2,
    steps=60,
    options={
        "attention_config": {"backend": "FLASH_ATTN"},
        "gpu_memory_utilization": 0.05,  # what must be free at the start; kv_cache_memory_bytes says the rest
        "enforce_eager": False,
        "compilation_config": GRAPHS,
    },
    gpu={"gpu": True},
    environment=ON_CARD,
)
ON_A_CPU = Scale(
    shape=Shape(4, 256, 512, 4, 2, 64, 1000, "float32"),
    block_tokens=32,
    lengths=(512, 1024),
    background_tokens=1024,
    fresh_tokens=512,
    decode_tokens=64,
    kv_tokens=16 * 1024,
    batch_tokens=2048,
    requests=4,
    prompts=2,
    steps=10,
    options={},
    gpu={},
    environment=ON_CPU,
)


@dataclass
class Figures:
    """Of one engine. first_s, load_s: by length, those that count; bad: by length, what was wrong."""

    first_s: dict[int, list[float]] = field(default_factory=dict)
    load_s: dict[int, list[float]] = field(default_factory=dict)
    card_s: dict[int, list[float]] = field(default_factory=dict)
    bad: dict[int, list[str]] = field(default_factory=dict)
    quiet_s: list[float] = field(default_factory=list)
    busy_s: list[float] = field(default_factory=list)
    beside: list[dict[str, Any]] = field(default_factory=list)
    hooks_us: list[float] = field(default_factory=list)


class Clock:
    """Says on stderr what goes on and when; knows what is left of the limit."""

    def __init__(self, limit_s: float) -> None:
        self._started_s, self._limit_s = time.monotonic(), limit_s

    @property
    def left_s(self) -> float:
        return self._limit_s - (time.monotonic() - self._started_s)

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._started_s:6.1f} s] {text}", file=sys.stderr, flush=True)


class Bench:
    """The engines of one run, less those that failed."""

    def __init__(self, fleet: Fleet, scale: Scale, options: Namespace, clock: Clock) -> None:
        self.fleet, self.scale, self.options, self.clock = fleet, scale, options, clock
        self.engines: dict[str, Talker] = {}
        self.figures: dict[str, Figures] = {}
        self.why_not: dict[str, str] = {}
        self.reference: dict[tuple[int, int], dict[str, Any]] = {}  # by length and number: the answer
        self.off = 0.0  # the largest difference of a log-probability from the recomputed one

    # Start

    def start(self, names: list[str]) -> None:
        port = free_port()
        if any(name in PEERS for name in names):
            self._fit_peers(sum(name in PEERS for name in names))
        node = self.fleet.node(self.options.dram, f"127.0.0.1:{port}")
        self.clock.say(f"the node runs with {self.options.dram}")
        starting: dict[str, Talker] = {}
        for name in sorted(names, key=lambda name: name == PINNED):
            if name == PINNED:
                self._wait_settled(port)
            starting[name] = self._engine(name, node)
            self.clock.say(f"{name} starts")
        for name, engine in starting.items():
            try:
                engine.wait_ready(max(self.clock.left_s - 40, 1))
            except Failed as error:
                self._drop(name, engine, error)
            else:
                self.engines[name], self.figures[name] = engine, Figures()
                self.clock.say(f"{name} is ready")
        if PINNED in self.engines and self.scale.gpu:
            self.clock.say(f"{PINNED}: {self._pinned()}")

    def _fit_peers(self, peers: int) -> None:
        """The OffloadingConnector keeps its bytes in /dev/shm."""
        room = shutil.disk_usage("/dev/shm").free * 0.95 / peers / GIB
        if room < self.options.peer_gib:
            self.clock.say(f"/dev/shm has room for {room:.1f} GiB of each OffloadingConnector")
            self.options.peer_gib = room

    def _engine(self, name: str, node: Path) -> Talker:
        scale = self.scale
        transfer: dict[str, Any] | None = None
        if name in OURS:
            pin = {"gpu_pin": "all"} if name == PINNED and scale.gpu else {}
            transfer = moonpool_config(node, **scale.gpu, **pin)
        elif name in PEERS:
            transfer = {
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"cpu_bytes_to_use": int(self.options.peer_gib * GIB)},
            }
        return self.fleet.engine(
            slug(name),
            transfer,
            {"VLLM_USE_V2_MODEL_RUNNER": "0"} if name == PEER_V1 else None,
            DRIVER,
            vocabulary=scale.shape.vocabulary,
            share_layers=not self.options.own_weights,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype=scale.shape.dtype,
            block_size=scale.block_tokens,
            max_model_len=scale.longest + 64,
            max_num_seqs=scale.requests + 8,
            max_num_batched_tokens=scale.batch_tokens,
            kv_cache_memory_bytes=scale.kv_tokens * scale.shape.kv_bytes + (64 << 20),
            **scale.options,
        )

    def _wait_settled(self, port: int) -> None:
        """Until as much of the node's memory lies in huge pages as the prompts take, or no more comes to:
        only that is pinned. The node takes its memory from the kernel first, which counts as progress."""
        tokens = sum(length * len(self.prompts(length)) for length in self.scale.lengths)
        tokens += self.scale.background_tokens * len(self.background_prompts())
        needed = 1.25 * tokens * self.scale.shape.kv_bytes
        last, since_s, deadline_s = -1.0, time.monotonic(), time.monotonic() + SETTLE_S
        huge = 0.0
        while huge < needed and time.monotonic() < deadline_s and time.monotonic() - since_s < STALL_S:
            huge = gauge(port, "moonpool_node_arena_huge_page_bytes")
            now = huge + gauge(port, "moonpool_node_arena_ready_bytes")
            if now != last:
                last, since_s = now, time.monotonic()
            time.sleep(0.2)
        self.clock.say(
            f"{huge / GIB:.1f} GiB of the node's memory lie in huge pages, {needed / GIB:.1f} are used"
        )

    def _pinned(self) -> str:
        log = (self.fleet.folder / f"{slug(PINNED)}.log").read_text(errors="replace")
        lines = re.findall(r"moonpool: (.* are pinned for the card.*)", log)
        return lines[-1] if lines else "its log does not say how much is pinned"

    def _drop(self, name: str, engine: Talker, error: Failed) -> None:
        """The engine is out of the run; what it had measured counts no more."""
        log = engine.process.log.read_text(errors="replace").splitlines()
        self.clock.say(
            "\n".join([f"{name} is out: {error}", f"--- the end of {engine.process.log.name}", *log[-40:]])
        )
        self.why_not[name] = str(error).splitlines()[0]
        self.engines.pop(name, None)
        engine.close()

    def ask(self, name: str, timeout_s: float = 60.0, **request: Any) -> Any:
        """The engine's answer; None when it is out."""
        engine = self.engines.get(name)
        if engine is None:
            return None
        try:
            return engine.ask(request, max(min(timeout_s, self.clock.left_s + 5), 1))
        except (Failed, OSError) as error:
            self._drop(name, engine, error if isinstance(error, Failed) else Failed(str(error)))
            return None

    # Hits

    def tokens(self, length: int, name: str) -> list[int]:
        return prompt(length, name, self.scale.shape.vocabulary)

    def prompts(self, length: int) -> list[list[int]]:
        count = 1 if length == self.scale.longest else self.scale.prompts
        return [self.tokens(length, f"{length}/{number}") for number in range(count)]

    def background_prompts(self) -> list[list[int]]:
        return [self.tokens(self.scale.background_tokens, f"background/{number}") for number in range(4)]

    def compute(self) -> None:
        """Every engine but the pinned one computes all prompts once, at the same time: that warms it and
        fills its pool."""
        everything = [p for length in self.scale.lengths for p in self.prompts(length)]
        everything += self.background_prompts()
        warm = [
            self.tokens(min(length, self.scale.batch_tokens), f"warm/{length}")
            for length in self.scale.lengths
        ]
        asked = list(self.engines.items())
        for name, engine in asked:
            engine.tell({"do": "compute", "prompts": warm if name == PINNED else everything})
        for name, engine in asked:
            try:
                engine.receive(max(self.clock.left_s - 30, 1))
            except Failed as error:
                self._drop(name, engine, error)
        self.clock.say("all prompts are computed and saved")

    def hits(self, rounds: int, reserve_s: float) -> int:
        """How many rounds count: as many as fit, while so many seconds are left."""
        done = 0
        for number in range(rounds + WARM_ROUNDS):
            started_s = self.clock.left_s
            for length in self.scale.lengths:
                group = self.prompts(length)
                which = number % len(group)
                for name in turned(list(self.engines), number):
                    result = self.ask(name, do="hit", prompt=group[which])
                    if result is not None:
                        self._note(name, length, which, result, counts=number >= WARM_ROUNDS)
            done += number >= WARM_ROUNDS
            took_s = started_s - self.clock.left_s
            self.clock.say(f"round {number} of hits took {took_s:.1f} s")
            if done >= ROUNDS_LEAST and self.clock.left_s - took_s < reserve_s:
                break
        self.clock.say(f"log-probabilities of answers differ from recomputed ones by {self.off:.2g} at most")
        return done

    def _note(self, name: str, length: int, which: int, result: dict[str, Any], counts: bool) -> None:
        """result: CardDriver.hit's."""
        figures, blocks = (
            self.figures[name],
            (length - 1) // self.scale.block_tokens * self.scale.block_tokens,
        )
        if name == RECOMPUTE:
            self.reference[length, which] = result["check"]
        pool, card = result["pool"], result["card"]
        wrong = ""
        if name == RECOMPUTE and pool["cached"]:
            wrong = f"{pool['cached']} tokens were not computed"
        elif name != RECOMPUTE and pool["cached"] < blocks:
            wrong = f"{pool['cached']} of {blocks} tokens were loaded"
        elif card["cached"] < blocks:
            wrong = f"{card['cached']} of {blocks} tokens were in the prefix cache"
        elif difference := self._differs(length, which, result["check"]):
            wrong = difference
        if wrong:
            self.clock.say(f"{name}, {length:,} tokens: {wrong}")
        if not counts:
            return
        if wrong:
            figures.bad.setdefault(length, []).append(wrong)
            return
        figures.first_s.setdefault(length, []).append(pool["first_s"])
        figures.card_s.setdefault(length, []).append(card["first_s"])
        figures.load_s.setdefault(length, []).append(pool["first_s"] - card["first_s"])

    def _differs(self, length: int, which: int, answer: dict[str, Any]) -> str:
        """How the answer differs from the recomputed one; "" when it does not, or there is none."""
        right = self.reference.get((length, which))
        if right is None:
            return ""
        if right["tokens"] != answer["tokens"]:
            return f"the answer is {answer['tokens']}, recomputed {right['tokens']}"
        off = max(abs(a - b) for a, b in zip(right["logprobs"], answer["logprobs"], strict=True))
        self.off = max(self.off, off)
        return f"a log-probability is off by {off:.2g}" if off > LOGPROB_NEAR else ""

    # Decode

    def decode(self, segments: int, reserve_s: float) -> None:
        scale = self.scale
        group = [self.tokens(scale.decode_tokens, f"decode/{number}") for number in range(scale.requests)]
        budget = scale.longest - scale.decode_tokens - 1
        for name in list(self.engines):
            self.ask(name, do="start_decoding", prompts=group, tokens=budget)
            self.ask(name, do="decode_quiet", steps=scale.steps)
            hooks = self.ask(name, do="decode_hooks", steps=2 * scale.steps)
            if hooks:
                self.figures[name].hooks_us = hooks["step_us"]
                self.clock.say(f"{name}: us a step by method {hooks['method_us']}")
        self.clock.say("all engines decode")
        loads = self.background_prompts()
        for segment in range(segments):
            started_s = self.clock.left_s
            for name in turned(list(self.engines), segment):
                quiet = self.ask(name, do="decode_quiet", steps=scale.steps)
                if quiet is not None:
                    self.figures[name].quiet_s += quiet["seconds"]
                if name == RECOMPUTE:
                    continue
                fresh = [
                    self.tokens(scale.fresh_tokens, f"{name}/fresh/{segment}/{number}") for number in range(8)
                ]
                busy = self.ask(
                    *(name, 30.0),
                    do="decode_beside",
                    loads=loads,
                    fresh=fresh,
                    steps=2 * scale.steps,
                    seconds=max(min(4.0, (self.clock.left_s - reserve_s) / len(self.engines)), 0.5),
                )
                if busy is not None:
                    self.figures[name].busy_s += busy.pop("seconds")
                    self.figures[name].beside.append(busy)
            took_s = started_s - self.clock.left_s
            self.clock.say(f"segment {segment} of decode took {took_s:.1f} s")
            if self.clock.left_s - took_s < reserve_s:
                break
        for name, figures in self.figures.items():
            if figures.beside:
                self.clock.say(f"{name}: {beside_in_words(figures)}")


def beside_in_words(figures: Figures) -> str:
    total = {
        key: sum(each[key] for each in figures.beside)
        for key in ("steps", "saving", "saving_of_all", "loads", "fresh")
    }
    covered = min(each["covered"] for each in figures.beside)
    every_ms = [second * 1e3 for each in figures.beside for second in each["all_seconds"]]
    return (
        f"{len(figures.busy_s)} of {total['steps']} steps were decode alone beside copies, "
        f"{total['saving']} of them beside a save ({total['saving_of_all']} of all); "
        f"{total['loads']} loads, the least covered {covered:.1%} of its prompt; {total['fresh']} fresh "
        f"prompts; all steps: median {statistics.median(every_ms):.2f} ms, "
        f"p99 {percentile(every_ms, 0.99):.1f} ms"
    )


def slug(name: str) -> str:
    return re.sub(r"\W+", "-", name)


def turned(names: list[str], number: int) -> list[str]:
    """Another one first in each round."""
    turn = number % max(len(names), 1)
    return names[turn:] + names[:turn]


def gauge(port: int, name: str) -> float:
    """A gauge of the node's /metrics, summed over its labels; 0 where it is missing."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(f"http://127.0.0.1:{port}/metrics", timeout=2) as page:
            text = page.read().decode()
    except OSError:
        return 0.0
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(math.ceil(share * len(values)) - 1, len(values) - 1)]


# Rows


def median_ms(values: list[float] | None) -> float | str:
    return statistics.median(values) * 1e3 if values else NOT_RUN


def judged(
    work: str, ours: float | str, unit: str, peers: dict[str, float | str], target: str, most: float | None
) -> Row:
    """most: what ours may be; None where that is not known."""
    if isinstance(ours, str):
        return Row(f"{work}: {ours}", 0.0, unit, peers, None, target, None)
    return Row(work, ours, unit, peers, None, target, None if most is None or not target else ours <= most)


def times_of(value: float | str, factor: float) -> float | None:
    return None if isinstance(value, str) else value * factor


def label(what: str, form: str, bench: Bench, length: int) -> str:
    figures = bench.figures.get(form, Figures())
    good, bad = len(figures.first_s.get(length, [])), figures.bad.get(length, [])
    wrong = f", {len(bad)} more were wrong: {bad[0]}" if bad else ""
    return f"{what} [{form.removeprefix('ours, ')}, {good} hits{wrong}]"


def length_name(length: int) -> str:
    return f"{length // 1024}k" if length % 1024 == 0 else f"{length:,}"


def rows_of_first_tokens(bench: Bench, forms: list[str]) -> list[Row]:
    rows = []
    for length in reversed(bench.scale.lengths):
        others = [RECOMPUTE, *PEERS]
        ms = {
            name: median_ms(bench.figures.get(name, Figures()).first_s.get(length))
            for name in (*others, *OURS)
        }
        peers = {name: ms[name] for name in others}
        in_cache = {name: median_ms(figures.card_s.get(length)) for name, figures in bench.figures.items()}
        bench.clock.say(
            f"{length_name(length)} in the prefix cache, ms: "
            + ", ".join(f"{name} {value:.1f}" for name, value in in_cache.items() if isinstance(value, float))
        )
        longest = length == bench.scale.longest
        target = f"<= {TTFT_SHARE:g}x recompute" if longest else ""
        for form in forms:
            work = label(f"TTFT of a {length_name(length)} hit", form, bench, length)
            rows.append(judged(work, ms[form], "ms", peers, target, times_of(ms[RECOMPUTE], TTFT_SHARE)))
    return rows


def rows_of_loads(bench: Bench, forms: list[str]) -> list[Row]:
    rows = []
    for length in bench.scale.lengths:
        ms = {name: median_ms(figures.load_s.get(length)) for name, figures in bench.figures.items()}
        peers = {name: ms.get(name, NOT_RUN) for name in PEERS}
        ran = [value for value in peers.values() if isinstance(value, float)]
        if length == bench.scale.longest:
            target, most = "<= 1x OffloadingConnector's better form", min(ran, default=None)
        else:
            target, most = "<= 0.8x OffloadingConnector", times_of(peers[PEER], 0.8)
        for form in forms:
            work = label(f"load time {length_name(length)}", form, bench, length)
            rows.append(judged(work, ms.get(form, NOT_RUN), "ms", peers, target, most))
    return rows


def rows_of_decode(bench: Bench, forms: list[str]) -> list[Row]:
    rows = []
    nothing = Figures()
    plain = bench.figures.get(RECOMPUTE, nothing).quiet_s
    parts = (("ITL median", 0.5, ITL_SHARE, "3 %"), ("ITL p99", 0.99, P99_SHARE, "10 %"))
    for what, share, factor, percent in parts:
        for form in (*forms, *(peer for peer in PEERS if peer in bench.figures)):
            figures = bench.figures.get(form, nothing)
            quiet = percentile(figures.quiet_s, share) * 1e3 if figures.quiet_s else NOT_RUN
            busy = percentile(figures.busy_s, share) * 1e3 if figures.busy_s else NOT_RUN
            peers: dict[str, float | str] = {
                "in quiet": quiet,
                "no connector, in quiet": percentile(plain, share) * 1e3 if plain else NOT_RUN,
            }
            work = (
                f"{what}, {bench.scale.requests} requests beside copies [{form}, {len(figures.busy_s)} steps]"
            )
            target = f"at most {percent} longer" if form in OURS else ""
            rows.append(judged(work, busy, "ms", peers, target, times_of(quiet, factor)))
    return rows


def rows_of_steps(bench: Bench, forms: list[str]) -> list[Row]:
    us = {
        name: statistics.median(figures.hooks_us)
        for name, figures in bench.figures.items()
        if figures.hooks_us
    }
    peers: dict[str, float | str] = {name: us.get(name, NOT_RUN) for name in PEERS}
    work = f"a step without work, in the connector's methods [{bench.scale.requests} requests decode, "
    return [
        judged(f"{work}{form}]", us.get(form, NOT_RUN), "us", peers, f"<= {STEP_US:g} us", STEP_US)
        for form in forms
    ]


# The run


def names_that_fit(wanted: list[str], scale: Scale, card: Card, own_weights: bool, clock: Clock) -> list[str]:
    """Those engines that the card has memory for."""
    weights, cache = scale.shape.weights_bytes, scale.kv_tokens * scale.shape.kv_bytes
    kept = weights if own_weights else weights // scale.shape.layers
    each = max(weights + GIB, kept + cache + 3 * GIB)  # at its start it has weights of its own
    room = int((card.memory_bytes - GIB) // each)
    if len(wanted) > room:
        clock.say(f"{card.name} has room for {room} engines of {each / GIB:.1f} GiB: without {wanted[room:]}")
    return wanted[:room]


def scale_of(options: Namespace) -> Scale:
    if options.cpu_check:
        return ON_A_CPU
    scale = replace(ON_A_CARD, shape=replace(LLAMA, layers=options.layers))
    if options.eager:
        scale = replace(scale, options={**without_graphs(scale.options), "enforce_eager": True})
    return replace(scale, steps=30) if options.quick else scale


def without_graphs(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "compilation_config"}


def measure(
    options: Namespace, scale: Scale, card: Card | None, stack: ExitStack
) -> list[tuple[str, list[Row]]]:
    """The tables. Raises Failed when there is nothing to measure."""
    clock = Clock(options.limit)
    wanted = [name for name in ENGINES if slug(name) in options.engines.split("/")]
    if card is not None:
        clock.say(f"{card.name}, {card.memory_bytes / GIB:.1f} GiB")
        wanted = names_that_fit(wanted, scale, card, options.own_weights, clock)
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moonpool-bench-")))
    if options.logs is not None:
        stack.callback(keep_logs, folder, options.logs)  # when the processes have ended
    environment = {**scale.environment, **(with_library_path(card) if card else {})}
    model = write_model(folder, scale.shape, 4 * scale.longest)
    bench = Bench(
        Fleet(folder, options.vllm_python, stack, model=model, environment=environment), scale, options, clock
    )
    bench.start(wanted)
    forms = [form for form in OURS if form in wanted]
    if bench.engines:
        bench.compute()
        bench.hits(3 if options.quick else 8, reserve_s=20 if options.quick else 60)
        bench.decode(2 if options.quick else 6, reserve_s=8)
    for name, why in bench.why_not.items():
        print(f"gpu_engine: {name} is out of the run: {why}", file=sys.stderr)
    where = f", {card.name}" if card is not None else ""
    return [
        (f"Time to first token of a hit in the pool{where}", rows_of_first_tokens(bench, forms)),
        (f"Load time: hit in the pool less hit in the prefix cache{where}", rows_of_loads(bench, forms)),
        (f"Decode beside loads and saves: steps of decode alone{where}", rows_of_decode(bench, forms)),
        (f"A step without work{where}", rows_of_steps(bench, forms)),
    ]


def keep_logs(folder: Path, to: Path) -> None:
    to.mkdir(parents=True, exist_ok=True)
    for log in folder.glob("*.log"):
        shutil.copy(log, to)


def main() -> None:
    parser = make_parser(__doc__, "fewer rounds and steps")
    parser.add_argument(
        "--vllm-python", default=vllm_python(), metavar="PYTHON", help="(MOONPOOL_VLLM_PYTHON)"
    )
    parser.add_argument(
        "--limit", type=float, default=195.0, metavar="S", help="seconds of all of it (%(default)s)"
    )
    parser.add_argument("--layers", type=int, default=LLAMA.layers, help="of the model, for a check")
    parser.add_argument("--dram", default="32GiB", help="of the node (%(default)s)")
    parser.add_argument("--peer-gib", type=float, default=20.0, help="host memory of each peer (%(default)s)")
    parser.add_argument(
        "--engines",
        default="/".join(map(slug, ENGINES)),
        help="which of them, with / between (%(default)s)",
    )
    parser.add_argument("--logs", type=Path, metavar="DIR", help="keep the logs of node and engines there")
    parser.add_argument("--own-weights", action="store_true", help="each layer in memory of its own")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument(
        "--cpu-check", action="store_true", help="check this script with a CPU build of vLLM and a tiny model"
    )
    options = parser.parse_args()
    card = None if options.cpu_check else first_card()
    if isinstance(card, str):
        print(f"gpu_engine: it needs a CUDA device ({card})", file=sys.stderr)
        sys.exit(2)
    end_on_sigterm()
    with ExitStack() as stack:
        try:
            tables = measure(options, scale_of(options), card, stack)
        except Failed as error:
            sys.exit(f"gpu_engine: {error}")
        for title, rows in tables:
            if rows:
                print_table(title, rows)
        write_json(options.json, [row for _, rows in tables for row in rows])


if __name__ == "__main__":
    main()
