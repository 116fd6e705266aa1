"""``MoonpoolScheduler``: the half on rank 0. It asks the pool once for each new prompt, pins what it
promises, and tells the workers what to load and, as blocks become full, what to save.

Runs on the executor's thread. A lookup waits for the node's answer (on this host, tens of microseconds), at
most TIMEOUT_S without progress; a node that does not answer is not asked again for a while. Reads from other
hosts wait at most FETCH_S, see fetch.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from moonpool.connectors.tensorrt_llm import compat
from moonpool.connectors.tensorrt_llm.fetch import Offer
from moonpool.connectors.tensorrt_llm.link import Engine, Link, name_list
from moonpool.connectors.tensorrt_llm.messages import Load, Plan, Save
from moonpool.connectors.tensorrt_llm.pool import Held, PoolClient
from moonpool.connectors.tensorrt_llm.tokens import Chain
from moonpool.core.errors import Error


class MoonpoolScheduler(compat.Scheduler):
    """Made by TensorRT-LLM on rank 0 with its arguments. Raises ConfigError for options that are wrong."""

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        self._link = Link.of(llm_args)
        self._block_tokens = int(llm_args.kv_cache_config.tokens_per_block)
        self._chains: dict[int, Chain] = {}
        self._loads: dict[int, Load] = {}  # loads that the workers were not told of yet
        self._loading: set[int] = set()  # requests that they were told of, until they run

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """(tokens behind the computed ones that the pool has, whether they come later), and the latter
        always: the request is parked meanwhile. At least one token is left to compute."""
        try:
            self._forget(int(request.request_id))
            prompt = compat.prompt_of(request)
            engine = self._link.engine
            if prompt is None or (engine is not None and engine.foreign.are_in(prompt.tokens)):
                self._link.count["requests_left_out"] += 1
                return 0, False
            chain = Chain(prompt.seed, self._block_tokens)
            chain.extend(prompt.tokens)
            self._chains[prompt.request_id] = chain
            usable = min(len(chain.digests), (len(prompt.tokens) - 1) // self._block_tokens)
            offer = self._ask(chain.digests, num_computed_tokens // self._block_tokens, usable)
            chain.saved = self._link.known.leading(chain.digests)
            if offer is None:
                return 0, False
            chain.offer = self._link.offers[prompt.request_id] = offer
            return (offer.first + offer.blocks) * self._block_tokens - num_computed_tokens, True
        except Exception as error:  # the engine must survive its connector
            self._survived("lookup", error)
            return 0, False

    def update_state_after_alloc(self, request: Any, block_ids: Sequence[int]) -> None:
        """As update_state_after_alloc_by_layer_group, for an engine with one layer group."""
        self.update_state_after_alloc_by_layer_group(request, [block_ids])

    def update_state_after_alloc_by_layer_group(
        self, request: Any, block_ids_by_layer_group: Sequence[Sequence[int]]
    ) -> None:
        """The request has its pages. What was promised is loaded into them with the next step: a parked
        request is in no SchedulerOutput. Pages that it has not got are not loaded."""
        request_id = int(request.request_id)
        offer = self._link.offers.get(request_id)
        if offer is None:
            return
        last = min(offer.first + offer.blocks, *(len(ids) for ids in block_ids_by_layer_group))
        last = max(last, offer.first)
        digests = b"".join(self._chains[request_id].digests[offer.first : last])
        pages = tuple(tuple(ids[offer.first : last]) for ids in block_ids_by_layer_group)
        self._loads[request_id] = Load(request_id, digests, pages)

    def build_connector_meta(self, scheduler_output: Any) -> Plan:
        """The loads and saves of the step, for the workers."""
        loads, self._loads = tuple(self._loads.values()), {}
        self._loading.update(load.request_id for load in loads)
        saves: list[Save] = []
        written: list[list[int]] = []
        try:
            for data in scheduler_output.new_requests:
                self._follow(data, saves, written, new=True)
            for data in scheduler_output.cached_requests:
                self._follow(data, saves, written, new=False)
        except Exception as error:  # the engine must survive its connector
            self._survived("save", error)
            return Plan(loads, tuple(saves), None)
        return Plan(loads, tuple(saves), tuple(map(tuple, written)))

    def request_finished(self, request: Any, cache_block_ids: Sequence[int]) -> bool:
        """Whether the pages must be kept, until ``get_finished`` of all ranks has named the request: true for
        one that was cancelled while it was parked, since a rank may be writing into them, and for one whose
        saves a rank may not have read yet."""
        request_id = int(request.request_id)
        kept = request_id in self._loading or request_id in self._loads or self._may_be_read(request_id)
        self._forget(request_id)
        return kept

    def _may_be_read(self, request_id: int) -> bool:
        """Whether a rank may still read the request's pages for a save; of other ranks it is not known."""
        engine, chain = self._link.engine, self._chains.get(request_id)
        if engine is None or chain is None or not chain.saves:
            return False
        return int(self._link.args.tensor_parallel_size) > 1 or request_id in engine.saves.requests()

    def request_finished_by_layer_group(
        self, request: Any, cache_block_ids_by_layer_group: Sequence[Sequence[int]]
    ) -> bool:
        """As request_finished, for an engine with several layer groups."""
        return self.request_finished(request, ())

    def wait_for_initialization(self) -> None:
        """There is nothing to wait for."""

    def _ask(self, digests: list[bytes], first: int, usable: int) -> Offer | None:
        """What the pool has of the blocks [first, usable) of a prompt; hears of the others, too, where that
        was long ago."""
        engine, count, known = self._link.engine, self._link.count, self._link.known
        if engine is None:
            return None
        connection = engine.pool.client
        if connection is None:
            count["unanswered"] += first < usable
            return None
        try:
            offer = self._look_up(engine, connection, digests[:usable], first)
            known.seen_at(connection.client.incarnation)
            if offer is not None:
                known.add(digests[first : first + offer.blocks])
            # This engine computes what was found and not read, and then saves it here.
            known.forget(digests[first + (offer.blocks if offer else 0) : usable])
            self._hear_of(engine, connection, known.doubtful(digests))
        except Error as error:
            count["unanswered"] += 1
            engine.pool.failed(error)
            return None
        return offer

    def _look_up(
        self, engine: Engine, connection: PoolClient, digests: list[bytes], first: int
    ) -> Offer | None:
        """What the pool has of the blocks of these digests, from block ``first`` on."""
        count, ranges = self._link.count, engine.shape.ranges
        width = len(ranges)
        wanted = name_list(b"".join(digests[first:]), ranges)
        if not wanted:
            return None
        count["lookups"] += 1
        held = connection.hold(wanted, width)
        count["lookup_blocks"] += len(wanted) // width
        if held is None:
            return None
        found = self._right(engine, held.sizes) // width
        own = np.array([ranges.index(column.ranges) for column in engine.shape.columns], np.intp)
        objects = (np.arange(found)[:, None] * width + own).ravel()  # of this rank
        near = _near(held, objects, len(own))
        offer = Offer(first, near, held, objects[: near * len(own)])
        if near < found:
            far = [int(at) for at in objects if held.far[at]]
            before = name_list(digests[first - 1], ranges) if first else [None] * width
            parents = [*before, *wanted]  # of object i: the one of the block before it
            if engine.fetch.bring(held, far, [parents[at] for at in far]):
                # Of this rank's objects alone: the own node has them, whatever the master knows by now.
                brought = connection.hold([wanted[at] for at in objects], len(own))
                if brought is not None:
                    objects = np.arange(self._right(engine, brought.sizes) // len(own) * len(own))
                    near = _near(brought, objects, len(own))
                    offer = Offer(first, near, brought, objects[: near * len(own)], others=held)
        count["hit_blocks"] += near
        count["too_far_blocks"] += found - near
        return offer if near else None

    def _hear_of(self, engine: Engine, connection: PoolClient, digests: list[bytes]) -> None:
        """Whether the pool still has these blocks."""
        if not digests:
            return
        ranges, known = engine.shape.ranges, self._link.known
        present = connection.client.exists(name_list(b"".join(digests), ranges))
        blocks = [present[at : at + len(ranges)] for at in range(0, len(present), len(ranges))]
        known.add(digest for digest, block in zip(digests, blocks, strict=True) if set(block) == {1})
        known.forget(digest for digest, block in zip(digests, blocks, strict=True) if 0 in block)

    def _right(self, engine: Engine, found: Sequence[int]) -> int:
        """How many objects of these sizes, from the first on, have the size that this engine's have."""
        sizes = [column.size for column in engine.shape.columns]
        for at, size in enumerate(found):
            if size != sizes[at % len(sizes)]:
                self._link.log.error("an object of the pool has %d bytes; it is not used", size)
                return at
        return len(found)

    def _follow(self, data: Any, saves: list[Save], written: list[list[int]], *, new: bool) -> None:
        """A request is part of the step: what the step makes full is saved.

        saves, written: get what the request adds to a Plan's.
        """
        request_id = int(data.request_id)
        self._loading.discard(request_id)  # it runs, so it was loaded
        pages = compat.new_pages(data)
        written += [[] for _ in range(len(pages) - len(written))]
        for group, ids in zip(written, pages, strict=False):
            group += ids[int(data.computed_position) // self._block_tokens :] if new else ids
        chain = self._chains.get(request_id)
        if chain is None:
            return
        chain.offer = None
        if new:
            chain.pages = []
        elif self._link.settings.save_decode:
            chain.extend(data.new_tokens)
        chain.add_pages(pages)
        engine = self._link.engine
        full = min(
            (data.computed_position + data.num_scheduled_tokens) // self._block_tokens, len(chain.digests)
        )
        if engine is None or full <= chain.saved:
            return
        saves.append(Save(request_id, chain.previous(chain.saved), *chain.blocks(chain.saved, full)))
        chain.saves = True
        self._link.known.add(chain.digests[chain.saved : full])
        chain.saved = full

    def _forget(self, request_id: int) -> None:
        """The request has ended, or is asked for anew: its pages and what was promised are void. The engine
        was told that it is loaded, so the workers still say that it is."""
        self._chains.pop(request_id, None)
        self._link.offers.pop(request_id, None)
        self._loading.discard(request_id)
        if request_id in self._loads:
            self._loads[request_id] = Load(request_id, b"", ())

    def _survived(self, what: str, error: Exception) -> None:
        self._link.count["survived_errors"] += 1
        self._link.log.error("an unexpected error in a %s (%r); the engine goes on without", what, error)


def _near(held: Held, objects: npt.NDArray[np.intp], width: int) -> int:
    """How many blocks, from the first on, lie on this host, ``width`` of ``objects`` to a block."""
    far = np.flatnonzero(np.array(held.far, bool)[objects])
    return int(far[0]) // width if len(far) else len(objects) // width
