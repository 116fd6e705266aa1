"""The options of ``kv_connector_extra_config``, checked once at start."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import ClassVar

from moonpool.connectors.options import PoolOptions, flag, optional_text, refuse_unknown, text
from moonpool.connectors.pinned_arena import pin_bytes
from moonpool.core.config.units import parse_size
from moonpool.core.errors import ConfigError
from moonpool.core.service.addresses import parse_address

PLACE = "kv_connector_extra_config"
TRANSPORTS = frozenset({"loopback", "shm", "cuda_ipc", "rdma", "efa", "tcp"})
BOOTSTRAP_VARIABLE = "VLLM_MOONCAKE_BOOTSTRAP_PORT"
BOOTSTRAP_PORT = 8998
LEASE_S_MAX = 3600.0
RING_BYTES_MIN, RING_BYTES_MAX = 8 << 20, 2 << 30
COPY_THREADS_MAX = 64
Bytes = int
Threads = int
PinBytes = int


@dataclass(frozen=True, slots=True)
class Settings(PoolOptions):
    """kv_connector_extra_config, checked.

    save_decode: whether blocks of answers are saved, beside those of prompts.
    handover: whether this engine hands KV over to decode engines, or takes it from prefill engines.
    handover_listen: where those engines reach its workers, "host:port".
    handover_transports: "all", or some of loopback, shm, cuda_ipc, rdma, efa, tcp with commas between.
    neighbours: whether blocks of this engine's own cache are offered to other engines, and theirs taken.
    neighbour_wait_s: seconds that a request waits at most for what another engine's cache has.
    lease_s: seconds that a finished prefill is kept for a decode engine that sends no heartbeat.
    bootstrap_port: port of the page for the concurrent form; 0: none; None: see ``bootstrap``.
    compute_if_faster: whether stored blocks are computed where measured rates say that a load takes longer.
    gpu: whether a KV cache on a CUDA device is pooled.
    gpu_ring: bytes of pinned host memory, between a card and the pool, of each worker; less where they are
        refused.
    gpu_copy_threads: threads of each worker that copy from the pool into that memory.
    gpu_pin: bytes of the node's memory that the card of each worker reads by itself.
    """

    place: ClassVar[str] = PLACE

    save_decode: bool = False
    handover: bool = True
    handover_listen: str = "127.0.0.1:0"
    handover_transports: str = "all"
    neighbours: bool = True
    neighbour_wait_s: float = 1.0
    lease_s: float = 10.0
    bootstrap_port: int | None = None
    compute_if_faster: bool = True
    gpu: bool = True
    gpu_ring: Bytes = 64 << 20
    gpu_copy_threads: Threads = 4
    gpu_pin: PinBytes = 0

    @classmethod
    def parse(cls, extra: Mapping[str, object]) -> Settings:
        """Raises ConfigError for an unknown key (naming the nearest) and for a value of the wrong type."""
        known = {field.name: field.type for field in fields(cls)}
        refuse_unknown(PLACE, extra, known)
        values: dict[str, object] = {}
        for key, value in extra.items():
            values[key] = _READERS[str(known[key])](key, value)
        settings = cls(**values)  # type: ignore[arg-type]
        parse_address(settings.handover_listen, f"{PLACE}.handover_listen")
        unknown = set(settings.transports() or ()) - TRANSPORTS
        if unknown:
            raise ConfigError(
                f"{PLACE}.handover_transports names {', '.join(sorted(unknown))}; there are "
                f"{', '.join(sorted(TRANSPORTS))}, and all",
                operation="config",
                key="handover_transports",
            )
        return settings

    def transports(self) -> list[str] | None:
        """The transports that the transfer engine may use; None: all."""
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
    raise _must_be(key, f"seconds above 0 and up to {LEASE_S_MAX:g}", value)


def _ring_bytes(key: str, value: object) -> int:
    try:
        size = parse_size(str(value)) if not isinstance(value, bool) else -1
    except ValueError:
        size = -1
    if RING_BYTES_MIN <= size <= RING_BYTES_MAX:
        return size
    raise _must_be(key, "a size from 8MiB to 2GiB, such as 64MiB", value)


def _threads(key: str, value: object) -> int:
    if not isinstance(value, bool) and isinstance(value, int) and 1 <= value <= COPY_THREADS_MAX:
        return value
    raise _must_be(key, f"a number of threads from 1 to {COPY_THREADS_MAX}", value)


def _must_be(key: str, what: str, value: object) -> ConfigError:
    return ConfigError(f"{PLACE}.{key} must be {what}, not {value!r}", operation="config", key=key)


def _optional_port(key: str, value: object) -> int | None:
    return None if value is None else _port(f"{PLACE}.{key}", value)


_READERS: Mapping[str, Callable[[str, object], object]] = {
    "bool": functools.partial(flag, PLACE),
    "str": functools.partial(text, PLACE),
    "str | None": functools.partial(optional_text, PLACE),
    "float": _seconds,
    "int | None": _optional_port,
    "Bytes": _ring_bytes,
    "Threads": _threads,
    "PinBytes": functools.partial(pin_bytes, PLACE),
}
