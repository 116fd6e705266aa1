"""Every difference between the vLLM versions that this connector runs under, and nothing else.

Without vLLM (unit tests, type checks) the base classes are empty stand-ins, so that the halves can be
imported.
"""

from __future__ import annotations

import functools
import logging
import platform
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

from moonpool.connectors.vllm import weight_changes
from moonpool.connectors.vllm.standins import or_standins
from moonpool.connectors.vllm.weight_changes import Change

# The range that README.md, docs/vllm.md, docs/engines.md and pyproject.toml claim: tests/test_versions.py
OLDEST, NEWEST = (0, 26), (0, 33)

if TYPE_CHECKING:
    from moonpool.connectors.vllm import standins as base
    from moonpool.connectors.vllm import standins as metrics
else:
    base = or_standins("vllm.distributed.kv_transfer.kv_connector.v1.base")
    metrics = or_standins("vllm.distributed.kv_transfer.kv_connector.v1.metrics")

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
    """Whether a failed load of a model with several KV cache groups, or with sliding windows, can be reported
    (0.30+): the blocks before a failed one are not enough to go on from there."""
    return TransferResults is not None


def tells_snapshots() -> bool:
    """Whether this vLLM lists in the plan of a step where it keeps snapshots of states (0.32+); also when
    there is no vLLM."""
    try:
        from vllm.v1.core.sched import output
    except ImportError:
        return True
    return hasattr(output, "KVConnectorBlockState")


def snapshots_of(output: Any, request_id: str) -> dict[int, dict[int, int]]:
    """What a step's plan tells of the snapshots that it leaves of a request's states (0.32+): for each KV
    cache group, from the tokens of a snapshot to the block that has it."""
    told: dict[int, dict[int, int]] = {}
    offers = getattr(getattr(output, "kv_connector_block_state", None), "boundary_state_offloads", None) or {}
    for group, block_id, tokens in offers.get(request_id, ()):
        told.setdefault(group, {})[tokens] = block_id
    return told


def scheduler_base(vllm_config: Any) -> Any:
    """vLLM's own scheduler class for this configuration."""
    ahead = vllm_config.scheduler_config.async_scheduling
    if getattr(vllm_config, "diffusion_config", None) is not None:  # a vLLM that has it has these classes
        from vllm.v1.core.sched import diffusion_scheduler

        return (
            diffusion_scheduler.DiffusionAsyncScheduler if ahead else diffusion_scheduler.DiffusionScheduler
        )
    if ahead:
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler

        return AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    return Scheduler


def new_request_data(scheduler: Any, request: Any, block_ids: tuple[list[int], ...]) -> Any:
    """What vLLM's scheduler gives workers with model runner V2 of a request in its first step."""
    from vllm.v1.core.sched.output import NewRequestData

    return NewRequestData.from_request(
        request, block_ids, request._all_token_ids, uses_mrope=scheduler.model_uses_mrope
    )


def count_loaded(request: Any, tokens: int) -> None:
    """In vLLM's own counts these tokens of the request came from a connector, as with any load."""
    stats = getattr(request, "prefill_stats", None)
    if stats is not None and request.num_preemptions == 0:
        external = stats.num_external_cached_tokens + tokens
        stats.set(stats.num_prompt_tokens, stats.num_local_cached_tokens, external)


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
    engine_core = core or _engine_core()
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


def _engine_core() -> type | None:
    """vLLM's class of an engine; None: this vLLM has none by that name, or there is no vLLM."""
    try:
        from vllm.v1.engine.core import EngineCore
    except ImportError:
        return None
    core: type = EngineCore
    return core


def _adapter_watchers(engine: Any) -> list[AdapterWatcher]:
    connector = getattr(getattr(engine, "scheduler", None), "connector", None)
    return [one for one in _ours(connector) if hasattr(one, "adapter_loading")]


def _ours(connector: Any) -> list[Any]:
    """The connector itself, and those behind it when it is vLLM's MultiConnector."""
    return [connector, *(getattr(connector, "_connectors", None) or ())]


def is_one_of_several(connector: Any) -> bool:
    """Whether a worker's connector stands behind vLLM's MultiConnector, which carries one connector's
    handshake only, to all of them."""
    try:
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
    except ImportError:
        return False
    return has_kv_transfer_group() and get_kv_transfer_group() is not connector


