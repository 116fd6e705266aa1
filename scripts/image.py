"""`make image`: the container image, by docker, podman or buildah. `MACHINES='x86_64 aarch64'` makes one for
each of them, the other processor's by emulation (binfmt_misc with QEMU).
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil

from scripts import environments
from scripts.environments import ROOT
from scripts.progress import Progress

DOCKERFILE = ROOT / "deploy" / "images" / "Dockerfile"
# Program -> its options; the OCI's format has no HEALTHCHECK.
PROGRAMS = {"docker": (), "podman": ("--format", "docker"), "buildah": ("--format", "docker")}
PLATFORMS = {"x86_64": "linux/amd64", "aarch64": "linux/arm64"}


def tag(machine: str, machines: list[str]) -> str:
    """One for each machine where there are several."""
    name = f"moonpool:{environments.project()['version']}"
    return name if len(machines) == 1 else f"{name}-{machine}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.image", description=__doc__)
    parser.add_argument("machine", nargs="*", choices=PLATFORMS, default=platform.machine())
    parser.add_argument("--base", help="the image to build on; default: as the Dockerfile says")
    words = parser.parse_args()
    machines = [words.machine] if isinstance(words.machine, str) else words.machine
    progress = Progress(environments.cache() / "logs" / "image.log")
    program = next((name for name in PROGRAMS if shutil.which(name)), None)
    if program is None:
        raise progress.fail(f"none of {', '.join(PROGRAMS)} is in PATH: install one of them")
    arguments = [*PROGRAMS[program], *(["--build-arg", f"BASE={words.base}"] if words.base else [])]
    for machine in machines:
        name = tag(machine, machines)
        command = [program, "build", "--platform", PLATFORMS[machine], "--tag", name, *arguments]
        progress.run(
            f"{name} by {program} (some minutes)", [*command, "-f", DOCKERFILE, ROOT], dict(os.environ)
        )


if __name__ == "__main__":
    main()
