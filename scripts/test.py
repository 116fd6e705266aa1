"""`make test`: everything that CI checks, in the order of what is cheapest to know; pytest's summary comes
last.
"""

from __future__ import annotations

import argparse
import os
import shlex

from scripts import environments, system_packages
from scripts.environments import ROOT
from scripts.lint import lint
from scripts.progress import Progress


def main() -> None:
    parser = argparse.ArgumentParser(prog="make test")
    parser.add_argument("--pytest", default="", help="arguments for pytest (make test ARGS='-k store')")
    parser.add_argument("--only-pytest", action="store_true", help="no lint, no native tests")
    parser.add_argument("--no-engine", action="store_true", help="skip the tests that start a real vLLM")
    options = parser.parse_args()
    progress = Progress(environments.cache() / "logs" / "test.log")
    needed = [*system_packages.BUILD, *system_packages.TEST]
    system_packages.require(progress, *needed, *([] if options.no_engine else system_packages.ENGINE))

    tools = environments.tools(progress)
    env = environments.clean_env()
    if not options.only_pytest:
        if not lint(progress, tools):
            raise progress.fail("lint is not clean (see above); `make lint FIX=1` repairs layout and imports")
        progress.run(
            "native tests under ASan, UBSan and TSan", ["make", "-C", ROOT / "tests" / "native"], env
        )
    if not options.no_engine:
        env["MOONPOOL_VLLM_PYTHON"] = str(environments.engine(progress).python)

    progress.say("pytest")
    os.chdir(ROOT)
    command = [str(tools.python), "-m", "pytest", *shlex.split(options.pytest)]
    os.execve(tools.python, command, env)


if __name__ == "__main__":
    main()
