"""`moonpool bench`: real peers, real nodes, its lines, its JSON, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from moonpool import Store, TransferEngine, _native
from moonpool.cli import run
from moonpool.core.bench import control, load, report, store, transfer
from moonpool.core.bench.load import Gauge
from moonpool.core.bench.memory import Memory
from moonpool.core.errors import CorruptObject, InvalidArgument, Unavailable
from tests import outside_example, soft_card, soft_verbs
from tests.descriptors import speaks

from ..core.metadata_bed import running
from ..core.store_bed import MIB, TOKEN, NodeProcess, until

DEADLINE_S = 60
QUICK = ["--seconds", "0.2", "--working-set", "8MiB"]


def bench(*arguments: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "moonpool", "bench", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | (env or {}),
    )


def rows_of(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    return rows


# ---- transfer


def test_two_processes_by_default(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    assert run(["bench", "transfer", *QUICK, "--size", "4KiB,1MiB", "--json", str(file)]) == 0
    text = capsys.readouterr().out
    for word in ("read 4.0 KiB x 1", "read 1.0 MiB x 1", "GB/s", "p50 us", "p99 us", "CPU s/GB", "peer's"):
        assert word in text
    small, large = rows_of(file)
    assert (small["size"], large["size"]) == (4096, MIB)
    for row in (small, large):
        assert row["transport"] == "shm"
        assert row["direction"] == "read"
        assert row["bytes"] == row["operations"] * row["size"] > 0
        assert row["gb_per_s"] == pytest.approx(row["bytes"] / 1e9 / row["seconds"])
        assert 0 < row["p50_us"] <= row["p99_us"]
        assert row["cpu_s_per_gb"] > 0
        assert row["peer_cpu_s_per_gb"] >= 0
        assert row["verified_bytes"] == 0
        assert row["interrupted"] is False


@pytest.mark.parametrize("transport", ["loopback", "shm", "tcp"])
@pytest.mark.parametrize("direction", ["read", "write"])
def test_each_transport_and_direction_verified(tmp_path: Path, transport: str, direction: str) -> None:
    file = tmp_path / "rows.json"
    options = ["--transport", transport, "--direction", direction, "--verify", "--json", str(file)]
    assert run(["bench", "transfer", *QUICK, *options, "--size", "64KiB", "--batch", "4"]) == 0
    (row,) = rows_of(file)
    assert row["transport"] == transport
    assert row["batch"] == 4
    if direction == "read":
        assert row["verified_bytes"] >= row["bytes"]
    else:  # what was written last, wherever it was written
        assert min(row["bytes"], 8 * MIB) <= row["verified_bytes"] <= 8 * MIB
    if transport == "tcp":
        assert row["peer_cpu_s_per_gb"] > 0.01  # the other side takes part


@pytest.fixture(scope="session")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if outside_example.COMPILER is None:
        pytest.skip("needs a C compiler")
    return outside_example.build(tmp_path_factory.mktemp("outside"))


@pytest.fixture
def verbs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A libibverbs with soft0 and soft1, which the peer of a bench shares."""
    if soft_verbs.COMPILER is None:
        pytest.skip("needs a C++ compiler")
    monkeypatch.setenv("MOONPOOL_SOFT_VERBS", "devices=2 speed0=500 speed1=500")  # MB/s
    monkeypatch.setenv("MOONPOOL_SOFT_VERBS_FILE", str(tmp_path / "wire"))
    return soft_verbs.compile_library(tmp_path)


@pytest.mark.parametrize("direction", ["read", "write"])
def test_a_transport_that_is_built_outside(tmp_path: Path, outside: Path, direction: str) -> None:
    file = tmp_path / "rows.json"
    options = ["--outside", str(outside), "--transport", "unix_socket", "--direction", direction, "--verify"]
    assert run(["bench", "transfer", *QUICK, *options, "--size", "64KiB", "--json", str(file)]) == 0
    (row,) = rows_of(file)
    assert row["transport"] == "unix_socket"
    assert row["verified_bytes"] > 0
    assert row["rails"] == []


