"""Both halves of the hand-over in the scheduler's process, behind one interface. An engine may produce KV
(kv_producer), consume it (kv_consumer), or do both; an engine whose workers cannot be reached does neither.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from moonpool.connectors.vllm.engine_config import EngineConfig
from moonpool.connectors.vllm.engine_types import (
    BlockPool,
    Blocks,
    BlockTables,
    Request,
    SchedulerOutput,
)
from moonpool.connectors.vllm.messages import Handshake, Report
from moonpool.connectors.vllm.metrics import Tally
from moonpool.connectors.vllm.pd.bootstrap import Bootstrap
from moonpool.connectors.vllm.pd.consumer_scheduler import ConsumerScheduler
from moonpool.connectors.vllm.pd.kv_transfer_params import Unusable
from moonpool.connectors.vllm.pd.neighbour_asks import HASHES_MAX, Neighbour
from moonpool.connectors.vllm.pd.neighbour_offers import NeighbourOffers
from moonpool.connectors.vllm.pd.neighbour_queries import NeighbourQueries
from moonpool.connectors.vllm.pd.producer_scheduler import Identity, ProducerScheduler
from moonpool.connectors.vllm.pd.step_plan import HandoverStep
from moonpool.connectors.vllm.repeats import Repeats, times
from moonpool.connectors.vllm.requests.chain import Digests
from moonpool.connectors.vllm.requests.media import Media
from moonpool.connectors.vllm.settings import Settings
from moonpool.core.config import paths
from moonpool.core.errors import ConfigError
from moonpool.core.service.addresses import Address, parse_address
from moonpool.core.store.keys import with_items

WAIT_SHARE = 0.5  # of computing what a neighbour may have: so long a request waits for its answer
WAIT_S_MIN = 0.03  # an answer takes a connection and a step of the neighbour: in less there is none
# What a neighbour must have more than the pool. The pool's blocks may lie in this host's memory, and stay
# there while they are read; a neighbour's may be far away, and can be taken back.
SURPLUS_TOKENS_MIN = 256
SURPLUS_SHARE = 0.25  # of what the pool has
NO_STATES = (
    "its model has layers with states, and decode would need the state before the prompt's last token, which "
    "prefill does not keep"
)


class Handover:
    """Both halves in the scheduler's process; each is None where this engine does not take that role."""

    def __init__(
        self,
        engine_config: EngineConfig,
        settings: Settings,
        *,
        digest: Digests,
        tally: Tally,
        log: logging.Logger,
        clock: Callable[[], float],
    ) -> None:
        self._engine_config = engine_config
        self._settings = settings
        self._digest = digest
        self._tally = tally
        self._log = log
        self._clock = clock
        self._blocks: BlockPool | None = None
        self._tables: BlockTables | None = None
        self._bootstrap: Bootstrap | None = None
        self._repeats = Repeats(clock)
        self._stopped = ""  # why no hand-over begins any more
        self.wake: Callable[[], None] = _nothing  # lets an idle engine begin a step
        self.queries: NeighbourQueries | None = None  # None: no other engine's cache is asked
        self._asks_neighbours = True
        self.producer: ProducerScheduler | None = None
        self.consumer: ConsumerScheduler | None = None

    # Start and end

    def start(self, handshakes: Sequence[Handshake]) -> None:
        """The workers are known. Raises ConfigError for a bootstrap_port that was asked for and is taken."""
        if self._engine_config.has_states:
            self._stopped = NO_STATES
            self._log.info("moonpool: this engine takes part in no hand-over: %s", NO_STATES)
            return
        workers = sorted(handshakes, key=lambda hand: hand.rank)
        if not all(hand.handover_address for hand in workers):
            return
        engine_config, ranks = self._engine_config, tuple(hand.handover_address for hand in workers)
        fingerprint = workers[0].fingerprint
        try:
            token = paths.read_or_create_token()  # the one that its workers prove to others
        except ConfigError as error:
            self._log.warning("moonpool: this engine takes part in no hand-over: %s", error)
            return
        if engine_config.may_save and engine_config.zeroes_blocks:
            self._log.warning(
                "moonpool: this engine hands nothing over: vLLM zeroes the blocks of its KV cache, which is "
                "of mixed precision, before its connector can end a hand-over of them"
            )
        elif engine_config.may_save:
            identity = Identity(
                engine_config.engine_id,
                fingerprint,
                ranks,
                engine_config.tp_size,
                engine_config.block_tokens,
                token,
            )
            self.producer = ProducerScheduler(
                identity,
                reaches=engine_config.reaches,
                splits=engine_config.splits,
                silence_s=self._settings.lease_s,
                tally=self._tally,
                log=self._log,
                clock=self._clock,
            )
            if self._settings.neighbours and engine_config.has_plain_blocks:
                self.producer.neighbours = NeighbourOffers(
                    self.producer,
                    identity,
                    algorithm=engine_config.hash_algorithm,
                    wake=lambda: self.wake(),
                    tally=self._tally,
                    clock=self._clock,
                )
            if self._blocks is not None:
                self.producer.bind(self._blocks)
            if self._tables is not None:
                self.producer.bind_tables(self._tables)
            self._serve_bootstrap(workers)
        if engine_config.may_load:
            self.consumer = ConsumerScheduler(
                fingerprint=fingerprint,
                sizes=engine_config.sizes,
                taker=ranks[0],
                block_tokens=engine_config.block_tokens,
                splits=engine_config.splits,
                token=token,
                tally=self._tally,
            )
            if self._settings.neighbours and engine_config.has_plain_blocks:
                self.queries = NeighbourQueries(
                    engine_id=engine_config.engine_id,
                    fingerprint=fingerprint,
                    algorithm=engine_config.hash_algorithm,
                    token=token,
                    wait_s_max=self._settings.neighbour_wait_s,
                    tally=self._tally,
                    clock=self._clock,
                )

    def bind(self, blocks: BlockPool) -> None:
        """The engine's blocks."""
        self._blocks = blocks
        if self.producer is not None:
            self.producer.bind(blocks)

    def bind_tables(self, tables: BlockTables) -> None:
        """The blocks that each request has now."""
        self._tables = tables
        if self.producer is not None:
            self.producer.bind_tables(tables)

    def close(self) -> None:
        """Stops serving the bootstrap page."""
        if self._bootstrap is not None:
            self._bootstrap.close()
            self._bootstrap = None

    # A request, in the order in which vLLM calls

    def arrived(self, request: Request, *, media: Media | None, seed: bytes | None) -> None:
        """Records whether the request is to be handed over, here or there; the engine computes what cannot
        be.

        media: the items of its prompt; None: it is not made of tokens and items.
        seed: digest of what names the KV beside the tokens; None: it has no name, or none yet.
        """
        params = request.kv_transfer_params
        gives = bool(params) and bool((params or {}).get("do_remote_decode"))
        takes = bool(params) and bool((params or {}).get("do_remote_prefill"))
        if not (gives or takes):
            return
        try:
            if media is None:
                raise Unusable("prompt embeddings and sessions that grow are not handed over")
            if media.refusal:
                raise Unusable(media.refusal)
            if seed is None:
                raise Unusable("it cannot be told, or not yet, which bytes its LoRA adapter is made of")
            if gives:
                self._producer().arrived(request, self._prompt(request, seed, media))
            if takes:
                self._consumer().arrived(request, self._prompt(request, seed, media))
        except Unusable as why:
            self._tally.add("handover_refused")
            if count := self._repeats.due(str(why)):
                self._log.warning(
                    "moonpool: request %s is not handed over: %s%s", request.request_id, why, times(count)
                )
            if takes and self.consumer is not None:
                self.consumer.refused(request, str(why))

    def neighbour_tokens(
        self,
        request: Request,
        neighbour: Neighbour,
        local_tokens: int,
        stored_tokens: int,
        compute_s: Callable[[int], float],
    ) -> int | None:
        """Tokens beyond the local ones that a neighbour's own cache gives; None: it has not answered. Asked
        again until it has, and then no more.

        stored_tokens: that the pool has beyond the local ones; it gives them, if the neighbour's
            surplus is not worth it (is_worth).
        compute_s: predicts the seconds of computing so many tokens. The request waits for a share of that.
        """
        block_tokens = self._engine_config.block_tokens
        if self.queries is None or self.consumer is None or not self._asks_neighbours:
            return 0
        if local_tokens % block_tokens:
            return 0
        request_id, first = request.request_id, local_tokens // block_tokens
        if not self.queries.is_asked(request_id):
            last = min((request.num_tokens - 1) // block_tokens, first + HASHES_MAX)
            hashes = request.block_hashes[first:last]
            named = len(request.block_hashes) == request.num_tokens // block_tokens
            more = len(hashes) * block_tokens - stored_tokens
            if not named or not is_worth(more, stored_tokens):
                return 0
            wait_s = min(self._settings.neighbour_wait_s, WAIT_SHARE * compute_s(more))
            if wait_s < WAIT_S_MIN or not self.queries.begin(request_id, neighbour, first, hashes, wait_s):
                return 0
        query = self.queries.poll(request_id)
        if query is None:
            return None
        offer = query.offer
        if offer is None:
            return 0
        offered = (query.first + len(offer.blocks[0])) * block_tokens - local_tokens
        if not is_worth(offered - stored_tokens, stored_tokens):
            self.consumer.refuse_cached(offer)
            return 0
        if not self.consumer.take_cached(request, offer, query.first):
            return 0
        return self.consumer.matched(request, local_tokens) or 0

    def taken_tokens(self, request: Request) -> int:
        """Tokens of the request that came from a neighbour's own cache."""
        return self.consumer.cached_tokens(request) if self.consumer is not None else 0

    def rejected(self, request: Request) -> None:
        """vLLM does not serve the request that these fields are of."""
        if self.consumer is not None:
            self.consumer.rejected(request)

    def matched(self, request: Request, local_tokens: int) -> int:
        """Tokens beyond the local ones that a prefill engine hands over."""
        return (self.consumer.matched(request, local_tokens) or 0) if self.consumer is not None else 0

    def admitted(self, request: Request, blocks: Blocks, external_tokens: int) -> bool:
        """Whether the room that was made is for a hand-over."""
        if self.consumer is None or not self.consumer.is_waiting(request):
            return False
        ids = tuple(map(tuple, blocks.get_block_ids()))
        return self.consumer.admitted(request, ids, external_tokens)

    def finished(self, request: Request) -> dict[str, Any]:
        """The kv_transfer_params of the answer: for decode, or a count of what was handed over."""
        answer = (self.producer.finished(request) if self.producer is not None else None) or {}
        if self.queries is not None:
            self.queries.drop(request.request_id)
        tokens = self.consumer.finished(request) if self.consumer is not None else None
        if tokens is not None:
            answer.setdefault("moonpool", {})["handed_over_tokens"] = tokens
        return answer

    def forget(self, request_id: str) -> None:
        """Something unexpected happened to the request."""
        if self.queries is not None:
            self.queries.drop(request_id)
        if self.producer is not None:
            self.producer.forget(request_id)
        if self.consumer is not None:
            self.consumer.forget(request_id)

    def stop(self, why: str) -> None:
        """Ends all hand-overs, as forget_all, and begins none from here on."""
        self.forget_all()
        self._stopped = why
        self.stop_neighbours()
        self.close()

    def stop_neighbours(self) -> None:
        """The weights may be others than the fingerprint says: no blocks of caches are given or taken."""
        if self.producer is not None and self.producer.neighbours is not None:
            self.producer.neighbours.stop()
        self._asks_neighbours = False

    def forget_all(self) -> None:
        """The KV of before counts for nothing any more, as after a change of weights: from the next step on,
        which has_work asks for, it is neither given nor taken. Requests under way are computed, here and
        there."""
        if self.producer is not None:
            self.producer.forget_all()
        if self.consumer is not None:
            self.consumer.forget_all()

    def gives(self, request: Request) -> bool:
        """Whether a decode engine takes this request's KV."""
        return self.producer is not None and self.producer.is_wanted(request)

    def takes(self, request: Request) -> bool:
        """Whether a prefill engine computed, or was to compute, this request's prompt."""
        return self.consumer is not None and self.consumer.is_ours(request)

    # A step

    @property
    def is_busy(self) -> bool:
        """Whether a step has anything to do here."""
        return (
            (self.producer is not None and not self.producer.is_idle)
            or (self.consumer is not None and self.consumer.has_work)
            or (self.queries is not None and self.queries.under_way > 0)
        )

    @property
    def has_work(self) -> bool:
        """Whether the engine must go on stepping for it."""
        return (
            (self.producer is not None and self.producer.has_work)
            or (self.consumer is not None and self.consumer.has_work)
            or (self.queries is not None and self.queries.under_way > 0)
        )

    def frees_soon(self) -> bool:
        """The engine lacks blocks: neighbours lose theirs. Whether waiting a moment frees some."""
        return self.revoke_lent() or (self.producer is not None and self.producer.leases.frees_soon)

    def revoke_lent(self) -> bool:
        """The engine lacks blocks: neighbours lose theirs with the next step. Whether there were any."""
        neighbours = None if self.producer is None else self.producer.neighbours
        return neighbours is not None and neighbours.revoke()

    def plan(self, output: SchedulerOutput) -> HandoverStep:
        """The plan of this step for the workers."""
        gives = self.producer.plan(output) if self.producer is not None else HandoverStep()
        if self.queries is not None and self.consumer is not None:
            for offer in self.queries.take_late():
                self.consumer.refuse_cached(offer)
        takes = self.consumer.plan() if self.consumer is not None else HandoverStep()
        return HandoverStep(
            gives.opens,
            gives.grown,
            gives.ends,
            takes.holds,
            takes.pulls,
            takes.drops,
            takes.refuses,
            takes.voids,
            is_idle=not output.num_scheduled_tokens,
        )

    def reported(self, request_id: str, good: int) -> None:
        """This many leading blocks of a hand-over are good."""
        if self.consumer is not None:
            self.consumer.reported(request_id, good)

    def heard(self, report: Report) -> bool:
        """What the workers received from other engines. Returns whether blocks are free because of it."""
        if self.consumer is not None and report.lost:
            self.consumer.lost(report.lost)
        if self.producer is not None and (report.heartbeats or report.handed):
            return self.producer.heartbeats(report.heartbeats, report.handed)
        return False

    def give_up(self) -> None:
        """``plan`` raised: nothing that was computed here is handed over."""
        if self.producer is not None:
            self.producer.forget_all()

    def unplan(self, request_id: str) -> None:
        """The room that was made for the request is not to be filled by a hand-over."""
        if self.consumer is not None:
            self.consumer.unplan(request_id)

    def ended(self, request_id: str) -> None:
        """A hand-over to this request has ended on all ranks."""
        if self.consumer is not None:
            self.consumer.ended(request_id)

    # The parts

    def _producer(self) -> ProducerScheduler:
        if self._stopped:
            raise Unusable(self._stopped)
        if self.producer is None:
            raise Unusable("this engine hands nothing over: see its log, kv_role and handover")
        return self.producer

    def _consumer(self) -> ConsumerScheduler:
        if self._stopped:
            raise Unusable(self._stopped)
        if self.consumer is None:
            raise Unusable("this engine takes nothing over: see its log, kv_role and handover")
        return self.consumer

    def _prompt(self, request: Request, seed: bytes, media: Media) -> bytes:
        """Digest of a whole prompt and its other inputs: equal on both sides, or nothing is handed over."""
        tokens = np.array(request.prompt_token_ids, np.uint32)
        return self._digest(tokens, len(tokens), seed, with_items(seed, media.items) if media.items else b"")

    def _serve_bootstrap(self, workers: Sequence[Handshake]) -> None:
        port = self._settings.bootstrap(os.environ, only_produces=not self._engine_config.may_load)
        if not port:
            return
        host = parse_address(self._settings.handover_listen, "handover_listen").host
        address = Address(host, port + self._engine_config.dp_rank)
        try:
            self._bootstrap = Bootstrap(
                address,
                dp_rank=self._engine_config.dp_rank,
                engine_id=self._engine_config.engine_id,
                workers={(hand.tp_rank, hand.pp_rank): hand.handover_address for hand in workers},
                answer_ask=None
                if self.producer is None or self.producer.neighbours is None
                else self.producer.neighbours.ask,
                takes_cached=self._engine_config.may_load,
            )
        except ConfigError as error:
            if self._settings.bootstrap_port is not None:
                raise
            self._log.warning("moonpool: decode engines cannot be served concurrently: %s", error)
            return
        self._log.info("moonpool: decode engines find this one at http://%s/query", self._bootstrap.address)


def is_worth(more: int, stored: int) -> bool:
    """Whether blocks are taken from a neighbour that has so many tokens more than the pool, which has
    ``stored`` of those that the engine lacks."""
    return more >= max(SURPLUS_TOKENS_MIN, SURPLUS_SHARE * stored)


def _nothing() -> None:
    """An engine that cannot be woken, such as one in its caller's process, answers with its next step."""
