"""The kernel of the virtual machine that tests/vm starts: Debian's, unpacked into the cache, never installed.

It brings what a host in CI has not: soft RoCE (rdma_rxe), NVMe over fabrics, CXL and DAX devices, NUMA nodes.
A folder of it holds:

    vmlinux            the kernel, uncompressed: an emulated processor would need seconds to unpack it
    initramfs          busybox and the modules that mount the host's files (9p, overlay)
    lib/modules/...    the other modules; the guest finds them by 9p
"""

from __future__ import annotations

import hashlib
import lzma
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from scripts import environments
from scripts.progress import Progress
from scripts.system_packages import BUSYBOX, CHECKS, DEPMOD, VM

# Its flavour for clouds has neither rdma_rxe nor 9p.
KERNEL = "linux-image-amd64"
# Works with the libibverbs of the same Debian only, and with its Python; PyPI has none that does.
PYVERBS = "python3-pyverbs"
DRIVERS = ("infiniband", "nvme", "cxl", "dax", "nvdimm", "acpi", "virtio", "block", "net", "ptp", "pps")
FOLDERS = ("fs", "net", "lib", "block", "crypto", "arch", *(f"drivers/{name}" for name in DRIVERS))
MOUNTING = ("virtio_pci", "9pnet_virtio", "9p", "overlay")

INIT = """#!/bin/busybox sh
B=/bin/busybox A=/above R=/root
$B mount -t proc proc /proc; $B mount -t sysfs sys /sys; $B mount -t devtmpfs dev /dev
for module in MODULES; do $B insmod /lib/$module || echo "insmod $module failed"; done
options=trans=virtio,version=9p2000.L,msize=512000
$B mount -t 9p -o ro,$options,cache=loose host /below
$B mount -t tmpfs -o size=80% tmpfs $A; $B mkdir $A/upper $A/work
$B mount -t overlay -o lowerdir=/below,upperdir=$A/upper,workdir=$A/work overlay $R
for folder in proc sys dev; do $B mount --move /$folder $R/$folder; done
$B mkdir -p $R/mnt $R/dev/shm $R/dev/pts
$B mount -t 9p -o rw,$options,cache=none job $R/mnt
exec $B switch_root $R /bin/bash /mnt/begin.sh
"""


def prepare(progress: Progress) -> Path | None:
    """The folder, made if it is missing; None, after a sentence that says why, where it cannot be had."""
    if missing := [package for package in VM if not CHECKS[package]()]:
        progress.say(f"no virtual machine: it needs Debian's {' '.join(missing)}")
        return None
    if shutil.which("apt-cache") is None:
        progress.say("no virtual machine: its kernel is a Debian package, and there is no apt-get here")
        return None
    found = subprocess.run(["apt-cache", "depends", KERNEL], capture_output=True, text=True, check=False)
    package = re.search(r"Depends: (\S+)", found.stdout)
    if package is None:
        progress.say(f"no virtual machine: apt-cache knows no {KERNEL} ({found.stderr.strip()})")
        return None
    made_by = hashlib.sha256(repr((INIT, FOLDERS, MOUNTING)).encode()).hexdigest()[:8]
    folder = environments.cache() / "vm" / f"{package[1]}-{made_by}"
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        progress.say(f"{package[1]}, for the virtual machine of tests/vm: about 70 MB")
        code, output = progress.attempt(["apt-get", "download", package[1]], cwd=Path(scratch))
        if code:
            progress.say(f"no virtual machine: apt-get could not download it: {output.splitlines()[-1:]}")
            return None
        made = Path(scratch) / "made"
        try:
            unpack(next(Path(scratch).glob("*.deb")), made)
        except (OSError, ValueError, StopIteration, subprocess.CalledProcessError) as error:
            progress.say(f"no virtual machine: {package[1]} is not as expected: {error}")
            return None
        os.rename(made, folder)
    return folder


def prepare_pyverbs(progress: Progress) -> Path | None:
    """The folder of Python packages that has Debian's pyverbs, made if it is missing; None, after a sentence
    that says why, where it cannot be had."""
    found = subprocess.run(
        ["apt-cache", "show", "--no-all-versions", PYVERBS], capture_output=True, text=True, check=False
    )
    version = re.search(r"^Version: (\S+)", found.stdout, re.MULTILINE)
    if version is None:
        progress.say(f"no pyverbs in the virtual machine: apt-cache knows no {PYVERBS}")
        return None
    folder = environments.cache() / "vm" / f"{PYVERBS}-{version[1]}"
    packages = folder / "usr" / "lib" / "python3" / "dist-packages"
    if folder.exists():
        return packages
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        code, output = progress.attempt(["apt-get", "download", PYVERBS], cwd=Path(scratch))
        if code:
            progress.say(f"no pyverbs: apt-get could not download it: {output.splitlines()[-1:]}")
            return None
        made = Path(scratch) / "made"
        [package] = Path(scratch).glob("*.deb")
        subprocess.run(["dpkg-deb", "--extract", package, made], check=True, timeout=60)
        os.rename(made, folder)
    return packages


