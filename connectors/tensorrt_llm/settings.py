"""Our options. TensorRT-LLM's kv_connector_config takes no keys of ours, so they stand in one environment
variable, as JSON; its ``server_url``, where the version has it, names the node."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from moonpool.connectors.options import PoolOptions, optional_text, refuse_unknown, text, wrong
from moonpool.core.config.units import parse_size
from moonpool.core.errors import ConfigError

VARIABLE = "MOONPOOL_TENSORRT_LLM"
STAGING_BYTES = 512 << 20
FETCH_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Settings(PoolOptions):
    """The connector's options.

    node: socket path, node name, or None for the default socket.
    tenant, namespace: whose blocks; docs/keys.md has both.
    require_pool: whether the engine refuses to start without a node, or when it cannot use the pool.
    save_decode: whether blocks of answers are saved, beside those of prompts.
    staging: bytes of host memory, on every rank, between the engine's memory and the pool's.
    fetch: bytes that one lookup may read from other hosts before it promises them; 0: none.
    """

    place: ClassVar[str] = VARIABLE

    save_decode: bool = False
    staging: int = STAGING_BYTES
    fetch: int = FETCH_BYTES

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
            staging=_size(given, "staging", STAGING_BYTES, at_least=1),
            fetch=_size(given, "fetch", FETCH_BYTES, at_least=0),
        )


def _flag(given: Mapping[str, Any], key: str) -> bool:
    value = given.get(key, False)
    if isinstance(value, bool):
        return value
    raise wrong(VARIABLE, key, f"must be true or false, not {value!r}")


def _size(given: Mapping[str, Any], key: str, default: int, *, at_least: int) -> int:
    value = given.get(key, default)
    if isinstance(value, str):
        value = parse_size(value)
    if isinstance(value, int) and not isinstance(value, bool) and value >= at_least:
        return value
    raise wrong(VARIABLE, key, f"must be a size such as '512MiB', not {value!r}")


def _wrong(key: str, sentence: str) -> ConfigError:
    return ConfigError(f"{VARIABLE}: {sentence}", operation="config", key=key)
