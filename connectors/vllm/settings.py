"""The options of ``kv_connector_extra_config``, checked once at start."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from moonpool.core import paths
from moonpool.core.addresses import parse_address
from moonpool.core.errors import ConfigError

_PLACE = "kv_connector_extra_config"
TRANSPORTS = frozenset({"loopback", "shm", "tcp"})
BOOTSTRAP_VARIABLE = "VLLM_MOONCAKE_BOOTSTRAP_PORT"
BOOTSTRAP_PORT = 8998
LEASE_S_MAX = 3600.0


@dataclass(frozen=True, slots=True)
class Settings:
    """node: socket path, node name, or None for the default socket; require_pool: refuse to start without a
    node; tenant, namespace: whose blocks, see docs/keys.md; save_decode: save the blocks of answers, not only
    of prompts.

    handover: whether this engine hands KV over to decode engines, or takes it from prefill engines;
    handover_listen: where its workers are reached by those, "host:port"; handover_transports: which may be
    used, "all" or some of loopback, shm, tcp with commas between; lease_s: how long a finished prefill is
    kept for a decode engine that gives no sign of life; bootstrap_port: of the page for the concurrent form,
    0: none, None: see ``bootstrap``."""

    node: str | None = None
    require_pool: bool = False
    tenant: str = "default"
    namespace: str = "default"
    save_decode: bool = False
    handover: bool = True
    handover_listen: str = "127.0.0.1:0"
    handover_transports: str = "all"
    lease_s: float = 10.0
    bootstrap_port: int | None = None

    @classmethod
    def parse(cls, extra: Mapping[str, object]) -> Settings:
        """Raises ConfigError for an unknown key (naming the nearest) and for a value of the wrong type."""
        known = {field.name: field.type for field in fields(cls)}
        for key in extra:
            if key not in known:
                raise ConfigError(_unknown(key, list(known)), operation="config", key=key)
        values: dict[str, object] = {}
        for key, value in extra.items():
            values[key] = _READERS[str(known[key])](key, value)
        settings = cls(**values)  # type: ignore[arg-type]
        parse_address(settings.handover_listen, f"{_PLACE}.handover_listen")
        unknown = set(settings.transports() or ()) - TRANSPORTS
        if unknown:
            raise ConfigError(
                f"{_PLACE}.handover_transports names {', '.join(sorted(unknown))}; there are "
                f"{', '.join(sorted(TRANSPORTS))}, and all",
                operation="config",
                key="handover_transports",
            )
        return settings

    def transports(self) -> list[str] | None:
        """What the transfer engine may use; None: everything."""
        if self.handover_transports == "all":
            return None
        return [name.strip() for name in self.handover_transports.split(",")]

    def bootstrap(self, environment: Mapping[str, str], *, only_produces: bool) -> int:
        """The port of the bootstrap page, 0 for none: what is configured, else what vLLM's own variable says,
        else the port that its proxies expect, on engines that do nothing but prefill."""
        if self.bootstrap_port is not None:
            return self.bootstrap_port
        text = environment.get(BOOTSTRAP_VARIABLE, "")
        if text:
            return _port(BOOTSTRAP_VARIABLE, text)
        return BOOTSTRAP_PORT if only_produces else 0

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


def _port(key: str, value: object) -> int:
    if not isinstance(value, bool) and isinstance(value, int | str) and str(value).isascii():
        text = str(value)
        if text.isdigit() and int(text) <= 65535:
            return int(text)
    raise ConfigError(f"{key} must be a port from 0 to 65535, not {value!r}", operation="config", key=key)


def _seconds(key: str, value: object) -> float:
    try:
        seconds = float(value) if not isinstance(value, bool) else -1.0  # type: ignore[arg-type]
    except (TypeError, ValueError):
        seconds = -1.0
    if 0 < seconds <= LEASE_S_MAX:
        return seconds
    raise ConfigError(
        f"{_PLACE}.{key} must be seconds above 0 and up to {LEASE_S_MAX:g}, not {value!r}",
        operation="config",
        key=key,
    )


def _optional_port(key: str, value: object) -> int | None:
    return None if value is None else _port(f"{_PLACE}.{key}", value)


_READERS: Mapping[str, Callable[[str, object], object]] = {
    "bool": _flag,
    "str": _text,
    "str | None": _text,
    "float": _seconds,
    "int | None": _optional_port,
}
