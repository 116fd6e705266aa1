"""The half in the scheduler's process: asks the pool, owns the pins, decides what is loaded and saved when.

Runs on the scheduler's thread only, and waits for the pool at most 1 ms a step (lookups): native threads
answer queries, and each step polls for the answers. A step without work costs a few tests of empty
dictionaries.

vLLM keeps blocks that are being loaded until the worker reports the request. This half keeps the pin until
then, even when the request is gone. saves.py keeps blocks that are being saved.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from moonpool.connectors.node_connection import NodeConnection
from moonpool.connectors.vllm import compat
from moonpool.connectors.vllm.adapters import Adapters
from moonpool.connectors.vllm.engine_config import EngineConfig
from moonpool.connectors.vllm.engine_types import (
    BlockPool,
    Blocks,
    BlockTables,
    ConnectorOutput,
    Request,
    SchedulerOutput,
)
from moonpool.connectors.vllm.free_block_wait import FreeBlockWait
from moonpool.connectors.vllm.group_blocks import by_part, objects_of
from moonpool.connectors.vllm.item_hashes import ItemHashes
from moonpool.connectors.vllm.item_names import ItemNames
from moonpool.connectors.vllm.load_decision import ALWAYS, BOTH, Choice, LoadDecision, Shares
from moonpool.connectors.vllm.lookups import WAIT_S, Lookups
from moonpool.connectors.vllm.meetings import Meetings
from moonpool.connectors.vllm.messages import NOTHING, Handshake, Load, Report, Step
from moonpool.connectors.vllm.metrics import Tally
from moonpool.connectors.vllm.pd.handover import Handover
from moonpool.connectors.vllm.pd.neighbour_asks import read_neighbour
from moonpool.connectors.vllm.pool import Pool
from moonpool.connectors.vllm.repeats import Repeats, times
from moonpool.connectors.vllm.requests import Chain, Needs, Phase, RequestState
from moonpool.connectors.vllm.requests.chain import Digests
from moonpool.connectors.vllm.requests.switches import Switches, read_switches
from moonpool.connectors.vllm.saves import Saves
from moonpool.connectors.vllm.settings import Settings
from moonpool.connectors.vllm.step_times import StepTimes
from moonpool.connectors.vllm.tiers import from_network, object_sizes
from moonpool.connectors.vllm.weight_changes import Change
from moonpool.core.errors import ConfigError, Error
from moonpool.core.store.keys import chain_seed

LOOKUPS_AHEAD_MAX = 64
HASH_TIMEOUT_S = 1.0  # that a request waits for the hashes of its items
NO_HAND_OVER = (
    "the weights of this engine were replaced while it ran, and it takes part in no hand-over until it is "
    "started again"
)
DESCRIPTOR_BYTES = 32

OpenNode = Callable[[bytes], NodeConnection[Pool]]


class SchedulerHalf:
    """The half in the scheduler's process; all methods run on its thread."""

    def __init__(
        self,
        engine_config: EngineConfig,
        settings: Settings,
        *,
        open_node: OpenNode,
        digest: Digests,
        log: logging.Logger,
        adapters: Adapters | None = None,
        hashes: ItemHashes | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """engine_config: of this engine.
        settings: the connector's options.
        open_node: connects to the node under a fingerprint; called once, when the workers have told theirs.
        digest: hashes blocks of tokens, see ``Digests``.
        log: for messages.
        adapters: names this engine's LoRA adapters; None: requests with an adapter do not use the pool.
        hashes: of what items are; None: its own.
        clock: seconds, monotonic.
        """
        self._engine_config = engine_config
        self._settings = settings
        self._open_node = open_node
        self._digest = digest
        self._log = log
        self._node: NodeConnection[Pool] | None = None
        self._late: list[Handshake] = []  # handshakes of pending workers, used when the last one is known
        self._greets = False  # whether the next step asks for the workers' handshakes
        self._blocks: BlockPool | None = None
        self._left = False  # whether this half was in the pool before a change of weights
        self._cache_is_old = False  # the engine's own prefix cache may hold KV of weights that are gone
        self._suffixes = b""
        self._roots: Sequence[int] = ()  # columns of windows and states: objects without a parent
        self._parts: Sequence[tuple[int, int]] = ()  # of each object of a block, see Chain
        self._epoch = b""
        self._requests: dict[str, RequestState] = {}
        self._adapters = adapters
        self._adapted: dict[str, int] = {}  # request -> number of its adapter
        self._item_names = ItemNames(
            form=engine_config.media_form,
            refusal=engine_config.media_refusal,
            log=log,
            clock=clock,
            on_conflict=self._item_changed,
            hashes=hashes,
        )
        self._identifiers: dict[str, frozenset[str]] = {}  # request -> vLLM's names of its items
        # Requests whose items are being hashed, and when each came. vLLM computes none of them yet.
        self._unnamed: dict[str, tuple[Request, float]] = {}
        self._sessions: dict[str, tuple[Request, int]] = {}  # that grow, and their items so far
        self._unplaced = ""  # the request that vLLM asked about last in this step, until it has room for it
        self._loads: list[Load] = []
        self._loading: dict[str, RequestState] = {}
        self._clock = clock
        self._free_block_wait = FreeBlockWait(clock)
        self._repeats = Repeats(clock)
        self._step_times = StepTimes(clock)
        self._decision: LoadDecision | None = None
        if settings.compute_if_faster:
            self._decision = LoadDecision(engine_config.block_tokens, clock)
        # A step was planned; its end is to be timed. Called each step, so without a method around it.
        self.step_begins = self._step_times.begins if settings.compute_if_faster else _nothing
        self.tally = Tally()
        self.lookups = Lookups(
            self.pool, block_tokens=engine_config.block_tokens, tally=self.tally, log=log, clock=clock
        )
        self.saves = Saves(
            engine_config, save_decode=settings.save_decode, tally=self.tally, log=log, clock=clock
        )
        self.meetings = Meetings(
            block_tokens=engine_config.block_tokens,
            workers=engine_config.workers,
            tally=self.tally,
            release=self.lookups.release,
            save_again=self._save_again,
            clock=clock,
        )
        self.handover = Handover(
            engine_config, settings, digest=digest, tally=self.tally, log=log, clock=clock
        )
        # What a step looks at first: a step without work must cost next to nothing.
        self._waiting = self.lookups.tickets
        self._tracked = self.saves.tracked

    # Start and end

    def meet_workers(self, handshakes: Sequence[Handshake]) -> None:
        """What the workers' memory looks like; from here on the pool is used. Raises ConfigError or
        Unavailable when the pool is required and cannot be used. Workers that are pending are met again."""
        refusal = self._engine_config.refusal or next(
            (hand.refusal for hand in handshakes if hand.refusal), ""
        )
        pending = next((hand.pending for hand in handshakes if hand.pending), "")
        if pending and not refusal:
            self._late = list(handshakes)
            self._log.info(
                "moonpool: %s; this engine computes alone until then, and joins the pool with a request",
                pending,
            )
            return
        if not refusal and len({hand.fingerprint for hand in handshakes}) != 1:
            refusal = (
                "its workers disagree about the model they serve or the form of its KV (in a pipeline, "
                "layers must not differ in the type of their KV)"
            )
        if refusal:
            self.refuse(refusal)
            return
        columns = sorted(
            {ranges for hand in handshakes for ranges in hand.columns},
            key=lambda ranges: (ranges.group, ranges.first_layer, ranges.first_head),
        )
        splits = self._engine_config.splits
        objects = objects_of(columns, splits)
        self._suffixes = b"".join(columns[place].suffix() for place, _, _ in objects)
        self._parts = [(part, count) for _, part, count in objects] if splits else []
        if self._engine_config.has_windows:
            needs = Needs(columns, self._engine_config.reaches, self._engine_config.block_tokens, splits)
            self.lookups.needs = needs
            self._roots = [int(column) for window in needs.windows for column in window.columns]
        fingerprint = handshakes[0].fingerprint
        if self._decision is not None:
            self._decision.block_bytes = max(hand.bytes_per_block for hand in handshakes)
        self._log.info(
            "moonpool: blocks of %d tokens, %d bytes in %d objects, fingerprint %s",
            self._engine_config.block_tokens,
            sum(hand.bytes_per_block for hand in handshakes),
            len(objects),
            fingerprint.hex()[:16],
        )
        if self._engine_config.media_refusal:
            self._log.info(
                "moonpool: images, sounds and videos, and what follows them in a prompt, are computed "
                "without the pool, and such prompts are not handed over: %s",
                self._engine_config.media_refusal,
            )
        if self._engine_config.takes_embeddings:
            self._log.info(
                "moonpool: prompt embeddings are computed without the pool; requests of tokens use it"
            )
        self.handover.start(handshakes)
        self._node = self._open_node(fingerprint)

    def greet_workers(self) -> None:
        """vLLM has delivered no handshake, as behind its MultiConnector: the first step asks for them."""
        if self._engine_config.refusal:
            self.refuse(self._engine_config.refusal)
            return
        self._late = [Handshake(pending="its workers have not been heard")] * self._engine_config.workers
        self._greets = True

    def _meet_late(self, handshakes: Sequence[Handshake]) -> None:
        """Some of the workers that were pending are not any more, or some of the workers have left the
        pool."""
        refusal = next((hand.refusal for hand in handshakes if hand.refusal), "")
        if refusal and not self._late:
            if self._node is not None:
                self._leave()
                self._log.warning("moonpool: this engine runs without the pool: %s", refusal)
            return
        for hand in handshakes:
            waiting = next((index for index, late in enumerate(self._late) if late.pending), None)
            if waiting is not None:
                self._late[waiting] = hand
        if self._late and not any(hand.pending for hand in self._late):
            if self._cache_is_old and not any(hand.refusal for hand in self._late):
                self._log.warning(
                    "moonpool: this engine joins the pool again when its prefix cache, which may hold KV of "
                    "the weights of before, is reset"
                )
                return
            late, self._late = self._late, []
            self._log.info("moonpool: this engine can join the pool now")
            try:
                self.meet_workers(late)
            except Error as error:  # the engine serves already
                self._log.error("moonpool: this engine runs without the pool: %s", error)

    def weights_changing(self, change: Change) -> None:
        """The engine's weights are about to be replaced. Nothing that is stored is read again, and nothing
        that is computed from here on is stored, until the workers have a name for the new weights."""
        was_there = self._node is not None or bool(self._late)
        if not (was_there or self._left):
            return
        self._leave()
        if change.from_files:  # the workers report what has become of it
            self._late = [Handshake(pending=change.how)] * self._engine_config.workers
            self._log.info("moonpool: %s: this engine leaves the pool until it is done", change.how)
        elif was_there:
            self._log.warning("moonpool: this engine runs without the pool: %s", change.sentence)

    def workers_left(self) -> None:
        """No worker reads or writes blocks for the pool any more."""
        if self._node is None:
            self.saves.all_ended()

    def _leave(self) -> None:
        node, self._node, self._late = self._node, None, []
        self._left, self._epoch = True, b""
        for state in self._loading.values():
            state.hit = None  # its pin goes with the connection
        self.meetings.disconnected()
        for request_id in list(self._requests):
            self.forget(request_id)
        self.handover.stop(NO_HAND_OVER)
        for request, _ in self._unnamed.values():
            self.handover.rejected(request)
        self.lookups.disconnected()
        if node is not None:
            node.close()
        self._cache_is_old = self._blocks is None or compat.holds_prefixes(self._blocks)

    def refuse(self, why: str) -> None:
        """The engine runs without the pool, or not at all when the pool is required."""
        if self._settings.require_pool:
            raise ConfigError(
                f"require_pool is set, but this engine cannot use the pool: {why}", operation="start"
            )
        self._log.warning("moonpool: this engine runs without the pool: %s", why)
        self._adapters = None

    def bind_block_pool(self, blocks: BlockPool) -> None:
        """The engine's blocks, to hold those that are being saved or handed over."""
        self._blocks = blocks
        self.saves.bind(blocks)
        self.meetings.bind(blocks)
        self.handover.bind(blocks)

    def bind_block_tables(self, tables: BlockTables) -> None:
        """Which blocks each request has now: vLLM takes those away that a sliding window has passed."""
        self.saves.bind_tables(tables)
        self.handover.bind_tables(tables)

    def pool(self) -> Pool | None:
        """The pool, if there is one now."""
        return None if self._node is None else self._node.client

    def forget_everything_stored(self) -> None:
        """The weights changed: nothing stored so far may be used again by this engine. Its chains get a seed
        of their own, known to no other engine; requests that came before go on without the pool, and what
        they compute is not stored under the old names."""
        self._epoch = secrets.token_bytes(32)
        for request_id in list(self._requests):
            self.forget(request_id)
        self.handover.forget_all()
        self.handover.stop_neighbours()

    def adapter_loading(self, lora: Any) -> None:
        """The engine is about to load this adapter. Requests of an adapter that it replaces go on without the
        pool: what they compute from here on does not match their names."""
        if self._adapters is not None and self._adapters.loading(lora):
            for request_id in [name for name, number in self._adapted.items() if number == lora.lora_int_id]:
                self.forget(request_id)

    def adapter_loaded(self, lora: Any, *, well: bool) -> None:
        """The engine has loaded this adapter, or failed to."""
        if self._adapters is not None:
            self._adapters.loaded(lora, well=well)

    def adapter_removed(self, number: int) -> None:
        """The engine has dropped the adapter of this number."""
        if self._adapters is not None:
            self._adapters.removed(number)

    def distrust_adapters(self) -> None:
        """Stops all use of the pool by requests with an adapter, after an unexpected exception."""
        self._adapters = None
        for request_id in list(self._adapted):
            self.forget(request_id)

    def cache_was_reset(self) -> None:
        """The engine's own prefix cache was emptied."""
        if self._adapters is not None:
            self._adapters.cache_was_reset()
        self._cache_is_old = False
        if self._late:
            self._meet_late(())

    def close(self) -> None:
        """Stops serving the bootstrap page and disconnects."""
        self.handover.close()
        self._item_names.close()
        if self._node is not None:
            self._node.close()

    # A request, in the order in which vLLM calls

    def arrived(self, request: Request) -> None:
        """Asks for the longest stored prefix, unless many answers wait for their requests to be admitted."""
        # Without a pool, too: the bytes of an adapter are known only after its load.
        name = self._adapter_name(request)
        if self._node is None and not self._may_join:
            return
        if compat.was_rejected(request):
            self.handover.rejected(request)
            return
        request_id = request.request_id
        if request_id in self._requests or request_id in self._unnamed:
            self.forget(request_id)  # an earlier request of that name, whose end vLLM did not report
        if _grows(request):
            self._sessions[request_id] = (request, len(request.mm_features))
        if request.mm_features:
            self._item_names.begin(request)
            if not self._item_names.is_ready(request):
                self._unnamed[request_id] = (request, self._clock())
                return
        self._begin(request, name)

    @property
    def _may_join(self) -> bool:
        """Whether this engine may have a pool later; by then it must know which items vLLM has cached."""
        return bool(self._late) or self._left

    def _begin_unnamed(self, request_id: str) -> bool:
        """Goes on with a request when its items are hashed, or it has waited for that for too long."""
        request, since_s = self._unnamed[request_id]
        if not self._item_names.is_ready(request) and self._clock() - since_s < HASH_TIMEOUT_S:
            return False
        del self._unnamed[request_id]
        self._begin(request, self._adapter_name(request))
        return True

    def _drop_unnamed(self, request_id: str) -> Request | None:
        """The request, if it was one; a prefill engine need not keep what it has for it."""
        if request_id not in self._unnamed:
            return None
        request, _ = self._unnamed.pop(request_id)
        self.handover.rejected(request)
        return request

    def _record_grown(self) -> None:
        """The items that sessions were given since they came, which vLLM does not announce."""
        for request_id, (request, count) in self._sessions.items():
            if len(request.mm_features) > count:
                self._sessions[request_id] = (request, len(request.mm_features))
                self._item_names.distrust(request.mm_features[count:])

    def _begin(self, request: Request, name: str | None) -> None:
        """Names the request's blocks, and asks for them. name: of its adapter."""
        if self._node is None or not _has_tokens(request):
            self._item_names.record(request)
            media = None
        else:
            media = self._item_names.media(request)
        if self._node is None:
            return
        seed = None if request.lora_request and not name else chain_seed(name, request.cache_salt)
        self.handover.arrived(request, media=media, seed=seed)
        if media is None or seed is None:
            return
        chain = Chain(
            self._engine_config.block_tokens,
            self._suffixes,
            self._epoch + seed,
            self._digest,
            self._roots,
            media,
            self._parts,
        )
        state = RequestState(request.request_id, chain, switches=self._switches(request))
        if state.switches.load and not (media.items or request.lora_request):
            state.neighbour = read_neighbour(request.kv_transfer_params)
        self._requests[request.request_id] = state
        if media.items:
            self._identifiers[request.request_id] = frozenset(
                feature.identifier for feature in request.mm_features
            )
        if request.lora_request is not None and self._adapters is not None:
            state.adapter = self._adapters.files(request)
            self._adapted[request.request_id] = request.lora_request.lora_int_id
        self.tally.add("requests")
        self.tally.add("switched_off_load", not state.switches.load)
        self.tally.add("switched_off_store", not state.switches.store)
        if self.lookups.under_way + self.lookups.pins < LOOKUPS_AHEAD_MAX:
            self._ask(state, request)

    def matched_tokens(self, request: Request, local_tokens: int) -> tuple[int | None, bool]:
        """(tokens beyond the local ones that can be loaded, whether asynchronously); (None, False): ask
        again."""
        tokens, asynchronous = self._matched_tokens(request, local_tokens)
        self._unplaced = "" if tokens is None else request.request_id
        return tokens, asynchronous

    def _matched_tokens(self, request: Request, local_tokens: int) -> tuple[int | None, bool]:
        if request.request_id in self._unnamed and not self._begin_unnamed(request.request_id):
            return None, False
        state = self._requests.get(request.request_id)
        if state is None:
            return 0, False
        if request.num_preemptions != state.preemptions:
            if request.request_id in self._adapted and not self._adapter_stays(request):
                self.forget(request.request_id)  # the engine may have loaded another adapter meanwhile
                return 0, False
            self.meetings.drop(request.request_id)
            self.lookups.abandon(state)
            self.lookups.release(state.restarted(request.num_preemptions))
        if state.phase is Phase.NEW:
            self._ask(state, request)
        handed = self.handover.matched(request, local_tokens)
        if not handed and state.phase is Phase.LOOKING:
            # An engine that has all of it waits for nothing. A request of one step has no later one in which
            # blocks that the pool has lost could be saved.
            covered = request.max_tokens > 1 and state.is_covered(
                local_tokens, self._engine_config.block_tokens
            )
            if not covered and not self.lookups.is_settled(state):
                return None, False
        state.offered_after = local_tokens
        if state.preemptions == 0:
            state.local_tokens = local_tokens
        if handed:
            return handed, True
        tokens = state.loadable_tokens(local_tokens, request.num_tokens, self._engine_config.block_tokens)
        if state.neighbour is not None and not request.skip_reading_prefix_cache:
            compute_s = _unmeasured if self._decision is None else self._decision.compute_s
            theirs = self.handover.neighbour_tokens(request, state.neighbour, local_tokens, tokens, compute_s)
            if theirs is None:
                return None, False
            state.neighbour = None  # a request that is preempted asks no more
            if theirs:
                return theirs, True
        if tokens and state.load_until is None:
            tokens = self._decide(state, request, local_tokens, tokens)
        return tokens, tokens > 0

    def admitted(self, request: Request, blocks: Blocks, external_tokens: int) -> None:
        """Room was made for the request; called again, with nothing external, after its load."""
        self._unplaced = ""
        state = self._requests.get(request.request_id)
        if state is None or state.phase is Phase.LOADING:
            return
        if self.handover.admitted(request, blocks, external_tokens):
            return  # its pin is kept: when the hand-over fails as a whole, the pool is asked
        if external_tokens > 0:
            self._plan_load(state, blocks.get_block_ids(), external_tokens)
            return
        if state.phase is Phase.LOOKING:
            state.covered()
        elif not self.meetings.begin(state, request, blocks):
            self.lookups.release(state.give_up_pin())
        if state.preemptions == 0:
            self.tally.add("prompt_tokens", request.num_prompt_tokens)
            self.tally.add("local_tokens", state.local_tokens)
        if self.pool() is not None and state.switches.store:
            self.saves.track(state, request, handed_over=self.handover.takes(request))

    def step_computed(self) -> None:
        """The oldest step that was planned has been computed, and its tokens are known."""
        if self._decision is None:
            return
        tokens, seconds = self._step_times.ends()
        if tokens and self._decision.step_took(tokens, seconds):
            self.tally.add("timed_prefill_tokens", tokens)
            self.tally.add("timed_prefill_seconds", seconds)

    def build_step(self, output: SchedulerOutput) -> Step:
        """The work of this step."""
        self.lookups.wait_left_s = WAIT_S  # the next queries are those of another step
        if self._unplaced:  # vLLM asks for frees (has_pending_frees) only for requests that run
            if not output.num_scheduled_tokens:
                self.handover.revoke_lent()
            self._unplaced = ""
        if self._sessions:
            self._record_grown()
        if self._unnamed:  # vLLM asks for none while as many run as may, and a prefill engine waits for ours
            for request_id in list(self._unnamed):
                self._begin_unnamed(request_id)
        meets = self.meetings.busy
        if not (
            self._loads or self._waiting or self._tracked or self.handover.is_busy or self._greets or meets
        ):
            return NOTHING
        if self._waiting:
            self.lookups.poll()
        saves = self.saves.plan(output) if self.saves.tracked else ()
        handover = self.handover.plan(output) if self.handover.is_busy else None
        pieces = self.meetings.plan(output) if meets else ()
        if not self._loads and not saves and not handover and not self._greets and not pieces:
            return NOTHING
        loads = (*self._loads, *pieces)
        step = Step(loads, saves, handover or None, self._greets)
        self._greets = False
        self._loads.clear()
        self.saves.told()
        self.meetings.told()
        return step

    def step_ended(self, output: ConnectorOutput) -> None:
        """What the workers reported with a step."""
        report = output.kv_connector_worker_meta
        if isinstance(report, Report):
            for job_id, ranks in report.saved.items():
                if self.saves.ended(job_id, ranks):
                    self._free_block_wait.renew()
            if self._decision is not None:
                for request_id, took in report.load_times.items():
                    timed = self._loading.get(request_id)
                    self._decision.load_took(took, probe=timed is not None and timed.is_probe)
                for end in report.pieces.values():
                    if end.took is not None:
                        self._decision.load_took(end.took, piece=True)
            if report.pieces:
                self.meetings.ended(report.pieces)
                self._free_block_wait.renew()
            for request_id, good in report.loaded.items():
                loading = self._loading.get(request_id)
                if loading is not None:
                    loading.load_good = min(loading.load_good, good)
                else:
                    self.handover.reported(request_id, good)
        for request_id in output.finished_recving or ():
            state = self._loading.pop(request_id, None)
            if state is not None:
                self._load_ended(state)
                if not self._loading and self._decision is not None:
                    self._decision.loads_ended()
            else:
                self.handover.ended(request_id)
        if isinstance(report, Report) and report.handshakes:
            self._meet_late(report.handshakes)
        # Last: a failure in other engines' reports must not keep this engine's loads from ending.
        if isinstance(report, Report) and self.handover.heard(report):
            self._free_block_wait.renew()

    def finished(self, request: Request) -> dict[str, Any] | None:
        """The request is over. Returns the pool's share of it, for the answer's kv_transfer_params."""
        taken = self.handover.taken_tokens(request)
        answer = self.handover.finished(request)
        self._drop_unnamed(request.request_id)
        self._sessions.pop(request.request_id, None)
        self._adapted.pop(request.request_id, None)
        self._identifiers.pop(request.request_id, None)
        self.meetings.drop(request.request_id)  # also of one that was forgotten
        state = self._requests.pop(request.request_id, None)
        if state is None:
            return answer or None
        self.saves.forget(request.request_id)
        self._let_go(state)
        ours = answer.setdefault("moonpool", {})
        ours["pool_tokens"] = state.pool_tokens
        ours["local_tokens"] = state.local_tokens
        ours["load_errors"] = state.load_errors
        if taken:
            ours["neighbour_tokens"] = taken
        if state.choice is not None and _asks_why(request):
            ours["decision"] = state.choice.plain()
        return answer

    # What vLLM asks to know whether to go on stepping

    def has_pending_work(self) -> bool:
        """Whether answers are under way that only a step can take in."""
        return bool(
            self.saves.under_way
            or self.lookups.under_way
            or self.meetings.under_way
            or self.handover.has_work
        )

    def has_pending_frees(self) -> bool:
        """Whether waiting a moment frees blocks; vLLM asks when it lacks some, before it preempts."""
        frees_soon = self.saves.frees_soon() or self.meetings.frees_soon() or self.handover.frees_soon()
        return frees_soon and self._free_block_wait.is_left()

    # When something unexpected happened: called by the connector, which has logged it

    def give_up_step(self) -> None:
        """A step could not be planned: gives up the work that may have failed; the next one reports it."""
        self.saves.give_up()
        self.meetings.give_up()
        self.handover.give_up()

    def fail_load(self, request_id: str, blocks: Blocks, external_tokens: int) -> None:
        """The engine waits for a load that could not be planned: let the worker report it as failed."""
        state = self._requests.get(request_id)
        if state is not None:
            self._let_go(state)
        self.handover.unplan(request_id)
        if all(load.request_id != request_id for load in self._loads):
            ids, splits = blocks.get_block_ids(), self._engine_config.splits
            count = -(-external_tokens // self._engine_config.block_tokens)
            last = -(-len(ids[0]) // splits[0]) if splits else len(ids[0])
            failed = by_part(ids, splits, max(last - count, 0), last)
            self._loads.append(Load(request_id, 0, b"", b"", b"", failed))

    def forget(self, request_id: str) -> None:
        """The request goes on without the pool."""
        unnamed = self._drop_unnamed(request_id)
        if unnamed is not None:
            self._item_names.distrust(unnamed.mm_features)
        self._adapted.pop(request_id, None)
        self._identifiers.pop(request_id, None)
        state = self._requests.pop(request_id, None)
        self.saves.forget(request_id)
        self.meetings.stop(request_id)
        self.handover.forget(request_id)
        if state is not None:
            self._let_go(state)

    # The parts

    def _adapter_name(self, request: Request) -> str | None:
        """The name in the pool of the request's adapter; None: it has none, or no adapter."""
        return self._adapters.name(request) if request.lora_request and self._adapters else None

    def _adapter_stays(self, request: Request) -> bool:
        """Whether the request's adapter is the one it had when the request came."""
        return self._adapters is not None and self._adapters.name(request) is not None

    def _item_changed(self, identifier: str) -> None:
        """What vLLM's caches have under this name of an item may be another item's from here on. Requests
        with it go on without the pool: what they compute may not match their names."""
        for request_id in [name for name, those in self._identifiers.items() if identifier in those]:
            self.forget(request_id)

    def _switches(self, request: Request) -> Switches:
        switches, complaints = read_switches(request.kv_transfer_params)
        for complaint in complaints:
            if count := self._repeats.due(complaint):
                self._log.warning(
                    "moonpool: in kv_transfer_params %s; request %s is served as without it%s",
                    complaint,
                    request.request_id,
                    times(count),
                )
        return switches

    def _ask(self, state: RequestState, request: Request) -> None:
        if self.pool() is not None:
            state.chain.extend(self.saves.savable_tokens(request))
        may_load = self._engine_config.may_load or self.handover.gives(request)
        if may_load and state.switches.load and not request.skip_reading_prefix_cache:
            self.lookups.ask(state, request.num_tokens)
        else:
            state.missed(0)

    def _let_go(self, state: RequestState) -> None:
        """The engine has no more use for this state. A load under way keeps its pin until it has ended."""
        self.lookups.abandon(state)
        if state.phase is not Phase.LOADING:
            self.lookups.release(state.give_up_pin())

    def meetings_refusal(self) -> str:
        """Why the front of a hit is never computed while its back is loaded; "": it may be."""
        if self._decision is None:
            return 'kv_connector_extra_config has "compute_if_faster": false'
        if self._engine_config.has_windows:
            return "its model has sliding windows or states"
        return ""

    def _decide(self, state: RequestState, request: Request, local_tokens: int, loadable_tokens: int) -> int:
        """How many of the tokens that can be loaded are, while the request waits; decided once for each
        hit."""
        block_tokens = self._engine_config.block_tokens
        first, blocks = local_tokens // block_tokens, loadable_tokens // block_tokens
        if self._decision is None:
            choice = Choice(blocks, ALWAYS)
        else:
            shares = self._shares(state, first, blocks)
            choice = self._decision.choose(shares, whole=self._engine_config.has_windows)
            if self.meetings.enabled and not (request.mm_features or self.handover.gives(request)):
                choice, pace = self._decision.meet(shares, choice)
                if pace is not None:
                    self.meetings.decide(state, pace)
        awaited = 0 if choice.reason == BOTH else choice.blocks
        state.choice, state.load_until = choice, first + awaited
        self.tally.add("declined_tokens", (blocks - choice.blocks) * block_tokens)
        if choice.reason != BOTH:  # counted when the meeting begins
            self.tally.add(f"load_decisions_{choice.reason}")
        return awaited * block_tokens

    def _shares(self, state: RequestState, first: int, blocks: int) -> Shares:
        """Of each of the blocks behind ``first`` the shares that are to be loaded."""
        assert state.hit is not None
        unit = DESCRIPTOR_BYTES * state.chain.width
        descriptors = state.hit.descriptors[first * unit : (first + blocks) * unit]
        remote = from_network(state.hit.holders, descriptors).reshape(blocks, -1)
        if not self._engine_config.has_windows:
            network = remote.mean(axis=1)
            return Shares(1.0 - network, network)
        sizes = object_sizes(descriptors).reshape(blocks, -1).astype(np.float64)  # 0: not needed
        shares = sizes / max(float(sizes.max(axis=0, initial=0.0).sum()), 1.0)
        return Shares(np.where(remote, 0.0, shares).sum(axis=1), np.where(remote, shares, 0.0).sum(axis=1))

    def _plan_load(self, state: RequestState, block_ids: tuple[list[int], ...], external_tokens: int) -> None:
        """The blocks behind those that the engine has itself, as many as it made room for."""
        first = state.offered_after // self._engine_config.block_tokens
        blocks = external_tokens // self._engine_config.block_tokens
        if self._decision is not None:
            self._decision.load_begins(self._shares(state, first, blocks))
        hit = state.admitted_to_load(first, blocks)
        self._loading[state.request_id] = state
        unit = DESCRIPTOR_BYTES * state.chain.width
        self._loads.append(
            Load(
                request_id=state.request_id,
                width=state.chain.width,
                first_names=state.chain.names(first, first + 1),
                holders=hit.holders,
                descriptors=hit.descriptors[first * unit : (first + blocks) * unit],
                block_ids=by_part(block_ids, self._engine_config.splits, first, first + blocks),
            )
        )

    def _save_again(self, state: RequestState, request: Request) -> None:
        """Blocks that the pool had did not come: the engine computes them, and they are saved."""
        tracked = state.request_id in self.saves.tracked
        if not tracked and self.pool() is not None and state.switches.store:
            self.saves.track(state, request, handed_over=self.handover.takes(request))

    def _load_ended(self, state: RequestState) -> None:
        self.lookups.release(state.loaded(self._engine_config.block_tokens))
        self.tally.add("loads")
        self.tally.add("loaded_tokens", state.load_good * self._engine_config.block_tokens)
        self.tally.add("load_errors", state.load_blocks - state.load_good)


def _nothing(_output: SchedulerOutput) -> None:
    pass


def _unmeasured(_tokens: int) -> float:
    return math.inf


def _asks_why(request: Request) -> bool:
    """Whether the request wants to know how its hit was decided."""
    ours = (request.kv_transfer_params or {}).get("moonpool")
    return isinstance(ours, Mapping) and ours.get("explain") is True


def _has_tokens(request: Request) -> bool:
    """Whether the prompt is made of tokens, and of items among them. Embeddings and sessions that grow do not
    use the pool."""
    return (
        request.prompt_token_ids is not None
        and getattr(request, "prompt_embeds", None) is None
        and not _grows(request)
    )


def _grows(request: Request) -> bool:
    """Whether it is a session, to which vLLM adds tokens and items later."""
    return bool(getattr(request, "resumable", False))
