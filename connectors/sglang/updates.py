"""Weights that are replaced while an engine serves (reinforcement learning, a swapped checkpoint): its KV is
then another model's, under the old fingerprint. SGLang empties its own two tiers and does not notify storage
backends.

So this module watches the class that replaces weights, in the process that holds them. Before the first
change each follower leaves the pool, and for the rest of the process none joins: weights that an engine
received over a network have no name.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from moonpool.connectors.objects import Refused

MODULE = "sglang.srt.model_executor.model_runner_components.weight_updater"
CLASS = "WeightUpdater"
# The methods' names in SGLang 0.5.18 to 0.5.23 begin so; the first one there is in every version.
NEEDED = "update_weights_from_disk"
PREFIXES = ("update_weights_", "receive_weights_", "load_weights_", "begin_weight_update")
SENTENCE = (
    "the weights of this engine were replaced while it ran, and their KV has no name in the pool; start it "
    "again with them"
)


class Follower(Protocol):
    """An object that uses the KV of the weights that an engine has now."""

    def weights_replaced(self) -> None:
        """Called before they are; must not raise."""


_lock = threading.Lock()
_followers: weakref.WeakSet[Any] = weakref.WeakSet()
_replaced = False


def watch(updater: type) -> None:
    """Puts us before the methods of SGLang's class; once is enough. Raises Refused for an unknown one."""
    names = [name for name, value in vars(updater).items() if name.startswith(PREFIXES) and callable(value)]
    if NEEDED not in names:
        raise Refused(
            f"this SGLang's {updater.__name__} has no {NEEDED}, so moonpool would not see that its weights "
            f"are replaced; use SGLang 0.5.18 to 0.5.23, or a newer moonpool"
        )
    for name in names:
        method = getattr(updater, name)
        if not hasattr(method, "_moonpool"):
            setattr(updater, name, _told(method))


def watch_loaded() -> None:
    """watch(), where this process has the class already: a backend may be attached after a change. For
    SGLang's plugins: a server that asks for nothing is only remembered to have changed its weights."""
    updater = getattr(sys.modules.get(MODULE), CLASS, None)
    if isinstance(updater, type):
        try:
            watch(updater)
        except Refused:
            return  # reported by a backend that joins the pool


def follow(follower: Follower) -> None:
    """Tells ``follower`` of the first change, as long as it lives. Raises Refused when there was one."""
    with _lock:
        if _replaced:
            raise Refused(SENTENCE)
        _followers.add(follower)


def _told(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        # With a filter, experts are moved between ranks: the weights stay what they are.
        if kwargs.get("weight_name_filter") is None:
            _tell()
        return method(*args, **kwargs)

    wrapper._moonpool = True  # type: ignore[attr-defined]
    return wrapper


def _tell() -> None:
    global _replaced
    with _lock:
        _replaced = True
        followers = list(_followers)
        _followers.clear()
    for follower in followers:
        follower.weights_replaced()
