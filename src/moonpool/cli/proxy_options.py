"""The options of `moonpool proxy`, in the groups that its help shows. docs/proxy.md says more of each."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

_engines = partial(typer.Option, rich_help_panel="Engines")
_address = partial(typer.Option, rich_help_panel="Address")
_choice = partial(typer.Option, rich_help_panel="Choice of an engine")
_admission = partial(typer.Option, rich_help_panel="Admission")
_several = partial(typer.Option, rich_help_panel="Several processes and proxies")
_access = partial(typer.Option, rich_help_panel="Access and records")

# Engines
Engines = Annotated[
    list[str] | None,
    _engines("--engine", metavar="URL|NAME=URL", help="An engine; give it once for each."),
]
Prefill = Annotated[
    list[str] | None,
    _engines(
        metavar="URL|NAME=URL",
        help="Computes prompts for --decode; once for each. #bootstrap=PORT behind it, where not 8998.",
    ),
]
Decode = Annotated[
    list[str] | None,
    _engines(metavar="URL|NAME=URL", help="An engine that answers what --prefill computed."),
]
Discovery = Annotated[
    list[str] | None,
    _engines(
        metavar="SOURCE",
        help="Find engines while it runs: file:PATH, http, etcd:URL/PREFIX, kubernetes:NAMESPACE/LABELS.",
    ),
]
DiscoveryKeysFile = Annotated[
    str | None, _engines(metavar="FILE", help="Keys of who may register engines over HTTP, one per line.")
]
DiscoveryAllow = Annotated[
    list[str] | None,
    _engines(metavar="CIDR", help="A network in which engines may register; without one this host alone."),
]
DiscoveryRegistryFile = Annotated[
    str | None, _engines(metavar="FILE", help="Keeps engines that registered over a restart.")
]

# Address
Listen = Annotated[str | None, _address(metavar="HOST:PORT", help="Address of the OpenAI API.")]
Host = Annotated[str | None, _address(help="The address alone.")]
Port = Annotated[int | None, _address(min=0, max=65535, help="The port alone; 0: a free one.")]
TakeOver = Annotated[
    bool, _address("--take-over", help="Replace a proxy that runs there; no connection is refused.")
]

# Choice of an engine
Policy = Annotated[
    str | None,
    _choice(
        help="conductor (default with --prefill and --decode, or events), prefix_affinity, least_load, "
        "round_robin (default otherwise), dynamo_cost, sglang_cache_aware, vllm_kv_aware, lmetric, min_ttft, "
        "load_balancing, or package.module:Class."
    ),
]
Handover = Annotated[
    str | None,
    _choice(
        metavar="FORM",
        help="From prefill to decode: auto, two_step, concurrent, one_shot, context_first, generation_first.",
    ),
]
Tokenizer = Annotated[
    list[str] | None,
    _choice(metavar="MODEL=FOLDER", help="Tokenise here instead of asking engines; or: none."),
]
Events = Annotated[
    list[str] | None, _choice(metavar="NAME=ZMQ", help="KV events of an engine; once for each.")
]
PoolEvents = Annotated[list[str] | None, _choice(metavar="NAME=ZMQ", help="KV events of a node of the pool.")]

# Admission
TtftSlo = Annotated[
    float | None,
    _admission(min=0.0, metavar="SECONDS", help="Refuse what would get its first token later."),
]
GapSlo = Annotated[
    float | None,
    _admission(min=0.0, metavar="SECONDS", help="Refuse what would get its tokens more slowly, each."),
]
QueueMax = Annotated[
    int | None, _admission(min=0, metavar="N", help="So many requests may wait until engines are free.")
]
QueueDeadline = Annotated[float | None, _admission(min=0.0, metavar="SECONDS", help="The longest such wait.")]

# Several processes and proxies
Processes = Annotated[int | None, _several(min=1, max=64, help="Processes that serve at the address.")]
ProcessListen = Annotated[
    str | None,
    _several(metavar="HOST:PORT", help="Reach each of them alone, too: at PORT, PORT + 1, ..."),
]
PeerListen = Annotated[
    str | None, _several(metavar="HOST:PORT", help="Where other proxies hear what this one has in flight.")
]
Peers = Annotated[
    list[str] | None,
    _several("--peer", metavar="HOST:PORT", help="Another proxy's --peer-listen; once for each."),
]

# Access and records
ApiKeysFile = Annotated[str | None, _access(metavar="FILE", help="API keys of clients, one per line.")]
Open = Annotated[
    bool, _access("--open", help="Serve every caller beyond loopback, without API keys; a gateway asks.")
]
EngineKeyFile = Annotated[
    str | None,
    _access(metavar="FILE", help="API keys that engines want: KEY, or NAME KEY or HOST:PORT KEY, per line."),
]
AccessLog = Annotated[
    str | None, _access(metavar="FILE", help="Gets a line per request; - is standard output.")
]
OtlpEndpoint = Annotated[
    str | None, _access(metavar="URL", help="Gets OpenTelemetry spans, such as http://host:4318.")
]
