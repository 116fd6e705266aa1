"""A real vLLM engine in a process of its own, driven line by line: JSON commands in, JSON answers out.

Run by tests with the interpreter that has vLLM: ``engine_driver.py ANSWER_FD CONFIG_JSON``. vLLM writes to
stdout as it likes, so the answers go to a descriptor of their own. The engine runs in this process (no HTTP,
no children) and is stepped by hand, which lets a test act between two steps.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

sys.path.append(str(Path(__file__).resolve().parents[3]))
from tests.connectors.vllm import media_models
from tests.connectors.vllm.schedule_ahead import schedule_ahead

DEFAULTS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 4096,
    "max_num_seqs": 8,
    "block_size": 32,
    "enforce_eager": True,
    "seed": 0,
    "disable_log_stats": False,
}


LABELS = ("source", "reason", "switch")  # that tell samples of one name apart


class Driver:
    def __init__(self, config: dict[str, Any]) -> None:
        media_models.prepare(config["model"])
        if config.pop("schedule_ahead", False):
            schedule_ahead()
        self.llm = LLM(**DEFAULTS | config)
        self.engine = self.llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        if config.get("pipeline_parallel_size", 1) > 1:
            # In eager mode vLLM makes the buffers between stages in such a run only, and not on a CPU.
            self.core.model_executor.collective_rpc("execute_dummy_batch")
        self.next_id = 0
        self.preemptions = 0
        self.preempted_gives = 0  # of these, how many another engine waits for
        self.go_on: threading.Event | None = None
        original = self.scheduler._preempt_request

        def counted(request: Any, *args: Any, **kwargs: Any) -> None:
            self.preemptions += 1
            self.preempted_gives += bool((request.kv_transfer_params or {}).get("do_remote_decode"))
            original(request, *args, **kwargs)

        self.scheduler._preempt_request = counted

    def generate(
        self,
        prompts: list[Any],
        max_tokens: int | list[int] = 8,
        abort: list[int] | None = None,
        abort_when: str = "",
        salt: str | None = None,
        params: list[dict[str, Any] | None] | None = None,
        adapter: list[Any] | None = None,
        chances: bool = False,
        preempt_when: str = "",
    ) -> dict[str, Any]:
        """Runs all prompts together. prompts: what media_models.request takes; max_tokens: of all, or of
        each; params: kv_transfer_params of each; adapter: name, number and path of the LoRA adapter of all.
        chances: whether to tell the log-probability of each token.
        abort: positions of the prompts to abort, ``abort_when`` they first are "looking" (before the first
        step), "loading" (waiting for a load), "half" (some of it has come; see ``hold_reads``), "loaded" (all
        of it, and no step since), "meeting" (its front is computed and its back is being loaded), "met" (it
        went on behind some of the back, and more is being loaded) or "running" (after the first token).
        preempt_when: the first prompt is preempted once in that stage, as for room."""
        ids = {}
        lengths = max_tokens if isinstance(max_tokens, list) else [max_tokens] * len(prompts)
        for position, prompt in enumerate(prompts):
            request_id = f"r{self.next_id}"
            self.next_id += 1
            ids[request_id] = position
            request = media_models.request(prompt)
            if salt is not None:
                request["cache_salt"] = salt
            extra = {"kv_transfer_params": params[position]} if params and params[position] else None
            self.engine.add_request(
                request_id,
                request,
                SamplingParams(
                    temperature=0.0,
                    max_tokens=lengths[position],
                    ignore_eos=True,
                    extra_args=extra,
                    logprobs=1 if chances else None,
                ),
                lora_request=LoRARequest(*adapter) if adapter else None,
            )
        doomed = {request_id for request_id, position in ids.items() if position in (abort or [])}
        outputs: dict[int, dict[str, Any]] = {}
        started_s = time.monotonic()
        first_s: dict[int, float] = {}
        if abort_when == "looking":
            self.engine.abort_request(list(doomed))
        preemptions, preempted_gives = self.preemptions, self.preempted_gives
        while self.engine.has_unfinished_requests():
            if doomed and abort_when != "looking":
                hit = {request for request in doomed if self._is(request, abort_when)}
                if hit:
                    self.engine.abort_request(list(hit))
                    doomed -= hit
                    if self.go_on is not None:
                        self.go_on.set()
            if preempt_when and self._is(next(iter(ids)), preempt_when):
                preempt_when = ""
                self._preempt(next(iter(ids)))
            for output in self.engine.step():
                position = ids.get(output.request_id, -1)
                if output.outputs[0].token_ids and position not in first_s:
                    first_s[position] = time.monotonic() - started_s
                if output.finished:
                    tokens = list(output.outputs[0].token_ids)
                    steps = output.outputs[0].logprobs or ()
                    outputs[position] = {
                        "tokens": tokens,
                        "chances": [step[token].logprob for token, step in zip(tokens, steps, strict=False)],
                        "pool": (output.kv_transfer_params or {}).get("moonpool"),
                        "params": output.kv_transfer_params,
                        "cached": output.num_cached_tokens,
                        "reason": output.outputs[0].finish_reason,
                    }
        return {
            "outputs": [outputs.get(position) for position in range(len(prompts))],
            "first_s": [first_s.get(position) for position in range(len(prompts))],
            "preemptions": self.preemptions - preemptions,
            "preempted_gives": self.preempted_gives - preempted_gives,
            "ended_s": time.monotonic(),
        }

    def load_adapter(self, name: str, number: int, path: str, inplace: bool = False) -> bool:
        """As a server does when it is told to."""
        return bool(self.engine.add_lora(LoRARequest(name, number, path, load_inplace=inplace)))

    def drop_adapter(self, number: int) -> bool:
        return bool(self.engine.remove_lora(number))

    def call_workers(self, method: str, **kwargs: Any) -> None:
        """As a program that replaces weights does."""
        self.llm.collective_rpc(method, kwargs=kwargs)

    def give_model(self, path: str) -> None:
        """As a trainer in the engine's process does: the weights of ``path``, and no call of the engine."""
        from safetensors.torch import load_file

        runner = self.core.model_executor.driver_worker.model_runner
        runner.reload_weights(load_file(f"{path}/model.safetensors").items())

    def sleep_and_wake(self, level: int) -> None:
        self.llm.sleep(level)
        self.llm.wake_up()

    def _is(self, external_id: str, stage: str) -> bool:
        for request_id, request in self.scheduler.requests.items():
            if request_id == external_id or request_id.startswith(external_id + "-"):
                if stage in ("meeting", "met"):
                    meeting = self._half().meetings._meetings.get(request_id)
                    if meeting is None or not meeting.flying or not request.num_computed_tokens:
                        return False
                    return stage == "meeting" or bool(meeting.loaded)
                if stage != "running":
                    if request.status.name != "WAITING_FOR_REMOTE_KVS":
                        return False
                    if stage == "half":
                        return self._has_come(request_id) > 0
                    return stage == "loading" or request_id in self.scheduler.finished_recving_kv_req_ids
                return request.status.name == "RUNNING" and request.num_output_tokens > 0
        return False

    def _preempt(self, external_id: str) -> None:
        """As vLLM does for room."""
        request = next(one for one in self.scheduler.running if one.request_id.startswith(external_id))
        self.scheduler.running.remove(request)
        self.scheduler._preempt_request(request, time.monotonic())

    def runs(self) -> list[bool]:
        """Whether model runner V2 runs, and whether a step is planned before the last one has ended."""
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler

        ahead = self.core.batch_queue is not None and isinstance(self.scheduler, AsyncScheduler)
        return [bool(self.scheduler.use_v2_model_runner), ahead]

    def shape_loads(self, per_second: float, break_from: int = 0) -> None:
        """From now on loads are as slow as through a link of so many bytes per second; 0: as fast as they
        are. break_from: see Link."""
        from benchmarks.engine.shaped import Link

        self.link = Link(per_second, break_from=break_from) if per_second else Link.take_down()

    def measure_prefill(self, per_second: float) -> None:
        """From now on prefill was measured at so many tokens per second."""
        from moonpool.connectors.vllm.load_decision import STEPS_MAX, STEPS_MIN, Rate

        rate = Rate(STEPS_MIN, STEPS_MAX)
        for _ in range(STEPS_MAX):
            rate.add(1024, 1024 / per_second)
        self.scheduler.connector._sched._decision._prefill = rate

    def _has_come(self, request_id: str) -> int:
        """How many blocks of a hand-over to this request are here."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        take = get_kv_transfer_group()._worker._handover_worker._consumer._requests.get(request_id)
        return min(part.good for part in take.parts.values()) if take is not None and take.parts else 0

    def hold_reads(self) -> None:
        """From the second piece of a hand-over on, reading waits until a request was aborted, once."""
        from moonpool.core.transfer.engine import TransferEngine

        original = TransferEngine.transfer
        self.go_on = go_on = threading.Event()
        pieces = 0

        def held(engine: Any, *args: Any, **kwargs: Any) -> int:
            nonlocal pieces
            pieces += 1
            if pieces > 1:
                TransferEngine.transfer = original
                go_on.wait(30)
            return int(original(engine, *args, **kwargs))

        TransferEngine.transfer = held

    def drain(self, timeout_s: float = 10.0) -> dict[str, Any]:
        """Steps until nothing is pending. Tells what is left: blocks in use, pins, requests."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s and self.scheduler.has_requests():
            self.engine.step()
            self.core.step_fn()
            time.sleep(0.001)
        pool = self.scheduler.kv_cache_manager.block_pool
        half = self._half()
        return {
            "used_blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
            "requests": len(self.scheduler.requests),
            "pins": half.lookups.pins if half else 0,
            "saves": half.saves.under_way if half else 0,
            "lookups": half.lookups.under_way if half else 0,
            "leases": len(half.handover.producer.leases) if half and half.handover.producer else 0,
        }

    def serve_neighbours(self, asks: int, timeout_s: float = 60.0) -> dict[str, Any]:
        """Steps until so many asks of other engines are answered, and nothing is left of them."""
        offers = self._half().handover.producer.neighbours
        until, deadline_s = offers.answered + asks, time.monotonic() + timeout_s
        while time.monotonic() < deadline_s and offers.answered < until:
            self.engine.step()
            time.sleep(0.001)
        return self.drain(max(deadline_s - time.monotonic(), 1.0))

    def claim_evicted(self) -> None:
        """From now on, once, blocks are offered whose lease has ended on the workers."""
        offers = self._half().handover.producer.neighbours
        confirmed = offers.confirmed

        def late(lease_ids: set[int]) -> None:
            if not offers._opened.keys() & lease_ids:
                return confirmed(lease_ids)
            offers.confirmed = confirmed
            for _, lease, _ in list(offers._opened.values()):
                offers._producer.end_cached(lease, "a test takes its blocks away")
            self.core.step()
            confirmed(lease_ids)

        offers.confirmed = late

    def metrics(self) -> dict[str, float]:
        """What /metrics would say, of the connector and of caches: name (and label) -> value."""
        from prometheus_client import REGISTRY

        return {
            " ".join(
                [sample.name, *filter(None, map(sample.labels.get, ("source", "reason", "switch")))]
            ): sample.value
            for family in REGISTRY.collect()
            for sample in family.samples
            if ("moonpool" in sample.name or "cache" in sample.name) and "le" not in sample.labels
        }

    def reset_prefix_cache(self) -> bool:
        return bool(self.llm.reset_prefix_cache())

    def measure_loads(self, per_second: float) -> None:
        """From now on loads from memory were measured at so many bytes per second, as often as is kept."""
        from moonpool.connectors.vllm.load_decision import LOADS_MAX, Probes, Tier

        decision = self.scheduler.connector._sched._decision
        decision._memory, decision._load_probes = Tier(), Probes(time.monotonic)
        for _ in range(LOADS_MAX):
            decision._memory.add(1 << 20, (1 << 20) / per_second)

    def load_rate(self) -> float:
        """Of loads from memory, bytes per second."""
        return float(self.scheduler.connector._sched._decision._memory.per_second(1 << 20) or 0.0)

    def break_loads(self, broken: bool = True) -> None:
        """From now on every load asks for another life of the node, as after its restart."""
        from moonpool.connectors.vllm.pool import Pool

        if not hasattr(Pool, "true_submit_load"):
            Pool.true_submit_load = Pool.submit_load

        def submit_load(pool: Any, holders: bytes, *rest: Any) -> Any:
            return pool.true_submit_load(bytes(16) if broken else holders, *rest)

        Pool.submit_load = submit_load

    def fail_requests(self, failing: bool) -> None:
        """What kv_load_failure_policy says: fail, or recompute."""
        self.scheduler.recompute_kv_load_failures = not failing

    def kill_at(self, operation: str, pid: int) -> None:
        """Kills the process ``pid`` right before the next submit_load or submit_save, once."""
        from moonpool.connectors.vllm.pool import Pool

        original = getattr(Pool, operation)

        def killing(pool: Any, *args: Any) -> Any:
            setattr(Pool, operation, original)
            os.kill(pid, signal.SIGKILL)
            return original(pool, *args)

        setattr(Pool, operation, killing)

    def events_published(self, timeout_s: float = 10.0) -> int:
        """The number of the last batch of KV events, once all of them are sent; -1: none."""
        publisher = self.scheduler.kv_event_publisher
        deadline_s = time.monotonic() + timeout_s
        while publisher._event_queue.unfinished_tasks and time.monotonic() < deadline_s:
            time.sleep(0.001)
        return int(publisher._buffer[-1][0]) if publisher._buffer else -1

    def kill_at_read(self, pid: int, after: bool) -> None:
        """Kills the process ``pid`` (0: this one) at the next piece that is handed over, once: before its
        bytes are read, or between reading them and looking whether they were valid."""
        from moonpool.core.transfer.engine import TransferEngine

        original = TransferEngine.transfer

        def killing(engine: Any, *args: Any, **kwargs: Any) -> int:
            TransferEngine.transfer = original
            if not after:
                os.kill(pid or os.getpid(), signal.SIGKILL)
            try:
                return int(original(engine, *args, **kwargs))
            finally:
                if after:
                    os.kill(pid or os.getpid(), signal.SIGKILL)

        TransferEngine.transfer = killing

    def watch_reads(self) -> None:
        """From now on remembers when a piece of a hand-over has been read (see ``reads``)."""
        from moonpool.core.transfer.engine import TransferEngine

        original = TransferEngine.transfer
        self.read_s: list[float] = []

        def watched(engine: Any, *args: Any, **kwargs: Any) -> int:
            moved = int(original(engine, *args, **kwargs))
            self.read_s.append(time.monotonic())
            return moved

        TransferEngine.transfer = watched

    def reads(self) -> list[float]:
        """When pieces were read, on the clock that all processes of the machine share."""
        seen, self.read_s = self.read_s, []
        return seen

    def _half(self) -> Any:
        """The scheduler's half of our connector, which may stand behind vLLM's MultiConnector; or None."""
        connector = self.scheduler.connector
        several = [connector, *getattr(connector, "_connectors", ())]
        return next((one._sched for one in several if hasattr(one, "_sched")), None)

    def joined(self) -> bool:
        return self._half().pool() is not None

    def encoder_joined(self) -> bool:
        return self.scheduler.ec_connector._sched.membership.pool() is not None

    def reset_caches(self) -> None:
        """As an operator does that has replaced weights."""
        assert self.llm.reset_prefix_cache()
        self.engine.engine_core.reset_encoder_cache()

    def lose_outputs(self) -> None:
        """From now on the pool loses each encoder output that was found, before it is loaded."""
        half = self.scheduler.ec_connector._sched
        original = half.allocated

        def lost(request: Any, index: int, rows: int) -> None:
            half.membership.pool().client.remove([half._asked[request.request_id].names[index]])
            original(request, index, rows)

        half.allocated = lost

    def step_cost(self, requests: int = 8, steps: int = 200) -> dict[str, float]:
        """Median microseconds of one decode step's schedule() + update_from_output(), and of the connector's
        worker hooks, with a full batch and nothing to load or save."""
        for position in range(requests):
            self.engine.add_request(
                f"cost{self.next_id}",
                {"prompt_token_ids": [position + 1] * 20},
                SamplingParams(temperature=0.0, max_tokens=steps + 20, ignore_eos=True),
            )
            self.next_id += 1
        for _ in range(10):
            self.engine.step()
        timed: dict[str, list[float]] = {"schedule": [], "update": [], "worker": _worker_hooks(steps)}
        _time_calls(self.scheduler, "schedule", timed["schedule"])
        _time_calls(self.scheduler, "update_from_output", timed["update"])
        for _ in range(steps):
            self.engine.step()
        for name in ("schedule", "update_from_output"):
            delattr(self.scheduler, name)
        while self.engine.has_unfinished_requests():
            self.engine.step()
        return {name: statistics.median(values) * 1e6 for name, values in timed.items() if values}


