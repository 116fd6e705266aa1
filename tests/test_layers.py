"""The floors of the house: an import or an #include goes down only, and no two folders go round in a circle.

The tables below are the plan. A new folder is added to them, with what it may know.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# A folder of Python -> the floors below it that it may import.
CORE = ("core",)
PYTHON = {
    "core": (),
    "connectors": CORE,
    "disagg_proxy": CORE,
    "disagg_proxy/tools": ("disagg_proxy", *CORE),
    "launch": ("disagg_proxy", "connectors", *CORE),
    "cli": ("launch", "disagg_proxy/tools", "disagg_proxy", "connectors", *CORE),
}
# A connector -> its neighbours that it may know; what all of them share knows none of them.
CONNECTORS = {
    "vllm": (),
    "sglang": (),
    "lmcache": ("vllm",),  # it runs inside vLLM, whose configuration says what its KV means
    "tensorrt_llm": (),
    "mooncake": (),
}
# Its own names, those of the extension module and of the public classes, are for all floors.
FACADE = "moonpool"

# A folder of C++ -> the folders whose headers it may include.
BASE = ("base",)
WIRE = ("wire", *BASE)
DEVICE = ("device", *BASE)
TRANSPORT = ("memory", "io", *DEVICE, *WIRE)
CPP = {
    "core/base": (),
    "core/device": ("device/kernels", *BASE),
    "core/device/kernels": (),
    "core/memory": DEVICE,
    "core/wire": BASE,
    "core/io": BASE,
    "core/ssd": ("io", *BASE),
    "core/topology": BASE,
    "core/directory": ("memory", *WIRE),  # of the list of members that a node shares
    "core/transport": TRANSPORT,
    "core/transport/loopback": ("transport", *TRANSPORT),
    "core/transport/host": ("transport", *TRANSPORT),
    "core/transport/shm": ("transport/host", "transport", *TRANSPORT),
    "core/transport/cufile": ("transport", *TRANSPORT),
    "core/transport/file": ("transport", *TRANSPORT),
    "core/transport/cuda_ipc": ("transport/host", "transport", *TRANSPORT),
    "core/transport/nic": ("transport", "topology", *TRANSPORT),
    "core/transport/outside": ("transport", *TRANSPORT),
    "core/transport/rdma": ("transport/nic", "transport", "topology", *TRANSPORT),
    "core/transport/efa": ("transport/nic", "transport", "topology", *TRANSPORT),
    "core/transport/tcp": ("transport", *TRANSPORT),
    "core/transport/registry": (
        "transport/cuda_ipc",
        "transport/cufile",
        "transport/efa",
        "transport/file",
        "transport/loopback",
        "transport/rdma",
        "transport/shm",
        "transport/tcp",
        "transport",
        *TRANSPORT,
    ),
    "core/engine": ("transport/outside", "transport/registry", "transport", *TRANSPORT),
    "core/store/shared": TRANSPORT,
    "core/store/node": ("store/shared", "directory", "ssd", *TRANSPORT),
    "core/store/client": ("store/shared", "directory", *TRANSPORT),
    "core/store/client/paths": ("store/client", "store/shared", *TRANSPORT),
    "core/store/device": ("store/client", "store/shared", "directory", *DEVICE, *TRANSPORT),
    "core/capi": ("engine", *WIRE),
    "core/nixl": ("capi", "engine", *WIRE),
    "core/python": (
        "store/shared",
        "store/node",
        "store/client",
        "store/device",
        "directory",
        "ssd",
        "engine",
        "topology",
        *DEVICE,
        *TRANSPORT,
    ),
    "disagg_proxy/json": BASE,
    "disagg_proxy/http": ("json", *BASE),
    "disagg_proxy/conductor": BASE,
    "disagg_proxy/relay": ("http", "json", *WIRE),
    "disagg_proxy/python": ("relay", "http", "json", "conductor", *WIRE),
}


def floor_of(module: str) -> str | None:
    """The row of PYTHON that a module belongs to; None: none, or the facade."""
    words = module.split(".")
    if words[0] != FACADE or len(words) == 1:
        return None
    if words[1:3] == ["disagg_proxy", "tools"]:
        return "disagg_proxy/tools"
    return words[1] if words[1] in PYTHON else None


def sources() -> Iterator[tuple[str, Path]]:
    """(module, file) of all Python of the product."""
    for top in ("core", "connectors", "disagg_proxy", "src/moonpool/launch", "src/moonpool/cli"):
        for path in sorted((ROOT / top).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            parts = parts[2:] if parts[0] == "src" else parts
            yield ".".join((FACADE, *(part for part in parts if part != "__init__"))), path


def imported(text: str) -> Iterator[tuple[int, str]]:
    """(line, module) of each import of ours, those in functions included."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def wrong_imports(module: str, text: str) -> list[str]:
    """What ``module`` imports from its own floor's neighbours or from above."""
    found = []
    here = floor_of(module)
    assert here is not None, f"{module} is on no floor"
    for line, name in imported(text):
        there = floor_of(name)
        if there is None or (there == here and here != "connectors"):
            continue
        words, own = name.split("."), module.split(".")
        if there == here:
            if words[2] in CONNECTORS and words[2] not in (own[2], *CONNECTORS.get(own[2], ())):
                found.append(f"{module}:{line} imports {name}, of another connector")
        elif there not in PYTHON[here]:
            found.append(f"{module}:{line} imports {name}, which is not below it")
    return found


