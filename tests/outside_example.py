"""The transport of examples/transport_outside, as its users build it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from moonpool.capi import root

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "transport_outside"
COMPILER = shutil.which(os.environ.get("CC", "cc").split()[-1])


def build(folder: Path) -> Path:
    """libunix_socket.so in that folder, made by the example's own Makefile. Raises CalledProcessError."""
    for name in ("Makefile", "unix_socket.c"):
        shutil.copy(EXAMPLE / name, folder)
    command = ["make", f"HEADERS={root() / 'include'}", f"CC={COMPILER}", "CFLAGS=-O2 -Wall -Wextra -Werror"]
    subprocess.run(command, cwd=folder, check=True, timeout=100)
    return folder / "libunix_socket.so"