@pytest.mark.parametrize("direction", ["read", "write"])
def test_rdma_and_what_each_rail_carried(
    tmp_path: Path, verbs: Path, direction: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.json"
    options = ["--transport", "rdma", "--rdma-library", str(verbs), "--direction", direction, "--verify"]
    assert run(["bench", "transfer", *QUICK, *options, "--depth", "2", "--json", str(file)]) == 0
    (row,) = rows_of(file)
    assert row["transport"] == "rdma"
    assert row["verified_bytes"] > 0
    assert [rail["port"] for rail in row["rails"]] == ["soft0:1", "soft1:1"]
    # Beside what was counted, the control block was read, and what was under way at the end.
    assert sum(rail["bytes"] for rail in row["rails"]) >= row["bytes"]
    for rail in row["rails"]:
        assert rail["transport"] == "rdma"
        assert rail["state"] == "up"
        assert rail["bytes"] > 0
        assert rail["pieces"] > 0
        assert rail["faults"] == 0
    text = capsys.readouterr().out
    assert "rails" in text
    assert "soft0:1" in text
    assert "soft1:1" in text


def test_rdma_by_the_device_that_is_named(
    tmp_path: Path, verbs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.json"
    options = ["--transport", "rdma", "--rdma-library", str(verbs), "--rdma-devices"]
    assert run(["bench", "transfer", *QUICK, *options, "soft1", "--json", str(file)]) == 0
    (row,) = rows_of(file)
    assert [rail["port"] for rail in row["rails"]] == ["soft1:1"]
    capsys.readouterr()
    assert run(["bench", "transfer", *QUICK, *options, "mlx5_0"]) == 2
    said = capsys.readouterr().err
    assert 'no RDMA device of this host is called "mlx5_0"; it has soft0, soft1' in said
    assert said.count("\n") == 1


def test_efa_by_the_provider_that_is_named(tmp_path: Path) -> None:
    with TransferEngine("asked", transports=["efa"], efa_provider="tcp") as engine:
        if why := engine.transports()["efa"]:
            pytest.skip(why)
    file = tmp_path / "rows.json"
    options = ["--transport", "efa", "--efa-provider", "tcp", "--verify", "--json", str(file)]
    assert run(["bench", "transfer", *QUICK, *options]) == 0
    (row,) = rows_of(file)
    assert row["transport"] == "efa"
    assert row["verified_bytes"] > 0
    assert sum(rail["bytes"] for rail in row["rails"]) >= row["bytes"]


@pytest.mark.parametrize("names", ["cuda_ipc", "tcp,cufile"])
def test_transports_of_cards_are_refused_with_the_reason(
    names: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", "transfer", *QUICK, "--transport", names]) == 2
    said = capsys.readouterr().err
    assert names.split(",")[-1] in said
    assert "memory of cards" in said


class Counting:
    """The counters of an engine, which the test changes."""

    def __init__(self) -> None:
        self.counters: dict[str, int] = {}

    def transports(self) -> dict[str, str]:
        return dict.fromkeys(("cuda_ipc", "rdma", "unix_socket", "tcp"), "")

    def metrics(self) -> dict[str, int]:
        return self.counters


def test_bytes_of_each_transport_are_counted_whatever_its_name() -> None:
    engine: Any = Counting()
    client = transfer.Bench.__new__(transfer.Bench)
    client.engine = engine
    engine.counters = {
        "cuda_ipc_read_bytes_total": 3,
        "cuda_ipc_write_bytes_total": 4,
        "cuda_ipc_read_slices_total": 100,
        "unix_socket_write_bytes_total": 5,
        "served_tcp_read_bytes_total": 100,  # by peers
        'rdma_rail_bytes_total{port="mlx5_0:1"}': 100,
    }
    assert client._moved() == {"cuda_ipc": 7, "rdma": 0, "unix_socket": 5, "tcp": 0}


def test_the_column_of_rails_says_why_one_was_left() -> None:
    up = transfer.RailUse("rdma", "mlx5_0:1", "to there", "up", "", 3 * MIB, 12, 0)
    left = transfer.RailUse("rdma", "mlx5_1:1", "to there", "down", "the port is down", MIB, 4, 1)
    plan = transfer.Plan(MIB)
    row: Any = transfer.Row(*(plan.size, 1, 1, 1, "read", "rdma"), *(1.0, 4 * MIB, 4), *(0.0,) * 6, 0)
    assert [column.heading for column in report.columns_of("transfer", [row])][-1] == "peer's"
    row.rails = [up, left]
    column = report.columns_of("transfer", [row])[-1]
    assert column.heading == "rails"
    assert column.text(row) == "mlx5_0:1 75 %, mlx5_1:1 25 % (1 faults; down: the port is down)"


@pytest.mark.parametrize("extra", [["--foreign"], ["--transport", "tcp"]], ids=["foreign", "tcp"])
def test_depth_and_threads(tmp_path: Path, extra: list[str]) -> None:
    file = tmp_path / "rows.json"
    options = ["--depth", "4", "--threads", "2", "--batch", "2", "--verify", "--direction", "write"]
    assert run(["bench", "transfer", *QUICK, *extra, *options, "--size", "4KiB", "--json", str(file)]) == 0
    (row,) = rows_of(file)
    assert (row["depth"], row["threads"], row["batch"]) == (4, 2, 2)
    assert row["operations"] > 8
    assert row["verified_bytes"] > 0


def test_json_on_standard_output_has_it_alone(runtime_dir: Path) -> None:
    process = bench("transfer", *QUICK, "--json", "-")
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, err
    document = json.loads(out)
    assert document["bench"] == "transfer"
    assert document["interrupted"] is False
    assert len(document["rows"]) == 1
    assert "GB/s" in err


@pytest.fixture
def card(tmp_path: Path) -> Iterator[soft_card.SoftCard]:
    """Card 0 of this process, in software."""
    if soft_card.COMPILER is None:
        pytest.skip("needs a C++ compiler")
    with soft_card.soft_card(soft_card.compile_library(tmp_path)) as found:
        yield found


@pytest.mark.parametrize("direction", ["read", "write"])
@pytest.mark.parametrize("transport", ["loopback", "tcp"])
def test_memory_of_a_card_verified(
    tmp_path: Path, card: soft_card.SoftCard, transport: str, direction: str
) -> None:
    file = tmp_path / "rows.json"
    options = ["--device", "cuda:0", "--transport", transport, "--direction", direction, "--verify"]
    if transport == "tcp":  # its peer is another process, which has no card
        options += ["--peer-device", "cpu"]
    before = card.calls("cuMemAlloc")
    options += ["--working-set", "1MiB", "--seconds", "0.2", "--size", "64KiB", "--json", str(file)]
    assert run(["bench", "transfer", *options]) == 0
    (row,) = rows_of(file)
    assert row["transport"] == transport
    assert row["verified_bytes"] > 0
    document = json.loads(file.read_text())
    assert document["device"] == "cuda:0"
    assert document["peer_kind"] == ("device" if transport == "loopback" else "host_arena")
    assert card.calls("cuMemAlloc") - before >= (2 if transport == "loopback" else 1)


def test_memory_of_a_card_that_is_not_there(
    tmp_path: Path, runtime_dir: Path, card: soft_card.SoftCard, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*options: str) -> str:
        assert run(["bench", "transfer", *QUICK, *options]) == 2
        return " ".join(capsys.readouterr().err.split())

    said = refused("--transport", "loopback", "--device", "cuda:1")
    assert "no memory of cuda:1: there is no CUDA device 1: this process sees 1" in said
    # The peer's process has another driver, or none.
    assert "no memory of cuda:99: " in refused("--peer-device", "cuda:99")
    with TransferEngine(token=TOKEN) as engine:
        (tmp_path / "none").write_bytes(b"no library")
        _native.use_driver_for_tests(str(tmp_path / "none"))
        with pytest.raises(InvalidArgument, match=r"no memory of cuda:0: .*driver"):
            Memory(engine, MIB, "cuda:0")


@pytest.mark.parametrize("option", ["--device", "--peer-device"])
@pytest.mark.parametrize("text", ["gpu0", "cuda", "cuda:", "cuda:-1", "cuda:0x1", "cuda:99999", "cpu:0"])
def test_a_device_that_is_none(option: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "transfer", *QUICK, option, text]) == 2
    assert f"{option} is cpu, or cuda:0" in " ".join(capsys.readouterr().err.split())


@contextmanager
def server(*arguments: str, env: dict[str, str] | None = None) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`moonpool bench transfer --serve`, and its address."""
    process = bench("transfer", "--serve", "--listen", "127.0.0.1:0", *arguments, env=env)
    try:
        assert process.stdout is not None
        assert speaks(process.stdout, DEADLINE_S)
        line = process.stdout.readline()
        assert "moonpool bench transfer --connect" in line
        yield process, line.split()[-1]
    finally:
        process.kill()
        process.communicate()


def test_serve_and_connect(tmp_path: Path, runtime_dir: Path) -> None:
    with server("--memory", "8MiB") as (process, address):
        for number in range(2):  # one after the other
            file = tmp_path / f"{number}.json"
            connect = ["--connect", address, "--verify", "--json", str(file)]
            assert run(["bench", "transfer", *QUICK, *connect, "--direction", "write"]) == 0
            assert run(["bench", "transfer", *QUICK, *connect]) == 0
            document = json.loads(file.read_text())
            assert document["peer"] == address
            assert document["rows"][0]["verified_bytes"] > 0
        process.send_signal(signal.SIGTERM if number else signal.SIGINT)
        assert process.wait(20) == 0


def test_a_server_by_name(tmp_path: Path, runtime_dir: Path) -> None:
    with running("redis", tmp_path) as redis, server("--name", "far", "--metadata", redis.url) as (_, said):
        assert said == redis.url  # of the line with the command for the other side
        file = tmp_path / "rows.json"
        connect = ["--connect", "far", "--metadata", redis.url, "--json", str(file)]
        assert run(["bench", "transfer", *QUICK, *connect, "--verify"]) == 0
        assert rows_of(file)[0]["verified_bytes"] > 0


@pytest.mark.parametrize("direction", ["read", "write"])
@pytest.mark.parametrize("there", ["directory", "new file"])
def test_a_file_verified(tmp_path: Path, there: str, direction: str) -> None:
    file, path = tmp_path / "rows.json", tmp_path / "far"
    if there == "directory":
        path.mkdir()
    options = ["--file", str(path), "--direction", direction, "--depth", "4", "--json", str(file)]
    assert run(["bench", "transfer", *QUICK, *options, "--size", "64KiB", "--verify"]) == 0
    (row,) = rows_of(file)
    assert row["transport"] == "file"
    assert row["verified_bytes"] > 0
    assert not (list(path.iterdir()) if there == "directory" else path.exists())


def test_a_file_of_a_user_is_read_and_not_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine"
    path.write_bytes(b"mine" * (2 * MIB))
    before = path.read_bytes()
    assert run(["bench", "transfer", *QUICK, "--file", str(path)]) == 0
    for writes in (["--direction", "write"], ["--verify"]):
        assert run(["bench", "transfer", *QUICK, "--file", str(path), *writes]) == 2
        assert "--overwrite" in capsys.readouterr().err
    assert path.read_bytes() == before
    assert run(["bench", "transfer", "--seconds", "0.2", "--file", str(path)]) == 2  # 64 MiB are not there
    assert "less than the working set" in capsys.readouterr().err
    assert run(["bench", "transfer", *QUICK, "--file", str(path), "--verify", "--overwrite"]) == 0
    assert path.read_bytes() != before


def test_no_place_for_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "transfer", *QUICK, "--file", str(tmp_path / "not" / "there")]) == 2
    assert "there is no directory" in capsys.readouterr().err
    assert run(["bench", "transfer", *QUICK, "--file", str(tmp_path), "--serve"]) == 2


def test_a_server_with_another_token_or_too_little_memory(
    runtime_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "token").write_text("a token that was chosen")
    (tmp_path / "token").chmod(0o600)
    with server("--memory", "1MiB", "--token-file", str(tmp_path / "token")) as (_, address):
        assert run(["bench", "transfer", *QUICK, "--connect", address]) == 2
        assert "token" in capsys.readouterr().err
        right = ["--connect", address, "--token-file", str(tmp_path / "token")]
        assert run(["bench", "transfer", *QUICK, *right]) == 2
        assert "less than the working set" in capsys.readouterr().err


def test_nobody_to_connect_to(free_port: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "transfer", *QUICK, "--connect", f"127.0.0.1:{free_port}"]) == 3
    said = capsys.readouterr().err
    assert said.startswith("moonpool: ")
    assert str(free_port) in said


def test_an_engine_that_is_no_bench_server(runtime_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with TransferEngine() as engine:
        engine.allocate(8 * MIB)
        assert run(["bench", "transfer", *QUICK, "--connect", engine.addresses[0]]) == 3
    assert "is no bench server" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_shows_what_there_is(
    runtime_dir: Path, tmp_path: Path, number: signal.Signals
) -> None:
    file = tmp_path / "rows.json"
    process = bench("transfer", "--seconds", "60", "--size", "64KiB,1MiB", "--json", str(file))
    assert process.stdout is not None
    line = process.stdout.readline()  # the first second is over
    assert "GB/s" in line
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) == 1
    process.send_signal(number)
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130, err
    assert err == ""
    assert "64.0 KiB" in out
    document = json.loads(file.read_text())
    assert document["interrupted"] is True
    (row,) = document["rows"]
    assert row["interrupted"] is True
    assert row["seconds"] < 30
    assert row["operations"] > 0
    until(lambda: not Path(f"/proc/{children[0]}").exists())


def test_its_peer_ends_with_it(runtime_dir: Path) -> None:
    process = bench("transfer", "--seconds", "60")
    assert process.stdout is not None
    process.stdout.readline()
    (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    process.communicate()
    until(lambda: not Path(f"/proc/{child}").exists())


def test_a_peer_that_is_killed_is_named(runtime_dir: Path) -> None:
    process = bench("transfer", "--seconds", "60", "--transport", "tcp")
    assert process.stdout is not None
    process.stdout.readline()
    (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(child), signal.SIGKILL)
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 3
    assert err.startswith("moonpool: ")
    assert "127.0.0.1:" in err
    assert err.count("\n") == 1


@contextmanager
def altered_server(change: Any) -> Iterator[str]:
    """A bench server that changes its memory when the load begins: the second mark is the one before it."""
    with TransferEngine("altered", token=TOKEN) as engine:
        block = engine.allocate(control.CONTROL_BYTES, control.CONTROL)
        control.start(block.view)
        data = engine.allocate(MIB, control.DATA)
        over = threading.Event()

        def serve() -> None:
            while not over.is_set():
                for _, message in engine.notifications(0.1):
                    change(data.view)
                    control.answer(block.view, message, 0)

        thread = threading.Thread(target=serve)
        thread.start()
        yield engine.addresses[0]
        over.set()
        thread.join()


@pytest.mark.parametrize("direction", ["read", "write"])
def test_verify_finds_one_wrong_byte(direction: str) -> None:
    def change(view: memoryview) -> None:
        view[12345] ^= 1

    with altered_server(change) as address, TransferEngine(token=TOKEN) as engine:
        client = transfer.EngineBench(engine, address, MIB)
        plan = transfer.Plan(65536, direction=direction, working_set=MIB, seconds=0.2, verify=True)
        with pytest.raises(CorruptObject, match="offset 12345 of the memory of"):
            client.run(plan, lambda seconds, operations: None)


def test_the_pattern_has_no_two_equal_words() -> None:
    import numpy as np

    words = control.pattern(7, MIB).view(np.uint64)
    assert len(np.unique(words)) == len(words)
    with TransferEngine(token=TOKEN) as engine:
        data = Memory(engine, 3 << 24)
        data.fill()
        assert data.region.view == control.pattern(0, 3 << 24).data


# ---- the load


def test_percentiles_of_all_threads() -> None:
    gauges = [Gauge(), Gauge()]
    for number in range(101):
        gauges[number % 2].add(number * 1000)
    assert load.percentiles_us(gauges) == (50.0, 99.0)
    assert load.percentiles_us([Gauge()]) == (0.0, 0.0)


def test_the_samples_have_a_maximum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "SAMPLES_MAX", 10)
    gauge = Gauge()
    for number in range(25):
        gauge.add(number)
    assert gauge.operations == 25
    assert sorted(gauge.samples) == list(range(15, 25))


def test_what_a_worker_raises_ends_the_load() -> None:
    def fails(gauge: Gauge) -> None:
        raise Unavailable("gone")

    def works(gauge: Gauge) -> None:
        while not gauge.stop:
            gauge.add(1)

    with pytest.raises(Unavailable, match="gone"):
        load.run([works, fails], 60, lambda seconds, operations: None)


# ---- store


@pytest.mark.parametrize("where", [[], ["--embedded"]], ids=["own node", "embedded"])
def test_store(
    where: list[str], tmp_path: Path, runtime_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.json"
    options = ["--seconds", "0.2", "--dram", "32MiB", "--batch", "4", "--threads", "2", "--verify"]
    assert run(["bench", "store", *where, *options, "--json", str(file)]) == 0
    text = capsys.readouterr().out
    for word in ("keys/s", "put", "longest_prefix", "node's"):
        assert word in text
    rows = {row["verb"]: row for row in rows_of(file)}
    assert list(rows) == list(store.VERBS)
    for row in rows.values():
        assert row["operations"] > 0
        assert row["keys_per_s"] == pytest.approx(row["operations"] * 4 / row["seconds"])
        assert (row["gb_per_s"] > 0) == (row["verb"] in ("put", "get"))
        assert 0 < row["p50_us"] <= row["p99_us"]
        assert row["cpu_s_per_million"] > 0
    assert rows["put"]["verified_bytes"] > 0
    assert rows["get"]["verified_bytes"] >= rows["get"]["operations"] * 4 * 65536
    if not where:
        assert rows["put"]["node_cpu_s_per_million"] > 0


def test_a_running_node_is_left_as_it_was(tmp_path: Path, runtime_dir: Path) -> None:
    path = runtime_dir / "node-t.sock"
    (runtime_dir / "token").write_bytes(TOKEN)
    (runtime_dir / "token").chmod(0o600)
    node = NodeProcess(path)
    try:
        with Store(str(path), token=TOKEN) as kept:
            kept.put("mine", b"stays")
            file = tmp_path / "rows.json"
            options = ["--seconds", "0.2", "--size", "4KiB", "--json", str(file)]
            assert run(["bench", "store", "--node", "t", *options]) == 0
            assert json.loads(file.read_text())["node"] == "t"
            # Some verbs need nothing of the node.
            assert max(row["node_cpu_s_per_million"] for row in rows_of(file)) > 0
            assert kept.get("mine") == b"stays"
            assert kept.stat()["objects"] == 1
        assert run(["bench", "store", "--node", "absent", *options]) == 3
    finally:
        node.close()


def test_store_interrupted(runtime_dir: Path) -> None:
    process = bench("store", "--seconds", "60", "--verb", "put", "--dram", "32MiB")
    assert process.stdout is not None
    assert "GB/s" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130, err
    assert err == ""
    assert "keys/s" in out
