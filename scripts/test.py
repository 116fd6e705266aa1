"""`make test`: everything that CI checks, in the order of what is cheapest to know; pytest's summaries come
last.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

from scripts import engine_choice, environments, system_packages
from scripts.environments import ROOT
from scripts.lint import lint
from scripts.progress import Progress

CLUSTER = "tests/cluster"


def main() -> None:
    parser = argparse.ArgumentParser(prog="make test")
    parser.add_argument("--pytest", default="", help="arguments for pytest (make test ARGS='-k store')")
    parser.add_argument("--only-pytest", action="store_true", help="no lint, no native tests")
    parser.add_argument(
        "--no-engine", action="store_true", help="skip the tests with a real vLLM, SGLang, LMCache or NIXL"
    )
    parser.add_argument("--no-sglang", action="store_true", help="skip the tests that start a real SGLang")
    parser.add_argument("--no-lmcache", action="store_true", help="skip the tests with a real LMCache")
    parser.add_argument("--heavy", action="store_true", help="the tests marked heavy, too")
    options = parser.parse_args()
    progress = Progress(environments.cache() / "logs" / "test.log")
    with_vllm, with_sglang = not options.no_engine, not (options.no_engine or options.no_sglang)
    needed = [*system_packages.BUILD, *system_packages.TEST]
    needed += system_packages.ENGINE if with_vllm else ()
    needed += system_packages.SGLANG if with_sglang else ()
    system_packages.require(progress, *dict.fromkeys(needed))
    system_packages.wish(progress, *system_packages.TEST_WISHES)

    tools = environments.tools(progress)
    env = environments.clean_env()
    if not options.only_pytest:
        if not lint(progress, tools):
            raise progress.fail("lint is not clean (see above); `make lint FIX=1` repairs layout and imports")
        progress.run(
            "native tests under ASan, UBSan and TSan",
            ["make", "-C", ROOT / "tests" / "native"],
            environments.compiler_env(),
        )
    if with_vllm:
        env["MOONPOOL_VLLM_PYTHON"] = str(environments.engine(progress).python)
    if with_sglang:
        sglang = environments.engine(progress, engine_choice.sglang(engine_choice.SGLANG_VERSION))
        env["MOONPOOL_SGLANG_PYTHON"] = str(sglang.python)
    if not (options.no_engine or options.no_lmcache):
        lmcache = environments.engine(progress, engine_choice.lmcache(engine_choice.LMCACHE_VERSION))
        env["MOONPOOL_LMCACHE_PYTHON"] = env["MOONPOOL_CHECKPOINT_ENGINE_PYTHON"] = str(lmcache.python)
    if not options.no_engine:
        nixl = environments.alone(progress, engine_choice.nixl(engine_choice.NIXL_VERSION))
        env["MOONPOOL_NIXL_PYTHON"] = str(nixl.python)
    if options.heavy:
        env["HEAVY"] = "1"

    progress.say("pytest")
    os.chdir(ROOT)
    command = [str(tools.python), "-m", "pytest", "--durations=25"]
    if options.pytest:
        os.execve(tools.python, [*command, *shlex.split(options.pytest)], env)
    sys.exit(in_two(command, env, progress.log.with_name("cluster.log")))


def in_two(pytest: list[str], env: dict[str, str], log: Path) -> int:
    """Runs all tests -> exit code. The cluster's run beside the others: their hosts are namespaces of their
    own, and mostly they wait for one another. What they print comes last. SIGTERM, as of a CI that is
    cancelled, reaches both as Ctrl-C does, so that they end what they have started.
    """
    running: list[subprocess.Popen[bytes]] = []

    def end(*_: object) -> None:
        for each in running:
            each.send_signal(signal.SIGINT)

    heeded = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in background jobs
    ended = signal.signal(signal.SIGTERM, end)
    with log.open("wb") as output:
        beside = [*pytest, "-p", "no:cacheprovider", CLUSTER]
        running.append(subprocess.Popen(beside, env=env, stdout=output, stderr=subprocess.STDOUT))
    running.append(subprocess.Popen([*pytest, f"--ignore={CLUSTER}"], env=env))
    cluster, others = running
    try:
        code = others.wait()
        return code or cluster.wait()
    finally:
        others.wait()
        cluster.wait()
        signal.signal(signal.SIGTERM, ended)
        signal.signal(signal.SIGINT, heeded)
        print(log.read_text(errors="replace"), flush=True)


if __name__ == "__main__":
    main()
