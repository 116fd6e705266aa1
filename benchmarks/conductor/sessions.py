"""The sessions of benchmarks.agents, and what they see of each answer."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass

import aiohttp

from benchmarks.conductor.streamed import complete, open_session
from benchmarks.engine.fleet import prompt
from benchmarks.engine.serving import BLOCK_TOKENS

SYSTEM_TOKENS = 600
TURN_TOKENS, BRANCH_TOKENS, ANSWER_TOKENS = (60, 220), (40, 120), (16, 64)
BRANCH_EACH = 4  # turns
THINKS_S = (0.1, 1.0)


@dataclass(frozen=True)
class Turn:
    """number: in its session, from 0. known: leading tokens, in whole blocks, that earlier prompts and
    answers had. cached: prompt tokens that no engine computed for it."""

    number: int
    ttft_s: float
    known: int
    cached: int


@dataclass(frozen=True)
class _Answer:
    ttft_s: float
    ids: list[int]
    cached: int


async def warm_up(url: str) -> None:
    """First requests of each engine, which are slower; what they say is said in no session."""
    async with open_session() as session:
        for number in range(4):
            await _ask(session, url, prompt(300, f"warm up {number}"), 8)


async def talk(url: str, sessions: int, turns: int, seed: int) -> list[Turn]:
    """All turns of all sessions, branches left out of what is returned. Raises RuntimeError for a request
    that failed."""
    done: list[Turn] = []
    system = prompt(SYSTEM_TOKENS, f"{seed}/system")
    async with open_session() as session:

        async def agent(number: int) -> None:
            chance = random.Random(f"{seed}/{number}")
            ids = system
            known = SYSTEM_TOKENS if number else 0
            # The first session computes the system prompt.
            await asyncio.sleep(number and 1.0 + chance.uniform(*THINKS_S))
            for turn in range(turns):
                history = ids
                ids = history + prompt(chance.randint(*TURN_TOKENS), f"{seed}/{number}/{turn}")
                asked = [_ask(session, url, ids, chance.randint(*ANSWER_TOKENS))]
                if turn % BRANCH_EACH == BRANCH_EACH - 1:
                    end = prompt(chance.randint(*BRANCH_TOKENS), f"{seed}/{number}/{turn}/branch")
                    asked.append(_ask(session, url, history + end, chance.randint(*ANSWER_TOKENS)))
                answer, *_ = await asyncio.gather(*asked)
                done.append(Turn(turn, answer.ttft_s, known // BLOCK_TOKENS * BLOCK_TOKENS, answer.cached))
                ids = ids + answer.ids
                known = len(ids) - 1  # nothing was computed with the last token
                await asyncio.sleep(chance.uniform(*THINKS_S))

        await asyncio.gather(*map(agent, range(sessions)))
    return done


async def _ask(session: aiohttp.ClientSession, url: str, ids: list[int], answer_tokens: int) -> _Answer:
    began_s = time.perf_counter()
    found = await complete(session, url, ids, answer_tokens, return_token_ids=True)
    if len(found.said) != answer_tokens:
        raise RuntimeError(f"{url} sent {len(found.said)} of {answer_tokens} tokens")
    return _Answer(found.first_s - began_s, found.said, found.cached)


__all__ = ["Turn", "talk", "warm_up"]
