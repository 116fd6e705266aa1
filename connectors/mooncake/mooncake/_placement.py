"""Preferred nodes and retention of an object, from its configuration."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Any

from moonpool.core.errors import InvalidArgument

from ._base import key_of
from ._values import DEFAULT, ReplicateConfig, SoftPinAction

if TYPE_CHECKING:
    from ._access import Access

SOFT_PIN_S = 1800.0  # without soft_pin_ttl_ms


def wishes(config: ReplicateConfig, keys: int, access: Access) -> dict[str, Any]:
    """What Store.put() is asked for so many keys, beside bytes and copies. Raises InvalidArgument."""
    if config is DEFAULT:
        return {}
    asked: dict[str, Any] = {}
    if nodes := preferred_nodes(config, access):
        asked["node"] = nodes
    if groups := groups_of(config, keys):
        asked["groups"] = [_group(group) for group in groups]
    soft = config.with_soft_pin or config.soft_pin_action is SoftPinAction.ENABLE
    if soft and config.soft_pin_action is not SoftPinAction.DISABLE and config.soft_pin_ttl_ms != 0:
        asked["soft_pin_s"] = SOFT_PIN_S if config.soft_pin_ttl_ms is None else config.soft_pin_ttl_ms / 1000
    return asked


def groups_of(config: ReplicateConfig, keys: int) -> list[str]:
    """One for each key, or none at all. Raises InvalidArgument for another number of them."""
    groups = config.group_ids or []
    if groups and len(groups) not in (1, keys):
        raise InvalidArgument(f"{len(groups)} group_ids came with {keys} keys")
    return list(groups) * keys if len(groups) == 1 else list(groups)


def _group(name: str) -> bytes | None:
    """Ids that are longer than a pool's are shortened as keys are."""
    return key_of(name) if name else None


def for_each(config: ReplicateConfig, keys: int) -> list[ReplicateConfig]:
    """The same for each key of a call alone. Raises InvalidArgument."""
    groups_of(config, keys)
    return [for_one(config, i) for i in range(keys)]


def for_one(config: ReplicateConfig, i: int) -> ReplicateConfig:
    """The same for key ``i`` of a call alone."""
    if not config.group_ids or i >= len(config.group_ids):
        return config
    one = copy(config)
    one.group_ids = [config.group_ids[i]]
    return one


def preferred_nodes(config: ReplicateConfig, access: Access) -> list[str] | None:
    """Addresses of the nodes whose segments are named; None: moonpool chooses. A batch that should stay
    together goes to this process's own segment."""
    if config is DEFAULT:
        return None
    segments = [one for one in (config.preferred_segment, *config.preferred_segments) if one]
    if not segments and config.prefer_alloc_in_same_node:
        segments = [access.segment]
    return list(map(access.names.address_of, segments)) or None
