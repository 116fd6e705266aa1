"""The set-up of environments: what a user is told, and that an interrupted run leaves nothing half-made."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """scripts.environments with a cache of its own."""
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setenv("MOONPOOL_CACHE", str(tmp_path / "cache"))
    return importlib.import_module("scripts.environments")


@pytest.fixture
def progress(scripts: ModuleType, tmp_path: Path) -> object:
    return importlib.import_module("scripts.progress").Progress(tmp_path / "logs" / "log")


def test_without_root_the_exact_command_is_printed(
    scripts: ModuleType, progress: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    packages = importlib.import_module("scripts.system_packages")
    monkeypatch.setattr(packages, "CHECKS", {"there": lambda: True, "a": lambda: False, "b": lambda: False})
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    packages.require(progress, "there")
    with pytest.raises(SystemExit):
        packages.require(progress, "there", "a", "b")
    assert "    sudo apt-get install -y --no-install-recommends a b\n" in capsys.readouterr().err


@pytest.mark.parametrize("codes", [[0], [100, 0, 0], [100, 0, 100]])
def test_what_tests_wish_for_ends_nothing_when_it_is_not_to_be_had(
    scripts: ModuleType,
    progress: object,
    codes: list[int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    packages = importlib.import_module("scripts.system_packages")
    monkeypatch.setattr(packages, "CHECKS", {"there": lambda: True, "a": lambda: False})
    monkeypatch.setattr(packages, "TEST_WISHES", {"a": "this is slow"})
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda name: name)
    left, ran = list(codes), []

    def attempt(command: list[str], env: object) -> tuple[int, str]:
        ran.append(command[1])
        return left.pop(0), ""

    monkeypatch.setattr(progress, "attempt", attempt)
    packages.wish(progress, "there", "a")
    assert ran == ["install", "update", "install"][: len(codes)]
    assert ("a is not to be had here: this is slow" in capsys.readouterr().out) == (codes[-1] != 0)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    packages.wish(progress, "a")
    assert not left
    assert len(ran) == len(codes)


def test_a_compiler_may_be_a_command_of_several_words(
    scripts: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = importlib.import_module("scripts.system_packages")
    for name in ("ccache", "c++"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    for command, there in (("", False), ("c++", True), ("ccache c++ -m64", True), ("ccache clang++", False)):
        monkeypatch.setenv("CXX", command)
        assert packages._has_compiler() is there, command


def test_ccache_stands_before_the_compilers_where_it_is(
    scripts: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/bin")
    monkeypatch.setattr(scripts, "CCACHE", tmp_path / "none")
    assert scripts.compiler_env() == scripts.clean_env()
    monkeypatch.setattr(scripts, "CCACHE", tmp_path)
    monkeypatch.setenv("CCACHE_DIR", "/mine")
    env = scripts.compiler_env()
    assert env["PATH"] == f"{tmp_path}:/bin"
    assert env["CCACHE_DIR"] == "/mine"  # a user's settings stay
    assert env["CCACHE_BASEDIR"] == str(ROOT)


def test_a_missing_cpu_build_of_torch_says_what_to_set(
    scripts: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = importlib.import_module("scripts.engine_choice")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "https://mine.example/simple")
    told = choice.no_cpu_torch("ERROR: No matching distribution found for torch==2.13.0+cpu")
    index = "https://download.pytorch.org/whl/cpu"
    assert f"    export PIP_EXTRA_INDEX_URL='https://mine.example/simple {index}'\n" in told
    assert choice.no_cpu_torch("ERROR: connection reset") is None


def test_a_failed_command_shows_its_last_lines_and_its_log(
    progress: object, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        progress.run("counting", [sys.executable, "-c", "print('one'); print('two'); exit(3)"])  # type: ignore[attr-defined]
    told = capsys.readouterr().err
    assert "counting" in told
    assert "ended with 3" in told
    assert "one\ntwo" in told
    assert str(progress.log) in told  # type: ignore[attr-defined]


def test_an_interrupted_environment_leaves_nothing_and_a_complete_one_is_kept(
    scripts: ModuleType, progress: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled = []

    def interrupted(_: object, made: object, *rest: object) -> None:
        (made.path / "half").mkdir()  # type: ignore[attr-defined]
        raise KeyboardInterrupt

    def complete(_: object, made: object, *rest: object) -> None:
        (made.path / "bin").mkdir()  # type: ignore[attr-defined]
        made.python.touch()  # type: ignore[attr-defined]
        filled.append(made)

    monkeypatch.setattr(scripts, "_fill", interrupted)
    with pytest.raises(KeyboardInterrupt):
        scripts._base(progress, "x", ["a", "b"])
    assert [path.name for path in (scripts.cache() / "envs").iterdir() if path.suffix != ".lock"] == []

    monkeypatch.setattr(scripts, "_fill", complete)
    first = scripts._base(progress, "x", ["a", "b"])
    assert first.python.exists()
    assert scripts._base(progress, "x", ["b", "a"]) == first
    assert scripts._base(progress, "x", ["b", "c"]) != first
    assert len(filled) == 2


def test_requirements_come_from_pyproject_with_nested_extras(scripts: ModuleType) -> None:
    names = {requirement.split(">")[0].split("=")[0] for requirement in scripts.project_requirements("dev")}
    assert {"aiohttp", "pytest", "ruff", "setuptools"} <= names
    assert not [name for name in names if name.startswith("moonpool")]


def base_with(scripts: ModuleType, name: str, *versions: str) -> Path:
    """A complete base with ``name`` in these versions: a module, its bytecode, a console script."""
    made = scripts.Environment(scripts.cache() / "envs" / f".made-{name}")
    for version in versions:
        info = made.packages / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[console_scripts]\n{name} = {name}:main\n")
        (info / "RECORD").write_text(f"{name}.py,,\n../../../bin/{name},,\n{info.name}/METADATA,,\n")
    (made.packages / f"{name}.py").write_text("there = True")
    cached = made.packages / importlib.util.cache_from_source(f"{name}.py")
    cached.parent.mkdir()
    cached.write_text("compiled")
    (made.path / "bin").mkdir()
    (made.path / "bin" / name).write_text("#!/usr/bin/another")
    (scripts.cache() / "envs" / f"engine-{name}").symlink_to(made.path.name)
    return Path(made.packages)


def test_what_another_base_has_in_the_same_version_is_linked(scripts: ModuleType, tmp_path: Path) -> None:
    theirs = base_with(scripts, "one_two", "1.0")
    base_with(scripts, "other", "3.0")
    made = scripts.Environment(tmp_path / "made")
    assert scripts.share(made, ["One-Two==1.0", "other==4.0", "unpinned>=1"]) == ["one-two"]
    for file in (
        "one_two.py",
        importlib.util.cache_from_source("one_two.py"),
        "one_two-1.0.dist-info/METADATA",
    ):
        assert (made.packages / file).samefile(theirs / file), file
    assert not (made.packages / "other.py").exists()
    assert not (made.path / "bin").exists()  # a console script names the other's interpreter
    assert scripts.share(made, ["one_two==1.0"]) == ["one-two"]  # what is there is left alone


def test_a_file_outside_of_its_package_is_not_shared(scripts: ModuleType, tmp_path: Path) -> None:
    theirs = base_with(scripts, "tool", "1.0")
    (theirs / "tool-1.0.dist-info" / "entry_points.txt").unlink()
    assert scripts.share(scripts.Environment(tmp_path / "made"), ["tool==1.0"]) == []


def test_sglang_is_installed_in_exact_versions(scripts: ModuleType) -> None:
    choice = importlib.import_module("scripts.engine_choice")
    for version in choice.SGLANG:
        engine = choice.sglang(version)
        names = [choice.name_of(line) for line in engine.requirements]
        assert len(set(names)) == len(names)
        assert {"torch", "transformers", "ninja"} <= set(names)
        assert all(line.count("==") == 1 for line in engine.requirements)
        assert engine.requirements.count(f"sglang=={version}") == 1
        assert engine.complete


def test_lmcache_is_installed_in_exact_versions(scripts: ModuleType) -> None:
    choice = importlib.import_module("scripts.engine_choice")
    engine = choice.lmcache(choice.LMCACHE_VERSION)
    names = [choice.name_of(line) for line in engine.requirements]
    assert len(set(names)) == len(names)
    assert {"torch", "lmcache", "pytest", "pytest-timeout"} <= set(names)
    assert all(line.count("==") == 1 for line in engine.requirements)
    assert engine.complete


def test_nixl_is_installed_in_the_version_that_the_plugin_is_made_for(scripts: ModuleType) -> None:
    choice = importlib.import_module("scripts.engine_choice")
    wheel = choice.nixl(choice.NIXL_VERSION)
    assert all(line.count("==") == 1 for line in wheel.requirements)
    assert {choice.name_of(line) for line in wheel.requirements} == {"numpy", "nixl", "nixl-cu12"}
    assert wheel.complete
    assert not wheel.is_cpu  # it has no torch to look for
    plugin = (ROOT / "core" / "csrc" / "nixl" / "host.cpp").read_text()
    assert f"NIXL {choice.NIXL_VERSION}" in plugin


@pytest.mark.parametrize("engines", [True, False])
def test_make_test_hands_real_engines_to_pytest(
    scripts: ModuleType, monkeypatch: pytest.MonkeyPatch, engines: bool
) -> None:
    """Else their tests are skipped, and nobody sees it."""
    test = importlib.import_module("scripts.test")
    monkeypatch.setattr(test.system_packages, "require", lambda *_: None)
    monkeypatch.setattr(test.system_packages, "wish", lambda *_: None)

    def made(_: object, choice: object = None) -> object:
        return scripts.Environment(Path(getattr(choice, "name", "vllm")))

    for name in ("tools", "engine", "alone"):
        monkeypatch.setattr(test.environments, name, made)
    monkeypatch.setattr(test.guest_kernel, "prepare", lambda _: Path("kernel"))
    handed: list[dict[str, str]] = []
    monkeypatch.setattr(test, "in_two", lambda command, env, log: handed.append(env))
    monkeypatch.setattr("os.chdir", lambda _: None)
    monkeypatch.setattr("sys.argv", ["test", "--only-pytest", *([] if engines else ["--no-engine"])])
    for name in [name for name in test.os.environ if name.endswith("_PYTHON")]:
        monkeypatch.delenv(name)
    with pytest.raises(SystemExit):
        test.main()
    found = {name: Path(value).parts[0] for name, value in handed[0].items() if name.endswith("_PYTHON")}
    expected = {
        "MOONPOOL_VLLM_PYTHON": "vllm",
        "MOONPOOL_SGLANG_PYTHON": "sglang-0.5.23",
        "MOONPOOL_LMCACHE_PYTHON": "lmcache-0.5.6",
        "MOONPOOL_CHECKPOINT_ENGINE_PYTHON": "lmcache-0.5.6",
        "MOONPOOL_NIXL_PYTHON": "nixl-1.5.1",
    }
    assert found == (expected if engines else {})
    assert handed[0]["GUEST_KERNEL"] == "kernel"


@pytest.mark.parametrize("codes", [(0, 0, 0), (3, 0, 3), (0, 4, 4), (3, 4, 3)])
def test_half_of_the_tests_run_beside_the_others(
    scripts: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str], codes: tuple[int, int, int]
) -> None:
    first, second, code = codes
    test = importlib.import_module("scripts.test")
    ends = f"import sys; print(sys.argv[-1]); sys.exit({first} if '--ignore' in sys.argv[-1] else {second})"
    assert test.in_two([sys.executable, "-c", ends], dict(os.environ), tmp_path / "log") == code
    printed = capfd.readouterr().out.splitlines()
    assert printed[:2] == [f"--ignore={test.SECOND[-1]}", test.SECOND[-1]]


@pytest.mark.parametrize(
    ("body", "tries", "races"),
    [
        ("assert not first", 2, True),
        ("assert False", 2, False),
        ("import os; os._exit(1)", 1, False),  # as a test that hangs ends
    ],
)
def test_few_that_failed_are_looked_at_again_and_have_failed_all_the_same(
    scripts: ModuleType,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    body: str,
    tries: int,
    races: bool,
) -> None:
    """By a real pytest; those that passed are not run again."""
    test = importlib.import_module("scripts.test")
    monkeypatch.setattr(test, "CACHE", tmp_path / "cache")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "tests" / "cluster").mkdir(parents=True)
    (tmp_path / "tests" / "cluster" / "test_there.py").write_text("def test_passes():\n    pass\n")
    (tmp_path / "tests" / "test_it.py").write_text(
        "from pathlib import Path\n"
        "def test_passes():\n    note('passes')\n"
        "def note(word):\n    with Path(__file__).with_name('tries').open('a') as tries:\n"
        "        tries.write(word + ' ')\n        return tries.tell() < 15\n"
        f"def test_fails():\n    first = note('fails')\n    {body}\n"
    )
    monkeypatch.chdir(tmp_path)
    pytest_there = [sys.executable, "-m", "pytest", "-q"]
    assert test.in_two(pytest_there, dict(os.environ), tmp_path / "log") == 1
    assert (tmp_path / "tests" / "tries").read_text().split() == ["passes", *["fails"] * tries]
    said = "failed, and passed by itself at the second try: tests/test_it.py::test_fails"
    assert (said in capfd.readouterr().out) == races


def test_many_that_failed_are_not_run_again(scripts: ModuleType, tmp_path: Path) -> None:
    test = importlib.import_module("scripts.test")
    told = tmp_path / "v" / "cache" / "lastfailed"
    told.parent.mkdir(parents=True)
    told.write_text(json.dumps(dict.fromkeys("abcd", True)))
    test.look_again(["-o", f"cache_dir={tmp_path}"], None)  # nothing is started


def test_the_matrix_says_which_versions_it_knows(
    scripts: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    matrix = importlib.import_module("scripts.matrix")
    ran: list[tuple[str, str]] = []
    monkeypatch.setattr(matrix, "run", lambda _, engine, version: ran.append((engine, version)) or 0)
    monkeypatch.setattr("sys.argv", ["matrix", "vllm-0.31.0", "sglang-0.5.18"])
    with pytest.raises(SystemExit) as passed:
        matrix.main()
    assert (passed.value.code, ran) == (False, [("vllm", "0.31.0"), ("sglang", "0.5.18")])
    monkeypatch.setattr(matrix.shutil, "which", lambda name: None)
    monkeypatch.setattr("sys.argv", ["matrix", "python-3.12"])
    with pytest.raises(SystemExit) as skipped:
        matrix.main()
    assert skipped.value.code == 0
    assert "python-3.12: not run: no such program in PATH" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["matrix", "sglang-0.1"])
    with pytest.raises(SystemExit) as refused:
        matrix.main()
    assert refused.value.code == 1
    known = "release, vllm-VERSION, python-VERSION, sglang-0.5.23"
    assert f"sglang-0.1 is none of: {known}" in capsys.readouterr().err


def test_both_end_what_they_have_started_when_the_run_is_told_to_end(tmp_path: Path) -> None:
    """Also as a job in the background, where SIGINT is ignored."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    fake = tmp_path / "pytest.py"
    fake.write_text(
        "import signal, sys\n"
        "signal.alarm(60)\n"
        "said = open(sys.argv[1], 'w', buffering=1)\n"
        "try:\n    said.write('up\\n')\n    signal.pause()\n"
        "except KeyboardInterrupt:\n    said.write('down\\n')\n    sys.exit(2)\n"
    )
    run = (
        "import os, pathlib, sys\nfrom scripts.test import in_two\n"
        "sys.exit(in_two([sys.executable, *sys.argv[1:3]], dict(os.environ), pathlib.Path(sys.argv[3])))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", run, fake, pipe, tmp_path / "log"],
        cwd=ROOT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    try:
        with pipe.open() as said:
            assert [said.readline() for _ in range(2)] == ["up\n", "up\n"]
            process.terminate()
            assert said.read() == "down\ndown\n"
        assert process.wait(60) == 2
    finally:
        process.kill()
        process.wait()


