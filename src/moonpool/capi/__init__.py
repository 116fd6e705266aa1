"""Where the C library lies that programs of C and C++ link instead of the original `transfer_engine`:
``python -m moonpool.capi`` prints the folder with ``lib/libtransfer_engine.so`` and
``include/transfer_engine_c.h``. docs/tensorrt_llm.md says who needs it."""

from __future__ import annotations

from pathlib import Path


def root() -> Path:
    """The folder that holds ``lib`` and ``include``, as CMake's MOONCAKE_ROOT."""
    return Path(__file__).resolve().parent
