"""`make constraints`: constraints.txt anew, the newest versions that pyproject.toml admits of what Moonpool
and its extras import, with what those import in turn.

CI installs these versions, and so does the image; `pip install -c constraints.txt moonpool` does elsewhere.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts import environments
from scripts.environments import CONSTRAINTS
from scripts.progress import Progress

EXTRAS = ("otel", "plots", "tokenizer", "yaml")  # of the processes; engines bring their own versions
HEAD = """\
# Versions that CI ran with: pip install -c constraints.txt moonpool. Written by `make constraints`.
"""


@dataclass(frozen=True)
class Pin:
    name: str
    version: str
    via: tuple[str, ...]  # names of packages that need it; moonpool or moonpool[EXTRA] for ours


def read(path: Path = CONSTRAINTS) -> list[Pin]:
    lines = re.findall(r"^([\w.-]+)==(\S+)  # via (.+)$", path.read_text(), re.M)
    return [Pin(name, version, tuple(via.split(", "))) for name, version, via in lines]


def text(report: dict[str, Any], wanted: dict[str, list[str]]) -> str:
    """The file, from pip's report of what it would install.

    wanted: moonpool, or moonpool[EXTRA] -> its requirements.
    """
    needs = dict(wanted)
    versions: dict[str, str] = {}
    for item in report["install"]:
        metadata = item["metadata"]
        name = canonical(metadata["name"])
        versions[name] = metadata["version"]
        needs[name] = [each for each in metadata.get("requires_dist", []) if "extra ==" not in each]
    via: dict[str, list[str]] = {name: [] for name in versions}
    for needing, requirements in needs.items():
        for required in dict.fromkeys(canonical(name_of(each)) for each in requirements):
            if required in via:
                via[required].append(needing)
    return HEAD + "".join(
        f"{name}=={versions[name]}  # via {', '.join(via[name])}\n" for name in sorted(versions)
    )


def name_of(requirement: str) -> str:
    return re.split(r"[\s\[<>=!~;(]", requirement, maxsplit=1)[0]


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def main() -> None:
    progress = Progress(environments.cache() / "logs" / "constraints.log")
    project = environments.project()
    wanted = {"moonpool": project["dependencies"]}
    wanted |= {f"moonpool[{extra}]": project["optional-dependencies"][extra] for extra in EXTRAS}
    progress.say("asking pip which versions it would install")
    ask = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--dry-run",
        "--ignore-installed",
        "--report",
        "-",
    ]
    ask += [each for requirements in wanted.values() for each in requirements]
    done = subprocess.run(ask, stdout=subprocess.PIPE, text=True, env=environments.clean_env(), check=False)
    if done.returncode:
        raise progress.fail("pip found no versions that fit; its reasons are above")
    CONSTRAINTS.write_text(text(json.loads(done.stdout), wanted))
    progress.say(f"wrote {CONSTRAINTS.name}: {len(read())} packages")


if __name__ == "__main__":
    main()
