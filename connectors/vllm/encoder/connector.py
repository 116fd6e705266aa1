"""The class vLLM talks to. It delegates to one of two halves and survives what goes wrong below
(guard.py)."""

from __future__ import annotations

import functools
from typing import Any

from moonpool.connectors import weights
from moonpool.connectors.vllm import compat as vllm_compat
from moonpool.connectors.vllm import item_hashes
from moonpool.connectors.vllm.encoder import compat
from moonpool.connectors.vllm.encoder.identity import encoder_identity
from moonpool.connectors.vllm.encoder.membership import Membership
from moonpool.connectors.vllm.encoder.messages import NOTHING, EncoderReport, EncoderStep
from moonpool.connectors.vllm.encoder.metrics import EncoderProm
from moonpool.connectors.vllm.encoder.scheduler import SchedulerHalf
from moonpool.connectors.vllm.encoder.settings import EncoderSettings
from moonpool.connectors.vllm.encoder.worker import WorkerHalf
from moonpool.connectors.vllm.engine_config import launcher_refusal, weights_refusal
from moonpool.connectors.vllm.guard import Guard
from moonpool.connectors.vllm.media_options import encoder_refusal, media_form, takes_media
from moonpool.connectors.vllm.metrics import Stats
from moonpool.connectors.vllm.pool import open_node
from moonpool.connectors.vllm.served_files import ServedFiles
from moonpool.connectors.vllm.weight_hooks import WeightHooks, fingerprint_of
from moonpool.core.errors import ConfigError


