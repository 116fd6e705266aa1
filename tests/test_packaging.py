"""What pip gets: the names inside the distributions, their size, a build that compiles only what changed."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import moonpool

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WHEEL_BYTES_MAX = 6_000_000
LINKS = ("core", "connectors", "disagg_proxy")
COMPILERS = {"CC": sysconfig.get_config_var("CC"), "CXX": sysconfig.get_config_var("CXX")}
# What programs of C and C++ use of the wheel (docs/tensorrt_llm.md, docs/nixl.md).
C_FILES = (
    "moonpool/capi/include/moonpool_transport.h",
    "moonpool/capi/include/transfer_engine_c.h",
    "moonpool/capi/lib/libtransfer_engine.so",
    "moonpool/capi/nixl/libplugin_MOONPOOL.so",
)
IN_TREE = (
    "build",
    ".git",
    ".mypy_cache",
    ".ruff_cache",
    ".pytest_cache",
    "__pycache__",
    "*.egg-info",
    "*.so",
)


def run(*command: str | Path, cwd: Path | None = None, **env: str) -> str:
    """stdout and stderr of a command that must end with 0."""
    result = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-4000:]
    return result.stdout


def test_versions_agree() -> None:
    assert moonpool.__version__ == PROJECT["version"] == importlib.metadata.version("moonpool")
    assert f"## {moonpool.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_public_names_exist() -> None:
    for name in moonpool.__all__:
        assert getattr(moonpool, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Stroe'"):
        _ = moonpool.Stroe  # type: ignore[attr-defined]


def test_import_is_cheap_and_leaks_no_top_level_names() -> None:
    code = (
        "import sys, moonpool, moonpool.connectors.vllm.plugin;"
        "print(sorted({'torch', 'vllm', 'numpy', 'aiohttp', 'core', 'connectors', 'disagg_proxy'}"
        " & sys.modules.keys()))"
    )
    assert run(sys.executable, "-P", "-c", code, cwd=ROOT).strip() == "[]"


def test_entry_points() -> None:
    points = {
        (point.group, point.name): point for point in importlib.metadata.distribution("moonpool").entry_points
    }
    assert points["console_scripts", "moonpool"].value == "moonpool.cli:main"
    assert callable(points["vllm.general_plugins", "moonpool"].load())


def test_the_facade_is_links() -> None:
    for name in LINKS:
        assert os.readlink(ROOT / "src" / "moonpool" / name) == f"../../{name}"


def test_requirements_are_what_is_imported() -> None:
    """No dependency that nothing imports, none that is imported only by luck."""
    imported_as = {"prometheus_client": "prometheus_client", "pyzmq": "zmq"}
    folders = (*LINKS, "src/moonpool/cli", "src/moonpool/launch")
    text = "\n".join(path.read_text() for folder in folders for path in (ROOT / folder).rglob("*.py"))
    for requirement in PROJECT["dependencies"]:
        name = requirement.split(">")[0]
        module = imported_as.get(name, name)
        assert f"import {module}" in text or f"from {module}" in text, f"nothing imports {module}"


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An sdist, and a wheel built from it, as a package index would have them.

    The sdist gets the objects of this checkout. What an object was made from is written beside it, and where
    a file of that is missing it is compiled anew, which fails for the same reason as without them. HEAVY=1
    compiles everything.
    """
    pytest.importorskip("build")
    folder = tmp_path_factory.mktemp("dist")
    source = tmp_path_factory.mktemp("source") / "moonpool"
    build = (sys.executable, "-m", "build", "--no-isolation", "--outdir", folder)
    shutil.copytree(ROOT, source, symlinks=True, ignore=shutil.ignore_patterns(*IN_TREE))
    run(*build, "--sdist", source)
    (path,) = folder.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        # Debian 12's Python 3.11.2 knows no filters; later ones warn where none is named.
        filters = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        archive.extractall(source.parent, **filters)
    unpacked = source.parent / path.name.removesuffix(".tar.gz")
    if not os.environ.get("HEAVY"):
        for objects in (ROOT / "build").glob("native-*[0-9a-f]"):
            shutil.copytree(objects, unpacked / "build" / objects.name)
    run(*build, "--wheel", unpacked)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_sdist_builds_and_holds_what_the_build_needs(distributions: Path) -> None:
    (path,) = distributions.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    sources = {
        str(source.relative_to(ROOT))
        for pattern in ("*.cpp", "*.hpp")
        for folder in ("core/csrc", "disagg_proxy/csrc")
        for source in (ROOT / folder).rglob(pattern)
    } | {"src/moonpool/native.cpp"}
    assert sources <= names
    assert {"LICENSE", "README.md", "setup.py", "pyproject.toml", "src/moonpool/core/__init__.py"} <= names
    assert "src/moonpool/capi/include/transfer_engine_c.h" in names
    assert "src/moonpool/capi/include/moonpool_transport.h" in names
    assert not [name for name in names if "__pycache__" in name or name.endswith(".so")]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_wheel_is_small_works_and_holds_one_package(distributions: Path, tmp_path: Path) -> None:
    (path,) = distributions.glob("*.whl")
    assert path.stat().st_size < WHEEL_BYTES_MAX
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path)
    assert {name.split("/")[0] for name in names} == {
        "moonpool",
        f"moonpool-{moonpool.__version__}.dist-info",
    }
    assert {"moonpool/py.typed", "moonpool/_native.pyi", *C_FILES} <= set(names)
    assert not [name for name in names if name.endswith((".cpp", ".hpp", ".pyc"))]
    code = (
        "import moonpool, moonpool._native;"
        "store = moonpool.Store(embedded='16MiB'); store.put('k', b'v');"
        "print(moonpool.__file__, bytes(store.get('k')))"
    )
    printed = run(sys.executable, "-P", "-c", code, cwd=tmp_path, PYTHONPATH=str(tmp_path)).split()
    assert printed == [str(tmp_path / "moonpool" / "__init__.py"), "b'v'"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_c_libraries_of_an_installed_wheel_load(distributions: Path, tmp_path: Path) -> None:
    """In an environment with nothing else in it: the command of the docs says where they are, they need no
    Python to be loaded, and they have the names that are looked for."""
    (path,) = distributions.glob("*.whl")
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--no-deps")
    run(*pip, path, PYTHONPATH="")
    root = Path(run(python, "-I", "-m", "moonpool.capi", cwd=tmp_path).strip())
    assert root.is_relative_to(tmp_path / "venv")
    assert all((root.parents[1] / name).is_file() for name in C_FILES)
    header = (root / "include" / "transfer_engine_c.h").read_text()
    functions = re.findall(r"^\w[\w* ]*?[ *](\w+)\(", header, re.M)
    assert len(functions) == 15
    compiler = shutil.which(os.environ.get("CXX", "g++").split()[-1])
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    (tmp_path / "load.cpp").write_text(LOAD)
    run(compiler, tmp_path / "load.cpp", "-ldl", "-o", tmp_path / "load")
    run(tmp_path / "load", root / "lib" / "libtransfer_engine.so", *functions)
    run(tmp_path / "load", root / "nixl" / "libplugin_MOONPOOL.so", "nixl_plugin_init", "nixl_plugin_fini")


LOAD = """
#include <dlfcn.h>
#include <cstdio>
int main(int count, char** words) {  // LIBRARY NAME...
    void* library = dlopen(words[1], RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return std::puts(dlerror()), 1;
    for (int i = 2; i < count; ++i) {
        if (dlsym(library, words[i]) == nullptr) return std::puts(dlerror()), 1;
    }
    return 0;
}
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_edit_compiles_one_unit(tmp_path: Path) -> None:
    """On a small project with our setup.py: what is compiled after an edit of a source, of a header, of
    nothing, and after a folder got one source more.
    """
    pytest.importorskip("pybind11")
    for folder in ("core/csrc/base", "core/csrc/wire", "src/moonpool", "scripts"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("setup.py", "scripts/units.py", "pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "src/moonpool/__init__.py").touch()
    base, wire = tmp_path / "core/csrc/base", tmp_path / "core/csrc/wire"
    (base / "a.hpp").write_text("#pragma once\nint a();\n")
    (base / "a.cpp").write_text('#include "base/a.hpp"\nint a() { return 1; }\n')
    (wire / "b.cpp").write_text("int b() { return 2; }\n")
    (tmp_path / "src/moonpool/native.cpp").write_text(
        '#include <Python.h>\n#include "base/a.hpp"\n'
        'static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", 0, 0, 0, 0, 0, 0, 0};\n'
        'extern "C" __attribute__((visibility("default"))) PyObject* PyInit__native() {\n'
        "    PyObject* self = PyModule_Create(&module);\n"
        '    PyModule_AddIntConstant(self, "a", a());\n    return self;\n}\n'
    )

    def compiled(**env: str) -> set[str]:
        before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.o")}
        run(sys.executable, "setup.py", "-q", "build_ext", "--inplace", cwd=tmp_path, **env)
        after = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.o")}
        changed = (path for path, time_ns in after.items() if before.get(path) != time_ns)
        return {path.stem.rpartition("-")[0] for path in changed}  # without the digest of its sources' names

    assert compiled() == {"core-csrc-base", "core-csrc-wire", "src-moonpool"}
    assert compiled() == set()
    (tmp_path / "ccache").write_text('#!/bin/sh\nexec "$@"\n')
    (tmp_path / "ccache").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    compilers = {name: "ccache " + os.environ.get(name, default) for name, default in COMPILERS.items()}
    assert compiled(PATH=path, **compilers) == set()
    (wire / "b.cpp").write_text("int b() { return 3; }\n")
    assert compiled() == {"core-csrc-wire"}
    (base / "a.hpp").write_text("#pragma once\n\nint a();\n")
    assert compiled() == {"core-csrc-base", "src-moonpool"}
    (base / "a.cpp").write_text('#include "base/a.hpp"\nint a() { return 4; }\n')
    assert compiled() == {"core-csrc-base"}
    code = "import moonpool._native as native; print(native.a)"
    assert run(sys.executable, "-c", code, cwd=tmp_path / "src").strip() == "4"
    (base / "c.cpp").write_text("int c() { return 5; }\n")
    assert compiled() == {"core-csrc-base"}
    (wire / "b.cpp").unlink()
    assert compiled() == set()
