"""Which NIXLs the plugin lets itself be loaded by: libraries that export what NIXL's does, or not quite."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from moonpool.capi import root

ROOT = Path(__file__).parents[2]
COMPILER = shutil.which(os.environ.get("CXX", "g++").split()[-1])
PYTHON = os.environ.get("MOONPOOL_NIXL_PYTHON")
PLUGIN = root() / "nixl" / "libplugin_MOONPOOL.so"
LOAD = """
import ctypes, sys
for library in sys.argv[2:]:
    ctypes.CDLL(library)
start = ctypes.CDLL(sys.argv[1]).nixl_plugin_init
start.restype = ctypes.c_void_p
print("taken" if start() else "refused")
"""


def load(*libraries: Path, plugin: Path = PLUGIN, python: str = sys.executable) -> tuple[str, str]:
    done = subprocess.run(
        [python, "-c", LOAD, str(plugin), *map(str, libraries)],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return done.stdout.strip(), done.stderr


def needed() -> list[str]:
    """The names in host.cpp, as its compiler sees them."""
    text = (ROOT / "core/csrc/nixl/host.cpp").read_text()
    string = re.search(r'#define STRING "(\w+)"', text)
    assert string is not None
    table = text[text.index("kNeeded{") : text.index("kOthers{")].replace("STRING", f'"{string[1]}"')
    table = re.sub(r'"\s*"', "", table)
    return re.findall(r'"(_ZN\w+)"', table)


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("change", ["none", "without the last", "with a function of another"])
def test_a_library_that_is_nixl_or_not(tmp_path: Path, change: str) -> None:
    names = needed()
    assert len(names) == 9
    if change == "without the last":
        names.pop()
    elif change == "with a function of another":
        names.append("_ZNK17nixlBackendEngine16getGpuSignalSizeERm")
    source, library = tmp_path / "nixl.cpp", tmp_path / "libnixl.so"
    source.write_text("".join(f'extern "C" void {name}() {{}}\n' for name in names))
    assert COMPILER is not None
    subprocess.run([COMPILER, "-shared", "-fPIC", str(source), "-o", str(library)], check=True, timeout=60)
    said, why = load(library)
    assert said == ("taken" if change == "none" else "refused")
    assert why == "" if change == "none" else "made for NIXL 1.5.1" in why


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
def test_another_library_of_the_engines_name_is_not_taken_for_it(tmp_path: Path) -> None:
    """As the original's is, which programs may have loaded; and a link to the plugin finds its engine."""
    source, other = tmp_path / "empty.cpp", tmp_path / "libtransfer_engine.so"
    source.touch()
    assert COMPILER is not None
    named = f"-Wl,-soname,{other.name}"
    subprocess.run([COMPILER, "-shared", named, str(source), "-o", str(other)], check=True, timeout=60)
    link = tmp_path / PLUGIN.name
    link.symlink_to(PLUGIN)
    for plugin in (PLUGIN, link):
        _, why = load(other, plugin=plugin)
        assert "no libnixl.so is loaded" in why  # the engine says so


def test_no_library() -> None:
    said, why = load()
    assert said == "refused"
    assert "no libnixl.so is loaded" in why


def libraries() -> Path:
    """Of the wheel."""
    assert PYTHON is not None
    command = [PYTHON, "-c", "import nixl_cu12; print(nixl_cu12.__path__[0])"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    return Path(said.strip()).parent / ".nixl_cu12.mesonpy.libs"


@pytest.mark.skipif(not PYTHON, reason="needs a Python with NIXL: MOONPOOL_NIXL_PYTHON")
def test_nixl_itself() -> None:
    assert PYTHON is not None
    assert load(libraries() / "libnixl.so", python=PYTHON) == ("taken", "")


NAMES = {  # in abi.hpp and in NIXL
    "supports_remote": "supportsRemote",
    "supports_local": "supportsLocal",
    "supports_messages": "supportsNotif",
    "memories": "getSupportedMems",
    "register_memory": "registerMem",
    "deregister_memory": "deregisterMem",
    "connect": "connect",
    "disconnect": "disconnect",
    "unload": "unloadMD",
    "prepare": "prepXfer",
    "post": "postXfer",
    "check": "checkXfer",
    "release": "releaseReqH",
    "view_remote": "prepMemView",
    "view_local": "prepMemView",
    "release_view": "releaseMemView",
    "public_data": "getPublicData",
    "connection_info": "getConnInfo",
    "load_connection": "loadRemoteConnInfo",
    "load_remote": "loadRemoteMD",
    "load_local": "loadLocalMD",
    "messages": "getNotifs",
    "send_message": "genNotif",
    "query": "queryMem",
    "estimate": "estimateXferCost",
}
READELF = shutil.which("readelf")


@pytest.mark.skipif(not PYTHON or not READELF, reason="needs readelf and NIXL: MOONPOOL_NIXL_PYTHON")
def test_the_order_of_the_virtual_functions() -> None:
    """In the virtual table of the wheel's UCX engine, word by word; one may have more at its end."""
    assert READELF is not None
    plugin = libraries() / "plugins" / "libplugin_UCX.so"
    said = [
        subprocess.run(
            [READELF, what, str(plugin)], capture_output=True, text=True, timeout=60, check=True
        ).stdout.splitlines()
        for what in ("-Ws", "-Wr")
    ]
    start, size = next(
        (int(words[1], 16), int(words[2]))
        for line in said[0]
        if (words := line.split()) and words[-1] == "_ZTV13nixlUcxEngine"
    )
    words = {
        (int(found[1], 16) - start) // 8: found[2]
        for line in said[1]
        if (found := re.match(r"(\w+) +\w+ R_X86_64_64 +\w+ _ZNK?\d+nixl[A-Z]\w*?Engine\d+([a-z]\w*)", line))
        and start <= int(found[1], 16) < start + size
    }
    header = (ROOT / "core/csrc/nixl/abi.hpp").read_text()
    ours = re.findall(r"virtual [\w:<>]+ (\w+)\(", header[header.index("class NixlEngine") :])
    assert list(NAMES) == ours
    for at, name in enumerate(ours, start=4):  # behind an offset, the type and two destructors
        assert words[at].startswith(NAMES[name]), (at, name)