class WeightsWatcher(Protocol):
    """A connector, of the scheduler or of a worker. No method may raise."""

    def weights_changing(self, change: Change) -> None:
        """The engine's weights are about to be replaced. In the scheduler, called before its workers'."""

    def workers_left(self) -> None:
        """In the scheduler: all workers have returned from weights_changing."""

    def weights_are_files(self, path: str) -> None:
        """In a worker: it has loaded weights from the files at ``path``."""

    def model_loading(self) -> None:
        """In a worker: its model is about to be given weights, by whatever call."""

    def model_loaded(self, *, whole: bool) -> None:
        """In a worker: its model was given weights.

        whole: whether each of its parameters was.
        """


def watch_weights(core: type | None = None) -> bool:
    """Notifies the connectors of an engine, of its scheduler and of each worker, before a call of the engine
    to its workers that may replace weights, and after one that loaded them from files. Returns whether this
    vLLM allows it, also when there is no vLLM; one call is enough.

    core: the class that is asked; for tests.
    """
    engine_core = core or _engine_core()
    if engine_core is None:
        return not vllm_version()
    rpc, sleep = getattr(engine_core, "collective_rpc", None), getattr(engine_core, "sleep", None)
    if rpc is None or sleep is None:
        return False
    if hasattr(rpc, "_moonpool"):
        return True

    @functools.wraps(rpc)
    def told_rpc(
        engine: Any,
        method: Any,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        change = weight_changes.change_by(method, args, kwargs or {})
        if change is not None:
            _leave(engine, change)
        if change is None or not change.from_files:
            return rpc(engine, method, timeout, args, kwargs)
        try:
            answer = rpc(engine, method, timeout, args, kwargs)
        except BaseException:
            _leave(engine, Change(f"{change.how}, which failed"))
            raise
        _tell_workers(engine, tell_of_files, change.path)
        return answer

    @functools.wraps(sleep)
    def told_sleep(engine: Any, level: int = 1, *args: Any, **kwargs: Any) -> Any:
        change = weight_changes.sleep_change(level)
        if change is not None:
            _leave(engine, change)
        return sleep(engine, level, *args, **kwargs)

    vars(told_rpc)["_moonpool"] = True
    setattr(engine_core, rpc.__name__, told_rpc)
    setattr(engine_core, sleep.__name__, told_sleep)
    return True


def _leave(engine: Any, change: Change) -> None:
    scheduler = getattr(engine, "scheduler", None)
    several = [*_ours(getattr(scheduler, "connector", None)), getattr(scheduler, "ec_connector", None)]
    watchers = [one for one in several if hasattr(one, "weights_changing")]
    for watcher in watchers:
        watcher.weights_changing(change)
    if watchers and _tell_workers(engine, tell_of_change, change):
        for watcher in watchers:
            watcher.workers_left()


def _tell_workers(engine: Any, tell: Callable[[Any, Any], None], what: Any) -> bool:
    """Calls ``tell`` in each worker, by the way that vLLM's own calls take. Returns whether all returned."""
    try:
        engine.model_executor.collective_rpc(tell, None, (what,))
    except Exception:  # the engine's call must be carried out all the same
        logger("weights").exception("moonpool: the workers could not be told that their weights change")
        return False
    return True


def tell_of_change(worker: Any, change: Change) -> None:
    """Runs in a worker: its connectors leave the pool."""
    for watcher in _worker_watchers():
        watcher.weights_changing(change)


def tell_of_files(worker: Any, path: str) -> None:
    """Runs in a worker: its connectors may join the pool again.

    path: "": that of the worker's model.
    """
    served = str(getattr(getattr(worker, "model_config", None), "model", ""))
    for watcher in _worker_watchers():  # an older vLLM does not note what it has loaded
        watcher.weights_are_files(served if path in ("", served) else "")


def _worker_watchers() -> list[WeightsWatcher]:
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    group = get_kv_transfer_group() if has_kv_transfer_group() else None
    several = [*_ours(group), _encoder_connector()]
    return [one for one in several if hasattr(one, "weights_changing")]


def _encoder_connector() -> Any:
    """The connector of encoder outputs in this worker; None: there is none."""
    try:
        from vllm.distributed.ec_transfer import get_ec_transfer, has_ec_transfer
    except ImportError:
        return None
    return get_ec_transfer() if has_ec_transfer() else None


_model_watchers: weakref.WeakSet[Any] = weakref.WeakSet()


def watch_model(vllm_config: Any, watcher: WeightsWatcher, model: type | None = None) -> None:
    """Notifies a worker's connector, as long as it lives, when the model's load_weights is called, which
    trainers do without asking the engine.

    model: the class of the model; None: that of the configuration.
    """
    if model is None:
        try:
            from vllm.model_executor.model_loader.utils import get_model_architecture
        except ImportError:
            return
        model = get_model_architecture(vllm_config.model_config)[0]
    _model_watchers.add(watcher)
    load = getattr(model, "load_weights", None)
    if load is None or hasattr(load, "_moonpool"):
        return

    @functools.wraps(load)
    def told_load(self: Any, *args: Any, **kwargs: Any) -> Any:
        watchers = list(_model_watchers)
        for one in watchers:
            one.model_loading()
        names = {name for name, _ in self.named_parameters()} if watchers else set()
        loaded = load(self, *args, **kwargs)
        for one in watchers:
            one.model_loaded(whole=isinstance(loaded, set) and names <= loaded)
        return loaded

    vars(told_load)["_moonpool"] = True
    setattr(model, load.__name__, told_load)


def holds_prefixes(pool: Any) -> bool:
    """Whether the engine's own prefix cache has blocks, or running requests may add some. True when this
    vLLM does not tell."""
    try:
        if not pool.enable_caching:
            return False
        if pool.num_gpu_blocks - pool.get_num_free_blocks() > 1:  # the null block is always in use
            return True
        return any(block.block_hash is not None for block in pool.blocks)
    except AttributeError:
        return True


def caches_adapters_by_path() -> bool:
    """Whether vLLM's prefix cache distinguishes adapters of one name by their paths (0.32 does)."""
    try:
        from vllm.v1.core.kv_cache_utils import _gen_lora_extra_hash_keys

        lora = SimpleNamespace(lora_name="n", lora_path="the path", lora_int_id=1)
        return "the path" in repr(_gen_lora_extra_hash_keys(SimpleNamespace(lora_request=lora)))
    except Exception:  # a private function of vLLM may raise anything
        return False


def hash_algorithm(vllm_config: Any) -> str:
    """How vLLM names blocks of its own prefix cache; "": not by SHA-256, or it has no such cache."""
    config = getattr(vllm_config, "cache_config", None)
    algorithm = str(getattr(config, "prefix_caching_hash_algo", ""))
    cached = bool(getattr(config, "enable_prefix_caching", False))
    return algorithm if cached and algorithm.startswith("sha256") else ""


def cached_block(pool: Any, block_hash: bytes) -> Any:
    """The block of this hash in the engine's own prefix cache, of an engine with one KV cache group; None:
    it is not there."""
    found = pool.get_cached_block(block_hash, [0])
    return found[0] if found else None


def watch_idle(core: type | None = None, request_type: Any = None) -> bool:
    """Gives the connector of an engine's scheduler what wakes the engine, when it first looks for requests.
    An idle engine waits for one, and makes no step. Returns whether this vLLM allows it; one call is
    enough.

    core, request_type: the classes that are asked; for tests.
    """
    try:
        from vllm.v1.engine import EngineCoreRequestType
        from vllm.v1.engine.core import EngineCoreProc

        core, request_type = core or EngineCoreProc, request_type or EngineCoreRequestType
    except ImportError:
        pass
    look, wakeup = getattr(core, "_process_input_queue", None), getattr(request_type, "WAKEUP", None)
    if core is None or look is None or wakeup is None:
        return False
    if hasattr(look, "_moonpool"):
        return True

    @functools.wraps(look)
    def first_look(engine: Any) -> Any:
        wake = functools.partial(engine.input_queue.put_nowait, (wakeup, None))
        for one in _ours(getattr(getattr(engine, "scheduler", None), "connector", None)):
            if hasattr(one, "engine_waits"):
                one.engine_waits(wake)
        engine._process_input_queue = look.__get__(engine)  # from here on there is nothing in between
        return look(engine)

    vars(first_look)["_moonpool"] = True
    setattr(core, look.__name__, first_look)
    return True


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


def device_name() -> str:
    """What vLLM calls the kind of device that it runs on, and the kind of this host's processor."""
    try:
        from vllm.platforms import current_platform

        name = str(current_platform.get_device_name())
    except (ImportError, NotImplementedError):
        name = "unknown"
    return f"{name} {platform.machine()}"


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