def _time_calls(target: Any, name: str, into: list[float]) -> None:
    original = getattr(target, name)

    def timed(*args: Any, **kwargs: Any) -> Any:
        start_s = time.perf_counter()
        result = original(*args, **kwargs)
        into.append(time.perf_counter() - start_s)
        return result

    setattr(target, name, timed)


def _worker_hooks(steps: int) -> list[float]:
    """Seconds that the hooks of one empty step take in the worker, as the model runner calls them."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    if not has_kv_transfer_group():
        return [0.0]
    connector = get_kv_transfer_group()
    metadata = _empty_metadata(connector)
    layers = [f"model.layers.{number}.self_attn.attn" for number in range(4)]
    nothing: set[str] = set()
    times = []
    for _ in range(steps):
        start_s = time.perf_counter()
        connector.handle_preemptions(metadata)
        connector.bind_connector_metadata(metadata)
        for layer in layers:
            connector.wait_for_layer_load(layer)
            connector.save_kv_layer(layer, None, None)
        connector.start_load_kv(None)
        connector.wait_for_save()
        connector.get_transfer_results(nothing)
        connector.get_block_ids_with_load_errors()
        connector.get_kv_connector_stats()
        connector.get_kv_connector_kv_cache_events()
        connector.build_connector_worker_meta()
        connector.clear_connector_metadata()
        times.append(time.perf_counter() - start_s)
    return times


def _empty_metadata(connector: Any) -> Any:
    """What the connector's scheduler half sends in a step without work."""
    if type(connector).__name__ == "ExampleConnector":
        from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnectorMetadata

        return ExampleConnectorMetadata()
    from moonpool.connectors.vllm.messages import NOTHING

    return NOTHING


def main() -> None:
    answers = os.fdopen(int(sys.argv[1]), "w", buffering=1)
    started_s = time.monotonic()
    try:
        driver = Driver(json.loads(sys.argv[2]))
    except Exception as error:
        chain = []
        cause: BaseException | None = error
        while cause is not None:
            chain.append(f"{type(cause).__name__}: {cause}")
            cause = cause.__cause__ or cause.__context__
        print(json.dumps({"error": chain}), file=answers)
        return
    print(json.dumps({"ready_s": time.monotonic() - started_s}), file=answers)
    for line in sys.stdin:
        command = json.loads(line)
        if command["op"] == "exit":
            break
        try:
            result = getattr(driver, command["op"])(**command.get("args", {}))
            print(json.dumps({"result": result}), file=answers)
        except Exception as error:
            import traceback

            traceback.print_exc()
            print(json.dumps({"error": [f"{type(error).__name__}: {error}"]}), file=answers)
    driver.core.shutdown()
    sys.stdout.flush()
    os._exit(0)  # interpreter teardown of torch and vLLM takes seconds and shows nothing


if __name__ == "__main__":
    main()
