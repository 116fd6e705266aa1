"""The storing processes, each started for one run of the benchmark and gone with it.

START[name] gives where the client connects to and which processes store: their CPU time is counted with the
client's.
"""

from __future__ import annotations

import secrets
import shutil
import socket
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.namespace import THERE, Namespace
from benchmarks.processes import PYTHON, Failed, Process, Talker, free_port

ARENA_MIB = 1024


@dataclass(frozen=True)
class Server:
    address: str  # a path or host:port
    pids: list[int]
    processes: tuple[Process, ...] = ()


@dataclass(frozen=True)
class Setting:
    """folder: for sockets and logs. peers_python: the interpreter with the peers' packages. tcp: instead of
    a Unix socket, where a peer has the choice. namespace: where the stores run, None for here.
    """

    folder: Path
    peers_python: Path | None
    tcp: bool
    namespace: Namespace | None = None
    token: str = field(default_factory=lambda: secrets.token_hex(32))

    def log(self, name: str) -> Path:
        return self.folder / f"{name}{' there' if self.namespace else ''}.log"

    @property
    def host(self) -> str:
        return THERE if self.namespace else "127.0.0.1"

    @property
    def prefix(self) -> list[str | Path]:
        return self.namespace.enter if self.namespace else []


def moonpool(setting: Setting, stack: ExitStack) -> Server:
    path = setting.folder / ("there.sock" if setting.namespace else "node.sock")
    where = ["--dram", f"{ARENA_MIB}MiB", "--socket", str(path), "--http", "off"]
    port = free_port()
    listen = ["--listen", f"{setting.host}:{port}"] if setting.namespace else []
    command: list[str | Path] = [*setting.prefix, PYTHON, "-m", "moonpool", "node", *where, *listen]
    node = Process(command, setting.log("node"), extra=runtime(setting))
    stack.callback(node.stop)
    if setting.namespace:
        node.wait_for_port(socket.AF_INET, (setting.host, port))
        return Server(f"tcp://{setting.host}:{port}", [node.pid])
    node.wait_for_port(socket.AF_UNIX, str(path))
    return Server(str(path), [node.pid])


def mooncake(setting: Setting, stack: ExitStack) -> Server:
    assert setting.peers_python is not None
    port = free_port()
    master = Process(
        [
            *setting.prefix,
            setting.peers_python.with_name("mooncake_master"),
            f"--rpc_port={port}",
            f"--rpc_address={setting.host}",
            f"--metrics_host={setting.host}",
            f"--metrics_port={free_port()}",
            "--default_kv_lease_ttl=500",
        ],
        setting.log("mooncake_master"),
    )
    stack.callback(master.stop)
    master.wait_for_port(socket.AF_INET, (setting.host, port))
    address = f"{setting.host}:{port}"
    provider = Talker(
        setting.peers_python,
        "benchmarks.store.mooncake_provider",
        [address, str(ARENA_MIB), setting.host],
        setting.log("mooncake_provider"),
        prefix=setting.prefix,
    )
    stack.callback(provider.close)
    provider.wait_ready()
    return Server(address, [master.pid, provider.process.pid], (master, provider.process))


def drop_in(setting: Setting, stack: ExitStack) -> Server:
    """The same node as ours, with a socket that has the name by which setup_dummy() finds it."""
    folder, port = drop_in_folder(setting), free_port()
    folder.mkdir(mode=0o700)
    path = folder / f"node-mooncake-client-{port}.sock"
    where = ["--dram", f"{ARENA_MIB}MiB", "--socket", str(path), "--http", "off"]
    node = Process(
        [PYTHON, "-m", "moonpool", "node", *where, "--listen", f"127.0.0.1:{port}"],
        setting.log("drop-in node"),
        extra=drop_in_runtime(setting),
    )
    stack.callback(node.stop)
    node.wait_for_port(socket.AF_UNIX, str(path))
    return Server(f"127.0.0.1:{port}", [node.pid], (node,))


def drop_in_runtime(setting: Setting) -> dict[str, str]:
    return runtime(setting) | {"MOONPOOL_RUNTIME_DIR": str(drop_in_folder(setting))}


def drop_in_folder(setting: Setting) -> Path:
    return setting.folder / "drop-in"


def redis(setting: Setting, stack: ExitStack) -> Server:
    path, port = str(setting.folder / "redis.sock"), free_port()
    where = (
        ["--bind", setting.host, "--port", str(port), "--protected-mode", "no"]
        if setting.tcp
        else ["--port", "0", "--unixsocket", path]
    )
    command = [program("redis-server"), "--save", "", "--appendonly", "no", *where]
    return daemon("redis", command, path, port, setting, stack)


def memcached(setting: Setting, stack: ExitStack) -> Server:
    path, port = str(setting.folder / "memcached.sock"), free_port()
    where = ["-l", setting.host, "-p", str(port)] if setting.tcp else ["-s", path]
    command = [program("memcached"), "-u", "root", "-m", str(ARENA_MIB), "-I", "32m", *where]
    return daemon("memcached", command, path, port, setting, stack)


START: dict[str, Callable[[Setting, ExitStack], Server]] = {
    "ours": moonpool,
    "drop-in": drop_in,
    "mooncake": mooncake,
    "redis": redis,
    "memcached": memcached,
}


def daemon(name: str, command: list[str], path: str, port: int, setting: Setting, stack: ExitStack) -> Server:
    """A server that listens on ``path`` or, over TCP, on ``port``."""
    process = Process([*setting.prefix, *command], setting.log(name))
    stack.callback(process.stop)
    if setting.tcp:
        process.wait_for_port(socket.AF_INET, (setting.host, port))
        return Server(f"{setting.host}:{port}", [process.pid], (process,))
    process.wait_for_port(socket.AF_UNIX, path)
    return Server(path, [process.pid], (process,))


def program(name: str) -> str:
    """Where Debian's ``name`` is. Raises Failed with the remedy."""
    found = shutil.which(name, path="/usr/sbin:/usr/bin:/usr/local/bin")
    if found is None:
        raise Failed(f"{name} is not installed; apt-get install {name}")
    return found


def runtime(setting: Setting) -> dict[str, str]:
    """The node and our client share a token that no other process knows."""
    return {"MOONPOOL_RUNTIME_DIR": str(setting.folder), "MOONPOOL_CLUSTER_TOKEN": setting.token}
