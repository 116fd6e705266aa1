"""The settings of a configuration: each is stated here once, with its type, default, bounds, unit and help.

The loader (config_sources.py), the schema of a file and the tables of docs/configuration.md (schema.py) read
them here.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import inspect

from moonpool.core.config.units import parse_size


def about(
    help: str,
    *,
    choices: tuple[str, ...] = (),
    ge: float | None = None,
    le: float | None = None,
) -> msgspec.Meta:
    """Of one setting: its help, which goes on behind "KEY: "; the values that it may have; its bounds."""
    return msgspec.Meta(
        description=help,
        ge=ge,
        le=le,
        extra={"choices": choices} if choices else None,
        extra_json_schema={"enum": list(choices)} if choices else None,
    )


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
    """Base of the sections."""


class Setting(NamedTuple):
    """What the definition of one setting says. type: with bounds, unit and help around the bare type."""

    name: str
    type: inspect.Type
    default: object

    @property
    def bare(self) -> inspect.Type:
        """Without what stands around it: IntType has the bounds, ListType the type of the items."""
        return self.type.type if isinstance(self.type, inspect.Metadata) else self.type

    @property
    def help(self) -> str:
        described = self.type.extra_json_schema if isinstance(self.type, inspect.Metadata) else None
        return str((described or {})["description"])

    @property
    def unit(self) -> str:
        """seconds, bytes, arena bytes, or "" for none."""
        return str(extra_of(self.type).get("unit", ""))


def settings_of(kind: type[Section]) -> tuple[Setting, ...]:
    """All of a section, in the order of the documentation."""
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    made = kind()
    return tuple(Setting(field.name, field.type, getattr(made, field.name)) for field in info.fields)


def extra_of(kind: inspect.Type) -> dict[str, Any]:
    """What about() and the types above say of a type besides bounds: unit, choices, secret."""
    return (kind.extra or {}) if isinstance(kind, inspect.Metadata) else {}


class Cluster(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    token_file: Annotated[
        str,
        about(
            "a 0600 file that holds the cluster token; empty: the token that the first process on "
            "the host makes, in the runtime folder"
        ),
    ] = ""
    token: Annotated[
        Secret, about("the cluster token itself; only from the environment, MOONPOOL_CLUSTER_TOKEN")
    ] = ""
    admin_token_file: Annotated[
        str,
        about(
            "a 0600 file with the token that admin actions need; empty: one that the first process "
            "on the host makes, in the runtime folder"
        ),
    ] = ""
    admin_token: Annotated[
        Secret, about("that token itself; only from the environment, MOONPOOL_CLUSTER_ADMIN_TOKEN")
    ] = ""
    master: Annotated[
        str,
        about(
            "host:port of the master that this node joins; empty: none; on another host: needs a "
            "cluster token"
        ),
    ] = ""
    tls_cert: Annotated[
        str,
        about(
            "certificate (PEM) of the HTTP pages of node and master, which become https, and of "
            "control connections"
        ),
    ] = ""
    tls_key: Annotated[str, about("its key (PEM, 0600, without a password)")] = ""
    tls_ca: Annotated[
        str,
        about(
            "authorities (PEM) that `moonpool status` trusts, and who dials a master inside TLS; "
            "empty: the system's"
        ),
    ] = ""
    tls_control: Annotated[
        str,
        about(
            "connections to the master; on: inside TLS, it shows tls_cert; mutual: who dials it "
            "shows one, too, and tls_ca vouches for both; off: in plain",
            choices=("off", "on", "mutual"),
        ),
    ] = "off"
    tls_name: Annotated[
        str, about("the name that the master's certificate must have; empty: the host in cluster.master")
    ] = ""


class Node(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: Annotated[str, about("names the node's socket, node-NAME.sock")] = "default"
    socket: Annotated[
        str, about("path of the node's Unix socket; empty: node-NAME.sock in the runtime folder")
    ] = ""
    dram: Annotated[
        ArenaSize,
        about(
            "DRAM arena of the tenant called default, such as 2GiB; 80%: that share of the available memory"
        ),
    ] = parse_size("1GiB")
    tenants: Annotated[
        dict[str, ArenaSize], about("further tenants, each with an arena of its own size")
    ] = {}
    listen: Annotated[
        str, about("address of the wire, for other hosts, or off; not loopback: needs a cluster token")
    ] = "127.0.0.1:7710"
    advertise: Annotated[
        str,
        about(
            "host:port by which others reach the wire; empty: node.listen, or where that is 0.0.0.0 "
            "or ::, this host's address on the way to the master"
        ),
    ] = ""
    host_id: Annotated[
        str,
        about("nodes with the same one share memory and fate; empty: made of the ids of machine and boot"),
    ] = ""
    http: Annotated[
        str, about("address of /metrics, /health and /stat, or off; not loopback: needs a cluster token")
    ] = "127.0.0.1:7711"
    key_bytes_max: Annotated[Count, about("the longest key, bytes")] = 1024
    parts_max: Annotated[Count, about("the most parts of one object")] = 4096
    frame_bytes_max: Annotated[Size, about("the longest frame on the wire")] = parse_size("8MiB")
    frame_keys_max: Annotated[Count, about("the most keys in one frame; clients split larger calls")] = 16384
    object_share_max: Annotated[Share, about("the largest object, as a share of its tenant's arena")] = 0.25
    objects_max: Annotated[
        int,
        about(
            "the most objects of one tenant; 0: one for each KiB of the arena up to 8 Mi, then one "
            "for each 64 KiB",
            ge=0,
        ),
    ] = 0
    slab_bytes: Annotated[
        Size, about("what a client leases at a time for its puts; 0: derived from the arena")
    ] = 0
    connections_max: Annotated[Count, about("the most connections on the Unix socket")] = 512
    remote_connections_max: Annotated[
        Count,
        about(
            "the most connections of other hosts, as far as open files allow; they take no place "
            "from those on the Unix socket"
        ),
    ] = 4096
    pins_share_max: Annotated[
        Share, about("share of an arena that pins may hold; beyond it a pin is refused as a miss")
    ] = 0.75
    remote_pins_share_max: Annotated[Share, about("share of it that pins of other hosts may hold")] = 0.25
    remote_pin_idle_s: Annotated[
        Duration, about("how long another host may hold pins without a word before its connection ends")
    ] = 300.0
    scrub_bytes_per_s: Annotated[
        Size, about("how fast objects in memory are held against their checksums; 0: not at all")
    ] = parse_size("64MiB")
    http_connections_max: Annotated[
        Count, about("the most HTTP connections; beyond it the oldest is closed")
    ] = 64
    http_timeout_s: Annotated[Duration, about("the longest life of one HTTP connection")] = 10.0
    ssd: Annotated[
        list[str], about("directories for what does not fit into memory, each DIR:SIZE; none: no SSD")
    ] = []
    ssd_clean_share: Annotated[
        Share, about("share of an arena that is kept free, or written to the SSD, ahead of eviction")
    ] = 0.25
    ssd_stop_s: Annotated[Duration, about("how long a stop may take to write what is in memory only")] = 10.0
    ssd_io: Annotated[
        str,
        about(
            "auto: io_uring where the kernel allows it, else threads", choices=("auto", "io_uring", "threads")
        ),
    ] = "auto"
    ssd_depth: Annotated[int, about("reads in flight at one directory, and writes", ge=1, le=1024)] = 32
    ssd_records_max: Annotated[
        int, about("the most objects in one directory; 0: derived from its size", ge=0)
    ] = 0
    ssd_segment_bytes: Annotated[
        Size, about("piece in which a directory is written and reclaimed; 0: derived from its size")
    ] = 0
    events: Annotated[
        str,
        about(
            "where KV events are published for routers, tcp://host:port or ipc://path; empty: "
            "nowhere; not loopback: needs a cluster token"
        ),
    ] = ""
    events_replay: Annotated[
        str, about("where KV events are told again to subscribers that missed some; empty: nowhere")
    ] = ""


class Master(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    listen: Annotated[str, about("address of the wire; not loopback: needs a cluster token")] = (
        "127.0.0.1:7700"
    )
    http: Annotated[
        str, about("address of the admin pages and /metrics, or off; not loopback: needs a cluster token")
    ] = "127.0.0.1:7701"
    nodes_max: Annotated[Count, about("the most nodes")] = 1024
    clients_max: Annotated[Count, about("the most connections of clients")] = 4096
    keys_max: Annotated[
        Count, about("the most rows of the directory, one for each holder of a key: 27 to 80 bytes each")
    ] = 64 << 20
    removals_max: Annotated[Count, about("the most removals that are remembered for nodes that are away")] = (
        1 << 20
    )
    frame_bytes_max: Annotated[Size, about("the longest frame on the wire")] = parse_size("8MiB")
    frame_keys_max: Annotated[
        Count, about("the most keys in one frame; nodes and clients split larger calls")
    ] = 16384
    suspect_after_s: Annotated[Duration, about("a node that is silent for so long is avoided")] = 1.0
    gone_after_s: Annotated[
        Duration, about("a node that is silent for so long is given up, and what it held is forgotten")
    ] = 30.0
    http_connections_max: Annotated[
        Count, about("the most HTTP connections; beyond it the oldest is closed")
    ] = 64
    http_timeout_s: Annotated[Duration, about("the longest life of one HTTP connection")] = 10.0


class Proxy(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The names are those of disagg_proxy.settings; what belongs to a part of it has the part's name in
    front.
    """

    listen: Annotated[str, about("address of the OpenAI API, /metrics, /health, /engines and /ui")] = (
        "127.0.0.1:8080"
    )
    engines: Annotated[
        list[str], about("root URLs of the engines, each http://host:port or NAME=http://host:port")
    ] = []
    prefill: Annotated[
        list[str],
        about(
            "engines that compute prompts for those of proxy.decode; written like proxy.engines, "
            "with #bootstrap=PORT or #bootstrap=HOST:PORT behind one whose bootstrap page is not at "
            "8998 of its host"
        ),
    ] = []
    decode: Annotated[list[str], about("engines that answer what those of proxy.prefill computed")] = []
    policy: Annotated[
        str,
        about(
            "how an engine is chosen: round_robin, least_load, prefix_affinity, conductor, "
            "dynamo_cost, sglang_cache_aware, vllm_kv_aware, lmetric, min_ttft, load_balancing, or "
            "package.module:Class; auto: conductor where engines have roles or there are KV events, "
            "else round_robin"
        ),
    ] = "auto"
    handover: Annotated[
        str,
        about(
            "form of the hand-over from prefill to decode. two_step: prefill first, then decode; "
            "concurrent: both at once; one_shot: at once with the same request (SGLang); "
            "context_first, generation_first: as TensorRT-LLM; auto: what the engines' pages say",
            choices=("auto", "two_step", "concurrent", "one_shot", "context_first", "generation_first"),
        ),
    ] = "auto"
    api_keys_file: Annotated[
        str, about("file of the API keys of clients, one per line; empty: none is asked for")
    ] = ""
    open: Annotated[bool, about("serve every caller at an address beyond loopback, without API keys")] = False
    access_log: Annotated[
        str, about("file that gets a line per request; - is standard output; empty: none")
    ] = ""
    otlp_endpoint: Annotated[
        str,
        about(
            "collector that gets spans, http://host:4318; empty: where OpenTelemetry's own variables "
            "(OTEL_EXPORTER_OTLP_ENDPOINT) say"
        ),
    ] = ""
    tokenizer: Annotated[
        list[str],
        about(
            "MODEL=FOLDER with tokenizer.json, for each model; empty: engines are asked for token "
            'ids; "none": text is routed without its prefix'
        ),
    ] = []
    events: Annotated[
        list[str],
        about(
            "KV events of engines, each NAME=tcp://host:port or NAME=tcp://host:port,tcp://host:port "
            "(where they are replayed)"
        ),
    ] = []
    pool_events: Annotated[list[str], about("KV events of nodes of the pool, written like proxy.events")] = []
    ttft_slo: Annotated[
        Duration, about("refuse at once (429) what would get its first token later; 0: nothing")
    ] = 0.0
    gap_slo: Annotated[
        Duration, about("refuse (429), or let wait, what would get its tokens more slowly; 0: nothing")
    ] = 0.0
    queue_max: Annotated[
        int, about("so many requests may wait in the proxy until engines are free; 0: none", ge=0)
    ] = 0
    queue_deadline: Annotated[Duration, about("the longest such wait; then 429")] = 30.0
    peer_listen: Annotated[str, about("address at which other proxies hear what this one has in flight")] = ""
    peers: Annotated[
        list[str], about("proxy.peer_listen of each other proxy; a name stands for all its addresses")
    ] = []
    processes: Annotated[
        int, about("processes that serve at proxy.listen; each takes its share of the clients", ge=1, le=64)
    ] = 1
    process_listen: Annotated[
        str,
        about(
            "address at which the first process is reached alone, the next at the next port (for /metrics)"
        ),
    ] = ""
    discovery: Annotated[
        list[str],
        about(
            "where further engines are looked for: file:PATH, http, etcd:URL/PREFIX, "
            "kubernetes:NAMESPACE/LABELS"
        ),
    ] = []
    discovery_grace_s: Annotated[
        Duration, about("how long an engine may be missing there before it is removed")
    ] = 10.0
    engines_max: Annotated[Count, about("the most engines with proxy.discovery")] = 1024
    discovery_keys_file: Annotated[
        str,
        about(
            "file of the keys with which engines register over HTTP, one per line; never those of "
            "proxy.api_keys_file"
        ),
    ] = ""
    discovery_allow: Annotated[
        list[str],
        about("networks in which engines may register over HTTP, such as 10.0.0.0/8; empty: this host alone"),
    ] = []
    discovery_registry_file: Annotated[
        str, about("file that keeps engines which registered over HTTP; empty: a restart forgets them")
    ] = ""
    relay_paths: Annotated[
        list[str],
        about(
            "paths of the engines that are relayed besides those of inference, such as "
            "/v1/audio/transcriptions; /v1/audio/* stands for all below"
        ),
    ] = []
    engine_key_file: Annotated[
        str,
        about(
            "file of what engines are shown as Authorization: a line KEY for those of this section, "
            "NAME KEY or HOST:PORT KEY for one, * KEY for all; empty: nothing"
        ),
    ] = ""
    client_connections_max: Annotated[Count, about("the most client connections")] = 10_000
    head_bytes_max: Annotated[Size, about("the longest request head")] = parse_size("32KiB")
    body_bytes_max: Annotated[Size, about("the longest request body")] = parse_size("64MiB")
    bodies_bytes_max: Annotated[Size, about("all request bodies that are held at one time")] = parse_size(
        "1GiB"
    )
    address_share: Annotated[
        Share,
        about(
            "share of connections and of bodies_bytes_max that one client address (IPv6: /64) may "
            "have; 1 behind a balancer"
        ),
    ] = 0.5
    members_max: Annotated[Count, about("the most members of a request's JSON object")] = 1024
    prompts_max: Annotated[Count, about("the most prompts in one request")] = 4096
    prompt_ids_max: Annotated[Count, about("the most token ids in one request")] = 1 << 20
    pipelined_bytes_max: Annotated[
        Size, about("what is read ahead while a request of the same client runs")
    ] = parse_size("64KiB")
    write_buffer_bytes_max: Annotated[
        Size, about("what waits for one slow client before its engine's stream is paused")
    ] = parse_size("256KiB")
    unread_bytes_max: Annotated[
        Size, about("what waits for all clients; beyond it those that took nothing for longest are cut")
    ] = parse_size("512MiB")
    idle_upstreams_max: Annotated[
        int, about("the most idle connections that are kept to one engine", ge=0)
    ] = 256
    retries_max: Annotated[
        int,
        about(
            "further engines that are tried when one fails before it answered; one at most when it "
            "broke with the request",
            ge=0,
        ),
    ] = 2
    head_s: Annotated[Duration, about("the longest wait for a whole request head")] = 20.0
    body_stall_s: Annotated[Duration, about("the longest wait between two pieces of a request's body")] = 30.0
    body_bytes_per_s_min: Annotated[
        Size, about("a request's body that comes more slowly is cut once it is body_stall_s late")
    ] = 1024
    client_idle_s: Annotated[Duration, about("the longest silence between two requests of a connection")] = (
        75.0
    )
    client_stall_s: Annotated[Duration, about("how long a client may take nothing of its answer")] = 300.0
    linger_s: Annotated[Duration, about("time for a refused client to read why")] = 2.0
    decide_s: Annotated[Duration, about("the longest wait for a policy's decision")] = 60.0
    connect_s: Annotated[Duration, about("the longest wait for a connection to an engine")] = 5.0
    first_byte_s: Annotated[Duration, about("the longest wait for an engine's answer to begin")] = 600.0
    stream_stall_s: Annotated[Duration, about("the longest silence of an engine inside an answer")] = 600.0
    suspect_engine_s: Annotated[
        Duration, about("requests without an answer leave an engine that stands still for so long")
    ] = 5.0
    silent_engine_s: Annotated[
        Duration, about("all requests of an engine that stands still for so long are given up")
    ] = 15.0
    upstream_idle_s: Annotated[
        Duration, about("the longest rest of a connection to an engine, before it closes that itself")
    ] = 4.0
    tcp_dead_peer_s: Annotated[
        Count, about("a host that does not answer TCP for so long, in seconds, is gone")
    ] = 30
    drain_s: Annotated[Duration, about("how long running answers may go on after SIGTERM")] = 30.0
    health_path: Annotated[str, about("path that an engine answers with 2xx when it is well")] = "/health"
    health_interval_s: Annotated[Duration, about("pause between two health checks of an engine")] = 1.0
    health_timeout_s: Annotated[Duration, about("the longest wait for a health check")] = 2.0
    health_timeouts_max: Annotated[
        Count, about("so many late health checks in a row take an engine out of the rotation")
    ] = 3
    breaker_failures_max: Annotated[Count, about("so many failed requests in a row rest an engine")] = 5
    breaker_open_s: Annotated[Duration, about("its first rest; each further one is twice as long")] = 2.0
    breaker_open_s_max: Annotated[Duration, about("the longest rest")] = 30.0


