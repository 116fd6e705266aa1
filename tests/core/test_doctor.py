"""The doctor's checks of this machine: each planted fault is named, with its remedy, and nothing else is."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moonpool.cli import run
from moonpool.cli.doctor import lines
from moonpool.core.config.config import load
from moonpool.core.doctor import Host, State, examine, moonpool_checks, rdma_checks
from moonpool.core.errors import ConfigError

from .. import machines
from . import doctor_bed
from .doctor_bed import DEV, SYS_RDMA, changed, look, net, port, sound

Plant = Callable[[Path, Host], Host | None]
WEAK, BROKEN = State.WEAK, State.BROKEN
LOCAL = "fe80:0000:0000:0000:0e42:a1ff:fe00:0001"
EMPTY = "0000:0000:0000:0000:0000:0000:0000:0000"


def test_a_sound_machine_has_nothing_to_mend(tmp_path: Path) -> None:
    assert look(sound(tmp_path, gpu=True)) == []


AMAZON, BROADCOM = "0x1d0f", "0x14e4"


def network_cards(root: Path, vendor: str, device: str) -> None:
    """Those of the machine are of another maker."""
    for card in (root / "sys/bus/pci/devices").iterdir():
        if (card / "class").exists() and (card / "class").read_text().startswith("0x02"):
            (card / "vendor").write_text(vendor)
            (card / "device").write_text(device)


def only_efa(root: Path) -> None:
    """Its NICs are of EFA: the kernel knows no link layer, no LID and no GID of RoCE."""
    for nic in ("mlx5_0", "mlx5_1"):
        port(root, nic, "link_layer", "Unknown")
        shutil.rmtree(root / f"{SYS_RDMA[1:]}/{nic}/ports/1/gid_attrs")


# ---- faults: what is planted -> check, state, what is said, the remedy


def memlock(root: Path, host: Host) -> Host:
    limits = {resource.RLIMIT_MEMLOCK: 8 << 20}
    return changed(host, soft_limit=lambda which: limits.get(which, -1))


def open_files(root: Path, host: Host) -> Host:
    limits = {resource.RLIMIT_NOFILE: 1024}
    return changed(host, soft_limit=lambda which: limits.get(which, -1))


def little_memory(root: Path, host: Host) -> None:
    machines.write(root, "/proc/self/cgroup", "0::/pod")
    machines.write(root, "/sys/fs/cgroup/pod/memory.max", str(256 << 20))
    machines.write(root, "/sys/fs/cgroup/pod/memory.current", str(1 << 20))


def small_shm(root: Path, host: Host) -> Host:
    return changed(host, filesystem_bytes=lambda path: 64 << 20 if path.endswith("/dev/shm") else 1 << 40)


def no_shm(root: Path, host: Host) -> Host:
    def missing(path: str) -> int:
        raise FileNotFoundError(path)

    return changed(host, filesystem_bytes=missing)


def no_huge_pages(root: Path, host: Host) -> None:
    shutil.rmtree(root / "sys/kernel/mm/transparent_hugepage")


def old_kernel(root: Path, host: Host) -> None:
    machines.write(root, "/proc/sys/kernel/osrelease", "5.15.0-generic")


def io_uring_disabled(root: Path, host: Host) -> Host:
    machines.write(root, "/proc/sys/kernel/io_uring_disabled", "2")
    return changed(host, probe_io_uring=lambda: errno.EPERM)


def io_uring_seccomp(root: Path, host: Host) -> Host:
    return changed(host, probe_io_uring=lambda: errno.EPERM)


def process_vm_seccomp(root: Path, host: Host) -> Host:
    return changed(host, probe_process_vm=lambda: errno.EPERM)


def ptrace_scope(root: Path, host: Host) -> None:
    machines.write(root, "/proc/sys/kernel/yama/ptrace_scope", "1")


def slow_clock(root: Path, host: Host) -> None:
    clocks = "/sys/devices/system/clocksource/clocksource0"
    machines.write(root, f"{clocks}/current_clocksource", "hpet")


def wrong_clock(root: Path, host: Host) -> Host:
    return changed(host, now_s=lambda: 3600.0)


def cpus_of_one_node(root: Path, host: Host) -> None:
    machines.write(root, "/proc/self/status", "Cpus_allowed_list:\t0-15\nMems_allowed_list:\t0-1")


def one_cpu(root: Path, host: Host) -> None:
    machines.write(root, "/proc/self/status", "Cpus_allowed_list:\t3\nMems_allowed_list:\t0-1")


def no_libibverbs(root: Path, host: Host) -> Host:
    said = "libibverbs.so.1: cannot open shared object file: No such file or directory"
    return changed(host, open_library=lambda name: said if "ibverbs" in name else "")


def no_provider(root: Path, host: Host) -> None:
    machines.write(root, "/etc/libibverbs.d/efa.driver", "driver efa")
    (root / "etc/libibverbs.d/mlx5.driver").unlink()


def no_device_node(root: Path, host: Host) -> None:
    (root / f"{DEV[1:]}/uverbs1").unlink()


def no_uverbs(root: Path, host: Host) -> None:
    shutil.rmtree(root / "sys/class/infiniband_verbs/uverbs1")


def no_rdma_driver(root: Path, host: Host) -> None:
    shutil.rmtree(root / "sys/class/infiniband")


def efa_without_driver(root: Path, host: Host) -> None:
    no_rdma_driver(root, host)
    network_cards(root, AMAZON, device="0xefa2")


def efa_without_libfabric(root: Path, host: Host) -> Host:
    only_efa(root)
    said = "libfabric.so.1: cannot open shared object file: No such file or directory"
    return changed(host, open_library=lambda name: said if "fabric" in name else "")


def port_down(root: Path, host: Host) -> None:
    port(root, "mlx5_1", "state", "1: DOWN")
    port(root, "mlx5_1", "phys_state", "3: Disabled")


def no_cable(root: Path, host: Host) -> None:
    port(root, "mlx5_1", "state", "1: DOWN")
    port(root, "mlx5_1", "phys_state", "2: Polling")


def no_subnet_manager(root: Path, host: Host) -> None:
    port(root, "mlx5_1", "link_layer", "InfiniBand")
    port(root, "mlx5_1", "state", "2: INIT")


def no_lid(root: Path, host: Host) -> None:
    port(root, "mlx5_1", "link_layer", "InfiniBand")


def gids_of_version_one(root: Path, host: Host) -> None:
    for index in (1, 3):
        port(root, "mlx5_1", f"gids/{index}", EMPTY)


def no_gid(root: Path, host: Host) -> None:
    for index in range(4):
        port(root, "mlx5_1", f"gids/{index}", EMPTY)


def link_local_gid(root: Path, host: Host) -> None:
    port(root, "mlx5_1", "gids/3", EMPTY)


def slow_port(root: Path, host: Host) -> None:
    port(root, "mlx5_1", "rate", "25 Gb/sec (1X EDR)")


def net_down(root: Path, host: Host) -> None:
    net(root, "mlx5_1", "operstate", "down")


def unequal_mtu(root: Path, host: Host) -> None:
    net(root, "mlx5_1", "mtu", "1500")


def small_mtu(root: Path, host: Host) -> None:
    net(root, "mlx5_0", "mtu", "1500")
    net(root, "mlx5_1", "mtu", "1500")


def no_cuda_library(root: Path, host: Host) -> Host:
    return changed(host, open_library=lambda name: "no such file" if "cuda" in name else "")


def no_gpu_node(root: Path, host: Host) -> None:
    (root / "dev/nvidiactl").unlink()


def no_peer_memory(root: Path, host: Host) -> None:
    shutil.rmtree(root / "sys/module/nvidia_peermem")


def no_card_keys(root: Path, host: Host) -> Host:
    no_peer_memory(root, host)
    return changed(host, has_function=lambda library, name: False)


FAULTS: list[tuple[Plant, str, State, str, str]] = [
    (memlock, "memlock", BROKEN, "8.0 MiB of memory may be locked, and RDMA locks", "ulimit -l unlimited"),
    (open_files, "open files", WEAK, "1024 files open", "ulimit -n 65536"),
    (little_memory, "memory", WEAK, "255.0 MiB of 256.0 MiB", "the control group /pod more memory"),
    (small_shm, "/dev/shm", WEAK, "has 64", "--shm-size=8g"),
    (no_shm, "/dev/shm", WEAK, "is not there", "mount -t tmpfs"),
    (no_huge_pages, "huge pages", WEAK, "no transparent huge pages", "CONFIG_TRANSPARENT_HUGEPAGE"),
    (old_kernel, "huge pages", WEAK, "older than Linux 6.1", "shmem_enabled"),
    (io_uring_disabled, "io_uring", WEAK, "kernel.io_uring_disabled", "kernel.io_uring_disabled=0"),
    (io_uring_seccomp, "io_uring", WEAK, "seccomp", "io_uring_setup"),
    (process_vm_seccomp, "process_vm", WEAK, "process_vm_readv is forbidden", "SYS_PTRACE"),
    (ptrace_scope, "process_vm", WEAK, "ptrace_scope is 1", "kernel.yama.ptrace_scope=0"),
    (slow_clock, "clock", WEAK, "from hpet", "tsc"),
    (wrong_clock, "clock", BROKEN, "before 2025", "chronyd"),
    (cpus_of_one_node, "CPUs", WEAK, "far from mlx5_1 (node 1)", "--cpunodebind"),
    (one_cpu, "CPUs", WEAK, "one CPU", "cpuset"),
    (no_libibverbs, "libibverbs", BROKEN, "cannot open shared object", "apt-get install libibverbs1"),
    (no_provider, "libibverbs", BROKEN, "no driver mlx5 for mlx5_0, mlx5_1", "ibverbs-providers"),
    (no_device_node, "RDMA device nodes", BROKEN, "uverbs1, by which mlx5_1", "--device=/dev/infiniband"),
    (no_uverbs, "RDMA device nodes", BROKEN, "no access to mlx5_1", "modprobe ib_uverbs"),
    (no_rdma_driver, "RDMA devices", WEAK, "0000:31:00.0 can do RDMA", "modprobe mlx5_ib"),
    (efa_without_driver, "RDMA devices", WEAK, "0000:31:00.0 can do RDMA", "modprobe efa"),
    (efa_without_libfabric, "libfabric", BROKEN, "mlx5_0, mlx5_1 of EFA, and libfabric.so.1", "libfabric1"),
    (port_down, "RDMA ports", WEAK, "mlx5_1 port 1 is DOWN (Disabled)", "ip link set ens2f0np0 up"),
    (no_cable, "RDMA ports", WEAK, "other end of the cable", "transceiver"),
    (no_subnet_manager, "RDMA ports", WEAK, "mlx5_1 port 1 is INIT", "opensm"),
    (no_lid, "RDMA ports", BROKEN, "mlx5_1 port 1 has no LID", "opensm"),
    (gids_of_version_one, "GIDs", BROKEN, "no GID of RoCE v2, only of RoCE v1", "ip address add"),
    (no_gid, "GIDs", BROKEN, "mlx5_1 port 1 has no GID", "ens2f0np0"),
    (link_local_gid, "GIDs", WEAK, "link-local", "ip address add 10.0.0.1/24 dev ens2f0np0"),
    (slow_port, "RDMA speed", WEAK, "25 Gbit/s, others of its model at 100", "transceiver"),
    (net_down, "RDMA ports", BROKEN, "the network device of mlx5_1, is down", "ip link set ens2f0np0 up"),
    (unequal_mtu, "MTU", WEAK, "ens2f0np0 (mlx5_1) has 1500, others 9000", "ip link set ens2f0np0 mtu 9000"),
    (small_mtu, "MTU", WEAK, "frames of 1,024 bytes", "ip link set ens1f0np0 mtu 4200"),
    (no_cuda_library, "CUDA library", BROKEN, "has 1 CUDA card, and libcuda.so.1", "--gpus all"),
    (no_gpu_node, "GPU device nodes", BROKEN, "/dev/nvidiactl is not there", "nvidia-modprobe"),
    (no_peer_memory, "GPUDirect RDMA", WEAK, "nvidia_peermem", "modprobe nvidia-peermem"),
    (no_card_keys, "GPUDirect RDMA", BROKEN, "lacks ibv_reg_dmabuf_mr", "install libibverbs of rdma-core 34"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("plant", "check", "state", "what", "remedy"), FAULTS, ids=[row[0].__name__ for row in FAULTS]
)
def test_a_planted_fault_is_named_with_its_remedy(
    plant: Plant, check: str, state: State, what: str, remedy: str, tmp_path: Path
) -> None:
    host = sound(tmp_path, gpu=True)
    (found,) = look(plant(tmp_path, host) or host)
    assert (found.check, found.state) == (check, state)
    assert what in found.what
    assert remedy in found.remedy


def test_no_active_port_is_more_than_its_parts(tmp_path: Path) -> None:
    host = sound(tmp_path)
    for nic in ("mlx5_0", "mlx5_1"):
        port(tmp_path, nic, "state", "1: DOWN")
    first, *others = look(host)
    assert (first.check, first.state) == ("RDMA ports", BROKEN)
    assert "no port of mlx5_0, mlx5_1 is active: transfers go over TCP" in first.what
    assert [other.state for other in others] == [WEAK, WEAK]


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """One that every user may look into."""
    folder = Path(tempfile.mkdtemp(prefix="mp-", dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def test_device_nodes_that_this_user_may_not_open(open_folder: Path) -> None:
    """As another user than root, whom the kernel lets open everything."""
    host = sound(open_folder, gpu=True)
    for node in (f"{DEV}/uverbs0", "/dev/nvidia0"):
        (open_folder / node[1:]).chmod(0o600 if os.geteuid() == 0 else 0)
    for folder in open_folder.rglob("*"):
        if folder.is_dir() and not folder.is_symlink():
            folder.chmod(0o755)
    before = os.geteuid()
    if before == 0:
        for node in (open_folder / "dev").rglob("*"):
            if node.is_file() and node.stat().st_mode & 0o777 != 0o600:
                node.chmod(0o666)
        os.seteuid(65534)
    try:
        found = look(host)
    finally:
        os.seteuid(before)
    assert [finding.check for finding in found] == ["RDMA device nodes", "GPU device nodes"]
    assert "chmod 666 /dev/infiniband/uverbs0" in found[0].remedy
    assert "/dev/nvidia0" in found[1].what


def test_network_cards_without_rdma_are_no_fault(tmp_path: Path) -> None:
    host = sound(tmp_path)
    no_rdma_driver(tmp_path, host)
    network_cards(tmp_path, AMAZON, device="0xec20")  # ENA
    assert look(host) == []
    network_cards(tmp_path, BROADCOM, device="0x1657")  # tg3
    assert look(host) == []
    machines.write(tmp_path, "/sys/bus/pci/drivers/bnxt_en/0000:31:00.0", "")
    (found,) = look(host)
    assert "modprobe bnxt_re" in found.remedy


def test_nics_of_efa_need_no_subnet_manager_and_no_address(tmp_path: Path) -> None:
    host = sound(tmp_path)
    only_efa(tmp_path)
    assert look(host) == []
    assert "libfabric.so.1 opens, for mlx5_0, mlx5_1" in {each.what for each in rdma_checks.check(host)}


def test_what_is_no_fault(tmp_path: Path) -> None:
    """What capabilities allow, cards of other makers, and a machine without any of it."""
    host = sound(tmp_path)
    machines.write(tmp_path, "/proc/self/status", "CapEff:\t000001ffffffffff\nCpus_allowed_list:\t0-127")
    machines.write(tmp_path, "/proc/sys/kernel/yama/ptrace_scope", "2")
    assert look(changed(host, soft_limit=lambda which: 8 << 20)) == []
    machines.write(tmp_path, "/proc/sys/kernel/yama/ptrace_scope", "3")
    (found,) = look(host)
    assert "ptrace_scope is 3" in found.what
    vm = tmp_path / "vm"
    machines.build("mmio_vm", vm)
    assert [finding.check for finding in look(changed(host, root=str(vm)))] == ["huge pages"]
    cxl = changed(host, root=str(machines.build("cxl", tmp_path / "cxl")))
    (node,) = [finding for finding in look(cxl) if finding.check == "RDMA device nodes"]
    assert "no access to rxe0" in node.what  # it has no class infiniband_verbs


@pytest.mark.parametrize("name", machines.NAMES)
def test_recorded_machines_are_looked_at(name: str, tmp_path: Path) -> None:
    """Recordings lack what only the doctor reads: it says something, and never raises."""
    assert look(changed(sound(tmp_path / "other"), root=str(machines.build(name, tmp_path / "it"))))


# ---- moonpool's own


def own(config: ConfigError | None = None) -> dict[str, tuple[State, str, str]]:
    return {
        finding.check: (finding.state, finding.what, finding.remedy)
        for finding in moonpool_checks.check(load() if config is None else config)
    }


def test_without_any_setting(runtime: Path) -> None:
    found = own()
    assert {state for state, _, _ in found.values()} == {State.WORKS, State.ABSENT}
    assert "MOONPOOL_CLUSTER_TOKEN_FILE" in found["token"][1]
    assert not (runtime / "token").exists()  # it only looks


@pytest.mark.parametrize(
    ("content", "mode", "state", "part"),
    [
        ("a secret that is long enough", 0o600, State.WORKS, "configured"),
        ("a secret that is long enough", 0o644, BROKEN, "can be read by others"),
        ("", 0o600, BROKEN, "empty"),
        ("short", 0o600, WEAK, "guessed"),
        (None, 0, BROKEN, "cannot read"),
    ],
)
def test_the_token_file(
    content: str | None,
    mode: int,
    state: State,
    part: str,
    runtime: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_text(content)
        file.chmod(mode)
    monkeypatch.setenv("MOONPOOL_CLUSTER_TOKEN_FILE", str(file))
    found = own()["token"]
    assert found[0] is state
    assert part in found[1]
    assert "openssl rand" in found[2] or state is State.WORKS


def test_a_runtime_folder_that_cannot_serve(
    runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime.chmod(0o755)
    state, what, remedy = own()["runtime folder"]
    assert state is BROKEN
    assert "open to others" in what
    assert "MOONPOOL_RUNTIME_DIR" in remedy
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("MOONPOOL_RUNTIME_DIR", str(file / "below"))
    assert own()["runtime folder"][0] is BROKEN
    monkeypatch.setenv("MOONPOOL_RUNTIME_DIR", "/proc/moonpool")
    assert own()["runtime folder"][0] is BROKEN


def test_a_configuration_that_cannot_be_read(
    runtime: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "moonpool.toml"
    file.write_text("[node]\ndramm = '1GiB'\n")
    assert run(["doctor", "--config", str(file), "--json"]) == 1
    (found,) = [one for one in json.loads(capsys.readouterr().out)["findings"] if one["state"] == "broken"]
    assert found["check"] == "configuration"
    assert "dramm" in found["what"]


# ---- all of it


def test_the_report_of_a_faulty_machine(runtime: Path, tmp_path: Path) -> None:
    host = sound(tmp_path)
    gids_of_version_one(tmp_path, host)
    off = {f"{name}.http": "off" for name in ("node", "master")}  # what else runs here is no fault of it
    any_port = {f"{name}.listen": "127.0.0.1:0" for name in ("node", "master", "proxy")}
    report = examine(memlock(tmp_path, host), load(arguments=off | any_port))
    assert report.is_broken
    assert not report.peer_is_broken
    text = "\n".join(line.plain for line in lines(report))
    assert "broken  GIDs:                mlx5_1 port 1 has no GID of RoCE v2, only of RoCE v1\n" in text
    assert "-> ulimit -l unlimited" in text
    assert "2 broken, 0 weak" in text
    assert {f"transport {name}" for name in ("shm", "tcp")} <= {one.check for one in report.findings}


def test_this_machine_within_three_seconds(runtime: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = run(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["seconds"] < 3
    assert report["peer"] is None
    assert {finding["state"] for finding in report["findings"]} <= set(State)
    is_broken = any(finding["state"] == "broken" for finding in report["findings"])
    assert code == int(is_broken)
    assert run(["doctor"]) == code
    assert "works   transport tcp:" in capsys.readouterr().out


def test_probes_of_this_machine() -> None:
    """The real ones: they say 0, or how the kernel refuses."""
    host = Host()
    assert host.probe_io_uring() in (0, errno.EPERM, errno.ENOSYS)
    assert host.probe_process_vm() in (0, errno.EPERM, errno.ENOSYS)
    assert host.open_library("libc.so.6") == ""
    assert "libno-such" in host.open_library("libno-such.so.1")
    assert doctor_bed.look(host) is not None
