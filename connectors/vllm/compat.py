"""Every difference between the vLLM versions that this connector runs under (0.23 to 0.33), and nothing else.

Without vLLM (unit tests, type checks) the base classes are empty stand-ins, so that the halves can be
imported.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

OLDEST = (0, 23)

if TYPE_CHECKING:
    from moonpool.connectors.vllm import standins as base
    from moonpool.connectors.vllm import standins as metrics
else:
    try:
        from vllm.distributed.kv_transfer.kv_connector.v1 import base, metrics
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("vllm", "torch"):
            raise
        from moonpool.connectors.vllm import standins as base
        from moonpool.connectors.vllm import standins as metrics

ConnectorBase = base.KVConnectorBase_V1
ConnectorMetadata = base.KVConnectorMetadata
ConnectorRole = base.KVConnectorRole
HandshakeMetadata = base.KVConnectorHandshakeMetadata
SupportsHMA = base.SupportsHMA
WorkerMetadata = base.KVConnectorWorkerMetadata
ConnectorStats = metrics.KVConnectorStats
PromMetrics = metrics.KVConnectorPromMetrics
TransferResults: Any = getattr(base, "KVConnectorTransferResults", None)


def host_hit_source() -> Any:
    """vLLM's name for the tier our hits come from (0.32+: prompt_tokens_cached_by_source), or None before."""
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:
        return None
    return CacheHitSource.HOST


def current_stream(device: int) -> int:
    """The CUDA stream on which this thread queues work on a device (cudaStream_t as a number)."""
    import torch

    return int(torch.cuda.current_stream(device).cuda_stream)


def follows_sleep() -> bool:
    """Whether vLLM tells the connector when it takes the KV cache's memory away and brings it back (0.33)."""
    return hasattr(ConnectorBase, "unregister_kv_caches") and hasattr(ConnectorBase, "restore_kv_caches")


def transfer_results(finished: set[str], failed: set[str]) -> Any:
    """What get_transfer_results returns; only asked for by vLLM 0.30 and newer, get_finished before."""
    return TransferResults(set(), finished, failed)


def can_report_failed_requests() -> bool:
    """Whether a failed load of a model with several KV cache groups can be reported (0.30+)."""
    return TransferResults is not None


def recompute_failed_loads(vllm_config: Any) -> None:
    """Makes kv_load_failure_policy "recompute", whatever it was: vLLM's scheduler reads it after it made its
    connector."""
    vllm_config.kv_transfer_config.kv_load_failure_policy = "recompute"


def around_reset(pool: Any, before: Callable[[], None], after: Callable[[], None]) -> None:
    """Calls ``before`` before vLLM empties its prefix cache, and ``after`` when it did. vLLM itself notifies
    the connector only on request (reset_external), and after it has checked whether blocks are in use: blocks
    that the connector holds make the reset fail."""
    reset = pool.reset_prefix_cache

    def told() -> bool:
        before()
        done = bool(reset())
        if done:
            after()
        return done

    pool.reset_prefix_cache = told


class AdapterWatcher(Protocol):
    """What must not raise."""

    def adapter_loading(self, lora: Any) -> None:
        """The engine begins to read the files of ``lora``."""

    def adapter_loaded(self, lora: Any, *, well: bool) -> None:
        """The engine has read the files.

        well: whether it did so without an error.
        """

    def adapter_removed(self, number: int) -> None:
        """The engine dropped the adapter of this number."""


def watch_adapters(core: type | None = None) -> bool:
    """Notifies the connector of an engine's scheduler when the engine is asked to load or drop a LoRA
    adapter; vLLM does not notify connectors. Returns whether this vLLM allows it; one call is enough.

    core: the class that is asked; for tests.
    """
    engine_core = core
    if engine_core is None:
        try:
            from vllm.v1.engine.core import EngineCore
        except ImportError:
            return False
        engine_core = EngineCore
    add, remove = getattr(engine_core, "add_lora", None), getattr(engine_core, "remove_lora", None)
    if add is None or remove is None:
        return False
    if hasattr(add, "_moonpool"):
        return True

    @functools.wraps(add)
    def told_add(engine: Any, lora_request: Any, *args: Any, **kwargs: Any) -> Any:
        watchers = _adapter_watchers(engine)
        for watcher in watchers:
            watcher.adapter_loading(lora_request)
        well = False
        try:
            answer = add(engine, lora_request, *args, **kwargs)
            well = True
            return answer
        finally:
            for watcher in watchers:
                watcher.adapter_loaded(lora_request, well=well)

    @functools.wraps(remove)
    def told_remove(engine: Any, lora_id: int, *args: Any, **kwargs: Any) -> Any:
        answer = remove(engine, lora_id, *args, **kwargs)
        for watcher in _adapter_watchers(engine):
            watcher.adapter_removed(lora_id)
        return answer

    vars(told_add)["_moonpool"] = True
    setattr(engine_core, add.__name__, told_add)
    setattr(engine_core, remove.__name__, told_remove)
    return True


def _adapter_watchers(engine: Any) -> list[AdapterWatcher]:
    """Our connectors of this engine: its scheduler's one, or some of those that stand behind that."""
    connector = getattr(getattr(engine, "scheduler", None), "connector", None)
    several = [connector, *(getattr(connector, "_connectors", None) or ())]
    return [one for one in several if hasattr(one, "adapter_loading")]


def caches_adapters_by_path() -> bool:
    """Whether vLLM's prefix cache distinguishes adapters of one name by their paths (0.32 does)."""
    try:
        from vllm.v1.core.kv_cache_utils import _gen_lora_extra_hash_keys

        lora = SimpleNamespace(lora_name="n", lora_path="the path", lora_int_id=1)
        return "the path" in repr(_gen_lora_extra_hash_keys(SimpleNamespace(lora_request=lora)))
    except Exception:  # a private function of vLLM may raise anything
        return False


def was_rejected(request: Any) -> bool:
    """Whether vLLM made this request up, with a prompt of its own, only to report that it does not serve the
    request of the kv_transfer_params: the client left, or the body was wrong. vLLM aborts it at once."""
    return bool(getattr(request, "abort_immediately", False))


def parallel_ranks() -> tuple[int, int]:
    """(rank in the tensor-parallel group, rank in the pipeline-parallel group) of this worker process."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    return int(get_tp_group().rank_in_group), int(get_pp_group().rank_in_group)


def vllm_version() -> str:
    """The version of the vLLM in this process; "" when unknown."""
    try:
        from vllm.version import __version__
    except ImportError:
        return ""
    return str(__version__)


def is_too_old(version: str) -> bool:
    """Whether ``version`` is a release before OLDEST. Development versions and unknown ones are let
    through."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None or version.startswith("0.0."):
        return False
    return (int(match[1]), int(match[2])) < OLDEST


def logger(name: str) -> logging.Logger:
    """A logger that speaks through vLLM's handlers, which only serve names below "vllm"."""
    return logging.getLogger(f"vllm.moonpool.{name}")
