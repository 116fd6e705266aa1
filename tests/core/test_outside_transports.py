"""Transports that are built outside of Moonpool: the example, and how engines are told of a library."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from moonpool import InvalidArgument, TransferEngine, TransferError
from tests.outside_example import COMPILER, EXAMPLE, build

from .store_bed import stop_process

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example, built by its own Makefile."""
    return build(tmp_path_factory.mktemp("outside"))


def test_the_example_moves_bytes_between_two_processes(library: Path) -> None:
    command = [sys.executable, EXAMPLE / "transfer.py", library]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert said.returncode == 0, said.stderr
    assert said.stdout.startswith("hello\n")
    assert "unix_socket: unix_socket @" in said.stdout
    assert said.stdout.endswith("65536 bytes by unix_socket\n")


@pytest.fixture
def installed(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes a package whose entry point "carrier" has the value that is given."""

    def install(value: str) -> None:
        (tmp_path / "carriers.py").write_text(f"LIBRARY = {str(library)!r}\nCOUNT = 7\n")
        info = tmp_path / "carriers-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: carriers\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[moonpool.transports]\ncarrier = {value}\n")
        monkeypatch.syspath_prepend(tmp_path)

    return install


def test_a_package_names_its_library_by_an_entry_point(installed: Callable[[str], None]) -> None:
    installed("carriers:LIBRARY")
    with (
        TransferEngine("here", outside_transports=["carrier"], transports=["unix_socket"]) as here,
        TransferEngine("there", outside_transports=["carrier"]) as there,
    ):
        assert here.transports()["unix_socket"] == ""
        names = list(there.transports())
        assert names[0] == "loopback"  # in the order in which they are tried, not of the alphabet
        assert names.index("unix_socket") == names.index("tcp") - 1
        mine, theirs = here.allocate(4096), there.allocate(4096)
        here.write(here.open(there.addresses[0]), mine, theirs.address, 4096)
        assert here.metrics()["unix_socket_write_bytes_total"] == 4096


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("carriers:COUNT", 'the outside transport "carrier" names no path: carriers:COUNT is a int'),
        ("carriers:MISSING", 'the outside transport "carrier" cannot be found: carriers:MISSING: '),
        ("no_such_module:LIBRARY", 'the outside transport "carrier" cannot be found: no_such_module:LIBRARY'),
    ],
)
def test_an_entry_point_without_a_library(installed: Callable[[str], None], value: str, said: str) -> None:
    installed(value)
    with pytest.raises(InvalidArgument) as error:
        TransferEngine("here", outside_transports=["carrier"])
    assert said in str(error.value)


def test_a_library_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match='no installed package has an outside transport "pigeon"'):
        TransferEngine("here", outside_transports=["pigeon"])
    with pytest.raises(InvalidArgument, match="is a list of libraries, not one"):
        TransferEngine("here", outside_transports="libx.so")
    wrong = tmp_path / "libx.so"
    wrong.write_text("text")
    with pytest.raises(InvalidArgument, match=r"libx\.so is not used: "):
        TransferEngine("here", outside_transports=[wrong])


def test_no_byte_of_a_write_lands_after_the_peer_was_stopped_and_its_end_confirmed(library: Path) -> None:
    """The peer's process stands still in the middle of a write, which is given up. When it goes on, and has
    confirmed the end of that write, nothing of it lands any more."""
    script = (
        "import sys, moonpool\n"
        "engine = moonpool.TransferEngine('there', outside_transports=[sys.argv[1]])\n"
        "region = engine.allocate(64 << 20)\n"
        "print(engine.addresses[0], flush=True)\n"
        "for line in sys.stdin:\n"
        "    if line == 'clear\\n': region.view[:] = bytes(len(region.view))\n"
        "    print(region.view.tobytes().count(b'x'), flush=True)\n"
    )
    command = [sys.executable, "-c", script, library]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as peer:
        assert peer.stdin is not None
        assert peer.stdout is not None

        def ask(what: str) -> int:
            assert peer.stdin is not None
            assert peer.stdout is not None
            peer.stdin.write(f"{what}\n")
            peer.stdin.flush()
            return int(peer.stdout.readline())

        try:
            with TransferEngine("here", outside_transports=[library], transports=["unix_socket"]) as engine:
                segment = engine.open(peer.stdout.readline().strip())
                local = engine.allocate(64 << 20)
                local.view[:] = b"x" * len(local.view)
                engine.write(segment, local, segment.at(0), 4096)
                assert ask("count") == 4096
                stop_process(peer.pid)
                with pytest.raises(TransferError) as error:
                    engine.write(segment, local, segment.at(0), 64 << 20, deadline_s=0.3)
                assert not error.value.settled
                peer.send_signal(signal.SIGCONT)
                engine.read(segment, local, segment.at(0), 4096)  # goes well: all before it is settled
                assert ask("clear") == 0
                assert ask("count") == 0
        finally:
            peer.kill()
