"""What LMCache has for Mooncake, unchanged, over the drop-in ``mooncake`` (connectors/mooncake)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.connectors.lmcache.real.beds import EngineProcess
from tests.core.master_bed import MasterProcess, environment
from tests.descriptors import speaks
from tests.ports import free_port

pytestmark = [pytest.mark.heavy, pytest.mark.slow, pytest.mark.timeout(300)]

P2P = Path(__file__).with_name("p2p.py")


@pytest.fixture
def master(monkeypatch: pytest.MonkeyPatch) -> Iterator[MasterProcess]:
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    process = MasterProcess()
    yield process
    process.kill()


@pytest.mark.parametrize("save_chunk_meta", [True, False], ids=["meta", "zero-copy"])
def test_mooncakestore(master: MasterProcess, folder: Path, save_chunk_meta: bool) -> None:
    settings = {
        "remote_url": f"mooncakestore://{master.address}",
        "extra_config": {
            "local_hostname": "127.0.0.1",
            "metadata_server": "P2PHANDSHAKE",
            "master_server_address": master.address,
            "protocol": "tcp",
            "global_segment_size": 32 << 20,
            "local_buffer_size": 1 << 20,
            "save_chunk_meta": save_chunk_meta,
        },
    }
    # Whole chunks: without their meta this connector takes every chunk for a full one.
    first = EngineProcess(folder, "first", settings, tokens=96)
    second = None
    try:
        assert first.call("store", 1)["tokens"] == 96
        second = EngineProcess(folder, "second", settings, tokens=96)
        assert second.call("lookup", 1)["tokens"] == 96
        answer = second.call("retrieve", 1)
        assert (answer["tokens"], answer["right"]) == (96, True)
        assert second.call("retrieve", 2)["tokens"] == 0
    finally:
        first.kill()
        if second is not None:
            second.kill()


def test_the_p2p_channel() -> None:
    serving, reading = free_port(), free_port()
    ends: list[subprocess.Popen[str]] = []
    said = []
    try:
        for role, own, peer in (("serve", serving, reading), ("read", reading, serving)):
            command = [sys.executable, str(P2P), role, str(own), str(peer)]
            ends.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
            output = ends[-1].stdout
            assert output is not None
            line = ""
            while len(line) != 65:  # LMCache may log to stdout, too
                assert speaks(output, 100), f"{role} says nothing"
                line = output.readline()
                assert line, f"{role} ended with {ends[-1].wait(10)}"
            said.append(line)
    finally:
        for end in ends:
            end.kill()
            end.communicate()
    assert said[0] == said[1]
