"""Every path that this machine has: its bytes checked, its rate, and what was left out and why.

    python -m benchmarks.transfer_paths [--dir DIR] [--quick] [--json FILE]                  # within one host
    moonpool bench transfer --serve --listen 10.0.0.7:7720 --token-file token                # on another one
    python -m benchmarks.transfer_paths --connect 10.0.0.7:7720 --token-file token
    python -m benchmarks.transfer_paths --efa-provider tcp         # efa without its NICs, beside our own TCP

For a machine with real NICs, an EFA or NVMe: each transport by itself, in both directions, with 128 x 4 KiB,
64 KiB and 1 MiB. The bytes of each are compared before it is timed. Rates stand beside TCP's (a file's beside
none), to the same peer in the same run. GPUDirect Storage (cufile) moves memory of the first card; other
memory of cards is measured by benchmarks.gpu_copies. With --efa-provider both engines are in this process,
and efa goes over that provider of libfabric; its limit is a plain C++ loop that posts the same requests to
the same provider.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.options import make_parser
from benchmarks.processes import end_on_sigterm
from benchmarks.report import Row, print_table, write_json
from moonpool import Error, TransferEngine
from moonpool.core.bench.file import FileBench
from moonpool.core.bench.memory import OWN
from moonpool.core.bench.transfer import Bench, EngineBench, Plan, in_process, spawned

KIB, MIB = 1 << 10, 1 << 20
WORKING_SET = 64 * MIB
CELLS = ((4 * KIB, 128), (64 * KIB, 1), (MIB, 1))
OF_FILES = ("file", "cufile")
OF_CARDS = ("cuda_ipc",)
CARD = "cuda:0"  # whose memory cufile moves
BESIDE = "tcp"
EFA_TARGET = 0.7  # of our own TCP, over libfabric's


def silent(operations: int, rate: float) -> None:
    """No line for each second."""


def measured(client: Bench, transport: str, seconds: float) -> dict[tuple[str, int, int], float]:
    """GB/s by direction, size and batch. Raises where other bytes came, or by another transport."""
    found = {}
    for direction in ("read", "write"):
        for size, batch in CELLS:
            for verify in (True, False):
                plan = Plan(size, batch, 1, 1, direction, WORKING_SET, seconds, verify)
                row = client.run(plan, silent)
                if row.transport != transport:
                    sys.exit(f"transfer_paths: {row.transport} moved the bytes, not {transport}")
            found[direction, size, batch] = row.gb_per_s
    return found


def plain_loop(provider: str, folder: Path, seconds: float) -> dict[tuple[str, int, int], float]:
    """What the provider itself can do, in GB/s as in measured(). Empty: the loop cannot be built or run."""
    source, program = Path(__file__).parent / "transfer" / "drivers" / "fabric_loop.cpp", folder / "loop"
    core = Path(__file__).resolve().parents[1] / "core" / "csrc"
    compiler = os.environ.get("CXX", "c++").split()
    build = [*compiler, "-std=c++20", "-O2", f"-I{core}", str(source), "-ldl", "-o", str(program)]
    ask = [str(program), provider, str(seconds), str(WORKING_SET)]
    found = {}
    try:
        subprocess.run(build, check=True)
        done = subprocess.run(ask, check=True, stdout=subprocess.PIPE, text=True, timeout=60 + 10 * seconds)
        for line in done.stdout.splitlines():
            direction, size, batch, rate = line.split()
            found[direction, int(size), int(batch)] = float(rate)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"no plain loop over libfabric: {error}", file=sys.stderr)
    return found


def main() -> None:
    parser = make_parser(__doc__, "0.1 s for each figure")
    parser.add_argument("--connect", metavar="HOST:PORT", help="`moonpool bench transfer --serve` elsewhere")
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="its token")
    parser.add_argument("--efa-provider", default="efa", metavar="NAME", help="of libfabric; default: efa")
    parser.add_argument("--dir", type=Path, default=Path(), metavar="DIR", help="for the file; default: here")
    options = parser.parse_args()
    end_on_sigterm()
    seconds = 0.1 if options.quick else 2.0
    found: dict[str, dict[tuple[str, int, int], float]] = {}
    skipped: dict[str, str] = {}
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="paths-", dir=options.dir))
        os.environ["MOONPOOL_RUNTIME_DIR"] = folder
        if options.connect:
            address, token = options.connect, options.token_file and options.token_file.read_bytes().strip()
        elif options.efa_provider != "efa":
            token = secrets.token_hex(16).encode()
            provider = options.efa_provider
            address = stack.enter_context(in_process(token, WORKING_SET, efa_provider=provider))
        else:
            address, token = stack.enter_context(spawned(WORKING_SET))
        own = {"token": token, "metadata": "", "efa_provider": options.efa_provider}
        with TransferEngine("asked", **own) as engine:
            transports = engine.transports()
        for name, why in transports.items():
            if name in OF_CARDS:
                skipped[name] = why or "it is for memory of cards: python -m benchmarks.gpu_copies"
            elif why:
                skipped[name] = why
            elif name == "loopback" and options.connect:
                skipped[name] = "the peer is another process"
            else:
                make = opener(name, address, token, Path(folder))
                try:
                    found[name] = one_path(name, make, own, seconds)
                except Error as error:
                    skipped[name] = str(error)
            print(f"{name}: {skipped.get(name, 'right bytes in both directions')}", flush=True)
        judged = options.efa_provider != "efa" and BESIDE in found
        limits = plain_loop(options.efa_provider, Path(folder), seconds) if judged else {}
    rows = [
        Row(
            f"{direction} {f'{batch} x ' if batch > 1 else ''}{size // KIB} KiB by {name} "
            f"[{WORKING_SET // MIB} MiB]",
            rate,
            "GB/s",
            {BESIDE: found[BESIDE][direction, size, batch]}
            if BESIDE in found and name not in OF_FILES
            else {},
            limits.get((direction, size, batch)) if name == "efa" else None,
            f">= {EFA_TARGET:g}x tcp" if judged and name == "efa" else "",
            rate >= EFA_TARGET * found[BESIDE][direction, size, batch] if judged and name == "efa" else None,
        )
        for name, rates in found.items()
        for (direction, size, batch), rate in rates.items()
    ]
    for name in found:
        limit_name = "plain loop" if limits and name == "efa" else ""
        print_table(name, [row for row in rows if f" by {name} " in row.work], limit_name)
    write_json(options.json, rows)


Opener = Callable[[ExitStack, TransferEngine], Bench]


def opener(name: str, address: str, token: bytes | None, folder: Path) -> Opener:
    """What makes the other end for a transport."""

    def make(stack: ExitStack, engine: TransferEngine) -> Bench:
        if name in OF_FILES:
            kind = CARD if name == "cufile" else OWN
            return FileBench(engine, folder / "segment", WORKING_SET, kind, writable=True)
        if name == "loopback":
            here = stack.enter_context(in_process(token, WORKING_SET))
            return EngineBench(engine, here, WORKING_SET)
        return EngineBench(engine, address, WORKING_SET)

    return make


def one_path(
    name: str, make: Opener, own: dict[str, Any], seconds: float
) -> dict[tuple[str, int, int], float]:
    with ExitStack() as stack:
        engine = stack.enter_context(TransferEngine("paths", transports=[name], **own))
        return measured(make(stack, engine), name, seconds)


if __name__ == "__main__":
    main()
