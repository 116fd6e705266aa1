"""Which engines those that wait may go to, and that policies need not look at the same ones twice."""

from __future__ import annotations

from itertools import permutations

import pytest

from moonpool.disagg_proxy.conductor.worker import Role, Worker
from moonpool.disagg_proxy.dispatch.candidates import Candidates
from moonpool.disagg_proxy.engines.engine import Engine
from moonpool.disagg_proxy.settings import EngineSpec, ProxySettings


def fleet(models: list[set[str]]) -> tuple[Candidates, list[Engine]]:
    candidates = Candidates(len(models))
    specs = tuple(EngineSpec(f"e{place}", f"http://h:{place + 1}") for place in range(len(models)))
    settings = ProxySettings(engines=specs)
    engines = [Engine(place, spec, settings) for place, spec in enumerate(settings.engines)]
    for engine, served in zip(engines, models, strict=True):
        engine.models = dict.fromkeys(served, b"{}")
        engine.answered_well()
        candidates.join(engine, Worker(engine.place, engine.name, Role.BOTH))
    return candidates, engines


def test_models_of_the_same_engines_share_one_tuple() -> None:
    every = {f"m{number}" for number in range(40)}
    candidates, engines = fleet([every, every, every | {"own"}])
    candidates.look_again([*every, "own"], 1.0)
    fits = {id(candidates.of_waiting(model, 1.0).workers) for model in every}
    assert len(fits) == 1
    assert candidates.of_waiting("own", 1.0).workers == candidates.workers[2:]
    candidates.look_again([*every, "own", ""], 2.0)
    assert {id(candidates.of_waiting(model, 2.0).workers) for model in every | {""}} == fits
    engines[2].refused("it is not there")
    candidates.look_again([*every, "own"], 3.0)
    assert {candidates.of_waiting(model, 3.0).workers for model in every} == {candidates.workers[:2]}
    assert len({id(candidates.of_waiting(model, 3.0).workers) for model in every}) == 1
    assert candidates.of_waiting("own", 3.0).workers == candidates.workers[2:]  # better than nobody
    engines[2].answered_well()
    candidates.look_again(every, 4.0)
    assert candidates.of_waiting("m0", 4.0).workers == candidates.workers


def test_what_an_engine_is_now_is_looked_up_anew() -> None:
    candidates, engines = fleet([{"m"}, {"m"}])
    candidates.look_again(["m"], 1.0)
    assert candidates.of_waiting("m", 1.0).computing == candidates.workers
    engines[1].role = "decode"
    candidates.became(engines[1])
    candidates.look_anew()
    candidates.look_again(["m"], 1.0)
    assert candidates.of_waiting("m", 1.0).computing == candidates.workers[:1]


def taught(worker: Worker, token_s: float) -> None:
    for number in range(40):
        tokens = 500 + 997 * number % 20_000
        worker.prefill_model.observe(tokens, 0, 0, 0.1 + token_s * tokens)


@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_engines_of_two_llms_are_two_kinds_in_whatever_order_they_become_known(
    order: tuple[int, ...],
) -> None:
    candidates, engines = fleet([set()] * 4)
    workers = candidates.workers
    for engine in engines:  # of the command line: nothing is known of them
        workers[engine.place].join_kind(candidates.same_kind(engine))
    for place in order:
        engines[place].models = {"ab"[place % 2]: b"{}"}
        workers[place].join_kind(candidates.same_kind(engines[place]))
    taught(workers[0], 1e-4)
    taught(workers[1], 6e-4)
    predicted = [worker.prefill_model.predict(10_000) for worker in workers]
    assert predicted == pytest.approx([1.1, 6.1, 1.1, 6.1], rel=0.1)
    assert {worker.prefill_model.regression.share for worker in workers} == {0.0}


def test_an_engine_whose_models_are_not_known_yet_is_predicted_as_others_of_its_role() -> None:
    candidates, engines = fleet([{"a"}, set()])
    taught(candidates.workers[0], 6e-4)
    candidates.workers[1].join_kind(candidates.same_kind(engines[1]))
    assert candidates.workers[1].prefill_model.predict(10_000) == pytest.approx(6.1, rel=0.1)
