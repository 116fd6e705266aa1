"""The relay's records of requests (``Relay.take_observations``), 128 bytes each."""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

import numpy as np

RECORD = struct.Struct("<QqiiddddddiiiiHBBBBBB16s8s8s")
# The same layout for numpy, to sum up records without a tuple for each.
COLUMNS = np.dtype(
    [
        *((name, "<i8") for name in ("request", "tracked")),
        *((name, "<i4") for name in ("prefill", "decode")),
        *((name, "<f8") for name in ("arrived_s", "sent_prefill_s", "prefill_done_s")),
        *((name, "<f8") for name in ("sent_decode_s", "first_byte_s", "last_byte_s")),
        *((name, "<i4") for name in ("prompt_tokens", "cached_tokens")),
        *((name, "<i4") for name in ("completion_tokens", "prefill_cached_tokens")),
        ("status", "<u2"),
        *((name, "u1") for name in ("outcome", "attempts", "handed_over", "stream", "stage", "sampled")),
        *((name, f"S{size}") for name, size in (("trace_id", 16), ("parent_id", 8), ("span_id", 8))),
    ]
)
_KEPT = struct.Struct("<8xq76xB35x")  # tracked and handed_over alone


class Stage(IntEnum):
    """ENDED: the last record of a request. PREFILLED: the prefill engine has answered. BEGUN: the first byte
    of the answer is there, unless one that is no stream ends at once. The latter two only of requests whose
    plan is tracked.
    """

    ENDED = 0
    PREFILLED = 1
    BEGUN = 2


class Outcome(IntEnum):
    """Outcome of a request. LEFT: the client closed. REFUSED: by the policy, after an engine was tried."""

    ANSWERED = 0
    LEFT = 1
    FAILED = 2
    BROKEN_OFF = 3
    REFUSED = 4


class HandoverForm(IntEnum):
    """The form of the hand-over of a request; NOT: there was none."""

    NOT = 0
    TWO_STEP = 1
    CONCURRENT = 2
    ONE_SHOT = 3
    CONTEXT_FIRST = 4
    GENERATION_FIRST = 5


class Observation(NamedTuple):
    """One record, in the order of its bytes. Places are -1 and times 0.0 for steps that did not happen; token
    counts are the engine's, -1 if its answer has none. handed_over: a HandoverForm.
    """

    request: int
    tracked: int
    prefill: int
    decode: int
    arrived_s: float
    sent_prefill_s: float
    prefill_done_s: float
    sent_decode_s: float
    first_byte_s: float
    last_byte_s: float
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    prefill_cached_tokens: int
    status: int
    outcome: int
    attempts: int
    handed_over: int
    stream: int
    stage: int
    sampled: int
    trace_id: bytes
    parent_id: bytes
    span_id: bytes


_made = functools.partial(tuple.__new__, Observation)  # _make is Python code and doubles the cost


def read(records: bytes) -> Iterator[Observation]:
    """All records, in order."""
    return map(_made, RECORD.iter_unpack(records))


def read_last(records: bytes, count: int) -> Iterator[Observation]:
    """The last ``count`` records."""
    return read(records[-count * RECORD.size :])


def read_kept(records: bytes) -> Iterator[Observation]:
    """Of the records those that the proxy keeps account of: tracked, or handed over. (A policy that looks
    at no prompt makes neither, and every request would pay for a tuple that is thrown away.)"""
    for number, kept in enumerate(_KEPT.iter_unpack(records)):
        if kept != (0, 0):
            yield _made(RECORD.unpack_from(records, number * RECORD.size))
