"""The class vLLM talks to. It delegates to one of two halves and survives what goes wrong below: an exception
in a hook kills the engine, while a connector that steps aside costs a cache miss (guard.py)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from moonpool import _native
from moonpool.connectors import weights
from moonpool.connectors.objects import Refused
from moonpool.connectors.vllm import compat, identity, item_hashes
from moonpool.connectors.vllm.adapters import Adapters
from moonpool.connectors.vllm.device_memory import DeviceMemory
from moonpool.connectors.vllm.engine_config import EngineConfig, read_engine_config
from moonpool.connectors.vllm.guard import Guard
from moonpool.connectors.vllm.layout import BlockLayout, Tensor, unlike_heads
from moonpool.connectors.vllm.meetings import Meetings
from moonpool.connectors.vllm.messages import NOTHING, Handshake, Step
from moonpool.connectors.vllm.metrics import ConnectorProm, Stats
from moonpool.connectors.vllm.pd.handover_worker import HandoverWorker, KvMemory
from moonpool.connectors.vllm.pool import Rows, open_node
from moonpool.connectors.vllm.scheduler import SchedulerHalf
from moonpool.connectors.vllm.served_files import ServedFiles
from moonpool.connectors.vllm.settings import Settings
from moonpool.connectors.vllm.weight_hooks import WeightHooks, fingerprint_of
from moonpool.connectors.vllm.worker import WorkerHalf
from moonpool.core.errors import Error
from moonpool.core.service.data_tls import configured_engine_tls


class Mooncake(WeightHooks, compat.ConnectorBase, compat.SupportsHMA):
    """KV connector of the Moonpool pool: ``"kv_connector": "Mooncake"``."""

    _cache_hit_source = compat.host_hit_source()  # a node of this host answers from DRAM

    def __init__(self, vllm_config: Any, role: compat.ConnectorRole, kv_cache_config: Any = None) -> None:
        """Raises ConfigError for options that cannot be meant."""
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._settings = self.read_options(extra)
        self._log = compat.logger(role.name.lower())
        self._served_files = ServedFiles(vllm_config.model_config)
        self._sched: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        self._guard = Guard(self._log, lambda: getattr(self._sched or self._worker, "tally", None))
        engine_config = read_engine_config(vllm_config, kv_cache_config)
        if not (engine_config.refusal or compat.watch_weights()):
            unseen = "this vLLM replaces weights where moonpool does not see it"
            engine_config = replace(engine_config, refusal=unseen)
        if role is compat.ConnectorRole.SCHEDULER:
            self._sched = self._scheduler_half(engine_config, vllm_config)
            self._tally = self._sched.tally
        else:
            self._worker = self._worker_half(engine_config, vllm_config)
            self._tally = self._worker.tally

    @classmethod
    def read_options(cls, extra: Mapping[str, Any]) -> Settings:
        """What ``kv_connector_extra_config`` says. Raises ConfigError."""
        return Settings.parse(extra)

    def engine_waits(self, wake: Callable[[], None]) -> None:
        """``wake`` lets this engine begin a step when it is idle; on any thread. See compat.watch_idle."""
        if self._sched is not None:
            self._sched.handover.wake = wake

    def _scheduler_half(self, engine_config: EngineConfig, vllm_config: Any) -> SchedulerHalf:
        if not engine_config.recomputes and engine_config.may_load:
            compat.recompute_failed_loads(vllm_config)
            self._log.warning(
                'moonpool: kv_load_failure_policy was "fail", which ends a request with an error when its '
                'blocks are lost between lookup and load; "recompute" computes them instead, and is what '
                "this engine does from here on"
            )
        compat.watch_idle()
        return SchedulerHalf(
            engine_config,
            self._settings,
            open_node=functools.partial(
                open_node, self._settings, self._log, required=self._settings.require_pool
            ),
            digest=_native.block_digests,
            log=self._log,
            adapters=self._adapters(engine_config) if getattr(vllm_config, "lora_config", None) else None,
            hashes=item_hashes.shared(),
        )

    def _adapters(self, engine_config: EngineConfig) -> Adapters:
        unseen = "this vLLM does not load them where moonpool looks for it"
        return Adapters(
            form=engine_config.adapter_form,
            refusal=engine_config.adapter_refusal or ("" if compat.watch_adapters() else unseen),
            cached_by_path=compat.caches_adapters_by_path(),
            log=self._log,
        )

    def _worker_half(self, engine_config: EngineConfig, vllm_config: Any) -> WorkerHalf:
        self._guard(None, compat.watch_model, vllm_config, self)

        def fingerprint(layout: BlockLayout, tensor: Tensor) -> bytes:
            def ask() -> bytes:
                return fingerprint_of(
                    lambda: identity.identity(
                        vllm_config,
                        block_tokens=engine_config.block_tokens,
                        kv_dtype=identity.kv_dtype(vllm_config, tensor.dtype),
                        form=identity.form(
                            vllm_config, layout, engine_config.reaches, unlike_heads(layout, engine_config)
                        ),
                    ),
                    self._served_files,
                    subject="its KV depends",
                    guard=self._guard,
                    log=self._log,
                )

            if self._served_files.replaced or not self._settings.require_pool:
                return ask()
            return weights.wait_for(ask, functools.partial(self._log.info, "moonpool: %s"))

        sleeps = bool(getattr(vllm_config.model_config, "enable_sleep_mode", False))
        return WorkerHalf(
            engine_config,
            ranks=compat.parallel_ranks,
            fingerprint=fingerprint,
            open_node=functools.partial(open_node, self._settings, self._log, required=False, quiet=True),
            log=self._log,
            open_handover_worker=functools.partial(self._open_handover_worker, sleeps=sleeps)
            if self._settings.handover
            else lambda memory, device: None,
            open_device=functools.partial(self._open_device, sleeps=sleeps),
        )

    def _open_handover_worker(
        self, memory: KvMemory, device: DeviceMemory | None, *, sleeps: bool
    ) -> HandoverWorker | None:
        """Opens this worker to other engines; logs one sentence when that fails."""
        settings = self._settings
        if device is not None and sleeps:  # peers know the addresses that a sleep takes away
            self._log.warning(
                "moonpool: with sleep mode an engine on a CUDA device takes part in no hand-over"
            )
            return None
        try:
            return HandoverWorker(
                memory,
                listen=settings.handover_listen,
                transports=settings.transports(),
                tenant=settings.tenant,
                silence_s=settings.lease_s,
                log=self._log,
                device=device,
                tls=configured_engine_tls(listens=True, socket=settings.socket()),
            )
        except Error as error:
            self._log.warning("moonpool: this engine takes part in no hand-over: %s", error)
            return None

    def _open_device(self, layout: BlockLayout, rows: Rows, *, sleeps: bool) -> DeviceMemory:
        """sleeps: vLLM may take the KV cache's memory away. Raises Refused or Error."""
        settings = self._settings
        if not settings.gpu:
            raise Refused(
                'the KV cache lies on a CUDA device, and kv_connector_extra_config has "gpu": false'
            )
        if sleeps and not compat.follows_sleep():
            raise Refused(
                "the KV cache lies on a CUDA device, and with sleep mode this vLLM may unmap it under a "
                "copy; 0.33 and newer say when"
            )
        return DeviceMemory(
            layout,
            rows,
            current_stream=compat.current_stream,
            ring_bytes=settings.gpu_ring,
            copy_threads=settings.gpu_copy_threads,
            pin_bytes=settings.gpu_pin,
            log=self._log,
        )

    # Both halves

    def shutdown(self) -> None:
        """Ends loads and saves under way and disconnects."""
        half = self._sched or self._worker
        if half is not None:
            half.close()

    def get_kv_connector_stats(self) -> Stats | None:
        """Counts since the last call; None for a connector without a half."""
        tally = self._tally
        return tally.take() if tally else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats:
        """Stats from what another process has sent."""
        return Stats(data={} if data is None else dict(data))

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> ConnectorProm:
        """The Prometheus metrics in vLLM's own registry."""
        return ConnectorProm(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a dropped save is a later miss, nothing more; preempted requests may keep their output."""
        return False

    # Worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """The KV memory of this worker, a tensor for each layer."""
        if self._worker is not None:
            self._worker.register(kv_caches)

    def unregister_kv_caches(self, *args: Any, **kwargs: Any) -> None:
        """vLLM 0.33 and newer: the engine goes to sleep, and the KV memory of a device with it."""
        if self._worker is not None:
            self._guard(None, self._worker.sleep)

    def restore_kv_caches(self, kv_caches: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """vLLM 0.33 and newer: the engine woke up. kv_caches: None: those that were registered."""
        if self._worker is not None:
            self._guard(None, self._worker.wake_up, kv_caches)

    def get_handshake_metadata(self) -> Handshake | None:
        """What this worker tells the scheduler's half; None in the scheduler, and behind a MultiConnector,
        where a step asks for it."""
        if self._worker is None or compat.is_one_of_several(self):
            return None
        return self._worker.handshake()

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Called before the forward of the step: leases that end must be invalid by then. vLLM zeroes and
        copies blocks earlier (before or after ``handle_preemptions``, depending on its model runner). It
        copies only for Mamba layers, and an engine that zeroes hands nothing over."""
        super().bind_connector_metadata(connector_metadata)
        if connector_metadata is NOTHING:
            return
        worker, step = self._worker, self._step()
        if worker is None:
            return
        if step.greets:
            worker.greeted()
        handover = step.handover
        if step.loads or (handover is not None and handover.pulls):
            self._guard(None, worker.begin_loads)
        if handover is None:
            return
        self._guard(None, worker.begin_handover, handover, otherwise=worker.revoke_leases)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Starts the step's pulls and loads on native threads. Never waits."""
        if self._connector_metadata is NOTHING:
            return
        worker, step = self._worker, self._step()
        if worker is None:
            return
        handover = step.handover
        if handover is not None and handover.pulls:
            self._guard(None, worker.start_pulls, handover, otherwise=lambda: worker.fail_pulls(handover))
        if step.loads:
            self._guard(None, worker.start_loads, step, otherwise=lambda: worker.fail_loads(step))

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are asynchronous: a request is computed only after its load."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Blocks are saved whole, after the forward; see wait_for_save."""

    def wait_for_save(self) -> None:
        """Hands the step's saves over, now that the forward has ended; their blocks are held, so the
        forward's thread does not wait."""
        if self._connector_metadata is NOTHING:
            return
        worker, step = self._worker, self._step()
        if worker is None:
            return
        if step.handover is not None and step.handover.grown:
            self._guard(None, worker.computed, step.handover)
        if step.saves:
            self._guard(None, worker.start_saves, step, otherwise=lambda: worker.give_up_saves(step))

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Nothing is ever reported as sent: saves hold their blocks by reference, not by delaying a free."""
        if self._worker is None:
            return None, None
        return None, self._take_finished(self._worker)[0] or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """vLLM 0.30 and newer."""
        if self._worker is None or self._worker.is_idle:
            return compat.transfer_results(set(), set())
        return compat.transfer_results(*self._take_finished(self._worker))

    def _take_finished(self, worker: WorkerHalf) -> tuple[set[str], set[str]]:
        self._guard(None, worker.poll)
        return worker.take_finished()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that were not loaded, which vLLM computes again."""
        return set() if self._worker is None else self._worker.take_failed_blocks()

    def build_connector_worker_meta(self) -> Any:
        """What this worker tells the scheduler's half of the step; None for nothing."""
        worker = self._worker
        if worker is None:
            return None
        try:
            return worker.take_report()
        except Exception:
            return self._guard.survive(None)

    def _step(self) -> Step:
        step = self._connector_metadata
        return step if isinstance(step, Step) else NOTHING

    # Scheduler

    def set_xfer_handshake_metadata(self, metadata: dict[int, Handshake]) -> None:
        """What each worker told, by rank."""
        self._meet(list(metadata.values()))

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Handshake]) -> None:
        """What each worker told, by pipeline and tensor rank."""
        self._meet(list(metadata.values()))

    def _meet(self, told: list[Any]) -> None:
        if self._sched is None:
            return
        ours = [hand for hand in told if isinstance(hand, Handshake)]
        if ours:
            self._sched.meet_workers(ours)
        else:
            self._sched.greet_workers()

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """vLLM 0.30 and newer: the engine's blocks, and which request has which."""
        if self._sched is not None:
            self._sched.bind_block_tables(kv_cache_manager)
        self.bind_gpu_block_pool(kv_cache_manager.block_pool)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """The engine's block pool, whose blocks saves and leases hold."""
        if self._sched is not None:
            self._sched.bind_block_pool(gpu_block_pool)
            compat.around_reset(gpu_block_pool, self._before_reset, self._sched.cache_was_reset)

    def adapter_loading(self, lora: Any) -> None:
        """The engine is about to load this LoRA adapter; see compat.watch_adapters."""
        if self._sched is not None:
            self._guard(None, self._sched.adapter_loading, lora, otherwise=self._sched.distrust_adapters)

    def adapter_loaded(self, lora: Any, *, well: bool) -> None:
        """The engine has loaded this LoRA adapter.

        well: whether it did so without an error.
        """
        if self._sched is not None:
            loaded = functools.partial(self._sched.adapter_loaded, lora, well=well)
            self._guard(None, loaded, otherwise=self._sched.distrust_adapters)

    def adapter_removed(self, number: int) -> None:
        """The engine has dropped the LoRA adapter of this number."""
        if self._sched is not None:
            self._guard(None, self._sched.adapter_removed, number, otherwise=self._sched.distrust_adapters)

    def on_new_request(self, request: Any) -> None:
        """A request came: asks the pool for its prefix, on a native thread."""
        sched = self._sched
        if sched is not None:
            self._guard(None, sched.arrived, request, otherwise=lambda: sched.forget(request.request_id))

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """(tokens to load beyond ``num_computed_tokens``, whether asynchronously); None: ask again."""
        sched = self._sched
        nothing: tuple[int | None, bool] = (0, False)
        if sched is None:
            return nothing
        return self._guard(
            nothing,
            sched.matched_tokens,
            request,
            num_computed_tokens,
            otherwise=lambda: sched.forget(request.request_id),
        )

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """vLLM gave the request ``blocks``; ``num_external_tokens`` of it are to be loaded."""
        sched = self._sched
        if sched is None:
            return

        def fail() -> None:
            if num_external_tokens:
                sched.fail_load(request.request_id, blocks, num_external_tokens)
            sched.meetings.stop(request.request_id)

        self._guard(None, sched.admitted, request, blocks, num_external_tokens, otherwise=fail)

    def build_connector_meta(self, scheduler_output: Any) -> Step:
        """What the workers load, save and hand over in the step."""
        sched = self._sched
        if sched is None:
            return NOTHING
        try:
            sched.step_begins(scheduler_output)
        except Exception:
            self._guard.survive(None)
        try:
            return sched.build_step(scheduler_output)
        except Exception:
            self._guard.survive(None, sched.give_up_step)
        return self._guard(NOTHING, sched.build_step, scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """What the workers reported of a step."""
        if self._sched is None:
            return
        if connector_output.kv_connector_worker_meta is None and not connector_output.finished_recving:
            return
        self._guard(None, self._sched.step_ended, connector_output)

    # Called by the scheduler class (meeting_scheduler.py)

    def allow_meetings(self, refusal: str) -> Meetings | None:
        """The engine runs the scheduler class, and does not allow it to compute the front of a hit while the
        back is loaded if there is a ``refusal``. Returns the meetings, to see whether there is one; None: it
        is never done."""
        sched = self._sched
        if sched is None:
            return None
        sched.meetings.enabled = not (refusal or sched.meetings_refusal())
        if sched.meetings.enabled:
            self._log.info(
                "moonpool: the front of a hit is computed while its back is loaded, if that is faster"
            )
        else:
            self._log.warning(
                "moonpool: the scheduler class is without effect: %s", refusal or sched.meetings_refusal()
            )
        return sched.meetings if sched.meetings.enabled else None

    def before_schedule(self) -> list[tuple[Any, int]]:
        """Requests that go on behind what was loaded of them, each with its tokens, which are counted."""
        sched = self._sched
        if sched is None:
            return []
        self._guard(None, sched.meetings.jump, otherwise=sched.meetings.stop_all)
        moved = sched.meetings.take_moved()
        for request, tokens in moved:
            self._guard(None, compat.count_loaded, request, tokens)
        return moved

    def chunk_tokens(self, request: Any, computed: int, wanted: int) -> int:
        """How many of the ``wanted`` tokens behind ``computed`` ones the next step may compute."""
        sched = self._sched
        if sched is None:
            return wanted
        request_id = request.request_id
        try:
            return sched.meetings.chunk_tokens(request, computed, wanted)
        except Exception:
            self._guard.survive(None, lambda: sched.meetings.stop(request_id))
        return 0 if sched.meetings.is_loading(request_id) else wanted  # pieces write to its blocks

    def tokens_to_place(self, request: Any) -> int:
        """For so many tokens the engine is to make room in the first step of the request; 0: as ever."""
        sched = self._sched
        if sched is None:
            return 0
        return self._guard(0, sched.meetings.tokens_to_place, request)

    def waits_for_room(self, request: Any) -> bool:
        """Whether the request, for whose hit there is no room yet, waits for it; else it computes the hit."""
        return self._sched is not None and self._guard(False, self._sched.meetings.waits_for_room, request)

    def take_events(self) -> tuple[()]:
        """No KV cache events. vLLM asks when it has the output of a step, which ends the step's time."""
        if self._sched is not None:
            try:
                self._sched.step_computed()
            except Exception:
                self._guard.survive(None)
        return ()

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """(False: the blocks may be freed, kv_transfer_params of the answer or None)."""
        sched = self._sched
        if sched is None:
            return False, None
        params = self._guard(
            None, sched.finished, request, otherwise=lambda: sched.forget(request.request_id)
        )
        return False, params

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """As request_finished, for an engine with several KV cache groups."""
        return self.request_finished(request, block_ids)

    def has_pending_push_work(self) -> bool:
        """Whether a step without tokens must run for the connector."""
        return self._sched is not None and self._guard(False, self._sched.has_pending_work)

    def has_pending_block_frees(self) -> bool:
        """Whether blocks that the connector holds are free soon."""
        return self._sched is not None and self._guard(False, self._sched.has_pending_frees)

    def reset_cache(self) -> bool:
        """Nothing stored so far is used by this engine again; other engines keep it."""
        try:
            if self._sched is not None:
                self._sched.forget_everything_stored()
        except Exception:
            return self._guard.survive(False)
        return True

    def _before_reset(self) -> None:
        """vLLM is about to empty its own cache; that alone leaves the pool as it is."""
        if self._sched is not None:
            self._guard(None, self._sched.handover.forget_all)


Moonpool = Mooncake  # for a kv_connector_module_path; the names mean the same
