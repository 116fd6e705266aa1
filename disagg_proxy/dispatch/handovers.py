"""From a policy's choice to the plan that the data plane carries out: the form of hand-over that a pair of
engines uses, what a client may hear of the choice, and what became of hand-overs.

    two_step     prefill answers first; what it says of its blocks goes to decode
    concurrent   both are asked at once; they meet under a transfer id, which is made here for each attempt
    one_shot     both are asked at once with the same request, which names a room for them to meet in (SGLang)
    context_first
                 prefill answers first; its disaggregated_params and the prompt's ids go to decode
                 (TensorRT-LLM)
    generation_first
                 both are asked at once; decode is told where the prefill engine is met (TensorRT-LLM)

A policy chooses the engines, never the form.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from moonpool._native import ProxyRequest
from moonpool.disagg_proxy.conductor.choice import Choice
from moonpool.disagg_proxy.conductor.plan import Plan
from moonpool.disagg_proxy.data_plane.counters import BOUNDS_S, Histogram
from moonpool.disagg_proxy.data_plane.observations import HandoverForm, Observation, Outcome, Stage
from moonpool.disagg_proxy.dispatch.neighbours import without_cached_at
from moonpool.disagg_proxy.dispatch.request_hints import asks_why
from moonpool.disagg_proxy.engines.bootstrap import parameters
from moonpool.disagg_proxy.engines.bootstrap_trust import wait_of
from moonpool.disagg_proxy.engines.engine import Engine
from moonpool.disagg_proxy.engines.sglang import room_ids
from moonpool.disagg_proxy.engines.tensorrt_llm import to_context, to_generation, transfer_ids

RANK_HEADER = b"X-data-parallel-rank"
UNTAKEN_TOKENS_MIN = 256  # a shorter prompt may have no whole block
OUTCOMES: Mapping[int, str] = {
    Outcome.ANSWERED: "answered",
    Outcome.LEFT: "client_left",
    Outcome.FAILED: "failed",
    Outcome.BROKEN_OFF: "broken_off",
    Outcome.REFUSED: "refused",
}
_ENDED = int(Stage.ENDED)
_FORMS = tuple(HandoverForm)
_TWO_STEP = HandoverForm.TWO_STEP  # an enum's members are slow to look up
_TENSORRT_LLM = ("context_first", "generation_first")
_COUNT_TAKEN = (int(HandoverForm.TWO_STEP), int(HandoverForm.CONCURRENT))


class Handovers:
    """engines: by place, None where there is none. policy_name: as clients are told it. instance: begins each
    transfer id, so that no other proxy makes the same. handover: the setting. ``plan`` may be called on any
    thread; ``observed`` by one at a time."""

    def __init__(
        self,
        engines: Sequence[Engine | None],
        instance: str = "",
        *,
        handover: str = "auto",
        policy_name: str = "",
    ) -> None:
        self.engines = engines
        self.stats: dict[HandoverForm, FormStats] = {form: FormStats() for form in _FORMS if form}
        self._policy_name = policy_name
        self._instance = instance or os.urandom(8).hex()
        self._rooms = room_ids()
        self._tensorrt_llm = handover in _TENSORRT_LLM
        self._numbers = transfer_ids()

    def plan(
        self,
        request: ProxyRequest,
        choice: Choice,
        *,
        tracked: bool,
        waited_s: float = 0.0,
        neighbour: str = "",
    ) -> Plan:
        """What the data plane carries out for this choice. waited_s: that the request was in the queue.
        neighbour: the engine from whose cache a part of the prompt may come."""
        decode, prefill = choice.decode, choice.prefill
        if prefill is None:
            plan, form = Plan(decode.place, tracked=tracked), HandoverForm.NOT
        else:
            plan, form = self._plan_pair(decode.place, prefill.place, request, tracked)
        if not asks_why(request):
            return plan
        why: dict[str, Any] = {
            "policy": self._policy_name,
            "engine": decode.name,
            "prefill": prefill and prefill.name,
            "handover": form.name.lower() if form else None,
            **{
                name: round(value, 5) if isinstance(value, float) else value
                for name, value in choice.why.items()
            },
        }
        if neighbour:
            why["neighbour"] = neighbour
        switches = without_cached_at(request.switches)  # which has an address
        if switches:
            why["switches"] = {name: msgspec.Raw(value.encode()) for name, value in switches}
        if waited_s:
            why["queued_s"] = round(waited_s, 5)
        return plan._replace(headers=((b"X-Moonpool-Decision", msgspec.json.encode(why)),))

    def _plan_pair(
        self, decode: int, prefill: int, request: ProxyRequest, tracked: bool
    ) -> tuple[Plan, HandoverForm]:
        """The plan for a pair (places), and its form."""
        if self._tensorrt_llm:
            return self._plan_by_number(decode, prefill, request, tracked)
        prefill_engine, decode_engine = self.engines[prefill], self.engines[decode]
        assert prefill_engine is not None
        assert decode_engine is not None
        bootstrap_server = prefill_engine.bootstrap_server
        if bootstrap_server is not None:
            if decode_engine.self_sufficient:  # it would not come: it was another one when it was chosen
                return Plan(decode, tracked=tracked), HandoverForm.NOT
            members = bootstrap_server.members(self._rooms, request.prompt_count())
            return Plan(decode, prefill, tracked=tracked, members=members), HandoverForm.ONE_SHOT
        bootstrap = prefill_engine.bootstrap
        rank = None if bootstrap is None else bootstrap.take()
        if rank is None:
            return Plan(decode, prefill, None, None, (), tracked), _TWO_STEP
        # Names this attempt; a request id of the client's would not do, which may come twice.
        transfer = f"moonpool-{self._instance}-{request.id:x}-{request.attempt}"
        to_prefill, to_decode = parameters(rank, transfer)
        own = () if rank.number is None else ((RANK_HEADER, b"%d" % rank.number),)
        plan = Plan(decode, prefill, to_prefill, to_decode, (), tracked, prefill_headers=own)
        return plan, HandoverForm.CONCURRENT

    def _plan_by_number(
        self, decode: int, prefill: int, request: ProxyRequest, tracked: bool
    ) -> tuple[Plan, HandoverForm]:
        """TensorRT-LLM's. Generation first where the context server says how it is met."""
        if request.prompt_count() is not None:  # it hands over one prompt at a time
            return Plan(decode, tracked=tracked), HandoverForm.NOT
        prefill_engine = self.engines[prefill]
        assert prefill_engine is not None
        number, context = next(self._numbers), prefill_engine.context
        to_prefill = to_context(number, generation_first=context is not None)
        if context is None:
            return Plan(decode, prefill, to_prefill, tracked=tracked), HandoverForm.CONTEXT_FIRST
        members = ((b"disaggregated_params", to_generation(number, context)),)
        plan = Plan(decode, prefill, to_prefill, tracked=tracked, members=members)
        return plan, HandoverForm.GENERATION_FIRST

    def observed(self, seen: Observation) -> None:
        """A request has ended."""
        if not seen.handed_over or seen.stage != _ENDED:
            return
        form = _FORMS[seen.handed_over]
        self.stats[form].add(seen)
        prefill_engine = self.engines[seen.prefill]
        bootstrap = None if prefill_engine is None else prefill_engine.bootstrap
        if form not in (HandoverForm.TWO_STEP, HandoverForm.CONCURRENT):
            return
        if bootstrap is not None and (wait_s := wait_of(seen)) is not None:
            at_once = form is HandoverForm.CONCURRENT
            bootstrap.met(seen.decode, wait_s, concurrent=at_once, now_s=seen.last_byte_s)


