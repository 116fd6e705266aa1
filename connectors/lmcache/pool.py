"""LMCache's way to the node: a thread dials and probes, so that no caller waits for a silent node."""

from __future__ import annotations

import logging
from collections.abc import Callable

from moonpool import _native
from moonpool.connectors.lmcache.settings import Settings
from moonpool.connectors.node_connection import Messages, NodeConnection

_PROBE = ["?"]  # a name that no chunk has: any answer shows that the node is there
_MESSAGES = Messages(
    absent="moonpool: no pool at %s (%s); this goes on without it and joins when a node appears there",
    silent="moonpool: the pool at %s does not answer (%s); until it does, this goes on without it",
)


def open_pool(
    settings: Settings,
    dial: Callable[[], _native.Client],
    *,
    log: logging.Logger,
    on_joined: Callable[[_native.Client], object] = lambda client: None,
    on_left: Callable[[], object] = lambda: None,
) -> NodeConnection[_native.Client]:
    """A connection whose first attempt has been made. The arguments are NodeConnection's. Raises what
    ``dial`` raises if the settings require the pool."""
    node: NodeConnection[_native.Client] = NodeConnection(
        dial,
        address=str(settings.socket()),
        log=log,
        probe=lambda client: client.exists(_PROBE),
        on_joined=on_joined,
        on_left=on_left,
        log_retry=log.warning,
        messages=_MESSAGES,
    )
    node.open(required=settings.require_pool)
    return node
