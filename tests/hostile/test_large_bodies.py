"""Bodies that are made to cost: many members, prompts, ids. Refused with one sentence, and others go on."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.disagg_proxy.harness import Bed, bed, until, with_deadline

COMPLETIONS = "/v1/completions"
ORDINARY = b'{"prompt":[1,2,3]}'


def hostile(size: int) -> dict[str, bytes]:
    """By the reason of their refusal, each of so many bytes."""
    return {
        "too_many_members": b"{" + b'"a":1,' * (size // 6) + b'"prompt":"x"}',
        "too_many_prompts": b'{"prompt":[' + b'"",' * (size // 3) + b'""]}',
        "too_many_ids": b'{"prompt":[' + b"1," * (size // 2) + b"1]}",
        "no_object": b'{"prompt":[' + b"[" * size + b"]}",
    }


async def attacked(b: Bed, size: int, at_once: int) -> None:
    for reason, body in hostile(size).items():
        attackers = [asyncio.ensure_future(b.ask("POST", COMPLETIONS, body)) for _ in range(at_once)]
        while not all(attacker.done() for attacker in attackers):
            assert (await b.ask("POST", COMPLETIONS, ORDINARY)).status == 200
        for attacker in attackers:
            answer = attacker.result()
            assert (answer.status, json.loads(answer.body)["error"]["code"]) == (400, reason)
        assert b.metric("moonpool_proxy_rejected_total", reason=reason) == at_once
    told = {exchange.body for exchange in b.engines[0].seen if exchange.target == COMPLETIONS}
    assert told == {ORDINARY}


@with_deadline
@pytest.mark.parametrize("policy", ["round_robin", "conductor"])
async def test_hostile_bodies_are_refused_while_others_are_served(policy: str) -> None:
    async with bed(1, policy=policy) as b:
        await attacked(b, 4 << 20, 2)
        assert b.counters.held_body_bytes == 0


@pytest.mark.heavy
@pytest.mark.timeout(320)
def test_at_their_full_size() -> None:
    async def run() -> None:
        async with bed(1, policy="conductor") as b:
            await attacked(b, 62 << 20, 4)

    with_deadline(run, deadline_s=300.0)()


@with_deadline
async def test_within_the_limits_all_is_served() -> None:
    """Read beside the relay's thread, and whole."""
    bodies = [
        b"{" + b",".join(b'"a%d":1' % n for n in range(1000)) + b',"prompt":"%b"}' % (b"x" * 300_000),
        b'{"prompt":[' + b",".join([b'"%b"' % (b"x" * 100)] * 4096) + b"]}",
        b'{"prompt":[' + b",".join(b"%d" % n for n in range(100_000)) + b"]}",
        b'{"rid":1,"prompt":"%b"}' % (b"x" * 2_000_000),
    ]
    async with bed(1, policy="conductor") as b:
        for body in bodies:
            assert (await b.ask("POST", COMPLETIONS, body)).status == 200
        told = [exchange.body for exchange in b.engines[0].seen if exchange.target == COMPLETIONS]
        assert told == [*bodies[:3], bodies[3].replace(b'{"rid":1,', b"{")]


@with_deadline
async def test_a_client_that_leaves_while_its_body_is_read() -> None:
    """In any order with the reader's end; the next request finds all in place."""
    body = b'{"prompt":"%b"}' % (b"x" * 4_000_000)
    async with bed(1) as b:
        for _ in range(10):
            client = await b.client()
            await client.request("POST", COMPLETIONS, body)
            client.leave()
        await until(lambda: b.client_count == 0)
        assert b.counters.held_body_bytes == 0
        assert (await b.ask("POST", COMPLETIONS, body)).status == 200
