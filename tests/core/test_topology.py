"""The topology of recorded machines, as a person and a program see it."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from moonpool import _native
from moonpool.cli import run
from moonpool.cli.topology import render
from moonpool.core.errors import InvalidArgument
from moonpool.core.topology import as_json, matrix, memories, read, usable_nics
from moonpool.core.topology.gids import best_gid, gid_text, is_ethernet, is_routable

from .. import machines
from ..machines import __main__ as recorder

NIC_OF_GPU = ["mlx5_0", "mlx5_3", "mlx5_4", "mlx5_5", "mlx5_6", "mlx5_9", "mlx5_10", "mlx5_11"]
RDMA_PORT = "/sys/class/infiniband/mlx5_0/ports/1"


def machine(name: str, root: Path) -> _native.Machine:
    return read(str(machines.build(name, root)))


def shown(found: _native.Machine) -> str:
    text = io.StringIO()
    Console(file=text, width=200).print(render(found))
    return text.getvalue()


def test_which_nic_each_memory_of_a_dgx_takes_first(tmp_path: Path) -> None:
    found = machine("dgx_h100", tmp_path)
    assert memories(found) == ["cpu:0", "cpu:1", *(f"gpu{number}" for number in range(8))]
    near = matrix(found)
    for number, nic in enumerate(NIC_OF_GPU):
        (preferred,) = [row for row in near[f"gpu{number}"] if row.preferred]
        assert (preferred.nic, preferred.nearness) == (nic, "switch")
        assert near[f"gpu{number}"][0] == preferred
    of_node = [row.nic for row in near["cpu:1"] if row.preferred]
    assert of_node == ["mlx5_6", "mlx5_7", "mlx5_8", "mlx5_9", "mlx5_10", "mlx5_11"]
    assert near["cpu:1"][-1].distance == 21
    assert "docker0" not in {nic.name for nic in usable_nics(found)}


def test_a_kind_of_device_that_does_not_exist() -> None:
    with pytest.raises(InvalidArgument, match="nic, gpu, nvme or dax, not disk"):
        read().near_node(0, "disk")


@pytest.mark.parametrize("name", machines.NAMES)
def test_json_and_tables_of_each_machine(name: str, tmp_path: Path) -> None:
    found = machine(name, tmp_path)
    described = json.loads(json.dumps(as_json(found)))
    assert [node["id"] for node in described["nodes"]] == [node.id for node in found.nodes]
    assert set(described["near"]) == set(memories(found))
    text = shown(found)
    for device in found.devices:
        assert device.name in text
    for row in described["near"]["cpu:0"]:
        assert row["nearness"] in ("switch", "root port", "node", "far")


def test_what_a_person_reads(tmp_path: Path) -> None:
    text = shown(machine("dgx_h100", tmp_path))
    assert "2 NUMA nodes, 224 CPUs, 2.0 TiB" in text
    assert "0-55,112-167" in text
    (row,) = [line for line in text.splitlines() if "mlx5_8 " in line and "ACTIVE" in line]
    cells = [cell.strip() for cell in row.split("│")]
    assert cells[3:5] == ["0000:aa:00.1", "Ethernet"]
    assert cells[6:-1] == ["200 Gbit/s", "10.0.8.7 (3)", "9000", "enp170s0f1np1 up"]
    (row,) = [line for line in text.splitlines() if "mlx5_7 " in line and "DOWN" in line]
    assert "fe80" in row
    assert "virtual: docker0" in text
    assert "0000:ab:00.0" in text  # rich makes a picture of ":ab:"


def test_memory_without_cpus_says_so(tmp_path: Path) -> None:
    found = machine("cxl", tmp_path)
    assert "none: memory alone" in shown(found)
    assert [row.nic for row in matrix(found)["cpu:2"] if row.preferred] == ["rxe0"]
    machines.write(tmp_path, "/proc/self/status", "Cpus_allowed_list:\t0-7\nMems_allowed_list:\t0")
    text = shown(read(str(tmp_path)))
    assert "this process may use CPUs 0-7; it may take memory of nodes 0" in text


def test_a_recording_of_this_machine_shows_this_machine(tmp_path: Path) -> None:
    recorded = "\n".join(recorder.lines())
    of_recording, here = (as_json(read(root)) for root in (str(machines.build_text(recorded, tmp_path)), ""))
    for node in (*of_recording["nodes"], *here["nodes"]):
        del node["free_bytes"]  # it changes
    assert of_recording == here


def test_no_machine_at_all(tmp_path: Path) -> None:
    found = read(str(tmp_path))
    assert "no NIC" in shown(found)
    assert as_json(found)["near"] == {"cpu:0": []}


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["topology"]) == 0
    assert "NUMA node" in capsys.readouterr().out
    assert run(["topology", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["nodes"][0]["total_bytes"] > 0


def port(root: Path, gids: list[tuple[str, str]], link_layer: str = "Ethernet") -> _native.RdmaPort:
    machines.write(root, f"{RDMA_PORT}/link_layer", link_layer)
    for index, (address, kind) in enumerate(gids):
        machines.write(root, f"{RDMA_PORT}/gids/{index}", address)
        machines.write(root, f"{RDMA_PORT}/gid_attrs/types/{index}", kind)
    ((nic,),) = [[device for device in read(str(root)).devices if device.ports]]
    return nic.ports[0]


LOCAL, IPV6, IPV4 = "fe80::1", "fd00::7", "0000:0000:0000:0000:0000:ffff:0a00:0807"


def test_the_gid_for_peers(tmp_path: Path) -> None:
    v1, v2 = "IB/RoCE v1", "RoCE v2"
    found = best_gid(port(tmp_path, [(LOCAL, v2), (IPV6, v2), (IPV4, v1), (IPV4, v2)]))
    assert found is not None
    assert gid_text(found) == "10.0.8.7 (3)"
    found = best_gid(port(tmp_path, [(LOCAL, v2), (IPV6, v2), (IPV4, v1), (LOCAL, v2)]))
    assert found is not None
    assert (found.index, is_routable(found)) == (1, True)
    found = best_gid(port(tmp_path, [(LOCAL, v2), ("no address", v2), (IPV4, v1), (IPV4, v1)]))
    assert found is not None
    assert (found.index, is_routable(found)) == (0, False)
    assert best_gid(port(tmp_path, [(LOCAL, v1), ("no address", v2), (IPV4, v1), (IPV4, v1)])) is None
    unreadable = port(tmp_path, [(LOCAL, v1)], link_layer="")
    assert is_ethernet(unreadable)
    infiniband = port(tmp_path, [(LOCAL, "")], "InfiniBand")
    assert not is_ethernet(infiniband)
    found = best_gid(infiniband)
    assert found is not None
    assert found.index == 0