class Mooncake(WeightHooks, compat.ConnectorBase):
    """Encoder outputs in the Moonpool pool: ``"ec_connector": "Mooncake"``."""

    def __init__(self, vllm_config: Any, role: compat.ConnectorRole) -> None:
        """Raises ConfigError for options that cannot be meant."""
        super().__init__(vllm_config=vllm_config, role=role)
        self._settings = EncoderSettings.parse(vllm_config.ec_transfer_config.ec_connector_extra_config)
        is_scheduler = role is compat.ConnectorRole.SCHEDULER
        self._log = vllm_compat.logger(f"encoder.{role.name.lower()}")
        self._sched: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        self._guard = Guard(self._log, lambda: getattr(self._sched or self._worker, "tally", None))
        self._served_files = ServedFiles(vllm_config.model_config)
        refusal = self._guard("its configuration cannot be read", _refusal, vllm_config)
        membership = Membership(
            fingerprint=functools.partial(self._fingerprint, vllm_config),
            open_node=functools.partial(
                open_node,
                self._settings,
                self._log,
                required=is_scheduler and self._settings.require_pool,
                quiet=not is_scheduler,
            ),
            log=self._log,
            refusal=refusal,
            quiet=not is_scheduler,
        )
        if is_scheduler:
            self._sched = self._scheduler_half(membership, vllm_config)
        else:
            self._worker = self._worker_half(membership, vllm_config)

    def _scheduler_half(self, membership: Membership, vllm_config: Any) -> SchedulerHalf:
        if membership.refusal:
            if self._settings.require_pool:
                raise ConfigError(
                    f"require_pool is set, but encoder outputs cannot be shared: {membership.refusal}",
                    operation="start",
                )
            membership.refuse(membership.refusal)
        elif self._settings.require_pool:
            weights.wait_for(membership.join, functools.partial(self._log.info, "moonpool: %s"))
        else:
            membership.pool()
        model = vllm_config.model_config
        return SchedulerHalf(
            membership,
            form=media_form(model) if takes_media(model) else "",
            may_load=self.is_consumer,
            can_fail_requests=compat.can_fail_requests(),
            log=self._log,
            hashes=item_hashes.shared(),
        )

    def _worker_half(self, membership: Membership, vllm_config: Any) -> WorkerHalf:
        model = vllm_config.model_config
        self._guard(None, vllm_compat.watch_model, vllm_config, self)
        return WorkerHalf(
            membership,
            dtype=model.dtype,
            unit=compat.embedding_width(model),
            save_bytes=self._settings.save_bytes,
            is_saver=lambda: bool(self.is_producer and compat.is_saver()),
            agreed=compat.agreed,
            device=compat.device,
            log=self._log,
        )

    def _fingerprint(self, vllm_config: Any) -> bytes:
        """Raises Pending, Refused or Error."""
        return fingerprint_of(
            lambda: encoder_identity(vllm_config),
            self._served_files,
            subject="its encoder's outputs depend",
            guard=self._guard,
            log=self._log,
        )

    # Both halves

    def shutdown(self) -> None:
        """Ends loads and saves under way and disconnects."""
        half = self._sched or self._worker
        if half is not None:
            half.close()

    @classmethod
    def build_ec_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats:
        """Stats from what another process has sent."""
        return Stats(data={} if data is None else dict(data))

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> EncoderProm:
        """The Prometheus metrics in vLLM's own registry."""
        return EncoderProm(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def get_ec_connector_stats(self) -> Stats | None:
        """Counts since the last call, in the scheduler. Those of workers come with their reports: not every
        model runner asks workers."""
        return self._sched.tally.take() if self._sched is not None else None

    # Worker

    def start_worker_services(self) -> None:
        """vLLM 0.30 and newer: the model has its first weights. Their files are read now, if they are not
        known."""
        if self._worker is not None:
            self._worker.armed = True
            self._guard(None, self._worker.membership.pool)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """The plan of the step that begins."""
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            self._worker.armed = True

    def start_load_caches(self, encoder_cache: Any, **kwargs: Any) -> None:
        """Loads outputs into vLLM's cache before the step computes; what is not there is computed."""
        worker, step = self._worker, self._step()
        if worker is None or not step.loads:
            return
        self._guard(None, worker.fetch, step.loads, encoder_cache)
        worker.settle(step, encoder_cache)  # not guarded: all ranks do the same, or the engine ends

    def save_caches(self, encoder_cache: Any, mm_hash: str, **kwargs: Any) -> None:
        """The encoder has computed an output."""
        worker, step = self._worker, self._step()
        if worker is not None and mm_hash in step.computed:
            self._guard(None, worker.computed, step, encoder_cache, mm_hash)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Nothing is ever waited for: saves keep their tensors themselves."""
        return None, None

    def build_connector_worker_meta(self) -> EncoderReport | None:
        """What this worker tells the scheduler's half of the step; None for nothing."""
        return None if self._worker is None else self._guard(None, self._worker.take_report)

    def _step(self) -> EncoderStep:
        step = self._connector_metadata
        return step if isinstance(step, EncoderStep) else NOTHING

    # Scheduler

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        """Whether it is known which items of the request the pool has; False: ask again in the next step."""
        sched = self._sched
        if sched is None or not request.mm_features:
            return True
        return self._guard(True, sched.is_ready, request, num_computed_tokens)

    def has_cache_item(self, identifier: str) -> bool:
        """Whether the pool has the item, so that vLLM does not compute it."""
        return self._sched is not None and self._guard(False, self._sched.has_item, identifier)

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        """The item is computed in this step, or loaded when ``has_cache_item`` said so."""
        sched = self._sched
        if sched is not None:
            rows = int(request.get_num_encoder_embeds(index))
            otherwise = functools.partial(sched.allocated_unknown, request, index, rows)
            self._guard(None, sched.allocated, request, index, rows, otherwise=otherwise)

    def take_unavailable_requests(self) -> set[str]:
        """vLLM 0.30 and newer: requests that end with an error, because they lack what their items are."""
        return set() if self._sched is None else self._sched.take_unavailable()

    def build_connector_meta(self, scheduler_output: Any) -> EncoderStep:
        """What the workers load and compute in the step."""
        return NOTHING if self._sched is None else self._guard(NOTHING, self._sched.plan, scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """What the workers reported of a step."""
        report = getattr(connector_output, "ec_connector_worker_meta", None)
        if self._sched is not None and isinstance(report, EncoderReport):
            self._guard(None, self._sched.reported, report)

    def request_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        """(False: its outputs may be freed, no ec_transfer_params: the pool names items by their content)."""
        if self._sched is not None:
            self._guard(None, self._sched.finished, request.request_id)
        return False, None


Moonpool = Mooncake  # for an ec_connector_module_path; the names mean the same


def _refusal(vllm_config: Any) -> str:
    """Why the encoder outputs of this engine cannot be shared, or ""."""
    model = vllm_config.model_config
    if not takes_media(model):
        return "the model takes no images, sounds or videos"
    if getattr(model, "is_encoder_decoder", False):
        return "vLLM keeps no encoder outputs of encoder-decoder models"
    if not vllm_compat.watch_weights():
        return "this vLLM replaces weights where moonpool does not see it"
    return launcher_refusal(vllm_config) or weights_refusal(vllm_config) or encoder_refusal(vllm_config)
