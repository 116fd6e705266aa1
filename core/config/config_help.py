"""What each key of the configuration means; and the schema and the tables that are made of it."""

from __future__ import annotations

from typing import Any

import msgspec

from moonpool.core.config.config import CHOICES, SECRETS, SECTIONS, TABLES, Section
from moonpool.core.config.config_sources import show_value

HELP: dict[str, str] = {
    "cluster.token_file": "a 0600 file that holds the cluster token; empty: the token that the first "
    "process on the host makes, in the runtime folder",
    "cluster.token": "the cluster token itself; only from the environment, MOONPOOL_CLUSTER_TOKEN",
    "cluster.admin_token_file": "a 0600 file with the token that admin actions need; empty: one that the "
    "first process on the host makes, in the runtime folder",
    "cluster.admin_token": "that token itself; only from the environment, MOONPOOL_CLUSTER_ADMIN_TOKEN",
    "cluster.master": "host:port of the master that this node joins; empty: none; on another host: needs "
    "a cluster token",
    "cluster.tls_cert": "certificate (PEM) of the HTTP pages of node and master, which become https, and of "
    "control connections",
    "cluster.tls_key": "its key (PEM, 0600, without a password)",
    "cluster.tls_ca": "authorities (PEM) that `moonpool status` trusts, and who dials a master inside TLS; "
    "empty: the system's",
    "cluster.tls_control": "connections to the master; on: inside TLS, it shows tls_cert; mutual: who dials "
    "it shows one, too, and tls_ca vouches for both; off: in plain",
    "cluster.tls_name": "the name that the master's certificate must have; empty: the host in cluster.master",
    "node.name": "names the node's socket, node-NAME.sock",
    "node.socket": "path of the node's Unix socket; empty: node-NAME.sock in the runtime folder",
    "node.dram": "DRAM arena of the tenant called default; 80%: that share of the available memory",
    "node.tenants": "further tenants, each with an arena of its own size",
    "node.listen": "address of the wire, for other hosts, or off; not loopback: needs a cluster token",
    "node.advertise": "host:port by which others reach the wire; empty: node.listen, or where that is "
    "0.0.0.0 or ::, this host's address on the way to the master",
    "node.host_id": "nodes with the same one share memory and fate; empty: made of the ids of machine "
    "and boot",
    "node.http": "address of /metrics, /health and /stat, or off; not loopback: needs a cluster token",
    "node.key_bytes_max": "the longest key, bytes",
    "node.parts_max": "the most parts of one object",
    "node.frame_bytes_max": "the longest frame on the wire",
    "node.frame_keys_max": "the most keys in one frame; clients split larger calls",
    "node.object_share_max": "the largest object, as a share of its tenant's arena",
    "node.objects_max": "the most objects of one tenant; 0: one for each KiB of the arena up to 8 Mi, then "
    "one for each 64 KiB",
    "node.slab_bytes": "what a client leases at a time for its puts; 0: derived from the arena",
    "node.connections_max": "the most connections on the Unix socket",
    "node.remote_connections_max": "the most connections of other hosts, as far as open files allow; they "
    "take no place from those on the Unix socket",
    "node.pins_share_max": "share of an arena that pins may hold; beyond it a pin is refused as a miss",
    "node.remote_pins_share_max": "share of it that pins of other hosts may hold",
    "node.remote_pin_idle_s": "how long another host may hold pins without a word before its connection ends",
    "node.scrub_bytes_per_s": "how fast objects in memory are held against their checksums; 0: not at all",
    "node.http_connections_max": "the most HTTP connections; beyond it the oldest is closed",
    "node.http_timeout_s": "the longest life of one HTTP connection",
    "node.ssd": "directories for what does not fit into memory, each DIR:SIZE; none: no SSD",
    "node.ssd_clean_share": "share of an arena that is kept free, or written to the SSD, ahead of eviction",
    "node.ssd_stop_s": "how long a stop may take to write what is in memory only",
    "node.ssd_io": "auto: io_uring where the kernel allows it, else threads",
    "node.ssd_depth": "reads in flight at one directory, and writes",
    "node.ssd_records_max": "the most objects in one directory; 0: derived from its size",
    "node.ssd_segment_bytes": "piece in which a directory is written and reclaimed; 0: derived from its size",
    "node.events": "where KV events are published for routers, tcp://host:port or ipc://path; empty: "
    "nowhere; not loopback: needs a cluster token",
    "node.events_replay": "where they are told again to whoever missed some; empty: nowhere",
    "master.listen": "address of the wire; not loopback: needs a cluster token",
    "master.http": "address of the admin pages, or off; not loopback: needs a cluster token",
    "master.nodes_max": "the most nodes",
    "master.clients_max": "the most connections of clients",
    "master.keys_max": "the most rows of the directory, one for each holder of a key: 27 to 80 bytes each",
    "master.removals_max": "the most removals that are remembered for nodes that are away",
    "master.frame_bytes_max": "the longest frame on the wire",
    "master.frame_keys_max": "the most keys in one frame; nodes and clients split larger calls",
    "master.suspect_after_s": "a node that is silent for so long is avoided",
    "master.gone_after_s": "a node that is silent for so long is given up, and what it held is forgotten",
    "master.http_connections_max": "the most HTTP connections; beyond it the oldest is closed",
    "master.http_timeout_s": "the longest life of one HTTP connection",
    "proxy.listen": "address of the OpenAI API, /metrics, /health, /engines and /ui",
    "proxy.engines": "root URLs of the engines, each http://host:port or NAME=http://host:port",
    "proxy.prefill": "engines that compute prompts for those of proxy.decode; written like proxy.engines, "
    "with #bootstrap=PORT or #bootstrap=HOST:PORT behind one whose bootstrap page is not at 8998 of its host",
    "proxy.decode": "engines that answer what those of proxy.prefill computed",
    "proxy.policy": "how an engine is chosen: round_robin, least_load, prefix_affinity, conductor, or "
    "package.module:Class; auto: conductor where engines have roles or there are KV events, else round_robin",
    "proxy.handover": "two_step: prefill first, then decode; concurrent: both at once; one_shot: at once "
    "with the same request (SGLang); context_first, generation_first: as TensorRT-LLM; auto: what the "
    "engines' pages say",
    "proxy.api_keys_file": "file of the API keys of clients, one per line; empty: none is asked for",
    "proxy.open": "serve every caller at an address beyond loopback, without API keys",
    "proxy.access_log": "file that gets a line per request; - is standard output; empty: none",
    "proxy.otlp_endpoint": "collector that gets spans, http://host:4318; empty: where OpenTelemetry's own "
    "variables (OTEL_EXPORTER_OTLP_ENDPOINT) say",
    "proxy.tokenizer": "MODEL=FOLDER with tokenizer.json, for each model; empty: engines are asked for token "
    'ids; "none": text is routed without its prefix',
    "proxy.events": "KV events of engines, each NAME=tcp://host:port or NAME=tcp://host:port,tcp://host:port "
    "(where they are replayed)",
    "proxy.pool_events": "the same of nodes of the pool",
    "proxy.peer_listen": "address at which other proxies hear what this one has in flight",
    "proxy.peers": "those of the other proxies; a name stands for all its addresses",
    "proxy.processes": "processes that serve at proxy.listen; each takes its share of the clients",
    "proxy.process_listen": "address at which the first process is reached alone, the next at the next port"
    " (for /metrics)",
    "proxy.discovery": "where further engines are looked for: file:PATH, http, etcd:URL/PREFIX, "
    "kubernetes:NAMESPACE/LABELS",
    "proxy.discovery_grace_s": "how long an engine may be missing there before it is removed",
    "proxy.engines_max": "the most engines with proxy.discovery",
    "proxy.discovery_keys_file": "keys of those who may register engines over HTTP, one per line; never "
    "those of proxy.api_keys_file",
    "proxy.discovery_allow": "networks in which engines may register over HTTP, such as 10.0.0.0/8; empty: "
    "this host alone",
    "proxy.discovery_registry_file": "file that keeps engines which registered over HTTP; empty: a restart "
    "forgets them",
    "proxy.relay_paths": "paths of the engines that are relayed besides those of inference, such as "
    "/v1/audio/transcriptions; /v1/audio/* stands for all below",
    "proxy.engine_key_file": "what engines are shown as Authorization: a line KEY for those of this section, "
    "NAME KEY or HOST:PORT KEY for one, * KEY for all; empty: nothing",
    "proxy.ttft_slo": "refuse at once (429) what would get its first token later; 0: nothing",
    "proxy.gap_slo": "refuse (429), or let wait, what would get its tokens more slowly; 0: nothing",
    "proxy.queue_max": "so many requests may wait in the proxy until engines are free; 0: none",
    "proxy.queue_deadline": "the longest such wait; then 429",
    "proxy.client_connections_max": "the most client connections",
    "proxy.head_bytes_max": "the longest request head",
    "proxy.body_bytes_max": "the longest request body",
    "proxy.bodies_bytes_max": "all request bodies that are held at one time",
    "proxy.address_share": "share of connections and of bodies_bytes_max that one client address (IPv6: /64) "
    "may have; 1 behind a balancer",
    "proxy.members_max": "the most members of a request's JSON object",
    "proxy.prompts_max": "the most prompts in one request",
    "proxy.prompt_ids_max": "the most token ids in one request",
    "proxy.pipelined_bytes_max": "what is read ahead while a request of the same client runs",
    "proxy.write_buffer_bytes_max": "what waits for one slow client before its engine's stream is paused",
    "proxy.unread_bytes_max": "what waits for all clients; beyond it those that took nothing for longest are "
    "cut",
    "proxy.idle_upstreams_max": "the most idle connections that are kept to one engine",
    "proxy.retries_max": "further engines that are tried when one fails before it answered; one at most when "
    "it broke with the request",
    "proxy.head_s": "the longest wait for a whole request head",
    "proxy.body_stall_s": "the longest wait between two pieces of a request's body",
    "proxy.body_bytes_per_s_min": "a request's body that comes more slowly is cut once it is body_stall_s "
    "late",
    "proxy.client_idle_s": "the longest silence between two requests of a connection",
    "proxy.client_stall_s": "how long a client may take nothing of its answer",
    "proxy.linger_s": "time for a refused client to read why",
    "proxy.decide_s": "the longest wait for a policy's decision",
    "proxy.connect_s": "the longest wait for a connection to an engine",
    "proxy.first_byte_s": "the longest wait for an engine's answer to begin",
    "proxy.stream_stall_s": "the longest silence of an engine inside an answer",
    "proxy.suspect_engine_s": "requests without an answer leave an engine that stands still for so long",
    "proxy.silent_engine_s": "all requests of an engine that stands still for so long are given up",
    "proxy.upstream_idle_s": "the longest rest of a connection to an engine, before it closes that itself",
    "proxy.tcp_dead_peer_s": "a host that does not answer TCP for so long, in seconds, is gone",
    "proxy.drain_s": "how long running answers may go on after SIGTERM",
    "proxy.health_path": "path that an engine answers with 2xx when it is well",
    "proxy.health_interval_s": "pause between two health checks of an engine",
    "proxy.health_timeout_s": "the longest wait for a health check",
    "proxy.health_timeouts_max": "so many late health checks in a row take an engine out of the rotation",
    "proxy.breaker_failures_max": "so many failed requests in a row rest an engine",
    "proxy.breaker_open_s": "its first rest; each further one is twice as long",
    "proxy.breaker_open_s_max": "the longest rest",
    "up.engine": "the engines, each a table [[up.engine]]",
    "up.engine.name": "names its log; empty: engine-0, engine-1, ...",
    "up.engine.engine": "vllm, sglang, or mock (no model), when no command is given",
    "up.engine.model": "a folder or a model's name, as the engine takes it",
    "up.engine.node": "name of the node that it joins; empty: the nodes in turn",
    "up.engine.executable": "the engine's program; empty: beside this Python, then in PATH",
    "up.engine.args": "further arguments for the engine",
    "up.engine.command": "a whole command instead of engine and model; {port} and {host} are filled in",
    "up.engine.host": "address that the engine listens on",
    "up.engine.port": "its port; 0: a free one",
    "up.engine.env": "further environment variables",
    "up.engine.role": "both, prefill (computes prompts for others) or decode (answers what they computed)",
    "up.engine.kv_pool": "connect it to the pool",
    "up.engine.kv_role": "kv_both, kv_producer or kv_consumer",
    "up.engine.kv_load_failure_policy": "recompute: a failed load costs time; fail: it fails the request",
    "up.engine.require_pool": "refuse to start without a node",
    "up.engine.kv_events": "let it tell the proxy which blocks it holds, where proxy.policy looks at prompts",
    "up.engine.health": "path that answers 200 when the engine is ready",
    "up.node": "true: start a node; false: none; several: each a table [[up.node]]",
    "up.node.name": "names its socket, its log and its process, node-NAME; empty: 0, 1, ...",
    "up.node.dram": "as node.dram; 0: the same",
    "up.node.ssd": "as node.ssd; of one node only",
    "up.node.listen": "as node.listen; empty: the same for the first node, a free port for the others",
    "up.node.advertise": "as node.advertise",
    "up.node.host_id": "as node.host_id; empty: the same",
    "up.node.http": "as node.http; empty: the same for the first node, a free port for the others",
    "up.node.env": "further environment variables, for any other setting: MOONPOOL_NODE_...",
    "up.master": "start a master, which the nodes join",
    "up.proxy": "start the proxy",
    "up.log_dir": "folder of the logs; empty: logs in the runtime folder",
    "up.ready_timeout_s": "the longest wait until a process is ready",
    "up.start_attempts_max": "how often a process may die before it was ever ready",
    "up.grace_s": "time between SIGTERM and SIGKILL",
    "up.backoff_initial_s": "pause before the first restart; it doubles",
    "up.backoff_max_s": "the longest pause before a restart",
    "up.backoff_reset_s": "a process that lived this long starts again from the first pause",
    "up.progress_interval_s": "pause between two lines about a process that is still starting",
    "log.level": "debug, info, warning or error",
    "log.format": "text: a line for people; json: one JSON object a line",
}


