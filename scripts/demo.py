"""`make demo`: an environment with a real vLLM, then examples/demo in it."""

from __future__ import annotations

import argparse
import os

from scripts import engine_choice, environments, system_packages
from scripts.environments import ROOT
from scripts.progress import Progress


def main() -> None:
    parser = argparse.ArgumentParser(prog="make demo")
    parser.add_argument(
        "--once", action="store_true", help="end by itself after the proof (make demo ONCE=1)"
    )
    parser.add_argument("--model", default="", help="a model of your own: folder or hub name (MODEL=...)")
    parser.add_argument(
        "--nodes", type=int, choices=(1, 2), default=1, help="2: each engine on a node of its own (NODES=2)"
    )
    parser.add_argument("--json", default="", help="write the table to this file (JSON=...)")
    options = parser.parse_args()
    progress = Progress(environments.cache() / "logs" / "demo-setup.log")
    choice = engine_choice.CPU
    where = "on the CPU, also where a GPU is: docs/gpu.md has engines on GPUs"
    if not engine_choice.has_nvidia_gpu():
        where = "no NVIDIA GPU here, so on the CPU"
    progress.say(f"moonpool demo: prefill and decode engines, a pool and the proxy ({where})")
    system_packages.require(progress, *system_packages.BUILD, *system_packages.ENGINE)
    environment = environments.engine(progress, choice)

    command = [str(environment.python), str(ROOT / "examples" / "demo" / "main.py")]
    command += ["--cache", str(environments.cache())]
    command += ["--once"] if options.once else []
    command += ["--nodes", str(options.nodes)] if options.nodes > 1 else []
    command += ["--cpu"] if choice.is_cpu else []
    command += ["--model", options.model] if options.model else []
    command += ["--json", os.path.abspath(options.json)] if options.json else []
    os.execve(environment.python, command, environments.clean_env())


if __name__ == "__main__":
    main()
