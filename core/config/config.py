"""The configuration: one typed, frozen object, made once at start and handed down.

Each value comes from the last of these that names it, and remembers which:

    the default  <  a TOML file (--config FILE, else MOONPOOL_CONFIG)  <  MOONPOOL_SECTION_KEY  <  an argument

A key that does not exist is an error that names it, its place and the nearest right name. The cluster token
comes from a file or the environment, never from an argument, where other users of the host would see it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

import msgspec

from moonpool.core.config.config_sources import Origin, load_sections, show_value
from moonpool.core.config.paths import (
    TOKEN_BYTES_GOOD,
    check_token,
    client_token,
    default_node_socket,
    read_or_create_token,
)
from moonpool.core.config.units import parse_size
from moonpool.core.errors import ConfigError

Size = Annotated[int, msgspec.Meta(ge=0, extra={"unit": "bytes"}, extra_json_schema={"x-unit": "bytes"})]
# Of an arena: also a share of the available memory, as "80%".
ArenaSize = Annotated[
    int, msgspec.Meta(ge=0, extra={"unit": "arena bytes"}, extra_json_schema={"x-unit": "bytes"})
]
Duration = Annotated[
    float, msgspec.Meta(ge=0, extra={"unit": "seconds"}, extra_json_schema={"x-unit": "seconds"})
]
Count = Annotated[int, msgspec.Meta(ge=1)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
Secret = Annotated[str, msgspec.Meta(extra={"secret": "yes"})]


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the sections. The meaning of each key stands in config_help.py."""


