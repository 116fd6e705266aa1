"""`moonpool simulate`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core

from moonpool.cli import simulate_options as of
from moonpool.cli.options import check_writable, examples, write_text
from moonpool.cli.simulate_cache import simulate_cache

if TYPE_CHECKING:
    from moonpool.disagg_proxy.tools.simulator.runs import Plan, Run

RUN = "run"
TRACE_HELP = """Lines of timestamp, input_length, output_length, hash_ids; published ones:
github.com/kvcache-ai/Mooncake, FAST25-release/traces."""
TABLE_WIDTH = 140


class _Group(typer.core.TyperGroup):
    """`simulate TRACE` is `simulate run TRACE`, and --help is that of run."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args if args and args[0] in self.commands else [RUN, *args])


def register(app: typer.Typer) -> None:
    """Adds ``simulate`` as a group whose command RUN is the default: ``_Group`` inserts its name where the
    first argument names no command.
    """
    group = typer.Typer(cls=_Group, help="Replay a trace against simulated instances, or simulated caches.")
    group.command(
        RUN,
        epilog=examples(
            "moonpool simulate conversation_trace.jsonl",
            "moonpool simulate trace.jsonl --policy conductor,dynamo_cost/local --speed 1,1.5,2",
            "moonpool simulate trace.jsonl --prefill 10 --decode 6 --gap-slo 0.1 --admission ahead",
            "moonpool simulate trace.jsonl --capacity --ttft-slo 10 --policy conductor,round_robin/local",
            "moonpool simulate trace.jsonl --machine ours.json --link 12.5",
            "moonpool simulate trace.jsonl --sweep-pd 16 --ttft-slo 10 --gap-slo 0.1",
            "moonpool simulate trace.jsonl --copies 84 --prefill 500 --decode 500 --plot load.html",
            "moonpool simulate trace.jsonl --event '600s kill prefill-3' --event '900s join prefill-3'",
            "moonpool simulate trace.jsonl --whole 8 --prefill 0 --decode 0 --lag 0.5 --noise 0.15",
            "moonpool simulate cache trace.jsonl     hit rate over capacity (see simulate cache --help)",
        ),
    )(simulate)
    group.command(
        "cache",
        epilog=examples(
            "moonpool simulate cache conversation_trace.jsonl --plot hits.html",
            "moonpool simulate cache trace.jsonl --policy lru,s3fifo --blocks 1000,10000 --json -",
        ),
    )(simulate_cache)
    app.add_typer(group, name="simulate")


def simulate(
    trace: Annotated[Path, typer.Argument(help=TRACE_HELP)],
    speed: of.Speed = "1",
    copies: of.Copies = 1,
    requests: of.Requests = 0,
    seed: of.Seed = 0,
    prefill: of.Prefill = 8,
    decode: of.Decode = 8,
    whole: of.Whole = 0,
    machine: of.Machine = "paper",
    faster: of.Faster = 1.0,
    link: of.Link = 0.0,
    cache_tokens: of.CacheTokens = -1,
    chunk_tokens: of.ChunkTokens = 8192,
    eviction: of.Eviction = "lru",
    width: of.Width = 1,
    serial: of.Serial = False,
    event: of.Event = None,
    events: of.Events = None,
    policy: of.Policy = "conductor,min_ttft/local,load_balancing/local,round_robin/local",
    proxies: of.Proxies = 1,
    apart: of.Apart = False,
    exchange_lag: of.ExchangeLag = 0.004,
    lag: of.Lag = 0.0,
    report_period: of.ReportPeriod = 0.0,
    silence: of.Silence = "",
    noise: of.Noise = 0.0,
    skew: of.Skew = 1.0,
    ttft_slo: of.TtftSlo = 30.0,
    gap_slo: of.GapSlo = 0.0,
    admission: of.Admission = "none",
    queue: of.Queue = 0,
    queue_deadline: of.QueueDeadline = 30.0,
    capacity: of.Capacity = False,
    sweep_pd: of.SweepPd = 0,
    processes: of.Processes = 1,
    plot: of.Plot = None,
    json: of.Json = "",
) -> int:
    """Replay a trace against simulated instances under the proxy's own policies, and compare these.

    TTFT counts from a request's arrival to its first token, hand-over included. `simulate TRACE` is short for
    `simulate run TRACE`.
    """
    from dataclasses import replace

    from moonpool.disagg_proxy.conductor.admission import Lookahead, Objective
    from moonpool.disagg_proxy.tools.simulator import plots, report, run_plots
    from moonpool.disagg_proxy.tools.simulator.cluster import ClusterSettings
    from moonpool.disagg_proxy.tools.simulator.faults import parse, read_faults
    from moonpool.disagg_proxy.tools.simulator.machine import find_machine
    from moonpool.disagg_proxy.tools.simulator.reports import ReportSettings
    from moonpool.disagg_proxy.tools.simulator.results import Slo
    from moonpool.disagg_proxy.tools.simulator.runs import Plan

    looks = {"none": None, **{look.value: look for look in Lookahead}}
    if admission not in looks:
        raise typer.BadParameter(f"--admission is one of {', '.join(looks)}, not {admission}")
    drawn = plot or []
    speeds = _numbers(speed, "--speed")
    _check_question(capacity, sweep_pd, gap_slo, whole, drawn, processes, speeds)
    plots.check(drawn)
    check_writable(json, "simulate")
    of = find_machine(machine).faster(faster)
    if link:
        of = replace(of, link_bytes_s=link * 1e9)
    cluster = ClusterSettings(
        prefill=prefill,
        decode=decode,
        whole=whole,
        machine=of if cache_tokens < 0 else replace(of, cache_tokens=cache_tokens),
        chunk_tokens=chunk_tokens,
        width=width,
        layerwise=not serial,
        eviction=eviction,
        exchanging=not apart,
        tell_after_s=exchange_lag,
    )
    silent = _numbers(silence, "--silence") if silence else [0.0, 0.0]
    if len(silent) != 2:
        raise typer.BadParameter(f"--silence takes FROM,SECONDS, as 300,30, not {silence}")
    reports = ReportSettings(lag, report_period, noise, skew, *silent)
    faults = (*map(parse, event or ()), *(read_faults(events) if events is not None else ()))
    slo = Slo.of(ttft_slo, gap_slo)
    plans = [
        Plan(
            trace,
            replace(cluster, pool=not local),
            name,
            Objective(*slo),
            looks[admission],
            times,
            seed,
            copies,
            requests,
            queue,
            queue_deadline,
            faults,
            proxies,
            reports,
        )
        for times in speeds
        for name, local in _policies(policy)
    ]
    console = make_console(to_stderr=json == "-")
    if capacity:
        return _capacity(console, plans, slo, json)
    if sweep_pd:
        plans = [plan for each in plans for plan in _splits(each, sweep_pd)]
    runs = _run(console, plans, processes)
    console.print(report.table(runs, slo), highlight=False)
    if sweep_pd:
        for best in report.best_splits(runs, slo):
            console.print(report.recommendation(best, slo), highlight=False)
    for path in drawn:
        run_plots.draw(path, runs, slo, sweep=sweep_pd > 0)
        console.print(f"drawn: {path}", highlight=False)
    if json:
        write_text(json, report.as_json(runs, slo), "simulate")
    return 0


