"""The half beside the KV memory: reads its layout, then hands loads and saves to native threads and reports
their ends.

Runs on the worker's thread, between and after forwards, and never waits for a copy. Hand-overs between
engines go through its HandoverWorker. Every load of a step is reported exactly once, whether it succeeds or
fails, because the engine keeps the request waiting until then.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np
import numpy.typing as npt

from moonpool import _native
from moonpool.connectors.adapters import unchanged
from moonpool.connectors.files import Reading
from moonpool.connectors.node_connection import NodeConnection
from moonpool.connectors.objects import Refused, first_head, holds_first_copy
from moonpool.connectors.vllm import layout as layouts
from moonpool.connectors.vllm.device_memory import DeviceMemory
from moonpool.connectors.vllm.engine_config import EngineConfig
from moonpool.connectors.vllm.group_blocks import BlockIds, objects_of, part_columns, part_numbers
from moonpool.connectors.vllm.layout import BlockLayout, Tensor
from moonpool.connectors.vllm.messages import Handshake, Load, LoadTime, PieceEnd, Report, Save, Step
from moonpool.connectors.vllm.metrics import Tally
from moonpool.connectors.vllm.pd.consumer_worker import Ended
from moonpool.connectors.vllm.pd.copy_ranges import Held
from moonpool.connectors.vllm.pd.handover_worker import HandoverWorker, KvMemory
from moonpool.connectors.vllm.pd.kv_transfer_params import LEFT
from moonpool.connectors.vllm.pd.step_plan import HandoverStep
from moonpool.connectors.vllm.pool import Columns, Failed, Indices, KvTable, Pool, Rows, Ticket
from moonpool.connectors.vllm.reach import NULL_BLOCK
from moonpool.connectors.vllm.repeats import Repeats, times
from moonpool.connectors.vllm.tiers import from_network, object_sizes
from moonpool.connectors.vllm.weight_changes import UNKNOWN, Change
from moonpool.connectors.weights import Pending
from moonpool.core.errors import Error
from moonpool.core.store.keys import BLOCK_NAME_BYTES, DIGEST_BYTES, Ranges

OpenNode = Callable[[bytes], NodeConnection[Pool]]
OpenHandoverWorker = Callable[[KvMemory, DeviceMemory | None], "HandoverWorker | None"]
OpenDevice = Callable[[BlockLayout, Rows], DeviceMemory]
Fingerprint = Callable[[BlockLayout, Tensor], bytes]
Choice = npt.NDArray[np.intp]
Wanted = npt.NDArray[np.bool_]
GONE = "there is no pool now"
FAILED = "the connector failed"
VOID = "the prefix cache was reset meanwhile"
SLEPT = "the engine went to sleep meanwhile"
REPLACED = "the engine's weights were replaced meanwhile"


@dataclass(frozen=True, slots=True)
class Memory:
    """The KV memory of this worker, ready for the native threads.

    columns, rows: what it holds of a block of each group, by objects, and where their bytes are.
    saves: whether it saves them; one of the ranks that hold the same heads does.
    table: the rows as native threads take them.
    device: the same memory on a CUDA device; None: on the host.
    splits: of each group the parts of a block (group_blocks.py); (): one.
    objects: all objects of a block, as ``objects_of`` has them.
    part_numbers, places: of each of ``objects`` its part, counted over all groups, and its place in
        ``columns``.
    """

    columns: tuple[Ranges, ...]
    rows: Rows
    saves: bool
    table: KvTable
    device: DeviceMemory | None = None
    splits: tuple[int, ...] = ()
    objects: list[tuple[int, int, int]] = field(init=False)
    part_numbers: Choice = field(init=False)
    places: Columns = field(init=False)

    def __post_init__(self) -> None:
        objects = objects_of(self.columns, self.splits)
        numbers = part_numbers(self.columns, self.splits)
        object.__setattr__(self, "objects", objects)
        object.__setattr__(self, "part_numbers", np.array(numbers, np.intp))
        object.__setattr__(self, "places", np.array([place for place, _, _ in objects], np.uint16))

    def held(self, layout: BlockLayout) -> Held:
        """The same for hand-overs, which know parts in the place of groups."""
        layers = layouts.layers_of_columns(layout, self.columns)
        return Held(
            part_columns(self.columns, self.splits),
            [self.rows[place] for place, _, _ in self.objects],
            [layers[place] for place, _, _ in self.objects],
        )


@dataclass(frozen=True, slots=True)
class Late:
    """What a worker joins the pool with once ``reading`` is over, and its weights are known."""

    reading: Reading
    caches: Mapping[str, Tensor]
    memory: Memory
    layout: BlockLayout


@dataclass(slots=True)
class Running:
    """A load or a save under way.

    objects: number of objects.
    started_s: when it began, in seconds of the clock.
    descriptors: of a load's objects.
    alone: of a load whether no other was under way when it began.
    void: of a load whether the memory that it wrote to was taken away.
    staged: of a save whether its blocks are not read any more, and that was reported.
    """

    job: Load | Save
    objects: int
    started_s: float
    descriptors: bytes = b""
    alone: bool = False
    void: bool = False
    staged: bool = False


class WorkerHalf:
    """The half beside the KV memory; all methods run on the worker's thread."""

    def __init__(
        self,
        engine_config: EngineConfig,
        *,
        ranks: Callable[[], tuple[int, int]],
        fingerprint: Fingerprint,
        open_node: OpenNode,
        log: logging.Logger,
        open_handover_worker: OpenHandoverWorker = lambda memory, device: None,
        open_device: OpenDevice | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """engine_config: of this engine.
        ranks: returns the tensor- and the pipeline-parallel rank of this process.
        fingerprint: of this engine's KV, given the layout and one of its tensors, 32 bytes.
        open_node: connects to the node under a fingerprint.
        log: for messages.
        open_handover_worker: opens this worker to other engines; returns None without hand-over.
        open_device: prepares copies of a KV cache on a CUDA device; raises Error when it cannot. None: such
            a KV cache is refused.
        clock: seconds, monotonic.
        """
        self._engine_config = engine_config
        self._ranks = ranks
        self._fingerprint = fingerprint
        self._open_node = open_node
        self._open_handover_worker = open_handover_worker
        self._open_device = open_device
        self._log = log
        self._clock = clock
        self._node: NodeConnection[Pool] | None = None
        self._memory: Memory | None = None
        self._late: Late | None = None
        self._caches: Mapping[str, Tensor] = {}  # what is read again after a sleep or a change of weights
        self._asleep = False
        self._handshake = Handshake(refusal=engine_config.refusal or "vLLM registered no KV caches")
        self._choices: dict[bytes, Choice | None] = {}
        self._running: dict[Ticket, Running] = {}
        self._awaited: set[str] = set()  # requests that vLLM keeps waiting
        self._void: set[str] = set()  # those of them for which nothing that still comes counts
        self._finished: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._failed_requests: set[str] = set()
        self._report = Report()
        self._handover_worker: HandoverWorker | None = None
        self._repeats = Repeats(clock)
        self._left = False  # the weights have no name
        self._comes_back = False  # they have one again, and the KV memory is not there
        self._hands_over = not engine_config.has_states
        self.whole = False  # whether the last load into the model gave it each parameter
        self.tally = Tally()

    # Start and end

    def register(self, caches: Mapping[str, Tensor]) -> None:
        """Takes the KV memory that vLLM allocated. What cannot be used is refused in one sentence, not
        raised."""
        if self._engine_config.refusal or not caches:
            return
        try:
            self._join(caches, *self._read_memory(caches))
        except (Refused, Error) as error:
            self._handshake = Handshake(refusal=str(error))
        else:
            self._pin()

    def _pin(self) -> None:
        """Lets a device read memory of the node by itself, before the engine serves. A worker that has no
        pool by now pins nothing later."""
        memory = self._late.memory if self._late is not None else self._memory
        if memory is not None and memory.device is not None:
            memory.device.pin(self._pool())

    def _join(self, caches: Mapping[str, Tensor], memory: Memory, layout: BlockLayout) -> None:
        """Joins the pool. Raises Refused or Error when the engine's KV cannot be identified."""
        try:
            with_kv = next((group for group in layout.groups if group.state is None), layout.groups[0])
            fingerprint = self._fingerprint(layout, caches[with_kv.layers[0].name])
        except Pending as pending:
            self._late = Late(pending.reading, caches, memory, layout)
            self._handshake = Handshake(pending=str(pending))
            return
        self._memory = memory
        tp_rank, pp_rank = self._ranks()
        rank = pp_rank * self._engine_config.tp_size + tp_rank
        self._caches = caches
        if memory.device is not None:
            self._log.info("moonpool: this worker pools the memory of %s", memory.device.kv.device_name)
        address = ""
        if self._hands_over:
            self._handover_worker = self._open_handover_worker(
                KvMemory(
                    engine_id=self._engine_config.engine_id,
                    fingerprint=fingerprint,
                    spans=layouts.spans(caches),
                    held=memory.held(layout),
                    sizes=self._engine_config.sizes,
                    rank=rank,
                    tp_rank=tp_rank,
                    pp_rank=pp_rank,
                    has_windows=self._engine_config.has_windows,
                ),
                memory.device,
            )
            address = self._handover_worker.address if self._handover_worker is not None else ""
        self._handshake = Handshake(
            fingerprint,
            memory.columns,
            layout.bytes_per_block,
            handover_address=address,
            rank=rank,
            tp_rank=tp_rank,
            pp_rank=pp_rank,
        )
        self._node = self._open_node(fingerprint)

    def sleep(self) -> None:
        """The engine is about to take the memory of a device's KV cache away. Returns when no copy touches it
        any more, or after the limit of its close. Loads under way have failed: what they wrote is lost."""
        memory = self._late.memory if self._late is not None else self._memory
        if self._left:
            self._asleep = True
        if self._asleep or memory is None or memory.device is None:
            return
        self._asleep = True
        self._memory = None
        for running in self._running.values():
            running.void = isinstance(running.job, Load)
        memory.device.close()

    def wake_up(self, caches: Mapping[str, Tensor] | None = None) -> None:
        """The memory is there again. Until then, and when it cannot be used, loads fail and nothing is saved.

        caches: the KV memory; None: the tensors of before, which may have moved.
        """
        if not self._asleep:
            return
        if self._left or self._comes_back:
            self._asleep, self._caches = False, caches or self._caches
            return
        late = self._late
        caches = caches or (late.caches if late is not None else self._caches)
        try:
            memory, layout = self._read_memory(caches)
        except (Refused, Error) as error:
            self._log.warning("moonpool: after its sleep this worker neither loads nor saves: %s", error)
            return
        self._asleep = False
        if late is not None:
            self._late = replace(late, caches=caches, memory=memory, layout=layout)
        else:
            self._memory, self._caches = memory, caches
        self._pin()

    # Weights that are replaced

    def leave(self, change: Change) -> None:
        """The engine's weights are about to be replaced. Returns when no copy from or to the pool touches the
        KV memory any more: loads under way have failed. Hand-overs end by the plan of the next step, and none
        begins from here on."""
        if self._left:
            return
        self._left, self._comes_back, self._hands_over, self.whole = True, False, False, False
        memory = self._late.memory if self._late is not None else self._memory
        self._caches = self._late.caches if self._late is not None else self._caches
        self._memory = self._late = None
        self._handshake = Handshake(refusal=change.sentence)
        if memory is not None and memory.device is not None and not self._asleep:
            memory.device.close()
        node, self._node = self._node, None
        if node is not None:
            node.close()
        ended, self._running = self._running, {}
        for running in ended.values():
            if isinstance(running.job, Load):
                self._end_load(running.job, Failed(REPLACED, objects=running.objects), 0.0)
            else:
                self._end_save(running.job, None, 0.0, staged=running.staged)

    def leave_unannounced(self) -> None:
        """As ``leave``, for a change that the scheduler's half does not know: it hears of it with a step."""
        if not (self._left or (self._memory is None and self._late is None)):
            self.leave(Change("weights were given to its model"))
            self._report.handshakes.append(self._handshake)

    def come_back(self, *, known: bool) -> None:
        """The engine has loaded weights from files: joins the pool again, now or, in a sleep, when the KV
        memory is there.

        known: whether the files are those at the model's path.
        """
        if not self._left or not self._caches:
            return
        if not (known and self.whole):
            self._handshake = Handshake(refusal=UNKNOWN.sentence)
            self._report.handshakes.append(self._handshake)
            return
        self._left, self._comes_back = False, self._asleep
        if not self._asleep:
            self._rejoin()

    def _rejoin(self) -> None:
        self._comes_back = False
        try:
            memory, layout = self._read_memory(self._caches)
        except (Refused, Error) as error:
            self._handshake = Handshake(refusal=str(error))
            self._report.handshakes.append(self._handshake)
            return
        self._join_late(self._caches, memory, layout)

    def handshake(self) -> Handshake:
        """What the scheduler's half must know about this worker."""
        return self._handshake

    def greeted(self) -> None:
        """The scheduler's half has not heard of this worker: the step's report has the handshake."""
        self._report.handshakes.append(self._handshake)

    def close(self) -> None:
        """Returns when no native thread can touch the KV memory any more."""
        if self._handover_worker is not None:
            self._handover_worker.close()
        if self._memory is not None and self._memory.device is not None:
            self._memory.device.close()  # first: a native thread of the pool waits for its copies
        if self._node is not None:
            self._node.close()

    # A step

    @property
    def is_idle(self) -> bool:
        """Whether no load or save is under way, and none has ended that was not reported."""
        return not (
            self._running
            or self._finished
            or self._failed_blocks
            or (self._handover_worker is not None and self._handover_worker.has_news)
        )

    def begin_loads(self) -> None:
        """The step has loads or pulls, and nothing of it is queued on the device yet."""
        if self._memory is not None and self._memory.device is not None:
            self._memory.device.step_begins()

    def begin_handover(self, step: HandoverStep) -> None:
        """Begins the hand-overs of the step, before it uses any memory."""
        self._void.update(request_id for request_id in step.voids if request_id in self._awaited)
        if self._handover_worker is not None:
            self._handover_worker.begin(step)

    def revoke_leases(self) -> None:
        """Invalidates all leases: after an unexpected exception it is unknown which have ended."""
        if self._handover_worker is not None:
            self._handover_worker.revoke()

    def start_pulls(self, step: HandoverStep) -> None:
        """Starts the hand-overs to this engine."""
        self._awaited.update(pull.request_id for pull in step.pulls)
        assert self._handover_worker is not None
        self._handover_worker.pull(step)

    def computed(self, step: HandoverStep) -> None:
        """The forward of the step has ended: other engines may read its blocks."""
        if self._handover_worker is not None:
            self._handover_worker.computed(step)

    def fail_pulls(self, step: HandoverStep) -> None:
        """Ends every pull of the step once nothing writes to its blocks, after an unexpected exception."""
        self._awaited.update(pull.request_id for pull in step.pulls)
        if self._handover_worker is not None:
            self._handover_worker.fail_pulls(step, FAILED)
            return
        for pull in step.pulls:
            self._end_pull(Ended(pull, 0, 0, 0.0, FAILED))

    def start_loads(self, step: Step) -> None:
        """Hands the loads of this step over. One that cannot be handed over has failed."""
        self._awaited.update(load.request_id for load in step.loads if not load.piece)
        for load in step.loads:
            try:
                self._start_load(load)
            except Error as error:
                self._end_load(load, Failed(str(error)), 0.0)

    def fail_loads(self, step: Step) -> None:
        """Fails every load of the step that is not under way, after an unexpected exception."""
        started = {
            (running.job.request_id, running.job.piece)
            for running in self._running.values()
            if isinstance(running.job, Load)
        }
        for load in step.loads:
            if (load.request_id, load.piece) in started:
                continue
            if load.piece:
                if load.piece not in self._report.pieces:
                    self._end_load(load, Failed(FAILED), 0.0)
            elif load.request_id not in self._finished:
                self._awaited.add(load.request_id)
                self._end_load(load, Failed(FAILED), 0.0)

    def start_saves(self, step: Step) -> None:
        """Hands the saves of this step over; the forward that computed their blocks has ended, or is queued
        on the device."""
        after = None
        if self._memory is not None and self._memory.device is not None:
            try:
                after = self._memory.device.mark()
            except Error as error:  # without it the saves would read what is not computed yet
                for save in step.saves:
                    self._end_save(save, Failed(str(error), objects=1), 0.0)
                return
        for save in step.saves:
            try:
                self._start_save(save, after)
            except Error as error:
                self._end_save(save, Failed(str(error), objects=1), 0.0)

    def give_up_saves(self, step: Step) -> None:
        """Ends every save of the step that is not under way, after an unexpected exception."""
        started = {running.job.job_id for running in self._running.values() if isinstance(running.job, Save)}
        for save in step.saves:
            if save.job_id not in started and save.job_id not in self._report.saved:
                self._end_save(save, Failed(FAILED, objects=1), 0.0)

    def poll(self) -> None:
        """Takes in what the native threads have done."""
        if self._handover_worker is not None and self._handover_worker.has_news:
            self._take_news(self._handover_worker)
        if not self._running:
            return
        pool = self._pool()
        if pool is None:
            return
        now_s = self._clock()
        for ticket, answer in pool.poll():
            if isinstance(answer, _native.SaveStaged):
                self._save_staged(ticket)
                continue
            running = self._running.pop(ticket, None)
            if running is None:
                continue
            seconds = now_s - running.started_s
            if isinstance(running.job, Load):
                if running.void:
                    answer = Failed(SLEPT, objects=running.objects)
                self._end_load(running.job, answer, seconds)
                self._time_load(running.job, running, answer, seconds)
            else:
                self._end_save(running.job, answer, seconds, staged=running.staged)

    def _save_staged(self, ticket: Ticket) -> None:
        running = self._running.get(ticket)
        if running is not None and isinstance(running.job, Save):
            running.staged = True
            self._report.saved[running.job.job_id] = 1

    def take_finished(self) -> tuple[set[str], set[str]]:
        """Requests whose loads ended since the last call: (all of them, those to be reported as failed
        whole)."""
        if not self._finished:
            return set(), set()
        finished, self._finished = self._finished, set()
        failed, self._failed_requests = self._failed_requests, set()
        return finished, failed

    def take_failed_blocks(self) -> set[int]:
        """Ids of the blocks that were not loaded, since the last call."""
        if not self._failed_blocks:
            return set()
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_report(self) -> Report | None:
        """What the scheduler's half must know about the ends of loads and saves, or None."""
        if self._late is not None and self._late.reading.over.is_set() and not self._asleep:
            self._join_late(self._late.caches, self._late.memory, self._late.layout)
        if self._comes_back and not self._asleep:
            self._rejoin()
        if not self._report:
            return None
        report, self._report = self._report, Report()
        return report

    def _join_late(self, caches: Mapping[str, Tensor], memory: Memory, layout: BlockLayout) -> None:
        """The weights were read: this step's report has the handshake that was pending."""
        self._late, self._handshake = None, Handshake(refusal="it could not join the pool late")
        try:
            self._join(caches, memory, layout)
        except (Refused, Error) as error:
            self._handshake = Handshake(refusal=str(error))
        finally:
            if self._late is None:
                self._report.handshakes.append(self._handshake)

    # Memory

    def _read_memory(self, caches: Mapping[str, Tensor]) -> tuple[Memory, BlockLayout]:
        engine_config = self._engine_config
        layout = layouts.read_layout(
            caches,
            engine_config.groups,
            engine_config.block_tokens,
            engine_config.states,
            engine_config.splits,
        )
        tp_rank, _ = self._ranks()
        kv_heads = layouts.heads_of_groups(layout, engine_config)
        first_heads, saves = self._heads(layout, kv_heads, tp_rank)
        columns = layouts.object_ranges(layout, kv_heads=kv_heads, first_heads=first_heads, tp_rank=tp_rank)
        rows = layouts.all_rows(layout, columns, first_heads=first_heads)
        if layout.device is None:
            table = _native.PartTable(rows)
            return Memory(columns, rows, saves, table, splits=engine_config.splits), layout
        if self._open_device is None:
            raise Refused("the KV cache lies on a CUDA device, and this worker copies host memory only")
        device = self._open_device(layout, rows)
        return Memory(columns, rows, saves, device.kv, device, engine_config.splits), layout

    def _heads(self, layout: BlockLayout, kv_heads: Sequence[int], tp_rank: int) -> tuple[list[int], bool]:
        """(of each group the number of this rank's first KV head in the whole model, whether the rank saves
        what it has). Raises Refused.

        kv_heads: of each group, in the whole model.
        """
        tp_size, first_heads, saves = self._engine_config.tp_size, [], True
        for group, total in zip(layout.groups, kv_heads, strict=True):
            if group.state is not None:
                first_heads.append(0)
                continue
            if self._engine_config.has_states and group.heads * tp_size != total:
                raise Refused("states are not stored yet where several ranks hold the same KV heads")
            first_heads.append(first_head(total, group.heads, tp_rank, tp_size))
            saves = saves and holds_first_copy(total, group.heads, tp_rank, tp_size)
        return first_heads, saves

    def _pool(self) -> Pool | None:
        return None if self._node is None else self._node.client

    # Loads and saves

    def _start_load(self, load: Load) -> None:
        pool = self._pool()
        if pool is None or self._memory is None or load.width == 0:
            self._end_load(load, Failed(GONE), 0.0)
            return
        choice = self._choice(load.first_names, load.width)
        indices, columns, wanted = self._places(load.block_ids)
        descriptors = _choose(load.descriptors, load.blocks * load.width, load.width, choice, wanted)
        ticket = pool.submit_load(
            load.holders,
            descriptors,
            self._memory.table,
            indices,
            columns,
            None if self._memory.device is None else self._memory.device.before_step,
        )
        alone = not any(isinstance(running.job, Load) for running in self._running.values())
        self._running[ticket] = Running(load, len(indices), self._clock(), descriptors, alone)

    def _start_save(self, save: Save, after: _native.Mark | None) -> None:
        pool = self._pool()
        if pool is None or self._memory is None or not self._memory.saves:
            self._end_save(save, None, 0.0)
            return
        if save.adapter and not unchanged(save.adapter):
            self._end_save(save, Failed("the files of its LoRA adapter changed", objects=1), 0.0)
            return
        choice = self._choice(save.names, save.width)
        count = len(save.block_ids[0]) * save.width
        indices, columns, wanted = self._places(save.block_ids)
        ticket = pool.submit_save(
            _choose(save.names, count, save.width, choice, wanted),
            BLOCK_NAME_BYTES,
            _choose(save.parents, count, save.width, choice, wanted),
            self._memory.table,
            indices,
            columns,
            after,
            save.keep_s,
        )
        self._running[ticket] = Running(save, len(indices), self._clock())

    def _choice(self, names: bytes, width: int) -> Choice | None:
        """Which of a block's ``width`` objects this worker holds, in its own order; None when it holds them
        all so."""
        assert self._memory is not None
        unit = BLOCK_NAME_BYTES
        suffixes = [names[unit * column + DIGEST_BYTES : unit * (column + 1)] for column in range(width)]
        key = b"".join(suffixes)
        if key not in self._choices:
            columns = self._memory.columns
            starts = [suffixes.index(ranges.suffix()) for ranges in columns]
            wanted = [starts[place] + part for place, part, _ in self._memory.objects]
            self._choices[key] = None if wanted == list(range(width)) else np.array(wanted, np.intp)
        return self._choices[key]

    def _places(self, block_ids: BlockIds) -> tuple[Indices, Columns, Wanted | None]:
        """(block id, column) of each object of these blocks, block by block, without those of null blocks;
        and which of all those objects they are, None: all."""
        assert self._memory is not None
        by_part = np.array(block_ids, np.uint32)
        indices = np.ascontiguousarray(by_part[self._memory.part_numbers].T).reshape(-1)
        places = np.tile(self._memory.places, by_part.shape[1])
        if not self._engine_config.has_windows:
            return indices, places, None
        wanted = indices != NULL_BLOCK
        return indices[wanted], places[wanted], wanted

    def _time_load(
        self, load: Load, running: Running, answer: _native.LoadAnswer | Failed, seconds: float
    ) -> None:
        """Reports what the load took, by the tier that its bytes came from.

        seconds: from its start until now.
        """
        if answer.seconds <= 0 or len(answer.ok) != running.objects:
            return
        good = np.frombuffer(answer.ok, np.uint8) != 0
        remote = from_network(load.holders, running.descriptors)
        sizes = object_sizes(running.descriptors)
        took = LoadTime(
            answer.seconds,
            memory_bytes=int(sizes[good & ~remote].sum()),
            network_bytes=int(sizes[good & remote].sum()),
            failed_bytes=int(sizes[~good].sum()),
            from_network=bool(remote.any()),
            notice_s=max(seconds - answer.seconds, 0.0) if running.alone else None,
        )
        if load.piece:
            self._report.pieces[load.piece] = replace(self._report.pieces[load.piece], took=took)
        else:
            self._report.load_times[load.request_id] = took
        tier = "network" if took.from_network else "memory"
        self.tally.add(f"{tier}_loaded_bytes", took.memory_bytes + took.network_bytes)
        self.tally.add(f"{tier}_load_seconds", took.seconds)

    def _end_load(self, load: Load, answer: _native.LoadAnswer | Failed, seconds: float) -> None:
        good = self._good_blocks(answer.ok, load.blocks)
        bad = [block for block, is_good in enumerate(good) if not is_good]
        if load.piece:
            self._report.pieces[load.piece] = PieceEnd(1, bad[0] if bad else load.blocks)
        else:
            self._finish(load.request_id, load.block_ids, bad)
        self.tally.add("loaded_bytes", answer.bytes_loaded)
        self.tally.observe("load_seconds", seconds)
        error = answer.error or "the pool no longer has them"
        if bad and (count := self._repeats.due(error)):
            computed = load.piece or self._engine_config.recomputes  # a piece keeps no request waiting
            self._log.warning(
                "moonpool: %d of %d blocks of request %s were not loaded (%s); they are %s%s",
                len(bad),
                load.blocks,
                load.request_id,
                error,
                "computed instead" if computed else "an error (kv_load_failure_policy)",
                times(count),
            )

    def _good_blocks(self, ok: bytes, blocks: int) -> list[bool]:
        """For each block whether it was loaded, by the flags of all objects."""
        if self._engine_config.has_windows:
            return [bool(ok) and all(ok)] * blocks
        return _good_blocks(ok, blocks)

    def _finish(self, request_id: str, block_ids: Sequence[Sequence[int]], bad: Sequence[int]) -> None:
        """The load or hand-over of these blocks has ended; those at the places ``bad`` did not come."""
        if request_id not in self._awaited:
            return  # reported already, and a second report would end the engine
        self._awaited.discard(request_id)
        self._void.discard(request_id)
        leading = bad[0] if bad else len(block_ids[0])
        self._finished.add(request_id)
        # Block ids are ambiguous across groups, and a window's blocks are of no use without the others.
        if bad and (len(block_ids) > 1 or self._engine_config.has_windows):  # all of it is computed
            leading = 0
            self._failed_requests.add(request_id)
        elif bad:
            self._failed_blocks.update(block_ids[0][block] for block in bad)
        self._report.loaded[request_id] = leading

    def _take_news(self, handover_worker: HandoverWorker) -> None:
        """Takes in the ends of hand-overs and messages of other engines."""
        for ended in handover_worker.take_ended():
            self._end_pull(ended)
        heartbeats, handed = handover_worker.take_heartbeats()
        self._report.heartbeats |= heartbeats
        for lease, ranks in handed.items():
            self._report.handed[lease] = self._report.handed.get(lease, 0) + ranks
        self._report.lost |= handover_worker.take_lost()

    def _end_pull(self, ended: Ended) -> None:
        pull = ended.pull
        if pull.request_id in self._void:
            ended = replace(ended, good=0, error=VOID)
        self._finish(pull.request_id, pull.block_ids, range(ended.good, pull.blocks))
        self.tally.add("neighbour_bytes" if pull.is_cached else "handed_over_bytes", ended.bytes)
        if not pull.is_cached:
            self.tally.observe("handover_seconds", ended.seconds)
        if ended.error and (count := self._repeats.due(ended.error)):
            self._log.log(
                logging.INFO if ended.error == LEFT else logging.WARNING,
                "moonpool: %d of %d blocks of request %s were not handed over (%s); they are computed%s",
                pull.blocks - ended.good,
                pull.blocks,
                pull.request_id,
                ended.error,
                times(count),
            )

    def _end_save(
        self,
        save: Save,
        answer: _native.SaveAnswer | Failed | None,
        seconds: float,
        *,
        staged: bool = False,
    ) -> None:
        """staged: the scheduler's half has heard of it already."""
        if not staged:
            self._report.saved[save.job_id] = 1
        if answer is None:
            return
        self.tally.add("saves")
        self.tally.add("saved_objects", answer.stored)
        self.tally.add("existing_objects", answer.existed)
        self.tally.add("refused_objects", answer.refused)
        self.tally.add("saved_bytes", answer.bytes_stored)
        self.tally.observe("save_seconds", seconds)


def _good_blocks(ok: bytes, blocks: int) -> list[bool]:
    """For each block whether all of its objects were loaded; False for an answer of the wrong length."""
    if not ok or len(ok) % blocks:
        return [False] * blocks
    return cast("list[bool]", np.frombuffer(ok, np.uint8).reshape(blocks, -1).all(axis=1).tolist())


def _choose(
    items: bytes, count: int, width: int, choice: Choice | None, wanted: Wanted | None = None
) -> bytes:
    """The chosen columns of ``count`` items of equal size, ``width`` to a block; of these the ``wanted``."""
    if choice is None and wanted is None:
        return items
    array = np.frombuffer(items, np.uint8).reshape(count // width, width, -1)
    chosen = array if choice is None else array[:, choice]
    return (chosen if wanted is None else chosen.reshape(len(wanted), -1)[wanted]).tobytes()