class Cluster(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    token_file: str = ""
    token: Secret = ""
    admin_token_file: str = ""
    admin_token: Secret = ""
    master: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    tls_ca: str = ""
    tls_control: str = "off"
    tls_name: str = ""


class Node(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str = "default"
    socket: str = ""
    dram: ArenaSize = parse_size("1GiB")
    tenants: dict[str, ArenaSize] = {}
    listen: str = "127.0.0.1:7710"
    advertise: str = ""
    host_id: str = ""
    http: str = "127.0.0.1:7711"
    key_bytes_max: Count = 1024
    parts_max: Count = 4096
    frame_bytes_max: Size = parse_size("8MiB")
    frame_keys_max: Count = 16384
    object_share_max: Share = 0.25
    objects_max: Annotated[int, msgspec.Meta(ge=0)] = 0
    slab_bytes: Size = 0
    connections_max: Count = 512
    remote_connections_max: Count = 4096
    pins_share_max: Share = 0.75
    remote_pins_share_max: Share = 0.25
    remote_pin_idle_s: Duration = 300.0
    scrub_bytes_per_s: Size = parse_size("64MiB")
    http_connections_max: Count = 64
    http_timeout_s: Duration = 10.0
    ssd: list[str] = []
    ssd_clean_share: Share = 0.25
    ssd_stop_s: Duration = 10.0
    ssd_io: str = "auto"
    ssd_depth: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 32
    ssd_records_max: Annotated[int, msgspec.Meta(ge=0)] = 0
    ssd_segment_bytes: Size = 0
    events: str = ""
    events_replay: str = ""


class Master(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    listen: str = "127.0.0.1:7700"
    http: str = "127.0.0.1:7701"
    nodes_max: Count = 1024
    clients_max: Count = 4096
    keys_max: Count = 64 << 20
    removals_max: Count = 1 << 20
    frame_bytes_max: Size = parse_size("8MiB")
    frame_keys_max: Count = 16384
    suspect_after_s: Duration = 1.0
    gone_after_s: Duration = 30.0
    http_connections_max: Count = 64
    http_timeout_s: Duration = 10.0


class Proxy(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The names are those of disagg_proxy.settings; what belongs to a part of it has the part's name in
    front.
    """

    listen: str = "127.0.0.1:8080"
    engines: list[str] = []
    prefill: list[str] = []
    decode: list[str] = []
    policy: str = "auto"
    handover: str = "auto"
    api_keys_file: str = ""
    open: bool = False
    access_log: str = ""
    otlp_endpoint: str = ""
    tokenizer: list[str] = []
    events: list[str] = []
    pool_events: list[str] = []
    ttft_slo: Duration = 0.0
    gap_slo: Duration = 0.0
    queue_max: Annotated[int, msgspec.Meta(ge=0)] = 0
    queue_deadline: Duration = 30.0
    peer_listen: str = ""
    peers: list[str] = []
    processes: Count = 1
    process_listen: str = ""
    discovery: list[str] = []
    discovery_grace_s: Duration = 10.0
    engines_max: Count = 1024
    discovery_keys_file: str = ""
    discovery_allow: list[str] = []
    discovery_registry_file: str = ""
    relay_paths: list[str] = []
    engine_key_file: str = ""
    client_connections_max: Count = 10_000
    head_bytes_max: Size = parse_size("32KiB")
    body_bytes_max: Size = parse_size("64MiB")
    bodies_bytes_max: Size = parse_size("1GiB")
    address_share: Share = 0.5
    members_max: Count = 1024
    prompts_max: Count = 4096
    prompt_ids_max: Count = 1 << 20
    pipelined_bytes_max: Size = parse_size("64KiB")
    write_buffer_bytes_max: Size = parse_size("256KiB")
    unread_bytes_max: Size = parse_size("512MiB")
    idle_upstreams_max: Annotated[int, msgspec.Meta(ge=0)] = 256
    retries_max: Annotated[int, msgspec.Meta(ge=0)] = 2
    head_s: Duration = 20.0
    body_stall_s: Duration = 30.0
    body_bytes_per_s_min: Size = 1024
    client_idle_s: Duration = 75.0
    client_stall_s: Duration = 300.0
    linger_s: Duration = 2.0
    decide_s: Duration = 60.0
    connect_s: Duration = 5.0
    first_byte_s: Duration = 600.0
    stream_stall_s: Duration = 600.0
    suspect_engine_s: Duration = 5.0
    silent_engine_s: Duration = 15.0
    upstream_idle_s: Duration = 4.0
    tcp_dead_peer_s: Count = 30
    drain_s: Duration = 30.0
    health_path: str = "/health"
    health_interval_s: Duration = 1.0
    health_timeout_s: Duration = 2.0
    health_timeouts_max: Count = 3
    breaker_failures_max: Count = 5
    breaker_open_s: Duration = 2.0
    breaker_open_s_max: Duration = 30.0


class Engine(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine of `moonpool up`: a real one (engine = "vllm" or "sglang", model), one without a model
    (engine = "mock"), or any command that answers GET /health.
    """

    name: str = ""
    engine: str = "vllm"
    model: str = ""
    node: str = ""
    executable: str = ""
    args: list[str] = []
    command: list[str] = []
    host: str = "127.0.0.1"
    port: Port = 0
    env: dict[str, str] = {}
    role: str = "both"
    kv_pool: bool = True
    kv_role: str = "kv_both"
    kv_load_failure_policy: str = "recompute"
    require_pool: bool = False
    kv_events: bool = True
    health: str = "/health"


class UpNode(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of several nodes of `moonpool up`. What is empty is as in the section [node]."""

    name: str = ""
    dram: ArenaSize = 0
    ssd: list[str] = []
    listen: str = ""
    advertise: str = ""
    host_id: str = ""
    http: str = ""
    env: dict[str, str] = {}


class Up(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    engine: list[Engine] = []
    node: bool | list[UpNode] = True
    master: bool = False
    proxy: bool = True
    log_dir: str = ""
    ready_timeout_s: Duration = 900.0
    start_attempts_max: Count = 3
    grace_s: Duration = 15.0
    backoff_initial_s: Duration = 0.5
    backoff_max_s: Duration = 30.0
    backoff_reset_s: Duration = 60.0
    progress_interval_s: Duration = 10.0


class Log(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    level: str = "info"
    format: str = "text"


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of one process. ``origins`` maps "section.key" to where the value came from."""

    cluster: Cluster = Cluster()
    node: Node = Node()
    master: Master = Master()
    proxy: Proxy = Proxy()
    up: Up = Up()
    log: Log = Log()
    origins: dict[str, Origin] = {}

    def origin(self, key: str) -> Origin:
        """Where the value of "section.key" came from."""
        return self.origins.get(key, Origin("default"))

    def read_token(self) -> bytes:
        """The cluster token: as configured, else the one that the processes of this user on this host share.

        Raises ConfigError when a file cannot serve, or when the environment gives both a token and a file.
        """
        return self._secret("token")

    def client_token(self, socket: str = "") -> bytes:
        """What to show the node at ``socket`` ("": the host's default one), or its cluster: the cluster token
        where one is configured, else what stands beside the socket.
        """
        if self.token_is_configured:
            return self.read_token()
        return client_token(socket or default_node_socket())

    def warn_of_short_token(self, log: logging.Logger) -> None:
        """For processes that listen: a token that a person chose may be too short to be a secret."""
        if self.token_is_configured and len(self.read_token()) < TOKEN_BYTES_GOOD:
            log.warning(
                "the cluster token has fewer than %d characters and can be guessed from one recorded "
                "handshake; make one with: openssl rand -hex 32",
                TOKEN_BYTES_GOOD,
            )

    def read_admin_token(self) -> bytes:
        """What admin actions must show: as configured, else a file that the processes of this user on this
        host share.
        """
        return self._secret("admin_token")

    def _secret(self, name: str) -> bytes:
        secret: str = getattr(self.cluster, name)
        file: str = getattr(self.cluster, f"{name}_file")
        variable = f"MOONPOOL_CLUSTER_{name.upper()}"
        by = self.origin(f"cluster.{name}_file").kind
        if secret and by not in ("environment", "argument"):
            return check_token(secret.encode(), f"the variable {variable}")
        if secret and by == "environment":
            raise ConfigError(
                f"both {variable} and {variable}_FILE are set; unset one of them",
                operation="token",
                key=f"cluster.{name}",
            )
        return read_or_create_token(file or None, env={}, name=name.replace("_", "-"))

    @property
    def token_is_configured(self) -> bool:
        """Whether a person chose the cluster token; one that was made on demand does not count."""
        return bool(self.cluster.token or self.cluster.token_file)

    def rows(self) -> Iterator[tuple[str, str, str]]:
        """(key, value, origin) of each setting, in the order of the documentation. A secret shows only that
        it is set.
        """
        for section in SECTIONS:
            values = getattr(self, section)
            for field in msgspec.structs.fields(values):
                key = f"{section}.{field.name}"
                yield key, show_value(field.type, getattr(values, field.name)), str(self.origin(key))


SECTIONS: dict[str, type[Section]] = {
    "cluster": Cluster,
    "node": Node,
    "master": Master,
    "proxy": Proxy,
    "up": Up,
    "log": Log,
}

# The tables inside of sections.
TABLES: dict[str, type[Section]] = {"up.engine": Engine, "up.node": UpNode}

# Never in a file and never in the schema of one.
SECRETS = ("cluster.token", "cluster.admin_token")

CHOICES: dict[str, tuple[str, ...]] = {
    "cluster.tls_control": ("off", "on", "mutual"),
    "node.ssd_io": ("auto", "io_uring", "threads"),
    "proxy.handover": (
        "auto",
        "two_step",
        "concurrent",
        "one_shot",
        "context_first",
        "generation_first",
    ),
    "log.level": ("debug", "info", "warning", "error"),
    "log.format": ("text", "json"),
    "up.engine.engine": ("vllm", "sglang", "mock"),
    "up.engine.role": ("both", "prefill", "decode"),
    "up.engine.kv_role": ("kv_both", "kv_producer", "kv_consumer"),
    "up.engine.kv_load_failure_policy": ("recompute", "fail"),
}


def load(
    file: str | Path | None = None,
    *,
    env: Mapping[str, str] | None = None,
    arguments: Mapping[str, object] | None = None,
) -> Config:
    """The configuration of this process.

    file: a TOML file; None takes MOONPOOL_CONFIG, when that is set. arguments: "section.key" -> value, of the
    options that were given; a None is an option that was not given. Raises ConfigError for anything unknown,
    malformed or out of range, with the name, its place and the remedy.
    """
    sections, origins = load_sections(
        SECTIONS,
        file=file,
        env=os.environ if env is None else env,
        arguments={key: value for key, value in (arguments or {}).items() if value is not None},
        choices=CHOICES,
    )
    return Config(**sections, origins=origins)
