"""``MoonpoolWorker``: the half on every rank. It carries out the scheduler's plans on two threads, one for
loads and a native one for saves; the executor's thread only hands them over. Nothing is queued on its stream.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from moonpool import _native
from moonpool.connectors.tensorrt_llm import compat
from moonpool.connectors.tensorrt_llm.fetch import Offer
from moonpool.connectors.tensorrt_llm.kv_memory import page_keys
from moonpool.connectors.tensorrt_llm.layout import read_layout, read_tensor
from moonpool.connectors.tensorrt_llm.link import Engine, Link, name_list, names
from moonpool.connectors.tensorrt_llm.messages import Load, Plan, Save
from moonpool.connectors.tensorrt_llm.pool import Held
from moonpool.connectors.tensorrt_llm.saves import Saving
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
        self._thread = ThreadPoolExecutor(1, "moonpool-load")
        self._closing = threading.Event()
        self._lock = threading.Lock()  # what follows, all of it request ids
        self._running: set[int] = set()  # loads that write into pages, or will
        self._started: set[int] = set()  # that the engine waits for
        self._loaded: set[int] = set()
        self._finished: set[int] = set()  # the engine waits to reuse their pages
        self._failed: dict[int, Exception] = {}

    def register_kv_caches(self, kv_cache_tensor: Any) -> None:
        """The memory as one tensor [block, layer, 2, numbers]; connects."""
        tokens = int(self._llm_args.kv_cache_config.tokens_per_block)
        self._link.join(lambda: read_tensor(kv_cache_tensor, tokens))

    def register_kv_cache_layout(self, layout: Any) -> None:
        """The memory as layer groups; connects."""
        self._link.join(lambda: read_layout(layout))

    def start_load_kv(self, stream: Any) -> None:
        """Begins the loads of the step, which wait for what ``stream`` was given before. Waits itself where
        the step writes to a page that a save still reads.

        stream: of the forward pass.
        """
        plan, engine = self._plan(), self._link.engine
        self._metadata = Plan((), plan.saves)  # the engine may come again with the same one
        if engine is not None:
            written = None if plan.written is None else page_keys(plan.written)
            if (written is None or written) and engine.saves.wait_for(written, self._closing):
                self._link.count["waits_for_saves"] += 1
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
                    mark = engine.memory.mark(stream)
                except Exception as error:  # of the card; get_finished raises it
                    self._ended(load.request_id, error)
                else:
                    self._thread.submit(self._load, engine, load, offer, mark)

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        """Nothing: a request runs when all of its layers are there."""

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        """Nothing: a block is saved with all of its layers, when the step has ended."""

    def wait_for_save(self, stream: Any) -> None:
        """Begins the saves of the blocks that the step fills, which wait for what ``stream`` was given so
        far. Waits for nothing itself."""
        plan, engine = self._plan(), self._link.engine
        self._metadata = Plan()
        if engine is None or not engine.shape.saves or not plan.saves:
            return
        saves = list(plan.saves)
        try:
            mark = engine.memory.mark(stream)
            while saves:
                self._start_save(engine, saves[0], mark)
                del saves[0]
        except Exception as error:  # the engine must survive its connector
            for save in saves:
                self._unsaved(save.digests)
            if isinstance(error, Error):
                self._refused(len(saves), str(error))
            else:
                self._survived(error)

    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        """(finished requests whose pages nothing here reads or writes any more, requests that are loaded).
        When promised blocks could not be loaded, the engine ends: TensorRT-LLM cannot be told of it and must
        not serve missing blocks. One rank raises an exception; several ranks wait for each other right behind
        this call, so all of them are ended."""
        read = self._take_saved()
        with self._lock:
            self._started.update(started_loading_req_ids)
            self._finished.update(finished_gen_req_ids)
            for request_id in self._finished & self._failed.keys():  # the engine has dropped it
                del self._failed[request_id]
                self._loaded.add(request_id)
            failure = next(iter(self._failed.values()), None)
            loaded = self._started & self._loaded
            self._started -= loaded
            self._loaded -= loaded
            free = self._finished - self._running - read
            self._finished -= free
        if failure is not None:
            if int(self._llm_args.tensor_parallel_size) > 1:
                self._link.log.error("promised blocks are not there, so all ranks end (%s)", failure)
                compat.end_all_ranks()
            raise failure
        return sorted(free), sorted(loaded)

    def close(self) -> None:
        """For tests: an engine ends with its process."""
        self._closing.set()
        if self._link.engine is not None:
            self._link.engine.memory.close()  # first: a load waits for its copies
        self._thread.shutdown()
        if self._link.engine is not None:
            self._link.engine.close()

    def flush(self) -> None:
        """For tests: waits for all loads and saves."""
        self._thread.submit(lambda: None).result()
        while self._link.engine is not None and not self._link.engine.saves.idle:
            self._take_saved()

    def _plan(self) -> Plan:
        plan = self.get_connector_meta()
        return plan if isinstance(plan, Plan) else Plan()

    # Loads

    def _load(self, engine: Engine, load: Load, offer: Offer | None, mark: _native.Mark | None) -> None:
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

    def _move_in(self, engine: Engine, load: Load, offer: Offer | None, mark: _native.Mark | None) -> int:
        """Loads what the scheduler of this process promised, or else what the pool has under the same names:
        the scheduler of another process keeps it there. Returns how many blocks. Raises Error when not all of
        them are there, even after LOAD_DEADLINE_S of asking: they are pinned, and giving up ends the engine.
        """
        blocks = len(load.digests) // DIGEST_BYTES
        engine.saves.wait_for(page_keys(load.pages), self._closing)
        source = None if offer is None else (offer.held, offer.objects(blocks))
        deadline_s = time.monotonic() + LOAD_DEADLINE_S
        while True:
            engine.memory.check()
            try:
                self._copy_in(engine, load, *(source or self._ask(engine, load)), mark)
                return blocks
            except Error as failure:
                error = failure
            source = None
            with self._lock:
                cancelled = load.request_id in self._finished
            if cancelled or time.monotonic() > deadline_s or self._closing.wait(ASK_AGAIN_S):
                raise error

    def _copy_in(
        self,
        engine: Engine,
        load: Load,
        held: Held,
        objects: npt.NDArray[np.intp],
        mark: _native.Mark | None,
    ) -> None:
        """Raises Error when one of the objects is not there.

        objects: the places, in ``held``, of this rank's objects of the blocks, block by block.
        """
        rows, pages, columns = engine.memory.places(load.pages, len(load.digests) // DIGEST_BYTES)
        holders, descriptors = held.descriptors(objects[rows])
        answer = engine.pool.reach().loads.run(
            lambda worker: worker.submit_load(
                holders, descriptors, engine.memory.kv, pages, columns, after=mark
            )
        )
        if answer.ok.count(1) != len(rows):
            raise Unavailable(answer.error or "promised blocks are gone", operation="load")

    def _ask(self, engine: Engine, load: Load) -> tuple[Held, npt.NDArray[np.intp]]:
        """The pool's objects of this rank, pinned. Raises Error when not all of them are there."""
        columns = tuple(column.ranges for column in engine.shape.columns)
        wanted = name_list(load.digests, columns)
        held = engine.pool.reach().hold(wanted, len(columns))
        if held is None or len(held) < len(wanted):
            raise Unavailable("the pool does not have promised blocks", operation="load")
        return held, np.arange(len(wanted))

    # Saves

    def _start_save(self, engine: Engine, save: Save, mark: _native.Mark | None) -> None:
        client = engine.pool.client
        digests = len(save.digests) // DIGEST_BYTES
        blocks = 0 if client is None else engine.memory.savable(save.pages, digests, engine.saves.held)
        if blocks < digests:
            self._unsaved(save.digests[blocks * DIGEST_BYTES :])
        if client is None or not blocks:
            return
        save = Save(
            save.request_id,
            save.previous,
            save.digests[: blocks * DIGEST_BYTES],
            tuple(ids[:blocks] for ids in save.pages),
        )
        columns = tuple(column.ranges for column in engine.shape.columns)
        width = len(columns)
        rows, pages, places = engine.memory.places(save.pages, blocks)
        if not len(rows):
            return
        before = (save.previous or bytes(DIGEST_BYTES)) + save.digests[:-DIGEST_BYTES]
        parents = names(before, columns)
        if not save.previous:  # zero bytes: none
            parents = bytes(width * BLOCK_NAME_BYTES) + parents[width * BLOCK_NAME_BYTES :]
        engine.saves.start(
            Saving(save, client, page_keys(save.pages)),
            lambda worker: worker.submit_save(
                _chosen(names(save.digests, columns), rows),
                BLOCK_NAME_BYTES,
                _chosen(parents, rows),
                engine.memory.kv,
                pages,
                places,
                after=mark,
            ),
        )

    def _take_saved(self) -> set[int]:
        """Takes in the ends of saves. Returns the requests whose pages are still read."""
        engine = self._link.engine
        if engine is None:
            return set()
        for saving, answer in engine.saves.poll():
            count = self._link.count
            count["saved_objects"] += answer.stored
            count["existing_objects"] += answer.existed
            count["saved_bytes"] += answer.bytes_stored
            if answer.refused and not saving.client.client.connected:
                self._unsaved(saving.save.digests)
                engine.pool.failed(answer.error)
            elif answer.refused:
                self._link.known.forget(split(saving.save.digests))
                self._refused(answer.refused, answer.error)
        return engine.saves.requests()

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


def _chosen(joined: bytes, rows: npt.NDArray[np.intp]) -> bytes:
    """The names at ``rows``."""
    return np.frombuffer(joined, np.uint8).reshape(-1, BLOCK_NAME_BYTES)[rows].tobytes()
