"""Where an object should rather lie, and for how long, by its configuration."""

from __future__ import annotations

from copy import copy
from typing import Any

from moonpool.core.errors import InvalidArgument

from ._values import DEFAULT, ReplicateConfig, SoftPinAction

SOFT_PIN_S = 1800.0  # without soft_pin_ttl_ms


def wishes(config: ReplicateConfig, keys: int, own: str) -> dict[str, Any]:
    """What Store.put() is asked for so many keys, beside bytes and copies. Raises InvalidArgument."""
    if config is DEFAULT:
        return {}
    asked: dict[str, Any] = {}
    if nodes := preferred_nodes(config, own):
        asked["node"] = nodes
    if groups := config.group_ids:
        if len(groups) not in (1, keys):
            raise InvalidArgument(f"{len(groups)} group_ids came with {keys} keys")
        asked["groups"] = [group or None for group in (groups * keys if len(groups) == 1 else groups)]
    soft = config.with_soft_pin or config.soft_pin_action is SoftPinAction.ENABLE
    if soft and config.soft_pin_action is not SoftPinAction.DISABLE and config.soft_pin_ttl_ms != 0:
        asked["soft_pin_s"] = SOFT_PIN_S if config.soft_pin_ttl_ms is None else config.soft_pin_ttl_ms / 1000
    return asked


def for_one(config: ReplicateConfig, i: int) -> ReplicateConfig:
    """The same for key ``i`` of a call alone."""
    if not config.group_ids or i >= len(config.group_ids):
        return config
    one = copy(config)
    one.group_ids = [config.group_ids[i]]
    return one


def preferred_nodes(config: ReplicateConfig, own: str) -> list[str] | None:
    """Segments are nodes, by their address. ``own``: this process's segment, where a batch that should lie
    together goes, instead of to wherever there is room. None: moonpool's own choice.
    """
    if config is DEFAULT:
        return None
    segments = [one for one in (config.preferred_segment, *config.preferred_segments) if one]
    if not segments and config.prefer_alloc_in_same_node:
        segments = [own]
    return segments or None