@dataclass(slots=True)
class FormStats:
    """Of one form. untaken: long prompts of which the decode engine says that it had nothing, its own cache
    included (in two steps and concurrently: SGLang's and TensorRT-LLM's say what prefill had cached). gap:
    seconds from the end of a prefill to the first token of a stream, 0 when that came first; first_byte: from
    asking the prefill engine to that token."""

    outcomes: Counter[str] = field(default_factory=Counter)
    untaken: int = 0
    gap: Histogram = field(default_factory=lambda: ([0] * (len(BOUNDS_S) + 1), 0.0))
    first_byte: Histogram = field(default_factory=lambda: ([0] * (len(BOUNDS_S) + 1), 0.0))

    def add(self, seen: Observation) -> None:
        """Counts one ended request. Its seconds count only if the answer was streamed with status 200."""
        self.outcomes[OUTCOMES[seen.outcome]] += 1
        empty = seen.cached_tokens == 0 and seen.handed_over in _COUNT_TAKEN
        if seen.status == 200 and empty and seen.prompt_tokens >= UNTAKEN_TOKENS_MIN:
            self.untaken += 1
        if not is_timed(seen):
            return
        done_s = seen.prefill_done_s or seen.first_byte_s
        self.gap = _with(self.gap, max(0.0, seen.first_byte_s - done_s))
        self.first_byte = _with(self.first_byte, max(0.0, seen.first_byte_s - seen.sent_prefill_s))


def is_timed(seen: Observation) -> bool:
    """Whether the first byte is the first token: other answers come whole."""
    return bool(seen.stream and seen.first_byte_s and seen.status == 200)


def _with(histogram: Histogram, seconds: float) -> Histogram:
    counts, total = histogram
    counts[bisect_left(BOUNDS_S, seconds)] += 1
    return counts, total + seconds
