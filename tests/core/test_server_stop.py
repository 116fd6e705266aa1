"""A node that is stopped twice: by several threads, while it writes its disk, and in a child of fork()."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from moonpool import Store, _native
from moonpool.core.config.native_settings import node_settings

from .store_bed import MIB, TOKEN

DEADLINE_S = 60.0


def made(folder: Path, **more: object) -> _native.Server:
    arguments = (str(folder / "node.sock"), [("default", 32 * MIB)], TOKEN, node_settings())
    server = _native.Server(*arguments, **more)  # type: ignore[arg-type]
    server.start()
    return server


def test_an_embedded_node_may_be_closed_by_several_threads() -> None:
    for _ in range(20):
        store = Store(embedded="16MiB")
        together = threading.Barrier(4)

        def close(store: Store = store, together: threading.Barrier = together) -> None:
            together.wait(DEADLINE_S)
            store.close()

        threads = [threading.Thread(target=close, daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
        assert not any(thread.is_alive() for thread in threads)


def test_a_second_stop_ends_no_first_one_that_writes_the_disk(tmp_path: Path) -> None:
    (tmp_path / "ssd").mkdir()
    disk = [(str(tmp_path / "ssd"), 256 * MIB)]
    server = made(tmp_path, ssd=disk)
    keys = [f"k{number}" for number in range(24)]
    with Store(str(tmp_path / "node.sock"), token=TOKEN, timeout_s=20.0) as store:
        assert all(store.put(keys, [os.urandom(MIB) for _ in keys]))
    first = threading.Thread(target=server.stop)
    first.start()
    while first.is_alive():
        server.stop()
        first.join(0.001)
    again = made(tmp_path, ssd=disk)
    with Store(str(tmp_path / "node.sock"), token=TOKEN, timeout_s=20.0) as store:
        assert [each.name for each in store.exists(keys)] == ["HIT"] * len(keys)
    again.stop()


def test_a_child_of_fork_takes_nothing_of_its_parents_node(tmp_path: Path) -> None:
    server = made(tmp_path)
    child = os.fork()
    if child == 0:
        server.stop()
        server.stop()
        del server
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with Store(str(tmp_path / "node.sock"), token=TOKEN, timeout_s=20.0) as store:
        assert store.put("k", b"v")
    server.stop()
