"""`make test`: everything that CI checks, in the order of what is cheapest to know; pytest's summaries come
last.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO

from scripts import engine_choice, environments, guest_kernel, system_packages
from scripts.environments import ROOT
from scripts.lint import lint
from scripts.progress import Progress

# In the second process, about half of the time of all: what starts no engine.
SECOND = ("tests/cluster", "tests/core", "tests/capi", "tests/cli")
CACHE = ROOT / ".pytest_cache"
TESTS_FAILED = 1  # pytest's exit code
AGAIN_MAX = 3  # tests that failed: more are no accident


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
    kernel = guest_kernel.prepare(progress)
    if kernel is not None:
        env["GUEST_KERNEL"] = str(kernel)
        if options.heavy and (pyverbs := guest_kernel.prepare_pyverbs(progress)):
            env["GUEST_PYVERBS"] = str(pyverbs)
    if options.heavy:
        env["HEAVY"] = "1"

    progress.say("pytest")
    os.chdir(ROOT)
    command = [str(tools.python), "-m", "pytest", "--durations=25"]
    if options.pytest:
        os.execve(tools.python, [*command, *shlex.split(options.pytest)], env)
    sys.exit(in_two(command, env, progress.log.with_name("second.log")))


def in_two(pytest: list[str], env: dict[str, str], log: Path) -> int:
    """Runs all tests -> exit code. Those of SECOND run beside the others, as mostly they wait: for engines,
    for one another, for deadlines. What they print comes last. SIGTERM, as of a CI that is
    cancelled, reaches both as Ctrl-C does, so that they end what they have started.
    """
    running: list[subprocess.Popen[bytes]] = []

    def start(command: list[str], output: IO[bytes] | None = None) -> subprocess.Popen[bytes]:
        running.append(subprocess.Popen(command, env=env, stdout=output, stderr=output and subprocess.STDOUT))
        return running[-1]

    def end(*_: object) -> None:
        for each in running:
            each.send_signal(signal.SIGINT)

    heeded = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in background jobs
    ended = signal.signal(signal.SIGTERM, end)
    in_second = [*pytest, "-o", f"cache_dir={CACHE / 'second'}", *SECOND]
    in_first = [*pytest, "-o", f"cache_dir={CACHE / 'first'}", *(f"--ignore={part}" for part in SECOND)]
    try:
        try:
            with log.open("wb") as output:
                second = start(in_second, output)
            first = start(in_first)
            codes = first.wait(), second.wait()
        finally:
            for each in running:
                each.wait()
            print(log.read_text(errors="replace"), flush=True)
        for command, code in zip((in_first, in_second), codes, strict=True):
            if code == TESTS_FAILED:
                look_again(command, start)
        return codes[0] or codes[1]
    finally:
        for each in running:
            each.wait()
        signal.signal(signal.SIGTERM, ended)
        signal.signal(signal.SIGINT, heeded)


def look_again(command: list[str], start: Callable[[list[str]], subprocess.Popen[bytes]]) -> None:
    """Runs a few tests that failed once more, by themselves, for whoever looks into it: what passes then, or
    what it tests, has a race. The run has failed all the same.
    """
    cache = Path(next(word for word in command if word.startswith("cache_dir=")).partition("=")[2])
    told = cache / "v" / "cache" / "lastfailed"
    failed = list(json.loads(told.read_text())) if told.exists() else []
    if not 0 < len(failed) <= AGAIN_MAX:
        return
    print(f"once more, by themselves: {' '.join(failed)}", flush=True)
    if start([*command, "--last-failed"]).wait() == 0:
        print(f"failed, and passed by itself at the second try: {' '.join(failed)}", flush=True)


if __name__ == "__main__":
    main()
