"""CPU that a router spends on a request: ours beside vllm-router, sglang-router and nginx, same load.

    python -m benchmarks.proxy_vs_peers [--peers-venv DIR] [--quick] [--json FILE]

Closed loop of 64 clients; every answer is checked. Routers take turns; a figure is the median over the rounds
of the CPU time of the process and its children by the requests of that round. Rows with one step front two
engines with round robin; rows in two steps two prefill and two decode engines (the NIXL form; vllm-router
alone has it). --peers-venv: where the peers' packages are (pip install vllm-router==0.1.17
sglang-router==0.3.2). nginx is beside them where it is installed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import statistics
import sys
import tempfile
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import uvloop

from benchmarks.processes import Failed, Process, free_port
from benchmarks.proxy import load
from benchmarks.report import Row, print_table, write_json

CLIENTS = 64
PEERS = ("vllm-router", "sglang-router", "nginx")
PEERS_IN_TWO_STEPS = ("vllm-router",)
NGINX = """
worker_processes 1; daemon off; pid {folder}/nginx.pid; error_log {folder}/nginx.err;
events {{ worker_connections 1024; }}
http {{
  access_log off; client_max_body_size 64m; client_body_buffer_size 128k;
  upstream engines {{ {servers} keepalive 256; }}
  server {{
    listen 127.0.0.1:{port}; keepalive_requests 1000000;
    location / {{ proxy_pass http://engines; proxy_http_version 1.1; proxy_set_header Connection "";
                 proxy_buffering off; }}
  }}
}}
"""


@dataclass(frozen=True)
class Work:
    """A row. share: the most of vllm-router's CPU that meets the target; less: the part of the requests of a
    round."""

    name: str
    prompt_bytes: int
    stream: bool
    two_steps: bool
    share: float
    less: int = 1


WORKS = (
    Work("answer in one piece", 2 << 10, False, False, 0.35),
    Work("answer in one piece", 64 << 10, False, False, 0.35, 4),
    Work("stream of 64 chunks", 2 << 10, True, False, 0.65, 10),
    Work("prefill and decode, in one piece", 2 << 10, False, True, 0.5, 2),
    Work("prefill and decode, in one piece", 64 << 10, False, True, 0.35, 4),
)


def cpu_s(pid: int) -> float:
    """CPU seconds that the living threads of a process and its children have used, to the nanosecond."""
    total_ns = 0
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = (process / "stat").read_text().rsplit(")", 1)[1].split()[1]
            if str(pid) in (process.name, parent):
                total_ns += sum(
                    int((task / "schedstat").read_text().split()[0]) for task in (process / "task").iterdir()
                )
    return total_ns / 1e9


def router_command(
    name: str, port: int, engines: list[str], venv: Path | None, folder: Path, *, two_steps: bool
) -> list[str | Path] | None:
    """How a router is started in front of these engines; None where it is not there. In two steps the first
    half of the engines prefills."""
    half = len(engines) // 2
    roles = [("--prefill", url) for url in engines[:half]] + [("--decode", url) for url in engines[half:]]
    if name == "ours":
        ours = [word for pair in roles for word in pair] if two_steps else []
        ours = ours or [word for url in engines for word in ("--engine", url)]
        return [sys.executable, "-m", "moonpool", "proxy", "--port", str(port), *ours]
    if name == "nginx":
        program = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
        if program is None:
            return None
        servers = " ".join(f"server {url.removeprefix('http://')};" for url in engines)
        (folder / "nginx.conf").write_text(NGINX.format(folder=folder, servers=servers, port=port))
        return [program, "-p", folder, "-c", folder / "nginx.conf"]
    if venv is None:
        return None
    command: list[str | Path] = [venv / "bin" / name, *(["launch"] if name == "sglang-router" else [])]
    command += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    command += ["--policy", "round_robin"]
    if two_steps:
        return [*command, "--vllm-pd-disaggregation", *(word for pair in roles for word in pair)]
    return [*command, "--worker-urls", *engines]


def measure(venv: Path | None, rounds: int, requests: int) -> list[Row]:
    """Raises Failed."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))

        def start(command: list[str | Path], port: int, name: str) -> Process:
            process = Process(command, folder / f"{name}.log")
            stack.callback(process.stop)
            process.wait_for_port(socket.AF_INET, ("127.0.0.1", port))
            return process

        engines = []
        for number in range(4):
            port = free_port()
            start([sys.executable, "-m", "benchmarks.proxy.mock_engine", str(port)], port, f"engine-{number}")
            engines.append(f"http://127.0.0.1:{port}")
        rows = []
        for two_steps in (False, True):
            routers: dict[str, tuple[Process, int]] = {}
            for name in ("ours", *(PEERS_IN_TWO_STEPS if two_steps else PEERS)):
                port = free_port()
                used = engines if two_steps else engines[:2]
                command = router_command(name, port, used, venv, folder, two_steps=two_steps)
                if command is not None:
                    routers[name] = (start(command, port, f"{name}-{two_steps}"), port)
            rows += [
                measure_work(work, routers, rounds, requests // work.less)
                for work in WORKS
                if work.two_steps is two_steps
            ]
        return rows


def measure_work(work: Work, routers: dict[str, tuple[Process, int]], rounds: int, count: int) -> Row:
    spent: dict[str, list[float]] = {name: [] for name in routers}
    for round_number in range(rounds + 1):
        for name, (process, port) in routers.items():
            before_s = cpu_s(process.pid)
            uvloop.run(load.run(port, CLIENTS, count, stream=work.stream, prompt_bytes=work.prompt_bytes))
            if round_number > 0:  # the first warms up
                spent[name].append((cpu_s(process.pid) - before_s) / count * 1e6)
    ours = statistics.median(spent.pop("ours"))
    peers: dict[str, float | str] = dict.fromkeys(PEERS, "not run")
    peers.update({name: statistics.median(figures) for name, figures in spent.items()})
    anchor = peers["vllm-router"]
    engines = "2 + 2 engines" if work.two_steps else "2 engines"
    return Row(
        work=f"{work.name} [{count} x {work.prompt_bytes >> 10} KiB, {CLIENTS} clients, {engines}], CPU",
        ours=ours,
        unit="us",
        peers=peers,
        limit=None,
        target=f"<= {work.share:g}x vllm-router",
        met=ours <= work.share * anchor if isinstance(anchor, float) else None,
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers-venv", type=Path)
    parser.add_argument("--quick", action="store_true", help="under 50 s")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rounds, requests = (2, 2000) if options.quick else (5, 10000)
    try:
        rows = measure(options.peers_venv, rounds, requests)
    except (Failed, RuntimeError, TimeoutError) as error:
        print(f"proxy_vs_peers: {error}", file=sys.stderr)
        return 1
    print_table(f"Router's CPU per request; medians of {rounds} rounds", rows)
    if options.json:
        write_json(options.json, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