def json_schema() -> dict[str, Any]:
    """The JSON schema of the TOML file, with the help of each key."""
    properties: dict[str, Any] = {}
    (_, *_), components = msgspec.json.schema_components(
        list(SECTIONS.values()), ref_template="#/$defs/{name}"
    )
    for name, kind in SECTIONS.items():
        properties[name] = components.pop(kind.__name__) | {"default": {}}
        _describe(properties[name], name)
    for prefix, kind in TABLES.items():
        _describe(components[kind.__name__], prefix)
    for secret in SECRETS:
        del properties["cluster"]["properties"][secret.removeprefix("cluster.")]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "moonpool.toml",
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "$defs": components,
    }


def _describe(schema: dict[str, Any], prefix: str) -> None:
    schema.pop("description", None)
    for key, value in schema["properties"].items():
        value["description"] = HELP[f"{prefix}.{key}"]
        if (choices := CHOICES.get(f"{prefix}.{key}")) is not None:
            value["enum"] = list(choices)
        for leaf in (value, value.get("additionalProperties")):
            if isinstance(leaf, dict) and "x-unit" in leaf:
                leaf["type"] = [leaf["type"], "string"]


def markdown() -> str:
    """The tables of docs/configuration.md."""
    lines: list[str] = []
    for name, kind in SECTIONS.items():
        lines += _table(f"[{name}]", name, kind())
        for key, table in TABLES.items():
            if key.startswith(f"{name}."):
                lines += _table(f"[[{key}]]", key, table())
    return "\n".join(lines)


def _table(title: str, prefix: str, defaults: Section) -> list[str]:
    rows = [
        f"| `{field.name}` | `{show_value(field.type, getattr(defaults, field.name))}` | "
        f"{HELP[f'{prefix}.{field.name}']} |"
        for field in msgspec.structs.fields(defaults)
    ]
    return ["", f"## `{title}`", "", "| key | default | meaning |", "|---|---|---|", *rows]
