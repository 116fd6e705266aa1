"""Decode's half of the hand-over in the scheduler's process: which requests another engine computes, whether
its offer fits this engine, and into which blocks the KV goes. Runs on the scheduler's thread.

    WAITING ----room was made----> PULLING ----the load ended, well or badly----> OVER
       |                                                                            |
       +----nothing is needed, the prefill engine is lost, the request ended--------+

A request whose hand-over is OVER goes on like any other: with the blocks here, the pool and the model.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from moonpool.connectors.objects import Refused
from moonpool.connectors.vllm.engine_types import Request
from moonpool.connectors.vllm.group_blocks import by_part
from moonpool.connectors.vllm.metrics import Tally
from moonpool.connectors.vllm.pd import kv_transfer_params
from moonpool.connectors.vllm.pd.kv_transfer_params import Offer, Source, blocks_for
from moonpool.connectors.vllm.pd.rank_pairs import Sizes, prefill_sizes
from moonpool.connectors.vllm.pd.step_plan import HandoverStep, Hold, Pull, Refuse


class Phase(enum.Enum):
    """Where a request's hand-over stands; the module's docstring has the transitions."""

    WAITING = "waiting"
    PULLING = "pulling"
    OVER = "over"


@dataclass(slots=True)
class AwaitedRequest:
    """A request whose KV comes from a prefill engine.

    source: where the KV is.
    phase: where the hand-over stands.
    first, blocks: the blocks that are being pulled.
    good: leading blocks of those that are here (the minimum over all ranks).
    asked: tokens that vLLM waits for.
    tokens: tokens that were handed over in the end.
    gone: whether the request was aborted during the pull.
    is_cached: whether the blocks are of a neighbour's own cache: those from ``offset`` to before ``last``.
    """

    source: Source
    phase: Phase = Phase.WAITING
    first: int = 0
    blocks: int = 0
    good: int = 0
    asked: int = 0
    tokens: int = 0
    gone: bool = False
    is_cached: bool = False
    offset: int = 0
    last: int = 0


class ConsumerScheduler:
    """Decode's half; all methods run on the scheduler's thread."""

    def __init__(
        self,
        *,
        fingerprint: bytes,
        sizes: Sizes,
        taker: str,
        block_tokens: int,
        token: bytes,
        tally: Tally,
        splits: Sequence[int] = (),
    ) -> None:
        """fingerprint: of this engine's KV, 32 bytes.
        sizes: how many workers this engine has.
        taker: what tells its workers from those of other decode engines: the address of one of them.
        block_tokens: tokens per block.
        token: the cluster token, with which offers are signed.
        tally: counts.
        splits: of each KV cache group the parts of a block (group_blocks.py); (): one.
        """
        self._fingerprint = fingerprint
        self._token = token
        self._sizes = sizes
        self._taker = taker
        self._block_tokens = block_tokens
        self._splits = splits
        self._tally = tally
        self._requests: dict[str, AwaitedRequest] = {}
        self._holds: list[Hold] = []
        self._pulls: list[Pull] = []
        self._drops: list[str] = []
        self._refuses: list[Refuse] = []
        self._voids: list[str] = []

    @property
    def has_work(self) -> bool:
        """Whether the workers have yet to be told something."""
        return bool(self._holds or self._pulls or self._drops or self._refuses)

    def is_ours(self, request: Request) -> bool:
        """Whether the request's KV was, or is, to come from another engine."""
        awaited = self._requests.get(request.request_id)
        return awaited is not None and not awaited.is_cached

    def is_waiting(self, request: Request) -> bool:
        """Whether room for its hand-over is still to be made."""
        awaited = self._requests.get(request.request_id)
        return awaited is not None and awaited.phase is Phase.WAITING

    def arrived(self, request: Request, prompt: bytes) -> None:
        """A request came. Raises Unusable when its KV cannot come from the source in its parameters."""
        source = kv_transfer_params.parse_decode(request.kv_transfer_params, self._token)
        if source is None:
            return
        if request.request_id in self._requests:
            raise kv_transfer_params.Unusable("a request of the same name is still being handed over")
        blocks = blocks_for(request.num_prompt_tokens, self._block_tokens)
        if isinstance(source, Offer):
            self._check(source, request, prompt, blocks)
        self._requests[request.request_id] = AwaitedRequest(source)
        self._holds.append(Hold(request.request_id, source, prompt, blocks, self._taker))

    def take_cached(self, request: Request, offer: Offer, first: int) -> bool:
        """A neighbour offers blocks of its own cache, from block ``first`` of the prompt on. Whether they are
        taken; if not, the neighbour is told."""
        if request.request_id not in self._requests and self._goes_together(offer):
            blocks = len(offer.blocks[0])
            self._requests[request.request_id] = AwaitedRequest(
                offer, is_cached=True, offset=first, last=first + blocks
            )
            self._holds.append(Hold(request.request_id, offer, offer.prompt, blocks, self._taker))
            return True
        self.refuse_cached(offer)
        return False

    def refuse_cached(self, offer: Offer) -> None:
        """What a neighbour offers is not taken."""
        self._refuses.append(Refuse(offer, "", self._taker))

    def rejected(self, request: Request) -> None:
        """vLLM does not serve the request that these fields are of: the prefill engine need not keep it, and
        an offer that it made itself needs no explanation."""
        by_transfer = "transfer_id" in (request.kv_transfer_params or {})
        self.refused(request, kv_transfer_params.LEFT if by_transfer else "")

    def refused(self, request: Request, why: str) -> None:
        """The source of the request's KV cannot be used; the prefill engine is told not to keep it.

        why: for the log of the prefill engine. Must not be "" for a transfer, which that engine may not know
            yet.
        """
        with suppress(kv_transfer_params.Unusable):
            source = kv_transfer_params.parse_decode(request.kv_transfer_params, self._token)
            if source is not None:
                self._refuses.append(Refuse(source, why, self._taker))

    def matched(self, request: Request, local_tokens: int) -> int | None:
        """Tokens beyond the local ones that another engine hands over; None when it hands over nothing (any
        more)."""
        awaited = self._requests.get(request.request_id)
        if awaited is None or awaited.phase is not Phase.WAITING:
            return None
        # Where groups' blocks differ in tokens, local ones may end within a block: a pull would overwrite it.
        within = local_tokens % self._block_tokens
        if awaited.is_cached:
            size = self._block_tokens
            if request.num_preemptions or within or not awaited.offset <= local_tokens // size < awaited.last:
                self._drop(request.request_id, awaited)
                return None
            return awaited.last * size - local_tokens
        if request.num_preemptions or within or local_tokens >= request.num_prompt_tokens - 1:
            self._drop(request.request_id, awaited)
            return None
        return request.num_prompt_tokens - 1 - local_tokens

    def admitted(
        self, request: Request, block_ids: kv_transfer_params.BlockIds, external_tokens: int
    ) -> bool:
        """Room was made. Whether it is for a hand-over; if so its pull is planned."""
        awaited = self._requests.get(request.request_id)
        if awaited is None or awaited.phase is not Phase.WAITING:
            return False
        if external_tokens <= 0:  # vLLM must compute all of it: prompt_logprobs, for example
            self._drop(request.request_id, awaited)
            return False
        if awaited.is_cached:
            last = awaited.last
            first = last - external_tokens // self._block_tokens
        else:
            last = blocks_for(request.num_prompt_tokens, self._block_tokens)
            first = (request.num_prompt_tokens - 1 - external_tokens) // self._block_tokens
        pull = Pull(
            request.request_id,
            first - awaited.offset,
            by_part(block_ids, self._splits, first, last, pad=True),
            awaited.is_cached,
        )
        awaited.phase, awaited.first, awaited.blocks, awaited.good = (
            Phase.PULLING,
            first,
            last - first,
            last - first,
        )
        awaited.asked = external_tokens
        self._pulls.append(pull)
        return True

    def plan(self) -> HandoverStep:
        """What the workers are to do in this step."""
        step = HandoverStep(
            holds=tuple(self._holds),
            pulls=tuple(self._pulls),
            drops=tuple(self._drops),
            refuses=tuple(self._refuses),
            voids=tuple(self._voids),
        )
        self._holds, self._pulls, self._drops, self._refuses, self._voids = [], [], [], [], []
        return step

    def lost(self, request_ids: set[str]) -> None:
        """The workers know already that nothing will come for these requests."""
        for request_id in request_ids:
            awaited = self._requests.get(request_id)
            if awaited is not None and awaited.phase is Phase.WAITING:
                self._drop(request_id, awaited)  # of several ranks, another one may not know yet
                self._tally.add("neighbour_errors" if awaited.is_cached else "handover_errors")

    def reported(self, request_id: str, good: int) -> None:
        """A rank, or several, pulled this many leading blocks."""
        awaited = self._requests.get(request_id)
        if awaited is not None and awaited.phase is Phase.PULLING:
            awaited.good = min(awaited.good, good)

    def ended(self, request_id: str) -> bool:
        """The pull has ended on all ranks. Whether there was one."""
        awaited = self._requests.get(request_id)
        if awaited is None or awaited.phase is not Phase.PULLING:
            return False
        awaited.phase = Phase.OVER
        awaited.tokens = (
            awaited.asked if awaited.good == awaited.blocks else awaited.good * self._block_tokens
        )
        if awaited.gone:
            del self._requests[request_id]
        else:
            self._drops.append(request_id)  # gives the workers a step in which to tell prefill
            if awaited.good < awaited.blocks:
                self._tally.add("neighbour_errors" if awaited.is_cached else "handover_errors")
        if awaited.is_cached:
            self._tally.add("neighbour_tokens", awaited.tokens)
        else:
            self._tally.add("handovers")
            self._tally.add("handed_over_tokens", awaited.tokens)
        return True

    def cached_tokens(self, request: Request) -> int:
        """Tokens of the request that came from a neighbour's own cache."""
        awaited = self._requests.get(request.request_id)
        return awaited.tokens if awaited is not None and awaited.is_cached else 0

    def finished(self, request: Request) -> int | None:
        """The request ended. Returns the tokens that were handed over to it; None: it had no hand-over."""
        awaited = self._requests.get(request.request_id)
        if awaited is None:
            return None
        tokens = self._finished(request, awaited)
        return None if awaited.is_cached else tokens

    def _finished(self, request: Request, awaited: AwaitedRequest) -> int:
        if awaited.phase is Phase.PULLING:  # aborted: vLLM waits for the end of the pull
            awaited.gone = True
            self._drops.append(request.request_id)
            return 0
        self._drop(request.request_id, awaited)
        del self._requests[request.request_id]
        return awaited.tokens

    def forget(self, request_id: str) -> None:
        """Something unexpected happened to the request: it is computed."""
        awaited = self._requests.get(request_id)
        if awaited is not None:
            self._drop(request_id, awaited)

    def unplan(self, request_id: str) -> None:
        """Its pull, which no worker knows yet, must not be started."""
        self._pulls = [pull for pull in self._pulls if pull.request_id != request_id]

    def forget_all(self) -> None:
        """Discards what other engines computed so far. A pull under way ends soon, and its request computes
        all of it."""
        for request_id, awaited in self._requests.items():
            if awaited.phase is Phase.PULLING and not awaited.gone:
                self._drops.append(request_id)
                self._voids.append(request_id)
            self._drop(request_id, awaited)

    # The parts

    def _goes_together(self, offer: Offer) -> bool:
        workers, engine = len(offer.ranks), offer.engine_id
        try:
            prefill_sizes(self._sizes, workers=workers, tp_size=offer.tp_size, engine=engine)
        except Refused:
            return False
        return offer.fingerprint == self._fingerprint

    def _check(self, offer: Offer, request: Request, prompt: bytes, blocks: int) -> None:
        if offer.fingerprint != self._fingerprint:
            raise kv_transfer_params.Unusable(
                f"the prefill engine {offer.engine_id} serves another model, other weights, or KV of "
                f"another form: its fingerprint is {offer.fingerprint.hex()[:16]}, ours "
                f"{self._fingerprint.hex()[:16]}"
            )
        try:
            workers, engine = len(offer.ranks), offer.engine_id
            prefill_sizes(self._sizes, workers=workers, tp_size=offer.tp_size, engine=engine)
        except Refused as refusal:
            raise kv_transfer_params.Unusable(str(refusal)) from refusal
        if offer.tokens != request.num_prompt_tokens or offer.prompt != prompt:
            raise kv_transfer_params.Unusable(
                f"the prefill engine {offer.engine_id} computed another prompt: {offer.tokens} tokens, and "
                f"this one has {request.num_prompt_tokens}"
            )
        if any(len(ids) < blocks for ids in offer.blocks):
            raise kv_transfer_params.Unusable(f"the prefill engine {offer.engine_id} offers too few blocks")

    def _drop(self, request_id: str, awaited: AwaitedRequest) -> None:
        """The request needs nothing (more) of its hand-over; tells the workers once."""
        if awaited.phase is Phase.WAITING:
            awaited.phase = Phase.OVER
            self._drops.append(request_id)