# Where `make lint` has put it: the fixtures below look into a cache of their own.
CLANG_TIDY = sorted(
    Path(os.environ.get("MOONPOOL_CACHE", str(Path.home() / ".cache" / "moonpool"))).glob(
        "envs/clang-tidy-*/bin/clang-tidy"
    )
)


@pytest.mark.skipif(not CLANG_TIDY, reason="`make lint` installs clang-tidy")
def test_a_field_used_without_its_mutex_fails_lint_until_it_is_locked(
    scripts: ModuleType, progress: object, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    thread_safety = importlib.import_module("scripts.thread_safety")
    # Counts its runs, so that the test sees which units are looked at again.
    program = tmp_path / "clang-tidy"
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/runs\nexec {CLANG_TIDY[-1]} "$@"\n')
    program.chmod(0o755)
    base = tmp_path / "core" / "csrc" / "base"
    base.mkdir(parents=True)
    (base / "mutex.hpp").write_text((ROOT / "core" / "csrc" / "base" / "mutex.hpp").read_text())
    (base / "plain.cpp").write_text("int one() { return 1; }\n")
    (base / "counter.hpp").write_text('#include "base/mutex.hpp"\n')
    unit = base / "counter.cpp"
    text = (
        '#include "base/counter.hpp"\nusing namespace moonpool;\nMutex mutex;\nint count GUARDED_BY(mutex);\n'
    )

    def is_clean() -> bool:
        return bool(thread_safety.check(progress, scripts.Environment(tmp_path), program, tmp_path))

    def analysed() -> int:
        return (tmp_path / "runs").read_text().count("--quiet")

    unit.write_text(text + "void add() { ++count; }\n")
    assert not is_clean()
    assert "writing variable 'count' requires holding mutex 'mutex'" in capfd.readouterr().out
    unit.write_text(text + "void add() { MutexLock lock(mutex); ++count; }\n")
    assert is_clean()
    assert analysed() == 2  # plain.cpp reaches no mutex
    assert is_clean()
    assert analysed() == 2  # nothing changed
    (base / "counter.hpp").write_text('#include "base/mutex.hpp"\ninline int two() { return 2; }\n')
    assert is_clean()
    assert analysed() == 3
