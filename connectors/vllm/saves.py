"""Which blocks are saved when, and the references on them until then. Runs on the thread of the
scheduler's half.

A block is saved with the step in which it becomes full. From then on it carries one more reference in the
engine's block pool, so that it outlives the request, its preemption and its abort, until every rank is done
with it:

    tracked ----a step fills blocks----> held (a job, one reference per block) ----all ranks report----> free

A block of several parts (group_blocks.py) is full when all of them are.

A block that a sliding window has passed before it is saved is not saved: the engine has it no more. Of layers
with states the snapshots that the step leaves are saved, and no other block (states.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from moonpool.connectors.vllm import compat
from moonpool.connectors.vllm.engine_config import EngineConfig
from moonpool.connectors.vllm.engine_types import Block, BlockPool, BlockTables, Request, SchedulerOutput
from moonpool.connectors.vllm.group_blocks import by_part
from moonpool.connectors.vllm.messages import Save
from moonpool.connectors.vllm.metrics import Tally
from moonpool.connectors.vllm.reach import NULL_BLOCK
from moonpool.connectors.vllm.repeats import Repeats, times
from moonpool.connectors.vllm.requests import Phase, RequestState
from moonpool.connectors.vllm.states import snapshots
from moonpool.connectors.vllm.step_progress import step_progress

HELD_BLOCKS_SHARE = 4  # at most a quarter of the engine's blocks wait to be saved


class Saves:
    """Which blocks are saved when, and the references on them until then."""

    def __init__(
        self,
        engine_config: EngineConfig,
        *,
        save_decode: bool,
        tally: Tally,
        log: logging.Logger,
        clock: Callable[[], float],
    ) -> None:
        self._engine_config = engine_config
        self._save_decode = save_decode
        self._tally = tally
        self._log = log
        self._repeats = Repeats(clock)
        self._blocks: BlockPool | None = None
        self._tables: BlockTables | None = None
        self.tracked: dict[str, tuple[RequestState, Request]] = {}  # requests that may have blocks to save
        self._held: dict[int, tuple[list[Block], int]] = {}
        self._held_blocks = 0
        self._next_job = 1
        self._planned: list[Save] = []

    def bind(self, blocks: BlockPool) -> None:
        """The engine's blocks; without them nothing is saved, because nothing could be held."""
        self._blocks = blocks

    def bind_tables(self, tables: BlockTables) -> None:
        """The blocks of each request; without them an engine with sliding windows or states saves
        nothing."""
        self._tables = tables

    @property
    def under_way(self) -> int:
        """Jobs that some rank is not done with."""
        return len(self._held)

    def frees_soon(self) -> bool:
        """Whether a block is kept by nothing but its save."""
        return any(block.ref_cnt == 1 for blocks, _ in self._held.values() for block in blocks)

    def savable_tokens(self, request: Request) -> Sequence[int]:
        """The tokens whose blocks are named and saved: the prompt's, or also those of the answer so far."""
        tokens = request.all_token_ids if self._save_decode else request.prompt_token_ids
        assert tokens is not None
        return tokens

    def track(self, state: RequestState, request: Request, *, handed_over: bool = False) -> None:
        """Saves full blocks of the request from ``state.saved`` on.

        handed_over: whether another engine computed its prompt, so that no other engine stores its answer for
            the next turn.
        """
        if not (self._engine_config.may_save or handed_over) or self._blocks is None:
            return
        if self._engine_config.has_windows and self._tables is None:
            if self._repeats.due("tables"):
                self._log.warning(
                    "moonpool: nothing is saved: this vLLM does not tell the connector which blocks a "
                    "request still has (bind_kv_cache_manager)"
                )
            return
        state.saves_answer = self._save_decode or handed_over
        if state.saved < state.chain.blocks or state.saves_answer:
            self.tracked[state.request_id] = (state, request)

    def forget(self, request_id: str) -> None:
        """The request is over; blocks held for its saves stay held."""
        self.tracked.pop(request_id, None)

    def plan(self, output: SchedulerOutput) -> tuple[Save, ...]:
        """The saves of the step that ``output`` describes. They can be given up until ``told``."""
        for request_id, computed in step_progress(output, self._state):
            self._plan_request(request_id, computed, output)
        return tuple(self._planned)

    def told(self) -> None:
        """The step with the planned saves goes to the workers, which will report its end."""
        self._planned = []

    def give_up(self) -> None:
        """The step could not be planned: releases its blocks; requests that run now are saved no more."""
        self.tracked.clear()
        planned, self._planned = self._planned, []
        for save in planned:
            self.ended(save.job_id, self._engine_config.workers)

    def ended(self, job_id: int, ranks: int) -> bool:
        """``ranks`` more ranks are done with a job; the last one releases its blocks. Returns whether any of
        them is free then, without another holder."""
        held = self._held.get(job_id)
        if held is None:
            return False
        blocks, left = held[0], held[1] - ranks
        if left > 0:
            self._held[job_id] = (blocks, left)
            return False
        assert self._blocks is not None
        del self._held[job_id]
        self._held_blocks -= len(blocks)
        self._blocks.free_blocks(reversed(blocks))  # the end of a prefix is evicted before its beginning
        return any(block.ref_cnt == 0 for block in blocks)

    def all_ended(self) -> None:
        """No rank reads a block any more: releases all that are held."""
        for job_id in list(self._held):
            self.ended(job_id, self._engine_config.workers)

    def _state(self, request_id: str) -> RequestState | None:
        tracked = self.tracked.get(request_id)
        return None if tracked is None else tracked[0]

    def _plan_request(self, request_id: str, computed: int, output: SchedulerOutput) -> None:
        """Plans the blocks of this request that are full when the step ends with ``computed`` tokens."""
        state, request = self.tracked[request_id]
        if state.phase is Phase.COVERED:
            return  # its blocks are saved with a later step, without those that the pool has
        if state.saves_answer:
            state.chain.extend(request.all_token_ids)
        full = min(computed // self._engine_config.block_tokens, state.chain.blocks)
        if full > state.saved and not self._hold(
            state, state.saved, full, self._block_ids(state, computed, output)
        ):
            self._leave_out(state.chain.blocks - state.saved)
            del self.tracked[request_id]  # blocks behind a gap would never be found
            return
        state.saved = max(full, state.saved)
        if state.saved >= state.chain.blocks and not state.saves_answer:
            del self.tracked[request_id]

    def _leave_out(self, count: int) -> None:
        self._tally.add("unsaved_blocks", count)
        if often := self._repeats.due("held"):
            assert self._blocks is not None
            self._log.warning(
                "moonpool: the last %d blocks of a prompt are not saved: %d of the engine's %d blocks wait "
                "to be saved already, and %d may; a larger KV cache holds more%s",
                count,
                self._held_blocks,
                len(self._blocks.blocks),
                self._held_max(),
                times(often),
            )

    def _held_max(self) -> int:
        assert self._blocks is not None
        return max(len(self._blocks.blocks) // HELD_BLOCKS_SHARE, 1)

    def _block_ids(
        self, state: RequestState, computed: int, output: SchedulerOutput
    ) -> Sequence[Sequence[int]]:
        """The blocks of the request when the step ends with ``computed`` tokens, by KV cache group."""
        if not self._engine_config.has_windows:
            return state.block_ids
        assert self._tables is not None
        block_ids = self._tables.get_block_ids(state.request_id)
        if not self._engine_config.has_states:
            return block_ids
        scheduled, block_tokens = (
            output.num_scheduled_tokens[state.request_id],
            self._engine_config.block_tokens,
        )
        told = compat.snapshots_of(output, state.request_id)
        return [
            snapshots(ids, computed, scheduled, block_tokens, told.get(group, {})) if reach.state else ids
            for group, (ids, reach) in enumerate(zip(block_ids, self._engine_config.reaches, strict=True))
        ]

    def _hold(self, state: RequestState, first: int, last: int, by_group: Sequence[Sequence[int]]) -> bool:
        """Plans one save of the blocks [first, last). False when too many blocks are held already.

        by_group: all blocks of the request, by KV cache group.
        """
        assert self._blocks is not None
        block_ids = by_part(by_group, self._engine_config.splits, first, last)
        null = NULL_BLOCK if self._engine_config.has_windows else None
        blocks = [self._blocks.blocks[block_id] for ids in block_ids for block_id in ids if block_id != null]
        if not blocks:
            return True
        if self._held_blocks + len(blocks) > self._held_max():
            return False
        save = Save(
            job_id=self._next_job,
            width=state.chain.width,
            names=state.chain.names(first, last),
            parents=state.chain.parents(first, last),
            block_ids=block_ids,
            adapter=state.adapter,
            keep_s=state.switches.keep_s,
        )
        self._next_job += 1
        self._blocks.touch(blocks)
        self._held[save.job_id] = (blocks, self._engine_config.workers)
        self._held_blocks += len(blocks)
        self._planned.append(save)
        return True
