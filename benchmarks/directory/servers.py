"""The processes of each contender: which one knows where every key is, and what else it needs to run."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.processes import PYTHON, Failed, Process, free_port
from benchmarks.store import servers
from benchmarks.store.servers import Setting

ARENA = "1GiB"


@dataclass
class Contender:
    """address: for its client. knows: the process whose CPU and memory count. restart: kills that one and
    starts another in its place, where it can be had back.
    """

    address: str
    knows: Process
    client_arguments: list[str] = field(default_factory=list)
    restart: Callable[[], None] | None = None


def start_master(
    setting: Setting, stack: ExitStack, listen: str, settings: Mapping[str, str] | None = None
) -> Process:
    words: list[str | Path] = [PYTHON, "-m", "moonpool", "master", "--listen", listen, "--http", "off"]
    process = Process(words, setting.log("master"), extra={**servers.runtime(setting), **(settings or {})})
    stack.callback(process.stop)
    host, _, port = listen.rpartition(":")
    process.wait_for_port(socket.AF_INET, (host, int(port)))
    return process


def private_bytes(process: Process) -> int:
    """Memory that is this process's alone. Raises Failed."""
    for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise Failed("no RssAnon")


def lone_master(
    setting: Setting, stack: ExitStack, settings: Mapping[str, str] | None = None
) -> tuple[str, Process]:
    """With the default settings but for those of ``settings``. Its address, and its process."""
    listen = f"127.0.0.1:{free_port()}"
    return listen, start_master(setting, stack, listen, settings)


def moonpool(setting: Setting, stack: ExitStack, keys: int) -> Contender:
    listen = f"127.0.0.1:{free_port()}"
    extra = servers.runtime(setting)

    def master() -> Process:
        return start_master(setting, stack, listen)

    contender = Contender("", master(), [listen])
    path = setting.folder / "node.sock"
    words: list[str | Path] = [PYTHON, "-m", "moonpool", "node", "--dram", ARENA, "--http", "off"]
    words += ["--socket", path, "--listen", "127.0.0.1:0", "--master", listen]
    node = Process(
        words, setting.log("node"), extra={**extra, "MOONPOOL_NODE_OBJECTS_MAX": str(keys + keys // 10)}
    )
    stack.callback(node.stop)
    node.wait_for_port(socket.AF_UNIX, str(path))

    def restart() -> None:
        contender.knows.kill()
        contender.knows = master()

    contender.address = str(path)
    contender.restart = restart
    return contender


def mooncake(setting: Setting, stack: ExitStack, keys: int) -> Contender:
    server = servers.mooncake(setting, stack)
    return Contender(server.address, server.processes[0])


def redis(setting: Setting, stack: ExitStack, keys: int) -> Contender:
    server = servers.redis(setting, stack)
    return Contender(server.address, server.processes[0])


START: dict[str, Callable[[Setting, ExitStack, int], Contender]] = {
    "ours": moonpool,
    "mooncake": mooncake,
    "redis": redis,
}
