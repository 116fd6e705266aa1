"""Our options. TensorRT-LLM's kv_connector_config takes no keys of ours, so they stand in one environment
variable, as JSON; its ``server_url``, where the version has it, names the node."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from moonpool.connectors.options import PoolOptions, optional_text, refuse_unknown, text, wrong
from moonpool.connectors.pinned_arena import pin_bytes
from moonpool.core.config.units import parse_size
from moonpool.core.errors import ConfigError

VARIABLE = "MOONPOOL_TENSORRT_LLM"
FETCH_BYTES = 64 << 20
RING_BYTES = 64 << 20
RING_BYTES_MIN, RING_BYTES_MAX = 8 << 20, 2 << 30
COPY_THREADS = 4
COPY_THREADS_MAX = 64


@dataclass(frozen=True, slots=True)
class Settings(PoolOptions):
    """The connector's options.

    node: socket path, node name, or None for the default socket.
    tenant, namespace: whose blocks; docs/keys.md has both.
    require_pool: whether the engine refuses to start without a node, or when it cannot use the pool.
    save_decode: whether blocks of answers are saved, beside those of prompts.
    fetch: bytes that one lookup may bring from other hosts to the own node before it promises them; 0: none.
    gpu: whether a KV cache on a CUDA device is pooled.
    gpu_ring: bytes of pinned host memory, between a card and the pool, of each rank; less where they are
        refused.
    gpu_copy_threads: threads of each rank that copy from the pool into that memory.
    gpu_pin: bytes of the node's memory that the card of each rank reads by itself.
    """

    place: ClassVar[str] = VARIABLE

    save_decode: bool = False
    fetch: int = FETCH_BYTES
    gpu: bool = False
    gpu_ring: int = RING_BYTES
    gpu_copy_threads: int = COPY_THREADS
    gpu_pin: int = 0

    @classmethod
    def read(cls, environment: Mapping[str, str], server_url: str | None = None) -> Settings:
        """Raises ConfigError for text that is no JSON object, an unknown key (naming the nearest) and a value
        of the wrong type."""
        try:
            given = json.loads(environment.get(VARIABLE, "") or "{}")
        except ValueError as error:
            raise _wrong(VARIABLE, f"is not JSON: {error}") from None
        if not isinstance(given, dict):
            raise _wrong(VARIABLE, "must be a JSON object")
        # Where blocks are comes first, as in the documentation.
        known = [field.name for field in sorted(fields(cls), key=lambda field: field.name == "require_pool")]
        refuse_unknown(VARIABLE, given, known)
        if server_url and given.get("node") is None:
            given["node"] = server_url.removeprefix("moonpool://")
        return cls(
            node=optional_text(VARIABLE, "node", given.get("node")),
            tenant=text(VARIABLE, "tenant", given.get("tenant", "default")),
            namespace=text(VARIABLE, "namespace", given.get("namespace", "default")),
            require_pool=_flag(given, "require_pool"),
            save_decode=_flag(given, "save_decode"),
            fetch=_size(given, "fetch", FETCH_BYTES, at_least=0),
            gpu=_flag(given, "gpu"),
            gpu_ring=_size(given, "gpu_ring", RING_BYTES, at_least=RING_BYTES_MIN, at_most=RING_BYTES_MAX),
            gpu_copy_threads=_threads(given, "gpu_copy_threads"),
            gpu_pin=pin_bytes(VARIABLE, "gpu_pin", given.get("gpu_pin", 0)),
        )


def _flag(given: Mapping[str, Any], key: str) -> bool:
    value = given.get(key, False)
    if isinstance(value, bool):
        return value
    raise wrong(VARIABLE, key, f"must be true or false, not {value!r}")


def _size(
    given: Mapping[str, Any], key: str, default: int, *, at_least: int, at_most: int | None = None
) -> int:
    value = given.get(key, default)
    if isinstance(value, str):
        value = parse_size(value)
    fits = isinstance(value, int) and not isinstance(value, bool) and value >= at_least
    if fits and (at_most is None or value <= at_most):
        return int(value)
    within = "" if at_most is None else f" from {at_least >> 20}MiB to {at_most >> 20}MiB"
    raise wrong(VARIABLE, key, f"must be a size such as '64MiB'{within}, not {value!r}")


def _threads(given: Mapping[str, Any], key: str) -> int:
    value = given.get(key, COPY_THREADS)
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= COPY_THREADS_MAX:
        return value
    raise wrong(VARIABLE, key, f"must be a number of threads from 1 to {COPY_THREADS_MAX}, not {value!r}")


def _wrong(key: str, sentence: str) -> ConfigError:
    return ConfigError(f"{VARIABLE}: {sentence}", operation="config", key=key)
