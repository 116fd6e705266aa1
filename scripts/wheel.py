"""`make wheel`: the source distribution, and a wheel built from it, into dist/."""

from __future__ import annotations

from scripts import environments, system_packages
from scripts.environments import ROOT
from scripts.progress import Progress


def main() -> None:
    progress = Progress(environments.cache() / "logs" / "wheel.log")
    system_packages.require(progress, *system_packages.BUILD)
    tools = environments.tools(progress)
    command = [tools.python, "-m", "build", "--no-isolation", "--outdir", ROOT / "dist", ROOT]
    progress.run("building sdist and wheel", command, environments.clean_env())
    for path in sorted((ROOT / "dist").iterdir()):
        progress.say(f"dist/{path.name}  {path.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
