"""`moonpool bench transfer` and `moonpool bench store`; `bench serve` is in bench_serve.py."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moonpool.cli import bench_serve
from moonpool.cli.options import ConfigFile, TokenFile, examples
from moonpool.core.service.exit_codes import EXIT_INTERRUPTED

if TYPE_CHECKING:
    from moonpool.core.config.config import Config

SERVE_ADDRESS = "127.0.0.1:7720"
# Transports of memory of cards alone, each with the one that carries what a bench has on the host.
OF_CARDS = {"cuda_ipc": "tcp", "cufile": "file"}

Sizes = Annotated[
    str, typer.Option("--size", metavar="SIZE,...", help="Bytes of a slice; several: a row each.")
]
Seconds = Annotated[float, typer.Option(min=0.1, help="How long each row takes.")]
Threads = Annotated[int, typer.Option(min=1, max=256, help="Threads that work at the same time.")]
Verify = Annotated[bool, typer.Option("--verify", help="Compare the bytes; the figures then include that.")]
JsonFile = Annotated[
    str, typer.Option("--json", metavar="FILE|-", help="Write the rows there as JSON; - is standard output.")
]


def register(app: typer.Typer) -> None:
    """Adds the group ``bench`` with its commands ``transfer``, ``store`` and ``serve``."""
    group = typer.Typer(
        help="Measure how fast bytes move here, and how fast an endpoint serves.",
        no_args_is_help=True,
        epilog=examples(
            "moonpool bench transfer",
            "moonpool bench store",
            "moonpool bench serve --url http://127.0.0.1:8080",
        ),
    )
    group.command(
        epilog=examples(
            "moonpool bench transfer",
            "moonpool bench transfer --transport tcp --size 4KiB,64KiB,1MiB --seconds 2",
            "moonpool bench transfer --size 4KiB --batch 128 --direction write --verify --json rows.json",
            "moonpool bench transfer --serve --listen 0.0.0.0:7720 --token-file token    (on one host)",
            "moonpool bench transfer --connect 10.0.0.7:7720 --token-file token          (on the other)",
            "moonpool bench transfer --serve --name far --metadata etcd://h1:2379 --listen 0.0.0.0:7720 "
            "--token-file token",
            "moonpool bench transfer --connect far --metadata etcd://h1:2379 --token-file token",
            "moonpool bench transfer --file /mnt/nvme --size 64KiB,1MiB --depth 8",
            "moonpool bench transfer --connect 10.0.0.7:7720 --token-file token --transport rdma "
            "--rdma-devices mlx5_0,mlx5_1",
            "moonpool bench transfer --device cuda:0 --peer-device cuda:1 --verify",
        )
    )(transfer)
    group.command(
        epilog=examples(
            "moonpool bench store",
            "moonpool bench store --verb get --size 64KiB,1MiB --batch 16 --threads 2",
            "moonpool bench store --node default --verify",
            "moonpool bench store --embedded --json -",
        )
    )(store)
    bench_serve.register(group)
    app.add_typer(group, name="bench")


def transfer(
    serve: Annotated[bool, typer.Option("--serve", help="Be the other side, until SIGTERM.")] = False,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where --serve is reached.")
    ] = SERVE_ADDRESS,
    connect: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT|NAME",
            help="A server on this or another host, instead of our own; by name with --metadata.",
        ),
    ] = "",
    metadata: Annotated[
        str,
        typer.Option(metavar="URL", help="Where engines publish their names: http, etcd or redis."),
    ] = "",
    name: Annotated[
        str, typer.Option(metavar="NAME", help="What --serve publishes with --metadata.")
    ] = "bench-server",
    file: Annotated[
        str,
        typer.Option(
            metavar="PATH", help="A file, a block device, or a directory for a file, instead of a peer."
        ),
    ] = "",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Write to --file although it holds something.")
    ] = False,
    size: Sizes = "1MiB",
    batch: Annotated[int, typer.Option(min=1, max=65536, help="Slices of one operation.")] = 1,
    depth: Annotated[
        int, typer.Option(min=1, max=1024, help="Operations of each thread that are on their way.")
    ] = 1,
    threads: Threads = 1,
    direction: Annotated[str, typer.Option(metavar="read|write", help="From the peer, or to it.")] = "read",
    transport: Annotated[
        str,
        typer.Option(
            metavar="NAME,...",
            help="loopback, shm, cuda_ipc, rdma, efa, tcp, file, cufile, or one of --outside; default: the "
            "engine chooses.",
        ),
    ] = "",
    rdma_devices: Annotated[
        str,
        typer.Option(metavar="NAME,...", help="The RDMA devices to use, as mlx5_0; default: all that work."),
    ] = "",
    rdma_library: Annotated[
        str, typer.Option(metavar="FILE", help="libibverbs, where it is not the system's.")
    ] = "",
    efa_provider: Annotated[
        str, typer.Option(metavar="NAME", help="The provider of libfabric for efa; both sides need the same.")
    ] = "efa",
    efa_devices: Annotated[
        str,
        typer.Option(metavar="NAME,...", help="The EFA devices to use, as rdmap0s6; default: all that work."),
    ] = "",
    outside: Annotated[
        str,
        typer.Option(
            metavar="PATH|NAME,...",
            help="Libraries with a transport each that is built outside of Moonpool; both sides need them.",
        ),
    ] = "",
    working_set: Annotated[
        str, typer.Option(metavar="SIZE", help="Memory on each side that the slices walk through.")
    ] = "64MiB",
    foreign: Annotated[
        bool, typer.Option("--foreign", help="Memory of the host that the engine did not allocate.")
    ] = False,
    device: Annotated[
        str, typer.Option(metavar="cpu|cuda:N", help="Where the memory of this side is; also of --serve.")
    ] = "cpu",
    peer_device: Annotated[
        str,
        typer.Option(metavar="cpu|cuda:N", help="Of a peer that this command starts; default: as --device."),
    ] = "",
    memory: Annotated[str, typer.Option(metavar="SIZE", help="What --serve offers.")] = "512MiB",
    io_threads: Annotated[int, typer.Option(min=1, max=64, help="The engine's threads for TCP.")] = 2,
    connections: Annotated[int, typer.Option(min=1, max=64, help="TCP connections to the peer.")] = 2,
    interface: Annotated[str, typer.Option(metavar="NAME", help="The network interface to use.")] = "",
    seconds: Seconds = 5.0,
    verify: Verify = False,
    json: JsonFile = "",
    config: ConfigFile = None,
    token_file: TokenFile = None,
) -> int:
    """Move bytes between two engines, two processes of this host or two hosts, or between memory and a file.

    A peer that this command starts has the same options. Its cards have the same numbers as here.

    GB/s counts 10**9 bytes; an operation is one call of --batch slices; CPU s/GB is of this process and,
    beside it, of the peer.
    """
    from contextlib import ExitStack

    from moonpool.core.bench import peer
    from moonpool.core.bench import transfer as bench
    from moonpool.core.bench.file import FileBench, chosen
    from moonpool.core.bench.memory import Memory, is_of_card
    from moonpool.core.transfer.engine import TransferEngine

    token = _chosen_token(config, token_file)
    if sum(map(bool, (serve, connect, file))) > 1:
        raise typer.BadParameter("--serve, --connect and --file exclude each other")
    if direction not in ("read", "write"):
        raise typer.BadParameter(f"--direction is read or write, not {direction}")
    names = _names(transport)
    here = _kind(device, foreign, "--device")
    there = _kind(peer_device, foreign, "--peer-device") if peer_device else here
    for one in set(names) & OF_CARDS.keys():
        if not connect and not is_of_card(here if one == "cufile" else there):
            raise typer.BadParameter(f"--transport {one} moves memory of cards: name one, as --device cuda:0")
        names.append(OF_CARDS[one])
    both: dict[str, Any] = {  # of the engine here and of a peer that is started here
        "rdma_devices": _names(rdma_devices),
        "rdma_library": rdma_library,
        "efa_provider": efa_provider,
        "efa_devices": _names(efa_devices),
        "outside_transports": _names(outside),
    }
    if serve:
        size_bytes = _size(memory, "--memory")
        with TransferEngine(name, listen=listen, token=token, metadata=metadata, **both) as engine:
            data = Memory(engine, size_bytes, here)
            peer.serve(engine, data, lambda found: _say_served(found, size_bytes, name, metadata))
        return 0

    walked = _size(working_set, "--working-set")
    plans = [
        bench.Plan(one, batch, depth, threads, direction, walked, seconds, verify) for one in _sizes(size)
    ]
    with ExitStack() as stack:
        far, writable = Path(file), False
        if file:
            writes = verify or direction == "write"
            far, writable = stack.enter_context(chosen(far, writes, overwrite))
            address = file
        elif connect:
            address = connect
        elif names == ["loopback"]:
            address = ""
        else:
            address, token = stack.enter_context(bench.spawned(walked, there, **both))
        engine = stack.enter_context(
            TransferEngine(
                "bench",
                token=token,
                transports=names or None,
                interface=interface,
                metadata=metadata,
                io_threads=io_threads,
                connections_per_peer=connections,
                **both,
            )
        )
        if not address:
            address = stack.enter_context(bench.in_process(token, walked, there, **both))
        client: bench.Bench
        if file:
            client = FileBench(engine, far, walked, here, writable=writable)
        else:
            client = bench.EngineBench(engine, address, walked, here)
        facts = {"peer": client.segment.address, "working_set": walked, "foreign": foreign}
        facts |= {"device": device, "peer_kind": client.remote.kind}
        return _measure("transfer", client, plans, facts, json)


def store(
    node: Annotated[
        str,
        typer.Option(metavar="SOCKET", help="A running node's socket or name, instead of one of our own."),
    ] = "",
    embedded: Annotated[bool, typer.Option("--embedded", help="A node inside this process.")] = False,
    dram: Annotated[str, typer.Option(metavar="SIZE", help="DRAM of our own node.")] = "512MiB",
    verb: Annotated[
        str, typer.Option(metavar="NAME,...", help="put, get, exists, longest_prefix.")
    ] = "put,get,exists,longest_prefix",
    size: Annotated[
        str, typer.Option("--size", metavar="SIZE,...", help="Bytes of an object; several: a row each.")
    ] = "64KiB",
    batch: Annotated[int, typer.Option(min=1, max=65536, help="Keys of one call.")] = 1,
    threads: Threads = 1,
    seconds: Seconds = 3.0,
    verify: Verify = False,
    json: JsonFile = "",
    config: ConfigFile = None,
    token_file: TokenFile = None,
) -> int:
    """Put, get and look up objects: a node in another process, a running one, or one inside this process.

    Against a running node the objects live in a namespace of their own, fill at most a quarter of it, and are
    removed at the end.
    """
    from moonpool.core.bench import store as bench
    from moonpool.core.config import paths

    verbs = _names(verb)
    for name in verbs:
        if name not in bench.VERBS:
            raise typer.BadParameter(f"--verb knows {', '.join(bench.VERBS)}, not {name}")
    if node and embedded:
        raise typer.BadParameter("--node and --embedded exclude each other")
    plans = [bench.Plan(name, one, batch, threads, seconds, verify) for name in verbs for one in _sizes(size)]
    arena = _size(dram, "--dram")
    if node:
        path = node if "/" in node else str(paths.node_socket(node))
        opened = bench.running_node(path, _settings(config, token_file).read_token())
    elif embedded:
        opened = bench.embedded_node(arena)
    else:
        opened = bench.own_node(arena)
    with opened as client:
        facts = {"node": node or ("embedded" if embedded else "own"), "arena_bytes": client.arena_bytes}
        return _measure("store", client, plans, facts, json)


def _measure(kind: str, client: Any, plans: list[Any], facts: dict[str, Any], json: str) -> int:
    """Runs the rows, shows them, and ends early with what there is when it is interrupted."""
    import signal
    import sys

    from rich.console import Console

    from moonpool.core.bench import report

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: the rows so far are shown
    file = sys.stderr if json == "-" else sys.stdout
    console = Console(file=file, width=None if file.isatty() else report.WIDTH)
    rows: list[Any] = []
    for plan in plans:
        rows.append(client.run(plan, ticker := _ticker(console, kind, plan)))
        ticker.clear()
        if rows[-1].interrupted:
            break
    interrupted = bool(rows and rows[-1].interrupted)
    console.print(_title(kind, facts, plans[0]), highlight=False, soft_wrap=True)
    console.print(report.table(report.columns_of(kind, rows), rows), highlight=False)
    if json:
        report.write_json(json, kind, facts | {"interrupted": interrupted}, rows)
    return EXIT_INTERRUPTED if interrupted else 0


def _ticker(console: Any, kind: str, plan: Any) -> Any:
    from moonpool.core.bench import report
    from moonpool.core.config.units import format_size

    if kind == "transfer":
        return report.Ticker(
            console, f"{plan.direction} {format_size(plan.size)} x {plan.batch}", plan.size * plan.batch
        )
    moved = plan.size * plan.batch if plan.verb in ("put", "get") else 0
    return report.Ticker(console, f"{plan.verb} {format_size(plan.size)} x {plan.batch}", moved)


def _title(kind: str, facts: dict[str, Any], plan: Any) -> str:
    from moonpool.core.config.units import format_size

    common = f"batch {plan.batch}, threads {plan.threads}"
    if kind == "transfer":
        walked = format_size(plan.working_set)
        return f"{plan.direction} {facts['peer']}: {common}, depth {plan.depth}, working set {walked}"
    return f"node {facts['node']}, {format_size(facts['arena_bytes'])}: {common}"


def _say_served(addresses: list[str], nbytes: int, name: str, metadata: str) -> None:
    from moonpool.core.config.units import format_size

    far = f"{name} --metadata {metadata}" if metadata else addresses[0]
    print(
        f"moonpool bench: {format_size(nbytes)} at {', '.join(addresses)}; "
        f"measure with: moonpool bench transfer --connect {far}",
        flush=True,
    )


def _settings(config: Path | None, token_file: Path | None) -> Config:
    from moonpool.core.config.config import load

    return load(config, arguments={"cluster.token_file": None if token_file is None else str(token_file)})


def _chosen_token(config: Path | None, token_file: Path | None) -> bytes | None:
    """The token that a person chose; None: none, so only loopback addresses will do."""
    settings = _settings(config, token_file)
    return settings.read_token() if settings.token_is_configured else None


def _names(text: str) -> list[str]:
    return [one.strip() for one in text.split(",") if one.strip()]


def _kind(device: str, foreign: bool, option: str) -> str:
    """Of the memory on one side."""
    from moonpool.core.bench.memory import FOREIGN, OWN, is_of_card

    if is_of_card(device):
        return device
    if device != "cpu":
        raise typer.BadParameter(f"{option} is cpu, or cuda:0 for the first CUDA card, not {device}")
    return FOREIGN if foreign else OWN


def _sizes(text: str) -> list[int]:
    return [_size(one, "--size") for one in text.split(",")]


def _size(text: str, option: str) -> int:
    from moonpool.core.config.units import parse_size

    try:
        found = parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(f"{option}: {error}") from error
    if found == 0:
        raise typer.BadParameter(f"{option} must be above 0")
    return found
