"""`make build`: the C++ core in place, in seconds after an edit of one file."""

from __future__ import annotations

from scripts import environments, system_packages
from scripts.progress import Progress


def main() -> None:
    progress = Progress(environments.cache() / "logs" / "build.log")
    system_packages.require(progress, *system_packages.BUILD)
    environment = environments.tools(progress)
    progress.say(f"ready: {environment.path}/bin/moonpool --help")


if __name__ == "__main__":
    main()
