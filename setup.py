"""Builds the extension ``moonpool._native`` from core/csrc and disagg_proxy/csrc, and from core/csrc the C
library ``libtransfer_engine.so`` and the NIXL plugin ``libplugin_MOONPOOL.so``; everything else about the
package stands in pyproject.toml.

Sources of one folder are compiled together (scripts/units.py). Only what changed is compiled: every object
keeps the list of files it was made from (gcc -MMD) beside it in build/native-<digest of compiler, flags and
Python>, and that folder survives between `pip install .`, `pip install -e .` and `make build`. Nothing
outside a C++20 compiler, the Python headers and pybind11 is needed.

Environment: MOONPOOL_BUILD_JOBS (parallel compilers, default: all cores), MOONPOOL_WERROR=1 (warnings are
errors, as in CI), CXX, CFLAGS/CXXFLAGS/LDFLAGS (honoured by setuptools).
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from itertools import chain
from pathlib import Path

import pybind11
from pybind11.setup_helpers import Pybind11Extension
from setuptools import find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.extension import Extension

sys.path.insert(0, str(Path(__file__).resolve().parent))  # a build front end leaves it out
from scripts.units import write_units

SOURCES = sorted(glob("core/csrc/**/*.cpp", recursive=True))
NATIVE = [name for name in SOURCES if not name.startswith(("core/csrc/capi/", "core/csrc/nixl/"))]
NATIVE += [*sorted(glob("disagg_proxy/csrc/**/*.cpp", recursive=True)), "src/moonpool/native.cpp"]
# The C library: the transfer engine without Python, made of the same objects. The NIXL plugin is in it;
# libplugin_MOONPOOL.so only opens it.
NIXL_ENTRY = glob("core/csrc/nixl/entry.cpp")
CAPI_FOLDERS = ("base", "capi", "device", "engine", "io", "memory", "nixl", "topology", "transport", "wire")
CAPI = [name for name in SOURCES if name.split("/")[2] in CAPI_FOLDERS and name not in NIXL_ENTRY]
INCLUDES = ["core/csrc", "disagg_proxy/csrc", "src/moonpool/capi/include"]
HEADERS = sorted(header for folder in INCLUDES for header in glob(f"{folder}/**/*.h*", recursive=True))
# Each function in a section of its own, so that a library leaves out what it does not use.
SECTIONS = ("-ffunction-sections", "-fdata-sections")
FLAGS = ["-O3", "-Wall", "-Wextra", "-pthread", "-MMD", "-iquote", ".", *SECTIONS]
# Warnings of Python's own CFLAGS that only make sense for C; g++ would complain about each of them.
C_ONLY = {"-Wstrict-prototypes", "-Wmissing-prototypes"}


def objects_folder(compiler: list[str], flags: list[str]) -> Path:
    """Where the objects of exactly this compiler, these flags and this Python live."""
    compiler = [word for word in compiler if Path(word).name != "ccache"]  # it makes the same objects
    version = subprocess.run([compiler[0], "--version"], capture_output=True, text=True, check=True).stdout
    identity = [version, *compiler, *flags, pybind11.__version__, str(sysconfig.get_config_var("EXT_SUFFIX"))]
    return Path("build") / f"native-{hashlib.sha256(repr(identity).encode()).hexdigest()[:12]}"


def is_stale(unit: Path) -> bool:
    """True when the unit's object is missing, or older than the unit or any file of ours that it includes."""
    target, depfile = unit.with_suffix(".o"), unit.with_suffix(".d")
    if not target.exists() or not depfile.exists():
        return True
    made_s = target.stat().st_mtime
    words = re.split(r"\s+", depfile.read_text().replace("\\\n", " ").split(":", 1)[1])
    for name in {
        str(unit),
        *(word for word in words if word.startswith(("core/", "disagg_proxy/", "src/", "./"))),
    }:
        path = Path(name)
        if not path.exists() or path.stat().st_mtime >= made_s:
            return True
    return False


