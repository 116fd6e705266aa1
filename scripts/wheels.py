"""`make wheel`: the source distribution, and wheels for other Linux distributions, into dist/.

For each interpreter and each processor one wheel, tagged manylinux, which auditwheel confirms, and beside it
its bill of materials (scripts/sbom.py). The wheel of this processor is installed into a new environment
outside of this checkout, where a store puts and gets. One of the other processor is not run.

An interpreter is only asked for its headers; those of its version serve both processors.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from scripts import cross_compiler, environments, system_packages
from scripts.environments import ROOT, Environment
from scripts.progress import Progress

AUDITWHEEL = "auditwheel==6.8.2"
TRIAL = """
import ctypes, pathlib, moonpool, moonpool.capi
store = moonpool.Store(embedded="16MiB")
store.put("key", b"value")
assert bytes(store.get("key")) == b"value"
libraries = pathlib.Path(moonpool.capi.__file__).parent
assert ctypes.CDLL(str(libraries / "lib" / "libtransfer_engine.so")).createTransferEngine
assert ctypes.CDLL(str(libraries / "nixl" / "libplugin_MOONPOOL.so")).nixl_plugin_init
"""


@dataclass(frozen=True)
class Interpreter:
    """A CPython that wheels are built for, with an environment of its own that builds them."""

    version: str  # such as 312
    pybind11: str
    build: Environment


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.wheels", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--python", action="append", metavar="PATH", help="again for each; default: this one")
    parser.add_argument(
        "--machine", action="append", choices=cross_compiler.MACHINES, help="default: each of them"
    )
    parser.add_argument("--outdir", type=Path, default=ROOT / "dist", metavar="FOLDER")
    words = parser.parse_args()
    progress = Progress(environments.cache() / "logs" / "wheel.log")
    machines = words.machine or list(cross_compiler.MACHINES)
    system_packages.require(progress, *system_packages.BUILD, *map(system_packages.cross_compiler, machines))
    tools = environments.tools(progress)
    sdist = [tools.python, "-m", "build", "--no-isolation", "--sdist", "--outdir", words.outdir, ROOT]
    progress.run("building the sdist", sdist, environments.clean_env())
    zig = environments.programs(progress, "zig", cross_compiler.ZIG)
    auditwheel = environments.programs(progress, "auditwheel", AUDITWHEEL)
    for path in words.python or [sys.executable]:
        interpreter = _interpreter(progress, path)
        for machine in machines:
            compiler = cross_compiler.write(progress, zig, machine)
            wheel = build(progress, interpreter, machine, compiler, words.outdir)
            audit(progress, auditwheel, wheel)
            compiled_in = {"pybind11": interpreter.pybind11, **cross_compiler.compiled_in(machine)}
            pairs = [f"{name}=={version}" for name, version in compiled_in.items()]
            command = [tools.python, "-m", "scripts.sbom", wheel, *pairs]
            progress.run(f"the bill of materials of {wheel.name}", command, cwd=ROOT)
            if machine == platform.machine():
                try_out(progress, path, wheel)
    for path in sorted(words.outdir.iterdir()):
        progress.say(f"{path.name}  {path.stat().st_size / 1e6:.2f} MB")


def tag(machine: str) -> str:
    return f"manylinux_{cross_compiler.GLIBC.replace('.', '_')}_{machine}"


def build(progress: Progress, interpreter: Interpreter, machine: str, compiler: Path, outdir: Path) -> Path:
    """The wheel of this checkout; objects of the same compiler and the same Python are compiled once."""
    with tempfile.TemporaryDirectory() as folder:
        # Folders of its own, so that a wheel has no file that the checkout has no longer.
        setup = Path(folder, "setup.cfg")
        setup.write_text(
            f"[build]\nbuild_base = {folder}\n[egg_info]\negg_base = {folder}\n"
            f"[bdist_wheel]\nplat_name = {tag(machine)}\n"
        )
        env = environments.clean_env() | {
            "CC": str(compiler),
            "CXX": str(compiler),
            "DIST_EXTRA_CONFIG": str(setup),
            "SETUPTOOLS_EXT_SUFFIX": f".cpython-{interpreter.version}-{machine}-linux-gnu.so",
            "ZIG_GLOBAL_CACHE_DIR": str(environments.cache() / "zig"),
        }
        pip = [interpreter.build.python, "-m", "pip", "--no-input", "--disable-pip-version-check", "wheel"]
        what = f"building the wheel for CPython {interpreter.version} on {machine} (some minutes)"
        command = [*pip, "--no-deps", "--no-build-isolation", "--wheel-dir", folder, ROOT]
        progress.run(what, command, env)
        (made,) = Path(folder).glob("*.whl")
        outdir.mkdir(parents=True, exist_ok=True)
        return made.replace(outdir / made.name)


def audit(progress: Progress, auditwheel: Environment, wheel: Path) -> None:
    """Ends with an error unless the wheel keeps what its tag says."""
    code, told = progress.attempt([auditwheel.program("auditwheel"), "show", wheel])
    said = wheel.stem.rpartition("-")[2]
    if code or f'"{said}"' not in told:
        raise progress.fail(f"{wheel.name} needs more than its tag {said} says:\n\n{told}")
    progress.say(f"auditwheel: {wheel.name} is consistent with {said}")


def try_out(progress: Progress, python: str, wheel: Path) -> None:
    """Installs it with the tested versions of its requirements, and runs TRIAL away from the checkout."""
    with tempfile.TemporaryDirectory() as folder:
        env = environments.clean_env()
        progress.run("a new environment for the wheel", [python, "-m", "venv", folder], env)
        own = Path(folder, "bin", "python")
        pip = [own, "-m", "pip", "--no-input", "--disable-pip-version-check", "install"]
        command = [*pip, "--constraint", environments.CONSTRAINTS, wheel]
        progress.run("installing the wheel with its requirements", command, env)
        progress.run("a put and a get with it", [own, "-I", "-c", TRIAL], env, Path(folder))


def _interpreter(progress: Progress, path: str) -> Interpreter:
    ask = "import json, sys; print(json.dumps([sys.implementation.name, *sys.version_info[:2], sys.prefix]))"
    try:
        done = subprocess.run([path, "-c", ask], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise progress.fail(f"--python {path} is no interpreter that runs: {error}") from None
    name, major, minor, prefix = json.loads(done.stdout)
    if name != "cpython":
        raise progress.fail(f"--python {path} is {name}; wheels are built for CPython")
    requirements = [*environments.build_requirements(), "wheel"]
    identity = hashlib.sha256(repr([prefix, major, minor, requirements]).encode()).hexdigest()[:12]
    made = Environment(environments.cache() / "envs" / f"wheel-{major}.{minor}-{identity}")
    complete = made.path / "complete"
    if not complete.exists():
        env = environments.clean_env()
        progress.run(
            f"an environment that builds for {path}", [path, "-m", "venv", "--clear", made.path], env
        )
        pip = [made.python, "-m", "pip", "--no-input", "--disable-pip-version-check", "install"]
        progress.run("its packages", [*pip, *requirements], env)
        complete.touch()
    (pybind11,) = made.path.glob("lib/python*/site-packages/pybind11-*.dist-info")
    return Interpreter(f"{major}{minor}", pybind11.name.split("-")[1].removesuffix(".dist"), made)


if __name__ == "__main__":
    main()
