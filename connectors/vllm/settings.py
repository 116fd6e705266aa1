"""The options of ``kv_connector_extra_config``, checked once at start."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from moonpool.core import paths
from moonpool.core.errors import ConfigError

_PLACE = "kv_connector_extra_config"


@dataclass(frozen=True, slots=True)
class Settings:
    """node: socket path, node name, or None for the default socket; require_pool: refuse to start without a
    node; tenant, namespace: whose blocks, see docs/keys.md; save_decode: save the blocks of answers, not only
    of prompts."""

    node: str | None = None
    require_pool: bool = False
    tenant: str = "default"
    namespace: str = "default"
    save_decode: bool = False

    @classmethod
    def parse(cls, extra: Mapping[str, object]) -> Settings:
        """Raises ConfigError for an unknown key (naming the nearest) and for a value of the wrong type."""
        known = {field.name: field.type for field in fields(cls)}
        for key in extra:
            if key not in known:
                raise ConfigError(_unknown(key, list(known)), operation="config", key=key)
        values: dict[str, object] = {}
        for key, value in extra.items():
            values[key] = _flag(key, value) if known[key] == "bool" else _text(key, value)
        return cls(**values)  # type: ignore[arg-type]

    def socket(self) -> Path:
        """The Unix socket to connect to. Raises ConfigError for an address of another host."""
        if self.node is None:
            return paths.default_node_socket()
        if "/" in self.node:
            return paths.check_socket_path(Path(self.node))
        if ":" in self.node:
            raise ConfigError(
                f"{_PLACE}.node is {self.node!r}: this release reaches nodes of its own host only; give the "
                f"path of a node's Unix socket, or leave it out for the default one",
                operation="config",
                key="node",
                peer=self.node,
            )
        return paths.node_socket(self.node)


def _unknown(key: str, known: list[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    if key in ("token", "cluster_token"):
        return (
            f"{_PLACE}.{key} is not an option: a secret has no place on a command line; set "
            f"{paths.TOKEN_FILE_VARIABLE} in the environment"
        )
    hint = f"; did you mean {near[0]!r}?" if near else f"; the options are {', '.join(known)}"
    return f"{_PLACE} has an unknown key {key!r}{hint}"


def _flag(key: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise ConfigError(f"{_PLACE}.{key} must be true or false, not {value!r}", operation="config", key=key)


def _text(key: str, value: object) -> str | None:
    if isinstance(value, str) and value:
        return value
    if value is None and key == "node":
        return None
    raise ConfigError(f"{_PLACE}.{key} must be a non-empty text, not {value!r}", operation="config", key=key)
