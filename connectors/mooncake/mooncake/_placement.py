"""Where an object should rather lie, by its configuration."""

from __future__ import annotations

from ._values import DEFAULT, ReplicateConfig


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
