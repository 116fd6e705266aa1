"""The settings of a configuration: each is stated here once, with its type, default, bounds, unit and help.

The loader (config_sources.py), the schema of a file and the tables of docs/configuration.md (schema.py) read
them here.
"""

from __future__ import annotations

from typing import Annotated

from moonpool.core.config.proxy_section import Proxy
from moonpool.core.config.setting import (
    ArenaSize,
    Count,
    Duration,
    Port,
    Secret,
    Section,
    Share,
    Size,
    StoreUrl,
    about,
)
from moonpool.core.config.units import parse_size


class Cluster(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The section [cluster]: what all processes of a cluster share: tokens, the master's address, TLS."""

    token_file: Annotated[
        str,
        about(
            "a 0600 file that holds the cluster token, one line, or two while one secret replaces the other; "
            "it is followed; empty: the token that the first process on the host makes, in the runtime folder"
        ),
    ] = ""
    token: Annotated[
        Secret, about("the cluster token itself; only from the environment, MOONPOOL_CLUSTER_TOKEN")
    ] = ""
    tenants_file: Annotated[
        str,
        about(
            "a 0600 TOML file with the tenants' own keys, roles and limits, for nodes and masters; it is "
            "followed; empty: the cluster token alone opens all tenants"
        ),
    ] = ""
    tenant_key_file: Annotated[
        str,
        about(
            "a 0600 file with the key of a tenant, one line, or two while one replaces the other; it is "
            "followed; stores and engine connectors prove it in place of the cluster token"
        ),
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
        str | list[str],
        about(
            "host:port of the master that this node joins, and where the proxy finds the pool's "
            "nodes; empty: none; on another host: needs a cluster token; with a standby: a list of both; "
            'of several ranges (master.range): "A,B;C,D", with a semicolon between two ranges'
        ),
    ] = ""
    metadata: Annotated[
        StoreUrl,
        about(
            "where transfer engines find each other by name: http://host:port/metadata of a master, "
            "etcd://host:2379,host:2379 or redis://host:6379; empty: nowhere, they are opened by address"
        ),
    ] = ""
    metadata_password: Annotated[
        Secret,
        about(
            "the password of that store, where metadata has none; only from the environment, "
            "MOONPOOL_CLUSTER_METADATA_PASSWORD"
        ),
    ] = ""
    tls_cert: Annotated[
        str,
        about(
            "certificate (PEM) of the HTTP pages of node and master, which become https, and of "
            "control and data connections"
        ),
    ] = ""
    tls_key: Annotated[str, about("its key (PEM, 0600, without a password)")] = ""
    tls_ca: Annotated[
        str,
        about(
            "authorities (PEM) that `moonpool status` and processes that connect to a master or a node by "
            "TLS trust; empty: the system's"
        ),
    ] = ""
    tls_control: Annotated[
        str,
        about(
            "connections to the master; on: inside TLS, it shows tls_cert; mutual: the process "
            "that connects shows one, too, and tls_ca signed both; off: in plain",
            choices=("off", "on", "mutual"),
        ),
    ] = "off"
    tls_name: Annotated[
        str, about("the name that the master's certificate must have; empty: the host in cluster.master")
    ] = ""
    tls_data: Annotated[
        str,
        about(
            "connections to nodes of other hosts, and by TCP to transfer engines; on: inside TLS, they show "
            "tls_cert; mutual: the process that connects shows one, too, and tls_ca signed both; off: in "
            "plain",
            choices=("off", "on", "mutual"),
        ),
    ] = "off"
    tls_data_name: Annotated[
        str,
        about(
            "the name that certificates of nodes and engines must have; empty: the host of each one's address"
        ),
    ] = ""


class Node(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The section [node]: one `moonpool node`; also the defaults of [[up.node]] and of an embedded node."""

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
    connections_max: Annotated[
        Count,
        about(
            "the connections on the Unix socket that are expected; it rises as far as open files and "
            "memory allow, with a warning"
        ),
    ] = 512
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
    master_timeout_s: Annotated[
        Duration,
        about("how long the node waits for an answer of its master before it connects to it anew"),
    ] = 1.0
    clients_master_timeout_s: Annotated[
        Duration,
        about(
            "how long the node's clients wait for an answer of the master; a client whose own "
            "timeout is over four times as long waits a quarter of that"
        ),
    ] = 0.5
    relay: Annotated[
        str,
        about(
            "whether the processes of the host ask the master over one connection, the node's, or each over "
            "one of its own; auto: where the pool has more than 2,000 nodes",
            choices=("auto", "always", "never"),
        ),
    ] = "auto"
    http_connections_max: Annotated[
        Count, about("the most HTTP connections; beyond it the oldest of the address that has most is closed")
    ] = 64
    http_timeout_s: Annotated[Duration, about("the longest life of one HTTP connection")] = 10.0
    stop_delay_s: Annotated[
        Duration,
        about(
            "how long service goes on after SIGTERM while /readyz answers 503 already, so that its readers "
            "leave; 0: not at all; a second signal ends it"
        ),
    ] = 0.0
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
            "where KV events are published for routers, tcp://host:port or ipc://path; auto: at "
            "sockets beside node.socket, and where node.listen is not loopback at free TCP ports; "
            "none: nowhere; not loopback: needs a cluster token"
        ),
    ] = "auto"
    events_replay: Annotated[
        str,
        about(
            "where KV events are replayed to subscribers that missed some; empty: nowhere, with "
            'events = "auto" beside them'
        ),
    ] = ""


class Master(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The section [master]: one `moonpool master`."""

    listen: Annotated[str, about("address of the wire; not loopback: needs a cluster token")] = (
        "127.0.0.1:7700"
    )
    http: Annotated[
        str, about("address of the admin pages and /metrics, or off; not loopback: needs a cluster token")
    ] = "127.0.0.1:7701"
    nodes_max: Annotated[
        Count, about("the nodes that are expected; with more of them it rises, with a warning")
    ] = 1024
    clients_max: Annotated[
        Count,
        about(
            "the connections of clients that are expected; it rises as far as open files and memory allow, "
            "with a warning"
        ),
    ] = 4096
    keys_max: Annotated[
        Count, about("the most rows of the directory, one for each holder of a key: 27 to 80 bytes each")
    ] = 64 << 20
    removals_max: Annotated[Count, about("the most removals that are remembered for nodes that are away")] = (
        1 << 20
    )
    range: Annotated[
        str,
        about(
            "index/count of the range of shards that this master has, of 1 to 16 equal ones; the masters of "
            "all of them are one pool, whose number of ranges stays while it runs; 0/1: all shards"
        ),
    ] = "0/1"
    standby_of: Annotated[
        str,
        about(
            "host:port of the master whose standby this one is: it hears what that one hears, and answers "
            "lookups when that one is lost; empty: none"
        ),
    ] = ""
    take_over_after_s: Annotated[
        Duration,
        about(
            "a standby whose master is lost takes over by itself after so long; 0: only when it is told "
            "(moonpool promote), as it cannot tell a master that is dead from a line that is cut"
        ),
    ] = 0.0
    election: Annotated[
        StoreUrl,
        about(
            "etcd://host:2379,host:2379, where masters agree on which of them serves and which one is its "
            "standby; its password, where it has none: cluster.metadata_password; empty: master.standby_of "
            "says it"
        ),
    ] = ""
    election_name: Annotated[str, about("of these masters, where several pools share that etcd")] = "default"
    advertise: Annotated[
        str,
        about(
            "host:port by which masters, nodes and clients reach this one; empty: master.listen, or where "
            "that is 0.0.0.0 or ::, this host's address"
        ),
    ] = ""
    frame_bytes_max: Annotated[Size, about("the longest frame on the wire")] = parse_size("8MiB")
    frame_keys_max: Annotated[
        Count, about("the most keys in one frame; nodes and clients split larger calls")
    ] = 16384
    suspect_after_s: Annotated[Duration, about("a node that is silent for so long is avoided")] = 1.0
    gone_after_s: Annotated[
        Duration, about("a node that is silent for so long is given up, and what it held is forgotten")
    ] = 30.0
    http_connections_max: Annotated[
        Count, about("the most HTTP connections; beyond it the oldest of the address that has most is closed")
    ] = 64
    http_timeout_s: Annotated[Duration, about("the longest life of one HTTP connection")] = 10.0
    stop_delay_s: Annotated[
        Duration,
        about(
            "how long service goes on after SIGTERM while /readyz answers 503 already, so that its readers "
            "leave; 0: not at all; a second signal ends it"
        ),
    ] = 0.0


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
    """The section [up]: the processes that `moonpool up` starts, and how it restarts them."""

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
    """The section [log]: how much the processes log, and in which form. A library in another program's
    process ignores it.
    """

    level: Annotated[
        str, about("debug, info, warning or error", choices=("debug", "info", "warning", "error"))
    ] = "info"
    format: Annotated[
        str, about("text: a line for people; json: one JSON object a line", choices=("text", "json"))
    ] = "text"
    audit_file: Annotated[
        str,
        about(
            "file that gets the lines of the audit log (registrations, refused keys, take-overs), one JSON "
            "object each; empty: they stand with the others"
        ),
    ] = ""


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
SECRETS = ("cluster.token", "cluster.admin_token", "cluster.metadata_password")
