"""What a user of the engine sees when a peer dies, stands still, is somebody else, or is not there; and after
close() and fork()."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from typing import Any

import pytest

from moonpool import Batch, Slice, TransferEngine, TransferError, TransferState
from moonpool.core.errors import AuthError, Closed, Error, Forked, ProtocolError, Timeout, Unavailable

from .engine_bed import EnginePuppet, Peer, Reader, Relay, moved, moved_of, timed
from .forked import run_child
from .store_bed import MIB, TOKEN, until

MARGIN_S = 5  # real processes on a busy machine: the promise is 1 s, its measured time is printed


@pytest.fixture
def engines() -> Iterator[Callable[..., TransferEngine]]:
    """Makes engines that end with the test."""
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(TransferEngine(**({"token": TOKEN} | options)))


@pytest.fixture
def peers() -> Iterator[Callable[..., Peer]]:
    with ExitStack() as stack:
        yield lambda *arguments, **options: stack.enter_context(closing(Peer(*arguments, **options)))


# ---- the peer dies


def keep_reading(engine: TransferEngine, peer: Peer, size: int) -> TransferError:
    """Reads until it fails; the peer is killed meanwhile."""
    region = engine.allocate(size)
    segment = engine.open(peer.address)
    engine.read(segment, region, segment.at(0), size)
    rounds = [0]
    failed: list[Exception] = []

    def read() -> None:
        try:
            while True:
                engine.read(segment, region.address, segment.regions[0].address, size)
                rounds[0] += 1
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    until(lambda: rounds[0] >= 2)
    peer.kill()
    killed_s = time.monotonic()
    thread.join(30)
    assert failed
    print(f"noticed {time.monotonic() - killed_s:.3f} s after the kill: {failed[0]}")
    assert time.monotonic() - killed_s < MARGIN_S
    assert isinstance(failed[0], TransferError)
    return failed[0]


@pytest.mark.parametrize("kind", ["host_arena", "host"])
@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_peer_killed_in_mid_transfer(
    engines: Callable[..., TransferEngine], peers: Callable[..., Peer], kind: str, transport: str
) -> None:
    peer = peers(kind, 64 * MIB)
    engine = engines(transports=[transport], timeout_s=2)
    error = keep_reading(engine, peer, 64 * MIB)
    assert error.peer == peer.address
    assert error.path is not None
    assert error.path.startswith(transport)
    assert error.bytes == 64 * MIB
    assert 0 <= error.bytes_done < 64 * MIB
    assert error.cause
    for part in (peer.address, transport, f"{error.bytes_done} of {error.bytes}"):
        assert part in str(error)
    # The engine goes on, with other peers.
    other = peers("host_arena", MIB)
    region = engine.allocate(MIB)
    segment = engine.open(other.address)
    assert engine.read(segment, region, segment.at(0)) == MIB


def test_a_peer_killed_with_a_large_batch_on_its_way(
    engines: Callable[..., TransferEngine], peers: Callable[..., Peer]
) -> None:
    """What was done before counts, and is there."""
    peer = peers("host_arena", 16 * MIB)
    peer.poke(b"x" * 65536)
    engine = engines(transports=["tcp"], timeout_s=2)
    with Relay(peer.address) as relay:
        segment, region = engine.open(relay.address), engine.allocate(16 * MIB)
        engine.read(segment, region, segment.at(0), 1)
        relay.pace(16e6)
        offsets = range(0, 16 * MIB, 65536)
        transfer = engine.submit(
            Batch(
                "read", segment, [region.at(at) for at in offsets], [segment.at(at) for at in offsets], 65536
            )
        )
        until(lambda: transfer.bytes_done >= 65536)
        peer.kill()
        assert transfer.wait(MARGIN_S)
        assert transfer.state is TransferState.FAILED
        error = transfer.error
        assert error is not None
        print(error)
        assert 65536 <= error.bytes_done < 16 * MIB
        assert error.bytes_done == 65536 * transfer.slices.count(1)
        assert error.peer == relay.address
        assert bytes(region.view[:65536]) == b"x" * 65536


def test_only_the_slices_to_the_dead_peer_fail(
    engines: Callable[..., TransferEngine], peers: Callable[..., Peer]
) -> None:
    dead, alive = peers("host_arena", MIB), peers("host_arena", MIB)
    engine = engines(timeout_s=2)
    region = engine.allocate(MIB)
    to_dead, to_alive = engine.open(dead.address), engine.open(alive.address)
    dead.kill()

    def fails() -> TransferError | None:
        try:
            engine.read(to_dead, region, to_dead.at(0), 100)
        except TransferError as error:
            return error
        return None

    until(fails, MARGIN_S)
    with pytest.raises(TransferError) as caught:
        engine.transfer(
            [
                Slice("read", to_alive, region.at(0), to_alive.at(0), 100),
                Slice("read", to_dead, region.at(100), to_dead.at(0), 100),
                Slice("write", to_alive, region.at(200), to_alive.at(0), 100),
            ]
        )
    assert list(caught.value.states) == [1, 2, 1]
    assert caught.value.peer == dead.address
    assert caught.value.bytes_done == 200


def test_a_reader_that_is_killed_leaves_the_peer_unharmed(
    engines: Callable[..., TransferEngine],
) -> None:
    engine = engines(name="owner")
    region = engine.allocate(MIB)
    region.view[:] = b"y" * MIB
    for transports in (["shm"], ["tcp"]):
        options = f'{{"transports": ["{transports[0]}"]}}'
        user = EnginePuppet("user", TOKEN.decode(), engine.addresses[0], MIB, options)
        assert user.hear() == "reading"
        user.kill()
        user.close()
    other = engines()
    segment = other.open(engine.addresses[0])
    into = other.allocate(MIB)
    assert other.read(segment, into, segment.at(0)) == MIB
    assert into.view == region.view
    region.close()  # does not wait for the dead


def test_a_new_peer_at_the_same_address(
    engines: Callable[..., TransferEngine], peers: Callable[..., Peer]
) -> None:
    """The old segment never reaches the new engine's memory as if nothing had happened to the old one's."""
    peer = peers("host_arena", MIB)
    engine = engines(timeout_s=2)
    region = engine.allocate(MIB)
    old = engine.open(peer.address)
    engine.read(old, region, old.at(0))
    peer.kill()
    again = peers("host_arena", MIB, listen=peer.address)
    again.poke(b"z" * 100)
    segment = until(lambda: _opened(engine, again.address))
    assert segment.id != old.id
    assert engine.read(segment, region, segment.at(0), 100) == 100
    assert bytes(region.view[:100]) == b"z" * 100


def _opened(engine: TransferEngine, address: str) -> Any:
    try:
        return engine.open(address)
    except Error:
        return None


# ---- the peer stands still


def test_a_peer_that_stands_still_costs_the_deadline(
    engines: Callable[..., TransferEngine], peers: Callable[..., Peer]
) -> None:
    peer = peers("host_arena", MIB)
    engine = engines(transports=["tcp"])
    region = engine.allocate(MIB)
    segment = engine.open(peer.address)
    engine.read(segment, region, segment.at(0))
    peer.stop()
    error = timed(
        "a read with a deadline of 0.3 s",
        lambda: engine.read(segment, region, segment.at(0), deadline_s=0.3),
        0.3 * MARGIN_S,
        TransferError,
    )
    assert error.peer == peer.address
    assert error.bytes_done == 0
    assert "0.3 s" in str(error)
    peer.resume()
    until(lambda: _reads(engine, segment, region), MARGIN_S)


@pytest.mark.parametrize("transports", [["shm"], ["shm", "tcp"]])
def test_a_peer_that_stands_still_before_its_memory_was_touched_costs_the_deadline(
    engines: Callable[..., TransferEngine], peers: Callable[..., Peer], transports: list[str]
) -> None:
    """Shared memory is asked for when it is first touched. The engine's own timeout is no deadline of a
    transfer; once the peer goes on, its late answers spoil no later question.
    """
    peer = peers("host_arena", MIB)
    engine = engines(transports=transports, timeout_s=600)
    region = engine.allocate(MIB)
    segment = engine.open(peer.address)
    peer.stop()
    for _ in range(3):
        timed(
            "a read with a deadline of 0.3 s",
            lambda: engine.read(segment, region, segment.at(0), deadline_s=0.3),
            30,  # far below the engine's timeout, and above what a busy machine takes
            TransferError,
        )
    peer.resume()
    peer.poke(b"awake")
    before = moved(engine).get("shm", 0)
    assert engine.read(segment, region, segment.at(0)) == MIB
    assert bytes(region.view[:5]) == b"awake"
    assert moved(engine)["shm"] == before + MIB


def _reads(engine: TransferEngine, segment: Any, region: Any) -> bool:
    try:
        return engine.read(segment, region, segment.at(0), 4096) == 4096
    except TransferError:
        return False


def test_allocated_memory_is_read_while_its_owner_stands_still(
    engines: Callable[..., TransferEngine], peers: Callable[..., Peer]
) -> None:
    """Shared memory is memory: nobody has to answer."""
    peer = peers("host_arena", MIB)
    engine = engines(transports=["shm"])
    region = engine.allocate(MIB)
    segment = engine.open(peer.address)
    engine.read(segment, region, segment.at(0))
    peer.stop()
    assert engine.read(segment, region, segment.at(0)) == MIB
    assert engine.write(segment, region, segment.at(0)) == MIB
    peer.resume()


def test_the_deadline_is_measured_from_progress(
    engines: Callable[..., TransferEngine], peers: Callable[..., Peer]
) -> None:
    """A transfer that takes two deadlines, but moves all the time, is done; one that stalls is not. The
    deadline is long enough for a machine that stands still for a moment."""
    deadline_s = 1.5
    peer = peers("host_arena", 4 * MIB)
    engine = engines(transports=["tcp"])
    with Relay(peer.address) as relay:
        segment, region = engine.open(relay.address), engine.allocate(4 * MIB)
        engine.read(segment, region, segment.at(0), 1)
        relay.pace(4 * MIB / (2 * deadline_s))
        for verb in (engine.read, engine.write):
            began = time.monotonic()
            assert verb(segment, region, segment.at(0), 4 * MIB, deadline_s=deadline_s) == 4 * MIB
            spent = time.monotonic() - began
            print(f"{verb.__name__}: {spent:.2f} s with a deadline of {deadline_s} s")
            assert spent > 1.5 * deadline_s
        transfer = engine.submit(
            [Slice("read", segment, region, segment.at(0), 4 * MIB)], deadline_s=deadline_s
        )
        assert not transfer.wait(0.2)
        relay.stall()
        assert transfer.wait(deadline_s * MARGIN_S)
        error = transfer.error
        assert error is not None
        assert f"{deadline_s} s" in str(error)
        assert error.bytes_done < 4 * MIB


def test_a_cut_connection_is_made_anew(
    engines: Callable[..., TransferEngine], peers: Callable[..., Peer]
) -> None:
    """Within the same call when the peer is still there."""
    peer = peers("host_arena", MIB)
    peer.poke(b"still here")
    engine = engines(transports=["tcp"])
    with Relay(peer.address) as relay:
        segment, region = engine.open(relay.address), engine.allocate(MIB)
        for _ in range(5):
            assert engine.read(segment, region, segment.at(0)) == MIB
            assert bytes(region.view[:10]) == b"still here"
            relay.cut()


def test_a_region_that_goes_away(engines: Callable[..., TransferEngine], peers: Callable[..., Peer]) -> None:
    for kind in ("host_arena", "host"):
        peer = peers(kind, MIB)
        for transport in ("shm", "tcp"):
            engine = engines(transports=[transport])
            region = engine.allocate(MIB)
            segment = engine.open(peer.address)
            if transport == "shm":
                assert engine.read(segment, region, segment.at(0)) == MIB
            else:
                assert peer.ask("close region") == "closed"
            if transport == "tcp":
                assert segment.refresh() is None
                assert segment.regions == ()
                with pytest.raises(TransferError) as caught:
                    engine.read(segment, region.at(0), peer.region, 100)
                assert caught.value.peer == peer.address
    # The one that had it mapped notices too.
    peer = peers("host_arena", MIB)
    engine = engines(transports=["shm"])
    region, segment = engine.allocate(MIB), engine.open(peer.address)
    assert engine.read(segment, region, segment.at(0)) == MIB
    assert peer.ask("close region") == "closed"
    with pytest.raises(TransferError):
        engine.read(segment, region.at(0), peer.region, 100)


def test_a_local_region_closed_under_a_transfer(
    engines: Callable[..., TransferEngine], peers: Callable[..., Peer]
) -> None:
    """close() returns when the memory may be freed; the transfer ends with an error, or was done before."""
    peer = peers("host_arena", 4 * MIB)
    engine = engines(transports=["tcp"])
    with Relay(peer.address) as relay:
        segment, region = engine.open(relay.address), engine.allocate(4 * MIB)
        engine.read(segment, region, segment.at(0), 1)
        relay.stall()
        transfer = engine.submit([Slice("read", segment, region, segment.at(0), 4 * MIB)])
        assert not transfer.wait(0.05)
        region.close()
        relay.go_on()
        assert transfer.wait(MARGIN_S * 5)
        assert transfer.state is TransferState.FAILED
        with pytest.raises(TransferError):
            transfer.result()


# ---- the kernel forbids


@pytest.mark.parametrize("kind", ["host_arena", "host"])
def test_memory_that_the_kernel_forbids_goes_over_tcp(peers: Callable[..., Peer], kind: str) -> None:
    """As in containers without the right to trace. What the engine allocated is mapped all the same."""
    peer = peers(kind, 65536)
    peer.poke(b"far away")
    assert peer.ask("hide") == "hidden"
    with closing(Reader(peer)) as reader:
        assert reader.ask("give up ptrace") == "given up"
        data, transport, error, metrics = reader.ask("read", 8)
        assert error == ""
        assert bytes.fromhex(data) == b"far away"
        expected = {"host_arena": "shm", "host": "tcp"}[kind]
        assert transport == expected
        assert moved_of(metrics) == {expected: 8}
    with closing(Reader(peer, transports=["shm"])) as reader:
        reader.ask("give up ptrace")
        _, transport, error, metrics = reader.ask("read", 8)
        if kind == "host":
            assert transport == ""
            assert "the kernel forbids process_vm_readv" in error
            assert moved_of(metrics) == {}


def test_a_slice_that_fails_on_one_path_takes_the_next(peers: Callable[..., Peer]) -> None:
    """Within the same call: the kernel forbids what it permitted before."""
    peer = peers("host", 65536)
    peer.poke(b"far away")
    with closing(Reader(peer)) as reader:
        data, transport, error, metrics = reader.ask("read", 8)
        assert (bytes.fromhex(data), transport, error) == (b"far away", "shm", "")
        assert moved_of(metrics) == {"shm": 8}
        assert metrics["retries_total"] == 0
        peer.ask("hide")
        reader.ask("give up ptrace")
        data, transport, error, metrics = reader.ask("read", 8)
        assert (bytes.fromhex(data), error) == (b"far away", "")
        assert moved_of(metrics) == {"shm": 8, "tcp": 8}
        assert metrics["retries_total"] == 2  # by CUDA IPC, which is asked once, and TCP
        assert reader.ask("read", 8)[1] == "tcp"  # remembered


# ---- the peer is somebody else, or nobody


def test_nobody_listens(engines: Callable[..., TransferEngine], free_port: int) -> None:
    engine = engines()
    address = f"127.0.0.1:{free_port}"
    error = timed("open", lambda: engine.open(address), 2, Unavailable)
    assert error.peer == address
    assert address in str(error)


def test_somebody_listens_and_says_nothing(engines: Callable[..., TransferEngine]) -> None:
    engine = engines(timeout_s=0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = "{}:{}".format(*silent.getsockname())
        error = timed("open", lambda: engine.open(address), 0.3 * MARGIN_S, Timeout)
        assert error.peer == address


def test_somebody_else_listens(engines: Callable[..., TransferEngine]) -> None:
    engine = engines(timeout_s=2)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"220 mail.example.org ESMTP ready, please say hello to us first\r\n")
                with suppress(ConnectionError):
                    connection.recv(1000)

        thread = threading.Thread(target=greet)
        thread.start()
        with pytest.raises((ProtocolError, AuthError)):
            engine.open("{}:{}".format(*server.getsockname()))
        thread.join(10)


@pytest.mark.parametrize("address", ["", "127.0.0.1", "127.0.0.1:", "127.0.0.1:99999", ":7", "a b:1"])
def test_no_address(engines: Callable[..., TransferEngine], address: str) -> None:
    with pytest.raises(Error):
        engines(timeout_s=2).open(address)


def test_a_wrong_token_and_another_tenant(
    engines: Callable[..., TransferEngine], peers: Callable[..., Peer]
) -> None:
    peer = peers("host_arena", MIB)
    stranger = engines(token=b"a guess")
    with pytest.raises(AuthError) as caught:
        stranger.open(peer.address)
    assert caught.value.peer == peer.address
    assert "token" in str(caught.value)
    with pytest.raises(Error, match="tenant"):
        engines(tenant="other").open(peer.address)
    assert engines().open(peer.address).name == "peer"


# ---- after the end


def test_after_close_every_call_raises(engines: Callable[..., TransferEngine]) -> None:
    engine, other = engines(), engines()
    other.allocate(4096)
    region = engine.allocate(4096)
    registered = engine.register(bytearray(4096))
    segment = engine.open(other.addresses[0])
    remote = segment.at(0)
    done = engine.submit([Slice("read", segment, region, remote, 10)])
    assert done.result() == 10
    unseen = engine.submit([Slice("read", segment, region, remote, 10)])
    engine.close()
    engine.close()
    for call in (
        lambda: engine.read(segment, region.at(0), remote, 10),
        lambda: engine.write(segment, region.at(0), remote, 10),
        lambda: engine.read(segment, region, remote, 10, deadline_s=1),
        lambda: engine.transfer([Slice("read", segment, region, remote, 10)]),
        lambda: engine.submit([Slice("read", segment, region, remote, 10)]),
        lambda: engine.open(other.addresses[0]),
        lambda: engine.register(bytearray(10)),
        lambda: engine.allocate(10),
        lambda: engine.notify(segment, b"x"),
        lambda: engine.notifications(),
        lambda: engine.notifications(1),
        engine.metrics,
        segment.refresh,
    ):
        with pytest.raises(Closed, match="closed"):
            call()
    assert done.result() == 10
    region.close()
    registered.close()
    segment.close()
    with suppress(Closed):
        assert unseen.done
    region_again = other.allocate(4096)
    assert len(region_again.view) == 4096


def test_close_ends_what_waits(engines: Callable[..., TransferEngine], peers: Callable[..., Peer]) -> None:
    peer = peers("host_arena", MIB)
    engine = engines(transports=["tcp"], timeout_s=30)
    with Relay(peer.address) as relay:
        segment, region = engine.open(relay.address), engine.allocate(MIB)
        engine.read(segment, region, segment.at(0), 1)
        relay.stall()
        ends: list[BaseException] = []
        begun = threading.Barrier(3)

        def call(verb: Callable[[], Any]) -> None:
            begun.wait()
            try:
                verb()
            except BaseException as error:
                ends.append(error)

        transfer = engine.submit([Slice("read", segment, region, segment.at(0), MIB)])
        threads = [
            threading.Thread(target=call, args=(verb,))
            for verb in (
                lambda: engine.read(segment, region, segment.at(0)),
                lambda: transfer.result(),
            )
        ]
        for thread in threads:
            thread.start()
        begun.wait()
        assert not transfer.wait(0.1)
        began = time.monotonic()
        engine.close()
        for thread in threads:
            thread.join(10)
        print(f"closed and all ended within {time.monotonic() - began:.3f} s")
        assert time.monotonic() - began < MARGIN_S
        assert len(ends) == 2
        assert all(isinstance(end, (TransferError, Closed)) for end in ends), ends


def test_after_fork_the_child_is_refused_and_the_parent_goes_on(
    engines: Callable[..., TransferEngine], peers: Callable[..., Peer]
) -> None:
    peer = peers("host_arena", MIB)
    for transports in (["tcp"], ["shm"]):
        engine = engines(transports=transports)
        region = engine.allocate(MIB)
        segment = engine.open(peer.address)
        engine.read(segment, region, segment.at(0))
        transfer = engine.submit([Slice("read", segment, region, segment.at(0), 10)])

        def child(
            engine: TransferEngine = engine,
            segment: Any = segment,
            region: Any = region,
            waits: Any = transfer,
        ) -> None:
            for call in (
                lambda: engine.read(segment, region.at(0), segment.at(0), 10),
                lambda: engine.transfer([Slice("read", segment, region, segment.at(0), 10)]),
                lambda: engine.submit([Slice("read", segment, region, segment.at(0), 10)]),
                lambda: engine.open(peer.address),
                lambda: engine.allocate(10),
                lambda: engine.register(bytearray(10)),
                lambda: engine.notify(segment, b"x"),
                lambda: engine.notifications(),
                lambda: engine.metrics(),
                lambda: waits.result(),
                segment.refresh,
            ):
                try:
                    call()
                except Forked:
                    continue
                os._exit(3)
            with TransferEngine(token=TOKEN, transports=["tcp"]) as own:  # one of its own works
                here = own.allocate(MIB)
                there = own.open(peer.address)
                assert own.read(there, here, there.at(0)) == MIB
            engine.close()

        assert run_child(child) == 0
        assert transfer.result() == 10
        assert engine.read(segment, region, segment.at(0)) == MIB
        assert set(moved(engine)) == set(transports)
