"""LMCache over the pool beside its lm://, fs:// and mooncakestore://, in one run.

    python -m benchmarks.lmcache_vs_peers --lmcache-python PYTHON [--peers-venv DIR] [--quick] [--json FILE]
                                          [--parts remote l2]

One real LMCache engine for each backend, all up for the whole run; in each round each of them stores a new
prompt (134 MB in 16 chunks), retrieves it and looks it up, another one first in each round. The first round
warms everybody and is not counted; figures are medians. LMCache's own cache in memory is off, so every byte
goes through the backend, and every byte is compared. The engine's KV cache lies in CPU memory: beside the
backend's work each figure has LMCache's copy from or to it.

store-visible: from store() until lookup() finds all of it. The limit is LMCache over a backend that
keeps LMCache's own memory objects: what remains is LMCache's cost. Beside them "drop-in": LMCache's
mooncakestore:// over our module of that name, which is no peer.

Part l2: the adapters of LMCache's server, driven as its controllers do, with chunks of the same size in CPU
memory: ours, our native client, LMCache's fs and fs_native. The real Mooncake's is not in LMCache's wheel.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import peers
from benchmarks.lmcache.backends import L2, L2_PEERS, REMOTE, REMOTE_PEERS, Backends, Bed
from benchmarks.options import make_parser
from benchmarks.processes import ROOT, Failed, Talker, end_on_sigterm
from benchmarks.report import NOT_RUN, Row, print_table, write_json

TOKENS, CHUNK_TOKENS = 4096, 256
SHAPE = {"tokens": TOKENS, "layers": 8, "heads": 8, "head_size": 128}
START_TIMEOUT_S = 120.0
STORE_GB_S, RETRIEVE_GB_S, TIMES = 1.5, 2.5, 2.0


@dataclass(frozen=True)
class Part:
    """backends: all; peers: those to beat, by ``times``; others: of ours, beside "ours", with rows of their
    own; beside: neither. times None: a load is one copy for everybody, so nobody can be twice as fast."""

    name: str
    title: str
    module: str
    backends: Backends
    peers: tuple[str, ...]
    times: float | None
    others: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()


REMOTE_PART = Part(
    "remote",
    "LMCache over remote backends",
    "benchmarks.lmcache.engine",
    REMOTE,
    REMOTE_PEERS,
    TIMES,
    beside=("drop-in",),
)
L2_PART = Part(
    "l2", "L2 adapters of LMCache's server", "benchmarks.lmcache.l2", L2, L2_PEERS, None, others=("native",)
)
PARTS = {part.name: part for part in (REMOTE_PART, L2_PART)}


@dataclass
class Passes:
    """Of one backend: seconds of what was complete and right, and what was not."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    rounds: int = 0
    wrong: int = 0

    def median_s(self, what: str) -> float | None:
        return statistics.median(self.seconds[what]) if self.seconds[what] else None


class Run:
    """The engines of one part."""

    def __init__(
        self,
        folder: Path,
        python: Path,
        peers_python: Path | None,
        stack: ExitStack,
        part: Part = REMOTE_PART,
    ) -> None:
        self.part = part
        self._folder, self._python, self._peers_python, self._stack = folder, python, peers_python, stack
        self._engines: dict[str, Talker] = {}
        self.passes: dict[str, Passes] = {}
        self.missing: dict[str, str] = {}
        self.prompt_bytes = 0

    def start(self) -> None:
        """All engines at once. Raises Failed when ours does not start."""
        for name, prepare in self.part.backends.items():
            folder = self._folder / name
            folder.mkdir(mode=0o700)
            bed = Bed(folder, self._python, self._peers_python, self._stack)
            try:
                config = prepare(bed)
            except (Failed, OSError, ValueError) as error:
                self._out(name, error)
                continue
            self._engines[name] = self._engine(name, folder, config, bed.environment)
        for name, engine in list(self._engines.items()):
            try:
                self.prompt_bytes = engine.receive(START_TIMEOUT_S)["bytes"]
            except Failed as error:
                self._out(name, error)
            else:
                self.passes[name] = Passes()

    def round(self, number: int) -> None:
        """Each backend once, another one first each time. Round 0 is not counted. Raises Failed for ours."""
        names = list(self.passes)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            try:
                self._pass(name, number)
            except (Failed, OSError) as error:  # OSError: it ended before it was asked
                self._out(name, error)

    def _pass(self, name: str, number: int) -> None:
        engine, passes = self._engines[name], self.passes[name]
        told = {op: engine.ask({"op": op, "seed": number}) for op in ("store", "retrieve", "lookup")}
        right = told["retrieve"]["right"] and all(answer["tokens"] == TOKENS for answer in told.values())
        figures = [told["store"]["returned_s"], told["store"]["visible_s"], told["retrieve"]["seconds"]]
        said = ", ".join(f"{seconds * 1e3:.0f} ms" for seconds in figures)
        print(f"  {name}: {said}{'' if right else ', NOT COMPLETE OR NOT RIGHT'}", file=sys.stderr)
        if number == 0:
            return
        passes.rounds += 1
        if not right:
            passes.wrong += 1
            return
        passes.seconds["store"].append(told["store"]["visible_s"])
        passes.seconds["returned"].append(told["store"]["returned_s"])
        passes.seconds["retrieve"].append(told["retrieve"]["seconds"])
        passes.seconds["lookup"].append(told["lookup"]["seconds"])

    def _engine(self, name: str, folder: Path, config: dict[str, Any], extra: dict[str, str]) -> Talker:
        path = folder / "engine.json"
        cache = {"chunk_size": CHUNK_TOKENS, "local_cpu": False, "max_local_cpu_size": 0.6}
        both = {"lmcache": {**cache, **config}, "l2": config, "chunk_tokens": CHUNK_TOKENS}
        path.write_text(json.dumps({**SHAPE, **both}))
        more = {**extra, "PYTHONHASHSEED": "0"}
        more["PYTHONPATH"] = ":".join(
            [str(ROOT / "src"), str(ROOT), *filter(None, [extra.get("PYTHONPATH")])]
        )
        engine = Talker(self._python, self.part.module, [str(path)], folder / "engine.log", more)
        self._stack.callback(engine.close)
        return engine

    def _out(self, name: str, error: Exception) -> None:
        if name == "ours":
            raise Failed(str(error)) from error
        self.missing[name] = str(error)
        self.passes.pop(name, None)