class IncrementalBuild(build_ext):
    """build_ext that compiles stale objects only, several at a time, and then links."""

    def finalize_options(self) -> None:
        """Leaves out the environment's own folder of headers, so that ccache finds objects of other
        checkouts."""
        super().finalize_options()
        # That folder is empty, and its path differs from checkout to checkout.
        own = os.path.join(sys.exec_prefix, "include")
        if sys.exec_prefix != sys.base_exec_prefix:
            self.include_dirs = [folder for folder in self.include_dirs if folder != own]

    def get_ext_filename(self, fullname: str) -> str:
        """A C library has the name that programs link, no Python's."""
        if fullname.rpartition(".")[2].startswith("lib"):
            return fullname.replace(".", "/") + ".so"
        return str(super().get_ext_filename(fullname))

    def copy_extensions_to_source(self) -> None:
        """Makes the folders of the C libraries first: an editable build does not."""
        for folder in ("lib", "nixl"):
            (Path("src/moonpool/capi") / folder).mkdir(parents=True, exist_ok=True)
        super().copy_extensions_to_source()

    def build_extensions(self) -> None:
        """Compiles the stale units of all extensions, so that no core waits for the last one of each, on
        MOONPOOL_BUILD_JOBS threads (default: the cores that this process may use). Then it links."""
        self.check_extensions_list(self.extensions)
        for name in ("compiler", "compiler_so", "compiler_cxx", "compiler_so_cxx"):
            command = getattr(self.compiler, name, None)
            if command:
                setattr(self.compiler, name, [word for word in command if word not in C_ONLY])
        compiler = list(getattr(self.compiler, "compiler_so_cxx", None) or self.compiler.compiler_so)
        first = self.extensions[0]  # all have the same flags
        flags = list(first.extra_compile_args)
        folder = objects_folder(compiler, flags)
        units = {ext.name: write_units(ext.sources, folder) for ext in self.extensions}
        different = dict.fromkeys(chain(*units.values()))
        stale = [unit for unit in different if self.force or is_stale(unit)]

        def compile_one(unit: Path) -> None:
            target = unit.with_suffix(".o")
            target.unlink(missing_ok=True)
            started_s = time.time()
            self.compiler.compile([str(unit)], include_dirs=first.include_dirs, extra_postargs=flags)
            # Dated before the compiler read the source, so that an edit made meanwhile is seen next time.
            os.utime(target, (started_s, started_s))

        def link_one(ext: Extension) -> None:
            self.compiler.link_shared_object(
                [str(unit.with_suffix(".o")) for unit in units[ext.name]],
                self.get_ext_fullpath(ext.name),
                extra_postargs=ext.extra_link_args,
                target_lang="c++",
            )

        jobs = int(os.environ.get("MOONPOOL_BUILD_JOBS", "0")) or len(os.sched_getaffinity(0))
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(compile_one, stale))
            list(pool.map(link_one, self.extensions))


def linking(name: str) -> list[str]:
    """A C library says its name, so that programs look for it by that and not by a path of where they were
    built; and it needs nothing that whoever loads it must have."""
    last = name.rpartition(".")[2]
    return [f"-Wl,-soname,{last}.so", "-Wl,--no-undefined"] if last.startswith("lib") else []


def extension(name: str, sources: list[str]) -> Extension:
    """One native module or C library. All have the same flags, so that they share objects."""
    return Pybind11Extension(
        name,
        sources,
        include_dirs=list(INCLUDES),
        depends=[*HEADERS, "setup.py"],
        cxx_std=20,  # with it come -fvisibility=hidden and -g0
        extra_compile_args=[*FLAGS, *(["-Werror"] if os.environ.get("MOONPOOL_WERROR") == "1" else [])],
        extra_link_args=["-pthread", "-Wl,--gc-sections", *linking(name)],
    )


setup(
    packages=find_packages("src"),  # follows the links core, connectors and disagg_proxy
    package_dir={"": "src"},
    package_data={
        "*": ["py.typed", "*.pyi"],
        "moonpool.capi": ["include/*.h"],
        "moonpool.disagg_proxy.ui": ["*.html"],
    },
    ext_modules=[
        extension("moonpool._native", NATIVE),
        extension("moonpool.capi.lib.libtransfer_engine", CAPI),
        extension("moonpool.capi.nixl.libplugin_MOONPOOL", NIXL_ENTRY),
    ],
    cmdclass={"build_ext": IncrementalBuild},
)
