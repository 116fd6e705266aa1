"""What a policy is asked and what it answers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from moonpool.disagg_proxy.conductor.transfer_backlog import TransferBacklog
from moonpool.disagg_proxy.conductor.worker import Worker

PRIORITY_MOST = 4  # a higher or lower priority weighs the same as this one
ANSWER_TOKENS = 256  # assumed length of an answer whose request sets no limit


class Request(NamedTuple):
    """tokens: of the prompt, 0 when not known; own: by a worker's place, how many leading tokens lie in
    its own cache; pool: how many leading tokens the pool holds; presumed: the last of them, which no event
    reports (hidden_pool.py); holder: the sender of them, None when not known; answer_tokens: the most it may
    answer.

    tenant: whose request it is, "" for none in particular; priority: higher is more urgent; session: a
    conversation whose requests share their beginning, "" when not known. gap_s: wanted between two tokens of
    an answer, by this request and, as far as is known, by those that decode. one: it is for one answer to one
    prompt. draws: where other proxies choose at the same time, one of the cheapest workers is drawn; False:
    the cheapest is taken.
    """

    tokens: int = 0
    own: Sequence[int] = ()
    pool: int = 0
    answer_tokens: int = ANSWER_TOKENS
    tenant: str = ""
    priority: int = 0
    session: str = ""
    holder: TransferBacklog | None = None
    gap_s: float = math.inf
    one: bool = True
    draws: bool = True
    presumed: int = 0

    @property
    def urgency(self) -> float:
        """The factor by which a second of this request's time counts more than one of a request with priority
        0."""
        return 2.0 ** max(min(self.priority, PRIORITY_MOST), -PRIORITY_MOST)

    def own_at(self, worker: Worker) -> int:
        """How many leading tokens the worker's own cache holds; 0 for a place that ``own`` does not reach."""
        return self.own[worker.place] if worker.place < len(self.own) else 0

    def from_pool(self, worker: Worker) -> int:
        """Tokens behind the worker's own prefix that the pool would supply."""
        behind = self.pool - self.own_at(worker)
        return behind if behind > 0 else 0


class Choice(NamedTuple):
    """A tuple, because one is made for every request, and a tuple costs least.

    prefill: computes the prompt and hands it to decode; None: decode does both.

    prefill_s: predicted seconds of the prompt's fetch and computation, without the queue. why: the figures of
    the decision, for people. fetch: whether the worker is to fetch what the pool holds, if it ``obeys``;
    lost_s: predicted seconds that fetching takes longer than computing.
    """

    decode: Worker
    prefill: Worker | None = None
    prefill_s: float = 0.0
    why: Mapping[str, float | int | str] = MappingProxyType({})
    fetch: bool = True
    lost_s: float = 0.0

    @property
    def computes(self) -> Worker:
        """The worker that computes the prompt: the prefill worker, or the one that does both."""
        return self.prefill or self.decode
