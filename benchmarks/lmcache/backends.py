"""What each backend of LMCache needs: its processes, and what LMCache is told.

REMOTE[name](bed) -> the engine's part of LMCache's configuration; L2[name](bed) -> an L2 adapter's. Both
raise Failed.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.processes import PYTHON, ROOT, Failed, Process, free_port

POOL_MIB = 2048


@dataclass(frozen=True)
class Bed:
    """folder: for sockets, files and logs. python: with LMCache. peers_python: with the real Mooncake."""

    folder: Path
    python: Path
    peers_python: Path | None
    stack: ExitStack
    environment: dict[str, str] = field(default_factory=dict)

    def start(self, name: str, *command: str | Path) -> Process:
        process = Process(command, self.folder / f"{name}.log", extra=self.environment)
        self.stack.callback(process.stop)
        return process


def _node(bed: Bed) -> Path:
    """Starts one; its socket."""
    token, path = secrets.token_hex(32), bed.folder / "node.sock"
    bed.environment.update(MOONPOOL_CLUSTER_TOKEN=token, MOONPOOL_RUNTIME_DIR=str(bed.folder))
    where = ("--dram", f"{POOL_MIB}MiB", "--socket", str(path), "--http", "off")
    node = bed.start("node", PYTHON, "-m", "moonpool", "node", *where)
    node.wait_for_port(socket.AF_UNIX, str(path))
    return path


def ours(bed: Bed) -> dict[str, Any]:
    path = _node(bed)
    return _plugin("moonpool", "moonpool.connectors.lmcache.adapter_entry", "MoonpoolAdapter", node=str(path))


def in_process(bed: Bed) -> dict[str, Any]:
    return _plugin("in_process", "benchmarks.lmcache.in_process", "InProcessAdapter")


def lm(bed: Bed) -> dict[str, Any]:
    port = free_port()
    server = bed.start("lmcache_server", bed.python.with_name("lmcache_server"), "127.0.0.1", str(port))
    server.wait_for_port(socket.AF_INET, ("127.0.0.1", port))
    return {"remote_url": f"lm://127.0.0.1:{port}"}


def fs(bed: Bed) -> dict[str, Any]:
    """Files in the page cache of the folder for temporary files."""
    place = bed.folder / "files"
    place.mkdir()
    return {"remote_url": f"fs://localhost:0{place}"}


def mooncakestore(bed: Bed) -> dict[str, Any]:
    """The real wheel's, with its segment in the engine; save_chunk_meta, without which it is not right at
    all."""
    if bed.peers_python is None:
        raise Failed("no --peers-venv")
    port = free_port()
    master = bed.start(
        "mooncake_master",
        bed.peers_python.with_name("mooncake_master"),
        f"--rpc_port={port}",
        "--rpc_address=127.0.0.1",
        f"--metrics_port={free_port()}",
    )
    master.wait_for_port(socket.AF_INET, ("127.0.0.1", port))
    # Nothing else of that environment: it has another numpy.
    packages = bed.folder / "mooncake"
    packages.mkdir()
    (there,) = (bed.peers_python.parents[1] / "lib").glob("python3*/site-packages")
    for path in there.glob("mooncake*"):
        (packages / path.name).symlink_to(path)
    bed.environment["PYTHONPATH"] = str(packages)
    config = _mooncakestore(port)
    # This wheel's own name for it; the one that LMCache gives it means nothing to it.
    config["extra_config"]["mooncake_master_server_addr"] = f"127.0.0.1:{port}"
    return config


def drop_in(bed: Bed) -> dict[str, Any]:
    """LMCache's mooncakestore:// over the drop-in ``mooncake``, with its segment in the engine, too."""
    bed.environment.update(MOONPOOL_CLUSTER_TOKEN=secrets.token_hex(32), MOONPOOL_RUNTIME_DIR=str(bed.folder))
    port = free_port()
    where = ("--listen", f"127.0.0.1:{port}", "--http", f"127.0.0.1:{free_port()}")
    master = bed.start("master", PYTHON, "-m", "moonpool", "master", *where)
    master.wait_for_port(socket.AF_INET, ("127.0.0.1", port))
    bed.environment["PYTHONPATH"] = str(ROOT / "connectors" / "mooncake")
    return _mooncakestore(port)


def _mooncakestore(port: int) -> dict[str, Any]:
    settings = {
        "local_hostname": "127.0.0.1",
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": f"127.0.0.1:{port}",
        "protocol": "tcp",
        "global_segment_size": POOL_MIB << 20,
        "local_buffer_size": 256 << 20,
        "transfer_timeout": 10,
        "save_chunk_meta": True,
    }
    return {"remote_url": f"mooncakestore://127.0.0.1:{port}", "extra_config": settings}


def l2_adapter(bed: Bed) -> dict[str, Any]:
    return {
        "type": "plugin",
        "module_path": "moonpool.connectors.lmcache.adapter",
        "class_name": "MoonpoolL2Adapter",
        "adapter_params": {"node": str(_node(bed))},
    }


def l2_native(bed: Bed) -> dict[str, Any]:
    return {
        "type": "native_plugin",
        "module_path": "moonpool.connectors.lmcache.native",
        "class_name": "MoonpoolClient",
        "adapter_params": {"form": "bfloat16", "node": str(_node(bed))},
    }


def l2_fs(bed: Bed) -> dict[str, Any]:
    return {"type": "fs", "base_path": str(bed.folder / "files")}


def l2_fs_native(bed: Bed) -> dict[str, Any]:
    return {"type": "fs_native", "base_path": str(bed.folder / "files")}


def _plugin(name: str, module: str, class_name: str, **options: object) -> dict[str, Any]:
    prefix = f"remote_storage_plugin.{name}."
    extra = {f"{prefix}module_path": module, f"{prefix}class_name": class_name}
    extra |= {f"{prefix}{key}": str(value) for key, value in options.items()}
    return {"remote_storage_plugins": [name], "extra_config": extra}


Backends = dict[str, Callable[[Bed], dict[str, Any]]]
REMOTE: Backends = {
    "ours": ours,
    "in_process": in_process,
    "lm": lm,
    "fs": fs,
    "mooncakestore": mooncakestore,
    "drop-in": drop_in,
}
REMOTE_PEERS = ("lm", "fs", "mooncakestore")
L2: Backends = {"ours": l2_adapter, "native": l2_native, "fs": l2_fs, "fs_native": l2_fs_native}
L2_PEERS = ("fs", "fs_native")
