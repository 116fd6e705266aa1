"""The bed itself: hosts see nothing of each other but TCP, cuts cut, the relay does what it says."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..core.store_bed import until
from .hosts import Host, Network
from .namespaces import ROOT, Namespace, why_not
from .relay import DOWN, UP, Relay, flip_bit, flip_in

PORT = 7710


@contextlib.contextmanager
def echo(host: Host) -> Iterator[None]:
    """Sends back whatever comes, on PORT of the host."""
    with host.namespace.entered():
        listener = socket.create_server((host.address, PORT))

    def serve(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            while data := connection.recv(65536):
                connection.sendall(data)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=serve, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    yield
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def dial(caller: Host, server: Host, timeout_s: float = 5.0) -> socket.socket:
    with caller.namespace.entered():
        return socket.create_connection((server.address, PORT), timeout_s)


def exchange(connection: socket.socket, data: bytes) -> bytes:
    connection.sendall(data)
    back = b""
    while len(back) < len(data):
        piece = connection.recv(65536)
        if not piece:
            break
        back += piece
    return back


@pytest.fixture
def hosts(network: Network) -> tuple[Host, Host]:
    return network.host("a"), network.host("b")


def test_each_host_has_folders_of_its_own(network: Network, hosts: tuple[Host, Host]) -> None:
    for host in hosts:
        for folder in ("/run", "/tmp", "/dev/shm"):
            assert not host.path(f"{folder}/own").exists()
            host.path(f"{folder}/own").mkdir()
            host.path(f"{folder}/{host.name}").mkdir()
    look = hosts[0].start("look", ["ls", "-d", "/run/own", "/tmp/a", "/dev/shm/b"])
    assert look.wait() != 0
    assert look.text().splitlines()[1:] == ["/run/own", "/tmp/a"]
    assert [title for title, _ in network.logs()] == [f"log of a: look (pid {look.pid})"]


def test_moonpool_runs_in_a_host(hosts: tuple[Host, Host]) -> None:
    for host in hosts:
        node = host.moonpool("node", "--dram", "16MiB", "--http", "off")
        assert "/run/moonpool/node-default.sock" in node.said("^moonpool node .*$")[0]
    assert all(host.path("/run/moonpool/token").read_bytes() for host in hosts)
    tokens = {host.path("/run/moonpool/token").read_bytes() for host in hosts}
    assert len(tokens) == 2  # what one has made, the other does not see


def test_a_partition_is_silent_and_heals(network: Network, hosts: tuple[Host, Host]) -> None:
    a, b = hosts
    c = network.host("c")
    with echo(b):
        connection, bystander = dial(a, b), dial(c, b)
        assert exchange(connection, b"before") == b"before"
        network.cut((a, b))
        connection.settimeout(0.3)
        connection.sendall(b"lost for now")
        with pytest.raises(TimeoutError):
            connection.recv(100)
        with pytest.raises(TimeoutError):
            dial(a, b, 0.3)
        assert exchange(bystander, b"not cut") == b"not cut"
        network.heal()
        connection.settimeout(10)
        assert connection.recv(100) == b"lost for now"  # TCP sends it again
        assert exchange(dial(a, b), b"new") == b"new"


def test_one_direction_can_be_dropped(network: Network, hosts: tuple[Host, Host]) -> None:
    a, b = hosts
    with echo(b):
        connection = dial(a, b)
        before = len(network.switch_rules())
        network.drop((b, a))
        assert len(network.switch_rules()) == before + 1
        connection.settimeout(0.3)
        with pytest.raises(TimeoutError):
            exchange(connection, b"arrives, its answer does not")
        network.heal()
        assert len(network.switch_rules()) == before


def test_an_unplugged_host_comes_back(network: Network, hosts: tuple[Host, Host]) -> None:
    a, b = hosts
    with echo(b):
        connection = dial(a, b)
        network.unplug(b)
        connection.settimeout(0.3)
        with pytest.raises(TimeoutError):
            exchange(connection, b"x")
        network.plug(b)
        connection.settimeout(10)
        assert connection.recv(1) == b"x"


def test_a_host_that_is_closed_takes_its_processes_along(network: Network) -> None:
    host = network.host("a")
    process = host.start("cat", ["sleep", "1000"])
    network.close()
    assert not process.is_running
    network.hosts.clear()
    network.switch = Namespace()


def test_nothing_outlives_a_test_run_that_is_killed() -> None:
    script = (
        "import sys; from tests.cluster.namespaces import Namespace;"
        "n = Namespace(); p = n.popen(['sleep', '1000']); print(n.pid, p.pid, flush=True);"
        "sys.stdin.read()"
    )
    if why_not():
        pytest.skip(why_not())
    run = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    )
    assert run.stdout is not None
    pids = [int(word) for word in run.stdout.readline().split()]
    assert len(pids) == 2
    assert all(is_alive(pid) for pid in pids)
    run.kill()
    run.communicate()
    until(lambda: not any(is_alive(pid) for pid in pids))


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def relay(network: Network, hosts: tuple[Host, Host]) -> Iterator[Relay]:
    with echo(hosts[1]):
        relay = Relay(network, *hosts, PORT)
        yield relay
        relay.close()


def test_the_relay_is_on_the_way_of_one_host_only(
    network: Network, hosts: tuple[Host, Host], relay: Relay
) -> None:
    a, b = hosts
    data = bytes(range(256)) * 4096
    with dial(a, b) as connection:
        threading.Thread(target=connection.sendall, args=(data,)).start()
        back = b""
        while len(back) < len(data):
            back += connection.recv(65536)
        assert back == data
        assert relay.connections == 1
    until(lambda: relay.connections == 0)
    assert relay.passed == {UP: len(data), DOWN: len(data)}
    with dial(network.host("c"), b) as connection:
        assert exchange(connection, b"past it") == b"past it"
    assert relay.accepted == 1


def test_the_relay_delays_slows_and_holds(hosts: tuple[Host, Host], relay: Relay) -> None:
    with dial(*hosts) as connection:
        assert exchange(connection, b"at once") == b"at once"
        relay.delay_s = 0.1
        began = time.monotonic()
        assert exchange(connection, b"late") == b"late"
        assert time.monotonic() - began >= 0.2
        relay.delay_s, relay.bytes_per_s = 0, 200_000
        began = time.monotonic()
        assert exchange(connection, bytes(40_000)) == bytes(40_000)
        assert time.monotonic() - began >= 0.2
        relay.bytes_per_s = 0
        relay.hold(DOWN)
        connection.settimeout(0.2)
        with pytest.raises(TimeoutError):
            exchange(connection, b"held")
        relay.flow()
        connection.settimeout(5)
        assert connection.recv(4) == b"held"


def test_the_relay_resets_and_refuses(hosts: tuple[Host, Host], relay: Relay) -> None:
    with dial(*hosts) as connection:
        assert exchange(connection, b"x") == b"x"
        relay.cut(refuse=True)
        with pytest.raises(ConnectionError):
            exchange(connection, b"x" * 10)
        with pytest.raises(ConnectionError):  # by connect or by what follows
            exchange(dial(*hosts), b"x" * 10)
        relay.mend()
        with dial(*hosts) as again:
            assert exchange(again, b"y") == b"y"


def test_the_relay_flips_bits(hosts: tuple[Host, Host], relay: Relay) -> None:
    relay.spoil = flip_bit(DOWN, 2, bit=1)
    with dial(*hosts) as connection:
        assert exchange(connection, b"\0\0\0\0") == b"\0\0\2\0"
        assert exchange(connection, b"\0\0\0\0") == b"\0\0\0\0"
        relay.spoil = flip_in(UP, b"mark")
        assert exchange(connection, b"a mark, a mark") == b"a masj, a mark".replace(b"sj", b"sk")
