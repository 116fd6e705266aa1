"""The C library, driven by a program of C++ that makes TensorRT-LLM's calls (agent.cpp), in two processes.
The program is compiled against what is shipped: the header and the library, nothing else of this project."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import moonpool
from moonpool.capi import root
from moonpool.core.errors import Error, ProtocolError
from moonpool.core.service.data_tls import EngineTls
from tests.core.store_bed import until
from tests.core.tls_bed import pem, variables
from tests.descriptors import speaks

__all__ = ["pem"]

AGENT = Path(__file__).with_name("agent.cpp")
COMPILER = shutil.which(os.environ.get("CXX", "g++").split()[-1])
MIB = 1 << 20
TOKEN = "the token of these agents"

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert COMPILER is not None
    made = tmp_path_factory.mktemp("capi") / "agent"
    lib = root() / "lib"
    command = [COMPILER, "-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{root() / 'include'}", str(AGENT)]
    subprocess.run(
        [*command, "-o", str(made), f"-L{lib}", "-ltransfer_engine", f"-Wl,-rpath,{lib}"],
        check=True,
        timeout=100,
    )
    return made


class Agent:
    def __init__(
        self, program: Path, name: str, runtime: Path, address: str = "127.0.0.1", token: str = TOKEN
    ) -> None:
        environment = {**os.environ, "MOONPOOL_RUNTIME_DIR": str(runtime)}
        environment.pop("MOONPOOL_CLUSTER_TOKEN_FILE", None)
        environment.pop("MOONPOOL_CLUSTER_TOKEN", None)
        if token:
            environment["MOONPOOL_CLUSTER_TOKEN"] = token
        self.errors = runtime / f"{name}.err"
        with open(self.errors, "wb") as errors:
            self.process = subprocess.Popen(
                [str(program)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                text=True,
            )
        self.address = self.ask(f"create {name} {address}")

    def ask(self, command: str, timeout_s: float = 30.0) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        assert speaks(self.process.stdout, timeout_s), f"no answer to {command}"
        return self.process.stdout.readline().rstrip("\n")

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def agent(program: Path, tmp_path: Path) -> Iterator[Callable[..., Agent]]:
    made: list[Agent] = []

    def start(name: str, **more: str) -> Agent:
        made.append(Agent(program, name, tmp_path, **more))
        return made[-1]

    yield start
    for one in made:
        one.close()


def test_the_header_is_plain_c() -> None:
    assert COMPILER is not None
    header = root() / "include" / "transfer_engine_c.h"
    command = [COMPILER, "-x", "c", "-std=c99", "-pedantic", "-Wall", "-Werror", "-fsyntax-only", str(header)]
    subprocess.run(command, check=True, timeout=60)


def test_the_folder_is_told() -> None:
    said = subprocess.run([sys.executable, "-m", "moonpool.capi"], capture_output=True, text=True, timeout=60)
    assert said.stdout.strip() == str(root())
    assert (root() / "lib" / "libtransfer_engine.so").is_file()


def test_bytes_and_messages(agent: Callable[..., Agent]) -> None:
    """Context writes to generation, which hears of it and reads something back; 1,000 pieces at once."""
    context, generation = agent("ctx"), agent("gen")
    context.ask(f"memory {4 * MIB} 3")
    remote = generation.ask(f"memory {4 * MIB} 5")
    context_sum, generation_sum = context.ask(f"sum 0 {MIB}"), generation.ask(f"sum {3 * MIB} {MIB}")
    assert int(context.ask(f"connect gen {generation.address}")) >= 0
    assert context.ask(f"write gen 0 {remote} 1024 1000") == f"done {1024 * 1000}"
    assert generation.ask("messages") == "0"
    done = context.ask(f"write gen {1024 * 1000} {int(remote) + 1024 * 1000} {MIB - 1024 * 1000} 1 the rest")
    assert done == f"done {MIB - 1024 * 1000}"
    assert until(lambda: (said := generation.ask("messages")) != "0" and said) == "1 ctx:the rest"
    assert generation.ask(f"sum 0 {MIB}") == context_sum
    assert context.ask(f"read gen {3 * MIB} {int(remote) + 3 * MIB} {MIB} 1") == f"done {MIB}"
    assert context.ask(f"sum {3 * MIB} {MIB}") == generation_sum
    assert generation.ask(f"connect ctx {context.address}") == generation.ask(
        f"connect ctx {context.address}"
    )
    assert generation.ask("notify ctx c2F5") == "0"
    assert generation.ask(f"notify ctx {'x' * 70000}") == "0"
    assert until(lambda: (said := context.ask("messages")) != "0" and said).startswith("2 gen:c2F5 gen:xxx")
    assert context.ask("empty gen") == "0 4 0"
    assert until(lambda: (said := generation.ask("messages")) != "0" and said) == "1 ctx:nothing"
    assert context.ask("close gen") == "0"
    assert context.ask("unregister") == "0"
    assert context.ask("destroy") == "gone"


def test_a_peer_that_dies(agent: Callable[..., Agent]) -> None:
    context, generation = agent("ctx"), agent("gen")
    context.ask(f"memory {MIB} 3")
    remote = generation.ask(f"memory {MIB} 5")
    context.ask(f"connect gen {generation.address}")
    assert context.ask(f"write gen 0 {remote} 4096 8").startswith("done")
    generation.close()
    assert context.ask(f"write gen 0 {remote} 4096 8") == "failed, freed 0"
    assert context.ask("notify gen anybody?") != "0"
    assert int(context.ask(f"connect gen {generation.address}")) < 0
    # Another one at the same address: the old number is of no use, a new one is
    again = agent("gen", address=generation.address)
    remote = again.ask(f"memory {MIB} 7")
    assert int(context.ask(f"connect gen {again.address}")) >= 0
    assert context.ask(f"write gen 0 {remote} 4096 8").startswith("done")
    assert again.ask("sum 0 32768") == context.ask("sum 0 32768")


def test_memory_that_is_not_there_any_more(agent: Callable[..., Agent]) -> None:
    context, generation = agent("ctx"), agent("gen")
    context.ask(f"memory {MIB} 3")
    remote = int(generation.ask(f"memory {MIB} 5"))
    context.ask(f"connect gen {generation.address}")
    assert context.ask(f"write gen 0 {remote + MIB - 100} 200 1").startswith("failed")  # beyond its end
    assert generation.ask("unregister") == "0"
    assert context.ask(f"read gen 0 {remote} 4096 1").startswith("failed")
    assert generation.ask(f"sum 0 {MIB}") == Reference(5).sum(MIB)


def test_a_write_that_failed_delivers_no_message(agent: Callable[..., Agent]) -> None:
    """TensorRT-LLM's agent logs a failure and goes on: that the receiver hears nothing is all that keeps it
    from using what did not come. Messages of one peer keep their order."""
    context, generation = agent("ctx"), agent("gen")
    context.ask(f"memory {MIB} 3")
    remote = int(generation.ask(f"memory {MIB} 5"))
    context.ask(f"connect gen {generation.address}")
    assert context.ask(f"write gen 0 {remote + MIB - 100} 200 1 it is there").startswith("failed")
    assert context.ask(f"write gen 0 {remote} 100 1 and this is") == "done 100"
    assert until(lambda: (said := generation.ask("messages")) != "0" and said) == "1 ctx:and this is"
    assert generation.ask("messages") == "0"


class Reference:
    """agent.cpp's memory and its sum."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def bytes(self, length: int) -> bytes:
        return bytes(((i * 31 + i // 251 + self.seed) * self.seed) & 0xFF for i in range(length))

    def sum(self, length: int) -> str:
        total = 1469598103934665603
        for byte in self.bytes(length):
            total = ((total ^ byte) * 1099511628211) & 0xFFFFFFFFFFFFFFFF
        return str(total)


def test_what_cannot_be_meant(agent: Callable[..., Agent]) -> None:
    context = agent("ctx")
    context.ask(f"memory {MIB} 3")
    assert context.ask("misuse") == "all refused"
    assert "moonpool: createTransferEngine: " in context.errors.read_text()


def test_tokens(agent: Callable[..., Agent]) -> None:
    context, stranger = agent("ctx"), agent("other", token="another token")
    assert int(context.ask(f"connect other {stranger.address}")) < 0
    assert "token" in context.errors.read_text()
    nobody = agent("nobody", token="")
    assert nobody.address == "null"
    assert "MOONPOOL_CLUSTER_TOKEN_FILE" in nobody.errors.read_text()


def test_without_a_chosen_token_it_stays_on_loopback(agent: Callable[..., Agent], tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / "token").write_text("of this user\n")
    (tmp_path / "token").chmod(0o600)
    assert agent("inside", token="").address.startswith("127.0.0.1:")
    outside = agent("outside", token="", address="0.0.0.0")
    assert outside.address == "null"
    assert "needs a cluster token" in outside.errors.read_text()
    (tmp_path / "token").chmod(0o644)
    assert agent("open", token="").address == "null"


def test_a_token_file_that_is_none(agent: Callable[..., Agent], tmp_path: Path) -> None:
    """A FIFO without a writer would be waited for."""
    pipe = tmp_path / "token"
    tmp_path.chmod(0o700)
    os.mkfifo(pipe, 0o600)
    nobody = agent("nobody", token="")
    assert nobody.address == "null"
    assert "is empty" in nobody.errors.read_text()


def test_programs_need_the_library_by_its_name(program: Path) -> None:
    """And not by a path of where they were linked."""
    reader = shutil.which("readelf")
    if reader is None:
        pytest.skip("needs readelf")
    for file, word in ((root() / "lib" / "libtransfer_engine.so", "SONAME"), (program, "NEEDED")):
        said = subprocess.run([reader, "-dW", str(file)], capture_output=True, text=True, timeout=60).stdout
        assert any(word in line and "[libtransfer_engine.so]" in line for line in said.splitlines())


LIBRARY = """
import ctypes, os, resource, signal, sys, threading, time
library = ctypes.CDLL(sys.argv[1])
create = library.createTransferEngine
create.restype, create.argtypes = ctypes.c_void_p, [ctypes.c_char_p] * 3 + [ctypes.c_uint64, ctypes.c_int]
library.openSegment.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
library.getLocalIpAndPort.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t]
library.registerLocalMemory.argtypes = [
    ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_int]
library.allocateBatchID.restype = ctypes.c_uint64
library.allocateBatchID.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
library.submitTransfer.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t]
library.getTransferStatus.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
library.freeBatchID.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
library.destroyTransferEngine.argtypes = [ctypes.c_void_p]

class Request(ctypes.Structure):
    _fields_ = [("opcode", ctypes.c_int), ("source", ctypes.c_void_p), ("target", ctypes.c_int32),
                ("offset", ctypes.c_uint64), ("length", ctypes.c_uint64)]

class Status(ctypes.Structure):
    _fields_ = [("status", ctypes.c_int), ("bytes", ctypes.c_uint64)]

engine = create(b"P2PHANDSHAKE", b"127.0.0.1", b"", 0, 1)
"""
NO_THREADS = """
address = ctypes.create_string_buffer(64)
assert library.getLocalIpAndPort(engine, address, 64) == 0
size = 8 << 20
memory = ctypes.create_string_buffer(b"x" * size, 2 * size)
assert library.registerLocalMemory(engine, ctypes.addressof(memory), 2 * size, b"*", 1) == 0
peer = library.openSegment(engine, address.value)
resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
if os.getuid() == 0:
    os.setresuid(65534, 65534, 65534)  # root has no limits
try:
    threading.Thread(target=print).start()
    print("this host does not limit threads")
    sys.stdout.flush()
    os._exit(0)
except RuntimeError:
    pass
assert create(b"P2PHANDSHAKE", b"127.0.0.1", b"", 0, 1) is None
batch = library.allocateBatchID(engine, 1)
start = ctypes.addressof(memory)
request = Request(1, start, peer, start + size, size)
assert library.submitTransfer(engine, batch, ctypes.byref(request), 1) == 0
status = Status(1, 0)
while status.status == 1:
    assert library.getTransferStatus(engine, batch, 0, ctypes.byref(status)) == 0
assert (status.status, status.bytes) == (4, size), (status.status, status.bytes)
assert memory.raw[size : 2 * size] == b"x" * size
library.destroyTransferEngine(engine)
print("ok")
"""


def test_a_host_that_allows_no_more_threads() -> None:
    """An engine is refused with a sentence, what is there goes on, and no exception of C++ comes out."""
    done = subprocess.run(
        [sys.executable, "-c", LIBRARY + NO_THREADS, str(root() / "lib" / "libtransfer_engine.so")],
        env={**os.environ, "MOONPOOL_CLUSTER_TOKEN": TOKEN}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    if "does not limit" in done.stdout:
        pytest.skip("threads cannot be limited here")
    assert done.stdout == "ok\n", done.stderr
    assert "cannot start a thread" in done.stderr


HUNG = """
address, process, remote, size = sys.argv[2].encode(), int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5])
memory = ctypes.create_string_buffer(size)
start = ctypes.addressof(memory)
assert library.registerLocalMemory(engine, start, size, b"*", 1) == 0
peer = library.openSegment(engine, address)
batch = library.allocateBatchID(engine, 1)
os.kill(process, signal.SIGSTOP)
request = Request(1, start, peer, remote, size)
assert library.submitTransfer(engine, batch, ctypes.byref(request), 1) == 0
freed = []
freeing = threading.Thread(target=lambda: freed.append(library.freeBatchID(engine, batch)))
began = time.monotonic()
freeing.start()
longest = 0.0
while freeing.is_alive():
    asked = time.monotonic()
    other = library.allocateBatchID(engine, 1)
    assert library.freeBatchID(engine, other) == 0
    longest = max(longest, time.monotonic() - asked)
took = time.monotonic() - began
os.kill(process, signal.SIGCONT)
assert freed == [0]
library.destroyTransferEngine(engine)
print(f"{took} {longest}")
"""


def test_a_batch_of_a_peer_that_hangs_is_freed_and_others_do_not_wait(agent: Callable[..., Agent]) -> None:
    generation = agent("gen")
    size = 64 * MIB
    remote = generation.ask(f"memory {size} 5")
    place = [generation.address, str(generation.process.pid), remote, str(size)]
    done = subprocess.run(
        [sys.executable, "-c", LIBRARY + HUNG, str(root() / "lib" / "libtransfer_engine.so"), *place],
        env={**os.environ, "MOONPOOL_CLUSTER_TOKEN": TOKEN}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    took_s, longest_s = map(float, done.stdout.split())
    print(f"freed after {took_s:.3f} s, others waited {longest_s:.3f} s at most")
    assert longest_s < took_s / 2
    assert took_s < 10


def test_engines_of_python_speak_to_it(agent: Callable[..., Agent]) -> None:
    """Both sides of moonpool's own API and of the drop-in `mooncake` understand its messages."""
    generation = agent("gen")
    remote = int(generation.ask(f"memory {MIB} 5"))
    with moonpool.TransferEngine("python", token=TOKEN.encode()) as engine:
        region = engine.allocate(MIB)
        peer = engine.open(generation.address)
        engine.read(peer, region.at(0), remote, MIB)
        assert bytes(region.view) == Reference(5).bytes(MIB)
        engine.notify(peer, b"\x92\xa4name\xa4text")
        engine.notify(peer, b"plain")
        said = until(lambda: (said := generation.ask("messages")) != "0" and said)
        assert said == "2 name:text python:plain"
        generation.ask(f"connect py {engine.addresses[0]}")
        assert generation.ask("notify py back") == "0"
        assert [one.message for one in until(engine.notifications)] == [b"\x92\xa3gen\xa4back"]


@pytest.mark.parametrize("mode", ["on", "mutual"])
def test_what_travels_is_inside_tls(
    agent: Callable[..., Agent],
    pem: Callable[[str], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
) -> None:
    """By the variables of [cluster], as Python reads them; one that is missing is named."""
    cluster = {"tls_data": mode, "tls_cert": pem("master"), "tls_ca": pem("authority")}
    for name, value in variables(cluster).items():
        monkeypatch.setenv(name, value)
    assert agent("keyless").address == "null"
    said = (tmp_path / "keyless.err").read_text()
    assert "the transfer engine has no certificate to show; set MOONPOOL_CLUSTER_TLS_CERT" in said
    monkeypatch.setenv("MOONPOOL_CLUSTER_TLS_KEY", pem("test-key"))
    Path(pem("test-key")).chmod(0o644)
    assert agent("open").address == "null"
    assert "can be read by others; run: chmod 600 " in (tmp_path / "open.err").read_text()
    Path(pem("test-key")).chmod(0o600)
    generation = agent("gen")
    remote = int(generation.ask(f"memory {MIB} 5"))
    with moonpool.TransferEngine("python", token=TOKEN.encode(), transports=["tcp"]) as engine:
        region = engine.allocate(MIB)
        engine.read(engine.open(generation.address), region.at(0), remote, MIB)
        assert bytes(region.view) == Reference(5).bytes(MIB)
        # A key that was replaced and cannot be used: the library has no log, and says so on stderr.
        Path(pem("test-key")).chmod(0o644)
        with suppress(Error):
            engine.open(generation.address)
        said = until(lambda: (tmp_path / "gen.err").read_text())
        assert "can be read by others" in said
        assert "the files from before are in use" in said
    with (
        moonpool.TransferEngine("plain", token=TOKEN.encode(), listen=None, tls=EngineTls()) as plain,
        pytest.raises(ProtocolError, match="this port speaks TLS only"),
    ):
        plain.open(generation.address)
