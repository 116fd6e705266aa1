"""What happens to instances in mid simulation: they join, leave, die and change their speed.

600 kill prefill-3        seconds of the simulation; 600s, 10m and 1h are understood, too
900 join prefill-3        the same instance anew, with nothing in its cache
900 join decode           one more
1200 leave whole-0        nothing more is sent there; it ends what it has
300 slow decode-1 4       what it begins from now on takes four times as long as on its machine; 1: as long
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from enum import Enum
from functools import partial
from pathlib import Path
from typing import NamedTuple

from moonpool.core.errors import ConfigError

KINDS = ("prefill", "decode", "whole")
_LINE = re.compile(
    r"(\d+(?:\.\d+)?)([smh]?)\s+(join|leave|kill|slow)\s+(prefill|decode|whole)(-\d+)?(?:\s+(\d+(?:\.\d+)?))?"
)
_bad = partial(ConfigError, operation="simulate")
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600}


class Act(Enum):
    """What a ``ClusterEvent`` does to an instance; the values are the words of a line."""

    JOIN = "join"
    LEAVE = "leave"
    KILL = "kill"
    SLOW = "slow"


class ClusterEvent(NamedTuple):
    """name: KIND-NUMBER; for one more, KIND alone. times: of SLOW, how many times as long work takes."""

    at_s: float
    act: Act
    name: str
    times: float = 1.0

    def __str__(self) -> str:
        times = f" {self.times:g}" if self.act is Act.SLOW else ""
        return f"{self.at_s:g} {self.act.value} {self.name}{times}"


def parse(text: str) -> ClusterEvent:
    """Raises ConfigError that says what an event looks like."""
    found = _LINE.fullmatch(text.strip())
    slows = found is not None and found[3] == Act.SLOW.value
    if found is None or (found[3] != "join" and not found[5]) or slows != bool(float(found[6] or 0)):
        raise _bad(
            f"{text.strip()!r} is no event; it looks like '600s kill prefill-3', '15m join decode' or "
            "'300s slow whole-1 4'"
        )
    at_s = float(found[1]) * _SECONDS[found[2]]
    return ClusterEvent(at_s, Act(found[3]), found[4] + (found[5] or ""), float(found[6] or 1))


def read_faults(path: Path) -> list[ClusterEvent]:
    """One a line; empty lines and those that begin with # are passed over. Raises ConfigError that names the
    line."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise _bad(f"the events of {path} cannot be read: {error}") from error
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            found.append(parse(line))
        except ConfigError as error:
            raise _bad(f"{path}, line {number}: {error}") from error
    return found


def check(faults: Iterable[ClusterEvent], counts: dict[str, int]) -> list[ClusterEvent]:
    """In the order of their times. counts: instances of each kind at the beginning. Raises ConfigError for
    what cannot happen: an instance leaves that is not there, or joins that is.
    """
    ordered = sorted(faults, key=lambda each: each.at_s)
    known = dict(counts)
    there = {f"{kind}-{number}" for kind, count in counts.items() for number in range(count)}
    for each in ordered:
        kind, _, number = each.name.partition("-")
        if not 0 <= each.at_s < math.inf:
            raise _bad(f"{each}: there is no such time")
        if each.act is not Act.JOIN:
            if each.name not in there:
                raise _bad(f"{each}: there is no {each.name} at that time")
            if each.act is not Act.SLOW:
                there.remove(each.name)
            continue
        if not counts.get(kind):
            raise _bad(f"{each}: this cluster has no {kind} instances")
        name = each.name if number else f"{kind}-{known[kind]}"
        if name in there:
            raise _bad(f"{each}: {name} is there already")
        if number and int(number) >= known[kind]:
            raise _bad(f"{each}: there never was a {name}; 'join {kind}' makes {kind}-{known[kind]}")
        known[kind] += not number
        there.add(name)
    return ordered
