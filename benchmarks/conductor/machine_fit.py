"""A simulator's machine from the steps of a real engine, and what it says of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from moonpool.disagg_proxy.tools.simulator.decoding import Decoding
from moonpool.disagg_proxy.tools.simulator.machine import COMPUTED, Machine

TINY_S = 1e-9
ROUNDS = 8
BASE = Machine(
    **dict.fromkeys(COMPUTED, TINY_S),
    reuse_token_s=0.0,
    kv_bytes=1,
    cache_tokens=1 << 30,
    room_tokens=1 << 30,
    link_bytes_s=1e9,
    handover_s=0.0,
)


@dataclass(frozen=True)
class Step:
    """chunks: of prompts, (first token, token after the last); decoding: tokens in the KV cache of each
    request that gets its next token."""

    seconds: float
    chunks: tuple[tuple[int, int], ...]
    decoding: tuple[int, ...]


def step_s(machine: Machine, step: Step) -> float:
    """What the simulator takes for it, by its own code."""
    decoding = Decoding(machine)
    for name, context in enumerate(step.decoding):
        decoding.join(name, context, 1 << 30, 0.0)
    if not step.chunks:
        return decoding.current_gap_s(0.0)
    seconds = machine.chunks_s(step.chunks, in_decode_step=bool(step.decoding))
    return decoding.stall(seconds, 0.0, step=True)


def fit(steps: Sequence[Step]) -> Machine:
    """The machine with the least sum of relative errors: least squares, with weights that make them absolute
    errors. A step's seconds are linear in the machine's, except where the larger of two constants counts,
    so a few rounds suffice."""
    taken_s = np.array([step.seconds for step in steps])
    values = np.full(len(COMPUTED), TINY_S)
    weights = 1 / taken_s
    for _ in range(ROUNDS):
        slopes = _slopes(values, steps)
        values = np.maximum(_least_squares(slopes * weights[:, None], taken_s * weights), TINY_S)
        errors = np.abs(slopes @ values / taken_s - 1)
        weights = 1 / taken_s / np.sqrt(np.maximum(errors, 0.01))
    return _machine(values)


def _machine(values: np.ndarray) -> Machine:
    return replace(BASE, **dict(zip(COMPUTED, map(float, values), strict=True)))


def _slopes(values: np.ndarray, steps: Sequence[Step]) -> np.ndarray:
    """(steps, COMPUTED): seconds of each step for a second more of each figure."""
    machine = _machine(values)
    base_s = np.array([step_s(machine, step) for step in steps])
    slopes = np.empty((len(steps), len(COMPUTED)))
    for column, name in enumerate(COMPUTED):
        by = max(getattr(machine, name) * 1e-3, TINY_S)
        more = replace(machine, **{name: getattr(machine, name) + by})
        slopes[:, column] = (np.array([step_s(more, step) for step in steps]) - base_s) / by
    return slopes


def _least_squares(columns: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """None below 0: the lowest of those is left out, until none is."""
    left = list(range(columns.shape[1]))
    while True:
        found = np.linalg.lstsq(columns[:, left], wanted, rcond=None)[0]
        if found.min() >= 0 or len(left) == 1:
            values = np.zeros(columns.shape[1])
            values[left] = found
            return values
        left.pop(int(found.argmin()))
