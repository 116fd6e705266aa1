"""The option ``gpu_pin``: parts of the node's memory that a card reads by itself, without a copy by the CPU.
They are pinned before the engine serves, because each call that pins stops all CUDA calls of the process."""

from __future__ import annotations

from collections.abc import Callable

from moonpool import _native
from moonpool.connectors.options import wrong
from moonpool.core.config.units import format_size, parse_size

ALL = 1 << 62
STEP_BYTES = 8 << 30  # between two messages

Say = Callable[[str], object]


def pin_bytes(place: str, key: str, value: object) -> int:
    """Bytes to pin: of "all" ALL. Raises ConfigError that names ``place`` and ``key``."""
    if value == "all":
        return ALL
    try:
        size = parse_size(str(value)) if not isinstance(value, bool) else -1
    except ValueError:
        size = -1
    if 0 <= size <= ALL:
        return size
    raise wrong(place, key, f'must be 0, a size such as 16GiB, or "all", not {value!r}')


def pin_arena(
    kv: _native.DeviceKv, client: _native.Client | None, wanted: int, *, info: Say, warning: Say
) -> None:
    """Pins the memory of the client's node for a card's KV cache, as ``grow_pins``; all the rest is loaded
    through the ring.

    client: None: the engine has no pool.
    """
    if not wanted:
        return
    if client is None:
        warning("there is no pool yet, so no memory of a node is pinned (gpu_pin); loads go through the ring")
        return
    grow_pins(
        lambda target: kv.pin_arena(client, target),
        wanted,
        rest="loads of the rest go through the ring",
        info=info,
        warning=warning,
    )


def grow_pins(
    grow: Callable[[int], _native.ArenaPins], wanted: int, *, rest: str, info: Say, warning: Say
) -> int:
    """Pins a node's memory from its front on, until ``wanted`` bytes are pinned or no more can be. Says how
    far it is, and why it stopped. How many bytes are pinned.

    grow: pins until so many bytes are pinned.
    rest: what becomes of objects beyond them.
    """
    target = 0
    while True:
        target = min(target + STEP_BYTES, wanted)
        pins = grow(target)
        goal = min(wanted, pins.arena_bytes)
        pinned = f"{format_size(pins.pinned_bytes)} of the node's {format_size(pins.arena_bytes)}"
        if pins.why:
            warning(f"{pinned} are pinned for the card; {rest} ({pins.why})")
            return pins.pinned_bytes
        info(f"{pinned} are pinned for the card")
        if pins.pinned_bytes >= goal:
            return pins.pinned_bytes
