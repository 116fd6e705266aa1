"""Sources that flap, vanish and offer too much, in front of a proxy under load: real sockets, real files."""

from __future__ import annotations

import asyncio
import json
import os
import random
from pathlib import Path

from moonpool.core.config.proxy_section import HealthChecks
from tests.disagg_proxy.harness import QUIET, MockEngine, bed, broke_two_engines, until, with_deadline

BODY = b'{"model":"m","prompt":[1,2,3]}'


def write(path: Path, rows: list[dict[str, str]]) -> None:
    part = path.with_name("part")
    part.write_text(json.dumps({"engines": rows}))
    os.replace(part, path)


@with_deadline
async def test_no_request_is_lost_while_a_source_flaps_and_engines_die(
    tmp_path: Path, rng: random.Random
) -> None:
    """The file names, forgets, breaks and vanishes as chance has it; engines die and come back. One engine is
    always named and never dies."""
    path = tmp_path / "engines.json"
    mocks = [MockEngine(f"e{number}") for number in range(4)]
    for mock in mocks:
        await mock.start()
    rows = {mock.name: {"name": mock.name, "url": mock.spec.url} for mock in mocks}
    write(path, list(rows.values()))
    name = f"file:{path}"
    health = HealthChecks(interval_s=0.02)
    more = {"policy": "conductor", "tokenizer": ("none",), "discovery_grace_s": 0.05, "engines_max": 5}
    async with bed(0, discovery=(name,), health=health, **more) as b:  # type: ignore[arg-type]
        source = next(iter(b.proxy._reconciler._sources))  # type: ignore[union-attr]
        source._look_every_s = 0.005  # type: ignore[attr-defined]
        answered, done = 0, asyncio.Event()

        async def client() -> None:
            nonlocal answered
            connection = await b.client()
            while not done.is_set():
                answer = await connection.ask("POST", "/v1/completions", BODY)
                if broke_two_engines(answer):
                    continue
                assert answer.status == 200, answer.body
                answered += 1

        asking = [asyncio.ensure_future(client()) for _ in range(8)]
        for _ in range(60):
            match rng.randrange(5):
                case 0:
                    path.write_text(rng.choice(("", "{", '{"engines": [{"url": 3}]}')))
                case 1:
                    path.unlink(missing_ok=True)
                case 2:
                    victim = rng.choice(mocks[1:])
                    await victim.stop()
                    await victim.start()
                case _:
                    names = ["e0", *rng.sample([mock.name for mock in mocks[1:]], rng.randrange(4))]
                    write(path, [rows[each] for each in names])
            target = answered + rng.randrange(1, 40)
            await until(lambda target=target: answered >= target)  # type: ignore[misc]
            b.proxy.check_integrity()
        write(path, list(rows.values()))
        await until(lambda: [engine.name for engine in sorted_by_name(b.proxy.engines)] == list(rows))
        done.set()
        await asyncio.gather(*asking)
        assert answered > 300
    for mock in mocks:
        await mock.stop()


def sorted_by_name(engines: object) -> list[MockEngine]:
    return sorted(engines, key=lambda each: each.name)  # type: ignore[call-overload,no-any-return]


@with_deadline
async def test_an_engine_that_is_forgotten_for_a_moment_keeps_what_is_known_of_it(tmp_path: Path) -> None:
    path = tmp_path / "engines.json"
    mock = MockEngine("a")
    await mock.start()
    row = {"name": "a", "url": mock.spec.url}
    write(path, [row])
    more = {"policy": "conductor", "tokenizer": ("none",)}
    async with bed(0, discovery=(f"file:{path}",), **more) as b:  # type: ignore[arg-type]
        body = json.dumps({"model": "m", "prompt": list(range(256))}).encode()
        assert (await b.ask("POST", "/v1/completions", body)).status == 200
        engine, instance = b.proxy.engines[0], b.proxy._dispatcher.workers[0]
        write(path, [])
        await until(lambda: b.proxy._reconciler._membership.missing == 1)  # type: ignore[union-attr]
        answer = await b.ask("POST", "/v1/completions", body, "X-Moonpool-Decision: 1\r\n")
        assert json.loads(answer.headers["x-moonpool-decision"])["own_tokens"] == 256
        assert "moonpool_proxy_discovery_missing 1.0" in (await b.ask("GET", "/metrics")).body.decode()
        write(path, [row])
        await until(lambda: b.proxy._reconciler._membership.missing == 0)  # type: ignore[union-attr]
        assert b.proxy.engines[0] is engine
        assert b.proxy._dispatcher.workers[0] is instance
    await mock.stop()


@with_deadline
async def test_of_two_thousand_engines_a_thousand_and_some_join(tmp_path: Path) -> None:
    path = tmp_path / "engines.json"
    rows = [{"url": f"http://127.0.{number // 250}.{number % 250 + 1}:9"} for number in range(2000)]
    write(path, rows)
    async with bed(0, discovery=(f"file:{path}",), health=QUIET) as b:
        assert len(b.proxy.engines) == 1024
        text = (await b.ask("GET", "/metrics")).body.decode()
        assert 'moonpool_proxy_discovery_refused{reason="no_room"} 976.0' in text
        assert (await b.ask("POST", "/v1/completions", BODY)).status == 503
        first = b.proxy.engines[0].name
        write(path, rows[::-1])
        await until(lambda: b.proxy._reconciler._membership.sources[f"file:{path}"].updates == 2)  # type: ignore[union-attr]
        assert b.proxy.engines[0].name == first  # whoever is there stays
