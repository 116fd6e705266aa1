"""`moonpool node --take-over`: another process goes on with memory and connections of a running node."""

from __future__ import annotations

import array
import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from moonpool import STORED, Presence, _native
from moonpool.core.config import paths
from moonpool.core.config.config import load
from moonpool.core.config.native_settings import master_settings
from moonpool.core.errors import ConfigError, Unavailable
from moonpool.core.service import take_over
from moonpool.core.service.drain import DrainRequest
from moonpool.core.service.http_get import get_json
from moonpool.core.service.node import Node
from moonpool.core.service.published_events import local_nodes
from moonpool.core.service.take_over import Facts, Offer, find_predecessor
from moonpool.core.store.keys import Ranges, block_digests, block_name
from moonpool.core.version_range import VersionRange
from moonpool.disagg_proxy.events.prefix_indexes import PrefixIndexes
from moonpool.disagg_proxy.events.settings import EventSource
from moonpool.disagg_proxy.events.subscriber import Subscriber
from tests.descriptors import speaks

from .master_bed import MasterProcess, environment
from .store_bed import TOKEN, until
from .take_over_bed import START_S, Load, NodeCommand, OfferBed, make_server

KIB = 1 << 10
BLOCK = 16  # tokens


@pytest.fixture
def node(runtime: Path) -> Iterator[NodeCommand]:
    node = NodeCommand("a")
    yield node
    node.close()


@pytest.fixture
def offer(runtime: Path) -> Iterator[OfferBed]:
    offer = OfferBed()
    yield offer
    offer.close()


def some_objects(rng: random.Random, count: int = 200) -> dict[str, bytes]:
    return {f"k{i}": rng.randbytes(rng.choice((1, 4 * KIB, 50 * KIB))) for i in range(count)}


def assert_has(node: NodeCommand, objects: dict[str, bytes]) -> None:
    with node.store() as store:
        found = store.get(list(objects))
        assert [None if each is None else bytes(each) for each in found] == list(objects.values())


# ---- clients go on


def test_clients_put_and_read_all_the_time(node: NodeCommand, rng: random.Random) -> None:
    objects = some_objects(rng)
    with ExitStack() as stack:
        stores = [stack.enter_context(node.store()) for _ in range(3)]
        assert set(stores[0].put(list(objects), list(objects.values()))) == {STORED}
        load = Load(stores, objects)
        stack.callback(load.stop)
        for _ in range(3):
            load.reset()
            until(lambda: load.more(20), START_S)
            node.replace()
        load.reset()
        until(lambda: load.more(20), START_S)
    assert not load.faults
    assert_has(node, objects)


def test_views_and_pins_stay_what_they_were(node: NodeCommand, rng: random.Random) -> None:
    with node.store() as store:
        value = rng.randbytes(100 * KIB)
        assert store.put("held", value) == STORED
        view = store.get("held")
        assert view is not None
        prefix = store.longest_prefix(["held"])
        assert prefix.blocks == 1
        node.replace()
        with node.store() as other:
            assert other.remove("held")
            # Twice the arena: the memory of all that is not pinned gets other bytes.
            for i in range(64):
                assert other.put(f"new-{i}", rng.randbytes(1 << 20)) == STORED
        assert bytes(view) == value
        into = bytearray(len(value))
        assert store.get("held", into=into, pin=prefix.pin) == len(value)
        assert into == value
        assert store.get("held") is None


def test_a_process_that_starts_later_is_served_and_so_are_the_pages(node: NodeCommand) -> None:
    pages = node.http
    node.replace()
    assert node.http == pages
    assert get_json(f"{pages}/health")["pid"] == node.pid
    with node.store() as store:
        assert store.put("a", b"1") == STORED
    node.replace()
    assert_has(node, {"a": b"1"})


def test_a_stop_after_it_leaves_nothing_behind(node: NodeCommand) -> None:
    node.replace()
    node.processes[-1].send_signal(signal.SIGTERM)
    assert node.processes[-1].wait(START_S) == 0
    left = [path.name for path in node.socket.parent.iterdir() if path.name.startswith("node-a")]
    assert left == []


def test_without_a_running_node_it_begins_anew(runtime: Path) -> None:
    node = NodeCommand("a", "--take-over")
    try:
        assert_serves_one(node)
        node.processes[-1].send_signal(signal.SIGTERM)
        _, said = node.processes[-1].communicate(timeout=START_S)
        assert f"no node serves {node.socket}: this one begins anew" in said
    finally:
        node.close()


