"""The scheduler's view of one engine: its role, its load, and the cost models learnt from it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any

from moonpool._native import DecodeModel, HandoverModel, PrefillModel, WorkerLoad, WorkerView
from moonpool.disagg_proxy.conductor.arrival_rate import ArrivalRate, RemoteArrivals
from moonpool.disagg_proxy.conductor.calibration import Ratios
from moonpool.disagg_proxy.conductor.transfer_backlog import TransferBacklog

LEARNT = 16  # samples, from which on the model is better than the prior
# Old names of attributes that a user's own policy may read.
_OLD_NAMES = {
    "alone": "self_sufficient",
    "books": "load",
    "coming": "pending_handover",
    "coming_tokens": "pending_handover_tokens",
    "flow": "arrival_rate",
    "sender": "transfer_backlog",
}
_MODELS = ("prefill_model", "handover_model", "decode_model")


class Role(Enum):
    """What an engine may compute; the values are those of the setting ``role``."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


_PREFILL = Role.PREFILL  # an enum's members are slow to look up


class Worker(WorkerView):
    """What policies weigh is in C++ (``WorkerView``), where a thousand workers can be weighed at once.

    place:              stable number among all engines.
    name, known_as:     for people here, and for other proxies.
    site:               host and port as other proxies see them; "": not known.
    role:               what it may compute.
    self_sufficient:    it answers without another's prefill, or, a prefill worker, by itself.
    load:               its queue and running requests, as far as this proxy and its peers know.
    in_flight:          requests there, by the relay's count where it has one.
    room_tokens:        tokens that its KV cache holds; 0: not known.
    pending_handover, pending_handover_tokens: requests, and tokens of their prompts, that others prefill.
    obeys:              it computes what it is told not to fetch; others fetch whatever the pool holds.
    prefill_model, handover_model, decode_model: predict the seconds of its work.
    ttft_ratios:        how well its TTFT is predicted.
    arrival_rate:       of requests that are sent to it.
    remote_arrivals:    of requests that other proxies send to it.
    transfer_backlog:   fetches that other workers make from it.
    turn:               when a policy last chose it, by the policy's own count.
    """

    __slots__ = (
        "arrival_rate",
        "decode_model",
        "handover_model",
        "known_as",
        "load",
        "name",
        "place",
        "prefill_model",
        "relay_requests",
        "remote_arrivals",
        "role",
        "self_sufficient",
        "site",
        "transfer_backlog",
        "ttft_ratios",
    )

    def __init__(
        self,
        place: int,
        name: str,
        role: Role = Role.BOTH,
        *,
        room_tokens: int = 0,
        relay_requests: Callable[[], int] | None = None,
        known_as: str = "",
        site: str = "",
    ) -> None:
        """relay_requests: returns how many requests are there, where the relay counts them; None: ``load``
        counts."""
        load, prefill_model, decode_model = WorkerLoad(), PrefillModel(), DecodeModel()
        super().__init__(place, room_tokens, load, prefill_model, decode_model)
        self.place = place
        self.name = name
        self.known_as = known_as or name
        self.site = site
        self.role = role
        self.self_sufficient = True
        self.relay_requests = relay_requests
        self.load = load
        self.ttft_ratios = Ratios()
        self.arrival_rate = ArrivalRate()
        self.remote_arrivals = RemoteArrivals()
        self.transfer_backlog = TransferBacklog()
        self.prefill_model = prefill_model
        self.handover_model = HandoverModel()
        self.decode_model = decode_model

    def __getattr__(self, name: str) -> Any:
        """An attribute under its name in the release before, for a user's own policy."""
        now = _OLD_NAMES.get(name)
        if now is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        _warn_old(name, now)
        return getattr(self, now)

    @property
    def same_kind_computes(self) -> bool:
        """Deprecated: whether its kind has computed prompts."""
        _warn_old("same_kind_computes", "prefill_model.regression.kind.samples")
        return bool(self.prefill_model.regression.kind.samples)

    def learn_from(self, same_kind: Iterable[Worker]) -> None:
        """Deprecated: workers of one kind learn together."""
        _warn_old("learn_from", "join_kind")
        self.join_kind(same_kind)

    def seed_models(self, same_kind: Sequence[Worker]) -> None:
        """Deprecated: workers of one kind learn together."""
        _warn_old("seed_models", "join_kind")
        for other in same_kind:
            other.join_kind([self])

    @property
    def in_flight(self) -> int:
        """Requests that were sent there and are not over; the relay's count also has those that no policy
        tracked."""
        return self.load.requests if self.relay_requests is None else self.relay_requests()

    def join_kind(self, same_kind: Iterable[Worker]) -> None:
        """same_kind: the other workers of its kind. Each of its models learns together with theirs from now
        on. What it has learnt itself is kept. Empty: it is of a kind of its own, which begins with what is
        known of this one, as little certain as a prior."""
        other = next(iter(same_kind), None)
        for name in _MODELS:
            mine = getattr(self, name).regression
            if other is None:
                mine.leave_kind()
            else:
                mine.join_kind(getattr(other, name).regression)

    def guess_from(self, prefill_worker: Worker) -> None:
        """prefill_worker: computes prompts for this one. Until workers of this one's kind have computed
        prompts themselves, they are assumed to be as fast as that one."""
        theirs, mine = prefill_worker.prefill_model.regression, self.prefill_model.regression
        if theirs.kind.samples >= LEARNT and not mine.kind.samples and not mine.own.samples:
            mine.start(theirs.coefficients)

    def check_integrity(self) -> None:
        """Raises AssertionError when an invariant of the load or of a model is broken."""
        self.load.check_integrity()
        for name in _MODELS:
            getattr(self, name).regression.check_integrity()


def _warn_old(name: str, now: str) -> None:
    warnings.warn(
        f"{name} is named {now} now; the old name goes with the next release",
        DeprecationWarning,
        stacklevel=3,
    )


def answering(workers: Sequence[Worker]) -> list[Worker]:
    """Those that decode; all of them where none does, since a prefill worker can decode, too."""
    return [each for each in workers if each.role is not _PREFILL] or list(workers)
