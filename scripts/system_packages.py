"""Debian packages that a step needs: root gets them installed, others get the exact command to run."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shlex
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path

from scripts.progress import Progress


def _has_venv() -> bool:
    return importlib.util.find_spec("ensurepip") is not None and importlib.util.find_spec("venv") is not None


def _has_python_headers() -> bool:
    return Path(sysconfig.get_paths()["include"], "Python.h").exists()


def _has_compiler() -> bool:
    """CXX may be a command of several words, such as "ccache g++"."""
    words = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    return all(shutil.which(word) is not None for word in words if not word.startswith("-"))


def _has_libnuma() -> bool:
    try:
        ctypes.CDLL("libnuma.so.1")
    except OSError:
        return False
    return True


def _has_libfabric() -> bool:
    try:
        ctypes.CDLL("libfabric.so.1")
    except OSError:
        return False
    return True


def _has_openssl_headers() -> bool:
    return Path("/usr/include/openssl/sha.h").exists()


def _has_doctest() -> bool:
    return Path("/usr/include/doctest/doctest.h").exists()


def _has_cross_compiler(machine: str) -> Callable[[], bool]:
    return lambda: shutil.which(f"{machine}-linux-gnu-g++") is not None


BUSYBOX = ("/usr/bin/busybox", "/bin/busybox")
DEPMOD = "/usr/sbin/depmod"
# Debian package -> is what we need from it already there (from whatever source)?
CHECKS: dict[str, Callable[[], bool]] = {
    "python3-venv": _has_venv,
    "python3-dev": _has_python_headers,
    "g++": _has_compiler,
    "g++-x86-64-linux-gnu": _has_cross_compiler("x86_64"),
    "g++-aarch64-linux-gnu": _has_cross_compiler("aarch64"),
    "libnuma1": _has_libnuma,  # vLLM's CPU kernels link to it
    "libssl-dev": _has_openssl_headers,  # SGLang compiles its page hash when it starts
    "doctest-dev": _has_doctest,
    "iproute2": lambda: shutil.which("ip") is not None,  # test hosts are network namespaces
    "etcd-server": lambda: shutil.which("etcd") is not None,  # discovery, metadata by name
    "redis-server": lambda: shutil.which("redis-server") is not None,  # metadata by name
    "openssh-client": lambda: shutil.which("ssh-keygen") is not None,  # signs releases
    "libfabric1": _has_libfabric,  # efa, over its provider for TCP
    "chromium": lambda: shutil.which("chromium") is not None,  # looks at the proxy's page
    "ccache": lambda: shutil.which("ccache") is not None,
    "qemu-system-x86": lambda: shutil.which("qemu-system-x86_64") is not None,
    "busybox-static": lambda: any(Path(name).exists() for name in BUSYBOX),
    "kmod": lambda: Path(DEPMOD).exists(),
    "ibverbs-providers": lambda: any(Path("/usr/lib").glob("*/libibverbs/librxe-*.so")),
}
BUILD = ("python3-venv", "python3-dev", "g++")
ENGINE = ("libnuma1",)
SGLANG = (*ENGINE, "libssl-dev")
TEST = ("doctest-dev", "iproute2", "etcd-server", "redis-server", "openssh-client", "libfabric1")
VM = ("qemu-system-x86", "busybox-static", "kmod", "ibverbs-providers")
# Package -> what is so without it.
TEST_WISHES = {
    "chromium": "the tests that want it are skipped",
    "ccache": "each new checkout compiles the whole core",
    **dict.fromkeys(VM, "the tests in a virtual machine are skipped"),
}


def cross_compiler(machine: str) -> str:
    """The package with a g++ for that processor; on a host of that processor it is there already."""
    return f"g++-{machine.replace('_', '-')}-linux-gnu"


def require(progress: Progress, *packages: str) -> None:
    """Makes sure that these Debian packages' contents are there; ends with one clear sentence where it
    cannot.
    """
    missing = [package for package in packages if not CHECKS[package]()]
    if not missing:
        return
    install = ["apt-get", "install", "-y", "--no-install-recommends", *missing]
    if os.geteuid() != 0:
        raise progress.fail(
            f"these Debian packages are missing: {' '.join(missing)}. Install them, then run this again:\n\n"
            f"    sudo {' '.join(install)}\n"
        )
    if shutil.which("apt-get") is None:
        raise progress.fail(
            f"this needs what Debian calls {' '.join(missing)}, and there is no apt-get here to install it "
            "with. Install the equivalent packages of this system, then run this again."
        )
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    progress.run(f"missing system packages: {' '.join(missing)}; apt-get update", ["apt-get", "update"], env)
    progress.run(" ".join(install), install, env)
    importlib.invalidate_caches()
    still = [package for package in missing if not CHECKS[package]()]
    if still:
        raise progress.fail(f"apt-get installed {' '.join(still)}, but what it should bring was not found")


def wish(progress: Progress, *packages: str) -> None:
    """Installs what is missing of these TEST_WISHES where that can be done, and goes on without the rest."""
    missing = [package for package in packages if not CHECKS[package]()]
    if not missing or os.geteuid() != 0 or shutil.which("apt-get") is None:
        return
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for package in missing:
        progress.say(f"apt-get install {package}; without it {TEST_WISHES[package]}")
        install = ["apt-get", "install", "-y", "--no-install-recommends", package]
        code, _ = progress.attempt(install, env)
        if code:  # maybe the lists of packages are old
            progress.attempt(["apt-get", "update"], env)
            code, _ = progress.attempt(install, env)
        if code:
            progress.say(f"{package} is not to be had here: {TEST_WISHES[package]}")