def test_followers_of_its_kv_events_go_on(node: NodeCommand) -> None:
    indexes = PrefixIndexes(blocks_max=10_000)
    index = indexes.obtain(BLOCK)
    assert index is not None

    def put(first: int) -> None:
        names = [block_name(d, whole) for d in block_digests(_tokens(first), BLOCK)]
        with node.store(fingerprint=b"f" * 32) as store:
            assert store.put(names, [b"x"] * len(names)) == [STORED] * len(names)

    def known(first: int) -> int:
        return index.match(index.keys(array.array("I", _tokens(first)))).pool_blocks

    whole = Ranges(0, 0, 1, 0, 4)
    (published,) = [each.published for each in local_nodes()]
    source = EventSource("node", published.events, published.replay, pool=True)
    subscriber = Subscriber((source,), indexes, {"node": 5})
    subscriber.start()
    try:
        put(0)
        until(lambda: known(0) == 4, START_S)
        node.replace()
        assert [each.published for each in local_nodes()] == [published]
        put(1000)
        until(lambda: known(1000) == 4, START_S)
        assert known(0) == 4
    finally:
        subscriber.stop()


def _tokens(first: int) -> list[int]:
    return list(range(first, first + 4 * BLOCK))


def test_a_node_that_still_reserves_its_memory(runtime: Path) -> None:
    node = NodeCommand("a", dram="2GiB")
    try:
        with node.store() as store:
            for round in range(3):
                assert store.put(f"k{round}", bytes(1000)) == STORED
                node.replace()
            until(lambda: node.reserved_bytes() == 2 << 30, START_S)
            assert store.exists(["k0", "k1", "k2"]) == [Presence.HIT] * 3
    finally:
        node.close()


def assert_serves_one(node: NodeCommand) -> None:
    with node.store() as store:
        key = os.urandom(8)
        assert store.put(key, key) == STORED
        assert store.get(key) == key


# ---- in a pool


def test_a_node_of_another_host_reads_on_and_the_master_keeps_its_place(
    runtime: Path, rng: random.Random
) -> None:
    with ExitStack() as stack:
        master = MasterProcess(suspect_after_s="30s")
        stack.callback(master.close)
        node = NodeCommand("a", "--master", master.address)
        stack.callback(node.close)
        other = NodeCommand("b", "--master", master.address)
        stack.callback(other.close)
        objects = some_objects(rng, 50)
        with node.store() as store:
            store.put(list(objects), list(objects.values()))
        far = [stack.enter_context(other.store()) for _ in range(2)]
        until(lambda: all(each is Presence.HIT for each in far[0].exists(list(objects))), START_S)
        place = [n["id"] for n in master.page("/nodes")["nodes"] if n["name"] == "a"]
        load = Load(far, objects)
        stack.callback(load.stop)
        for _ in range(2):
            load.reset()
            until(lambda: load.more(10), START_S)
            node.replace()
        load.reset()
        until(lambda: load.more(10), START_S)
        assert not load.faults
        assert [n["id"] for n in master.page("/nodes")["nodes"] if n["name"] == "a"] == place
        assert master.states() == {"a": "alive", "b": "alive"}


def test_what_is_removed_meanwhile_stays_removed(runtime: Path, rng: random.Random) -> None:
    with ExitStack() as stack:
        master = MasterProcess()
        stack.callback(master.close)
        node = NodeCommand("a", "--master", master.address)
        stack.callback(node.close)
        other = NodeCommand("b", "--master", master.address)
        stack.callback(other.close)
        near = stack.enter_context(node.store())
        far = stack.enter_context(other.store())
        keys = [f"r{i}" for i in range(20_000)]
        near.put(keys, [rng.randbytes(16) for _ in keys])
        until(lambda: all(each is Presence.HIT for each in far.exists(keys)), START_S)
        removed: list[str] = []
        over = threading.Event()

        def remove() -> None:
            for i, key in enumerate(keys):
                if (near if i % 2 else far).remove(key):
                    removed.append(key)
                if over.is_set():
                    return

        remover = threading.Thread(target=remove)
        remover.start()
        until(lambda: len(removed) > 10, START_S)
        node.replace()
        over.set()
        remover.join(START_S)
        assert not remover.is_alive()
        assert len(removed) < len(keys), "all were removed before the other process served"
        for store in (near, far):
            assert set(store.exists(removed)) == {Presence.MISS}
        node.replace()
        assert set(near.exists(removed)) == {Presence.MISS}


