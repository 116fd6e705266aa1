"""What the tests of metadata by name share: a real master, etcd and Redis that can be stopped, killed and
wiped, engines in processes of their own, and a server that answers whatever a test says."""

from __future__ import annotations

import base64
import json
import shutil
import signal
import socket
import subprocess
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from moonpool import Error, TransferEngine
from moonpool.core.service.http_get import exchange
from moonpool.core.transfer.metadata import Metadata, SegmentRecord
from moonpool.core.transfer.metadata.connection_string import metadata_of
from moonpool.core.transfer.metadata.http_metadata import bearer_of
from tests.ports import held_ports

from .master_bed import MasterProcess
from .store_bed import TOKEN, Puppet, stop_process, until

KINDS = ("http", "etcd", "redis")
START_S = 30.0
LEASE_S = 2.0  # of most tests; etcd knows none that is shorter
PASSWORD = "a-secret-of-these-tests"


class Server(ABC):
    """A store of metadata in a process of its own, at one port from start to start. url: names it."""

    url: str
    process: subprocess.Popen[Any]

    def __init__(self, folder: Path, port: int, other_port: int) -> None:
        self.folder, self.port, self.other_port = folder, port, other_port

    @abstractmethod
    def start(self, *more: str) -> None: ...

    @abstractmethod
    def delete(self, key: str) -> None:
        """Removes an entry, as an operator would."""

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def pause(self) -> None:
        stop_process(self.process.pid)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def wipe(self) -> None:
        """It runs on, and has nothing."""
        self.kill()
        self.start()

    def store(self, lease_s: float = LEASE_S, timeout_s: float = 2.0) -> Metadata:
        made = metadata_of(self.url, TOKEN)
        assert made is not None
        made.lease_s = lease_s
        getattr(made, "_etcd", made)._timeout_s = timeout_s
        return made

    def _waits_for_an_answer(self) -> None:
        def answers() -> bool:
            assert self.process.poll() is None, f"it ended with {self.process.returncode}"
            with suppress(Error):
                self.store().resolve("default", "nobody")
                return True
            return False

        until(answers, START_S)


class Http(Server):
    """The page of `moonpool master`."""

    def start(self, *more: str) -> None:
        self.master = MasterProcess("--http", f"127.0.0.1:{self.port}", *more)
        self.process = self.master.process
        self.url = f"{self.master.http}/metadata"

    def delete(self, key: str) -> None:
        headers = {"Authorization": f"Bearer {bearer_of(TOKEN)}"}
        assert exchange("DELETE", f"{self.url}?key={quote(key)}", headers=headers).status == 200


