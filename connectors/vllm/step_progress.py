"""Which tracked requests a step computes, how far, and in which blocks. vLLM passes all blocks of a request
in its first step and after a preemption, and only added blocks in other steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from moonpool.connectors.vllm.engine_types import SchedulerOutput


class Tracked(Protocol):
    """A request whose blocks are followed.

    block_ids: one list per KV cache group.
    """

    block_ids: list[list[int]]


def step_progress(
    output: SchedulerOutput, find: Callable[[str], Tracked | None]
) -> Iterator[tuple[str, int]]:
    """(request, its tokens that are computed when the step ends) for each request of the step.

    find: the state of a request, or None for one that is not tracked; its ``block_ids`` are brought up to
        date.
    """
    scheduled = output.num_scheduled_tokens
    for new in output.scheduled_new_reqs:
        tracked = find(new.req_id)
        if tracked is not None:
            tracked.block_ids = [list(ids) for ids in new.block_ids]
            yield new.req_id, new.num_computed_tokens + scheduled[new.req_id]
    cached = output.scheduled_cached_reqs
    for index, request_id in enumerate(cached.req_ids):
        tracked = find(request_id)
        if tracked is None:
            continue
        fresh = cached.new_block_ids[index]
        if fresh is not None and request_id in cached.resumed_req_ids:
            tracked.block_ids = [list(ids) for ids in fresh]
        elif fresh is not None:
            for known, more in zip(tracked.block_ids, fresh, strict=True):
                known.extend(more)
        yield request_id, cached.num_computed_tokens[index] + scheduled[request_id]
