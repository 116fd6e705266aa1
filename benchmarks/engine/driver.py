"""A real vLLM engine in one process, stepped by hand, told by JSON lines what to do.

    python -m benchmarks.engine.driver FD CONFIG_JSON

FD is a socket; {"do": name, ...arguments} in, the result of Driver.<name> out. CONFIG_JSON are arguments of
vllm.LLM.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Any

from benchmarks.processes import serve

DEFAULTS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 4096,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 4096,
    "block_size": 32,
    "kv_cache_memory_bytes": 256 << 20,
    "enforce_eager": True,
    "seed": 0,
    "disable_log_stats": True,
}
WARM_UP_STEPS = 20
PARTS = ("schedule", "update_from_output", "hooks")
DRAIN_TIMEOUT_S = 30.0


class Stopwatch:
    """Time spent in what it wraps, less what a wrapped function that does nothing would have taken."""

    def __init__(self, own_s: float = 0.0) -> None:
        self.own_s = own_s
        self.spent_s = 0.0
        self.seen = False

    def call(self, function: Callable[..., Any]) -> Callable[..., Any]:
        clock = time.perf_counter

        def timed(*args: Any, **kwargs: Any) -> Any:
            start_s = clock()
            result = function(*args, **kwargs)
            self.spent_s += clock() - start_s - self.own_s
            self.seen = True
            return result

        return timed

    def take_us(self) -> float:
        spent_us, self.spent_s = self.spent_s * 1e6, 0.0
        return spent_us


def stopwatch_s(make: type[Stopwatch] = Stopwatch) -> float:
    """What a Stopwatch sees of a function that does nothing, in seconds."""
    watch = make()
    nothing = watch.call(lambda argument: None)
    samples_us = []
    for _ in range(2000):
        nothing(None)
        samples_us.append(watch.take_us())
    return statistics.median(samples_us) / 1e6


class TimedManager(AbstractContextManager[Any]):
    """Entering and leaving another context manager is timed, its body is not."""

    def __init__(self, inner: AbstractContextManager[Any], watch: Stopwatch) -> None:
        self.enter = watch.call(inner.__enter__)
        self.leave = watch.call(inner.__exit__)

    def __enter__(self) -> Any:
        return self.enter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        left: bool | None = self.leave(kind, error, trace)
        return left


class Driver:
    def __init__(self, config: dict[str, Any]) -> None:
        from vllm import LLM, SamplingParams

        self.make_sampling = SamplingParams
        self.llm = LLM(**{**DEFAULTS, **config})
        self.engine: Any = self.llm.llm_engine
        self.core: Any = self.engine.engine_core.engine_core
        self.scheduler: Any = self.core.scheduler
        self.next_id = 0

    def begin_decoding(self, requests: int, steps: int) -> None:
        """Starts a run of at least ``steps`` decode steps: ``requests`` side by side, their prompts shorter
        than a block, so that there is nothing to look up, to load or to save.
        """
        own_s = stopwatch_s()
        self.watches = {name: Stopwatch(own_s) for name in PARTS}
        self.decoding = [
            self._add([position + 1] * 20, WARM_UP_STEPS + steps + 8) for position in range(requests)
        ]
        for _ in range(WARM_UP_STEPS):
            self.engine.step()
        self.unwatch = self._watch(self.watches)

    def decode(self, steps: int) -> list[list[float]]:
        """Microseconds of each step in schedule(), in update_from_output() and in the connector's other
        hooks. The first two steps after a pause are not among them.
        """
        rows = []
        for _ in range(steps + 2):
            self.engine.step()
            rows.append([watch.take_us() for watch in self.watches.values()])
        return rows[2:]

    def end_decoding(self) -> None:
        """Aborts what still decodes. Raises RuntimeError when a connector's hooks were never seen."""
        self.unwatch()
        self.engine.abort_request(self.decoding)
        self._drain()
        if self.scheduler.connector is not None and not self.watches["hooks"].seen:
            raise RuntimeError("this vLLM calls the connector's hooks elsewhere: they were not timed")

    def _watch(self, watches: dict[str, Stopwatch]) -> Callable[[], None]:
        """Wraps what is to be timed; the result unwraps it."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
        from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin as Mixin

        hooks = watches["hooks"]
        wrapped: list[tuple[Any, str]] = []

        def wrap(target: Any, name: str, watch: Stopwatch) -> None:
            setattr(target, name, watch.call(getattr(target, name)))
            wrapped.append((target, name))

        wrap(self.scheduler, "schedule", watches["schedule"])
        wrap(self.scheduler, "update_from_output", watches["update_from_output"])
        manager = Mixin._get_kv_connector_output
        if has_kv_transfer_group():
            for name in ("has_pending_push_work", "has_pending_block_frees"):
                wrap(self.scheduler.connector, name, hooks)
            for name in ("handle_preemptions", "wait_for_layer_load", "save_kv_layer"):
                wrap(get_kv_transfer_group(), name, hooks)

            def timed_manager(*args: Any, **kwargs: Any) -> TimedManager:
                return TimedManager(manager(*args, **kwargs), hooks)

            Mixin._get_kv_connector_output = staticmethod(timed_manager)

        def undo() -> None:
            for target, name in wrapped:
                delattr(target, name)
            Mixin._get_kv_connector_output = staticmethod(manager)

        return undo

    def first_token(self, prompt: list[int]) -> dict[str, Any]:
        """Runs one prompt up to its first token. first_s: time to it; cached: prompt tokens not computed."""
        started_s = time.perf_counter()
        self._add(prompt, 1)
        while True:
            for output in self.engine.step():
                if output.outputs[0].token_ids:
                    first_s = time.perf_counter() - started_s
                    self._drain()
                    return {
                        "first_s": first_s,
                        "token": output.outputs[0].token_ids[0],
                        "cached": output.num_cached_tokens,
                    }

    def save(self, prompts: list[list[int]]) -> int:
        """Computes each prompt and returns when the connector has saved what it saves of them."""
        for prompt in prompts:
            self.first_token(prompt)
        return len(prompts)

    def prefill(self, prompt: list[int]) -> dict[str, Any]:
        """Computes a prompt for a decode engine. Its kv_transfer_params; the blocks stay held."""
        self._add(prompt, 1, {"do_remote_decode": True, "do_remote_prefill": False})
        while True:
            for output in self.engine.step():
                if output.finished:
                    return dict(output.kv_transfer_params)

    def give(self) -> float:
        """Steps as vLLM's own loop does until nothing is held for a decode engine. CPU seconds."""
        cpu_s = time.process_time()
        deadline_s = time.monotonic() + DRAIN_TIMEOUT_S
        while self.scheduler.has_requests():
            self._step()
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"blocks are still held {DRAIN_TIMEOUT_S:g} s after the hand-over")
        return time.process_time() - cpu_s

    def take_over(self, prompt: list[int], params: dict[str, Any], tokens: int) -> dict[str, Any]:
        """Runs a prompt whose KV a prefill engine has. handover_s, cpu_s: from the request's arrival until
        the scheduler knows that its KV is here; tokens_here: of how many tokens.
        """
        seen: list[tuple[float, float, int]] = []
        noted = self.scheduler._update_from_kv_xfer_finished

        def note(output: Any) -> None:
            noted(output)
            if output.finished_recving:
                (request_id,) = output.finished_recving
                here = (
                    0 if output.invalid_block_ids else self.scheduler.requests[request_id].num_computed_tokens
                )
                seen.append((time.perf_counter(), time.process_time(), here))

        self.scheduler._update_from_kv_xfer_finished = note
        started_s, cpu_s = time.perf_counter(), time.process_time()
        self._add(prompt, tokens, params)
        try:
            while True:
                for output in self._step():
                    if output.finished:
                        if not seen:
                            raise RuntimeError("nothing was handed over")
                        self._drain()
                        return {
                            "handover_s": seen[0][0] - started_s,
                            "cpu_s": seen[0][1] - cpu_s,
                            "tokens": list(output.outputs[0].token_ids),
                            "tokens_here": seen[0][2],
                        }
        finally:
            del self.scheduler._update_from_kv_xfer_finished

    def _step(self) -> list[Any]:
        """A step, and the pause that vLLM's own loop makes after one that ran nothing."""
        outputs: list[Any] = self.engine.step()
        if not outputs and self.scheduler.has_requests():
            time.sleep(0.001)
        return outputs

    def _add(self, prompt: list[int], tokens: int, params: dict[str, Any] | None = None, **more: Any) -> str:
        """more: arguments of SamplingParams."""
        extra = None if params is None else {"kv_transfer_params": params}
        sampling = self.make_sampling(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, extra_args=extra, **more
        )
        self.next_id += 1
        request_id = f"r{self.next_id}"
        self.engine.add_request(request_id, {"prompt_token_ids": prompt}, sampling)
        return request_id

    def _drain(self) -> None:
        """Steps until the connector has nothing under way."""
        deadline_s = time.monotonic() + DRAIN_TIMEOUT_S
        while self.scheduler.has_requests():
            self.core.step()
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"the engine is still busy {DRAIN_TIMEOUT_S:g} s after the last request")


def main(make: Callable[[dict[str, Any]], Driver] = Driver) -> None:
    """make: the driver, of CONFIG_JSON."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    descriptor, config = sys.argv[1:]
    with ExitStack() as stack:

        def start() -> tuple[object, Callable[[Any], object]]:
            driver = make(json.loads(config))
            stack.callback(driver.core.shutdown)
            return {"ready": True}, lambda request: getattr(driver, request.pop("do"))(**request)

        serve(descriptor, start)


if __name__ == "__main__":
    main()