def unpack(package: Path, folder: Path) -> None:
    """Raises ValueError, OSError or CalledProcessError for a package of another form."""
    folder.mkdir()
    wanted = ["./boot/vmlinuz*", "./lib/modules/*/modules.*"]
    wanted += [f"./lib/modules/*/kernel/{name}/*" for name in FOLDERS]
    packed = subprocess.Popen(["dpkg-deb", "--fsys-tarfile", package], stdout=subprocess.PIPE)
    subprocess.run(
        ["tar", "-x", "-C", folder, "--wildcards", *wanted], stdin=packed.stdout, check=True, timeout=300
    )
    packed.wait()
    [modules] = (folder / "lib" / "modules").iterdir()
    [image] = (folder / "boot").glob("vmlinuz*")
    (folder / "vmlinux").write_bytes(uncompressed(image.read_bytes()))
    shutil.rmtree(folder / "boot")
    subprocess.run([DEPMOD, "-b", folder, modules.name], check=True, timeout=300)
    (folder / "initramfs").write_bytes(initramfs(modules))


def uncompressed(image: bytes) -> bytes:
    """The ELF file in a bzImage."""
    at = -1
    while (at := image.find(b"\xfd7zXZ\0", at + 1)) >= 0:
        try:
            found = lzma.LZMADecompressor().decompress(image[at:])
        except lzma.LZMAError:
            continue
        if found.startswith(b"\x7fELF"):
            return found
    raise ValueError("no kernel packed by xz is in its image")


def initramfs(modules: Path) -> bytes:
    """As the kernel unpacks it (cpio, the form "newc")."""
    needed = load_order(modules, MOUNTING)
    busybox = next(Path(name) for name in BUSYBOX if Path(name).exists())
    archive = Archive()
    for folder in ("bin", "dev", "proc", "sys", "lib", "below", "above", "root"):
        archive.add(folder, mode=0o40755)
    archive.add("dev/console", mode=0o20600, device=(5, 1))
    archive.add("bin/busybox", busybox.read_bytes(), 0o100755)
    names = []
    for path in needed:
        data = path.read_bytes()
        names.append(path.name.removesuffix(".xz"))
        archive.add(f"lib/{names[-1]}", lzma.decompress(data) if path.suffix == ".xz" else data)
    archive.add("init", INIT.replace("MODULES", " ".join(names)).encode(), 0o100755)
    return archive.end()


def load_order(modules: Path, wanted: tuple[str, ...]) -> list[Path]:
    """The modules' files, each after those that it needs. What is built into the kernel is left out."""
    dependencies: dict[str, list[str]] = {}
    paths: dict[str, str] = {}

    def name_of(path: str) -> str:
        return Path(path).name.partition(".")[0].replace("-", "_")

    for line in (modules / "modules.dep").read_text().splitlines():
        path, _, needs = line.partition(":")
        paths[name_of(path)] = path
        dependencies[name_of(path)] = [name_of(need) for need in needs.split()]
    order: list[str] = []

    def add(name: str) -> None:
        for need in dependencies[name]:
            add(need)
        if name not in order:
            order.append(name)

    for name in wanted:
        if name in dependencies:
            add(name)
    return [modules / paths[name] for name in order]


class Archive:
    def __init__(self) -> None:
        self._files: list[bytes] = []

    def add(
        self, name: str, data: bytes = b"", mode: int = 0o100644, device: tuple[int, int] = (0, 0)
    ) -> None:
        number = len(self._files) + 1
        numbers = (number, mode, 0, 0, 1, 0, len(data), 0, 0, *device, len(name) + 1, 0)
        head = b"070701" + b"".join(b"%08X" % value for value in numbers) + name.encode() + b"\0"
        self._files.append(padded(head) + padded(data))

    def end(self) -> bytes:
        self.add("TRAILER!!!", mode=0)
        return b"".join(self._files)


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 4)
