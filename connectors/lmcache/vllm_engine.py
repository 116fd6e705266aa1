"""The vLLM that LMCache runs in. LMCache's keys have a model and the type and shape of its KV. Only vLLM's
configuration has the rest of what decides the meaning of the KV: weights, overrides, quantisation, rope,
types by layer.

A worker of vLLM makes LMCache, and LMCache makes this connector, while vLLM's configuration is current. In
other processes (LMCache's server, SGLang, a process of vLLM that only looks up) there is no configuration.
"""

from __future__ import annotations

import sys
from typing import Any

from moonpool.connectors.vllm import engine_config, identity
from moonpool.core.errors import ConfigError
from moonpool.core.store.keys import Json


def current() -> Any:
    """The configuration of the vLLM that is starting in this process, or None."""
    module = sys.modules.get("vllm.config")
    found = getattr(module, "get_current_vllm_config_or_none", None)
    return None if found is None else found()


def identity_of_engine(role: str | None) -> dict[str, Json] | None:
    """What tells this engine's KV from another's, beside LMCache's own keys; None where nothing says it.
    role: of this process, as LMCache names it.

    Raises ConfigError for an engine whose KV cannot be told from another's or used by another, and Pending
    while its weights are still being read.
    """
    return identity_with(current(), role)


def identity_with(config: Any, role: str | None) -> dict[str, Json] | None:
    """The same, where ``current`` was at hand before and is not any more."""
    if config is None and role == "scheduler" and "vllm.config" in sys.modules:
        raise ConfigError(
            "the scheduler of vLLM cannot tell what its workers compute with, so it must ask them: set "
            "enable_scheduler_bypass_lookup to false",
            operation="fingerprint",
            key="enable_scheduler_bypass_lookup",
        )
    if getattr(config, "model_config", None) is None:
        return None
    if why := engine_config.context_refusal(config) or engine_config.weights_refusal(config):
        raise ConfigError(why, operation="fingerprint", key="model")
    cache = config.cache_config
    skipped = sorted(getattr(cache, "kv_cache_dtype_skip_layers", None) or ())
    fields = identity.identity(config, block_tokens=0, kv_dtype=str(cache.cache_dtype), form="lmcache")
    return {**fields, "skipped_layers": skipped}
