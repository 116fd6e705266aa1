"""``MoonpoolWorker``: the half on every rank. It carries out the scheduler's plans on two threads of its own,
one for loads and one for saves; the executor's thread only hands them over and queues copies on its stream.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from moonpool.connectors.tensorrt_llm import compat
from moonpool.connectors.tensorrt_llm.fetch import Kept, Offer
from moonpool.connectors.tensorrt_llm.layout import missing, read_layout, read_tensor
from moonpool.connectors.tensorrt_llm.link import Engine, Link, name_list, names
from moonpool.connectors.tensorrt_llm.messages import Load, Plan, Save
from moonpool.connectors.tensorrt_llm.pool import Views
from moonpool.connectors.tensorrt_llm.staging import Move, Slots
from moonpool.connectors.tensorrt_llm.tokens import split
from moonpool.core.errors import Error, Unavailable
from moonpool.core.store.keys import BLOCK_NAME_BYTES, DIGEST_BYTES

LOAD_DEADLINE_S = 10.0  # so long a rank asks for promised blocks before it gives the engine up
ASK_AGAIN_S = 0.1


class MoonpoolWorker(compat.Worker):
    """Made by TensorRT-LLM on every rank with its arguments. Raises ConfigError for options that are
    wrong."""

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        self._link = Link.of(llm_args)
        self._threads = ThreadPoolExecutor(1, "moonpool-load"), ThreadPoolExecutor(1, "moonpool-save")
        self._closing = threading.Event()
        self._lock = threading.Lock()  # what follows, all of it request ids
        self._running: set[int] = set()  # loads that write into pages, or will
        self._started: set[int] = set()  # that the engine waits for
        self._loaded: set[int] = set()
        self._cancelled: set[int] = set()  # cancelled: the engine waits to reuse their pages
        self._failed: dict[int, Exception] = {}
        self._slots: tuple[Slots, Slots] | None = None  # for loads, for saves

    def register_kv_caches(self, kv_cache_tensor: Any) -> None:
        """The memory as one tensor [block, layer, 2, numbers]; connects."""
        tokens = int(self._llm_args.kv_cache_config.tokens_per_block)
        self._join(lambda: read_tensor(kv_cache_tensor, tokens))

    def register_kv_cache_layout(self, layout: Any) -> None:
        """The memory as layer groups; connects."""
        self._join(lambda: read_layout(layout))

    def _join(self, read: Callable[[], Any]) -> None:
        self._link.join(read)
        if self._link.engine is not None:
            self._slots = Slots(self._link.engine.loading), Slots(self._link.engine.saving)

    def start_load_kv(self, stream: Any) -> None:
        """Copies the blocks of the step from the pool to the pages before the forward pass.

        stream: of the forward pass.
        """
        plan, engine = self._plan(), self._link.engine
        self._metadata = Plan((), plan.saves)  # the engine may come again with the same one
        for load in plan.loads:
            offer = self._link.offers.pop(load.request_id, None)
            if not load.digests:
                self._ended(load.request_id)
            elif engine is None:
                self._ended(load.request_id, Unavailable("this rank has no pool", operation="load"))
            else:
                with self._lock:
                    self._running.add(load.request_id)
                try:
                    mark = engine.mover.mark(stream)
                except Exception as error:  # an error of CUDA; get_finished raises it
                    self._ended(load.request_id, error)
                else:
                    self._threads[0].submit(self._load, engine, load, offer, mark)

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        """Nothing: a request runs when all of its layers are there."""

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        """Nothing: a block is saved with all of its layers, when the step has ended."""

    def wait_for_save(self, stream: Any) -> None:
        """Queues copies of the blocks that the step fills on ``stream``, behind the step's own work."""
        plan, engine = self._plan(), self._link.engine
        self._metadata = Plan()
        if engine is None or not engine.shape.saves:
            return
        for save in plan.saves:
            try:
                self._start_save(engine, save, stream)
            except Exception as error:  # the engine must survive its connector
                self._survived(error)

    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        """(cancelled requests whose pages nothing here writes into any more, requests that are loaded). When
        promised blocks could not be loaded, the engine ends: TensorRT-LLM cannot be told of it and must not
        serve missing blocks. One rank raises an exception; several ranks wait for each other right behind
        this call, so all of them are ended."""
        with self._lock:
            self._started.update(started_loading_req_ids)
            self._cancelled.update(finished_gen_req_ids)
            for request_id in self._cancelled & self._failed.keys():  # the engine has dropped it
                del self._failed[request_id]
                self._loaded.add(request_id)
            failure = next(iter(self._failed.values()), None)
            loaded = self._started & self._loaded
            self._started -= loaded
            self._loaded -= loaded
            free = self._cancelled - self._running
            self._cancelled -= free
        if failure is not None:
            if int(self._llm_args.tensor_parallel_size) > 1:
                self._link.log.error("promised blocks are not there, so all ranks end (%s)", failure)
                compat.end_all_ranks()
            raise failure
        return sorted(free), sorted(loaded)

    def close(self) -> None:
        """For tests: an engine ends with its process."""
        self._closing.set()
        for threads in self._threads:
            threads.shutdown()
        if self._link.engine is not None:
            self._link.engine.close()

    def flush(self) -> None:
        """For tests: waits for all jobs."""
        for threads in self._threads:
            threads.submit(lambda: None).result()

    def _plan(self) -> Plan:
        plan = self.get_connector_meta()
        return plan if isinstance(plan, Plan) else Plan()

    # Loads

    def _load(self, engine: Engine, load: Load, offer: Offer | None, mark: Any) -> None:
        try:
            self._link.count["loaded_blocks"] += self._move_in(engine, load, offer, mark)
            self._ended(load.request_id)
        except Exception as error:  # get_finished raises it
            self._ended(load.request_id, error)

    def _ended(self, request_id: int, error: Exception | None = None) -> None:
        """A load; from now on nothing writes into the request's pages."""
        with self._lock:
            self._running.discard(request_id)
            if error is None:
                self._loaded.add(request_id)
            else:
                self._failed[request_id] = error

    def _move_in(self, engine: Engine, load: Load, offer: Offer | None, mark: Any) -> int:
        """Raises Error when not all of the blocks are there."""
        blocks = len(load.digests) // DIGEST_BYTES
        columns = engine.shape.columns
        promised = self._promised(engine, load, offer)
        assert self._slots is not None
        done = 0
        while done < blocks:
            slots = self._slots[0].take(blocks - done, wait=True)
            try:
                moves: list[Move] = []
                width = len(columns)
                found = iter(promised(done * width, (done + len(slots)) * width))
                for slot in slots:
                    block, place = done + len(moves), engine.mover.staging[slot]
                    for column in columns:
                        source, at = np.frombuffer(next(found), np.uint8), 0
                        for offset, size in column.rows:
                            place[offset : offset + size] = source[at : at + size]
                            at += size
                    moves.append((slot, tuple(ids[block] for ids in load.pages)))
                engine.mover.load(moves, mark)
                done += len(moves)
            finally:
                self._slots[0].give(slots)
        return blocks

    def _promised(self, engine: Engine, load: Load, offer: Offer | None) -> Callable[[int, int], Views]:
        """The source of this rank's promised objects [first, last): the scheduler's offer where it is in this
        process, else the pool, where the scheduler keeps them."""
        if offer is not None:
            return lambda first, last: offer.views[first:last]
        columns = tuple(column.ranges for column in engine.shape.columns)
        wanted = name_list(load.digests, columns)
        kept = Kept(lambda: engine.pool.reach().hold(wanted, len(columns)), len(wanted))

        def patient(first: int, last: int) -> Views:
            deadline_s = time.monotonic() + LOAD_DEADLINE_S
            while True:  # also after an error: the objects are pinned, and giving up ends the engine
                try:
                    return kept.views(first, last)
                except Error as failure:
                    error = failure
                with self._lock:
                    cancelled = load.request_id in self._cancelled
                if cancelled or time.monotonic() > deadline_s or self._closing.wait(ASK_AGAIN_S):
                    raise error

        return patient

    # Saves

    def _start_save(self, engine: Engine, save: Save, stream: Any) -> None:
        assert self._slots is not None
        blocks = len(save.digests) // DIGEST_BYTES
        slots = self._slots[1].take(blocks, wait=False) if engine.pool.client is not None else []
        if len(slots) < blocks:
            self._unsaved(save.digests[len(slots) * DIGEST_BYTES :])
        if not slots:
            return
        try:
            moves = [
                (slot, tuple(ids[block] if block < len(ids) else compat.NO_PAGE for ids in save.pages))
                for block, slot in enumerate(slots)
            ]
            copied = engine.mover.save(moves, stream)
        except BaseException:
            self._slots[1].give(slots)
            raise
        self._threads[1].submit(self._save, engine, save, slots, copied)

    def _save(self, engine: Engine, save: Save, slots: Sequence[int], copied: Callable[[], None]) -> None:
        assert self._slots is not None
        try:
            copied()
            self._move_out(engine, save, slots)
        except Exception as error:  # the engine must survive its connector
            self._unsaved(save.digests)
            if isinstance(error, Error):
                engine.pool.failed(error)
            else:
                self._survived(error)
        finally:
            self._slots[1].give(slots)

    def _move_out(self, engine: Engine, save: Save, slots: Sequence[int]) -> None:
        connection = engine.pool.client
        if connection is None:
            raise Unavailable("the pool does not answer", operation="save")
        columns = tuple(column.ranges for column in engine.shape.columns)
        width = len(columns)
        digests = save.digests[: len(slots) * DIGEST_BYTES]
        before = (save.previous or bytes(DIGEST_BYTES)) + digests[:-DIGEST_BYTES]
        parents = names(before, columns)
        if not save.previous:  # zero bytes: none
            parents = bytes(width * BLOCK_NAME_BYTES) + parents[width * BLOCK_NAME_BYTES :]
        there = [
            (block, column)
            for block in range(len(slots))
            for column, ranges in enumerate(columns)
            if ranges.group not in missing(save.pages, block)
        ]
        if not there:
            return
        rows = np.array([block * width + column for block, column in there])
        named = np.frombuffer(names(digests, columns), np.uint8).reshape(-1, BLOCK_NAME_BYTES)[rows].tobytes()
        above = np.frombuffer(parents, np.uint8).reshape(-1, BLOCK_NAME_BYTES)[rows].tobytes()
        places = np.array([slots[block] for block, _ in there], np.uint32)
        which = np.array([column for _, column in there], np.uint16)
        answer = connection.saves.run(
            lambda w: w.submit_save(named, BLOCK_NAME_BYTES, above, engine.table, places, which)
        )
        count = self._link.count
        count["saved_objects"] += answer.stored
        count["existing_objects"] += answer.existed
        count["saved_bytes"] += answer.bytes_stored
        if answer.refused and not connection.client.connected:
            raise Unavailable(answer.error, operation="save")
        if answer.refused:
            self._link.known.forget(split(digests))
            self._refused(answer.refused, answer.error)

    def _unsaved(self, digests: bytes) -> None:
        self._link.count["unsaved_blocks"] += len(digests) // DIGEST_BYTES
        self._link.known.forget(split(digests))

    def _refused(self, objects: int, reason: str) -> None:
        """Logs a reason once, until a save succeeds: a full pool refuses every call."""
        if not self._link.count["refused_objects"]:
            self._link.log.warning("%d objects were not saved (%s)", objects, reason)
        self._link.count["refused_objects"] += objects

    def _survived(self, error: Exception) -> None:
        self._link.count["survived_errors"] += 1
        self._link.log.error("an unexpected error in a save (%r); the engine goes on without", error)
