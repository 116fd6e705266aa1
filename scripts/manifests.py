"""`make manifests`: the files of deploy/kubernetes that kustomize takes, rendered from the chart by Helm's
own code, and committed.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from scripts import environments, system_packages
from scripts.environments import ROOT
from scripts.progress import Progress

CHART = ROOT / "deploy" / "chart"
MANIFESTS = ROOT / "deploy" / "kubernetes"
FILES = ("master.yaml", "node.yaml", "proxy.yaml", "network-policy.yaml")
SETTINGS = "moonpool.toml"
# The kustomization makes the ConfigMap, and names it by its digest.
VALUES: dict[str, Any] = {"configMap": "moonpool"}
HEAD = "# Written by `make manifests` from deploy/chart; edit that.\n"


def render(values: dict[str, Any], name: str = "moonpool", namespace: str = "moonpool") -> dict[str, str]:
    """Each template of the chart, such as master.yaml -> its text with those values above the default."""
    import helm_python

    with helm_python.Chart.load(CHART) as chart:
        chart.validate_schema(values)
        rendered = chart.render(values, name=name, namespace=namespace)
    return {Path(path).name: text for path, text in rendered.items()}


def manifests() -> dict[str, str]:
    """Name -> text of each file that is written."""
    import yaml

    rendered = render(VALUES)
    (config,) = yaml.safe_load_all(render({})["config.yaml"])
    files = {name: HEAD + rendered[name].strip("\n") + "\n" for name in FILES}
    return {**files, SETTINGS: HEAD + config["data"][SETTINGS]}


def main() -> None:
    progress = Progress(environments.cache() / "logs" / "manifests.log")
    system_packages.require(progress, *system_packages.BUILD)
    code = "import json; from scripts.manifests import manifests; print(json.dumps(manifests()))"
    command = [environments.tools(progress).python, "-c", code]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    for name, text in json.loads(done.stdout).items():
        (MANIFESTS / name).write_text(text)
        progress.say(f"wrote deploy/kubernetes/{name}")


if __name__ == "__main__":
    main()
