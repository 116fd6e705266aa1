"""The identity of a LoRA adapter: a digest over all bytes of its files. Its name identifies nothing: an
operator may give the same name to another checkpoint tomorrow, or to another adapter on another engine.

    python -m moonpool.connectors.adapters FOLDER...      prints the digest of each
"""

from __future__ import annotations

import sys
from pathlib import Path

from moonpool.connectors.files import File, Identity, Reading, digest_of_files
from moonpool.connectors.weights import WEIGHT_SUFFIXES
from moonpool.core.errors import ConfigError

CONFIG = "adapter_config.json"
READ_WAIT_S = 60.0


def adapter_files(folder: Path) -> tuple[File, ...]:
    """The files of an adapter that an engine reads: its settings and the weights beside them, without
    subfolders (checkpoints of a training). Raises ConfigError when there is no adapter."""
    try:
        names = sorted(
            path.name for path in folder.iterdir() if path.suffix in WEIGHT_SUFFIXES or path.name == CONFIG
        )
        files = tuple(File(name, folder / name, Identity.of(folder / name)) for name in names)
    except OSError as error:
        raise _untold(folder, f"{error.strerror or error}; download it and give the path") from error
    if len(files) < 2 or CONFIG not in names:
        raise _untold(folder, f"a folder with {CONFIG} and weights beside it is needed")
    return files


def unchanged(files: tuple[File, ...]) -> bool:
    """Whether an adapter's files are still these."""
    try:
        return adapter_files(files[0].path.parent) == files
    except ConfigError:
        return False


def adapter_digest(folder: Path) -> str:
    """Hexadecimal SHA-256 over all bytes of the adapter in ``folder``. Waits for READ_WAIT_S at most. Raises
    ConfigError."""
    files = adapter_files(folder)
    reading = Reading(files)
    if not reading.over.wait(READ_WAIT_S):
        raise _untold(folder, f"it was not read within {READ_WAIT_S:.0f} s")
    if reading.trouble:
        raise _untold(folder, reading.trouble)
    return digest_of_files(files, reading.digests)


def _untold(folder: Path, why: str) -> ConfigError:
    return ConfigError(
        f"cannot tell which bytes the adapter {str(folder)!r} is made of: {why}",
        operation="fingerprint",
        key="adapter",
    )


def main() -> None:
    """Prints the digest of each folder that the command line names. Exits with the reason for one that is no
    adapter."""
    folders = sys.argv[1:]
    if not folders or folders[0].startswith("-"):
        sys.exit(__doc__)
    try:
        for folder in folders:
            print(adapter_digest(Path(folder)), folder)
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
