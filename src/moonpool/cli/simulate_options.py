"""The options of `moonpool simulate`, in the groups that its help shows; docs/simulator.md says more."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

_load = partial(typer.Option, rich_help_panel="Load")
_instances = partial(typer.Option, rich_help_panel="Instances")
_proxy = partial(typer.Option, rich_help_panel="Proxies")
_objective = partial(typer.Option, rich_help_panel="Objective and admission")
_question = partial(typer.Option, rich_help_panel="Question and answer")

# Load
Speed = Annotated[str, _load(metavar="TIMES,...", help="How much faster requests come.")]
Copies = Annotated[int, _load(min=1, help="Groups of users that all do the whole trace.")]
Requests = Annotated[int, _load(min=0, help="So many at most; 0: all.")]
Seed = Annotated[int, _load(min=0, help="Of the arrivals within rounded times.")]

# Instances
Prefill = Annotated[int, _instances(min=0, max=10_000, help="Instances that compute prompts.")]
Decode = Annotated[
    int, _instances(min=0, max=10_000, help="Instances that make answers; 0: only first tokens are made.")
]
Whole = Annotated[int, _instances(min=0, max=10_000, help="Instances that do both.")]
Machine = Annotated[
    str, _instances(metavar="NAME|FILE.json", help="What instances can do: paper, h100_fp8, or own figures.")
]
Faster = Annotated[float, _instances(min=1e-3, help="So many times that machine's compute.")]
Link = Annotated[
    float, _instances(min=0.0, metavar="GB/S", help="Of an instance's network; 0: the machine's.")
]
CacheTokens = Annotated[int, _instances(min=-1, help="An instance's prefix cache; -1: the machine's.")]
ChunkTokens = Annotated[int, _instances(min=0, help="Of a prompt at one time; 0: all.")]
Eviction = Annotated[
    str, _instances(metavar="NAME", help="What a full prefix cache does; see `simulate cache`.")
]
Width = Annotated[int, _instances(min=1, help="Nodes of a prefill instance, in a pipeline.")]
Serial = Annotated[bool, _instances("--serial", help="Hand KV over after the whole prompt.")]
Event = Annotated[
    list[str] | None,
    _instances(metavar="'600s kill prefill-3'", help="Join, leave, kill or slow; may be repeated."),
]
Events = Annotated[Path | None, _instances(metavar="FILE", help="Such events, one a line.")]

# Proxies
Policy = Annotated[str, _proxy(metavar="NAME,...", help="As in proxy.policy. NAME/local: without the pool.")]
Proxies = Annotated[int, _proxy(min=1, max=64, help="So many, which exchange what they have in flight.")]
Apart = Annotated[bool, _proxy("--apart", help="The proxies exchange nothing.")]
ExchangeLag = Annotated[float, _proxy(min=0.0, help="Seconds from one proxy to the others.")]
Lag = Annotated[float, _proxy(min=0.0, help="Seconds, by which proxies hear late of what engines did.")]
ReportPeriod = Annotated[float, _proxy(min=0.0, help="They hear of it every so many seconds; 0: each time.")]
Silence = Annotated[
    str, _proxy(metavar="FROM,SECONDS", help="They hear nothing from then on, for so long; then all of it.")
]
Noise = Annotated[
    float, _proxy(min=0.0, max=2.0, help="Standard deviation of the error of each time that they hear.")
]
Skew = Annotated[
    float, _proxy(min=1.0, max=100.0, help="Times of an engine are off by its own factor, up to so much.")
]

# Objective and admission
TtftSlo = Annotated[float, _objective(min=0.0, help="Seconds to the first token; 0: any.")]
GapSlo = Annotated[float, _objective(min=0.0, help="Seconds, mean of the longest tenth of the gaps; 0: any.")]
Admission = Annotated[
    str, _objective(metavar="none|never|now|ahead|after", help="Refuse; looking at decode when.")
]
Queue = Annotated[int, _objective(min=0, help="Requests that may wait in a proxy.")]
QueueDeadline = Annotated[float, _objective(min=0.0, help="Seconds, the longest such wait.")]

# Question and answer
Capacity = Annotated[
    bool, _question("--capacity", help="Find the greatest speed with 90 % within the objective.")
]
SweepPd = Annotated[
    int, _question(min=0, help="So many instances: which split into prefill and decode? Needs --gap-slo.")
]
Processes = Annotated[int, _question(min=1, help="Simulations at the same time.")]
Plot = Annotated[
    list[Path] | None, _question(metavar="FILE", help="Draw it: .png or .html; may be repeated.")
]
Json = Annotated[str, _question("--json", metavar="FILE|-", help="Write the figures there.")]
