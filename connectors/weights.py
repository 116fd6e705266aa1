"""Which weights a folder holds, told cheaply: a digest over each weight file's name, size, header and 64
samples.

Two models with equal configs and different weights must never share KV, and reading hundreds of gigabytes at
every start is no option. A fine-tune changes almost every page of almost every tensor, so 64 pages of 4 KiB
per file tell two of them apart; what this cannot see is a file edited in a few places by hand.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import BinaryIO

from moonpool.core.errors import ConfigError

WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz"})
SAMPLES = 64
SAMPLE_BYTES = 4096
HEADER_BYTES_MAX = 16 << 20


def weights_digest(path: Path) -> str:
    """Hexadecimal SHA-256 that names the weights in the folder, or in the one file, ``path``.

    Costs one header and at most 256 KiB of reading per file. Raises ConfigError when there is no weight file.
    """
    files = [path] if path.is_file() else weight_files(path)
    if not files:
        raise ConfigError(
            f"{path} holds no weight file ({', '.join(sorted(WEIGHT_SUFFIXES))}), so its weights cannot be "
            f"told from others",
            operation="fingerprint",
            key="revision",
        )
    digest = hashlib.sha256()
    for file in files:
        name = (file.name if file == path else str(file.relative_to(path))).encode()
        size = file.stat().st_size
        digest.update(len(name).to_bytes(4, "little") + name + size.to_bytes(8, "little"))
        with open(file, "rb") as stream:
            _add_file(digest, stream, size, file.suffix == ".safetensors")
    return digest.hexdigest()


def weight_files(folder: Path) -> list[Path]:
    """The weight files below ``folder``, sorted by path; hidden folders are left out."""
    return sorted(
        Path(parent) / name
        for parent, folders, names in os.walk(folder, followlinks=True)
        if not any(part.startswith(".") for part in Path(parent).relative_to(folder).parts)
        for name in names
        if Path(name).suffix in WEIGHT_SUFFIXES
    )


def _add_file(digest: hashlib._Hash, stream: BinaryIO, size: int, has_length: bool) -> None:
    header_bytes = SAMPLE_BYTES
    if has_length and size >= 8:  # a safetensors file begins with the length of its JSON header
        header_bytes = 8 + int.from_bytes(stream.read(8), "little")
        stream.seek(0)
    digest.update(stream.read(min(header_bytes, size, HEADER_BYTES_MAX)))
    last = max(size - SAMPLE_BYTES, 0)
    for sample in range(SAMPLES):
        stream.seek(last * sample // (SAMPLES - 1))
        digest.update(stream.read(SAMPLE_BYTES))
        if last == 0:
            break
