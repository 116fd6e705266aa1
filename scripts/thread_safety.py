"""Clang's thread-safety analysis, for `make lint`.

An error is a field marked GUARDED_BY (core/csrc/base/mutex.hpp) that is used without its mutex, or a function
marked REQUIRES that is called without it.

clang-tidy is the compiler's front end in a wheel, so no clang need be installed; it reads the headers of the
system's g++. A translation unit takes about a second. Units that do not reach base/mutex.hpp are left out; a
unit that was clean is not looked at again until it, or a header that it reaches, changes.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sysconfig
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from scripts import environments
from scripts.environments import ROOT, Environment
from scripts.progress import Progress

CLANG_TIDY = "clang-tidy==23.1.4"
SOURCES = ("core/csrc", "disagg_proxy/csrc")
INCLUDES = (*SOURCES, "src/moonpool/capi/include")
MUTEX = "base/mutex.hpp"
OPTIONS = (
    "--quiet", "--allow-no-checks", "--checks=-*,clang-diagnostic-*", "--header-filter=.*",
    "--warnings-as-errors=*",
)  # fmt: skip
FLAGS = ("-xc++", "-std=c++20", "-Wno-everything", "-Wthread-safety", "-Wthread-safety-reference")
KEPT_S = 30 * 24 * 3600.0  # a result that no run has asked for in this time is deleted
_INCLUDE = re.compile(rb'^#include "([^"]+)"', re.MULTILINE)


def reached(unit: Path, folders: Sequence[Path], known: dict[Path, list[Path]]) -> list[Path]:
    """The files of ``folders`` that a unit includes, directly or not, and itself; sorted.

    known: the direct includes of each file that was looked at before; filled.
    """
    found = {unit}
    waiting = [unit]
    while waiting:
        file = waiting.pop()
        if file not in known:
            known[file] = _included(file, folders)
        new = set(known[file]) - found
        found |= new
        waiting += new
    return sorted(found)


def _included(file: Path, folders: Sequence[Path]) -> list[Path]:
    names = [name.decode() for name in _INCLUDE.findall(file.read_bytes())]
    candidates = [[file.parent / name, *(folder / name for folder in folders)] for name in names]
    return [next((path for path in paths if path.is_file()), file) for paths in candidates]


def units(root: Path) -> list[tuple[Path, str]]:
    """(translation unit that reaches base/mutex.hpp, digest of all that it reaches), the largest first."""
    folders = [root / folder for folder in INCLUDES]
    mutexes = {folder / MUTEX for folder in folders}
    known: dict[Path, list[Path]] = {}
    found = []
    for unit in sorted(path for folder in SOURCES for path in (root / folder).rglob("*.cpp")):
        files = reached(unit, folders, known)
        if mutexes.isdisjoint(files):
            continue
        digest = hashlib.sha256()
        for file in files:
            digest.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes() + b"\0")
        found.append((len(files), unit, digest.hexdigest()))
    return [(unit, digest) for _, unit, digest in sorted(found, reverse=True)]


def check(progress: Progress, tools: Environment, clang_tidy: Path, root: Path = ROOT) -> bool:
    """-> all units are clean. Prints what clang says of those that are not. tools: has pybind11."""
    base = Environment(tools.base or tools.path)
    folders = [root / folder for folder in INCLUDES]
    system = [sysconfig.get_path("include"), str(base.packages / "pybind11" / "include")]
    includes = [f"-I{folder}" for folder in folders] + [f"-isystem{folder}" for folder in system]
    version = subprocess.run([clang_tidy, "--version"], capture_output=True, check=True).stdout
    flags = hashlib.sha256(version + repr((OPTIONS, FLAGS)).encode()).hexdigest()[:12]
    results = environments.cache() / "thread_safety" / flags
    results.mkdir(parents=True, exist_ok=True)
    due = [(unit, results / digest) for unit, digest in units(root) if not _known(results / digest)]
    progress.say(f"lint: thread-safety analysis of {len(due)} translation units that changed")

    def analyse(job: tuple[Path, Path]) -> bool:
        unit, result = job
        command: list[str | Path] = [clang_tidy, *OPTIONS, unit, "--", *FLAGS, *includes]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=environments.clean_env()
        )
        if done.returncode == 0:
            result.touch()
        else:
            print(done.stdout.strip() or done.stderr.strip(), flush=True)
        return done.returncode == 0

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        clean = all(list(pool.map(analyse, due)))
    for result in results.parent.glob("*/*"):
        if result.stat().st_mtime < time.time() - KEPT_S:
            result.unlink(missing_ok=True)
    return clean


def _known(result: Path) -> bool:
    if not result.exists():
        return False
    os.utime(result)
    return True
