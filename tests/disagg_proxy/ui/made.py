"""Requests that are over, and pages of any size, without a proxy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moonpool.disagg_proxy.conductor.choice import Choice, Request
from moonpool.disagg_proxy.conductor.observer import Finished
from moonpool.disagg_proxy.conductor.worker import Worker
from moonpool.disagg_proxy.data_plane.observations import Observation
from moonpool.disagg_proxy.ui.history import STEP_S, TimeStep, Totals
from moonpool.disagg_proxy.ui.snapshot import DecisionRow, EngineSnapshot, ProxyGroup, Snapshot

INSTANCES = tuple(Worker(place, f"p{place}") for place in range(3))


def finished(
    *,
    at: int = 0,
    tokens: int = 1000,
    own: Sequence[int] = (0, 0, 0),
    pool: int = 0,
    why: Mapping[str, float | int | str] | None = None,
    prefill: int | None = None,
    fetch: bool = True,
    sent_s: float = 10.0,
    **observed: Any,
) -> Finished:
    """Of a stream that arrived at 10 s and had its first token at 10.5 s."""
    values = dict.fromkeys(Observation._fields, 0)
    values |= {"arrived_s": 10.0, "first_byte_s": 10.5, "last_byte_s": 12.0, "stream": 1, "status": 200}
    values |= {"prompt_tokens": -1, "cached_tokens": -1, "prefill_cached_tokens": -1, "completion_tokens": 9}
    values |= {"trace_id": bytes(16), "parent_id": bytes(8), "span_id": bytes(8), **observed}
    asks = None if prefill is None else INSTANCES[prefill]
    choice = Choice(INSTANCES[at], asks, 0.1, {} if why is None else why, fetch)
    return Finished(Observation(**values), choice, Request(tokens, own, pool), sent_s)


def page(engines: int, **other: Any) -> dict[str, Any]:
    """What /ui/data says of so many instances, every tenth of them ill in some way."""
    rows = [
        EngineSnapshot(
            f"engine-{at}",
            "prefill" if at % 2 else "decode",
            "dead" if at % 20 == 7 else "healthy",
            "GET /health failed: <img src=x onerror=alert(1)>" if at % 20 == 7 else "",
            at % 20 == 3,
            at % 13,
            (at % 29) / 10,
            at % 5,
            at % 7,
            1000 * (at % 11),
            100 * at,
            at % 3,
            "lost" if at == 1 else "live",
        )
        for at in range(engines)
    ]
    steps = [
        TimeStep(
            1000 - STEP_S * ago,
            50,
            60_000,
            20_000 + 100 * (ago % 40),
            9_000,
            60_000,
            28_000,
            50,
            20.0,
            ago % 17 / 4,
        )
        for ago in range(180, 0, -1)
    ]
    last = [
        DecisionRow(
            at,
            f"{at:032x}",
            at / 2,
            f"engine-{at}",
            None if at % 2 else "engine-1",
            "answered",
            200,
            1000,
            400,
            200,
            590,
            20,
            0.5,
            0.45 + at / 100,
            2.5,
            "its first token was predicted soonest",
            "behind 600 tokens it is new",
        )
        for at in range(60)
    ]
    made = Snapshot(
        version="9.9",
        process=1,
        group=ProxyGroup(),
        policy="conductor",
        explains=True,
        clock_s=1000.0,
        engines=engines,
        healthy=sum(row.health == "healthy" for row in rows),
        engine_columns=EngineSnapshot._fields,
        engine_rows=rows,
        step_s=STEP_S,
        step_columns=TimeStep.__struct_fields__,
        steps=steps,
        points=[(0.01 * 1.02**at, 0.01 * 1.02**at * (0.8 + at % 7 / 15)) for at in range(300)],
        rejected={"ttft": 900, "no_engine": 12, "unknown_path": 3},
        rejected_lately={"ttft": 450, "no_engine": 2},
        failures={"connect": 5},
        blind=4,
        last=last,
        total=Totals(
            saved=1_234_567,
            priced=100,
            whole_s=80.0,
            left_s=29.0,
            compared=50,
            compared_ttft_s=10.0,
            compared_whole_s=45.0,
        ),
    )
    return {**{name: getattr(made, name) for name in made.__struct_fields__}, **other}