# ---- what fails changes nothing


def test_a_successor_that_is_killed_before_it_serves(node: NodeCommand, rng: random.Random) -> None:
    objects = some_objects(rng)
    script = (
        "import sys, time; from pathlib import Path;"
        "from moonpool.core.service.take_over import find_predecessor;"
        "old = find_predecessor(Path(sys.argv[1])); given = old.take_what_it_has();"
        "print('given', flush=True); time.sleep(600)"
    )
    with ExitStack() as stack:
        stores = [stack.enter_context(node.store()) for _ in range(2)]
        stores[0].put(list(objects), list(objects.values()))
        view = stores[0].get("k0")
        load = Load(stores, objects)
        stack.callback(load.stop)
        for _ in range(2):
            successor = subprocess.Popen(
                [sys.executable, "-c", script, str(node.socket)],
                stdout=subprocess.PIPE,
                env=environment(),
            )
            assert successor.stdout is not None
            try:
                assert speaks(successor.stdout, START_S)
                assert successor.stdout.readline() == b"given\n"
            finally:
                successor.kill()
                successor.wait()
                successor.stdout.close()
            load.reset()
            until(lambda: load.more(20), START_S)
        assert not load.faults
        assert view is not None
        assert bytes(view) == objects["k0"]
        node.replace()
        load.reset()
        until(lambda: load.more(20), START_S)
    assert not load.faults


def test_a_running_node_that_is_killed_once_it_is_given(node: NodeCommand, rng: random.Random) -> None:
    objects = some_objects(rng)
    with node.store() as store:
        store.put(list(objects), list(objects.values()))
        predecessor = find_predecessor(node.socket)
        assert predecessor is not None
        server = make_server(node.socket, 32, predecessor.take_what_it_has(), listen=["127.0.0.1:0"])
        os.kill(node.pid, signal.SIGKILL)
        server.prepare()
        predecessor.agree()
        predecessor.replace()
        server.start()
        try:
            predecessor.close()
            assert [bytes(each or b"") for each in store.get(list(objects))] == list(objects.values())
            assert store.put("later", b"x") == STORED
            assert server.check_integrity()
        finally:
            server.stop()


@pytest.mark.parametrize("dram", ["16MiB", "64MiB"])
def test_another_size_is_refused(node: NodeCommand, dram: str) -> None:
    with node.store() as store:
        store.put("a", b"1")
    code, said = node.try_to_replace(dram=dram)
    assert code == 2
    size, other = "32.0 MiB", f"{dram[:2]}.0 MiB"
    assert f"the running node has node.dram = {size}, and this one {other}: give it the same" in said
    assert said.count("\n") == 1
    assert_has(node, {"a": b"1"})


def test_a_share_of_the_memory_keeps_the_running_nodes_size(node: NodeCommand) -> None:
    with node.store() as store:
        store.put("a", b"1")
    node.dram = "50%"
    node.replace()
    assert "32.0 MiB of DRAM" in node.line
    assert_has(node, {"a": b"1"})


