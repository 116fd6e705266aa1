"""A process that has no use for a card opens no CUDA driver, where there is one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import moonpool._native

CODE = """
import moonpool
store = moonpool.Store(embedded="16MiB")
store.put("k", b"v" * 5000)
assert bytes(store.get("k")) == b"v" * 5000
with moonpool.TransferEngine("a") as engine:
    engine.allocate(1 << 20)
    engine.register(bytearray(8192))
    engine.open(engine.addresses[0])
print("opened" if "libcuda" in open("/proc/self/maps").read() else "not opened")
"""


def test_importing_and_using_moonpool_opens_no_cuda_driver(tmp_path: Path) -> None:
    """The driver here is one in name only: a copy of the extension module, which can be opened."""
    shutil.copy(moonpool._native.__file__, tmp_path / "libcuda.so.1")
    env = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    command = "import ctypes; ctypes.CDLL('libcuda.so.1'); print('it could be')"
    for code, expected in ((command, "it could be"), (CODE, "not opened")):
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False, timeout=60
        )
        assert done.stdout.strip() == expected, done.stderr
