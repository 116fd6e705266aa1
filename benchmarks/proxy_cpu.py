"""CPU that a router spends on a request: ours beside vllm-router and sglang-router, same engines, same load.

    python -m benchmarks.proxy_cpu [--peers-venv DIR] [--quick] [--json FILE]

Each router fronts two mock engines with round robin; 64 clients in a closed loop send prompts of 2 KiB.
Routers take turns; the figure is the median over the rounds of the process's CPU seconds by the requests of
that round. --peers-venv: where the peers' packages are (pip install vllm-router==0.1.17
sglang-router==0.3.2).
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import uvloop

from benchmarks.processes import Failed, Process, free_port
from benchmarks.proxy import load
from benchmarks.report import Row, print_table, write_json

CLIENTS = 64
PROMPT_BYTES = 2048
PEERS = ("vllm-router", "sglang-router")


def cpu_s(pid: int) -> float:
    """CPU seconds that a process, all its threads together, has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def router_command(name: str, port: int, engines: list[str], venv: Path | None) -> list[str | Path]:
    if name == "ours":
        ours = [word for url in engines for word in ("--engine", url)]
        return [sys.executable, "-m", "moonpool", "proxy", "--port", str(port), *ours]
    assert venv is not None
    command: list[str | Path] = [venv / "bin" / name, "--host", "127.0.0.1", "--port", str(port)]
    metrics = ["--prometheus-port", str(free_port())]
    launch = ["launch"] if name == "sglang-router" else []
    return [command[0], *launch, *command[1:], *metrics, "--policy", "round_robin", "--worker-urls", *engines]


def measure(venv: Path | None, rounds: int, plain: int, streams: int) -> list[Row]:
    """Raises Failed."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))

        def start(command: list[str | Path], port: int, name: str) -> Process:
            process = Process(command, folder / f"{name}.log")
            stack.callback(process.stop)
            process.wait_for_port(socket.AF_INET, ("127.0.0.1", port))
            return process

        engines = []
        for number in range(2):
            port = free_port()
            start([sys.executable, "-m", "benchmarks.proxy.mock_engine", str(port)], port, f"engine-{number}")
            engines.append(f"http://127.0.0.1:{port}")
        routers: dict[str, tuple[Process, int]] = {}
        for name in ("ours", *(PEERS if venv is not None else ())):
            port = free_port()
            routers[name] = (start(router_command(name, port, engines, venv), port, name), port)

        rows = []
        for work, count, stream in (
            ("answer in one piece", plain, False),
            ("stream of 64 chunks", streams, True),
        ):
            spent: dict[str, list[float]] = {name: [] for name in routers}
            for round_number in range(rounds + 1):
                for name, (process, port) in routers.items():
                    before_s = cpu_s(process.pid)
                    uvloop.run(load.run(port, CLIENTS, count, stream=stream, prompt_bytes=PROMPT_BYTES))
                    if round_number > 0:  # the first warms up
                        spent[name].append((cpu_s(process.pid) - before_s) / count * 1e6)
            ours = statistics.median(spent.pop("ours"))
            peers: dict[str, float | str] = dict.fromkeys(PEERS, "not run")
            peers.update({name: statistics.median(figures) for name, figures in spent.items()})
            best = [figure for figure in peers.values() if isinstance(figure, float)]
            rows.append(
                Row(
                    work=f"{work} [{count} requests of {PROMPT_BYTES} B, {CLIENTS} clients, 2 engines], CPU",
                    ours=ours,
                    unit="us",
                    peers=peers,
                    limit=None,
                    target="<= the best peer",
                    met=ours <= min(best) if best else None,
                )
            )
        return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers-venv", type=Path)
    parser.add_argument("--quick", action="store_true", help="under 50 s")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rounds, plain, streams = (3, 2000, 200) if options.quick else (5, 10000, 1000)
    try:
        rows = measure(options.peers_venv, rounds, plain, streams)
    except (Failed, RuntimeError, TimeoutError) as error:
        print(f"proxy_cpu: {error}", file=sys.stderr)
        return 1
    print_table(f"Router's CPU per request; medians of {rounds} rounds", rows)
    if options.json:
        write_json(options.json, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
