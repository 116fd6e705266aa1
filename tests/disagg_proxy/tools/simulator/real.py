"""A live engine beside its simulation: what it takes for a few prompts makes a ``Machine``, and one small
trace goes to both.

A block of the trace, 512 tokens, becomes one block of the engine's cache, so lengths and times of the machine
are in the trace's tokens.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

import numpy as np

from moonpool.disagg_proxy.conductor.policy import make_policy
from moonpool.disagg_proxy.tools.replay.client import Ended, Outcome
from moonpool.disagg_proxy.tools.replay.prompts import Prompts
from moonpool.disagg_proxy.tools.replay.run import Plan, replay_here
from moonpool.disagg_proxy.tools.replay.sender import Bounds
from moonpool.disagg_proxy.tools.simulator.cluster import Cluster, ClusterSettings, SimulatedProxy
from moonpool.disagg_proxy.tools.simulator.job import Job
from moonpool.disagg_proxy.tools.simulator.machine import Machine
from moonpool.disagg_proxy.tools.simulator.trace import BLOCK_TOKENS, Arrival, Trace

MEASURED_BLOCKS = (1, 15, 30, 60)
TIMES = 3  # each, for the median
ANSWER_TOKENS = 12
TOGETHER = 4  # answers, for the step's time by its batch
AT_ONCE = 1e9  # times the trace's speed
LAST_ID = 255  # of a vocabulary of bytes


def conversations(count: int, turns: int, chance: random.Random) -> list[Arrival]:
    """count conversations of so many turns, one request a second on average, all with one system prompt. A
    turn is its predecessor with some blocks more; the last block of a prompt is partly filled."""
    ids = iter(range(1, 1 << 20))
    said: list[list[int]] = [[0] for _ in range(count)]
    order = [each for each in range(count) for _ in range(turns)]
    chance.shuffle(order)
    rows, at_s = [], 0.0
    for each in order:
        said[each] += [next(ids) for _ in range(chance.randint(4, 12))]
        # Never a last block that is full: engines keep that one, too, the simulated one does not.
        tokens = (len(said[each]) - 1) * BLOCK_TOKENS + chance.randint(1, BLOCK_TOKENS - 1)
        rows.append(Arrival(at_s, tokens, chance.randint(2, ANSWER_TOKENS), tuple(said[each])))
        said[each] = [*said[each][:-1], next(ids)]  # the next turn goes on in the middle of a block
        at_s += chance.expovariate(1.0)
    return rows


async def outcomes(
    url: str, rows: Sequence[Arrival], block_tokens: int, *, speed: float, at_once: int, seed: int
) -> list[Outcome]:
    """In the order of arrival. Raises AssertionError when one was not answered."""
    found: list[Outcome] = []
    plan = Plan([url], speed=speed, bounds=Bounds(concurrency=at_once))
    prompts = Prompts(block_tokens=block_tokens, first_id=0, last_id=LAST_ID, seed=seed)
    await replay_here(plan, Trace("small", rows), prompts, each=found.append)
    assert {each.ended for each in found} == {Ended.ANSWERED}, [each.why for each in found]
    return sorted(found, key=lambda each: each.number)


async def measured(url: str, block_tokens: int, seed: int) -> Machine:
    """What the engine takes now, alone with each prompt."""
    sizes = [blocks for _ in range(TIMES + 1) for blocks in MEASURED_BLOCKS]
    ids = iter(range(1 << 20))
    rows = [
        Arrival(0.0, blocks * BLOCK_TOKENS, ANSWER_TOKENS, tuple(next(ids) for _ in range(blocks)))
        for blocks in sizes
    ]
    again = [rows[-1]] * TIMES
    alone = await outcomes(url, [*rows, *again], block_tokens, speed=AT_ONCE, at_once=1, seed=seed)
    warm = alone[len(MEASURED_BLOCKS) : len(rows)]  # the first of each size warms the engine up
    tokens = np.array([blocks * BLOCK_TOKENS for blocks in MEASURED_BLOCKS], float)
    taken_s = [
        statistics.median(each.ttft_s for each in warm[at :: len(MEASURED_BLOCKS)])
        for at in range(len(MEASURED_BLOCKS))
    ]
    squared, linear, constant = np.polyfit(tokens, taken_s, 2)
    if squared < 0:
        squared, (linear, constant) = 0.0, np.polyfit(tokens, taken_s, 1)
    reused = tokens[-1] - BLOCK_TOKENS
    rest_s = max(constant, 0.0) + linear * BLOCK_TOKENS + squared * (tokens[-1] ** 2 - reused**2)
    cached_s = statistics.median(each.ttft_s for each in alone[len(rows) :])
    few = [row._replace(blocks=(next(ids),), tokens=BLOCK_TOKENS) for row in rows[:TOGETHER]]
    together = await outcomes(url, few, block_tokens, speed=AT_ONCE, at_once=TOGETHER, seed=seed)
    step_s = statistics.median(each.mean_gap_s for each in warm)
    batch_s = statistics.median(each.mean_gap_s for each in together)
    request_s = max((batch_s - step_s) / (TOGETHER - 1), 0.0)
    return Machine(
        prefill_s=float(max(constant, 0.0)),
        prefill_token_s=float(max(linear, 0.0)),
        prefill_token2_s=float(squared),
        reuse_token_s=float(max(cached_s - rest_s, 0.0) / reused),
        step_s=max(step_s - request_s, 1e-4),
        step_request_s=request_s,
        step_token_s=0.0,
        kv_bytes=1,
        cache_tokens=1 << 30,
        room_tokens=1 << 30,
        link_bytes_s=1e9,
        handover_s=0.0,
    )


def simulated(rows: Sequence[Arrival], machine: Machine, speed: float) -> list[Job]:
    """One engine that does both, as vLLM alone is. In the order of arrival."""
    jobs: list[Job] = []
    settings = ClusterSettings(whole=1, machine=machine, pool=False, chunk_tokens=0)
    cluster = Cluster(settings, [SimulatedProxy(make_policy("round_robin"), None)], jobs.append)
    cluster.run(Trace("small", rows).arrivals(speed=speed))
    return sorted(jobs, key=lambda job: job.name)
