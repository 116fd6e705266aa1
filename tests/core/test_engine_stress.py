"""Many threads on one engine, with peers, regions and segments that come and go, and a close in the middle:
every call ends, with the right bytes or an error of the family."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from moonpool import Batch, Priority, Segment, TransferEngine
from moonpool.core.errors import Closed, Error

from .engine_bed import Peer, moved
from .store_bed import MIB, TOKEN, until

BLOCK = 4096
BLOCKS = 256  # of each peer; block n of a peer is full of byte n
THREADS = 6
JOIN_S = 60


def fill(peer: Peer) -> None:
    peer.poke(b"".join(bytes([number]) * BLOCK for number in range(BLOCKS)))


def work(
    engine: TransferEngine, peers: list[Peer], seed: int, stop: threading.Event, done: Counter[str]
) -> None:
    """Reads blocks of known content until it is told to stop or the engine is closed."""
    rng = random.Random(seed)
    segments = [engine.open(peer.address) for peer in peers]
    while not stop.is_set():
        region = engine.allocate(64 * BLOCK) if rng.random() < 0.5 else engine.register(bytearray(64 * BLOCK))
        with region:
            for _ in range(20):
                n = rng.choice((1, 1, 3, 64))
                numbers = [rng.randrange(BLOCKS) for _ in range(n)]
                target = rng.randrange(len(peers))
                batch = Batch(
                    "read",
                    segments[target],
                    [region.at(place * BLOCK) for place in range(n)],
                    [peers[target].region + number * BLOCK for number in numbers],
                    BLOCK,
                )
                verb = rng.random()
                if verb < 0.4:
                    engine.transfer(batch, priority=rng.choice(list(Priority)))
                elif verb < 0.9:
                    engine.submit(batch, priority=rng.choice(list(Priority))).result(30)
                else:
                    transfer = engine.submit(batch)
                    transfer.cancel()
                    assert transfer.wait(30)
                    done["cancelled"] += 1
                    continue
                for place, number in enumerate(numbers):
                    found = bytes(region.view[place * BLOCK : (place + 1) * BLOCK])
                    assert found == bytes([number]) * BLOCK, f"block {number} has the bytes of {found[0]}"
                done["read"] += n
        if rng.random() < 0.2:
            segments[target].close()
            segments[target] = engine.open(peers[target].address)


def run_all(
    engine: TransferEngine,
    peers: list[Peer],
    rng: random.Random,
    act: Callable[[], None],
    *,
    until_closed: bool = False,
) -> Counter[str]:
    """All threads, and ``act`` meanwhile; -> what was done. Fails for any error but one of Closed, which ends
    a thread. until_closed: nothing else does."""
    stop = threading.Event()
    done: Counter[str] = Counter()
    ending = threading.Lock()  # one after the other: a sum of two threads at once may lose one of them
    problems: list[BaseException] = []

    def guarded(seed: int) -> None:
        try:
            work(engine, peers, seed, stop, done)
        except Closed:
            with ending:
                done["closed"] += 1
        except BaseException as error:
            problems.append(error)
            stop.set()

    threads = [threading.Thread(target=guarded, args=(rng.randrange(1 << 30),)) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    act()
    if not until_closed:
        stop.set()
    give_up_s = time.monotonic() + JOIN_S
    for thread in threads:
        thread.join(max(0.0, give_up_s - time.monotonic()))
        assert not thread.is_alive()
    if problems:
        raise problems[0]
    print(dict(done))
    return done


@pytest.fixture(scope="module")
def peers() -> Iterator[list[Peer]]:
    made = [Peer("host_arena", BLOCKS * BLOCK), Peer("host", BLOCKS * BLOCK)]
    yield made
    for peer in made:
        peer.close()


@pytest.fixture(autouse=True)
def _filled(peers: list[Peer]) -> None:
    for peer in peers:
        fill(peer)


@pytest.mark.parametrize("transports", [None, ["tcp"]], ids=["any", "tcp"])
def test_many_threads_read_the_right_bytes(
    peers: list[Peer], rng: random.Random, transports: list[str] | None
) -> None:
    with TransferEngine(token=TOKEN, transports=transports, timeout_s=20) as engine:
        done = run_all(engine, peers, rng, lambda: threading.Event().wait(2) and None)
        assert done["read"] > 100
        assert done["closed"] == 0
        assert set(moved(engine)) <= ({"tcp"} if transports else {"shm"})


@pytest.mark.parametrize("transports", [None, ["tcp"]], ids=["any", "tcp"])
def test_close_in_the_middle_of_many_threads(
    peers: list[Peer], rng: random.Random, transports: list[str] | None
) -> None:
    for _ in range(5):
        engine = TransferEngine(token=TOKEN, transports=transports, timeout_s=5)
        pause_s = rng.uniform(0.05, 0.4)

        def close(engine: TransferEngine = engine, pause_s: float = pause_s) -> None:
            threading.Event().wait(pause_s)
            engine.close()

        done = run_all(engine, peers, rng, close, until_closed=True)
        assert done["closed"] == THREADS
        with pytest.raises(Closed):
            engine.open(peers[0].address)


@pytest.mark.parametrize("kind", ["host_arena", "host"])
def test_a_peer_that_closes_its_region_under_many_readers(kind: str) -> None:
    """Right bytes until then, errors afterwards; and the peer's close returns."""
    ends: list[str] = []

    def read(engine: TransferEngine, segment: Segment, peer: Peer) -> None:
        region = engine.allocate(BLOCK)
        numbers = random.Random(threading.get_ident())
        try:
            while True:
                number = numbers.randrange(BLOCKS)
                engine.read(segment, region.address, peer.region + number * BLOCK, BLOCK)
                if bytes(region.view) != bytes([number]) * BLOCK:
                    ends.append("wrong bytes")
                    return
        except Error as error:
            ends.append(type(error).__name__)

    with closing(Peer(kind, BLOCKS * BLOCK)) as peer, TransferEngine(token=TOKEN, timeout_s=5) as engine:
        fill(peer)
        segment = engine.open(peer.address)
        threads = [threading.Thread(target=read, args=(engine, segment, peer)) for _ in range(4)]
        for thread in threads:
            thread.start()
        until(lambda: moved(engine).get("shm", 0) > 100 * BLOCK)
        assert peer.ask("close region") == "closed"
        for thread in threads:
            thread.join(20)
        assert ends == ["TransferError"] * 4


def test_the_pieces_of_a_large_transfer(peers: list[Peer]) -> None:
    """More than one call of the kernel takes, in one slice and in many, from and to foreign memory."""
    assert MIB % BLOCK == 0
    big = Peer("host", 64 * MIB)
    try:
        with TransferEngine(token=TOKEN) as engine, TransferEngine(token=TOKEN, transports=["tcp"]) as other:
            for one in (engine, other):
                region = one.register(bytearray(64 * MIB))
                segment = one.open(big.address)
                region.view[:] = bytes(range(256)) * (64 * MIB // 256)
                one.write(segment, region, segment.at(0))
                region.view[:] = bytes(64 * MIB)
                places = range(0, 64 * MIB, 8192)
                one.read(segment, [region.at(at) for at in places], [segment.at(at) for at in places], 8192)
                assert region.view == bytes(range(256)) * (64 * MIB // 256)
                region.view[:] = bytes(64 * MIB)
                one.write(segment, region, segment.at(0))
                assert big.peek(12345, 4096) == bytes(4096)
    finally:
        big.close()
