"""Transfer engines of releases next to each other take the highest version of the engine's own frames that
they have in common (docs/wire_engine.md), and each says in one sentence where there is none."""

from __future__ import annotations

import queue
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import closing, suppress

import pytest

from moonpool import TransferEngine
from moonpool.core.errors import ProtocolError

from . import wire_client as w
from .other_release import OWN, PROTOCOL_CODE, Release, offer
from .store_bed import TOKEN
from .wire_client import Closed, Frame, Versions, Wire

HELLO, REGIONS = 48, 49
OWN_ENGINE: Versions = (1, 3)
UNSAID = 0  # the lowest, of the release before: it ends before it
SEGMENT = b"s" * 16

# (lowest, highest) of a peer -> what both take
WORKING = [((UNSAID, 1), 1), ((UNSAID, 3), 3), ((1, 3), 3), ((1, 4), 3), ((3, 4), 3), ((2, 2), 2)]
MISFITS = [((4, 4), "version 4"), ((4, 5), "versions 4 to 5")]


def tail(versions: Versions) -> bytes:
    return struct.pack("<H", versions[0]) if versions[0] != UNSAID else b""


@pytest.fixture
def engine() -> Iterator[TransferEngine]:
    with TransferEngine("engine", listen=["127.0.0.1:0"], token=TOKEN) as made:
        yield made


def hello(engine: TransferEngine, versions: Versions) -> Frame:
    """The answer to the HELLO of an initiator that speaks these versions."""
    host, _, port = engine.addresses[0].rpartition(":")
    with Wire(socket.create_connection((host, int(port)), 10)) as wire:
        _, welcome = offer(wire, Release("same", 1, OWN), b"engine")
        body = welcome.body[32:]
        assert (*struct.unpack("<H", body[-2:]), *struct.unpack("<H", body[:2])) == OWN_ENGINE
        said = struct.pack("<H16s16sI", versions[1], SEGMENT, body[2:18], 7) + w.text16(b"peer")
        wire.send(HELLO, said + tail(versions), request_id=1)
        return wire.receive()


@pytest.mark.parametrize(("versions", "taken"), WORKING)
def test_an_initiator_of_an_adjacent_release(engine: TransferEngine, versions: Versions, taken: int) -> None:
    answer = hello(engine, versions)
    assert (answer.kind, answer.body) == (HELLO, struct.pack("<H", taken))


@pytest.mark.parametrize(("versions", "said"), MISFITS)
def test_an_initiator_without_a_version_in_common(
    engine: TransferEngine, versions: Versions, said: str
) -> None:
    code, text = hello(engine, versions).error
    assert code == PROTOCOL_CODE
    called = "the engine that is called"
    sentence = f"{called} speaks versions 1 to 3 of the transfer engine's format, the caller {said}, none in"
    assert text.startswith(f"{sentence} common; upgrade {called}")


class Target:
    """An engine of another release with nothing registered. ``asked``: the frames that it hears."""

    def __init__(self, versions: Versions, taken: int) -> None:
        self._versions, self._taken = versions, taken
        self._listener = socket.create_server(("127.0.0.1", 0))
        host, port = self._listener.getsockname()
        self.address = f"{host}:{port}"
        self.asked: queue.Queue[Frame] = queue.Queue()
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _serve(self) -> None:
        sock, _ = self._listener.accept()
        with Wire(sock) as wire, suppress(Closed, OSError):
            node_nonce, life = b"n" * 32, b"i" * 16
            wire.send(w.CHALLENGE, node_nonce + life, versions=OWN)
            auth = wire.receive()
            (size,) = struct.unpack_from("<H", auth.body)
            nonce = auth.body[2 + size : 34 + size]
            covered = auth.body[2 : 2 + size] + b"\0engine"
            proof = w.mac(b"node", TOKEN, nonce, node_nonce, life, covered)
            said = struct.pack("<H16s", self._versions[1], SEGMENT)
            said += w.text16(b"target") + w.text16(b"host") + w.text16(b"boot")
            said += 2 * (w.text16(b"") + bytes(32))
            if self._versions[0] != UNSAID:
                said += b"\0" + tail(self._versions)
            wire.send(w.WELCOME, proof + said, request_id=auth.request_id, flags=w.ANSWER)
            answers = {HELLO: struct.pack("<H", self._taken), REGIONS: struct.pack("<QI", 0, 0)}
            while True:
                asked = wire.receive()
                self.asked.put(asked)
                wire.send(asked.kind, answers[asked.kind], request_id=asked.request_id, flags=w.ANSWER)


@pytest.mark.parametrize(("versions", "taken"), WORKING)
def test_a_target_of_an_adjacent_release(versions: Versions, taken: int) -> None:
    with closing(Target(versions, taken)) as target, TransferEngine("caller", token=TOKEN) as engine:
        assert list(engine.open(target.address).regions) == []
        said = target.asked.get(timeout=10).body
        regions = target.asked.get(timeout=10)
    assert (*struct.unpack("<H", said[-2:]), *struct.unpack("<H", said[:2])) == OWN_ENGINE
    # As the version that was taken has it: version 1 asks by an empty question.
    assert (regions.kind, regions.body) == (REGIONS, struct.pack("<H", taken) if taken > 1 else b"")


@pytest.mark.parametrize(("versions", "said"), MISFITS)
def test_a_target_without_a_version_in_common(versions: Versions, said: str) -> None:
    with closing(Target(versions, 3)) as target, TransferEngine("caller", token=TOKEN) as engine:
        sentence = (
            f"this engine speaks versions 1 to 3 of the transfer engine's format, {target.address} {said}"
        )
        with pytest.raises(ProtocolError, match=f"{sentence}, none in common; upgrade this engine"):
            engine.open(target.address)
        assert target.asked.get(timeout=10).kind == HELLO  # by which the target can say so, too