def test_a_second_take_over_at_the_same_time_is_refused(
    offer: OfferBed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(take_over, "ANSWER_S", START_S)
    first = offer.find()
    with pytest.raises(ConfigError, match="another process takes over from it at this moment"):
        offer.find()
    first.close()
    until(lambda: not _is_busy(offer), START_S)
    assert offer.done == []


def _is_busy(offer: OfferBed) -> bool:
    try:
        found = offer.find()
    except ConfigError:
        return True
    found.close()
    return False


@pytest.mark.parametrize(
    ("lowest", "highest", "refusal"),
    [
        (1, 0, ""),  # of the release before, which says one version
        (1, 1, ""),
        (1, 2, ""),
        (2, 0, "the running node version 2, none in common; upgrade this release"),
        (2, 3, "the running node versions 2 to 3, none in common; upgrade this release"),
        (0, 0, "the running node version 0, none in common; upgrade the running node"),
        (3, 1, None),
    ],
)
def test_a_running_node_of_another_release(
    runtime: Path, lowest: int, highest: int, refusal: str | None
) -> None:
    path = paths.node_socket("a")
    facts = Facts(lowest, 1, {}, "", highest=highest)
    with open(os.devnull, "rb") as lock, ExitStack() as stack:
        offer = Offer(
            path,
            lambda: (facts, [lock.fileno()]),
            give=lambda: pytest.fail("it was given"),
            take_back=lambda: None,
            close_events=lambda: None,
            let_go=lambda: None,
        )
        stack.callback(offer.close)
        if refusal == "":
            predecessor = find_predecessor(path)
            assert predecessor is not None
            predecessor.close()
            return
        expected = "the running node says a range of versions of the take-over that is none"
        if refusal is not None:
            expected = f"this release speaks version 1 of the take-over, {refusal}"
        with pytest.raises(ConfigError, match=expected):
            find_predecessor(path)


def test_the_running_node_hears_in_which_version_it_is_taken_over(
    offer: OfferBed, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asker:
        asker.settimeout(START_S)
        asker.connect(str(paths.socket_take_over(offer.path)))
        _, numbers, _, _ = socket.recv_fds(asker, 1 << 16, 8)
        for number in numbers:
            os.close(number)
        asker.sendall(b"give 2")  # of a process that took the range for another one
        refusal = asker.recv(1 << 12)
    assert refusal == (
        b"the running node speaks version 1 of the take-over, the new process version 2, none in common; "
        b"upgrade the running node, since only adjacent releases work together"
    )
    assert offer.done == []

    monkeypatch.setattr(take_over, "VERSIONS", VersionRange(1, 2))
    words: list[bytes] = []
    monkeypatch.setattr(take_over.Predecessor, "_send", lambda _, word: words.append(word))
    monkeypatch.setattr(take_over.Predecessor, "_receive", lambda _: pytest.fail("it asked"))
    for highest, word in ((0, b"give"), (1, b"give"), (2, b"give 2"), (3, b"give 2")):
        found = offer.find()
        found.facts = Facts(1, 1, {}, "", highest=highest)
        with pytest.raises(pytest.fail.Exception, match="it asked"):
            found.take_what_it_has()
        found.close()
        assert words.pop() == word
        assert take_over.given_version(word) == (2 if highest > 1 else 1)
        until(lambda: not offer._offer._busy.locked(), START_S)


def test_masters_that_were_learned_go_along(runtime: Path) -> None:
    """Where none that is configured is there any more, the new process could learn them of no other."""
    with ExitStack() as stack:
        owner = _native.MasterServer(["127.0.0.1:0"], TOKEN, master_settings())
        stack.callback(owner.stop)
        owner.start()
        node = NodeCommand("a", "--master", owner.addresses[0])
        stack.callback(node.close)
        standby = _native.MasterServer(
            ["127.0.0.1:0"], TOKEN, master_settings(), standby_of=owner.addresses[0]
        )
        stack.callback(standby.stop)
        standby.start()

        def masters() -> dict[str, float]:
            page: dict[str, dict[str, float]] = get_json(f"{node.http}/stat")
            return {name: page["metrics"][f"masters_{name}"] for name in ("learned", "joined")}

        until(lambda: masters() == {"learned": 1, "joined": 2}, START_S)
        owner.stop()
        until(lambda: masters() == {"learned": 1, "joined": 1}, START_S)
        for _ in range(2):
            node.replace()
            until(lambda: masters() == {"learned": 1, "joined": 1}, START_S)


def test_facts_of_the_release_before_name_no_learned_masters() -> None:
    facts = msgspec.json.decode(b'{"version":1,"pid":7,"settings":{},"advertise":"","highest":1}', type=Facts)
    assert facts.learned == []
    # And the release before passes over what it does not know.
    more = msgspec.json.encode(Facts(1, 7, {}, "", learned=["10.0.0.1:7700"])).replace(b"learned", b"unknown")
    assert msgspec.json.decode(more, type=Facts).learned == []


# ---- which process serves


def test_a_successor_that_takes_too_long_learns_that_the_node_serves_on(
    offer: OfferBed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(take_over, "TAKE_S", 0.05)
    offer.events = lambda: pytest.fail("it has given up")
    predecessor = offer.given()
    until(lambda: offer.done == ["taken back"], START_S)
    with pytest.raises(Unavailable, match="serves on"):
        predecessor.agree()
    predecessor.close()


def test_the_running_node_lets_go_when_the_other_serves(offer: OfferBed) -> None:
    predecessor = offer.given()
    predecessor.agree()
    assert offer.done == []
    predecessor.replace()
    predecessor.let_end()
    until(lambda: offer.done == ["let go"], START_S)


def test_a_successor_that_ends_after_the_word_to_go_is_taken_back(offer: OfferBed) -> None:
    predecessor = offer.given()
    predecessor.agree()
    predecessor.close()
    until(lambda: offer.done == ["taken back"], START_S)


def test_a_successor_that_is_silent_after_the_word_to_go_learns_that_the_node_serves_on(
    offer: OfferBed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(take_over, "SERVE_S", 0.05)
    predecessor = offer.given()
    predecessor.agree()
    until(lambda: offer.done == ["taken back"], START_S)
    with pytest.raises(Unavailable, match="serves on"):
        predecessor.replace()
    predecessor.close()


def test_what_the_successor_said_in_time_counts_though_it_is_read_late() -> None:
    """Either both know that the new process serves, or both that the old one does."""
    old, new = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with old, new:
        new.sendall(take_over.SERVES)
        assert take_over._keep(old)
        with pytest.raises(BrokenPipeError):
            new.sendall(take_over.SERVES)


def test_whatever_fails_in_the_running_node_it_serves_on(offer: OfferBed) -> None:
    def fail() -> None:
        raise RuntimeError("no events were closed")

    offer.events = fail
    predecessor = offer.given()
    with pytest.raises(Unavailable, match="serves on"):
        predecessor.agree()
    until(lambda: offer.done == ["taken back"], START_S)
    predecessor.close()


def test_a_word_to_go_that_comes_too_late_ends_neither(
    offer: OfferBed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new process has given up when the old one is through with its events."""
    monkeypatch.setattr(take_over, "GO_S", 0.05)
    goes = threading.Event()
    offer.events = lambda: goes.wait(START_S) and None
    predecessor = offer.given()
    with pytest.raises(Unavailable, match="serves on"):
        predecessor.agree()
    goes.set()
    until(lambda: offer.done == ["taken back"], START_S)
    predecessor.close()


def test_a_new_process_that_cannot_write_in_the_runtime_folder(node: NodeCommand) -> None:
    with node.store() as store:
        store.put("a", b"1")
    token = paths.socket_token(node.socket)
    content = token.read_bytes()
    token.unlink()
    (token / "in the way").mkdir(parents=True)
    code, said = node.try_to_replace()
    assert code != 0, said
    assert_has(node, {"a": b"1"})
    (token / "in the way").rmdir()
    token.rmdir()
    token.write_bytes(content)
    node.replace()
    assert_has(node, {"a": b"1"})


def test_beats_go_on_while_a_node_is_given(runtime: Path) -> None:
    with ExitStack() as stack:
        master = MasterProcess()
        stack.callback(master.close)
        node = NodeCommand("a", "--master", master.address)
        stack.callback(node.close)

        def heard_s() -> float:
            (row,) = master.page("/nodes")["nodes"]
            return time.monotonic() - float(row["silent_s"])

        predecessor = find_predecessor(node.socket)
        assert predecessor is not None
        description, numbers = predecessor.take_what_it_has()
        for number in (description, *numbers):
            os.close(number)
        given_s = time.monotonic()
        # Well before the node takes itself back.
        until(lambda: heard_s() > given_s + 1.0, take_over.TAKE_S - 1.0)
        predecessor.close()


def test_a_node_that_is_given_begins_no_drain(runtime: Path) -> None:
    """Which would read memory that is another object's once the new process serves."""

    async def run() -> None:
        node = Node(load(env={}, arguments={"node.dram": 4 << 20, "node.http": "off", "node.listen": "off"}))
        await node.start()
        try:
            predecessor = await asyncio.to_thread(find_predecessor, node.socket)
            assert predecessor is not None
            description, numbers = await asyncio.to_thread(predecessor.take_what_it_has)
            for number in (description, *numbers):
                os.close(number)
            with pytest.raises(Unavailable, match="another process takes over"):
                node.drain(DrainRequest())
            predecessor.close()
        finally:
            await node.stop()

    asyncio.run(run())
