"""Engines that find each other by name, through a real master, etcd and Redis."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import moonpool
from moonpool import AsyncTransferEngine, ConfigError, InvalidArgument, TransferEngine, Unavailable
from moonpool.core.printable import without_password
from moonpool.core.transfer.metadata import NameTaken
from moonpool.core.transfer.metadata.backend import LEASE_S as DEFAULT_LEASE_S
from moonpool.core.transfer.metadata.connection_string import metadata_of

from .metadata_bed import KINDS, NamedPeer, engine, first_byte, record, running
from .store_bed import TOKEN, until


@pytest.fixture(scope="module", params=KINDS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with running(request.param, tmp_path_factory.mktemp("store")) as made:
        yield made


def test_a_store_keeps_one_owner_of_a_name(server: Any) -> None:
    store, other = server.store(), server.store()
    a, b = record("one", "a"), record("one", "b")
    assert store.resolve("default", "one") is None
    store.publish(a)
    assert other.resolve("default", "one") == a
    assert other.resolve("another", "one") is None
    with pytest.raises(
        NameTaken, match=r"the name one is held by the engine aaaaaaaa at 10\.0\.0\.1:1, in "
    ) as held:
        other.publish(b)
    assert held.value.held == a
    assert 0 <= held.value.left_s <= 2
    other.withdraw(b)  # it is not b's
    assert store.resolve("default", "one") == a
    store.publish(a)  # renewed
    store.withdraw(a)
    assert store.resolve("default", "one") is None
    store.withdraw(a)
    other.publish(b)
    store.publish(a, dead=b.id)
    assert store.resolve("default", "one") == a
    store.withdraw(a)


@pytest.mark.parametrize("name", ["127.0.0.1:12345", "ä/../?key=x&owner=y #", "a b", "x" * 256])
def test_a_name_may_be_any_text_that_prints(server: Any, name: str) -> None:
    store = server.store()
    store.publish(record(name, "a"))
    assert store.resolve("default", name) == record(name, "a")
    assert store.resolve("default", name + "x") is None
    store.withdraw(record(name, "a"))
    assert store.resolve("default", name) is None


def test_an_engine_is_opened_by_its_name(server: Any) -> None:
    with engine(server.store(), "gives") as gives, engine(server.url) as takes:
        gives.allocate(4096).view[0] = 5
        assert gives.publication_problem == takes.publication_problem == ""
        assert gives.metrics()["metadata_published"] == 1
        peer = takes.open("gives")
        assert (peer.name, peer.id) == ("gives", gives.segment_id)
        assert first_byte(takes, peer) == 5
        assert takes.open(gives.addresses[0]).id == gives.segment_id  # an address is no name, and works
        assert takes.open(takes.name).id == takes.segment_id
        with pytest.raises(Unavailable, match="no segment called 'nobody'"):
            takes.open("nobody")
        found = server.store().resolve("default", "gives")
        assert found.addresses == tuple(gives.addresses)
        assert "tcp" in found.transports
        with engine(server.store(), "gives", tenant="another") as apart:  # tenants do not meet
            with (
                engine(server.url, tenant="a third") as third,
                pytest.raises(Unavailable, match="no segment called"),
            ):
                third.open("gives")
            assert apart.publication_problem == ""
    assert server.store().resolve("default", "gives") is None  # withdrawn at the end


def test_with_asyncio(server: Any) -> None:
    async def act() -> None:
        async with (
            AsyncTransferEngine("agives", token=TOKEN, metadata=server.store()) as gives,
            AsyncTransferEngine(token=TOKEN, metadata=server.store()) as takes,
        ):
            await gives.allocate(4096)
            assert gives.publication_problem == ""
            peer = await takes.open("agives")
            await takes.refresh(peer)
            assert peer.id == gives.segment_id
            with pytest.raises(NameTaken):
                await AsyncTransferEngine.start("agives", token=TOKEN, metadata=server.store())

    asyncio.run(act())
    assert server.store().resolve("default", "agives") is None


def test_a_name_of_a_living_engine_is_refused(server: Any) -> None:
    """Its renewals show that it lives. It keeps the name, and the other is closed."""
    with engine(server.store(), "taken") as first:
        with pytest.raises(ConfigError, match=r"the name taken is held by the engine .* choose another name"):
            engine(server.store(), "taken")
        assert first.publication_problem == ""
        assert server.store().resolve("default", "taken").id == first.segment_id.hex()


def test_of_many_that_start_at_once_one_has_the_name(server: Any) -> None:
    won: list[TransferEngine] = []
    lost: list[Exception] = []

    def start() -> None:
        try:
            won.append(engine(server.store(), "race"))
        except NameTaken as error:
            lost.append(error)

    threads = [threading.Thread(target=start) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(won), len(lost)) == (1, 4)
    assert server.store().resolve("default", "race").id == won[0].segment_id.hex()
    won[0].close()


def test_a_peer_that_restarted_elsewhere_is_found_again(server: Any) -> None:
    with engine(server.store()) as takes, ExitStack() as stack:
        first = NamedPeer(server.url, "moves", value=1)
        stack.callback(first.close)
        peer = takes.open("moves")
        assert first_byte(takes, peer) == 1
        first.kill()
        second = NamedPeer(server.url, "moves", value=2)  # waits until the dead one's lease has ended
        stack.callback(second.close)
        assert second.address != first.address
        with pytest.raises(moonpool.Error):
            first_byte(takes, peer)
        peer.refresh()
        assert peer.id.hex() == second.id
        assert first_byte(takes, peer) == 2
        assert takes.open("moves").id.hex() == second.id


def test_a_peer_that_restarts_at_its_address_has_its_name_at_once(server: Any, free_port: int) -> None:
    """It listens where the holder listened, which has so ended: no lease is waited for."""
    listen = f"127.0.0.1:{free_port}"
    with engine(server.store()) as takes, ExitStack() as stack:
        first = NamedPeer(server.url, "stays", lease_s=60.0, listen=listen)
        stack.callback(first.close)
        peer = takes.open("stays")
        first.kill()
        second = NamedPeer(server.url, "stays", lease_s=60.0, listen=listen, value=9)
        stack.callback(second.close)
        peer.refresh()
        assert peer.id.hex() == second.id
        assert first_byte(takes, peer) == 9


@pytest.mark.slow
def test_the_name_of_a_dead_engine_is_gone(tmp_path: Path) -> None:
    """With the lease that engines have, in all stores. Of one that is stopped, too, and it comes back."""
    assert DEFAULT_LEASE_S <= 8.0  # and the 2 s that a store may take: 10 s
    with ExitStack() as stack:
        peers = []
        for kind in KINDS:
            (tmp_path / kind).mkdir()
            server = stack.enter_context(running(kind, tmp_path / kind))
            for name in ("killed", "stopped"):
                peer = NamedPeer(server.url, name, lease_s=DEFAULT_LEASE_S)
                stack.callback(peer.close)
                peers.append((kind, name, server.store(), peer))
        for _, name, store, peer in peers:
            assert store.resolve("default", name).id == peer.id
            peer.kill() if name == "killed" else peer.stop()
        ended_s = time.monotonic()
        left = list(peers)
        while left:
            for row in list(left):
                kind, name, store, _ = row
                if store.resolve("default", name) is None:
                    print(f"{kind}, {name}: gone {time.monotonic() - ended_s:.1f} s after its engine")
                    left.remove(row)
            assert time.monotonic() < ended_s + 60
        for kind, name, store, peer in peers:
            if name == "stopped":
                peer.resume()
                until(lambda s=store, i=peer.id: (r := s.resolve("default", "stopped")) and r.id == i, 30)
                assert until(lambda p=peer: p.ask("problem") == "", 30), kind


def test_an_engine_that_publishes_nothing(server: Any) -> None:
    with engine(server.store(), "silent", listen=None) as silent:
        assert silent.publication_problem == ""
        assert "metadata_published" not in silent.metrics()
        assert server.store().resolve("default", "silent") is None


def test_what_is_published_as_the_address(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store = server.store()
    for number, (options, host) in enumerate(
        (
            ({"advertise": "host.example"}, "host.example:PORT"),
            ({"advertise": "10.1.2.3:99"}, "10.1.2.3:99"),
            ({"advertise": "[fd00::1]"}, "[fd00::1]:PORT"),
        )
    ):
        with engine(store, f"told{number}", **options) as told:
            port = told.addresses[0].rpartition(":")[2]
            assert store.resolve("default", f"told{number}").addresses == (host.replace("PORT", port),)
    for options in ({"advertise": "0.0.0.0"}, {"name": "a\nb"}, {"name": "x" * 257}, {"advertise": "a:b:c"}):
        with pytest.raises(ConfigError):
            TransferEngine(**({"name": "odd", "token": TOKEN, "metadata": store} | options))
    with engine(store, "every", listen="0.0.0.0:0") as every:
        (address,) = store.resolve("default", "every").addresses
        assert not address.startswith("0.0.0.0")
        assert address.endswith(every.addresses[0].rpartition(":")[2])


def test_the_configured_store(server: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MOONPOOL_CLUSTER_METADATA", server.url)
    with TransferEngine("configured", token=TOKEN), TransferEngine(metadata="", token=TOKEN) as apart:
        assert server.store().resolve("default", "configured") is not None
        with pytest.raises(InvalidArgument, match="is no address"):
            apart.open("configured")
    monkeypatch.delenv("MOONPOOL_CLUSTER_METADATA")
    file = tmp_path / "moonpool.toml"
    file.write_text(f'[cluster]\nmetadata = "{server.url}"\n')
    monkeypatch.setenv("MOONPOOL_CONFIG", str(file))
    with TransferEngine("configured", token=TOKEN):
        assert server.store().resolve("default", "configured") is not None


@pytest.mark.parametrize(
    "text",
    [
        *(
            "foo",
            "host:2379",
            "ftp://h",
            "http://",
            "http://u:s3cret@h",
            "http://h:x",
            "etcd://",
            "etcd://h:0",
        ),
        *("redis://:s3cret@", "redis://:s3cret@h/x", "redis://:s3@cret@h y", "etcd://h1,,h2", "etcd://h/v3"),
    ],
)
def test_a_string_that_names_no_store_is_refused(text: str) -> None:
    with pytest.raises(
        ConfigError, match=r"metadata = .* names no store of metadata; write http://"
    ) as error:
        TransferEngine(token=TOKEN, metadata=text)
    assert "s3" not in str(error.value)


def test_strings_that_name_a_store() -> None:
    for text, shown, towards in (
        ("http://h", "http://h/metadata", ("h", 80)),
        ("https://h:1/x", "https://h:1/x", ("h", 1)),
        ("etcd://h1,h2:99", "etcd at h1:2379, h2:99", ("h1", 2379)),
        ("etcds://u:p%40@[::1]", "etcd at [::1]:2379", ("::1", 2379)),
        ("redis://h", "redis at h:6379", ("h", 6379)),
        ("rediss://:p@[::1]:7/2", "redis at [::1]:7", ("::1", 7)),
    ):
        store = metadata_of(text, TOKEN)
        assert store is not None
        assert (store.shown, tuple(store.towards)) == (shown, towards)
    assert metadata_of("", TOKEN) is metadata_of("P2PHANDSHAKE", TOKEN) is None
    assert without_password("redis://:a@b@h") == "redis://***@h"
