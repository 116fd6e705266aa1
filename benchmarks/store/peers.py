"""The virtual environment that holds the peers' Python packages: not ours, which needs none of them."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

PACKAGES = ("mooncake-transfer-engine-non-cuda==0.3.13.post1", "redis", "hiredis", "pymemcache")


def python(folder: Path) -> Path:
    """Its interpreter; makes the environment first where there is none. Raises CalledProcessError."""
    interpreter = folder.absolute() / "bin" / "python"
    if not interpreter.exists():
        print(f"making {folder} with {', '.join(PACKAGES)} (once)", file=sys.stderr)
        venv.create(folder, with_pip=True)
        try:
            subprocess.run([interpreter, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
        except subprocess.CalledProcessError:
            interpreter.unlink()  # so that the next run tries again
            raise
    return interpreter
