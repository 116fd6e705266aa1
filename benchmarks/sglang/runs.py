"""The two parts of the benchmark: processes, rounds, and the rows of the medians."""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

from benchmarks.processes import ROOT, Failed, Talker
from benchmarks.report import NOT_RUN, Row
from benchmarks.sglang import contenders, recorder
from benchmarks.sglang.contenders import DROP_IN, MOONCAKE, OURS, Contender
from benchmarks.sglang.shapes import PAGE_TOKENS, SHAPES
from benchmarks.store.servers import Setting
from examples.demo import tiny_model
from tests.connectors.sglang import server, sglang_cpu

SHARE = 0.7  # of Mooncake's
START_TIMEOUT_S = 120.0
STORE_TIMEOUT_S = 60.0
PAGES, LAYERS = 32, 16  # of a prompt in the server, and of its model
HITS = 3  # timed requests for it from storage
PAGE_BYTES = LAYERS * PAGE_TOKENS * 2 * tiny_model.KV_HEADS * tiny_model.HEAD_SIZE * 4  # float32
CLASSES = {"dynamic": "MoonpoolHiCache", "mooncake": "MooncakeStore"}
START: dict[str, Callable[[Setting, ExitStack], Contender]] = {
    OURS: contenders.ours,
    DROP_IN: contenders.drop_in,
    MOONCAKE: contenders.mooncake,
}


class Figures:
    """(contender, work) -> what its passes took, by figure."""

    def __init__(self) -> None:
        self.passes: dict[tuple[str, object], list[dict[str, float]]] = {}

    def keep(self, name: str, work: object, figures: dict[str, float]) -> None:
        self.passes.setdefault((name, work), []).append(figures)

    def row(self, what: str, work: object, figure: str, unit: str, scale: float, judged: bool = True) -> Row:
        def median(name: str) -> float | None:
            found = self.passes.get((name, work))
            return statistics.median(each[figure] for each in found) * scale if found else None

        own, mooncake = median(OURS), median(MOONCAKE)
        assert own is not None
        others = {name: median(name) for name in (DROP_IN, MOONCAKE)}
        met = own <= SHARE * mooncake if judged and mooncake is not None else None
        columns: dict[str, float | str] = {
            name: NOT_RUN if value is None else value for name, value in others.items()
        }
        return Row(what, own, unit, columns, None, f"<= {SHARE:g}x mooncake" if judged else "", met)


def taking_part(setting: Setting, stack: ExitStack, names: tuple[str, ...]) -> list[Contender]:
    """Those that start. Raises Failed when ours does not."""
    found = []
    for name in names:
        if name == MOONCAKE and setting.peers_python is None:
            print(f"{name}: not run: no --peers-venv", file=sys.stderr)
            continue
        found.append(START[name](setting, stack))
    return found


class Storage:
    """The backends alone."""

    part = "storage"

    def __init__(self, setting: Setting, python: str, stack: ExitStack) -> None:
        self.drivers: dict[str, Talker] = {}
        sglang_cpu.install(plugin := setting.folder / "plugin")
        for one in taking_part(setting, stack, (OURS, DROP_IN, MOONCAKE)):
            arguments = [one.name, json.dumps(one.extra), json.dumps(one.storing)]
            log = setting.folder / f"{one.name} driver.log"
            driver = Talker(
                python, "benchmarks.sglang.storage", arguments, log, extra=one.environment(plugin)
            )
            stack.callback(driver.close)
            self.drivers[one.name] = driver
        for driver in self.drivers.values():
            driver.wait_ready(START_TIMEOUT_S)

    def rows(self, rounds: int) -> list[Row]:
        """All rounds of one shape before the next."""
        figures = Figures()
        for number, shape in enumerate(SHAPES):
            for turn in range(rounds + 1):
                names = list(self.drivers)
                for name in names[turn % len(names) :] + names[: turn % len(names)]:
                    request = {"shape": number, "seed": f"{shape.name} {turn}"}
                    answer = self.drivers[name].ask(request)["figures"]
                    for verb in answer if turn else ():  # the first warms
                        gb = shape.pages * shape.page_bytes / 1e9
                        each = answer[verb] | {"cpu_s_gb": answer[verb]["cpu_s"] / gb}
                        figures.keep(name, (shape.name, verb), each)
        return list(self._rows(figures))

    def _rows(self, figures: Figures) -> Iterator[Row]:
        for shape in SHAPES:
            for verb, what in (("hit", "L3 hit: exists and get"), ("set", "write-back")):
                title, work = f"{what} [{shape.name}: {shape.described}]", (shape.name, verb)
                yield figures.row(title, work, "wall_s", "ms", 1e3)
                yield figures.row(f"{what}, CPU [{shape.name}]", work, "cpu_s_gb", "s/GB", 1)
            work = (shape.name, "miss")
            yield figures.row(
                f"no hit: exists [{shape.name}: {shape.pages} pages]", work, "wall_s", "us", 1e6
            )


