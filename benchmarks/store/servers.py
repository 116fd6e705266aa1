"""The storing processes, each started for one run of the benchmark and gone with it.

START[name] gives where the client connects to and which processes store: their CPU time is counted with the
client's.
"""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.processes import PYTHON, Failed, Process, Talker, free_port

ARENA = "1GiB"
ARENA_MIB = 1024


@dataclass(frozen=True)
class Server:
    address: str  # a path or host:port
    pids: list[int]


@dataclass(frozen=True)
class Setting:
    """folder: for sockets and logs. peers_python: the interpreter with the peers' packages. tcp: instead of
    a Unix socket, where a peer has the choice.
    """

    folder: Path
    peers_python: Path | None
    tcp: bool

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"


def moonpool(setting: Setting, stack: ExitStack) -> Server:
    path = setting.folder / "node.sock"
    command: list[str | Path] = [
        PYTHON,
        "-m",
        "moonpool",
        "node",
        "--dram",
        ARENA,
        "--socket",
        path,
        "--http",
        "off",
    ]
    node = Process(command, setting.log("node"), extra=runtime(setting))
    stack.callback(node.stop)
    node.wait_for_port(socket.AF_UNIX, str(path))
    return Server(str(path), [node.pid])


def mooncake(setting: Setting, stack: ExitStack) -> Server:
    assert setting.peers_python is not None
    port = free_port()
    master = Process(
        [
            setting.peers_python.with_name("mooncake_master"),
            f"--rpc_port={port}",
            "--rpc_address=127.0.0.1",
            "--metrics_host=127.0.0.1",
            f"--metrics_port={free_port()}",
            "--default_kv_lease_ttl=500",
        ],
        setting.log("mooncake_master"),
    )
    stack.callback(master.stop)
    master.wait_for_port(socket.AF_INET, ("127.0.0.1", port))
    address = f"127.0.0.1:{port}"
    provider = Talker(
        setting.peers_python,
        "benchmarks.store.mooncake_provider",
        [address, str(ARENA_MIB)],
        setting.log("mooncake_provider"),
    )
    stack.callback(provider.close)
    provider.wait_ready()
    return Server(address, [master.pid, provider.process.pid])


def redis(setting: Setting, stack: ExitStack) -> Server:
    path, port = str(setting.folder / "redis.sock"), free_port()
    where = (
        ["--bind", "127.0.0.1", "--port", str(port)] if setting.tcp else ["--port", "0", "--unixsocket", path]
    )
    command = [program("redis-server"), "--save", "", "--appendonly", "no", *where]
    return daemon("redis", command, path, port, setting, stack)


def memcached(setting: Setting, stack: ExitStack) -> Server:
    path, port = str(setting.folder / "memcached.sock"), free_port()
    where = ["-l", "127.0.0.1", "-p", str(port)] if setting.tcp else ["-s", path]
    command = [program("memcached"), "-u", "root", "-m", str(ARENA_MIB), "-I", "32m", *where]
    return daemon("memcached", command, path, port, setting, stack)


START: dict[str, Callable[[Setting, ExitStack], Server]] = {
    "ours": moonpool,
    "mooncake": mooncake,
    "redis": redis,
    "memcached": memcached,
}


def daemon(name: str, command: list[str], path: str, port: int, setting: Setting, stack: ExitStack) -> Server:
    """A server that listens on ``path`` or, over TCP, on ``port``."""
    process = Process(command, setting.log(name))
    stack.callback(process.stop)
    if setting.tcp:
        process.wait_for_port(socket.AF_INET, ("127.0.0.1", port))
        return Server(f"127.0.0.1:{port}", [process.pid])
    process.wait_for_port(socket.AF_UNIX, path)
    return Server(path, [process.pid])


def program(name: str) -> str:
    """Where Debian's ``name`` is. Raises Failed with the remedy."""
    found = shutil.which(name, path="/usr/sbin:/usr/bin:/usr/local/bin")
    if found is None:
        raise Failed(f"{name} is not installed; apt-get install {name}")
    return found


def runtime(setting: Setting) -> dict[str, str]:
    """The node and our client share a token that no other process knows."""
    return {"MOONPOOL_RUNTIME_DIR": str(setting.folder)}
