"""The manifests for Kubernetes fit each other, and the settings, ports and pages of the processes."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from moonpool.cli.entry import make_app
from moonpool.core.config import config
from moonpool.core.config.config import Config
from moonpool.core.service.addresses import parse_address
from moonpool.core.service.listen_addresses import node_addresses, require_token
from moonpool.disagg_proxy.from_config import proxy_settings

from .disagg_proxy.harness import bed, with_deadline

FOLDER = Path(__file__).parent.parent / "deploy" / "kubernetes"
KUBECTL = shutil.which("kubectl")
TOML = FOLDER / "moonpool.toml"
WORKLOADS = ("Deployment", "DaemonSet")


def objects() -> list[dict[str, Any]]:
    names = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())["resources"]
    return [each for name in names for each in yaml.safe_load_all((FOLDER / name).read_text())]


def of_kind(*kinds: str) -> list[dict[str, Any]]:
    return [each for each in objects() if each["kind"] in kinds]


def name_of(thing: dict[str, Any]) -> str:
    return str(thing["metadata"]["name"])


def pod_of(workload: dict[str, Any]) -> dict[str, Any]:
    pod: dict[str, Any] = workload["spec"]["template"]["spec"]
    return pod


def main_of(workload: dict[str, Any]) -> dict[str, Any]:
    (container,) = pod_of(workload)["containers"]
    return dict(container)


def settings(workload: dict[str, Any], tmp_path: Path) -> Config:
    """What a container is started with: its file, environment and arguments."""
    env = {
        each["name"]: each.get("value", "a secret that is long enough") for each in main_of(workload)["env"]
    }
    _, *words = main_of(workload)["args"]
    given = dict(zip(words[::2], words[1::2], strict=True))
    assert given.pop("--config").removeprefix("/etc/moonpool/config/") == TOML.name
    keys = tmp_path / "api-keys"
    keys.write_text("a key")
    file = tmp_path / TOML.name
    file.write_text(TOML.read_text().replace("/etc/moonpool/keys/api-keys", str(keys)))
    section = main_of(workload)["name"]
    arguments = {f"{section}.{word[2:].replace('-', '_')}": value for word, value in given.items()}
    return config.load(file, env=env, arguments=arguments)


def each_workload() -> pytest.MarkDecorator:
    return pytest.mark.parametrize("workload", of_kind(*WORKLOADS), ids=name_of)


def test_all_processes_are_there() -> None:
    assert [name_of(each) for each in of_kind(*WORKLOADS)] == [
        "moonpool-master-a",
        "moonpool-master-b",
        "moonpool-node",
        "moonpool-proxy",
    ]
    budgets = {
        name_of(each): each["spec"]["selector"]["matchLabels"] for each in of_kind("PodDisruptionBudget")
    }
    for name in ("moonpool-master", "moonpool-proxy"):
        assert budgets[name] == {"app.kubernetes.io/name": name}


@each_workload()
def test_commands_options_and_settings_exist(workload: dict[str, Any], tmp_path: Path) -> None:
    container = main_of(workload)
    assert container["command"] == ["moonpool"]
    app: Any = typer.main.get_command(make_app())
    command = app.commands[container["args"][0]]
    known = {option for each in command.get_params(typer.Context(command)) for option in each.opts}
    assert {word for word in container["args"] if word.startswith("--")} <= known
    made = settings(workload, tmp_path)
    for key in {"master": ("listen", "http"), "node": ("listen", "http"), "proxy": ()}[container["name"]]:
        text = getattr(getattr(made, container["name"]), key)
        require_token(made, parse_address(text, key), f"{container['name']}.{key}")
    if container["name"] == "node":
        assert node_addresses(made).master == "moonpool-master-a:7700,moonpool-master-b:7700"
    if container["name"] == "proxy":
        assert proxy_settings(made).discovery == ["kubernetes:moonpool.io/engine=true"]
    volumes = {each["name"] for each in pod_of(workload)["volumes"]}
    assert {each["name"] for each in container["volumeMounts"]} == volumes


@each_workload()
def test_ports_are_those_of_the_settings(workload: dict[str, Any], tmp_path: Path) -> None:
    made, name = settings(workload, tmp_path), main_of(workload)["name"]
    listens = {
        "master": {"wire": made.master.listen, "http": made.master.http},
        "node": {
            "wire": made.node.listen,
            "http": made.node.http,
            "events": made.node.events,
            "replay": made.node.events_replay,
        },
        "proxy": {"http": made.proxy.listen, "peers": made.proxy.peer_listen},
    }[name]
    assert all(each.removeprefix("tcp://").startswith("0.0.0.0:") for each in listens.values())
    ports = {each["name"]: each["containerPort"] for each in main_of(workload)["ports"]}
    assert ports == {key: int(each.rpartition(":")[2]) for key, each in listens.items()}
    by_default = config.load(env={})
    for key, default in (
        ("wire", getattr(by_default, name).listen),
        ("http", getattr(by_default, name).http if name != "proxy" else by_default.proxy.listen),
    ):
        if key in ports:
            assert ports[key] == int(default.rpartition(":")[2])


@each_workload()
def test_a_stop_is_not_cut_off(workload: dict[str, Any], tmp_path: Path) -> None:
    made = settings(workload, tmp_path)
    stop_s = {
        "master": made.master.stop_delay_s,
        "node": made.node.stop_delay_s + made.node.ssd_stop_s,
        "proxy": made.proxy.deadlines.stop_delay_s + made.proxy.deadlines.drain_s,
    }[main_of(workload)["name"]]
    assert pod_of(workload)["terminationGracePeriodSeconds"] > stop_s + 5
    ready = main_of(workload)["readinessProbe"]
    delay_s = (
        stop_s
        - {"master": 0, "node": made.node.ssd_stop_s, "proxy": made.proxy.deadlines.drain_s}[
            main_of(workload)["name"]
        ]
    )
    assert delay_s > ready["periodSeconds"] * ready["failureThreshold"]


@each_workload()
def test_probes_ask_pages_that_are_there(workload: dict[str, Any]) -> None:
    """They are tested in tests/core/test_probes.py and tests/disagg_proxy/endpoints/test_probes.py."""
    container = main_of(workload)
    probes = {kind: container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")}
    assert {each["port"] for each in probes.values()} == {"http"}
    paths = [probes[kind]["path"] for kind in ("startup", "liveness", "readiness")]
    assert paths == ["/livez", "/livez", "/readyz"]


@with_deadline
async def test_a_proxy_without_an_engine_is_live_and_not_ready() -> None:
    async with bed(1, prepare=lambda engines: setattr(engines[0], "healthy", False)) as b:
        (proxy,) = (each for each in of_kind("Deployment") if name_of(each) == "moonpool-proxy")
        for probe, status in (("livenessProbe", 200), ("readinessProbe", 503)):
            await b.probe(main_of(proxy)[probe]["httpGet"]["path"], status)


@each_workload()
def test_pods_are_confined(workload: dict[str, Any]) -> None:
    pod, container = pod_of(workload), main_of(workload)
    assert pod["securityContext"].items() >= {"runAsNonRoot": True, "runAsUser": 1000}.items()
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["resources"]["limits"]["memory"]
    assert pod["enableServiceLinks"] is False  # its variables would begin with MOONPOOL_


def matching(selector: dict[str, str]) -> list[dict[str, Any]]:
    return [
        each
        for each in of_kind(*WORKLOADS)
        if selector.items() <= each["spec"]["template"]["metadata"]["labels"].items()
    ]


def test_selectors_find_pods_and_their_ports() -> None:
    for workload in of_kind(*WORKLOADS):
        assert matching(workload["spec"]["selector"]["matchLabels"]) == [workload]
    for service in of_kind("Service"):
        (found,) = matching(service["spec"]["selector"])
        assert {each["targetPort"] for each in service["spec"]["ports"]} <= set(ports_of(found))
        for port in service["spec"]["ports"]:
            assert ports_of(found)[port["targetPort"]] == port["port"]
    hosts = set(re.findall(r'"(moonpool-[a-z-]+):\d+"', TOML.read_text()))
    assert hosts <= {name_of(each) for each in of_kind("Service")}
    named = set()
    for policy in of_kind("NetworkPolicy"):
        found_by_policy = matching(policy["spec"]["podSelector"]["matchLabels"])
        asked = {port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]}
        for each in found_by_policy:
            named.add(name_of(each))
            assert asked == set(ports_of(each)), "a port without a rule is closed"
    assert named == {name_of(each) for each in of_kind(*WORKLOADS)}


def ports_of(workload: dict[str, Any]) -> dict[str, int]:
    return {each["name"]: each["containerPort"] for each in main_of(workload)["ports"]}


def keys_asked() -> Iterator[tuple[str, str]]:
    """(secret, key) of each that a pod needs."""
    for workload in of_kind(*WORKLOADS):
        for each in main_of(workload)["env"]:
            if secret := each.get("valueFrom", {}).get("secretKeyRef"):
                yield secret["name"], secret["key"]
        for volume in pod_of(workload)["volumes"]:
            for item in volume.get("secret", {}).get("items", []):
                yield volume["secret"]["secretName"], item["key"]


def test_the_documentation_makes_each_secret_that_is_asked_for() -> None:
    page = (FOLDER.parent.parent / "docs" / "kubernetes.md").read_text()
    (name,) = re.findall(r"create secret generic (\S+)", page)
    made = {(name, key) for key in re.findall(r"--from-(?:literal|file)=([a-z-]+)=", page)}
    assert set(keys_asked()) == made


@pytest.mark.skipif(KUBECTL is None, reason="no kubectl")
def test_kustomize_renders_them() -> None:
    assert KUBECTL is not None
    done = subprocess.run([KUBECTL, "kustomize", FOLDER], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rendered = list(yaml.safe_load_all(done.stdout))
    (configured,) = (each for each in rendered if each["kind"] == "ConfigMap")
    assert configured["data"] == {"moonpool.toml": TOML.read_text()}
    assert len(rendered) == len(objects()) + 1
    for each in rendered:
        if each["kind"] in WORKLOADS:
            volumes = {volume["name"]: volume for volume in pod_of(each)["volumes"]}
            assert volumes["config"]["configMap"]["name"] == name_of(configured)  # with its digest
