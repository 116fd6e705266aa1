"""The section [proxy], and its parts as the proxy uses them: one part for each of its concerns."""

from __future__ import annotations

from typing import Annotated, ClassVar

from moonpool.core.config.setting import (
    Count,
    Duration,
    Part,
    PositiveDuration,
    PositiveSize,
    Section,
    Share,
    about,
)
from moonpool.core.config.units import parse_size

# Uses of the pool that can be switched off for a single request: the engine asks for blocks, it saves them.
SWITCHES = ("load", "store")


class Limits(Part, frozen=True, kw_only=True):
    """Sizes and counts. Beyond them a request is refused with one sentence, counted by reason."""

    client_connections_max: Annotated[Count, about("the most client connections")] = 10_000
    head_bytes_max: Annotated[PositiveSize, about("the longest request head")] = parse_size("32KiB")
    body_bytes_max: Annotated[PositiveSize, about("the longest request body")] = parse_size("64MiB")
    bodies_bytes_max: Annotated[PositiveSize, about("all request bodies that are held at one time")] = (
        parse_size("1GiB")
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
        PositiveSize, about("what is read ahead while a request of the same client runs")
    ] = parse_size("64KiB")
    write_buffer_bytes_max: Annotated[
        PositiveSize, about("what waits for one slow client before its engine's stream is paused")
    ] = parse_size("256KiB")
    unread_bytes_max: Annotated[
        PositiveSize,
        about("what waits for all clients; beyond it those that took nothing for longest are cut"),
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


class Deadlines(Part, frozen=True, kw_only=True):
    """Waits in seconds, measured from the last progress unless the help says otherwise."""

    head_s: Annotated[PositiveDuration, about("the longest wait for a whole request head")] = 20.0
    body_stall_s: Annotated[
        PositiveDuration, about("the longest wait between two pieces of a request's body")
    ] = 30.0
    body_bytes_per_s_min: Annotated[
        PositiveSize, about("a request's body that comes more slowly is cut once it is body_stall_s late")
    ] = 1024
    client_idle_s: Annotated[
        PositiveDuration, about("the longest silence between two requests of a connection")
    ] = 75.0
    client_stall_s: Annotated[PositiveDuration, about("how long a client may take nothing of its answer")] = (
        300.0
    )
    linger_s: Annotated[PositiveDuration, about("time for a refused client to read why")] = 2.0
    decide_s: Annotated[PositiveDuration, about("the longest wait for a policy's decision")] = 60.0
    connect_s: Annotated[PositiveDuration, about("the longest wait for a connection to an engine")] = 5.0
    first_byte_s: Annotated[PositiveDuration, about("the longest wait for an engine's answer to begin")] = (
        600.0
    )
    stream_stall_s: Annotated[
        PositiveDuration, about("the longest silence of an engine inside an answer")
    ] = 600.0
    suspect_engine_s: Annotated[
        PositiveDuration, about("requests without an answer leave an engine that stands still for so long")
    ] = 4.0
    silent_engine_s: Annotated[
        PositiveDuration, about("all requests of an engine that stands still for so long are given up")
    ] = 15.0
    upstream_idle_s: Annotated[
        PositiveDuration, about("the longest rest of a connection to an engine, before it closes that itself")
    ] = 4.0
    tcp_dead_peer_s: Annotated[
        Count, about("a host that does not answer TCP for so long, in seconds, is gone")
    ] = 30
    stop_delay_s: Annotated[
        Duration,
        about(
            "how long requests are accepted after SIGTERM while /health answers 503 already, so that its "
            "readers leave; 0: not at all; a second signal ends it"
        ),
    ] = 0.0
    drain_s: Annotated[Duration, about("how long running answers may go on after that")] = 30.0


class HealthChecks(Part, frozen=True, kw_only=True):
    """GET ``path`` of each engine every ``interval_s``; 2xx within ``timeout_s`` is healthy."""

    prefix: ClassVar[str] = "health_"
    path: Annotated[str, about("path that an engine answers with 2xx when it is well")] = "/health"
    interval_s: Annotated[PositiveDuration, about("pause between two health checks of an engine")] = 1.0
    timeout_s: Annotated[PositiveDuration, about("the longest wait for a health check")] = 2.0
    timeouts_max: Annotated[
        Count, about("so many late health checks in a row take an engine out of the rotation")
    ] = 3


class BreakerLimits(Part, frozen=True, kw_only=True):
    """So many failures in a row (no answer, or 5xx; never 4xx) rest an engine, longer each time up to the
    maximum.
    """

    prefix: ClassVar[str] = "breaker_"
    failures_max: Annotated[Count, about("so many failed requests in a row rest an engine")] = 5
    open_s: Annotated[PositiveDuration, about("its first rest; each further one is twice as long")] = 2.0
    open_s_max: Annotated[PositiveDuration, about("the longest rest")] = 30.0


class Admission(Part, frozen=True, kw_only=True):
    """Which objectives requests are admitted by, and how many of them may wait."""

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


class ProxyCommon(Section, frozen=True, kw_only=True):
    """What a running proxy keeps as it was given."""

    policy: Annotated[
        str,
        about(
            "how an engine is chosen: round_robin, least_load, prefix_affinity, conductor, "
            "dynamo_cost, sglang_cache_aware, vllm_kv_aware, lmetric, min_ttft, load_balancing, or "
            "package.module:Class; auto: conductor where engines have roles, KV events or a pool, else "
            "round_robin"
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
    clients_file: Annotated[
        str,
        about(
            "TOML file of clients, [[clients]] with name, key, tenant, max_priority and what the key may do; "
            "in place of the files of keys"
        ),
    ] = ""
    tenants_share: Annotated[
        bool,
        about(
            "with clients_file: tenants with equal prompts share cached blocks, and can tell by time and by "
            "counts of cached tokens what others have asked; false: each gets a cache salt of its own"
        ),
    ] = False
    switch_headers: Annotated[
        list[str],
        about(
            "headers by which a client may keep a request out of the pool: store (X-Moonpool-Store: off, "
            "nothing of it is saved), load (X-Moonpool-Load: off, nothing is loaded for it); others are "
            "refused",
        ),
    ] = []
    neighbour_tokens_min: Annotated[
        int,
        about(
            "a vLLM engine is told of another one whose own cache has so many more tokens of a prompt than "
            "it and the pool have, and takes them from there; 0: never",
            ge=0,
        ),
    ] = 256
    tls_cert: Annotated[
        str,
        about(
            "certificate (PEM) that clients are shown: every address of the proxy is https; replaced files "
            "are used at once"
        ),
    ] = ""
    tls_key: Annotated[str, about("its key (PEM, 0600, without a password)")] = ""
    tls_client_ca: Annotated[
        str,
        about(
            "authorities (PEM) one of which must have signed the certificate that each client shows; empty: "
            "clients need none"
        ),
    ] = ""
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
    engine_tls_ca: Annotated[
        str,
        about("authorities (PEM) that are trusted for engines at https://; empty: the system's"),
    ] = ""
    engine_tls_cert: Annotated[
        str, about("certificate (PEM) that engines at https:// are shown; empty: none")
    ] = ""
    engine_tls_key: Annotated[str, about("its key (PEM, 0600, without a password)")] = ""
    engine_tls_name: Annotated[
        str,
        about("name that the certificates of all engines have; empty: the host of each one's URL"),
    ] = ""
    admission: Admission = Admission()
    limits: Limits = Limits()
    deadlines: Deadlines = Deadlines()
    health: HealthChecks = HealthChecks()
    breaker: BreakerLimits = BreakerLimits()


class Proxy(ProxyCommon, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All keys of [proxy]: those that are read into something else at the start stand here."""

    listen: Annotated[str, about("address of the OpenAI API, /metrics, /health, /engines and /ui")] = (
        "127.0.0.1:8080"
    )
    engines: Annotated[
        list[str],
        about("root URLs of the engines, each http://host:port or NAME=http://host:port, or with https"),
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
    open: Annotated[bool, about("serve every caller at an address beyond loopback, without API keys")] = False
    events: Annotated[
        list[str],
        about(
            "KV events of engines, each NAME=tcp://host:port or NAME=tcp://host:port,tcp://host:port "
            "(where they are replayed)"
        ),
    ] = []
    pool: Annotated[
        str,
        about(
            "which nodes of the pool tell what they hold; auto: those of this host and user, those of "
            "cluster.master, and those of the masters that nodes of this host join; none: those of "
            "proxy.pool_events alone",
            choices=("auto", "none"),
        ),
    ] = "auto"
    pool_events: Annotated[
        list[str], about("KV events of further nodes of the pool, written like proxy.events")
    ] = []
    peer_listen: Annotated[
        str, about("address at which other proxies read this one's requests in flight")
    ] = ""
    peers: Annotated[
        list[str], about("proxy.peer_listen of each other proxy; a name stands for all its addresses")
    ] = []
