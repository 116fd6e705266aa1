"""The software libibverbs (tests/native/transport/soft_verbs) for tests in Python: NICs named soft0, soft1
and so on that read and write memory of all processes with the same MOONPOOL_SOFT_VERBS_FILE. Their script is
MOONPOOL_SOFT_VERBS."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "tests" / "native" / "transport" / "soft_verbs"
COMPILER = shutil.which(os.environ.get("CXX", "g++").split()[-1])


@functools.cache
def _compiled() -> bytes:
    """Some seconds, once a run."""
    assert COMPILER is not None
    flags = ["-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", f"-I{ROOT / 'core' / 'csrc'}"]
    with tempfile.TemporaryDirectory(prefix="moonpool-") as folder:
        library = Path(folder) / "libsoftverbs.so"
        sources = sorted(SOURCES.glob("*.cpp"))
        subprocess.run([COMPILER, *flags, "-iquote", ROOT, *sources, "-o", library], check=True, timeout=300)
        return library.read_bytes()


def compile_library(folder: Path) -> Path:
    """A file of its own: to the loader each is another library, with a state of its own."""
    library = folder / "libsoftverbs.so"
    library.write_bytes(_compiled())
    return library