def test_python_imports_go_down() -> None:
    assert [wrong for module, path in sources() for wrong in wrong_imports(module, path.read_text())] == []


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("moonpool.core.store.store", "from moonpool.disagg_proxy.settings import ProxySettings"),
        ("moonpool.core.service.node", "import moonpool.launch.up"),
        ("moonpool.disagg_proxy.server", "def f():\n    from moonpool.disagg_proxy.tools import simulator"),
        ("moonpool.disagg_proxy.server", "from moonpool.connectors.vllm import plugin"),
        ("moonpool.connectors.vllm.plugin", "from moonpool.connectors.sglang import plugin"),
        ("moonpool.connectors.identity", "from moonpool.connectors.vllm import plugin"),
        ("moonpool.connectors.mooncake.mooncake.cli", "from moonpool.cli import run"),
        ("moonpool.launch.up", "from moonpool.cli.entry import run"),
    ],
)
def test_an_import_that_goes_up_is_found(module: str, line: str) -> None:
    assert wrong_imports(module, line)


@pytest.mark.parametrize("top", ["core", "connectors", "disagg_proxy"])
def test_a_second_copy_of_a_module_cannot_be_imported(top: str) -> None:
    """From the root of a checkout, where the folders lie by their own names."""
    done = subprocess.run(
        [sys.executable, "-c", f"import {top}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert f"import moonpool.{top}: {top} would be a second copy" in done.stderr


def folder_of(path: Path) -> str:
    """ "core/store/client", of core/csrc/store/client/peers.cpp."""
    top, _, *folders, _ = path.relative_to(ROOT).parts
    return "/".join((top, *folders))


def wrong_includes(folder: str, text: str) -> list[str]:
    own = folder.partition("/")[2]
    known = {own, *CPP[folder]} | ({"python"} if own == "python" else set())
    return [
        f"{folder} includes {header}"
        for header in re.findall(r'^#include "([\w./]+)"', text, re.M)
        if "/" in header
        and header.rpartition("/")[0] not in known
        and not header.startswith("transfer_engine")
    ]


def test_includes_go_down() -> None:
    found = []
    for top in ("core/csrc", "disagg_proxy/csrc"):
        for path in sorted((ROOT / top).rglob("*.[ch]pp")):
            found += [f"{path.name}: {wrong}" for wrong in wrong_includes(folder_of(path), path.read_text())]
    assert found == []


@pytest.mark.parametrize(
    ("folder", "header"),
    [
        ("core/base", "wire/frame.hpp"),
        ("core/device", "memory/memory_ref.hpp"),
        ("core/store/node", "conductor/prefix_index.hpp"),
        ("core/store/client", "relay/relay.hpp"),
        ("core/store/client", "store/node/server.hpp"),
        ("core/store/shared", "store/client/session.hpp"),
        ("core/transport", "engine/engine.hpp"),
        ("disagg_proxy/relay", "conductor/books.hpp"),
        ("disagg_proxy/http", "relay/relay.hpp"),
        ("disagg_proxy/json", "store/client/client.hpp"),
    ],
)
def test_an_include_that_goes_up_is_found(folder: str, header: str) -> None:
    assert wrong_includes(folder, f'#include "{header}"\n')


def circle(edges: Iterable[tuple[str, str]]) -> list[str]:
    """One circle in a graph, as its nodes in order; empty: none."""
    to: dict[str, set[str]] = {}
    for one, other in edges:
        to.setdefault(one, set()).add(other)
    done: set[str] = set()

    def walk(node: str, way: list[str]) -> list[str]:
        if node in way:
            return [*way[way.index(node) :], node]
        if node in done:
            return []
        for other in sorted(to.get(node, ())):
            if found := walk(other, [*way, node]):
                return found
        done.add(node)
        return []

    return next((found for node in sorted(to) if (found := walk(node, []))), [])


def test_the_tables_have_no_circle() -> None:
    assert circle((one, other) for one, below in PYTHON.items() for other in below) == []
    tops = {folder.partition("/")[2]: folder for folder in CPP if not folder.endswith("python")}
    assert circle((one, tops[other]) for one, below in CPP.items() for other in below) == []


def test_files_import_each_other_in_no_circle() -> None:
    """At import time: what stands in a function, or behind TYPE_CHECKING, waits until both are there."""
    modules = dict(sources())
    edges = []
    for module, path in modules.items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom) and node.module:
                names = (f"{node.module}.{alias.name}" for alias in node.names)
                edges += [(module, name if name in modules else node.module) for name in names]
            elif isinstance(node, ast.Import):
                edges += [(module, alias.name) for alias in node.names]
    assert circle((one, other) for one, other in edges if other in modules and one != other) == []


def test_a_circle_is_found() -> None:
    assert circle([("a", "b"), ("b", "c"), ("c", "b")]) == ["b", "c", "b"]
    assert circle([("a", "b"), ("a", "c"), ("b", "c")]) == []


def test_no_test_file_imports_another() -> None:
    """What several of them need is a module of its own, so that a test file can be changed or removed."""
    found = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            found += [f"{path.name}: {name}" for name in names if name.rpartition(".")[2].startswith("test_")]
    assert found == []
