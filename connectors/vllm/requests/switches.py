"""Switches of a single request's use of the pool: members of "moonpool" in its ``kv_transfer_params``.

    load     false: the pool is not asked for its blocks, and none is loaded
    store    false: none of its blocks is saved
    keep_s   its blocks are saved with a soft pin: a node evicts them after all that have none, until they
             were not used for so many seconds

The proxy sets them (disagg_proxy/dispatch/request_switches.py), and keeps clients from it. A hand-over
between prefill and decode is no use of the pool: it takes place all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

# What else stands there: a hand-over, what an answer says of its request, the wish to hear why, and an engine
# whose own cache has more (pd/neighbour_asks.py).
_NO_SWITCHES = frozenset(
    (
        "handover",
        "handed_over_tokens",
        "pool_tokens",
        "local_tokens",
        "load_errors",
        "decision",
        "explain",
        "cached_at",
        "neighbour_tokens",
    )
)
_KEEP_MIN_S = 0.001
_KEEP_MAX_S = 49 * 86_400.0  # a node's longest


class Switches(NamedTuple):
    """load: whether the pool is asked for the request's blocks. store: whether they are saved. keep_s: their
    soft pin in seconds, 0: none."""

    load: bool = True
    store: bool = True
    keep_s: float = 0.0


NO_SWITCH = Switches()
OFF = ("load", "store")  # those that switch a use of the pool off


def _is_seconds(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return _KEEP_MIN_S <= value <= _KEEP_MAX_S


_FIT: Mapping[str, tuple[Callable[[object], bool], str]] = {
    "load": (lambda value: isinstance(value, bool), "true or false"),
    "store": (lambda value: isinstance(value, bool), "true or false"),
    "keep_s": (_is_seconds, "a number of seconds from 0.001 to 49 days"),
}


def read_switches(params: Mapping[str, Any] | None) -> tuple[Switches, list[str]]:
    """params: the request's ``kv_transfer_params``. -> the switches, and what is said there and counts for
    nothing, one phrase each; the same for each of a kind."""
    ours = params.get("moonpool") if params else None
    if ours is None:
        return NO_SWITCH, []
    if not isinstance(ours, Mapping):
        return NO_SWITCH, [f'"moonpool" is an object with {", ".join(_FIT)}']
    said = {name: ours[name] for name, (fits, _) in _FIT.items() if name in ours and fits(ours[name])}
    return Switches(**said), list(_complaints(ours, said))


def _complaints(ours: Mapping[str, Any], said: Mapping[str, Any]) -> Iterator[str]:
    for name, (_, what) in _FIT.items():
        if name in ours and name not in said:
            yield f'"{name}" of "moonpool" is {what}, and is something else'
    if not ours.keys() <= _NO_SWITCHES | _FIT.keys():
        yield f'"moonpool" has members that this connector does not know; it knows {", ".join(_FIT)}'
