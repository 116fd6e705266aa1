"""`python -m scripts.sign` signs what a release consists of (--key KEY), or says whether a folder has that
and nothing else (--check SIGNERS).

    dist/*  --SHA-256-->  SHA256SUMS  --ssh-keygen -Y sign-->  SHA256SUMS.sig

KEY is a private key of OpenSSH, as git signs tags with; SIGNERS is an allowed_signers file of ssh-keygen(1).
The sums are those of sha256sum(1), so both can be checked without this script.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
from pathlib import Path

NAMESPACE = "moonpool-release"  # a signature made for another purpose is none of a release
SUMS, SIGNATURE = "SHA256SUMS", "SHA256SUMS.sig"


class Refused(Exception):
    """One sentence: why a folder is not what the signer released, or why it cannot be signed."""


def sign(folder: Path, key: Path) -> int:
    """Writes both files into the folder. -> how many files they name. Raises Refused."""
    files = _files(folder)
    if not files:
        raise Refused(f"{folder} has no files to sign; `make wheel` makes them")
    sums = folder / SUMS
    sums.write_text("".join(f"{_sha256(file)}  {file.name}\n" for file in files))
    (folder / SIGNATURE).unlink(missing_ok=True)  # ssh-keygen asks before it writes over one
    _run(["sign", "-f", str(key), "-n", NAMESPACE, str(sums)], f"{key} does not sign")
    return len(files)


def check(folder: Path, signers: Path) -> tuple[str, int]:
    """-> the signer's name in the file, and how many files it signed. Raises Refused."""
    sums, signature = folder / SUMS, folder / SIGNATURE
    for needed in (sums, signature, signers):
        if not needed.is_file():
            raise Refused(f"{needed} is missing")
    found = _run(
        ["find-principals", "-s", str(signature), "-f", str(signers)],
        f"{signature} is not of a key in {signers}",
    )
    name = found.splitlines()[0]
    _run(
        ["verify", "-f", str(signers), "-I", name, "-n", NAMESPACE, "-s", str(signature)],
        f"{signature} is no signature of {sums}",
        given=sums.read_bytes(),
    )
    named: dict[str, str] = {}
    for line in sums.read_text().splitlines():
        digest, _, file_name = line.partition("  ")
        named[file_name] = digest
    files = {file.name: file for file in _files(folder)}
    if missing := sorted(named.keys() - files.keys()):
        raise Refused(f"{folder} lacks {', '.join(missing)}")
    if added := sorted(files.keys() - named.keys()):
        raise Refused(f"{', '.join(added)} in {folder} is not signed")
    for file_name, digest in named.items():
        if _sha256(files[file_name]) != digest:
            raise Refused(f"{files[file_name]} has other bytes than the signed ones")
    return name, len(named)


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.is_file() and file.name not in (SUMS, SIGNATURE))


def _sha256(file: Path) -> str:
    with file.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


def _run(arguments: list[str], refusal: str, given: bytes = b"") -> str:
    command = ["ssh-keygen", "-Y", *arguments]
    try:
        ended = subprocess.run(command, input=given, capture_output=True, check=False, timeout=60)
    except FileNotFoundError:
        raise Refused("there is no ssh-keygen; install the package openssh-client") from None
    if ended.returncode != 0:
        last = (ended.stderr or ended.stdout).decode(errors="replace").strip().splitlines()
        raise Refused(f"{refusal}: {last[-1] if last else f'ssh-keygen ended with {ended.returncode}'}")
    return ended.stdout.decode()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.sign",
        description="Sign the files of a release, or check them.",
        epilog="examples: python -m scripts.sign --key ~/.ssh/release; "
        "python -m scripts.sign --check allowed_signers downloads",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--key", type=Path, help="OpenSSH's private key to sign with")
    what.add_argument("--check", type=Path, metavar="SIGNERS", help="allowed_signers file to check against")
    parser.add_argument("folder", type=Path, nargs="?", default=Path("dist"), help="default: dist")
    given = parser.parse_args()
    try:
        if given.check is None:
            print(f"{sign(given.folder, given.key)} files are signed by {given.folder / SIGNATURE}")
        else:
            name, files = check(given.folder, given.check)
            print(f"{files} files are as {name} signed them")
    except (Refused, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