def rows(run: Run) -> Iterator[Row]:
    for name in ("ours", *run.part.others):
        yield from _rows(run, name)


def _rows(run: Run, ours: str) -> Iterator[Row]:
    called = "" if ours == "ours" else f", {ours}"
    size = f"{run.prompt_bytes / 1e6:.0f} MB in {TOKENS // CHUNK_TOKENS} chunks"
    columns = (*run.part.peers, *run.part.beside)
    for what, text, least in (
        ("store", "store-visible", STORE_GB_S),
        ("retrieve", "retrieve", RETRIEVE_GB_S),
    ):
        figures = {name: run.prompt_bytes / s / 1e9 for name, s in _medians(run, what).items()}
        limit = figures.get("in_process")
        best = max((figures[name] for name in run.part.peers if name in figures), default=None)
        enough = figures.get(ours, 0.0) >= min(least, limit or least)
        met: bool | None
        times, target = run.part.times, f"{least:g} GB/s or the limit"
        if times is None:
            met = enough
        else:
            target += f", {times:g}x the best"
            met = enough and figures.get(ours, 0.0) >= times * best if best is not None else None
        yield Row(
            f"{text}{called} [{size}]",
            figures.get(ours, 0.0),
            "GB/s",
            {name: figures.get(name, NOT_RUN) for name in columns},
            limit,
            target,
            met if enough else False,
        )
    for what, text in (("returned", "store() returns"), ("lookup", "lookup of 16 chunks")):
        figures = {name: s * 1e3 for name, s in _medians(run, what).items()}
        yield Row(
            f"{text}{called} [{size}]",
            figures.get(ours, 0.0),
            "ms",
            {name: figures.get(name, NOT_RUN) for name in columns},
            figures.get("in_process"),
            "",
            None,
        )


def _medians(run: Run, what: str) -> dict[str, float]:
    found = {name: passes.median_s(what) for name, passes in run.passes.items()}
    return {name: seconds for name, seconds in found.items() if seconds is not None}


def main() -> None:
    parser = make_parser(
        __doc__, "7 counted rounds instead of 21", "environment with the real Mooncake; made if missing"
    )
    parser.add_argument("--lmcache-python", type=Path, required=True, metavar="PYTHON", help="has LMCache")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), help="default: all")
    options = parser.parse_args()
    end_on_sigterm()
    started_s = time.monotonic()
    peers_python = peers.python(options.peers_venv) if options.peers_venv else None
    rounds = 7 if options.quick else 21
    table: list[Row] = []
    for part in (PARTS[name] for name in options.parts):
        with tempfile.TemporaryDirectory(prefix="moonpool-bench-") as folder, ExitStack() as stack:
            run = Run(Path(folder), options.lmcache_python.absolute(), peers_python, stack, part)
            try:
                run.start()
                for number in range(rounds + 1):
                    run.round(number)
                    print(
                        f"round {number} of {rounds}, {time.monotonic() - started_s:.0f} s", file=sys.stderr
                    )
            except Failed as error:
                sys.exit(f"lmcache_vs_peers: {error}")
        found = list(rows(run))
        print_table(f"{part.title}; medians of {rounds} interleaved rounds", found, "in-process")
        for name, why in run.missing.items():
            print(f"{name}: not run: {why}")
        for name, passes in run.passes.items():
            if passes.wrong:
                print(f"{name}: {passes.wrong} of {passes.rounds} rounds were not complete, not counted")
        table += found
    write_json(options.json, table)
    met = [row.met for row in table]
    took_s = time.monotonic() - started_s
    print(f"{met.count(True)} targets met, {met.count(False)} missed, in {took_s:.0f} s")


if __name__ == "__main__":
    main()
