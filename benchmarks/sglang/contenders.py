"""Who takes part: the storing processes of each backend, its extra config, and what its process needs."""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.processes import PYTHON, ROOT, Process, Talker, free_port
from benchmarks.store import servers
from benchmarks.store.servers import ARENA_MIB, Setting

OURS, MOONCAKE, DROP_IN = "ours", "mooncake", "drop-in"
PACKAGE = ROOT / "connectors" / "mooncake"


@dataclass(frozen=True)
class Contender:
    """backend: SGLang's name of it. extra: its config. storing: the processes that hold the bytes or know
    where they are. package: the folder that `mooncake` is imported from. settings: environment variables.
    """

    name: str
    backend: str
    extra: dict[str, Any]
    storing: list[int]
    package: Path | None
    settings: dict[str, str]

    def environment(self, plugin: Path) -> dict[str, str]:
        """plugin: the folder with what lets SGLang run on a CPU."""
        path = [plugin, ROOT / "src", ROOT, *([self.package] if self.package else [])]
        return self.settings | {
            "PYTHONPATH": os.pathsep.join(map(str, path)),
            "SGLANG_PLATFORM": "torchcpu",
            "HF_HUB_OFFLINE": "1",
        }


def ours(setting: Setting, stack: ExitStack) -> Contender:
    node = servers.moonpool(setting, stack)
    extra = {
        "backend_name": "moonpool",
        "module_path": "moonpool.connectors.sglang",
        "class_name": "MoonpoolHiCache",
        "interface_v1": 1,
        "node": node.address,
        "prefetch_threshold": 16,
        "hicache_storage_pass_prefix_keys": True,
    }
    return Contender(OURS, "dynamic", extra, node.pids, None, servers.runtime(setting))


def mooncake(setting: Setting, stack: ExitStack) -> Contender:
    """`mooncake_master`, and a process with the segment."""
    server = servers.mooncake(setting, stack)
    settings = {"MC_FORCE_TCP": "1", "SGLANG_HICACHE_MOONCAKE_REUSE_TE": "0"}
    return Contender(MOONCAKE, "mooncake", in_tree(server.address), server.pids, original(setting), settings)


def drop_in(setting: Setting, stack: ExitStack) -> Contender:
    """`moonpool master`, and a process with the segment: the drop-in itself, as Mooncake's."""
    address, extra = f"127.0.0.1:{free_port()}", servers.runtime(setting)
    extra |= {"MOONPOOL_RUNTIME_DIR": str(setting.folder / "drop-in")}
    (setting.folder / "drop-in").mkdir(mode=0o700)
    words = [PYTHON, "-m", "moonpool", "master", "--listen", address, "--http", "off"]
    master = Process(words, setting.log("drop-in master"), extra=extra)
    stack.callback(master.stop)
    master.wait_for_port(socket.AF_INET, ("127.0.0.1", int(address.rpartition(":")[2])))
    provider = Talker(
        PYTHON,
        "benchmarks.store.mooncake_provider",
        [address, str(ARENA_MIB), "127.0.0.1"],
        setting.log("drop-in provider"),
        extra=extra | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", ROOT, PACKAGE)))},
    )
    stack.callback(provider.close)
    provider.wait_ready()
    storing = [master.pid, provider.process.pid]
    return Contender(DROP_IN, "mooncake", in_tree(address), storing, PACKAGE, extra)


def in_tree(master: str) -> dict[str, Any]:
    """For SGLang's own backend; the bytes are in another process, as with ours."""
    return {
        "master_server_address": master,
        "local_hostname": "127.0.0.1",
        "metadata_server": "P2PHANDSHAKE",
        "global_segment_size": 0,
        "protocol": "tcp",
        "device_name": "",
        "prefetch_threshold": 16,
    }


def original(setting: Setting) -> Path:
    """A folder with Mooncake's package alone: the rest of its environment is not SGLang's."""
    assert setting.peers_python is not None
    folder = setting.folder / "mooncake"
    if not folder.exists():
        folder.mkdir()
        (packages,) = setting.peers_python.parents[1].glob("lib/python3*/site-packages")
        for part in packages.glob("mooncake*"):
            (folder / part.name).symlink_to(part)
    return folder
