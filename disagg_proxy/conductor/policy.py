"""The interface of a policy, and the registry of those that have a name."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol, cast

from moonpool._native import Turns
from moonpool.disagg_proxy.conductor.choice import Choice, Request
from moonpool.disagg_proxy.conductor.policies.conductor import Conductor
from moonpool.disagg_proxy.conductor.policies.least_load import LeastLoad
from moonpool.disagg_proxy.conductor.policies.prefix_affinity import PrefixAffinity
from moonpool.disagg_proxy.conductor.policies.round_robin import RoundRobin
from moonpool.disagg_proxy.conductor.worker import Worker
from moonpool.disagg_proxy.setting_error import bad


class Policy(Protocol):
    """Pure: it keeps no clock, opens nothing, waits for nothing; it is called for each request in turn.

    One that keeps account of what it chose has a method ``sent(request, choice, now_s)``, too: it is called
    for each choice that was carried out, and for no other.
    """

    uses_tokens: bool
    """Whether prompts are tokenised and looked up for it; if not, ``Request`` has no tokens and no prefixes.
    """

    def choose(self, request: Request, workers: Sequence[Worker], now_s: float) -> Choice:
        """workers: never empty, ordered by place. now_s: seconds of a monotonic clock.

        Changes nothing that a later choice depends on: it is called for requests that are then refused, and
        repeatedly for one that waits.
        """
        ...


_bad = partial(bad, "policy")
Hook = Callable[[Request, Choice, float], None]


# Policies of other routers, for comparison; loaded on demand.
_COMPARED = {
    "dynamo_cost": "DynamoCost",
    "lmetric": "LMetric",
    "load_balancing": "LoadBalancing",
    "min_ttft": "MinTtft",
    "sglang_cache_aware": "SGLangCacheAware",
    "vllm_kv_aware": "VllmKvAware",
}
_COMPARED_IN = "moonpool.disagg_proxy.tools.simulator.policies"


def _compared(name: str) -> Policy:
    made: Policy = getattr(importlib.import_module(_COMPARED_IN), _COMPARED[name])()
    return made


POLICIES: Mapping[str, Callable[[], Policy]] = {
    "conductor": Conductor,
    "least_load": LeastLoad,
    "prefix_affinity": PrefixAffinity,
    "round_robin": RoundRobin,
    **{name: partial(_compared, name) for name in _COMPARED},
}


def make_policy(name: str) -> Policy:
    """A fresh policy: one of POLICIES, or a class of the user's own as ``package.module:Class``.

    Raises ConfigError that lists the names, or says why the class cannot be used.
    """
    if name in POLICIES:
        return POLICIES[name]()
    if ":" not in name:
        raise _bad(
            f"there is no policy {name!r}; choose one of {', '.join(sorted(POLICIES))}, or give a class of "
            f"your own as package.module:Class"
        )
    module_name, _, class_name = name.partition(":")
    try:
        policy = getattr(importlib.import_module(module_name), class_name)()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise _bad(f"the policy {name} cannot be made: {error}") from error
    if not callable(getattr(policy, "choose", None)) or not isinstance(
        getattr(policy, "uses_tokens", None), bool
    ):
        raise _bad(f"the policy {name} needs a method choose(request, workers, now_s) and a bool uses_tokens")
    if not callable(getattr(policy, "sent", _nothing)):
        raise _bad(f"what the policy {name} has as sent is no method sent(request, choice, now_s)")
    made: Policy = policy
    return made


def hook_of(policy: Policy) -> Hook:
    """The policy's ``sent``, which is called for each choice that was carried out; a function that does
    nothing for a policy without one."""
    return cast(Hook, getattr(policy, "sent", _nothing))


def turns_of(policy: Policy) -> Turns | None:
    """The turns of RoundRobin, which looks at nothing else where all workers serve requests whole: the data
    plane then counts them itself. None for every other policy, a subclass among them."""
    return policy.turns if type(policy) is RoundRobin else None


def _nothing(request: Request, choice: Choice, now_s: float) -> None:
    pass
