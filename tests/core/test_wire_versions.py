"""Releases next to each other, on each handshake and whichever calls: both take the highest version of the
wire format that they have in common, and say in one sentence where there is none (docs/wire.md, Versions)."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from moonpool import Store, TransferEngine, _native
from moonpool.core.config.native_settings import master_settings, node_settings
from moonpool.core.errors import Error

from . import wire_client as w
from .other_release import (
    BEHIND_NEXT,
    NEXT,
    OWN,
    PROTOCOL_CODE,
    WORKING,
    Called,
    Misfit,
    Release,
    offer,
    sentences,
)
from .store_bed import MIB, TOKEN, until
from .wire_client import UNSAID, Wire

# What a release says that has no version in common with this one.
CALLED = [
    Misfit(Release("behind next", 1, BEHIND_NEXT), "version 2"),
    Misfit(Release("two behind", 1, (2, 3)), "versions 2 to 3"),
]
CALLING = [
    Misfit(Release("behind next", 2, BEHIND_NEXT), "version 2"),
    Misfit(Release("two behind", 2, (2, 3)), "versions 2 to 3"),
    Misfit(Release("one version, newer", 2, UNSAID), "version 2"),
    Misfit(Release("one version, older", 0, UNSAID), "version 0"),
]
NAMES = {"ids": lambda each: each.name if isinstance(each, Release) else each.release.name}
PORTS = ["socket", "store", "engine", "directory", "member", "standby"]


class Bed:
    """A node, a master and an engine of this release, and a connection to each handshake of theirs."""

    def __init__(self, folder: Path) -> None:
        self.master = _native.MasterServer(["127.0.0.1:0"], TOKEN, master_settings())
        self.master.start()
        self.path = str(folder / "node.sock")
        self.node = _native.Server(
            self.path,
            [("default", 16 * MIB)],
            TOKEN,
            node_settings(),
            listen=["127.0.0.1:0"],
            master=self.master.addresses[0],
        )
        self.node.start()
        self.engine = TransferEngine("engine", listen=["127.0.0.1:0"], token=TOKEN)

    def call(self, port: str) -> Wire:
        if port == "socket":
            return Wire.dial(self.path)
        addresses = {"store": self.node.addresses, "engine": self.engine.addresses}
        host, _, number = addresses.get(port, self.master.addresses)[0].rpartition(":")
        return Wire(socket.create_connection((host, int(number)), 10))

    def notes(self, port: str) -> list[str]:
        """What its operator reads of refused callers."""
        notes = (self.node if port in ("socket", "store") else self.master).take_notes()
        return [text for _, kind, _, text, _ in notes if kind == "protocol_refused"]

    def close(self) -> None:
        self.engine.close()
        self.node.stop()
        self.master.stop()


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    with closing(Bed(tmp_path_factory.mktemp("bed"))) as made:
        yield made


def purpose(port: str) -> bytes:
    return b"" if port == "socket" else port.encode()


# ---- the other release calls


@pytest.mark.parametrize("release", WORKING, **NAMES)
@pytest.mark.parametrize("port", PORTS)
def test_an_adjacent_release_calls(bed: Bed, port: str, release: Release) -> None:
    with bed.call(port) as wire:
        challenge, welcome = offer(wire, release, purpose(port))
        assert challenge.versions == OWN
        assert welcome.kind == w.WELCOME, welcome.error


@pytest.mark.parametrize("misfit", CALLING, **NAMES)
@pytest.mark.parametrize("with_body", [True, False], ids=["proof", "no body"])
@pytest.mark.parametrize("port", PORTS)
def test_a_caller_without_a_version_in_common(bed: Bed, port: str, misfit: Misfit, with_body: bool) -> None:
    with bed.call(port) as wire:
        _, refusal = offer(wire, misfit.release, purpose(port), with_body=with_body)
        code, text = refusal.error
        assert wire.is_closed()
    own = "this node" if port == "socket" else "this process"
    upgrade_own, upgrade_caller = sentences("the caller", own, misfit.said)
    sentence = upgrade_caller if misfit.release.version == 0 else upgrade_own
    assert code == PROTOCOL_CODE
    assert text.startswith(sentence)


@pytest.mark.parametrize("port", [port for port in PORTS if port != "engine"])
def test_the_operator_reads_of_it(bed: Bed, port: str) -> None:
    """Of many refusals in a row not each is noted."""

    def noted() -> bool:
        with bed.call(port) as wire:
            _, text = offer(wire, CALLING[0].release, purpose(port))[1].error
        return text in bed.notes(port)

    until(noted, 30.0)


@pytest.mark.parametrize(
    ("release", "text"),
    [
        (Release("not the highest", 2, NEXT), "the caller took version 2 .* version 1 is the highest"),
        (Release("upside down", 1, (2, 1)), "says a range .* that is none"),
    ],
    ids=lambda each: each.name if isinstance(each, Release) else "",
)
@pytest.mark.parametrize("port", ["socket", "store"])
def test_a_caller_that_breaks_the_rule(bed: Bed, port: str, release: Release, text: str) -> None:
    with bed.call(port) as wire:
        _, refusal = offer(wire, release, purpose(port))
        code, said = refusal.error
    assert code == PROTOCOL_CODE
    assert re.search(text, said)


# ---- the other release is called


def node_of(master: str, path: Path) -> _native.Server:
    node = _native.Server(
        str(path), [("default", 2 * MIB)], TOKEN, node_settings(), listen=["127.0.0.1:0"], master=master
    )
    node.start()
    return node


class Caller:
    """A part of this release that calls a peer of that one. why_not(): what it says of that."""

    def __init__(self, kind: str, release: Release, folder: Path) -> None:
        self.kind = kind
        self._why: list[str] = []
        self._ends: list[Callable[[], object]] = []
        path = str(folder / "called.sock")
        self.called = Called.by_socket(release, path) if kind == "socket" else Called.by_tcp(release)
        self.peer = path if kind == "socket" else self.called.address
        if kind == "member":
            self._node = node_of(self.peer, folder / "node.sock")
            self._ends = [self._node.stop]
        elif kind == "standby":
            self._master = _native.MasterServer(
                ["127.0.0.1:0"], TOKEN, master_settings(), standby_of=self.peer
            )
            self._master.start()
            self._ends = [self._master.stop]
        else:
            thread = threading.Thread(target=self._ask)
            thread.start()
            self._ends = [thread.join]

    def _ask(self) -> None:
        try:
            if self.kind == "directory":
                with closing(_native.DirectoryClient(self.peer, TOKEN, timeout_s=10.0)) as directory:
                    directory.members()
            elif self.kind == "engine":
                with TransferEngine("caller", token=TOKEN) as engine:
                    engine.open(self.peer)
            else:
                where = self.peer if self.kind == "socket" else f"tcp://{self.peer}"
                Store(where, token=TOKEN, timeout_s=10).close()
        except Error as error:
            self._why.append(f"{type(error).__name__}: {error}")

    def why_not(self) -> str:
        if self.kind == "member":
            return str(self._node.membership()[2])
        if self.kind == "standby":
            self._why += [note[3] for note in self._master.take_notes() if note[1] == "not_following"]
        return "".join(self._why)

    def close(self) -> None:
        self.called.close()
        for end in self._ends:
            end()


CALLERS = ["socket", "store", "engine", "directory", "member", "standby"]


@pytest.mark.parametrize("release", WORKING, **NAMES)
@pytest.mark.parametrize("kind", CALLERS)
def test_an_adjacent_release_is_called(runtime_dir: Path, kind: str, release: Release) -> None:
    with closing(Caller(kind, release, runtime_dir)) as caller:
        auth = caller.called.heard()
    assert auth is not None
    assert (auth.kind, auth.version, auth.versions) == (w.AUTH, 1, OWN)
    assert auth.body


@pytest.mark.parametrize("misfit", CALLED, **NAMES)
@pytest.mark.parametrize("kind", CALLERS)
def test_who_is_called_has_no_version_in_common(runtime_dir: Path, kind: str, misfit: Misfit) -> None:
    with closing(Caller(kind, misfit.release, runtime_dir)) as caller:
        auth = caller.called.heard()
        sentence, _ = sentences(caller.peer, "this process", misfit.said)
        until(lambda: sentence in caller.why_not(), 30.0)
    # By that the other side can tell its operator.
    assert auth is not None
    assert (auth.kind, auth.version, auth.versions, auth.body) == (w.AUTH, 1, OWN, b"")


@pytest.mark.parametrize("version", [0, 2])
@pytest.mark.parametrize("kind", CALLERS)
def test_who_is_called_speaks_one_other_version(runtime_dir: Path, kind: str, version: int) -> None:
    with closing(Caller(kind, Release("one", version, UNSAID), runtime_dir)) as caller:
        newer, older = sentences(caller.peer, "this process", f"version {version}")
        until(lambda: (newer if version else older) in caller.why_not(), 30.0)


@pytest.mark.parametrize("kind", ["member", "standby"])
def test_a_peer_without_a_version_in_common_is_called_with_pauses(runtime_dir: Path, kind: str) -> None:
    """As a peer that is away: pauses of 50 ms that double, of a standby of 100 ms."""
    with closing(Caller(kind, CALLED[0].release, runtime_dir)) as caller:
        until(lambda: len(caller.called.times) >= 4, 60.0)
        times = caller.called.times[:4]
    assert times[3] - times[0] >= (0.35 if kind == "member" else 0.3)
