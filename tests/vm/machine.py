"""A virtual machine whose root is this host's, read-only with a layer of memory above it: what was built here
runs there at the same paths. Its kernel has what this host's may lack: soft RoCE, NUMA nodes, NVMe over
fabrics, CXL. QEMU emulates the processor, about 20 times slower than the real one.
"""

from __future__ import annotations

import ctypes
import mmap
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

GUEST = Path(__file__).with_name("guest.sh")
TSC_S = 0.06
BEGIN = """
export PATH={python}:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root TERM=dumb
mount -t tmpfs tmpfs /dev/shm; mount -t devpts devpts /dev/pts; mount -t tmpfs tmpfs /run
mkdir -p /usr/lib/modules; mount -t tmpfs tmpfs /usr/lib/modules; mkdir /usr/lib/modules/{release}
mount --bind {modules} /usr/lib/modules/{release}
hostname guest; ip link set lo up
cd {folder}
( . {guest}; . /mnt/command.sh ) < /dev/null > /mnt/output 2>&1
echo $? > /mnt/code
sync; busybox poweroff -f
"""


@dataclass(frozen=True)
class Ended:
    """seconds: from the start of QEMU."""

    code: int
    output: str
    seconds: float


class NeverEnded(Exception):
    """The guest did not end its command in time, or its kernel panicked."""


def run(
    kernel: Path,
    command: str,
    job: Path,
    *,
    timeout_s: float,
    memory_mib: int = 768,
    pmem_mib: int = 0,
    far_mib: int = 0,
    line: tuple[Path, Path] | None = None,
) -> Ended:
    """Runs a command of bash there, as root; functions of guest.sh are known to it.

    kernel: a folder made by scripts/guest_kernel.py. job: an empty folder, which the guest sees as /mnt and
    may write to. pmem_mib: memory that the guest takes for persistent, beside the other. far_mib: memory of
    a NUMA node without CPUs, node 1, beside the other. line: Unix sockets, this end's and the other's, of a
    line to another machine; eth0 is the guest's network card for it. Raises NeverEnded.
    """
    [modules] = (kernel / "lib" / "modules").iterdir()
    python = Path(sys.executable).parent
    words = {
        "python": python,
        "release": modules.name,
        "modules": modules,
        "folder": Path.cwd(),
        "guest": GUEST,
    }
    quoted = {name: shlex.quote(str(word)) for name, word in words.items()}
    (job / "begin.sh").write_text(BEGIN.format(**quoted))
    (job / "command.sh").write_text(command + "\n")
    arguments = [
        "quiet",
        "console=ttyS0",
        "panic=-1",
        # An emulated processor shows the host's counter; measured on a busy host, a guest's clock runs fast.
        f"tsc_early_khz={tsc_khz()}",
        "tsc=reliable",
        "no_timer_check",
        "random.trust_cpu=on",
        "mitigations=off",
        "audit=0",
        "apparmor=0",
    ]
    if pmem_mib:
        arguments.append(f"memmap={pmem_mib}M!{memory_mib}M")
    near_mib = memory_mib + pmem_mib
    numa = []
    for node, mib in enumerate([near_mib, far_mib] if far_mib else []):
        numa += ["-object", f"memory-backend-ram,id=node{node},size={mib}M"]
        numa += ["-numa", f"node,nodeid={node},memdev=node{node}{',cpus=0-1' if node == 0 else ''}"]
    qemu = [
        "qemu-system-x86_64",
        *("-accel", "tcg,thread=multi,tb-size=256", "-machine", "q35", "-cpu", "max"),
        *("-smp", "2", "-m", f"{near_mib + far_mib}M", *numa),
        *("-nodefaults", "-display", "none", "-serial", "stdio", "-no-reboot"),
        *("-kernel", str(kernel / "vmlinux"), "-initrd", str(kernel / "initramfs")),
        *("-append", " ".join(arguments)),
        *("-object", "rng-random,filename=/dev/urandom,id=random", "-device", "virtio-rng-pci,rng=random"),
    ]
    for tag, path, mode in (("host", Path("/"), ",readonly=on"), ("job", job, "")):
        qemu += ["-fsdev", f"local,id={tag},path={path},security_model=none,multidevs=remap{mode}"]
        qemu += ["-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}"]
    if line:
        ends = ",".join(
            f"{end}.type=unix,{end}.path={path}" for end, path in zip(("local", "remote"), line, strict=True)
        )
        qemu += ["-netdev", f"dgram,id=line,{ends}", "-device", "virtio-net-pci,netdev=line"]
    began_s = time.monotonic()
    try:
        ended = subprocess.run(
            qemu, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        console = ended.stdout + ended.stderr
    except subprocess.TimeoutExpired as error:
        console = f"no end within {timeout_s:g} s\n{(error.stdout or b'').decode(errors='replace')}"
    seconds = time.monotonic() - began_s
    output = (job / "output").read_text(errors="replace") if (job / "output").exists() else ""
    if not (job / "code").exists():
        raise NeverEnded(f"{console[-2000:]}\n{output[-4000:]}")
    return Ended(int((job / "code").read_text()), output, seconds)


def why_not(kernel: Path | None) -> str:
    """Why no machine can be started here; "" where it can."""
    if kernel is None:
        return "needs the kernel of a virtual machine in GUEST_KERNEL; `make test` brings one"
    if shutil.which("qemu-system-x86_64") is None:
        return "needs qemu-system-x86_64"
    return ""


def tsc_khz() -> int:
    """The rate of this processor's time stamp counter, measured."""
    code = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    code.write(bytes.fromhex("0f31 48c1e220 4809d0 c3"))  # rdtsc; shl rdx, 32; or rax, rdx; ret
    address = ctypes.addressof(ctypes.c_char.from_buffer(code))
    counter = ctypes.CFUNCTYPE(ctypes.c_uint64)(address)

    def measured() -> tuple[float, float]:
        """(how far apart the two clocks were read, the rate)."""
        before_s, first, between_s = time.perf_counter(), counter(), time.perf_counter()
        time.sleep(TSC_S)
        then_s, last, after_s = time.perf_counter(), counter(), time.perf_counter()
        passed_s = (then_s + after_s - before_s - between_s) / 2
        return between_s - before_s + after_s - then_s, (last - first) / passed_s

    return round(min(measured() for _ in range(5))[1] / 1000)
