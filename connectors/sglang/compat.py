"""Every difference between the SGLang versions that this backend runs under (0.5.18 to 0.5.23), and nothing
else.

Without SGLang (unit tests, type checks) the base classes are empty stand-ins, so that the backend can be
imported.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
from typing import TYPE_CHECKING, Any

from moonpool.connectors.sglang import updates

if TYPE_CHECKING:
    from moonpool.connectors.sglang import standins as hicache_storage
    from moonpool.connectors.sglang import standins as metrics_collector
else:
    try:
        from sglang.srt.mem_cache import hicache_storage
        from sglang.srt.observability import metrics_collector
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("sglang", "torch"):
            raise
        from moonpool.connectors.sglang import standins as hicache_storage
        from moonpool.connectors.sglang import standins as metrics_collector

PoolName = hicache_storage.PoolName
PoolTransferResult = hicache_storage.PoolTransferResult
Storage = hicache_storage.HiCacheStorage
StorageMetrics = metrics_collector.StorageMetrics


def transfer_result(pages: int, hits: dict[Any, int], lengths: set[int]) -> PoolTransferResult:
    """What batch_exists_v2 returns. ``lengths``: all that can be restored, which 0.5.18 does not ask for."""
    known: dict[str, Any] = {
        "kv_hit_pages": pages,
        "extra_pool_hit_pages": hits,
        "restorable_prefix_pages": sorted(lengths),
    }
    names = {field.name for field in dataclasses.fields(PoolTransferResult)}
    return PoolTransferResult(**{name: value for name, value in known.items() if name in names})


def first_page(pool: Any) -> Any:
    """The slots of a host pool's first page, as SGLang gives them."""
    import torch

    return torch.arange(int(getattr(pool, "page_size", 1) or 1))


def server_args() -> Any:
    """The arguments of the server in this process."""
    from sglang.srt.runtime_context import get_server_args

    return get_server_args()


def model_config(args: Any) -> Any:
    """SGLang's ModelConfig of the target model."""
    from sglang.srt.configs.model_config import ModelConfig

    return ModelConfig.from_server_args(args)


def draft_model_config(args: Any) -> Any:
    """SGLang's ModelConfig of the draft model."""
    from sglang.srt.configs.model_config import ModelConfig

    return ModelConfig.from_server_args(
        args,
        model_path=args.speculative_draft_model_path,
        model_revision=args.speculative_draft_model_revision,
        is_draft_model=True,
    )


def keys_have_namespaces() -> bool:
    """Whether SGLang's page keys tell LoRA adapters and cache salts apart. 0.5.18's are of tokens alone."""
    try:
        from sglang.srt.mem_cache import utils
    except ModuleNotFoundError:
        return True  # unit tests: the stand-ins follow the newest version
    return hasattr(utils, "storage_namespace_seed")


def weight_updater() -> type | None:
    """The class that replaces a running model's weights; None where SGLang has none of that name."""
    try:
        module = importlib.import_module(updates.MODULE)
    except ImportError:
        return None
    return getattr(module, updates.CLASS, None)


def hub_folder(name: str) -> str:
    """The folder of the hub's model ``name`` on this host. Raises when there is none."""
    from huggingface_hub import snapshot_download

    return str(snapshot_download(name, local_files_only=True))


def logger(name: str) -> logging.Logger:
    """A logger that speaks through SGLang's handlers."""
    return logging.getLogger(f"sglang.moonpool.{name}")
