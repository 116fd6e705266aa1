"""What benchmarks.conductor_real sends, and what it sees of each answer."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import aiohttp

from benchmarks.conductor.streamed import complete, open_session
from benchmarks.engine.fleet import prompt
from benchmarks.engine.serving import BLOCK_TOKENS

PREFIXES, PREFIX_TOKENS, WITH_PREFIX = 4, 512, 0.4
LENGTHS = ((0.65, 20, 150), (0.25, 300, 900), (0.10, 900, 1500))  # share, shortest, longest
ANSWER_TOKENS = (4, 24)

SYSTEM_TOKENS = 600
TURN_TOKENS = (60, 220)
THINKS_S = (0.1, 1.0)


class Planned(NamedTuple):
    """prefix: one of PREFIXES, which comes before its own tokens, or None."""

    at_s: float
    own_tokens: int
    prefix: int | None
    answer_tokens: int


@dataclass(frozen=True)
class Request:
    at_s: float
    ids: list[int]
    answer_tokens: int


@dataclass(frozen=True)
class Answer:
    """due_s: by time.perf_counter. ttft_s: from then on. decision: what the proxy says of its choice. cached:
    prompt tokens that the engine which computed the prompt did not compute."""

    due_s: float
    ttft_s: float
    engine: str
    decision: dict[str, Any]
    prompt_tokens: int
    cached: int


def alone(answers: Sequence[Answer]) -> list[Answer]:
    """Those beside which no other request waited for its first token."""
    return [
        one
        for one in answers
        if not any(
            other is not one
            and other.due_s < one.due_s + one.ttft_s
            and one.due_s < other.due_s + other.ttft_s
            for other in answers
        )
    ]


@dataclass(frozen=True)
class Turn:
    """known: leading tokens, in whole blocks, that earlier prompts of all sessions had."""

    answer: Answer
    known: int


def plan(count: int, per_s: float, chance: random.Random) -> list[Planned]:
    """Short and long prompts at random times."""
    made, at_s = [], 0.0
    for _ in range(count):
        pick = chance.random()
        for share, shortest, longest in LENGTHS:
            length = chance.randint(shortest, longest)
            if pick < share:
                break
            pick -= share
        which, with_prefix = chance.randrange(PREFIXES), chance.random() < WITH_PREFIX
        answer_tokens = chance.randint(*ANSWER_TOKENS)
        made.append(Planned(at_s, length, which if with_prefix else None, answer_tokens))
        at_s += chance.expovariate(per_s)
    return made


def mixed(count: int, per_s: float, chance: random.Random, name: str) -> list[Request]:
    """A plan's requests. name: of their tokens; another name has other tokens, and the same times and
    lengths."""
    made = []
    for number, each in enumerate(plan(count, per_s, chance)):
        ids = prompt(each.own_tokens, f"{name}/{number}")
        if each.prefix is not None:
            ids = prompt(PREFIX_TOKENS, f"{name}/prefix {each.prefix}") + ids
        made.append(Request(each.at_s, ids, each.answer_tokens))
    return made


async def send(url: str, requests: Sequence[Request]) -> list[Answer]:
    """Each at its time, whatever became of those before. Raises RuntimeError for one that failed."""
    async with open_session() as session:
        begun_s = time.perf_counter()
        asking = []
        for request in requests:
            due_s = begun_s + request.at_s
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            asking.append(
                asyncio.ensure_future(_ask(session, url, request.ids, request.answer_tokens, due_s))
            )
        return list(await asyncio.gather(*asking))


async def throughput(url: str, requests: Sequence[Request], clients: int) -> float:
    """Requests a second of so many clients that each send the next one at once."""
    left = list(requests)
    async with open_session() as session:

        async def client() -> None:
            while left:
                request = left.pop()
                await _ask(session, url, request.ids, request.answer_tokens, time.perf_counter())

        begun_s = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(clients)))
        return len(requests) / (time.perf_counter() - begun_s)


async def talk(url: str, sessions: int, turns: int, seed: int, name: str) -> list[Turn]:
    """Sessions that begin with one system prompt; each sends its next turn some time after the answer to the
    last one, with all that was said before."""
    done: list[Turn] = []
    async with open_session() as session:

        async def agent(number: int) -> None:
            chance = random.Random(f"{seed}/{number}")
            ids = prompt(SYSTEM_TOKENS, f"{name}/system")
            known = SYSTEM_TOKENS if number else 0
            await asyncio.sleep(
                number and 1.0 + chance.uniform(*THINKS_S)
            )  # the first computes the system prompt
            for turn in range(turns):
                ids = ids + prompt(chance.randint(*TURN_TOKENS), f"{name}/{number}/{turn}")
                answer = await _ask(session, url, ids, chance.randint(*ANSWER_TOKENS), time.perf_counter())
                done.append(Turn(answer, known // BLOCK_TOKENS * BLOCK_TOKENS))
                known = len(ids)
                await asyncio.sleep(chance.uniform(*THINKS_S))

        await asyncio.gather(*map(agent, range(sessions)))
    return done


async def _ask(
    session: aiohttp.ClientSession, url: str, ids: list[int], answer_tokens: int, due_s: float
) -> Answer:
    found = await complete(session, url, ids, answer_tokens, {"X-Moonpool-Decision": "1"})
    by_prefill = found.headers.get("X-Moonpool-Prefill-Cached", "")
    return Answer(
        due_s,
        found.first_s - due_s,
        found.headers.get("X-Moonpool-Engine", ""),
        json.loads(found.headers["X-Moonpool-Decision"]),
        found.usage["prompt_tokens"],
        int(by_prefill) if by_prefill.isdecimal() else found.cached,
    )
