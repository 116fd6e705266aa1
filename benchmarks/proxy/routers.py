"""The routers of the comparison: how each is started in front of the same engines, and the CPU it uses."""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.processes import free_port

PEERS = ("vllm-router", "sglang-router", "nginx", "haproxy")
PEERS_OF = {"": PEERS, "two_step": ("vllm-router",), "one_shot": ("sglang-router",)}
NGINX = """
worker_processes 1; daemon off; pid {folder}/nginx.pid; error_log {folder}/nginx.err;
events {{ worker_connections 1024; }}
http {{
  access_log off; client_max_body_size 64m; client_body_buffer_size 128k;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  upstream engines {{ {servers} keepalive 256; }}
  server {{
    listen 127.0.0.1:{port}; keepalive_requests 1000000;
    location / {{ proxy_pass http://engines; proxy_http_version 1.1; proxy_set_header Connection "";
                 proxy_buffering off; }}
  }}
}}
"""
HAPROXY = """
global
  nbthread 1
  maxconn 4096
defaults
  mode http
  timeout connect 5s
  timeout client 60s
  timeout server 60s
frontend clients
  bind 127.0.0.1:{port}
  default_backend engines
backend engines
  balance roundrobin
  http-reuse always
{servers}
"""


@dataclass(frozen=True)
class Engine:
    """url: of its HTTP; events, replay: of its KV events."""

    url: str
    events: str
    replay: str


def command(
    name: str,
    port: int,
    engines: list[Engine],
    venv: Path | None,
    folder: Path,
    *,
    form: str,
    options: tuple[str | Path, ...],
) -> list[str | Path] | None:
    """How a router is started in front of these engines; None where it is not there. form: of the hand-over
    from the first half of the engines to the others; "": each does all. options: of ours."""
    urls = [engine.url for engine in engines]
    half = len(urls) // 2
    roles = [("--prefill", url) for url in urls[:half]] + [("--decode", url) for url in urls[half:]]
    if name == "ours":
        ours = [word for pair in roles for word in pair] if form else []
        ours = [*ours, "--handover", form] if form == "one_shot" else ours
        ours = ours or [word for url in urls for word in ("--engine", url)]
        return [sys.executable, "-m", "moonpool", "proxy", "--port", str(port), *ours, *options]
    if name in ("nginx", "haproxy"):
        return _server_command(name, port, urls, folder)
    if venv is None or not (venv / "bin" / name).exists():
        return None
    words: list[str | Path] = [venv / "bin" / name, *(["launch"] if name == "sglang-router" else [])]
    words += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    words += ["--policy", "round_robin"]
    if form == "two_step":
        return [*words, "--vllm-pd-disaggregation", *(word for pair in roles for word in pair)]
    if form == "one_shot":
        ports = {"--prefill": ("8998",)}  # nobody is there: the engines do not look
        pairs = [word for option, url in roles for word in (option, url, *ports.get(option, ()))]
        return [*words, "--pd-disaggregation", *pairs]
    return [*words, "--worker-urls", *urls]


def event_options(engines: list[Engine], names: list[str]) -> tuple[str, ...]:
    """For ours: where each engine, by the name that the proxy gives it, tells its blocks."""
    sources = [f"{name}={engine.events},{engine.replay}" for name, engine in zip(names, engines, strict=True)]
    return tuple(word for source in sources for word in ("--events", source))


def cpu_s(pid: int, thread: str = "") -> float:
    """CPU seconds that the living threads of a process and its children have used, to the nanosecond. thread:
    those of this name alone."""
    total_ns = 0
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = (process / "stat").read_text().rsplit(")", 1)[1].split()[1]
            if str(pid) in (process.name, parent):
                total_ns += sum(
                    int((task / "schedstat").read_text().split()[0])
                    for task in (process / "task").iterdir()
                    if thread in ("", (task / "comm").read_text().strip())
                )
    return total_ns / 1e9


def _server_command(name: str, port: int, urls: list[str], folder: Path) -> list[str | Path] | None:
    program = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if program is None:
        return None
    addresses = [url.removeprefix("http://") for url in urls]
    settings = folder / f"{name}.conf"
    if name == "nginx":
        servers = " ".join(f"server {address};" for address in addresses)
        settings.write_text(NGINX.format(folder=folder, servers=servers, port=port))
        return [program, "-p", folder, "-c", settings]
    servers = "\n".join(f"  server engine-{i} {address}" for i, address in enumerate(addresses))
    settings.write_text(HAPROXY.format(servers=servers, port=port))
    return [program, "-db", "-f", settings]