def _run(console: Any, plans: list[Plan], processes: int) -> list[Run]:
    from moonpool.disagg_proxy.tools.simulator import report
    from moonpool.disagg_proxy.tools.simulator.runs import simulate_all

    with console.status(f"simulating {len(plans)} runs") as status:
        count = 0

        def done(run: Run) -> None:
            nonlocal count
            count += 1
            status.update(f"{count} of {len(plans)} done, the last: {report.label(run.plan)}")

        return simulate_all(plans, processes=processes, done=done)


def _capacity(console: Any, plans: list[Plan], slo: Any, json: str) -> int:
    import json as encoder
    import math

    from moonpool.disagg_proxy.tools.simulator import report
    from moonpool.disagg_proxy.tools.simulator.capacity import SPEED_MAX, capacity
    from moonpool.disagg_proxy.tools.simulator.trace import read_trace

    trace = read_trace(plans[0].trace)
    rows = []
    for plan in plans:
        label = report.label(plan)
        with console.status(label) as status:

            def tried(at: float, good: float, label: str = label, status: Any = status) -> None:
                status.update(f"{label}: {good * 100:.1f} % are good at {at:.3g} times the speed")

            speed = capacity(plan, slo, trace, tried=tried)
        endless = speed == math.inf
        speed = min(speed, max(SPEED_MAX, plan.speed))
        rows.append({"policy": plan.policy, "pool": plan.cluster.pool, "speed": speed, "at_least": endless})
        said = f"{'at least ' if endless else ''}{speed:.2f} times the trace's speed"
        console.print(f"{report.label(plan):40} {said}", highlight=False)
    if json:
        write_text(json, encoder.dumps({"runs": rows}, indent=1), "simulate")
    return 0


def _splits(plan: Plan, total: int) -> list[Plan]:
    from dataclasses import replace

    return [
        replace(plan, cluster=replace(plan.cluster, prefill=prefill, decode=total - prefill, whole=0))
        for prefill in range(1, total)
    ]


def _check_question(
    capacity: bool,
    sweep_pd: int,
    gap_slo: float,
    whole: int,
    drawn: list[Path],
    processes: int,
    speeds: list[float],
) -> None:
    """Nothing that was asked for is left out without a word. Raises BadParameter."""
    if capacity:
        for given, why in (
            (sweep_pd, "--sweep-pd is another question"),
            (drawn, "there is nothing to --plot"),
            (processes > 1, "--processes cannot help, each speed depends on the one before"),
            (len(speeds) > 1, "--speed is one number, where the search begins"),
        ):
            if given:
                raise typer.BadParameter(f"with --capacity {why}")
    if sweep_pd:
        if sweep_pd < 2:
            raise typer.BadParameter("--sweep-pd needs two instances or more")
        if whole:
            raise typer.BadParameter("--sweep-pd splits into prefill and decode; --whole has no place there")
        if not gap_slo:
            raise typer.BadParameter("--sweep-pd needs --gap-slo, or decode instances would be for nothing")


def _policies(text: str) -> list[tuple[str, bool]]:
    """(name, without the pool) each."""
    found = []
    for one in filter(None, (part.strip() for part in text.split(","))):
        name, _, where = one.partition("/")
        if where not in ("", "local"):
            raise typer.BadParameter(f"--policy takes NAME or NAME/local, not {one}")
        found.append((name, where == "local"))
    if not found:
        raise typer.BadParameter("--policy needs a name")
    return found


def _numbers(text: str, option: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"{option} takes numbers: {error}") from error


def make_console(*, to_stderr: bool) -> Any:
    """Wide enough for the tables where the output is no terminal."""
    import sys

    from rich.console import Console

    console = Console(file=sys.stderr if to_stderr else sys.stdout)
    if not console.is_terminal:
        console.width = TABLE_WIDTH
    return console
