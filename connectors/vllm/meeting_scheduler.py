"""The class for ``--scheduler-cls moonpool.connectors.vllm.meeting_scheduler.Scheduler``: vLLM's own, whose
requests may compute the front of a hit while the connector loads its back (meetings.py).

A connector alone cannot do that: its answer is a prefix, for which the request waits. So it answers that
nothing is to be loaded, and this class adds four things to vLLM's:

- the first step of such a request makes room for the whole hit, so that there are blocks to load into;
- a chunk of it ends where the loads begin, also with 0 tokens, which makes vLLM skip the request in a step;
- before a step, a request whose front has reached loaded blocks goes on behind them: vLLM tells its workers
  with each step how many tokens of a request are computed, and they take the number as it is. Model runner V2
  counts by itself: it is given the request once more, as one that comes with so many tokens, which replaces
  what it has of it;
- loaded blocks get their names in vLLM's prefix cache with the first step behind them, and not before.

Everything else, and every request without such a hit, is vLLM's own.
"""

from __future__ import annotations

from typing import Any

from moonpool.connectors.vllm import compat

# Of vLLM's scheduler, which this one extends.
HOOKS = ("schedule", "_reserve_prefill_lookahead", "_build_kv_connector_meta")


def Scheduler(*args: Any, **kwargs: Any) -> Any:  # noqa: N802 - what vLLM calls is a class by its name
    """The scheduler of an engine; arguments as of vLLM's."""
    vllm_config = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
    return scheduler_class(compat.scheduler_base(vllm_config))(*args, **kwargs)


def scheduler_class(base: Any) -> Any:
    """vLLM's scheduler class ``base``, extended."""

    class MeetingScheduler(base):  # type: ignore[misc] # vLLM's, known when the engine starts
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._meetings: Any = None
            self._moved: dict[str, Any] = {}  # requests that a worker must be given once more
            allow = getattr(self.connector, "allow_meetings", None)
            if allow is None:
                compat.logger("scheduler").warning(
                    "moonpool: the scheduler class is without effect: Mooncake (or Moonpool) is not the "
                    "engine's kv_connector, or stands behind another one"
                )
                return
            self._meetings = allow(refusal(self, base))
            if self._meetings is not None:
                self._allocate_slots = self.kv_cache_manager.allocate_slots
                self.kv_cache_manager.allocate_slots = self._allocate

        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            if self._meetings is not None and self._meetings.busy:
                for request, _ in self.connector.before_schedule():
                    if self.use_v2_model_runner:
                        self._moved[request.request_id] = request
            return super().schedule(*args, **kwargs)

        def _build_kv_connector_meta(self, connector: Any, output: Any) -> Any:
            if self._moved:
                give_again(self, output, self._moved)
            return super()._build_kv_connector_meta(connector, output)

        def _reserve_prefill_lookahead(self, request: Any, computed: int, wanted: int) -> int:
            wanted = super()._reserve_prefill_lookahead(request, computed, wanted)
            if self._meetings is not None and self._meetings.busy:
                return int(self.connector.chunk_tokens(request, computed, wanted))
            return int(wanted)

        def _allocate(self, request: Any, num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
            """In the first step of a meeting: room for the whole hit, of which only the chunk is named.
            Without that room the request waits, as it would for a load, or computes the hit."""
            if not self._meetings.busy:  # nearly all calls, and each decoding request's in each step
                return self._allocate_slots(request, num_new_tokens, *args, **kwargs)
            placed = self.connector.tokens_to_place(request)
            computed = request.num_computed_tokens + kwargs.get("num_new_computed_tokens", 0)
            elsewhere = args or kwargs.get("num_external_computed_tokens") or kwargs.get("delay_cache_blocks")
            if placed - computed > num_new_tokens and not elsewhere:
                whole = {**kwargs, "delay_cache_blocks": True}
                blocks = self._allocate_slots(request, placed - computed, **whole)
                if blocks is not None:
                    self.kv_cache_manager.cache_blocks(
                        request, min(computed + num_new_tokens, request.num_tokens)
                    )
                    return blocks
                if self.connector.waits_for_room(request):
                    return None
            return self._allocate_slots(request, num_new_tokens, *args, **kwargs)

    return MeetingScheduler


def refusal(scheduler: Any, base: Any) -> str:
    """Why this engine cannot compute the front of a hit while its back is loaded; "": it can."""
    parallel = scheduler.parallel_config
    if missing := [name for name in HOOKS if not hasattr(base, name)]:
        return f"this vLLM's scheduler has no {missing[0]}"
    if getattr(scheduler.vllm_config, "diffusion_config", None) is not None:
        return "its model is a diffusion model"
    if scheduler.vllm_config.speculative_config is not None:
        return "the engine speculates"
    if parallel.pipeline_parallel_size > 1:
        return "the engine is a pipeline"
    if max(scheduler.dcp_world_size, scheduler.pcp_world_size) > 1:
        return "the engine splits the context"
    if getattr(scheduler, "needs_kv_cache_zeroing", False):
        return "its model needs new blocks to be zeroed"
    if not scheduler.scheduler_config.enable_chunked_prefill:
        return "chunked prefill is off"
    return ""


def give_again(scheduler: Any, output: Any, moved: dict[str, Any]) -> None:
    """Requests that were moved are new ones in the step that schedules them next, with all of their blocks
    and the number of tokens that are computed.

    moved: by their ids; those that are given again, or are over, are taken out. So is what vLLM itself gives
    again: a request that was preempted after it had been moved.
    """
    for new in output.scheduled_new_reqs:
        moved.pop(new.req_id, None)
    cached = output.scheduled_cached_reqs
    for request_id, request in list(moved.items()):
        if request_id in cached.req_ids:
            place = cached.req_ids.index(request_id)
            columns = (
                "req_ids",
                "new_token_ids",
                "new_block_ids",
                "num_computed_tokens",
                "num_output_tokens",
            )
            for column in (getattr(cached, name) for name in columns):
                if column:
                    del column[place]
            blocks = scheduler.kv_cache_manager.get_blocks(request_id).get_block_ids()
            output.scheduled_new_reqs.append(compat.new_request_data(scheduler, request, blocks))
            del moved[request_id]
        elif scheduler.requests.get(request_id) is not request or request.status.name != "RUNNING":
            del moved[request_id]
