"""A C++ compiler for wheels that run on other Linux distributions than the one that builds them.

Zig's clang brings glibc's headers and symbols of a version that is named, for both processors; g++ of this
host, or Debian's cross compiler, brings libstdc++. That is linked statically and none of its names are
exported, so that a wheel needs nothing but glibc and libgcc_s, which unwinds exceptions for all libraries of
a process. It is not Zig's libc++: NIXL hands std::string and std::vector to its plugins (core/csrc/nixl).
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from scripts.environments import ROOT, Environment
from scripts.progress import Progress

ZIG = "ziglang==0.17.1"
# libstdc++.a of Debian 12 calls functions of this version. Ubuntu 22.04 has 2.35, RHEL 9 has 2.34.
GLIBC = "2.34"
MACHINES = ("x86_64", "aarch64")
# Names of the C++ library; ours that are exported begin with a letter.
EXPORTS = "{ local: _*; atomic_*; };\n"
# `--version` names the folder of objects in setup.py: other flags, other objects.
WRAPPER = """\
#!/bin/sh
case " $* " in
    *" --version "*) exec cat "$0" ;;
    *" -c "*) exec {zig} c++ {target} -nostdinc++ {includes} -w -fno-sanitize=undefined "$@" ;;
    *) exec {zig} c++ {target} -nostdlib++ -s -Wl,--version-script={exports} "$@" {libraries} ;;
esac
"""


def write(progress: Progress, zig: Environment, machine: str) -> Path:
    """The compiler for ``machine``, a program in build/wheels."""
    gxx = f"{machine}-linux-gnu-g++"
    folder = ROOT / "build" / "wheels" / machine
    folder.mkdir(parents=True, exist_ok=True)
    (program,) = zig.packages.glob("ziglang/zig")
    target = f"-target {machine}-linux-gnu.{GLIBC}"
    (folder / "exports").write_text(EXPORTS)
    random = folder / "arc4random.o"
    compile_random = [program, "cc", *target.split(), "-O2", "-fPIC", "-fno-sanitize=undefined"]
    compile_random += ["-c", ROOT / "scripts" / "arc4random.c", "-o", random]
    progress.run(f"a compiler for {machine} with glibc {GLIBC}", compile_random)
    libraries = [_told(gxx, f"-print-file-name={name}").strip() for name in ("libstdc++.a", "libgcc_s.so.1")]
    # Before glibc's, whose headers libstdc++ includes "next".
    searched = _told(gxx, "-E", "-x", "c++", "-v", "/dev/null").partition("#include <...>")[2]
    includes = [f"-I{path}" for path in re.findall(r"^ (/\S+)$", searched, re.M) if "/c++/" in path]
    written = folder / "c++"
    written.write_text(
        WRAPPER.format(
            zig=program,
            target=target,
            includes=" ".join(includes),
            exports=folder / "exports",
            libraries=" ".join([str(random), *libraries]),
        )
    )
    written.chmod(0o755)
    return written


def compiled_in(machine: str) -> dict[str, str]:
    """Name -> version of each library of others that a link puts into our binaries."""
    gcc = _told(f"{machine}-linux-gnu-g++", "-dumpfullversion").strip()
    return {"libstdc++": gcc, "zig-compiler-rt": ZIG.partition("==")[2]}


def _told(*command: str) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True)
    return done.stdout
