"""The virtual environment that holds the peers' Python packages: not ours, which needs none of them."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

# NIXL's dependencies would bring torch and two CUDA builds; on a CPU it needs neither.
INSTALLS = (
    ("mooncake-transfer-engine-non-cuda==0.3.13.post1", "redis", "hiredis", "pymemcache", "numpy"),
    ("--no-deps", "nixl==1.5.1", "nixl-cu12==1.5.1"),
)
NOTE = "moonpool-peers.txt"  # what this module has put into the environment


def python(folder: Path) -> Path:
    """Its interpreter; makes or completes the environment first. Raises CalledProcessError."""
    interpreter, note = folder.absolute() / "bin" / "python", folder / NOTE
    wanted = "\n".join(" ".join(words) for words in INSTALLS)
    if not note.exists() or note.read_text() != wanted:
        print(f"filling {folder} with {' '.join(wanted.split())} (once)", file=sys.stderr)
        if not interpreter.exists():
            venv.create(folder, with_pip=True)
        for words in INSTALLS:
            subprocess.run([interpreter, "-m", "pip", "install", "--quiet", *words], check=True)
        note.write_text(wanted)  # last: an interrupted run tries again
    return interpreter