class Server:
    """One server; its backends are attached in turn. With each a prompt is computed and stored, then loaded
    several times, after the server's own two tiers were emptied. Raises Failed when an answer is another."""

    part = "server"

    def __init__(self, setting: Setting, python: str, stack: ExitStack) -> None:
        os.environ["MOONPOOL_SGLANG_PYTHON"] = python
        self.contenders = taking_part(setting, stack, (OURS, MOONCAKE))
        plugin, notes, model = (setting.folder / name for name in ("plugin", "notes", "model"))
        sglang_cpu.install(plugin)
        recorder.install(notes)
        tiny_model.LAYERS = LAYERS
        tiny_model.make(model)
        self.calls = setting.folder / "calls"
        self.calls.touch()
        storing = {CLASSES[one.backend]: one.storing for one in self.contenders}
        settings = {
            "MOONPOOL_BENCHMARK_CALLS": str(self.calls),
            "MOONPOOL_BENCHMARK_STORING": json.dumps(storing),
        }
        packages = [notes, ROOT]
        for one in self.contenders:
            settings |= one.settings
            packages += [one.package] if one.package else []
        self.attached = self.contenders[0]
        self.server = server.Server(
            model,
            setting.folder,
            plugin,
            setting.folder / "server.log",
            layout="page_first_direct",
            extra=self.attached.extra,
            flags=[f"--page-size={PAGE_TOKENS}"],
            paths=packages,
            settings=settings,
        )
        stack.callback(self.server.close)
        self.server.wait()

    def rows(self, rounds: int) -> list[Row]:
        figures = Figures()
        for number in range(rounds + 1):
            turn = number % len(self.contenders)
            random_ids = random.Random(number)
            prompt = [random_ids.randrange(256) for _ in range(PAGES * PAGE_TOKENS + 1)]
            answers = {}
            for one in self.contenders[turn:] + self.contenders[:turn]:
                took, answers[one.name] = self.pass_of(one, prompt)
                for work, values in took if number else ():  # the first warms
                    figures.keep(one.name, work, values)
            if len(set(map(tuple, answers.values()))) != 1:
                raise Failed(f"other answers from other backends: {answers}\n{self.server.tail()}")
        return list(self._rows(figures))

    def pass_of(
        self, one: Contender, prompt: list[int]
    ) -> tuple[list[tuple[str, dict[str, float]]], list[int]]:
        """(work, what it took) of everything timed, and the answer from the pool."""
        if one is not self.attached:
            self.server.detach()
            self.server.attach(one.backend, one.extra)
            self.attached = one
        self.server.forget()
        begin = self._noted()
        first, from_pool = self.server.generate(prompt, 1)
        self._wait_stored(begin)
        took, answers, loaded = [("set", self._sum(begin, "set"))], [first], [from_pool]
        for tokens in (*[1] * HITS, server.MAX_TOKENS):
            self.server.forget()
            begin, started_s = self._noted(), time.perf_counter()
            answer, from_pool = self.server.generate(prompt, tokens)
            request_s = time.perf_counter() - started_s
            answers.append(answer)
            loaded.append(from_pool)
            took.append(("hit", self._sum(begin, "exists", "get")))
            if tokens == 1:
                took.append(("request", {"wall_s": request_s}))
        wanted = [0, *[PAGES * PAGE_TOKENS] * (HITS + 1)]
        if loaded != wanted or any(each[0] != first[0] for each in answers):
            raise Failed(f"{one.name}: loaded {loaded}, answers {answers}\n{self.server.tail()}")
        return took, answers[-1]

    def _noted(self) -> int:
        return self.calls.stat().st_size

    def _notes(self, begin: int) -> list[dict[str, Any]]:
        with self.calls.open() as notes:
            notes.seek(begin)
            return [json.loads(line) for line in notes.read().splitlines()]

    def _wait_stored(self, begin: int) -> None:
        deadline_s = time.monotonic() + STORE_TIMEOUT_S
        while sum(note["pages"] for note in self._notes(begin) if note["verb"] == "set") < PAGES:
            if time.monotonic() > deadline_s:
                raise Failed(f"the prompt was not stored: {self._notes(begin)}\n{self.server.tail()}")
            time.sleep(0.05)

    def _sum(self, begin: int, *verbs: str) -> dict[str, float]:
        notes = [note for note in self._notes(begin) if note["verb"] in verbs]
        cpu_s = sum(note["cpu_s"] for note in notes)
        return {
            "wall_s": sum(note["wall_s"] for note in notes),
            "cpu_s_gb": cpu_s / (PAGES * PAGE_BYTES / 1e9),
        }

    def _rows(self, figures: Figures) -> Iterator[Row]:
        described = f"{PAGES * PAGE_TOKENS:,} tokens, {PAGES} pages, {PAGES * PAGE_BYTES >> 20} MiB"
        for verb, what in (("hit", "L3 hit: SGLang's exists and get"), ("set", "write-back")):
            yield figures.row(f"server: {what} [{described}]", verb, "wall_s", "ms", 1e3)
            yield figures.row(f"server: {what}, CPU", verb, "cpu_s_gb", "s/GB", 1)
        what = f"server: a request answered from L3, with all of SGLang [{described}]"
        yield figures.row(what, "request", "wall_s", "ms", 1e3, judged=False)
