"""The half in the scheduler's process: names the items of requests, asks the pool for their encoder outputs,
and plans what a step loads and computes.

    a request comes up -> its items are hashed -> one query for all of them -> vLLM schedules each item:
        the pool has it   vLLM does not compute it, and the step loads it
        else              vLLM computes it, and the worker's half saves it

Nothing is pinned meanwhile: what is gone when the step runs is computed in that step (worker.py). vLLM asks
``has_cache_item`` by its own name of an item, which may be a client's UUID, so that its answer is a hint;
what is loaded and saved goes by the item of the request.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moonpool.connectors.vllm.encoder.membership import Membership
from moonpool.connectors.vllm.encoder.messages import NOTHING, EncoderReport, EncoderStep, Load, Output
from moonpool.connectors.vllm.engine_types import MediaFeature, Request
from moonpool.connectors.vllm.item_hashes import ItemHashes
from moonpool.connectors.vllm.item_names import SIZES_ALONE, ItemNames, is_sizes_alone
from moonpool.connectors.vllm.lookups import ANSWER_TIMEOUT_S, WAIT_S
from moonpool.connectors.vllm.metrics import Tally
from moonpool.connectors.vllm.pool import Pool, Ticket
from moonpool.connectors.vllm.scheduler import HASH_TIMEOUT_S
from moonpool.connectors.vllm.weight_changes import Change
from moonpool.core.errors import Error

PAUSE_S = 5.0  # without loads, after one for which a step has waited in vain
NO_ITEM = "prompt_embeds"  # a modality of vLLM that no encoder computes


@dataclass(slots=True)
class Asked:
    """The items of one request.

    names: of each, 32 bytes; b"": it has none.
    queried: identifiers of the items in the query, in its order.
    ticket: of the query; None: it is over.
    since_s: when the query was made, in seconds of the clock.
    awaited: whether a step has waited for the answer.
    hits: identifiers of items that the pool has.
    """

    names: list[bytes]
    queried: list[str]
    ticket: Ticket | None = None
    since_s: float = 0.0
    awaited: bool = False
    hits: frozenset[str] = frozenset()


class SchedulerHalf:
    """The half in the scheduler's process; all methods run on its thread."""

    def __init__(
        self,
        membership: Membership,
        *,
        form: str,
        may_load: bool,
        can_fail_requests: bool,
        log: logging.Logger,
        hashes: ItemHashes | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """membership: of this half in the pool.
        form: what beside its tensors changes what the encoder makes of an item (media_options).
        may_load: from ec_role. An engine that only saves does not encode what the pool has either.
        can_fail_requests: whether vLLM ends requests that take_unavailable names.
        hashes: of what items are; None: its own.
        """
        self.membership = membership
        self._may_load, self._can_fail = may_load, can_fail_requests
        self._log = log
        self._clock = clock
        self._names = ItemNames(
            form=form, refusal="", log=log, clock=clock, on_conflict=self._conflict, hashes=hashes
        )
        self._asked: dict[str, Asked] = {}
        self._unhashed: dict[str, float] = {}  # requests whose items are being hashed, and since when
        self._tickets: dict[Ticket, str] = {}
        self._found: dict[str, int] = {}  # identifier -> requests of which the pool has the item
        self._external: set[str] = set()  # identifiers that vLLM was told of in this step
        self._loads: list[Load] = []
        self._kept: list[Load] = []  # of requests that were not in the step that made room for them
        self._computed: dict[str, Output] = {}
        self._unavailable: set[str] = set()
        self._wait_left_s = WAIT_S
        self._pause_until_s = 0.0  # nothing is loaded before that time of the clock
        self.tally = Tally()

    # A request, in the order in which vLLM calls

    def is_ready(self, request: Request, computed: int) -> bool:
        """Whether it is known which items of the request the pool has; False: vLLM asks again in the next
        step.

        computed: tokens of the request that need not be computed.
        """
        features = request.mm_features
        last = features[-1].mm_position
        if int(last.offset) + int(last.length) <= computed:
            return True
        asked = self._asked.get(request.request_id)
        if asked is None or len(asked.names) != len(features):  # the latter in a streaming session
            if self._lacks_content(request, computed):
                return False
            pool = self.membership.pool()
            if pool is None:
                return True
            asked = self._begin(request, pool)
            if asked is None:
                return False
        return asked.ticket is None or self._is_answered(asked)

    def has_item(self, identifier: str) -> bool:
        """Whether vLLM shall leave the item to the worker's half."""
        if not self._found.get(identifier) or self.membership.pool() is None:
            return False
        if self._clock() < self._pause_until_s:
            return False
        self._external.add(identifier)
        return True

    def allocated(self, request: Request, index: int, rows: int) -> None:
        """vLLM has room for the output of an item, which this step computes, or loads if ``has_item`` said
        so.

        rows: embeddings of the item.
        """
        request_id, feature = request.request_id, request.mm_features[index]
        identifier = feature.identifier
        asked = self._asked.get(request_id)
        name = asked.names[index] if asked is not None and index < len(asked.names) else b""
        output = Output(identifier, name, rows, feature.modality)
        if identifier in self._external:
            self._external.discard(identifier)
            if self._may_load:
                self._loads.append(Load(output, request_id, index))
            return
        self.tally.add("encoded")
        self._computed[identifier] = output

    def allocated_unknown(self, request: Request, index: int, rows: int) -> None:
        """As ``allocated``, after an unexpected exception in it: the worker's half has it computed."""
        feature = request.mm_features[index]
        output = Output(feature.identifier, b"", rows, feature.modality)
        self._loads.append(Load(output, request.request_id, index))

    def finished(self, request_id: str) -> None:
        """The request is over."""
        self._unhashed.pop(request_id, None)
        self._unavailable.discard(request_id)
        asked = self._asked.pop(request_id, None)
        if asked is not None:
            self._forget(asked)
        self._loads = [load for load in self._loads if load.request_id != request_id]
        self._kept = [load for load in self._kept if load.request_id != request_id]

    def take_unavailable(self) -> set[str]:
        """Requests with an item that can be neither computed nor loaded."""
        taken, self._unavailable = self._unavailable, set()
        return taken

    # A step

    def plan(self, output: Any) -> EncoderStep:
        """What the step that ``output`` describes loads and computes. vLLM may preempt a request in the step
        that has made room for its items. Its loads are planned with each step until it is in one, which can
        compute them, or until vLLM takes the room back."""
        self._wait_left_s = WAIT_S
        self._external.clear()
        freed = frozenset(output.free_encoder_mm_hashes) if self._kept else frozenset()
        kept = [load for load in self._kept if load.output.identifier not in freed]
        loads, computed = kept + self._loads, self._computed
        self._loads, self._kept = [], []
        if not loads and not computed:
            return NOTHING
        scheduled = output.num_scheduled_tokens
        self._kept = [load for load in loads if load.request_id not in scheduled]
        self._computed = {}
        return EncoderStep(
            tuple(loads),
            computed,
            output.scheduled_encoder_inputs,
            frozenset(load.request_id for load in self._kept),
        )

    def reported(self, report: EncoderReport) -> None:
        """What the workers tell of a step."""
        self.tally.merge(report.counts)
        if report.stalled:
            self._pause_until_s = self._clock() + PAUSE_S
        if report.left:
            self.leave()
        elif report.fingerprints:
            # Workers may have read their weights in different steps.
            told = set(report.fingerprints) | ({self.membership.fingerprint} - {b""})
            if len(told) > 1:
                self.membership.refuse("its workers disagree about the weights that they serve")
            elif not self.membership.fingerprint:
                self.membership.join(report.fingerprints[0])

    def weights_changing(self, change: Change) -> None:
        """The engine is about to replace its weights: nothing is looked up until the workers have a name for
        the new ones."""
        if self.membership.fingerprint and not change.from_files:
            self._log.warning("moonpool: encoder outputs are not shared from here on: %s", change.sentence)
        self.leave()

    def workers_left(self) -> None:
        """All workers have left the pool; this half keeps nothing for them."""

    def leave(self) -> None:
        """No output is looked up until the workers report a fingerprint."""
        self.membership.leave()
        self._asked.clear()
        self._tickets.clear()
        self._found.clear()

    def close(self) -> None:
        """Ends the thread of hashes and disconnects."""
        self._names.close()
        self.membership.close()

    def _lacks_content(self, request: Request, computed: int) -> bool:
        """Whether the request has sizes in the place of an item that it needs. It has to end, with or without
        a pool, or the encoder ends the engine: vLLM's front end accepts such requests where outputs may be
        loaded, for connectors that know these by another name than the content."""
        if not (self._can_fail and self._may_load) or not any(
            is_sizes_alone(one) and _is_needed(one, computed) for one in request.mm_features
        ):
            return False
        if request.request_id not in self._unavailable:
            self._unavailable.add(request.request_id)
            self._log.warning("moonpool: request %s ends with an error: %s", request.request_id, SIZES_ALONE)
        return True

    def _begin(self, request: Request, pool: Pool) -> Asked | None:
        """Names the items and asks the pool for them. None: they are not hashed yet."""
        request_id, now_s = request.request_id, self._clock()
        if request_id not in self._unhashed:
            self._unhashed[request_id] = now_s
            self._names.begin(request)
        if not self._names.is_ready(request) and now_s - self._unhashed[request_id] < HASH_TIMEOUT_S:
            return None
        del self._unhashed[request_id]
        features = request.mm_features
        told = self._names.names(request)
        names = [
            name if isinstance(name, bytes) and one.modality != NO_ITEM else b""
            for name, one in zip(told, features, strict=True)
        ]
        places = [place for place, name in enumerate(names) if name]
        before = self._asked.pop(request_id, None)
        if before is not None:
            self._forget(before)
        queried = [features[place].identifier for place in places]
        asked = self._asked[request_id] = Asked(names, queried, since_s=now_s)
        if places:
            try:
                asked.ticket = pool.submit_presence([names[place] for place in places])
            except Error:
                self.tally.add("lookups_unknown", len(places))
            else:
                self._tickets[asked.ticket] = request_id
        return asked

    def _is_answered(self, asked: Asked) -> bool:
        """Whether the query is over: answered, or without an answer for too long. Waits for an answer that
        may come soon, once for a query."""
        self._poll()
        pool = self.membership.pool()
        if asked.ticket is not None and pool is not None and not asked.awaited:
            asked.awaited = True
            while asked.ticket is not None and self._wait_left_s > 0:
                began_s = self._clock()
                came = pool.wait_for_read(self._wait_left_s)
                self._wait_left_s -= self._clock() - began_s
                if not came:
                    break
                self._poll()
        if asked.ticket is None:
            return True
        if pool is not None and self._clock() - asked.since_s < ANSWER_TIMEOUT_S:
            return False
        self.tally.add("lookups_unknown", len(asked.queried))
        self._forget(asked)
        return True

    def _poll(self) -> None:
        pool = self.membership.pool()
        if pool is None:
            return
        for ticket, answer in pool.poll():
            asked = self._asked.get(self._tickets.pop(ticket, ""))
            if asked is None or asked.ticket != ticket:
                continue
            asked.ticket = None
            if not isinstance(answer, bytes):
                self.tally.add("lookups_unknown", len(asked.queried))
                continue
            self.tally.add("lookups", len(asked.queried))
            self.tally.observe("lookup_seconds", self._clock() - asked.since_s)
            asked.hits = frozenset(one for one, flag in zip(asked.queried, answer, strict=True) if flag == 1)
            self.tally.add("hits", len(asked.hits))
            for identifier in asked.hits:
                self._found[identifier] = self._found.get(identifier, 0) + 1

    def _forget(self, asked: Asked) -> None:
        """No answer counts for these items any more."""
        if asked.ticket is not None:
            self._tickets.pop(asked.ticket, None)
            asked.ticket = None
        for identifier in asked.hits:
            left = self._found.get(identifier, 0) - 1
            if left > 0:
                self._found[identifier] = left
            else:
                self._found.pop(identifier, None)
        asked.hits = frozenset()

    def _conflict(self, identifier: str) -> None:
        """An identifier stands for two contents: it is not found any more."""
        self._found.pop(identifier, None)


def _is_needed(feature: MediaFeature, computed: int) -> bool:
    return int(feature.mm_position.offset) + int(feature.mm_position.length) > computed
