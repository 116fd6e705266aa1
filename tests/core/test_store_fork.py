"""fork() with an open store: the child's handles raise, and nothing that it does, its end included, reaches
the parent's connection."""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from moonpool import STORED, Presence, Store, _native
from moonpool.core.config.native_settings import master_settings, node_settings
from moonpool.core.errors import Closed, Forked

from .forked import run_child, wait_for
from .store_bed import MIB, TOKEN, until


@pytest.fixture
def server(runtime_dir: Path) -> Iterator[_native.Server]:
    server = _native.Server(str(runtime_dir / "n.sock"), [("default", 16 * MIB)], TOKEN, node_settings())
    server.start()
    yield server
    assert server.check_integrity()
    server.stop()


def test_every_call_of_the_child_raises_and_the_parent_goes_on(
    server: _native.Server, runtime_dir: Path
) -> None:
    store = Store(str(runtime_dir / "n.sock"), token=TOKEN)
    store.put("k", b"before")
    view = store.get("k")
    pin = store.longest_prefix(["k"]).pin
    held: list[object] = [view, pin]

    def child() -> None:
        calls = (
            lambda: store.put("k2", b"x"),
            lambda: store.get("k"),
            lambda: store.get("k", bytearray(6)),
            lambda: store.get("k", pin=pin),
            lambda: store.exists("k"),
            lambda: store.longest_prefix(["k"]),
            lambda: store.remove("k"),
            lambda: store.list(),
            lambda: store.stat(),
        )
        for call in calls:
            with pytest.raises(Forked, match="parent process"):
                call()
        assert not store.connected
        assert view == b"before"
        assert pin is not None
        pin.release()
        held.clear()
        with Store(str(runtime_dir / "n.sock"), token=TOKEN) as own:  # a store of its own works
            assert own.put("child", b"mine") == STORED
        store.close()

    assert run_child(child) == 0
    until(lambda: server.metrics()["connections"] == 1)  # the child's own has ended
    metrics = server.metrics()
    assert metrics["pins"] == 2  # the child's release was none
    assert store.put("after", b"x") == STORED
    assert store.get(["k", "child"]) == [b"before", b"mine"]
    assert metrics["protocol_errors_total"] == 0
    store.close()


def test_a_child_that_drops_everything_disturbs_nobody(server: _native.Server, runtime_dir: Path) -> None:
    stores = [Store(str(runtime_dir / "n.sock"), token=TOKEN)]
    stores[0].put(["a", "b"], [b"aa", b"bb"], ack=False)
    views = [stores[0].get("a")]
    workers = [_native.Worker(stores[0]._client)]

    def child() -> None:
        views.clear()
        workers.clear()
        stores.clear()

    assert run_child(child) == 0
    assert stores[0].put("c", b"cc") == STORED
    assert views[0] == b"aa"
    assert server.metrics()["connections"] == 1
    workers[0].close()
    stores[0].close()


def test_a_child_of_a_process_with_an_embedded_node(runtime_dir: Path) -> None:
    stores = [Store(embedded=4 * MIB)]
    stores[0].put("k", b"x")
    server = _native.Server(str(runtime_dir / "e.sock"), [("default", 4 * MIB)], TOKEN, node_settings())
    server.start()
    servers = [server]

    def child() -> None:
        with pytest.raises(Forked):
            stores[0].put("k2", b"x")
        assert not servers[0].check_integrity()
        assert servers[0].metrics() == {}
        stores[0].close()
        servers[0].stop()  # it has no thread to wait for, and the socket is not its own
        servers.clear()
        stores.clear()

    assert run_child(child) == 0
    assert (runtime_dir / "e.sock").exists()
    with Store(str(runtime_dir / "e.sock"), token=TOKEN) as other:
        assert other.put("k", b"x") == STORED
    assert stores[0].put("k2", b"x") == STORED
    stores[0].close()
    server.stop()


def test_a_child_of_a_store_with_a_master(runtime_dir: Path) -> None:
    """The thread that dials the master waits on a condition variable, which the child must not destroy."""
    master = _native.MasterServer(["127.0.0.1:0"], TOKEN, master_settings())
    master.start()
    path = str(runtime_dir / "n.sock")
    node = _native.Server(
        path,
        [("default", 4 * MIB)],
        TOKEN,
        node_settings(),
        name="a",
        listen=["127.0.0.1:0"],
        master=master.addresses[0],
    )
    node.start()
    stores = [Store(path, token=TOKEN)]
    stores[0].put("k", b"x")
    directories = [_native.DirectoryClient(master.addresses[0], TOKEN, timeout_s=5.0)]
    until(lambda: len(directories[0].members(fresh=True)[1]) == 1)
    assert stores[0].exists("nowhere") == Presence.MISS  # the master was asked
    masters, nodes = [master], [node]

    def child() -> None:
        with pytest.raises(Forked):
            stores[0].exists("nowhere")
        with pytest.raises(Forked):
            directories[0].members()
        for dropped in (stores, directories, nodes, masters):
            dropped.clear()  # type: ignore[attr-defined]
            gc.collect()

    del master, node
    assert run_child(child) == 0
    assert stores[0].exists(["k", "nowhere"]) == [Presence.HIT, Presence.MISS]
    assert len(directories[0].members(fresh=True)[1]) == 1
    stores[0].close()
    directories[0].close()
    nodes[0].stop()
    masters[0].stop()


def test_a_child_forked_while_a_thread_connects(runtime_dir: Path) -> None:
    """The thread holds the client's mutex over the fork, and is not there to let go of it."""
    path = str(runtime_dir / "silent.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener, ThreadPoolExecutor(1) as pool:
        listener.bind(path)
        listener.listen()
        clients = [_native.Client(path, TOKEN, timeout_s=60.0)]
        waiting = pool.submit(clients[0].connect)
        caller, _ = listener.accept()  # it is in the handshake

        def child() -> None:
            assert not clients[0].connected
            for call in (
                clients[0].connect,
                lambda: clients[0].exists(["k"]),
                lambda: clients[0].longest_prefix(["k"]),
                lambda: clients[0].remove(["k"]),
            ):
                with pytest.raises(Forked):
                    call()
            clients[0].close()
            clients.clear()

        assert run_child(child) == 0
        clients[0].close()
        with pytest.raises(Closed):
            waiting.result(10)
        caller.close()


def test_a_child_that_lives_on_does_not_keep_the_parents_connection(
    server: _native.Server, runtime_dir: Path
) -> None:
    """The descriptor is in both processes: without a shutdown the node would wait for the child's end."""
    store = Store(str(runtime_dir / "n.sock"), token=TOKEN)
    store.put("k", b"x")
    view = store.get("k")
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(write_end)
        os.read(read_end, 1)  # until the parent closes it
        os._exit(0)
    os.close(read_end)
    store.close()
    del view
    until(lambda: server.metrics()["connections"] == 0)
    assert server.metrics()["pins"] == 0
    os.close(write_end)
    assert wait_for(pid) == 0
