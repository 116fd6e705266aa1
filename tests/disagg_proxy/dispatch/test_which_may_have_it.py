"""Which engines those that wait may go to, and that policies need not look at the same ones twice."""

from __future__ import annotations

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
