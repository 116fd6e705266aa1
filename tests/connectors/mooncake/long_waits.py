"""Patience for a machine that stands still for some seconds: none of these tests has a node or a master that
hangs, so no answer may depend on how soon another one comes. Processes of tests call wait_long(), too."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from mooncake import _access
from mooncake._segment_names import members_by_segment

from moonpool import _native

TIMEOUT_S = 20.0  # of a node; the store's own client gives a master a quarter of that
SUSPECT_S = 10.0  # a master suspects a node that is silent for so long, and one whose process ended at once


def wait_long(change: Callable[[object, str, object], None] = setattr) -> None:
    """For the rest of this process, or for as long as ``change`` has it."""
    for name in ("TIMEOUT_S", "JOIN_TIMEOUT_S"):
        change(_access, name, TIMEOUT_S)
    change(_native, "DirectoryClient", functools.partial(_native.DirectoryClient, timeout_s=TIMEOUT_S / 4))


def wait_known(store: Any) -> None:
    """Until the master tells others of the store's segment: it has taken the node in before it hears which
    tenants that has, and a member without tenants has no segment."""
    from tests.core.store_bed import until  # not where an engine's interpreter runs checks of ours

    until(lambda: store.get_hostname() in members_by_segment(store._access.members()), 60)
