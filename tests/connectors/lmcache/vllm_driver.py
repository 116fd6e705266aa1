"""The driver of a real vLLM (tests/connectors/vllm/engine_driver.py) where LMCache is, too."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import llvmlite.binding.ffi  # noqa: F401

# vLLM 0.32 looks into whatever modules hold, and stops at an object here that has a __dict__ which is none;
# LMCache imports it earlier than vLLM does by itself.
del sys.modules["llvmlite.binding.ffi"]

if __name__ == "__main__":
    runpy.run_path(
        str(Path(__file__).resolve().parents[1] / "vllm" / "engine_driver.py"), run_name="__main__"
    )