class Engine(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine of `moonpool up`: a real one (engine = "vllm" or "sglang", model), one without a model
    (engine = "mock"), or any command that answers GET /health.
    """

    name: Annotated[str, about("names its log; empty: engine-0, engine-1, ...")] = ""
    engine: Annotated[
        str,
        about(
            "vllm, sglang, or mock (no model), when no command is given", choices=("vllm", "sglang", "mock")
        ),
    ] = "vllm"
    model: Annotated[str, about("a folder or a model's name, as the engine takes it")] = ""
    node: Annotated[str, about("name of the node that it joins; empty: the nodes in turn")] = ""
    executable: Annotated[str, about("the engine's program; empty: beside this Python, then in PATH")] = ""
    args: Annotated[list[str], about("further arguments for the engine")] = []
    command: Annotated[
        list[str], about("a whole command instead of engine and model; {port} and {host} are filled in")
    ] = []
    host: Annotated[str, about("address that the engine listens on")] = "127.0.0.1"
    port: Annotated[Port, about("its port; 0: a free one")] = 0
    env: Annotated[dict[str, str], about("further environment variables")] = {}
    role: Annotated[
        str,
        about(
            "both, prefill (computes prompts for others) or decode (answers what they computed)",
            choices=("both", "prefill", "decode"),
        ),
    ] = "both"
    kv_pool: Annotated[bool, about("connect it to the pool")] = True
    kv_role: Annotated[
        str, about("kv_both, kv_producer or kv_consumer", choices=("kv_both", "kv_producer", "kv_consumer"))
    ] = "kv_both"
    kv_load_failure_policy: Annotated[
        str,
        about(
            "recompute: a failed load costs time; fail: it fails the request", choices=("recompute", "fail")
        ),
    ] = "recompute"
    require_pool: Annotated[bool, about("refuse to start without a node")] = False
    kv_events: Annotated[
        bool, about("let it tell the proxy which blocks it holds, where proxy.policy looks at prompts")
    ] = True
    health: Annotated[str, about("path that answers 200 when the engine is ready")] = "/health"


class UpNode(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of several nodes of `moonpool up`. What is empty is as in the section [node]."""

    name: Annotated[str, about("names its socket, its log and its process, node-NAME; empty: 0, 1, ...")] = ""
    dram: Annotated[ArenaSize, about("as node.dram; 0: the same")] = 0
    ssd: Annotated[list[str], about("as node.ssd; of one node only")] = []
    listen: Annotated[
        str, about("as node.listen; empty: the same for the first node, a free port for the others")
    ] = ""
    advertise: Annotated[str, about("as node.advertise")] = ""
    host_id: Annotated[str, about("as node.host_id; empty: the same")] = ""
    http: Annotated[
        str, about("as node.http; empty: the same for the first node, a free port for the others")
    ] = ""
    env: Annotated[
        dict[str, str], about("further environment variables, for any other setting: MOONPOOL_NODE_...")
    ] = {}


class Up(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    engine: Annotated[list[Engine], about("the engines, each a table [[up.engine]]")] = []
    node: Annotated[
        bool | list[UpNode], about("true: start a node; false: none; several: each a table [[up.node]]")
    ] = True
    master: Annotated[bool, about("start a master, which the nodes join")] = False
    proxy: Annotated[bool, about("start the proxy")] = True
    log_dir: Annotated[str, about("folder of the logs; empty: logs in the runtime folder")] = ""
    ready_timeout_s: Annotated[Duration, about("the longest wait until a process is ready")] = 900.0
    start_attempts_max: Annotated[Count, about("how often a process may die before it was ever ready")] = 3
    grace_s: Annotated[Duration, about("time between SIGTERM and SIGKILL")] = 15.0
    backoff_initial_s: Annotated[Duration, about("pause before the first restart; it doubles")] = 0.5
    backoff_max_s: Annotated[Duration, about("the longest pause before a restart")] = 30.0
    backoff_reset_s: Annotated[
        Duration, about("a process that lived this long starts again from the first pause")
    ] = 60.0
    progress_interval_s: Annotated[
        Duration, about("pause between two lines about a process that is still starting")
    ] = 10.0


class Log(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    level: Annotated[
        str, about("debug, info, warning or error", choices=("debug", "info", "warning", "error"))
    ] = "info"
    format: Annotated[
        str, about("text: a line for people; json: one JSON object a line", choices=("text", "json"))
    ] = "text"


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
