"""The machinery of conductor_vs_rivals, on traces small enough for a test."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import random
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """load("conductor.bed") imports a module of this checkout's benchmarks."""
    monkeypatch.syspath_prepend(str(ROOT))

    def module(name: str) -> ModuleType:
        return importlib.import_module(f"benchmarks.{name}")

    return module


@pytest.fixture
def made(load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: random.Random) -> Any:
    """A Bed of two small traces in the place of the published ones."""
    bed = load("conductor.bed")
    sums = {}
    for name in bed.SHA256:
        rows = []
        for number in range(150):
            blocks = [0, *(1000 * rng.randrange(40) + place for place in range(rng.randrange(1, 12)))]
            rows.append(
                {
                    "timestamp": 300 * number,
                    "input_length": 512 * len(blocks) - 7,
                    "output_length": rng.randrange(1, 80),
                    "hash_ids": blocks,
                }
            )
        path = tmp_path / f"{name}_trace.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)))
        sums[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setattr(bed, "SHA256", sums)
    return bed.Bed(tmp_path, quick=True, processes=1)


def test_every_row_of_a_quick_run_has_its_figures(
    load: Any, made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load("conductor.whole_engines"), "SETTLED_S", 1.0)  # the traces last eleven seconds
    parts = ("first_token", "short_prompts", "whole_engines", "late_reports", "proxies", "pool_links")
    for part in (*parts, "end_to_end", "overload", "hit_rate"):
        for row in load(f"conductor.{part}").rows(made):
            json.dumps(
                asdict(row), allow_nan=part == "overload"
            )  # a load that never moves correlates with nothing
            assert "[" in row.work


def test_whole_engines_have_rows_for_each_target(
    load: Any, made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = load("conductor.whole_engines")
    monkeypatch.setattr(whole, "SETTLED_S", 1.0)
    plans: list[Any] = []
    simulate = made.simulate

    def told(what: str, asked: Any) -> Any:
        plans.extend(asked)
        return simulate(what, asked)

    monkeypatch.setattr(made, "simulate", told)
    rows = whole.rows(made)
    works = [row.work.partition(",")[0] for row in rows]
    assert works.count("mean TTFT") == works.count("mean time per token") == len(whole.WORKS)
    (slowed,) = (row for row in rows if "slows down" in row.work)
    assert set(slowed.peers) == set(whole.RIVALS)
    slow = [plan for plan in plans if plan.faults]
    assert [plan.policy for plan in slow] == list(whole.POLICIES)
    (fault,) = slow[0].faults
    assert (str(fault).split()[1:], fault.at_s) == (["slow", "whole-1", "4"], pytest.approx(75 * 0.3 / 4))


def test_a_row_of_capacity_says_who_has_a_gate(load: Any, made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    capacity = load("conductor.capacity")
    monkeypatch.setattr(capacity, "RIVALS", {"round_robin": 2.6})
    monkeypatch.setattr(capacity, "QUICK_ROWS", tuple(capacity.ROWS))
    asked = {}
    search = made.search

    def told(what: str, searches: Any) -> list[float]:
        speeds: list[float] = search(what, searches)
        for each, speed in zip(searches, speeds, strict=True):
            plan = each.plan
            asked[plan.policy, plan.cluster.pool, plan.admission is not None] = speed
        return speeds

    monkeypatch.setattr(made, "search", told)
    rows = capacity.rows(made)
    shipped, ungated, gated, pooled = ((row.ours, row.peers["round_robin"]) for row in rows)
    ours = {gate: asked["conductor", True, gate] for gate in (False, True)}
    assert shipped == (ours[True], asked["round_robin", False, False])
    assert ungated == (ours[False], asked["round_robin", False, False])
    assert gated == (ours[True], asked["round_robin", False, True])
    assert pooled == (ours[True], asked["round_robin", True, True])
    assert all(row.met is None for row in rows)  # a part of a trace is not the whole
    assert min(asked.values()) > 0


def test_the_papers_speed_is_where_its_ratio_arises(
    load: Any, made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first_token = load("conductor.first_token")

    def means(_bed: Any, _what: str, _trace: str, speed: float, _policies: Any) -> list[list[float]]:
        return [[speed * 1.3, speed * 1.2], [1.0, 1.0]]  # a mean ratio of 1.25 times the speed

    monkeypatch.setattr(first_token, "_means", means)
    made.quick = False
    assert first_token.paper_speed(made) == pytest.approx(first_token.PAPER_RATIO / 1.25, abs=0.005)


def test_prediction_is_judged_alone_and_under_one_queue(
    load: Any, made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused: 100 by the naive gate, and 99 by prediction: missed, and so with a queue each."""
    overload = load("conductor.overload")
    refused = {"naive": 100, "ahead": 99, "naive, queue": 50, "ahead, queue": 49}

    class Told:
        def __init__(self, gate: str) -> None:
            self.results = self.loads = self
            self.good, self.refused = 0.5, refused.get(gate, 60)

        def summary(self, _slo: Any) -> Any:
            return self

        def correlation(self) -> float:
            return 0.0

    monkeypatch.setattr(made, "judged", lambda met: met)
    monkeypatch.setattr(made, "simulate", lambda _what, _plans: [Told(gate) for gate in overload.GATES])
    rows = [row for row in overload.rows(made) if row.work.startswith("refused")]
    assert [(row.ours, row.met) for row in rows] == [(99, False), (49, True), (49, False)]


def test_a_trace_that_is_not_the_published_one_is_refused(load: Any, made: Any, tmp_path: Path) -> None:
    bed = load("conductor.bed")
    (tmp_path / "synthetic_trace.jsonl").write_text("{}\n")
    with pytest.raises(SystemExit, match="is not the published trace"):
        bed.Bed(tmp_path, quick=True, processes=1)
    with pytest.raises(SystemExit, match="it is published at github"):
        bed.Bed(tmp_path / "nowhere", quick=True, processes=1)


def test_the_command_says_where_the_traces_are() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "MOONPOOL_TRACES"}
    command = [sys.executable, "-m", "benchmarks.conductor_vs_rivals"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "github.com/kvcache-ai/Mooncake" in done.stderr


def test_a_machine_is_found_from_its_steps(load: Any, rng: random.Random) -> None:
    """Also where some steps took twice as long, because something else ran. It is judged by the steps that it
    predicts: of figures that mostly come together each alone is known less well."""
    fits = load("conductor.machine_fit")
    figures = (0.01, 2e-4, 1e-7, 0.005, 4e-4, 1e-6)
    machine = replace(fits.BASE, **dict(zip(fits.COMPUTED, figures, strict=True)))

    def step() -> Any:
        decoding = tuple(rng.randrange(10, 3000) for _ in range(rng.choice((0, 0, 1, 5, 20))))
        begin = rng.randrange(2000)
        chunks = ((begin, begin + rng.randrange(1, 200)),) if rng.random() < 0.5 or not decoding else ()
        made = fits.Step(1.0, chunks, decoding)
        times = 2 if rng.random() < 0.1 else rng.uniform(0.97, 1.03)
        return replace(made, seconds=fits.step_s(machine, made) * times)

    steps = [step() for _ in range(400)]
    found = fits.fit(steps)
    for each in steps:
        assert fits.step_s(found, each) == pytest.approx(fits.step_s(machine, each), rel=0.05), each


def test_recorded_steps_are_compared_by_what_is_in_them(load: Any) -> None:
    """The second half took 10 % longer than the first says."""
    compared = load("simulator_vs_vllm")
    steps = []
    for times in (1.0, 1.1):
        steps += [step(0.01 * times, [], [100] * 2) for _ in range(5)]
        steps += [step(0.05 * times, [[0, 0, 50]], []) for _ in range(5)]
        steps += [step(0.06 * times, [[0, 0, 50]], [100] * 2) for _ in range(5)]
    found = compared.compare([[0.0, 50, 1]], {"steps": steps, "first_s": [0.05]})
    rows = {row.work.partition(" [")[0]: row for row in compared.rows_of([found], 1)}
    assert rows["median error of a step, chunks beside decode"].ours == pytest.approx(9.1, abs=1)
    assert rows["steps within 15 %, decode alone"].ours == 100
    assert rows["median first token of the replay, error"].met


def step(seconds: float, chunks: list[list[int]], decoding: list[int]) -> dict[str, Any]:
    return {"seconds": seconds, "wall_s": seconds, "chunks": chunks, "decoding": decoding}


def test_policies_get_the_same_requests_in_other_tokens(load: Any) -> None:
    mixed = load("conductor.real_load").mixed
    one, other = (mixed(50, 3.0, random.Random(1), name) for name in ("one", "other"))
    assert [(r.at_s, len(r.ids), r.answer_tokens) for r in one] == [
        (r.at_s, len(r.ids), r.answer_tokens) for r in other
    ]
    assert not {tuple(r.ids[:16]) for r in one} & {tuple(r.ids[:16]) for r in other}
    assert len({tuple(r.ids[:512]) for r in one if len(r.ids) >= 532}) < sum(len(r.ids) >= 532 for r in one)


def test_requests_beside_others_are_not_alone(load: Any) -> None:
    made = load("conductor.real_load")
    answers = [made.Answer(due_s, 1.0, "e0", {}, 10, 0) for due_s in (0.0, 0.5, 2.0)]
    assert made.alone(answers) == [answers[2]]


def test_real_policies_are_judged_by_the_ratios_of_rounds(load: Any) -> None:
    """Ours is below the other in each round, also in one that was slow for both."""
    real, made = load("conductor_real"), load("conductor.real_load")

    def answers(ttft_s: float) -> list[Any]:
        decision = {"predicted_ttft_s": 1.2 * ttft_s}
        return [made.Answer(0.0, ttft_s, "e0", decision, 10, 0) for _ in range(4)]

    found = {real.OURS: [answers(0.1), answers(0.9), answers(0.1)]}
    found |= {name: [answers(0.2), answers(1.0), answers(0.05)] for name in real.POLICIES[1:]}
    mean, median = real._times(found, "two", True)
    assert (mean.ours, mean.peers["round_robin"], mean.met, median.met) == (100, 200, True, None)
    share, ratio = real._predictions(found[real.OURS], "two", True)
    assert (share.ours, share.met) == (100, True)
    assert ratio.ours == pytest.approx(1 / 1.2)


class FakeStepped:
    """An engine that takes a second for a prompt, one after the other, and half a second for a token."""

    def __init__(self) -> None:
        self.waiting: list[dict[str, Any]] = []
        self.running: dict[int, int] = {}
        self.prompts: list[list[int]] = []

    def ask(self, asked: dict[str, Any]) -> dict[str, Any] | None:
        if asked["do"] == "submit":
            self.waiting.append(asked)
            self.prompts.append(asked["ids"])
            return None
        begun, first, seconds = [], [], 0.5
        for number in self.running:
            self.running[number] -= 1
        if self.waiting:
            new = self.waiting.pop(0)
            begun, first, seconds = [new["number"]], [[new["number"], 0]], 1.0
            self.running[new["number"]] = new["answer_tokens"] - 1
        ended = [number for number, left in self.running.items() if left == 0]
        for number in ended:
            del self.running[number]
        return {"seconds": seconds, "begun": begun, "first": first, "ended": ended}


def test_steps_of_real_engines_make_simulated_time(load: Any) -> None:
    stepped, real_load = load("conductor_stepped"), load("conductor.real_load")
    engines = [FakeStepped(), FakeStepped()]
    contender = stepped.Contender(engines, "round_robin", "name")
    planned = [real_load.Planned(at_s, 40, 1, 2) for at_s in (0.0, 0.0, 0.1)]
    assert contender.run(planned) == pytest.approx(2.5)
    jobs = sorted(contender.turns[0], key=lambda job: job.name)
    assert [job.ttft_s for job in jobs] == pytest.approx([1.0, 1.0, 1.9])
    assert [job.done_s for job in jobs] == pytest.approx([2.0, 1.5, 2.5])
    assert [job.begun_s for job in jobs] == pytest.approx([0.0, 0.0, 1.0])
    prompts = [prompt for engine in engines for prompt in engine.prompts]
    assert {len(prompt) for prompt in prompts} == {552}
    assert len({tuple(prompt[:512]) for prompt in prompts}) == 1
    assert len({tuple(prompt[512:]) for prompt in prompts}) == 3
    assert contender.run(planned) == pytest.approx(2.5)  # the next turn begins where that one ended
