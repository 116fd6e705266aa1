"""What clients asked and were told, and the checker of it.

Each key is a register of which every write has a value of its own. A read returns the last acknowledged
value, one whose write is concurrent with it, or a miss. For one register it is enough to compare pairs of
values: with all operations of a value (its write, its reads) taken together, a comes before b if an
operation of a ended before one of b began; two values that each come before the other have no order (P.
Gibbons, E. Korach: Testing shared memories). A removal is a value of its own that no read returns.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

REPLACE, REMOVE, GET = "replace", "remove", "get"
# Of a write: acknowledged; carried out, and some nodes may have an older value until all is well; not known.
DONE, PARTLY, UNKNOWN = "done", "partly", "unknown"
REMOVED_VALUE, OLD_VALUE, OTHER_BYTES = "a removed value", "an old value", "bytes that no client had written"


class Operation(NamedTuple):
    """Times in seconds of one clock. value: written (of a removal: a number of its own) or read; 0: a miss.
    outcome: DONE, PARTLY or UNKNOWN.
    """

    kind: str
    client: int
    key: str
    value: int
    begin_s: float
    end_s: float
    outcome: str


class Violation(NamedTuple):
    """What was read: REMOVED_VALUE, OLD_VALUE or OTHER_BYTES, and of which key."""

    what: str
    key: str
    value: int
    instead_of: int


def violations(operations: Iterable[Operation], healed_s: float) -> list[Violation]:
    """Of all keys. healed_s: from then on every node has carried out what it had missed."""
    keys: dict[str, list[Operation]] = {}
    for operation in operations:
        keys.setdefault(operation.key, []).append(operation)
    return [found for key, of_key in keys.items() for found in _of_key(key, of_key, healed_s)]


def _of_key(key: str, operations: Sequence[Operation], healed_s: float) -> list[Violation]:
    writes = {one.value: one for one in operations if one.kind != GET}
    first_end = dict.fromkeys(writes, math.inf)
    last_begin = {value: one.begin_s for value, one in writes.items()}
    found = []
    for value, one in writes.items():
        if one.outcome != UNKNOWN:
            first_end[value] = one.end_s
    for one in operations:
        if one.kind != GET or not one.value:
            continue
        if one.value not in writes:
            found.append(Violation(OTHER_BYTES, key, one.value, 0))
            continue
        first_end[one.value] = min(first_end[one.value], one.end_s)
        last_begin[one.value] = max(last_begin[one.value], one.begin_s)
    for value, one in writes.items():
        if one.outcome == PARTLY:  # a node that was away gives the older one until all is well
            first_end[value] = max(first_end[value], healed_s)
    values = list(writes)
    # A write without an acknowledgement may take effect at any time; a removal is never read.
    acknowledged = np.array([writes[value].outcome != UNKNOWN for value in values], dtype=bool)
    is_value = np.array([writes[value].kind == REPLACE for value in values], dtype=bool)
    ends = np.array([first_end[value] for value in values])
    begins = np.array([last_begin[value] for value in values])
    before = ends[:, None] < begins[None, :]
    wrong = before & before.T & acknowledged[:, None] & acknowledged[None, :] & is_value[:, None]
    np.fill_diagonal(wrong, False)
    for old, new in zip(*np.nonzero(wrong), strict=True):
        if is_value[new] and old > new:
            continue  # the same pair, the other way round
        what = OLD_VALUE if is_value[new] else REMOVED_VALUE
        found.append(Violation(what, key, values[old], values[new]))
    return found
