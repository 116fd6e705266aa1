"""`make lint`: ruff, mypy --strict, clang-format, clang's thread-safety analysis. `make lint FIX=1`
repairs what can be repaired.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from scripts import environments, system_packages, thread_safety
from scripts.environments import ROOT, Environment
from scripts.progress import Progress

PYTHON_FOLDERS = (
    "benchmarks", "connectors", "core", "deploy", "disagg_proxy", "examples", "scripts", "setup.py",
    "src", "tests",
)  # fmt: skip
NATIVE_FOLDERS = ("core/csrc", "disagg_proxy/csrc", "tests/native", "tests/sim", "benchmarks")


def lint(progress: Progress, tools: Environment, fix: bool = False) -> bool:
    """-> all clean. Everything that is wrong is printed."""
    python = [folder for folder in PYTHON_FOLDERS if (ROOT / folder).exists()]
    native = sorted(
        str(path.relative_to(ROOT))
        for folder in NATIVE_FOLDERS
        for pattern in ("*.cpp", "*.hpp")
        for path in Path(ROOT, folder).rglob(pattern)
    )
    native.append("src/moonpool/native.cpp")
    ruff = [str(tools.python), "-m", "ruff"]
    seen = environments.cache() / "mypy" / environments.checkout()
    commands = [
        [*ruff, "check", *(["--fix"] if fix else []), *python],
        [*ruff, "format", *([] if fix else ["--check", "--diff"]), *python],
        [str(tools.python), "-m", "mypy", "--cache-dir", str(seen), "-p", "moonpool"],
        [str(tools.program("clang-format")), *(["-i"] if fix else ["--dry-run", "-Werror"]), *native],
    ]
    clean = True
    for command in commands:
        progress.say("lint: " + " ".join([Path(command[0]).name, *command[1:]])[:90])
        result = subprocess.run(command, cwd=ROOT, env=environments.clean_env(), check=False)
        clean = clean and result.returncode == 0
    analyser = environments.programs(progress, "clang-tidy", thread_safety.CLANG_TIDY)
    return thread_safety.check(progress, tools, analyser.program("clang-tidy")) and clean


def main() -> None:
    progress = Progress(environments.cache() / "logs" / "lint.log")
    system_packages.require(progress, *system_packages.BUILD)
    if not lint(progress, environments.tools(progress), fix="--fix" in sys.argv):
        raise progress.fail("lint is not clean (see above); `make lint FIX=1` repairs layout and imports")
    progress.say("lint is clean")


if __name__ == "__main__":
    main()