class Etcd(Server):
    def start(self, *more: str) -> None:
        here, peer = (f"http://127.0.0.1:{port}" for port in (self.port, self.other_port))
        self.url = f"etcd://127.0.0.1:{self.port}"
        self.process = subprocess.Popen(
            [
                *("etcd", "--data-dir", str(self.folder / "etcd"), "--unsafe-no-fsync"),
                *("--listen-client-urls", here, "--advertise-client-urls", here),
                *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
                *("--initial-cluster", f"default={peer}", *more),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._waits_for_an_answer()

    def wipe(self) -> None:
        self.kill()
        shutil.rmtree(self.folder / "etcd")
        self.start()

    def delete(self, key: str) -> None:
        assert self.ask("kv/deleterange", key=b64(key.encode()))["deleted"] == "1"

    def ask(self, path: str, **body: Any) -> Any:
        answer = exchange("POST", f"http://127.0.0.1:{self.port}/v3/{path}", body=json.dumps(body).encode())
        assert answer.status == 200, answer
        return json.loads(answer.body)

    def demand_password(self) -> None:
        self.ask("auth/user/add", name="root", password=PASSWORD)
        self.ask("auth/role/add", name="root")
        self.ask("auth/user/grant", user="root", role="root")
        self.ask("auth/enable")
        self.url = f"etcd://root:{PASSWORD}@127.0.0.1:{self.port}"

    def put(self, key: str, value: bytes) -> None:
        self.ask("kv/put", key=b64(key.encode()), value=b64(value))


class Redis(Server):
    def start(self, *more: str, env: dict[str, str] | None = None) -> None:
        self.url = f"redis://127.0.0.1:{self.port}/3"
        self.process = subprocess.Popen(
            [
                *("redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder)),
                *("--save", "", "--appendonly", "no", *more),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=env,
        )
        self._waits_for_an_answer()

    def delete(self, key: str) -> None:
        assert self.ask("DEL", key) == "1"

    def ask(self, *words: str) -> str:
        done = subprocess.run(
            ["redis-cli", "-p", str(self.port), "-n", "3", *words], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    def demand_password(self) -> None:
        self.ask("CONFIG", "SET", "requirepass", PASSWORD)
        self.url = f"redis://:{PASSWORD}@127.0.0.1:{self.port}/3"

    def put(self, key: str, value: bytes) -> None:
        self.ask("SET", key, value.decode())


CLASSES: dict[str, type[Server]] = {"http": Http, "etcd": Etcd, "redis": Redis}
PROGRAMS = {"etcd": ("etcd", "etcd-server"), "redis": ("redis-server", "redis-server")}


@contextmanager
def running(kind: str, folder: Path) -> Iterator[Any]:
    """A server of that kind."""
    program, package = PROGRAMS.get(kind, ("", ""))
    if program and shutil.which(program) is None:
        pytest.skip(f"needs {program} (apt-get install {package})")
    with held_ports(2) as ports:
        made = CLASSES[kind](folder, *ports)
        try:
            made.start()
            yield made
        finally:
            if hasattr(made, "process"):
                made.kill()
                if isinstance(made, Http):
                    made.master.close()


class NamedPeer(Puppet):
    """An engine with one page of memory, published under a name, in a process of its own."""

    script = Path(__file__).with_name("metadata_puppet.py")

    def __init__(self, url: str, name: str, lease_s: float = LEASE_S, value: int = 7, **options: Any) -> None:
        super().__init__("peer", TOKEN.decode(), url, lease_s, value, json.dumps({"name": name} | options))
        said = self.hear(60.0)
        self.address: str = said["address"]
        self.id: str = said["id"]

    def ask(self, what: str) -> Any:
        self.tell(json.dumps(what) + "\n")
        return self.hear()


def engine(store: Metadata | str, name: str = "", **options: Any) -> TransferEngine:
    return TransferEngine(name, token=TOKEN, metadata=store, **options)


def first_byte(taker: TransferEngine, segment: Any) -> int:
    """Reads the first byte of a peer's memory."""
    here = taker.allocate(4096)
    try:
        taker.read(segment, here, segment.at(0), 1)
        return here.view[0]
    finally:
        here.close()


def record(
    name: str, owner: str, lease_s: float = LEASE_S, addresses: tuple[str, ...] = ("10.0.0.1:1",)
) -> SegmentRecord:
    return SegmentRecord(id=owner * 32, name=name, addresses=addresses, lease_s=lease_s)


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


class Liar:
    """Takes connections and sends ``answer`` in pieces of ``piece`` bytes, one each ``pause_s`` seconds."""

    def __init__(self, answer: bytes, piece: int = 1 << 20, pause_s: float = 0.0) -> None:
        self._answer, self._piece, self._pause_s = answer, piece, pause_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._ended = threading.Event()
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._ended.set()
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                caller, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._lie, args=(caller,), daemon=True).start()

    def _lie(self, caller: socket.socket) -> None:
        with suppress(OSError), caller:
            caller.recv(65536)
            for start in range(0, len(self._answer), self._piece):
                caller.sendall(self._answer[start : start + self._piece])
                self._ended.wait(self._pause_s)
            if not self._answer:
                self._ended.wait()
